"""Steps of a cache that are undone if anything raises."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from dsv4.config import ModelConfig
from dsv4.kv_cache.batch import Batch
from dsv4.kv_cache.layer_cache import LayerCache, State
from dsv4.kv_cache.page_tables import Growth, PageTable, to_device
from dsv4.kv_cache.row_counts import RowCount
from dsv4.kv_cache.step_record import StepRecord, save


class AtomicSteps:
    """The records by which a cache takes back its latest steps.

    Counts and page tables are undone on the host by ``StepRecord``. A step of one token, and of
    ``rollback`` more, overwrites nothing that it would read again when it is repeated; longer steps
    save what they overwrite.
    """

    config: ModelConfig
    layers: list[LayerCache]
    lengths: torch.Tensor
    _tables: Mapping[int, PageTable]
    _states: list[State]
    _counts: list[RowCount]  # of each sequence
    _grown: set[int]  # sequences of the last step, whose windows may have moved on
    _records: list[StepRecord]  # of the latest step, or of all within ``atomic``
    _within: set[int] | None  # within ``atomic``: its rows of several steps

    @contextmanager
    def atomic(self, sequences: Sequence[int] = (), lengths: Sequence[int] = ()) -> Iterator[None]:
        """Undo the steps within if anything raises, ``KeyboardInterrupt`` too.

        A step is ``prepare``, the work of all layers, ``advance``, and everything else that has to
        succeed. After an error the cache is as before: the caller can repeat the call, and gets the
        bits of a run without the error. Steps of a captured graph are undone with ``undo``.

        Args:
            sequences: Rows of which several steps are made within.
            lengths: New tokens of each in all steps together.
        """
        self._outside("atomic")
        self._records.clear()
        self._within = set(sequences)
        try:
            self._save_windows(sequences, lengths)
            yield
        except BaseException:
            self._undo_all()
            raise
        finally:
            self._within = None
            self._records.clear()

    def undo(self, batch: Batch | None = None) -> bool:
        """Undo the latest ``prepare``, whose step was not completed.

        Call it at once after the error. Nothing happens if there is nothing to undo: it was undone,
        or a row was freed, reset, copied, rolled back or confirmed since.

        Args:
            batch: The step's batch, if ``advance`` may have run.

        Returns:
            Whether there was a step to undo.
        """
        self._outside("undo")
        if not self._records:
            return False
        self._records[-1].batch = batch
        self._undo_all()
        return True

    def _outside(self, what: str) -> None:
        if self._within is not None:
            raise RuntimeError(f"PagedCache.{what}: called within atomic, wanted outside")

    def _undo_all(self) -> None:
        for record in reversed(self._records):
            self._take_back(record)
        if self.lengths.is_cuda and not torch.cuda.is_current_stream_capturing():
            # Layers also write on other streams.
            torch.cuda.synchronize(self.lengths.device)
        for record in reversed(self._records):
            self._write_back(record)
        self._records.clear()

    def _take_back(self, record: StepRecord) -> None:
        """Undo on the host what a step has changed, also of a part of a step."""
        for table, before in reversed(record.tables):
            table.restore(before)
        for row, count in record.counts.items():
            self._counts[row] = self._counts[row].undone(count)
        self._grown = set(record.grown)

    def _write_back(self, record: StepRecord) -> None:
        """Undo it on the device."""
        for table in self._tables.values():
            table.flush()
        for saved in record.saved:
            saved.restore()
        if record.batch is not None:
            new = record.batch.cu_seqlens.diff()
            self._set_lengths(record.batch, new, record.batch.starts)

    def _save_windows(self, sequences: Sequence[int], lengths: Sequence[int]) -> None:
        """Save the windows and states of rows with tokens, which several steps overwrite."""
        held = self._prepared(sequences) if self._tables else self.lengths.tolist()
        if not self._tables:
            held = [held[row] for row in sequences]
        steps = [
            (row, start, start + new)
            for row, new, start in zip(sequences, lengths, held, strict=True)
            if row >= 0 and start > 0 and new > 0
        ]
        if not steps:
            return
        record = StepRecord({}, frozenset(self._grown))
        self._save_states(steps, record)
        pages: dict[tuple[int, int], torch.Tensor] = {}
        for layer in self.layers:
            key = id(layer.window_table), layer.window.page_size
            if key not in pages:
                pages[key] = self._window_pages(layer, steps)
            record.saved += save([layer.window.data], 0, pages[key])
        self._records.append(record)

    def _window_pages(
        self, layer: LayerCache, steps: Sequence[tuple[int, int, int]]
    ) -> torch.Tensor:
        """Return the pages of the raw entries that the first token of each step sees."""
        size, columns = layer.window.page_size, layer.window_table.shape[1]
        cells = [
            (row, number % columns)
            for row, start, _ in steps
            for number in range(self._window_low(start) // size, -(-start // size))
        ]
        rows, column = to_device(cells, layer.window_table.device).unbind(1)
        return layer.window_table[rows, column].clamp(min=0).to(torch.int64)

    def _check_repeated(self, steps: Sequence[tuple[int, int, int]]) -> None:
        if self._within is None:
            return
        for row, _, _ in steps:
            if row not in self._within and any(row in record.counts for record in self._records):
                raise RuntimeError(
                    f"PagedCache.prepare: a second step of row {row} within atomic, wanted it "
                    "among the sequences of atomic"
                )

    def _save_states(self, steps: Sequence[tuple[int, int, int]], record: StepRecord) -> None:
        """Save states whose slots a step of many tokens overwrites."""
        if all(end - start == 1 for _, start, end in steps):
            return
        for state in self._states:
            rows = [row for row, start, end in steps if state.loses(start, end)]
            record.saved += save([state.tensor], 1, rows)

    def _save_pages(self, ratio: int, growths: Sequence[Growth], record: StepRecord) -> None:
        """Save pages that must have their old content when their table is restored."""
        overwritten = [self._tables[ratio].overwrites(growth) for growth in growths]
        pages = [page for page in overwritten if page is not None]
        record.saved += save(
            [data for layer in self.layers for data in layer.pools(ratio)], 0, pages
        )

    def _prepared(self, rows: Sequence[int]) -> list[int]:
        """Return the tokens that each row was prepared for, 0 for -1."""
        return [self._counts[row].high if 0 <= row < len(self._counts) else 0 for row in rows]

    def _window_low(self, tokens: int) -> int:
        """Return the first position that the token, or a draft, at ``tokens`` sees raw."""
        return max(0, tokens - self.config.raw_history)

    def _set_lengths(self, batch: Batch, new: torch.Tensor, lengths: torch.Tensor) -> None:
        row = batch.sequences.clamp(min=0)
        counts = (batch.sequences >= 0) & (new > 0)
        # Added as a difference, so that ignored entries change nothing, whatever their row is.
        change = torch.where(counts, lengths - self.lengths[row], 0)
        self.lengths.index_add_(0, row, change)
