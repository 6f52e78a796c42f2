"""Kernels of ``dsv4.ops.kv_cache``: a few entries per program, each in registers, one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.triton import _entries, _launch, _rows
from dsv4.triton._entries import (
    bfloat16_bits,
    convert,
    decode_groups,
    encode_groups,
    load_entries,
    store_entries,
)
from dsv4.triton._numerics import wait_for_inputs, widen


def _tile(entries: int) -> dict[str, int]:
    """Entries per program: one while there are few, so that as many programs as entries run."""
    return {"ROWS": 1, "num_warps": 2} if entries < 4096 else {"ROWS": 4, "num_warps": 4}


def _programs(entries: int, tile: dict[str, int]) -> tuple[int]:
    return (triton.cdiv(entries, tile["ROWS"]),)


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
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    first = tl.program_id(0) * ROWS
    values = load_rows(entries, stride, first, count, NOPE + ROPE, ROWS, BLOCK)
    where = load_slots(slots, first, count, ROWS)
    store_entries(data, data_stride, where, values, NOPE, ROPE, PAGE_SIZE)


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
            **tile,
            **_launch.options(data),
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
    tile = _tile(count)
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
            **_launch.options(data),
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
    wait_for_inputs(PDL)
    first = tl.program_id(0) * ROWS
    values = widen(load_rows(x, stride, first, count, NOPE + ROPE, ROWS, BLOCK))
    codes, scale = encode_groups(values, NOPE)
    rope = (bfloat16_bits(values).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
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
            **_launch.options(x),
        )
    return out
