"""Reasons why CuTeDSL kernels cannot run a call of an operator; None where they can.

Named in ``dsv4.implementations``. Nothing here imports CuTeDSL.
"""

from __future__ import annotations

import torch

from dsv4.cute.grouped_problem import MOST_EXPERTS, Experts
from dsv4.cute.runtime.architectures import (
    ARCHITECTURES,
    BLACKWELL,
    BLACKWELL_NAMES,
    HOPPER,
    shared_limit,
)
from dsv4.cute.sm90 import gemm_fp8_small_m_plan, gemm_fp8_wgmma_plan
from dsv4.cute.sm90.attention_plan import DIMS, ROPE
from dsv4.cute.sm90.gemm_fp8_wgmma_plan import fp8_plan
from dsv4.cute.sm90.gemm_small_m_plan import TOKENS, SmallMPlan
from dsv4.cute.sm90.grouped_gemm_plans import typical_plan
from dsv4.cute.sm90.indexer_logits_plan import supports_int8
from dsv4.cute.sm90.plans import GemmProblem, choose
from dsv4.cute.sm90.topk_plan import is_long
from dsv4.cute.sm100.grouped_gemm_plan import K_MULTIPLE
from dsv4.device import cached, capability, dotted, has, no_triton
from dsv4.dispatch import Call, implementations
from dsv4.ops._grouped_operands import chosen_for
from dsv4.ops.attention import SparseAttentionArgs
from dsv4.ops.gemm import GemmArgs
from dsv4.ops.gemm_swiglu import GemmSwigluArgs
from dsv4.ops.grouped_gemm import GroupedGemmArgs
from dsv4.ops.grouped_gemm_swiglu import GroupedGemmSwigluArgs, GroupedGemmSwigluQuantizeArgs
from dsv4.ops.indexer import IndexerSelectArgs
from dsv4.ops.unsupported import (
    dense_gemm_dtypes,
    gapped,
    gemm_dtypes,
    input_dtype,
    many_segments,
    misaligned,
    not_both_nvfp4,
    not_in_fragments,
    not_swizzled,
    ragged_groups,
)
from dsv4.quant import fragments
from dsv4.quant.formats import FP8_BLOCK, FP8_TOKEN, FRAGMENTS, NVFP4, SWIZZLED
from dsv4.triton import supports as triton

GroupedArgs = GroupedGemmArgs | GroupedGemmSwigluArgs | GroupedGemmSwigluQuantizeArgs

MOST_FEW_TOKENS = 64  # tokens that the kernel for small M multiplies, 16 at a time


def gemm(call: Call) -> str | None:
    """Return why ``gemm`` is unsupported: weights in fragments, and on Hopper FP8 ones."""
    args: GemmArgs = call.args
    if args.format == FP8_BLOCK.name:
        return _fp8_gemm(args, call.device)
    return _packed_gemm(args, call.device, args.groups)


def gemm_swiglu(call: Call) -> str | None:
    """Return why ``gemm_swiglu`` is unsupported: weights in fragments."""
    return _packed_gemm(call.args, call.device, 1)


def _packed_gemm(args: GemmArgs | GemmSwigluArgs, device: torch.device, groups: int) -> str | None:
    reason = _packed_sizes(
        device,
        args.layout,
        input_dtype(args),
        args.out_dtype,
        len(args.segments),
        args.codes.shape,
        groups,
        args.x.shape[0],
    )
    if reason is not None:
        return reason
    assert args.global_scale is not None
    return gapped("global scales", args.global_scale) or misaligned(args.codes, args.scales)


@cached
def _packed_sizes(
    device: torch.device,
    layout: str,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    segments: int,
    codes: torch.Size,
    groups: int,
    tokens: int,
) -> str | None:
    """The same of what does not change from call to call of a weight."""
    elsewhere = not_in_fragments(layout) or gemm_dtypes(dtype, out_dtype) or no_cute(device)
    reason = elsewhere or many_segments(segments)
    if reason:
        return reason
    rows, columns = codes[0], 2 * codes[1]
    if rows // 16 % groups:
        return f"a group has {rows // groups} rows, wanted a multiple of 16"
    arch = ARCHITECTURES[capability(device)]
    problem = GemmProblem(rows, columns, groups, False, False)
    plan = choose(problem, max(tokens, 1), arch)
    if plan is None or not _fits_every_kind(problem, max(tokens, 1), arch):
        return f"{columns} columns of 16 tokens do not fit a block's shared memory"
    if isinstance(plan, SmallMPlan) and tokens > MOST_FEW_TOKENS:
        return _many_tokens(arch, tokens, rows // groups, columns)
    return None


def _fits_every_kind(problem: GemmProblem, tokens: int, arch: str) -> bool:
    """Return whether all kinds of results and tokens fit; on Hopper all fit if one does."""
    if shared_limit(arch) == shared_limit(HOPPER):
        return True
    flags = (False, True)
    kinds = [problem._replace(float32_out=f, row_scaled=s) for f in flags for s in flags]
    return all(choose(kind, tokens, arch) is not None for kind in kinds)


def few_token_gemm(device: torch.device, rows: int, columns: int) -> str | None:
    """Return why no measured kernel multiplies few tokens by an NVFP4 weight of a size, or None.

    The weight is in fragments, tokens are bfloat16 and results float32, as of an output head.
    """
    if not fragments.fits(rows, columns):
        return f"the weight is {rows} x {columns}, wanted multiples of 16 x 64"
    kind = (torch.bfloat16, torch.float32, 0, torch.Size((rows, columns // 2)), 1, 1)
    reason = _packed_sizes(device, FRAGMENTS, *kind)
    proven = next(row.proven for row in implementations("gemm") if row.name == "cute")
    if reason is None and proven is not None and capability(device) not in proven:
        return f"the kernel was never measured on compute capability {dotted(device)}"
    return reason


def _many_tokens(arch: str, tokens: int, rows: int, columns: int) -> str:
    """Return why the kernel for large M does not take a weight."""
    if arch != HOPPER:
        return (
            f"there are {tokens} tokens, and the kernel multiplies {TOKENS} at a time, wanted "
            f"at most {MOST_FEW_TOKENS}; that for more is Hopper's, whose wgmma {arch} lacks"
        )
    return (
        f"there are {tokens} tokens, and of {rows} rows and {columns} columns the "
        f"kernel multiplies {TOKENS} tokens at a time; that for more wants columns by 128 and, "
        "of each of several groups, rows by 128 or 192"
    )


def _fp8_gemm(args: GemmArgs, device: torch.device) -> str | None:
    codes, scales, groups = args.codes, args.scales, args.groups
    elsewhere = dense_gemm_dtypes(args) or not_hopper(device)
    if elsewhere:
        return elsewhere
    sizes = GemmProblem(codes.shape[0], codes.shape[1], groups, False, False)
    if fp8_plan(sizes, max(args.x.shape[0], 1), scales.dtype == torch.float8_e8m0fnu) is None:
        return (
            f"a group is {codes.shape[0] // groups} x {codes.shape[1]}, wanted multiples of "
            "16 x 128, and of each of several groups rows by 128 or 192"
        )
    return _rows_apart(codes) or gapped("scales", scales)


def _rows_apart(codes: torch.Tensor) -> str | None:
    """Return why copies of 16 bytes cannot read rows of codes, or None."""
    if codes.stride(0) % 16 or codes.stride(1) != 1 or codes.data_ptr() % 16:
        return "rows of codes do not begin at multiples of 16 bytes"
    return None


def fp8_small_m_gemm(call: Call) -> str | None:
    """Return why ``gemm`` of few tokens and FP8 weights is unsupported, or None."""
    return _fp8_small_m_gemm(call.args, call.device)


def _fp8_small_m_gemm(args: GemmArgs, device: torch.device) -> str | None:
    if args.format != FP8_BLOCK.name:
        return f"the weight is in {args.format!r}, wanted {FP8_BLOCK.name!r}"
    reason = dense_gemm_dtypes(args) or not_hopper(device)
    if reason:
        return reason
    codes, tokens = args.codes, args.x.shape[0]
    if tokens > MOST_FEW_TOKENS:
        return f"there are {tokens} tokens, wanted at most {MOST_FEW_TOKENS}"
    if _fp8_small_m_plan(args) is None:
        return (
            f"a group is {codes.shape[0] // args.groups} x {codes.shape[1]}, wanted multiples of "
            "16 x 128, whose 8 to 32 tokens fit a block's shared memory"
        )
    return _rows_apart(codes) or gapped("scales", args.scales)


def _fp8_small_m_plan(args: GemmArgs) -> gemm_fp8_small_m_plan.SmallMFp8Plan | None:
    """Return the plan of a call's first launch."""
    problem = GemmProblem(args.codes.shape[0], args.codes.shape[1], args.groups, False, False)
    tokens = min(max(args.x.shape[0], 1), gemm_fp8_small_m_plan.TOKENS)
    folded = args.scales.dtype == torch.float8_e8m0fnu
    return gemm_fp8_small_m_plan.fp8_small_m_plan(problem, tokens, folded)


def fp8_wgmma_is_faster(call: Call) -> str | None:
    """Return why the row for large M is faster for a call of few tokens, by estimate, or None.

    Also while nobody has measured the kernel for few tokens on this GPU.
    """
    args: GemmArgs = call.args
    tokens, (rows, columns) = args.x.shape[0], args.codes.shape
    if not tokens:
        return None
    if not gemm_fp8_small_m_plan.is_measured():
        how = "python -m dsv4.bench tune --only gemm_fp8_small_m"
        return f"its times on this GPU are not known: {how} measures them"
    if _fp8_gemm(args, call.device) is not None:
        return None
    problem = GemmProblem(rows, columns, args.groups, False, False)
    folded = args.scales.dtype == torch.float8_e8m0fnu
    small_m = gemm_fp8_small_m_plan.fastest_us(problem, tokens, folded)
    large_m = gemm_fp8_wgmma_plan.fastest_us(problem, tokens, folded)
    if small_m <= large_m:
        return None
    times = f"an estimated {small_m:.1f} us for {tokens} tokens, the kernel for large M"
    return f"it takes {times} {large_m:.1f}"


def grouped_gemm(call: Call) -> str | None:
    """Return why ``grouped_gemm`` and its fused forms are unsupported: weights in fragments."""
    args: GroupedArgs = call.args
    weight, scales, global_scale = args.weight, args.scales, args.global_scale
    reason = _grouped_sizes(
        call.device,
        args.layout,
        _rows_dtype(args),
        _out_dtype(args),
        len(args.segments),
        weight.shape,
        *chosen_for(args),
    )
    if reason is not None:
        return reason
    assert scales is not None
    assert global_scale is not None
    if not all(tensor.is_contiguous() for tensor in (weight, scales, global_scale)):
        return "the weight or its scales are not contiguous"
    return misaligned(weight, scales)


@cached
def _grouped_sizes(
    device: torch.device,
    layout: str,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    segments: int,
    codes: torch.Size,
    tokens: int,
    step_experts: int,
) -> str | None:
    """Return the reason that holds for all calls of a weight with these arguments, or None.

    Kernels are chosen for ``tokens`` and ``step_experts``; a call has a part of these.
    """
    elsewhere = not_in_fragments(layout) or gemm_dtypes(dtype, out_dtype) or no_cute(device)
    reason = elsewhere or many_segments(segments)
    if reason:
        return reason
    held, rows, half = codes
    experts = max(held, step_experts)
    arch = ARCHITECTURES[capability(device)]
    sizes = Experts(rows, 2 * half, step_experts, False, False)
    sizes = sizes._replace(float32_out=out_dtype == torch.float32)
    kinds = _kinds(sizes, arch)
    if experts > MOST_EXPERTS or not all(typical_plan(k, max(tokens, 1), arch) for k in kinds):
        if experts <= MOST_EXPERTS and typical_plan(sizes, max(tokens, 1)) is not None:
            kib = shared_limit(arch) // 1024
            return f"8 rows of {2 * half} columns do not fit {kib} KB of shared memory"
        return (
            f"there are {experts} experts of {2 * half} columns, wanted at most {MOST_EXPERTS} and "
            "a multiple of 128"
        )
    return None


def _kinds(sizes: Experts, arch: str) -> list[Experts]:
    """Return the kinds of GEMM that must fit; on Hopper one, because all have the room there."""
    if shared_limit(arch) == shared_limit(HOPPER):
        return [sizes]
    fused = sizes._replace(swiglu=True, row_weighted=True)
    kinds = [sizes, fused, fused._replace(quantized_out=not sizes.float32_out)]
    return [kind._replace(row_scaled=scaled) for kind in kinds for scaled in (False, True)]


def _rows_dtype(args: GroupedArgs) -> torch.dtype:
    """Return the dtype of sorted rows; codes are dequantized to bfloat16."""
    return args.x.dtype if args.x_scales is None else torch.bfloat16


def _out_dtype(args: GroupedArgs) -> torch.dtype:
    """Return the dtype of the result, before it is quantised where it is."""
    if isinstance(args, GroupedGemmSwigluQuantizeArgs):
        return _rows_dtype(args)
    return args.out_dtype


def tcgen05_gemm(call: Call) -> str | None:
    """Return why ``gemm`` with both operands in NVFP4 is unsupported, on Blackwell."""
    return _tcgen05(call.args, call.device, call.args.groups)


def tcgen05_gemm_swiglu(call: Call) -> str | None:
    """Return why ``gemm_swiglu`` with both operands in NVFP4 is unsupported, on Blackwell."""
    return _tcgen05(call.args, call.device, 1)


def _activation(args: GemmArgs | GemmSwigluArgs) -> str:
    """Return the format of activations; that of codes is called "bf16" in the record."""
    return args.activation if args.x_scales is None else FP8_TOKEN.name


def _tcgen05(args: GemmArgs | GemmSwigluArgs, device: torch.device, groups: int) -> str | None:
    elsewhere = (
        not_both_nvfp4(args.format, _activation(args))
        or not_swizzled(args.layout)
        or dense_gemm_dtypes(args)
        or not_blackwell(device)
    )
    if elsewhere:
        return elsewhere
    rows, columns = args.codes.shape[0] // groups, args.codes.shape[1] * 2
    reason = many_segments(len(args.segments)) or ragged_groups(rows, columns)
    if reason is None and groups > 1 and rows % 128:
        reason = f"a group has {rows} rows, wanted a multiple of 128 of each of several"
    return reason or _stored(args.codes, args.scales, args.global_scale)


def tcgen05_grouped_gemm(call: Call) -> str | None:
    """Return why ``grouped_gemm`` and its fused forms, all in NVFP4, are unsupported."""
    args: GroupedArgs = call.args
    activation = args.activation
    if args.x_scales is not None:  # the activation of rows that come as codes is called "bf16"
        activation = NVFP4.name if args.x.dtype == NVFP4.codes_dtype else FP8_TOKEN.name
    elsewhere = (
        not_both_nvfp4(args.format, activation)
        or not_swizzled(args.layout)
        or gemm_dtypes(_rows_dtype(args), _out_dtype(args))
        or not_blackwell(call.device)
        or many_segments(len(args.segments))
    )
    if elsewhere:
        return elsewhere
    experts, rows, half = args.weight.shape
    if experts > MOST_EXPERTS or rows % 16 or half % (K_MULTIPLE // 2):
        return (
            f"there are {experts} experts of {rows} x {2 * half}, wanted at most {MOST_EXPERTS} of "
            f"multiples of 16 x {K_MULTIPLE}"
        )
    return _stored(args.weight, args.scales, args.global_scale)


def _stored(
    codes: torch.Tensor, scales: torch.Tensor | None, global_scale: torch.Tensor | None
) -> str | None:
    """Return how an NVFP4 weight lies in memory."""
    assert scales is not None
    assert global_scale is not None
    whole = gapped("codes, scales or global scales", codes, scales, global_scale)
    return whole or misaligned(codes, scales)


def indexer_select(call: Call) -> str | None:
    """Return why ``indexer_select`` is unsupported, on Hopper."""
    return triton.indexer_select(call) or not_hopper(call.device)


def indexer_select_is_slower(call: Call) -> str | None:
    """Return why Triton's kernels of ``indexer_select`` are as fast or faster, or None."""
    args: IndexerSelectArgs = call.args
    capacity = args.page_table.shape[1] * args.page_size
    integers = supports_int8(
        args.q,
        args.weights,
        args.data,
        args.page_size,
        args.entry_format,
        args.query_scales,
        capacity,
    )
    if integers or is_long(capacity, args.top_k):
        return None
    return (
        "they score many MXFP4 keys and choose from long rows, wanted are for each of "
        f"{args.q.shape[0]} tokens {args.top_k} of {capacity} {args.entry_format!r} keys"
    )


def sparse_attention(call: Call) -> str | None:
    """Return why ``sparse_attention`` is unsupported, on Hopper."""
    args: SparseAttentionArgs = call.args
    elsewhere = triton.attention_sizes(call) or not_hopper(call.device)
    if elsewhere:
        return elsewhere
    formats, dims = (args.window_format, args.compressed_format), args.q.shape[-1]
    if formats != ("fp8", "fp8"):
        return f"entries are {formats[0]!r} and {formats[1]!r}, wanted 'fp8'"
    if (dims, args.rope_dim) != (DIMS, ROPE):
        return f"heads have {dims} dims, {args.rope_dim} rotated, wanted {DIMS} and {ROPE}"
    if not args.scale > 0:
        return f"the scale is {args.scale}, wanted one above 0"
    if args.cos is not None and 2 * args.cos.shape[1] != ROPE:
        rotated = 2 * args.cos.shape[1]
        return f"{rotated} dims of the result are to be rotated back, wanted {ROPE}"
    for pool, size in triton.pools_of(args):
        if size & (size - 1):
            return f"a page has {size} entries, wanted a power of two"
        if pool.data_ptr() % 16 or pool.stride(0) % 16:
            return "pages do not begin at multiples of 16 bytes"
    return None


def _not_on_gpu(device: torch.device) -> str | None:
    if not has("cutlass"):
        return "the package nvidia-cutlass-dsl is not installed"
    if device.type != "cuda":
        return f"CuTeDSL kernels run on a CUDA GPU, the tensors are on {device}"
    return None


@cached
def no_cute(device: torch.device) -> str | None:
    """Return why CuTeDSL kernels for several architectures cannot run on a device, or None."""
    elsewhere = _not_on_gpu(device)
    if elsewhere is None and capability(device) not in ARCHITECTURES:
        supported = ", ".join(f"{major}.{minor}" for major, minor in ARCHITECTURES)
        return f"the kernels are for compute capability {supported}, the GPU has {dotted(device)}"
    return elsewhere


@cached
def not_hopper(device: torch.device) -> str | None:
    """Return why Hopper's CuTeDSL kernels cannot run on a device, or None."""
    elsewhere = no_cute(device)
    if elsewhere is None and capability(device) != (9, 0):
        return f"the kernel is Hopper's, compute capability 9.0, the GPU has {dotted(device)}"
    return elsewhere


@cached
def not_blackwell(device: torch.device) -> str | None:
    """Return why tcgen05 with NVFP4 operands is not asked of a device, or None."""
    elsewhere = _not_on_gpu(device)
    if elsewhere or capability(device) in BLACKWELL:
        return elsewhere
    gpu = f"the GPU has compute capability {dotted(device)}"
    major, _ = capability(device)
    if major == 12:
        return f"{gpu}, which has no tensor memory and no tcgen05, wanted 10.0 or 10.3"
    if major == 11:
        return f"{gpu}, for which no kernel was compiled and inspected, wanted 10.0 or 10.3"
    return f"{gpu}, and tcgen05 is of 10.0 and 10.3"


def no_packed_weights(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why no kernel takes packed NVFP4 weights and inputs of a dtype, or None."""
    if device.type != "cuda":
        return f"kernels for packed weights run on a CUDA GPU, the tensors are on {device}"
    if dtype != torch.bfloat16:
        return f"kernels for packed weights take bfloat16, the model is {dtype}"
    return no_triton(device)


def no_fp8_gemm(device: torch.device) -> str | None:
    """Return why no GEMM on a device multiplies FP8 activations by FP8 tensor cores, or None."""
    if not any(row.name == "fp8" for row in implementations("gemm")):
        return "this version has no GEMM by FP8 tensor cores"
    return not_hopper(device)


def packed_layout(device: torch.device, activation: str) -> str:
    """The layout that kernels for these activations want on a device."""
    return packed_layout_of(ARCHITECTURES.get(capability(device)), activation)


def packed_layout_of(arch: str | None, activation: str) -> str:
    """The same for a value of ``EVERY_ARCHITECTURE``, or None for another GPU.

    On 12.0 and 12.1 it is fragments, although the kernels that multiply NVFP4 by NVFP4 there take
    other layouts: those kernels ran on no GPU and depend on the version of Triton, and the CuTeDSL
    kernels for few tokens read fragments alone. The user can name the other layout when packing.
    """
    swizzled = arch in BLACKWELL_NAMES and activation == NVFP4.name
    return SWIZZLED if swizzled else FRAGMENTS
