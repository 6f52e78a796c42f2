"""Bookkeeping of pages: pools with reference counts, and the tables on the device.

All of it runs on the host, between steps. A table is changed in place, so a captured graph finds
the new pages in it.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch


class CacheFullError(RuntimeError):
    """The cache is full; nothing was changed. Free a sequence, or make the cache larger."""


class PagePool:
    """Pages ``0 .. size - 1``, each free or held by one or more users.

    Attributes:
        name: Name in messages.
        size: Pages in all.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._users = [0] * size

    def clear(self) -> None:
        """Make every page free."""
        self._free = list(range(self.size - 1, -1, -1))
        self._users = [0] * self.size

    @property
    def free(self) -> int:
        """The number of pages that nobody holds."""
        return len(self._free)

    def last_free(self, count: int) -> tuple[int, ...]:
        """Return the pages of the next ``count`` calls of ``take``, in the order of the list."""
        return tuple(self._free[len(self._free) - count :])

    def restore(self, record: TableRecord) -> None:
        """Restore free pages and users to their state when ``record`` was made."""
        self._free[record.free_before :] = record.taken
        for page, users in record.users.items():
            self._users[page] = users

    def users(self, page: int) -> int:
        """Return the number of users of a page."""
        return self._users[page]

    def take(self) -> int:
        """Take a free page, which then has one user. There must be one."""
        page = self._free.pop()
        self._users[page] = 1
        return page

    def share(self, page: int) -> int:
        """Count one user of a page more, and return the page."""
        self._users[page] += 1
        return page

    def give_back(self, page: int) -> None:
        """Count one user of a page less."""
        self._users[page] -= 1
        if not self._users[page]:
            self._free.append(page)


@dataclass(frozen=True)
class Growth:
    """The pages that a sequence needs before a step.

    Attributes:
        row: The sequence.
        first: Page, by its number within the sequence, of the first entry that the step reads.
        end: One past the page of the last entry that it writes.
        shared: Whether the last page continues in the place of the first.
        split: Whether a page that did so must leave the place of the first.
        pages: Number of pages that it takes from the pool.
    """

    row: int
    first: int = 0
    end: int = 0
    shared: bool = False
    split: bool = False
    pages: int = 0


@dataclass(frozen=True)
class HeldRecord:
    """The recorded pages of a sequence.

    Attributes:
        first: Number of its first page.
        end: One past that of its last.
        twin: Number of the page in the place of the first, or None.
        pages: Pages that are about to be released or to move, by number.
    """

    first: int
    end: int
    twin: int | None
    pages: dict[int, int]


@dataclass(frozen=True)
class TableRecord:
    """The state that is needed to undo a change of a table; see ``PageTable.restore``.

    Attributes:
        free_before: Free pages of the pool that the change does not take.
        taken: Pages that the change takes.
        users: How many hold a page, of each page whose number changes.
        held: Pages of the sequences that change, by row.
    """

    free_before: int
    taken: tuple[int, ...]
    users: dict[int, int]
    held: dict[int, HeldRecord]


@dataclass
class _Held:
    """Pages of a sequence: numbers ``first .. end - 1``; ``twin`` is in the place of the first."""

    pages: dict[int, int] = field(default_factory=dict)
    first: int = 0
    end: int = 0
    twin: int | None = None


@dataclass
class PageTable:
    """Page tables of some sequences: entry e of a sequence lies on its page ``e // page_size``.

    A sequence may release its first pages, and then has a ring: page q is in column ``q %
    columns``. If a step needs entries from the middle of the first page to before the middle of the
    last, both lie in one page of the pool. A window that is a multiple of the page size therefore
    occupies only as many pages as its entries fill, not one more.

    Attributes:
        pool: Pool of pages.
        page_size: Entries per page.
        table: ``[S, columns]`` int64 on the device; -1 where a sequence has no page.
    """

    pool: PagePool
    page_size: int
    table: torch.Tensor
    _held: list[_Held] = field(init=False)
    _changes: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._held = [_Held() for _ in range(self.table.shape[0])]

    def rehearsed(self) -> PageTable:
        """Return a copy without a table on a device, to find what steps would need."""
        twin = PageTable(copy.deepcopy(self.pool), self.page_size, self.table.to("meta"))
        twin._held = copy.deepcopy(self._held)
        return twin

    @property
    def columns(self) -> int:
        """The pages that a sequence can hold."""
        return self.table.shape[1]

    def stale(self, row: int, low: int) -> dict[int, int]:
        """Return pages, by number, that only hold entries before ``low``."""
        held = self._held[row]
        end = min(held.end, low // self.page_size)
        return {q: held.pages[q] for q in range(held.first, end)} if held.first < end else {}

    def freed_by(self, stale: Sequence[dict[int, int]]) -> int:
        """Return how many pages become free if sequences release these."""
        counts = Counter(page for pages in stale for page in pages.values())
        return sum(self.pool.users(page) == count for page, count in counts.items())

    def before_trim(self, stale: Mapping[int, dict[int, int]]) -> TableRecord:
        """Return the record that undoes ``trim`` of rows, given their stale pages."""
        pages = {page for numbers in stale.values() for page in numbers.values()}
        users = {page: self.pool.users(page) for page in pages}
        held = {row: self._record(row, pages) for row, pages in stale.items()}
        return TableRecord(self.pool.free, (), users, held)

    def before_growth(self, growths: Sequence[Growth]) -> TableRecord:
        """Return the record that undoes ``grow`` of these."""
        count = sum(growth.pages for growth in growths)
        taken = self.pool.last_free(count)
        users, held = dict.fromkeys(taken, 0), {}
        for row in (growth.row for growth in growths):
            now = self._held[row]
            moving = {q: now.pages[q] for q in (now.first, now.twin) if q in now.pages}
            users.update({page: self.pool.users(page) for page in moving.values()})
            held[row] = self._record(row, moving)
        return TableRecord(self.pool.free - count, taken, users, held)

    def _record(self, row: int, pages: dict[int, int]) -> HeldRecord:
        held = self._held[row]
        return HeldRecord(held.first, held.end, held.twin, pages)

    def restore(self, record: TableRecord) -> None:
        """Undo the latest change, made after ``record``; ``flush`` writes it to the device.

        The change may have been interrupted. Changes are undone in reverse order.
        """
        self.pool.restore(record)
        for row, old in record.held.items():
            now = self._held[row].pages
            pages = {q: page for q, page in now.items() if q < old.end} | old.pages
            self._held[row] = _Held(pages, old.first, old.end, old.twin)
            standing = {q % self.columns: pages[q] for q in sorted(pages)}
            for q in (*(q for q in now if q >= old.end), *old.pages):
                self._changes[row, q % self.columns] = standing.get(q % self.columns, -1)

    def overwrites(self, growth: Growth) -> int | None:
        """Return the page of the pool that a step writes and whose content an undo must restore.

        This is a page that leaves the place of the first, while another takes that place.
        """
        if not (growth.split and growth.shared):
            return None
        held = self._held[growth.row]
        assert held.twin is not None
        return held.pages[held.twin]

    def trim(self, row: int, low: int) -> None:
        """Release the pages that only hold entries before ``low``."""
        held = self._held[row]
        while held.first < min(held.end, low // self.page_size):
            self.pool.give_back(held.pages.pop(held.first))
            if held.first + self.columns >= held.end:
                self._changes[row, held.first % self.columns] = -1
            held.first += 1
            held.twin = None

    def growth(self, row: int, low: int, end: int) -> Growth | None:
        """Return what a step needs that reads entries from ``low`` and writes up to ``end``.

        A sequence that holds pages holds that of ``low``; ``trim`` got the same ``low``. None means
        nothing, as in most steps of one token.
        """
        held, size = self._held[row], self.page_size
        last = (end - 1) // size
        if last < held.end and held.twin is None:
            return None
        first = low // size
        new = last + 1 - max(held.end, first)
        meets = (end - 1) % size >= low % size
        split = held.twin is not None and (held.twin < last or (held.twin == last and meets))
        shared = new > 0 and first < held.end and not meets
        if new <= 0 and not split:
            return None
        return Growth(row, first, last + 1, shared, split, max(0, new) - shared + split)

    def grow(self, growth: Growth) -> list[tuple[int, int]]:
        """Take the pages, which must be there.

        Returns:
            Pages of the pool whose bytes must be copied, and their targets.
        """
        row, held, copies = growth.row, self._held[growth.row], []
        if growth.split and held.twin is not None:
            page = self.pool.take()
            copies.append((held.pages[held.twin], page))
            self.pool.give_back(held.pages[held.twin])
            self._put(row, held.twin, page)
            held.twin = None
        if not held.pages:
            held.first = held.end = growth.first
        while held.end < growth.end:
            if growth.shared and held.end == growth.end - 1:
                held.twin = held.end
                self._put(row, held.end, self.pool.share(held.pages[held.first]))
            else:
                self._put(row, held.end, self.pool.take())
        return copies

    def own_pages(self, row: int) -> int:
        """Return how many pages become free if the sequence gives back all of its own."""
        counts = Counter(self._held[row].pages.values())
        return sum(self.pool.users(page) == count for page, count in counts.items())

    def fork_pages(self, source: int, sealed: int) -> int:
        """Return how many pages ``fork`` takes from the pool."""
        return len({page for q, page in self._held[source].pages.items() if q >= sealed})

    def fork(self, source: int, target: int, sealed: int) -> list[tuple[int, int]]:
        """Give ``target``, which holds no pages, the pages of ``source``.

        Pages before number ``sealed`` are never written again and are shared; the others are new.

        Returns:
            Pages of the pool whose bytes must be copied, and their targets.
        """
        held, copies = self._held[source], dict[int, int]()
        new = self._held[target] = _Held({}, held.first, held.first, held.twin)
        for q in range(held.first, held.end):
            page = held.pages[q]
            if q < sealed:
                page = self.pool.share(page)
            elif page in copies:
                page = self.pool.share(copies[page])
            else:
                copies[page] = page = self.pool.take()
            self._put(target, q, page)
        assert new.end == held.end
        return list(copies.items())

    def release(self, row: int) -> None:
        """Release all pages of a sequence."""
        for q, page in self._held[row].pages.items():
            self.pool.give_back(page)
            self._changes[row, q % self.columns] = -1
        self._held[row] = _Held()

    def clear(self) -> None:
        """Release all pages of all sequences, without reading who holds which."""
        self.pool.clear()
        self._held = [_Held() for _ in self._held]
        self._changes.clear()
        self.table.fill_(-1)

    def flush(self) -> None:
        """Write changes to the table on the device, in stream order and without waiting."""
        if not self._changes:
            return
        changes = [[row, column, page] for (row, column), page in self._changes.items()]
        rows, columns, pages = to_device(changes, self.table.device).unbind(1)
        self.table.index_put_((rows, columns), pages)
        self._changes.clear()

    def _put(self, row: int, q: int, page: int) -> None:
        held = self._held[row]
        held.pages[q] = page
        held.end = max(held.end, q + 1)
        self._changes[row, q % self.columns] = page


def to_device(values: Sequence[object], device: torch.device) -> torch.Tensor:
    """Return integers of the host as an int64 tensor, without waiting for a GPU."""
    host = torch.tensor(values, dtype=torch.int64, device="cpu")
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
