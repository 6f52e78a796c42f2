"""Routed experts in host memory: for a model that is larger than its GPU.

Of each layer some experts are static: they stay on the GPU and have no copy in host memory. The
others lie in host memory; some slots on the GPU are a cache for these, by use counts with decay. A
decode step finds and loads what it lacks on the device alone, so a CUDA graph holds it. A step that
chooses more experts than there are slots is planned on the host, in waves. A long prompt passes
all experts that have no slot through a buffer, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from dsv4.layers import _host_memory
from dsv4.layers._expert_staging import ExpertStaging
from dsv4.layers._hosted_experts import HostedExperts
from dsv4.layers._module import frozen
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.quant.formats import SWIZZLED

__all__ = ["CacheUse", "HostExperts", "cache_use", "expert_counts", "host_experts_", "repin_"]

_DRAFT = "mtp."


@dataclass(frozen=True, eq=False)
class HostExperts:
    """Which experts of each layer are static, and how many slots are for the others.

    Attributes:
        static: Static experts of a layer.
        slots: Slots of a layer for the others: as many as a token chooses, at least.
        counts: int64 ``[layers, experts]``, uses of each expert (``expert_counts``): the most used
            ones are static. None: the first ones.
        staged: Experts of each of the two halves of the buffer through which long prompts pass the
            experts that have no slot; one buffer for all layers. 0: none, long prompts exchange
            the experts in the slots.

    Raises:
        TypeError: if a number is no integer, or ``counts`` no tensor of integers.
        ValueError: if a count is negative.
    """

    static: int
    slots: int
    counts: torch.Tensor | None = None
    staged: int = 0

    def __post_init__(self) -> None:
        for name in ("static", "slots", "staged"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"HostExperts: {name} is {value!r}, wanted an integer")
        if self.counts is not None:
            check_counts("HostExperts", self.counts)

    def check(self, experts: int, layers: int, top_k: int) -> None:
        """Check it for a model.

        Raises:
            ValueError: if a number is out of range, or the counts have another shape.
        """
        if not 0 <= self.static <= experts:
            raise ValueError(
                f"host_experts: static is {self.static}, wanted 0 to {experts}, the experts of a "
                "layer"
            )
        others = experts - self.static
        if not min(top_k, others) <= self.slots <= others:
            raise ValueError(
                f"host_experts: slots is {self.slots}, wanted {min(top_k, others)} to {others}: "
                f"{others} experts of a layer are not static, and a token chooses {top_k}"
            )
        if not 0 <= self.staged <= others:
            raise ValueError(
                f"host_experts: staged is {self.staged}, wanted 0 to {others}, the experts of a "
                "layer that are not static"
            )
        if self.counts is not None:
            check_shape("host_experts", self.counts, layers, experts)

    def static_of(self, layer: int, experts: int) -> list[int]:
        """Return the static experts of a layer, ascending; of equal counts the lowest ones."""
        if self.counts is None:
            return list(range(self.static))
        return most_used(self.counts[layer].tolist(), self.static)


def check_counts(function: str, counts: object) -> None:
    """Check that counts of use are a tensor of integers from 0.

    Raises:
        TypeError: if it is no tensor, or its dtype is no integer.
        ValueError: if a count is negative.
    """
    if not isinstance(counts, torch.Tensor):
        kind = type(counts).__name__
        raise TypeError(f"{function}: counts is {kind}, wanted a tensor or None")
    if counts.dtype.is_floating_point or counts.dtype.is_complex or counts.dtype == torch.bool:
        raise TypeError(f"{function}: counts have dtype {counts.dtype}, wanted torch.int64")
    if counts.numel() and not counts.is_meta and int(counts.min()) < 0:
        raise ValueError(f"{function}: a count is {int(counts.min())}, wanted 0 or more")


def check_shape(function: str, counts: torch.Tensor, layers: int, experts: int) -> None:
    """Raise ValueError unless counts of use are those of a model."""
    if list(counts.shape) != [layers, experts]:
        raise ValueError(
            f"{function}: counts have shape {list(counts.shape)}, wanted {[layers, experts]}"
        )


@dataclass(frozen=True)
class CacheUse:
    """What the slots did since the model was loaded.

    Attributes:
        steps: Steps of each layer.
        asked: Distinct experts that the steps of all layers asked for.
        loaded: Experts that were loaded for them.
        row_bytes: Bytes of a loaded expert.
        unasked: Experts that were copied to the buffer for long prompts though no token chose them.
    """

    steps: int
    asked: int
    loaded: int
    row_bytes: int
    unasked: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of experts that were in a slot already; 1 before the first step."""
        return 1.0 - self.loaded / self.asked if self.asked else 1.0

    @property
    def loaded_bytes(self) -> int:
        """Bytes that were loaded from host memory, those of unasked experts included."""
        return (self.loaded + self.unasked) * self.row_bytes

    def since(self, before: CacheUse) -> CacheUse:
        """Return what happened after an earlier time."""
        asked, loaded = self.asked - before.asked, self.loaded - before.loaded
        unasked = self.unasked - before.unasked
        return CacheUse(self.steps - before.steps, asked, loaded, self.row_bytes, unasked)


def host_experts_(model: nn.Module, placement: HostExperts) -> int:
    """Move experts of every layer to host memory, those of draft layers excepted.

    Call it when the weights are final: loaded, quantised, moved and packed. Graphs that were
    captured before must be captured again. Not for models on several ranks.

    Args:
        model: A model, or anything that holds ``DeepseekV4Experts`` with all experts.
        placement: What is static, and how many slots there are.

    Returns:
        Bytes of host memory.

    Raises:
        MemoryError: if host memory does not suffice; layers before keep their experts there.
        ValueError: if the placement does not fit, or a layer cannot have experts in host memory.
    """
    layers = [experts for _, experts in experts_of(model)]
    if not layers:
        raise ValueError("host_experts_: the model has no DeepseekV4Experts, wanted at least one")
    host = Hosting(placement, len(layers))
    return sum(host.move(experts) for experts in layers)


@dataclass
class Hosting:
    """Moves the experts of a model's layers one after another.

    Attributes:
        placement: See ``host_experts_``.
        layers: Number of layers.
        moved: Layers that were moved.
        staging: Buffer for long prompts; None: the placement has none, or no layer was moved yet.
    """

    placement: HostExperts
    layers: int
    moved: int = 0
    staging: ExpertStaging | None = None
    _last: HostedExperts | None = None
    _allocate: Callable[[int, torch.device], torch.Tensor] = _host_memory.allocate

    @contextmanager
    def allocating_ahead(self) -> Iterator[None]:
        """Allocate a layer's host memory in a thread while the layer is read and packed."""
        with _host_memory.BlocksAhead(self.layers - self.moved) as blocks:
            self._allocate = blocks.allocate
            try:
                yield
            finally:
                self._allocate = _host_memory.allocate

    def takes(self, name: str, module: nn.Module) -> bool:
        """Return whether a module is a main layer's experts."""
        return isinstance(module, DeepseekV4Experts) and not name.startswith(_DRAFT)

    def move(self, experts: DeepseekV4Experts) -> int:
        """Move the next layer's; return the bytes of host memory. See ``host_experts_``."""
        check_layer(experts)
        self.placement.check(experts.num_experts, self.layers, experts.num_experts_per_tok)
        static = self.placement.static_of(self.moved, experts.num_experts)
        tensors = _tensors_of(experts)
        hosted = HostedExperts(tensors, static, self.placement.slots, self._allocate)
        if self.placement.staged:
            if self.staging is None:
                self.staging = ExpertStaging(self.placement.staged, hosted.device)
            hosted.stage(self.staging, self._last)
            self._last = hosted
        experts.forget_value()
        _put(hosted, experts)
        self.moved += 1
        return hosted.rows.nbytes


def _tensors_of(experts: DeepseekV4Experts) -> dict[str, torch.Tensor]:
    own = {**experts._parameters, **experts._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


def _put(hosted: HostedExperts, experts: DeepseekV4Experts) -> None:
    """Replace the experts of a layer by slots."""
    for name, tensor in hosted.tensors.items():
        if name in experts._buffers:
            experts._buffers[name] = tensor
        else:
            experts._parameters[name] = frozen(tensor)
    experts.num_local_experts = hosted.slots
    experts.hosted = hosted


def declare_hosted(experts: DeepseekV4Experts, static: int, slots: int, staged: int = 0) -> None:
    """Give a layer on the meta device the slots that ``host_experts_`` would give it.

    Args:
        experts: The layer, its weights declared.
        static: Static experts.
        slots: Slots for the others.
        staged: Experts of a half of the buffer for long prompts, which is the layer's own; 0: none.
    """
    hosted = HostedExperts(
        _tensors_of(experts),
        range(static),
        slots,
        lambda nbytes, device: torch.empty(nbytes, dtype=torch.uint8, device=device),
    )
    if staged:
        hosted.stage(ExpertStaging(staged, hosted.device), None)
    _put(hosted, experts)


def check_layer(experts: DeepseekV4Experts) -> None:
    """Raise ValueError unless a layer's experts can be moved to host memory."""
    reason = None
    if experts.hosted is not None:
        reason = "are in host memory already"
    elif experts.num_local_experts != experts.num_experts:
        reason = f"are {experts.num_local_experts} of {experts.num_experts}, wanted all of a layer"
    elif experts.layout == SWIZZLED:
        reason = f"have layout {SWIZZLED!r}, wanted 'linear' or 'fragments_16x64'"
    elif experts.observers is not None:
        reason = "are being calibrated"
    elif experts.gate_up_proj.is_meta:
        reason = "are on the meta device, wanted ones with values"
    if reason is not None:
        raise ValueError(f"host_experts: the experts of a layer {reason}")


def experts_of(model: nn.Module) -> list[tuple[str, DeepseekV4Experts]]:
    """Return the routed experts of the main layers, by name."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, DeepseekV4Experts) and not name.startswith(_DRAFT)
    ]


def slot_tokens(model: nn.Module) -> list[int]:
    """Return the most tokens of a step that reads nothing on the host, of each layer that has one.

    Layers without experts in host memory, or with a slot for each of them, have none.
    """
    return [
        experts.hosted.cached_slots // experts.num_experts_per_tok
        for _, experts in experts_of(model)
        if experts.hosted is not None
        and experts.hosted.cached_slots < experts.num_experts - experts.hosted.static_slots
    ]


def hosted_of(model: nn.Module) -> list[HostedExperts]:
    """Return the experts of the main layers of which some are in host memory."""
    layers = [experts.hosted for _, experts in experts_of(model)]
    return [hosted for hosted in layers if hosted is not None]


def _all_hosted(function: str, model: nn.Module) -> list[HostedExperts]:
    layers = hosted_of(model)
    if not layers:
        raise ValueError(f"{function}: the model has no experts in host memory, wanted some")
    return layers


def expert_counts(model: nn.Module) -> torch.Tensor:
    """Return how often each expert was chosen since the model was loaded.

    They can be saved (``torch.save``) and given to ``repin_``, or to ``load`` as
    ``host_experts=HostExperts(..., counts=...)``.

    Returns:
        int64 ``[layers, experts]`` on the CPU.

    Raises:
        ValueError: if the model has no experts in host memory.
    """
    layers = _all_hosted("expert_counts", model)
    return torch.stack([hosted.state.totals.cpu() for hosted in layers])


def cache_use(model: nn.Module) -> CacheUse:
    """Return what the slots of all layers did since the model was loaded; waits for the device.

    Raises:
        ValueError: if the model has no experts in host memory.
    """
    layers = _all_hosted("cache_use", model)
    counters = torch.stack([hosted.state.counters.cpu() for hosted in layers])
    steps, asked, loaded = counters[0, 0], counters[:, 1].sum(), counters[:, 2].sum()
    unasked = sum(hosted.unasked for hosted in layers)
    return CacheUse(int(steps), int(asked), int(loaded), layers[0].layout.row_bytes, unasked)


def repin_(model: nn.Module, counts: torch.Tensor | None = None) -> int:
    """Make the most used experts of each layer the static ones.

    Between requests, never while a step runs. Captured graphs go on with the new ones. Results do
    not change. Each exchange takes an expert's bytes over the bus in both directions.

    Args:
        model: A model with experts in host memory.
        counts: int64 ``[layers, experts]``; None: those of ``expert_counts``.

    Returns:
        Number of experts that became static.

    Raises:
        TypeError: if the counts are no tensor of integers.
        ValueError: if the model has no experts in host memory, the counts have another shape, or
            one is negative.
    """
    layers = _all_hosted("repin_", model)
    counts = expert_counts(model) if counts is None else counts
    check_counts("repin_", counts)
    check_shape("repin_", counts, len(layers), layers[0].experts)
    return sum(
        hosted.repin(most_used(row, hosted.static_slots, hosted.static_experts()))
        for hosted, row in zip(layers, counts.tolist(), strict=True)
    )


def most_used(counts: Sequence[int], number: int, before: Sequence[int] = ()) -> list[int]:
    """Return the experts with the largest counts, ascending.

    Of equal ones those in ``before``, then the lowest.
    """
    present = set(before)
    order = sorted(range(len(counts)), key=lambda e: (-counts[e], e not in present, e))
    return sorted(order[:number])
