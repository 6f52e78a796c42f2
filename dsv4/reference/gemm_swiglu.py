"""Meaning of ``dsv4.ops.gemm_swiglu``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsv4.reference._precision import compute_dtype
from dsv4.reference.gemm import gemm
from dsv4.reference.swiglu import swiglu


def gemm_swiglu(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor | None,
    segments: Sequence[int],
    format: str,
    layout: str,
    activation: str,
    input_scale: torch.Tensor | None,
    limit: float | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """See ``dsv4.ops.gemm_swiglu.gemm_swiglu``."""
    wide = compute_dtype(x)
    weight = (codes, scales, global_scale, segments, format, layout)
    gate_up = gemm(x, *weight, activation, input_scale, 1, wide)
    return swiglu(gate_up, limit, "interleaved", None, out_dtype)
