"""Power-of-two scales, computed exactly (a rounded log2 would be off by one at the borders)."""

from __future__ import annotations

import torch


def ceil_log2(value: torch.Tensor) -> torch.Tensor:
    """``ceil(log2(value))`` of positive finite values, int32; anything for other values."""
    mantissa, exponent = torch.frexp(value)
    return torch.where(mantissa == 0.5, exponent - 1, exponent).to(torch.int32)


def power_of_two(exponent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``2 ** exponent`` for exponents in the normal range of float32 or float64, by its bits."""
    if dtype == torch.float64:
        return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)
