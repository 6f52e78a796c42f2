"""Estimate which rows of a request fit the device, before anything is built."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dsv4.bench.problem import UsageError
from dsv4.bench.suites.model.request import LEFT_OUT, ModelRequest
from dsv4.bench.suites.random_model import quantised_format
from dsv4.bench.suites.whole_model import INDEX_FORMAT
from dsv4.checkpoint.host_experts import FILLING_GPU_BYTES
from dsv4.config import ModelConfig
from dsv4.kv_cache.paged_cache import PagedCache
from dsv4.layers import DeepseekV4Experts, Linear, _host_memory
from dsv4.layers.host_experts import HostExperts
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.parallel.emulated import emulated_rank
from dsv4.speculation.draft_costs import weight_bytes

ACTIVATIONS = 6 << 30  # bytes on a GPU for activations, workspaces, graphs and the CUDA context


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of a model's weights.

    Attributes:
        expert: Bytes of one routed expert in all layers, those of the draft included.
        layer_expert: Bytes of one routed expert in one layer.
        other: Bytes of everything but routed experts.
        experts: How many there are per layer, or the number of slots of a layer.
        stacked: Experts of a layer while it is filled, which then move to slots and to host memory;
            0: all experts stay.
        draft_expert: Bytes of one routed expert in the draft's layers.
    """

    expert: int
    layer_expert: int
    other: int
    experts: int
    stacked: int = 0
    draft_expert: int = 0

    @property
    def resident(self) -> int:
        """Bytes that are on the GPU wherever the experts of the main layers are."""
        return self.other + self.experts * self.draft_expert

    @property
    def peak(self) -> int:
        """The most bytes while it is built: all weights, and one layer's experts not packed yet."""
        stacked = self.stacked or self.experts
        return self.other + self.experts * self.expert + stacked * self.layer_expert

    def needed(self, cache: int, reserve: int) -> int:
        """Return the bytes that a row needs.

        Args:
            cache: Bytes of its cache.
            reserve: Bytes for activations, workspaces, graphs and the CUDA context.
        """
        if not self.stacked:
            return self.peak + cache + reserve
        # The stacks of the last layer are gone when steps run.
        built = self.peak + min(reserve, FILLING_GPU_BYTES)
        return max(built, self.other + self.experts * self.expert + cache + reserve)

    def with_slots(self, placement: HostExperts) -> ModelBytes:
        """Return the bytes on the GPU where the other experts lie in host memory.

        Those of draft layers are on the GPU. The stacks of one layer are there while it is filled,
        and the buffer for long prompts.
        """
        slots, staged = placement.static + placement.slots, 2 * placement.staged
        main, other = self.expert - self.draft_expert, self.resident + staged * self.layer_expert
        return ModelBytes(main, self.layer_expert, other, slots, self.experts)

    def experts_within(self, available: int) -> int:
        """Return the most experts per layer that fit; below 0 if the other weights do not."""
        return (available - self.other) // (self.expert + self.layer_expert)


@torch.no_grad()
def model_bytes(request: ModelRequest) -> ModelBytes:
    """Count the weights, without memory for them."""
    config = request.config
    context = emulated_rank(request.shared, config, with_mailboxes=False)
    with torch.device("meta"):
        drafted = request.drafts is not None
        model = DeepseekV4ForCausalLM(config, mtp=drafted, parallel=context).to(torch.bfloat16)
    experts = drafted_experts = 0
    for name, module in model.named_modules():
        stored = quantised_format(name, module, request.weights)
        if stored is None:
            continue
        assert isinstance(module, (DeepseekV4Experts, Linear))
        module.to_format(stored)
        if isinstance(module, DeepseekV4Experts):
            experts += weight_bytes(module)
            drafted_experts += weight_bytes(module) * name.startswith("mtp.")
    count = config.n_routed_experts // request.ranks
    layers = sum(isinstance(module, DeepseekV4Experts) for module in model.modules())
    layer_expert = experts // (count * layers)
    other, draft_expert = weight_bytes(model) - experts, drafted_experts // count
    return ModelBytes(experts // count, layer_expert, other, count, draft_expert=draft_expert)


def cache_bytes(config: ModelConfig, sequences: int, tokens: int) -> int:
    """Bytes of a cache of sequences of some tokens, with room for a chunk in its windows."""
    cache = PagedCache(
        config,
        max_sequences=1,
        max_tokens=tokens,
        max_chunk=min(tokens, 1024),
        device="meta",
        dtype=torch.bfloat16,
        index_format=INDEX_FORMAT,
    )
    return sequences * sum(cache.bytes_per_sequence(tokens).values())


def free_bytes(device: torch.device) -> int:
    """Return the bytes of memory that are free on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return _host_memory.available_bytes()


def reserve_bytes(device: torch.device) -> int:
    """Return the bytes of a device for activations, workspaces, graphs and the CUDA context."""
    return ACTIVATIONS if device.type == "cuda" else 0


def caches_of(request: ModelRequest) -> dict[tuple[int, int], int]:
    """Return the bytes of the cache of each row, by sequences and context."""
    return {
        (n, context): cache_bytes(request.config, n, context + request.new_tokens(n, context))
        for context in request.contexts
        for n in request.tokens
    }


def fitted(request: ModelRequest, free: int | None = None) -> ModelRequest:
    """Return the request without the rows that do not fit: weights and cache exceed free memory.

    Args:
        request: The request.
        free: Free bytes; on several ranks, those of the rank with the least; None: the free bytes
            of this device.

    Raises:
        UsageError: if no row fits. The message names the bytes that the smallest row needs, the
            free bytes, and the largest number of experts that fits.
    """
    if request.checkpoint is not None:
        return request  # its formats are known only after it is read
    size = model_bytes(request)
    if isinstance(request.host_experts, HostExperts):
        size = size.with_slots(request.host_experts)
    free = free_bytes(request.device) if free is None else free
    reserve, caches = reserve_bytes(request.device), caches_of(request)
    left_out = {
        row: (
            f"{LEFT_OUT}the model needs {_gb(size.needed(cache, reserve))} with a cache of "
            f"{_gb(cache)}, and {_gb(free)} are free"
        )
        for row, cache in caches.items()
        if size.needed(cache, reserve) > free
    }
    if len(left_out) < len(caches):
        return replace(request, left_out=left_out)
    (sequences, context), cache = min(caches.items(), key=lambda item: item[1])
    experts = (size.stacked or size.experts) * request.ranks
    where = f"on {request.device}" if request.ranks == 1 or request.emulated else "on a rank"
    problem = (
        f"the model needs {_gb(size.needed(cache, reserve))} and {_gb(free)} are free {where}: "
        f"weights {_gb(size.peak)} with --preset {request.preset} --experts {experts} --layers "
        f"{request.config.num_hidden_layers}, cache {_gb(cache)} with --tokens {sequences} "
        f"--context {context}, activations {_gb(reserve)}; "
    )
    if isinstance(request.host_experts, HostExperts):
        raise UsageError(f"{problem}wanted --host-experts auto, or fewer static experts and slots")
    most = size.experts_within(free - cache - reserve) * request.ranks
    if most >= request.config.num_experts_per_tok:
        raise UsageError(f"{problem}wanted --experts {most} at most")
    raise UsageError(
        f"{problem}no number of experts fits, wanted fewer --layers, --tokens or --context"
    )


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
