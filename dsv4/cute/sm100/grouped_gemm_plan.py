"""Arguments and configurations of the ``tcgen05`` grouped GEMM in ``grouped_gemm``.

Needs no compiler. No constant here was chosen by a measurement: the project has no such GPU.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from dsv4.cute.grouped_problem import MOST_EXPERTS, Experts, counted_as, expected_tiles
from dsv4.cute.runtime.kernel_abi import Float32, Int32, KernelAbi, Pointer, TmaDescriptor
from dsv4.cute.sm100.gemm_plan import COPY_WARP, ROWS, TOKEN_BLOCKS, OperandTile, Tcgen05Plan
from dsv4.cute.sm100.plans import SMS, cycles_of
from dsv4.cute.sm100.tensor_maps import STAGE_K, Box, code_box, scale_box

SCALE_WARP, CLEAR_WARP = COPY_WARP + 1, COPY_WARP + 2
# Stages whose scales of X are loaded at a time: 64 bytes of a row, two sectors of L2.
PREFETCHED_STAGES = 4
SCALE_BYTES = STAGE_K // 16  # scales of a row of X in a stage
K_MULTIPLE = STAGE_K  # of K, because the scale warp loads whole stages
_FEW_ROUNDS = 8  # of tiles; up to here the last one is counted as a whole


class GroupedTcgen05Tma(NamedTuple):
    """The TMA copies of the operands; these parameters come first.

    In device code each is a ``gemm_pipeline.TmaOperand``, as of ``gemm_plan.Tcgen05Tma``.

    Attributes:
        row_codes: Codes of all experts' weights, ``[experts rows, K / 2]``.
        row_scales: Their block scales, ``[experts ceil(rows / 128), K / 64, 512 bytes]``.
        token_codes: Codes of X, ``[tokens, K / 2]``.
    """

    row_codes: TmaDescriptor
    row_scales: TmaDescriptor
    token_codes: TmaDescriptor


class GroupedTcgen05Args(NamedTuple):
    """Arguments of the grouped GEMM.

    Attributes:
        x_scales: Block scales of X, ``[tokens, K / 16]``.
        global_scale: float32 global scales of the weights, ``[experts, expert_scales]``.
        token_scale: float32 global scales of X, ``[tokens]``.
        row_weight: float32 ``[tokens]``; read where the plan is ``row_weighted``.
        out: ``[tokens, rows]``, or half as many columns after SwiGLU; of ``quantized_out`` the
            codes, ``[tokens, rows / 4]``.
        offsets: int32 ``[experts + 1]``, the first row of X of each expert and the end.
        result_scale: With ``quantized_out``, the global scales of each expert's results,
            float32.
        block_scales: With ``quantized_out``, the block scales of the results, ``[tokens,
            rows / 32]``, or swizzled by expert.
        row_scale: With ``quantized_out``, the global scales of the results' rows, float32
            ``[tokens]``.
        tokens: Rows of X, of all experts and of none, at least 1.
        experts: At most ``MOST_EXPERTS``.
        k_stages: K / 256.
        rows: Rows of an expert's weight, a multiple of 16.
        row_blocks: Rows of an expert's weight / rows of a tile, rounded up.
        expert_scales: Global scales of an expert: one, one per segment, or one per row.
        cut0: First row of the second segment, which has a global scale of its own.
        cut1: First row of the third segment.
        cut2: First row of the fourth segment.
        scale_rows: 1 if every row has a global scale of its own, else 0.
        limit: Clamp of SwiGLU; infinity for none.
    """

    x_scales: Pointer
    global_scale: Pointer
    token_scale: Pointer
    row_weight: Pointer
    out: Pointer
    offsets: Pointer
    result_scale: Pointer
    block_scales: Pointer
    row_scale: Pointer
    tokens: Int32
    experts: Int32
    k_stages: Int32
    rows: Int32
    row_blocks: Int32
    expert_scales: Int32
    cut0: Int32
    cut1: Int32
    cut2: Int32
    scale_rows: Int32
    limit: Float32


GROUPED_TCGEN05_ABI = KernelAbi(GroupedTcgen05Tma, GroupedTcgen05Args)


@dataclass(frozen=True)
class GroupedTcgen05Plan(Tcgen05Plan):
    """One configuration of the kernel in ``grouped_gemm``; ``k_splits`` is 1.

    K is never shared: the six experts of one token of Flash and Pro have 192 to 336 tiles for the
    148 SMs of a B200.

    Attributes:
        row_weighted: Whether SwiGLU's results are multiplied by a weight of their token.
        quantized_out: Whether results are NVFP4: codes, block scales, scales of rows.
        swizzled_out: Whether those block scales are swizzled, by expert.
    """

    row_weighted: bool = False
    quantized_out: bool = False
    swizzled_out: bool = False

    @property
    def kernel(self) -> str:
        """The kernel's class, as ``module:class``."""
        return "dsv4.cute.sm100.grouped_gemm:GroupedTcgen05Kernel"

    @property
    def threads(self) -> int:
        """Threads of a CTA: a warp for scales of X and one that clears rows, beside a GEMM's."""
        return super().threads + 64

    @property
    def tma_bytes(self) -> int:
        """Bytes of a stage that TMA copies bring to a CTA: all but the tokens' scales."""
        return self.stage_bytes - self.token_scale_bytes

    @property
    def table_bytes(self) -> int:
        """Bytes of the table of the experts' first tiles and rows."""
        return 8 * (MOST_EXPERTS + 2)

    @property
    def multicasts_scales(self) -> bool:
        """Return whether CTAs copy scales for each other: never."""
        return False

    @property
    def full_arrivals(self) -> int:
        """Arrivals that fill a stage: of the copy warp, and of each CTA's scale warp."""
        return 1 + self.cta_group

    @property
    def tile_bytes(self) -> int:
        """Bytes of a token's results, or of their codes, in 16 rows."""
        if self.quantized_out:
            return self.tile_outputs // 2
        return self.tile_outputs * (4 if self.float32_out else 2)

    def operands(self, rows: int, columns: int, tokens: int, experts: int) -> tuple[Box, Box, Box]:
        """Return what the TMA copies read, in the order of ``GroupedTcgen05Tma``."""
        return (
            code_box(experts * rows, columns, ROWS),
            scale_box(experts * -(-rows // ROWS), columns, (1, 4)),
            code_box(tokens, columns, self.cta_tokens),
        )

    # Index arithmetic of the kernel, on Python numbers or DSL values.

    def expert_row_tile(
        self, row_block: Any, rank: Any, k: Any, expert: Any, rows: Any
    ) -> OperandTile:
        """Return where stage ``k`` of a CTA's rows of an expert begins.

        Swizzling the weights pads each expert's scales to a multiple of 128 rows.
        """
        (row, byte), (tile, k_tile) = self.row_tile(row_block, rank, k)
        tiles = (rows + ROWS - 1) // ROWS
        return OperandTile((expert * rows + row, byte), (expert * tiles + tile, k_tile))

    def sorted_codes(self, start: Any, rank: Any, k: Any) -> tuple[Any, Any]:
        """Row and byte where a CTA's codes begin, of the tile whose first row of X is ``start``."""
        return start + rank * self.cta_tokens, k * (STAGE_K // 2)


@functools.lru_cache(maxsize=1 << 14)
def choose(problem: Experts, tokens: int) -> GroupedTcgen05Plan | None:
    """The configuration for a number of rows of X, None if there is none.

    How many of them each expert has is known on the GPU alone, so the choice supposes that they
    were drawn uniformly; the result is right for any routing.
    """
    return _choose(problem, counted_as(tokens))


@functools.cache
def _choose(problem: Experts, tokens: int) -> GroupedTcgen05Plan | None:
    if problem.experts > MOST_EXPERTS or problem.columns % K_MULTIPLE:
        return None
    return min(candidates(problem), key=lambda plan: _cycles(plan, problem, tokens))


def candidates(problem: Experts) -> list[GroupedTcgen05Plan]:
    """Return every configuration that can compute a grouped GEMM."""
    return [
        GroupedTcgen05Plan(
            token_block,
            ctas,
            problem.float32_out,
            problem.swiglu,
            row_weighted=problem.row_weighted,
            quantized_out=problem.quantized_out,
            swizzled_out=problem.swizzled_out,
        )
        for token_block, ctas in itertools.product(TOKEN_BLOCKS, (1, 2))
    ]


def plans(problem: Experts, max_tokens: int) -> list[GroupedTcgen05Plan]:
    """The configurations taken for 1 to ``max_tokens`` rows of X, each once."""
    counts, tokens = [], 1
    while tokens < max_tokens:
        counts.append(tokens)
        tokens = counted_as(tokens + 1)
    chosen = (choose(problem, count) for count in [*counts, max_tokens])
    return list(dict.fromkeys(plan for plan in chosen if plan is not None))


def _cycles(plan: GroupedTcgen05Plan, problem: Experts, tokens: int) -> float:
    """Estimated cycles: tiles of all experts, in rounds while there are few."""
    token_tiles = problem.experts * expected_tiles(tokens / problem.experts, plan.token_block)
    tiles = token_tiles * -(-problem.rows // plan.rows)
    rounds = tiles / (SMS // plan.ctas)
    if rounds < _FEW_ROUNDS:
        rounds = math.ceil(rounds)
    return cycles_of(plan, rounds, tiles, plan.k_stages(problem.columns))
