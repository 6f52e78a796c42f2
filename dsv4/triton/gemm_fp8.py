"""GEMM with an FP8 weight, one scale per 128 x 128 block.

The weight's tile is the left operand of the tensor cores (M) and the tokens are the right one (N):
the codes are widened to bfloat16 in registers, exactly, and 16 tokens still fill the instruction.
Each block of 128 columns is summed by the tensor cores in float32, times its scale, and added in
float32 in ascending order. That sum has to stay in float32's range before its scale too:
it may overflow where a value of ``x`` passes 2^112.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4.ops.gemm import GemmArgs
from dsv4.ops.quantize import bfloat16_operand, fp8_values
from dsv4.triton._lib import row_tiles
from dsv4.triton._lib.gemm_tiles import nan_if_not_finite, tile_of_program
from dsv4.triton._lib.numerics import INTERPRETED, e4m3_value, narrow, wait_for_inputs, widen
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

BLOCK = 128
_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _scale_value(scale):
    """Block scale as float32: float32 itself, or the byte of E8M0 (0 is 2^-127, 255 is NaN)."""
    if scale.dtype == tl.float32:
        return scale
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        byte = scale.to(tl.int32)
        bits = tl.where(byte == 0, 1 << 22, byte << 23)
        return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _block_gemm(codes, x):
    """``codes [N, 128]`` (bits of E4M3) times ``x [T, 128]`` transposed, float32 ``[N, T]``."""
    if INTERPRETED:
        return tl.dot(e4m3_value(codes), tl.trans(widen(x)), input_precision="ieee")
    else:  # noqa: RET505
        # Through float32: the conversion from float16 to bfloat16 has a sixteenth of its rate.
        return tl.dot(e4m3_value(codes).to(tl.bfloat16), tl.trans(x))


@fast_launch
@triton.jit(do_not_specialize=["tokens", "tiles", "token_tiles", "length"])
def _gemm_kernel(
    x,
    x_stride,
    group_stride,
    codes,
    codes_stride,
    scales,
    row_scale,
    out,
    tokens,
    rows,
    columns,
    tiles,
    token_tiles,
    length,
    SPLIT: tl.constexpr,
    WHOLE: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    TOGETHER: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows of one group's weight by TOKENS tokens over ``length`` blocks of 128 columns.

    Tiles begin at multiples of ROWS of the whole weight, not of the group: so each lies within one
    row of scales. ``out`` is the result ``[T, G, N]``, or with SPLIT the partials ``[S, T, G, N]``.
    """
    wait_for_inputs(PDL)
    row_tile, token_tile = tile_of_program(tiles, token_tiles, TOGETHER)
    group, part = tl.program_id(1), tl.program_id(2)
    groups = tl.num_programs(1)
    begin = group * rows
    first = (begin // ROWS + row_tile) * ROWS
    row = first + tl.arange(0, ROWS)
    token = token_tile.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    owned, inside = (row >= begin) & (row < begin + rows), token < tokens
    x += group.to(tl.int64) * group_stride
    blocks = tl.cdiv(columns, _BLOCK)
    # A group's last tile may have none of its rows, and the weight's none at all: no scales either.
    scales += (tl.minimum(first, begin + rows - 1) // _BLOCK).to(tl.int64) * blocks
    start, end = part * length, tl.minimum((part + 1) * length, blocks)
    column = tl.arange(0, _BLOCK)
    code_addresses = codes + row.to(tl.int64)[:, None] * codes_stride + column[None, :]
    x_addresses = x + token[:, None] * x_stride + column[None, :]
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    # The scale of the next block is prefetched, because Triton does not pipeline a scalar's load.
    following = tl.load(scales + tl.minimum(start, blocks - 1))
    for block in tl.range(start, end, num_stages=STAGES):
        scale = _scale_value(following)
        following = tl.load(scales + tl.minimum(block + 1, blocks - 1))
        done = block * _BLOCK
        code_mask, x_mask = owned[:, None], inside[:, None]
        if not WHOLE:
            code_mask &= (done + column < columns)[None, :]
            x_mask &= (done + column < columns)[None, :]
        code = tl.load(code_addresses + done, mask=code_mask, other=0)
        value = tl.load(x_addresses + done, mask=x_mask, other=0.0)
        total += _block_gemm(code, value) * scale
    target = (token * groups + group)[:, None] * rows + (row - begin)[None, :]
    stored = inside[:, None] & owned[None, :]
    if SPLIT:
        target += part.to(tl.int64) * tokens * groups * rows
        tl.store(out + target, tl.trans(total), mask=stored)
    else:
        total = nan_if_not_finite(total, x, token * x_stride, inside, columns, TOKENS)
        if SCALED:
            factor = tl.load(row_scale + token * groups + group, mask=inside, other=0.0)
            total *= factor[None, :]
        tl.store(out + target, tl.trans(narrow(total, out.dtype.element_ty)), mask=stored)


@fast_launch
@triton.jit
def _sum_kernel(
    partials,
    x,
    x_stride,
    group_stride,
    row_scale,
    out,
    count,
    groups,
    rows,
    columns,
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS sums of one token and group: ``partials [S, T, G, N]`` added in their order."""
    wait_for_inputs(PDL)
    pair = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    partials += pair * rows
    total = tl.load(partials + row, mask=inside, other=0.0)
    for _ in tl.static_range(1, SPLITS):
        partials += count
        total += tl.load(partials + row, mask=inside, other=0.0)
    x += pair % groups * group_stride
    token = tl.zeros([1], tl.int64) + pair // groups
    total = nan_if_not_finite(total[:, None], x, token * x_stride, token >= 0, columns, 1)
    if SCALED:
        total *= tl.load(row_scale + pair)
    values = narrow(total, out.dtype.element_ty)
    tl.store(out + (pair * rows + row)[:, None], values, mask=inside[:, None])


@dataclass(frozen=True)
class Plan:
    """Tiling of one GEMM.

    Attributes:
        rows: Rows of the weight in one program.
        tokens: Tokens in one program.
        length: Blocks of 128 columns in one program.
        splits: Split-K: programs that share one tile of the result, each with its own columns.
        warps: Warps of a program.
        stages: Pipeline stages, in blocks of columns.
    """

    rows: int
    tokens: int
    length: int
    splits: int
    warps: int
    stages: int


_MOST_SPLITS = 16
_HOPPER_SHARED = 227 * 1024


@functools.lru_cache(maxsize=4096)
def plan(
    tokens: int, rows: int, columns: int, groups: int, sm_count: int, shared: int = _HOPPER_SHARED
) -> Plan:
    """Choose tiles by tokens, and the split of the columns by an estimate of cycles.

    ``rows`` are those of a group. Columns that end within a block take small tiles, which
    leave registers for loads of single values. ``shared`` is the number of bytes of shared memory
    of a program; it bounds the stages, and the programs that an SM holds at a time.
    """
    whole = columns % BLOCK == 0
    if tokens > 64 and whole:
        high, wide, warps, stages = 128, 128, 8, 4
    else:
        high, warps = 64, 4
        wide = min(64 if whole else 32, max(16, launch_options.power_of_two(tokens)))
        stages = {16: 6, 32: 5, 64: 4}[wide]
    stages = min(stages, (shared - 1024) // (BLOCK * (high + 2 * wide)))
    blocks = triton.cdiv(columns, BLOCK)
    resident = launch_options.resident(shared, 2, stages * BLOCK * (high + 2 * wide))
    tiles = tiles_of_group(rows, groups, high) * groups * triton.cdiv(tokens, wide)
    sums = tokens * groups * rows

    def cycles(length: int) -> float:
        splits = triton.cdiv(blocks, length)
        programs = tiles * splits
        # An SM's share of the memory's rate is 20 bytes a cycle, its tensor cores do
        # some 1300 multiplications a cycle of 2048; a program alone needs 600 cycles for a block.
        block = max(high * BLOCK / 20, high * wide * BLOCK / 1300)
        busy = triton.cdiv(programs, sm_count) * length * block
        alone = triton.cdiv(programs, resident * sm_count) * length * max(600.0, block)
        # The second launch, and partials that are written and read.
        second = 2500 + 8 * sums * splits / (20 * sm_count) if splits > 1 else 0.0
        return max(busy, alone) + second

    lengths = {triton.cdiv(blocks, splits) for splits in range(1, _MOST_SPLITS + 1)}
    length = min(sorted(lengths, reverse=True), key=cycles)
    return Plan(high, wide, length, triton.cdiv(blocks, length), warps, stages)


def tiles_of_group(rows: int, groups: int, high: int) -> int:
    """Tiles of one group, whose rows may begin within a tile."""
    return triton.cdiv(rows, high) + (1 if groups > 1 and rows % high else 0)


def gemm(args: GemmArgs) -> torch.Tensor:
    """See ``dsv4.ops.gemm.gemm``; ``x`` is ``[T, K]``, or ``[T, G, K]`` with several groups.

    Allocates float32 partials ``[S, T, G, N]`` where the columns are shared by S programs.
    """
    x = args.x
    rows, columns = args.codes.shape[0] // args.groups, args.codes.shape[1]
    out = x.new_empty((*x.shape[:-1], rows), dtype=args.out_dtype)
    if out.numel() == 0 or columns == 0:
        return out.zero_()
    row_scale = None
    if args.activation == "nvfp4":
        x, row_scale = bfloat16_operand(x, args.input_scale)
    elif args.activation == "fp8":
        x = fp8_values(x)
    x = _aligned(x if x.dim() == 3 else x.unsqueeze(1))
    _launch_gemm(x, row_tiles.as_rows(args.codes), args.scales.contiguous(), row_scale, out)
    return out


def _strides(x: torch.Tensor) -> tuple[int, int]:
    """Return strides of ``[T, G, K]`` along T and G; for an axis of one entry, contiguous ones."""
    tokens, groups, columns = x.shape
    return x.stride(0) if tokens > 1 else groups * columns, x.stride(1) if groups > 1 else columns


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy: with unit stride, and rows at multiples of 16 bytes where K allows it."""
    fits = x.data_ptr() % 16 == 0 and not any(stride % 8 for stride in _strides(x))
    if x.stride(2) == 1 and (fits or x.shape[2] % 8):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _launch_gemm(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    row_scale: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """``out [T, G, N]`` of ``x [T, G, K]``, with unit stride along K."""
    tokens, groups, columns = x.shape
    rows = codes.shape[0] // groups
    gpu = (launch_options.sm_count(x.device), launch_options.shared_memory(x))
    cut = plan(tokens, rows, columns, groups, *gpu)
    target = out
    if cut.splits > 1:
        shape = (cut.splits, tokens, groups, rows)
        target = torch.empty(shape, dtype=torch.float32, device=x.device)
    tiles, token_tiles = tiles_of_group(rows, groups, cut.rows), triton.cdiv(tokens, cut.tokens)
    scale_bytes = scales if scales.dtype == torch.float32 else scales.view(torch.uint8)
    options: dict[str, Any] = {"SCALED": row_scale is not None, **launch_options.options(x)}
    with launch_options.on(x):
        _gemm_kernel[(tiles * token_tiles, groups, cut.splits)](
            x,
            *_strides(x),
            codes.view(torch.uint8),
            codes.stride(0),
            scale_bytes,
            row_scale,
            target,
            tokens,
            rows,
            columns,
            tiles,
            token_tiles,
            cut.length,
            SPLIT=cut.splits > 1,
            WHOLE=columns % BLOCK == 0,
            ROWS=cut.rows,
            TOKENS=cut.tokens,
            TOGETHER=8,
            STAGES=cut.stages,
            num_warps=cut.warps,
            **options,
        )
        if cut.splits > 1:
            block = min(256, launch_options.power_of_two(rows))
            _sum_kernel[(tokens * groups, triton.cdiv(rows, block))](
                target,
                x,
                *_strides(x),
                row_scale,
                out,
                tokens * groups * rows,
                groups,
                rows,
                columns,
                SPLITS=cut.splits,
                ROWS=block,
                num_warps=2,
                **options,
            )
