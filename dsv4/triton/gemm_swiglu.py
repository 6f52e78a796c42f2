"""Product and SwiGLU as two operators, each by the best of its own implementations."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsv4 import dispatch


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
    """See ``dsv4.ops.gemm_swiglu.gemm_swiglu``. Allocates the product in float32."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    weight = (codes, scales, global_scale, segments, format, layout)
    gate_up = dispatch.first("gemm", (x, *weight, activation, input_scale, 1, wide))
    return dispatch.first("swiglu", (gate_up, limit, "interleaved", None, out_dtype))
