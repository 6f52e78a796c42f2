"""Launchers of the CuTeDSL grouped GEMMs with NVFP4 weights in the layout ``fragments_16x64``."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from threading import get_ident
from typing import Any, NamedTuple

import torch

from dsv4.cute.gemm import packed_matrices
from dsv4.cute.grouped_problem import Experts, counted_as
from dsv4.cute.runtime.architectures import HOPPER
from dsv4.cute.runtime.driver import Kernel, Launch, Matrix
from dsv4.cute.runtime.launch import (
    aligned,
    architecture,
    current_device,
    cuts,
    loaded,
    run_noted,
    stream_of,
)
from dsv4.cute.sm90.grouped_gemm_plans import (
    GroupedPlan,
    LaunchPlan,
    launch_plans,
    uses_tile_counters,
)
from dsv4.cute.sm90.grouped_gemm_small_m_plan import (
    ALL_READY,
    GROUPED_SMALL_M_ABI,
    NOTHING_READY,
    OFFSETS_READY,
    GroupedSmallMPlan,
)
from dsv4.cute.sm90.grouped_gemm_wgmma_plan import GROUPED_WGMMA_ABI, GroupedWgmmaPlan
from dsv4.device import launches
from dsv4.ops._grouped_operands import chosen_for, of_rows, result_of
from dsv4.ops.grouped_gemm import GroupedGemmArgs
from dsv4.ops.grouped_gemm_swiglu import (
    GroupedGemmSwigluArgs,
    GroupedGemmSwigluQuantizeArgs,
    empty_codes,
)
from dsv4.ops.quantize import bfloat16_operand, block_values, fp8_values
from dsv4.quant.formats import SWIZZLED_EXPERTS

# Fields of an ``Experts``, without its name.
_Problem = tuple[int, int, int, bool, bool, bool, bool, bool, bool]
_ROW_SCALED = 4
_AnyArgs = GroupedGemmArgs | GroupedGemmSwigluArgs | GroupedGemmSwigluQuantizeArgs
_small_m_pointers = GROUPED_SMALL_M_ABI.pointers
_wgmma_pointers = GROUPED_WGMMA_ABI.pointers


def grouped_gemm(args: GroupedGemmArgs, out: torch.Tensor | None = None) -> torch.Tensor:
    """See ``dsv4.ops.grouped_gemm.grouped_gemm``.

    Nothing but the result, and at most 128 bytes for counters, is allocated for bfloat16
    activations whose rows begin at multiples of 16 bytes. Codes are dequantized first.
    """
    x = _values(args)
    (experts, rows, _), columns = args.weight.shape, x.shape[1]
    scaled = args.activation == "nvfp4" or args.row_scale is not None
    kind = (args.out_dtype == torch.float32, scaled, False, False, False, False)
    out = result_of(args, out, rows)
    problem = (rows, columns, experts, *kind)
    _multiply(problem, args, x, None, math.inf, (out, None, None, None), args.settled)
    return out


def grouped_gemm_swiglu(
    args: GroupedGemmSwigluArgs, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See ``dsv4.ops.grouped_gemm_swiglu.grouped_gemm_swiglu``; allocates like ``grouped_gemm``."""
    x, row_weight = _values(args), args.row_weight
    (experts, rows, _), columns = args.weight.shape, x.shape[1]
    scaled = args.activation == "nvfp4" or args.row_scale is not None
    kind = (args.out_dtype == torch.float32, scaled, True, row_weight is not None, False, False)
    if row_weight is not None:
        row_weight = row_weight.float().contiguous()
    out = result_of(args, out, rows // 2)
    limit = math.inf if args.limit is None else args.limit
    problem = (rows, columns, experts, *kind)
    _multiply(problem, args, x, row_weight, limit, (out, None, None, None))
    return out


def grouped_gemm_swiglu_quantize(
    args: GroupedGemmSwigluQuantizeArgs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.grouped_gemm_swiglu.grouped_gemm_swiglu_quantize``; allocates likewise."""
    x, row_weight = _values(args), args.row_weight
    experts, rows, _ = args.weight.shape
    scaled = args.activation == "nvfp4" or args.row_scale is not None
    swizzled = args.scale_layout == SWIZZLED_EXPERTS
    kind = (False, scaled, True, row_weight is not None, True, swizzled)
    if row_weight is not None:
        row_weight = row_weight.float().contiguous()
    out = empty_codes(x, args.weight, args.scale_layout)
    limit = math.inf if args.limit is None else args.limit
    problem = (rows, x.shape[1], experts, *kind)
    _multiply(problem, args, x, row_weight, limit, (*out, args.result_scale.contiguous()))
    return out


def _values(args: _AnyArgs) -> torch.Tensor:
    """The rows as the kernels multiply them: of codes the values without their global scales."""
    if args.x_scales is not None:
        return block_values(args.x, args.x_scales, torch.bfloat16, args.x_layout)
    return fp8_values(args.x) if args.activation == "fp8" else args.x


def _multiply(
    problem: _Problem,
    args: _AnyArgs,
    x: torch.Tensor,
    row_weight: torch.Tensor | None,
    limit: float,
    results: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    offsets_ready: bool = False,
) -> None:
    """Fill the results.

    Args:
        problem: Fields of an ``Experts``.
        args: Arguments of the operator.
        x: Its rows of X.
        row_weight: float32 weights of these rows.
        limit: Clamp of SwiGLU.
        results: The result; where it is NVFP4, its codes, block scales and row scales, and then the
            scale of each expert's results, which is read.
        offsets_ready: Whether the preceding kernel does not write the offsets.
    """
    tokens, device = x.shape[0], x.get_device()
    if not tokens:
        return
    if current_device() != device:
        with torch.cuda.device(device):
            _multiply(problem, args, x, row_weight, limit, results, offsets_ready)
        return
    row_scale, global_scale = args.row_scale, args.global_scale
    assert global_scale is not None
    if problem[_ROW_SCALED] and row_scale is None:
        input_scale = args.input_scale
        by_row = None if input_scale is None else of_rows(input_scale, args.offsets, tokens)
        x, row_scale = bfloat16_operand(x, by_row)
    x, _, token_stride = aligned(x, tokens)
    out, block_scales, row_scales, result_scale = results
    operands = (
        *(x, args.weight, args.scales, global_scale, row_scale, row_weight),
        *(out, args.offsets, result_scale, block_scales, row_scales),
    )
    segments, stream = tuple(args.segments), stream_of(device)
    scales = global_scale.shape[-1]
    kind = (
        problem,
        tokens,
        chosen_for(args),
        token_stride,
        segments,
        scales,
        limit,
        offsets_ready,
        device,
    )
    prepared = _prepared(*kind, get_ident())
    if not prepared.counted:
        run_noted(functools.partial(_launch_all, kind), stream, operands)
        return
    # A tape would repeat the launches, but not set the counters to 0.
    counters = torch.zeros(len(prepared.launches), dtype=torch.int32, device=x.device)
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in operands]
    _launch_all(kind, stream, addresses, counters.data_ptr())


def _launch_all(
    kind: tuple[Any, ...], stream: int, addresses: Sequence[int], counters: int = 0
) -> None:
    """Launch a grouped GEMM on the current GPU.

    Args:
        kind: First arguments of ``_prepared``.
        stream: The driver's handle.
        addresses: Addresses of ``operands`` in ``_multiply``; 0 for those that there are not.
        counters: Address of an int32 0 for each launch, which counts its tiles, or 0.
    """
    x, codes, scales, global_scale, token_scale, row_weight, *others = addresses
    out, offsets, result_scale, out_block_scales, out_row_scale = others
    prepared = _prepared(*kind, get_ident())
    for i, (launch, is_small_m) in enumerate(prepared.launches):
        if is_small_m:  # which reads codes and scales without TMA, and has no counter
            pointers = _small_m_pointers(
                codes=codes,
                scales=scales,
                global_scale=global_scale,
                x=x,
                token_scale=token_scale,
                row_weight=row_weight,
                out=out,
                offsets=offsets,
                result_scale=result_scale,
                out_block_scales=out_block_scales,
                out_row_scale=out_row_scale,
            )
            launch(stream, pointers)
        else:
            pointers = _wgmma_pointers(
                global_scale=global_scale,
                x=x,
                token_scale=token_scale,
                row_weight=row_weight,
                out=out,
                offsets=offsets,
                result_scale=result_scale,
                out_block_scales=out_block_scales,
                out_row_scale=out_row_scale,
                tile_counter=counters and counters + 4 * i,
            )
            launch(stream, pointers, described=(x, codes, scales))


class _Prepared(NamedTuple):
    """The launches of a grouped GEMM.

    Attributes:
        launches: Each with whether it is of the small-M kernel. Plain tuples, because unpacking a
            named one takes 0.1 us more in every launch (CPython 3.11).
        counted: Whether their CTAs take tiles by counters.
    """

    launches: tuple[tuple[Launch, bool], ...]
    counted: bool


@launches
def _prepared(
    problem: _Problem,
    tokens: int,
    chosen: tuple[int, int],
    token_stride: int,
    segments: tuple[int, ...],
    scales: int,
    limit: float,
    offsets_ready: bool,
    device: int,
    thread: int,
) -> _Prepared:
    """The launches of a grouped GEMM.

    Made once in every thread, because it takes longer than a launch.

    Args:
        problem: Fields of an ``Experts``.
        tokens: Rows of X.
        chosen: Rows and experts that the launches are chosen for.
        token_stride: Elements from one row of X to the next.
        segments: Rows of an expert's weight that share a global scale each.
        scales: Global scales of an expert.
        limit: Clamp of SwiGLU.
        offsets_ready: Whether the preceding kernel does not write the offsets.
        device: Index of the GPU.
        thread: Identifier of the thread; a launch is for one thread at a time.
    """
    experts, arch = Experts(*problem), architecture(device)
    rows, step = chosen[0], experts._replace(experts=chosen[1])
    planned = launch_plans(step, rows, arch)
    assert planned
    cut0, cut1, cut2 = cuts(segments)
    common = {
        "experts": experts.experts,
        "token_stride": token_stride,
        "expert_scales": scales,
        "cut0": cut0,
        "cut1": cut1,
        "cut2": cut2,
        "scale_rows": not segments and scales > 1,
        "opaque_16": 16,
        "limit": limit,
    }
    launches = []
    for i, launch_plan in enumerate(planned):
        kernel = loaded(launch_plan.plan, arch)
        ctas = kernel.prepare(device)  # as many as the GPU holds: the kernels find their tiles
        # Rows of no expert are cleared once, by the last launch.
        values = {**common, "clear_end": tokens if i == len(planned) - 1 else 0}
        if isinstance(launch_plan.plan, GroupedSmallMPlan):
            # Another launch of the same GEMM, which it follows, has waited for the operands.
            ready = ALL_READY if i else OFFSETS_READY if offsets_ready else NOTHING_READY
            launch = _small_m(kernel, ctas, launch_plan, experts, ready, values)
            launches.append((launch, True))
        else:
            x = Matrix(tokens, experts.columns, token_stride, launch_plan.plan.tma_tokens)
            launch = _wgmma(kernel, ctas, launch_plan, experts, x, i > 0, values)
            launches.append((launch, False))
    counted = len(planned) > 1 and uses_tile_counters(step, rows)
    return _Prepared(tuple(launches), counted)


def _small_m(
    kernel: Kernel,
    ctas: int,
    launch_plan: LaunchPlan,
    experts: Experts,
    ready: int,
    values: dict[str, float],
) -> Launch:
    """A launch of the small-M kernel."""
    plan = launch_plan.plan
    assert isinstance(plan, GroupedSmallMPlan)
    return GROUPED_SMALL_M_ABI.launch(
        kernel,
        ctas,
        (),
        units=experts.rows // 16 // plan.unit_tiles,
        most_rows=launch_plan.most_rows,
        ready=ready,
        **values,
    )


def _wgmma(
    kernel: Kernel,
    ctas: int,
    launch_plan: LaunchPlan,
    experts: Experts,
    x: Matrix,
    all_ready: bool,
    values: dict[str, float],
) -> Launch:
    """A launch of the wgmma kernel."""
    plan = launch_plan.plan
    assert isinstance(plan, GroupedWgmmaPlan)
    row_tiles, k_blocks = experts.rows // 16, experts.columns // 64
    return GROUPED_WGMMA_ABI.launch(
        kernel,
        ctas,
        (x, *packed_matrices(plan, experts.experts * row_tiles, k_blocks)),
        k_blocks=k_blocks,
        row_tiles=row_tiles,
        row_blocks=-(-experts.rows // plan.rows),
        above_rows=launch_plan.above_rows,
        most_rows=launch_plan.most_rows,
        all_ready=all_ready,
        **values,
    )


def plans(experts: Experts, max_tokens: int, arch: str = HOPPER) -> list[GroupedPlan]:
    """The configurations taken for 1 to ``max_tokens`` rows of X, each once."""
    representatives, tokens = [], 1
    while tokens < max_tokens:
        representatives.append(tokens)
        tokens = counted_as(tokens + 1)
    launches = (launch_plans(experts, count, arch) for count in [*representatives, max_tokens])
    return list(dict.fromkeys(x.plan for launch in launches for x in launch))
