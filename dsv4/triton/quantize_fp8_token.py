"""Kernels of ``"fp8_token"``, FP8 by tokens and 128 columns: see ``dsv4.ops.quantize``.

One takes 128 columns of some rows. The other one is for many blocks of 128 columns: a thread owns
16 columns of a block, which are four words in the order of fragments, so that codes need no
exchange between threads, and a program takes several times as many bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.ops.quantize import QuantizeFp8TokenArgs, empty_fp8_token
from dsv4.quant import formats
from dsv4.triton._lib import row_tiles
from dsv4.triton._lib.fp8_token import (
    WIDTH,
    finite_peak,
    fp8_token_tile,
    fragment_order,
    fragment_words,
    inverse_scales,
    without_infinities,
)
from dsv4.triton._lib.numerics import e4m3_tile, once, wait_for_inputs, widen
from dsv4.triton._lib.nvfp4_tile import as_bytes
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

_ROWS = 8  # of a program: 128 columns of 8 rows are 8 values for each of 128 threads
_MANY_BLOCKS = 16384  # blocks of 128 columns of all rows from which they count as many
# Many blocks: those of a chunk, in which a thread has 16 columns, and chunks of a program.
_CHUNK_BLOCKS, _CHUNKS = 16, 2


@fast_launch
@triton.jit
def _fp8_token_kernel(
    x,
    codes,
    scales,
    stride,
    rows,
    columns,
    blocks,
    ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """128 columns of ROWS rows. WHOLE: no block is ragged. FRAGMENTS: in the order of fragments."""
    for _ in range(once(PDL)):
        wait_for_inputs(PDL)
        block = tl.program_id(0) % blocks
        row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = block * WIDTH + tl.arange(0, WIDTH)[None, :]
        inside = (row < rows)[:, None]
        if not WHOLE:
            inside = inside & (column < columns)
        loaded = tl.load(x + row[:, None] * stride + column, mask=inside, other=0.0)
        bits, byte = fp8_token_tile(widen(loaded))
        if FRAGMENTS:
            bits = fragment_order(bits)
        tl.store(codes + row[:, None] * columns + column, bits, mask=inside)
        tl.store(scales + row * blocks + block, byte, mask=row < rows)


@fast_launch
@triton.jit(do_not_specialize=["total"])
def _fp8_token_many_kernel(
    x,
    codes,
    scales,
    stride,
    blocks,
    total,
    CONTIGUOUS: tl.constexpr,
    FRAGMENTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """CHUNKS times BLOCKS of all ``total`` blocks; CONTIGUOUS: a row follows the one before."""
    wait_for_inputs(PDL)
    start = tl.program_id(0).to(tl.int64) * (BLOCKS * CHUNKS)
    left = tl.minimum(total - start, BLOCKS * CHUNKS).to(tl.int32)
    piece = tl.arange(0, BLOCKS * 8)
    loaded = ()
    for chunk in tl.static_range(CHUNKS):
        block = chunk * BLOCKS + piece // 8
        if CONTIGUOUS:
            address = x + start * WIDTH + (block * WIDTH + piece % 8 * 16)[:, None]
        else:
            row = (start + block) // blocks
            column = (start + block - row * blocks) * WIDTH + piece % 8 * 16
            address = x + (row * stride + column)[:, None]
        address += tl.arange(0, 8)[None, :]
        inside = (block < left)[:, None]
        loaded += (tl.load(address, mask=inside, other=0.0),)  # type: ignore[assignment]
        loaded += (tl.load(address + 8, mask=inside, other=0.0),)  # type: ignore[assignment]
    codes += start * WIDTH
    for chunk in tl.static_range(CHUNKS):
        block = chunk * BLOCKS + piece // 8
        inside = block < left
        first = without_infinities(widen(loaded[2 * chunk]))
        last = without_infinities(widen(loaded[2 * chunk + 1]))
        inverse, byte = inverse_scales(tl.maximum(finite_peak(first), finite_peak(last)))
        first, last = first * inverse[:, None], last * inverse[:, None]
        if FRAGMENTS:
            words = fragment_words(first, last)
            address = codes.to(tl.pointer_type(tl.uint32)) + block * (WIDTH // 4) + piece % 8
            for q in tl.static_range(4):
                word = tl.reshape(words[q], [BLOCKS * 8])
                tl.store(address + 8 * q, word, mask=inside)
        else:
            address = codes + (block * WIDTH + piece % 8 * 16)[:, None] + tl.arange(0, 8)[None, :]
            tl.store(address, e4m3_tile(first), mask=inside[:, None])
            tl.store(address + 8, e4m3_tile(last), mask=inside[:, None])
        tl.store(scales + start + block, byte, mask=inside & (piece % 8 == 0))


def quantize_fp8_token(args: QuantizeFp8TokenArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.quantize.quantize``."""
    x = args.x
    codes, scales = empty_fp8_token(x, x.shape)
    if codes.numel() == 0:
        return codes, scales
    matrix = row_tiles.as_rows(x)
    rows, columns = matrix.shape
    blocks = triton.cdiv(columns, 128)
    fragments = args.layout == formats.FRAGMENTS
    if columns % 128 == 0 and rows * blocks >= _MANY_BLOCKS:
        _quantize_many(matrix, codes, scales, fragments)
        return codes, scales
    tall = min(_ROWS, launch_options.power_of_two(rows))
    programs, warps = triton.cdiv(rows, tall) * blocks, max(1, tall // 2)
    with launch_options.on(x):
        _fp8_token_kernel[(programs,)](
            matrix,
            as_bytes(codes),
            as_bytes(scales),
            matrix.stride(0),
            rows,
            columns,
            blocks,
            ROWS=tall,
            WHOLE=columns % 128 == 0,
            FRAGMENTS=fragments,
            num_warps=warps,
            **launch_options.options(x, small=launch_options.is_small(programs, warps)),
        )
    return codes, scales


def _quantize_many(
    matrix: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, fragments: bool
) -> None:
    """Quantise many rows whose number of columns is a multiple of 128."""
    rows, columns = matrix.shape
    blocks = columns // 128
    with launch_options.on(matrix):
        _fp8_token_many_kernel[(triton.cdiv(rows * blocks, _CHUNK_BLOCKS * _CHUNKS),)](
            matrix,
            as_bytes(codes),
            as_bytes(scales),
            matrix.stride(0),
            blocks,
            rows * blocks,
            CONTIGUOUS=matrix.stride(0) == columns,
            FRAGMENTS=fragments,
            BLOCKS=_CHUNK_BLOCKS,
            CHUNKS=_CHUNKS,
            num_warps=_CHUNK_BLOCKS // 4,
            **launch_options.options(matrix),
        )
