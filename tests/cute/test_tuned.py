"""Data files of plans: values that are read, values that are refused, and unchanged choices."""

from __future__ import annotations

import json
import zlib

import pytest

from dsv4.cute.grouped_problem import Experts
from dsv4.cute.sm90 import tuned as module
from dsv4.cute.sm90.grouped_gemm_plans import launch_plans
from dsv4.cute.sm90.plans import GemmProblem, choose
from dsv4.cute.sm90.costs import Costs
from dsv4.cute.sm90.tuned import read, tuned
from dsv4.cute.sm90.tuned_file import TunedFileError
from dsv4.cute.sm90.tuned_records import SmallMConfiguration, SmallMKey

FILE = module._FOLDER / module._H200
# N, K and groups of matrices of Pro and Flash, and of two matrices without measurements.
MATRICES = (
    *((2048, 7168, 1), (65536, 1536, 1), (7168, 16384, 1), (6144, 7168, 1), (16384, 4096, 16)),
    *((32768, 1024, 1), (4096, 8192, 1), (4096, 2048, 1), (8192, 4096, 8)),
    *((512, 512, 1), (1024, 640, 2)),
)
EXPERTS = ((6144, 7168, 384), (7168, 3072, 384), (4096, 4096, 256), (4096, 2048, 256))
KINDS = ((False, False), (True, False), (False, True))  # float32 results, scales of rows
TOKENS = (1, 8, 9, 16, 17, 64, 200, 1000, 4096)


def digest(plan) -> int:
    return zlib.crc32(repr(plan).encode())


def test_choices_are_those_that_are_recorded(snapshots):
    """A change of a plan changes times and can change bits, so a diff must show it."""
    figures = {
        f"{rows}x{columns}, {groups} groups, {kind}": {
            str(tokens): digest(choose(GemmProblem(rows, columns, groups, *kind), tokens))
            for tokens in TOKENS
        }
        for rows, columns, groups in MATRICES
        for kind in KINDS
    }
    figures |= {
        f"{count} experts of {rows}x{columns}, {kind}": {
            str(tokens): digest(launch_plans(Experts(rows, columns, count, *kind), 6 * tokens))
            for tokens in TOKENS
        }
        for rows, columns, count in EXPERTS
        for kind in KINDS
    }
    snapshots.check("choices", figures)


def test_the_file_of_the_h200():
    data = read(FILE)
    assert (data.gpu, data.sms, data.clusters[1]) == ("NVIDIA H200", 132, 132)
    assert tuned().entries == data.entries
    assert tuned().costs == data.costs == Costs()
    fastest = data.plan_of(SmallMKey(1, 512, 64, 4096))
    assert fastest == SmallMConfiguration(2, 8, 16, 1, True)
    assert data.plan_of(SmallMKey(1, 1, 1, 64)) is None
    assert [str(tuned().origins[name]) for name in ("gemm_small_m", "attention")] == [
        "shipped, NVIDIA H200, 2026-11-23, nvidia_h200.json",
        "rule, constants fitted on NVIDIA H200",
    ]


def changed(content, path, value):
    """The content with another value at a path; None removes the last name of the path."""
    inner = content
    for name in path[:-1]:
        inner = inner[name]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return content


FIRST = ("gemm_small_m", "configurations", 0)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("schema",), "dsv4 plans 0", r"wanted a file of schema 'dsv4 plans 1'"),
        (("gpu",), None, r"the file has \['clusters', .*, wanted"),
        (("extra",), 1, r"the file has .*'extra'"),
        (("sms",), 0, r"the file.sms is 0, wanted 1 or more"),
        (("gemm_small_m", "few_tokens"), "8", r"gemm_small_m.few_tokens is '8', wanted 1 or more"),
        ((*FIRST, "warps"), True, r"configurations\[0\].warps is True, wanted 1 or more"),
        ((*FIRST, "ring"), 0, r"configurations\[0\].ring is 0, wanted true or false"),
        ((*FIRST, "columns"), None, r"configurations\[0\] has no \['columns', "),
    ],
)
def test_what_is_wrong_is_named(path, value, message, tmp_path):
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps(changed(json.loads(FILE.read_text()), path, value)))
    with pytest.raises(TunedFileError, match=message) as caught:
        read(file)
    assert str(file) in str(caught.value)
