"""How a token lies in a slot of a mailbox: its expert ids, their weights, its values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4.config import ModelConfig
from dsv4.parallel.mailboxes import Mailbox

_ALIGNED = 16  # elements of 2 bytes: rows begin at multiples of 32 bytes
_PER_CHOICE = 4  # elements of an id and a weight, 4 bytes each


@dataclass(frozen=True)
class RowLayout:
    """Sizes of a row, in elements of 2 bytes.

    Attributes:
        choices: Experts of a token.
        hidden: Values of a token.
    """

    choices: int
    hidden: int

    @classmethod
    def of(cls, rows: torch.Tensor, ids: torch.Tensor) -> RowLayout:
        """Return the layout of ``rows [R, H]`` with ``ids [T, k]``."""
        return cls(ids.shape[1], rows.shape[1])

    @classmethod
    def of_model(cls, config: ModelConfig) -> RowLayout:
        """Return the layout of a model's tokens."""
        return cls(config.num_experts_per_tok, config.hidden_size)

    @property
    def head(self) -> int:
        """Elements before the values."""
        return _aligned(_PER_CHOICE * self.choices)

    @property
    def elements(self) -> int:
        """Elements from one row to the next."""
        return self.head + _aligned(self.hidden)

    def nbytes(self, tokens: int) -> int:
        """Return the bytes of a slot for a number of tokens."""
        return 2 * tokens * self.elements

    def unfit(self, mailbox: Mailbox, tokens: int) -> str | None:
        """Return why these tokens do not fit a slot, or None."""
        most = min(mailbox.capacity // self.elements, mailbox.chunks)
        if tokens > most:
            return f"each rank has {tokens} tokens, and a slot holds {most}"
        return None


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGNED) * _ALIGNED
