"""GEMM with FP8 arithmetic and exact NVFP4 weights for large M.

``out[m, n] = sum_k x[m, k] w[n, k]`` as ``wgmma`` of E4M3 operands, both in shared memory: M of the
instruction is 64 tokens, N 128 rows of the weight, K 32 columns.

Tiling and ownership. A CTA computes tiles of ``token_block`` tokens and 128 rows of the weight, one
after another. Two of its warpgroups multiply, each every second block of 64 tokens by all 128 rows;
one or two dequantize weights; one copies. Dequantized weights are common to both MMA warpgroups, so
their cost is spread over all tokens of the tile. Tokens are the rows of accumulators because a lane
has two rows of each fragment, so two scales, and 32 columns.

Pipeline. The copy warp keeps a ring of ``stages`` stages of 128 columns full by TMA: X as E4M3
codes, packed codes and scales of the weight. The warps that dequantize read the latter and write
E4M3 to a ring of ``dequantized_stages`` stages, in the layout that ``wgmma`` reads (lines of 128
bytes, a row each, whose 16-byte pieces are exchanged by the row's number). A lane's codes of a row
and 64 columns become 16 consecutive bytes, so columns stand in *fragment order* there
(``dsv4.quant.fragments.fragment_columns``), and in X, too.

Barriers:

* ``full[stage]``: mbarrier with one arrival (with the expected bytes) and the bytes of a stage.
* ``empty[stage]``: mbarrier with an arrival of every MMA warp and of every warp that dequantizes.
* ``ready[stage]``: mbarrier with an arrival of every warp that dequantizes; its rows are written.
* ``free[stage]``: mbarrier with an arrival of every MMA warp that has read dequantized weights.
* ``sync_threads``, once: the mbarriers exist.

A warp that dequantizes waits for stage n + 1 and loads its first piece before it signals that stage
n is dequantized. This cannot deadlock: stage n + 1 needs only the MMAs of stages before n, because
the ring has two stages or more.

Factors of rows (global scale times power of two) are written to shared memory by the warps that
dequantize, before they signal the tile's first stage; there is room for those of all tiles that
these warps may be ahead.

Numerics. Operands are exact E4M3 numbers. The tensor cores sum 128 columns with the precision that
they have (about 14 bits below the largest term); see ``e4m3_tiles``. The bits of a token depend on
the plan, not on the other tokens. A NaN among the codes of X makes its token's results NaN, and no
other's.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Boolean, Int32, Uint32
from cutlass.cute.nvgpu import cpasync

from dsv4.cute.device import exact_fp8, ptx
from dsv4.cute.device.tile_walk import Walk
from dsv4.cute.sm90.e4m3_results import MMA_WARPS, Lane, ResultBuffers
from dsv4.cute.sm90.e4m3_tiles import E4m3Tiles, Position, Rings
from dsv4.cute.sm90.e4m3_walks import DenseTiles
from dsv4.cute.sm90.gemm_e4m3_plan import E4M3_ABI, K_BLOCK, ROWS, E4m3Tma
from dsv4.cute.sm90.wgmma_copies import fake_weights, fake_x

ROW_TILES = ROWS // 16

Piece = list[Uint32]  # a lane's 4 words of codes and 2 of scales of 16 rows and 64 columns


class E4m3Kernel(DenseTiles, E4m3Tiles):
    """The kernel of one configuration."""

    abi = E4M3_ABI

    def compile(self, options: str) -> Any:
        """Compile with CuTeDSL; every argument is fixed in type, none in value."""
        operands = (fake_x(), fake_weights(), fake_weights())
        return cute.compile(self, *operands, self.abi.placeholders(), CUstream(0), options=options)

    @cute.jit
    def __call__(
        self, x: cute.Tensor, codes: cute.Tensor, scales: cute.Tensor, args: Any, stream: CUstream
    ) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute`` launches the cubin itself.

        Args:
            x: E4M3 codes as pairs, ``[tokens, groups K / 2]``.
            codes: Packed codes, as words.
            scales: Packed block scales, as words.
            args: The scalars.
            stream: The driver's handle.
        """
        x_atom, x_tensor = self._x_tma(x)
        codes_atom, codes_tensor = self._weights_tma(codes, self.plan.code_bytes)
        scales_atom, scales_tensor = self._weights_tma(scales, self.plan.scale_bytes)
        tma = E4m3Tma(
            x_tma=x_atom,
            codes_tma=codes_atom,
            scales_tma=scales_atom,
            x_tensor=x_tensor,
            codes_tensor=codes_tensor,
            scales_tensor=scales_tensor,
        )
        self.kernel(tma, args).launch(
            grid=[1, 1, 1],
            block=[self.plan.threads, 1, 1],
            cluster=[1, 1, 1],
            smem=self.plan.shared_bytes,
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, tma: E4m3Tma, args: Any) -> None:
        """Multiply the tiles of a CTA, one after another; see the module."""
        thread, _, _ = cute.arch.thread_idx()
        me = Lane(thread, cute.arch.make_warp_uniform(thread // 32), thread % 32)
        smem = cutlass.memory.SmemAllocator()
        layout = self._layout(self.plan.token_block, self.plan.stages)
        shared_x = smem.allocate_tensor(
            BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner
        )
        layout = self._layout(ROWS, self.plan.dequantized_stages)
        shared_weights = smem.allocate_tensor(
            BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner
        )
        packed = smem.allocate_array(
            cutlass.Uint8, self.plan.stages * self.plan.weight_bytes, byte_alignment=128
        )
        other = smem.allocate_array(cutlass.Uint8, self.plan.other_bytes, byte_alignment=16)
        lines = Uint32(other.toint())
        first_results = lines + Uint32(self.plan.transpose_bytes)
        factors = first_results + Uint32(self.plan.first_result_bytes)
        buffers = ResultBuffers(lines, first_results, factors)
        table_at = factors + Uint32(self.plan.factor_slots * (ROWS * 4))
        full_at = smem.allocate_array(cutlass.Int64, self.plan.barriers)
        rings = self._rings(Uint32(full_at.toint()))
        if me.warp == 0:
            self._make_rings(rings, me.lane)
        walk = self._begin(table_at, args, me)

        copy_warp = MMA_WARPS + self.plan.dequant_warps
        if cutlass.const_expr(self.plan.dequant_warps % 4):  # noqa: SIM102
            # Copy and dequant warps of a warpgroup: they execute one setmaxnreg.
            if me.warp >= MMA_WARPS:
                cute.arch.setmaxregister_decrease(self.plan.dequant_registers)
        if me.warp >= copy_warp:
            if cutlass.const_expr(self.plan.dequant_warps % 4 == 0):
                cute.arch.setmaxregister_decrease(self.plan.copy_registers)
            if me.warp == copy_warp:
                self._copy(tma, shared_x, packed, full_at, rings, walk, args, me.lane)
            else:
                self._clear(walk, args, me.thread - 32 * (copy_warp + 1))
        elif me.warp >= MMA_WARPS:
            if cutlass.const_expr(self.plan.dequant_warps % 4 == 0):
                cute.arch.setmaxregister_decrease(self.plan.dequant_registers)
            to = Uint32(shared_weights.iterator.toint())
            self._dequantize(Uint32(packed.toint()), to, factors, rings, walk, args, me)
        else:
            cute.arch.setmaxregister_increase(self.plan.mma_registers)
            operands = self._mma_operands(shared_x, shared_weights)
            self._multiply(operands, buffers, rings, walk, args, me)

    # The copy warp.

    @cute.jit
    def _copy(
        self,
        tma: E4m3Tma,
        shared_x: cute.Tensor,
        packed: cute.Pointer,
        full_at: cute.Pointer,
        rings: Rings,
        walk: Walk,
        args: Any,
        lane: Int32,
    ) -> None:
        """One warp: keep the ring full, tile after tile."""
        cpasync.prefetch_descriptor(tma.x_tma)
        cpasync.prefetch_descriptor(tma.codes_tma)
        cpasync.prefetch_descriptor(tma.scales_tma)
        boxes = self.plan.token_block // self.plan.tma_tokens
        stages_of_x = cute.make_tensor(
            shared_x.iterator, self._layout(self.plan.tma_tokens, self.plan.stages * boxes).outer
        )
        number, position = walk.first, Position(Int32(0), Int32(1))
        while number < walk.total:
            tile = self._tile(number, walk, args)
            tokens = cute.domain_offset((tile.token, 0), tma.x_tensor)
            x_tiles = cute.local_tile(tokens, (self.plan.tma_tokens, 64), (None, None))
            x = self._partition(tma.x_tma, stages_of_x, x_tiles)
            # Boxes that have tokens of the tile; a dense tile is a single box.
            count = Int32(1)
            if cutlass.const_expr(boxes > 1):
                most = cutlass.min(tile.end - tile.token, self.plan.token_block)
                count = (most + (self.plan.tma_tokens - 1)) // self.plan.tma_tokens
            box_bytes = self.plan.tma_tokens * K_BLOCK
            for part in cutlass.range_constexpr(self.plan.row_parts):
                row_tile = (tile.expert * args.rows + tile.row) // 16 + part * (ROWS // 16)
                weights = self._weight_copies(tma, packed, row_tile)
                for k in cutlass.range(args.stages, unroll=1):
                    stage = position.stage
                    barrier = full_at + stage
                    ptx.mbarrier_wait(rings.empty + Uint32(stage * 8), position.parity)
                    if lane == 0:
                        ptx.mbarrier_arrive_expect_tx(
                            rings.full + Uint32(stage * 8),
                            count * box_bytes + self.plan.weight_bytes,
                        )
                    self._copy_weights(tma, weights, Int32(k), stage, barrier)
                    for box in cutlass.range(count, unroll=1):
                        cute.copy(
                            tma.x_tma,
                            x.source[(None, box, tile.input + k)],
                            x.to[(None, stage * boxes + box)],
                            tma_bar_ptr=barrier,
                        )
                    position = self._advanced(position, self.plan.stages)
            number += walk.stride

    # The warps that dequantize weights.

    @cute.jit
    def _dequantize(
        self,
        packed: Uint32,
        to: Uint32,
        factors: Uint32,
        rings: Rings,
        walk: Walk,
        args: Any,
        me: Lane,
    ) -> None:
        """``dequant_warps`` warps: dequantize the weights of every stage.

        A warp holds the next piece, also of the next stage, in registers while it dequantizes one.
        Without that 4096 x 8192 of 4096 tokens took 297 us instead of 273 (H200, 2026-11-28).

        Args:
            packed: Codes and scales of all stages.
            to: Dequantized weights of all stages.
            factors: Factors of rows.
            rings: mbarriers.
            walk: The CTA's tiles.
            args: The scalars.
            me: Who this is.
        """
        warp, lane = me.warp - MMA_WARPS, me.lane
        row, quarter = lane // 4, lane % 4
        tiles = ROW_TILES // self.plan.dequant_warps
        codes_from = packed + Uint32(warp * self.plan.code_bytes + lane * 16)
        scales_from = packed + Uint32(
            self.plan.cta_row_tiles * self.plan.code_bytes + warp * self.plan.scale_bytes + row * 8
        )
        # The first of the lane's two pieces of a line; the other one is its neighbour.
        to += Uint32((warp * 16 + row) * K_BLOCK) + Uint32(((2 * quarter) ^ row) * 16)
        opaque_16 = Uint32(args.opaque_16)
        number, slot = walk.first, Int32(0)
        position, target = Position(Int32(0), Int32(0)), Position(Int32(0), Int32(1))
        piece = self._next_piece(codes_from, scales_from, rings, position, number < walk.total)
        while number < walk.total:
            tile = self._tile(number, walk, args)
            is_last = number + walk.stride >= walk.total
            for part in cutlass.range_constexpr(self.plan.row_parts):
                first_row = tile.row + part * ROWS
                of_thread = me.thread % ROWS
                factor = self._factor(args, tile.expert, first_row + of_thread)
                ptx.store_shared_float(factors + Uint32(slot * (ROWS * 4) + of_thread * 4), factor)
                slot = self._next_slot(slot)
                biases = [
                    self._row_biases(
                        args,
                        tile.expert,
                        first_row + (warp + h * self.plan.dequant_warps) * 16 + row,
                    )
                    for h in range(tiles)
                ]
                for k in cutlass.range(args.stages, unroll=1):
                    following = self._advanced(position, self.plan.stages)
                    ptx.mbarrier_wait(rings.free + Uint32(target.stage * 8), target.parity)
                    there = to + Uint32(target.stage * self.plan.dequantized_bytes)
                    for n in cutlass.range_constexpr(2 * tiles):
                        current = piece
                        if cutlass.const_expr(n + 1 < 2 * tiles):
                            piece = self._load(codes_from, scales_from, position.stage, n + 1)
                        else:
                            more = not (
                                is_last and k + 1 == args.stages and part + 1 == self.plan.row_parts
                            )
                            piece = self._next_piece(
                                codes_from, scales_from, rings, following, more
                            )
                        self._write(current, there, biases[n // 2], opaque_16, n)
                    # Written by ordinary stores, read by wgmma.
                    ptx.fence_proxy_async_shared()
                    cute.arch.sync_warp()
                    if lane == 0:
                        ptx.mbarrier_arrive(rings.ready + Uint32(target.stage * 8))
                        ptx.mbarrier_arrive(rings.empty + Uint32(position.stage * 8))
                    position = following
                    target = self._advanced(target, self.plan.dequantized_stages)
            number += walk.stride

    @cute.jit
    def _next_piece(
        self,
        codes_from: Uint32,
        scales_from: Uint32,
        rings: Rings,
        position: Position,
        exists: Boolean,
    ) -> Piece:
        """Wait for a stage, if there is one, and load the lane's first piece of it."""
        if exists:
            ptx.mbarrier_wait(rings.full + Uint32(position.stage * 8), position.parity)
        return self._load(codes_from, scales_from, position.stage, 0)

    def _load(self, codes_from: Uint32, scales_from: Uint32, stage: Int32, n: int) -> Piece:
        """The lane's piece ``n`` of a stage: row tile ``n // 2`` of the warp's, column half."""
        skip, further = Uint32(stage * self.plan.weight_bytes), n // 2 * self.plan.dequant_warps
        codes = ptx.load_shared(codes_from + skip, 4, further * self.plan.code_bytes + n % 2 * 512)
        scales = ptx.load_shared(
            scales_from + skip, 2, further * self.plan.scale_bytes + n % 2 * 64
        )
        return [*codes, *scales]

    def _write(self, piece: Piece, to: Uint32, biases: Uint32, opaque_16: Uint32, n: int) -> None:
        """One warp: dequantize piece ``n`` of a stage."""
        lines: tuple[list[Uint32], list[Uint32]] = ([], [])
        for j in range(4):
            powers = exact_fp8.factors((piece[4], piece[5]), j, biases, opaque_16)
            words = exact_fp8.dequantized(piece[j], powers, opaque_16)
            for line_of_half, word in zip(lines, words, strict=True):
                line_of_half.append(word)
        # The second piece of 16 bytes is the first one's neighbour.
        at = to ^ Uint32(n % 2 * 16)
        for half, line_of_half in enumerate(lines):
            row = n // 2 * self.plan.dequant_warps * 16 + half * 8
            ptx.store_shared4(at, line_of_half, row * K_BLOCK)

    @cute.jit
    def _row_biases(self, args: Any, expert: Int32, row: Int32) -> Uint32:
        """``exact_fp8.row_biases`` of a lane's two rows, ``row`` and 8 further on."""
        exponents = []
        for h in cutlass.range_constexpr(2):
            exponents.append(self._row_exponent(args, expert, row + 8 * h))
        return exact_fp8.row_biases(exponents[0], exponents[1])
