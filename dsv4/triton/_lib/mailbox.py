"""Write chunks to the mailboxes of all ranks, wait for chunks, and add slots in rank order.

Layout, and why no slot is overwritten too early: ``dsv4/parallel/mailboxes.py``.
Memory order: a thread's stores to a slot come before the program's barrier, the barrier before a
fence at system scope and the store of a flag (together a release); an acquiring load of that flag
comes before the reader's barrier, which comes before its loads of the slot. Stores and loads of
slots themselves are weak.

In Triton's interpreter programs run one after another, and nothing can be waited for: there all
ranks push before any of them reads, so a flag that is not there yet is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from dsv4.parallel import mailboxes
from dsv4.parallel.mailboxes import Mailbox
from dsv4.triton._lib.numerics import INTERPRETED, narrow, widen

CHUNK = tl.constexpr(mailboxes.CHUNK)
GENERATIONS = tl.constexpr(mailboxes.GENERATIONS)
# Calls are counted up to here and then from 1 again: a multiple of the generations, so that their
# order stays, and reached after a day of decoding.
_LAST_CALL = tl.constexpr(3 << 28)
# Number of polls of a flag before the kernel ends with an error: some minutes at 1 us per poll,
# because the peer may compile. If a peer is gone, a rank's host writes GONE to its own flags.
_MOST_POLLS = tl.constexpr(1 << 28)
GONE = tl.constexpr(mailboxes.GONE)
_ANY_GONE = tl.constexpr(1 << 16)  # more than the number of flags


@dataclass(frozen=True)
class PushedSum:
    """A tensor that a kernel finds in its mailbox as one slot per rank.

    Attributes:
        mailbox: This rank's mailboxes, to which all ranks push.
    """

    mailbox: Mailbox

    @property
    def ranks(self) -> int:
        """Slots to add."""
        return self.mailbox.ranks

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What ``load_sum`` takes, as one argument of a kernel."""
        box = self.mailbox
        own = box.rank
        return box.slots[own], box.flags[own], box.counter, box.capacity, box.chunks


@triton.jit
def next_call(counter):
    """Return the number of the call that this rank is about to push."""
    calls = tl.load(counter)
    return tl.where(calls == _LAST_CALL, 1, calls + 1)


@triton.jit
def count_call(counter, call):
    """Store ``call`` as the last one, by the program of a launch that ends last.

    All programs have loaded the number before, because what they stored depends on it.
    """
    ended = tl.atomic_add(counter + 1, 1, sem="relaxed", scope="gpu")
    if ended == tl.num_programs(0) - 1:
        tl.store(counter + 1, 0)
        tl.store(counter, call)


@triton.jit
def push_chunk(
    values, slots, flags, call, rank, offset, inside, chunk, capacity, chunks, RANKS: tl.constexpr
):
    """Store a chunk of this rank's partial sum in all mailboxes, then set its flags there.

    ``slots`` and ``flags`` are tuples in the order of ``Mailbox.peers``. A program pushes one
    chunk.
    """
    slot = (call % GENERATIONS) * RANKS + rank
    at = slot.to(tl.int64) * capacity + offset
    for i in tl.static_range(RANKS):
        tl.store(slots[i] + at, values, mask=inside)
    set_flags(flags, slot * chunks + chunk, call, RANKS)


@triton.jit
def set_flags(flags, flag, call, RANKS: tl.constexpr):
    """Set a flag in all mailboxes, behind what the program's threads stored there."""
    tl.debug_barrier()
    _fence(call)
    for i in tl.static_range(RANKS):
        _store_flag(flags[i] + flag, call, i)


@triton.jit
def set_flag_of(flags, peer, flag, call, RANKS: tl.constexpr):
    """Set a flag in the mailbox of one peer, the number ``peer`` in the order of the tuple."""
    tl.debug_barrier()
    _fence(call)
    for i in tl.static_range(RANKS):
        if i == peer:
            _store_flag(flags[i] + flag, call, i)


@triton.jit
def wait_for_chunk(flags, call, chunk, chunks, RANKS: tl.constexpr):
    """Return when all ranks have pushed a chunk of a call to this rank's mailbox.

    The flags of all generations are loaded, because which one counts is in ``call``, whose own load
    would have to come back first.
    """
    SOURCES: tl.constexpr = triton.next_power_of_2(RANKS)
    lane = tl.arange(0, 4 * SOURCES)
    generation, source = lane // SOURCES, lane % SOURCES
    exists = (generation < GENERATIONS) & (source < RANKS)
    flag = tl.where(exists, (generation * RANKS + source) * chunks + chunk, chunk)
    expected = exists & (generation == call % GENERATIONS)
    missing = _missing(_acquire(flags + flag), call, expected)
    if INTERPRETED:
        tl.static_assert(missing == 0, "a rank has not pushed yet, and nothing else runs")
    else:
        polls = 0
        while missing > 0:
            missing = _missing(_acquire(flags + flag), call, expected)
            polls += 1
            if (missing >= _ANY_GONE) | (polls == _MOST_POLLS):
                _fail(polls)
    tl.debug_barrier()


@triton.jit
def _missing(seen, call, expected):
    """Return the number of missing flags; ``_ANY_GONE`` or more if a rank is gone."""
    weight = tl.where(seen == GONE, _ANY_GONE, 1)
    return tl.sum(tl.where(expected & (seen != call), weight, 0), 0)


@triton.jit
def add_slots(slots, call, offset, inside, capacity, dtype: tl.constexpr, RANKS: tl.constexpr):
    """Add what all ranks pushed, in float32 in rank order, and round once."""
    at = slots + ((call % GENERATIONS) * RANKS).to(tl.int64) * capacity + offset
    total = widen(tl.load(at, mask=inside, other=0.0))
    for _ in tl.static_range(RANKS - 1):
        at += capacity
        total += widen(tl.load(at, mask=inside, other=0.0))
    return narrow(total, dtype)


@triton.jit
def load_sum(pushed, row, start, column, inside, width, RANKS: tl.constexpr):
    """Load the columns from ``start`` on of a row of ``PushedSum.arguments``, float32.

    They are within one chunk. The kernel that pushed, an earlier one of this rank, has counted the
    call.
    """
    slots, flags, counter, capacity, chunks = pushed
    call = tl.load(counter)
    chunk = row.to(tl.int32) * tl.cdiv(width, CHUNK) + start // CHUNK
    wait_for_chunk(flags, call, chunk, chunks, RANKS)
    offset = row * width + column
    dtype: tl.constexpr = slots.dtype.element_ty
    return widen(add_slots(slots, call, offset, inside, capacity, dtype, RANKS))


@triton.jit
def _acquire(flags):
    """Load flags with acquire semantics at system scope."""
    if INTERPRETED:
        return tl.load(flags)
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.u32 $0, [$1];",
        "=r,l",
        [flags],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _fence(call):
    """Order what the program's threads stored before its barrier before the stores of flags.

    By the first warp, once: a releasing store for each flag would be a fence for each.
    """
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "{ .reg .pred first; .reg .u32 thread; mov.u32 thread, %tid.x; "
            "setp.lt.u32 first, thread, 32; @first fence.acq_rel.sys; mov.u32 $0, $1; }",
            "=r,r",
            [call],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _store_flag(flag, call, THREAD: tl.constexpr):
    """Store a flag at system scope by one thread of the first warp, after ``_fence``."""
    if INTERPRETED:
        tl.store(flag, call)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred mine; .reg .u32 thread; mov.u32 thread, %tid.x; "
            "setp.eq.u32 mine, thread, $3; @mine st.relaxed.sys.global.u32 [$1], $2; "
            "mov.u32 $0, 0; }",
            "=r,l,r,r",
            [flag, call, THREAD],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _fail(polls):
    """End the kernel with an error."""
    tl.inline_asm_elementwise(
        "trap; mov.u32 $0, $1;", "=r,r", [polls], dtype=tl.int32, is_pure=False, pack=1
    )
