"""Experts of hash layers, loaded from host memory at the start of a captured step.

A hash layer chooses experts by the token ids alone, so its experts need not wait for the layers
before it. A branch of the graph loads the experts of all hash layers, one layer after another,
while the first layers compute. The GEMMs of each layer wait for that layer's experts. The branch
begins after all earlier launches have ended, so nothing reads the slots that it writes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from dsv4.kv_cache.batch import CacheStep
from dsv4.layers.moe import DeepseekV4SparseMoeBlock
from dsv4.layers.router import DeepseekV4HashRouter
from dsv4.overlap import Streams, distant_streams


class ChoosesByToken(ABC):
    """Base class of routers that choose experts by token ids alone, or without any input.

    Only padding may have other experts. ``DeepseekV4HashRouter`` chooses by token ids without this
    base class; a class derived from it may choose otherwise, so it needs this one.
    """

    @abstractmethod
    def experts_of(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the experts ``[T, k]`` that ``forward`` will choose for token ids ``[T]``."""


_KEY = "arrival"  # of the values that a step keeps for its layers


@dataclass(frozen=True)
class Arrival:
    """Slots of a step's experts while these are being loaded.

    Attributes:
        slots: int32 ``[T, k]``; see ``dsv4.ops.expert_slots.expert_decide``.
        streams: Side streams that load them.
        work: Name of the work.
    """

    slots: torch.Tensor
    streams: Streams
    work: str

    def joined(self) -> torch.Tensor:
        """Make the current stream wait for the experts; return their slots."""
        self.streams.join(self.work, self.slots)
        return self.slots


def fetch_early(layers: Iterable[nn.Module], input_ids: torch.Tensor, step: CacheStep) -> None:
    """Load the experts of hash layers on a side stream, if a graph is being captured.

    Args:
        layers: Decoder layers; each finds its experts by ``arrival_of``.
        input_ids: ``[1, T]``, token ids of the step.
        step: The step.
    """
    streams, flat = distant_streams(input_ids), input_ids.reshape(-1)
    if streams is None:
        return
    before = None
    for layer in layers:
        block, number = getattr(layer, "mlp", None), getattr(layer, "layer_idx", None)
        choose = _early_choice(block, len(flat))
        if choose is None:
            continue
        assert isinstance(block, DeepseekV4SparseMoeBlock)
        work = f"experts of layer {number}"
        with streams.on(work, behind=before):
            ids = choose(flat)
            if step.routed is not None:
                ids = ids.masked_fill(step.routed.unsqueeze(1) < 0, -1)
            slots = block.experts.fetch(ids)
        step.keep((_KEY, number), Arrival(slots, streams, work))
        before = work


def arrival_of(step: CacheStep, layer_idx: int) -> Arrival | None:
    """Return the experts of a layer that ``fetch_early`` loads for a step, or None."""
    arrival: Arrival | None = step.value_of((_KEY, layer_idx))
    return arrival


def early_layers(layers: Iterable[nn.Module], tokens: int) -> int:
    """Return the number of layers whose experts a captured step of some tokens loads early."""
    blocks = [getattr(layer, "mlp", None) for layer in layers]
    return sum(_early_choice(block, tokens) is not None for block in blocks)


def _early_choice(block: object, tokens: int) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the function that chooses a block's experts by token ids.

    None if it chooses otherwise, can miss no expert, or has too few slots for the step.
    """
    if not isinstance(block, DeepseekV4SparseMoeBlock):
        return None
    experts, hosted = block.experts, getattr(block.experts, "hosted", None)
    if hosted is None or hosted.cached_slots >= hosted.experts - hosted.static_slots:
        return None
    if hosted.obstacle(tokens * experts.num_experts_per_tok) is not None:
        return None
    router = block.gate
    if type(router) is DeepseekV4HashRouter:
        return router.tid2eid.__getitem__
    return router.experts_of if isinstance(router, ChoosesByToken) else None
