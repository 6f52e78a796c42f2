"""GEMM with a four-bit weight, NVFP4 in fragments or MXFP4, for every GPU from 8.0 on.

NVFP4 with swizzled scales is taken on 12.x, where a kernel for that layout may be passed over.

The weight's rows are the left operand of the tensor cores, tokens the right one. A program
dequantises its rows in registers (``dsv4.triton._lib.packed_weights``), 64 columns at a time. The
sum is float32; the global scales, the clamps of SwiGLU and the rounding follow it. If there are few
tiles, several programs share the columns of a tile (split-K). The last of them to end (few tokens)
or a second launch adds their sums in the order of the columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4.cute.runtime.launch import cuts
from dsv4.ops.gemm import GemmArgs
from dsv4.ops.gemm_swiglu import GemmSwigluArgs
from dsv4.ops.quantize import bfloat16_operand, fp8_operand
from dsv4.ops.unsupported import MOST_SEGMENTS
from dsv4.quant import formats
from dsv4.triton import gemm_fp8
from dsv4.triton._lib.gemm_tiles import (
    NO_SCALE,
    ONE_SCALE,
    ROW_SCALES,
    SEGMENT_SCALES,
    store_result,
    tile_of_program,
)
from dsv4.triton._lib.last_arrival import is_last, leave, seen_early, words_of
from dsv4.triton._lib.numerics import wait_for_inputs
from dsv4.triton._lib.packed_plan import PackedPlan, Weight, dense_plan
from dsv4.triton._lib.packed_weights import (
    FRAGMENTS,
    MXFP4,
    SWIZZLED,
    packed_sum,
    prefetch_fragments,
)
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

# Rows of a program that adds partial sums, and its warps.
_SUM_ROWS, _SUM_WARPS = 256, 2
_TOGETHER = 8  # token tiles before the next row tile, in the order of programs
_NAMES = {formats.FRAGMENTS: FRAGMENTS, formats.SWIZZLED: SWIZZLED, formats.LINEAR: MXFP4}


@fast_launch
@triton.jit(
    do_not_specialize=[
        "tokens",
        "tiles",
        "token_tiles",
        "k_tiles",
        "length",
        "cut0",
        "cut1",
        "cut2",
    ]
)
def _packed_gemm_kernel(
    x,
    x_stride,
    group_stride,
    codes,
    scales,
    global_scale,
    row_scale,
    out,
    partials,
    words,
    tokens,
    rows,
    k_tiles,
    tiles,
    token_tiles,
    length,
    cut0,
    cut1,
    cut2,
    limit,
    SPLIT: tl.constexpr,
    JOINED: tl.constexpr,
    LAYOUT: tl.constexpr,
    SCALES: tl.constexpr,
    SWIGLU: tl.constexpr,
    CLAMPED: tl.constexpr,
    UNBOUNDED: tl.constexpr,
    TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCHED: tl.constexpr,
    TOGETHER: tl.constexpr,
    PDL: tl.constexpr,
):
    """16 TILES rows of one group's weight by TOKENS tokens over ``length`` tiles of 64 columns.

    With SPLIT the sums are stored as ``partials [S, T, G, N]``. If the last program of a tile adds
    them, JOINED is S, else 0; ``words`` has one of ``last_arrival`` for each tile.
    """
    ROWS: tl.constexpr = 16 * TILES
    row_tile, token_tile = tile_of_program(tiles, token_tiles, TOGETHER)
    group, part, groups = tl.program_id(1).to(tl.int64), tl.program_id(2), tl.num_programs(1)
    of_group = group * rows * k_tiles
    codes += of_group * 8
    scales += of_group
    start = part * length
    end = tl.minimum(start + length, k_tiles)
    if PDL and PREFETCHED > 0:
        prefetch_fragments(
            codes, scales, row_tile * TILES, rows // 16, k_tiles, start, end, TILES, PREFETCHED
        )
    wait_for_inputs(PDL)
    if JOINED:
        words += group * tl.num_programs(0) + tl.program_id(0)
        seen = seen_early(words)
    token = token_tile * TOKENS + tl.arange(0, TOKENS)
    inside = token < tokens
    # Tokens past the end repeat the last one, so that no load is masked.
    token = tl.minimum(token, tokens - 1).to(tl.int64)
    x += group * group_stride
    total = packed_sum(
        codes,
        scales,
        x,
        token * x_stride,
        row_tile * TILES,
        rows // 16,
        k_tiles,
        start,
        end,
        LAYOUT,
        TILES,
        TOKENS,
        PARTS,
        BLOCKS,
        STAGES,
    )
    first, position = row_tile * ROWS, token * groups + group
    if SPLIT:
        row = first + tl.arange(0, ROWS)
        stored = inside[:, None] & (row < rows)[None, :]
        partials += (position * rows)[:, None] + row[None, :]
        step = tokens.to(tl.int64) * groups * rows
        tl.store(partials + part * step, tl.trans(total), mask=stored)
        if JOINED:  # noqa: SIM102  (a choice of the compiler)
            if is_last(words, seen, JOINED):
                # From L2, where the others' stores are; unrolled, so that no load waits for one.
                sums = tl.load(partials, mask=stored, other=0.0, cache_modifier=".cg")
                for _ in tl.static_range(1, JOINED):
                    partials += step
                    sums += tl.load(partials, mask=stored, other=0.0, cache_modifier=".cg")
                store_result(
                    tl.trans(sums),
                    (global_scale, cut0, cut1, cut2),
                    (first, rows, group * rows),
                    (x, token * x_stride, k_tiles * 64),
                    (row_scale, None),
                    (out, position, inside),
                    limit,
                    SCALES,
                    SWIGLU,
                    CLAMPED,
                    UNBOUNDED,
                )
                leave(words)
    else:
        store_result(
            total,
            (global_scale, cut0, cut1, cut2),
            (first, rows, group * rows),
            (x, token * x_stride, k_tiles * 64),
            (row_scale, None),
            (out, position, inside),
            limit,
            SCALES,
            SWIGLU,
            CLAMPED,
            UNBOUNDED,
        )


@fast_launch
@triton.jit(do_not_specialize=["count", "columns", "cut0", "cut1", "cut2"])
def _packed_sum_kernel(
    partials,
    x,
    x_stride,
    group_stride,
    global_scale,
    row_scale,
    out,
    count,
    groups,
    rows,
    columns,
    cut0,
    cut1,
    cut2,
    limit,
    SCALES: tl.constexpr,
    SWIGLU: tl.constexpr,
    CLAMPED: tl.constexpr,
    UNBOUNDED: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS sums of one token and group: ``partials [SPLITS, T, G, N]`` added in their order."""
    wait_for_inputs(PDL)
    pair = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * ROWS
    row = first + tl.arange(0, ROWS)
    inside = row < rows
    partials += pair * rows + row
    total = tl.load(partials, mask=inside, other=0.0)
    # Unrolled, so that no load waits for the one before.
    for _ in tl.static_range(1, SPLITS):
        partials += count
        total += tl.load(partials, mask=inside, other=0.0)
    group = pair % groups
    position = tl.zeros([1], tl.int64) + pair
    store_result(
        total[:, None],
        (global_scale, cut0, cut1, cut2),
        (first, rows, group * rows),
        (x + group * group_stride, position // groups * x_stride, columns),
        (row_scale, None),
        (out, position, position >= 0),
        limit,
        SCALES,
        SWIGLU,
        CLAMPED,
        UNBOUNDED,
    )


@dataclass(frozen=True)
class GlobalScale:
    """A weight's global scales as kernels take them.

    Attributes:
        values: Contiguous; None without scales.
        kind: Number of scales of each matrix: a constant of ``dsv4.triton._lib.gemm_tiles``.
        cuts: First rows of the second, third and fourth segment.
    """

    values: torch.Tensor | None
    kind: int
    cuts: tuple[int, ...]

    @classmethod
    def of(cls, values: torch.Tensor | None, segments: Sequence[int], rows: int) -> GlobalScale:
        """Return the scales of a matrix of ``rows`` rows: ``[..., 1]``, per segment, or per row."""
        if values is None:
            return cls(None, NO_SCALE, cuts(()))
        if len(segments) > MOST_SEGMENTS:
            values, segments = formats.expand_segments(values, segments, rows), ()
        count = values.shape[-1]
        kind = SEGMENT_SCALES if segments else ONE_SCALE if count == 1 else ROW_SCALES
        return cls(values.contiguous(), kind, cuts(segments))


def layout_of(layout: str) -> int:
    """Return the kernels' constant for the layout of a weight."""
    return _NAMES[layout]


def scale_words(scales: torch.Tensor, layout: int) -> torch.Tensor:
    """Block scales as kernels load them; a word covers 64 columns of MXFP4, 32 of fragments."""
    return scales.view(torch.int16 if layout == MXFP4 else torch.int32)


def swiglu_options(limit: float | None) -> dict[str, Any]:
    """Return the constants of SwiGLU with a bound."""
    return {"CLAMPED": limit is not None, "UNBOUNDED": limit is None or limit > 128}


def aligned(x: torch.Tensor) -> torch.Tensor:
    """``x [T, G, K]`` or a copy with unit stride and rows at multiples of 32 bytes (wide loads)."""
    fits = x.data_ptr() % 16 == 0 and not any(stride % 16 for stride in strides(x))
    if x.stride(2) == 1 and fits:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def strides(x: torch.Tensor) -> tuple[int, int]:
    """Return strides of ``[T, G, K]`` along T and G; for an axis of one entry, contiguous ones."""
    tokens, groups, columns = x.shape
    return x.stride(0) if tokens > 1 else groups * columns, x.stride(1) if groups > 1 else columns


def has_wgmma(x: torch.Tensor) -> bool:
    """Return whether the GPU has ``wgmma``, which takes the weight from registers."""
    return launch_options.capability(x) == (9, 0)


def gemm(args: GemmArgs) -> torch.Tensor:
    """See ``dsv4.ops.gemm.gemm``; ``x`` is ``[T, K]``, or ``[T, G, K]`` with several groups.

    ``gemm_fp8`` multiplies FP8 weights. If S programs share the columns, float32 partials ``[S, T,
    G, N]`` are allocated, and at few tokens an int64 word for each tile.
    """
    if args.format == formats.FP8_BLOCK.name:
        return gemm_fp8.gemm(args)
    rows = args.codes.shape[0] // args.groups
    out = args.x.new_empty((*args.x.shape[:-1], rows), dtype=args.out_dtype)
    return _multiply(args, args.groups, out, {"SWIGLU": False, **swiglu_options(None)}, None)


def gemm_swiglu(args: GemmSwigluArgs) -> torch.Tensor:
    """See ``dsv4.ops.gemm_swiglu.gemm_swiglu``; allocates as ``gemm`` does."""
    shape = (args.x.shape[0], args.codes.shape[0] // 2)
    out = args.x.new_empty(shape, dtype=args.out_dtype)
    options = {"SWIGLU": True, **swiglu_options(args.limit)}
    return _multiply(args, 1, out, options, args.limit)


def _multiply(
    args: GemmArgs | GemmSwigluArgs,
    groups: int,
    out: torch.Tensor,
    options: dict[str, Any],
    limit: float | None,
) -> torch.Tensor:
    """Fill and return ``out``; ``options`` are constants of the kernels."""
    x, row_scale = args.x, None
    if out.numel() == 0:
        return out
    if args.activation == "nvfp4":
        x, row_scale = bfloat16_operand(x, args.input_scale)
    else:
        x = fp8_operand(args)
    x = aligned(x if x.dim() == 3 else x.unsqueeze(1))
    high, columns = args.codes.shape[0], 2 * args.codes.shape[1]
    layout = layout_of(args.layout)
    weight = Weight(high // groups, columns, layout == FRAGMENTS)
    sms = launch_options.sm_count(x.device)
    cut = dense_plan(weight, x.shape[0], groups, sms, has_wgmma(x))
    scale = GlobalScale.of(args.global_scale, args.segments, high)
    options = {**options, "SCALES": scale.kind}
    bound = float("inf") if limit is None else float(limit)
    _launch(x, args, layout, weight, cut, scale, row_scale, out, bound, options)
    return out


def _launch(
    x: torch.Tensor,
    args: GemmArgs | GemmSwigluArgs,
    layout: int,
    weight: Weight,
    cut: PackedPlan,
    scale: GlobalScale,
    row_scale: torch.Tensor | None,
    out: torch.Tensor,
    limit: float,
    options: dict[str, Any],
) -> None:
    """Launch for ``x [T, G, K]``, whose rows are aligned."""
    tokens, groups, columns = x.shape
    tiles, token_tiles = -(-weight.row_tiles // cut.tiles), -(-tokens // cut.tokens)
    partials = words = None
    if cut.splits > 1:
        shape = (cut.splits, tokens, groups, weight.rows)
        partials = torch.empty(shape, dtype=torch.float32, device=x.device)
    if cut.is_joined:
        words = words_of(groups * tiles * token_tiles, x.device)
    options = {**options, **launch_options.options(x)}
    with launch_options.on(x):
        _packed_gemm_kernel[(tiles * token_tiles, groups, cut.splits)](
            x,
            *strides(x),
            args.codes.view(torch.int32),
            scale_words(args.scales, layout),
            scale.values,
            row_scale,
            out,
            partials,
            words,
            tokens,
            weight.rows,
            weight.k_tiles,
            tiles,
            token_tiles,
            cut.length,
            *scale.cuts,
            limit,
            SPLIT=cut.splits > 1,
            JOINED=cut.splits if cut.is_joined else 0,
            LAYOUT=layout,
            TILES=cut.tiles,
            TOKENS=cut.tokens,
            PARTS=cut.parts,
            BLOCKS=cut.blocks,
            STAGES=cut.stages,
            PREFETCHED=cut.prefetched,
            TOGETHER=_TOGETHER,
            num_warps=cut.warps,
            **options,
        )
        if cut.splits > 1 and not cut.is_joined:
            block = min(_SUM_ROWS, launch_options.power_of_two(weight.rows))
            _packed_sum_kernel[(tokens * groups, -(-weight.rows // block))](
                partials,
                x,
                *strides(x),
                scale.values,
                row_scale,
                out,
                tokens * groups * weight.rows,
                groups,
                weight.rows,
                columns,
                *scale.cuts,
                limit,
                SPLITS=cut.splits,
                ROWS=block,
                num_warps=_SUM_WARPS,
                **options,
            )
