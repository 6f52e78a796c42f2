"""``run gemm --check``: the report of every kernel, and that it tells a wrong one."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
import torch

from dsv4 import dispatch
from dsv4.bench import environment
from dsv4.bench.cases import PRESETS
from dsv4.bench.cli import main
from dsv4.bench.validate import experts as validate_experts
from dsv4.bench.validate import kernel as validate_kernel

COMMAND = ["run", "gemm", "--check", "--device", "cpu"]
TWO_MATRICES = [*COMMAND, "--cases", "q_a+kv,o_a"]


@pytest.fixture(autouse=True)
def quick_rates(monkeypatch):
    monkeypatch.setattr(environment, "rates", lambda device: environment.Rates(0.02, 0.01, 0.1))


@pytest.fixture
def register(monkeypatch):
    """Put an implementation before all others of an operator: what it makes of the right result."""

    def put(change, supports=None, of="gemm"):
        right = dispatch.load(dispatch.implementations(of)[-1].target)
        row = dispatch.Implementation(of, "tested", "tests:tested", supports)
        rows = (row, *dispatch.implementations(of))
        others = dispatch.implementations.__wrapped__
        monkeypatch.setattr(
            dispatch, "implementations", lambda op: rows if op == of else others(op)
        )
        load = dispatch.load.__wrapped__
        monkeypatch.setattr(
            dispatch,
            "load",
            lambda target: (
                (lambda args: change(args, right(args)))
                if target == "tests:tested"
                else load(target)
            ),
        )

    return put


def printed(capsys, arguments=TWO_MATRICES):
    status = main(arguments)
    out = capsys.readouterr().out.split("\n\n", 1)
    return status, out[0].splitlines(), out[1].splitlines()


def test_the_report(capsys):
    """A header with everything that tells the machine, a line for each kernel, why others lack."""
    status, header, lines = printed(capsys)
    assert status == 0
    names = ("device", "versions", "platform", "commit", "rates", "note")
    assert [line.split()[0] for line in header if line[0] != " "] == list(names)
    assert "driver none" in header[0]
    assert f"torch {torch.__version__}" in header[1]
    assert lines[0].split() == " ".join(validate_kernel.HEADINGS).split()
    body = [line.split() for line in lines[2:8]]
    assert [line[:2] for line in body] == [["tiny", "q_a+kv"]] * 3 + [["tiny", "o_a"]] * 3
    expected = 2 * [("bf16", "12"), ("nvfp4", "14"), ("fp8", "12")]
    for line, (activation, points) in zip(body, expected, strict=True):
        start = line.index("linear")
        assert line[start : start + 4] == ["linear", activation, "reference", points]
        assert 0 < float(line[start + 4]) <= 1
        assert 0 < float(line[start + 5]) <= 1
        assert line[start + 6] == "ok"
        assert [word for word in line if word.endswith(":")] == ["1:", "17:"]
    assert any(line.startswith("not run: cute: ") for line in lines)
    assert any(line.startswith("not run: scaled_mm: ") for line in lines)
    assert lines[-1] == "PASSED: 6 kernels passed; 76 GEMMs compared"


def test_the_report_as_json(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert main([*TWO_MATRICES, "--tokens", "3", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert set(document) == {"header", "kernels", "absent"}
    expected = {"gpu", "driver", "versions", "commit", "command", "date"}
    assert expected <= set(document["header"])
    kernel = document["kernels"][0]
    assert set(kernel) == {
        *("matrix", "shape", "layout", "activation", "backend", "points", "failed"),
        *("worst", "us", "messages"),
    }
    assert (kernel["points"], kernel["failed"]) == (10, 0)
    assert kernel["shape"] == {"N": 96, "K": 64}
    assert set(kernel["worst"]) == {"bfloat16", "float32"}
    assert all(0 < ratio <= 1 for ratio in kernel["worst"].values())
    assert list(kernel["us"]) == ["3"]
    assert f"wrote {path}\nPASSED: " in capsys.readouterr().out


def scaled(args, out):
    return out * (1 + 2.0**-7)


def bfloat16_sum(args, out):
    """Right to bfloat16, wrong to the float32 that was asked for."""
    return out.bfloat16().to(out.dtype)


def first_scale_for_all(args, out):
    """A segment's global scale for the others, too."""
    segments = args[4]
    if len(segments) == 2:
        out = out.clone()
        out[..., segments[0] :] *= args[3][0] / args[3][1]
    return out


def leaking_nan(args, out):
    return torch.where(out.isnan().any(), torch.nan, out)


def plausible(args, out):
    return out.nan_to_num(nan=1.0)


def last_token(args, out):
    out = out.clone()
    out[-1] = 0
    return out


def raising(args, out):
    raise RuntimeError("an illegal memory access\nwas encountered")


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (scaled, "17 tokens, bfloat16"),
        (bfloat16_sum, "17 tokens, float32"),
        (first_scale_for_all, "1 tokens, float32"),
        (leaking_nan, "a NaN and an infinity, float32: inf times the budget"),
        (plausible, "a NaN and an infinity, bfloat16: inf times the budget"),
        (last_token, "1 tokens, bfloat16"),
        (raising, "scales 448, float32: RuntimeError: an illegal memory access"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_kernel_is_found(register, capsys, change, where):
    register(change)
    status, _, lines = printed(capsys, [*COMMAND, "--cases", "q_a+kv", "--backend", "tested"])
    assert status == 1
    wrong = [line for line in lines if line.startswith("WRONG tested tiny q_a+kv ")]
    assert any(where in line for line in wrong), wrong
    assert not any(line.startswith("not run: tested") for line in lines)
    assert not lines[-1].endswith(" 0 kernels wrong")
    table = [line for line in lines if " tested " in line and not line.startswith("WRONG")]
    assert any("WRONG" in line for line in table)


def test_products_of_experts_are_validated(tmp_path):
    """Both projections, their SwiGLU and its codes, of the shared expert and of routed ones."""
    path = tmp_path / "report.json"
    command = [*COMMAND, "--cases", "*swiglu*,experts*", "--tokens", "1,17", "--json", str(path)]
    assert main(command) == 0
    kernels = json.loads(path.read_text())["kernels"]
    names = {"tiny " + name for name in validate_experts.CASES}
    assert {kernel["matrix"] for kernel in kernels} == names
    for kernel in kernels:
        shared = kernel["matrix"] == "tiny gate_up swiglu"
        codes = kernel["matrix"].endswith("quantize")
        assert kernel["points"] == (3 if shared else 4) * (1 if codes else 2)
        assert (kernel["failed"], list(kernel["us"])) == (0, ["1", "17"])
        assert set(kernel["worst"]) == ({"uint8"} if codes else {"bfloat16", "float32"})
        assert all(
            (ratio == 0) if codes else (0 < ratio <= 1) for ratio in kernel["worst"].values()
        )


def next_expert(args, out):
    """Rows of one expert as if they were the next one's; nothing where all are the last's."""
    offsets = args[5]
    out = out.clone()
    for start, end in itertools.pairwise(offsets.tolist()):
        if start < end < out.shape[0]:
            out[end - 1] = out[end]
            break
    return out


def one_code(args, out):
    codes = out[0].clone()
    codes[-1, -1] ^= 1
    return codes, *out[1:]


@pytest.mark.parametrize(
    ("change", "op", "case", "where"),
    [
        (next_expert, "grouped_gemm", "experts down", "17 tokens, bfloat16"),
        (leaking_nan, "grouped_gemm_swiglu", "experts gate_up swiglu", "a NaN and an infinity"),
        (scaled, "gemm_swiglu", "gate_up swiglu", "17 tokens, float32"),
        (one_code, "grouped_gemm_swiglu_quantize", "experts*quantize", "uint8: codes differs"),
        (raising, "grouped_gemm", "experts gate_up", "one expert, float32: RuntimeError: an ille"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_product_of_experts_is_found(register, capsys, change, op, case, where):
    register(change, of=op)
    status, _, lines = printed(capsys, [*COMMAND, "--cases", case, "--tokens", "17"])
    assert status == 1
    wrong = [line for line in lines if line.startswith("WRONG tested tiny ")]
    assert any(where in line for line in wrong), wrong
    assert not any(line.startswith("WRONG reference") for line in lines)


def stale_padding(args, out):
    """The last scale byte of a swizzled result, which no row has, is not zero."""
    codes, scales, total = out
    if scales.ndim == 1:
        scales = scales.clone()
        scales.view(torch.uint8)[-1] = 0x38
    return codes, scales, total


def test_wrong_padding_of_swizzled_results_is_found(register, capsys, monkeypatch):
    config = dataclasses.replace(PRESETS["tiny"](), moe_intermediate_size=64)
    monkeypatch.setitem(PRESETS, "tiny", lambda: config)
    register(stale_padding, of="grouped_gemm_swiglu_quantize")
    status, _, lines = printed(capsys, [*COMMAND, "--cases", "experts*quantize", "--tokens", "17"])
    assert status == 1
    wrong = [line for line in lines if line.startswith("WRONG")]
    assert wrong
    assert all(line.startswith("WRONG tested tiny ") for line in wrong)
    assert all("swizzled results, uint8: scales differs" in line for line in wrong)


def test_a_wrong_kernel_has_no_time(register, tmp_path):
    register(scaled)
    path = tmp_path / "report.json"
    assert main([*TWO_MATRICES, "--backend", "tested", "--json", str(path)]) == 1
    for kernel in json.loads(path.read_text())["kernels"]:
        assert (kernel["us"], kernel["failed"] > 0) == ({}, True)


def one_token(call):
    return None if call.args.x.shape[0] <= 1 else "one token alone"


def test_a_kernel_that_takes_some_is_validated_there(register, tmp_path):
    register(lambda args, out: out, f"{__name__}:one_token")
    path = tmp_path / "report.json"
    assert main([*TWO_MATRICES, "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    tested = [kernel for kernel in document["kernels"] if kernel["backend"] == "tested"]
    assert {kernel["layout"] for kernel in tested} == {
        "linear",
        "swizzled_128x4",
        "fragments_16x64",
    }
    assert all((kernel["points"], list(kernel["us"])) == (2, ["1"]) for kernel in tested)
    assert "tested" not in document["absent"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "rope", "--check"], "--check validates gemm"),
        (["run", "--check"], "--check validates gemm"),
        ([*COMMAND, "--csv", "x"], "--json alone"),
        ([*COMMAND, "--shapes", "huge"], "--shapes has 'huge', wanted one of"),
        ([*COMMAND, "--backend", "fast"], "--backend has 'fast', wanted one of auto, "),
        ([*COMMAND, "--cases", "q_c"], "--cases matches none of q_a+kv, q_b"),
        ([*TWO_MATRICES, "--json", "x/"], "wanted a file"),
    ],
)
def test_bad_arguments(arguments, words, capsys):
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.slow
def test_on_a_gpu(tmp_path):
    """All implementations that this GPU has, on one matrix of each kind."""
    path = tmp_path / "report.json"
    matrices = "q_a+kv,o_a,indexer_q,gate_up swiglu,experts*"
    command = ["run", "gemm", "--check", "--shapes", "flash", "--cases", matrices]
    assert main([*command, "--tokens", "1,17,65", "--repeat", "2", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    ran = {kernel["backend"] for kernel in document["kernels"]}
    assert {"reference", "cublas"} <= ran
    if torch.cuda.get_device_capability()[0] in (9, 10):
        assert "cute" in ran
    assert all(kernel["us"] for kernel in document["kernels"])
