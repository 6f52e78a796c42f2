"""Operators of a step: whether a row's bits depend on how many rows there are.

A step that verifies drafts has up to nine rows of a sequence, where plain decoding has one. An
operator is invariant up to n rows if each of them has the bits that it has alone. ``MOST_ROWS``
lists the implementations that are not invariant up to ``ROWS``; docs/numerics.md says why. The
compressor's state has tests of its own (``test_compressor_rollback``), whole steps of a fixed
number of rows, too (``tests/speculation/test_fixed_rows.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dsv4 import dispatch
from dsv4.bench.cases import MAKERS
from dsv4.bench.problem import Case, Draw, Problem
from dsv4.config import ModelConfig
from dsv4.device import interpret_triton
from dsv4.quant.formats import QuantizedTensor

ROWS = 9
DRAWN = 11  # tokens of a case: a number of rows that no weight has
# So wide that products have kernels, too.
WIDE = ModelConfig.tiny(
    hidden_size=256, moe_intermediate_size=128, q_lora_rank=128, o_lora_rank=128
)
OPERATORS = (
    "quantize", "gemm", "gemm_swiglu", "rms_norm", "rms_norm_pair", "head_norm_rope_",
    "rms_norm_fp8", "rms_norm_quantize", "rope_tables", "rope", "swiglu", "route_topk",
    "route_hash", "hc_pre", "hc_post", "hc_head", "rope_quantize", "swiglu_fp8", "swiglu_quantize",
    "hc_post_pre_norm", "hc_pre_norm", "hc_pre_norm_quantize", "hc_post_pre_norm_quantize",
    "compressor_projections", "indexer_rotate_quantize", "indexer_queries",
    "quantize_index_queries", "indexer_select", "sparse_attention", "fake_quantize_kv",
    "verify_greedy", "verify_sampled", "draw_draft",
)  # fmt: skip
# Most rows up to which an implementation is invariant on a GPU, if these are fewer than ROWS. Its
# plan (tiles, splits of a sum, paths for few rows) follows from the number of rows.
MOST_ROWS = {
    ("compressor_projections", "triton"): 2,  # vectors, then tiles
    ("sparse_attention", "triton"): 1,  # splits of the entries, by estimates
    ("sparse_attention", "cute"): 1,
    ("gemm", "triton"): 1,  # splits of the columns, by estimates
    ("gemm_swiglu", "triton"): 1,
    ("gemm", "cute"): 8,  # plans of up to 8 and of 9 to 16 tokens
    ("gemm_swiglu", "cute"): 8,
    ("route_topk", "triton"): 4,  # vectors, then tensor cores
    ("route_hash", "triton"): 4,
    ("hc_pre", "triton"): 4,  # a program of one token, then tensor cores
    ("hc_head", "triton"): 4,
    ("hc_pre_norm", "triton"): 4,
    ("hc_pre_norm_quantize", "triton"): 4,
    ("hc_post_pre_norm", "triton"): 8,
    ("hc_post_pre_norm_quantize", "triton"): 8,
}
# Whose reference on a CPU multiplies in float32: a BLAS may treat the last rows of a matrix
# otherwise, so nothing is promised.
CPU_FLOAT32 = (
    "route_topk", "route_hash", "hc_pre", "hc_head", "hc_post_pre_norm", "hc_pre_norm",
    "hc_pre_norm_quantize", "hc_post_pre_norm_quantize", "compressor_projections",
)  # fmt: skip
# Quick in the interpreter.
INTERPRETED = ("rms_norm", "rope", "swiglu", "hc_post", "head_norm_rope_", "verify_greedy")


def rows_of(value: Any, start: int, stop: int) -> Any:
    """Rows of what has one for each token, as memory of its own."""
    if isinstance(value, QuantizedTensor) and value.shape[0] == DRAWN:
        codes, scales = (rows_of(x, start, stop) for x in (value.codes, value.scales))
        return dataclasses.replace(value, codes=codes, scales=scales)
    if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == DRAWN:
        return value[start:stop].clone()
    return value


def of_rows(problem: Problem, start: int, stop: int) -> Problem:
    """The same call for some of its rows."""
    args = tuple(rows_of(arg, start, stop) for arg in problem.args)
    kwargs = {name: rows_of(value, start, stop) for name, value in problem.kwargs.items()}
    return dataclasses.replace(problem, args=args, kwargs=kwargs)


def results(problem: Problem, backend: str, start: int, stop: int) -> dict[int, torch.Tensor]:
    """The bytes of each row of the results that have as many rows, by their positions."""
    count = stop - start
    outputs = enumerate(of_rows(problem, start, stop).run(backend))
    return {
        i: x.contiguous().view(torch.uint8).reshape(count, -1)
        for i, x in outputs
        if x.dim() and x.shape[0] == count
    }


def most_rows(problem: Problem, backend: str, largest: int = ROWS) -> int:
    """The number of rows up to which every row has the bits that it has alone."""
    alone = [results(problem, backend, i, i + 1) for i in range(largest)]
    # What has as many rows for one, two and three rows has a row for each.
    by_row = alone[0].keys()
    for count in (2, 3):
        by_row = by_row & results(problem, backend, 0, count).keys()
    assert by_row, "no result has rows"
    expected = {i: torch.cat([rows[i] for rows in alone]) for i in by_row}
    for count in range(2, largest + 1):
        together = results(problem, backend, 0, count)
        if not all(torch.equal(together[i], expected[i][:count]) for i in by_row):
            return count - 1
    return largest


def cases_of(op: str) -> Iterator[Case]:
    yield from MAKERS[op](WIDE, DRAWN)


def available(problem: Problem) -> list[str]:
    """The kernels that take a problem on its device."""
    explained = dispatch.explain(problem.function, *problem.args, **problem.kwargs).candidates
    return [name for name, reason in explained if reason is None and name != "reference"]


@pytest.mark.parametrize("op", [op for op in OPERATORS if op not in CPU_FLOAT32])
def test_rows_of_the_reference_are_those_alone(op: str) -> None:
    cases = [next(cases_of(op))] if op != "indexer_select" else cases_of(op)  # formats of queries
    for case in cases:
        assert most_rows(case.build(Draw(0, torch.device("cpu"))), "reference", 5) == 5


def test_the_lists_name_operators_of_the_test() -> None:
    assert {op for op, _ in MOST_ROWS} <= set(OPERATORS)
    assert set(CPU_FLOAT32) <= set(OPERATORS)
    assert set(OPERATORS) <= set(MAKERS)


@pytest.mark.parametrize("op", INTERPRETED)
def test_rows_of_interpreted_kernels_are_those_alone(op: str) -> None:
    problem = next(cases_of(op)).build(Draw(0, torch.device("cpu")))
    with interpret_triton():
        assert most_rows(problem, "triton", 3) == 3


def test_a_difference_is_found() -> None:
    """An operator that adds the number of its rows is invariant for one row alone."""

    def added(x: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        return x + (x.shape[0] > 4)

    problem = Problem(added, (torch.zeros(DRAWN, 3),), {}, judge=None, reads=0)  # type: ignore
    assert most_rows(problem, "auto") == 4


@pytest.mark.gpu
@pytest.mark.slow
def test_rows_of_kernels_are_those_alone_on_a_gpu(capsys) -> None:
    """Each implementation of each case; prints those that are not invariant."""
    measured = dict[tuple[str, str], int]()
    for op in OPERATORS:
        for case in cases_of(op):
            problem = case.build(Draw(0, torch.device("cuda", 0)))
            for name in available(problem):
                most = most_rows(problem, name)
                key = (op, name)
                measured[key] = min(most, measured.get(key, ROWS))
    listed = {key: most for key, most in measured.items() if most < ROWS}
    with capsys.disabled():
        print(f"\n{len(measured)} implementations; most rows of those that vary: {listed}")
    assert len(measured) > 25
    wrong = {key: most for key, most in listed.items() if most < MOST_ROWS.get(key, ROWS)}
    assert not wrong
