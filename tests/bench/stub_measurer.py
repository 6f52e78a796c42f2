"""A measurer for child processes whose candidates say what they do; it imports no PyTorch."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

GOOD, WRONG, RAISES, CRASHES, HANGS = "good", "wrong", "raises", "crashes", "hangs"


@dataclass(frozen=True)
class StubCandidate:
    """A candidate.

    Attributes:
        number: Its number within its problem, and its time in microseconds.
        does: One of the constants of this module.
    """

    number: int
    does: str


@dataclass
class StubMeasurer:
    """The interface of ``dsv4.bench.tune.guarded_timer.Measurer``."""

    drawn: Any = field(default=None)

    def clusters(self) -> dict[int, int]:
        """Return a cluster of this process."""
        return {os.getpid(): 1}

    def draw(self, name: Any) -> None:
        """Keep the name of the problem."""
        self.drawn = name

    def us(self, name: Any, candidate: StubCandidate) -> tuple[float, str]:
        """Do what the candidate says."""
        assert self.drawn == name
        if candidate.does == HANGS:
            time.sleep(1000)
        if candidate.does == CRASHES:
            os._exit(3)
        if candidate.does == RAISES:
            raise RuntimeError("an illegal memory access was encountered\nfurther lines")
        if candidate.does == WRONG:
            return 0.0, "row 3 is off by 0.5"
        return float(candidate.number), ""


class GpuMeasurer(StubMeasurer):
    """Hangs and crashes by kernels of a GPU."""

    def us(self, name: Any, candidate: StubCandidate) -> tuple[float, str]:
        """Run a kernel that does what the candidate says."""
        import torch

        value = torch.full((64,), float(candidate.number), device="cuda")
        if candidate.does == HANGS:
            torch.cuda._sleep(1 << 60)
        if candidate.does == RAISES:  # an assertion of the kernel fails, which breaks the context
            value = value[torch.full((64,), 1 << 40, device="cuda")]
        return float(value.mean()), ""
