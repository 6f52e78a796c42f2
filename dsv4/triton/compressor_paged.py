"""Kernels of ``dsv4.ops.compressor_paged``: a program has a token and some channels.

The first kernel stores each token's own state and, where a window closes, pools the window: from
the tokens of the call where they are in it, else from the state. So it reads no state that it
writes, and one launch needs no order among its programs. Which of the tokens before are those of
the window is seen from their sequences and positions. Tiles are those of ``triton/compressor``.

The second kernel has a program per token, which ends at once unless an entry is to be stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.kv_cache.pages import COMPACT_FORMATS
from dsv4.ops.compressor_paged import CompressWritePagedArgs
from dsv4.triton._lib import cache_entries, row_tiles
from dsv4.triton._lib.cache_entries import store_entries
from dsv4.triton._lib.index_keys import store_keys
from dsv4.triton._lib.numerics import narrow, wait_for_inputs, widen
from dsv4.triton._lib.nvfp4 import conversion
from dsv4.triton._lib.prefetch import prefetch_row
from dsv4.triton._lib.rms import inverse_rms
from dsv4.triton._lib.rotation import rotate
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch
from dsv4.triton.compressor import _channels, _pool, _score, _store_pooled, _tiles

_ABSENT = tl.constexpr(float("-inf"))


@triton.jit
def _load_rows(tokens, before, phase, column, mask):
    """kv and score with ape of the tokens ``before [SLOTS, 1]`` of the call; elsewhere 0, -inf."""
    kv, kv_stride, score, score_stride, ape, ape_stride = tokens
    row = before.to(tl.int64)
    k = tl.load(kv + row * kv_stride + column, mask=mask, other=0.0)
    s = tl.load(score + row * score_stride + column, mask=mask, other=_ABSENT)
    a = tl.load(ape + phase * ape_stride + column, mask=mask, other=0.0)
    return widen(k), _score(s, a)


@triton.jit
def _load_state(state, block, row, column, mask, COLUMNS: tl.constexpr):
    """kv and score of rows ``[SLOTS, 1]`` of the state; elsewhere 0, -inf."""
    data, by_block, by_row = state
    address = data + block.to(tl.int64) * by_block + (row * by_row + column)
    k = tl.load(address, mask=mask, other=0.0)
    return k, tl.load(address + COLUMNS, mask=mask, other=_ABSENT)


@triton.jit
def _window(
    tokens,
    state,
    batch,
    row,
    token,
    last,
    behind,
    column,
    mask,
    RATIO: tl.constexpr,
    COLUMNS: tl.constexpr,
    STATES: tl.constexpr,
):
    """kv and score ``[SLOTS, WIDTH]`` of tokens ``behind [SLOTS, 1]`` positions before the last.

    ``row``: the sequence of ``token``; ``last``: its position. What has no position is absent.
    """
    positions, sequences, table, table_stride = batch
    before, position = token - behind, last - behind
    mask = mask & (position >= 0)
    near = mask & (before >= 0)
    same = tl.load(sequences + before, mask=near, other=-1) == row
    same = same & (tl.load(positions + before, mask=near, other=-1) == position)
    new, old = mask & near & same, mask & ~(near & same)
    k, s = _load_rows(tokens, before, position % RATIO, column, new)
    block = tl.load(table + row.to(tl.int64) * table_stride + position // STATES, mask=old, other=0)
    x, y = _load_state(state, block, position % STATES, column, old, COLUMNS)
    return tl.where(new, k, x), tl.where(new, s, y)


@fast_launch
@triton.jit(do_not_specialize=["slices"])
def _pool_kernel(
    tokens,
    state,
    state_slots,
    batch,
    slots,
    pooled,
    slices,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    CHANNELS: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    STATES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program per token and slice of its channels."""
    wait_for_inputs(PDL)
    COLUMNS: tl.constexpr = (1 + OVERLAP) * CHANNELS
    token = tl.program_id(0) // slices
    channel = _channels(tl.program_id(0) % slices, WIDTH)
    inside = channel < CHANNELS
    positions, sequences, _, _ = batch
    own = tl.load(state_slots + token).to(tl.int64)
    if own >= 0:
        last = tl.load(positions + token).to(tl.int32)
        zero = tl.zeros([1, 1], tl.int32)
        data, by_block, by_row = state
        for half in tl.static_range(1 + OVERLAP):
            column = channel + half * CHANNELS
            k, s = _load_rows(tokens, token + zero, last % RATIO + zero, column, inside)
            address = data + (own // STATES) * by_block + ((own % STATES) * by_row + column)
            tl.store(address, k, mask=inside)
            tl.store(address + COLUMNS, s, mask=inside)
        if (tl.load(slots + token) >= 0) & ((last + 1) % RATIO == 0):
            slot = tl.arange(0, SLOTS)[:, None]
            row = tl.load(sequences + token)
            mask = (slot < RATIO) & inside
            # The order of a window is ascending; slots past it are absent.
            behind = RATIO - 1 - slot
            second = channel + (CHANNELS if OVERLAP else 0)
            kv, score = _window(
                tokens, state, batch, row, token, last, behind, second, mask, RATIO, COLUMNS, STATES
            )
            kv0, score0 = kv, score
            if OVERLAP:
                kv0, score0 = _window(
                    tokens,
                    state,
                    batch,
                    row,
                    token,
                    last,
                    behind + RATIO,
                    channel,
                    mask,
                    RATIO,
                    COLUMNS,
                    STATES,
                )
            values = _pool(kv, score, kv0, score0, RATIO, OVERLAP)
            row_of_token = pooled + token.to(tl.int64) * CHANNELS
            _store_pooled(row_of_token, values, slot, channel, CHANNELS)


@fast_launch
@triton.jit
def _paged_entry_kernel(
    pooled,
    positions,
    state_slots,
    slots,
    weight,
    angles,
    angles_stride,
    eps,
    data,
    data_stride,
    RATIO: tl.constexpr,
    DIM: tl.constexpr,
    NOPE: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    COMPACT: tl.constexpr,
    CONVERT: tl.constexpr,
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm, rotation and storage of one pooled row. COMPACT: as in ``triton/compressor``."""
    if tl.program_id(0) == 0:
        prefetch_row(weight, DIM, BLOCK)
    wait_for_inputs(PDL)
    UNROTATED: tl.constexpr = DIM - ROTATED
    program = tl.program_id(0).to(tl.int64)
    where = tl.load(slots + program + tl.arange(0, 1)).to(tl.int64)
    last = tl.load(positions + program).to(tl.int64)
    closes = (tl.max(where, 0) >= 0) & (tl.load(state_slots + program) >= 0)
    if closes & ((last + 1) % RATIO == 0):
        column = tl.arange(0, BLOCK)[None, :]
        pair = tl.arange(0, BLOCK // 2)[None, :] - UNROTATED // 2
        rotating = (pair >= 0) & (pair < ROTATED // 2)
        values = tl.load(pooled + program * DIM + column, mask=column < DIM, other=0.0)
        scale = widen(tl.load(weight + column, mask=column < DIM, other=0.0))
        table = angles + (last + 1 - RATIO) * angles_stride
        c = tl.load(table + pair, mask=rotating, other=1.0)
        s = tl.load(table + ROTATED // 2 + pair, mask=rotating, other=0.0)
        values = widen(narrow(values, DTYPE))
        rms = inverse_rms(tl.sum(values * values, 1), DIM, eps)
        normed = widen(narrow(scale * (values * rms[:, None]), DTYPE))
        entry = narrow(tl.where(column < UNROTATED, normed, rotate(normed, c, s)), DTYPE)
        if COMPACT is not None:
            store_keys(data, data_stride, where, widen(entry), DIM, PAGE_SIZE, COMPACT, CONVERT)
        else:
            store_entries(data, data_stride, where, entry, NOPE, DIM - NOPE, PAGE_SIZE)


def compress_write_paged(args: CompressWritePagedArgs) -> None:
    """See ``dsv4.ops.compressor_paged.compress_write_paged``."""
    count, dims = args.kv.shape[0], args.head_dim
    if count == 0 or args.state.shape[0] == 0 or args.data.shape[0] == 0:
        return
    pooled = torch.empty((count, dims), dtype=torch.float32, device=args.kv.device)
    positions, state_slots = args.positions.contiguous(), args.state_slots.contiguous()
    slots = args.slots.contiguous()
    with launch_options.on(pooled):
        _launch_pool(args, pooled, positions, state_slots, slots)
        _launch_entries(args, pooled, positions, state_slots, slots)


def _launch_pool(
    args: CompressWritePagedArgs,
    pooled: torch.Tensor,
    positions: torch.Tensor,
    state_slots: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    ratio, state = args.ape.shape[0], args.state
    table = args.state_table if args.state_table.stride(1) == 1 else args.state_table.contiguous()
    padded = launch_options.power_of_two(ratio)
    width, _, warps = _tiles(padded, args.head_dim, pooled.shape[0])
    slices = triton.cdiv(args.head_dim, width)
    rows = tuple(row_tiles.as_rows(x) for x in (args.kv, args.score, args.ape))
    _pool_kernel[(pooled.shape[0] * slices,)](
        tuple(part for x in rows for part in (x, x.stride(0))),
        (state, state.stride(0), state.stride(1)),
        state_slots,
        (positions, args.sequences.contiguous(), table, table.stride(0)),
        slots,
        pooled,
        slices,
        RATIO=ratio,
        OVERLAP=args.overlap,
        CHANNELS=args.head_dim,
        SLOTS=padded,
        WIDTH=width,
        STATES=state.shape[1],
        num_warps=warps,
        **launch_options.options(pooled),
    )


def _launch_entries(
    args: CompressWritePagedArgs,
    pooled: torch.Tensor,
    positions: torch.Tensor,
    state_slots: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    dims = args.head_dim
    block = launch_options.power_of_two(dims)
    if args.entry_format == "fp8":
        block = cache_entries.block(dims)
    angles = row_tiles.as_rows(args.angles)
    _paged_entry_kernel[(pooled.shape[0],)](
        pooled,
        positions,
        state_slots,
        slots,
        args.norm_weight.contiguous(),
        angles,
        angles.stride(0),
        args.eps,
        args.data,
        cache_entries.page_stride(args.data),
        RATIO=args.ape.shape[0],
        DIM=dims,
        NOPE=dims - args.rope_dim,
        ROTATED=angles.shape[1],
        BLOCK=block,
        PAGE_SIZE=args.page_size,
        COMPACT=args.entry_format if args.entry_format in COMPACT_FORMATS else None,
        CONVERT=conversion(args.data),
        DTYPE=row_tiles.TYPES[args.dtype],
        num_warps=min(16, max(1, block // 128)),
        **launch_options.options(pooled),
    )
