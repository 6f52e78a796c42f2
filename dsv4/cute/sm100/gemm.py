"""NVFP4 GEMM on Blackwell's tensor cores, ``tcgen05.mma`` with block scales.

``out[t, n] = sum_k x[t, k] w[n, k]`` with 128 rows of the weight as the MMA's left operand, or 256
rows of two CTAs, and 64 to 256 tokens as right operand. Small M fills the instruction, too, and a
row's global scale belongs to a lane.

Tiling and ownership. A cluster computes tiles of ``plan.rows`` rows and ``plan.token_block``
tokens, one after another; clusters are persistent. Warp roles of a CTA:

* warps 0 to 3: the epilogue (``gemm_epilogue``). Warp 0 also allocates and frees TMEM.
* warp 4: MMAs (``gemm_mma``), one thread of the leader CTA for the whole cluster.
* warp 5: TMA copies (``gemm_copies``), one lane; it also makes the mbarriers.

Of two CTAs that multiply together (``cta_group`` 2) each holds its own 128 rows, half of the
tokens' codes, and all tokens' scales; each stores the results of its rows. Or the CTAs of a cluster
share the K of one tile of 64 tokens, because few tokens have fewer tiles than a GPU has SMs: of
2048 x 7168 there are 16 tiles for the 148 SMs of a B200.

Pipeline. A ring of ``plan.stages`` stages of 256 columns of K (``gemm_pipeline``) between the copy
warp and the MMA warp; two accumulators in TMEM between the MMA warp and the epilogue, which stores
one tile while the next is computed. The weights of the first stages are copied before
griddepcontrol.wait.

Barriers: mbarriers as in ``gemm_pipeline.Barriers``; a barrier of the whole cluster after they are
made and TMEM is allocated, and one before TMEM is freed, because commits and arrivals of one CTA
reach the other.

Numerics. Accumulators are float32; the tensor core applies block scales, the epilogue global ones.
The bits of a token depend on the plan, not on the other tokens.

Tests run this source on the CPU (``tests/blackwell_emulator.py``) and inspect its machine code. It
never ran on a GPU: nothing here is measured.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Uint32
from cutlass.cute.nvgpu import cpasync

from dsv4.cute.device import ptx
from dsv4.cute.device.tile_walk import TileOrder, Walk
from dsv4.cute.sm100 import tcgen05
from dsv4.cute.sm100.gemm_copies import Tcgen05Copies, fake_codes, fake_scales
from dsv4.cute.sm100.gemm_epilogue import Output, Tcgen05Epilogue
from dsv4.cute.sm100.gemm_mma import Tcgen05Mma
from dsv4.cute.sm100.gemm_pipeline import Grid, KRange, Thread
from dsv4.cute.sm100.gemm_plan import (
    COPY_WARP,
    MMA_WARP,
    ROWS,
    TCGEN05_ABI,
    Tcgen05Args,
    Tcgen05Tma,
)


class Tcgen05Kernel(Tcgen05Copies, Tcgen05Mma, Tcgen05Epilogue):
    """The kernel of one configuration."""

    abi = TCGEN05_ABI

    def compile(self, options: str) -> Any:
        """Compile with CuTeDSL; every argument is fixed in type, none in value."""
        operands = (fake_codes(), fake_scales(), fake_codes(), fake_scales())
        return cute.compile(self, *operands, self.abi.placeholders(), CUstream(0), options=options)

    @cute.jit
    def __call__(
        self,
        codes: cute.Tensor,
        scales: cute.Tensor,
        x_codes: cute.Tensor,
        x_scales: cute.Tensor,
        args: Tcgen05Args,
        stream: CUstream,
    ) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute`` launches the cubin itself."""
        tma = Tcgen05Tma(
            row_codes=self._code_operand(codes, ROWS),
            row_scales=self._scale_operand(scales, (1, 4)),
            token_codes=self._code_operand(x_codes, self.plan.cta_tokens),
            token_scales=self._scale_operand(
                x_scales, self.plan.token_scale_box, multicast=self.plan.multicasts_scales
            ),
        )
        self._launch(self.kernel(tma, args), stream)

    @cute.kernel
    def kernel(self, tma: Tcgen05Tma, args: Tcgen05Args) -> None:
        """Compute the tiles of a cluster, one after another; see the module.

        Args:
            tma: The operands.
            args: The scalars.
        """
        me, grid = self._thread_and_grid()
        order = TileOrder(args.token_tiles, args.token_span, args.row_blocks)
        walk = Walk(*self._clusters(grid), args.token_tiles * args.row_blocks, order)

        memory = self._allocate(cutlass.memory.SmemAllocator())
        stages_at, barriers = Uint32(memory.stages.toint()), self._barriers(memory)
        # At once: the next kernel's CTAs start where SMs are free, and wait for this kernel's end
        # before they read its results.
        cute.arch.griddepcontrol_launch_dependents()

        if me.warp == COPY_WARP:
            for operand in tma:
                cpasync.prefetch_descriptor(operand.atom)
            self._make_barriers(barriers, me.lane)
        if me.warp == 0:
            tcgen05.allocate(memory.tmem, self.plan.tmem_columns, self.plan.cta_group)
        tcgen05.fence_before_sync()
        self._sync_cluster()
        tcgen05.fence_after_sync()
        tmem = Uint32(ptx.load_shared_int(memory.tmem))

        if me.warp == COPY_WARP:
            k_range = self._k_range(args.k_stages, me.split)
            self._copy(tma, memory, barriers, walk, k_range, args, me)
            self._sync_splits()
        elif me.warp == MMA_WARP:
            if me.rank == 0:
                k_stages = self._k_range(args.k_stages, me.split).stages
                self._multiply(stages_at, barriers, tmem, walk, k_stages)
            self._sync_splits()
        else:
            # The preceding kernel writes the tokens' global scales, and may still read ``out``.
            cute.arch.griddepcontrol_wait()
            output = Output(
                global_scale=args.global_scale,
                token_scale=args.token_scale,
                token_scale_stride=args.scale_tokens,
                out=args.out,
                lines=memory.lines,
            )
            self._store_tiles(barriers, stages_at, tmem, walk, output, args, me)
        tcgen05.fence_before_sync()
        self._sync_cluster()
        tcgen05.fence_after_sync()
        if me.warp == 0:
            tcgen05.free(tmem, self.plan.tmem_columns, self.plan.cta_group)

    def _thread_and_grid(self) -> tuple[Thread, Grid]:
        """Return the thread's role, and the CTA's place in the grid."""
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = thread % 32
        me = Thread(
            thread=thread,
            warp=cute.arch.make_warp_uniform(thread // 32),
            lane=lane,
            rank=cta % self.plan.cta_group,
            split=cta % self.plan.k_splits,
        )
        return me, Grid(cta, ctas)

    def _clusters(self, grid: Grid) -> tuple[Int32, Int32]:
        """This CTA's cluster, and the number of clusters."""
        return grid.cta // self.plan.ctas, grid.ctas // self.plan.ctas

    def _k_range(self, stages: Int32, split: Int32) -> KRange:
        """A CTA's part of K."""
        begin, end = self.plan.k_range(stages, split)
        return KRange(begin, end - begin)
