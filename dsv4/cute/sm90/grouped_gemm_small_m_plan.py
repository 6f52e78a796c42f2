"""Arguments and configurations of the grouped GEMM for few rows an expert; needs no compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dsv4.cute.runtime.kernel_abi import Float32, Int32, Int64, KernelAbi, Pointer
from dsv4.cute.sm90.gemm_small_m_plan import SmallMPlan
from dsv4.cute.sm90.grouped_gemm_wgmma_plan import TABLE_BYTES

# Most units whose partial sums a CTA holds at once (``GroupedSmallMPlan.sum_slots``).
SUM_SLOTS = 8
STATE_BYTES = 48 + 4 * 16  # twelve words of the CTA, one for each of up to 16 warps

# What ``GroupedSmallMArgs.ready`` says of the operands when the kernel starts.
NOTHING_READY, OFFSETS_READY, ALL_READY = 0, 1, 2


class GroupedSmallMArgs(NamedTuple):
    """Arguments of the grouped GEMM for few rows an expert.

    Attributes:
        codes: Packed E2M1 codes of all experts' weights, layout ``fragments_16x64``.
        scales: Their packed E4M3 block scales.
        global_scale: float32 ``[experts, expert_scales]``.
        x: bfloat16 ``[tokens, K]``, rows sorted by expert.
        token_scale: float32 ``[tokens]``; read where the plan is ``row_scaled``.
        row_weight: float32 ``[tokens]``; read where the plan is ``row_weighted``.
        out: ``[tokens, rows]`` or, after SwiGLU, half as many columns; where ``quantized_out``, the
            codes of these results.
        offsets: int32 ``[experts + 1]``: first row of each expert, and the end.
        result_scale: float32 ``[experts]``, by which results are quantized, where
            ``quantized_out``.
        out_block_scales: Scale bytes of the results, linear or swizzled, where ``quantized_out``.
        out_row_scale: float32 ``[tokens]``, the results' global scales, where ``quantized_out``.
        clear_end: Rows of X, if this launch clears the rows of no expert; else 0.
        experts: At most ``MOST_EXPERTS``.
        units: Units of an expert's weight (``GroupedSmallMPlan``).
        token_stride: Elements of X from one row to the next.
        expert_scales: Global scales of an expert.
        cut0: First row of the second segment, which has a global scale of its own.
        cut1: First row of the third segment.
        cut2: First row of the fourth segment.
        scale_rows: 1 if every row has a global scale of its own, else 0.
        opaque_16: 16. An argument, so that the compiler cannot turn products by it into shifts.
        most_rows: Experts of more rows belong to another launch.
        ready: ``NOTHING_READY`` if the preceding kernel writes the offsets; ``OFFSETS_READY`` if
            they are older, so that weights are loaded before griddepcontrol.wait;
            ``ALL_READY`` if that kernel is a launch of the same GEMM, for experts of more rows,
            which has waited for all operands: this kernel waits at its end only.
        limit: Clamp of SwiGLU; infinity for none.
    """

    codes: Pointer
    scales: Pointer
    global_scale: Pointer
    x: Pointer
    token_scale: Pointer
    row_weight: Pointer
    out: Pointer
    offsets: Pointer
    result_scale: Pointer
    out_block_scales: Pointer
    out_row_scale: Pointer
    clear_end: Int32
    experts: Int32
    units: Int32
    token_stride: Int64
    expert_scales: Int32
    cut0: Int32
    cut1: Int32
    cut2: Int32
    scale_rows: Int32
    opaque_16: Int32
    most_rows: Int32
    ready: Int32
    limit: Float32


GROUPED_SMALL_M_ABI = KernelAbi(GroupedSmallMArgs)


@dataclass(frozen=True)
class GroupedSmallMPlan(SmallMPlan):
    """One configuration of the kernel in ``grouped_gemm_small_m``.

    ``ctas`` is 1, and ``stages`` is a divisor of ``split_tiles``. A unit is a row tile (16 rows of
    the weight), or two where their outputs make a block of 16 codes.

    Attributes:
        splits: K splits of a row tile, a divisor of ``tiles``.
        row_weighted: Whether SwiGLU's results are multiplied by a weight of their token.
        segment_rows: Most rows of X of a segment, at most 8 ``token_tiles``.
        quantized_out: Whether results are NVFP4: codes, block scales, scales of rows.
        swizzled_out: Whether those block scales are swizzled, by expert.
    """

    splits: int = 1
    row_weighted: bool = False
    segment_rows: int = 8
    quantized_out: bool = False
    swizzled_out: bool = False

    @property
    def kernel(self) -> str:
        """The kernel's class, as ``module:class``."""
        return "dsv4.cute.sm90.grouped_gemm_small_m:GroupedSmallMKernel"

    @property
    def x_bytes(self) -> int:
        """Shared memory of a segment's rows of X."""
        return self.segment_rows * self.x_row_bytes

    @property
    def unit_tiles(self) -> int:
        """Row tiles of a unit."""
        return 2 if self.quantized_out else 1

    @property
    def unit_jobs(self) -> int:
        """Jobs of a unit: the K splits of its row tiles."""
        return self.splits * self.unit_tiles

    def __post_init__(self) -> None:
        """Check that a round of all warps has whole units, which ``sum_slots`` needs."""
        assert self.unit_jobs == 1 or self.warps % self.unit_jobs == 0

    @property
    def sum_slots(self) -> int:
        """Units whose partial sums a CTA holds at once, if a unit has several jobs.

        A warp that needs a slot again waits for the phase in which its sums were read. mbarriers
        tell phases by their parity alone, so a warp must not skip one: if the phase before the
        skipped one is still open, it has the parity that the warp waits for. In a round all warps
        take one job each. With a multiple of a round's units, a warp comes to the same slots in
        every phase.
        """
        if self.unit_jobs == 1:
            return 0
        in_round = self.warps // self.unit_jobs
        return SUM_SLOTS // in_round * in_round

    @property
    def sums_bytes(self) -> int:
        """Shared memory of partial sums; none where a job is a whole unit."""
        return self.sum_slots * self.unit_jobs * self.partial_bytes

    @property
    def buffer_bytes(self) -> int:
        """A warp's buffer for the epilogue transpose: 16 bytes for 8 results to be quantized."""
        return self.partial_bytes // 2 if self.quantized_out else self.partial_bytes

    @property
    def split_tiles(self) -> int:
        """Tiles of 64 columns of a split."""
        return self.tiles // self.splits

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        state = 8 + 16 * SUM_SLOTS + STATE_BYTES
        return self.x_bytes + self.sums_bytes + self.epilogue_bytes + state + TABLE_BYTES
