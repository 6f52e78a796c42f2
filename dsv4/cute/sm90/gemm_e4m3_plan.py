"""Arguments and configurations of the GEMMs with FP8 arithmetic; needs no compiler."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from dsv4.cute.grouped_problem import MOST_EXPERTS
from dsv4.cute.runtime.kernel_abi import (
    Float32,
    Int32,
    KernelAbi,
    Pointer,
    TmaDescriptor,
    TmaSizes,
)
from dsv4.cute.sm90 import e4m3_times
from dsv4.cute.sm90.costs import TileTimes
from dsv4.cute.sm90.tuned import tuned

K_BLOCK = 128  # columns that share a scale of the activations: a stage
ROWS = 128  # rows of the weight of a tile
# Bytes from a token's line to the next in a transpose buffer: 128 of results, 16 of padding.
LINE = 144


# Registers of a thread of an MMA warp, by warpgroups that dequantize. Those of all threads must not
# be above what the CTA is launched with, else setmaxnreg hangs.
_MMA_REGISTERS = {0: 232, 1: 216, 2: 168}


class E4m3Tma(NamedTuple):
    """Types of the TMA copies for the compiler; these parameters come first.

    Attributes:
        x_tma: Copies 128 columns of the X of a tile.
        codes_tma: Copies the codes of a stage.
        scales_tma: Copies the block scales of a stage.
        x_tensor: X as pairs of E4M3 codes, ``[tokens, groups K / 2]``.
        codes_tensor: Packed codes, ``[row tiles, K / 64 * 128]`` words.
        scales_tensor: Packed block scales, ``[row tiles, K / 64 * 16]`` words.
    """

    x_tma: TmaDescriptor
    codes_tma: TmaDescriptor
    scales_tma: TmaDescriptor
    x_tensor: TmaSizes
    codes_tensor: TmaSizes
    scales_tensor: TmaSizes


class E4m3Args(NamedTuple):
    """Arguments of the GEMM with FP8 arithmetic and NVFP4 weights.

    Attributes:
        global_scale: float32 global scales: one, one per segment, or one per row.
        row_exponent: int8, one per row of the weight (``dsv4.quant.exact_fp8``).
        x_scales: E8M0 scales of X, ``[tokens, groups K / 128]``.
        out: ``[tokens, rows]``, bfloat16 or float32.
        tokens: At least 1.
        token_tiles: Tiles of tokens.
        token_span: Token tiles that follow one another before the next block of rows does.
        stages: K / 128.
        rows: Rows of the weight.
        row_blocks: Blocks of 128 rows, rounded up.
        group_blocks: Blocks of rows that share an input.
        scale_stride: Scales of X from one token to the next.
        expert_scales: 0; see ``GroupedE4m3Args``.
        cut0: First row of the second segment, which has a global scale of its own.
        cut1: First row of the third segment.
        cut2: First row of the fourth segment.
        scale_rows: 1 if every row has a global scale of its own, else 0.
        opaque_16: 16. An argument, so that the compiler cannot turn products by it into shifts.
        limit: Clamp of SwiGLU; infinity for none.
    """

    global_scale: Pointer
    row_exponent: Pointer
    x_scales: Pointer
    out: Pointer
    tokens: Int32
    token_tiles: Int32
    token_span: Int32
    stages: Int32
    rows: Int32
    row_blocks: Int32
    group_blocks: Int32
    scale_stride: Int32
    expert_scales: Int32
    cut0: Int32
    cut1: Int32
    cut2: Int32
    scale_rows: Int32
    opaque_16: Int32
    limit: Float32


class BlockE4m3Tma(NamedTuple):
    """Types of the TMA copies of the GEMM with FP8 weights, as in ``E4m3Tma``.

    Attributes:
        x_tma: Copies 128 columns of the X of a tile.
        codes_tma: Copies the codes of a stage.
        x_tensor: X as pairs of E4M3 codes, ``[tokens, groups K / 2]``.
        codes_tensor: The weight as pairs of E4M3 codes, ``[rows, K / 2]``.
    """

    x_tma: TmaDescriptor
    codes_tma: TmaDescriptor
    x_tensor: TmaSizes
    codes_tensor: TmaSizes


class BlockE4m3Args(NamedTuple):
    """Arguments of the GEMM with FP8 arithmetic and FP8 weights; see ``E4m3Args``.

    Attributes:
        scales: Block scales of the weight, ``[rows / 128, K / 128]``, float32 or E8M0.
        x_scales: E8M0 scales of X, ``[tokens, groups K / 128]``.
        out: ``[tokens, rows]``, bfloat16 or float32.
        tokens: At least 1.
        token_tiles: Tiles of tokens.
        token_span: Token tiles that follow one another before the next block of rows does.
        stages: K / 128.
        rows: Rows of the weight.
        row_blocks: Blocks of 128 rows, rounded up.
        group_blocks: Blocks of rows that share an input.
        scale_stride: Scales of X from one token to the next.
    """

    scales: Pointer
    x_scales: Pointer
    out: Pointer
    tokens: Int32
    token_tiles: Int32
    token_span: Int32
    stages: Int32
    rows: Int32
    row_blocks: Int32
    group_blocks: Int32
    scale_stride: Int32


class GroupedE4m3Args(NamedTuple):
    """Arguments of the grouped GEMM with FP8 arithmetic.

    Attributes:
        global_scale: float32 ``[experts, expert_scales]``.
        row_exponent: int8 ``[experts, rows]``.
        x_scales: E8M0 scales of X, ``[tokens, K / 128]``; its rows are sorted by expert.
        row_weight: float32 ``[tokens]``; read where the plan is ``row_weighted``.
        out: ``[tokens, rows]`` or, after SwiGLU, half as many columns; where ``quantized_out``, the
            E4M3 codes of these results, columns in the order of fragments.
        out_scales: E8M0 scales ``[tokens, columns / 128]`` of the results, where ``quantized_out``.
        offsets: int32 ``[experts + 1]``: first row of each expert, and the end.
        clear_end: Rows of X: those of no expert are cleared.
        experts: At most ``MOST_EXPERTS``.
        stages: K / 128.
        rows: Rows of an expert's weight.
        row_blocks: Blocks of ``unit_rows`` rows, rounded up.
        scale_stride: Scales of X from one token to the next.
        expert_scales: Global scales of an expert.
        cut0: First row of the second segment, which has a global scale of its own.
        cut1: First row of the third segment.
        cut2: First row of the fourth segment.
        scale_rows: 1 if every row has a global scale of its own, else 0.
        opaque_16: 16. An argument, so that the compiler cannot turn products by it into shifts.
        limit: Clamp of SwiGLU; infinity for none.
    """

    global_scale: Pointer
    row_exponent: Pointer
    x_scales: Pointer
    row_weight: Pointer
    out: Pointer
    out_scales: Pointer
    offsets: Pointer
    clear_end: Int32
    experts: Int32
    stages: Int32
    rows: Int32
    row_blocks: Int32
    scale_stride: Int32
    expert_scales: Int32
    cut0: Int32
    cut1: Int32
    cut2: Int32
    scale_rows: Int32
    opaque_16: Int32
    limit: Float32


E4M3_ABI = KernelAbi(E4m3Tma, E4m3Args)
BLOCK_E4M3_ABI = KernelAbi(BlockE4m3Tma, BlockE4m3Args)
GROUPED_E4M3_ABI = KernelAbi(E4m3Tma, GroupedE4m3Args)


@dataclass(frozen=True)
class E4m3Plan:
    """One configuration of the kernel in ``gemm_e4m3``; K is a multiple of 128.

    Attributes:
        token_rows: Tiles of 64 tokens of an MMA warpgroup: 1 or 2.
        stages: Stages of the ring that TMA fills.
        dequantized_stages: Stages of the ring of dequantized weights; 0 where they are E4M3.
        float32_out: Whether the result is float32, else bfloat16.
        swiglu: Whether rows are interleaved gate and up, and the result is their SwiGLU.
        row_weighted: Whether SwiGLU's results are multiplied by a weight of their token.
        quantized_out: Whether results are E4M3 codes and their scales.
    """

    token_rows: int
    stages: int
    dequantized_stages: int
    float32_out: bool
    swiglu: bool = False
    # Fields of grouped plans.
    row_weighted = False
    quantized_out = False

    @property
    def kernel(self) -> str:
        """The kernel's class, as ``module:class``."""
        return "dsv4.cute.sm90.gemm_e4m3:E4m3Kernel"

    @property
    def times(self) -> TileTimes:
        """Measured times of its tiles."""
        return e4m3_times.loop(self.token_rows)

    def dense_us(self, rows: int, columns: int, tokens: int) -> float:
        """Microseconds of a dense GEMM, without a conversion; see ``e4m3_times.dense_us``."""
        return e4m3_times.dense_us(self.times, self.token_rows, rows, columns, tokens, tuned().sms)

    @property
    def ctas(self) -> int:
        """CTAs of a cluster."""
        return 1

    @property
    def is_grouped(self) -> bool:
        """Return whether tiles belong to experts, and may have few tokens."""
        return False

    @property
    def row_parts(self) -> int:
        """Tiles of 128 rows that follow one another, for the same tokens: results of 128 columns.

        SwiGLU makes 64 of 128 rows, and 128 share a scale.
        """
        return 2 if self.quantized_out else 1

    @property
    def unit_rows(self) -> int:
        """Rows of the weight of these tiles."""
        return ROWS * self.row_parts

    @property
    def token_block(self) -> int:
        """Tokens of a tile, of two warpgroups."""
        return 128 * self.token_rows

    @property
    def tma_tokens(self) -> int:
        """Tokens of one TMA copy: of experts 64, so that no more is copied than is multiplied."""
        return 64 if self.is_grouped else self.token_block

    @property
    def rows(self) -> int:
        """Rows of the weight of a tile."""
        return ROWS

    @property
    def cta_row_tiles(self) -> int:
        """Row tiles, of 16 rows, of a tile."""
        return ROWS // 16

    @property
    def code_bytes(self) -> int:
        """Codes of 16 rows in a stage."""
        return 1024

    @property
    def scale_bytes(self) -> int:
        """Scales of 16 rows in a stage."""
        return 128

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight that TMA copies a stage: codes and scales, or only E4M3 codes."""
        if not self.dequantized_stages:
            return ROWS * K_BLOCK
        return self.cta_row_tiles * (self.code_bytes + self.scale_bytes)

    @property
    def x_bytes(self) -> int:
        """Bytes of X of a stage."""
        return self.token_block * K_BLOCK

    @property
    def mma_weight_stages(self) -> int:
        """Stages of weights that MMAs read: of a ring of their own, or as TMA copies them."""
        return self.dequantized_stages or self.stages

    @property
    def dequantized_bytes(self) -> int:
        """Bytes of a stage of dequantized weights."""
        return ROWS * K_BLOCK

    @property
    def transpose_bytes(self) -> int:
        """Transpose buffers, of lines of 16 tokens, of the MMA warps."""
        return 8 * 16 * LINE

    @property
    def first_result_bytes(self) -> int:
        """Results of the first of two tiles of rows, kept for the scale that both share."""
        return self.token_block * 128 if self.quantized_out else 0

    @property
    def factor_slots(self) -> int:
        """Tiles whose factors of rows exist at a time.

        Where weights are dequantized, tiles of one stage: the one that is stored, those of the
        ring, and the one that comes. Else two of each MMA warpgroup.
        """
        return self.dequantized_stages + 2 if self.dequantized_stages else 4

    @property
    def table_bytes(self) -> int:
        """The table of experts: tiles and first rows."""
        return 8 * (MOST_EXPERTS + 2) if self.is_grouped else 0

    @property
    def other_bytes(self) -> int:
        """Shared memory beside the rings and their mbarriers."""
        buffers = self.transpose_bytes + self.first_result_bytes + self.factor_slots * ROWS * 4
        return buffers + self.table_bytes

    @property
    def barriers(self) -> int:
        """The mbarriers: two for each stage of each ring."""
        return 2 * (self.stages + self.dequantized_stages)

    @property
    def dequant_warpgroups(self) -> int:
        """Warpgroups that dequantize: two where an MMA warpgroup has one tile of 64 tokens."""
        if not self.dequantized_stages:
            return 0
        return 2 if self.token_rows == 1 else 1

    @property
    def dequant_warps(self) -> int:
        """Warps that dequantize."""
        return 4 * self.dequant_warpgroups

    @property
    def threads(self) -> int:
        """Threads of a CTA: two MMA warpgroups, those that dequantize, one that copies."""
        return 384 + 32 * self.dequant_warps

    @property
    def mma_registers(self) -> int:
        """Registers of a thread of an MMA warp."""
        return _MMA_REGISTERS[self.dequant_warpgroups]

    @property
    def dequant_registers(self) -> int:
        """Registers of a thread that dequantizes weights."""
        return 56

    @property
    def copy_registers(self) -> int:
        """Registers of a thread of the copy warpgroup."""
        return 24 if self.dequant_warps else 40

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA; 1024 bytes to align the stages to that."""
        rings = self.stages * (self.x_bytes + self.weight_bytes)
        rings += self.dequantized_stages * self.dequantized_bytes
        return 1024 + rings + self.other_bytes + 8 * self.barriers


@dataclass(frozen=True)
class BlockE4m3Plan(E4m3Plan):
    """One configuration of the kernel in ``gemm_e4m3_block``; ``dequantized_stages`` is 0.

    Attributes:
        e8m0_scales: Whether scales of the weight are E8M0, else float32.
    """

    e8m0_scales: bool = False

    @property
    def kernel(self) -> str:
        """The kernel's class, as ``module:class``."""
        return "dsv4.cute.sm90.gemm_e4m3_block:BlockE4m3Kernel"

    @property
    def times(self) -> TileTimes:
        """Measured times of its tiles."""
        return e4m3_times.block(self.token_rows)

    @property
    def factor_slots(self) -> int:
        """Rows have no factors."""
        return 0


@dataclass(frozen=True)
class GroupedE4m3Plan(E4m3Plan):
    """One configuration of the kernel in ``grouped_gemm_e4m3``.

    Attributes:
        row_weighted: See ``E4m3Plan``; needs ``swiglu``.
        quantized_out: See ``E4m3Plan``; needs ``swiglu``.
    """

    row_weighted: bool = False
    quantized_out: bool = False

    @property
    def kernel(self) -> str:
        """The kernel's class, as ``module:class``."""
        return "dsv4.cute.sm90.grouped_gemm_e4m3:GroupedE4m3Kernel"

    @property
    def times(self) -> TileTimes:
        """Measured times of its tiles."""
        return e4m3_times.grouped_loop(self.token_rows)

    @property
    def is_grouped(self) -> bool:
        """Return whether tiles belong to experts, and may have few tokens."""
        return True


# Few configurations serve all matrices.
_dense = functools.cache(E4m3Plan)
_block = functools.cache(BlockE4m3Plan)
_grouped = functools.cache(GroupedE4m3Plan)


def e4m3_plans(float32_out: bool, swiglu: bool) -> tuple[E4m3Plan, E4m3Plan]:
    """The configurations of a GEMM with NVFP4 weights: wide tiles and narrow ones.

    Args:
        float32_out: Whether the result is float32.
        swiglu: See ``E4m3Plan``.
    """
    return _dense(2, 3, 3, float32_out, swiglu), _dense(1, 5, 3, float32_out, swiglu)


def block_e4m3_plans(float32_out: bool, e8m0_scales: bool) -> tuple[BlockE4m3Plan, BlockE4m3Plan]:
    """The configurations of a GEMM with FP8 weights; see ``e4m3_plans`` and ``BlockE4m3Plan``."""
    wide = _block(2, 4, 0, float32_out, e8m0_scales=e8m0_scales)
    narrow = _block(1, 6, 0, float32_out, e8m0_scales=e8m0_scales)
    return wide, narrow


def grouped_e4m3_plan(
    rows_of_x: int,
    experts: int,
    float32_out: bool,
    swiglu: bool,
    row_weighted: bool,
    quantized_out: bool,
) -> GroupedE4m3Plan:
    """The configuration of a grouped GEMM.

    Args:
        rows_of_x: Of all experts.
        experts: How many.
        float32_out: Whether the result is float32.
        swiglu: See ``E4m3Plan``.
        row_weighted: See ``E4m3Plan``.
        quantized_out: See ``E4m3Plan``.
    """
    kind = {
        "float32_out": float32_out,
        "swiglu": swiglu,
        "row_weighted": row_weighted,
        "quantized_out": quantized_out,
    }
    if rows_of_x > 128 * experts:
        return _grouped(2, 3, 2 if quantized_out else 3, **kind)
    return _grouped(1, 4, 3, **kind)
