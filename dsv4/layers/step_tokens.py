"""The most tokens of a step by default, and the memory that such a step needs on a GPU."""

from __future__ import annotations

import torch
from torch import nn

from dsv4.config import ModelConfig
from dsv4.kv_cache.paged_cache import PagedCache
from dsv4.layers._expert_staging import ExpertStaging
from dsv4.layers.experts import DeepseekV4Experts

# Tokens of a prefill step of ``dsv4.serving.Runner`` by default. On an H100 one step of 4096 tokens
# takes 43 to 49 ms and two of 2048 take 48 to 81 ms (Flash, 64 experts, 8 layers, 2026-11-24).
STEP_TOKENS = 4096
_BYTES = torch.bfloat16.itemsize
# What PyTorch's allocator takes for a step, in bytes of its tensors: blocks do not fit exactly.
_SLACK = 1.25
# Of the GPU, for kernels, CUDA graphs of decode steps and workspaces of libraries.
_GRAPH_BYTES = 1_500_000_000


def step_tokens(model: nn.Module) -> int:
    """Return the most tokens of a step of a model by default.

    They are ``STEP_TOKENS``, and where long prompts pass experts in host memory through a buffer
    ``STAGED_STEP_TOKENS``, or as many as memory allowed when the model was loaded
    (``limit_step_tokens``) or ``reserve_experts`` reserved.
    """
    buffers = _buffers_of(model)
    if not buffers:
        return STEP_TOKENS
    layers = (layer for layer in model.modules() if isinstance(layer, DeepseekV4Experts))
    reserved = [layer.workspace.max_tokens for layer in layers if layer.workspace is not None]
    most = min(buffer.step_tokens for buffer in buffers)
    return min([most, *(max(STEP_TOKENS, tokens) for tokens in reserved)])


def prepared_tokens(model: nn.Module) -> int:
    """Return the tokens of a sequence that ``generate`` is prepared for by default.

    These are a prompt of one step, and as many tokens after it.
    """
    return 2 * step_tokens(model)


def limit_step_tokens(model: nn.Module, config: ModelConfig, free: int) -> int:
    """Make steps of a model with a buffer for long prompts as short as memory demands.

    Call it before anything is prepared. Such a step is never shorter than ``STEP_TOKENS``.

    Args:
        model: A model whose experts are in their places.
        config: Its configuration.
        free: Free bytes of the GPU.

    Returns:
        ``step_tokens``.
    """
    tokens = step_tokens(model)
    while tokens > STEP_TOKENS and prompt_bytes(config, tokens) > free:
        tokens = shorter(tokens)
    for buffer in _buffers_of(model):
        buffer.step_tokens = tokens
    return tokens


def shorter(tokens: int) -> int:
    """Return the next shorter default: a half, and not below ``STEP_TOKENS``."""
    return max(STEP_TOKENS, tokens // 2)


def _buffers_of(model: nn.Module) -> list[ExpertStaging]:
    layers = (layer for layer in model.modules() if isinstance(layer, DeepseekV4Experts))
    hosted = (layer.hosted for layer in layers if layer.hosted is not None)
    return [layer.staging for layer in hosted if layer.staging is not None]


def step_bytes(config: ModelConfig, tokens: int, context: int | None = None) -> int:
    """Return the bytes of a step's tensors in bfloat16, without weights and cache.

    Most are alive while routed experts run or in attention. For a prompt of 16384 tokens (GB):

    ========================================  =====  =====
    tensors                                   Flash  Pro
    ========================================  =====  =====
    streams before and after a layer's half   1.07   1.88
    rows of 6 experts a token, their results  1.61   2.82
    SwiGLU of gate and up                     0.40   0.60
    five tensors of the hidden size           0.67   1.17
    page slots and positions                  0.04   0.04
    together, during the experts              3.80   6.52
    ========================================  =====  =====

    During attention, with queries, results and keys of the indexer, these are 3.4 and 6.3 GB.
    Logits are those of a prompt's last token. With the context, page slots grow: at 1048576 tokens
    by 1.1 GB.

    Args:
        config: The model's.
        tokens: Tokens of the step.
        context: Tokens of the sequence, those of the step included; None: ``tokens``.
    """
    context = tokens if context is None else context
    hidden, streams = config.hidden_size, config.hc_mult * config.hidden_size
    chosen = config.num_experts_per_tok
    experts = 2 * streams + chosen * (2 * hidden + config.moe_intermediate_size) + 5 * hidden
    attention = streams + 2 * config.num_attention_heads * config.head_dim + 2 * hidden
    attention += config.index_n_heads * config.index_head_dim + 2 * config.q_lora_rank
    indices = 8 * (config.sliding_window + -(-context // max(config.compress_rates.values())))
    # Mixes of this half of a layer and of the next one, weights of index heads, choices.
    small = 8 * (2 * config.hc_mult * (config.hc_mult + 2) + config.index_n_heads + 16)
    largest = max(_BYTES * experts, _BYTES * attention + 8 * config.index_topk)
    return tokens * (largest + indices + small)


def cache_bytes(
    config: ModelConfig,
    max_tokens: int,
    max_chunk: int,
    sequences: int = 1,
    pool: int = 0,
    index_format: str = "plain",
) -> int:
    """Return the bytes of a runner's cache.

    Args:
        config: The model's.
        max_tokens: Tokens of the longest sequence.
        max_chunk: Most new tokens of a step.
        sequences: Rows of the cache.
        pool: Tokens of all sequences; 0: ``max_tokens`` of each.
        index_format: Format of the indexer's keys.
    """
    cache = PagedCache(
        config,
        max_sequences=sequences,
        max_tokens=max_tokens,
        max_chunk=max_chunk,
        device="meta",
        dtype=torch.bfloat16,
        index_format=index_format,
        pool_tokens=pool or sequences * max_tokens,
    )
    return cache.nbytes()


def free_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that a step can have, those in the allocator's cache included."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def prompt_bytes(config: ModelConfig, tokens: int) -> int:
    """Return the bytes of the GPU, beside weights, for a prompt of one step.

    They hold the step and a quarter more for the allocator, the cache of a sequence of twice as
    many tokens, and 1.5 GB for graphs and kernels. For 16384 tokens these are 6.9 GB in Flash (step
    3.8, cache 0.6) and 10.5 GB in Pro (6.5 and 0.8), for 4096 tokens 2.9 and 3.8 GB.
    """
    longest = min(2 * tokens, config.max_position_embeddings)
    cache = cache_bytes(config, longest, min(tokens, longest))
    return chunk_bytes(config, tokens, longest) + cache


def chunk_bytes(config: ModelConfig, tokens: int, context: int) -> int:
    """Return the bytes for a step of a prompt and for graphs, without the cache."""
    return int(_SLACK * step_bytes(config, tokens, context)) + _GRAPH_BYTES
