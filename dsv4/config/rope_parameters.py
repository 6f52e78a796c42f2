"""A rotary table: its frequencies, with YaRN's for compressed layers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RopeParameters:
    """A rotary table: base, width and, for compressed layers, YaRN (specification, section 4.3).

    Attributes:
        theta: Base of the geometric sequence of frequencies.
        dim: Number of rotated dimensions R, even.
        factor: YaRN's interpolation factor, or None for plain RoPE.
        original_max_position: Positions seen before YaRN.
        beta_fast: Rotations above which a frequency is left alone.
        beta_slow: Rotations below which a frequency is divided by ``factor``.
    """

    theta: float
    dim: int = 64
    factor: float | None = None
    original_max_position: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise ValueError(f"RopeParameters: dim is {self.dim}, wanted an even number >= 2")
        if not 1 < self.theta < math.inf:
            raise ValueError(f"RopeParameters: theta is {self.theta}, wanted a number > 1")
        if self.factor is not None and not 1 <= self.factor < math.inf:
            raise ValueError(f"RopeParameters: factor is {self.factor}, wanted None or >= 1")
        for name in ("beta_fast", "beta_slow"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"RopeParameters: {name} is {getattr(self, name)}, wanted > 0")
        if self.original_max_position < 1:
            raise ValueError(
                "RopeParameters: original_max_position is "
                f"{self.original_max_position}, wanted >= 1"
            )

    def correction_range(self) -> tuple[int, int]:
        """Return the first and last index of YaRN's ramp: 15 and 25 for the published models."""

        def index(rotations: float) -> float:
            turns = self.original_max_position / (rotations * 2 * math.pi)
            return self.dim * math.log(turns) / (2 * math.log(self.theta))

        low = max(math.floor(index(self.beta_fast)), 0)
        high = min(math.ceil(index(self.beta_slow)), self.dim - 1)
        return low, high

    def frequencies(self) -> list[float]:
        """Return the R/2 angular frequencies in radians per position, in double precision."""
        plain = [self.theta ** (-2 * i / self.dim) for i in range(self.dim // 2)]
        if self.factor is None:
            return plain
        low, high = self.correction_range()
        width = max(high - low, 0.001)  # a ramp of no width is a step
        ramp = [min(max((i - low) / width, 0.0), 1.0) for i in range(len(plain))]
        return [f * (1 - r) + f / self.factor * r for f, r in zip(plain, ramp, strict=True)]

    def inv_freq(self, device: torch.device | str | None = None) -> torch.Tensor:
        """Return the frequencies as a float32 table ``[R/2]``, without an amplitude (pitfall 2).

        Computed in float32 on the CPU, step by step as the published code does: the models were
        trained with that table, whose last bit is worth hundredths of a radian at position 2^20.
        """
        index = torch.arange(0, self.dim, 2, dtype=torch.float32, device="cpu")
        plain = 1.0 / (self.theta ** (index / self.dim))
        if self.factor is None:
            return plain.to(device or "cpu")
        low, high = self.correction_range()
        steps = torch.arange(self.dim // 2, dtype=torch.float32, device="cpu")
        ramp = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
        return (plain / self.factor * ramp + plain * (1 - ramp)).to(device or "cpu")
