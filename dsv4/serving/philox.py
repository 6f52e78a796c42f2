"""Philox4x32-10, a counter-based random number generator, in integer tensor operations.

The same counter and key give the same words on every device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


class Words(NamedTuple):
    """Four 32-bit words, each an int64 tensor with values 0 to 2**32 - 1."""

    x: torch.Tensor
    y: torch.Tensor
    z: torch.Tensor
    w: torch.Tensor


def philox(counter: Words, key: torch.Tensor) -> Words:
    """Return four random words for each counter.

    Args:
        counter: Words of one broadcastable shape.
        key: int64, broadcastable to that shape; both 32-bit halves are used.
    """
    x, y, z, w = counter
    low, high = key & _MASK, (key >> 32) & _MASK
    for _ in range(_ROUNDS):
        # The low 64 bits of a product are the same for signed and for unsigned factors.
        first, second = x * _MULTIPLIERS[0], z * _MULTIPLIERS[1]
        x, y, z, w = (
            _high(second) ^ y ^ low,
            second & _MASK,
            _high(first) ^ w ^ high,
            first & _MASK,
        )
        low, high = (low + _WEYL[0]) & _MASK, (high + _WEYL[1]) & _MASK
    return Words(x, y, z, w)


def _high(product: torch.Tensor) -> torch.Tensor:
    return (product >> 32) & _MASK


def token_words(
    seeds: torch.Tensor, positions: torch.Tensor, tokens: range, purpose: int = 0
) -> torch.Tensor:
    """Return a random word per row and token: word ``token % 4`` of ``(token // 4, position)``.

    Args:
        seeds: ``[B]`` int64, the key of each row.
        positions: ``[B]`` int64, below 2**32.
        tokens: Consecutive token ids.
        purpose: Third word of the counter; words of different purposes are independent.

    Returns:
        ``[B, len(tokens)]`` int64, values 0 to 2**32 - 1.
    """
    first, stop = tokens.start // 4, -(-tokens.stop // 4)
    quads = torch.arange(first, stop, device=seeds.device).unsqueeze(0)
    zero = torch.zeros_like(quads)
    counter = Words(quads, positions.unsqueeze(1), torch.full_like(quads, purpose), zero)
    words = philox(counter, seeds.unsqueeze(1))
    return torch.stack(words, dim=-1).flatten(1)[:, tokens.start - 4 * first :][:, : len(tokens)]
