"""Cache of one layer: its pages, their tables, and the last tokens of compressors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from dsv4.config import CSA, HCA, ModelConfig
from dsv4.kv_cache.page_tables import PagePool, PageTable
from dsv4.kv_cache.pages import COMPACT_FORMATS, ENTRY_FORMATS, Pages
from dsv4.ops import _check
from dsv4.ops.kv_cache import check_pages
from dsv4.ops.slots import entry_slots, prefix_slots, window_slots

WINDOW_PAGE = 64  # entries per page of raw KV entries
# Tokens of a sequence that can be taken back, enough for the longest drafts: MTP's, and DSpark's 5.
ROLLBACK = 8
BLOCK = 256  # tokens that one page of compressed entries stands for


@dataclass(frozen=True, eq=False)
class LayerCache:
    """The cached entries and the compressors' last tokens of every sequence in one layer.

    Attributes:
        window: Raw KV entries; a sequence owns a ring of ``window_capacity`` entries.
        window_table: ``[S, P]`` int64, pages of the ring.
        sliding_window: Positions a token sees raw, itself included.
        ratio: Tokens per compressed entry, 0 for a sliding-window layer.
        compressed: Compressed entries, or None.
        compressed_table: ``[S, P']`` int64, pages of the sequence's entries 0, 1, ...
        state: Last tokens of the compressor, ``[S, slots, 2, c * head_dim]``, by position.
        indexer_pages: Keys of the indexer (CSA layers), addressed as ``compressed``.
        indexer_state: Last tokens of the indexer's compressor.
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
        """The entries of a sequence's ring; position p is ring entry ``p % window_capacity``."""
        return self.window_table.shape[1] * self.window.page_size

    @property
    def compressed_capacity(self) -> int:
        """The compressed entries that a sequence can hold."""
        pages, table = self._compressed()
        return table.shape[1] * pages.page_size

    def window_write_slots(self, sequences: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the slot of the raw KV entry of each token: ``[T]`` x ``[T]`` -> ``[T]`` int64."""
        return self._window_slots(sequences, positions, 1).squeeze(-1)

    def window_read_slots(self, sequences: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the slots that tokens at ``positions`` see: ``max(0, p - w + 1) .. p``, ascending.

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

    def compressed_slots_of(self, sequences: torch.Tensor, entry_ids: torch.Tensor) -> torch.Tensor:
        """Return slots of entries ``[T]`` or ``[T, k]`` of ``[T]`` sequences; -1 stays -1."""
        pages, table = self._compressed()
        return entry_slots(table, pages.page_size, sequences, entry_ids)

    def compressed_prefix_slots(
        self, sequences: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        """Return the slots of the entries ``0 .. visible - 1`` of each token's sequence.

        Args:
            sequences: ``[T]`` int, -1 for padding.
            visible: ``[T]`` int.

        Returns:
            ``[T, compressed_capacity]`` int64, -1 from column ``visible`` on.
        """
        pages, table = self._compressed()
        return prefix_slots(table, pages.page_size, sequences, visible)

    def tensors(self) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Yield every tensor of the layer with the table that says which rows a sequence owns.

        None stands for one row per sequence.
        """
        yield self.window.data, self.window_table
        for pages in (self.compressed, self.indexer_pages):
            if pages is not None:
                yield pages.data, self.compressed_table
        for state in (self.state, self.indexer_state):
            if state is not None:
                yield state, None

    def pools(self, ratio: int) -> Iterator[torch.Tensor]:
        """Return the tensors of pages that the table of one ratio addresses, 0 for the window."""
        if ratio == 0:
            yield self.window.data
        elif ratio == self.ratio:
            for pages in (self.compressed, self.indexer_pages):
                if pages is not None:
                    yield pages.data

    def bytes_of(self, tokens: int, *, grows: bool) -> dict[str, int]:
        """Return the bytes that a sequence of ``tokens`` tokens occupies; see ``PagedCache``."""
        size, columns = self.window.page_size, self.window_table.shape[1]
        count = -(-min(tokens, self.sliding_window) // size) if grows else columns
        sizes = {"window": min(count, columns) * self.window.page_bytes()}
        if self.compressed is None or self.compressed_table is None or self.state is None:
            return sizes
        columns = self.compressed_table.shape[1]
        count = -(-(tokens // self.ratio) // self.compressed.page_size) if grows else columns
        sizes["compressed"] = count * self.compressed.page_bytes()
        sizes["state"] = self.state[0].nbytes
        if self.indexer_pages is not None and self.indexer_state is not None:
            sizes["indexer"] = count * self.indexer_pages.page_bytes()
            sizes["state"] += self.indexer_state[0].nbytes
        return sizes

    def _compressed(self) -> tuple[Pages, torch.Tensor]:
        if self.compressed is None or self.compressed_table is None:
            raise ValueError("LayerCache: a sliding-window layer has no compressed entries")
        return self.compressed, self.compressed_table


@dataclass(frozen=True, eq=False)
class State:
    """Last tokens of the compressors of one kind, of one or more layers.

    Attributes:
        ratio: Tokens of a window.
        pooled: Tokens that an entry is pooled of: one window, or two that overlap.
        tensor: ``[layers, S, slots, 2, channels]``; the token at position p has slot ``p % slots``.
    """

    ratio: int
    pooled: int
    tensor: torch.Tensor

    @classmethod
    def of_layer(cls, layer: LayerCache) -> list[State]:
        """Return the states of a layer."""
        states = (layer.state, layer.indexer_state)
        pooled = layer.ratio * (2 if layer.indexer_state is not None else 1)
        return [
            cls(layer.ratio, pooled, state.unsqueeze(0)) for state in states if state is not None
        ]

    def loses(self, start: int, end: int) -> bool:
        """Return whether tokens ``start`` up to ``end`` take slots of earlier ones still pooled.

        A step of a single token never does, nor one of as many more as can be taken back.
        """
        first = max(0, start // self.ratio * self.ratio - (self.pooled - self.ratio))
        return first < start and end > first + self.tensor.shape[2]


@dataclass(frozen=True)
class CacheSize:
    """The capacity of a cache.

    Attributes:
        sequences: Number of rows.
        max_tokens: Longest sequence.
        max_chunk: Most new tokens of one sequence in one step.
        pool_tokens: Tokens of all sequences together whose compressed entries fit; None: each
            sequence has pages of its own for ``max_tokens``.
        window_pages: Pages of raw KV entries, of each layer, in all.
        rollback: Tokens of a sequence that can be taken back.
    """

    sequences: int
    max_tokens: int
    max_chunk: int
    pool_tokens: int | None = None
    window_pages: int | None = None
    rollback: int = 0

    def window_entries(self, config: ModelConfig) -> int:
        """Raw KV entries of a window and of tokens that a step adds or that are taken back.

        Tokens to be taken back may lie beyond ``max_tokens``, and overwrite no others there.
        """
        ahead = max(self.max_chunk, self.rollback)
        return min(config.sliding_window - 1 + ahead, self.max_tokens + self.rollback)


@dataclass
class LayerBuilder:
    """Makes the layers of a cache.

    Attributes:
        tables: Page tables with pools, by ratio, 0 for the window; empty where every sequence has
            pages of its own.
        states: Last tokens of all layers of a kind.
    """

    config: ModelConfig
    size: CacheSize
    entry_format: str
    index_format: str
    dtype: torch.dtype
    device: torch.device | str | None
    tables: dict[int, PageTable] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)
    _known_tables: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)
    _made: dict[str, int] = field(default_factory=dict)

    def layers(self) -> list[LayerCache]:
        """Make one ``LayerCache`` per main layer, then one per MTP layer."""
        layers = []
        for index in range(self.config.total_layers):
            ratio = self.config.compress_rate(index)
            overlap = self.config.layer_type(index) == CSA
            layer = self._window()
            layers.append(self._with_compressed(layer, ratio, overlap) if ratio else layer)
        return layers

    def _window(self) -> LayerCache:
        columns = -(-self.size.window_entries(self.config) // WINDOW_PAGE)
        table, count = self._table(0, "window", WINDOW_PAGE, columns, self._window_pages(columns))
        pages = self._pages(count, WINDOW_PAGE, self.config.head_dim, self.entry_format)
        return LayerCache(pages, table, self.config.sliding_window)

    def _window_pages(self, columns: int) -> int:
        if self.size.window_pages is not None:
            return self.size.window_pages
        # For each sequence a window that begins within a page, and one chunk of the largest size.
        pages = -(-self.config.sliding_window // WINDOW_PAGE) + 1
        return self.size.sequences * min(pages, columns) + columns

    def _with_compressed(self, layer: LayerCache, ratio: int, overlap: bool) -> LayerCache:
        page_size, config = max(1, BLOCK // ratio), self.config  # 64 at ratio 4, 2 at ratio 128
        columns = -(-max(1, self.size.max_tokens // ratio) // page_size)
        pages = -(-max(1, (self.size.pool_tokens or 0) // ratio) // page_size)
        table, count = self._table(ratio, f"compressed (ratio {ratio})", page_size, columns, pages)
        layer = replace(
            layer,
            ratio=ratio,
            compressed_table=table,
            compressed=self._pages(count, page_size, config.head_dim, self.entry_format),
            state=self._state(CSA if overlap else HCA, ratio, overlap, config.head_dim),
        )
        if not overlap:
            return layer
        # Index keys may also be plain with "deepseek" numerics: after rounding to FP4 every model
        # dtype holds them exactly.
        return replace(
            layer,
            indexer_pages=self._pages(count, page_size, config.index_head_dim, self.index_format),
            indexer_state=self._state("indexer", ratio, overlap, config.index_head_dim),
        )

    def _table(
        self, ratio: int, name: str, page_size: int, columns: int, pooled: int
    ) -> tuple[torch.Tensor, int]:
        """Return the page table that layers of one ratio share, and pages of each layer."""
        if ratio in self._known_tables:
            return self._known_tables[ratio]
        shape = (self.size.sequences, columns)
        if self.size.pool_tokens is None:
            count = self.size.sequences * columns
            table = torch.arange(count, device=self.device).view(shape)
        else:
            count = pooled
            table = torch.full(shape, -1, dtype=torch.int64, device=self.device)
            self.tables[ratio] = PageTable(PagePool(name, count), page_size, table)
        self._known_tables[ratio] = table, count
        return table, count

    def _pages(self, count: int, size: int, dim: int, entry_format: str) -> Pages:
        rope = self.config.qk_rope_head_dim
        return Pages.allocate(count, size, dim, rope, entry_format, self.dtype, self.device)

    def _state(self, kind: str, ratio: int, overlap: bool, dim: int) -> torch.Tensor:
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        shape = state_shape(self.size.sequences, ratio, overlap, dim, self.size.rollback)
        if kind not in self.states:
            types = [self.config.layer_type(i) for i in range(self.config.total_layers)]
            layers = types.count(CSA) if overlap else len(types) - types.count(CSA)
            state = torch.zeros((layers, *shape), dtype=wide, device=self.device)
            state[:, :, :, 1] = -torch.inf
            pooled = ratio * (2 if overlap else 1)
            self.states[kind], self._made[kind] = State(ratio, pooled, state), 0
        self._made[kind] += 1
        return self.states[kind].tensor[self._made[kind] - 1]


def state_shape(
    sequences: int, ratio: int, overlap: bool, dim: int, rollback: int = 0
) -> tuple[int, int, int, int]:
    """Return the shape ``[S, slots, 2, channels]`` of a compressor's last tokens: values, scores.

    The token at position p has slot ``p % slots``. There are slots for the tokens that an entry is
    pooled of and for ``rollback`` more, so that as many can be taken back.
    """
    c = 2 if overlap else 1
    return sequences, c * ratio + rollback, 2, c * dim


def check_layers(config: ModelConfig, layers: Sequence[LayerCache], size: CacheSize) -> None:
    """Raise unless the caller's tensors can be the cache of a model.

    It reads the page tables back from the device, so it runs once, when the cache is made.

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if the number of layers, a shape, a format or a page of a table is wrong.
    """
    if len(layers) not in (config.num_hidden_layers, config.total_layers):
        raise ValueError(
            f"PagedCache: layers are {len(layers)}, wanted {config.num_hidden_layers}, or "
            f"{config.total_layers} with those of multi-token prediction"
        )
    seen: set[tuple[int, int]] = set()
    for index, layer in enumerate(layers):
        _LayerCheck(config, layer, index, size, seen).all()


@dataclass(frozen=True)
class _LayerCheck:
    config: ModelConfig
    layer: LayerCache
    index: int
    size: CacheSize
    seen: set[tuple[int, int]]

    def all(self) -> None:
        layer, config, ratio = self.layer, self.config, self.config.compress_rate(self.index)
        overlap = config.layer_type(self.index) == CSA
        self._same("sliding_window", layer.sliding_window, config.sliding_window)
        self._same("ratio", layer.ratio, ratio)
        self._present("compressed", layer.compressed, ratio > 0)
        self._present("compressed_table", layer.compressed_table, ratio > 0)
        self._present("state", layer.state, ratio > 0)
        self._present("indexer_pages", layer.indexer_pages, overlap)
        self._present("indexer_state", layer.indexer_state, overlap)
        self._pages("window", layer.window, config.head_dim, ENTRY_FORMATS)
        self._table("window_table", layer.window_table, layer.window)
        self._check_entries("window_table", layer.window_capacity, self.size.window_entries(config))
        if layer.compressed is None or layer.compressed_table is None or layer.state is None:
            return
        self._pages("compressed", layer.compressed, config.head_dim, ENTRY_FORMATS)
        self._table("compressed_table", layer.compressed_table, layer.compressed)
        entries = self.size.max_tokens // ratio
        self._check_entries("compressed_table", layer.compressed_capacity, entries)
        self._state("state", layer.state, overlap, config.head_dim)
        if layer.indexer_pages is None or layer.indexer_state is None:
            return
        formats = ("plain", *COMPACT_FORMATS)
        self._pages("indexer_pages", layer.indexer_pages, config.index_head_dim, formats)
        page_size = layer.compressed.page_size
        self._same("indexer_pages.page_size", layer.indexer_pages.page_size, page_size)
        self._table("compressed_table", layer.compressed_table, layer.indexer_pages)
        self._state("indexer_state", layer.indexer_state, overlap, config.index_head_dim)

    @property
    def _op(self) -> str:
        return f"PagedCache: layer {self.index}"

    def _same(self, name: str, value: int, expected: int) -> None:
        if value != expected:
            raise ValueError(f"{self._op}: {name} is {value}, wanted {expected}")

    def _present(self, name: str, value: object, expected: bool) -> None:
        if (value is not None) != expected:
            state, asked = ("None", "one") if expected else ("given", "None")
            kind = self.config.layer_type(self.index)
            raise ValueError(f"{self._op}: {name} is {state}, wanted {asked} for {kind}")

    def _pages(self, name: str, pages: Pages, dim: int, formats: Sequence[str]) -> None:
        check_pages(self._op, name, pages, formats)
        self._same(f"{name}.head_dim", pages.head_dim, dim)
        if pages.entry_format in ENTRY_FORMATS and name != "indexer_pages":
            self._same(f"{name}.rope_dim", pages.rope_dim, self.config.qk_rope_head_dim)

    def _table(self, name: str, table: torch.Tensor, pages: Pages) -> None:
        _check.integer(self._op, name, table)
        _check.shape(self._op, name, table, [self.size.sequences, None])
        _check.same_device(self._op, **{name: table, "pages": pages.data})
        if (id(table), pages.num_pages) in self.seen or not table.numel() or table.is_meta:
            return
        low, high = (int(x) for x in torch.stack(table.aminmax()).tolist())
        if low < -1 or high >= pages.num_pages:
            wrong = low if low < -1 else high
            raise ValueError(
                f"{self._op}: {name} has page {wrong}, wanted -1 to {pages.num_pages - 1}: the "
                f"pool has {pages.num_pages} pages"
            )
        self.seen.add((id(table), pages.num_pages))

    def _check_entries(self, name: str, entries: int, least: int) -> None:
        if entries < least:
            raise ValueError(
                f"{self._op}: {name} has room for {entries} entries of a sequence, wanted at least "
                f"{least} for max_tokens {self.size.max_tokens} and max_chunk "
                f"{self.size.max_chunk}"
            )

    def _state(self, name: str, state: torch.Tensor, overlap: bool, dim: int) -> None:
        _check.dtype(self._op, name, state, torch.float32, torch.float64)
        rows, slots, *kinds = state_shape(
            self.size.sequences, self.layer.ratio, overlap, dim, self.size.rollback
        )
        more = state.dim() == 4 and state.shape[1] > slots
        _check.shape(self._op, name, state, (rows, None if more else slots, *kinds))
        _check.same_device(self._op, **{name: state, "window_table": self.layer.window_table})
