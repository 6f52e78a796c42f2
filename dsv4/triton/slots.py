"""Kernels of ``dsv4.ops.slots``: one lookup per slot, a program per block of some tokens' slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.ops.slots import EntrySlotsArgs, PrefixSlotsArgs, WindowSlotsArgs
from dsv4.triton._lib.numerics import once, wait_for_inputs
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

_NARROW_SLOTS = 1 << 16  # slots up to which a program has _NARROW of them, one per thread
_NARROW = 128
_WIDE = 512  # slots of a program above


@fast_launch
@triton.jit(do_not_specialize=["stride", "tokens", "width", "blocks", "pages"])
def _slots_kernel(
    table,
    sequences,
    numbers,
    out,
    stride,
    tokens,
    width,
    blocks,
    pages,
    KIND: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile is ROWS tokens' slots, BLOCK of each, in one row: as a matrix, tables would be read in
    another layout than slots are stored in.
    """
    for _ in range(once(PDL)):
        wait_for_inputs(PDL)
        first = (tl.program_id(0) // blocks).to(tl.int64) * ROWS
        i = tl.arange(0, ROWS * BLOCK)
        token = i // BLOCK
        column = (tl.program_id(0) % blocks) * BLOCK + i % BLOCK
        inside = (token < tokens - first) & (column < width)
        sequence = tl.load(sequences + first + token, mask=inside, other=-1).to(tl.int64)
        offset = first * width + (token * width + column)
        # An entry of a sequence has 64 bits; a negative one is too large without its sign.
        if KIND == "entry":
            entry = tl.load(numbers + offset, mask=inside, other=-1).to(tl.int64)
        else:
            number = tl.load(numbers + first + token, mask=inside, other=-1).to(tl.int64)
            if KIND == "prefix":
                entry = tl.where(column < number, column, -1).to(tl.int64)
            else:
                entry = _ring(number, width - 1 - column, pages.to(tl.int64) * PAGE_SIZE)
        entry = entry.to(tl.uint64, bitcast=True)
        size = pages.to(tl.uint64) * PAGE_SIZE
        exists = inside & (sequence >= 0) & (entry < size)
        page = table + sequence * stride + (entry // PAGE_SIZE).to(tl.int64)
        page = tl.load(page, mask=exists, other=0).to(tl.int64)
        slots = page * PAGE_SIZE + (entry % PAGE_SIZE).to(tl.int64)
        tl.store(out + offset, tl.where(exists, slots, -1), mask=inside)


@triton.jit
def _ring(position, back, size):
    """Entry of the token ``back`` before each position in a ring; -1 of one before the first.

    The size is no constant, because each length of a cache would have a kernel of its own.
    """
    last = (position.to(tl.uint64, bitcast=True) % size.to(tl.uint64)).to(tl.int64)
    entry = last - back % size
    entry = tl.where(entry < 0, entry + size, entry)
    return tl.where(position < back, -1, entry)


def _launch_slots(
    kind: str,
    table: torch.Tensor,
    page_size: int,
    sequences: torch.Tensor,
    numbers: torch.Tensor,
    shape: tuple[int, ...],
) -> torch.Tensor:
    out = torch.empty(shape, dtype=torch.int64, device=numbers.device)
    if out.numel() == 0:
        return out
    if table.numel() == 0:
        return out.fill_(-1)
    tokens, width = shape[0], out.numel() // shape[0]
    tile = _NARROW if out.numel() <= _NARROW_SLOTS else _WIDE
    block = min(tile, launch_options.power_of_two(width))
    rows = tile // block  # however few tokens there are: their number must not be a constant
    blocks = triton.cdiv(width, block)
    programs = triton.cdiv(tokens, rows) * blocks
    table = table if table.stride(1) == 1 else table.contiguous()
    with launch_options.on(out):
        _slots_kernel[(programs,)](
            table,
            sequences.contiguous(),
            numbers.contiguous(),
            out,
            table.stride(0),
            tokens,
            width,
            blocks,
            table.shape[1],
            KIND=kind,
            PAGE_SIZE=page_size,
            ROWS=rows,
            BLOCK=block,
            num_warps=4,
            **launch_options.options(out, small=launch_options.is_small(programs, 4)),
        )
    return out


def entry_slots(args: EntrySlotsArgs) -> torch.Tensor:
    """See ``dsv4.ops.slots.entry_slots``."""
    shape = tuple(args.entries.shape)
    return _launch_slots(
        "entry", args.page_table, args.page_size, args.sequences, args.entries, shape
    )


def prefix_slots(args: PrefixSlotsArgs) -> torch.Tensor:
    """See ``dsv4.ops.slots.prefix_slots``."""
    shape = (args.counts.shape[0], args.page_table.shape[1] * args.page_size)
    return _launch_slots(
        "prefix", args.page_table, args.page_size, args.sequences, args.counts, shape
    )


def window_slots(args: WindowSlotsArgs) -> torch.Tensor:
    """See ``dsv4.ops.slots.window_slots``."""
    shape = (args.positions.shape[0], args.window)
    return _launch_slots(
        "window", args.page_table, args.page_size, args.sequences, args.positions, shape
    )
