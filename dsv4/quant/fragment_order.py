"""The order of columns in which FP8 activations meet weights of the layout ``"fragments_16x64"``.

A lane's codes of a row and 128 columns become 32 consecutive E4M3 bytes (``dsv4.cute.device.
exact_fp8``), so a column has another place among these 128, and its activation must stand there,
too: column ``64 u + 16 j + 8 k + 2 q + e`` at place ``32 q + 16 u + 4 j + 2 e + (1 - k)``, with q
and j in 0..3, u, k and e in 0..1. Scales of activations belong to the same 128 columns and stay.
"""

from __future__ import annotations

import torch

BLOCK = 128
_AXES = (2, 4, 2, 4, 2)  # u, j, k, q, e


def to_fragment_order(x: torch.Tensor) -> torch.Tensor:
    """Columns in fragment order, a copy.

    Args:
        x: ``[*batch, K]`` of any dtype, K a multiple of 128.

    Raises:
        ValueError: if K is no multiple of 128.
    """
    blocks = _blocks(x).flip(-3)  # 1 - k
    batch = blocks.dim() - 5
    u, j, k, q, e = range(batch, batch + 5)
    return blocks.permute(*range(batch), q, u, j, e, k).reshape(x.shape)


def from_fragment_order(x: torch.Tensor) -> torch.Tensor:
    """The inverse of ``to_fragment_order``."""
    _blocks(x)
    places = to_fragment_order(torch.arange(BLOCK, device=x.device))
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    out.view(-1, BLOCK)[:, places] = x.reshape(-1, BLOCK)
    return out


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """Blocks of 128 columns by the axes of the module's formula."""
    if x.shape[-1] % BLOCK:
        raise ValueError(f"x has {x.shape[-1]} columns, wanted a multiple of {BLOCK}")
    return x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, *_AXES)
