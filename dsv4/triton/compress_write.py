"""Kernel of ``compress_write`` of ``dsv4.ops.compressor``: pooled windows become entries of pages.

``compressor_update`` pools the windows; a program of this kernel has one of its rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.kv_cache.pages import COMPACT_FORMATS
from dsv4.ops._library import as_record
from dsv4.ops.compressor import CompressorUpdateArgs, CompressWriteArgs
from dsv4.triton._lib import cache_entries, row_tiles
from dsv4.triton._lib.angles import cos_sin
from dsv4.triton._lib.compressed_entries import norm_and_rotate, store_entry
from dsv4.triton._lib.hadamard import hadamard_row, rotate_quantize_row
from dsv4.triton._lib.numerics import narrow, wait_for_inputs, widen
from dsv4.triton._lib.nvfp4 import conversion
from dsv4.triton._lib.prefetch import prefetch_row
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch
from dsv4.triton.compressor_update import compressor_update


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
