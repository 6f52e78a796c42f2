"""Kernels of ``dsv4.ops.kv_cache``: a few entries per program, each in registers, one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4.ops.kv_cache import FakeQuantizeKvArgs, NormRopeWriteKvArgs, ReadKvArgs, WriteKvArgs
from dsv4.triton._lib import cache_entries, rotation, row_tiles
from dsv4.triton._lib.arrival import arrival, once_here
from dsv4.triton._lib.cache_entries import (
    decode_groups,
    encode_groups,
    load_entries,
    store_nope,
    store_pieces,
    store_rope,
)
from dsv4.triton._lib.numerics import convert, narrow, once, wait_for_inputs, widen
from dsv4.triton._lib.nvfp4 import narrowed, rounded
from dsv4.triton._lib.nvfp4_tile import load_pieces, own_part
from dsv4.triton._lib.prefetch import prefetch_row
from dsv4.triton._lib.rms import inverse_rms
from dsv4.triton._lib.rotation import load_angles, rotate
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

_SHARED_ENTRIES = 128  # entries up to which several programs share an entry
_MANY_ENTRIES = 1 << 16  # entries above which a program reads 8 of them


def _tile(entries: int) -> dict[str, int]:
    """Entries per program: one while there are few; many programs of one start too slowly."""
    return {"ROWS": 1, "num_warps": 4} if entries <= 512 else {"ROWS": 4, "num_warps": 4}


def _reading_tile(entries: int) -> dict[str, int]:
    """The same for reading: of very many entries a thread takes 8 columns of four."""
    return _tile(entries) if entries <= _MANY_ENTRIES else {"ROWS": 8, "num_warps": 4}


def _programs(entries: int, tile: dict[str, int]) -> tuple[int]:
    return (triton.cdiv(entries, tile["ROWS"]),)


def _is_small(entries: int, tile: dict[str, int]) -> bool:
    return launch_options.is_small(*_programs(entries, tile), tile["num_warps"])


@triton.jit
def load_rows(x, stride, first, count, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows ``first`` and following of a matrix, ``[ROWS, BLOCK]``; zeros outside."""
    row = (first + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < count) & (column < columns)
    return tl.load(x + row.to(tl.int64) * stride + column, mask=inside, other=0.0)


@triton.jit
def load_slots(slots, first, count, ROWS: tl.constexpr):
    """Slots ``first`` and following as int64 ``[ROWS]``; -1 past the last."""
    row = first + tl.arange(0, ROWS)
    return tl.load(slots + row, mask=row < count, other=-1).to(tl.int64)


@fast_launch
@triton.jit(do_not_specialize=["count"])
def _write_kernel(
    data,
    data_stride,
    entries,
    stride,
    slots,
    count,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    for _ in range(once(PDL)):
        wait_for_inputs(PDL)
        first = tl.program_id(0) * ROWS
        where = load_slots(slots, first, count, ROWS)
        values = load_rows(entries, stride, first, count, NOPE, ROWS, BLOCK)
        if ROPE > 0:
            dim = tl.arange(0, ROPE_BLOCK)[None, :]
            rope = load_rows(entries + NOPE, stride, first, count, ROPE, ROWS, ROPE_BLOCK)
            store_rope(data, data_stride, where, rope, dim, NOPE, ROPE, PAGE_SIZE)
        store_nope(data, data_stride, where, values, NOPE, ROPE, PAGE_SIZE)


def write_kv(args: WriteKvArgs) -> None:
    """See ``dsv4.ops.kv_cache.write_kv``."""
    data, entries = args.data, args.entries
    count = entries.shape[0]
    if count == 0 or data.shape[0] == 0:
        return
    entries = row_tiles.as_rows(entries)
    tile = _tile(count)
    with launch_options.on(data):
        _write_kernel[_programs(count, tile)](
            data,
            cache_entries.page_stride(data),
            entries,
            entries.stride(0),
            args.slots.contiguous(),
            count,
            NOPE=args.head_dim - args.rope_dim,
            ROPE=args.rope_dim,
            PAGE_SIZE=args.page_size,
            BLOCK=cache_entries.block(args.head_dim),
            ROPE_BLOCK=launch_options.power_of_two(args.rope_dim),
            **tile,
            **launch_options.options(data, small=_is_small(count, tile)),
        )


@fast_launch
@triton.jit(do_not_specialize=["count"])
def _read_kernel(
    data,
    data_stride,
    slots,
    out,
    count,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    for _ in range(once(PDL)):
        wait_for_inputs(PDL)
        first = tl.program_id(0) * ROWS
        where = load_slots(slots, first, count, ROWS)
        values = load_entries(data, data_stride, where, NOPE, ROPE, PAGE_SIZE, BLOCK)
        store_rows(out, first, count, values, NOPE + ROPE)


@triton.jit
def store_rows(out, first, count, values, columns):
    """Store ``[ROWS, BLOCK]`` as rows ``first`` and following of a contiguous matrix."""
    row = (first + tl.arange(0, values.shape[0]))[:, None]
    column = tl.arange(0, values.shape[1])[None, :]
    address = out + row.to(tl.int64) * columns + column
    stored = convert(values, out.dtype.element_ty)
    tl.store(address, stored, mask=(row < count) & (column < columns))


def read_kv(args: ReadKvArgs) -> torch.Tensor:
    """See ``dsv4.ops.kv_cache.read_kv``."""
    data = args.data
    out = torch.empty((*args.slots.shape, args.head_dim), dtype=args.dtype, device=data.device)
    if data.shape[0] == 0:
        return out.zero_()
    count = args.slots.numel()
    if count == 0:
        return out
    tile = _reading_tile(count)
    with launch_options.on(data):
        _read_kernel[_programs(count, tile)](
            data,
            cache_entries.page_stride(data),
            args.slots.contiguous(),
            out,
            count,
            NOPE=args.head_dim - args.rope_dim,
            ROPE=args.rope_dim,
            PAGE_SIZE=args.page_size,
            BLOCK=cache_entries.block(args.head_dim),
            **tile,
            **launch_options.options(data, small=_is_small(count, tile)),
        )
    return out


@fast_launch
@triton.jit(do_not_specialize=["count"])
def _round_trip_kernel(
    x,
    stride,
    out,
    count,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    for _ in range(once(PDL)):
        wait_for_inputs(PDL)
        first = tl.program_id(0) * ROWS
        values = widen(load_rows(x, stride, first, count, NOPE + ROPE, ROWS, BLOCK))
        codes, scale = encode_groups(values, NOPE)
        rope = widen(narrow(values, tl.bfloat16))
        column = tl.arange(0, BLOCK)[None, :]
        values = tl.where(column < NOPE, decode_groups(codes, scale), rope)
        store_rows(out, first, count, values, NOPE + ROPE)


def fake_quantize_kv(args: FakeQuantizeKvArgs) -> torch.Tensor:
    """See ``dsv4.ops.kv_cache.fake_quantize_kv``."""
    x = args.x
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return out
    rows = row_tiles.as_rows(x)
    count, head_dim = rows.shape
    tile = _tile(count)
    with launch_options.on(x):
        _round_trip_kernel[_programs(count, tile)](
            rows,
            rows.stride(0),
            out,
            count,
            NOPE=head_dim - args.rope_dim,
            ROPE=args.rope_dim,
            BLOCK=cache_entries.block(head_dim),
            **tile,
            **launch_options.options(x, small=_is_small(count, tile)),
        )
    return out


@fast_launch
@triton.jit(do_not_specialize=["count"])
def _norm_rope_write_kernel(
    data,
    data_stride,
    kv,
    stride,
    weight,
    cos,
    sin,
    table_stride,
    slots,
    count,
    eps,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if tl.program_id(0) == 0:
        prefetch_row(weight, NOPE + ROPE, BLOCK)
    DTYPE: tl.constexpr = kv.dtype.element_ty
    first = tl.program_id(0) * ROWS
    for _ in range(once(PDL)):
        wait_for_inputs(PDL)
        where = load_slots(slots, first, count, ROWS)
        values = load_rows(kv, stride, first, count, NOPE + ROPE, ROWS, BLOCK)
        factor = _load_weight(weight, NOPE, ROWS, BLOCK)
        if ROPE > 0:
            # The rotated columns are loaded once more, so that no other column runs the rotation.
            rope = load_rows(kv + NOPE, stride, first, count, ROPE, ROWS, ROPE_BLOCK)
            rope_factor = _load_weight(weight + NOPE, ROPE, ROWS, ROPE_BLOCK)
            row = (first + tl.arange(0, ROWS))[:, None]
            pair = tl.arange(0, ROPE_BLOCK // 2)[None, :]
            rotating = (row < count) & (pair < ROPE // 2)
            c, s = load_angles(cos, sin, row.to(tl.int64) * table_stride, pair, rotating, False)

        values = widen(values)
        rms = inverse_rms(tl.sum(values * values, 1), NOPE + ROPE, eps)[:, None]
        values = narrowed(factor * (values * rms), DTYPE)
        store_nope(data, data_stride, where, values, NOPE, ROPE, PAGE_SIZE)
        if ROPE > 0:
            rotated = rotate(rounded(rope_factor * (widen(rope) * rms), DTYPE), c, s)
            rotated = narrowed(rotated, DTYPE)
            dim = tl.arange(0, ROPE_BLOCK)[None, :]
            store_rope(data, data_stride, where, rotated, dim, NOPE, ROPE, PAGE_SIZE)


@triton.jit
def _inverse_rms_of(pieces, COLUMNS: tl.constexpr, eps):
    values = widen(pieces)
    return inverse_rms(tl.sum(tl.sum(values * values, 1), 0), COLUMNS, eps)


@triton.jit
def write_shared_entry(
    program,
    data,
    data_stride,
    kv,
    stride,
    weight,
    cos,
    sin,
    table_stride,
    slots,
    eps,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SHARES: tl.constexpr,
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """SHARES programs of one warp per entry: the last one owns the rotated columns.

    The others own 256 columns each, 8 per thread. Each program sums up the whole row itself, so
    that no warp waits for another. ``program`` is the number among the programs of entries.
    """
    if program == 0:
        prefetch_row(weight, NOPE + ROPE, 8 * WHOLE)
    N: tl.constexpr = 32
    COLUMNS: tl.constexpr = NOPE + ROPE
    DTYPE: tl.constexpr = kv.dtype.element_ty
    row, part = (program // SHARES).to(tl.int64), program % SHARES
    kv += row * stride
    pieces = tl.arange(0, WHOLE)
    if part < SHARES - 1:
        piece = part * N + tl.arange(0, N)
        for _ in range(once(PDL)):
            wait_for_inputs(PDL)
            loaded = load_pieces(kv, 0, pieces * 0, pieces, pieces < COLUMNS // 8)
            factor = load_pieces(weight, 0, piece * 0, piece, piece < NOPE // 8)
            slot = tl.load(slots + row)
            here = arrival(factor, N) | arrival(slot, N)
            loaded = once_here(loaded, here)
            rms = _inverse_rms_of(loaded, COLUMNS, eps)
            values = narrowed(widen(factor) * (widen(own_part(loaded, part, N)) * rms), DTYPE)
            slot = slot.to(tl.int64) + tl.zeros([1], tl.int64)
            store_pieces(data, data_stride, slot, values, piece, NOPE, ROPE, PAGE_SIZE)
    else:
        piece = tl.arange(0, N)
        rotating = piece < ROPE // 8
        for _ in range(once(PDL)):
            wait_for_inputs(PDL)
            loaded = load_pieces(kv, 0, pieces * 0, pieces, pieces < COLUMNS // 8)
            rope = load_pieces(kv + NOPE, 0, piece * 0, piece, rotating)
            factor = load_pieces(weight + NOPE, 0, piece * 0, piece, rotating)
            pair = (piece * 4)[:, None] + tl.arange(0, 4)[None, :]
            c, s = load_angles(cos, sin, row * table_stride, pair, rotating[:, None], False)
            slot = tl.load(slots + row)
            here = arrival(rope, N) | arrival(factor, N) | arrival(c, N) | arrival(s, N)
            here |= arrival(slot, N)
            rms = _inverse_rms_of(once_here(loaded, here), COLUMNS, eps)
            rotated = rotate(rounded(widen(factor) * (widen(rope) * rms), DTYPE), c, s)
            slot = slot.to(tl.int64) + tl.zeros([1], tl.int64)
            dim = (piece * 8)[:, None] + tl.arange(0, 8)[None, :]
            rotated = narrowed(rotated, DTYPE)
            store_rope(data, data_stride, slot, rotated, dim, NOPE, ROPE, PAGE_SIZE)


@fast_launch
@triton.jit
def _norm_rope_write_few_kernel(
    data,
    data_stride,
    kv,
    stride,
    weight,
    cos,
    sin,
    table_stride,
    slots,
    eps,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SHARES: tl.constexpr,
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):
    write_shared_entry(
        tl.program_id(0),
        data,
        data_stride,
        kv,
        stride,
        weight,
        cos,
        sin,
        table_stride,
        slots,
        eps,
        NOPE,
        ROPE,
        PAGE_SIZE,
        SHARES,
        WHOLE,
        PDL,
    )


@triton.jit
def _load_weight(weight, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Load a copy ``[ROWS, BLOCK]`` per row: a shared one would lie in other threads."""
    column = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], [ROWS, BLOCK])
    return widen(tl.load(weight + column, mask=column < columns, other=0.0))


@dataclass(frozen=True)
class SharedEntries:
    """Launch arguments of ``write_shared_entry``, for few entries.

    Attributes:
        programs: Programs of one warp.
        arguments: Positional arguments, from ``data`` on.
        constants: Its constants but ``PDL``.
    """

    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, int]

    @classmethod
    def of(cls, args: NormRopeWriteKvArgs) -> SharedEntries | None:
        """Return them; None if entries are many, or a thread's 8 columns would not fit."""
        rotated, count = 2 * args.cos.shape[1], args.kv.shape[0]
        if count > _SHARED_ENTRIES or args.head_dim % 8 or rotated % 8:
            return None
        kv = row_tiles.as_rows(args.kv)
        cos, sin, _ = rotation.tables(kv, args.cos, args.sin)
        block = cache_entries.block(args.head_dim)
        shares = triton.cdiv(block, 256) + 1
        arguments = (
            args.data,
            cache_entries.page_stride(args.data),
            kv,
            kv.stride(0),
            args.weight.contiguous(),
            cos,
            sin,
            cos.stride(0),
            args.slots.contiguous(),
        )
        constants = {
            "NOPE": args.head_dim - rotated,
            "ROPE": rotated,
            "PAGE_SIZE": args.page_size,
            "SHARES": shares,
            "WHOLE": block // 8,
        }
        return cls(count * shares, arguments, constants)


def norm_rope_write_kv(args: NormRopeWriteKvArgs) -> None:
    """See ``dsv4.ops.kv_cache.norm_rope_write_kv``."""
    data, head_dim, kv = args.data, args.head_dim, args.kv
    count = kv.shape[0]
    if count == 0 or data.shape[0] == 0:
        return
    shared = SharedEntries.of(args)
    if shared is not None:
        with launch_options.on(data):
            _norm_rope_write_few_kernel[(shared.programs,)](
                *shared.arguments,
                args.eps,
                **shared.constants,
                num_warps=1,
                **launch_options.options(data, small=True),
            )
        return
    kv = row_tiles.as_rows(kv)
    cos, sin, _ = rotation.tables(kv, args.cos, args.sin)
    # In "plain" pages the split is the rotation's; "fp8" pages split where their RoPE dims begin.
    rotated = 2 * cos.shape[1]
    tile = _tile(count) if count <= 512 else {"ROWS": 8, "num_warps": 4}
    with launch_options.on(data):
        _norm_rope_write_kernel[_programs(count, tile)](
            data,
            cache_entries.page_stride(data),
            kv,
            kv.stride(0),
            args.weight.contiguous(),
            cos,
            sin,
            cos.stride(0),
            args.slots.contiguous(),
            count,
            args.eps,
            NOPE=head_dim - rotated,
            ROPE=rotated,
            PAGE_SIZE=args.page_size,
            BLOCK=cache_entries.block(head_dim),
            ROPE_BLOCK=launch_options.power_of_two(rotated),
            **tile,
            **launch_options.options(data, small=_is_small(count, tile)),
        )
