"""Which configuration of the kernel in ``many`` a product takes; needs no compiler."""

from __future__ import annotations

from dataclasses import dataclass

WARPGROUPS = 2  # that multiply; their rows are 64 ``row_repeat`` each
_SHARED_ROOM = 220 * 1024
_MOST_STAGES = 12
LINE = 144  # bytes from one token's 64 rows to the next where results are turned, padded


@dataclass(frozen=True)
class ManyPlan:
    """One configuration of the kernel.

    Attributes:
        columns: K; ``columns / 64`` is a multiple of ``blocks depth``.
        token_block: Tokens of a tile, a multiple of 8 ``share`` and of 8 ``parts``, at most 256.
        row_repeat: Sets of 64 rows of a warpgroup, 1 or 2.
        parts: Blocks of a cluster that share K.
        share: Blocks of a cluster that share X: neighbouring rows. 1 where ``parts`` is not 1.
        depth: Blocks of 64 columns that are loaded ahead into registers, six words each; even
            where ``row_repeat`` is 1.
        float32_out: Whether the result is float32, else bfloat16.
        row_scaled: Whether every token has a scale of its own (quantised activations).
    """

    columns: int
    token_block: int
    row_repeat: int
    parts: int
    share: int
    depth: int
    float32_out: bool
    row_scaled: bool

    @property
    def kernel(self) -> str:
        """Where the kernel's class is."""
        return "dsv4.cute.sm90.many:ManyKernel"

    @property
    def blocks(self) -> int:
        """Blocks of a cluster."""
        return self.parts * self.share

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return 64 * WARPGROUPS * self.row_repeat

    @property
    def steps(self) -> int:
        """Blocks of 64 columns of a block's part of K."""
        return self.columns // 64 // self.parts

    @property
    def x_bytes(self) -> int:
        """Bytes of one stage of X."""
        return self.token_block * 128

    @property
    def turned_bytes(self) -> int:
        """Room in which both warpgroups turn 64 tokens of their results."""
        return WARPGROUPS * min(64, self.token_block) * LINE

    @property
    def stages(self) -> int:
        """Stages of X; the sums of a block's part of K lie in the same room afterwards."""
        most = (_SHARED_ROOM - self.turned_bytes) // self.x_bytes
        sums = self.token_block * self.rows * 4 if self.parts > 1 else 0
        return min(most, max(_MOST_STAGES, -(-sums // self.x_bytes)))

    @property
    def threads(self) -> int:
        """Threads of a block: those that multiply and one warpgroup that copies."""
        return 128 * (WARPGROUPS + 1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block; 1024 to begin at a multiple of it."""
        return 1024 + self.stages * (self.x_bytes + 16) + self.turned_bytes
