"""Kernels of ``dsv4.ops.compressor``: a program pools windows in registers, channels side by side.

Tiles are ``[channels, slots]``: a thread holds neighbouring channels, so that slots are reduced
within few threads and every load is a row of a matrix.

The programs of a ragged batch are, first, one *head* per entry of the batch. It pools the windows
that reach back into the entry's state (the first to close, with overlap also the second) and then
overwrites that state: nobody else touches it, so one launch does both without a race. The
windows after those hold new tokens alone; each is a *tail*. An entry with n tokens has at most
n // m of them, so ``B + T // m`` programs are enough, the number of output rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dsv4.triton import _entries, _launch, _rows
from dsv4.triton._angles import cos_sin
from dsv4.triton._entries import store_entries
from dsv4.triton._hadamard import rotate_quantize_row
from dsv4.triton._numerics import INTERPRETED, narrow, wait_for_inputs, widen
from dsv4.triton._prefetch import prefetch_tile
from dsv4.triton._rotation import rotate
from dsv4.triton.norm import inverse_rms

_ABSENT = tl.constexpr(float("-inf"))
_LOG2E = tl.constexpr(1.4426950408889634)
_ALL = tl.constexpr(1 << 30)  # windows of a head that takes all of its entry's
_SCAN = 1024  # entries of the batch looked at together
_STEP = tl.constexpr(8)  # slots of the state that new tokens are put into together
_TILE = 4096  # numbers of one tile of scores
_MANY = 8  # slots above which a row is shared out by channels
_SLICE = 32  # channels per program where it is, with no more than _FEW rows
_FEW = 16


@triton.jit
def _absorb(kv, score, top, total, mean, FIRST: tl.constexpr, SLOTS: tl.constexpr):
    """Take a tile ``[D, N]`` of slots into the running softmax of each channel.

    Weights are divided by the number of slots, so that a sum of finite products is finite. While a
    channel has met no finite score its weights are 0, and 0 / 0 makes it NaN if that is the end.
    A maximum passes NaN over; the weight of a NaN is NaN.
    """
    new = tl.maximum(top, tl.max(score, 1))
    base = tl.where(new == _ABSENT, 0.0, new)
    weight = power((score - base[:, None]) * _LOG2E, SLOTS.bit_length() - 1)
    if FIRST:
        return new, tl.sum(weight, 1), tl.sum(weight * kv, 1)
    scale = power((top - base) * _LOG2E, 0)
    return new, total * scale + tl.sum(weight, 1), mean * scale + tl.sum(weight * kv, 1)


@triton.jit
def power(x, LESS: tl.constexpr):
    """``2 ** (x - LESS)`` for ``x <= 0``; what is below 2^-126 may be 0."""
    if INTERPRETED:
        return tl.exp2(x - LESS)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x - LESS], tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _clip(number):
    """An int64 difference of positions as int32; only what is near 0 matters."""
    return tl.minimum(tl.maximum(number, -(1 << 30)), 1 << 30).to(tl.int32)


@triton.jit
def _load_tokens(source, token, slot, phase, column, mask, ALL: tl.constexpr):
    """kv, score and ape ``[D, N]`` as stored of the tokens ``token + slot``; 0, -inf, 0 elsewhere.

    ``source``: pointers and row strides of kv and of score, then ape ``[m, c*d]`` and its stride.
    ``token``: int64; ``slot`` and ``phase``: ``[1, N]``, the second is the row of ape.
    ALL: ``mask`` is true everywhere.
    """
    kv, kv_stride, score, score_stride, ape, ape_stride = source
    # Offsets within a tile are of 32 bits. Tokens are read once, past the first-level cache, where
    # ape stays.
    kv = kv + token * kv_stride + (slot * kv_stride + column)
    score = score + token * score_stride + (slot * score_stride + column)
    ape = ape + (phase * ape_stride + column)
    if ALL:
        k = tl.load(kv, cache_modifier=".cg")
        s = tl.load(score, cache_modifier=".cg")
        return k, s, tl.load(ape)
    k = tl.load(kv, mask=mask, other=0.0, cache_modifier=".cg")
    s = tl.load(score, mask=mask, other=_ABSENT, cache_modifier=".cg")
    return k, s, tl.load(ape, mask=mask, other=0.0)


@triton.jit
def _load_new(source, entry, position, slot, phase, column, mask):
    """``_load_tokens`` of those among the positions ``position + slot`` that are new; and which.

    ``entry``: first token, start and end of the entry of the batch, and its old open window.
    """
    first, start, end, _ = entry
    new = (slot >= _clip(start - position)) & (slot < _clip(end - position)) & mask
    k, s, a = _load_tokens(source, first + position - start, slot, phase, column, new, False)
    return k, s, a, new


@triton.jit
def _load_kept(state, entry, position, slot, column, mask, RATIO: tl.constexpr, EARLIER):
    """kv and score of earlier positions from the state; 0 and -inf where there are none.

    ``state``: pointer to the row, then the strides of slot, kind and column. The first EARLIER
    slots are those of the window before the open one.
    """
    row, by_slot, by_kind, by_column = state
    _, start, _, window = entry
    old = (slot >= _clip(-position)) & (slot < _clip(start - position)) & mask
    begin = _clip(position - window * RATIO) + EARLIER
    place = row + ((begin + slot) * by_slot + column * by_column)
    k = tl.load(place, mask=old, other=0.0)
    return k, tl.load(place + by_kind, mask=old, other=_ABSENT)


@triton.jit
def _merge(loaded):
    """kv and score of slots as loaded, new or kept."""
    k, s, a, new, x, y = loaded
    return tl.where(new, widen(k), x), tl.where(new, widen(s) + widen(a), y)


@triton.jit
def _slots_of(begin, channel, channels, PART: tl.constexpr, RATIO: tl.constexpr, EARLIER):
    """Slots ``begin`` and following of a window that is pooled.

    Returns ``(slot, phase)``, each ``[1, PART]``, and ``(column, mask)``, each ``[D, PART]``. With
    overlap the first RATIO slots are the window before, in the first half of the columns.
    """
    slot = begin + tl.arange(0, PART)[None, :]
    mask = (slot < RATIO + EARLIER) & (channel < channels)
    if EARLIER > 0:
        return slot, slot % RATIO, channel + slot // RATIO * channels, mask
    return slot, slot, channel + tl.zeros_like(slot), mask


@triton.jit
def _load_slots(
    source,
    state,
    entry,
    window,
    begin,
    channel,
    channels,
    PART: tl.constexpr,
    RATIO: tl.constexpr,
    EARLIER: tl.constexpr,
):
    """What slots ``begin`` and following of a window hold, for the channels ``channel [D, 1]``.

    Nothing is computed from what is loaded, so that nothing waits: see ``_merge``.
    """
    slot, phase, column, mask = _slots_of(begin, channel, channels, PART, RATIO, EARLIER)
    position = window * RATIO - EARLIER
    k, s, a, new = _load_new(source, entry, position, slot, phase, column, mask)
    x, y = _load_kept(state, entry, position, slot, column, mask, RATIO, EARLIER)
    return k, s, a, new, x, y


@triton.jit
def _pool(
    loaded,
    source,
    state,
    entry,
    window,
    channel,
    channels,
    RATIO: tl.constexpr,
    SLOTS: tl.constexpr,
    PART: tl.constexpr,
    EARLIER: tl.constexpr,
):
    """Pooled values ``[D]`` of one window, whose first PART slots are ``loaded``."""
    WIDTH: tl.constexpr = channel.shape[0]
    nothing = tl.full([WIDTH], _ABSENT, tl.float32)
    k, s = _merge(loaded)
    top, total, mean = _absorb(k, s, nothing, nothing, nothing, True, SLOTS)
    for begin in range(PART, SLOTS, PART):
        k, s = _merge(
            _load_slots(
                source, state, entry, window, begin, channel, channels, PART, RATIO, EARLIER
            )
        )
        top, total, mean = _absorb(k, s, top, total, mean, False, SLOTS)
    return mean / total


@triton.jit
def _pool_new(
    source,
    entry,
    window,
    channel,
    channels,
    RATIO: tl.constexpr,
    SLOTS: tl.constexpr,
    PART: tl.constexpr,
    EARLIER: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """``_pool`` where all slots are new tokens. WHOLE: no tile has a slot or a channel too many."""
    WIDTH: tl.constexpr = channel.shape[0]
    top = tl.full([WIDTH], _ABSENT, tl.float32)
    total, mean = top, top
    token = entry[0] + window * RATIO - EARLIER - entry[1]
    for begin in tl.static_range(0, SLOTS, PART):
        slot, phase, column, mask = _slots_of(begin, channel, channels, PART, RATIO, EARLIER)
        k, s, a = _load_tokens(source, token, slot, phase, column, mask, WHOLE)
        s = widen(s) + widen(a)
        top, total, mean = _absorb(widen(k), s, top, total, mean, begin == 0, SLOTS)
    return mean / total


@triton.jit
def _put(state, slot, column, mask, kv, score):
    row, by_slot, by_kind, by_column = state
    place = row + (slot * by_slot + column * by_column)
    tl.store(place, kv, mask=mask)
    tl.store(place + by_kind, score, mask=mask)


@triton.jit
def _store_state(
    source,
    state,
    entry,
    channel,
    channels,
    RATIO: tl.constexpr,
    SLOTS: tl.constexpr,
    EARLIER: tl.constexpr,
):
    """Overwrite the state of an entry's sequence, in the channels ``channel [D, 1]``.

    While the open window stays the same only new tokens are written. When it closes, or a sequence
    begins, every slot is.
    """
    _, start, end, old_window = entry
    window = end // RATIO
    WINDOW: tl.constexpr = SLOTS // 2 if EARLIER > 0 else SLOTS
    STEP: tl.constexpr = WINDOW if WINDOW < _STEP else _STEP
    if (window > old_window) | (start == 0):
        _turn_over(source, state, entry, window, channel, channels, RATIO, WINDOW, EARLIER)
    position = window * RATIO
    for begin in range(_clip(tl.maximum(start - position, 0)), _clip(end - position), STEP):
        slot = begin + tl.arange(0, STEP)[None, :]
        inside = (slot < RATIO) & (channel < channels)
        for half in tl.static_range(2 if EARLIER > 0 else 1):
            column = channel + half * channels
            k, s, a, new = _load_new(source, entry, position, slot, slot, column, inside)
            _put(state, slot + EARLIER, column, new, widen(k), widen(s) + widen(a))


@triton.jit
def _turn_over(
    source,
    state,
    entry,
    window,
    channel,
    channels,
    RATIO: tl.constexpr,
    WINDOW: tl.constexpr,
    EARLIER: tl.constexpr,
):
    """Begin ``window``: its slots are unfilled, and the window before it, if kept, is full.

    A barrier stands between loads, here or of windows pooled before, and stores to the same columns
    by other threads.
    """
    slot = tl.arange(0, WINDOW)[None, :]
    mask = (slot < RATIO) & (channel < channels)
    unfilled = mask & (slot >= _clip(entry[2] - window * RATIO))
    nothing = tl.zeros(mask.shape, tl.float32)
    for half in tl.static_range(2 if EARLIER > 0 else 1):
        column = channel + half * channels
        if EARLIER > 0:
            p = (window - 1) * RATIO
            k, s, a, new = _load_new(source, entry, p, slot, slot, column, mask)
            x, y = _load_kept(state, entry, p, slot, column, mask, RATIO, EARLIER)
            tl.debug_barrier()
            k, s = _merge((k, s, a, new, x, y))
            _put(state, slot, column, mask, k, s)
        else:
            tl.debug_barrier()
        _put(state, slot + EARLIER, column, unfilled, nothing, nothing + _ABSENT)


@triton.jit
def _prefetch_copied(state, COLUMNS: tl.constexpr, RATIO: tl.constexpr):
    """Ask for what ``_turn_over`` copies and no window pools: half of the open window's columns."""
    row, by_slot, by_kind, _ = state
    if not INTERPRETED:
        # Rows of a power of two; the last one again instead of those past it.
        slot = RATIO + tl.minimum(tl.arange(0, triton.next_power_of_2(RATIO)), RATIO - 1)
        prefetch_tile(row, by_slot, slot, 0, COLUMNS)
        prefetch_tile(row, by_slot, slot, by_kind, COLUMNS)


@triton.jit
def _closing(start, length, row, RATIO: tl.constexpr):
    """How many windows an entry of the batch closes; none without tokens or as padding."""
    closed = (start + length) // RATIO - start // RATIO
    return tl.where((length > 0) & (row >= 0), closed, 0)


@triton.jit
def _locate(
    batch,
    program,
    HEAD: tl.constexpr,
    RATIO: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Which windows a program pools, by a scan over the batch.

    ``batch``: pointers to cu_seqlens, starts and sequences, then B.

    Returns ``(b, skipped, before, total)``: the program's entry (-1: it is a tail too many), how
    many tails of that entry come before it, and the closed windows before the entry and in all.
    """
    cu, starts, sequences, count = batch
    wanted = program - count
    b = tl.full([], -1, tl.int32)
    skipped = tl.full([], 0, tl.int32)
    before = tl.full([], 0, tl.int32)
    total = tl.full([], 0, tl.int32)
    tails = tl.full([], 0, tl.int32)
    for begin in range(0, count, SCAN):
        i = begin + tl.arange(0, SCAN)
        inside = i < count
        first = tl.load(cu + i, mask=inside, other=0).to(tl.int64)
        end = tl.load(cu + i + 1, mask=inside, other=0).to(tl.int64)
        start = tl.load(starts + i, mask=inside, other=0).to(tl.int64)
        row = tl.load(sequences + i, mask=inside, other=-1)
        closed = _closing(start, end - first, row, RATIO).to(tl.int32)
        tail = tl.maximum(closed - HEAD, 0)
        closed_after = total + tl.cumsum(closed, 0)
        tails_after = tails + tl.cumsum(tail, 0)
        mine = tl.where(
            wanted < 0, i == program, (tails_after - tail <= wanted) & (wanted < tails_after)
        )
        b += tl.sum(tl.where(mine, i + 1, 0), 0)
        skipped += tl.sum(tl.where(mine, wanted - (tails_after - tail), 0), 0)
        before += tl.sum(tl.where(mine, closed_after - closed, 0), 0)
        total += tl.sum(closed, 0)
        tails += tl.sum(tail, 0)
    return b, skipped, before, total


@triton.jit
def _entry(batch, b, RATIO: tl.constexpr):
    """``(first token, start, end, old open window)`` of entry b, its length and its state row."""
    cu, starts, sequences, _ = batch
    first = tl.load(cu + b).to(tl.int64)
    length = tl.load(cu + b + 1).to(tl.int64) - first
    start = tl.load(starts + b).to(tl.int64)
    row = tl.load(sequences + b).to(tl.int64)
    return (first, start, start + length, start // RATIO), length, row


@triton.jit(do_not_specialize=["count"])
def _update_kernel(
    kv,
    kv_stride,
    score,
    score_stride,
    ape,
    ape_stride,
    state,
    state_stride,
    by_slot,
    by_kind,
    by_column,
    cu,
    starts,
    sequences,
    count,
    pooled,
    positions,
    owners,
    channels,
    slices,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    SLOTS: tl.constexpr,
    PART: tl.constexpr,
    HEAD_PART: tl.constexpr,
    WIDTH: tl.constexpr,
    WHOLE: tl.constexpr,
    ORDERED: tl.constexpr,
    SCAN: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    # A program has at most one row where its number is that of the row.
    tl.static_assert(ORDERED or not OVERLAP)
    EARLIER: tl.constexpr = RATIO if OVERLAP else 0
    HEAD: tl.constexpr = 1 + OVERLAP
    program, piece = tl.program_id(0) // slices, tl.program_id(0) % slices
    channel = (piece * WIDTH + tl.arange(0, WIDTH))[:, None]
    batch = (cu, starts, sequences, count)
    source = (kv, kv_stride, score, score_stride, ape, ape_stride)
    b, skipped, before, total = program, tl.full([], 0, tl.int32), program, program
    if ORDERED or program >= count:
        b, skipped, before, total = _locate(batch, program, HEAD, RATIO, SCAN)
    entry, length, row = _entry(batch, tl.maximum(b, 0), RATIO)
    kept = (state + tl.maximum(row, 0) * state_stride, by_slot, by_kind, by_column)
    out = (before if ORDERED else program).to(tl.int64)
    outputs = (pooled, positions, owners, piece, channels)
    if program < count:
        windows = tl.minimum(_closing(entry[1], length, row, RATIO), HEAD)
        unused = windows == 0
        for i in range(windows):
            window = entry[3] + i
            loaded = _load_slots(
                source, kept, entry, window, 0, channel, channels, HEAD_PART, RATIO, EARLIER
            )
            values = _pool(
                loaded,
                source,
                kept,
                entry,
                window,
                channel,
                channels,
                RATIO,
                SLOTS,
                HEAD_PART,
                EARLIER,
            )
            _put_row(outputs, out + i, channel, values, window * RATIO, row)
        if (length > 0) & (row >= 0):
            _store_state(source, kept, entry, channel, channels, RATIO, SLOTS, EARLIER)
    else:
        unused = b < 0
        if b >= 0:
            if ORDERED:
                out += HEAD + skipped
            window = entry[3] + HEAD + skipped
            values = _pool_new(
                source, entry, window, channel, channels, RATIO, SLOTS, PART, EARLIER, WHOLE
            )
            _put_row(outputs, out, channel, values, window * RATIO, row)
    if ORDERED:
        unused = program >= total
    if unused:
        nothing = tl.zeros([WIDTH], tl.float32)
        none = tl.full([], -1, tl.int64)
        _put_row(outputs, program.to(tl.int64), channel, nothing, none, none)


@triton.jit
def _put_row(outputs, place, channel, values, position, owner):
    pooled, positions, owners, piece, channels = outputs
    tl.store(pooled + place * channels + channel, values[:, None], mask=channel < channels)
    if piece == 0:
        tl.store(positions + place, position)
        tl.store(owners + place, owner)


@triton.jit
def _slot(table, table_stride, table_pages, row, number, PAGE_SIZE: tl.constexpr):
    """Slot of entry ``number`` of a sequence, int64 ``[1]``; negative where it has no page."""
    page = number // PAGE_SIZE + tl.arange(0, 1)
    inside = page < table_pages
    place = tl.load(table + row * table_stride + page, mask=inside, other=-1).to(tl.int64)
    return tl.where(inside, place * PAGE_SIZE + number % PAGE_SIZE, -1)


@triton.jit
def _load_finish(
    target,
    row,
    number,
    DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """What entry ``number`` of a sequence needs after pooling; loaded before it, to be there.

    Returns the norm's weights ``[1, BLOCK]``, the frequencies of its pairs ``[1, BLOCK / 2]``, 0
    (no turn) for those before the rotated dims, and its slot.
    """
    weight, frequencies, _, _, _, table, table_stride, table_pages = target
    slots = _slot(table, table_stride, table_pages, row, number, PAGE_SIZE)
    column = tl.arange(0, BLOCK)[None, :]
    pair = tl.arange(0, BLOCK // 2)[None, :] - (DIM - ROTATED) // 2
    turning = (pair >= 0) & (pair < ROTATED // 2)
    scale = tl.load(weight + column, mask=column < DIM, other=0.0)
    return scale, tl.load(frequencies + pair, mask=turning, other=0.0), slots


@triton.jit
def _write_entry(
    pooled,
    position,
    finish,
    target,
    DIM: tl.constexpr,
    NOPE: tl.constexpr,
    ROTATED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROTATE_QUANTIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    TABLE: tl.constexpr,
):
    """Norm, rotation, rounding to FP4 if asked, and storage of one entry ``pooled [BLOCK]``.

    ``finish``: what ``_load_finish`` returned.
    """
    BLOCK: tl.constexpr = pooled.shape[0]
    KEPT: tl.constexpr = DIM - ROTATED
    scale, frequency, slots = finish
    _, _, eps, data, data_stride, _, _, _ = target
    column = tl.arange(0, BLOCK)[None, :]
    c, s = cos_sin(frequency * position.to(tl.float32))
    c, s = widen(narrow(c, TABLE)), widen(narrow(s, TABLE))
    values = tl.where(column < DIM, widen(narrow(pooled, DTYPE))[None, :], 0.0)
    rms = inverse_rms(tl.sum(values * values, 1), DIM, eps)
    normed = widen(narrow(widen(scale) * (values * rms[:, None]), DTYPE))
    turned = tl.where(column < KEPT, normed, rotate(normed, c, s))
    entry = narrow(turned, DTYPE)
    if ROTATE_QUANTIZE:
        entry = narrow(rotate_quantize_row(widen(entry), DIM, DTYPE), DTYPE)
    store_entries(data, data_stride, slots, entry, NOPE, DIM - NOPE, PAGE_SIZE)


@triton.jit(do_not_specialize=["count"])
def _write_kernel(
    kv,
    kv_stride,
    score,
    score_stride,
    ape,
    ape_stride,
    state,
    state_stride,
    by_slot,
    by_kind,
    by_column,
    cu,
    starts,
    sequences,
    count,
    weight,
    frequencies,
    eps,
    data,
    data_stride,
    table,
    table_stride,
    table_pages,
    TAILS: tl.constexpr,
    WHOLE: tl.constexpr,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    SLOTS: tl.constexpr,
    PART: tl.constexpr,
    HEAD_PART: tl.constexpr,
    DIM: tl.constexpr,
    NOPE: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROTATE_QUANTIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    TABLE: tl.constexpr,
    SCAN: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    EARLIER: tl.constexpr = RATIO if OVERLAP else 0
    HEAD: tl.constexpr = 1 + OVERLAP if TAILS else _ALL
    program = tl.program_id(0)
    channel = tl.arange(0, BLOCK)[:, None]
    batch = (cu, starts, sequences, count)
    source = (kv, kv_stride, score, score_stride, ape, ape_stride)
    target = (weight, frequencies, eps, data, data_stride, table, table_stride, table_pages)
    if TAILS and program >= count:
        b, skipped, _, _ = _locate(batch, program, HEAD, RATIO, SCAN)
        if b >= 0:
            entry, length, row = _entry(batch, b, RATIO)
            number = entry[3] + HEAD + skipped
            finish = _load_finish(target, row, number, DIM, ROTATED, BLOCK, PAGE_SIZE)
            values = _pool_new(
                source, entry, number, channel, DIM, RATIO, SLOTS, PART, EARLIER, WHOLE
            )
            _write_entry(
                values,
                number * RATIO,
                finish,
                target,
                DIM,
                NOPE,
                ROTATED,
                PAGE_SIZE,
                ROTATE_QUANTIZE,
                DTYPE,
                TABLE,
            )
    else:
        entry, length, row = _entry(batch, program, RATIO)
        windows = tl.minimum(_closing(entry[1], length, row, RATIO), HEAD).to(tl.int32)
        kept = (state + tl.maximum(row, 0) * state_stride, by_slot, by_kind, by_column)
        continues = (length > 0) & (row >= 0)
        for i in range(windows):
            number = entry[3] + i
            if EARLIER > 0 and not TAILS:
                _prefetch_copied(kept, DIM, RATIO)
            finish = _load_finish(target, row, number, DIM, ROTATED, BLOCK, PAGE_SIZE)
            loaded = _load_slots(
                source, kept, entry, number, 0, channel, DIM, HEAD_PART, RATIO, EARLIER
            )
            values = _pool(
                loaded,
                source,
                kept,
                entry,
                number,
                channel,
                DIM,
                RATIO,
                SLOTS,
                HEAD_PART,
                EARLIER,
            )
            _write_entry(
                values,
                number * RATIO,
                finish,
                target,
                DIM,
                NOPE,
                ROTATED,
                PAGE_SIZE,
                ROTATE_QUANTIZE,
                DTYPE,
                TABLE,
            )
        if continues:
            _store_state(source, kept, entry, channel, DIM, RATIO, SLOTS, EARLIER)


def _ragged(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    starts: torch.Tensor,
    sequences: torch.Tensor,
) -> tuple[Any, ...]:
    """Arguments that both kernels of a ragged batch begin with."""
    kv, score, ape = _rows.as_rows(kv), _rows.as_rows(score), _rows.as_rows(ape)
    return (
        kv,
        kv.stride(0),
        score,
        score.stride(0),
        ape,
        ape.stride(0),
        state,
        *state.stride(),
        cu_seqlens.contiguous(),
        starts.contiguous(),
        sequences.contiguous(),
        starts.shape[0],
    )


def _slots(
    ratio: int, overlap: bool, channels: int, width: int, few: bool
) -> dict[str, int | bool]:
    """Slots of a pooled window as a power of two, how many make a tile, and whether tiles fit.

    A head loads a tile twice, tokens and state. Where it is one program among many it takes half
    the slots at a time, to need no more registers than a tail.
    """
    slots = _launch.power_of_two(ratio * (1 + overlap))
    part = min(slots, max(1, _TILE // width))
    head = part if few else max(1, part // 2)
    whole = slots == ratio * (1 + overlap) and channels % width == 0
    return {"SLOTS": slots, "PART": part, "HEAD_PART": head, "WHOLE": whole}


def _update(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    starts: torch.Tensor,
    sequences: torch.Tensor,
    overlap: bool,
    ordered: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``compressor_update``; not ``ordered``: rows in any order, unused ones among them."""
    ratio, batch = ape.shape[0], starts.shape[0]
    rows, channels = kv.shape[0] // ratio + batch, kv.shape[1] // (1 + overlap)
    pooled = torch.empty((rows, channels), dtype=torch.float32, device=kv.device)
    positions = torch.empty(rows, dtype=torch.int64, device=kv.device)
    owners = torch.empty_like(positions)
    if batch == 0:
        return pooled.zero_(), positions.fill_(-1), owners.fill_(-1)
    width, slices = _channels(ratio, channels, rows)
    with _launch.on(kv):
        _update_kernel[(rows * slices,)](
            *_ragged(kv, score, ape, state, cu_seqlens, starts, sequences),
            pooled,
            positions,
            owners,
            channels,
            slices,
            RATIO=ratio,
            OVERLAP=overlap,
            **_slots(ratio, overlap, channels, width, rows <= _FEW),
            WIDTH=width,
            ORDERED=ordered,
            SCAN=min(_SCAN, _launch.power_of_two(batch)),
            num_warps=8 if ratio > _MANY else _head_warps(width),
            **_launch.options(kv),
        )
    return pooled, positions, owners


def compressor_update(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    starts: torch.Tensor,
    sequences: torch.Tensor,
    overlap: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.compressor.compressor_update``."""
    return _update(kv, score, ape, state, cu_seqlens, starts, sequences, overlap, True)


def _channels(ratio: int, channels: int, rows: int) -> tuple[int, int]:
    """Channels per program, and programs per row: many where there are few rows."""
    width = _launch.power_of_two(channels)
    if ratio > _MANY:
        width = min(width, _SLICE if rows <= _FEW else 4 * _SLICE)
    return width, triton.cdiv(channels, width)


def compress_write(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    starts: torch.Tensor,
    sequences: torch.Tensor,
    norm_weight: torch.Tensor,
    inv_freq: torch.Tensor,
    data: torch.Tensor,
    page_size: int,
    entry_format: str,
    head_dim: int,
    rope_dim: int,
    page_table: torch.Tensor,
    overlap: bool,
    eps: float,
    rotate_quantize: bool,
    dtype: torch.dtype,
    table_dtype: torch.dtype,
) -> None:
    """See ``dsv4.ops.compressor.compress_write``."""
    ratio, batch, tokens = ape.shape[0], starts.shape[0], kv.shape[0]
    if batch == 0:
        return
    pages = _pages(data, page_size, entry_format, head_dim, rope_dim, page_table)
    finish = {
        "ROTATED": 2 * inv_freq.shape[0],
        "ROTATE_QUANTIZE": rotate_quantize,
        "DTYPE": _rows.TYPES[dtype],
        "TABLE": _rows.TYPES[table_dtype],
    }
    norm = (norm_weight.contiguous(), inv_freq.contiguous(), eps)
    tensors = (kv, score, ape, state, cu_seqlens, starts, sequences)
    if ratio > _MANY and not overlap:
        # Half a megabyte for one entry: many programs pool it, one per row does the rest.
        _finish(_update(*tensors, overlap, False), ratio, norm, pages, finish)
        return
    few = tokens <= 4 * batch or tokens // ratio <= 4
    arguments = (*_ragged(*tensors), *norm, *pages[0])
    block = pages[1]["BLOCK"]
    common = {
        "RATIO": ratio,
        "OVERLAP": overlap,
        **_slots(ratio, overlap, head_dim, block, few),
        "SCAN": min(_SCAN, _launch.power_of_two(batch)),
        **pages[1],
        **finish,
        **_launch.options(kv),
    }
    programs = batch if few else batch + tokens // ratio
    threads = {"num_warps": _warps(block)}
    if few:
        # More registers than are needed, lest the assembler aims for 128 and spills.
        threads = {"num_warps": _head_warps(block), "maxnreg": 168}
    with _launch.on(kv):
        _write_kernel[(programs,)](*arguments, TAILS=not few, **threads, **common)


def _warps(block: int) -> int:
    """One vector of 16 bytes of a row per thread, so that a thread has all slots of a channel."""
    return min(16, max(1, block // 128))


def _head_warps(block: int) -> int:
    """Half of that: few rows, each of which is waited for."""
    return min(16, max(1, block // 64))


def _pages(
    data: torch.Tensor,
    page_size: int,
    entry_format: str,
    head_dim: int,
    rope_dim: int,
    page_table: torch.Tensor,
) -> tuple[tuple[Any, ...], dict[str, int]]:
    """Arguments that say where entries lie, and what of it is known when a kernel is compiled."""
    table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    fp8 = entry_format == "fp8"
    return (
        data,
        _entries.page_stride(data),
        table,
        table.stride(0),
        table.shape[1] if data.shape[0] else 0,
    ), {
        "DIM": head_dim,
        "NOPE": head_dim - rope_dim,
        "BLOCK": _entries.block(head_dim) if fp8 else _launch.power_of_two(head_dim),
        "PAGE_SIZE": page_size,
    }


@triton.jit
def _finish_kernel(
    pooled,
    positions,
    owners,
    weight,
    frequencies,
    eps,
    data,
    data_stride,
    table,
    table_stride,
    table_pages,
    RATIO: tl.constexpr,
    DIM: tl.constexpr,
    NOPE: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROTATE_QUANTIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    TABLE: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    values = tl.load(pooled + program * DIM + column, mask=column < DIM, other=0.0)
    position = tl.load(positions + program)
    row = tl.load(owners + program)
    target = (weight, frequencies, eps, data, data_stride, table, table_stride, table_pages)
    if row >= 0:
        finish = _load_finish(target, row, position // RATIO, DIM, ROTATED, BLOCK, PAGE_SIZE)
        _write_entry(
            values,
            position,
            finish,
            target,
            DIM,
            NOPE,
            ROTATED,
            PAGE_SIZE,
            ROTATE_QUANTIZE,
            DTYPE,
            TABLE,
        )


def _finish(
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ratio: int,
    norm: tuple[Any, ...],
    pages: tuple[tuple[Any, ...], dict[str, int]],
    finish: dict[str, Any],
) -> None:
    """Store what ``compressor_update`` returned, a program per row."""
    pooled = parts[0]
    with _launch.on(pooled):
        _finish_kernel[(pooled.shape[0],)](
            *parts,
            *norm,
            *pages[0],
            RATIO=ratio,
            **pages[1],
            **finish,
            num_warps=_warps(pages[1]["BLOCK"]),
            **_launch.options(pooled),
        )


@triton.jit
def _before(
    kv,
    kv_stride,
    score,
    score_stride,
    previous_kv,
    previous_score,
    row,
    windows,
    phase,
    channel,
    channels,
    RATIO: tl.constexpr,
):
    """First half of the columns of the window before: a neighbour, the one given, or absent."""
    first = row % windows == 0
    mask = (phase < RATIO) & (channel < channels)
    nothing = mask & (phase < 0)
    inner = tl.where(first, nothing, mask)
    place = (row - 1) * RATIO + phase
    k = widen(tl.load(kv + place * kv_stride + channel, mask=inner, other=0.0))
    s = widen(tl.load(score + place * score_stride + channel, mask=inner, other=_ABSENT))
    if previous_kv is not None:
        outer = tl.where(first, mask, nothing)
        place = ((row // windows) * RATIO + phase) * channels + channel
        k0 = widen(tl.load(previous_kv + place, mask=outer, other=0.0))
        s0 = widen(tl.load(previous_score + place, mask=outer, other=_ABSENT))
        k, s = tl.where(outer, k0, k), tl.where(outer, s0, s)
    return k, s


@triton.jit
def _windows_kernel(
    kv,
    kv_stride,
    score,
    score_stride,
    previous_kv,
    previous_score,
    out,
    windows,
    channels,
    slices,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    SLOTS: tl.constexpr,
    PART: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = (tl.program_id(0) // slices).to(tl.int64)
    channel = (tl.program_id(0) % slices * WIDTH + tl.arange(0, WIDTH))[:, None]
    own = channels if OVERLAP else 0
    top = tl.full([WIDTH], _ABSENT, tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    mean = tl.zeros([WIDTH], tl.float32)
    for begin in range(0, SLOTS, PART):
        phase = begin + tl.arange(0, PART)[None, :]
        mask = (phase < RATIO) & (channel < channels)
        place = row * RATIO + phase
        k = tl.load(kv + place * kv_stride + channel + own, mask=mask, other=0.0)
        s = tl.load(score + place * score_stride + channel + own, mask=mask, other=_ABSENT)
        if OVERLAP:
            k0, s0 = _before(
                kv,
                kv_stride,
                score,
                score_stride,
                previous_kv,
                previous_score,
                row,
                windows,
                phase,
                channel,
                channels,
                RATIO,
            )
            top, total, mean = _absorb(k0, s0, top, total, mean, False, 2 * SLOTS)
        top, total, mean = _absorb(widen(k), widen(s), top, total, mean, False, 2 * SLOTS)
    place = out + row * channels + channel
    tl.store(place, (mean / total)[:, None], mask=channel < channels)


def pool_windows(
    kv: torch.Tensor,
    score: torch.Tensor,
    previous_kv: torch.Tensor | None,
    previous_score: torch.Tensor | None,
    overlap: bool,
) -> torch.Tensor:
    """See ``dsv4.ops.compressor.pool_windows``."""
    sequences, windows, ratio, columns = kv.shape
    channels = columns // (1 + overlap)
    out = torch.empty((sequences, windows, channels), dtype=torch.float32, device=kv.device)
    if out.numel() == 0:
        return out
    kv, score = _rows.as_rows(kv), _rows.as_rows(score)
    slots = _launch.power_of_two(ratio)
    width, slices = _channels(ratio, channels, sequences * windows)
    with _launch.on(kv):
        _windows_kernel[(sequences * windows * slices,)](
            kv,
            kv.stride(0),
            score,
            score.stride(0),
            None if previous_kv is None else previous_kv.contiguous(),
            None if previous_score is None else previous_score.contiguous(),
            out,
            windows,
            channels,
            slices,
            RATIO=ratio,
            OVERLAP=overlap,
            WIDTH=width,
            SLOTS=slots,
            PART=min(slots, max(1, _TILE // width)),
            num_warps=8 if ratio > _MANY else _head_warps(width),
            **_launch.options(kv),
        )
    return out
