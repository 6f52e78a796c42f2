"""Launches of kernels in which a cluster has a token and a tile of 16 heads."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cuda.bindings.driver import CUstream

from dsv4.cute.device.kernel import PlannedKernel
from dsv4.cute.sm90.attention_args import CLUSTER_ATTENTION_ABI, ClusterAttentionArgs


class ClusterLaunch(PlannedKernel):
    """A kernel of ``ClusterAttentionArgs``, the CTAs of a cluster of which share an item."""

    abi = CLUSTER_ATTENTION_ABI
    kernel: Any

    @cute.jit
    def __call__(self, args: ClusterAttentionArgs, stream: CUstream) -> None:
        """Launch, for the compiler's sake; ``dsv4.cute.attention`` launches the cubin itself."""
        self._launch(self.kernel(args), stream, preferred_smem_carveout=100)
