"""The grouped output projection ``wo_a`` of vLLM's attention, on this package's GEMM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dsv4.ops.gemm import gemm
from dsv4.quant.formats import FP8_BLOCK, QuantizedTensor

Projection = Callable[[torch.Tensor], torch.Tensor]
_SCALES = ("weight_scale_inv", "weight_scale")
_BLOCK = 128


def grouped_projection(wo_a: Any, groups: int) -> Projection:
    """A function ``[T, groups, in] -> [T, groups, out]`` of a loaded ``wo_a``.

    Args:
        wo_a: vLLM's ``ColumnParallelLinear``: with ``dsv4_linear``, a grouped linear layer of this
            package, if the linear part has adopted it; else its weight is read as it is, in
            bfloat16 or FP8 with scales of 128 x 128 blocks.
        groups: Groups of this rank.

    Raises:
        ValueError: if the weight is in none of these forms.
    """
    linear = getattr(wo_a, "dsv4_linear", None)
    if linear is not None:
        return linear  # type: ignore[no-any-return]
    weight = wo_a.weight
    flat = weight.reshape(-1, weight.shape[-1])
    if weight.dtype == torch.bfloat16:
        return _plain(flat.view(groups, -1, flat.shape[1]))
    quantized = QuantizedTensor(flat, _block_scales(wo_a, flat), None, FP8_BLOCK)
    return lambda x: gemm(x, quantized, activation="bf16", groups=groups)


def _plain(weight: torch.Tensor) -> Projection:
    transposed = weight.transpose(1, 2)  # [groups, in, out]
    return lambda x: torch.bmm(x.transpose(0, 1), transposed).transpose(0, 1)


def _block_scales(wo_a: Any, flat: torch.Tensor) -> torch.Tensor:
    parameters = [getattr(wo_a, name) for name in _SCALES if hasattr(wo_a, name)]
    rows, columns = (-(-size // _BLOCK) for size in flat.shape)
    if flat.dtype == torch.float8_e4m3fn and parameters:
        scales = parameters[0].detach()
        known = (torch.float32, torch.float8_e8m0fnu)
        if scales.dtype in known and scales.numel() == rows * columns:
            return scales.reshape(rows, columns)
    have = ", ".join(f"{list(scale.shape)} {scale.dtype}" for scale in parameters) or "none"
    raise ValueError(
        f"dsv4 in vLLM: wo_a has a weight of {flat.dtype} and scales {have}, expected bfloat16, or "
        f"float8_e4m3fn with [{rows}, {columns}] scales; add 'linear' to DSV4_VLLM, or take "
        "'attention' out"
    )
