"""What else could do the job: plain PyTorch, timed beside an operator. More can be registered.

A rival takes the operator's ``Problem`` and returns a call without arguments; what it prepares
before (a dequantised weight, say) is not timed. None: it cannot do this problem.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from dsv4 import ops
from dsv4.bench.problem import Problem

Rival = Callable[[Problem], Callable[[], Any] | None]
RIVALS: dict[str, dict[str, Rival]] = {}


def register(op: str, name: str) -> Callable[[Rival], Rival]:
    """Decorator: add a rival of an operator."""

    def add(rival: Rival) -> Rival:
        RIVALS.setdefault(op, {})[name] = rival
        return rival

    return add


def rivals(
    op: str, problem: Problem, names: tuple[str, ...] | None = None
) -> dict[str, Callable[[], Any]]:
    """The prepared calls of the rivals named, or of all, that can do this problem."""
    known = RIVALS.get(op, {})
    wanted = known if names is None else {n: r for n, r in known.items() if n in names}
    prepared = {name: rival(problem) for name, rival in wanted.items()}
    return {name: call for name, call in prepared.items() if call is not None}


@register("gemm", "torch bf16")
def _bf16_product(problem: Problem) -> Callable[[], Any]:
    x, quantized = problem.args
    weight = ops.dequantize(quantized, torch.bfloat16, backend="reference")
    groups = problem.kwargs["groups"]
    if groups == 1:
        return lambda: F.linear(x, weight)
    stacked = weight.view(groups, -1, weight.shape[-1]).transpose(1, 2)
    return lambda: torch.bmm(x.transpose(0, 1), stacked)


@register("rms_norm", "torch rms_norm")
def _rms_norm(problem: Problem) -> Callable[[], Any]:
    x, weight = problem.args
    return lambda: F.rms_norm(x, x.shape[-1:], weight, problem.kwargs["eps"])


@register("swiglu", "torch bf16")
def _swiglu(problem: Problem) -> Callable[[], Any]:
    x, limit = problem.args

    def call() -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)

    return call


@register("moe_gather", "torch index_select")
def _gather(problem: Problem) -> Callable[[], Any]:
    x, order, top_k = problem.args
    tokens = order // top_k
    return lambda: x.index_select(0, tokens)


@register("dequantize", "torch copy to bf16")
def _copy(problem: Problem) -> Callable[[], Any]:
    wide = ops.dequantize(problem.args[0], torch.float32, backend="reference")
    return lambda: wide.bfloat16()
