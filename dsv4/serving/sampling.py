"""Choose the next token from logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampler:
    """Sampler: greedy, or from the smallest set of tokens with ``top_p`` of the probability.

    Attributes:
        temperature: Divides the logits; 0 is greedy.
        top_p: Probability to keep, in (0, 1].
        generator: Source of randomness, on the logits' device; None for torch's own.

    Raises:
        TypeError: if one of them is of another type.
        ValueError: if ``temperature`` is negative or infinite, or ``top_p`` is not in (0, 1].
    """

    temperature: float = 0.0
    top_p: float = 1.0
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"Sampler: {name} is {value!r}, wanted a number")
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            kind = type(self.generator).__name__
            raise TypeError(f"Sampler: generator is {kind}, wanted a torch.Generator")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"Sampler: temperature is {self.temperature}, wanted 0 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"Sampler: top_p is {self.top_p}, wanted more than 0 and at most 1")

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Map ``[B, vocab]`` to token ids ``[B]``; ties of a greedy choice go to the lowest id.

        The id is -1 for a row whose logits have no finite maximum: NaN, or infinity, also after the
        division by ``temperature``.
        """
        if self.temperature == 0:
            top, chosen = logits.max(-1)
            return torch.where(top - top == 0, chosen, -1)  # NaN unless top is finite
        scaled = logits.float() / self.temperature
        finite = scaled.amax(-1).isfinite()
        # A row without probabilities must not reach the draw, which would make the GPU's context
        # unusable.
        scaled = torch.where(finite.unsqueeze(-1), scaled, 0.0)
        return torch.where(finite, self._drawn(scaled), -1)

    def _drawn(self, scaled: torch.Tensor) -> torch.Tensor:
        probabilities = torch.softmax(scaled, dim=-1)
        ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
        # A token is kept if the tokens before it hold less than top_p.
        eligible = ordered.cumsum(-1) - ordered < self.top_p
        drawn = torch.multinomial(ordered * eligible, 1, generator=self.generator)
        return ids.gather(-1, drawn).squeeze(-1)
