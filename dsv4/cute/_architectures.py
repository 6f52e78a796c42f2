"""The GPUs that there are CuTeDSL kernels for."""

from __future__ import annotations

HOPPER = "sm_90a"
# Compute capability to what a kernel is compiled for.
ARCHITECTURES = {(9, 0): HOPPER, (10, 0): "sm_100a", (10, 3): "sm_103a"}
