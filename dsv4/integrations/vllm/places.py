"""Places of vLLM that the plugin calls, overrides or replaces, with the signatures it knows.

A place is compared by the text of its signature, so that a release of vLLM that changes one is
refused instead of called wrongly.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass

from dsv4.integrations.vllm import switches

VERSIONS = ("0.33",)  # minor releases that were tried


@dataclass(frozen=True)
class Place:
    """A function, class or method of vLLM.

    Attributes:
        module: Where it is defined.
        name: Its qualified name there.
        signature: Parameter names, separated by commas, as ``signature_of`` writes them.
    """

    module: str
    name: str
    signature: str


_V4 = "vllm.models.deepseek_v4"
CORE: tuple[Place, ...] = (
    Place(f"{_V4}.nvidia.model", "DeepseekV4ForCausalLM.__init__", "self, vllm_config, prefix"),
    Place(f"{_V4}.nvidia.model", "DeepseekV4ForCausalLM.load_weights", "self, weights"),
)
EXPERTS: tuple[Place, ...] = ()
LINEAR: tuple[Place, ...] = ()
_INPUTS = (
    "self, hidden_states, qr, kv, qr_scale, kv_score, indexer_kv_score, indexer_weights, "
    "positions, o_padded"
)
ATTENTION: tuple[Place, ...] = (
    Place(
        f"{_V4}.attention",
        "DeepseekV4Attention.forward",
        "self, positions, hidden_states, llama_4_scaling",
    ),
    Place(
        f"{_V4}.attention",
        "DeepseekV4Attention._alloc_attn_out",
        "self, num_tokens, hidden_states",
    ),
    Place(f"{_V4}.attention", "DeepseekV4Attention._split_qkv_and_norm", "self, qr_kv"),
    Place(f"{_V4}.attention", "DeepseekV4Attention._prepare_and_attn", _INPUTS),
    Place(f"{_V4}.attention", "DeepseekV4Attention._prepare_and_attn_eager", _INPUTS),
    Place(
        f"{_V4}.attention",
        "DeepseekV4Attention._fused_qnorm_rope_kv_insert",
        "self, q, kv, positions, attn_metadata",
    ),
    Place(
        f"{_V4}.attention",
        "DeepseekV4Attention._sparse_indexer_and_attn",
        "self, hidden_states, index_q, index_q_scale, index_weights, q, kv, positions, out",
    ),
    Place(
        f"{_V4}.nvidia.flashmla",
        "DeepseekV4FlashMLAAttention.forward_mqa",
        "self, q, kv, positions, output",
    ),
    Place(f"{_V4}.nvidia.flashmla", "DeepseekV4FlashMLAAttention._o_proj", "self, o, positions"),
    Place(
        f"{_V4}.attention",
        "DeepseekV4Indexer.forward",
        "self, hidden_states, qr, compressed_kv_score, indexer_weights, positions, rotary_emb, "
        "qr_scale, skip_compressor",
    ),
    Place(f"{_V4}.attention", "DeepseekV4Indexer._wq_b_proj", "self, qr, qr_scale"),
    Place(
        f"{_V4}.compressor",
        "DeepseekCompressor.forward",
        "self, kv_score, positions, rotary_emb",
    ),
    Place(
        f"{_V4}.compressor",
        "CompressorMetadata",
        "block_table, slot_mapping, block_size, token_to_req_indices, num_decode_tokens, "
        "c128_boundary",
    ),
    Place(
        f"{_V4}.sparse_mla",
        "DeepseekV4FlashMLAMetadata",
        "num_reqs, max_query_len, max_seq_len, num_actual_tokens, query_start_loc, slot_mapping, "
        "block_table, req_id_per_token, block_size, topk_tokens, "
        "c128a_global_decode_topk_indices, c128a_decode_topk_lens, c128a_prefill_topk_indices",
    ),
    Place(
        "vllm.v1.attention.backends.mla.indexer",
        "DeepseekV32IndexerMetadata",
        "seq_lens, max_seq_len, slot_mapping, num_decodes, num_decode_tokens, num_prefills, "
        "num_prefill_tokens, decode, prefill, positions, block_table",
    ),
    Place(
        "vllm.utils.multi_stream_utils",
        "maybe_execute_in_parallel",
        "fn0, fn1, event0, event1, aux_stream",
    ),
    Place("vllm.compilation.breakable_cudagraph", "eager_break_during_capture", "fn"),
    Place("vllm.compilation.breakable_cudagraph", "BreakableCUDAGraphCapture.is_active", ""),
    Place("vllm.forward_context", "get_forward_context", ""),
)
HYPER_CONNECTION: tuple[Place, ...] = ()
MODEL: tuple[Place, ...] = ()


def is_supported(version: str) -> bool:
    """Whether a release of vLLM, ``0.33.1+cu130`` say, is one that was tried."""
    return ".".join(version.split("+")[0].split(".")[:2]) in VERSIONS


def of_part(part: str) -> tuple[Place, ...]:
    """Places of a part of ``switches.PARTS``, or of ``"core"`` or ``"model"``."""
    return {
        "core": CORE,
        switches.EXPERTS: EXPERTS,
        switches.LINEAR: LINEAR,
        switches.ATTENTION: ATTENTION,
        switches.HYPER_CONNECTION: HYPER_CONNECTION,
        "model": MODEL,
    }[part]


def signature_of(target: object) -> str:
    """Parameter names of a function, separated by commas; stars mark the variadic ones."""
    parameters = inspect.signature(target).parameters.values()  # type: ignore[arg-type]
    return ", ".join(_stars(parameter) + parameter.name for parameter in parameters)


def _stars(parameter: inspect.Parameter) -> str:
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return "*"
    return "**" if parameter.kind is inspect.Parameter.VAR_KEYWORD else ""


def mismatches(places: Iterable[Place]) -> list[str]:
    """One sentence per place that this vLLM does not have, or has with other parameters."""
    sentences = [_mismatch(place) for place in places]
    return [sentence for sentence in sentences if sentence]


def _mismatch(place: Place) -> str:
    where = f"{place.module}.{place.name}"
    try:
        target: object = importlib.import_module(place.module)
        for name in place.name.split("."):
            target = getattr(target, name)
    except (ImportError, AttributeError) as error:
        return f"{where} is missing ({error})"
    actual = signature_of(target)
    if actual != place.signature:
        return f"{where} has the parameters ({actual}), expected ({place.signature})"
    return ""
