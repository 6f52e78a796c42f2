"""Kernels of ``dsv4.ops.quantize``: one thread takes a block of 16, in two loads of 8 columns.

So the maximum of a block needs no other thread, and codes and scales leave as they were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4 import formats
from dsv4.triton import _launch, _rows
from dsv4.triton._numerics import e4m3_bits, e4m3_value, narrow, wait_for_inputs, widen
from dsv4.triton._nvfp4 import (
    block_scales,
    conversion,
    divisor,
    dynamic_scale,
    e2m1_codes,
    finite_amax,
    is_moderate,
    larger,
    largest,
    scale_columns,
    scale_offset,
    scale_rows,
    scaled_codes,
)

# Where the global scale comes from: it is given, from the row, or from partial maxima of a matrix.
_GIVEN = tl.constexpr(0)
_TOKEN = tl.constexpr(1)
_PARTS = tl.constexpr(2)

# 6 * 2^-126 and 448 * 2^-126 as float32 bits: the least maxima that set a scale.
_FLOOR_OF_6 = tl.constexpr(0x01C00000)
_FLOOR_OF_448 = tl.constexpr(0x04E00000)

# Blocks of a tile, a thread for each. Up to how many rows are few.
_GROUPS = 128
_FEW = 256
_TILE = tl.constexpr(128)
_SIGN = tl.constexpr(-0x80000000)


@triton.jit
def _load_halves(x, stride, row, block, inside):
    """The blocks' first and last 8 columns, float32 ``[N, 8]`` each; 0 outside."""
    column = tl.arange(0, 8)[None, :]
    place = x + (row * stride + block * 16)[:, None] + column
    first = tl.load(place, mask=inside[:, None], other=0.0)
    last = tl.load(place + 8, mask=inside[:, None], other=0.0)
    return widen(first), widen(last)


@triton.jit
def _store_halves(codes, row, blocks, block, first, last, inside):
    """Codes ``[N, 4]`` of both halves, as 8 bytes of each block; ``inside`` may be None."""
    both = tl.reshape(tl.permute(tl.join(first, last), (0, 2, 1)), [first.shape[0], 8])
    place = codes + ((row * blocks + block) * 8)[:, None] + tl.arange(0, 8)[None, :]
    tl.store(place, both, mask=None if inside is None else inside[:, None])


@triton.jit
def _store_scales(scales, bits, row, block, inside, rows, columns, SWIZZLED: tl.constexpr):
    """Scale bytes of a tile; 0 in the padding, which the layout counts as ``rows x columns``."""
    place = scales + scale_offset(row, block, columns, SWIZZLED)
    tl.store(place, tl.where(inside, bits, 0).to(tl.uint8), mask=(row < rows) & (block < columns))


@triton.jit
def _row_scale(amax, ROWS: tl.constexpr):
    """Dynamic global scale of each row of ``amax [ROWS * BLOCKS]``, and the same for each block."""
    BLOCKS: tl.constexpr = amax.shape[0] // ROWS
    scale = dynamic_scale(tl.max(tl.reshape(amax, [ROWS, BLOCKS]), 1))
    return scale, tl.reshape(tl.broadcast_to(scale[:, None], [ROWS, BLOCKS]), [ROWS * BLOCKS])


@triton.jit
def tile_places(ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """This program's matrix, and row and block of each of its ROWS * BLOCKS blocks."""
    group = tl.arange(0, ROWS * BLOCKS)
    row = tl.program_id(0).to(tl.int64) * ROWS + group // BLOCKS
    block = tl.program_id(1) * BLOCKS + group % BLOCKS
    return tl.program_id(2).to(tl.int64), row, block


@triton.jit
def quantize_tile(
    first,
    last,
    source,
    codes,
    scales,
    total,
    rows,
    blocks,
    scale_rows,
    scale_columns,
    parts,
    SOURCE: tl.constexpr,
    PER_ROW: tl.constexpr,
    WEIGHT: tl.constexpr,
    SWIZZLED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    CONVERT: tl.constexpr,
):
    """Quantise and store this program's blocks, whose halves are float32 ``[ROWS * BLOCKS, 8]``.

    ``source`` holds the given global scales or ``parts`` partial maxima of each matrix; ``parts``
    is 0 where all matrices share one given scale. The other arguments are ``Output.arguments`` and
    ``Output.options``.
    """
    matrix, row, block = tile_places(ROWS, BLOCKS)
    inside = (row < rows) & (block < blocks)
    start = matrix * rows
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if SOURCE == _GIVEN and PER_ROW:
        scale = tl.load(source + start + row, mask=row < rows, other=1.0)
        each = tl.load(source + start + line, mask=line < rows, other=1.0)
    elif SOURCE == _GIVEN:
        scale = tl.load(source + matrix * parts)
    elif SOURCE == _PARTS:
        part = tl.arange(0, PARTS)
        peaks = tl.load(source + matrix * parts + part, mask=part < parts, other=0.0)
        scale = dynamic_scale(tl.max(peaks, 0))
    amax, finite = finite_amax(larger(largest(first), largest(last)))
    if SOURCE == _TOKEN:
        each, scale = _row_scale(amax, ROWS)
    bits, product = block_scales(amax, finite, scale, WEIGHT)
    first, last = e2m1_codes(first, product, CONVERT), e2m1_codes(last, product, CONVERT)
    _store_halves(codes + start * blocks * 8, row, blocks, block, first, last, inside)
    scales += matrix * scale_rows * scale_columns
    _store_scales(scales, bits, row, block, inside, scale_rows, scale_columns, SWIZZLED)
    if tl.program_id(1) == 0:
        if PER_ROW:
            tl.store(total + start + line, each, mask=line < rows)
        elif tl.program_id(0) == 0:
            tl.store(total + matrix, scale)


@triton.jit
def _nvfp4_kernel(
    x,
    stride,
    source,
    codes,
    scales,
    total,
    rows,
    blocks,
    scale_rows,
    scale_columns,
    parts,
    SOURCE: tl.constexpr,
    PER_ROW: tl.constexpr,
    WEIGHT: tl.constexpr,
    SWIZZLED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    CONVERT: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    matrix, row, block = tile_places(ROWS, BLOCKS)
    inside = (row < rows) & (block < blocks)
    first, last = _load_halves(x + matrix * rows * stride, stride, row, block, inside)
    quantize_tile(
        first,
        last,
        source,
        codes,
        scales,
        total,
        rows,
        blocks,
        scale_rows,
        scale_columns,
        parts,
        SOURCE,
        PER_ROW,
        WEIGHT,
        SWIZZLED,
        ROWS,
        BLOCKS,
        PARTS,
        CONVERT,
    )


@triton.jit
def _code_row(
    firsts,
    lasts,
    places,
    scale,
    codes,
    scales,
    row,
    blocks,
    WEIGHT: tl.constexpr,
    SWIZZLED: tl.constexpr,
    CHUNKS: tl.constexpr,
    CONVERT: tl.constexpr,
    MODERATE: tl.constexpr,
):
    for chunk in tl.static_range(CHUNKS):
        block = places[chunk]
        first, last = firsts[chunk], lasts[chunk]
        amax, finite = finite_amax(larger(largest(first), largest(last)))
        bits, product = block_scales(amax, finite, scale, WEIGHT, MODERATE)
        first = e2m1_codes(first, product, CONVERT, MODERATE)
        last = e2m1_codes(last, product, CONVERT, MODERATE)
        _store_halves(codes, 0, blocks, block, first, last, None)
        tl.store(scales + scale_offset(row, block, blocks, SWIZZLED), bits)


@triton.jit
def blank_scales(
    scales,
    scale_rows,
    scale_columns,
    SWIZZLED: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Scales 0 for a row that only their layout has; otherwise as ``quantize_row``."""
    row, matrix = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    scales += matrix * scale_rows * scale_columns
    for chunk in tl.static_range(CHUNKS):
        block = chunk * BLOCKS + tl.arange(0, BLOCKS)
        place = scales + scale_offset(row, block, scale_columns, SWIZZLED)
        tl.store(place, tl.zeros([BLOCKS], tl.uint8), mask=block < scale_columns)


@triton.jit
def quantize_row(
    firsts,
    lasts,
    places,
    source,
    codes,
    scales,
    total,
    rows,
    blocks,
    scale_rows,
    scale_columns,
    parts,
    SOURCE: tl.constexpr,
    PER_ROW: tl.constexpr,
    WEIGHT: tl.constexpr,
    SWIZZLED: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    CONVERT: tl.constexpr,
):
    """``quantize_tile`` of one row, whose CHUNKS times BLOCKS blocks are tuples of halves.

    ``places`` is a tuple too: which block of the row each one is. The halves may still be of a
    narrow dtype. A thread has CHUNKS blocks, which share what is
    computed once for a row; and whether its global scale is moderate is asked once. BLOCKS is a
    multiple of 4, so that scales have no padding but whole rows: see ``blank_scales``.
    """
    row, matrix = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    start = matrix * rows + row
    if SOURCE == _GIVEN:
        scale = tl.load(source + (start if PER_ROW else matrix * parts))
    elif SOURCE == _PARTS:
        part = tl.arange(0, PARTS)
        peaks = tl.load(source + matrix * parts + part, mask=part < parts, other=0.0)
        scale = dynamic_scale(tl.max(peaks, 0))
    else:
        peak = tl.zeros([BLOCKS], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            both = larger(largest(firsts[chunk]), largest(lasts[chunk]))
            peak = tl.maximum(peak, finite_amax(both)[0])
        scale = dynamic_scale(tl.max(peak, 0))
    codes += start * blocks * 8
    scales += matrix * scale_rows * scale_columns
    if is_moderate(scale):
        _code_row(
            firsts,
            lasts,
            places,
            scale,
            codes,
            scales,
            row,
            blocks,
            WEIGHT,
            SWIZZLED,
            CHUNKS,
            CONVERT,
            True,
        )
    else:
        _code_row(
            firsts,
            lasts,
            places,
            scale,
            codes,
            scales,
            row,
            blocks,
            WEIGHT,
            SWIZZLED,
            CHUNKS,
            CONVERT,
            False,
        )
    if PER_ROW:
        tl.store(total + start, scale)
    elif row == 0:
        tl.store(total + matrix, scale)


@triton.jit
def _nvfp4_row_kernel(
    x,
    stride,
    source,
    codes,
    scales,
    total,
    rows,
    blocks,
    scale_rows,
    scale_columns,
    parts,
    SOURCE: tl.constexpr,
    PER_ROW: tl.constexpr,
    WEIGHT: tl.constexpr,
    SWIZZLED: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PARTS: tl.constexpr,
    CONVERT: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    if row >= rows:
        blank_scales(scales, scale_rows, scale_columns, SWIZZLED, BLOCKS, CHUNKS)
    else:
        x += (tl.program_id(2).to(tl.int64) * rows + row) * stride
        firsts, lasts, places = (), (), ()
        for chunk in tl.static_range(CHUNKS):
            block = chunk * BLOCKS + tl.arange(0, BLOCKS)
            places += (block,)  # type: ignore[assignment]
            place = x + block[:, None] * 16 + tl.arange(0, 8)[None, :]
            firsts += (tl.load(place),)  # type: ignore[assignment]
            lasts += (tl.load(place + 8),)  # type: ignore[assignment]
        quantize_row(
            firsts,
            lasts,
            places,
            source,
            codes,
            scales,
            total,
            rows,
            blocks,
            scale_rows,
            scale_columns,
            parts,
            SOURCE,
            PER_ROW,
            WEIGHT,
            SWIZZLED,
            BLOCKS,
            CHUNKS,
            PARTS,
            CONVERT,
        )


@triton.jit
def _amax_kernel(
    x,
    peaks,
    stride,
    rows,
    blocks,
    chunks,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Largest finite block's amax in every ``parts``-th tile of a matrix."""
    wait_for_inputs(PDL)
    matrix = tl.program_id(1).to(tl.int64)
    parts = tl.num_programs(0)
    group = tl.arange(0, ROWS * BLOCKS)
    x += matrix * rows * stride
    peak = tl.zeros([ROWS * BLOCKS], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * chunks, parts):
        row = (tile // chunks).to(tl.int64) * ROWS + group // BLOCKS
        block = tile % chunks * BLOCKS + group % BLOCKS
        first, last = _load_halves(x, stride, row, block, (row < rows) & (block < blocks))
        both = larger(largest(first), largest(last))
        peak = tl.maximum(peak, finite_amax(both)[0])
    tl.store(peaks + matrix * parts + tl.program_id(0), tl.max(peak, 0))


def _tile(blocks: int, whole: bool) -> tuple[int, int]:
    """Rows and blocks of a tile of 128 blocks or, where it must hold a ``whole`` row, more."""
    wide = _launch.power_of_two(blocks)
    if not whole:
        fitting = blocks & -blocks
        wide = fitting if fitting >= 32 else wide
        wide = min(wide, _GROUPS)
    return max(1, _GROUPS // wide), wide


def _chunks(blocks: int, rows: int, by_warp: bool) -> tuple[int, int]:
    """Blocks of a chunk, and chunks of a program that takes one row: 0 where tiles do better.

    Few rows are better spread over many threads. Many are better kept by few threads each, which
    share what is computed once: by two warps, or one (``by_warp``). A thread's blocks, at most 8,
    are in its registers. No block may lie past the row.
    """
    wide = 32 if by_warp else 64
    across = min(blocks & -blocks, max(wide, _launch.power_of_two(triton.cdiv(blocks, 8))))
    fits = rows > _FEW and across >= 32 and blocks // across <= 8
    return across, blocks // across if fits else 0


def _warps(groups: int) -> int:
    """Warps for that many blocks: one thread each, up to 16 warps."""
    return min(16, max(1, groups // 32))


def _empty_scales(
    of: Sequence[int], like: torch.Tensor, width: int, layout: str, dtype: torch.dtype
) -> torch.Tensor:
    """Block scales of a matrix of the shape ``of``, on the device of ``like``."""
    *batch, rows, columns = of
    swizzled = layout == formats.SWIZZLED
    shape = (scale_rows(rows, swizzled), scale_columns(columns // width, swizzled))
    if swizzled:
        return like.new_empty((*batch, shape[0] * shape[1]), dtype=dtype)
    return like.new_empty((*batch, *shape), dtype=dtype)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@dataclass(frozen=True)
class Output:
    """What quantising ``[*batch, N, K]`` to NVFP4 writes, and how a kernel is started for it.

    Attributes:
        codes: ``[*batch, N, K / 2]``, to be written.
        scales: Block scales, to be written, padding included.
        total: Global scales, to be written.
        source: The given global scales or partial maxima, contiguous but for a single scale that is
            expanded to all matrices; None for one per token.
        dynamic: Whether the global scale follows from ``source`` or, without it, from the row.
        weight: Whether block scales are those of weights.
        layout: Layout of ``scales``.
        by_warp: Whether ``quantize_row`` leaves a row to one warp.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    total: torch.Tensor
    source: torch.Tensor | None
    dynamic: bool
    weight: bool
    layout: str
    by_warp: bool = False

    @staticmethod
    def empty(
        x: torch.Tensor,
        columns: int,
        global_scale: torch.Tensor | None,
        scaling: str,
        layout: str,
    ) -> Output:
        """Tensors for a matrix like ``x``, but of ``columns`` columns; ``source`` if given."""
        *batch, rows, _ = x.shape
        codes = x.new_empty((*batch, rows, columns // 2), dtype=torch.uint8)
        scales = _empty_scales((*batch, rows, columns), x, 16, layout, torch.float8_e4m3fn)
        weight = scaling == "weight"
        if global_scale is None:
            total = x.new_empty((*batch, rows if scaling == "token" else 1), dtype=torch.float32)
            return Output(codes, scales, total, None, True, weight, layout)
        total = torch.empty_like(global_scale, memory_format=torch.contiguous_format)
        shared = total.shape[-1] == 1 and not any(global_scale.stride()[:-1])
        given = global_scale if shared else global_scale.contiguous()
        return Output(codes, scales, total, given, False, weight, layout)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the operator returns."""
        return self.codes, self.scales, self.total

    def without_rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``tensors`` where there is nothing to quantise: a matrix has a scale all the same."""
        total = self.total.fill_(1.0) if self.source is None else self.total.copy_(self.source)
        return self.codes, self.scales, total

    @property
    def _per_token(self) -> bool:
        return self.dynamic and self.source is None

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        rows, blocks = self.codes.shape[-2], self.codes.shape[-1] // 8
        swizzled = self.layout == formats.SWIZZLED
        return rows, blocks, scale_rows(rows, swizzled), scale_columns(blocks, swizzled)

    @property
    def _parts(self) -> int:
        """From the source of one matrix to that of the next."""
        if self.source is None or self.source.dim() == 1:
            return 1
        return self.source.shape[-1] if self.dynamic else self.source.stride(-2)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Programs of a kernel that calls ``quantize_tile``; there must be a row."""
        rows, blocks, high, wide = self._sizes
        tall, across = _tile(blocks, self._per_token)
        count = self.codes.numel() // (rows * blocks * 8)
        return triton.cdiv(high, tall), triton.cdiv(wide, across), count

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments from ``source`` to ``parts``."""
        return self.source, self.codes, _bytes(self.scales), self.total, *self._sizes, self._parts

    @property
    def _constants(self) -> dict[str, Any]:
        per_row = self._per_token or (not self.dynamic and self.total.shape[-1] != 1)
        kind = _GIVEN if not self.dynamic else _TOKEN if self._per_token else _PARTS
        return {
            "SOURCE": kind.value,
            "PER_ROW": per_row,
            "WEIGHT": self.weight,
            "SWIZZLED": self.layout == formats.SWIZZLED,
            "PARTS": _launch.power_of_two(self._parts),
            "CONVERT": conversion(self.codes),
            **_launch.options(self.codes),
        }

    @property
    def options(self) -> dict[str, Any]:
        """The constants of ``quantize_tile`` and what every launch needs."""
        tall, across = _tile(self._sizes[1], self._per_token)
        warps = _warps(tall * across)
        return {**self._constants, "ROWS": tall, "BLOCKS": across, "num_warps": warps}

    @property
    def by_row(self) -> bool:
        """Whether a kernel that calls ``quantize_row`` is the better choice."""
        return self._chunks[1] > 0

    @property
    def _chunks(self) -> tuple[int, int]:
        blocks = self.codes.shape[-1] // 8
        return _chunks(blocks, self.codes.numel() // (blocks * 8), self.by_warp)

    @property
    def row_grid(self) -> tuple[int, int, int]:
        """Programs of a kernel that calls ``quantize_row``."""
        rows, blocks, high, _ = self._sizes
        return high, 1, self.codes.numel() // (rows * blocks * 8)

    @property
    def row_options(self) -> dict[str, Any]:
        """The constants of ``quantize_row`` and what every launch needs."""
        across, chunks = self._chunks
        sizes = {"BLOCKS": across, "CHUNKS": chunks, "num_warps": _warps(across)}
        return {**self._constants, **sizes}


def quantize_nvfp4(
    x: torch.Tensor, global_scale: torch.Tensor | None, scaling: str, layout: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.quantize.quantize``."""
    out = Output.empty(x, x.shape[-1], global_scale, scaling, layout)
    if out.codes.numel() == 0:
        return out.without_rows()
    matrix = _rows.as_rows(x)
    if global_scale is None and scaling != "token":
        out = replace(out, source=_partial_amax(matrix, matrix.shape[0] // x.shape[-2]))
    arguments = (matrix, matrix.stride(0), *out.arguments)
    with _launch.on(x):
        if out.by_row:
            _nvfp4_row_kernel[out.row_grid](*arguments, **out.row_options)
        else:
            _nvfp4_kernel[out.grid](*arguments, **out.options)
    return out.tensors


def _partial_amax(matrix: torch.Tensor, count: int) -> torch.Tensor:
    """Block maxima of ``count`` matrices, each in up to 1024 parts: float32 ``[count, parts]``."""
    rows, blocks = matrix.shape[0] // count, matrix.shape[1] // 16
    tall, across = _tile(blocks, False)
    chunks = triton.cdiv(blocks, across)
    fill = max(1, 16 * _launch.multiprocessors(matrix.device) // count)
    parts = min(triton.cdiv(rows, tall) * chunks, fill, 1024)
    peaks = matrix.new_empty((count, parts), dtype=torch.float32)
    with _launch.on(matrix):
        _amax_kernel[(parts, count)](
            matrix,
            peaks,
            matrix.stride(0),
            rows,
            blocks,
            chunks,
            ROWS=tall,
            BLOCKS=across,
            num_warps=_warps(tall * across),
            **_launch.options(matrix),
        )
    return peaks


@triton.jit
def _power_of_two_byte(amax, FLOOR: tl.constexpr, MANTISSA: tl.constexpr, EXPONENT: tl.constexpr):
    """E8M0 byte of ``2 ** ceil(log2(amax / largest))``, largest = (1 + MANTISSA / 2^23) 2^EXPONENT.

    The exponent of amax less EXPONENT, and one more where its mantissa passes that of ``largest``:
    a carry out of the mantissa bits. Maxima below FLOOR count as FLOOR.
    """
    bits = tl.maximum(amax.to(tl.int32, bitcast=True), FLOOR)
    return ((bits + (0x7FFFFF - MANTISSA)) >> 23) - EXPONENT


@triton.jit
def _inverse_of_byte(byte):
    """``2 ** (127 - byte)`` as float32, for bytes 1 to 253."""
    return ((254 - byte) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _mxfp4_kernel(
    x,
    codes,
    scales,
    stride,
    rows,
    blocks,
    scale_rows,
    scale_columns,
    SWIZZLED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    CONVERT: tl.constexpr,
    PDL: tl.constexpr,
):
    """A thread takes a block of 32, in four loads of 8 columns."""
    wait_for_inputs(PDL)
    matrix, row, block = tile_places(ROWS, BLOCKS)
    inside = (row < rows) & (block < blocks)
    start = matrix * rows
    place = x + ((start + row) * stride + block * 32)[:, None] + tl.arange(0, 8)[None, :]
    a = tl.load(place, mask=inside[:, None], other=0.0)
    b = tl.load(place + 8, mask=inside[:, None], other=0.0)
    c = tl.load(place + 16, mask=inside[:, None], other=0.0)
    d = tl.load(place + 24, mask=inside[:, None], other=0.0)
    peak = larger(larger(largest(a), largest(b)), larger(largest(c), largest(d)))
    amax, finite = finite_amax(peak)
    byte = _power_of_two_byte(amax, _FLOOR_OF_6, 0x400000, 2)
    factor, bound = _inverse_of_byte(byte), tl.where(finite, 6.0, 0.0)
    a, b = scaled_codes(a, factor, bound, CONVERT), scaled_codes(b, factor, bound, CONVERT)
    c, d = scaled_codes(c, factor, bound, CONVERT), scaled_codes(d, factor, bound, CONVERT)
    # Byte 8 i + 4 j + k is byte k of the half j of a and c (i = 0, 1).
    packed = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (0, 2, 3, 1))
    place = codes + (((start + row) * blocks + block) * 16)[:, None] + tl.arange(0, 16)[None, :]
    tl.store(place, tl.reshape(packed, [ROWS * BLOCKS, 16]), mask=inside[:, None])
    bits = tl.where(finite, byte, 255)
    scales += matrix * scale_rows * scale_columns
    _store_scales(scales, bits, row, block, inside, scale_rows, scale_columns, SWIZZLED)


def quantize_mxfp4(x: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.quantize.quantize``."""
    *batch, rows, columns = x.shape
    codes = x.new_empty((*batch, rows, columns // 2), dtype=torch.uint8)
    scales = _empty_scales(x.shape, x, 32, layout, torch.float8_e8m0fnu)
    if codes.numel() == 0:
        return codes, scales
    matrix = _rows.as_rows(x)
    blocks, swizzled = columns // 32, layout == formats.SWIZZLED
    high, wide = scale_rows(rows, swizzled), scale_columns(blocks, swizzled)
    tall, across = _tile(blocks, False)
    tall *= 2 if rows > _FEW else 1
    with _launch.on(x):
        _mxfp4_kernel[
            (triton.cdiv(high, tall), triton.cdiv(wide, across), matrix.shape[0] // rows)
        ](
            matrix,
            codes,
            _bytes(scales),
            matrix.stride(0),
            rows,
            blocks,
            high,
            wide,
            SWIZZLED=swizzled,
            ROWS=tall,
            BLOCKS=across,
            CONVERT=conversion(x),
            num_warps=_warps(tall * across),
            **_launch.options(x),
        )
    return codes, scales


@triton.jit
def _fp8_codes(values, shift, high, low, EXACT: tl.constexpr):
    """E4M3 bytes of ``values / scale``, see ``divisor``; EXACT: of ``values * shift``.

    A value times 0 is added, which makes NaN of an infinity. ``low`` may be negative: then a zero
    would lose its sign.
    """
    if EXACT:
        return e4m3_bits(tl.fma(values, shift, values * 0.0))
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        scaled = values * shift
        quotients = tl.fma(scaled, high, tl.fma(values, 0.0, scaled * low))
        magnitude = quotients.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        sign = values.to(tl.int32, bitcast=True) & _SIGN
        return e4m3_bits((magnitude | sign).to(tl.float32, bitcast=True))


@triton.jit
def _load_tile(place, inside, WHOLE: tl.constexpr):
    return tl.load(place) if WHOLE else tl.load(place, mask=inside, other=0.0)


@triton.jit
def _fp8_block_kernel(
    x, codes, scales, stride, rows, columns, WHOLE: tl.constexpr, PDL: tl.constexpr
):
    """One tile of 128 rows by 128 columns; what is not finite is looked for once.

    It is read twice, because between the two it is as well kept by the cache as by registers, and
    then more programs share a multiprocessor. WHOLE: no tile is ragged.
    """
    wait_for_inputs(PDL)
    E8M0: tl.constexpr = scales.dtype.element_ty == tl.uint8
    first = tl.program_id(0) * _TILE
    start = tl.program_id(2).to(tl.int64) * rows + first
    row, column = tl.arange(0, _TILE)[:, None], tl.program_id(1) * _TILE
    inside = (row < rows - first) & (tl.arange(0, _TILE)[None, :] < columns - column)
    x += start * stride + column
    place = x + row.to(tl.int64) * stride + tl.arange(0, _TILE)[None, :]
    loaded = _load_tile(place, inside, WHOLE)
    amax = largest(tl.reshape(loaded, [_TILE * _TILE], can_reorder=True))
    if not amax < float("inf"):
        magnitude = tl.abs(widen(_load_tile(place, inside, WHOLE)))
        amax = tl.max(tl.max(tl.where(magnitude < float("inf"), magnitude, 0.0), 1), 0)
    if E8M0:
        byte = _power_of_two_byte(amax, _FLOOR_OF_448, 0x600000, 8)
        stored = byte.to(tl.uint8)
        shift, high, low = _inverse_of_byte(byte), 1.0, 0.0
    else:
        stored = tl.maximum(tl.div_rn(amax, 448.0), 2.0**-126)
        stored = tl.where(amax == 0, 1.0, stored)
        shift, high, low = divisor(stored)
    tile = tl.program_id(2).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(scales + tile * tl.num_programs(1) + tl.program_id(1), stored)
    values = widen(_load_tile(place, inside, WHOLE))
    bits = _fp8_codes(values, shift, high, low, E8M0)
    codes += start * columns + column
    place = codes + row.to(tl.int64) * columns + tl.arange(0, _TILE)[None, :]
    tl.store(place, bits, mask=None if WHOLE else inside)


def quantize_fp8_block(
    x: torch.Tensor, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.quantize.quantize``."""
    *batch, rows, columns = x.shape
    codes = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    tiles = (triton.cdiv(rows, 128), triton.cdiv(columns, 128))
    scales = x.new_empty((*batch, *tiles), dtype=scale_dtype)
    if codes.numel() == 0:
        return codes, scales
    matrix = _rows.as_rows(x)
    grid = (*tiles, matrix.shape[0] // rows)
    with _launch.on(x):
        _fp8_block_kernel[grid](
            matrix,
            _bytes(codes),
            scales if scale_dtype == torch.float32 else _bytes(scales),
            matrix.stride(0),
            rows,
            columns,
            WHOLE=rows % 128 == 0 and columns % 128 == 0,
            num_warps=16 if scale_dtype == torch.float32 else 8,
            **_launch.options(x),
        )
    return codes, scales


@triton.jit
def _e8m0_value(bits):
    """Value of E8M0 bytes as float32: 0 is 2^-127, a subnormal number, and 255 is NaN."""
    byte = bits.to(tl.int32)
    exponent = tl.where(byte == 0, 1 << 22, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, exponent).to(tl.float32, bitcast=True)


@triton.jit
def _scale_value(loaded, E8M0: tl.constexpr):
    value = loaded
    if E8M0:
        value = _e8m0_value(loaded)
    elif loaded.dtype == tl.uint8:
        value = e4m3_value(loaded)
    return value


@triton.jit
def _e2m1_value(codes):
    """Value of E2M1 codes as float32: shifted to the top, their bits are it times 2^-126."""
    code = codes.to(tl.int32)
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def _store_decoded(out, packed, scale, total, inside):
    """Bytes ``[N, 4]`` as 8 columns at ``out [N, 1]``: ``(code * scale) * total``."""
    values = tl.join(_e2m1_value(packed & 15), _e2m1_value(packed >> 4))
    values = tl.reshape(values, [packed.shape[0], 8]) * scale[:, None] * total
    place = out + tl.arange(0, 8)[None, :]
    tl.store(place, narrow(values, out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _unpack_kernel(
    codes,
    scales,
    total,
    out,
    rows,
    blocks,
    scale_rows,
    scale_columns,
    total_stride,
    SCALED: tl.constexpr,
    PER_ROW: tl.constexpr,
    E8M0: tl.constexpr,
    SWIZZLED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows by BLOCKS pieces of 16 columns; an E8M0 scale belongs to two pieces."""
    wait_for_inputs(PDL)
    matrix = tl.program_id(2).to(tl.int64)
    group = tl.arange(0, ROWS * BLOCKS)
    row = tl.program_id(0).to(tl.int64) * ROWS + group // BLOCKS
    block = tl.program_id(1) * BLOCKS + group % BLOCKS
    inside = (row < rows) & (block < blocks)
    piece = ((matrix * rows + row) * blocks + block)[:, None]
    place = codes + piece * 8 + tl.arange(0, 4)[None, :]
    first = tl.load(place, mask=inside[:, None], other=0)
    last = tl.load(place + 4, mask=inside[:, None], other=0)
    scales += matrix * scale_rows * scale_columns
    offset = scale_offset(row, block // 2 if E8M0 else block, scale_columns, SWIZZLED)
    scale = _scale_value(tl.load(scales + offset, mask=inside, other=0), E8M0)
    factor = 1.0
    if SCALED and PER_ROW:
        factor = tl.load(total + matrix * total_stride + row, mask=inside, other=0.0)[:, None]
    elif SCALED:
        factor = tl.load(total + matrix * total_stride)
    _store_decoded(out + piece * 16, first, scale, factor, inside)
    _store_decoded(out + piece * 16 + 8, last, scale, factor, inside)


@triton.jit
def _decode_fp8_kernel(
    codes, scales, out, rows, columns, E8M0: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr
):
    """ROWS rows, a divisor of 128, of one tile."""
    wait_for_inputs(PDL)
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * _TILE + tl.arange(0, _TILE)[None, :]
    inside = (row < rows) & (column < columns)
    place = (matrix * rows + row) * columns + column
    loaded = tl.load(codes + place, mask=inside, other=0)
    tile = matrix * tl.cdiv(rows, _TILE) + tl.program_id(0) * ROWS // _TILE
    scale = _scale_value(tl.load(scales + tile * tl.num_programs(1) + tl.program_id(1)), E8M0)
    values = narrow(e4m3_value(loaded) * scale, out.dtype.element_ty)
    tl.store(out + place, values, mask=inside)


def dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor | None,
    segments: Sequence[int],
    format: str,
    layout: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """See ``dsv4.ops.quantize.dequantize``."""
    packing = 2 if formats.format_named(format).packed else 1
    shape = (*codes.shape[:-1], codes.shape[-1] * packing)
    out = codes.new_empty(shape, dtype=dtype)
    if out.numel() == 0:
        return out
    codes, scales = codes.contiguous(), scales.contiguous()
    e8m0 = scales.dtype == torch.float8_e8m0fnu
    scales = scales if scales.dtype == torch.float32 else _bytes(scales)
    if packing == 1:
        _launch_fp8(_bytes(codes), scales, out, e8m0)
        return out
    if segments:
        assert global_scale is not None
        global_scale = formats.expand_segments(global_scale, segments, codes.shape[-2])
    _launch_unpack(codes, scales, global_scale, out, e8m0, layout == formats.SWIZZLED)
    return out


def _launch_fp8(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, e8m0: bool) -> None:
    rows, columns = out.shape[-2:]
    count = out.numel() // (rows * columns)
    tall = 32
    grid = (triton.cdiv(rows, tall), triton.cdiv(columns, 128), count)
    options: dict[str, Any] = _launch.options(out)
    with _launch.on(out):
        _decode_fp8_kernel[grid](
            codes, scales, out, rows, columns, E8M0=e8m0, ROWS=tall, num_warps=8, **options
        )


def _launch_unpack(
    codes: torch.Tensor,
    scales: torch.Tensor,
    total: torch.Tensor | None,
    out: torch.Tensor,
    e8m0: bool,
    swizzled: bool,
) -> None:
    rows, blocks = out.shape[-2], out.shape[-1] // 16
    high = scale_rows(rows, swizzled)
    wide = scale_columns(blocks // 2 if e8m0 else blocks, swizzled)
    tall, across = _tile(blocks, False)
    count = out.numel() // (rows * blocks * 16)
    with _launch.on(out):
        _unpack_kernel[(triton.cdiv(rows, tall), triton.cdiv(blocks, across), count)](
            codes,
            scales,
            None if total is None else total.contiguous(),
            out,
            rows,
            blocks,
            high,
            wide,
            0 if total is None else total.shape[-1],
            SCALED=total is not None,
            PER_ROW=total is not None and total.shape[-1] != 1,
            E8M0=e8m0,
            SWIZZLED=swizzled,
            ROWS=tall,
            BLOCKS=across,
            num_warps=_warps(tall * across),
            **_launch.options(out),
        )
