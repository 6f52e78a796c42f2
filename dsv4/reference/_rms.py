"""The root mean square that norms and hyper-connections share."""

from __future__ import annotations

import torch


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """``rsqrt(mean(x^2) + eps)`` over the last axis, ``[..., 1]``; NaN where the mean overflows.

    An infinite mean would give 0 and a row of plausible zeros.
    """
    mean = x.square().mean(-1, keepdim=True)
    return torch.rsqrt(mean + eps).masked_fill(mean.isinf(), torch.nan)
