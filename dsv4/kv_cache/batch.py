"""The new tokens of a step, alone and together with a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import torch

from dsv4.config import ModelConfig
from dsv4.kv_cache.layer_cache import LayerCache
from dsv4.kv_cache.page_tables import to_device


class Cache(Protocol):
    """A cache as layers see it; ``dsv4.kv_cache.paged_cache.PagedCache`` is one.

    Attributes:
        layers: The cached entries of each layer.
    """

    layers: list[LayerCache]

    def check_model(self, config: ModelConfig, dtype: torch.dtype) -> None:
        """Raise ValueError unless the cache was made for such a model."""
        ...


@dataclass(frozen=True, eq=False)
class Batch:
    """New tokens of some sequences, flat: entry b owns ``cu_seqlens[b] : cu_seqlens[b+1]``.

    Attributes:
        cu_seqlens: ``[B+1]`` int64.
        starts: ``[B]`` int64, tokens each sequence had before.
        sequences: ``[B]`` int64, rows of the cache.
        positions: ``[T]`` int64, position of each token in its sequence.
        sequence_of_token: ``[T]`` int64, row of the cache of each token.
    """

    cu_seqlens: torch.Tensor
    starts: torch.Tensor
    sequences: torch.Tensor
    positions: torch.Tensor
    sequence_of_token: torch.Tensor

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int], starts: torch.Tensor, sequences: torch.Tensor
    ) -> Batch:
        """Make a ragged batch.

        Args:
            lengths: Number of new tokens of each entry, on the host; 0 is allowed.
            starts: ``[B]`` int.
            sequences: ``[B]`` int, distinct.

        Raises:
            ValueError: if a length is negative or the three differ in number.
        """
        count = len(lengths)
        if any(n < 0 for n in lengths):
            raise ValueError(f"Batch: lengths are {list(lengths)}, wanted none negative")
        for name, tensor in (("starts", starts), ("sequences", sequences)):
            if tuple(tensor.shape) != (count,):
                raise ValueError(f"Batch: {name} has shape {list(tensor.shape)}, wanted [{count}]")
        starts, sequences = starts.to(torch.int64), sequences.to(torch.int64)
        device, total = starts.device, sum(lengths)
        cu = to_device(list(accumulate(lengths, initial=0)), device)
        entry = torch.repeat_interleave(cu.diff(), output_size=total)
        index = torch.arange(total, device=device)
        positions = starts[entry] + index - cu[entry]
        return cls(cu, starts, sequences, positions, sequences[entry])

    @classmethod
    def decode(cls, starts: torch.Tensor, sequences: torch.Tensor) -> Batch:
        """Make a batch of one new token per sequence; ``starts`` and ``sequences`` are ``[B]`` int.

        An entry with ``sequences`` -1 is padding: its slots are all -1.
        """
        starts, sequences = starts.to(torch.int64), sequences.to(torch.int64)
        cu = torch.arange(starts.shape[0] + 1, device=starts.device)
        return cls(cu, starts, sequences, starts, sequences)

    @classmethod
    def equal(cls, starts: torch.Tensor, sequences: torch.Tensor, count: int) -> Batch:
        """Make a batch of ``count`` new tokens per sequence, without a number of the host.

        An entry with ``sequences`` -1 is padding: the slots of its tokens are all -1.

        Args:
            starts: ``[B]`` int.
            sequences: ``[B]`` int.
            count: New tokens of each, 1 and up.
        """
        starts, sequences = starts.to(torch.int64), sequences.to(torch.int64)
        device = starts.device
        cu = torch.arange(starts.shape[0] + 1, device=device) * count
        positions = starts.unsqueeze(1) + torch.arange(count, device=device)
        rows = sequences.unsqueeze(1).expand(-1, count)
        return cls(cu, starts, sequences, positions.flatten(), rows.flatten())


@dataclass(frozen=True, eq=False)
class CacheStep:
    """A cache and the batch that extends it, which layers take as ``past_key_values``.

    Attributes:
        cache: The cache of earlier tokens, to which the new ones are added.
        batch: The new tokens; flat, so hidden states are ``[1, T, ...]``.
        routed: ``[T]`` int64, negative for a token that goes to no routed expert, so that its
            experts need not be read; its results mean nothing then. None: there is no such token.
    """

    cache: Cache
    batch: Batch
    routed: torch.Tensor | None = None
    _shared: dict[Any, Any] = field(default_factory=dict, repr=False)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what ``make`` returned for ``key`` in this step: layers share tables and slots.

        A step lives for one forward, so no value is used with other numbers.
        """
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def keep(self, key: Any, value: Any) -> None:
        """Keep a value for the layers of this step."""
        self._shared[key] = value

    def value_of(self, key: Any) -> Any:
        """Return what was kept for ``key``; None if nothing was."""
        return self._shared.get(key)

    def write_slots(self, layer: LayerCache) -> torch.Tensor:
        """Return the slot of each token's raw KV entry, ``[T]``; see ``LayerCache``."""
        return self.once(
            ("write", id(layer.window_table)),
            lambda: layer.window_write_slots(self.batch.sequence_of_token, self.batch.positions),
        )

    def read_slots(self, layer: LayerCache) -> torch.Tensor:
        """Return the slots each token sees, ``[T, sliding_window]``; see ``LayerCache``."""
        return self.once(
            ("read", id(layer.window_table), layer.sliding_window),
            lambda: layer.window_read_slots(self.batch.sequence_of_token, self.batch.positions),
        )
