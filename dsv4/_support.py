"""What an implementation can run: the reasons that dispatch gives for passing one over.

Knows nothing of Triton or CuTeDSL themselves: a reason must not need an import.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch

from dsv4.cute.grouped_problem import Experts
from dsv4.cute.runtime.architectures import ARCHITECTURES, HOPPER
from dsv4.cute.sm90.attention_plan import DIMS, ROPE
from dsv4.cute.sm90.gemm_small_m_plan import TOKENS, SmallMPlan
from dsv4.cute.sm90.grouped_plan import MOST_EXPERTS as MOST_GROUPED
from dsv4.cute.sm90.grouped_plan import choose as choose_grouped
from dsv4.cute.sm90.index_choice_plan import is_long
from dsv4.cute.sm90.index_scores_plan import multiplies
from dsv4.cute.sm90.many_fp8_plan import fp8_plan
from dsv4.cute.sm90.plans import Product, choose
from dsv4.cute.sm100.dense_plan import STEP as _STAGE
from dsv4.formats import FP8_BLOCK, FRAGMENTS, LINEAR, NVFP4, SWIZZLED

if TYPE_CHECKING:
    from dsv4.dispatch import Call

_interpreting: ContextVar[bool] = ContextVar("dsv4_interpreting", default=False)


@contextmanager
def interpret_triton() -> Iterator[None]:
    """Let Triton kernels run on the CPU, in Triton's interpreter: for tests, very slow.

    The environment variable ``TRITON_INTERPRET=1`` has to be set before the first kernel is
    imported; without it the calls inside the block fail.
    """
    token = _interpreting.set(True)
    try:
        yield
    finally:
        _interpreting.reset(token)


def triton(args: Sequence[Any], device: torch.device) -> str | None:
    """Why Triton kernels cannot run a call with these arguments, or None."""
    elsewhere = _interpreted(device) if _interpreting.get() else _no_triton(device)
    if elsewhere:
        return elsewhere
    for argument in args:
        if isinstance(argument, torch.Tensor) and argument.dtype == torch.float64:
            return "a tensor is float64, which only the reference computes in"
    return None


def _interpreted(device: torch.device) -> str | None:
    return None if device.type == "cpu" and _has("triton") else _no_triton(device)


@cache
def _no_triton(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on a device, or None."""
    if not _has("triton"):
        return "the package triton is not installed"
    if device.type != "cuda":
        return f"Triton kernels run on a CUDA GPU, the tensors are on {device}"
    if _capability(device) < (8, 0):
        found = ".".join(map(str, _capability(device)))
        return f"Triton kernels need compute capability 8.0 or newer, the GPU has {found}"
    return None


@cache
def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def forget_devices() -> None:
    """Ask every device again what it is: for tests that pretend to have another one."""
    for cached in (_capability, _no_triton, _not_hopper, _no_cute, _no_cute_gemm, _no_cute_grouped):
        getattr(cached, "cache_clear", lambda: None)()


MOST_FEW_TOKENS = 64
_MOST_SEGMENTS = 4


def cute_gemm(call: Call) -> str | None:
    """Why the CuTeDSL kernels cannot run a product, or None."""
    x, codes, scales, global_scale, segments, format, layout = call.args[:7]
    if call.op == "gemm" and format == FP8_BLOCK.name:
        return _cute_fp8(call)
    groups = call.args[9] if call.op == "gemm" else 1
    kind = (call.device, layout, x.dtype, call.args[-1], len(segments))
    objection = _no_cute_gemm(*kind, codes.shape, groups, x.shape[0])
    if objection is not None:
        return objection
    if not global_scale.is_contiguous():
        return "the global scales are not contiguous"
    if codes.data_ptr() % 16 or scales.data_ptr() % 16:
        return "the codes or scales do not begin at multiples of 16 bytes"
    return None


def _cute_fp8(call: Call) -> str | None:
    """Why the CuTeDSL kernel for FP8 weights cannot run a product, or None."""
    x, codes, scales, _, _, _, _, _, _, groups, out_dtype = call.args
    elsewhere = _wrong_dtypes(x.dtype, out_dtype) or _not_hopper(call.device)
    if elsewhere:
        return elsewhere
    product = Product(codes.shape[0], codes.shape[1], groups, False, False)
    if fp8_plan(product, max(x.shape[0], 1), scales.dtype == torch.float8_e8m0fnu) is None:
        return (
            f"a group is {codes.shape[0] // groups} x {codes.shape[1]}, wanted multiples of "
            "16 x 128, and of each of several groups rows by 128 or 192"
        )
    if codes.stride(0) % 16 or codes.stride(1) != 1 or codes.data_ptr() % 16:
        return "rows of codes do not begin at multiples of 16 bytes"
    if not scales.is_contiguous():
        return "the scales are not contiguous"
    return None


@lru_cache(maxsize=1 << 16)
def _no_cute_gemm(
    device: torch.device,
    layout: str,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    segments: int,
    codes: tuple[int, ...],
    groups: int,
    tokens: int,
) -> str | None:
    """The same of what does not change from call to call of a product."""
    elsewhere = _packed_as(layout, dtype, out_dtype) or _no_cute(device)
    if elsewhere:
        return elsewhere
    if segments > _MOST_SEGMENTS:
        return f"the weight has {segments} segments, wanted at most {_MOST_SEGMENTS}"
    rows, columns = codes[0], 2 * codes[1]
    if rows // 16 % groups:
        return f"a group has {rows // groups} rows, wanted a multiple of 16"
    arch = ARCHITECTURES[_capability(device)]
    plan = choose(Product(rows, columns, groups, False, False), max(tokens, 1), arch)
    if plan is None:
        return f"{columns} columns of 16 tokens do not fit a block's shared memory"
    if isinstance(plan, SmallMPlan) and tokens > MOST_FEW_TOKENS:
        if arch != HOPPER:
            return (
                f"there are {tokens} tokens, and the kernel multiplies {TOKENS} at a time, wanted "
                f"at most {MOST_FEW_TOKENS}; that for more is Hopper's, whose wgmma {arch} lacks"
            )
        return (
            f"there are {tokens} tokens, and of {rows // groups} rows and {columns} columns the "
            f"kernel multiplies {TOKENS} tokens at a time; that for more wants columns by 128 and, "
            "of each of several groups, rows by 128 or 192"
        )
    return None


_BLACKWELL = ((10, 0), (10, 3))


def scaled_mm(call: Call) -> str | None:
    """Why torch's block-scaled product cannot run a product, or None."""
    x, codes, scales, _, _, format, layout, activation, _, groups, out_dtype = call.args
    if format != NVFP4.name:
        return f"the weight is {format!r}, wanted {NVFP4.name!r}"
    if activation != NVFP4.name:
        return f"activations are {activation!r}, and both operands have to be NVFP4"
    if layout == FRAGMENTS:
        return f"the weight has layout {layout!r}, wanted {LINEAR!r} or {SWIZZLED!r}"
    if torch.float64 in (x.dtype, out_dtype):
        return "x or the result is float64, which only the reference computes in"
    if call.device.type != "cuda":
        return f"block-scaled products run on a CUDA GPU, the tensors are on {call.device}"
    if _capability(call.device) not in _BLACKWELL:
        found = ".".join(map(str, _capability(call.device)))
        return f"block-scaled products are asked of compute capability 10.0 and 10.3, not {found}"
    rows, columns = codes.shape[0] // groups, codes.shape[1] * 2
    if rows % 16 or columns % 32:
        return f"a group is {rows} x {columns}, wanted multiples of 16 x 32"
    if layout == SWIZZLED and groups > 1 and rows % 128:
        return f"a group has {rows} rows, and swizzled scales of groups begin at multiples of 128"
    if not (codes.is_contiguous() and scales.is_contiguous()):
        return "the codes or scales are not contiguous"
    if codes.data_ptr() % 16 or scales.data_ptr() % 16:
        return "the codes or scales do not begin at multiples of 16 bytes"
    return None


def tcgen05(call: Call) -> str | None:
    """Why Blackwell's CuTeDSL kernels cannot run a product, or None."""
    _, codes, scales, global_scale, segments, format, layout, activation, *_ = call.args
    groups = call.args[9] if call.op == "gemm" else 1
    if format != NVFP4.name or activation != NVFP4.name:
        found = f"the weight is {format!r} and activations are {activation!r}"
        return f"{found}, and both operands have to be NVFP4"
    if layout != SWIZZLED:
        return f"the weight has layout {layout!r}, wanted {SWIZZLED!r}: QuantizedTensor.with_layout"
    elsewhere = _wrong_dtypes(call.args[0].dtype, call.args[-1]) or _not_blackwell(call)
    if elsewhere:
        return elsewhere
    if len(segments) > _MOST_SEGMENTS:
        return f"the weight has {len(segments)} segments, wanted at most {_MOST_SEGMENTS}"
    rows, columns = codes.shape[0] // groups, codes.shape[1] * 2
    if rows % 16 or columns % 32:
        return f"a group is {rows} x {columns}, wanted multiples of 16 x 32"
    if groups > 1 and rows % 128:
        return f"a group has {rows} rows, wanted a multiple of 128 of each of several"
    if not all(t.is_contiguous() for t in (codes, scales, global_scale)):
        return "the codes, scales or global scales are not contiguous"
    if codes.data_ptr() % 16 or scales.data_ptr() % 16:
        return "the codes or scales do not begin at multiples of 16 bytes"
    return None


def _not_blackwell(call: Call) -> str | None:
    """Why tcgen05 with NVFP4 operands is not asked of the device, or None."""
    if not _has("cutlass"):
        return "the package nvidia-cutlass-dsl is not installed"
    if call.device.type != "cuda":
        return f"CuTeDSL kernels run on a CUDA GPU, the tensors are on {call.device}"
    found = _capability(call.device)
    if found in _BLACKWELL:
        return None
    said = f"the GPU has compute capability {found[0]}.{found[1]}"
    if found[0] == 12:
        return f"{said}, which has no tensor memory and no tcgen05, wanted 10.0 or 10.3"
    if found[0] == 11:
        return f"{said}, for which no kernel was compiled and inspected, wanted 10.0 or 10.3"
    return f"{said}, and tcgen05 is of 10.0 and 10.3"


@cache
def _not_hopper(device: torch.device) -> str | None:
    """Why Hopper's CuTeDSL kernels cannot run on a device, or None."""
    elsewhere = _no_cute(device)
    if elsewhere is None and _capability(device) != (9, 0):
        found = ".".join(map(str, _capability(device)))
        return f"the kernel is Hopper's, compute capability 9.0, the GPU has {found}"
    return elsewhere


@cache
def _no_cute(device: torch.device) -> str | None:
    """Why CuTeDSL kernels that several architectures share cannot run on a device, or None."""
    if not _has("cutlass"):
        return "the package nvidia-cutlass-dsl is not installed"
    if device.type != "cuda":
        return f"CuTeDSL kernels run on a CUDA GPU, the tensors are on {device}"
    if _capability(device) not in ARCHITECTURES:
        found = ".".join(map(str, _capability(device)))
        wanted = ", ".join(f"{major}.{minor}" for major, minor in ARCHITECTURES)
        return f"the kernels are for compute capability {wanted}, the GPU has {found}"
    return None


def no_packed_weights(device: torch.device, dtype: torch.dtype, *, experts: bool) -> str | None:
    """Why no kernel takes packed NVFP4 weights with inputs of a dtype on a device, or None.

    Args:
        device: Of the weights.
        dtype: Of the inputs.
        experts: Whether they are routed experts, for which only CuTeDSL kernels are.
    """
    if device.type != "cuda":
        return f"kernels for packed weights run on a CUDA GPU, the tensors are on {device}"
    if dtype != torch.bfloat16:
        return f"kernels for packed weights take bfloat16, the model is {dtype}"
    return _no_cute(device) if experts else _no_triton(device)


def packed_layout(device: torch.device, activation: str) -> str:
    """The layout that kernels for these activations want on a device."""
    return packed_layout_of(ARCHITECTURES.get(_capability(device)), activation)


def packed_layout_of(arch: str | None, activation: str) -> str:
    """The same for a value of ``ARCHITECTURES``, or None for another GPU."""
    swizzled = arch not in (None, HOPPER) and activation == NVFP4.name
    return SWIZZLED if swizzled else FRAGMENTS


def cute_grouped(call: Call) -> str | None:
    """Why the CuTeDSL kernel cannot run a product of sorted rows with experts, or None."""
    x, weight, scales, global_scale, segments, _, _, layout = call.args[:8]
    kind = (call.device, layout, _rows_dtype(call), _out_dtype(call), len(segments))
    objection = _no_cute_grouped(*kind, weight.shape, x.shape[0])
    if objection is not None:
        return objection
    if not (weight.is_contiguous() and scales.is_contiguous() and global_scale.is_contiguous()):
        return "the weight or its scales are not contiguous"
    if weight.data_ptr() % 16 or scales.data_ptr() % 16:
        return "the codes or scales do not begin at multiples of 16 bytes"
    return None


def _rows_dtype(call: Call) -> torch.dtype:
    """Of sorted rows; codes are expanded to bfloat16."""
    x, x_scales = call.args[0], call.args[10]
    return x.dtype if x_scales is None else torch.bfloat16


def tcgen05_grouped(call: Call) -> str | None:
    """Why Blackwell's CuTeDSL kernel cannot run a product of sorted rows with experts, or None."""
    _, codes, scales, global_scale, segments, _, format, layout, activation = call.args[:9]
    if format != NVFP4.name or (activation != NVFP4.name and call.args[10] is None):
        found = f"the weight is {format!r} and activations are {activation!r}"
        return f"{found}, and both operands have to be NVFP4"
    if layout != SWIZZLED:
        return f"the weight has layout {layout!r}, wanted {SWIZZLED!r}: QuantizedTensor.with_layout"
    elsewhere = _wrong_dtypes(_rows_dtype(call), _out_dtype(call)) or _not_blackwell(call)
    if elsewhere:
        return elsewhere
    if len(segments) > _MOST_SEGMENTS:
        return f"the weight has {len(segments)} segments, wanted at most {_MOST_SEGMENTS}"
    experts, rows, half = codes.shape
    if experts > MOST_GROUPED or rows % 16 or half % (_STAGE // 2):
        return (
            f"there are {experts} experts of {rows} x {2 * half}, wanted at most {MOST_GROUPED} of "
            f"multiples of 16 x {_STAGE}"
        )
    if not all(t.is_contiguous() for t in (codes, scales, global_scale)):
        return "the codes, scales or global scales are not contiguous"
    if codes.data_ptr() % 16 or scales.data_ptr() % 16:
        return "the codes or scales do not begin at multiples of 16 bytes"
    return None


@lru_cache(maxsize=1 << 16)
def _no_cute_grouped(
    device: torch.device,
    layout: str,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    segments: int,
    codes: tuple[int, ...],
    tokens: int,
) -> str | None:
    """The same of what does not change from call to call of a product."""
    elsewhere = _packed_as(layout, dtype, out_dtype) or _no_cute(device)
    if elsewhere:
        return elsewhere
    if segments > _MOST_SEGMENTS:
        return f"the weight has {segments} segments, wanted at most {_MOST_SEGMENTS}"
    experts, rows, half = codes
    wanted = Experts(rows, 2 * half, experts, out_dtype == torch.float32, False)
    if choose_grouped(wanted, max(tokens, 1), ARCHITECTURES[_capability(device)]) is None:
        return (
            f"there are {experts} experts of {2 * half} columns, wanted at most {MOST_GROUPED} and "
            "a multiple of 128"
        )
    return None


def parts(call: Call) -> str | None:
    """Why an operator's parts are not run one after another, or None."""
    if call.device.type == "cpu" and not _interpreting.get():
        return "on the CPU the reference does the same"
    return None


def packed(call: Call) -> str | None:
    """Why no kernel for weights in fragments can run a product, or None."""
    return _packed_as(call.args[6], call.args[0].dtype, call.args[-1])


def _packed_as(layout: str, dtype: torch.dtype, out_dtype: torch.dtype) -> str | None:
    if layout != FRAGMENTS:
        return (
            f"the weight has layout {layout!r}, wanted {FRAGMENTS!r}: "
            "QuantizedTensor.with_layout or the layer's pack()"
        )
    return _wrong_dtypes(dtype, out_dtype)


def _wrong_dtypes(dtype: torch.dtype, out_dtype: torch.dtype) -> str | None:
    if dtype != torch.bfloat16:
        return f"x is {dtype}, wanted bfloat16"
    if out_dtype not in (torch.bfloat16, torch.float32):
        return f"the result is {out_dtype}, wanted bfloat16 or float32"
    return None


def _out_dtype(call: Call) -> torch.dtype:
    """Of a product; of one that is quantised, before that."""
    named = [arg for arg in call.args if isinstance(arg, torch.dtype)]
    return named[0] if named else _rows_dtype(call)


def fp8_gemm(call: Call) -> str | None:
    """Why the kernel for FP8 weights cannot run a product, beyond ``triton``, or None."""
    x, _, _, _, _, format, _, _, _, groups, out_dtype = call.args
    if format != FP8_BLOCK.name:
        return f"the weight is {format!r}, wanted {FP8_BLOCK.name!r}"
    if x.dtype != torch.bfloat16:
        return f"x is {x.dtype}, wanted bfloat16"
    if out_dtype not in (torch.bfloat16, torch.float32):
        return f"the result is {out_dtype}, wanted bfloat16 or float32"
    if groups > _LARGEST_GRID:
        return f"there are {groups} groups, wanted at most {_LARGEST_GRID}"
    return _no_e4m3(call)


def not_four_streams(call: Call) -> str | None:
    """Why the kernels of hyper-connections cannot run a call, beyond ``triton``, or None."""
    streams = _streams_of(call)
    if streams.shape[-2] != 4:
        return f"there are {streams.shape[-2]} streams, the kernels mix 4"
    return None


def _streams_of(call: Call) -> torch.Tensor:
    return call.args[1] if call.op.startswith("hc_post") else call.args[0]


def _fused_write(head_dim: int, rope_dim: int, rotated: int, plain: bool) -> str | None:
    if head_dim % 2:
        return f"entries have {head_dim} dims, wanted an even number"
    if not plain and rope_dim != rotated:
        return f"the pages have {rope_dim} RoPE dims, cos and sin turn {rotated}"
    return None


def kv_pages(call: Call) -> str | None:
    """Why the cache kernels cannot run a call, beyond ``triton``, or None."""
    if any(a == torch.float64 for a in call.args if isinstance(a, torch.dtype)):
        return "the result is float64, which only the reference computes in"
    plain = any(a == "plain" for a in call.args if isinstance(a, str))
    if any(isinstance(a, str) and a.startswith("index_") for a in call.args):
        return "compact index keys are written by 'compress_write' and read by 'indexer_select'"
    if not plain and call.device.type == "cuda" and _capability(call.device) < (8, 9):
        return "the GPU has no E4M3 conversions, which need compute capability 8.9"
    pages = next(a for a in call.args if isinstance(a, torch.Tensor))
    if call.op != "fake_quantize_kv" and not pages.is_contiguous():
        return f"the pages have strides {pages.stride()}, wanted contiguous ones"
    if not plain and call.op != "fake_quantize_kv" and pages.data_ptr() % 2:
        return "the pages begin at an odd address"
    if call.op == "norm_rope_write_kv":
        head_dim, rope_dim = call.args[3:5]
        return _fused_write(head_dim, rope_dim, 2 * call.args[7].shape[1], plain)
    return None


def _no_e4m3(call: Call) -> str | None:
    if call.device.type == "cuda" and _capability(call.device) < (8, 9):
        return "the GPU has no E4M3 conversions, which need compute capability 8.9"
    return None


def index_queries(call: Call) -> str | None:
    """Why the kernel of ``quantize_index_queries`` cannot run a call, beyond ``triton``, or None.

    Whatever the format: codes of E2M1 come out of instructions as new as those of E4M3.
    """
    return _no_e4m3(call)


LARGEST_SELECTION = 4096


def index_pages(call: Call) -> str | None:
    """Why the selection kernels cannot run a call of ``indexer_select``, or None."""
    q, _, data, page_size, entry_format, _, table, _, _, top_k, _ = call.args
    if entry_format == "fp8":
        return "the keys are 'fp8' entries, which only the reference reads as index keys"
    if entry_format == "index_fp8" and (data.stride(0) % 4 or data.data_ptr() % 4):
        return "the pages do not begin at multiples of 4 bytes, where their scales need to be"
    if entry_format == "index_fp8" or q.dtype == torch.float8_e4m3fn:
        objection = _no_e4m3(call)
        if objection:
            return objection
    if LARGEST_SELECTION < top_k < table.shape[1] * page_size:
        return f"top_k is {top_k}, and a kernel chooses at most {LARGEST_SELECTION}"
    return None


def cute_indexer(call: Call) -> str | None:
    """Why the CuTeDSL kernels of ``indexer_select`` cannot run a call, or None."""
    return triton(call.args, call.device) or index_pages(call) or _not_hopper(call.device)


def only_triton(call: Call) -> str | None:
    """Why the CuTeDSL kernels of ``indexer_select`` have no part in a call, or None."""
    q, weights, data, page_size, entry_format, _, table, _, _, top_k, scales = call.args
    capacity = table.shape[1] * page_size
    kinds = (q, weights, data, page_size, entry_format, scales, capacity)
    if multiplies(*kinds) or is_long(capacity, top_k):
        return None
    return (
        "they score many MXFP4 keys and choose from long rows, wanted are for each of "
        f"{q.shape[0]} tokens {top_k} of {capacity} {entry_format!r} keys"
    )


LARGEST_HEAD = 512


def attention(call: Call) -> str | None:
    """Why the kernel of ``sparse_attention`` cannot run a call, beyond ``triton``, or None."""
    q, window, page_size, entry_format, _, compressed, other_size, other_format = call.args[:8]
    rope_dim, dims = call.args[10], q.shape[-1]
    if q.shape[0] > _LARGEST_GRID:
        return f"there are {q.shape[0]} tokens, wanted at most {_LARGEST_GRID}"
    if dims > LARGEST_HEAD:
        return f"heads have {dims} dims, and a kernel holds at most {LARGEST_HEAD}"
    pools = [(window, page_size)] + ([] if compressed is None else [(compressed, other_size)])
    if entry_format != other_format or len({pool.dtype for pool, _ in pools}) > 1:
        return "the two caches are of different formats, and a kernel reads one"
    if q.dtype != torch.bfloat16 or window.dtype not in (torch.bfloat16, torch.uint8):
        return f"q is {q.dtype} and entries are {window.dtype}, wanted bfloat16 or 'fp8' entries"
    for pool, size in pools:
        if not pool.is_contiguous():
            return f"the pages have strides {pool.stride()}, wanted contiguous ones"
        if pool.shape[0] * size >= 2**31:
            return f"there are {pool.shape[0] * size} slots, wanted fewer than 2^31"
    cos = call.args[12]
    if cos is not None and dims % 2:
        return f"heads have {dims} dims, of which pairs are turned, wanted an even number"
    if entry_format != "fp8":
        return None
    entry = dims + rope_dim
    if entry % 8 or (dims - rope_dim) % 2 or any(pool.data_ptr() % 8 for pool, _ in pools):
        return "entries do not begin at multiples of 8 bytes, where their scales need to be"
    return _no_e4m3(call)


def cute_attention(call: Call) -> str | None:
    """Why the CuTeDSL kernel of ``sparse_attention`` cannot run a call, or None."""
    q, window, page, entry_format, _, compressed, other_page, other_format = call.args[:8]
    rope_dim, scale = call.args[10:12]
    elsewhere = attention(call) or _not_hopper(call.device)
    if elsewhere:
        return elsewhere
    if (entry_format, other_format) != ("fp8", "fp8"):
        return f"entries are {entry_format!r} and {other_format!r}, wanted 'fp8'"
    if (q.shape[-1], rope_dim) != (DIMS, ROPE):
        return f"heads have {q.shape[-1]} dims, {rope_dim} rotated, wanted {DIMS} and {ROPE}"
    if not scale > 0:
        return f"the scale is {scale}, wanted one above 0"
    cos = call.args[12]
    if cos is not None and 2 * cos.shape[1] != ROPE:
        return f"{2 * cos.shape[1]} dims of the result are to be turned, wanted {ROPE}"
    pools = [(window, page)] + ([] if compressed is None else [(compressed, other_page)])
    for pool, size in pools:
        if size & (size - 1):
            return f"a page has {size} entries, wanted a power of two"
        if pool.data_ptr() % 16 or pool.stride(0) % 16:
            return "pages do not begin at multiples of 16 bytes"
    return None


LARGEST_ROW = 65536
_LARGEST_GRID = 65535


def quantized(call: Call) -> str | None:
    """Why the kernels that write or read block formats cannot run a call, or None."""
    x = next(a for a in call.args if isinstance(a, torch.Tensor))
    if any(a == torch.float64 for a in call.args if isinstance(a, torch.dtype)):
        return "the result is float64, which only the reference computes in"
    if call.device.type == "cuda" and _capability(call.device) < (8, 9):
        return "the GPU has no E4M3 conversions, which need compute capability 8.9"
    strings = [a for a in call.args if isinstance(a, str)]
    if FRAGMENTS in strings:
        return f"the weight has layout {FRAGMENTS!r}, which only the reference takes apart"
    if "token" in strings and x.shape[-1] > LARGEST_ROW:
        return f"a row has {x.shape[-1]} columns, and a kernel holds at most {LARGEST_ROW}"
    if x.shape[:-2].numel() > _LARGEST_GRID:
        return f"there are {x.shape[:-2].numel()} matrices, wanted at most {_LARGEST_GRID}"
    return None


def hyper_quantize(call: Call) -> str | None:
    """Why the kernels of hyper-connections that quantise cannot run a call, or None."""
    columns = _streams_of(call).shape[-1]
    if columns > LARGEST_ROW:
        return f"a row has {columns} columns, and a kernel holds at most {LARGEST_ROW}"
    return not_four_streams(call) or _no_e4m3(call)


def compressor_state(call: Call) -> str | None:
    """Why the kernels that update a compressor's state cannot run a call, or None."""
    state = call.args[3]
    last = sum((n - 1) * step for n, step in zip(state.shape[1:], state.stride()[1:], strict=True))
    if last >= 1 << 31:
        return f"a row of the state spans {last + 1} numbers, wanted at most 2^31"
    return None


def compress_write(call: Call) -> str | None:
    """Why the kernel of ``compress_write`` cannot run a call, or None."""
    data, entry_format, dims = call.args[9], call.args[11], call.args[12]
    rotate_quantize, dtypes = call.args[17], call.args[18:20]
    if torch.float64 in dtypes:
        return "entries or tables are float64, which only the reference computes in"
    if not data.is_contiguous():
        return f"the pages have strides {data.stride()}, wanted contiguous ones"
    if dims % 2:
        return f"entries have {dims} dims, wanted an even number"
    if entry_format != "plain":
        objection = _no_e4m3(call)
        if objection:
            return objection
    if entry_format == "fp8" and rotate_quantize:
        return "rounding to FP4 before 'fp8' entries is left to the reference"
    if entry_format == "index_fp8" and data.data_ptr() % 4:
        return "the pages do not begin at a multiple of 4 bytes, where their scales need to be"
    return compressor_state(call)


def norm(call: Call) -> str | None:
    """Why the norm kernels cannot run a call, beyond ``triton``, or None."""
    columns = call.args[0].shape[-1]
    if columns > LARGEST_ROW:
        return f"a row has {columns} columns, and a kernel holds at most {LARGEST_ROW}"
    return quantized(call) if call.op == "rms_norm_quantize" else None


def swiglu(call: Call) -> str | None:
    """Why the SwiGLU kernels cannot run a call, or None."""
    return quantized(call) if call.op == "swiglu_quantize" else None


def rope(call: Call) -> str | None:
    """Why the rotation kernels cannot run a call, or None."""
    if call.op != "rope_quantize":
        return None
    (tokens, heads, dims), groups = call.args[0].shape, call.args[4]
    if dims % 16:
        return f"heads have {dims} dims, wanted a multiple of 16"
    if call.args[6] == "token" and heads * dims // groups > LARGEST_ROW:
        return f"a row has {heads * dims // groups} columns, a kernel holds at most {LARGEST_ROW}"
    if tokens > _LARGEST_GRID:
        return f"there are {tokens} tokens, wanted at most {_LARGEST_GRID}"
    if call.device.type == "cuda" and _capability(call.device) < (8, 9):
        return "the GPU has no E4M3 conversions, which need compute capability 8.9"
    return None


def wide_result(call: Call) -> str | None:
    """Why no kernel can run a call that names a dtype of its result, or None."""
    if any(a == torch.float64 for a in call.args if isinstance(a, torch.dtype)):
        return "the result is float64, which only the reference computes in"
    return None


MOST_EXPERTS = 4094


def moe(call: Call) -> str | None:
    """Why the kernels of the experts' rows cannot run a call, beyond ``triton``, or None."""
    experts = {"moe_permute": 3, "moe_sort": 5}.get(call.op)
    if experts is not None and call.args[experts] > MOST_EXPERTS:
        return f"there are {call.args[experts]} experts, and a kernel sorts at most {MOST_EXPERTS}"
    if call.op == "moe_gather_quantize":
        if call.device.type == "cuda" and _capability(call.device) < (8, 9):
            return "the GPU has no E4M3 conversions, which need compute capability 8.9"
        if call.args[0].shape[1] > LARGEST_ROW:
            columns = call.args[0].shape[1]
            return f"a row has {columns} columns, and a kernel holds at most {LARGEST_ROW}"
    return wide_result(call)
