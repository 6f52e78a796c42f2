"""Arguments and configurations of the grouped GEMM for many rows an expert; needs no compiler."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from dsv4.cute.grouped_problem import MOST_EXPERTS
from dsv4.cute.runtime.kernel_abi import Float32, Int32, Int64, KernelAbi, Pointer
from dsv4.cute.sm90.gemm_wgmma_plan import WgmmaPlan, WgmmaTma

# Slots in which the copy warp writes which tile comes next: more than there are stages.
SLOTS = 14
SLOT_BYTES = 24  # 16 of the tile, 8 of the mbarrier that says that all have read it
# The experts' tiles and first rows, 4 bytes each, and the slots.
TABLE_BYTES = 8 * (MOST_EXPERTS + 2) + SLOT_BYTES * SLOTS


class GroupedWgmmaArgs(NamedTuple):
    """Arguments of the grouped GEMM for many rows an expert.

    Attributes:
        global_scale: float32 ``[experts, expert_scales]``.
        x: bfloat16 ``[tokens, K]``, rows sorted by expert; TMA reads it through
            ``WgmmaTma.x_tma``.
        token_scale: float32 ``[tokens]``; read where the plan is ``row_scaled``.
        row_weight: float32 ``[tokens]``; read where the plan is ``row_weighted``.
        out: ``[tokens, rows]`` or, after SwiGLU, half as many columns; where ``quantized_out``, the
            codes of these results.
        offsets: int32 ``[experts + 1]``: first row of each expert, and the end.
        result_scale: float32 ``[experts]``, by which results are quantized, where
            ``quantized_out``.
        out_block_scales: Scale bytes of the results, linear or swizzled, where ``quantized_out``.
        out_row_scale: float32 ``[tokens]``, the results' global scales, where ``quantized_out``.
        tile_counter: int32 that counts the tiles that CTAs have taken, 0 before the launch; or a
            null pointer, and in every round a CTA takes one of the next tiles.
        clear_end: Rows of X, if this launch clears the rows of no expert; else 0.
        experts: At most ``MOST_EXPERTS``.
        k_blocks: K / 64, a multiple of ``stage_k_blocks``.
        row_tiles: Rows of an expert's weight / 16.
        row_blocks: Rows of an expert's weight / rows of a CTA, rounded up.
        token_stride: Elements of X from one row to the next.
        expert_scales: Global scales of an expert.
        cut0: First row of the second segment, which has a global scale of its own.
        cut1: First row of the third segment.
        cut2: First row of the fourth segment.
        scale_rows: 1 if every row has a global scale of its own, else 0.
        opaque_16: 16. An argument, so that the compiler cannot turn products by it into shifts.
        above_rows: Experts of as many rows or fewer belong to another launch.
        most_rows: So do experts of more rows than this.
        all_ready: 1 if the preceding kernel is a launch of the same GEMM, for the other experts,
            which has waited for all operands: this kernel waits at its end only. Else 0.
        limit: Clamp of SwiGLU; infinity for none.
    """

    global_scale: Pointer
    x: Pointer
    token_scale: Pointer
    row_weight: Pointer
    out: Pointer
    offsets: Pointer
    result_scale: Pointer
    out_block_scales: Pointer
    out_row_scale: Pointer
    tile_counter: Pointer
    clear_end: Int32
    experts: Int32
    k_blocks: Int32
    row_tiles: Int32
    row_blocks: Int32
    token_stride: Int64
    expert_scales: Int32
    cut0: Int32
    cut1: Int32
    cut2: Int32
    scale_rows: Int32
    opaque_16: Int32
    above_rows: Int32
    most_rows: Int32
    all_ready: Int32
    limit: Float32


GROUPED_WGMMA_ABI = KernelAbi(WgmmaTma, GroupedWgmmaArgs)


@dataclass(frozen=True)
class GroupedWgmmaPlan(WgmmaPlan):
    """One configuration of the kernel in ``grouped_gemm_wgmma``; ``ctas`` is 1.

    Attributes:
        row_weighted: Whether SwiGLU's results are multiplied by a weight of their token.
        quantized_out: Whether results are NVFP4: codes, block scales, scales of rows.
        narrow_widths: Narrower numbers of tokens (N) of a wgmma, ascending, multiples of 8 below
            ``token_block``. A tile takes the first that its expert's rows fit.
        swizzled_out: Whether those block scales are swizzled, by expert.
    """

    row_weighted: bool = False
    quantized_out: bool = False
    narrow_widths: tuple[int, ...] = ()
    swizzled_out: bool = False

    @property
    def kernel(self) -> str:
        """The kernel's class, as ``module:class``."""
        if self.shares_scales:
            return "dsv4.cute.sm90.grouped_gemm_wgmma_shared_scales:GroupedWgmmaSharedScalesKernel"
        return "dsv4.cute.sm90.grouped_gemm_wgmma:GroupedWgmmaKernel"

    @property
    def shares_scales(self) -> bool:
        """Return whether the lanes of a warp share the dequantization of its block scales.

        They do it for four pairs of a row tile and a block of 64 columns at a time, if registers
        hold that.
        """
        # 128 accumulators of a thread leave too few registers for float32 results, or for four row
        # tiles and scales of rows.
        most = self.warp_tiles * self.token_block == 256
        spills = most and (self.float32_out or (self.row_scaled and self.warp_tiles == 4))
        whole = self.warp_tiles > 1 and self.warp_tiles * self.stage_k_blocks % 4 == 0
        # With three warpgroups ptxas keeps MMAs in flight over a single loop, not over one for each
        # width.
        fits = self.warpgroups == 2 or (self.warpgroups == 3 and not self.narrow_widths)
        return fits and whole and not spills

    @property
    def scale_buffer_bytes(self) -> int:
        """Shared memory of the block scales that lanes dequantize for one another."""
        return 512 * self.mma_warps if self.shares_scales else 0

    @property
    def mma_widths(self) -> tuple[int, ...]:
        """Numbers of tokens (N) that a wgmma can have, ascending."""
        return (*self.narrow_widths, self.token_block)

    @property
    def tma_tokens(self) -> int:
        """Tokens of one TMA copy: every width is a multiple of it."""
        return math.gcd(*self.mma_widths)

    @property
    def k_steps(self) -> int:
        """Steps of 16 columns that are dequantized, and then multiplied, at a time."""
        return 2

    @property
    def epilogue_buffers(self) -> int:
        """Transpose buffers of a warpgroup: one, so that shared memory is left for stages."""
        return 1

    @property
    def other_bytes(self) -> int:
        """The other shared memory: the table of experts, slots, shared block scales."""
        return TABLE_BYTES + self.scale_buffer_bytes
