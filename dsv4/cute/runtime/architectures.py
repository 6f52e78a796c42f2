"""GPU architectures for which this package has kernels."""

from __future__ import annotations

from dsv4.device import shared_memory

HOPPER = "sm_90a"
# Compute capability, and the architecture for which CuTeDSL kernels are compiled.
ARCHITECTURES = {
    (9, 0): HOPPER,
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (12, 0): "sm_120a",
    (12, 1): "sm_121a",
}
BLACKWELL = ((10, 0), (10, 3))  # data-centre GPUs: tcgen05, and as much shared memory as Hopper
BLACKWELL_NAMES = tuple(ARCHITECTURES[capability] for capability in BLACKWELL)
# Architectures that run on two GPUs, for kernels without instructions of only one of them.
FAMILIES = {
    "sm_100a": "sm_100f",
    "sm_103a": "sm_100f",
    "sm_120a": "sm_120f",
    "sm_121a": "sm_120f",
}
# GPUs that have only Triton kernels, and all GPUs.
TRITON_ONLY = {(8, 0): "sm_80", (8, 6): "sm_86", (8, 9): "sm_89"}
EVERY_ARCHITECTURE = {**TRITON_ONLY, **ARCHITECTURES}


def shared_limit(arch: str) -> int:
    """Bytes of shared memory that a CTA can have on a value of ``EVERY_ARCHITECTURE``."""
    capability = next(number for number, name in EVERY_ARCHITECTURE.items() if name == arch)
    return shared_memory(capability)
