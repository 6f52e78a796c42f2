"""Pools and page tables: against what every sequence wrote, entry by entry."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4.kv_cache.page_tables import PagePool, PageTable

PAGE = 4  # entries
ROWS = 3


class Memory:
    """Sequences of numbered entries in pages, a window of them alive, through a ``PageTable``."""

    def __init__(self, pages: int, window: int | None, most: int, shuffle: list[int]) -> None:
        self.window = window
        columns = -(-((window - 1 + most) if window else 200) // PAGE)
        table = torch.full((ROWS, columns), -1)
        self.pages = PageTable(PagePool("test", pages), PAGE, table)
        self.pages.pool._free = list(shuffle)
        self.data = torch.full((pages, PAGE), -1)
        self.history: list[list[int]] = [[] for _ in range(ROWS)]
        self.next = 0

    def low(self, row: int) -> int:
        length = len(self.history[row])
        return max(0, length - self.window + 1) if self.window else 0

    def copy(self, copies: list[tuple[int, int]]) -> None:
        for source, target in copies:
            self.data[target] = self.data[source].clone()

    def append(self, row: int, count: int) -> bool:
        """Write ``count`` new entries as a step does; False if the pool is full."""
        low, start = self.low(row), len(self.history[row])
        self.pages.trim(row, low)
        growth = self.pages.growth(row, low, start + count)
        free = self.pages.pool.free
        if growth is not None and growth.pages > free:
            return False
        if growth is not None:
            self.copy(self.pages.grow(growth))
            assert self.pages.pool.free == free - growth.pages
        self.pages.flush()
        new = list(range(self.next, self.next + count))
        self.next += count
        self.history[row] += new
        for entry in range(start, start + count):
            self.data[self.slot(row, entry)] = self.history[row][entry]
        self.check(row, low)
        return True

    def fork(self, source: int, target: int) -> bool:
        self.pages.trim(source, self.low(source))
        sealed = 0 if self.window else len(self.history[source]) // PAGE
        if self.pages.fork_pages(source, sealed) > self.pages.pool.free:
            return False
        self.pages.release(target)
        self.copy(self.pages.fork(source, target, sealed))
        self.pages.flush()
        self.history[target] = list(self.history[source])
        return True

    def slot(self, row: int, entry: int) -> tuple[int, int]:
        page = int(self.pages.table[row, entry // PAGE % self.pages.columns])
        assert 0 <= page < self.pages.pool.size
        return page, entry % PAGE

    def check(self, row: int, low: int) -> None:
        for entry in range(low, len(self.history[row])):
            assert self.data[self.slot(row, entry)] == self.history[row][entry]


ROW = st.integers(0, ROWS - 1)
# Steps of one token in a row, then of some: where a page serves both ends of a window, and parts.
COUNTS = st.lists(st.sampled_from([1, 1, 1, 1, 2, 5, 9]), min_size=1, max_size=12)
ACTIONS = st.one_of(
    st.tuples(st.just("append"), ROW, COUNTS),
    st.tuples(st.just("fork"), ROW, ROW),
    st.tuples(st.just("free"), ROW, ROW),
)


@given(
    st.lists(ACTIONS, max_size=9),
    st.one_of(st.sampled_from([None, 4, 8, 12]), st.integers(1, 17)),
    st.sampled_from([1, 2, 5, 9]),
    st.permutations(range(14)),
)
def test_every_live_entry_is_where_the_table_says(actions, window, most, shuffle) -> None:
    """Growth by one and by many, forks, frees and full pools, with and without a window."""
    memory = Memory(14, window, most, list(shuffle))
    for action, row, other in actions:
        before = memory.pages.table.clone()
        if action == "append":
            done = True
            for count in other:
                if done:
                    before = memory.pages.table.clone()
                    done = memory.append(row, min(count, most))
        elif action == "fork":
            done = row == other or memory.fork(row, other)
        else:
            memory.pages.release(row)
            memory.pages.flush()
            memory.history[row] = []
            done = True
        if not done:
            assert torch.equal(memory.pages.table, before)
        for row_index in range(ROWS):
            memory.check(row_index, memory.low(row_index))
    for row in range(ROWS):
        memory.pages.release(row)
    memory.pages.flush()
    assert memory.pages.pool.free == 14
    assert bool((memory.pages.table == -1).all())


@given(st.integers(1, 5), st.integers(0, 60))
def test_a_window_of_whole_pages_occupies_no_page_more(pages: int, start: int) -> None:
    """One token at a time, from the first on; after a chunk, once its pages have been left."""
    memory = Memory(40, pages * PAGE, 61, list(range(40)))
    if start:
        memory.append(0, start)
    for _ in range(4 * PAGE * pages):
        memory.append(0, 1)
        length = len(memory.history[0])
        if not start or length >= start + PAGE * pages:
            assert memory.pages.own_pages(0) == min(pages, -(-length // PAGE))
        else:
            assert memory.pages.own_pages(0) <= pages + 1 + -(-start // PAGE)


def test_forks_share_the_pages_that_nobody_writes_again() -> None:
    memory = Memory(20, None, 9, list(range(20)))
    memory.append(0, 4 * PAGE + 1)
    assert memory.pages.pool.free == 15
    memory.fork(0, 1)
    assert memory.pages.pool.free == 14
    assert torch.equal(memory.pages.table[0, :4], memory.pages.table[1, :4])
    assert memory.pages.table[0, 4] != memory.pages.table[1, 4]
    memory.pages.release(0)
    assert memory.pages.pool.free == 15
    memory.pages.release(1)
    assert memory.pages.pool.free == 20


@pytest.mark.gpu
def test_a_table_changes_without_waiting() -> None:
    pages = PageTable(PagePool("test", 9), PAGE, torch.full((2, 9), -1, device="cuda"))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pages.grow(pages.growth(1, 0, 11))
        pages.flush()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pages.table[1].tolist() == [0, 1, 2] + [-1] * 6
