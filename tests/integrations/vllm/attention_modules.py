"""vLLM's attention modules without its engine: attributes as its constructors set them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.models.deepseek_v4.attention import DeepseekV4Attention, DeepseekV4Indexer
from vllm.models.deepseek_v4.compressor import CompressorMetadata, DeepseekCompressor
from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention
from vllm.models.deepseek_v4.sparse_mla import DeepseekV4FlashMLAMetadata
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadata
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadata

from dsv4.config import CSA, SLIDING
from dsv4.layers.attention import DeepseekV4Attention as Layer
from dsv4.ops.rope import rope_tables

BLOCK, WINDOW_BLOCK = 256, 64
PREFIX = "model.layers.0.attn"


class Projection(nn.Module):
    """A linear layer of vLLM: a weight, and a result with or without a bias beside it."""

    def __init__(self, weight: torch.Tensor, with_bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.with_bias = with_bias

    def forward(self, x: torch.Tensor) -> Any:
        """Multiply."""
        y = nn.functional.linear(x, self.weight)
        return (y, None) if self.with_bias else y


def norm(weight: torch.Tensor) -> nn.Module:
    """A module with the weight of an RMS norm."""
    module = nn.Module()
    module.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return module


def bare(cls: type) -> Any:
    """A module of a class whose constructor is not called."""
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    return module


@dataclass
class Sizes:
    """What vLLM's engine decides.

    Attributes:
        max_len: Longest sequence, a multiple of 256.
        sequences: Rows of its batches.
        top_k: Entries that the indexer chooses.
        max_tokens: Most tokens of a step.
        fp4_keys: Whether index keys are MXFP4.
    """

    max_len: int = 256
    sequences: int = 3
    top_k: int = 512
    max_tokens: int = 256
    fp4_keys: bool = False


def cache_of(blocks: int, entries: int, entry_bytes: int) -> torch.Tensor:
    """A layer's pages in blocks that hold a page of another layer, too."""
    page = -(-entries * entry_bytes // 576) * 576
    memory = torch.zeros(blocks, 2, page, dtype=torch.uint8)
    strides = (2 * page, entry_bytes, 1)
    return memory[:, 1].as_strided((blocks, entries, entry_bytes), strides, page)


def _compressor(
    source: Any, prefix: str, key_prefix: str, layers: dict[str, Any], sizes: Sizes
) -> DeepseekCompressor:
    module = bare(DeepseekCompressor)
    ratio, width = source.compress_rate, source.head_dim
    module.compress_ratio, module.head_dim, module.overlap = ratio, width, source.overlap
    module.coff, module.rope_head_dim = 1 + source.overlap, source.rope_dim
    module.rms_norm_eps, module.use_fp4_cache = (
        source.kv_norm.variance_epsilon,
        sizes.fp4_keys and width == 128,
    )
    module.prefix, module.k_cache_prefix = prefix, key_prefix
    module._quant_block = 64 if width == 512 else 128
    module.ape = nn.Parameter(source.position_bias.detach().clone(), requires_grad=False)
    weight = torch.cat((source.kv_proj.weight, source.gate_proj.weight))
    module.fused_wkv_wgate = Projection(weight.detach(), True)
    module.norm = norm(source.kv_norm.weight)
    block = 4 if ratio == 4 else 8
    state = torch.full(
        (sizes.sequences * (sizes.max_len // block) + 1, block, 2 * module.coff * width), torch.nan
    )
    module.state_cache = SimpleNamespace(
        prefix=f"{prefix}.state_cache", kv_cache=state, dtype=torch.float32, block_size=block
    )
    module._static_forward_context = layers
    return module


def vllm_module(layer: Layer, sizes: Sizes) -> DeepseekV4FlashMLAAttention:
    """vLLM's module with the weights of this package's layer."""
    module: Any = bare(DeepseekV4FlashMLAAttention)
    config, ratio = layer.config, max(1, layer.config.compress_rate(layer.layer_idx))
    module.prefix, module.compress_ratio = PREFIX, ratio
    module.hidden_size, module.window_size = config.hidden_size, config.sliding_window
    module.q_lora_rank, module.head_dim = config.q_lora_rank, config.head_dim
    module.rope_head_dim = config.qk_rope_head_dim
    module.n_local_heads, module.padded_heads = config.num_attention_heads, 64
    module.n_local_groups, module.eps = config.o_groups, config.rms_norm_eps
    module.scale, module.max_image_tokens = layer.scaling, 0
    module.kv_cache_dtype, module.kv_cache_torch_dtype = "fp8_ds_mla", torch.uint8
    module.attn_sink = nn.Parameter(torch.full((64,), -torch.inf), requires_grad=False)
    module.attn_sink.data[: module.n_local_heads] = layer.sinks.detach()
    down = torch.cat((layer.q_a_proj.weight, layer.kv_proj.weight)).detach()
    module.fused_wqa_wkv = Projection(down, True)
    module.q_norm, module.kv_norm = norm(layer.q_a_norm.weight), norm(layer.kv_norm.weight)
    module.wq_b = Projection(layer.q_b_proj.weight.detach(), False)
    module.wo_a = Projection(layer.o_a_proj.weight.detach(), False)
    module.wo_b = Projection(layer.o_b_proj.weight.detach(), False)
    frequencies = layer.rotary_emb.inv_freq(torch.device("cpu"), layer.rope_layer_type)
    angles = torch.cat(rope_tables(torch.arange(sizes.max_len), frequencies), dim=1)
    module.rotary_emb = module.indexer_rotary_emb = SimpleNamespace(cos_sin_cache=angles)
    blocks = sizes.sequences * (sizes.max_len // WINDOW_BLOCK) + 1
    module.swa_cache_layer = SimpleNamespace(
        prefix=f"{PREFIX}.swa_cache", kv_cache=cache_of(blocks, WINDOW_BLOCK, 584)
    )
    blocks = sizes.sequences * (sizes.max_len // BLOCK) + 1
    module.kv_cache = torch.tensor([])
    layers: dict[str, Any] = {PREFIX: module}
    module.compressor = module.indexer = None
    if layer.layer_type != SLIDING:
        module.kv_cache = cache_of(blocks, BLOCK // ratio, 584)
        module.compressor = _compressor(
            layer.compressor, f"{PREFIX}.compressor", PREFIX, layers, sizes
        )
    module.topk_indices_buffer = torch.full((sizes.max_tokens, sizes.top_k), -1, dtype=torch.int32)
    if layer.layer_type == CSA:
        module.indexer = _indexer(layer.compressor.indexer, layers, blocks, sizes)
    module.aux_stream_list, module.ln_events = None, [None] * 4
    module._prepare_and_attn_fn = module._prepare_and_attn
    return module


def _indexer(source: Any, layers: dict[str, Any], blocks: int, sizes: Sizes) -> DeepseekV4Indexer:
    module: Any = bare(DeepseekV4Indexer)
    prefix = f"{PREFIX}.indexer"
    module.n_head, module.head_dim, module.compress_ratio = source.num_heads, source.head_dim, 4
    module.topk_tokens, module.use_fp4_kv = sizes.top_k, sizes.fp4_keys
    module.softmax_scale = source.head_dim**-0.5
    module.wq_b = Projection(source.q_b_proj.weight.detach(), True)
    module.weights_proj = Projection(source.scorer.weights_proj.weight.detach(), True)
    module.k_cache = SimpleNamespace(
        prefix=f"{prefix}.k_cache",
        kv_cache=cache_of(blocks, BLOCK // 4, 68 if sizes.fp4_keys else 132),
    )
    layers[module.k_cache.prefix] = module.k_cache
    module.compressor = _compressor(
        source, f"{prefix}.compressor", module.k_cache.prefix, layers, sizes
    )
    module.indexer_op = SimpleNamespace(candidate_blocks=None)
    module.aux_stream, module.ln_events = None, [None, None]
    return module


class Tables:
    """Random block tables of every cache of a module."""

    def __init__(self, module: Any, sizes: Sizes, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def table(block: int) -> torch.Tensor:
            columns = sizes.max_len // block
            order = torch.randperm(sizes.sequences * columns, generator=generator) + 1
            return order.view(sizes.sequences, columns).to(torch.int32)

        self.window = table(WINDOW_BLOCK)
        self.states = {4: table(4), 8: table(8)}
        self.compressed = table(BLOCK)


@dataclass
class Step:
    """New tokens of some sequences: the decode part first, as vLLM orders them.

    Attributes:
        pieces: Sequence, start and number of tokens.
        decodes: How many of the pieces are decodes.
        padding: Tokens behind them that a padded graph has.
    """

    pieces: list[tuple[int, int, int]]
    decodes: int
    padding: int = 0


def metadata(module: Any, tables: Tables, step: Step, window: int) -> tuple[Any, torch.Tensor]:
    """``(attn_metadata, positions)`` of a step, as vLLM's builders make them."""
    rows = [(i, s, p) for i, (s, b, n) in enumerate(step.pieces) for p in range(b, b + n)]
    count, pad = len(rows), step.padding
    requests = torch.tensor([r[0] for r in rows] + [0] * pad, dtype=torch.int32)
    positions = torch.tensor([r[2] for r in rows] + [7] * pad)
    order = torch.tensor([s for s, *_ in step.pieces])
    valid = torch.tensor([True] * count + [False] * pad)
    decode_tokens = sum(n for *_, n in step.pieces[: step.decodes])
    if not step.pieces[step.decodes :]:
        decode_tokens += pad
    longest = max(b + n for _, b, n in step.pieces)

    def slots(table: torch.Tensor, block: int, at: torch.Tensor) -> torch.Tensor:
        row = order[requests.long()]
        return torch.where(valid, table[row, at // block].long() * block + at % block, -1)

    seen = torch.full((count + pad, window), -1, dtype=torch.int32)
    for t, (_, s, p) in enumerate(rows):
        first = max(0, p - window + 1)
        at = torch.arange(first, p + 1)
        seen[t, : at.shape[0]] = (
            tables.window[s, at // WINDOW_BLOCK] * WINDOW_BLOCK + at % WINDOW_BLOCK
        ).int()
    rest = count + pad - decode_tokens
    made: dict[str, Any] = {
        module.swa_cache_layer.prefix: DeepseekSparseSWAMetadata(
            block_table=tables.window[order],
            slot_mapping=slots(tables.window, WINDOW_BLOCK, positions),
            block_size=WINDOW_BLOCK,
            is_valid_token=valid,
            token_to_req_indices=requests,
            decode_swa_indices=seen[:decode_tokens].unsqueeze(1),
            prefill_swa_indices=seen[decode_tokens:].unsqueeze(1) if rest else None,
            num_decodes=step.decodes,
            num_prefills=len(step.pieces) - step.decodes,
            num_decode_tokens=decode_tokens,
            num_prefill_tokens=rest,
        )
    }
    if module.compressor is None:
        return made, positions
    ratio, block_table = module.compress_ratio, tables.compressed[order]
    closes = valid & ((positions + 1) % ratio == 0)
    entry = torch.where(closes, positions // ratio, 0)
    entries = torch.where(closes, slots(tables.compressed, BLOCK // ratio, entry), -1)
    made[module.prefix] = DeepseekV4FlashMLAMetadata(
        num_reqs=len(step.pieces),
        max_query_len=max(n for *_, n in step.pieces),
        max_seq_len=longest,
        num_actual_tokens=count + pad,
        query_start_loc=torch.zeros(0),
        slot_mapping=entries,
        block_table=block_table,
        req_id_per_token=requests,
        block_size=BLOCK,
        topk_tokens=0,
    )
    compressors = [module.compressor]
    if module.indexer is not None:
        compressors.append(module.indexer.compressor)
        made[module.indexer.k_cache.prefix] = DeepseekV32IndexerMetadata(
            seq_lens=torch.zeros(0),
            max_seq_len=longest,
            slot_mapping=entries,
            num_decodes=step.decodes,
            num_decode_tokens=decode_tokens,
            num_prefills=len(step.pieces) - step.decodes,
            num_prefill_tokens=rest,
            block_table=block_table,
        )
    for compressor in compressors:
        block = compressor.state_cache.block_size
        made[compressor.state_cache.prefix] = CompressorMetadata(
            block_table=tables.states[block][order],
            slot_mapping=slots(tables.states[block], block, positions),
            block_size=block,
            token_to_req_indices=requests,
        )
    return made, positions


def run(module: DeepseekV4Attention, made: Any, positions: torch.Tensor, x: torch.Tensor) -> Any:
    """Call vLLM's forward in a forward context with this metadata."""
    context = ForwardContext(no_compile_layers={}, attn_metadata=made, slot_mapping={})
    with override_forward_context(context), torch.inference_mode():
        return module(positions, x)
