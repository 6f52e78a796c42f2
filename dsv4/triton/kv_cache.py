"""Kernels of ``dsv4.ops.kv_cache``: a few entries per program, each in registers, one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.triton import _entries, _launch, _rotation, _rows
from dsv4.triton._entries import (
    convert,
    decode_groups,
    encode_groups,
    load_entries,
    store_nope,
    store_rope,
)
from dsv4.triton._numerics import narrow, once, wait_for_inputs, widen
from dsv4.triton._nvfp4 import narrowed, rounded
from dsv4.triton._prefetch import prefetch_row
from dsv4.triton._rotation import load_angles, rotate
from dsv4.triton.norm import inverse_rms

_MANY = 1 << 16  # entries from which a program reads more of them


def _tile(entries: int) -> dict[str, int]:
    """Entries per program: one while there are few; more than that start too slowly one by one."""
    return {"ROWS": 1, "num_warps": 4} if entries <= 512 else {"ROWS": 4, "num_warps": 4}


def _reading_tile(entries: int) -> dict[str, int]:
    """The same for reading: of very many entries a thread takes 8 columns of four."""
    return _tile(entries) if entries <= _MANY else {"ROWS": 8, "num_warps": 4}


def _programs(entries: int, tile: dict[str, int]) -> tuple[int]:
    return (triton.cdiv(entries, tile["ROWS"]),)


def _are_few(entries: int, tile: dict[str, int]) -> bool:
    return _launch.are_few(*_programs(entries, tile), tile["num_warps"])


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


def write_kv(
    data: torch.Tensor,
    page_size: int,
    entry_format: str,
    head_dim: int,
    rope_dim: int,
    entries: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """See ``dsv4.ops.kv_cache.write_kv``."""
    count = entries.shape[0]
    if count == 0 or data.shape[0] == 0:
        return
    entries = _rows.as_rows(entries)
    tile = _tile(count)
    with _launch.on(data):
        _write_kernel[_programs(count, tile)](
            data,
            _entries.page_stride(data),
            entries,
            entries.stride(0),
            slots.contiguous(),
            count,
            NOPE=head_dim - rope_dim,
            ROPE=rope_dim,
            PAGE_SIZE=page_size,
            BLOCK=_entries.block(head_dim),
            ROPE_BLOCK=_launch.power_of_two(rope_dim),
            **tile,
            **_launch.options(data, few=_are_few(count, tile)),
        )


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
    place = out + row.to(tl.int64) * columns + column
    stored = convert(values, out.dtype.element_ty)
    tl.store(place, stored, mask=(row < count) & (column < columns))


def read_kv(
    data: torch.Tensor,
    page_size: int,
    entry_format: str,
    head_dim: int,
    rope_dim: int,
    slots: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """See ``dsv4.ops.kv_cache.read_kv``."""
    out = torch.empty((*slots.shape, head_dim), dtype=dtype, device=data.device)
    if data.shape[0] == 0:
        return out.zero_()
    count = slots.numel()
    if count == 0:
        return out
    tile = _reading_tile(count)
    with _launch.on(data):
        _read_kernel[_programs(count, tile)](
            data,
            _entries.page_stride(data),
            slots.contiguous(),
            out,
            count,
            NOPE=head_dim - rope_dim,
            ROPE=rope_dim,
            PAGE_SIZE=page_size,
            BLOCK=_entries.block(head_dim),
            **tile,
            **_launch.options(data, few=_are_few(count, tile)),
        )
    return out


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


def fake_quantize_kv(x: torch.Tensor, rope_dim: int) -> torch.Tensor:
    """See ``dsv4.ops.kv_cache.fake_quantize_kv``."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return out
    rows = _rows.as_rows(x)
    count, head_dim = rows.shape
    tile = _tile(count)
    with _launch.on(x):
        _round_trip_kernel[_programs(count, tile)](
            rows,
            rows.stride(0),
            out,
            count,
            NOPE=head_dim - rope_dim,
            ROPE=rope_dim,
            BLOCK=_entries.block(head_dim),
            **tile,
            **_launch.options(x, few=_are_few(count, tile)),
        )
    return out


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
            # The columns that turn once more, so that no other runs the rotation.
            rope = load_rows(kv + NOPE, stride, first, count, ROPE, ROWS, ROPE_BLOCK)
            rope_factor = _load_weight(weight + NOPE, ROPE, ROWS, ROPE_BLOCK)
            row = (first + tl.arange(0, ROWS))[:, None]
            pair = tl.arange(0, ROPE_BLOCK // 2)[None, :]
            turning = (row < count) & (pair < ROPE // 2)
            c, s = load_angles(cos, sin, row.to(tl.int64) * table_stride, pair, turning, False)

        values = widen(values)
        rms = inverse_rms(tl.sum(values * values, 1), NOPE + ROPE, eps)[:, None]
        values = narrowed(factor * (values * rms), DTYPE)
        store_nope(data, data_stride, where, values, NOPE, ROPE, PAGE_SIZE)
        if ROPE > 0:
            turned = rotate(rounded(rope_factor * (widen(rope) * rms), DTYPE), c, s)
            turned = narrowed(turned, DTYPE)
            dim = tl.arange(0, ROPE_BLOCK)[None, :]
            store_rope(data, data_stride, where, turned, dim, NOPE, ROPE, PAGE_SIZE)


@triton.jit
def _load_weight(weight, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """One copy ``[ROWS, BLOCK]`` per row: held once, it would lie in other threads."""
    column = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], [ROWS, BLOCK])
    return widen(tl.load(weight + column, mask=column < columns, other=0.0))


def norm_rope_write_kv(
    data: torch.Tensor,
    page_size: int,
    entry_format: str,
    head_dim: int,
    rope_dim: int,
    kv: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    eps: float,
) -> None:
    """See ``dsv4.ops.kv_cache.norm_rope_write_kv``."""
    count = kv.shape[0]
    if count == 0 or data.shape[0] == 0:
        return
    kv = _rows.as_rows(kv)
    cos, sin, _ = _rotation.tables(kv, cos, sin)
    # In "plain" pages the split is the rotation's; "fp8" pages split where their RoPE dims begin.
    rotated = 2 * cos.shape[1]
    tile = _tile(count) if count <= 512 else {"ROWS": 8, "num_warps": 4}
    with _launch.on(data):
        _norm_rope_write_kernel[_programs(count, tile)](
            data,
            _entries.page_stride(data),
            kv,
            kv.stride(0),
            weight.contiguous(),
            cos,
            sin,
            cos.stride(0),
            slots.contiguous(),
            count,
            eps,
            NOPE=head_dim - rotated,
            ROPE=rotated,
            PAGE_SIZE=page_size,
            BLOCK=_entries.block(head_dim),
            ROPE_BLOCK=_launch.power_of_two(rotated),
            **tile,
            **_launch.options(data, few=_are_few(count, tile)),
        )
