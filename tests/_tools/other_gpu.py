"""Triton's launches for a GPU that need not be there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from dsv4.compilation.target import PROCESSORS
from dsv4.cute.runtime.architectures import EVERY_ARCHITECTURE
from dsv4.triton._runtime import launch_options


class _Driver:
    """The answers of a driver that Triton asks for before it launches."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        # One number per architecture, because Triton keeps what it compiled by device.
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


def replace_launches(
    arch: int, run: Callable[..., Any], processors: int | None = None
) -> tuple[int, int]:
    """Let launches of this process, to its end, be for another GPU; return its capability.

    Args:
        arch: Compute capability times 10.
        run: Takes the place of ``JITFunction.run``.
        processors: SMs of the GPU; None: those of the architecture's usual one.
    """
    capability = divmod(arch, 10)
    count = PROCESSORS[EVERY_ARCHITECTURE[capability]] if processors is None else processors
    triton.runtime.driver.set_active(_Driver(arch))
    JITFunction.run = run
    launch_options.sm_count = lambda device: count
    launch_options.capability = lambda tensor: capability
    return capability
