"""How kernels of attention are compiled in which a cluster has a token and a tile of heads."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64


class ClusterLaunch:
    """A kernel with ``kernel_``, whose arguments ``NarrowKernel.kernel_`` describes, and a plan."""

    blocks: int
    threads: int
    shared_bytes: int
    kernel_: Any

    def compile(self, options: str) -> Any:
        """Compile with CuTeDSL; every argument is fixed in type, none in value."""
        return cute.compile(
            self,
            *[Int64(0)] * 9,
            *[Int64(8)] * 4,
            *[Int32(1)] * 6,
            Float32(1.0),
            CUstream(0),
            options=options,
        )

    @cute.jit
    def __call__(
        self,
        q: Int64,
        window: Int64,
        window_slots: Int64,
        compressed: Int64,
        compressed_slots: Int64,
        sink: Int64,
        out: Int64,
        cos: Int64,
        sin: Int64,
        token_stride: Int64,
        head_stride: Int64,
        window_stride: Int64,
        compressed_stride: Int64,
        width: Int32,
        second_width: Int32,
        page_shift: Int32,
        second_shift: Int32,
        heads: Int32,
        tiles: Int32,
        scale: Float32,
        stream: CUstream,
    ) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute`` launches the cubin itself."""
        self.kernel_(
            q, window, window_slots, compressed, compressed_slots, sink, out, cos, sin,
            token_stride, head_stride, window_stride, compressed_stride, width, second_width,
            page_shift, second_shift, heads, tiles, scale,
        ).launch(
            grid=[self.blocks, 1, 1],
            block=[self.threads, 1, 1],
            smem=self.shared_bytes,
            stream=stream,
            cluster=[self.blocks, 1, 1],
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
        )  # fmt: skip
