"""Arguments and configurations of routed experts in one launch; needs no compiler."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dsv4.cute.grouped_problem import Experts
from dsv4.cute.runtime.architectures import HOPPER, shared_limit
from dsv4.cute.runtime.kernel_abi import Float32, Int32, Int64, KernelAbi, Pointer
from dsv4.cute.sm90.grouped_gemm_plans import launch_plans
from dsv4.cute.sm90.grouped_gemm_small_m_plan import STATE_BYTES, SUM_SLOTS, GroupedSmallMPlan
from dsv4.cute.sm90.grouped_gemm_wgmma_plan import TABLE_BYTES
from dsv4.ops.expert_mlp import COUNTERS, ExpertMlpArgs

COUNTER_BYTES = 32  # from one counter to the next: a sector of L2 each
# Rows of X, of all experts, that one launch takes: every one may be a segment with a counter. The
# last counter is that of ranges.
MOST_ROWS = 4 * COUNTERS // COUNTER_BYTES - 1
# A counter has gate_up's units in its lower half and down's in its upper one.
MOST_UNITS = (1 << 16) - 1
# Warps of a CTA: with twelve a thread has 168 registers, which hold eight stages of weights.
_WARPS, _MOST_STAGES = 12, 8
_STATES_BYTES = 2 * (8 + 16 * SUM_SLOTS + 2 * STATE_BYTES)  # of both GEMMs: barriers and state


class ExpertMlpSmallMArgs(NamedTuple):
    """Arguments of routed experts in one launch.

    Attributes:
        codes: Packed E2M1 codes of all experts' gate_up, layout ``fragments_16x64``.
        scales: Their packed E4M3 block scales.
        global_scale: float32 ``[experts, expert_scales]`` of gate_up.
        down_codes: Packed codes of all experts' down weight, likewise.
        down_scales: Their block scales.
        down_global_scale: float32 ``[experts, down_expert_scales]``.
        x: bfloat16 ``[tokens, K]``, rows sorted by expert.
        row_weight: float32 ``[tokens]``; read where the plan is ``row_weighted``.
        inner: bfloat16 ``[tokens, I]``: results of SwiGLU; rows of no expert are not written.
        out: bfloat16 ``[tokens, rows of down]``.
        offsets: int32 ``[experts + 1]``: first row of each expert, and the end.
        counters: A uint32 every ``COUNTER_BYTES`` for each of ``MOST_ROWS`` segments, and one for
            ranges of units. They are 0 before a launch and after it, and one launch at a time uses
            them.
        clear_end: Rows of X.
        experts: At most ``MOST_EXPERTS``.
        units: Row tiles of an expert's gate_up.
        down_units: Row tiles of an expert's down weight.
        token_stride: Elements of X from one row to the next.
        inner_stride: I.
        expert_scales: Global scales of an expert's gate_up.
        down_expert_scales: Global scales of an expert's down weight.
        cut0: First row of gate_up's second segment, which has a global scale of its own.
        cut1: First row of the third segment.
        cut2: First row of the fourth segment.
        scale_rows: 1 if every row of gate_up has a global scale of its own, else 0.
        no_cut: A row that there is not: the down weight has one segment.
        down_scale_rows: 1 if every row of down has a global scale of its own, else 0.
        opaque_16: 16. An argument, so that the compiler cannot turn products by it into shifts.
        limit: Clamp of SwiGLU; infinity for none.
    """

    codes: Pointer
    scales: Pointer
    global_scale: Pointer
    down_codes: Pointer
    down_scales: Pointer
    down_global_scale: Pointer
    x: Pointer
    row_weight: Pointer
    inner: Pointer
    out: Pointer
    offsets: Pointer
    counters: Pointer
    clear_end: Int32
    experts: Int32
    units: Int32
    down_units: Int32
    token_stride: Int64
    inner_stride: Int64
    expert_scales: Int32
    down_expert_scales: Int32
    cut0: Int32
    cut1: Int32
    cut2: Int32
    scale_rows: Int32
    no_cut: Int32
    down_scale_rows: Int32
    opaque_16: Int32
    limit: Float32


EXPERT_MLP_ABI = KernelAbi(ExpertMlpSmallMArgs)


@dataclass(frozen=True)
class ExpertMlpPlan:
    """One configuration of the kernel in ``expert_mlp``.

    Attributes:
        gate_up: Configuration of the first GEMM, with SwiGLU.
        down: Configuration of the second GEMM, of as many warps.
    """

    gate_up: GroupedSmallMPlan
    down: GroupedSmallMPlan

    @property
    def kernel(self) -> str:
        """The kernel's class, as ``module:class``."""
        return "dsv4.cute.sm90.expert_mlp:ExpertMlpKernel"

    @property
    def ctas(self) -> int:
        """CTAs of a cluster."""
        return 1

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return self.gate_up.warps

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.gate_up.threads

    @property
    def x_bytes(self) -> int:
        """Shared memory of rows of X of one GEMM, then of the other."""
        return max(self.gate_up.x_bytes, self.down.x_bytes)

    @property
    def sums_bytes(self) -> int:
        """Shared memory of partial sums of one GEMM, then of the other."""
        return max(self.gate_up.sums_bytes, self.down.sums_bytes)

    @property
    def epilogue_bytes(self) -> int:
        """Buffers of all warps for the epilogue transpose."""
        return max(self.gate_up.epilogue_bytes, self.down.epilogue_bytes)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self.x_bytes + self.sums_bytes + self.epilogue_bytes + _STATES_BYTES + TABLE_BYTES


def problems(args: ExpertMlpArgs) -> tuple[Experts, Experts]:
    """The two grouped GEMMs of a record."""
    experts, high, _ = args.weight.shape
    _, rows, half = args.down.shape
    float32_out = args.out_dtype == torch.float32
    weighted = args.row_weight is not None
    gate_up = Experts(high, args.x.shape[1], experts, False, False, True, weighted)
    return gate_up, Experts(rows, 2 * half, experts, float32_out, False)


def expert_mlp_plan(gate_up: Experts, down: Experts, rows: int) -> ExpertMlpPlan | None:
    """The configuration for a number of rows of X, None if there is none.

    Both GEMMs split K as they do in a launch of their own, so their results are the same bits.

    Args:
        gate_up: The first GEMM.
        down: The second.
        rows: Rows of X, of all experts.
    """
    if unsupported_reason(gate_up, down, rows) is not None:
        return None
    plans = []
    for problem in (gate_up, down):
        launches = launch_plans(problem, rows, HOPPER)
        if len(launches) != 1 or not isinstance(launches[0].plan, GroupedSmallMPlan):
            return None
        alone = launches[0].plan
        stages = next(n for n in range(_MOST_STAGES, 0, -1) if alone.split_tiles % n == 0)
        plans.append(dataclasses.replace(alone, warps=_WARPS, stages=stages))
    plan = ExpertMlpPlan(plans[0], plans[1])
    same = plan.gate_up.segment_rows == plan.down.segment_rows == 8
    return plan if same and plan.shared_bytes <= shared_limit(HOPPER) else None


def unsupported_reason(gate_up: Experts, down: Experts, rows: int) -> str | None:
    """Return why one launch cannot run two grouped GEMMs, or None."""
    if rows > MOST_ROWS:
        return f"there are {rows} rows, wanted at most {MOST_ROWS}"
    if (gate_up.experts, gate_up.rows) != (down.experts, 2 * down.columns):
        return f"the GEMMs are {gate_up} and {down}, wanted gate_up and down of the same experts"
    units = max(gate_up.rows, down.rows) // 16
    if units > MOST_UNITS:
        return f"an expert has {units} row tiles, wanted at most {MOST_UNITS}"
    plain = down._replace(rows=0, columns=0, experts=0) == Experts(0, 0, 0, False, False)
    kind = (gate_up.float32_out, gate_up.row_scaled, gate_up.swiglu, gate_up.quantized_out)
    if not plain or kind != (False, False, True, False):
        return f"the GEMMs are {gate_up} and {down}, wanted bfloat16 inputs and results, and SwiGLU"
    return None
