"""The GPUs that there are kernels for."""

from __future__ import annotations

HOPPER = "sm_90a"
# Compute capability to what CuTeDSL kernels are compiled for.
ARCHITECTURES = {(9, 0): HOPPER, (10, 0): "sm_100a", (10, 3): "sm_103a"}
BLACKWELL = ((10, 0), (10, 3))
BLACKWELL_NAMES = tuple(ARCHITECTURES[capability] for capability in BLACKWELL)
# What runs on both of Blackwell's, of kernels that use no instruction of one of them alone.
FAMILIES = {"sm_100a": "sm_100f", "sm_103a": "sm_100f"}
# GPUs with Triton kernels alone, and all GPUs.
TRITON_ONLY = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 9): "sm_89",
    (12, 0): "sm_120a",
    (12, 1): "sm_121a",
}
EVERY_ARCHITECTURE = {**TRITON_ONLY, **ARCHITECTURES}
