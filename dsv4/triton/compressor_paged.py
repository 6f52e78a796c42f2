"""Kernels of ``dsv4.ops.compressor_paged``: a program has a token and some channels.

The first kernel stores each token's own state and, where a window closes, pools the window: from
the tokens of the call where they are in it, else from the state. So it reads no state that it
writes, and one launch needs no order among its programs. Which of the tokens before are those of
the window is seen from their sequences and positions. Tiles are those of ``_lib/window_pooling``.

The second kernel has a program per token, which ends at once unless an entry is to be stored.

For many tokens most programs would end at once, and their launch would take longer than their work.
Both kernels then have programs for groups of neighbours, which look for tokens that close a window.
Other programs store states, one tile of tokens each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.kv_cache.pages import COMPACT_FORMATS
from dsv4.ops.compressor_paged import CompressWritePagedArgs
from dsv4.triton._lib import cache_entries, row_tiles
from dsv4.triton._lib.compressor_windows import (
    closing,
    first_of,
    pool_group,
    pool_window,
    store_pooled_entry,
    store_states,
    store_tile,
)
from dsv4.triton._lib.numerics import wait_for_inputs
from dsv4.triton._lib.nvfp4 import conversion
from dsv4.triton._lib.prefetch import prefetch_row
from dsv4.triton._lib.window_pooling import channels_of, pooling_tiles
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

FEW_TOKENS = 128  # most tokens for which each token has a program
_MOST_GROUPED = 16  # most tokens of a program for more tokens
_COPIED = 512  # most columns of a program that stores states


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
    channel = channels_of(tl.program_id(0) % slices, WIDTH)
    inside = channel < CHANNELS
    positions, _, _, _ = batch
    own = tl.load(state_slots + token).to(tl.int64)
    if own >= 0:
        last = tl.load(positions + token).to(tl.int32)
        zero = tl.zeros([1, 1], tl.int32)
        for half in tl.static_range(1 + OVERLAP):
            column = channel + half * CHANNELS
            store_states(
                tokens,
                state,
                token + zero,
                own,
                last + zero,
                column,
                inside,
                RATIO,
                COLUMNS,
                STATES,
            )
        if (tl.load(slots + token) >= 0) & ((last + 1) % RATIO == 0):
            pool_window(
                tokens,
                state,
                batch,
                pooled,
                token,
                last,
                channel,
                RATIO,
                OVERLAP,
                CHANNELS,
                SLOTS,
                STATES,
            )


@fast_launch
@triton.jit(do_not_specialize=["count", "pools", "slices"])
def _pool_many_kernel(
    tokens,
    state,
    state_slots,
    batch,
    slots,
    pooled,
    count,
    pools,
    slices,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    CHANNELS: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    STATES: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    COPIED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Pool windows in the first ``pools`` programs, and store states in the others.

    A program that pools has a slice of the windows that close in a group. A program that stores has
    a tile of TILE tokens and COPIED of their columns.
    """
    wait_for_inputs(PDL)
    COLUMNS: tl.constexpr = (1 + OVERLAP) * CHANNELS
    PIECES: tl.constexpr = (COLUMNS + COPIED - 1) // COPIED
    if tl.program_id(0) < pools:
        channel = channels_of(tl.program_id(0) % slices, WIDTH)
        start = tl.program_id(0) // slices * GROUP
        pool_group(
            tokens,
            state,
            state_slots,
            batch,
            slots,
            pooled,
            start,
            count,
            channel,
            RATIO,
            OVERLAP,
            CHANNELS,
            SLOTS,
            STATES,
            GROUP,
        )
    else:
        program = tl.program_id(0) - pools
        token = program // PIECES * TILE + tl.arange(0, TILE)[:, None]
        column = channels_of(program % PIECES, COPIED)
        store_tile(tokens, state, state_slots, batch, token, count, column, RATIO, COLUMNS, STATES)


@fast_launch
@triton.jit(do_not_specialize=["count"])
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
    count,
    RATIO: tl.constexpr,
    DIM: tl.constexpr,
    NOPE: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    COMPACT: tl.constexpr,
    CONVERT: tl.constexpr,
    DTYPE: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the entries of GROUP tokens that have one. COMPACT: as in ``compress_write``."""
    if tl.program_id(0) == 0:
        prefetch_row(weight, DIM, BLOCK)
    wait_for_inputs(PDL)
    norm, pages = (weight, angles, angles_stride, eps), (data, data_stride)
    if GROUP == 1:
        token = tl.program_id(0).to(tl.int64)
        where = tl.load(slots + token + tl.arange(0, 1)).to(tl.int64)
        last = tl.load(positions + token).to(tl.int64)
        closes = (tl.max(where, 0) >= 0) & (tl.load(state_slots + token) >= 0)
        if closes & ((last + 1) % RATIO == 0):
            store_pooled_entry(
                pooled,
                token,
                last,
                where,
                norm,
                pages,
                RATIO,
                DIM,
                NOPE,
                ROTATED,
                BLOCK,
                PAGE_SIZE,
                COMPACT,
                CONVERT,
                DTYPE,
            )
    else:
        start = tl.program_id(0) * GROUP
        member = tl.arange(0, GROUP)
        close, _ = closing(start + member, count, positions, state_slots, slots, RATIO)
        following = first_of(close, GROUP)
        while following < GROUP:
            token = (start + following).to(tl.int64)
            last = tl.load(positions + token).to(tl.int64)
            where = tl.load(slots + token + tl.arange(0, 1)).to(tl.int64)
            store_pooled_entry(
                pooled,
                token,
                last,
                where,
                norm,
                pages,
                RATIO,
                DIM,
                NOPE,
                ROTATED,
                BLOCK,
                PAGE_SIZE,
                COMPACT,
                CONVERT,
                DTYPE,
            )
            following = first_of(close & (member > following), GROUP)


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
    ratio, state, count = args.ape.shape[0], args.state, pooled.shape[0]
    table = args.state_table if args.state_table.stride(1) == 1 else args.state_table.contiguous()
    padded = launch_options.power_of_two(ratio)
    width, _, warps = pooling_tiles(padded, args.head_dim, count)
    if count > FEW_TOKENS:
        width, warps = _many_tiles(padded, args.head_dim)
    slices = triton.cdiv(args.head_dim, width)
    rows = tuple(row_tiles.as_rows(x) for x in (args.kv, args.score, args.ape))
    operands = (
        tuple(part for x in rows for part in (x, x.stride(0))),
        (state, state.stride(0), state.stride(1)),
        state_slots,
        (positions, args.sequences.contiguous(), table, table.stride(0)),
        slots,
        pooled,
    )
    options = {
        "RATIO": ratio,
        "OVERLAP": args.overlap,
        "CHANNELS": args.head_dim,
        "SLOTS": padded,
        "WIDTH": width,
        "STATES": state.shape[1],
        "num_warps": warps,
        **launch_options.options(pooled),
    }
    if count <= FEW_TOKENS:
        _pool_kernel[(count * slices,)](*operands, slices, **options)
        return
    columns = (1 + args.overlap) * args.head_dim
    copied = min(_COPIED, launch_options.power_of_two(columns))
    tile, group = max(1, warps * 256 // copied), _group(count, ratio)
    pools = triton.cdiv(count, group) * slices
    stores = triton.cdiv(count, tile) * triton.cdiv(columns, copied)
    _pool_many_kernel[(pools + stores,)](
        *operands, count, pools, slices, GROUP=group, TILE=tile, COPIED=copied, **options
    )


def _group(count: int, ratio: int) -> int:
    """Number of tokens of a program that looks for tokens that close a window."""
    if count <= FEW_TOKENS:
        return 1
    return min(_MOST_GROUPED, launch_options.power_of_two(ratio))


def _many_tiles(slots: int, channels: int) -> tuple[int, int]:
    """Channels and warps of a program that pools, for many tokens."""
    width = min(launch_options.power_of_two(channels), max(32, 1024 // slots))
    return width, min(16, max(4, slots * width // 512))


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
    angles, count = row_tiles.as_rows(args.angles), pooled.shape[0]
    group = _group(count, args.ape.shape[0])
    _paged_entry_kernel[(triton.cdiv(count, group),)](
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
        count,
        RATIO=args.ape.shape[0],
        DIM=dims,
        NOPE=dims - args.rope_dim,
        ROTATED=angles.shape[1],
        BLOCK=block,
        PAGE_SIZE=args.page_size,
        COMPACT=args.entry_format if args.entry_format in COMPACT_FORMATS else None,
        CONVERT=conversion(args.data),
        DTYPE=row_tiles.TYPES[args.dtype],
        GROUP=group,
        num_warps=min(16, max(1, block // 128)),
        **launch_options.options(pooled),
    )
