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
from cutlass import Boolean, Int32, Uint32

from dsv4.cute.device import exact_fp8, ptx
from dsv4.cute.device.tile_walk import Walk
from dsv4.cute.sm90.e4m3_copies import CtaMemory, E4m3Copies
from dsv4.cute.sm90.e4m3_results import MMA_WARPS, Lane, Tile
from dsv4.cute.sm90.e4m3_tiles import Position, Rings
from dsv4.cute.sm90.e4m3_walks import DenseTiles
from dsv4.cute.sm90.gemm_e4m3_plan import E4M3_ABI, K_BLOCK, ROWS, E4m3Tma
from dsv4.cute.sm90.wgmma_copies import WeightCopies, fake_weights, fake_x

ROW_TILES = ROWS // 16

Piece = list[Uint32]  # a lane's 4 words of codes and 2 of scales of 16 rows and 64 columns


class E4m3Kernel(DenseTiles, E4m3Copies):
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
        self._launch(self.kernel(tma, args), stream)

    @cute.kernel
    def kernel(self, tma: E4m3Tma, args: Any) -> None:
        """Multiply the tiles of a CTA, one after another; see the module."""
        me, memory = self._lane(), self._memory()
        if me.warp == 0:
            self._make_rings(memory.rings, me.lane)
        walk = self._begin(memory.table, args, me)

        copy_warp = MMA_WARPS + self.plan.dequant_warps
        if me.warp >= copy_warp:
            cute.arch.setmaxregister_decrease(self.plan.copy_registers)
            if me.warp == copy_warp:
                self._copy(tma, memory, walk, args, me.lane)
            else:
                self._clear(walk, args, me.thread - 32 * (copy_warp + 1))
        elif me.warp >= MMA_WARPS:
            cute.arch.setmaxregister_decrease(self.plan.dequant_registers)
            self._dequantize(memory, walk, args, me)
        else:
            cute.arch.setmaxregister_increase(self.plan.mma_registers)
            operands = self._mma_operands(memory.x, memory.weights)
            self._multiply(operands, memory.buffers, memory.rings, walk, args, me)

    def _tile_weights(
        self, tma: E4m3Tma, to: cute.Pointer, args: Any, tile: Tile, part: int
    ) -> WeightCopies:
        """The TMA copies of the packed weights of 128 rows of a tile."""
        row_tile = (tile.expert * args.rows + tile.row) // 16 + part * ROW_TILES
        return self._weight_copies(tma, to, row_tile)

    # The warps that dequantize weights.

    @cute.jit
    def _dequantize(self, memory: CtaMemory, walk: Walk, args: Any, me: Lane) -> None:
        """``dequant_warps`` warps: dequantize the weights of every stage.

        A warp holds the next piece, also of the next stage, in registers while it dequantizes one.
        Without that 4096 x 8192 of 4096 tokens took 297 us instead of 273 (H200, 2026-11-28).

        Args:
            memory: Shared memory.
            walk: The CTA's tiles.
            args: The scalars.
            me: Who this is.
        """
        packed, to = Uint32(memory.copied.toint()), Uint32(memory.weights.iterator.toint())
        factors, rings = memory.buffers.factors, memory.rings
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
            is_last = self._following(number, walk) >= walk.total
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
            number = self._following(number, walk)

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
        lines = exact_fp8.dequantized_lines(piece[:4], piece[4:], biases, opaque_16)
        # The second piece of 16 bytes is the first one's neighbour.
        at = to ^ Uint32(n % 2 * 16)
        for half, line in enumerate(lines):
            row = n // 2 * self.plan.dequant_warps * 16 + half * 8
            ptx.store_shared4(at, line, row * K_BLOCK)

    @cute.jit
    def _row_biases(self, args: Any, expert: Int32, row: Int32) -> Uint32:
        """``exact_fp8.row_biases`` of a lane's two rows, ``row`` and 8 further on."""
        exponents = []
        for h in cutlass.range_constexpr(2):
            exponents.append(self._row_exponent(args, expert, row + 8 * h))
        return exact_fp8.row_biases(exponents[0], exponents[1])
