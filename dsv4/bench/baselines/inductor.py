"""``torch.compile`` of the reference: what PyTorch makes of an operator's definition.

An operator itself is opaque to the compiler, so its plain PyTorch implementation is compiled, on
the operator's arguments. It is compiled whole: one graph without returns to Python. The
compiler divides approximately and drops a rounding between two steps that it joins, so up to two
codes or scales in a hundred are not those of the operator.
Operators whose time is a GEMM with a quantised matrix are left out; their reference is no way to
compute one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dsv4 import dispatch
from dsv4.bench.baselines._prepare import Baseline, Call, Table, attempt, captured
from dsv4.bench.problem import Problem

NAME = "inductor"
GEMMS = ("gemm", "gemm_swiglu", "grouped_gemm", "grouped_gemm_swiglu_quantize")
_MOST_TOKENS = 64  # of attention, whose reference is unrolled for more
# Every size of every case is compiled again; past its own limit the compiler gives up.
_UNLIMITED = {"recompile_limit": 1 << 20, "accumulated_recompile_limit": 1 << 20}


def compiled(
    function: Callable[..., Any], args: tuple[Any, ...], backend: str = "inductor"
) -> Call:
    """``function(*args)`` compiled as one graph for these sizes.

    Args:
        function: In PyTorch. Given twice, it is compiled once for equal sizes.
        args: Tensors and plain values.
        backend: Backend of ``torch.compile``.

    Raises:
        RuntimeError: if it cannot be compiled.
    """
    from torch._dynamo import config

    run = _compiler(function, backend)
    with config.patch(_UNLIMITED):
        run(*args)
    return lambda: run(*args)


@functools.cache
def _compiler(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False, fullgraph=True, backend=backend)


def of_reference(backend: str) -> Baseline:
    """The baseline that compiles an operator's reference with a backend of ``torch.compile``."""

    def baseline(problem: Problem) -> Call | None:
        call = captured(problem)
        if call.op == "sparse_attention" and call.args.q.shape[0] > _MOST_TOKENS:
            return None
        reference = dispatch.load(dispatch.implementations(call.op)[-1].target)
        return attempt(lambda: compiled(reference, (call.args,), backend), f"{backend}: {call.op}")

    return baseline


BASELINES: Table = {
    op: {NAME: of_reference("inductor")} for op in dispatch.operators() if op not in GEMMS
}
