"""Problems of ``tests._tools.sanitize``: the bench's, and forms that only a named kernel has.

Besides the bench's sizes there are ``small``, the sizes of the self-test, whose weights are in
fragments, and ``wide``, the widths of Flash with the few experts of ``tiny``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import torch

from dsv4 import dispatch
from dsv4.bench import self_test
from dsv4.bench.cases import MAKERS, PRESETS
from dsv4.bench.cases.other_formats import other_formats
from dsv4.bench.problem import Draw, Problem
from dsv4.config import ModelConfig


def wide() -> ModelConfig:
    """Return a model with the matrices of Flash's shared expert, for its routed experts as well."""
    return ModelConfig.tiny(hidden_size=4096, moe_intermediate_size=2048)


CONFIGS = {**PRESETS, "small": self_test.config, "wide": wide}


def problems(
    op: str, preset: str, tokens: int, device: torch.device, backend: str
) -> Iterator[Problem]:
    """Problems of an operator that an implementation takes.

    Args:
        op: A key of ``MAKERS``.
        preset: A key of ``CONFIGS``.
        tokens: Tokens in the batch.
        device: Where the tensors are.
        backend: Name of the implementation; with one, the cases of ``other_formats`` and weights
            of rows are added, and what it does not support is left out. ``"auto"`` takes all.
    """
    config = CONFIGS[preset]()
    cases = MAKERS[op](config, tokens)
    if backend == dispatch.AUTO:
        yield from (case.build(Draw(0, device)) for case in cases)
        return
    for case in chain(cases, other_formats(op, config, tokens)):
        problem = case.build(Draw(0, device))
        for form in (problem, *_with_row_weights(op, problem)):
            if _is_supported(form, backend):
                yield form


def _with_row_weights(op: str, problem: Problem) -> Iterator[Problem]:
    if op == "grouped_gemm_swiglu":
        rows = problem.args[0].shape[0]
        weights = torch.linspace(-1, 2, rows, device=problem.args[2].device)
        yield replace(problem, kwargs=problem.kwargs | {"row_weight": weights})


def _is_supported(problem: Problem, backend: str) -> bool:
    call = dispatch.arguments(problem.function, *problem.args, **problem.kwargs)
    rows = (row for row in dispatch.implementations(call.op) if row.name == backend)
    return any(row.unsupported_reason(call) is None for row in rows)
