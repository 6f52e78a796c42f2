"""A model of Hopper's FP8 tensor cores on a CPU, and of the GEMM that promotes their sums.

An instruction adds 32 products of E4M3 numbers to a running sum. It aligns all 33 to the largest,
drops what is below 13 bits after its leading one, and adds the rest exactly. After four
instructions (128 columns) the kernels multiply the sum by the scales of its columns and add it in
float32. ``dsv4.bench.checks.judge.FP8_SUM`` is the budget that follows.
"""

from __future__ import annotations

import torch

from dsv4.quant.exact_fp8 import to_e4m3
from dsv4.quant.formats import FP8_TOKEN, LINEAR, NVFP4, QuantizedTensor
from dsv4.quant.scales import e8m0_to_float

_PRODUCTS = 32  # that an instruction adds
_BITS = 13  # after the leading one of the largest term
_BLOCK = 128  # columns from one promotion to the next


def gemm(x: QuantizedTensor, weight: QuantizedTensor) -> torch.Tensor:
    """Multiply as the FP8 kernels of dense GEMMs do.

    Args:
        x: ``"fp8_token"`` ``[T, K]``, K a multiple of 128.
        weight: ``[N, K]``, FP8 128 x 128, or NVFP4 that is exact in E4M3 (``row_exponent``).

    Returns:
        float32 ``[T, N]``.
    """
    assert x.format == FP8_TOKEN
    left = x.with_layout(LINEAR).codes.to(torch.float64)
    right, factors, scales = _operand(weight)
    scales_of_x = e8m0_to_float(x.scales)
    sums = torch.zeros(left.shape[0], right.shape[0], dtype=torch.float32)
    for k in range(left.shape[1] // _BLOCK):
        columns = slice(k * _BLOCK, (k + 1) * _BLOCK)
        scale = scales_of_x[:, k, None] * scales[None, :, k]
        block = _block_sum(left[:, columns], right[:, columns])
        sums = (sums + scale.double() * block).float()
    return sums * factors


def _operand(weight: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return E4M3 numbers, float32 factors ``[N]`` of results, and of blocks ``[N, K / 128]``."""
    rows, blocks = weight.rows, weight.columns // _BLOCK
    if weight.format != NVFP4:
        scales = weight.scales.float().repeat_interleave(_BLOCK, 0)[:rows]
        return weight.codes.double(), torch.ones(rows), scales
    assert weight.row_exponent is not None
    assert weight.global_scale is not None
    factors = torch.exp2(weight.row_exponent.float()) * weight.global_scale
    return to_e4m3(weight).double(), factors, torch.ones(rows, blocks)


def _block_sum(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Sums of 128 products, by four instructions, in float64."""
    total = torch.zeros(left.shape[0], right.shape[0], dtype=torch.float64)
    for first in range(0, _BLOCK, _PRODUCTS):
        columns = slice(first, first + _PRODUCTS)
        products = left[:, None, columns] * right[None, :, columns]
        terms = torch.cat([total[..., None], products], -1)
        _, exponent = torch.frexp(terms.abs().amax(-1, keepdim=True))
        unit = torch.exp2((exponent - 1 - _BITS).double())
        total = ((terms / unit).trunc() * unit).sum(-1)
    return total
