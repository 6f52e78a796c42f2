"""Convert NVFP4 weights in fragments, exact in E4M3, to E4M3 for TMA copies.

Tiling and ownership. A CTA converts 16 rows and up to ``k_blocks`` blocks of 128 columns. Two warps
share a block: one has rows 0 to 3 and 8 to 11, the other one has the other rows. Lane ``8 r + p``
has 32 codes: piece p of the lines of rows r and r + 8. It loads 16 bytes and stores 16 bytes twice;
eight lanes fill a line. A warp has ``pieces`` blocks, and loads all of them before it converts one.

Columns of the result are in fragment order (``dsv4.quant.fragments.fragment_columns``), like the
columns of X.

Dependencies. The kernel reads and writes nothing before griddepcontrol.wait, because the preceding
kernel may read the result's memory.

Numerics. Results equal ``dsv4.quant.exact_fp8.to_e4m3`` bit for bit. The GEMM applies the power of
two of each row to its results.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int64, Uint32

from dsv4.cute.device import exact_fp8, ptx
from dsv4.cute.device.kernel import PlannedKernel
from dsv4.cute.sm90.e4m3_converted_plan import CONVERT_ABI, ConvertArgs, ConvertE4m3Plan

Number = Any  # of Python or of the DSL


class ConvertE4m3Kernel(PlannedKernel):
    """See the module."""

    abi = CONVERT_ABI
    plan: ConvertE4m3Plan

    @cute.jit
    def __call__(self, args: ConvertArgs, stream: CUstream) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute`` launches the cubin itself."""
        self.kernel(args).launch(
            grid=[1, 1, 1],
            block=[self.plan.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, args: ConvertArgs) -> None:
        """See the module."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane, warp = thread % 32, thread // 32
        tile, chunk = block // args.chunks, block % args.chunks
        row, piece = warp % 2 * 4 + lane // 8, lane % 8
        first = chunk * self.plan.k_blocks + warp // 2 * self.plan.pieces
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        exponents = []
        for h in cutlass.range_constexpr(2):
            at = args.row_exponent + Int64(tile * 16 + row + 8 * h)
            exponents.append(exact_fp8.load_row_exponent(at))
        biases = exact_fp8.row_biases(exponents[0], exponents[1])
        opaque_16 = Uint32(args.opaque_16)
        # Past the last block, load its piece again.
        blocks = [cutlass.min(first + n, args.k_blocks - 1) for n in range(self.plan.pieces)]
        loaded = []
        for n in cutlass.range_constexpr(self.plan.pieces):
            codes, scales = sources(tile, blocks[n], args.k_blocks, row, piece)
            loaded.append(
                (
                    ptx.load_streaming(args.codes + codes, 4),
                    ptx.load_streaming(args.scales + scales, 2),
                )
            )
        for n in cutlass.range_constexpr(self.plan.pieces):
            if first + n < args.k_blocks:
                lines = exact_fp8.dequantized_lines(*loaded[n], biases, opaque_16)
                for h in cutlass.range_constexpr(2):
                    to = target(tile, blocks[n], args.k_blocks, row + 8 * h, piece)
                    ptx.store_global4(args.out + to, lines[h])


def sources(
    tile: Number, k_block: Number, k_blocks: Number, row: Number, piece: Number
) -> tuple[Number, Number]:
    """Offsets in bytes of a lane's codes, and of its block scales.

    Args:
        tile: Row tile.
        k_block: Block of 128 columns.
        k_blocks: How many there are.
        row: Row of the tile, 0 to 7; the codes belong to this row and to row + 8.
        piece: Piece of 16 bytes of the line of 128.
    """
    # Piece 2 q + u: the codes of lane 4 row + q of 64 columns u.
    fragment = Int64(tile * k_blocks * 2 + k_block * 2 + piece % 2)
    return fragment * 512 + (row * 4 + piece // 2) * 16, fragment * 64 + row * 8


def target(tile: Number, k_block: Number, k_blocks: Number, row: Number, piece: Number) -> Number:
    """Offset in bytes of 16 results; see ``sources``."""
    return (Int64(tile * 16 + row) * k_blocks + k_block) * 128 + piece * 16
