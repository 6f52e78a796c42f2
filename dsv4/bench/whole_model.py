"""Whole models of random weights: what ``generate`` takes, beside what the GPU could do.

Each row is a number of sequences at a context. It has three times per token: of ``generate``, of
one decode step captured in a CUDA graph, and the sum of that step's kernels. Beside them stands the
roofline bound. Prompts give the time to the first token.

A model may have fewer experts or layers than the published one, so that it fits a GPU. A token of
one sequence reads the same bytes then. Steps of several sequences read fewer, because sequences
share experts. Every row therefore names experts, layers, context, routing and recipe.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsv4.bench.environment import Rates
from dsv4.config import CSA, ModelConfig
from dsv4.layers import DeepseekV4Experts, Linear
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.pages import entry_layout

INDEX_FORMAT = "index_mxfp4"
_NEW_TOKENS = 32  # of a timed call of generate
_REPLAYS = 20
_FILL_CHUNK = 2048  # prompt tokens of one prefill step while a cache is filled


@dataclass(frozen=True)
class StepCost:
    """Least work of one decode step.

    Attributes:
        weight_bytes: Weights read, each once; of the routed experts those that uniform routing is
            expected to choose.
        kv_bytes: Entries and index keys read from the KV cache.
        flops: Multiplications and additions, 2 per multiply-accumulate.
    """

    weight_bytes: float
    kv_bytes: float
    flops: float

    def bound_ms(self, rates: Rates) -> float:
        """Roofline bound: the slower of memory and bfloat16 tensor cores, in milliseconds."""
        return 1e-3 * rates.floor_us(int(self.weight_bytes + self.kv_bytes), int(self.flops))


def step_cost(model: DeepseekV4ForCausalLM, sequences: int, context: int) -> StepCost:
    """Count the least bytes and operations of a decode step.

    Args:
        model: With its weights.
        sequences: One token of each is computed.
        context: Tokens that each sequence has, the new one included.
    """
    config = model.config
    experts = [m for m in model.modules() if isinstance(m, DeepseekV4Experts)]
    expert_bytes = [_nbytes(module) for module in experts]
    embedding = model.model.embed_tokens.weight
    plain = _nbytes(model) - sum(expert_bytes) - embedding.nbytes
    chosen, count = config.num_experts_per_tok, config.n_routed_experts
    share = 1 - (1 - chosen / count) ** sequences
    embedded = sequences * embedding[0].nbytes
    reads = [_reads(config, i, context) for i in range(config.num_hidden_layers)]
    entry = entry_layout("fp8", config.head_dim, config.qk_rope_head_dim)
    key = entry_layout(INDEX_FORMAT, config.index_head_dim, 0)
    kv_bytes = sum(
        read.entries * (entry.data_bytes + entry.scale_bytes)
        + read.keys * (key.data_bytes + key.scale_bytes)
        for read in reads
    )
    return StepCost(
        weight_bytes=plain + share * sum(expert_bytes) + embedded,
        kv_bytes=sequences * kv_bytes,
        flops=sequences * _flops(model, reads),
    )


def _nbytes(module: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers of a module, each memory counted once."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum({t.data_ptr(): t.nbytes for t in tensors if t.nbytes}.values())


@dataclass(frozen=True)
class _Reads:
    """What one token reads of a layer's KV cache.

    Attributes:
        entries: Entries that it attends to.
        keys: Index keys that it is scored against.
    """

    entries: int
    keys: int = 0


def _reads(config: ModelConfig, layer: int, context: int) -> _Reads:
    window = min(context, config.sliding_window)
    rate = config.compress_rate(layer)
    if not rate:
        return _Reads(window)
    closed = context // rate
    if config.layer_type(layer) != CSA:
        return _Reads(window + closed)
    return _Reads(window + min(closed, config.index_topk), keys=closed)


def _flops(model: DeepseekV4ForCausalLM, reads: Sequence[_Reads]) -> int:
    """Operations of one token: linear layers, chosen experts, attention and indexer."""
    config = model.config
    linear = sum(
        module.out_features * module.in_features
        for module in model.modules()
        if isinstance(module, Linear)
    )
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    routed = config.num_hidden_layers * config.num_experts_per_tok * expert
    attended = sum(read.entries for read in reads) * config.num_attention_heads * config.head_dim
    scanned = sum(read.keys for read in reads) * config.index_n_heads * config.index_head_dim
    return 2 * (linear + routed + 2 * attended + scanned)


class DecodeStep:
    """A decode step of some sequences at one context, run eagerly or replayed from a CUDA graph.

    The cache is filled by prefill. Every step starts at the same lengths, so all do the same work.

    Args:
        model: Packed, on its device.
        sequences: How many.
        context: Tokens of each before the step, at least 1.
        seed: Of the prompts.
    """

    def __init__(
        self, model: DeepseekV4ForCausalLM, sequences: int, context: int, seed: int = 0
    ) -> None:
        self.model = model
        generator = torch.Generator().manual_seed(seed)
        vocabulary = model.config.vocab_size
        prompts = torch.randint(2, vocabulary, (sequences, context), generator=generator).tolist()
        chunk = min(context, max(1, _FILL_CHUNK // sequences))
        self.cache = model.new_cache(sequences, context + 1, chunk, index_format=INDEX_FORMAT)
        rows = [self.cache.allocate() for _ in prompts]
        model.prefill(prompts, self.cache, rows)
        self.cache.prepare(rows, [1] * sequences)
        self.rows = torch.tensor(rows, device=model.device)
        self.lengths = self.cache.lengths.clone()
        self.tokens = torch.randint(2, vocabulary, (sequences,), generator=generator)
        self.tokens = self.tokens.to(model.device)

    def __call__(self) -> torch.Tensor:
        """Run it; logits ``[sequences, vocabulary]``."""
        self.cache.lengths.copy_(self.lengths)
        return self.model.decode(self.tokens, self.cache, self.rows)

    def captured(self) -> torch.cuda.CUDAGraph:
        """Capture it in a CUDA graph."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self()
        return graph


def replay_ms(graph: torch.cuda.CUDAGraph, replays: int = _REPLAYS) -> float:
    """Median milliseconds of a replay; weights exceed the L2, which therefore stays cold."""
    times = []
    for _ in range(3 + replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])
