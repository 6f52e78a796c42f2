"""Baselines in plain PyTorch, without a compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from dsv4 import ops
from dsv4.bench.baselines._prepare import Table
from dsv4.bench.problem import Problem
from dsv4.quant.formats import QuantizedTensor


def _bf16_gemm(problem: Problem) -> Callable[[], Any] | None:
    """Multiply in bfloat16 on a CPU; on a GPU this is cuBLAS's GEMM in ``packed``."""
    x, quantized = problem.args
    if x.device.type == "cuda":
        return None
    if isinstance(x, QuantizedTensor):
        x = ops.dequantize(x, torch.bfloat16, backend="reference")
    weight = ops.dequantize(quantized, torch.bfloat16, backend="reference")
    groups = problem.kwargs["groups"]
    if groups == 1:
        return lambda: F.linear(x, weight)
    stacked = weight.view(groups, -1, weight.shape[-1]).transpose(1, 2)
    return lambda: torch.bmm(x.transpose(0, 1), stacked)


def _rms_norm(problem: Problem) -> Callable[[], Any]:
    x, weight = problem.args
    return lambda: F.rms_norm(x, x.shape[-1:], weight, problem.kwargs["eps"])


def _swiglu(problem: Problem) -> Callable[[], Any]:
    x, limit = problem.args

    def call() -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)

    return call


def _gather(problem: Problem) -> Callable[[], Any]:
    x, rows = problem.args
    tokens = rows.flatten().argsort() // rows.shape[1]
    return lambda: x.index_select(0, tokens)


def _copy(problem: Problem) -> Callable[[], Any]:
    wide = ops.dequantize(problem.args[0], torch.float32, backend="reference")
    return lambda: wide.bfloat16()


BASELINES: Table = {
    "gemm": {"torch bf16": _bf16_gemm},
    "rms_norm": {"torch rms_norm": _rms_norm},
    "swiglu": {"torch bf16": _swiglu},
    "moe_gather": {"torch index_select": _gather},
    "dequantize": {"torch copy to bf16": _copy},
}
