"""Room for the new tokens of a step: pages that windows have left are evicted, others are taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dsv4.kv_cache.page_tables import Growth, PageTable, to_device
from dsv4.kv_cache.rollback import Rollback
from dsv4.kv_cache.row_counts import OpenStep, RowCount
from dsv4.kv_cache.step_record import StepRecord


class StepPreparation(Rollback):
    """The pages of a cache's sequences, which change before each step."""

    def prepare(
        self,
        sequences: Sequence[int],
        lengths: Sequence[int],
        starts: Sequence[int] | None = None,
        *,
        certain: Sequence[int] | None = None,
    ) -> None:
        """Make room for a step; call it before the step, on the host, in the order of the steps.

        A cache with pools needs it before every step. It evicts the pages that windows have left,
        takes the pages that new tokens need, and changes the page tables on the device in place. A
        cache without pools, or of the caller's tensors, only checks the numbers. In the latter, a
        sequence that starts at 0 is a new one.

        Args:
            sequences: Rows of the cache, distinct; -1 for padding.
            lengths: New tokens of each, 0 and up.
            starts: Tokens that each has already, which confirms its open steps; None: as many as
                it was prepared for, which a cache of the caller's tensors does not know.
            certain: New tokens of each that are certainly kept, if the device decides how many are
                (``advance``); None: all. There may be ``rollback`` others, also beyond
                ``max_tokens``. Such a step is open until ``confirm``: further steps may be
                prepared, and reserve pages for as many tokens as there may be.

        Raises:
            CacheFullError: if a pool has too few pages; nothing is changed.
            ValueError: if a row is not allocated or occurs twice, a sequence would have too many
                tokens, in the chunk or in all, or starts before its end, or ``certain`` is not from
                ``lengths`` less ``rollback`` to ``lengths``.
        """
        if self._within is None:
            self._records.clear()
        known = starts is not None
        if starts is None:
            if self._brought:
                raise ValueError("PagedCache.prepare: starts is None, wanted it with brought pages")
            starts = self._prepared(sequences)
        self._check_step(sequences, lengths, starts)
        least = list(lengths) if certain is None else list(certain)
        self._check_certain(sequences, lengths, least)
        self.check(lengths, starts if known else self._least(sequences, starts), least)
        steps = [
            (row, start, start + new)
            for row, new, start in zip(sequences, lengths, starts, strict=True)
            if row >= 0 and new > 0
        ]
        self._check_repeated(steps)
        counts = {row: self._counts[row] for row, _, _ in steps}
        record = StepRecord(counts, frozenset(self._grown))
        try:
            for row, start, _ in steps:
                if known and self._counts[row].open:
                    self._counts[row] = self._counts[row].at(start)
            self._grow(steps, record, dict(zip(sequences, least, strict=True)))
        except BaseException:
            self._take_back(record)
            self._write_back(record)
            raise
        self._records.append(record)

    def _least(self, sequences: Sequence[int], starts: Sequence[int]) -> list[int]:
        """Return the fewest tokens that each row may start with."""
        return [
            self._counts[row].low if row >= 0 and self._counts[row].open else start
            for row, start in zip(sequences, starts, strict=True)
        ]

    def _grow(
        self,
        steps: Sequence[tuple[int, int, int]],
        record: StepRecord,
        certain: Mapping[int, int],
    ) -> None:
        """Change tables and counts for a step, and store the old ones in ``record``.

        ``certain``: new tokens of each row that are certainly kept.
        """
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
        for row, start, end in steps:
            count = RowCount() if self._brought and start == 0 else self._counts[row]
            if self.pooled:  # entries that the window had left are overwritten from now on
                count = replace(count, floor=count.low)
            self._counts[row] = count.after(start, OpenStep(certain[row], end - start))
            self._grown.add(row)

    def _growths(self, ratio: int, steps: Sequence[tuple[int, int, int]]) -> list[Growth]:
        grow = self._tables[ratio].growth
        if ratio:  # entries of tokens beyond max_tokens are skipped
            growths = [grow(row, 0, min(end, self.max_tokens) // ratio) for row, _, end in steps]
        else:
            starts = self._least([row for row, _, _ in steps], [start for _, start, _ in steps])
            growths = [
                grow(row, self._window_low(start), end)
                for (row, _, end), start in zip(steps, starts, strict=True)
            ]
        return [growth for growth in growths if growth is not None]

    def _stale(self, window: PageTable) -> dict[int, dict[int, int]]:
        """Return pages that windows have left since the last step, by row and number."""
        stale = {
            row: window.stale(row, self._window_low(self._counts[row].low)) for row in self._grown
        }
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
                window.trim(row, self._window_low(self._counts[row].low))
            for row in self._grown:
                self._counts[row] = replace(self._counts[row], floor=self._counts[row].low)
        self._grown.clear()

    def _copy_pages(self, ratio: int, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages of every layer of one ratio, 0 for the window of all."""
        if not copies or not self.layers:
            return
        source, target = to_device(copies, self.lengths.device).unbind(1)
        for layer in self.layers:
            for data in layer.pools(ratio):
                data[target] = data[source]
