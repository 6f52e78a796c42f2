"""Arguments and configurations of the GEMM with FP8 arithmetic; needs no compiler."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from dsv4.cute.runtime.kernel_abi import (
    Float32,
    Int32,
    KernelAbi,
    Pointer,
)
from dsv4.cute.sm90.gemm_wgmma_plan import SMS, WgmmaTma

K_BLOCK = 128  # columns that share a scale of the activations: a stage
ROWS = 128  # rows of the weight of a tile
_SHARED_LIMIT = 227 * 1024
# Bytes from a token's line to the next in a transpose buffer: 64 results and 16 bytes of padding.
LINE = 144


class E4m3Args(NamedTuple):
    """Arguments of the GEMM with FP8 arithmetic.

    Attributes:
        global_scale: float32 global scales: one, one per segment, or one per row.
        row_exponent: int8, one per row of the weight (``exact_fp8``).
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
    cut0: Int32
    cut1: Int32
    cut2: Int32
    scale_rows: Int32
    opaque_16: Int32
    limit: Float32


E4M3_ABI = KernelAbi(WgmmaTma, E4m3Args)


@dataclass(frozen=True)
class E4m3Plan:
    """One configuration of the kernel in ``gemm_e4m3``; K is a multiple of 128.

    Attributes:
        token_rows: Tiles of 64 tokens of an MMA warpgroup: 1 or 2.
        stages: Stages of the ring of X and packed weights.
        dequantized_stages: Stages of the ring of dequantized weights.
        float32_out: Whether the result is float32, else bfloat16.
        swiglu: Whether rows are interleaved gate and up, and the result is their SwiGLU.
    """

    token_rows: int
    stages: int
    dequantized_stages: int
    float32_out: bool
    swiglu: bool = False

    @property
    def kernel(self) -> str:
        """The kernel's class, as ``module:class``."""
        return "dsv4.cute.sm90.gemm_e4m3:E4m3Kernel"

    @property
    def ctas(self) -> int:
        """CTAs of a cluster."""
        return 1

    @property
    def token_block(self) -> int:
        """Tokens of a tile, of two warpgroups."""
        return 128 * self.token_rows

    @property
    def tma_tokens(self) -> int:
        """Tokens of one TMA copy."""
        return self.token_block

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
        """Codes and scales of a stage."""
        return self.cta_row_tiles * (self.code_bytes + self.scale_bytes)

    @property
    def x_bytes(self) -> int:
        """Bytes of X of a stage."""
        return self.token_block * K_BLOCK

    @property
    def dequantized_bytes(self) -> int:
        """Bytes of a stage of dequantized weights."""
        return ROWS * K_BLOCK

    @property
    def transpose_bytes(self) -> int:
        """Transpose buffers, of 16 tokens and 64 results for each MMA warp."""
        return 8 * 16 * LINE

    @property
    def factor_slots(self) -> int:
        """Tiles whose factors of rows exist at a time.

        Tiles of one stage: the one that is stored, those of the ring, and the one that comes.
        """
        return self.dequantized_stages + 2

    @property
    def epilogue_bytes(self) -> int:
        """Transpose buffers and factors."""
        return self.transpose_bytes + self.factor_slots * ROWS * 4

    @property
    def barriers(self) -> int:
        """The mbarriers: two for each stage of each ring."""
        return 2 * (self.stages + self.dequantized_stages)

    @property
    def threads(self) -> int:
        """Threads of a CTA: two MMA warpgroups, one that dequantizes weights, one that copies."""
        return 512

    @property
    def mma_registers(self) -> int:
        """Registers of a thread of an MMA warp."""
        return 216

    @property
    def dequant_registers(self) -> int:
        """Registers of a thread that dequantizes weights."""
        return 56

    @property
    def copy_registers(self) -> int:
        """Registers of a thread of the copy warpgroup."""
        return 24

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA; 1024 bytes to align the stages to that."""
        rings = self.stages * (self.x_bytes + self.weight_bytes)
        rings += self.dequantized_stages * self.dequantized_bytes
        return 1024 + rings + self.epilogue_bytes + 8 * self.barriers


_configuration = functools.cache(E4m3Plan)


def e4m3_plan(rows: int, columns: int, tokens: int, float32_out: bool, swiglu: bool) -> E4m3Plan:
    """The configuration of a GEMM.

    Args:
        rows: N, of all groups, a multiple of 128 in each group if there are several.
        columns: K, a multiple of 128.
        tokens: At least 1.
        float32_out: Whether the result is float32.
        swiglu: See ``E4m3Plan``.
    """
    row_blocks = -(-rows // ROWS)
    # Two tiles of 64 tokens share the cost of dequantizing, unless they leave SMs idle.
    wide = row_blocks * -(-tokens // 256) >= SMS or tokens > 1024
    plan = _configuration(2, 3, 3, float32_out, swiglu)
    narrow = _configuration(1, 5, 3, float32_out, swiglu)
    return plan if wide else narrow
