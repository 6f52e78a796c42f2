"""Kernels of ``dsv4.ops.compressor``: a program pools a window in registers.

Tiles are ``[slots, channels]``, a slot per token of a window; a thread holds four neighbouring
channels of some slots. Whatever is loaded or stored is such a tile, so that all have one layout,
and threads exchange nothing but sums over slots.

The programs of a ragged batch are, first, one *head* per entry of the batch. The open window of the
entry's state, with the new tokens that belong to it, is loaded once: it is pooled if it closes,
with overlap also as the window before the next. The last new tokens are stored, each in the slot of
its position modulo the number of slots. Nobody else touches that state, so one launch does all
without a race. The windows after those hold new tokens alone; each is a *tail*. An entry with n
tokens has at most n // m of them, so ``B + T // m`` programs are enough, the number of output rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.kv_cache.pages import COMPACT_FORMATS
from dsv4.ops._library import as_record
from dsv4.ops.compressor import CompressorUpdateArgs, CompressWriteArgs, PoolWindowsArgs
from dsv4.triton._lib import cache_entries, row_tiles
from dsv4.triton._lib.angles import cos_sin
from dsv4.triton._lib.compressed_entries import norm_and_rotate, store_entry
from dsv4.triton._lib.hadamard import hadamard_row, rotate_quantize_row
from dsv4.triton._lib.numerics import INTERPRETED, narrow, once, wait_for_inputs, widen
from dsv4.triton._lib.nvfp4 import conversion
from dsv4.triton._lib.prefetch import prefetch_row
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

_ABSENT = tl.constexpr(float("-inf"))
_LOG2E = tl.constexpr(1.4426950408889634)
_VECTOR = tl.constexpr(4)  # channels of a thread: 16 bytes of float32
_STEP = tl.constexpr(4)  # new tokens of an open window stored together
# Entries of the batch looked at together. A kernel for 1024 took twice as long to compile as one
# for 256 (2.3 to 3.7 s).
_SCANS = (1, 32, 64, 256)
_WARPS = 2048  # warps of all programs up to which rows count as few
_FAR = 1 << 31  # elements that 32-bit offsets reach


@triton.jit
def _channels(piece, WIDTH: tl.constexpr):
    """Channels ``[1, WIDTH]`` of a program.

    Declared contiguous by four alone: loads of 2-byte numbers then take as many as those of 4-byte
    ones and stores, and no tile changes its layout. ``piece`` must not be known to be 0 when the
    kernel is compiled, or the sum that carries the declaration is gone.
    """
    channel = piece * WIDTH + tl.arange(0, WIDTH)
    if WIDTH >= _VECTOR:
        channel = tl.max_contiguous(tl.multiple_of(channel, _VECTOR), _VECTOR)
    return channel[None, :]


@triton.jit
def _pool(kv, score, earlier_kv, earlier_score, RATIO: tl.constexpr, OVERLAP: tl.constexpr):
    """Return means ``[WIDTH]`` of the slots of a tile, and with overlap of an earlier one.

    Weights are divided by more than the slots, so that a sum of finite products is finite. A
    channel without a finite score has weights of 0, and 0 / 0 makes it NaN. A maximum passes NaN
    over; the weight of a NaN is NaN.
    """
    LESS: tl.constexpr = RATIO.bit_length() + OVERLAP
    top = tl.max(tl.maximum(score, earlier_score) if OVERLAP else score, 0)
    base = tl.where(top == _ABSENT, 0.0, top)[None, :]
    weight = power((score - base) * _LOG2E, LESS)
    total, mean = weight, weight * kv
    if OVERLAP:
        weight = power((earlier_score - base) * _LOG2E, LESS)
        total, mean = total + weight, mean + weight * earlier_kv
    # Side by side: warps hand both to each other at once.
    mean, total = tl.split(tl.sum(tl.join(mean, total), 0))
    return mean / total


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
    s = tl.load(score, mask=mask, other=_ABSENT, cache_modifier=".cg")
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
    return k, tl.load(address + by_kind, mask=mask, other=_ABSENT)


@triton.jit
def _store_state(state, slot, column, mask, kv, score):
    row, by_slot, by_kind, by_column = state
    address = row + (slot * by_slot + column * by_column)
    tl.store(address, kv, mask=mask)
    tl.store(address + by_kind, score, mask=mask)


@triton.jit
def _score(s, a):
    return widen(s) + widen(a)


@triton.jit
def _merge(new, k, s, a, x, y):
    """kv and score of slots as loaded, new or kept."""
    return tl.where(new, widen(k), x), tl.where(new, _score(s, a), y)


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
                _channels((program - heads) % tail_slices, TAIL_WIDTH),
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
                _channels(program % head_slices, HEAD_WIDTH),
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
                _store_state(entry_state, here, column, inside, widen(k), _score(s, a))
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
            values = _pool(kv, score, before[0], before[1], RATIO, True)
        else:
            values = _pool(kv, score, kv, score, RATIO, False)
        _store_row(out, out_row, position, row, values, slot, channel, CHANNELS)
        # What all threads have read of the state may now be overwritten by any.
        tl.debug_barrier()
        begins = _ring_slots(window + closed, slot, RATIO, RING)
        _store_state(entry_state, begins, own, begun, widen(ka), _score(sa, aa))
        if SEVERAL:
            new = new & (slot >= _clip(end - RING - window * RATIO))
        _store_state(entry_state, here, own, new, kv, score)
        if OVERLAP:
            _store_state(entry_state, begins, channel, begun, widen(ka0), _score(sa0, aa0))
            _store_state(entry_state, here, channel, new, kv0, score0)
            if SEVERAL and closed > 1:
                values = _pool(widen(k1), _score(s1, a1), kv0, score0, RATIO, True)
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
                    _store_state(entry_state, target, column, last, widen(k), _score(s, a))
    else:
        # The window stays open.
        _store_state(entry_state, here, own, new, widen(k), _score(s, a))
        if OVERLAP:
            _store_state(entry_state, here, channel, new, widen(k0), _score(s0, a0))


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
        kv, score = widen(k), _score(s, a)
        kv0, score0 = kv, score
        if OVERLAP:
            kv0, score0 = widen(k0), _score(s0, a0)
        values = _pool(kv, score, kv0, score0, RATIO, OVERLAP)
        out_row += skipped
        _store_row(out, out_row, window * RATIO, row, values, slot, channel, CHANNELS)


@triton.jit
def _store_row(target, out_row, position, owner, values, slot, channel, CHANNELS: tl.constexpr):
    """Row ``out_row`` of pooled, positions and owners."""
    pooled, positions, owners = target
    out_row = out_row.to(tl.int64)
    _store_pooled(pooled + out_row * CHANNELS, values, slot, channel, CHANNELS)
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


@triton.jit
def _store_pooled(row, values, slot, channel, CHANNELS: tl.constexpr):
    """Values ``[WIDTH]``, sums over the slots of a tile, stored as the tile's slot 0.

    Every thread of a channel holds its sum. One of them stores it, and none hands it to another.
    """
    address = row + (channel + tl.zeros_like(slot))
    values = tl.broadcast_to(values[None, :], address.shape)
    tl.store(address, values, mask=(slot == 0) & (channel < CHANNELS))


def _tiles(slots: int, channels: int, rows: int) -> tuple[int, int, int]:
    """Channels of a head and of a tail, and warps of either, for that many rows.

    Few rows: a thread has little of a tile, because its instructions take longer than a load. Many:
    as much as its registers hold, because a warp's instructions per tile count, too;
    heads, which hold more for each number, are narrow.
    """
    limit = launch_options.power_of_two(channels)
    narrow = min(limit, max(16, 128 // slots))
    warps = _warps(slots * narrow, 512)
    if rows * triton.cdiv(channels, narrow) * warps <= _WARPS:
        return narrow, narrow, warps
    wide = min(limit, max(32, 1024 // slots))
    warps = _warps(slots * wide, 1024)
    return min(limit, max(16, 128 * warps // slots)), wide, warps


def _warps(numbers: int, share: int) -> int:
    return min(16, max(1, numbers // share))


def _with_stride(x: torch.Tensor, slots: int) -> tuple[torch.Tensor, int]:
    """Rows and their stride; copied where 32-bit offsets do not reach over ``slots`` of them."""
    rows = row_tiles.as_rows(x)
    if slots * rows.stride(0) >= _FAR:
        rows = rows.contiguous()
    return rows, rows.stride(0)


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
    head, tail, warps = _tiles(launch_options.power_of_two(ratio), channels, rows)
    heads, tails = triton.cdiv(channels, head), triton.cdiv(channels, tail)
    programs, several = batch * heads + (rows - batch) * tails, rows > batch
    with launch_options.on(kv):
        _update_kernel[(programs,)](
            tuple(part for x in (kv, args.score, args.ape) for part in _with_stride(x, ratio)),
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


@fast_launch
@triton.jit(do_not_specialize=["table_stride", "table_pages"])
def _entry_kernel(
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
    COMPACT: tl.constexpr,
    CONVERT: tl.constexpr,
    ROTATE_QUANTIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    TABLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm, rotation, rounding to FP4 if asked, and storage of one pooled row.

    COMPACT: the format of pages that round index keys by themselves, else None.
    Angles are those of all pairs; frequencies of 0 leave the ones before the rotated dims alone.
    """
    if tl.program_id(0) == 0:
        prefetch_row(weight, DIM, BLOCK)
        prefetch_row(frequencies, ROTATED // 2, BLOCK // 2)
    wait_for_inputs(PDL)
    UNROTATED: tl.constexpr = DIM - ROTATED
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    pair = tl.arange(0, BLOCK // 2)[None, :] - UNROTATED // 2
    rotating = (pair >= 0) & (pair < ROTATED // 2)
    # No branch around rows without an owner: loads behind it would be a trip to memory more.
    row = tl.load(owners + program)
    position = tl.load(positions + program)
    values = tl.load(pooled + program * DIM + column, mask=column < DIM, other=0.0)
    scale = widen(tl.load(weight + column, mask=column < DIM, other=0.0))
    frequency = tl.load(frequencies + pair, mask=rotating, other=0.0)
    own_table = table + tl.maximum(row, 0) * table_stride
    owned = tl.where(row >= 0, table_pages, 0)
    slots = _slot(own_table, owned, position // RATIO, PAGE_SIZE)
    c, s = cos_sin(frequency * position.to(tl.float32))
    c, s = widen(narrow(c, TABLE)), widen(narrow(s, TABLE))
    entry = norm_and_rotate(values, scale, eps, c, s, column, DIM, ROTATED, DTYPE)
    if ROTATE_QUANTIZE:
        if COMPACT is not None:
            entry = narrow(hadamard_row(widen(entry), DIM), DTYPE)
        else:
            entry = narrow(rotate_quantize_row(widen(entry), DIM, DTYPE), DTYPE)
    pages = data, data_stride
    store_entry(pages, slots, entry, DIM, NOPE, PAGE_SIZE, COMPACT, CONVERT)


@triton.jit
def _slot(table, pages, number, PAGE_SIZE: tl.constexpr):
    """Slot of entry ``number`` of a sequence, int64 ``[1]``; negative where it has no page."""
    page = number // PAGE_SIZE + tl.arange(0, 1)
    inside = page < pages
    physical = tl.load(table + page, mask=inside, other=-1).to(tl.int64)
    return tl.where(inside, physical * PAGE_SIZE + number % PAGE_SIZE, -1)


def compress_write(args: CompressWriteArgs) -> None:
    """See ``dsv4.ops.compressor.compress_write``."""
    if args.starts.shape[0] == 0:
        return
    pooled, positions, owners = compressor_update(as_record(CompressorUpdateArgs, args))
    table = args.page_table if args.page_table.stride(1) == 1 else args.page_table.contiguous()
    fp8 = args.entry_format == "fp8"
    block = (
        cache_entries.block(args.head_dim) if fp8 else launch_options.power_of_two(args.head_dim)
    )
    with launch_options.on(pooled):
        _entry_kernel[(pooled.shape[0],)](
            pooled,
            positions,
            owners,
            args.norm_weight.contiguous(),
            args.inv_freq.contiguous(),
            args.eps,
            args.data,
            cache_entries.page_stride(args.data),
            table,
            table.stride(0),
            table.shape[1] if args.data.shape[0] else 0,
            RATIO=args.ape.shape[0],
            DIM=args.head_dim,
            NOPE=args.head_dim - args.rope_dim,
            ROTATED=2 * args.inv_freq.shape[0],
            BLOCK=block,
            PAGE_SIZE=args.page_size,
            COMPACT=args.entry_format if args.entry_format in COMPACT_FORMATS else None,
            CONVERT=conversion(args.data),
            ROTATE_QUANTIZE=args.rotate_quantize,
            DTYPE=row_tiles.TYPES[args.dtype],
            TABLE=row_tiles.TYPES[args.table_dtype],
            num_warps=min(16, max(1, block // 128)),
            **launch_options.options(pooled),
        )


@triton.jit
def _load_window(source, first, slot, column, mask):
    """kv and score as stored of rows ``first + slot``; elsewhere 0, -inf."""
    kv, kv_stride, score, score_stride = source
    k = tl.load(kv + first * kv_stride + (slot * kv_stride + column), mask=mask, other=0.0)
    address = score + first * score_stride + (slot * score_stride + column)
    return k, tl.load(address, mask=mask, other=_ABSENT)


@fast_launch
@triton.jit(do_not_specialize=["slices"])
def _windows_kernel(
    source,
    previous,
    out,
    windows,
    slices,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    CHANNELS: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program per window and slice of channels. ``previous``: pointers, or None twice."""
    for _ in range(once(PDL)):
        wait_for_inputs(PDL)
        row = (tl.program_id(0) // slices).to(tl.int64)
        slot = tl.arange(0, SLOTS)[:, None]
        channel = _channels(tl.program_id(0) % slices, WIDTH)
        inside = channel < CHANNELS
        own = channel + (CHANNELS if OVERLAP else 0)
        k, s = _load_window(source, row * RATIO, slot, own, (slot < RATIO) & inside)
        if OVERLAP:
            # The window before: a neighbour, the one given, or absent.
            first = row % windows == 0
            inner = (slot < tl.where(first, 0, RATIO)) & inside
            k0, s0 = _load_window(source, (row - 1) * RATIO, slot, channel, inner)
            if previous is not None:
                outer = (slot < tl.where(first, RATIO, 0)) & inside
                strides = previous[0], CHANNELS, previous[1], CHANNELS
                k1, s1 = _load_window(strides, row // windows * RATIO, slot, channel, outer)
        kv, score = widen(k), widen(s)
        kv0, score0 = kv, score
        if OVERLAP:
            kv0, score0 = widen(k0), widen(s0)
            if previous is not None:
                kv0, score0 = tl.where(outer, widen(k1), kv0), tl.where(outer, widen(s1), score0)
        values = _pool(kv, score, kv0, score0, RATIO, OVERLAP)
        _store_pooled(out + row * CHANNELS, values, slot, channel, CHANNELS)


def pool_windows(args: PoolWindowsArgs) -> torch.Tensor:
    """See ``dsv4.ops.compressor.pool_windows``."""
    kv = args.kv
    sequences, windows, ratio, columns = kv.shape
    channels = columns // (1 + args.overlap)
    out = torch.empty((sequences, windows, channels), dtype=torch.float32, device=kv.device)
    if out.numel() == 0:
        return out
    previous = None
    if args.previous_kv is not None and args.previous_score is not None:
        previous = args.previous_kv.contiguous(), args.previous_score.contiguous()
    slots, rows = launch_options.power_of_two(ratio), sequences * windows
    _, width, warps = _tiles(slots, channels, rows)
    slices = triton.cdiv(channels, width)
    with launch_options.on(kv):
        _windows_kernel[(rows * slices,)](
            (*_with_stride(kv, ratio), *_with_stride(args.score, ratio)),
            previous,
            out,
            windows,
            slices,
            RATIO=ratio,
            OVERLAP=args.overlap,
            CHANNELS=channels,
            SLOTS=slots,
            WIDTH=width,
            num_warps=max(warps, width // 128),  # numbers of 4 bytes take more registers
            **launch_options.options(kv, small=launch_options.is_small(rows * slices, warps)),
        )
    return out
