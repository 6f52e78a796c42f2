"""Product with a quantised gate and up projection, and the SwiGLU of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dsv4.formats import QuantizedTensor
from dsv4.ops._library import define
from dsv4.ops._plans import planned
from dsv4.ops.gemm import check_product


def _fake(
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
    backend: str,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], codes.shape[0] // 2), dtype=out_dtype)


_gemm_swiglu = define(
    "gemm_swiglu(Tensor x, Tensor codes, Tensor scales, Tensor? global_scale, int[] segments, "
    "str format, str layout, str activation, Tensor? input_scale, float? limit, "
    "ScalarType out_dtype, str backend) -> Tensor",
    _fake,
)


@planned
def gemm_swiglu(
    x: torch.Tensor,
    weight: QuantizedTensor,
    limit: float | None,
    *,
    activation: str = "bf16",
    input_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """``swiglu(x @ weight.T)``, gate in the even rows of the weight, up in the odd ones.

    What ``gemm`` and ``swiglu`` mean (specification, sections 4.4, 8.2 and 11), without a rounding
    between them: the product stays float32 (float64 for float64 ``x``).

    Args:
        x: ``[..., K]``. bfloat16, float16, float32 or float64.
        weight: ``[2 I, K]``.
        limit: Clamp bound, greater than 0, or None for no clamp.
        activation: As in ``gemm``.
        input_scale: As in ``gemm``.
        out_dtype: Floating; ``x.dtype`` if None.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[..., I]``.

    Raises:
        TypeError: as ``gemm``.
        ValueError: as ``gemm``, and if the weight has an odd number of rows or ``limit`` is not
            above 0.
    """
    input_scale = check_product("gemm_swiglu", x, weight, activation, input_scale, out_dtype)
    _check_swiglu(weight, limit)
    flat = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    arguments = (
        flat,
        weight.codes,
        weight.scales,
        weight.global_scale,
        list(weight.segments),
        weight.format.name,
        weight.layout,
        activation,
        input_scale,
        limit,
        x.dtype if out_dtype is None else out_dtype,
    )
    out = _gemm_swiglu(*arguments, backend)
    return out if flat is x else out.reshape(*x.shape[:-1], weight.rows // 2)


def _check_swiglu(weight: QuantizedTensor, limit: float | None) -> None:
    if weight.rows % 2:
        raise ValueError(f"gemm_swiglu: weight has {weight.rows} rows, wanted an even number")
    if limit is not None and not limit > 0:
        raise ValueError(f"gemm_swiglu: limit is {limit}, wanted one above 0 or None")
