"""Reasons why Triton kernels cannot run a call of an operator; None where they can.

Named in ``dsv4.implementations``. Nothing here imports Triton.
"""

from __future__ import annotations

import torch

from dsv4.device import is_interpreting, no_triton, shared_memory
from dsv4.dispatch import AUTO, Call, implementations
from dsv4.kv_cache.pages import GROUP
from dsv4.ops.attention import SparseAttentionArgs
from dsv4.ops.compressor import CompressWriteArgs
from dsv4.ops.compressor_paged import CompressWritePagedArgs
from dsv4.ops.compressor_projections import CompressorProjectionsArgs
from dsv4.ops.expert_slots import ExpertGatherArgs
from dsv4.ops.gemm import GemmArgs
from dsv4.ops.gemm_swiglu import GemmSwigluArgs
from dsv4.ops.grouped_gemm import GroupedGemmArgs
from dsv4.ops.grouped_gemm_swiglu import GroupedGemmSwigluArgs, GroupedGemmSwigluQuantizeArgs
from dsv4.ops.grouped_gemm_swiglu_fp8 import gemm_record
from dsv4.ops.head_norm_rope_write_kv import HeadNormRopeWriteKvArgs
from dsv4.ops.indexer import IndexerSelectArgs
from dsv4.ops.kv_cache import NormRopeWriteKvArgs, ReadKvArgs, WriteKvArgs
from dsv4.ops.quantize import DequantizeArgs
from dsv4.ops.rope import RopeQuantizeArgs
from dsv4.ops.unsupported import (
    dense_gemm_dtypes,
    float64_result,
    float64_tensor,
    gapped,
    gapped_pages,
    gemm_dtypes,
    misaligned,
    not_in_fragments,
    odd_dims,
    too_many,
    wide_row,
)
from dsv4.ops.verify import DrawDraftArgs, VerifyGreedyArgs, VerifySampledArgs
from dsv4.quant.formats import FP8_BLOCK, FP8_TOKEN, FRAGMENTS, MXFP4, NVFP4, SWIZZLED
from dsv4.quant.fragments import fits

LARGEST_SELECTION = 4096  # entries that a kernel chooses per token
LARGEST_HEAD = 512  # dims of a head that a program holds
MOST_EXPERTS = 4094  # experts that a kernel sorts by
_HALVES = frozenset((torch.bfloat16, torch.float16))
# Most tokens for which a GEMM with a four-bit weight takes less time than dequantising the weight
# and cuBLAS. Computed, not measured: at 60 % of cuBLAS's rate the times are equal at 3.45 tokens
# per multiplication that a GPU does while it moves a byte: 430 tokens (A100) to 1500 (GB10).
MOST_PACKED_TOKENS = 512


def any_call(call: Call) -> str | None:
    """Reasons that hold for every operator: the device, and tensors in float64."""
    return no_triton(call.device) or float64_tensor(call.args)


def expert_gather(call: Call) -> str | None:
    """Return why ``expert_gather`` is unsupported, or None."""
    args: ExpertGatherArgs = call.args
    rows = args.rows
    in_host = call.device.type == "cuda" and rows.device.type == "cpu" and rows.numel() > 0
    if in_host and not rows.is_pinned():
        return "rows are in pageable host memory, wanted pinned memory, which a GPU reads"
    return any_call(call)


def quantize_nvfp4(call: Call) -> str | None:
    """Return why ``quantize_nvfp4`` is unsupported, or None."""
    return any_call(call) or _quantized(call, call.args.x)


def _quantized(call: Call, x: torch.Tensor) -> str | None:
    """Return why codes of NVFP4 are unsupported for rows of as many columns as ``x`` or fewer."""
    reason = wide_row(x.shape[-1]) if call.args.scaling == "token" else None
    return reason or _many_matrices(x)


def _many_matrices(x: torch.Tensor) -> str | None:
    return too_many(x.shape[:-2].numel(), "matrices")


def quantize_blocks(call: Call) -> str | None:
    """Return why quantisation to another format than NVFP4 is unsupported, or None."""
    return any_call(call) or _many_matrices(call.args.x)


def dequantize(call: Call) -> str | None:
    """Return why ``dequantize`` is unsupported, or None."""
    args: DequantizeArgs = call.args
    reason = any_call(call) or float64_result(args.dtype)
    if reason is None and args.layout == FRAGMENTS and args.format != FP8_TOKEN.name:
        reason = f"the weight has layout {FRAGMENTS!r}, which only the reference unpacks"
    return reason or _many_matrices(args.codes)


def packed_gemm(call: Call) -> str | None:
    """Return why ``gemm`` with an NVFP4 weight, dequantized first, is unsupported, or None."""
    args: GemmArgs = call.args
    wrong = not_in_fragments(args.layout) or dense_gemm_dtypes(args)
    return wrong or any_call(call)


def gemm(call: Call) -> str | None:
    """Return why ``gemm`` with an FP8 weight, or one of four bits, is unsupported, or None."""
    args: GemmArgs = call.args
    reason = any_call(call)
    if reason is None and args.format != FP8_BLOCK.name:
        layouts = _dense_layouts(call, args.codes.shape[0] // args.groups, args.groups)
        reason = _four_bits(args.format, args.layout, args.codes, args.scales, layouts)
    if reason is None and args.format != FP8_BLOCK.name and args.codes.shape[0] // 16 % args.groups:
        rows = args.codes.shape[0] // args.groups
        reason = f"a group has {rows} rows, wanted a multiple of 16"
    return reason or dense_gemm_dtypes(args) or too_many(args.groups, "groups")


def gemm_swiglu(call: Call) -> str | None:
    """Return why ``gemm_swiglu`` with a weight of four bits is unsupported, or None."""
    args: GemmSwigluArgs = call.args
    reason = any_call(call) or dense_gemm_dtypes(args)
    layouts = _dense_layouts(call, args.codes.shape[0], 1)
    return reason or _four_bits(args.format, args.layout, args.codes, args.scales, layouts)


def _dense_layouts(call: Call, rows: int, groups: int) -> tuple[str, ...]:
    """Return the layouts of NVFP4 that the kernels take, of groups of ``rows`` rows.

    Swizzled scales are those of 12.x, where the FP4 kernel that needs them may be passed over; the
    interpreter takes them too. The scales of a group have to begin at a whole tile.
    """
    has_fp4 = call.capability is None or call.capability[0] == 12
    return (FRAGMENTS, SWIZZLED) if has_fp4 and (groups == 1 or rows % 128 == 0) else (FRAGMENTS,)


def dequantized_is_faster(call: Call) -> str | None:
    """Return why cuBLAS is faster with an NVFP4 weight that was dequantized first, or None.

    Writing that weight takes as long as multiplying it by some hundreds of tokens. On 9.0 and 10.x
    CuTeDSL kernels take nearly every call; cuBLAS takes the rest above 64 tokens.
    """
    args: GemmArgs | GemmSwigluArgs = call.args
    tokens = args.x.shape[0]
    has_cute = call.capability is not None and call.capability[0] in (9, 10)
    most = 64 if has_cute else MOST_PACKED_TOKENS
    if args.layout == FRAGMENTS and tokens > most:
        return f"there are {tokens} tokens, and above {most} a dequantized weight is faster"
    return None


def grouped_gemm(call: Call) -> str | None:
    """Return why ``grouped_gemm`` or a fused form with four-bit weights is unsupported, or None."""
    args: GroupedGemmArgs | GroupedGemmSwigluArgs | GroupedGemmSwigluQuantizeArgs = call.args
    dtype = args.x.dtype if args.x_scales is None else torch.bfloat16
    result = dtype if isinstance(args, GroupedGemmSwigluQuantizeArgs) else args.out_dtype
    reason = any_call(call) or gemm_dtypes(dtype, result)
    if reason is None:
        layouts = (FRAGMENTS, SWIZZLED)
        reason = _four_bits(args.format, args.layout, args.weight, args.scales, layouts)
    experts = args.weight.shape[0]
    if reason is None and experts > MOST_EXPERTS:
        reason = f"there are {experts} experts, wanted at most {MOST_EXPERTS}"
    return reason or too_many(experts + args.x.shape[0] // 8, "experts and tiles of rows")


def _four_bits(
    format_name: str,
    layout: str,
    codes: torch.Tensor,
    scales: torch.Tensor | None,
    layouts: tuple[str, ...],
) -> str | None:
    """Return why a weight is not one of four bits that the kernels read, or None.

    NVFP4 is in one of ``layouts``, MXFP4 row by row.
    """
    if format_name != MXFP4.name:
        if format_name != NVFP4.name:
            return f"the weight is {format_name!r}, wanted {NVFP4.name!r} or {MXFP4.name!r}"
        if layout not in layouts:
            return not_in_fragments(layout)
    rows, columns = codes.shape[-2], 2 * codes.shape[-1]
    if not fits(rows, columns):
        return f"the weight is {rows} x {columns}, wanted multiples of 16 x 64"
    assert scales is not None
    return gapped("codes or scales", codes, scales) or misaligned(codes, scales)


def parts(call: Call) -> str | None:
    """Return why an operator composed of other operators is unsupported, or None."""
    if call.device.type == "cpu" and not is_interpreting():
        return "on the CPU the reference does the same"
    return None


def grouped_parts(call: Call) -> str | None:
    """Return why ``grouped_gemm_swiglu_fp8`` as two operators is unsupported, or None."""
    reason = parts(call)
    if reason is None:
        inner = Call("grouped_gemm_swiglu", gemm_record(call.args), call.device)
        reasons = {}
        for row in implementations(inner.op):
            why = row.unsupported_reason(inner, AUTO)
            if why is None and not row.waits:
                return None
            reasons[row.name] = why
        del reasons["reference"]
        reason = f"only the reference runs the GEMM: {reasons}"
    return reason


def rms_norm(call: Call) -> str | None:
    """Return why ``rms_norm``, ``rms_norm_pair`` and ``rms_norm_fp8`` are unsupported, or None."""
    return any_call(call) or wide_row(call.args.x.shape[-1])


def head_norm_rope(call: Call) -> str | None:
    """Return why ``head_norm_rope_`` is unsupported, or None."""
    return any_call(call) or wide_row(call.args.q.shape[-1])


def rms_norm_quantize(call: Call) -> str | None:
    """Return why ``rms_norm_quantize`` is unsupported, or None."""
    return rms_norm(call) or _quantized(call, call.args.x)


def rope_quantize(call: Call) -> str | None:
    """Return why ``rope_quantize`` is unsupported, or None."""
    args: RopeQuantizeArgs = call.args
    tokens, heads, dims = args.x.shape
    columns = heads * dims // args.groups
    reason = any_call(call)
    if reason is None and dims % 16:
        reason = f"heads have {dims} dims, wanted a multiple of 16"
    if reason is None and args.scaling == "token":
        reason = wide_row(columns)
    return reason or too_many(tokens, "tokens")


def swiglu_quantize(call: Call) -> str | None:
    """Return why ``swiglu_quantize`` is unsupported, or None."""
    return any_call(call) or _quantized(call, call.args.gate_up)


def router(call: Call) -> str | None:
    """Return why ``route_topk`` and ``route_hash`` are unsupported, or None."""
    return any_call(call) or float64_result(call.args.logits_dtype)


def moe_sorting(call: Call) -> str | None:
    """Return why ``moe_permute`` and ``moe_sort`` are unsupported, or None."""
    experts = call.args.num_local_experts
    reason = any_call(call)
    if reason is None and experts > MOST_EXPERTS:
        reason = f"there are {experts} experts, and a kernel sorts at most {MOST_EXPERTS}"
    return reason


def moe_gather_quantize(call: Call) -> str | None:
    """Return why ``moe_gather_quantize`` is unsupported, or None."""
    return any_call(call) or wide_row(call.args.x.shape[1])


def moe_combine(call: Call) -> str | None:
    """Return why ``moe_combine`` is unsupported, or None."""
    return any_call(call) or float64_result(call.args.out_dtype)


def hyper_connection(call: Call) -> str | None:
    """Return why hyper-connections without codes are unsupported, or None."""
    return any_call(call) or _not_four_streams(call.args.streams)


def _not_four_streams(streams: torch.Tensor) -> str | None:
    if streams.shape[-2] != 4:
        return f"there are {streams.shape[-2]} streams, the kernels mix 4"
    return None


def hyper_connection_combine(call: Call) -> str | None:
    """Return why hyper-connections that add up rows are unsupported, or None."""
    return any_call(call) or _not_four_streams(call.args.streams)


def hyper_connection_quantize(call: Call) -> str | None:
    """Return why hyper-connections that quantise are unsupported, or None."""
    streams = call.args.streams
    wide = any_call(call) or wide_row(streams.shape[-1])
    return wide or _not_four_streams(streams)


def compressor_projections(call: Call) -> str | None:
    """Return why ``compressor_projections`` is unsupported, or None."""
    args: CompressorProjectionsArgs = call.args
    reason = any_call(call) or float64_result(args.out_dtype)
    if reason:
        return reason
    heads = () if args.heads is None else (args.heads,)
    dtypes = {tensor.dtype for tensor in (args.x, *args.pooled, *heads)}
    if len(dtypes) > 1 or not dtypes <= _HALVES:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        return f"the operands are {names}, wanted all bfloat16 or all float16"
    return None


def compressor_update(call: Call) -> str | None:
    """Return why ``compressor_update`` is unsupported, or None."""
    return any_call(call) or _wide_state(call.args.state)


def _wide_state(state: torch.Tensor) -> str | None:
    last = sum((n - 1) * step for n, step in zip(state.shape[1:], state.stride()[1:], strict=True))
    if last >= 1 << 31:
        return f"a row of the state spans {last + 1} numbers, wanted at most 2^31"
    return None


def compress_write(call: Call) -> str | None:
    """Return why ``compress_write`` is unsupported, or None."""
    args: CompressWriteArgs = call.args
    elsewhere = any_call(call)
    if elsewhere:
        return elsewhere
    if torch.float64 in (args.dtype, args.table_dtype):
        return "entries or tables are float64, which only the reference computes in"
    reason = gapped_pages(args.data) or odd_dims(args.head_dim)
    if reason:
        return reason
    if args.entry_format == "fp8" and args.rotate_quantize:
        return "rounding to FP4 before 'fp8' entries is left to the reference"
    if args.entry_format == "index_fp8" and args.data.data_ptr() % 4:
        return "the pages do not begin at a multiple of 4 bytes, where their scales need to be"
    return _wide_state(args.state)


def compress_write_paged(call: Call) -> str | None:
    """For ``compress_write_paged``."""
    args: CompressWritePagedArgs = call.args
    if args.dtype == torch.float64:
        return "entries are float64, which only the reference computes in"
    reason = any_call(call) or gapped_pages(args.data) or odd_dims(args.head_dim)
    if reason is None and args.entry_format == "index_fp8" and args.data.data_ptr() % 4:
        reason = "the pages do not begin at a multiple of 4 bytes, where their scales need to be"
    if reason is None and args.state.stride(2) != 1:
        reason = "the state has gaps between its columns"
    return reason


def indexer_select(call: Call) -> str | None:
    """Return why ``indexer_select`` is unsupported, or None."""
    args: IndexerSelectArgs = call.args
    data, entry_format = args.data, args.entry_format
    elsewhere = any_call(call)
    if elsewhere:
        return elsewhere
    if entry_format == "fp8":
        return "the keys are 'fp8' entries, which only the reference reads as index keys"
    if entry_format == "index_fp8" and (data.stride(0) % 4 or data.data_ptr() % 4):
        return "the pages do not begin at multiples of 4 bytes, where their scales need to be"
    if LARGEST_SELECTION < args.top_k < args.page_table.shape[1] * args.page_size:
        return f"top_k is {args.top_k}, and a kernel chooses at most {LARGEST_SELECTION}"
    return None


def pools_of(args: SparseAttentionArgs) -> list[tuple[torch.Tensor, int]]:
    """Pages that attention reads, and entries of a page."""
    pools = [(args.window, args.window_page_size)]
    if args.compressed is not None:
        pools.append((args.compressed, args.compressed_page_size))
    return pools


def sparse_attention(call: Call) -> str | None:
    """Return why ``sparse_attention`` is unsupported, or None."""
    return any_call(call) or attention_sizes(call) or _padded_entries(call)


def _padded_entries(call: Call) -> str | None:
    """Return why padded entries do not fit shared memory of a GPU with less than Hopper, or None.

    Of ``"fp8"`` entries the dims with and without rotary embedding are padded to groups each.
    """
    args: SparseAttentionArgs = call.args
    dims = args.q.shape[-1]
    rope = args.rope_dim if args.window_format == "fp8" else 0
    groups = -(-(dims - rope) // GROUP) + -(-rope // GROUP)
    capability = call.capability
    if capability is None or shared_memory(capability) >= shared_memory((9, 0)):
        return None
    if groups * GROUP > LARGEST_HEAD:
        return f"entries have {groups} groups of {GROUP} dims, wanted at most {LARGEST_HEAD} dims"
    return None


def attention_sizes(call: Call) -> str | None:
    """Return why ``sparse_attention`` has unsupported sizes for Triton or CuTeDSL, or None."""
    args: SparseAttentionArgs = call.args
    q, window, dims = args.q, args.window, args.q.shape[-1]
    reason = too_many(q.shape[0], "tokens")
    if reason:
        return reason
    if dims > LARGEST_HEAD:
        return f"heads have {dims} dims, and a kernel holds at most {LARGEST_HEAD}"
    pools = pools_of(args)
    dtypes = {pool.dtype for pool, _ in pools}
    if args.window_format != args.compressed_format or len(dtypes) > 1:
        return "the two caches are of different formats, and a kernel reads one"
    if q.dtype != torch.bfloat16 or window.dtype not in (torch.bfloat16, torch.uint8):
        return f"q is {q.dtype} and entries are {window.dtype}, wanted bfloat16 or 'fp8' entries"
    for pool, size in pools:
        reason = gapped_pages(pool)
        if reason:
            return reason
        if pool.shape[0] * size >= 2**31:
            return f"there are {pool.shape[0] * size} slots, wanted fewer than 2^31"
    if args.cos is not None and dims % 2:
        return f"heads have {dims} dims, of which pairs are rotated, wanted an even number"
    return _fp8_entries(call) if args.window_format == "fp8" else None


def _fp8_entries(call: Call) -> str | None:
    """Return why attention over ``"fp8"`` entries is unsupported, or None."""
    args: SparseAttentionArgs = call.args
    dims, rope_dim = args.q.shape[-1], args.rope_dim
    misplaced = any(pool.data_ptr() % 8 for pool, _ in pools_of(args))
    if (dims + rope_dim) % 8 or (dims - rope_dim) % 2 or misplaced:
        return "entries do not begin at multiples of 8 bytes, where their scales need to be"
    return None


def write_kv(call: Call) -> str | None:
    """Return why ``write_kv`` is unsupported, or None."""
    return any_call(call) or _pages(call)


def read_kv(call: Call) -> str | None:
    """Return why ``read_kv`` is unsupported, or None."""
    return any_call(call) or float64_result(call.args.dtype) or _pages(call)


def norm_rope_write_kv(call: Call) -> str | None:
    """Return why ``norm_rope_write_kv`` is unsupported, or None."""
    args: NormRopeWriteKvArgs | HeadNormRopeWriteKvArgs = call.args
    reason = any_call(call) or _pages(call) or odd_dims(args.head_dim)
    rotated = 2 * args.cos.shape[1]
    if reason is None and args.entry_format != "plain" and args.rope_dim != rotated:
        reason = f"the pages have {args.rope_dim} RoPE dims, cos and sin turn {rotated}"
    return reason


def head_norm_rope_write_kv(call: Call) -> str | None:
    """Return why ``head_norm_rope_write_kv`` is unsupported, or None."""
    return norm_rope_write_kv(call) or head_norm_rope(call)


def _pages(call: Call) -> str | None:
    """Return why pages cannot be read or written entry by entry, or None."""
    args: WriteKvArgs | ReadKvArgs | NormRopeWriteKvArgs | HeadNormRopeWriteKvArgs = call.args
    if args.entry_format.startswith("index_"):
        return "compact index keys are written by 'compress_write' and read by 'indexer_select'"
    reason = gapped_pages(args.data)
    if reason is None and args.entry_format != "plain" and args.data.data_ptr() % 2:
        reason = "the pages begin at an odd address"
    return reason


def verify(call: Call) -> str | None:
    """Return why verification and drawn drafts are unsupported; parameters are float64 always."""
    args: VerifyGreedyArgs | VerifySampledArgs | DrawDraftArgs = call.args
    probabilities = getattr(args, "probabilities", None)
    return no_triton(call.device) or float64_tensor((args.logits, probabilities))
