"""Which configuration of the kernel in ``few`` a product takes; needs no compiler."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from dsv4.cute.runtime.kernel_abi import Float32, Int32, Int64, KernelAbi, Pointer

TOKENS = 16  # of one launch
_PARTIAL = 512
_REGISTER_FILE = 1 << 16  # of an SM
_REGISTERS_BESIDE = 46  # of a thread, beside the weights that are ahead
_ENOUGH_WARPS = 1024  # about two of each quarter of an SM
RING_TILE = 32 * (16 + 8)  # bytes of a tile of 16 x 64 weights in a ring
_PRIMED = 8
_HALF = 112 * 1024  # of an SM's shared memory
_SHARED_ROOM = 100 * 1024  # two blocks of an SM, so that the next kernel's first loads run early
# Blocks, warps, depth and, where it is 2, rounds that a search on an H200 found the fastest,
# bfloat16 results, by tiles of tokens, row tiles, of them in a group, and columns: the matrices of
# Pro, then of Flash.
_MEASURED = {
    (1, 4096, 4096, 1536): (1, 16, 4),
    (1, 448, 448, 16384): (4, 16, 6, 2),
    (1, 384, 384, 7168): (4, 14, 4, 2),
    (1, 448, 448, 3072): (4, 15, 4),
    (1, 128, 128, 7168): (8, 6, 7),
    (1, 1024, 64, 4096): (2, 16, 5, 2),
    (1, 512, 512, 1536): (4, 10, 6),
    (2, 4096, 4096, 1536): (1, 16, 4),
    (2, 448, 448, 16384): (4, 16, 4),
    (2, 384, 384, 7168): (4, 14, 4),
    (2, 448, 448, 3072): (4, 16, 3),
    (2, 128, 128, 7168): (8, 9, 7),
    (2, 1024, 64, 4096): (2, 16, 4),
    (2, 512, 512, 1536): (2, 8, 4),
    (1, 2048, 2048, 1024): (1, 16, 4),
    (1, 256, 256, 8192): (8, 18, 4),
    (1, 256, 256, 4096): (8, 4, 8),
    (1, 96, 96, 4096): (8, 4, 8),
    (1, 512, 512, 1024): (2, 11, 8),
    (2, 2048, 2048, 1024): (1, 16, 4),
    (2, 256, 256, 8192): (8, 18, 4, 2),
    (2, 256, 256, 4096): (8, 10, 4),
    (2, 256, 256, 2048): (8, 18, 4),
    (2, 96, 96, 4096): (8, 7, 4),
    (2, 512, 512, 1024): (2, 12, 4),
}
# Blocks, warps and depth where the kernel with rings was found faster than the other.
_RINGS = {
    (1, 512, 64, 4096): (2, 8, 16),
    (2, 512, 64, 4096): (2, 8, 8),
    (1, 256, 256, 2048): (8, 9, 4),
}


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
class FewPlan:
    """One configuration of the kernel.

    Attributes:
        columns: K.
        blocks: Blocks of a cluster, 1 to 8; ``columns / 64`` is a multiple of it.
        warps: Warps of a block.
        token_tiles: Tiles of 8 tokens.
        float32_out: Whether the result is float32, else bfloat16.
        row_scaled: Whether every token has a scale of its own (quantised activations).
        depth: Tiles of 64 columns that are loaded ahead into registers, six each; a divisor of
            ``tiles`` where ``rounds`` is 1.
        swiglu: Whether rows are gate and up in turn, and the result is their SwiGLU.
        rounds: 1 if a tile's registers are loaded anew after its product. 2 if all ``depth`` tiles
            are asked for, into other registers, before the products of the ``depth`` before; then
            ``blocks`` is above 1.
    """

    columns: int
    blocks: int
    warps: int
    token_tiles: int
    float32_out: bool
    row_scaled: bool
    depth: int
    swiglu: bool = False
    rounds: int = 1

    @property
    def kernel(self) -> str:
        """Where the kernel's class is."""
        return "dsv4.cute.sm90.few:FewKernel"

    @property
    def for_family(self) -> bool:
        """Whether one image is for all of Blackwell: its code is the same for each of them."""
        return True

    @property
    def tiles(self) -> int:
        """Tiles of 64 columns of a block's part of K."""
        return self.columns // 64 // self.blocks

    @property
    def x_row_bytes(self) -> int:
        """Bytes from one token's part of X to the next in shared memory."""
        return self.tiles * 128 + 16

    @property
    def x_bytes(self) -> int:
        """Bytes of the block's part of X."""
        return self.token_tiles * 8 * self.x_row_bytes

    @property
    def chains(self) -> int:
        """Sums that a warp keeps: two of one tile of tokens, so that products can overlap."""
        return max(2, self.token_tiles)

    @property
    def partial_bytes(self) -> int:
        """Bytes of a warp's sums."""
        return _PARTIAL * self.token_tiles

    @property
    def parts_bytes(self) -> int:
        """Room for the sums that other blocks, and this one, send to this one."""
        return 0 if self.blocks == 1 else (self.warps + self.blocks) * self.partial_bytes

    @property
    def room_bytes(self) -> int:
        """Room in which a warp turns its results."""
        return self.partial_bytes

    @property
    def turned_bytes(self) -> int:
        """The warps' rooms."""
        return self.warps * self.room_bytes

    @property
    def resident(self) -> int:
        """Blocks that an SM must hold at once, which bounds the registers of a thread.

        Two, so that the next kernel's blocks begin beside this one's. The operands of 16 tokens
        need too many registers for that, as do float32 results, scales of tokens where the next
        row tile's weights are loaded beside results, and many tiles ahead.
        """
        wide = self.float32_out or (self.row_scaled and self.blocks == 1)
        registers = _REGISTERS_BESIDE + 6 * self.depth * self.rounds
        fits = 2 * self.threads * registers <= _REGISTER_FILE
        return 2 if self.token_tiles == 1 and self.warps <= 12 and fits and not wide else 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.x_bytes + self.parts_bytes + self.turned_bytes + 8 * (self.warps + 3)


@dataclass(frozen=True)
class FewRingPlan(FewPlan):
    """One configuration of the kernel in ``few_ring``: ``blocks`` above 1, ``rounds`` 1.

    ``depth`` is how many tiles a warp's ring has, at most ``tiles``.
    """

    @property
    def kernel(self) -> str:
        """Where the kernel's class is."""
        return "dsv4.cute.sm90.few_ring:FewRingKernel"

    @property
    def primed(self) -> int:
        """Tiles that are asked for before X, which would wait for more."""
        return min(self.depth, _PRIMED)

    @property
    def room_bytes(self) -> int:
        """A warp's ring, in which it turns its results afterwards."""
        return max(self.partial_bytes, self.depth * RING_TILE)

    @property
    def resident(self) -> int:
        """Blocks that an SM must hold at once: two where they fit, which takes 64 registers."""
        fits = self.token_tiles == 1 and self.warps <= 16 and self.shared_bytes <= _HALF
        return 2 if fits and not self.float32_out else 1


def few_plan(
    row_tiles: int, group_tiles: int, columns: int, tokens: int, float32_out: bool, row_scaled: bool
) -> FewPlan | None:
    """The configuration for up to 16 tokens, or None if there is none.

    It depends on the weight's shape and on whether there are more than 8 tokens: what was measured
    as the best, else by rule. As few blocks as make enough warps share K, because each part's sums
    travel; 8 warps, two blocks at a time, leave 128 registers a thread.

    Args:
        row_tiles: N / 16, all groups.
        group_tiles: Row tiles that share an input.
        columns: K, a multiple of 64.
        tokens: 1 to 16.
        float32_out: Whether the result is float32.
        row_scaled: Whether every token has a scale.
    """
    token_tiles = 1 if tokens <= 8 else 2
    return _chosen(row_tiles, group_tiles, columns, token_tiles, float32_out, row_scaled)


def measured(
    row_tiles: int, group_tiles: int, columns: int, tokens: int, float32_out: bool, row_scaled: bool
) -> bool:
    """Whether the configuration that ``few_plan`` gives is one of those measured."""
    key = (1 if tokens <= 8 else 2, row_tiles, group_tiles, columns)
    found = _RINGS.get(key) or _MEASURED.get(key)
    return found is not None and _holds(found[0], float32_out, row_scaled)


def _holds(blocks: int, float32_out: bool, row_scaled: bool) -> bool:
    """Whether what was measured with bfloat16 results has the registers for others."""
    return not float32_out and not (row_scaled and blocks == 1)


@functools.cache
def _chosen(
    row_tiles: int,
    group_tiles: int,
    columns: int,
    token_tiles: int,
    float32_out: bool,
    row_scaled: bool,
) -> FewPlan | None:
    key = (token_tiles, row_tiles, group_tiles, columns)
    kind = (token_tiles, float32_out, row_scaled)
    ring = _RINGS.get(key)
    if ring is not None and _holds(ring[0], float32_out, row_scaled):
        blocks, warps, depth = ring
        return FewRingPlan(columns, blocks, warps, *kind, depth)
    found = _MEASURED.get(key)
    if found is not None and _holds(found[0], float32_out, row_scaled):
        blocks, warps, depth, rounds = (*found, 1)[:4]
        return FewPlan(columns, blocks, warps, *kind, depth, rounds=rounds)
    one_input = group_tiles == row_tiles
    warps = next(w for w in range(8, 0, -1) if one_input or group_tiles % w == 0)
    depths = (7, 6, 5, 4, 3, 2, 1) if token_tiles == 1 else (4, 3, 2, 1)
    fitting = []
    for blocks in (1, 2, 4, 8):
        tiles = columns // 64 // blocks
        if columns // 64 % blocks:
            continue
        most = depths[0] if blocks > 1 else 3 if float32_out else 4
        depth = next(n for n in depths if n <= most and tiles % n == 0)
        plan = FewPlan(columns, blocks, warps, token_tiles, float32_out, row_scaled, depth)
        if plan.shared_bytes <= _SHARED_ROOM:
            fitting.append(plan)
    wide = [plan for plan in fitting if row_tiles * plan.blocks >= _ENOUGH_WARPS]
    return wide[0] if wide else fitting[-1] if fitting else None
