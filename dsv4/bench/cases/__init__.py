"""The problem sizes of every operator: what the layers of a model of that size call.

One function per operator makes its cases from a model configuration and a token count. Sizes are
those of the published models (specification, sections 1 and 12), or of ``ModelConfig.tiny``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dsv4.bench.cases import (
    elementwise,
    exchange,
    expert_slots,
    fused,
    gemm,
    moe,
    paged,
    projections,
    sequence,
    speculation,
)
from dsv4.bench.problem import Case, UsageError
from dsv4.config import ModelConfig

PRESETS: dict[str, Callable[[], ModelConfig]] = {
    "tiny": ModelConfig.tiny,
    "flash": ModelConfig.flash,
    "pro": ModelConfig.pro,
}
Maker = Callable[[ModelConfig, int], Iterator[Case]]
# What a public function calls, where that is not the operator of its name.
_SEVERAL = {
    "quantize": ("quantize_nvfp4", "quantize_mxfp4", "quantize_fp8_block", "quantize_fp8_token")
}


def cases(op: str, preset: str, tokens: int) -> list[Case]:
    """All cases of an operator.

    Args:
        op: A key of ``MAKERS``.
        preset: A key of ``PRESETS``.
        tokens: Tokens in the batch, at least 1.

    Raises:
        UsageError: if a name is unknown or ``tokens`` is below 1.
    """
    if op not in MAKERS:
        raise UsageError(f"operator is {op!r}, wanted one of {', '.join(MAKERS)}")
    if preset not in PRESETS:
        raise UsageError(f"shapes are {preset!r}, wanted one of {', '.join(PRESETS)}")
    if tokens < 1:
        raise UsageError(f"tokens is {tokens}, wanted at least 1")
    return list(MAKERS[op](PRESETS[preset](), tokens))


def operators(op: str) -> tuple[str, ...]:
    """The operators, as ``dsv4.dispatch`` names them, that a public function calls."""
    return _SEVERAL.get(op, (op,))


# By name of a public function of ``dsv4.ops``.
MAKERS: dict[str, Maker] = {
    "quantize": gemm.quantize,
    "dequantize": gemm.dequantize,
    "gemm": gemm.gemm,
    "gemm_swiglu": gemm.gemm_swiglu,
    "grouped_gemm": moe.grouped_gemm,
    "grouped_gemm_swiglu": moe.grouped_gemm_swiglu,
    "grouped_gemm_swiglu_fp8": moe.grouped_gemm_swiglu_fp8,
    "grouped_gemm_swiglu_quantize": moe.grouped_gemm_swiglu_quantize,
    "mark_nonfinite_": elementwise.mark_nonfinite_,
    "rms_norm": elementwise.rms_norm,
    "rms_norm_pair": fused.rms_norm_pair,
    "head_norm_rope_": fused.head_norm_rope_,
    "rms_norm_fp8": fused.rms_norm_fp8,
    "rms_norm_quantize": fused.rms_norm_quantize,
    "rope_tables": fused.rope_tables,
    "rope": elementwise.rope,
    "swiglu": elementwise.swiglu,
    "route_topk": moe.route_topk,
    "route_hash": moe.route_hash,
    "moe_permute": moe.moe_permute,
    "moe_gather": moe.moe_gather,
    "moe_sort": moe.moe_sort,
    "moe_combine": moe.moe_combine,
    "expert_decide": expert_slots.expert_decide,
    "expert_gather": expert_slots.expert_gather,
    "moe_send": exchange.moe_send,
    "moe_return": exchange.moe_return,
    "hc_pre": elementwise.hc_pre,
    "hc_post": elementwise.hc_post,
    "hc_head": elementwise.hc_head,
    "hc_combine_post": fused.hc_combine_post,
    "hc_combine_post_pre_norm": fused.hc_combine_post_pre_norm,
    "moe_gather_fp8": fused.moe_gather_fp8,
    "moe_gather_quantize": fused.moe_gather_quantize,
    "rope_quantize": fused.rope_quantize,
    "swiglu_fp8": fused.swiglu_fp8,
    "swiglu_quantize": fused.swiglu_quantize,
    "hc_post_pre_norm": fused.hc_post_pre_norm,
    "hc_pre_norm": fused.hc_pre_norm,
    "hc_pre_norm_quantize": fused.hc_pre_norm_quantize,
    "hc_post_pre_norm_quantize": fused.hc_post_pre_norm_quantize,
    "all_reduce": elementwise.all_reduce,
    "hc_reduce_post": elementwise.hc_reduce_post,
    "hc_reduce_post_pre_norm": fused.hc_reduce_post_pre_norm,
    "pool_windows": sequence.pool_windows,
    "compressor_projections": projections.compressor_projections,
    "compressor_update": sequence.compressor_update,
    "compress_write": sequence.compress_write,
    "compress_write_paged": paged.compress_write_paged,
    "indexer_rotate_quantize": sequence.indexer_rotate_quantize,
    "indexer_select": sequence.indexer_select,
    "sparse_attention": sequence.sparse_attention,
    "entry_slots": sequence.entry_slots,
    "prefix_slots": sequence.prefix_slots,
    "window_slots": sequence.window_slots,
    "norm_rope_write_kv": fused.norm_rope_write_kv,
    "head_norm_rope_write_kv": fused.head_norm_rope_write_kv,
    "indexer_queries": fused.indexer_queries,
    "quantize_index_queries": fused.quantize_index_queries,
    "write_kv": sequence.write_kv,
    "read_kv": sequence.read_kv,
    "fake_quantize_kv": sequence.fake_quantize_kv,
    "verify_greedy": speculation.verify_greedy,
    "verify_sampled": speculation.verify_sampled,
    "draw_draft": speculation.draw_draft,
}
