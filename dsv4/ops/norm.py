"""RMS normalisation, weighted or not."""

from __future__ import annotations

import torch

from dsv4.ops import _check
from dsv4.ops._library import define


def _fake(x: torch.Tensor, weight: torch.Tensor | None, eps: float, backend: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_rms_norm = define("rms_norm(Tensor x, Tensor? weight, float eps, str backend) -> Tensor", _fake)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """``weight * x * rsqrt(mean(x^2) + eps)`` over the last axis (specification section 2).

    Statistics and product in float32 (float64 for float64 input), one rounding to ``x.dtype`` at
    the end. Without a weight this is the per-head norm of q (section 4.2, step 2). A row that holds
    a non-finite value, or whose mean square overflows, is NaN throughout.

    Args:
        x: ``[..., D]``, bfloat16, float16, float32 or float64.
        weight: ``[D]`` or None.
        eps: Added to the mean square.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[..., D]`` in ``x.dtype``, contiguous.

    Raises:
        TypeError: if a dtype is not a floating type of at least 16 bits.
        ValueError: if ``weight`` has another shape than ``[D]`` or is on another device.
    """
    _check.floating("rms_norm", "x", x)
    if weight is not None:
        _check.floating("rms_norm", "weight", weight)
        _check.shape("rms_norm", "weight", weight, [x.shape[-1]])
        _check.same_device("rms_norm", x=x, weight=weight)
    return _rms_norm(x, weight, eps, backend)
