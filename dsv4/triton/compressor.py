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
from dsv4.triton._numerics import narrow, wait_for_inputs, widen
from dsv4.triton._rotation import rotate
from dsv4.triton.norm import inverse_rms

_ABSENT = tl.constexpr(float("-inf"))
_SCAN = 1024  # entries of the batch looked at together
_TILE = 8192  # numbers of one tile of scores
_MANY = 8  # slots above which a row is shared out by channels
_SLICE = 32  # channels per program where it is


@triton.jit
def _absorb(kv, score, top, total, mean, SLOTS: tl.constexpr):
    """Take a tile ``[D, N]`` of slots into the running softmax of each channel.

    Weights are divided by the number of slots, so that a sum of finite products is finite. While a
    channel has met no finite score its weights are 0, and 0 / 0 makes it NaN if that is the end.
    A maximum passes NaN over; the weight of a NaN is NaN.
    """
    new = tl.maximum(top, tl.max(score, 1))
    base = tl.where(new == _ABSENT, 0.0, new)
    weight = tl.exp(score - base[:, None]) * (1.0 / SLOTS)
    scale = tl.exp(top - base)
    total = total * scale + tl.sum(weight, 1)
    return new, total, mean * scale + tl.sum(weight * kv, 1)


@triton.jit
def _load_new(source, entry, position, phase, column, mask):
    """kv, score and ape ``[D, N]`` of the new tokens at ``position [1, N]``, as stored; 0, -inf
    and 0 elsewhere. Also where that is.

    ``source``: pointers and row strides of kv and of score, then ape ``[m, c*d]`` and its stride.
    ``entry``: first token, start and end of the entry of the batch, and its old open window.
    """
    kv, kv_stride, score, score_stride, ape, ape_stride = source
    first, start, end, _ = entry
    new = (position >= start) & (position < end) & mask
    token = first + position - start
    k = tl.load(kv + token * kv_stride + column, mask=new, other=0.0)
    s = tl.load(score + token * score_stride + column, mask=new, other=_ABSENT)
    a = tl.load(ape + phase * ape_stride + column, mask=new, other=0.0)
    return k, s, a, new


@triton.jit
def _load_kept(state, entry, position, column, mask, RATIO: tl.constexpr, EARLIER: tl.constexpr):
    """kv and score of earlier positions from the state; 0 and -inf where there are none.

    ``state``: pointer to the row, then the strides of slot, kind and column. The first EARLIER
    slots are those of the window before the open one.
    """
    row, by_slot, by_kind, by_column = state
    _, start, _, window = entry
    old = (position >= 0) & (position < start) & mask
    place = row + (position - window * RATIO + EARLIER) * by_slot + column * by_column
    k = tl.load(place, mask=old, other=0.0)
    return k, tl.load(place + by_kind, mask=old, other=_ABSENT)


@triton.jit
def _load(
    source,
    state,
    entry,
    position,
    phase,
    column,
    mask,
    RATIO: tl.constexpr,
    EARLIER: tl.constexpr,
):
    """kv and score ``[D, N]`` at positions ``[1, N]``: new, kept in the state, or absent."""
    k, s, a, new = _load_new(source, entry, position, phase, column, mask)
    old_k, old_s = _load_kept(state, entry, position, column, mask, RATIO, EARLIER)
    return tl.where(new, widen(k), old_k), tl.where(new, widen(s) + widen(a), old_s)


@triton.jit
def _pool(
    source,
    state,
    entry,
    window,
    channel,
    channels,
    RATIO: tl.constexpr,
    SLOTS: tl.constexpr,
    PART: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Pooled values ``[D]`` of one window, for the channels ``channel [D, 1]`` of ``channels``."""
    WIDTH: tl.constexpr = channel.shape[0]
    top = tl.full([WIDTH], _ABSENT, tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    mean = tl.zeros([WIDTH], tl.float32)
    EARLIER: tl.constexpr = RATIO if OVERLAP else 0
    reaches_back = window * RATIO - EARLIER < entry[1]
    for begin in range(0, SLOTS, PART):
        phase = begin + tl.arange(0, PART)[None, :]
        mask = (phase < RATIO) & (channel < channels)
        p = window * RATIO + phase
        if OVERLAP:
            own = channel + channels
            k, s, a, new = _load_new(source, entry, p, phase, own, mask)
            k0, s0, a0, new0 = _load_new(source, entry, p - RATIO, phase, channel, mask)
            k, s = widen(k), widen(s) + widen(a)
            k0, s0 = widen(k0), widen(s0) + widen(a0)
            if reaches_back:
                x, y = _load_kept(state, entry, p, own, mask, RATIO, EARLIER)
                x0, y0 = _load_kept(state, entry, p - RATIO, channel, mask, RATIO, EARLIER)
                k, s = tl.where(new, k, x), tl.where(new, s, y)
                k0, s0 = tl.where(new0, k0, x0), tl.where(new0, s0, y0)
            top, total, mean = _absorb(k0, s0, top, total, mean, SLOTS)
        else:
            k, s, a, new = _load_new(source, entry, p, phase, channel, mask)
            k, s = widen(k), widen(s) + widen(a)
            if reaches_back:
                x, y = _load_kept(state, entry, p, channel, mask, RATIO, EARLIER)
                k, s = tl.where(new, k, x), tl.where(new, s, y)
        top, total, mean = _absorb(k, s, top, total, mean, SLOTS)
    return mean / total


@triton.jit
def _put(state, slot, column, mask, kv, score):
    row, by_slot, by_kind, by_column = state
    place = row + slot * by_slot + column * by_column
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
    PART: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Overwrite the state of an entry's sequence, in the channels ``channel [D, 1]``.

    While the open window stays the same only new tokens are written. When it closes, or a sequence
    begins, every slot is. Then the window before the open one, where there is overlap, is partly a
    copy of slots that are overwritten too; the open one holds new tokens alone.
    """
    _, start, end, old_window = entry
    window = end // RATIO
    full = (window > old_window) | (start == 0)
    EARLIER: tl.constexpr = RATIO if OVERLAP else 0
    if full:
        if OVERLAP:
            phase = tl.arange(0, SLOTS)[None, :]
            mask = (phase < RATIO) & (channel < channels)
            p, own = (window - 1) * RATIO + phase, channel + channels
            k0, s0 = _load(source, state, entry, p, phase, channel, mask, RATIO, EARLIER)
            k, s = _load(source, state, entry, p, phase, own, mask, RATIO, EARLIER)
            # Other threads may still be reading, here or in the windows pooled before.
            tl.debug_barrier()
            _put(state, phase, channel, mask, k0, s0)
            _put(state, phase, own, mask, k, s)
        else:
            tl.debug_barrier()
    for begin in range(0, SLOTS, PART):
        phase = begin + tl.arange(0, PART)[None, :]
        p = window * RATIO + phase
        inside = (phase < RATIO) & (channel < channels)
        for half in tl.static_range(2 if OVERLAP else 1):
            column = channel + half * channels
            k, s, a, new = _load_new(source, entry, p, phase, column, inside)
            written = tl.where(full, inside, new)
            _put(state, phase + EARLIER, column, written, widen(k), widen(s) + widen(a))


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


@triton.jit
def _share(entry, closed, head, b, skipped, HEAD: tl.constexpr):
    """First window of a program and how many it has."""
    window = entry[3]
    if head:
        count = tl.minimum(closed, HEAD).to(tl.int32)
    else:
        window += HEAD + skipped
        count = (b >= 0).to(tl.int32)
    return window, count


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
    WIDTH: tl.constexpr,
    ORDERED: tl.constexpr,
    SCAN: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    # A program has at most one row where its number is that of the row.
    tl.static_assert(ORDERED or not OVERLAP)
    HEAD: tl.constexpr = 2 if OVERLAP else 1
    program, piece = tl.program_id(0) // slices, tl.program_id(0) % slices
    channel = piece * WIDTH + tl.arange(0, WIDTH)
    batch = (cu, starts, sequences, count)
    source = (kv, kv_stride, score, score_stride, ape, ape_stride)
    b, skipped, before, total = program, tl.full([], 0, tl.int32), program, program
    if ORDERED or program >= count:
        b, skipped, before, total = _locate(batch, program, HEAD, RATIO, SCAN)
    entry, length, row = _entry(batch, tl.maximum(b, 0), RATIO)
    closed = _closing(entry[1], length, row, RATIO)
    head = program < count
    window, windows = _share(entry, closed, head, b, skipped, HEAD)
    kept = (state + tl.maximum(row, 0) * state_stride, by_slot, by_kind, by_column)
    out = program.to(tl.int64)
    unused = windows == 0
    if ORDERED:
        out = before + (window - entry[3])
        unused = program >= total
    for i in range(windows):
        values = _pool(
            source,
            kept,
            entry,
            window + i,
            channel[:, None],
            channels,
            RATIO,
            SLOTS,
            PART,
            OVERLAP,
        )
        tl.store(pooled + (out + i) * channels + channel, values, mask=channel < channels)
        if piece == 0:
            tl.store(positions + out + i, (window + i) * RATIO)
            tl.store(owners + out + i, row)
    if head & (length > 0) & (row >= 0):
        _store_state(source, kept, entry, channel[:, None], channels, RATIO, SLOTS, PART, OVERLAP)
    if unused:
        place = pooled + program.to(tl.int64) * channels + channel
        tl.store(place, tl.zeros([WIDTH], tl.float32), mask=channel < channels)
        if piece == 0:
            tl.store(positions + program, -1)
            tl.store(owners + program, -1)


@triton.jit
def _slot(table, table_stride, table_pages, row, number, PAGE_SIZE: tl.constexpr):
    """Slot of entry ``number`` of a sequence, int64 ``[1]``; negative where it has no page."""
    page = number // PAGE_SIZE + tl.arange(0, 1)
    inside = page < table_pages
    place = tl.load(table + row * table_stride + page, mask=inside, other=-1).to(tl.int64)
    return tl.where(inside, place * PAGE_SIZE + number % PAGE_SIZE, -1)


@triton.jit
def _angles(frequencies, position, HALF: tl.constexpr, KEPT: tl.constexpr, ROTATED: tl.constexpr):
    """cos and sin ``[1, HALF]`` for the pairs of an entry; those before KEPT do not turn."""
    pair = tl.arange(0, HALF)[None, :] - KEPT // 2
    turning = (pair >= 0) & (pair < ROTATED // 2)
    frequency = tl.load(frequencies + pair, mask=turning, other=0.0)
    return cos_sin(frequency * position.to(tl.float32))


@triton.jit
def _write_entry(
    pooled,
    position,
    slots,
    finish,
    pages,
    DIM: tl.constexpr,
    NOPE: tl.constexpr,
    ROTATED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROTATE_QUANTIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    TABLE: tl.constexpr,
):
    """Norm, rotation, rounding to FP4 if asked, and storage of one entry ``pooled [BLOCK]``."""
    BLOCK: tl.constexpr = pooled.shape[0]
    KEPT: tl.constexpr = DIM - ROTATED
    weight, frequencies, eps = finish
    data, data_stride = pages
    column = tl.arange(0, BLOCK)[None, :]
    scale = widen(tl.load(weight + column, mask=column < DIM, other=0.0))
    c, s = _angles(frequencies, position, BLOCK // 2, KEPT, ROTATED)
    c, s = widen(narrow(c, TABLE)), widen(narrow(s, TABLE))
    values = tl.where(column < DIM, widen(narrow(pooled, DTYPE))[None, :], 0.0)
    rms = inverse_rms(tl.sum(values * values, 1), DIM, eps)
    normed = widen(narrow(scale * (values * rms[:, None]), DTYPE))
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
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    SLOTS: tl.constexpr,
    PART: tl.constexpr,
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
    HEAD: tl.constexpr = 2 if OVERLAP else 1
    program = tl.program_id(0)
    channel = tl.arange(0, BLOCK)[:, None]
    batch = (cu, starts, sequences, count)
    source = (kv, kv_stride, score, score_stride, ape, ape_stride)
    head = program < count
    b, skipped = program, tl.full([], 0, tl.int32)
    if program >= count:
        b, skipped, _, _ = _locate(batch, program, HEAD, RATIO, SCAN)
    entry, length, row = _entry(batch, tl.maximum(b, 0), RATIO)
    closed = _closing(entry[1], length, row, RATIO)
    window, windows = _share(entry, closed, head, b, skipped, HEAD)
    kept = (state + tl.maximum(row, 0) * state_stride, by_slot, by_kind, by_column)
    for i in range(windows):
        number = window + i
        slots = _slot(table, table_stride, table_pages, row, number, PAGE_SIZE)
        values = _pool(source, kept, entry, number, channel, DIM, RATIO, SLOTS, PART, OVERLAP)
        _write_entry(
            values,
            number * RATIO,
            slots,
            (weight, frequencies, eps),
            (data, data_stride),
            DIM,
            NOPE,
            ROTATED,
            PAGE_SIZE,
            ROTATE_QUANTIZE,
            DTYPE,
            TABLE,
        )
    if head & (length > 0) & (row >= 0):
        _store_state(source, kept, entry, channel, DIM, RATIO, SLOTS, PART, OVERLAP)


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


def _slots(ratio: int, width: int) -> dict[str, int]:
    """Slots of a window as a power of two, and how many of them make a tile."""
    slots = _launch.power_of_two(ratio)
    return {"SLOTS": slots, "PART": min(slots, max(1, _TILE // width))}


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
    width, slices = _channels(ratio, channels)
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
            **_slots(ratio, width),
            WIDTH=width,
            ORDERED=ordered,
            SCAN=min(_SCAN, _launch.power_of_two(batch)),
            num_warps=4,
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


def _channels(ratio: int, channels: int) -> tuple[int, int]:
    """Channels per program, and programs per row."""
    width = _launch.power_of_two(channels)
    if ratio > _MANY:
        width = min(width, _SLICE)
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
    block = pages[1]["BLOCK"]
    with _launch.on(kv):
        _write_kernel[(batch + tokens // ratio,)](
            *_ragged(*tensors),
            *norm,
            *pages[0],
            RATIO=ratio,
            OVERLAP=overlap,
            **_slots(ratio, block),
            SCAN=min(_SCAN, _launch.power_of_two(batch)),
            **pages[1],
            **finish,
            num_warps=_warps(block),
            **_launch.options(kv),
        )


def _warps(block: int) -> int:
    """One vector of 16 bytes of a row per thread, so that a thread has all slots of a channel."""
    return min(16, max(1, block // 128))


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
    if row >= 0:
        slots = _slot(table, table_stride, table_pages, row, position // RATIO, PAGE_SIZE)
        _write_entry(
            values,
            position,
            slots,
            (weight, frequencies, eps),
            (data, data_stride),
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
            top, total, mean = _absorb(k0, s0, top, total, mean, SLOTS)
        top, total, mean = _absorb(widen(k), widen(s), top, total, mean, SLOTS)
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
    width, slices = _channels(ratio, channels)
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
            **_slots(ratio, width),
            num_warps=4,
            **_launch.options(kv),
        )
    return out
