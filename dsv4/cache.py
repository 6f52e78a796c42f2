"""The static paged cache of a model: raw key-values, compressed entries, compressor state.

Everything is allocated once. Which slot a token reads or writes is tensor arithmetic on sequence
rows and positions, so a captured graph replays with other values. Only ``allocate``, ``free`` and
the ``check`` of numbers the host knows run on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dsv4.config import CSA, ModelConfig
from dsv4.ops.slots import entry_slots, prefix_slots, window_slots
from dsv4.pages import COMPACT_FORMATS, ENTRY_FORMATS, Pages

WINDOW_PAGE = 64  # entries per page of raw key-values
BLOCK = 256  # tokens that one page of compressed entries stands for


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
        """A ragged batch.

        Args:
            lengths: Number of new tokens of each entry, on the host; 0 is legal.
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
        host = torch.tensor([0, *lengths], dtype=torch.int64, device="cpu")
        cu = host.cumsum(0).to(device)
        entry = torch.repeat_interleave(cu.diff(), output_size=total)
        index = torch.arange(total, device=device)
        positions = starts[entry] + index - cu[entry]
        return cls(cu, starts, sequences, positions, sequences[entry])

    @classmethod
    def decode(cls, starts: torch.Tensor, sequences: torch.Tensor) -> Batch:
        """One new token per sequence; ``starts`` and ``sequences`` are ``[B]`` int.

        An entry with ``sequences`` -1 is padding: its slots are all -1.
        """
        starts, sequences = starts.to(torch.int64), sequences.to(torch.int64)
        cu = torch.arange(starts.shape[0] + 1, device=starts.device)
        return cls(cu, starts, sequences, starts, sequences)


@dataclass(frozen=True, eq=False)
class LayerCache:
    """What one layer remembers of every sequence.

    Attributes:
        window: Raw key-values; a sequence owns a ring of ``window_capacity`` entries.
        window_table: ``[S, P]`` int64, pages of the ring.
        sliding_window: Positions a token sees raw, itself included.
        ratio: Tokens per compressed entry, 0 for a sliding-window layer.
        compressed: Compressed entries, or None.
        compressed_table: ``[S, P']`` int64, pages of the sequence's entries 0, 1, ...
        state: Open windows of the compressor, ``[S, slots, 2, c * head_dim]``.
        indexer_pages: Keys of the indexer (CSA layers), addressed as ``compressed``.
        indexer_state: Open windows of the indexer's compressor.
    """

    window: Pages
    window_table: torch.Tensor
    sliding_window: int
    ratio: int = 0
    compressed: Pages | None = None
    compressed_table: torch.Tensor | None = None
    state: torch.Tensor | None = None
    indexer_pages: Pages | None = None
    indexer_state: torch.Tensor | None = None

    @property
    def window_capacity(self) -> int:
        """Entries of a sequence's ring; position p lies at ring entry ``p % window_capacity``."""
        return self.window_table.shape[1] * self.window.page_size

    @property
    def compressed_capacity(self) -> int:
        """Compressed entries a sequence can hold."""
        pages, table = self._compressed()
        return table.shape[1] * pages.page_size

    def window_write_slots(self, sequences: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Slot of the raw key-value of each token: ``[T]`` x ``[T]`` -> ``[T]`` int64."""
        return self._window_slots(sequences, positions, 1).squeeze(-1)

    def window_read_slots(self, sequences: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Slots a token at ``positions`` sees: ``max(0, p - w + 1) .. p`` in ascending order.

        Args:
            sequences: ``[T]`` int, -1 for padding.
            positions: ``[T]`` int.

        Returns:
            ``[T, sliding_window]`` int64, -1 where the position would be negative.
        """
        return self._window_slots(sequences, positions, self.sliding_window)

    def _window_slots(
        self, sequences: torch.Tensor, positions: torch.Tensor, window: int
    ) -> torch.Tensor:
        return window_slots(self.window_table, self.window.page_size, sequences, positions, window)

    def compressed_write_slots(
        self, sequence: torch.Tensor, entry_index: torch.Tensor
    ) -> torch.Tensor:
        """Slot of compressed entry ``entry_index`` of each row: ``[M]`` int64, -1 stays -1."""
        pages, table = self._compressed()
        return entry_slots(table, pages.page_size, sequence, entry_index)

    def compressed_slots_of(self, sequences: torch.Tensor, entry_ids: torch.Tensor) -> torch.Tensor:
        """Slots of chosen entries: ``[T]`` x ``[T, k]`` -> ``[T, k]`` int64, -1 stays -1."""
        return self.compressed_write_slots(sequences, entry_ids)

    def compressed_prefix_slots(
        self, sequences: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        """Slots of the entries ``0 .. visible - 1`` of each token's sequence.

        Args:
            sequences: ``[T]`` int, -1 for padding.
            visible: ``[T]`` int.

        Returns:
            ``[T, compressed_capacity]`` int64, -1 from column ``visible`` on.
        """
        pages, table = self._compressed()
        return prefix_slots(table, pages.page_size, sequences, visible)

    def tensors(self) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Every tensor of the layer with the table that says which rows a sequence owns.

        None stands for one row per sequence.
        """
        yield self.window.data, self.window_table
        for pages in (self.compressed, self.indexer_pages):
            if pages is not None:
                yield pages.data, self.compressed_table
        for state in (self.state, self.indexer_state):
            if state is not None:
                yield state, None

    def _compressed(self) -> tuple[Pages, torch.Tensor]:
        if self.compressed is None or self.compressed_table is None:
            raise ValueError("LayerCache: a sliding-window layer has no compressed entries")
        return self.compressed, self.compressed_table


class PagedCache:
    """Cache of ``max_sequences`` sequences of at most ``max_tokens`` tokens each.

    Attributes:
        lengths: ``[max_sequences]`` int64 on the device: tokens processed so far.
        layers: One ``LayerCache`` per main layer, then one per MTP layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_sequences: int,
        max_tokens: int,
        max_chunk: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        entry_format: str | None = None,
        index_format: str = "plain",
    ) -> None:
        """Allocate everything.

        Args:
            config: The model's.
            max_sequences: S, sequences that live at one time.
            max_tokens: Longest sequence.
            max_chunk: Most new tokens of one sequence in one forward; None: ``max_tokens``.
            device: Where.
            dtype: Of plain pages; float64 also makes the compressor state float64.
            entry_format: ``"fp8"`` or ``"plain"``; None: what ``config.numerics`` calls for.
            index_format: Of the indexer's keys: ``"plain"``, which holds what ``config.numerics``
                calls for; ``"index_mxfp4"``, the same values in a quarter of bfloat16's bytes with
                ``"deepseek"`` numerics; ``"index_fp8"``, finer. With either of these, queries are
                rounded to the same format.

        Raises:
            ValueError: if a number is below 1, or a format is none of these or does not fit the
                dims of the indexer's keys.
        """
        max_chunk = max_tokens if max_chunk is None else max_chunk
        for name, value in (
            ("max_sequences", max_sequences),
            ("max_tokens", max_tokens),
            ("max_chunk", max_chunk),
        ):
            if value < 1:
                raise ValueError(f"PagedCache: {name} is {value}, wanted >= 1")
        if entry_format is None:
            entry_format = "fp8" if config.numerics == "deepseek" else "plain"
        if entry_format not in ENTRY_FORMATS:
            raise ValueError(
                f"PagedCache: entry_format is {entry_format!r}, wanted 'fp8' or 'plain'"
            )
        if index_format not in ("plain", *COMPACT_FORMATS):
            words = ", ".join(map(repr, COMPACT_FORMATS))
            raise ValueError(
                f"PagedCache: index_format is {index_format!r}, wanted 'plain', {words}"
            )
        self.config = config
        self.max_sequences = max_sequences
        self.max_tokens = max_tokens
        self.max_chunk = min(max_chunk, max_tokens)
        build = _Builder(config, max_sequences, entry_format, index_format, dtype, device)
        self.lengths = torch.zeros(max_sequences, dtype=torch.int64, device=device)
        self.layers = build.layers(max_tokens, self.max_chunk)
        self._free = list(range(max_sequences))

    def allocate(self) -> int:
        """Row of a new, empty sequence; the lowest free one.

        Raises:
            RuntimeError: if all ``max_sequences`` are taken.
        """
        if not self._free:
            raise RuntimeError(
                f"PagedCache: all {self.max_sequences} sequences are taken; free one, "
                "or make the cache with a larger max_sequences"
            )
        sequence = self._free.pop(0)
        self.reset(sequence)
        return sequence

    def free(self, sequence: int) -> None:
        """Give a row back.

        Raises:
            ValueError: if it is not allocated.
        """
        self._check_allocated("free", sequence)
        self._free = sorted([*self._free, sequence])

    def reset(self, sequence: int) -> None:
        """Forget the tokens of a sequence; the row stays allocated."""
        self._check_allocated("reset", sequence)
        self.lengths[sequence] = 0

    def copy(self, source: int, target: int) -> None:
        """Make ``target`` a copy of ``source``, to continue both apart.

        Raises:
            ValueError: if either is not allocated.
        """
        self._check_allocated("copy", source)
        self._check_allocated("copy", target)
        self.lengths[target] = self.lengths[source]
        for layer in self.layers:
            for tensor, table in layer.tensors():
                if table is None:
                    tensor[target] = tensor[source].clone()
                else:
                    tensor[table[target]] = tensor[table[source]]

    def _check_allocated(self, what: str, sequence: int) -> None:
        if not 0 <= sequence < self.max_sequences or sequence in self._free:
            raise ValueError(
                f"PagedCache.{what}: sequence is {sequence}, wanted one that is allocated"
            )

    def check(self, lengths: Sequence[int], starts: Sequence[int]) -> None:
        """Raise unless the cache can take a batch whose numbers the host knows.

        Args:
            lengths: New tokens of each sequence.
            starts: Tokens each has already.

        Raises:
            ValueError: naming the sequence that has too many tokens, in the chunk or in all.
        """
        for i, (new, start) in enumerate(zip(lengths, starts, strict=True)):
            if new > self.max_chunk:
                raise ValueError(
                    f"PagedCache: entry {i} of the batch has {new} new tokens, wanted at most "
                    f"max_chunk ({self.max_chunk})"
                )
            if start < 0 or start + new > self.max_tokens:
                raise ValueError(
                    f"PagedCache: entry {i} of the batch would reach {start} + {new} tokens, "
                    f"wanted at most max_tokens ({self.max_tokens})"
                )

    def advance(self, batch: Batch) -> None:
        """Set ``lengths`` of the batch's sequences to what they are after it.

        Entries with a negative sequence or without tokens are ignored.
        """
        new = batch.cu_seqlens.diff()
        row = batch.sequences.clamp(min=0)
        counts = (batch.sequences >= 0) & (new > 0)
        # Added as a difference, so that ignored entries change nothing wherever they point.
        change = torch.where(counts, batch.starts + new - self.lengths[row], 0)
        self.lengths.index_add_(0, row, change)

    def nbytes(self) -> int:
        """Bytes of all tensors; a table that layers share counts once."""
        tensors = {id(self.lengths): self.lengths}
        for layer in self.layers:
            for tensor, table in layer.tensors():
                tensors[id(tensor)] = tensor
                if table is not None:
                    tensors[id(table)] = table
        return sum(t.numel() * t.element_size() for t in tensors.values())


@dataclass(frozen=True)
class _Builder:
    config: ModelConfig
    sequences: int
    entry_format: str
    index_format: str
    dtype: torch.dtype
    device: torch.device | str | None

    def layers(self, max_tokens: int, max_chunk: int) -> list[LayerCache]:
        ring = min(self.config.sliding_window - 1 + max_chunk, max_tokens)
        tables: dict[int, torch.Tensor] = {0: self._table(-(-ring // WINDOW_PAGE))}
        layers = []
        for index in range(self.config.total_layers):
            ratio = self.config.compress_rate(index)
            layer = self._window(tables[0])
            if ratio:
                if ratio not in tables:
                    entries = max(1, max_tokens // ratio)
                    tables[ratio] = self._table(-(-entries // _page_size(ratio)))
                overlap = self.config.layer_type(index) == CSA
                layer = self._with_compressed(layer, tables[ratio], ratio, overlap)
            layers.append(layer)
        return layers

    def _window(self, table: torch.Tensor) -> LayerCache:
        pages = self._pages(table, WINDOW_PAGE, self.config.head_dim, self.entry_format)
        return LayerCache(pages, table, self.config.sliding_window)

    def _with_compressed(
        self, layer: LayerCache, table: torch.Tensor, ratio: int, overlap: bool
    ) -> LayerCache:
        size, config = _page_size(ratio), self.config
        layer = replace(
            layer,
            ratio=ratio,
            compressed_table=table,
            compressed=self._pages(table, size, config.head_dim, self.entry_format),
            state=self._state(ratio, overlap, config.head_dim),
        )
        if not overlap:
            return layer
        # Index keys may be plain also with "deepseek" numerics: after rounding to FP4 every model
        # dtype holds them exactly.
        return replace(
            layer,
            indexer_pages=self._pages(table, size, config.index_head_dim, self.index_format),
            indexer_state=self._state(ratio, overlap, config.index_head_dim),
        )

    def _table(self, pages: int) -> torch.Tensor:
        table = torch.arange(self.sequences * pages, device=self.device)
        return table.view(self.sequences, pages)

    def _pages(self, table: torch.Tensor, size: int, dim: int, entry_format: str) -> Pages:
        rope = self.config.qk_rope_head_dim
        return Pages.allocate(table.numel(), size, dim, rope, entry_format, self.dtype, self.device)

    def _state(self, ratio: int, overlap: bool, dim: int) -> torch.Tensor:
        c = 2 if overlap else 1
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        state = torch.zeros(self.sequences, c * ratio, 2, c * dim, dtype=wide, device=self.device)
        state[:, :, 1] = -torch.inf
        return state


def _page_size(ratio: int) -> int:
    # 64 entries at ratio 4, 2 at ratio 128.
    return max(1, BLOCK // ratio)


@dataclass(frozen=True, eq=False)
class CacheStep:
    """A cache and the batch about to extend it: what layers take as ``past_key_values``.

    Attributes:
        cache: Holds earlier tokens, receives the new ones.
        batch: The new tokens; flat, so hidden states are ``[1, T, ...]``.
    """

    cache: PagedCache
    batch: Batch
    _shared: dict[Any, Any] = field(default_factory=dict, repr=False)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` returned for ``key`` in this step: layers share tables and slots.

        A step lives for one forward, so nothing outlives the numbers it came from.
        """
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def write_slots(self, layer: LayerCache) -> torch.Tensor:
        """Slot of each token's raw key-value, ``[T]``; see ``LayerCache.window_write_slots``."""
        return self.once(
            ("write", id(layer.window_table)),
            lambda: layer.window_write_slots(self.batch.sequence_of_token, self.batch.positions),
        )

    def read_slots(self, layer: LayerCache) -> torch.Tensor:
        """Slots each token sees, ``[T, sliding_window]``; see ``LayerCache.window_read_slots``."""
        return self.once(
            ("read", id(layer.window_table), layer.sliding_window),
            lambda: layer.window_read_slots(self.batch.sequence_of_token, self.batch.positions),
        )
