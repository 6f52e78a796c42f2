"""The paged cache of a model: raw KV entries, compressed entries, compressor state.

Every tensor is allocated once. Which slot a token reads or writes is tensor arithmetic on sequence
rows, positions and page tables, so a captured graph replays with other values. On the host run
``allocate``, ``free``, ``fork``, ``copy`` and, before a step, ``prepare``: they know how many
tokens each sequence has, change tables in place and never wait for a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dsv4.config import ModelConfig
from dsv4.kv_cache.atomic_steps import AtomicSteps
from dsv4.kv_cache.batch import Batch, CacheStep
from dsv4.kv_cache.layer_cache import CacheSize, LayerBuilder, LayerCache, State, check_layers
from dsv4.kv_cache.page_tables import CacheFullError, Growth, PageTable, to_device
from dsv4.kv_cache.pages import COMPACT_FORMATS, ENTRY_FORMATS
from dsv4.kv_cache.step_record import StepRecord

__all__ = ["Batch", "CacheFullError", "CacheStep", "LayerCache", "PagedCache"]


class PagedCache(AtomicSteps):
    """Cache of ``max_sequences`` sequences of at most ``max_tokens`` tokens each.

    Each sequence has pages of its own for ``max_tokens``; or, with ``pool_tokens``, takes pages
    from pools that all share as it grows, and gives back those that its window has left. Then
    ``prepare`` has to come before every step.

    A step happens or does not: within ``atomic``, or with ``undo`` after an error, whatever raises
    leaves the cache such that the step can be repeated.

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
    ) -> None:
        """Allocate everything.

        Args:
            config: The model's.
            max_sequences: S, sequences that live at one time.
            max_tokens: Longest sequence.
            max_chunk: Most new tokens of one sequence in one forward; None: ``max_tokens``.
            device: Where.
            dtype: Dtype of plain pages; float64 also makes the compressor state float64.
            entry_format: ``"fp8"`` or ``"plain"``; None: what ``config.numerics`` calls for.
            index_format: Format of the indexer's keys: ``"plain"``, which holds what
                ``config.numerics`` calls for; ``"index_mxfp4"``, the same values in a quarter of
                bfloat16's bytes with ``"deepseek"`` numerics; ``"index_fp8"``, finer. With either
                of these, queries are rounded to the same format.
            pool_tokens: Tokens of all sequences together whose compressed entries have room, in
                pools that the sequences share; each sequence rounds up to whole pages. None: no
                pools.
            window_pages: Pages of raw KV entries in their pool; None: enough for a window of every
                sequence and one chunk of ``max_chunk``. Several chunks in one step need more.

        Raises:
            ValueError: if a number is below 1, a format is none of these or does not fit the dims
                of the indexer's keys, or there are ``window_pages`` without ``pool_tokens``.
        """
        size = _size(max_sequences, max_tokens, max_chunk, pool_tokens, window_pages)
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
    ) -> PagedCache:
        """A cache of tensors that somebody else made, a serving engine's pools and page tables.

        Their owner says which pages a sequence has, by changing the tables in place between steps,
        and which rows are in use; ``allocate`` and ``fork`` of the result raise. The tables are
        read and checked here, and whenever ``check_tables`` is asked to.

        Args:
            config: The model's.
            layers: One per main layer, or also one per MTP layer. A window table is a ring, see
                ``LayerCache.window_capacity``; a column without a page holds -1.
            max_tokens: Longest sequence.
            max_chunk: Most new tokens of one sequence in one forward; None: ``max_tokens``.

        Raises:
            TypeError: if a dtype is wrong.
            ValueError: if a shape, a format, a page size, a table's room or a page is wrong.
        """
        rows = layers[0].window_table.shape[0] if layers else 1
        size = _size(rows, max_tokens, max_chunk, None, None)
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
        self._tokens = [0] * size.sequences  # that each sequence was prepared for
        self._grown: set[int] = set()  # sequences of the last step, whose windows may have moved on
        self._brought = False
        self._fits: tuple[ModelConfig, torch.dtype] | None = None  # what was last found to

    @property
    def max_sequences(self) -> int:
        """Sequences that live at one time."""
        return self.size.sequences

    @property
    def max_tokens(self) -> int:
        """Longest sequence."""
        return self.size.max_tokens

    @property
    def max_chunk(self) -> int:
        """The most new tokens of one sequence in one step."""
        return self.size.max_chunk

    @property
    def pooled(self) -> bool:
        """Return whether sequences share pools, so that ``prepare`` comes before every step."""
        return bool(self._tables)

    @property
    def free_pages(self) -> dict[str, int]:
        """Pages that no sequence holds or needs, by pool; empty without pools."""
        free = {table.pool.name: table.pool.free for table in self._tables.values()}
        if 0 in self._tables:
            window = self._tables[0]
            free[window.pool.name] += window.freed_by(list(self._stale(window).values()))
        return free

    def allocate(self) -> int:
        """Row of a new, empty sequence; the lowest free one.

        Raises:
            CacheFullError: if all ``max_sequences`` are taken.
        """
        self._check_owner("allocate")
        if all(self._live):
            raise CacheFullError(
                f"PagedCache: all {self.max_sequences} sequences are taken; free one, "
                "or make the cache with a larger max_sequences"
            )
        sequence = self._live.index(False)
        self._release(sequence)
        self.lengths[sequence] = 0
        self._live[sequence] = True
        return sequence

    def free(self, sequence: int) -> None:
        """Give a row and its pages back.

        Raises:
            ValueError: if it is not allocated.
        """
        self._check_allocated("free", sequence)
        self._release(sequence)
        self._live[sequence] = False

    def reset(self, sequence: int) -> None:
        """Forget the tokens of a sequence; the row stays allocated."""
        self._check_allocated("reset", sequence)
        self._release(sequence)
        self.lengths[sequence] = 0

    def clear(self) -> None:
        """Free every row and page, whatever an interrupted call has left of the bookkeeping.

        Raises:
            RuntimeError: if the pages were brought.
        """
        self._check_owner("clear")
        for table in self._tables.values():
            table.clear()
        self._records.clear()
        self._within = None
        self._grown.clear()
        self._tokens = [0] * self.max_sequences
        self._live = [False] * self.max_sequences
        self.lengths.zero_()

    def _release(self, sequence: int) -> None:
        self._outside("free, reset or copy")
        self._records.clear()
        self._tokens[sequence] = 0
        self._grown.discard(sequence)
        for table in self._tables.values():
            table.release(sequence)
            table.flush()

    def fork(self, source: int) -> int:
        """A new sequence that goes on where ``source`` is, to continue both independently.

        From pools it shares the pages of compressed entries that are full, which nobody writes
        again; windows, open pages and compressor state are copied. Without pools all is copied.

        Returns:
            Its row.

        Raises:
            CacheFullError: if all rows are taken or a pool has too few pages; nothing is changed.
            ValueError: if ``source`` is not allocated.
        """
        self._check_allocated("fork", source)
        target = self.allocate()
        try:
            self.copy(source, target)
        except BaseException:
            self.free(target)
            raise
        return target

    def copy(self, source: int, target: int) -> None:
        """Make ``target`` forget its tokens and go on where ``source`` is; see ``fork``.

        Whatever else raises leaves ``target`` without tokens, and ``source`` as it was.

        Raises:
            CacheFullError: if a pool has too few pages; nothing is changed.
            ValueError: if either is not allocated.
        """
        self._check_allocated("copy", source)
        self._check_allocated("copy", target)
        if source == target:
            return
        self._trim()
        sealed = {
            ratio: self._tokens[source] // ratio // table.page_size if ratio else 0
            for ratio, table in self._tables.items()
        }
        for ratio, table in self._tables.items():
            free = table.pool.free + table.own_pages(target)
            self._check_pages("copy", table, table.fork_pages(source, sealed[ratio]), free)
        self.reset(target)
        try:
            for ratio, table in self._tables.items():
                self._copy_pages(ratio, table.fork(source, target, sealed[ratio]))
                table.flush()
            self._copy_rows(source, target)
            self.lengths[target] = self.lengths[source]
            self._tokens[target] = self._tokens[source]
        except BaseException:
            self.reset(target)
            raise

    def _copy_rows(self, source: int, target: int) -> None:
        """Copy what no pool holds."""
        for layer in self.layers:
            for tensor, pages in layer.tensors():
                if pages is None:
                    tensor[target] = tensor[source].clone()
                elif not self.pooled:
                    tensor[pages[target]] = tensor[pages[source]]

    def _copy_pages(self, ratio: int, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages of every layer of one ratio, 0 for the window of all."""
        if not copies or not self.layers:
            return
        source, target = to_device(copies, self.lengths.device).unbind(1)
        for layer in self.layers:
            for data in layer.pools(ratio):
                data[target] = data[source]

    def prepare(
        self, sequences: Sequence[int], lengths: Sequence[int], starts: Sequence[int] | None = None
    ) -> None:
        """Make room for a step: to be called before it, on the host, in the order of the steps.

        A cache with pools needs it before every step. It evicts the pages that windows have left,
        takes the pages that new tokens need, and changes the page tables on the device in place. A
        cache without pools, or of somebody else's tensors, only checks the numbers. Of the latter,
        a sequence that starts at 0 is a new one.

        Args:
            sequences: Rows of the cache, distinct; -1 for padding.
            lengths: New tokens of each, 0 and up.
            starts: Tokens each has already; None: as many as it was prepared for, which a cache of
                somebody else's tensors does not know.

        Raises:
            CacheFullError: if a pool has too few pages; nothing is changed.
            ValueError: if a row is not allocated or occurs twice, a sequence would have too many
                tokens, in the chunk or in all, or starts before its end.
        """
        if self._within is None:
            self._records.clear()
        if starts is None:
            if self._brought:
                raise ValueError("PagedCache.prepare: starts is None, wanted it with brought pages")
            starts = self._prepared(sequences)
        self._check_step(sequences, lengths, starts)
        self.check(lengths, starts)
        steps = [
            (row, start, start + new)
            for row, new, start in zip(sequences, lengths, starts, strict=True)
            if row >= 0 and new > 0
        ]
        self._check_repeated(steps)
        tokens = {row: self._tokens[row] for row, _, _ in steps}
        record = StepRecord(tokens, frozenset(self._grown))
        try:
            self._grow(steps, record)
        except BaseException:
            self._take_back(record)
            self._write_back(record)
            raise
        self._records.append(record)

    def _grow(self, steps: Sequence[tuple[int, int, int]], record: StepRecord) -> None:
        """Change tables and counts for a step, and say in ``record`` what they were."""
        self._trim(record)
        growths = {ratio: self._growths(ratio, steps) for ratio in self._tables}
        for ratio, table in self._tables.items():
            need = sum(growth.pages for growth in growths[ratio])
            self._check_pages("prepare", table, need, table.pool.free)
        if self._within is None or not self._records:
            self._save_states(steps, record)
        for ratio, table in self._tables.items():
            if growths[ratio]:
                self._save_pages(ratio, growths[ratio], record)
                record.tables.append((table, table.before_growth(growths[ratio])))
            for growth in growths[ratio]:
                self._copy_pages(ratio, table.grow(growth))
            table.flush()
        for row, _, end in steps:
            self._tokens[row] = end
            self._grown.add(row)

    def _growths(self, ratio: int, steps: Sequence[tuple[int, int, int]]) -> list[Growth]:
        grow = self._tables[ratio].growth
        if ratio:
            growths = [grow(row, 0, end // ratio) for row, _, end in steps]
        else:
            growths = [grow(row, self._window_low(start), end) for row, start, end in steps]
        return [growth for growth in growths if growth is not None]

    def _stale(self, window: PageTable) -> dict[int, dict[int, int]]:
        """Pages that windows have left since the last step, by row and number."""
        stale = {row: window.stale(row, self._window_low(self._tokens[row])) for row in self._grown}
        return {row: stale[row] for row in sorted(stale) if stale[row]}

    def _trim(self, record: StepRecord | None = None) -> None:
        """Evict the pages that windows have left since the last step."""
        if 0 in self._tables:
            window = self._tables[0]
            stale = self._stale(window)
            if record is None:
                self._records.clear()
            elif stale:
                record.tables.append((window, window.before_trim(stale)))
            for row in stale:
                window.trim(row, self._window_low(self._tokens[row]))
        self._grown.clear()

    def _check_pages(self, what: str, table: PageTable, need: int, free: int) -> None:
        if need > free:
            window = table is self._tables.get(0)
            raise CacheFullError(
                f"PagedCache.{what}: needs {need} {table.pool.name} pages, and {free} of "
                f"{table.pool.size} are free; free a sequence, "
                f"{'give a step fewer tokens, ' if window else ''}or make the cache with a larger "
                f"{'window_pages' if window else 'pool_tokens'}"
            )

    def _check_owner(self, what: str) -> None:
        if self._brought:
            raise RuntimeError(
                f"PagedCache.{what}: the pages were brought; who brought them gives them out"
            )

    def _check_allocated(self, what: str, sequence: int) -> None:
        self._check_owner(what)
        if not 0 <= sequence < self.max_sequences or not self._live[sequence]:
            raise ValueError(
                f"PagedCache.{what}: sequence is {sequence}, wanted one that is allocated"
            )

    def check_rows(self, what: str, sequences: Sequence[int]) -> None:
        """Raise unless rows are distinct and, but for -1, in use.

        Raises:
            ValueError: naming the row.
        """
        rows = [row for row in sequences if row != -1]
        if len(set(rows)) < len(rows):
            raise ValueError(f"PagedCache.{what}: sequences are {rows}, wanted distinct ones")
        for i, row in enumerate(sequences):
            if row == -1:
                continue
            if self._brought and not 0 <= row < self.max_sequences:
                raise ValueError(
                    f"PagedCache.{what}: sequences[{i}] is {row}, wanted -1 to "
                    f"{self.max_sequences - 1}"
                )
            if not self._brought:
                self._check_allocated(what, row)

    def starts_of(self, sequences: Sequence[int]) -> list[int] | None:
        """Tokens of rows, 0 of -1; None with pools, where ``prepare`` knows them.

        Without pools steps need not have been announced: the lengths are read from the device, but
        for a GPU's, which would have to be waited for.
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
        return all(self._tokens[row] == held[row] + 1 for row in rows)

    def _check_step(
        self, sequences: Sequence[int], lengths: Sequence[int], starts: Sequence[int]
    ) -> None:
        if not len(sequences) == len(lengths) == len(starts):
            raise ValueError(
                f"PagedCache.prepare: {len(sequences)} sequences, {len(lengths)} lengths and "
                f"{len(starts)} starts, wanted as many of each"
            )
        self.check_rows("prepare", sequences)
        for i, (row, new, start) in enumerate(zip(sequences, lengths, starts, strict=True)):
            if new < 0:
                raise ValueError(f"PagedCache.prepare: lengths[{i}] is {new}, wanted >= 0")
            if row == -1:
                continue
            held = 0 if self._brought and start == 0 else self._tokens[row]
            # Without pools a step need not have been announced.
            if start != held and (start < held or self.pooled):
                raise ValueError(
                    f"PagedCache.prepare: starts[{i}] is {start}, wanted {held}: the tokens that "
                    f"sequence {row} was prepared for, and positions neither go back nor skip any"
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

    def check_tables(self) -> None:
        """Raise if a page table points outside its pool: for brought tables that were changed.

        Reads the tables back from the device, so use it for debugging, not for each step.

        Raises:
            ValueError: naming the layer, the table and the page.
        """
        check_layers(self.config, self.layers, self.size)

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
        rehearsed._tokens = list(self._tokens) if self.pooled else self.lengths.tolist()
        for begin in range(0, max(lengths), chunk):
            steps = [max(0, min(chunk, length - begin)) for length in lengths]
            rehearsed.prepare(sequences, steps, rehearsed._prepared(sequences))

    def check_model(self, config: ModelConfig, dtype: torch.dtype) -> None:
        """Raise unless a model of this configuration and dtype can use the cache.

        Raises:
            TypeError: if plain pages or the compressor state are of another dtype.
            ValueError: if the cache was made for other layers, dims or numerics.
        """
        if self._fits is not None and self._fits[0] is config and self._fits[1] == dtype:
            return
        if config is not self.config:
            for name, own, expected in _shaping(self.config, config):
                if own != expected:
                    raise ValueError(
                        f"PagedCache: made for {name} {own}, wanted {expected} as the model has"
                    )
        for i, layer in enumerate(self.layers):
            data = layer.window.data
            if layer.window.entry_format == "plain" and data.dtype != dtype:
                raise TypeError(
                    f"PagedCache: plain pages of layer {i} have dtype {_name(data.dtype)}, wanted "
                    f"{_name(dtype)} as the model's hidden states"
                )
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            if layer.state is not None and layer.state.dtype != wide:
                raise TypeError(
                    f"PagedCache: state of layer {i} has dtype {_name(layer.state.dtype)}, wanted "
                    f"{_name(wide)} for hidden states of {_name(dtype)}"
                )
        self._fits = config, dtype

    def advance(self, batch: Batch) -> None:
        """Set ``lengths`` of the batch's sequences to what they are after it.

        Entries with a negative sequence or without tokens are ignored.
        """
        if self._within is not None and self._records:
            self._records[-1].batch = batch
        new = batch.cu_seqlens.diff()
        self._set_lengths(batch, new, batch.starts + new)

    def nbytes(self) -> int:
        """Bytes of all tensors; a table that layers share counts once."""
        tensors = {id(self.lengths): self.lengths}
        for layer in self.layers:
            for tensor, table in layer.tensors():
                tensors[id(tensor)] = tensor
                if table is not None:
                    tensors[id(table)] = table
        return sum(t.numel() * t.element_size() for t in tensors.values())

    def bytes_per_sequence(self, tokens: int) -> dict[str, int]:
        """Bytes that a sequence of ``tokens`` tokens occupies between steps, over all layers.

        With pools and one token at a time; for fewer than 64 tokens after a chunk its window may
        hold a page more. Without pools a sequence occupies its pages for ``max_tokens`` always.

        Returns:
            Bytes of ``"window"``, ``"compressed"`` and ``"indexer"`` pages, which are what grows,
            and of the compressors' ``"state"``, the same for every length.

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


def _size(
    max_sequences: int,
    max_tokens: int,
    max_chunk: int | None,
    pool_tokens: int | None,
    window_pages: int | None,
) -> CacheSize:
    max_chunk = max_tokens if max_chunk is None else max_chunk
    for name, value in (
        ("max_sequences", max_sequences),
        ("max_tokens", max_tokens),
        ("max_chunk", max_chunk),
        ("pool_tokens", pool_tokens),
        ("window_pages", window_pages),
    ):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"PagedCache: {name} is {value!r}, wanted an int")
        if value is not None and value < 1:
            raise ValueError(f"PagedCache: {name} is {value}, wanted >= 1")
    if window_pages is not None and pool_tokens is None:
        raise ValueError(
            f"PagedCache: window_pages is {window_pages} and pool_tokens None, wanted both: pools "
            "are of window pages and compressed pages alike"
        )
    return CacheSize(
        max_sequences, max_tokens, min(max_chunk, max_tokens), pool_tokens, window_pages
    )


def _shaping(*configs: ModelConfig) -> list[tuple[Any, ...]]:
    """Return, by name and for each configuration, what gives a cache its shape and its content."""
    dims = ("head_dim", "qk_rope_head_dim", "index_head_dim", "sliding_window")
    names = ("num_hidden_layers", *dims, "numerics")
    rows = [(name, *(getattr(c, name) for c in configs)) for name in names]
    rates = (tuple(c.compress_rate(i) for i in range(c.num_hidden_layers)) for c in configs)
    return [*rows, ("compression rates", *rates)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
