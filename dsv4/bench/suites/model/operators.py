"""Operators by the names of the kernels that do their work."""

from __future__ import annotations

import re

NVFP4_GEMM, FP8_GEMM, EXPERTS = "GEMM, NVFP4", "GEMM, FP8", "routed experts, grouped GEMM"
ATTENTION, INDEXER, ROUTER = "attention", "indexer", "router"
PERMUTATION, HYPER = "expert permutation", "hyper-connection"
COMPRESSOR, CACHE, NORM, ROPE = "compressor", "KV cache", "norm", "RoPE"
CHECKS, SUMS = "checks for NaN", "sums over ranks"
EXCHANGE, HOST = "tokens over ranks", "experts from host memory"
SWIGLU, QUANTIZE, DEQUANTIZE = "SwiGLU", "quantize", "dequantize"
SAMPLING, VERIFICATION, PACKING = "sampling", "drafts, verification", "weight packing"
CUBLAS, TORCH, COPIES, OTHER = "GEMM, cuBLAS", "torch", "copies", "other"

# CuTeDSL: the class of a kernel, whose name the entry contains.
CLASSES = {
    "SmallMKernel": NVFP4_GEMM,
    "SmallMRingKernel": NVFP4_GEMM,
    "WgmmaKernel": NVFP4_GEMM,
    "Tcgen05Kernel": NVFP4_GEMM,
    "Fp8WgmmaKernel": FP8_GEMM,
    "SmallMFp8Kernel": FP8_GEMM,
    "FoldedFp8WgmmaKernel": FP8_GEMM,
    "GroupedTcgen05Kernel": EXPERTS,
    "GroupedWgmmaKernel": EXPERTS,
    "E4m3Kernel": NVFP4_GEMM,
    "BlockE4m3Kernel": FP8_GEMM,
    "ConvertedE4m3Kernel": NVFP4_GEMM,
    "ConvertE4m3Kernel": DEQUANTIZE,
    "GroupedE4m3Kernel": EXPERTS,
    "GroupedConvertedE4m3Kernel": EXPERTS,
    "GroupedSmallMKernel": EXPERTS,
    "GroupedWgmmaSharedScalesKernel": EXPERTS,
    "AttentionKernel": ATTENTION,
    "ColumnsKernel": ATTENTION,
    "NarrowKernel": ATTENTION,
    "MergeKernel": ATTENTION,
    "TopkKernel": INDEXER,
    "TopkClusterKernel": INDEXER,
    "IndexerLogitsKernel": INDEXER,
}
# Triton: the kernel's function.
FUNCTIONS = {
    "_attend_kernel": ATTENTION,
    "_merge_kernel": ATTENTION,
    "_queries_kernel": INDEXER,
    "_codes_kernel": INDEXER,
    "score_kernel": INDEXER,
    "score_pages_kernel": INDEXER,
    "select_kernel": INDEXER,
    "_small_m_logits_kernel": ROUTER,
    "_logits_kernel": ROUTER,
    "_large_m_logits_kernel": ROUTER,
    "_topk_kernel": ROUTER,
    "_hash_kernel": ROUTER,
    "_count_kernel": PERMUTATION,
    "_histogram_kernel": PERMUTATION,
    "_scan_kernel": PERMUTATION,
    "_scatter_kernel": PERMUTATION,
    "_decide_kernel": HOST,
    "_load_kernel": HOST,
    "_gather_kernel": PERMUTATION,
    "_gather_quantize_kernel": PERMUTATION,
    "_sort_kernel": PERMUTATION,
    "_combine_kernel": PERMUTATION,
    "_mixing_gemm_kernel": HYPER,
    "_mixing_small_m_kernel": HYPER,
    "_split_bf16_kernel": HYPER,
    "_mixing_large_m_kernel": HYPER,
    "coefficients_kernel": HYPER,
    "_post_kernel": HYPER,
    "_finish_kernel": HYPER,
    "_projections_kernel": COMPRESSOR,
    "_vectors_kernel": COMPRESSOR,
    "_update_kernel": COMPRESSOR,
    "_entry_kernel": COMPRESSOR,
    "_windows_kernel": COMPRESSOR,
    "_pool_kernel": COMPRESSOR,
    "_pool_many_kernel": COMPRESSOR,
    "_paged_entry_kernel": COMPRESSOR,
    "_slots_kernel": CACHE,
    "_write_kernel": CACHE,
    "_read_kernel": CACHE,
    "_round_trip_kernel": CACHE,
    "_norm_rope_write_kernel": CACHE,
    "_norm_rope_write_few_kernel": CACHE,
    "_rms_norm_kernel": NORM,
    "_pair_kernel": NORM,
    "_head_kernel": NORM,
    "_heads_and_entries_kernel": NORM,
    "_norm_quantize_kernel": NORM,
    "_norm_quantize_few_kernel": NORM,
    "_tables_kernel": ROPE,
    "_rope_kernel": ROPE,
    "_rope_quantize_kernel": ROPE,
    "_rope_quantize_row_kernel": ROPE,
    "_swiglu_kernel": SWIGLU,
    "_swiglu_quantize_kernel": SWIGLU,
    "_swiglu_quantize_row_kernel": SWIGLU,
    "_nvfp4_kernel": QUANTIZE,
    "_nvfp4_row_kernel": QUANTIZE,
    "_amax_kernel": QUANTIZE,
    "_mxfp4_kernel": QUANTIZE,
    "_mxfp4_few_kernel": QUANTIZE,
    "_fp8_block_kernel": QUANTIZE,
    "_fp8_token_kernel": QUANTIZE,
    "_fp8_token_many_kernel": QUANTIZE,
    "_norm_fp8_kernel": NORM,
    "_swiglu_fp8_kernel": SWIGLU,
    "_gather_fp8_kernel": PERMUTATION,
    "_gemm_kernel": FP8_GEMM,
    "_sum_kernel": FP8_GEMM,
    "_packed_gemm_kernel": NVFP4_GEMM,
    "_packed_sum_kernel": NVFP4_GEMM,
    "_nvfp4_gemm_kernel": NVFP4_GEMM,
    "_grouped_kernel": EXPERTS,
    "_grouped_nvfp4_kernel": EXPERTS,
    "_dequantize_kernel": DEQUANTIZE,
    "_unpack_kernel": DEQUANTIZE,
    "_decode_fp8_kernel": DEQUANTIZE,
    "_pack_kernel": PACKING,
    "_push_kernel": SUMS,
    "_send_kernel": EXCHANGE,
    "_receive_kernel": EXCHANGE,
    "_return_kernel": EXCHANGE,
    "_collect_kernel": EXCHANGE,
    "_mark_kernel": CHECKS,
    "_largest_kernel": SAMPLING,
    "_scores_kernel": SAMPLING,
    "_filter_kernel": SAMPLING,
    "_highest_kernel": VERIFICATION,
    "_greedy_kernel": VERIFICATION,
    "_relatives_kernel": VERIFICATION,
    "_floors_kernel": VERIFICATION,
    "_masses_kernel": VERIFICATION,
    "_candidates_kernel": VERIFICATION,
    "_emit_kernel": VERIFICATION,
    "_distribution_kernel": VERIFICATION,
    "_drawn_kernel": VERIFICATION,
}
# Libraries: the first pattern that the name contains, in lower case.
_LIBRARIES = (
    (r"memcpy|memset", COPIES),
    (r"nccl|shot_all_reduce", SUMS),
    (r"nvjet|cublas|splitk|gemm|gemv|cutlass|dot_kernel", CUBLAS),
    (r"at::|at_cuda|elementwise|cub::|reduce_kernel|index", TORCH),
)
_CLASS = re.compile(r"kernel_cutlass_kernel_+(\w*?Kernel)")


def operator_of(kernel: str) -> str:
    """The operator that a kernel belongs to, by the name that a profiler gives it."""
    entry = _CLASS.match(kernel)
    if entry:
        return CLASSES.get(entry.group(1), OTHER)
    if kernel in FUNCTIONS:
        return FUNCTIONS[kernel]
    name = kernel.lower()
    return next((op for pattern, op in _LIBRARIES if re.search(pattern, name)), OTHER)
