"""Steps of a transformers model with this package's modules, run on the meta device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dsv4.compilation.step_shapes import token_counts
from dsv4.integrations._cache import paged_cache_for

_BATCHES = (2, 16)  # rows of the batches whose shapes are listed; single prompts are listed, too
_NARROWEST = 64  # tokens of the smallest paged cache that is looked at


@dataclass(frozen=True)
class SwappedShape:
    """Sizes of a prompt and of the decode step behind it.

    Attributes:
        tokens: Tokens of each row's prompt.
        rows: Rows of the batch.
        context: Tokens that a row of a ``paged_cache`` has room for; None: transformers' own cache.
    """

    tokens: int
    rows: int = 1
    context: int | None = None

    def run(self, model: Any) -> None:
        """Run both as ``model.generate`` does."""
        cache: Any = None
        if self.context is not None:
            most = max(self.context, self.tokens + 1)
            cache = paged_cache_for(model, max_tokens=most, max_sequences=self.rows)
        ids = torch.zeros((self.rows, self.tokens), dtype=torch.int64, device="meta")
        done = model(ids, past_key_values=cache, use_cache=True)
        cache = cache or done.past_key_values
        model(ids[:, :1], past_key_values=cache, use_cache=True)


def swapped_shapes(max_tokens: int, context: int) -> list[SwappedShape]:
    """Return shapes that together launch what prompts of up to that many tokens do.

    Args:
        max_tokens: Most tokens of a step, of all rows together.
        context: Most tokens of a row.
    """
    most = min(max_tokens, context - 1)
    counts = [count for count in token_counts(max_tokens) if count <= most]
    powers = [1 << i for i in range(context.bit_length())]
    batches = {1: counts}
    for rows in _BATCHES:
        bounds = [n for power in powers for n in (power, power + 1)]
        batches[rows] = sorted({n for n in bounds if n <= most and n * rows <= max_tokens})
    shapes = []
    for rows, lengths in batches.items():
        shapes += [SwappedShape(n, rows) for n in lengths]
        shapes += [SwappedShape(n, rows, max(_NARROWEST, 2 * n)) for n in lengths]
    shapes += [SwappedShape(1, 1, power) for power in powers if power >= _NARROWEST]
    return list(dict.fromkeys(shapes))
