"""A GPU that a model's steps are to run on, which need not be there."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dsv4.cute.runtime.architectures import EVERY_ARCHITECTURE, HOPPER
from dsv4.cute.sm90 import tuned
from dsv4.cute.sm90.tuned_records import TunedData

# SMs of an A100, A40, L40S, H200, B200, B300 (assumed), RTX PRO 6000 and GB10. They decide how work
# is split.
PROCESSORS = {
    "sm_80": 108,
    "sm_86": 84,
    "sm_89": 142,
    "sm_90a": 132,
    "sm_100a": 148,
    "sm_103a": 148,
    "sm_120a": 188,
    "sm_121a": 48,
}


@dataclass(frozen=True)
class Target:
    """A GPU that steps are to run on.

    Attributes:
        arch: A value of ``EVERY_ARCHITECTURE``.
        processors: Its SMs, which decide how work is split.
        plans: Figures by which plans of CuTeDSL kernels are chosen; None: those that Hopper GPUs
            have by default.
    """

    arch: str
    processors: int = 0
    plans: TunedData | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, device: torch.device, arch: str) -> Target:
        """A GPU of this machine."""
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        own = tuned.tuned() if arch == HOPPER else None
        is_usual = own is None or own.digest == tuned.resolve(None).digest
        return cls(arch, processors, None if is_usual else own)

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability."""
        return next(n for n, name in EVERY_ARCHITECTURE.items() if name == self.arch)

    @property
    def sms(self) -> int:
        """The number of SMs, by default that of the architecture's GPU that was measured."""
        return self.processors or PROCESSORS[self.arch]
