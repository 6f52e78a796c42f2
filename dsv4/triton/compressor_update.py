"""Kernel of ``compressor_update`` of ``dsv4.ops.compressor``: states and windows of a ragged batch.

A program pools a window in registers (``_lib/window_pooling.py``). The programs of a ragged batch
are, first, one *head* per entry of the batch. The open window of the entry's state, with the new
tokens that belong to it, is loaded once: it is pooled if it closes, with overlap also as the window
before the next. The last new tokens are stored, each in the slot of its position modulo the number
of slots. Nobody else touches that state, so one launch does all without a race. The windows after
those hold new tokens alone; each is a *tail*. An entry with n tokens has at most n // m of them, so
``B + T // m`` programs are enough, the number of output rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.ops.compressor import CompressorUpdateArgs
from dsv4.triton._lib.numerics import once, wait_for_inputs, widen
from dsv4.triton._lib.window_pooling import (
    ABSENT,
    channels_of,
    pool_slots,
    pooling_tiles,
    score_of,
    store_pooled,
    with_stride,
)
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

_STEP = tl.constexpr(4)  # new tokens of an open window stored together
# Entries of the batch looked at together. A kernel for 1024 took twice as long to compile as one
# for 256 (2.3 to 3.7 s).
_SCANS = (1, 32, 64, 256)


@triton.jit
def _clip(number):
    """An int64 difference of positions as int32; only what is near 0 matters."""
    return tl.minimum(tl.maximum(number, -(1 << 30)), 1 << 30).to(tl.int32)


@triton.jit
def _load_tokens(tokens, token, slot, column, mask):
    """kv, score and ape as stored of tokens ``token + slot`` of a window; elsewhere 0, -inf, 0.

    ``tokens``: pointers and row strides of kv, score and ape. ``token``: int64. Nothing is computed
    from what is loaded, so that nothing waits.
    """
    kv, kv_stride, score, score_stride, ape, ape_stride = tokens
    # Offsets within a tile are of 32 bits. Tokens are read once, past the first-level cache, where
    # ape stays.
    kv = kv + token * kv_stride + (slot * kv_stride + column)
    score = score + token * score_stride + (slot * score_stride + column)
    k = tl.load(kv, mask=mask, other=0.0, cache_modifier=".cg")
    s = tl.load(score, mask=mask, other=ABSENT, cache_modifier=".cg")
    return k, s, tl.load(ape + (slot * ape_stride + column), mask=mask, other=0.0)


@triton.jit
def _ring_slots(window, slot, RATIO: tl.constexpr, RING: tl.constexpr):
    """Slots ``[SLOTS, 1]`` of a state of RING slots that hold the tokens of a window.

    A ring that is no multiple of a window, such as 136 slots of windows of 128, is wrapped.
    """
    if RING == RATIO:
        return slot
    here = (window * RATIO % RING).to(tl.int32) + slot
    return here if RING % RATIO == 0 else tl.where(here < RING, here, here - RING)


@triton.jit
def _load_state(state, slot, column, mask):
    """kv and score of slots of the state; elsewhere 0, -inf.

    ``state``: pointer to the sequence's row, then the strides of slot, kind and column.
    """
    row, by_slot, by_kind, by_column = state
    address = row + (slot * by_slot + column * by_column)
    k = tl.load(address, mask=mask, other=0.0)
    return k, tl.load(address + by_kind, mask=mask, other=ABSENT)


@triton.jit
def _store_state(state, slot, column, mask, kv, score):
    row, by_slot, by_kind, by_column = state
    address = row + (slot * by_slot + column * by_column)
    tl.store(address, kv, mask=mask)
    tl.store(address + by_kind, score, mask=mask)


@triton.jit
def _merge(new, k, s, a, x, y):
    """kv and score of slots as loaded, new or kept."""
    return tl.where(new, widen(k), x), tl.where(new, score_of(s, a), y)


@triton.jit
def _locate(batch, count, program, HEADS: tl.constexpr, RATIO: tl.constexpr, SCAN: tl.constexpr):
    """Find the window that a program pools, by a scan over the batch.

    Returns ``(b, tail, before, total)``: the entry (``count``: it is a tail too many), which of its
    tails, and the closed windows of the entries before it and of all.
    """
    cu, starts, sequences = batch
    number = program - count
    b = tl.full([], 0, tl.int32)
    skipped, before, total, tails = b, b, b, b
    for begin in range(0, count, SCAN):
        i = begin + tl.arange(0, SCAN)
        inside = i < count
        first = tl.load(cu + i, mask=inside, other=0).to(tl.int64)
        end = tl.load(cu + i + 1, mask=inside, other=0).to(tl.int64)
        start = tl.load(starts + i, mask=inside, other=0).to(tl.int64)
        row = tl.load(sequences + i, mask=inside, other=-1)
        live = (end > first) & (row >= 0)
        closed = (start + end - first) // RATIO - start // RATIO
        closed = tl.where(live, closed, 0).to(tl.int32)
        tail = tl.maximum(closed - HEADS, 0)
        after = tails + tl.cumsum(tail, 0)
        earlier = tl.where(number < 0, i < program, after <= number) & inside
        b += tl.sum(earlier.to(tl.int32), 0)
        skipped += tl.sum(tl.where(earlier, tail, 0), 0)
        before += tl.sum(tl.where(earlier, closed, 0), 0)
        total += tl.sum(closed, 0)
        tails += tl.sum(tail, 0)
    return b, number - skipped, before, total


@triton.jit
def _before(
    batch,
    count,
    b,
    closed,
    HEADS: tl.constexpr,
    RATIO: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Closed windows of the entries before entry b, which closes ``closed``, and of all."""
    if SCAN == 1:  # it is the only one
        return closed * 0, closed
    _, _, before, total = _locate(batch, count, b, HEADS, RATIO, SCAN)
    return before, total


@triton.jit
def _entry(batch, b):
    """Return first token, start, end, state row of entry b; padding is empty, in row 0."""
    cu, starts, sequences = batch
    first = tl.load(cu + b).to(tl.int64)
    length = tl.load(cu + b + 1).to(tl.int64) - first
    start = tl.load(starts + b).to(tl.int64)
    row = tl.load(sequences + b).to(tl.int64)
    live = (length > 0) & (row >= 0)
    return first, start, tl.where(live, start + length, start), tl.where(live, row, 0)


@fast_launch
@triton.jit(do_not_specialize=["count", "head_slices", "tail_slices"])
def _update_kernel(
    tokens,
    state,
    batch,
    count,
    out,
    head_slices,
    tail_slices,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    CHANNELS: tl.constexpr,
    SLOTS: tl.constexpr,
    RING: tl.constexpr,
    HEAD_WIDTH: tl.constexpr,
    TAIL_WIDTH: tl.constexpr,
    SCAN: tl.constexpr,
    SEVERAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program per row of the output and slice of its channels, heads first.

    SEVERAL: whether an entry may close more than one window; else there are no tails, and what is
    left is a third to a half of the instructions.
    """
    for _ in range(once(PDL)):
        wait_for_inputs(PDL)
        program = tl.program_id(0)
        slot = tl.arange(0, SLOTS)[:, None]
        heads = count * head_slices
        if SEVERAL and program >= heads:
            _tail(
                tokens,
                batch,
                count,
                out,
                count + (program - heads) // tail_slices,
                slot,
                channels_of((program - heads) % tail_slices, TAIL_WIDTH),
                RATIO,
                OVERLAP,
                CHANNELS,
                SCAN,
            )
        else:
            _head(
                tokens,
                state,
                batch,
                count,
                out,
                program // head_slices,
                slot,
                channels_of(program % head_slices, HEAD_WIDTH),
                RATIO,
                OVERLAP,
                CHANNELS,
                RING,
                SCAN,
                SEVERAL,
            )


@triton.jit
def _head(
    tokens,
    state,
    batch,
    count,
    out,
    b,
    slot,
    channel,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    CHANNELS: tl.constexpr,
    RING: tl.constexpr,
    SCAN: tl.constexpr,
    SEVERAL: tl.constexpr,
):
    """Pool the windows of entry b that its state has a part in, and overwrite that state."""
    first, start, end, row = _entry(batch, b)
    base, by_row, by_slot, by_kind, by_column = state
    entry_state = (base + row * by_row, by_slot, by_kind, by_column)
    window = start // RATIO
    lag = _clip(start - window * RATIO)
    closed = _clip(end // RATIO - window)
    token = first - lag
    if (closed > 0) | (slot.shape[0] <= _STEP):
        _renew(
            tokens,
            entry_state,
            batch,
            count,
            out,
            b,
            (token, start, end, window, row),
            slot,
            channel,
            RATIO,
            OVERLAP,
            CHANNELS,
            RING,
            SCAN,
            SEVERAL,
        )
    else:
        # A long window stays open: the new tokens alone are stored, a few at a time.
        for begin in range(lag, _clip(end - window * RATIO), _STEP):
            i = begin + tl.arange(0, _STEP)[:, None]
            inside = (i < _clip(end - window * RATIO)) & (channel < CHANNELS)
            here = _ring_slots(window, i, RATIO, RING)
            for half in tl.static_range(1 + OVERLAP):
                column = channel + half * CHANNELS
                k, s, a = _load_tokens(tokens, token, i, column, inside)
                _store_state(entry_state, here, column, inside, widen(k), score_of(s, a))
        _, total = _before(batch, count, b, closed, 1 + OVERLAP, RATIO, SCAN)
        _clear_unused(out, b, total, slot, channel, CHANNELS)


@triton.jit
def _renew(
    tokens,
    entry_state,
    batch,
    count,
    out,
    b,
    entry,
    slot,
    channel,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    CHANNELS: tl.constexpr,
    RING: tl.constexpr,
    SCAN: tl.constexpr,
    SEVERAL: tl.constexpr,
):
    """Pool the windows that close and store new tokens, with the whole open window in registers."""
    token, start, end, window, row = entry
    here = _ring_slots(window, slot, RATIO, RING)
    lag = _clip(start - window * RATIO)
    closed = _clip(end // RATIO - window)
    inside = channel < CHANNELS
    own = channel + (CHANNELS if OVERLAP else 0)
    # Slots of the open window: those that are new and, if it closes, those that were there.
    new = (slot >= lag) & (slot < tl.minimum(_clip(end - window * RATIO), RATIO)) & inside
    old = (slot < tl.where(closed > 0, lag, 0)) & inside
    k, s, a = _load_tokens(tokens, token, slot, own, new)
    x, y = _load_state(entry_state, here, own, old)
    if OVERLAP:
        k0, s0, a0 = _load_tokens(tokens, token, slot, channel, new)
        x0, y0 = _load_state(entry_state, here, channel, old)
        there = (slot < tl.where((closed > 0) & (window > 0), RATIO, 0)) & inside
        earlier = _ring_slots(window - 1, slot, RATIO, RING)
        before = _load_state(entry_state, earlier, channel, there)
    out_row, total = _before(batch, count, b, closed, 1 + OVERLAP, RATIO, SCAN)
    _clear_unused(out, b, total, slot, channel, CHANNELS)
    if closed > 0:
        # The windows that follow hold new tokens alone; loaded before anything waits for a load.
        after = token + closed * RATIO
        begun = (slot < tl.minimum(_clip(end - (window + closed) * RATIO), RATIO)) & inside
        ka, sa, aa = _load_tokens(tokens, after, slot, own, begun)
        position = window * RATIO
        if OVERLAP:
            ka0, sa0, aa0 = _load_tokens(tokens, after, slot, channel, begun)
        if OVERLAP and SEVERAL:
            later = (slot < tl.where(closed > 1, RATIO, 0)) & inside
            k1, s1, a1 = _load_tokens(tokens, token + RATIO, slot, own, later)
        kv, score = _merge(new, k, s, a, x, y)
        if OVERLAP:
            kv0, score0 = _merge(new, k0, s0, a0, x0, y0)
            values = pool_slots(kv, score, before[0], before[1], RATIO, True)
        else:
            values = pool_slots(kv, score, kv, score, RATIO, False)
        _store_row(out, out_row, position, row, values, slot, channel, CHANNELS)
        # What all threads have read of the state may now be overwritten by any.
        tl.debug_barrier()
        begins = _ring_slots(window + closed, slot, RATIO, RING)
        _store_state(entry_state, begins, own, begun, widen(ka), score_of(sa, aa))
        if SEVERAL:
            new = new & (slot >= _clip(end - RING - window * RATIO))
        _store_state(entry_state, here, own, new, kv, score)
        if OVERLAP:
            _store_state(entry_state, begins, channel, begun, widen(ka0), score_of(sa0, aa0))
            _store_state(entry_state, here, channel, new, kv0, score0)
            if SEVERAL and closed > 1:
                values = pool_slots(widen(k1), score_of(s1, a1), kv0, score0, RATIO, True)
                position += RATIO
                _store_row(out, out_row + 1, position, row, values, slot, channel, CHANNELS)
        if SEVERAL:
            # Whole windows of new tokens, of which a later window or a rollback may pool some.
            recent = tl.maximum(end - RING, 0)
            for i in range(tl.maximum(_clip(recent // RATIO - window), 1), closed):
                last = (slot >= _clip(recent - (window + i) * RATIO)) & (slot < RATIO) & inside
                target = _ring_slots(window + i, slot, RATIO, RING)
                for half in tl.static_range(1 + OVERLAP):
                    column = channel + half * CHANNELS
                    k, s, a = _load_tokens(tokens, token + i * RATIO, slot, column, last)
                    _store_state(entry_state, target, column, last, widen(k), score_of(s, a))
    else:
        # The window stays open.
        _store_state(entry_state, here, own, new, widen(k), score_of(s, a))
        if OVERLAP:
            _store_state(entry_state, here, channel, new, widen(k0), score_of(s0, a0))


@triton.jit
def _tail(
    tokens,
    batch,
    count,
    out,
    number,
    slot,
    channel,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    CHANNELS: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Pool one window of new tokens alone."""
    b, tail, out_row, total = _locate(batch, count, number, 1 + OVERLAP, RATIO, SCAN)
    _clear_unused(out, number, total, slot, channel, CHANNELS)
    if b < count:
        first, start, _, row = _entry(batch, b)
        skipped = 1 + OVERLAP + tail
        window = start // RATIO + skipped
        token = first + window * RATIO - start
        whole = (slot < RATIO) & (channel < CHANNELS)
        own = channel + (CHANNELS if OVERLAP else 0)
        k, s, a = _load_tokens(tokens, token, slot, own, whole)
        if OVERLAP:
            k0, s0, a0 = _load_tokens(tokens, token - RATIO, slot, channel, whole)
        kv, score = widen(k), score_of(s, a)
        kv0, score0 = kv, score
        if OVERLAP:
            kv0, score0 = widen(k0), score_of(s0, a0)
        values = pool_slots(kv, score, kv0, score0, RATIO, OVERLAP)
        out_row += skipped
        _store_row(out, out_row, window * RATIO, row, values, slot, channel, CHANNELS)


@triton.jit
def _store_row(target, out_row, position, owner, values, slot, channel, CHANNELS: tl.constexpr):
    """Row ``out_row`` of pooled, positions and owners."""
    pooled, positions, owners = target
    out_row = out_row.to(tl.int64)
    store_pooled(pooled + out_row * CHANNELS, values, slot, channel, CHANNELS)
    first, here = channel == 0, out_row + tl.zeros_like(channel)
    tl.store(positions + here, position, mask=first)
    tl.store(owners + here, owner, mask=first)


@triton.jit
def _clear_unused(out, row, total, slot, channel, CHANNELS: tl.constexpr):
    """Clear the output's row ``row`` if only ``total`` are used."""
    if row >= total:
        none = tl.full([], -1, tl.int64)
        nothing = tl.zeros([channel.shape[1]], tl.float32)
        _store_row(out, row, none, none, nothing, slot, channel, CHANNELS)


def compressor_update(
    args: CompressorUpdateArgs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.compressor.compressor_update``."""
    kv = args.kv
    ratio, batch = args.ape.shape[0], args.starts.shape[0]
    rows, channels = kv.shape[0] // ratio + batch, kv.shape[1] // (1 + args.overlap)
    pooled = torch.empty((rows, channels), dtype=torch.float32, device=kv.device)
    positions = torch.empty(rows, dtype=torch.int64, device=kv.device)
    owners = torch.empty_like(positions)
    if batch == 0:
        return pooled.zero_(), positions.fill_(-1), owners.fill_(-1)
    head, tail, warps = pooling_tiles(launch_options.power_of_two(ratio), channels, rows)
    heads, tails = triton.cdiv(channels, head), triton.cdiv(channels, tail)
    programs, several = batch * heads + (rows - batch) * tails, rows > batch
    with launch_options.on(kv):
        _update_kernel[(programs,)](
            tuple(part for x in (kv, args.score, args.ape) for part in with_stride(x, ratio)),
            (args.state, *args.state.stride()),
            (args.cu_seqlens.contiguous(), args.starts.contiguous(), args.sequences.contiguous()),
            batch,
            (pooled, positions, owners),
            heads,
            tails,
            RATIO=ratio,
            OVERLAP=args.overlap,
            CHANNELS=channels,
            SLOTS=launch_options.power_of_two(ratio),
            RING=args.state.shape[1],
            HEAD_WIDTH=head,
            TAIL_WIDTH=tail,
            SCAN=next(size for size in _SCANS if size >= min(batch, _SCANS[-1])),
            SEVERAL=several,
            num_warps=warps,
            **launch_options.options(
                kv, small=not several and launch_options.is_small(programs, warps)
            ),
        )
    return pooled, positions, owners
