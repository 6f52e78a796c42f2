"""Whole models: the least work of a decode step and of a prompt, and a decode step to be timed.

A model may have fewer experts or layers than the published one, so that it fits a GPU. A token of
one sequence reads the same bytes then. Steps of several sequences read fewer, because sequences
share experts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from dsv4.bench.environment import Rates
from dsv4.config import CSA, ModelConfig
from dsv4.kv_cache.layer_cache import BLOCK
from dsv4.kv_cache.paged_cache import Batch, CacheStep, PagedCache
from dsv4.kv_cache.pages import entry_layout
from dsv4.layers import DeepseekV4Experts, Linear
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.parallel import groups
from dsv4.parallel.context import ParallelContext, has_own_tokens
from dsv4.parallel.split import LocalSizes
from dsv4.speculation.draft_costs import weight_bytes

INDEX_FORMAT = "index_mxfp4"
_REPLAYS = 20
FILL_CHUNK = 2048  # most prompt tokens of a step that fills a cache: its kernels are launched, too
_FILL_TOKENS = 32768  # prompt tokens in all that fill a cache; other sequences get copies


@dataclass(frozen=True)
class StepCost:
    """Least work of one decode step.

    Attributes:
        weight_bytes: Weights read, each once; of the routed experts those that are chosen.
        kv_bytes: Entries and index keys read from the KV cache.
        flops: Multiplications and additions, 2 per multiply-accumulate.
    """

    weight_bytes: float
    kv_bytes: float
    flops: float

    def bytes_ms(self, rates: Rates) -> float:
        """Milliseconds that memory needs for the bytes."""
        return 1e-3 * rates.bound_us(int(self.weight_bytes + self.kv_bytes), 0)

    def flops_ms(self, rates: Rates) -> float:
        """Milliseconds that bfloat16 tensor cores need for the operations."""
        return 1e-3 * rates.bound_us(0, int(self.flops))

    def bound_ms(self, rates: Rates) -> float:
        """Roofline bound: the slower of memory and bfloat16 tensor cores, in milliseconds."""
        return max(self.bytes_ms(rates), self.flops_ms(rates))


def uniform_experts(config: ModelConfig, tokens: int) -> float:
    """Distinct experts that uniform routing is expected to choose for some tokens of a layer."""
    count = config.n_routed_experts
    return count * (1 - (1 - config.num_experts_per_tok / count) ** tokens)


def uniform_held(config: ModelConfig, tokens: int, context: ParallelContext | None) -> float:
    """Distinct experts held by a rank that uniform routing is expected to choose.

    Args:
        config: The model's.
        tokens: Tokens of a step, where each rank has tokens of its own those of a rank.
        context: The rank; None: there is one.
    """
    if context is None:
        return uniform_experts(config, tokens)
    of_all = tokens * context.size if has_own_tokens(context) else tokens
    return uniform_experts(config, of_all) / context.size


def step_cost(
    model: DeepseekV4ForCausalLM, sequences: int, context: int, experts_read: float | None = None
) -> StepCost:
    """Count the least bytes and operations of a decode step.

    Args:
        model: With its weights.
        sequences: One token of each is computed.
        context: Tokens that each sequence has, the new one included.
        experts_read: Distinct experts of a layer, of those held here, that the tokens choose, on
            average over layers; None: what uniform routing is expected to choose.
    """
    config = model.config
    routed = _routed_bytes(model)
    embedding = model.model.embed_tokens.weight
    plain = weight_bytes(model.model) + weight_bytes(model.lm_head) - routed - embedding.nbytes
    if experts_read is None:
        experts_read = uniform_held(config, sequences, model.parallel)
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
        weight_bytes=plain + experts_read * expert_bytes(model) + embedded,
        kv_bytes=sequences * kv_bytes,
        flops=sequences * _flops(model, reads),
    )


def expert_bytes(model: DeepseekV4ForCausalLM) -> float:
    """Return the bytes of one routed expert of each main layer."""
    held = next(m.num_local_experts for m in _routed(model))
    return _routed_bytes(model) / held


def _routed_bytes(model: DeepseekV4ForCausalLM) -> int:
    return sum(map(weight_bytes, _routed(model)))


def _routed(model: DeepseekV4ForCausalLM) -> list[DeepseekV4Experts]:
    return [m for m in model.model.modules() if isinstance(m, DeepseekV4Experts)]


@dataclass(frozen=True)
class _Reads:
    """The bytes that one token reads of a layer's KV cache.

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
    return _gemm_flops(model) + _attention_flops(model, reads)


def _gemm_flops(model: DeepseekV4ForCausalLM) -> int:
    """Operations of linear layers and chosen experts."""
    config = model.config
    linear = sum(map(_linear_flops, [*model.model.modules(), model.lm_head]))
    # By chance a share of the ranks; where each has tokens of its own, it gets a share of each.
    ranks = 1 if model.parallel is None or has_own_tokens(model.parallel) else model.parallel.size
    expert = 6 * config.hidden_size * config.moe_intermediate_size // ranks
    return linear + config.num_hidden_layers * config.num_experts_per_tok * expert


def _linear_flops(module: torch.nn.Module) -> int:
    return 2 * module.out_features * module.in_features if isinstance(module, Linear) else 0


def _attention_flops(model: DeepseekV4ForCausalLM, reads: Sequence[_Reads]) -> int:
    config, heads = model.config, LocalSizes.of(model.config, model.parallel).heads
    attended = sum(read.entries for read in reads) * heads * config.head_dim
    scanned = sum(read.keys for read in reads) * config.index_n_heads * config.index_head_dim
    return 2 * (2 * attended + scanned)


def prompt_flops(model: DeepseekV4ForCausalLM, tokens: int) -> int:
    """Count the operations of a prompt: the output head for its last token alone.

    Args:
        model: With its weights.
        tokens: Tokens of the prompt.
    """
    config = model.config
    head = _linear_flops(model.lm_head)
    layers = range(config.num_hidden_layers)
    kinds = [(config.compress_rate(i), config.layer_type(i)) for i in layers]
    attention = 0
    for kind in dict.fromkeys(kinds):
        layer = kinds.index(kind)
        reads = [_reads(config, layer, context) for context in range(1, tokens + 1)]
        attention += kinds.count(kind) * _attention_flops(model, reads)
    return tokens * (_gemm_flops(model) - head) + head + attention


@dataclass(frozen=True)
class Fill:
    """The way to fill a cache up to a context.

    Attributes:
        sequences: Sequences of the step.
        context: Tokens of each sequence.
        prompts: Distinct prompts that are processed; other sequences get copies of their pages.
        prompt_tokens: Tokens of each prompt: the context, or fewer whole blocks; their pages are
            then repeated up to the context.

    Raises:
        ValueError: if a prompt has another number of tokens.
    """

    sequences: int
    context: int
    prompts: int
    prompt_tokens: int

    def __post_init__(self) -> None:
        tokens = self.prompt_tokens
        if tokens != self.context and not (0 < tokens < self.context and tokens % BLOCK == 0):
            raise ValueError(
                f"Fill: prompt_tokens is {tokens}, wanted the context, {self.context}, or a "
                f"positive multiple of {BLOCK} below it"
            )

    @classmethod
    def plan(cls, sequences: int, context: int, most: int = _FILL_TOKENS) -> Fill:
        """Process at most ``most`` prompt tokens, or one block of them."""
        most = max(most, BLOCK)
        tokens = context if context <= most else most // BLOCK * BLOCK
        return cls(sequences, context, max(1, min(sequences, most // tokens)), tokens)

    def __str__(self) -> str:
        words = f"{self.prompts} prompt{'s' * (self.prompts > 1)} of {self.prompt_tokens} tokens"
        if self.prompt_tokens < self.context:
            words += f", pages repeated up to {self.context}"
        if self.prompts < self.sequences:
            words += f", copied to {self.sequences} sequences"
        return words


class DecodeStep:
    """A decode step of some sequences at one context, run eagerly or replayed from a CUDA graph.

    Every step starts at the same lengths, so all do the same work.

    Args:
        model: Packed, on its device.
        sequences: How many.
        context: Tokens of each before the step, at least 1.
        seed: Seed of the prompts.
        fill: How the cache is filled; None: ``Fill.plan``.
        new_tokens: Most tokens of each that the cache takes; the step itself has one.

    Attributes:
        fill: How the cache was filled.
        logits: Logits of a captured step, after a replay.
    """

    logits: torch.Tensor

    def __init__(
        self,
        model: DeepseekV4ForCausalLM,
        sequences: int,
        context: int,
        seed: int = 0,
        fill: Fill | None = None,
        new_tokens: int = 1,
    ) -> None:
        self.model = model
        self.fill = fill or Fill.plan(sequences, context)
        generator = torch.Generator().manual_seed(seed)
        vocabulary = drawn_vocabulary(model)
        shape = (self.fill.prompts, self.fill.prompt_tokens)
        prompts = torch.randint(2, vocabulary, shape, generator=generator).tolist()
        chunk = min(shape[1], max(1, FILL_CHUNK // shape[0]))
        self.cache = model.new_cache(
            sequences, context + new_tokens, max(chunk, new_tokens), index_format=INDEX_FORMAT
        )
        rows = [self.cache.allocate() for _ in range(sequences)]
        model.prefill(prompts, self.cache, rows[: len(prompts)])
        _repeat_pages(self.cache, rows[: len(prompts)], self.fill)
        for i, row in enumerate(rows[len(prompts) :]):
            self.cache.copy(rows[i % len(prompts)], row)
        self.cache.lengths[rows] = context
        self.cache.prepare(rows, [new_tokens] * sequences, [context] * sequences)
        self.rows = torch.tensor(rows, device=model.device)
        self.lengths = self.cache.lengths.clone()
        self.tokens = torch.randint(2, vocabulary, (sequences,), generator=generator)
        self.tokens = self.tokens.to(model.device)

    def __call__(self) -> torch.Tensor:
        """Run it; logits ``[sequences, vocabulary]``, on several ranks those of this one."""
        self.cache.lengths.copy_(self.lengths)
        if self.model.parallel is None:
            return self.model.decode(self.tokens, self.cache, self.rows)
        batch = Batch.decode(self.cache.lengths[self.rows], self.rows)
        ids = self.tokens.unsqueeze(0)
        hidden, _ = self.model.model(ids, None, CacheStep(self.cache, batch))
        self.cache.advance(batch)
        return self.model.local_logits(hidden[0])

    def captured(self) -> torch.cuda.CUDAGraph:
        """Capture it in a CUDA graph."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.logits = self()
        return graph

    def experts_read(self) -> float:
        """Run it and count the distinct experts that its tokens choose, averaged over layers.

        On several ranks those that are held here, which tokens of any of them choose.
        """
        return experts_chosen(self.model, self)


def experts_chosen(model: DeepseekV4ForCausalLM, call: Callable[[], object]) -> float:
    """Run a call and count the distinct experts that its tokens choose, averaged over layers.

    Args:
        model: The model; on several ranks the experts that are held here count.
        call: Runs layers of the model.
    """
    chosen: list[torch.Tensor] = []
    held = LocalSizes.of(model.config, model.parallel).experts

    def remember(module: torch.nn.Module, inputs: Any) -> None:
        ids = inputs[1].unique()
        chosen.append(ids[(ids >= held.start) & (ids < held.stop)])

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, DeepseekV4Experts):
                handle = module.register_forward_pre_hook(remember)
                stack.callback(handle.remove)
        call()
    return statistics.mean(len(ids) for ids in chosen)


def drawn_vocabulary(model: DeepseekV4ForCausalLM) -> int:
    """Return the number of token ids that prompts are drawn from.

    Of an emulated group, rank 0's: no rank has the embeddings of others, and a token without one
    would have streams of 0, which all choose the same experts.
    """
    context = model.parallel
    if context is not None and groups.emulated_ranks(context.group.name):
        return len(model.model.vocabulary)
    return model.config.vocab_size


def _repeat_pages(cache: PagedCache, rows: Sequence[int], fill: Fill) -> None:
    """Fill the pages from the end of the prompts up to the context with those before.

    Windows and open compressor windows are those of the prompts' last tokens.
    """
    if fill.prompt_tokens >= fill.context:
        return
    for table, data in _compressed_pages(cache):
        page_tokens = BLOCK  # a page of any ratio stands for them
        filled = fill.prompt_tokens // page_tokens
        count = -(-fill.context // page_tokens)
        source = torch.arange(filled, count, device=table.device) % filled
        for row in rows:
            pages = table[row]
            data[pages[filled:count]] = data[pages[source[: len(pages) - filled]]]


def _compressed_pages(cache: PagedCache) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Page table and pages of every layer that compresses."""
    for layer in cache.layers:
        if layer.compressed_table is not None:
            for data in layer.pools(layer.ratio):
                yield layer.compressed_table, data


def replay_ms(
    graph: torch.cuda.CUDAGraph,
    replays: int = _REPLAYS,
    before: Callable[[], object] | None = None,
) -> float:
    """Return the median milliseconds of a replay; the L2 stays cold, because weights exceed it.

    ``before`` is called before each replay and is not timed.
    """
    times = []
    for _ in range(3 + replays):
        if before is not None:
            before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])
