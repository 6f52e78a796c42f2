"""CuTeDSL products of sorted rows with NVFP4 experts in the layout ``"fragments_16x64"``."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from threading import get_ident

import torch

from dsv4.cute._architectures import HOPPER
from dsv4.cute._driver import Launch, Parameters
from dsv4.cute._launch import aligned, architecture, current_device, cuts, loaded, stream_of
from dsv4.cute.sm90.grouped_plan import (
    Experts,
    GroupedFewPlan,
    GroupedPlan,
    choose,
    counted_as,
)
from dsv4.ops.quantize import bfloat16_operand

# Parameters of the kernels, in the order of ``GroupedFewKernel.kernel`` and
# ``GroupedKernel.kernel``. Before the latter's come what tensor copies need, the sizes of X, and a
# layout without any content.
FEW_PARAMETERS = Parameters(*"qqqqqqqq", *"iii", "q", *"iiiiii", "f")
PARAMETERS = Parameters("128s", "2i", "s", *"qqqqqqqq", *"iiiii", "q", *"iiiiii", "f")
_BEFORE, _ADDRESSES = struct.Struct("@2is0q"), struct.Struct("@8q")
_FEW_AFTER, _AFTER = struct.Struct("@3iq6if"), struct.Struct("@5iq6if")

_Experts = tuple[int, int, int, bool, bool, bool, bool]  # their fields, without the name
_ROW_SCALED = 4


def grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor,
    segments: Sequence[int],
    offsets: torch.Tensor,
    format: str,
    layout: str,
    activation: str,
    input_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``dsv4.ops.grouped_gemm.grouped_gemm``.

    Nothing but the result is allocated for bfloat16 activations whose rows begin at multiples of
    16 bytes.
    """
    (experts, rows, _), (tokens, columns) = weight.shape, x.shape
    kind = (out_dtype == torch.float32, activation == "nvfp4", False, False)
    wanted = (rows, columns, experts, *kind)
    if out is None:
        out = torch.empty((tokens, rows), dtype=out_dtype, device=x.device)
    parts = (weight, scales, global_scale, offsets)
    return _product(wanted, x, parts, tuple(segments), input_scale, None, math.inf, out)


def grouped_gemm_swiglu(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor,
    segments: Sequence[int],
    offsets: torch.Tensor,
    format: str,
    layout: str,
    activation: str,
    input_scale: torch.Tensor | None,
    limit: float | None,
    row_weight: torch.Tensor | None,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``dsv4.ops.grouped_gemm.grouped_gemm_swiglu``; allocates as ``grouped_gemm`` does."""
    (experts, rows, _), (tokens, columns) = weight.shape, x.shape
    kind = (out_dtype == torch.float32, activation == "nvfp4", True, row_weight is not None)
    wanted = (rows, columns, experts, *kind)
    if row_weight is not None:
        row_weight = row_weight.float().contiguous()
    if out is None:
        out = torch.empty((tokens, rows // 2), dtype=out_dtype, device=x.device)
    parts = (weight, scales, global_scale, offsets)
    bound = math.inf if limit is None else limit
    return _product(wanted, x, parts, tuple(segments), input_scale, row_weight, bound, out)


def _product(
    wanted: _Experts,
    x: torch.Tensor,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    segments: tuple[int, ...],
    input_scale: torch.Tensor | None,
    row_weight: torch.Tensor | None,
    limit: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """Fills and returns ``out``."""
    tokens, device = out.shape[0], x.get_device()
    if not tokens:
        return out
    if current_device() != device:
        with torch.cuda.device(device):
            return _product(wanted, x, parts, segments, input_scale, row_weight, limit, out)
    codes, scales, global_scale, offsets = parts
    scale = 0
    if wanted[_ROW_SCALED]:
        each = None if input_scale is None else of_rows(input_scale, offsets, tokens)
        x, row_scale = bfloat16_operand(x, each)
        scale = row_scale.data_ptr()
    x, start, token_stride = aligned(x, tokens)
    fixed = (segments, global_scale.shape[-1], limit, device, get_ident())
    _prepared(wanted, tokens, token_stride, *fixed)(
        stream_of(device),
        start,
        codes.data_ptr(),
        scales.data_ptr(),
        global_scale.data_ptr(),
        start,
        scale,
        0 if row_weight is None else row_weight.data_ptr(),
        out.data_ptr(),
        offsets.data_ptr(),
    )
    return out


def of_rows(values: torch.Tensor, offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """Each expert's value for its rows, ``[rows]``, without reading the offsets on the host.

    Rows of no expert get the last one's, which is as good as any.
    """
    numbers = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
    expert = torch.bucketize(numbers, offsets[1:], right=True)
    return values[expert.clamp_(max=values.shape[0] - 1)]


@functools.lru_cache(maxsize=4096)
def _prepared(
    wanted: _Experts,
    tokens: int,
    token_stride: int,
    segments: tuple[int, ...],
    scales_each: int,
    limit: float,
    device: int,
    thread: int,
) -> Launch:
    """Made once in every thread, because it takes longer than a launch."""
    experts = Experts(*wanted)
    arch = architecture(device)
    plan = choose(experts, tokens, arch)
    assert plan is not None
    kernel = loaded(plan, arch)
    resident = kernel.prepare(device)
    rest = (token_stride, scales_each, *cuts(segments), not segments and scales_each > 1, 16, limit)
    sizes = (tokens, experts.experts)
    if isinstance(plan, GroupedFewPlan):
        after = _FEW_AFTER.pack(*sizes, experts.rows // 16, *rest)
        return Launch(kernel, resident, FEW_PARAMETERS, b"", _ADDRESSES, after)
    row_blocks = -(-experts.rows // plan.rows)
    after = _AFTER.pack(*sizes, experts.columns // 64, experts.rows // 16, row_blocks, *rest)
    before = _BEFORE.pack(tokens, experts.columns, b"")
    matrix = (tokens, experts.columns, token_stride, plan.token_block)
    return Launch(kernel, resident, PARAMETERS, before, _ADDRESSES, after, matrix)


def plans(
    experts: Experts, max_tokens: int, arch: str = HOPPER
) -> list[GroupedPlan | GroupedFewPlan]:
    """The configurations taken for 1 to ``max_tokens`` rows of X, each once."""
    stand, tokens = [], 1
    while tokens < max_tokens:
        stand.append(tokens)
        tokens = counted_as(tokens + 1)
    found = (choose(experts, count, arch) for count in [*stand, max_tokens])
    return list(dict.fromkeys(plan for plan in found if plan is not None))
