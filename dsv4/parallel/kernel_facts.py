"""What decides which kernels a rank runs, and with that the bits of its results."""

from __future__ import annotations

from typing import Any

import torch

import dsv4
from dsv4.compilation.versions import Versions
from dsv4.cute.sm90.tuned import tuned
from dsv4.device import gpu_of
from dsv4.dispatch import requested_backend
from dsv4.parallel.agreement import digest


def kernel_facts(device: torch.device) -> dict[str, Any]:
    """Return facts that are equal on all ranks, by their names in messages.

    Where one differs, a rank's streams may have other bits, so that its router chooses other
    experts.
    """
    versions = Versions.current()
    gpu = gpu_of(torch.cuda.get_device_properties(device)) if device.type == "cuda" else None
    return {
        "the version of dsv4": dsv4.__version__,
        "the version of torch": torch.__version__,
        "the version of Triton": versions.triton,
        "the version of CuTeDSL": versions.cutedsl,
        "a hash of the kernels' sources": versions.sources[:16],
        "the GPU": gpu,
        "a hash of the figures of kernels' plans": digest(tuned()),
        "the requested backend": requested_backend(),
    }
