"""Queries, sinks and angles of a tile of heads, copied to shared memory by the consumer warps.

``attention`` and ``attention_columns`` share these functions; they differ in heads of a tile and
in threads that copy.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.device.kernel import PlannedKernel
from dsv4.cute.sm90.attention_args import AttentionArgs, ClusterAttentionArgs
from dsv4.cute.sm90.attention_plan import DIMS, ROPE
from dsv4.cute.sm90.attention_softmax import LOG2E


def address_of(tensor: cute.Tensor) -> Uint32:
    """Shared-memory address of a tensor."""
    pointer: Any = tensor.iterator
    return Uint32(pointer.toint())


class AttentionInput(PlannedKernel):
    """Device functions that copy what a tile of heads needs beside entries."""

    @property
    def tile_heads(self) -> int:
        """Heads of a tile."""
        raise NotImplementedError

    @property
    def consumers(self) -> int:
        """Threads that multiply, which copy the inputs."""
        raise NotImplementedError

    @cute.jit
    def _load_queries(
        self,
        args: AttentionArgs | ClusterAttentionArgs,
        to: Uint32,
        token: Int32,
        tile: Int32,
        thread: Int32,
    ) -> None:
        """All consumers: copy a tile of queries to shared memory, zeros beyond the last head.

        The copies are one group of ``cp.async``, which the caller waits for and fences.

        Args:
            args: Arguments of the kernel.
            to: Where the tile begins.
            token: Whose queries.
            tile: Number of the tile.
            thread: Thread of the consumers.
        """
        q = args.q + (Int64(token) * args.token_stride) * 2
        for i in cutlass.range_constexpr(self.tile_heads * DIMS // 8 // self.consumers):
            # Neighbouring threads have neighbouring chunks of 16 bytes of a head: coalesced.
            number = i * self.consumers + thread
            row, chunk = number // (DIMS // 8), number % (DIMS // 8)
            head = tile * self.tile_heads + row
            source = q + (Int64(head) * args.head_stride + chunk * 8) * 2
            # Layout K_SW128: columns of 64 dims, each with 128 bytes a head, chunks exchanged.
            column = chunk // 8 * (self.tile_heads * 128)
            address = column + row * 128 + ((chunk % 8) ^ (row % 8)) * 16
            ptx.async_copy16_or_zero(to + Uint32(address), source, Int32(head < args.heads) * 16)
        ptx.commit_async_copies()

    @cute.jit
    def _load_tables(
        self,
        args: AttentionArgs | ClusterAttentionArgs,
        sinks: Uint32,
        angles: Uint32,
        skipped: cutlass.Constexpr,
        token: Int32,
        first: Int32,
        thread: Int32,
    ) -> None:
        """All consumers: copy a tile's sinks and the token's angles, for the epilogue.

        Args:
            args: Arguments of the kernel.
            sinks: Where sinks go, as multiples of ``log2 e``.
            angles: Address ``skipped`` words before the 32 cosines and 32 sines.
            skipped: Words; not part of the address, so that it folds into offsets.
            token: Whose angles.
            first: First head of the tile.
            thread: Thread of the consumers.
        """
        if thread < self.tile_heads:
            # Heads beyond the last are not stored; they read the last one's sink.
            head = cutlass.min(first + thread, args.heads - 1)
            logit = ptx.load_global_float(args.sink + Int64(head) * 4) * Float32(LOG2E)
            ptx.store_shared_float(sinks + Uint32(thread * 4), logit)
        number = thread - self.tile_heads
        if (number >= 0) & (number < ROPE) & (args.cos != Int64(0)):
            table = args.cos
            if number >= ROPE // 2:
                table = args.sin
            angle = table + (Int64(token) * (ROPE // 2) + number % (ROPE // 2)) * 4
            address = angles + Uint32((skipped + number) * 4)
            ptx.store_shared_float(address, ptx.load_global_float(angle))
