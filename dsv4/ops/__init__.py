"""The contract of every operator: public function, schema, shape function. Imports torch alone.

A function and the module that holds it can have the same name (``dsv4.ops.gemm``); the attribute of
this package is the function, and ``from dsv4.ops.gemm import gemm`` works as well.
"""

from __future__ import annotations

from dsv4.ops.all_reduce import all_reduce, hc_reduce_post, hc_reduce_post_pre_norm
from dsv4.ops.attention import sparse_attention
from dsv4.ops.compressor import compress_write, compressor_update, pool_windows
from dsv4.ops.compressor_paged import compress_write_paged
from dsv4.ops.compressor_projections import compressor_projections
from dsv4.ops.expert_slots import expert_decide, expert_gather
from dsv4.ops.fp8_token import moe_gather_fp8, rms_norm_fp8, swiglu_fp8
from dsv4.ops.gemm import gemm
from dsv4.ops.gemm_swiglu import gemm_swiglu
from dsv4.ops.grouped_gemm import grouped_gemm
from dsv4.ops.grouped_gemm_swiglu import grouped_gemm_swiglu, grouped_gemm_swiglu_quantize
from dsv4.ops.grouped_gemm_swiglu_fp8 import grouped_gemm_swiglu_fp8
from dsv4.ops.head_norm_rope_write_kv import head_norm_rope_write_kv
from dsv4.ops.hyper_connection import hc_head, hc_post, hc_post_pre_norm, hc_pre, hc_pre_norm
from dsv4.ops.hyper_connection_combine import hc_combine_post, hc_combine_post_pre_norm
from dsv4.ops.hyper_connection_quantize import hc_post_pre_norm_quantize, hc_pre_norm_quantize
from dsv4.ops.indexer import (
    indexer_queries,
    indexer_rotate_quantize,
    indexer_select,
    quantize_index_queries,
)
from dsv4.ops.kv_cache import Pages, fake_quantize_kv, norm_rope_write_kv, read_kv, write_kv
from dsv4.ops.moe import moe_combine, moe_gather, moe_gather_quantize, moe_permute, moe_sort
from dsv4.ops.moe_exchange import moe_return, moe_send
from dsv4.ops.nonfinite import mark_nonfinite_
from dsv4.ops.norm import head_norm_rope_, rms_norm, rms_norm_pair, rms_norm_quantize
from dsv4.ops.quantize import dequantize, quantize
from dsv4.ops.rope import rope, rope_quantize, rope_tables
from dsv4.ops.router import route_hash, route_topk
from dsv4.ops.slots import entry_slots, prefix_slots, window_slots
from dsv4.ops.swiglu import swiglu, swiglu_quantize
from dsv4.ops.verify import draw_draft, verify_greedy, verify_sampled

__all__ = [
    "Pages",
    "all_reduce",
    "compress_write",
    "compress_write_paged",
    "compressor_projections",
    "compressor_update",
    "dequantize",
    "draw_draft",
    "entry_slots",
    "expert_decide",
    "expert_gather",
    "fake_quantize_kv",
    "gemm",
    "gemm_swiglu",
    "grouped_gemm",
    "grouped_gemm_swiglu",
    "grouped_gemm_swiglu_fp8",
    "grouped_gemm_swiglu_quantize",
    "hc_combine_post",
    "hc_combine_post_pre_norm",
    "hc_head",
    "hc_post",
    "hc_post_pre_norm",
    "hc_post_pre_norm_quantize",
    "hc_pre",
    "hc_pre_norm",
    "hc_pre_norm_quantize",
    "hc_reduce_post",
    "hc_reduce_post_pre_norm",
    "head_norm_rope_",
    "head_norm_rope_write_kv",
    "indexer_queries",
    "indexer_rotate_quantize",
    "indexer_select",
    "mark_nonfinite_",
    "moe_combine",
    "moe_gather",
    "moe_gather_fp8",
    "moe_gather_quantize",
    "moe_permute",
    "moe_return",
    "moe_send",
    "moe_sort",
    "norm_rope_write_kv",
    "pool_windows",
    "prefix_slots",
    "quantize",
    "quantize_index_queries",
    "read_kv",
    "rms_norm",
    "rms_norm_fp8",
    "rms_norm_pair",
    "rms_norm_quantize",
    "rope",
    "rope_quantize",
    "rope_tables",
    "route_hash",
    "route_topk",
    "sparse_attention",
    "swiglu",
    "swiglu_fp8",
    "swiglu_quantize",
    "verify_greedy",
    "verify_sampled",
    "window_slots",
    "write_kv",
]
