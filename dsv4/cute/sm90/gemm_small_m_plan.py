"""Arguments and configurations of the small-M GEMM kernels; needs no compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dsv4.cute.runtime.kernel_abi import Float32, Int32, Int64, KernelAbi, Pointer
from dsv4.cute.sm90.tuned import tuned
from dsv4.cute.sm90.tuned_records import SmallMConfiguration, SmallMKey
from dsv4.device import cached

# Tokens of one launch. 16 take two tiles of 8; 32 that way are slower than the kernel for large M:
# 65536 x 1536 25.6 us instead of 19.6 (H200).
TOKENS = 16
RING_TILE = 32 * (16 + 8)  # bytes of a 16 x 64 tile in a ring: 24 for each lane
_PARTIAL = 512  # bytes of a warp's accumulators of 16 rows and 8 tokens
_REGISTER_FILE = 1 << 16  # registers of an SM
_THREAD_REGISTERS = 255  # registers of a thread, at most
_CTAS, _MOST_WARPS = (1, 2, 4, 8), 18  # CTAs of a cluster, and warps of a CTA
_OTHER_REGISTERS = 46  # registers of a thread beside prefetched weights
_EARLY_STAGES = 8  # loaded before X, in the configurations that were measured
_HALF_SM = 112 * 1024  # shared memory of each of two CTAs of an SM
_HOPPER_SHARED = 227 * 1024  # shared memory that one CTA can have
_SHARED_LIMIT = 100 * 1024  # two CTAs an SM, so that the next kernel's first loads run early


class SmallMArgs(NamedTuple):
    """Arguments of the small-M GEMM kernels.

    Attributes:
        codes: Packed E2M1 codes of the weight, layout ``fragments_16x64``.
        scales: Packed E4M3 block scales.
        global_scale: float32 global scales: one, one per segment, or one per row.
        x: bfloat16 ``[tokens, groups, K]``.
        token_scale: float32 ``[tokens, groups]``; read where the plan is ``row_scaled``.
        out: ``[tokens, rows]``, bfloat16 or float32.
        tokens: 1 to 8 ``token_tiles``.
        row_tiles: Rows of the weight / 16.
        group_tiles: Row tiles that share an input; a multiple of the plan's ``warps``.
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

    codes: Pointer
    scales: Pointer
    global_scale: Pointer
    x: Pointer
    token_scale: Pointer
    out: Pointer
    tokens: Int32
    row_tiles: Int32
    group_tiles: Int32
    token_stride: Int64
    group_stride: Int64
    cut0: Int32
    cut1: Int32
    cut2: Int32
    scale_rows: Int32
    groups: Int32
    opaque_16: Int32
    limit: Float32


SMALL_M_ABI = KernelAbi(SmallMArgs)


@dataclass(frozen=True)
class SmallMPlan:
    """One configuration of the kernel in ``gemm_small_m``.

    Attributes:
        columns: K.
        ctas: CTAs of a cluster, 1 to 8, which share K; ``columns / 64`` is a multiple of it.
        warps: Warps of a CTA, each with a row tile of its own.
        token_tiles: Tiles of 8 tokens, 1 or 2.
        float32_out: Whether the result is float32, else bfloat16.
        row_scaled: Whether every token has a scale of its own (quantised activations).
        stages: Weight tiles (16 rows x 64 columns) that a lane has prefetched to registers, six
            words each; a divisor of ``tiles`` where ``rounds`` is 1.
        swiglu: Whether rows are interleaved gate and up, and the result is their SwiGLU.
        rounds: 1 to load a stage's registers again right after its MMAs. 2 to load all ``stages``
            tiles into a second set of registers before the MMAs of the first; ``ctas`` is above 1.
    """

    columns: int
    ctas: int
    warps: int
    token_tiles: int
    float32_out: bool
    row_scaled: bool
    stages: int
    swiglu: bool = False
    rounds: int = 1

    @property
    def kernel(self) -> str:
        """The kernel's class, as ``module:class``."""
        return "dsv4.cute.sm90.gemm_small_m:SmallMKernel"

    @property
    def for_family(self) -> bool:
        """Whether one cubin serves all of Blackwell: its machine code is the same for each."""
        return True

    @property
    def tiles(self) -> int:
        """Tiles of 64 columns of a CTA's part of K."""
        return self.columns // 64 // self.ctas

    @property
    def x_row_bytes(self) -> int:
        """Bytes from one token of X to the next in shared memory.

        16 bytes of padding, so that the eight rows that ``ldmatrix`` reads lie in different banks.
        """
        return self.tiles * 128 + 16

    @property
    def x_bytes(self) -> int:
        """Shared memory of the CTA's part of X."""
        return self.token_tiles * 8 * self.x_row_bytes

    @property
    def accumulators(self) -> int:
        """Accumulator fragments of a warp.

        Two for a single tile of tokens, so that consecutive MMAs do not wait for each other. With
        two tiles one each fits 128 registers. One chain for 8 tokens, too, was slower: 2048 x 7168
        took 7.5 us instead of 4.9 (H200).
        """
        return max(2, self.token_tiles)

    @property
    def partial_bytes(self) -> int:
        """Bytes of a warp's accumulators."""
        return _PARTIAL * self.token_tiles

    @property
    def partials_bytes(self) -> int:
        """Shared memory of the partial sums that the cluster's CTAs send to this one."""
        return 0 if self.ctas == 1 else (self.warps + self.ctas) * self.partial_bytes

    @property
    def buffer_bytes(self) -> int:
        """A warp's buffer for the epilogue transpose."""
        return self.partial_bytes

    @property
    def epilogue_bytes(self) -> int:
        """The buffers of all warps."""
        return self.warps * self.buffer_bytes

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that an SM must hold at once, which bounds the registers of a thread.

        Two, so that CTAs of the next kernel run while those of this one finish. Operands of 16
        tokens need too many registers for that, as do float32 results, scales of tokens where the
        next row tile's weights are loaded during the epilogue, and many stages.
        """
        wide = self.float32_out or (self.row_scaled and self.ctas == 1)
        registers = _OTHER_REGISTERS + 6 * self.stages * self.rounds
        fits = 2 * self.threads * registers <= _REGISTER_FILE
        return 2 if self.token_tiles == 1 and self.warps <= 12 and fits and not wide else 1

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA; three words of 8 bytes beside an mbarrier per warp."""
        return self.x_bytes + self.partials_bytes + self.epilogue_bytes + 8 * (self.warps + 3)


@dataclass(frozen=True)
class SmallMRingPlan(SmallMPlan):
    """One configuration of the kernel in ``gemm_small_m_ring``: ``ctas`` above 1, ``rounds`` 1.

    ``stages`` is how many tiles a warp's ring in shared memory has, at most ``tiles``.
    """

    @property
    def kernel(self) -> str:
        """The kernel's class, as ``module:class``."""
        return "dsv4.cute.sm90.gemm_small_m_ring:SmallMRingKernel"

    @property
    def early_stages(self) -> int:
        """Stages whose weights are loaded before griddepcontrol.wait; X would wait for more."""
        return min(self.stages, _EARLY_STAGES)

    @property
    def buffer_bytes(self) -> int:
        """A warp's ring, which the epilogue transpose uses afterwards."""
        return max(self.partial_bytes, self.stages * RING_TILE)

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that an SM must hold at once: two where they fit, with 64 registers a thread."""
        fits = self.token_tiles == 1 and self.warps <= 16 and self.shared_bytes <= _HALF_SM
        return 2 if fits and not self.float32_out else 1


def small_m_plan(
    row_tiles: int,
    group_tiles: int,
    columns: int,
    tokens: int,
    float32_out: bool,
    row_scaled: bool,
    shared: int = _HOPPER_SHARED,
) -> SmallMPlan | None:
    """The configuration for up to 16 tokens, or None if there is none.

    It depends on the weight's shape and on whether there are more than 8 tokens: the fastest that
    was measured, else by rule. As few CTAs share K as make enough warps, because the partial sums
    of each travel. 8 warps, two CTAs an SM, leave 128 registers a thread.

    Args:
        row_tiles: N / 16, all groups.
        group_tiles: Row tiles that share an input.
        columns: K, a multiple of 64.
        tokens: 1 to 16.
        float32_out: Whether the result is float32.
        row_scaled: Whether every token has a scale.
        shared: Bytes of shared memory that a CTA can have.
    """
    token_tiles = 1 if tokens <= 8 else 2
    return _chosen(row_tiles, group_tiles, columns, token_tiles, float32_out, row_scaled, shared)


def is_measured(
    row_tiles: int, group_tiles: int, columns: int, tokens: int, float32_out: bool, row_scaled: bool
) -> bool:
    """Return whether the configuration that ``small_m_plan`` gives is one of those measured."""
    key = SmallMKey(1 if tokens <= 8 else 2, row_tiles, group_tiles, columns)
    return _measured(key, float32_out, row_scaled) is not None


def _measured(key: SmallMKey, float32_out: bool, row_scaled: bool) -> SmallMConfiguration | None:
    """Return the configuration that was measured, or None.

    All were measured with bfloat16 results; other kinds may not have enough registers for one.
    """
    configuration: SmallMConfiguration | None = tuned().plan_of(key)
    if configuration is None or float32_out or (row_scaled and configuration.ctas == 1):
        return None
    return configuration


def fits(key: SmallMKey, configuration: SmallMConfiguration) -> bool:
    """Return whether a kernel can have a configuration for a key, and hold it on an SM."""
    if key.token_tiles > 2 or key.columns % 64 or key.row_tiles % key.group_tiles:
        return False
    one_input = key.group_tiles == key.row_tiles
    tiles, rest = divmod(key.columns // 64, configuration.ctas)
    whole = one_input or key.group_tiles % configuration.warps == 0
    if configuration.ctas not in _CTAS or rest or not whole or configuration.warps > _MOST_WARPS:
        return False
    if configuration.rounds > 2 or (configuration.rounds == 2 and configuration.ctas == 1):
        return False
    if configuration.stages > tiles:
        return False
    if configuration.ring:
        shaped = configuration.ctas > 1 and configuration.rounds == 1
        registers = _OTHER_REGISTERS
    else:
        shaped = configuration.rounds == 2 or tiles % configuration.stages == 0
        registers = _OTHER_REGISTERS + 6 * configuration.stages * configuration.rounds
    plan = plan_of(configuration, key.columns, (key.token_tiles, False, False))
    fitting = plan.threads * registers <= _REGISTER_FILE and registers <= _THREAD_REGISTERS
    return shaped and fitting and plan.shared_bytes <= _HOPPER_SHARED


def configuration_of(plan: SmallMPlan) -> SmallMConfiguration:
    """Return the configuration of a plan, as a data file has it."""
    shape = (plan.ctas, plan.warps, plan.stages, plan.rounds)
    return SmallMConfiguration(*shape, ring=isinstance(plan, SmallMRingPlan))


def plan_of(
    measured: SmallMConfiguration, columns: int, kind: tuple[int, bool, bool]
) -> SmallMPlan:
    """Return the plan of a measured configuration; ``kind``: token tiles, float32, row scales."""
    shape = (columns, measured.ctas, measured.warps, *kind, measured.stages)
    if measured.ring:
        return SmallMRingPlan(*shape)
    return SmallMPlan(*shape, rounds=measured.rounds)


@cached
def _chosen(
    row_tiles: int,
    group_tiles: int,
    columns: int,
    token_tiles: int,
    float32_out: bool,
    row_scaled: bool,
    shared: int,
) -> SmallMPlan | None:
    kind = (token_tiles, float32_out, row_scaled)
    measured = _measured(
        SmallMKey(token_tiles, row_tiles, group_tiles, columns), float32_out, row_scaled
    )
    if measured is not None:
        plan = plan_of(measured, columns, kind)
        if plan.shared_bytes <= shared:
            return plan
    one_input = group_tiles == row_tiles
    warps = next(w for w in range(8, 0, -1) if one_input or group_tiles % w == 0)
    stage_counts = (7, 6, 5, 4, 3, 2, 1) if token_tiles == 1 else (4, 3, 2, 1)
    fitting = []
    for ctas in _CTAS:
        tiles = columns // 64 // ctas
        if columns // 64 % ctas:
            continue
        most = stage_counts[0] if ctas > 1 else 3 if float32_out else 4
        stages = next(n for n in stage_counts if n <= most and tiles % n == 0)
        plan = SmallMPlan(columns, ctas, warps, token_tiles, float32_out, row_scaled, stages)
        if plan.shared_bytes <= min(shared, _SHARED_LIMIT):
            fitting.append(plan)
    enough = tuned().costs.gemm_small_m.enough_warps
    wide = [plan for plan in fitting if row_tiles * plan.ctas >= enough]
    return wide[0] if wide else fitting[-1] if fitting else None
