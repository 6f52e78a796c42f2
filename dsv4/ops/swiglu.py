"""SwiGLU with DeepSeek-V4's clamp."""

from __future__ import annotations

import math

import torch

from dsv4.ops import _check
from dsv4.ops._library import define

LAYOUTS = ("concatenated", "interleaved")


def _fake(
    gate_up: torch.Tensor, limit: float | None, layout: str, out_dtype: torch.dtype, backend: str
) -> torch.Tensor:
    return gate_up.new_empty([*gate_up.shape[:-1], gate_up.shape[-1] // 2], dtype=out_dtype)


_swiglu = define(
    "swiglu(Tensor gate_up, float? limit, str layout, ScalarType out_dtype, str backend) -> Tensor",
    _fake,
)


def swiglu(
    gate_up: torch.Tensor,
    limit: float | None,
    *,
    layout: str = "concatenated",
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)`` (specification section 8.2).

    The gate has an upper clamp only, and both clamps come before the product. In float32 (float64
    for float64 input), one rounding to ``out_dtype`` at the end. A NaN or an infinity in gate or up
    comes out as NaN in its own element: the clamp never turns an infinity into a number.

    Args:
        gate_up: ``[..., 2 I]``, bfloat16, float16, float32 or float64.
        limit: Clamp bound, greater than 0, or None for no clamp.
        layout: ``"concatenated"``: I gate columns, then I up columns; ``"interleaved"``: gate in
            the even columns, up in the odd ones.
        out_dtype: Dtype of the result; None for ``gate_up.dtype``.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[..., I]`` in ``out_dtype``, contiguous.

    Raises:
        TypeError: if a dtype is not a floating type of at least 16 bits.
        ValueError: if the last size is odd, ``limit`` is not a positive number, or ``layout`` is
            unknown.
    """
    _check.floating("swiglu", "gate_up", gate_up)
    _check.one_of("swiglu", "layout", layout, LAYOUTS)
    if gate_up.ndim == 0 or gate_up.shape[-1] % 2:
        raise ValueError(
            f"swiglu: gate_up has shape {list(gate_up.shape)}, wanted an even last size"
        )
    if limit is not None and not (0 < limit < math.inf):
        raise ValueError(f"swiglu: limit is {limit}, wanted a finite number above 0, or None")
    out_dtype = gate_up.dtype if out_dtype is None else out_dtype
    if out_dtype not in _check.FLOATS:
        raise TypeError(f"swiglu: out_dtype is {out_dtype}, wanted a floating type of 16 bits up")
    return _swiglu(gate_up, limit, layout, out_dtype, backend)
