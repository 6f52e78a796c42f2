"""Cache rows that are kept so that prompts which begin alike share their pages.

A row can be forked only where it ends, because its window and its compressor state are those of its
last token. So rows are kept at two points: where a sequence ended, and at block boundaries up to
which at least two prompts agree. Prefill stops at such a boundary to keep the row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dsv4.kv_cache.paged_cache import CacheFullError, PagedCache

BLOCK = 256  # tokens that a page of compressed entries stands for, at every ratio that divides it
_MOST_SEEN = 1 << 17  # blocks of prompts that are remembered, some 20 MB


@dataclass(eq=False)
class CachedRow:
    """A cache row that no request owns, with the tokens it holds."""

    row: int
    tokens: tuple[int, ...]


class PrefixCache:
    """The kept rows, least recently used first.

    Attributes:
        capacity: Most rows to keep; 0 turns the prefix cache off.
        block: Fewest tokens worth keeping, and the grid of the boundaries.
        grid: Rows are kept at multiples of it alone, and not where a sequence ended, because
            answers are computed differently from prompts; None: no such limit.
    """

    def __init__(
        self, cache: PagedCache, capacity: int, block: int = BLOCK, grid: int | None = None
    ) -> None:
        self.capacity = capacity
        self.block = block
        self.grid = grid
        self._cache = cache
        self._rows: list[CachedRow] = []
        self._seen: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, tokens: Sequence[int]) -> CachedRow | None:
        """Return the longest kept row whose tokens are a proper prefix of ``tokens``."""
        longest: CachedRow | None = None
        for cached in self._rows:
            length = len(cached.tokens)
            longer = longest is None or length > len(longest.tokens)
            if not longer or length >= len(tokens) or tokens[length - 1] != cached.tokens[-1]:
                continue
            if tuple(tokens[:length]) == cached.tokens:
                longest = cached
        return longest

    def fork(self, cached: CachedRow) -> int:
        """Fork a new row that continues ``cached``.

        Raises:
            CacheFullError: if a pool has too few pages; nothing is changed.
        """
        row = self._cache.fork(cached.row)
        self._rows.remove(cached)
        self._rows.append(cached)
        return row

    def remember(self, prompt: Sequence[int]) -> None:
        """Count the blocks of a prompt, for ``boundary``."""
        if not self.capacity:
            return
        if len(self._seen) > _MOST_SEEN:
            self._seen.clear()
        self._seen.update(self._chain(prompt))

    def boundary(self, prompt: Sequence[int]) -> int:
        """Return the tokens of ``prompt`` up to the last block boundary shared with another prompt.

        At least one token of the prompt comes after it. 0: there is none. Blocks are compared by
        hash: a collision would only keep a row that nobody uses.
        """
        agreed = 0
        if self.capacity:
            for i, name in enumerate(self._chain(prompt)):
                end = (i + 1) * self.block
                if self._seen[name] < 2 or end >= len(prompt):
                    break
                agreed = end
        return agreed if self.grid is None else agreed // self.grid * self.grid

    def _chain(self, prompt: Sequence[int]) -> Iterator[int]:
        """Return a hash of the prompt up to each block boundary."""
        name = 0
        for end in range(self.block, len(prompt) + 1, self.block):
            name = hash((name, tuple(prompt[end - self.block : end])))
            yield name

    def snapshot(self, row: int, tokens: Sequence[int]) -> None:
        """Keep a copy of a row that holds ``tokens`` and is still used, if there is room."""
        if not self.capacity or self._holds(tokens):
            return
        self._shrink(self.capacity - 1)
        try:
            copied = self._cache.fork(row)
        except CacheFullError:
            return
        self._rows.append(CachedRow(copied, tuple(tokens)))

    def keep(self, row: int, tokens: Sequence[int]) -> None:
        """Keep a row that no request owns any more, or free it."""
        worth = self.capacity and len(tokens) >= self.block and self.grid is None
        if not worth or self._holds(tokens):
            self._cache.free(row)
            return
        self._shrink(self.capacity - 1)
        self._rows.append(CachedRow(row, tuple(tokens)))

    def evict(self, keep: CachedRow | None = None) -> bool:
        """Free the least recently used row but ``keep``; return whether there was one."""
        for cached in self._rows:
            if cached is not keep:
                self._rows.remove(cached)
                self._cache.free(cached.row)
                return True
        return False

    def clear(self) -> None:
        """Free all kept rows."""
        self._shrink(0)

    def forget(self) -> None:
        """Drop the kept rows without freeing them: the cache was cleared."""
        self._rows.clear()

    def _holds(self, tokens: Sequence[int]) -> bool:
        return any(cached.tokens == tuple(tokens) for cached in self._rows)

    def _shrink(self, count: int) -> None:
        while len(self._rows) > count:
            self.evict()
