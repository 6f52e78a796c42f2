"""Arguments and configurations of the large-M NVFP4 GEMM; needs no compiler.

``wgmma_plan`` takes the configuration that was measured to be the fastest (``tuned``). If none was,
it ranks every configuration that can multiply by ``estimated_cycles``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dsv4.cute.runtime.kernel_abi import (
    Empty,
    Float32,
    Int32,
    Int64,
    KernelAbi,
    Pointer,
    TmaDescriptor,
    TmaSizes,
)
from dsv4.cute.sm90.costs import WgmmaCosts
from dsv4.cute.sm90.tuned import tuned
from dsv4.cute.sm90.tuned_records import CLUSTERS, TunedData, WgmmaConfiguration, WgmmaKey

_SHARED_LIMIT = 227 * 1024  # shared memory of an SM that one CTA can have
_MOST_STAGES = 12
# Weights loaded before griddepcontrol.wait. Not a whole ring, because the first columns of X wait
# behind them: X came 0.5 to 1.5 us after the preceding kernel's end with 36 kB, 1.3 to 2.8 us with
# 110 to 150 kB; 65536 x 1536 with 32 tokens 22.6 us instead of 24.0 (H200). 18 kB: equal.
_EARLY_BYTES = 36 * 1024
# Registers of a thread of an MMA warpgroup, and of the copy warpgroup, by MMA warpgroups. Their sum
# must not be above what the CTA is launched with, else setmaxnreg hangs.
_REGISTERS = {2: 232, 3: 152, 4: 112}
_COPY_REGISTERS = {2: 40, 3: 40, 4: 32}
# Bytes from the line of a token's 64 rows to the next in a transpose buffer: 16 of padding, so that
# eight lines lie in different banks.
LINE = 144
# Warpgroups, row tiles of a warp, blocks of 64 columns of a stage, and tokens of a tile: 31 shapes,
# each the fastest somewhere. Timed on an H200 with matrices of Pro and Flash, 32 to 4096 tokens.
_SHAPES = (
    (2, 1, 2, (32, 48, 64, 72, 80, 88, 96, 104, 112, 120, 128, 144)),
    (2, 1, 1, (152, 160, 176, 192, 208, 224, 240, 256)),
    (2, 2, 2, (128,)),
    (3, 1, 2, (80, 96, 112, 128)),
    (4, 1, 2, (32, 48, 64, 96)),
    (4, 2, 2, (32, 64)),
)


class WgmmaTma(NamedTuple):
    """Types of the TMA copies for the compiler; these parameters come first.

    In device code the descriptors are copy atoms and the sizes are tensors as the copies address
    them.

    Attributes:
        x_tma: Copies 64 columns of the X of a tile.
        codes_tma: Copies the codes of a stage.
        scales_tma: Copies the block scales of a stage.
        x_tensor: X, ``[tokens, groups K]``.
        codes_tensor: Packed codes, ``[row tiles, K / 64 * 128]`` words.
        scales_tensor: Packed block scales, ``[row tiles, K / 64 * 16]`` words.
        x_layout: Shared-memory layout of the X of all stages.
    """

    x_tma: TmaDescriptor
    codes_tma: TmaDescriptor
    scales_tma: TmaDescriptor
    x_tensor: TmaSizes
    codes_tensor: TmaSizes
    scales_tensor: TmaSizes
    x_layout: Empty


class WgmmaArgs(NamedTuple):
    """Arguments of the large-M GEMM.

    Attributes:
        global_scale: float32 global scales: one, one per segment, or one per row.
        x: bfloat16 ``[tokens, groups, K]``; TMA reads it through ``WgmmaTma.x_tma``.
        token_scale: float32 ``[tokens, groups]``; read where the plan is ``row_scaled``.
        out: ``[tokens, rows]``, bfloat16 or float32.
        tokens: At least 1.
        token_tiles: Tiles of ``token_block`` tokens.
        token_span: Token tiles that follow one another before the next block of rows does.
        k_blocks: K / 64, a multiple of ``stage_k_blocks``, at least ``ctas stage_k_blocks``.
        row_tiles: Rows of the weight / 16.
        row_blocks: Rows of the weight / rows of a CTA, rounded up.
        group_blocks: Blocks of rows that share an input.
        token_stride: Elements of X from one token to the next.
        group_stride: Elements of X from one group to the next.
        cut0: First row of the second segment, which has a global scale of its own.
        cut1: First row of the third segment.
        cut2: First row of the fourth segment.
        scale_rows: 1 if every row has a global scale of its own, else 0.
        groups: Inputs of a token.
        opaque_16: 16. An argument, so that the compiler cannot turn products by it into shifts.
        limit: Clamp of SwiGLU; infinity for none.
    """

    global_scale: Pointer
    x: Pointer
    token_scale: Pointer
    out: Pointer
    tokens: Int32
    token_tiles: Int32
    token_span: Int32
    k_blocks: Int32
    row_tiles: Int32
    row_blocks: Int32
    group_blocks: Int32
    token_stride: Int64
    group_stride: Int64
    cut0: Int32
    cut1: Int32
    cut2: Int32
    scale_rows: Int32
    groups: Int32
    opaque_16: Int32
    limit: Float32


WGMMA_ABI = KernelAbi(WgmmaTma, WgmmaArgs)


@dataclass(frozen=True)
class WgmmaPlan:
    """One configuration of the kernel in ``gemm_wgmma``.

    ``K / 64`` is a multiple of ``stage_k_blocks`` and at least ``ctas stage_k_blocks``.

    Attributes:
        token_block: Tokens of a tile, a multiple of 8, at most 256.
        warpgroups: MMA warpgroups of a CTA, 2 to 4.
        ctas: CTAs of a cluster, which share K, at most 8.
        stage_k_blocks: Blocks of 64 columns of X and of the weights in a stage, 1 or 2.
        float32_out: Whether the result is float32, else bfloat16.
        row_scaled: Whether every token has a scale of its own (quantised activations).
        swiglu: Whether rows are interleaved gate and up, and the result is their SwiGLU.
        warp_tiles: Row tiles, of 16 rows, of a warp: 1, 2 or, for routed experts, 4.
    """

    token_block: int
    warpgroups: int
    ctas: int
    stage_k_blocks: int
    float32_out: bool
    row_scaled: bool
    swiglu: bool = False
    warp_tiles: int = 1

    @property
    def kernel(self) -> str:
        """The kernel's class, as ``module:class``."""
        return "dsv4.cute.sm90.gemm_wgmma:WgmmaKernel"

    @property
    def rows(self) -> int:
        """Rows of the weight of a CTA."""
        return 64 * self.warpgroups * self.warp_tiles

    @property
    def cta_row_tiles(self) -> int:
        """Row tiles of a CTA."""
        return self.mma_warps * self.warp_tiles

    @property
    def mma_widths(self) -> tuple[int, ...]:
        """Numbers of tokens (N) that a wgmma can have, ascending."""
        return (self.token_block,)

    @property
    def tma_tokens(self) -> int:
        """Tokens of one TMA copy."""
        return self.token_block

    @property
    def prefetched_k_blocks(self) -> int:
        """Blocks of 64 columns whose weights are prefetched to registers."""
        return self.stage_k_blocks if self.warp_tiles == 1 else 1

    @property
    def k_steps(self) -> int:
        """Steps of 16 columns that are dequantized, and then multiplied, at a time: 2 or 4.

        With 4 a warp waits half as often, and has twice the registers of operands. 32 and 64 tokens
        gained 1.5 to 5 % by 4, 128 tokens nothing, because the tensor cores are the bound there;
        512 rows of a CTA with 48 and 64 tokens lost 1 and 9 %, for want of registers (H200).
        """
        few_tokens = self.token_block <= 32 and not (self.float32_out and self.row_scaled)
        fits = self.warpgroups < 4 or self.warp_tiles == 1 or few_tokens
        return 4 if self.stage_k_blocks == 2 and self.token_block <= 96 and fits else 2

    @property
    def x_bytes(self) -> int:
        """Bytes of 64 columns of a tile's X."""
        return self.token_block * 128

    @property
    def code_bytes(self) -> int:
        """Codes of 16 rows in a stage."""
        return 512 * self.stage_k_blocks

    @property
    def scale_bytes(self) -> int:
        """Scales of 16 rows in a stage."""
        return 64 * self.stage_k_blocks

    @property
    def weight_bytes(self) -> int:
        """Codes and scales of a stage."""
        return self.cta_row_tiles * (self.code_bytes + self.scale_bytes)

    @property
    def stage_bytes(self) -> int:
        """X, weights and barriers of a stage."""
        return self.stage_k_blocks * self.x_bytes + self.weight_bytes + 16

    @property
    def exchange_bytes(self) -> int:
        """Shared memory for the sums of all CTAs of a cluster that one of them adds."""
        own = -(-self.token_block // 8 // self.ctas)
        return self.ctas * own * 8 * self.rows * 4

    @functools.cached_property
    def has_exchange_buffer(self) -> bool:
        """Whether these sums have a buffer of their own: if enough stages fit beside it.

        Else they lie where stages have been, and are sent when all CTAs have read these. The buffer
        gave 2 to 11 % where K is shared; three stages with three warpgroups cost 17 % (H200).
        """
        least = 3 if self.warpgroups == 2 else 4
        return self.ctas > 1 and self._stages_with(self.exchange_bytes) >= least

    @property
    def other_bytes(self) -> int:
        """The other shared memory: mbarriers of sums that CTAs exchange."""
        return 16

    @property
    def epilogue_tiles(self) -> int:
        """Tiles of 8 tokens that the epilogue transposes at a time."""
        return 4

    @property
    def epilogue_buffers(self) -> int:
        """Transpose buffers of a warpgroup: of two, one is read while the other is written."""
        return 2

    @property
    def epilogue_bytes(self) -> int:
        """The transpose buffers of all warpgroups."""
        lines = min(8 * self.epilogue_tiles, self.token_block)
        return self.warpgroups * self.epilogue_buffers * lines * LINE

    @functools.cached_property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return self._stages_with(self.exchange_buffer_bytes)

    def _stages_with(self, taken: int) -> int:
        """Stages that fit beside ``taken`` bytes and what every configuration has."""
        left = _SHARED_LIMIT - 1024 - self.epilogue_bytes - self.other_bytes - taken
        return min(_MOST_STAGES, left // self.stage_bytes)

    @property
    def exchange_buffer_bytes(self) -> int:
        """The buffer for exchanged sums, if there is one."""
        return self.exchange_bytes if self.has_exchange_buffer else 0

    @property
    def early_stages(self) -> int:
        """Stages whose weights are loaded before griddepcontrol.wait.

        No more than memory delivers meanwhile: the first columns of X wait for all of them.
        """
        return min(self.stages, max(1, _EARLY_BYTES // self.weight_bytes))

    @property
    def threads(self) -> int:
        """Threads of a CTA: the MMA warpgroups and the copy warpgroup."""
        return 128 * (self.warpgroups + 1)

    @property
    def mma_warps(self) -> int:
        """MMA warps of a CTA."""
        return 4 * self.warpgroups

    @property
    def mma_registers(self) -> int:
        """Registers of a thread of an MMA warp."""
        return _REGISTERS[self.warpgroups]

    @property
    def copy_registers(self) -> int:
        """Registers of a thread of the copy warpgroup."""
        return _COPY_REGISTERS[self.warpgroups]

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA; 1024 bytes to align the stages to that."""
        stages = self.stages * self.stage_bytes
        return 1024 + stages + self.epilogue_bytes + self.other_bytes + self.exchange_buffer_bytes


# Few configurations serve all matrices, and keep what is derived from their fields.
_configuration = functools.cache(WgmmaPlan)


def wgmma_plan(
    rows: int,
    group_rows: int,
    columns: int,
    tokens: int,
    float32_out: bool,
    row_scaled: bool,
) -> WgmmaPlan | None:
    """The fastest configuration, measured or by ``estimated_cycles``; None if there is none.

    Args:
        rows: N, of all groups, a multiple of 16 in each.
        group_rows: Rows that share an input.
        columns: K, a multiple of 64.
        tokens: At least 1.
        float32_out: Whether the result is float32.
        row_scaled: Whether every token has a scale.
    """
    if not (float32_out or row_scaled):
        measured = tuned().plan_of(WgmmaKey(rows, rows // group_rows, columns, tokens))
        if measured is not None:
            return plan_of(measured)
    costs, gpu = tuned().costs.gemm_wgmma, tuned()
    return min(
        candidates(rows, group_rows, columns, tokens, float32_out, row_scaled),
        key=lambda plan: estimated_cycles(plan, rows, columns, tokens, costs, gpu),
        default=None,
    )


def plan_of(measured: WgmmaConfiguration) -> WgmmaPlan:
    """Return the plan of a configuration that was measured."""
    return _configuration(
        measured.token_block,
        measured.warpgroups,
        measured.ctas,
        measured.stage_k_blocks,
        False,
        False,
        warp_tiles=measured.warp_tiles,
    )


def configuration_of(plan: WgmmaPlan) -> WgmmaConfiguration:
    """Return the configuration of a plan, as a data file has it."""
    return WgmmaConfiguration(
        plan.token_block, plan.warpgroups, plan.ctas, plan.stage_k_blocks, plan.warp_tiles
    )


def fits(key: WgmmaKey, measured: WgmmaConfiguration) -> bool:
    """Return whether a configuration is a candidate for a key."""
    if key.rows % key.groups:
        return False
    sizes = (key.rows, key.rows // key.groups, key.columns, key.tokens)
    return plan_of(measured) in candidates(*sizes, False, False)


def candidates(
    rows: int,
    group_rows: int,
    columns: int,
    tokens: int,
    float32_out: bool,
    row_scaled: bool,
) -> Iterator[WgmmaPlan]:
    """Return every configuration that can multiply; arguments as in ``wgmma_plan``."""
    own_rows = None if rows == group_rows else group_rows
    for plan in _of_any_tokens(own_rows, columns, float32_out, row_scaled):
        if plan.token_block <= 2 * max(tokens, 16):
            yield plan


@functools.cache  # choosing for every number of tokens took a third of its time for these
def _of_any_tokens(
    group_rows: int | None, columns: int, float32_out: bool, row_scaled: bool
) -> tuple[WgmmaPlan, ...]:
    """Return ``candidates`` for more tokens than a tile has; ``group_rows`` of several groups."""
    if columns % 128:
        return ()
    result = []
    shapes = ((*shape[:3], token_block) for shape in _SHAPES for token_block in shape[3])
    for (warpgroups, tiles, stage_k_blocks, token_block), ctas in itertools.product(
        shapes, CLUSTERS
    ):
        kind = (float32_out, row_scaled)
        plan = _configuration(
            token_block, warpgroups, ctas, stage_k_blocks, *kind, warp_tiles=tiles
        )
        whole = group_rows is None or group_rows % plan.rows == 0
        stages = columns // 64 // stage_k_blocks
        # 512 rows of a CTA: registers hold these options beside the accumulators of 32 tokens only.
        spills = plan.rows == 512 and token_block > 32 and (float32_out or row_scaled)
        if spills or not whole or stages < ctas:
            continue
        ring_bytes = plan.stages * (plan.stage_bytes - 16)
        if ctas == 1 or plan.has_exchange_buffer or plan.exchange_bytes <= ring_bytes:
            result.append(plan)
    return tuple(result)


def estimated_cycles(
    plan: WgmmaPlan, rows: int, columns: int, tokens: int, costs: WgmmaCosts, gpu: TunedData
) -> float:
    """Cycles of a GEMM: rounds of tiles, each of steps of 64 columns.

    The default constants are fitted to 2800 times on an H200 (701 pairs of a matrix and a number of
    tokens from 32 to 4096); they are there to rank configurations. The one that they take is within
    1 % of the fastest in 383 of 419 pairs, 0.3 % slower on average.

    Args:
        plan: The configuration.
        rows: N.
        columns: K.
        tokens: M.
        costs: The constants.
        gpu: SMs and clusters of the GPU.
    """
    tiles = -(-rows // plan.rows) * -(-tokens // plan.token_block)
    rounds = -(-tiles // gpu.clusters[plan.ctas])
    steps = -(-columns // 64 // plan.stage_k_blocks // plan.ctas) * plan.stage_k_blocks
    results = plan.token_block * plan.rows / 64
    active = min(1.0, tiles * plan.ctas / gpu.sms)
    # More warpgroups hide more of a tile's start and end.
    hidden = (2 / plan.warpgroups) ** costs.ends_power
    ends = (costs.ends + costs.result * results / plan.ctas) * hidden
    tile = ends + steps * step_cycles(plan, active, costs) + costs.row_tile * (plan.warp_tiles - 1)
    tile += costs.exchanged * results * (plan.ctas - 1) / plan.ctas
    cycles = costs.launch + rounds * tile
    if plan.ctas > 1:
        cycles += costs.round * (rounds - 1)
    # The CTAs of the next kernel start before those of this one end if there are free SMs.
    return cycles - costs.overlap if 2 * tiles * plan.ctas <= gpu.sms else cycles


def step_cycles(plan: WgmmaPlan, active: float, costs: WgmmaCosts) -> float:
    """Cycles of a block of 64 columns, in all warpgroups of a CTA.

    Bound by instructions, by the tensor cores, or by the latency of a warp's path through both;
    traffic through L2 adds to it.

    Args:
        plan: The configuration.
        active: Share of the SMs that have a CTA.
        costs: The constants.
    """
    units = plan.rows // 64
    busy = max(
        units * (costs.issue + costs.issue_token * plan.token_block),
        units * costs.tensor * plan.token_block,
        costs.latency + costs.latency_token * plan.token_block,
    )
    busy += costs.stage * (2 - plan.stage_k_blocks)
    return busy + active * (costs.x_byte * plan.x_bytes + costs.weight_byte * 36 * plan.rows)
