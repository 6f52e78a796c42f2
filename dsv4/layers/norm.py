"""RMS norms."""

from __future__ import annotations

import torch
from torch import nn

from dsv4.ops.norm import rms_norm


class DeepseekV4RMSNorm(nn.Module):
    """``weight * x * rsqrt(mean(x^2) + eps)`` over the last axis (specification, section 2)."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise ``[..., hidden_size]``; the result has the same dtype."""
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)

    def extra_repr(self) -> str:
        """Return size and eps."""
        return f"{self.weight.shape[0]}, eps={self.variance_epsilon}"


class DeepseekV4UnweightedRMSNorm(nn.Module):
    """RMS norm without a weight, of each query head (specification, section 4.2, step 2)."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise ``[..., D]``; the result has the same dtype."""
        return rms_norm(x, None, self.eps)

    def extra_repr(self) -> str:
        """Return eps."""
        return f"eps={self.eps}"
