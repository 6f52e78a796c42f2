"""The GPUs that there are CuTeDSL kernels for."""

from __future__ import annotations

HOPPER = "sm_90a"
# Compute capability to what a kernel is compiled for.
ARCHITECTURES = {(9, 0): HOPPER, (10, 0): "sm_100a", (10, 3): "sm_103a"}
BLACKWELL = ((10, 0), (10, 3))
# What runs on both of Blackwell's, of kernels that use no instruction of one of them alone.
FAMILIES = {"sm_100a": "sm_100f", "sm_103a": "sm_100f"}
