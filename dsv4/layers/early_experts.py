"""Experts of hash layers, loaded from host memory at the start of a captured step.

A hash layer chooses experts by the token ids alone, so its experts need not wait for the layers
before it. A branch of the graph loads the experts of all hash layers, one layer after another,
while the first layers compute. The GEMMs of each layer wait for that layer's experts. The branch
begins after all earlier launches have ended, so nothing reads the slots that it writes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from dsv4.kv_cache.batch import CacheStep
from dsv4.layers.moe import DeepseekV4SparseMoeBlock
from dsv4.layers.router import DeepseekV4HashRouter
from dsv4.overlap import Streams, distant_streams

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
        if not isinstance(block, DeepseekV4SparseMoeBlock) or not _is_early(block, len(flat)):
            continue
        router, work = block.gate, f"experts of layer {number}"
        assert isinstance(router, DeepseekV4HashRouter)
        with streams.on(work, behind=before):
            ids = router.tid2eid[flat]
            if step.routed is not None:
                ids = ids.masked_fill(step.routed.unsqueeze(1) < 0, -1)
            slots = block.experts.fetch(ids)
        step.keep((_KEY, number), Arrival(slots, streams, work))
        before = work


def arrival_of(step: CacheStep, layer_idx: int) -> Arrival | None:
    """Return the experts of a layer that ``fetch_early`` loads for a step, or None."""
    arrival: Arrival | None = step.value_of((_KEY, layer_idx))
    return arrival


def _is_early(block: DeepseekV4SparseMoeBlock, tokens: int) -> bool:
    """Return whether a block has a hash router, may miss experts, and has slots for the step."""
    experts, hosted = block.experts, getattr(block.experts, "hosted", None)
    if type(block.gate) is not DeepseekV4HashRouter or hosted is None:
        return False
    has_missing = hosted.cached_slots < hosted.experts - hosted.static_slots
    return has_missing and hosted.obstacle(tokens * experts.num_experts_per_tok) is None
