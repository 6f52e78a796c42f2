"""Records the largest activations while a model is calibrated."""

from __future__ import annotations

import torch

# amax / 2688 maps the largest activation onto code 6 times block scale 448 (specification, section
# 11.1).
LARGEST = 6.0 * 448.0


class AmaxObserver:
    """Largest absolute finite value seen, per slot.

    Args:
        slots: Number of values to keep: 1 for a linear layer, the number of experts for experts.
    """

    def __init__(self, slots: int = 1) -> None:
        self.amax = torch.zeros(slots, dtype=torch.float32, device="cpu")

    def see(self, x: torch.Tensor, slot: int = 0) -> None:
        """Observe ``x`` of any shape; non-finite values are left out."""
        if x.numel() == 0:
            return
        finite = torch.where(x.isfinite(), x, torch.zeros_like(x))
        amax = finite.detach().abs().amax().float().cpu()
        self.amax[slot] = torch.maximum(self.amax[slot], amax)

    def scale(self) -> torch.Tensor:
        """Return global scales ``[slots]``, float32; a slot that saw nothing takes the largest
        other.

        Raises:
            ValueError: if no slot saw a non-zero finite value.
        """
        largest = self.amax.max()
        if largest == 0:
            raise ValueError("calibrate: no non-zero activation was seen, wanted at least one")
        return torch.where(self.amax > 0, self.amax, largest) / LARGEST
