"""Rows of a paged cache, which sequences get, give back, and copy to each other."""

from __future__ import annotations

from dsv4.kv_cache.page_tables import CacheFullError
from dsv4.kv_cache.row_counts import RowCount
from dsv4.kv_cache.step_preparation import StepPreparation


class SequenceRows(StepPreparation):
    """The rows of a cache, each free or of one sequence."""

    def allocate(self) -> int:
        """Allocate the lowest free row for a new, empty sequence.

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
        self._empty(sequence)
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
        self._empty(sequence)

    def _empty(self, sequence: int) -> None:
        self.lengths[sequence] = 0
        self._tops[sequence] = 0

    def clear(self) -> None:
        """Free every row and page, also after an interrupted call.

        Raises:
            RuntimeError: if the pages are the caller's.
        """
        self._check_owner("clear")
        for table in self._tables.values():
            table.clear()
        self._records.clear()
        self._within = None
        self._grown.clear()
        self._counts = [RowCount()] * self.max_sequences
        self._live = [False] * self.max_sequences
        self.lengths.zero_()
        self._tops.zero_()

    def _release(self, sequence: int) -> None:
        self._outside("free, reset or copy")
        self._records.clear()
        self._counts[sequence] = RowCount()
        self._grown.discard(sequence)
        for table in self._tables.values():
            table.release(sequence)
            table.flush()

    def fork(self, source: int) -> int:
        """Make a copy of a sequence, so that both continue independently.

        With pools, full pages of compressed entries are shared, because they are never written
        again, not even after a rollback; windows, open pages and compressor state are copied.
        Without pools everything is copied.

        Returns:
            The row of the copy.

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
        """Replace the tokens of ``target`` by those of ``source``; see ``fork``.

        After any other error ``target`` has no tokens, and ``source`` is unchanged.

        Raises:
            CacheFullError: if a pool has too few pages; nothing is changed.
            ValueError: if either is not allocated.
        """
        self._check_allocated("copy", source)
        self._check_allocated("copy", target)
        if source == target:
            return
        self._trim()
        count = self._counts[source]
        # Of open steps the certain tokens alone are never written again.
        fewest = min(count.reach(self.rollback), count.low)
        sealed = {
            ratio: fewest // ratio // table.page_size if ratio else 0
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
            self._tops[target] = self._tops[source]
            self._counts[target] = self._counts[source]
        except BaseException:
            self.reset(target)
            raise

    def _copy_rows(self, source: int, target: int) -> None:
        """Copy the tensors of a row that are in no pool."""
        for layer in self.layers:
            for tensor, pages in layer.tensors():
                if pages is None:
                    tensor[target] = tensor[source].clone()
                elif not self.pooled:
                    tensor[pages[target]] = tensor[pages[source]]
