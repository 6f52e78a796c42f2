"""Kernels of ``dsv4.ops.slots``: one lookup per slot, a program per block of one token's slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.triton import _launch
from dsv4.triton._numerics import wait_for_inputs

_BLOCK = 1024


@triton.jit
def _slots_of(table, stride, pages, page_size, sequence, entry, inside):
    # A page may be any number, so its product with the page size is 64 bits wide. The sequence is
    # one number for the block: the interpreter turns a mask & such a condition into no mask.
    entry = tl.where(sequence < 0, -1, entry)
    inside = inside & (entry >= 0) & (entry < pages * page_size)
    entry = tl.where(inside, entry, 0)
    page = tl.load(table + sequence * stride + entry // page_size, mask=inside, other=0)
    return tl.where(inside, page.to(tl.int64) * page_size + entry % page_size, -1)


@triton.jit(do_not_specialize=["width"])
def _slots_kernel(
    table,
    sequences,
    numbers,
    out,
    stride,
    pages,
    page_size,
    width,
    blocks,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    sequence = tl.load(sequences + token).to(tl.int64)
    if KIND == "entry":
        entry = tl.load(numbers + token * width + column, mask=inside, other=-1).to(tl.int64)
    elif KIND == "prefix":
        count = tl.load(numbers + token).to(tl.int64)
        entry = tl.where(column < count, column.to(tl.int64), -1)
    else:
        position = tl.load(numbers + token).to(tl.int64) + (column - width + 1)
        entry = tl.where(position < 0, -1, position % (pages * page_size))
    slots = _slots_of(table, stride, pages, page_size, sequence, entry, inside)
    tl.store(out + token * width + column, slots, mask=inside)


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
    block = min(_BLOCK, _launch.power_of_two(width))
    blocks = -(-width // block)
    table = table if table.stride(1) == 1 else table.contiguous()
    with _launch.on(out):
        _slots_kernel[(tokens * blocks,)](
            table,
            sequences.contiguous(),
            numbers.contiguous(),
            out,
            table.stride(0),
            table.shape[1],
            page_size,
            width,
            blocks,
            KIND=kind,
            BLOCK=block,
            num_warps=max(1, block // 256),
            **_launch.options(out),
        )
    return out


def entry_slots(
    page_table: torch.Tensor, page_size: int, sequences: torch.Tensor, entries: torch.Tensor
) -> torch.Tensor:
    """See ``dsv4.ops.slots.entry_slots``."""
    shape = tuple(entries.shape)
    return _launch_slots("entry", page_table, page_size, sequences, entries, shape)


def prefix_slots(
    page_table: torch.Tensor, page_size: int, sequences: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """See ``dsv4.ops.slots.prefix_slots``."""
    shape = (counts.shape[0], page_table.shape[1] * page_size)
    return _launch_slots("prefix", page_table, page_size, sequences, counts, shape)


def window_slots(
    page_table: torch.Tensor,
    page_size: int,
    sequences: torch.Tensor,
    positions: torch.Tensor,
    window: int,
) -> torch.Tensor:
    """See ``dsv4.ops.slots.window_slots``."""
    shape = (positions.shape[0], window)
    return _launch_slots("window", page_table, page_size, sequences, positions, shape)
