"""The paged cache of a model: raw KV entries, compressed entries, compressor state.

Every tensor is allocated once. Slots that a token reads or writes are computed by tensor arithmetic
from sequence rows, positions and page tables, so a captured graph replays with other values.
``allocate``, ``free``, ``fork``, ``copy`` and, before a step, ``prepare`` run on the host: they
know how many tokens each sequence has, change tables in place and never wait for a GPU.

Everything is addressed by position, and no token of the last ``rollback`` ones has overwritten what
an earlier one needs. So tokens are taken back by ``lengths`` alone: on the host by ``roll_back``;
within a captured graph by ``advance`` with the number of tokens that are kept, which the host
learns later (``prepare`` with ``certain``, then ``confirm``).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch

from dsv4.config import ModelConfig
from dsv4.kv_cache.batch import Batch, CacheStep
from dsv4.kv_cache.cache_checks import checked_size
from dsv4.kv_cache.layer_cache import (
    ROLLBACK,
    CacheSize,
    LayerBuilder,
    LayerCache,
    State,
    check_layers,
)
from dsv4.kv_cache.page_tables import CacheFullError, PageTable
from dsv4.kv_cache.pages import COMPACT_FORMATS, ENTRY_FORMATS
from dsv4.kv_cache.row_counts import RowCount
from dsv4.kv_cache.sequence_rows import SequenceRows
from dsv4.kv_cache.step_record import StepRecord

__all__ = ["Batch", "CacheFullError", "CacheStep", "LayerCache", "PagedCache"]


class PagedCache(SequenceRows):
    """Cache of ``max_sequences`` sequences of at most ``max_tokens`` tokens each.

    Each sequence has pages of its own for ``max_tokens``; or, with ``pool_tokens``, takes pages
    from shared pools as it grows, and gives back those that its window has left. Then ``prepare``
    must be called before every step.

    Up to ``rollback`` of the latest tokens of a sequence can be taken back, as if they had never
    been there. With pools these are the tokens of the latest step, and of all steps since the
    last confirmed one.

    A step is completed or undone: within ``atomic``, or with ``undo`` after an error, the cache is
    left so that the step can be repeated.

    Attributes:
        config: The model's.
        size: What there is room for.
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
        pool_tokens: int | None = None,
        window_pages: int | None = None,
        rollback: int = ROLLBACK,
    ) -> None:
        """Allocate all tensors.

        Args:
            config: The model's.
            max_sequences: S, sequences that live at one time.
            max_tokens: Longest sequence.
            max_chunk: Most new tokens of one sequence in one forward; None: ``max_tokens``.
            device: Device of the cache.
            dtype: Dtype of plain pages; float64 also makes the compressor state float64.
            entry_format: ``"fp8"`` or ``"plain"``; None: as ``config.numerics`` requires.
            index_format: Format of the indexer's keys: ``"plain"``, which holds the values of
                ``config.numerics``; ``"index_mxfp4"``, the same values in a quarter of bfloat16's
                bytes with ``"deepseek"`` numerics; ``"index_fp8"``, finer. With either of these,
                queries are rounded to the same format.
            pool_tokens: Tokens of all sequences together whose compressed entries fit in pools that
                the sequences share; each sequence rounds up to whole pages. None: no pools.
            window_pages: Pages of raw KV entries in their pool; None: enough for a window of every
                sequence and one chunk of ``max_chunk``. Several chunks in one step need more.
            rollback: Tokens of a sequence that can be taken back, see ``roll_back``. Each adds a
                slot to the compressors' state of every sequence.

        Raises:
            ValueError: if a number is below 1, ``rollback`` below 0, a format is none of these or
                does not fit the dims of the indexer's keys, or there are ``window_pages`` without
                ``pool_tokens``.
        """
        size = checked_size(
            max_sequences, max_tokens, max_chunk, pool_tokens, window_pages, rollback
        )
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
        build = LayerBuilder(config, size, entry_format, index_format, dtype, device)
        layers = build.layers()
        lengths = torch.zeros(max_sequences, dtype=torch.int64, device=device)
        self._hold(config, size, layers, lengths, build.tables, list(build.states.values()))

    @classmethod
    def of_layers(
        cls,
        config: ModelConfig,
        layers: Sequence[LayerCache],
        *,
        max_tokens: int,
        max_chunk: int | None = None,
        rollback: int = 0,
    ) -> PagedCache:
        """Make a cache of the caller's tensors, such as a serving engine's pools and page tables.

        Their owner chooses the pages of each sequence, by changing the tables in place between
        steps, and the rows in use; ``allocate`` and ``fork`` of the result raise. The tables are
        read and checked here, and by ``check_tables``.

        Args:
            config: The model's.
            layers: One layer per main layer, or also one per MTP layer. A window table is a ring,
                see ``LayerCache.window_capacity``; a column without a page holds -1.
            max_tokens: Longest sequence.
            max_chunk: Most new tokens of one sequence in one forward; None: ``max_tokens``.
            rollback: Tokens of a sequence that its owner may take back, by smaller ``starts`` of
                ``prepare`` and of the batch; states and windows must have room for them.

        Raises:
            TypeError: if a dtype is wrong.
            ValueError: if a shape, a format, a page size, a table's room or a page is wrong.
        """
        rows = layers[0].window_table.shape[0] if layers else 1
        size = checked_size(rows, max_tokens, max_chunk, None, None, rollback)
        check_layers(config, layers, size)
        cache = cls.__new__(cls)
        lengths = torch.zeros(rows, dtype=torch.int64, device=layers[0].window_table.device)
        states = [state for layer in layers for state in State.of_layer(layer)]
        cache._hold(config, size, list(layers), lengths, {}, states)
        cache._brought = True
        return cache

    def _hold(
        self,
        config: ModelConfig,
        size: CacheSize,
        layers: list[LayerCache],
        lengths: torch.Tensor,
        tables: Mapping[int, PageTable],
        states: list[State],
    ) -> None:
        self.config = config
        self.size = size
        self.layers = layers
        self.lengths = lengths
        self._tables = tables
        self._states = states
        self._records: list[StepRecord] = []  # of the latest step, or of all within ``atomic``
        self._within: set[int] | None = None  # within ``atomic``: its rows of several steps
        self._live = [False] * size.sequences
        self._counts = [RowCount()] * size.sequences
        self._tops = torch.zeros_like(lengths)
        self._grown: set[int] = set()  # sequences of the last step, whose windows may have moved on
        self._brought = False
        self._fits: tuple[ModelConfig, torch.dtype] | None = None  # the latest model that fits

    @property
    def free_pages(self) -> dict[str, int]:
        """Pages that no sequence holds or needs, by pool; empty without pools."""
        free = {table.pool.name: table.pool.free for table in self._tables.values()}
        if 0 in self._tables:
            window = self._tables[0]
            free[window.pool.name] += window.freed_by(list(self._stale(window).values()))
        return free

    def starts_of(self, sequences: Sequence[int]) -> list[int] | None:
        """Return the tokens of rows, 0 for -1; None with pools, where ``prepare`` knows them.

        Without pools ``prepare`` need not have been called: the lengths are read from the device,
        except from a GPU, which would have to be waited for.
        """
        if self.pooled or (self.lengths.device.type != "cpu" and not self._brought):
            return None
        held = self.lengths.tolist()
        return [held[row] if row >= 0 else 0 for row in sequences]

    def is_prepared(self, sequences: Sequence[int]) -> bool:
        """Return whether the latest ``prepare`` was for one more token of these rows, on a CPU."""
        rows = [row for row in sequences if row >= 0]
        if self.lengths.device.type != "cpu" or not rows:
            return False
        held = self.lengths.tolist()
        return all(self._counts[row].high == held[row] + 1 for row in rows)

    def check_prompts(self, sequences: Sequence[int], lengths: Sequence[int], chunk: int) -> None:
        """Raise unless there are pages for new tokens, ``chunk`` at a time; changes nothing.

        Args:
            sequences: Rows of the cache.
            lengths: New tokens of each, over all steps.
            chunk: Most tokens of a sequence per step.

        Raises:
            CacheFullError: if a pool has too few pages for one of the steps.
            ValueError: what ``prepare`` raises of one of them.
        """
        rehearsed = copy.copy(self)
        rehearsed.layers, rehearsed._states, rehearsed._records = [], [], []
        rehearsed._within = None
        rehearsed._grown = set(self._grown)
        rehearsed._tables = {ratio: table.rehearsed() for ratio, table in self._tables.items()}
        rehearsed._counts = list(self._counts)
        if not self.pooled:
            rehearsed._counts = [RowCount.of(tokens) for tokens in self.lengths.tolist()]
        for begin in range(0, max(lengths), chunk):
            steps = [max(0, min(chunk, length - begin)) for length in lengths]
            rehearsed.prepare(sequences, steps, rehearsed._prepared(sequences))

    def nbytes(self) -> int:
        """Return the bytes of all tensors; a table that layers share counts once."""
        tensors = {id(self.lengths): self.lengths}
        for layer in self.layers:
            for tensor, table in layer.tensors():
                tensors[id(tensor)] = tensor
                if table is not None:
                    tensors[id(table)] = table
        return sum(t.numel() * t.element_size() for t in tensors.values())

    def bytes_per_sequence(self, tokens: int) -> dict[str, int]:
        """Return the bytes that a sequence of ``tokens`` tokens occupies between steps.

        The sum is over all layers, for a cache with pools and one token at a time; for fewer than
        64 tokens after a chunk the window may hold one page more. Without pools a sequence always
        occupies its pages for ``max_tokens``.

        Returns:
            Bytes of ``"window"``, ``"compressed"`` and ``"indexer"`` pages, which grow, and of the
            compressors' ``"state"``, which is the same for every length.

        Raises:
            ValueError: if ``tokens`` is not within 0 and ``max_tokens``.
        """
        if not 0 <= tokens <= self.max_tokens:
            raise ValueError(
                f"bytes_per_sequence: tokens is {tokens}, wanted 0 to {self.max_tokens}"
            )
        total = {"window": 0, "compressed": 0, "indexer": 0, "state": 0}
        for layer in self.layers:
            for name, count in layer.bytes_of(tokens, grows=self.pooled).items():
                total[name] += count
        return total
