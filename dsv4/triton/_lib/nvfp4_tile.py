"""Quantise registers to NVFP4 and store them: a tile, or a row by chunks.

Tiling for many rows (``quantize_row``): a thread owns a block of 16 in two halves of 8 columns, so
the maximum of a block needs no other thread, and codes and scales are stored from the registers
that computed them.

Tiling for few rows (``quantize_tile``): two threads own a block, a piece of 8 columns each, because
a lone thread takes 3 to 7 cycles per instruction and 8 columns take half the instructions of 16.
Several programs share a long row. Where the global scale follows from the row, or the kernel has a
norm first, each program reads all of the row, but codes and stores its own part only.

``Output`` is the launcher's side: every kernel that quantises takes its ``arguments`` and
``options``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4.quant import formats
from dsv4.triton._lib.numerics import widen
from dsv4.triton._lib.nvfp4 import (
    block_scales,
    conversion,
    dynamic_scale,
    e2m1_codes,
    finite_amax,
    is_moderate,
    larger,
    largest,
    scale_columns,
    scale_offset,
    scale_rows,
)
from dsv4.triton._runtime import launch_options

# Source of the global scale: stored in memory, computed from the row, or from partial maxima.
_STORED = tl.constexpr(0)
TOKEN = tl.constexpr(1)
_PARTIALS = tl.constexpr(2)

# Blocks of a tile, one thread each; rows up to which rows count as few; rows up to which a program
# has its SM to itself, so that a thread takes one piece only.
_TILE_BLOCKS = 128
_FEW_ROWS = 256
_LONE_ROWS = 8

# Rows up to which several programs share a row, and blocks that each of them codes.
_SHARED_ROWS = 64
_SHARE_BLOCKS = 128


@triton.jit
def load_halves(x, stride, row, block, inside):
    """The blocks' first and last 8 columns, float32 ``[N, 8]`` each; 0 outside."""
    column = tl.arange(0, 8)[None, :]
    address = x + (row * stride + block * 16)[:, None] + column
    first = tl.load(address, mask=inside[:, None], other=0.0)
    last = tl.load(address + 8, mask=inside[:, None], other=0.0)
    return widen(first), widen(last)


@triton.jit
def load_pieces(x, stride, row, piece, inside):
    """Pieces ``piece [N]`` of 8 columns of rows ``row [N]``, as ``[N, 8]``; 0 where not inside."""
    address = x + (row * stride + piece * 8)[:, None] + tl.arange(0, 8)[None, :]
    return tl.load(address, mask=inside[:, None], other=0.0)


@triton.jit
def of_block(peak, PIECES: tl.constexpr):
    """Maximum of each group of PIECES neighbours of ``peak [N]`` (a block), in all of them.

    Compared as ``largest`` does: NaN where one is NaN.
    """
    N: tl.constexpr = peak.shape[0] // PIECES
    bits = tl.reshape(peak.to(tl.int32, bitcast=True), [N, PIECES])
    peaks = tl.broadcast_to(tl.max(bits, 1)[:, None], [N, PIECES])
    return tl.reshape(peaks, [N * PIECES]).to(tl.float32, bitcast=True)


@triton.jit
def store_halves(codes, row, blocks, block, first, last, inside):
    """Codes ``[N, 4]`` of both halves, as 8 bytes of each block; ``inside`` may be None."""
    both = tl.reshape(tl.permute(tl.join(first, last), (0, 2, 1)), [first.shape[0], 8])
    address = codes + ((row * blocks + block) * 8)[:, None] + tl.arange(0, 8)[None, :]
    tl.store(address, both, mask=None if inside is None else inside[:, None])


@triton.jit
def store_scales(scales, bits, row, block, inside, rows, columns, SWIZZLED: tl.constexpr):
    """Scale bytes of a tile; 0 in the padding, which the layout counts as ``rows x columns``."""
    address = scales + scale_offset(row, block, columns, SWIZZLED)
    tl.store(address, tl.where(inside, bits, 0).to(tl.uint8), mask=(row < rows) & (block < columns))


@triton.jit
def row_peak(amax, ROWS: tl.constexpr):
    """The largest of each row of ``amax [ROWS * N]``, numbers of 0 or more: ``[ROWS]``.

    Of one row a scalar, behind one barrier: every warp broadcasts its maximum through shared
    memory and each thread compares all of them. ``tl.max`` would let one warp compare them and
    broadcast the result behind a second barrier.
    """
    N: tl.constexpr = amax.shape[0] // ROWS
    bits = amax.to(tl.int32, bitcast=True)
    if ROWS > 1:
        peak = tl.max(tl.reshape(bits, [ROWS, N]), 1)
    else:
        if N > 32:
            WARPS: tl.constexpr = N // 32
            COPIES: tl.constexpr = max(1, 32 // WARPS)
            partials = tl.max(tl.reshape(bits, [WARPS, 32]), 1)
            bits = tl.broadcast_to(partials[None, :], [COPIES, WARPS])
            bits = tl.reshape(bits, [COPIES * WARPS])
        peak = tl.max(bits, 0)
    return peak.to(tl.float32, bitcast=True)


@triton.jit
def sum_of_all(numbers):
    """The sum of int32 ``numbers [N]``, in every thread behind one barrier as in ``row_peak``."""
    N: tl.constexpr = numbers.shape[0]
    WARPS: tl.constexpr = max(1, N // 32)
    COPIES: tl.constexpr = max(1, 32 // WARPS) if N > 32 else 1
    if N > 32:
        partials = tl.sum(tl.reshape(numbers, [WARPS, 32]), 1)
        partials = tl.broadcast_to(partials[None, :], [COPIES, WARPS])
        numbers = tl.reshape(partials, [COPIES * WARPS])
    return tl.sum(numbers, 0) // COPIES


@triton.jit
def tile_coordinates(ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Return this program's matrix, and row and block of each of its ROWS * BLOCKS blocks."""
    group = tl.arange(0, ROWS * BLOCKS)
    row = tl.program_id(0).to(tl.int64) * ROWS + group // BLOCKS
    block = tl.program_id(1) * BLOCKS + group % BLOCKS
    return tl.program_id(2).to(tl.int64), row, block


@triton.jit
def own_coordinates(ROWS: tl.constexpr, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr):
    """Return this program's matrix, and row and piece of each of its ROWS * BLOCKS * 2 pieces.

    CHUNKS programs share ROWS rows. They follow one another, and so start at the same time.
    """
    group = tl.arange(0, ROWS * BLOCKS * 2)
    row = (tl.program_id(0) // CHUNKS).to(tl.int64) * ROWS + group // (2 * BLOCKS)
    piece = tl.program_id(0) % CHUNKS * (2 * BLOCKS) + group % (2 * BLOCKS)
    return tl.program_id(1).to(tl.int64), row, piece


@triton.jit
def loaded_coordinates(
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr, WHOLE: tl.constexpr
):
    """``own_coordinates``; or of all WHOLE pieces of the row, where WHOLE is not 0."""
    matrix, row, piece = own_coordinates(ROWS, BLOCKS, CHUNKS)
    if WHOLE > 0:
        piece = tl.arange(0, WHOLE)
        row = (tl.program_id(0) // CHUNKS).to(tl.int64) + piece * 0
    return matrix, row, piece


@triton.jit
def own_part(values, chunk, N: tl.constexpr):
    """The N pieces of part ``chunk`` of a row of M pieces, ``[M, 8]``: ``[N, 8]``.

    M is N times a power of two. Every thread has as many of each N neighbours, so no data are
    exchanged between threads.
    """
    for _ in tl.static_range(16):
        if values.shape[0] > N:
            halves = tl.reshape(values, [2, values.shape[0] // 2, 8])
            low, high = tl.split(tl.permute(halves, (1, 2, 0)))
            values = tl.where((chunk & (low.shape[0] // N)) != 0, high, low)
    return values


@triton.jit
def block_peaks(values):
    """Maximum magnitude of each piece's block, ``[M]`` of ``[M, 8]``; 0 where it is not finite."""
    return finite_amax(of_block(largest(values), 2))[0]


@triton.jit
def over_threads(peaks, N: tl.constexpr):
    """Maximum of every N-th of ``peaks [M]``, ``[N]``: within each thread, before any exchange."""
    if peaks.shape[0] == N:
        return peaks
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        return tl.max(tl.reshape(peaks, [peaks.shape[0] // N, N]), 0)


@triton.jit
def quantize_tile(
    values,
    peaks,
    out,
    SOURCE: tl.constexpr,
    PER_ROW: tl.constexpr,
    WEIGHT: tl.constexpr,
    SWIZZLED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PARTIALS: tl.constexpr,
    CONVERT: tl.constexpr,
    own=None,
):
    """Quantise and store this program's blocks: ``values [ROWS * BLOCKS * 2, 8]``, of any float.

    Two threads own a block, 8 columns each, so that a lone row has many threads. The pieces are
    those of ``own_coordinates``, unless ``own`` lists others.

    ``peaks``: with SOURCE TOKEN the ``block_peaks`` of whole rows (ROWS times any number); with a
    stored scale that scale, or None if it has not been loaded. ``out`` is ``Output.arguments``:
    ``source`` points to the stored global scales, or to ``partials`` partial maxima of each matrix;
    ``partials`` is 0 where all matrices share one stored scale. The other arguments are
    ``Output.options``.
    """
    source, codes, scales, total, rows, blocks, scale_rows, scale_columns, partials = out
    matrix, row, piece = own_coordinates(ROWS, BLOCKS, CHUNKS)
    if own is not None:
        piece = own
    inside = (row < rows) & (piece < 2 * blocks)
    start = matrix * rows
    # One scale per program is a scalar, so one branch decides whether it is moderate.
    SINGLE_SCALE: tl.constexpr = ROWS == 1 or not PER_ROW
    line = (tl.program_id(0) // CHUNKS).to(tl.int64) * ROWS
    if ROWS > 1:
        line += tl.arange(0, ROWS)
    amax, finite = finite_amax(of_block(largest(values), 2))
    if SOURCE == _STORED and PER_ROW:
        scale = peaks
        if peaks is None:
            scale = tl.load(source + start + line, mask=line < rows, other=1.0)
    elif SOURCE == _STORED:
        scale = peaks
        if peaks is None:
            scale = tl.load(source + matrix * partials)
    elif SOURCE == _PARTIALS:
        part = tl.arange(0, PARTIALS)
        peaks = tl.load(source + matrix * partials + part, mask=part < partials, other=0.0)
        scale = dynamic_scale(tl.max(peaks, 0))
    else:
        scale = dynamic_scale(row_peak(over_threads(peaks, ROWS * BLOCKS * 2), ROWS))
    if PER_ROW:
        if tl.program_id(0) % CHUNKS == 0:
            tl.store(total + start + line, scale, mask=line < rows)
    elif tl.program_id(0) == 0:
        tl.store(total + matrix, scale)
    codes += start * blocks * 8
    scales += matrix * scale_rows * scale_columns
    block = (values, amax, finite)
    to = (codes, scales, row, piece, inside, blocks, scale_rows, scale_columns)
    if SINGLE_SCALE:
        if is_moderate(scale):
            code_tile(block, scale, to, WEIGHT, SWIZZLED, CONVERT, True)
        else:
            code_tile(block, scale, to, WEIGHT, SWIZZLED, CONVERT, False)
    else:
        row_scales = tl.broadcast_to(scale[:, None], [ROWS, 2 * BLOCKS])
        row_scales = tl.reshape(row_scales, [ROWS * 2 * BLOCKS])
        code_tile(block, row_scales, to, WEIGHT, SWIZZLED, CONVERT, False)


@triton.jit
def code_tile(
    block,
    scale,
    to,
    WEIGHT: tl.constexpr,
    SWIZZLED: tl.constexpr,
    CONVERT: tl.constexpr,
    MODERATE: tl.constexpr,
):
    """Store codes and scales of ``values [N, 8]``, pieces ``piece [N]`` of rows ``row [N]``.

    ``block`` is these values, the maximum magnitude ``[N]`` of each piece's block and whether it is
    finite; ``to`` is where they go, as unpacked here.
    """
    values, amax, finite = block
    codes, scales, row, piece, inside, blocks, scale_rows, scale_columns = to
    bits, product = block_scales(amax, finite, scale, WEIGHT, MODERATE)
    packed = e2m1_codes(values, product, CONVERT, MODERATE)
    store_pieces(codes, row, blocks, piece, packed, inside)
    # Of the two threads that own a block, the first stores its scale.
    block = tl.where(piece % 2 == 0, piece // 2, scale_columns)
    store_scales(scales, bits, row, block, inside, scale_rows, scale_columns, SWIZZLED)


@triton.jit
def store_pieces(codes, row, blocks, piece, packed, inside):
    """Codes ``[N, 4]`` of pieces ``piece [N]`` of 8 columns of rows ``row [N]``."""
    address = codes + (row * (blocks * 8) + piece * 4)[:, None] + tl.arange(0, 4)[None, :]
    tl.store(address, packed, mask=inside[:, None])


@triton.jit
def _code_row(
    halves,
    scale,
    to,
    WEIGHT: tl.constexpr,
    SWIZZLED: tl.constexpr,
    CHUNKS: tl.constexpr,
    CONVERT: tl.constexpr,
    MODERATE: tl.constexpr,
):
    # Codes and scales of one row; ``halves`` as in ``quantize_row``.
    firsts, lasts, block_numbers = halves
    codes, scales, row, blocks = to
    for chunk in tl.static_range(CHUNKS):
        block = block_numbers[chunk]
        first, last = firsts[chunk], lasts[chunk]
        amax, finite = finite_amax(larger(largest(first), largest(last)))
        bits, product = block_scales(amax, finite, scale, WEIGHT, MODERATE)
        first = e2m1_codes(first, product, CONVERT, MODERATE)
        last = e2m1_codes(last, product, CONVERT, MODERATE)
        store_halves(codes, 0, blocks, block, first, last, None)
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
    """Store zero scales for a padding row of their layout; arguments as ``quantize_row``."""
    row, matrix = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    scales += matrix * scale_rows * scale_columns
    for chunk in tl.static_range(CHUNKS):
        block = chunk * BLOCKS + tl.arange(0, BLOCKS)
        address = scales + scale_offset(row, block, scale_columns, SWIZZLED)
        tl.store(address, tl.zeros([BLOCKS], tl.uint8), mask=block < scale_columns)


@triton.jit
def blank_tile(scales, rows, scale_rows, scale_columns, number, N: tl.constexpr):
    """Store zero scales in padding rows of the swizzled layout; ``number`` counts such programs.

    The padding rows end the last 128 rows, whose scales lie together: 16 bytes are 4 blocks of 4
    rows at a distance of 32. They have programs of their own, because a program that computed rows
    outside the matrix would take as long as the others.
    """
    group = number * N + tl.arange(0, N)[:, None]
    of_group = tl.arange(0, 4)[None, :]
    row, begun = group % 32, rows % 128
    start = tl.program_id(1).to(tl.int64) * scale_rows + rows // 128 * 128
    address = (scales + start * scale_columns).to(tl.pointer_type(tl.uint32)) + group * 4 + of_group
    inside = group < 8 * scale_columns
    nothing = tl.zeros([N, 4], tl.uint32)
    tl.store(address, nothing, mask=inside & (row >= begun))
    tl.store(address, nothing, mask=inside & (row < begun) & (row + 32 * of_group >= begun))


@triton.jit
def quantize_row(
    halves,
    out,
    SOURCE: tl.constexpr,
    PER_ROW: tl.constexpr,
    WEIGHT: tl.constexpr,
    SWIZZLED: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PARTIALS: tl.constexpr,
    CONVERT: tl.constexpr,
):
    """Do what ``quantize_tile`` does for one row, whose CHUNKS times BLOCKS blocks are in halves.

    ``halves`` is three tuples of CHUNKS members: first halves, last halves, and the numbers of the
    blocks in the row. The halves may still be of a narrow dtype. ``out`` is ``Output.arguments``.
    A thread has CHUNKS blocks, which share what is computed once for a row, and tests once whether
    its global scale is moderate. BLOCKS is a multiple of 4, so that scales have no padding but
    whole rows: see ``blank_scales``.
    """
    firsts, lasts, _ = halves
    source, codes, scales, total, rows, blocks, scale_rows, scale_columns, partials = out
    row, matrix = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    start = matrix * rows + row
    if SOURCE == _STORED:
        scale = tl.load(source + (start if PER_ROW else matrix * partials))
    elif SOURCE == _PARTIALS:
        part = tl.arange(0, PARTIALS)
        peaks = tl.load(source + matrix * partials + part, mask=part < partials, other=0.0)
        scale = dynamic_scale(tl.max(peaks, 0))
    else:
        peak = tl.zeros([BLOCKS], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            both = larger(largest(firsts[chunk]), largest(lasts[chunk]))
            peak = tl.maximum(peak, finite_amax(both)[0])
        scale = dynamic_scale(tl.max(peak, 0))
    codes += start * blocks * 8
    scales += matrix * scale_rows * scale_columns
    to = (codes, scales, row, blocks)
    if is_moderate(scale):
        _code_row(halves, scale, to, WEIGHT, SWIZZLED, CHUNKS, CONVERT, True)
    else:
        _code_row(halves, scale, to, WEIGHT, SWIZZLED, CHUNKS, CONVERT, False)
    if PER_ROW:
        tl.store(total + start, scale)
    elif row == 0:
        tl.store(total + matrix, scale)


def are_many(rows: int) -> bool:
    """Return whether the rows fill the GPU, so that each may have few threads."""
    return rows > _FEW_ROWS


def tile_shape(blocks: int, whole: bool) -> tuple[int, int]:
    """Rows and blocks of a tile of 128 blocks or, where it must hold a ``whole`` row, more."""
    wide = launch_options.power_of_two(blocks)
    if not whole:
        fitting = blocks & -blocks
        wide = fitting if fitting >= 32 else wide
        wide = min(wide, _TILE_BLOCKS)
    return max(1, _TILE_BLOCKS // wide), wide


def shared_blocks(blocks: int, rows: int) -> int:
    """Blocks of a row that a program codes; where rows are few, several programs share one.

    A program has 8 warps then. With 4, which look at twice as much of the row each, it was as fast
    with one or two rows and slower with more.
    """
    wide = launch_options.power_of_two(blocks)
    return min(wide, _SHARE_BLOCKS) if rows <= _SHARED_ROWS else wide


def _chunks(blocks: int, rows: int, by_warp: bool) -> tuple[int, int]:
    """Blocks of a chunk, and chunks of a program that takes one row: 0 where tiles do better.

    Few rows are faster with many threads per row. Many rows are faster with few threads each, two
    warps or one (``by_warp``), which share what is computed once per row. A thread keeps its
    blocks, at most 8, in registers. No block may lie past the row.
    """
    wide = 32 if by_warp else 64
    across = min(blocks & -blocks, max(wide, launch_options.power_of_two(triton.cdiv(blocks, 8))))
    fits = are_many(rows) and across >= 32 and blocks // across <= 8
    return across, blocks // across if fits else 0


def tile_warps(pieces: int, rows: int = _FEW_ROWS) -> int:
    """Warps for that many pieces of rows: one thread per piece, up to 16 warps.

    Above 256 pieces a thread has two, unless each program has an SM to itself.
    """
    threads = pieces if pieces <= 256 or rows <= _LONE_ROWS else max(256, pieces // 2)
    return min(16, max(1, threads // 32))


def empty_scales(
    of: Sequence[int], like: torch.Tensor, width: int, layout: str, dtype: torch.dtype
) -> torch.Tensor:
    """Block scales of a matrix of the shape ``of``, on the device of ``like``."""
    *batch, rows, columns = of
    swizzled = layout == formats.SWIZZLED
    shape = (scale_rows(rows, swizzled), scale_columns(columns // width, swizzled))
    if swizzled:
        return like.new_empty((*batch, shape[0] * shape[1]), dtype=dtype)
    return like.new_empty((*batch, *shape), dtype=dtype)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@dataclass(frozen=True)
class Output:
    """The tensors that quantising ``[*batch, N, K]`` to NVFP4 writes, and its launch options.

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
        normed: Whether the kernel norms the rows first, so that a program reads all of its row.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    total: torch.Tensor
    source: torch.Tensor | None
    dynamic: bool
    weight: bool
    layout: str
    by_warp: bool = False
    normed: bool = False

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
        scales = empty_scales((*batch, rows, columns), x, 16, layout, torch.float8_e4m3fn)
        weight = scaling == "weight"
        if global_scale is None:
            total = x.new_empty((*batch, rows if scaling == "token" else 1), dtype=torch.float32)
            return Output(codes, scales, total, None, True, weight, layout)
        total = torch.empty_like(global_scale, memory_format=torch.contiguous_format)
        shared = total.shape[-1] == 1 and not any(global_scale.stride()[:-1])
        stored = global_scale if shared else global_scale.contiguous()
        return Output(codes, scales, total, stored, False, weight, layout)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tensors that the operator returns."""
        return self.codes, self.scales, self.total

    def without_rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``tensors`` where there is nothing to quantise: a matrix has a scale all the same."""
        total = self.total.fill_(1.0) if self.source is None else self.total.copy_(self.source)
        return self.codes, self.scales, total

    @property
    def _per_token(self) -> bool:
        return self.dynamic and self.source is None

    @property
    def _all_rows(self) -> int:
        """The number of rows of all matrices; there must be a row."""
        return self.codes.numel() // self.codes.shape[-1]

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        rows, blocks = self.codes.shape[-2], self.codes.shape[-1] // 8
        swizzled = self.layout == formats.SWIZZLED
        return rows, blocks, scale_rows(rows, swizzled), scale_columns(blocks, swizzled)

    @property
    def _partials(self) -> int:
        """The distance from the source of one matrix to that of the next."""
        if self.source is None or self.source.dim() == 1:
            return 1
        return self.source.shape[-1] if self.dynamic else self.source.stride(-2)

    @property
    def grid(self) -> tuple[int, int]:
        """Programs of a kernel that calls ``quantize_tile``; there must be a row."""
        rows, blocks, high, wide = self._sizes
        tall, across, chunks = self._tile
        count = self.codes.numel() // (rows * blocks * 8)
        groups = 8 * wide if high > rows else 0
        return triton.cdiv(rows, tall) * chunks + triton.cdiv(groups, 2 * tall * across), count

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments from ``source`` to ``partials``."""
        return (
            self.source,
            self.codes,
            as_bytes(self.scales),
            self.total,
            *self._sizes,
            self._partials,
        )

    @property
    def _constants(self) -> dict[str, Any]:
        per_row = self._per_token or (not self.dynamic and self.total.shape[-1] != 1)
        kind = _STORED if not self.dynamic else TOKEN if self._per_token else _PARTIALS
        return {
            "SOURCE": kind.value,
            "PER_ROW": per_row,
            "WEIGHT": self.weight,
            "SWIZZLED": self.layout == formats.SWIZZLED,
            "PARTIALS": launch_options.power_of_two(self._partials),
            "CONVERT": conversion(self.codes),
            **launch_options.options(self.codes, small=self._all_rows <= _FEW_ROWS // 2),
        }

    @property
    def options(self) -> dict[str, Any]:
        """The constants of ``quantize_tile`` and what every launch needs."""
        tall, across, chunks = self._tile
        sizes = {"ROWS": tall, "BLOCKS": across, "CHUNKS": chunks}
        warps = tile_warps(2 * tall * across, self._all_rows)
        return {**self._constants, **sizes, "num_warps": warps}

    @property
    def whole(self) -> int:
        """Pieces of the row, where each program reads all of them and not its own only; else 0."""
        reads_all = self.normed or (self._per_token and self._shared)
        return 2 * launch_options.power_of_two(self._sizes[3]) if reads_all else 0

    @property
    def _shared(self) -> bool:
        """Return whether several programs share a row."""
        wide = self._sizes[3]
        return shared_blocks(wide, self._all_rows) < launch_options.power_of_two(wide)

    @property
    def _tile(self) -> tuple[int, int, int]:
        """Rows and blocks of a tile, and tiles that a row of scales has."""
        _, blocks, _, wide = self._sizes
        if self.normed or self._shared:
            part = shared_blocks(wide, self._all_rows)
            return 1, part, triton.cdiv(wide, part)
        tall, across = tile_shape(blocks, self._per_token)
        return tall, across, triton.cdiv(wide, across)

    @property
    def by_row(self) -> bool:
        """Return whether a kernel that calls ``quantize_row`` is the better choice."""
        return self._chunks[1] > 0

    @property
    def _chunks(self) -> tuple[int, int]:
        blocks = self.codes.shape[-1] // 8
        return _chunks(blocks, self._all_rows, self.by_warp)

    @property
    def row_grid(self) -> tuple[int, int, int]:
        """Programs of a kernel that calls ``quantize_row``."""
        rows, blocks, high, _ = self._sizes
        return high, 1, self.codes.numel() // (rows * blocks * 8)

    @property
    def row_options(self) -> dict[str, Any]:
        """The constants of ``quantize_row`` and what every launch needs."""
        across, chunks = self._chunks
        sizes = {"BLOCKS": across, "CHUNKS": chunks, "num_warps": min(16, max(1, across // 32))}
        return {**self._constants, **sizes}
