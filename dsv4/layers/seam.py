"""What two decoder layers in a row do in one operator: one ends, the next one begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from dsv4.layers.hyper_connection import DeepseekV4HyperConnection, PreResult
from dsv4.layers.norm import DeepseekV4RMSNorm


class Beginning(Protocol):
    """The modules with which a decoder layer begins."""

    attn_hc: DeepseekV4HyperConnection
    input_layernorm: DeepseekV4RMSNorm


@dataclass(frozen=True)
class Seam:
    """What a layer takes over from the layer before it, and does for the next one.

    Attributes:
        opened: Results of ``attn_hc.pre`` of this layer, which the layer before it made from the
            streams that it returned; None: this layer makes them.
        following: The next layer, whose ``attn_hc.pre`` this layer runs together with its own last
            write-back; None: it does not.
    """

    opened: PreResult | None = None
    following: Beginning | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors that were made for this layer."""
        return () if self.opened is None else self.opened

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Modules of the next layer that this layer runs."""
        following = self.following
        return () if following is None else (following.attn_hc, following.input_layernorm)


NO_SEAM = Seam()
