"""Launchers of the ``tcgen05`` GEMM with both operands in NVFP4, on Blackwell.

The weight is in the layout ``"swizzled_128x4"``: codes as in the checkpoint, scales moved.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from threading import get_ident
from typing import NamedTuple

import torch

from dsv4 import dispatch
from dsv4.cute.runtime.driver import Launch
from dsv4.cute.runtime.launch import architecture, cuts, loaded, on, run_noted, stream_of
from dsv4.cute.sm100 import plans as _plans
from dsv4.cute.sm100.gemm_plan import TCGEN05_ABI, Tcgen05Plan
from dsv4.cute.sm100.plans import GemmProblem, choose
from dsv4.cute.sm100.tensor_maps import tensor_map
from dsv4.ops.gemm import GemmArgs
from dsv4.ops.gemm_swiglu import GemmSwigluArgs
from dsv4.ops.quantize import QuantizeNvfp4Args
from dsv4.quant.formats import SWIZZLED

# Tokens whose tiles follow one another before the next block of rows does: their X stays in L2.
# Not measured: no such GPU.
_SPAN = 2048

_pointers = TCGEN05_ABI.pointers


class _Call(NamedTuple):
    """The values that determine every scalar of a launch.

    Attributes:
        problem: The GEMM.
        tokens: How many, at least 1.
        segments: Rows of each segment of the weight, if it has several.
        scale_rows: Whether every row has a global scale of its own.
        scale_tokens: Whether every token has one.
        limit: Clamp of SwiGLU; infinity for none.
        device: Index of the GPU.
    """

    problem: GemmProblem
    tokens: int
    segments: tuple[int, ...]
    scale_rows: bool
    scale_tokens: bool
    limit: float
    device: int


def gemm(args: GemmArgs) -> torch.Tensor:
    """See ``dsv4.ops.gemm.gemm``; ``x`` is ``[T, K]``, or ``[T, G, K]`` with several groups.

    Allocates the quantised activations. Block scales must not have their sign bit set: the tensor
    cores take them as unsigned.
    """
    x, rows, groups = args.x, args.codes.shape[0], args.groups
    problem = GemmProblem(rows, x.shape[-1], groups, args.out_dtype == torch.float32)
    out = x.new_empty((x.shape[0], *x.shape[1:-1], rows // groups), dtype=args.out_dtype)
    return _gemm(problem, args, math.inf, out)


def gemm_swiglu(args: GemmSwigluArgs) -> torch.Tensor:
    """See ``dsv4.ops.gemm_swiglu.gemm_swiglu``; allocates as ``gemm`` does."""
    rows = args.codes.shape[0]
    problem = GemmProblem(rows, args.x.shape[-1], 1, args.out_dtype == torch.float32, swiglu=True)
    out = args.x.new_empty((args.x.shape[0], rows // 2), dtype=args.out_dtype)
    return _gemm(problem, args, math.inf if args.limit is None else args.limit, out)


def _gemm(
    problem: GemmProblem, args: GemmArgs | GemmSwigluArgs, limit: float, out: torch.Tensor
) -> torch.Tensor:
    """Fill and return ``out``."""
    x, global_scale = args.x, args.global_scale
    assert global_scale is not None
    if x.shape[0] == 0:
        return out
    with on(x.get_device()):
        x_codes, x_scales, token_scale = quantized(x, args.input_scale)
        call = _Call(
            problem=problem,
            tokens=x.shape[0],
            segments=tuple(args.segments),
            scale_rows=not args.segments and global_scale.shape[-1] > 1,
            scale_tokens=args.input_scale is None,
            limit=limit,
            device=x.device.index,
        )
        operands = (args.codes, args.scales, x_codes, x_scales, global_scale, token_scale, out)
        run_noted(functools.partial(_launch, call), stream_of(call.device), operands)
    return out


def quantized(
    x: torch.Tensor, input_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes and swizzled scales, each group's tokens together, and global scales of the tokens."""
    if x.dim() == 3:
        x = x.transpose(0, 1)
        input_scale = None if input_scale is None else input_scale.expand(x.shape[0], 1)
    scaling = "token" if input_scale is None else "static"
    codes, scales, token_scale = dispatch.first(
        "quantize_nvfp4", QuantizeNvfp4Args(x, input_scale, scaling, SWIZZLED)
    )
    return codes.contiguous(), scales.contiguous(), token_scale.contiguous()


def _launch(call: _Call, stream: int, addresses: Sequence[int]) -> None:
    """Launch a GEMM on the current GPU.

    Args:
        call: Its scalars.
        stream: The driver's handle.
        addresses: Addresses of codes and block scales of the weight, then of the tokens, global
            scales of the weight and of the tokens, and the result.
    """
    *described, global_scale, token_scale, out = addresses
    pointers = _pointers(global_scale=global_scale, token_scale=token_scale, out=out)
    _prepared(call, get_ident())(stream, pointers, described=tuple(described))


@functools.lru_cache(maxsize=4096)
def _prepared(call: _Call, thread: int) -> Launch:
    """The launch of a GEMM, made once in every thread, because that takes longer than a launch."""
    problem, tokens = call.problem, call.tokens
    plan = choose(problem, tokens)
    kernel = loaded(plan, architecture(call.device))
    token_tiles, row_blocks = -(-tokens // plan.token_block), -(-problem.rows // plan.rows)
    tiles, resident = token_tiles * row_blocks, kernel.prepare(call.device)
    # Clusters are persistent; CTAs that share K compute a single tile.
    clusters = tiles if plan.k_splits > 1 else min(tiles, resident)
    cut0, cut1, cut2 = cuts(call.segments)
    return TCGEN05_ABI.launch(
        kernel,
        clusters * plan.ctas,
        plan.boxes(problem.rows, problem.columns, tokens, problem.groups),
        tensor_map,
        tokens=tokens,
        token_tiles=token_tiles,
        token_span=max(1, _SPAN // plan.token_block),
        k_stages=plan.k_stages(problem.columns),
        rows=problem.rows,
        row_blocks=row_blocks,
        group_blocks=row_blocks // problem.groups,
        cut0=cut0,
        cut1=cut1,
        cut2=cut2,
        scale_rows=call.scale_rows,
        scale_tokens=call.scale_tokens,
        limit=call.limit,
    )


def warmup(plans: Sequence[Tcgen05Plan], device: torch.device) -> None:
    """Compile or load kernels now, so that no later call does, e.g. while a graph is captured."""
    with torch.cuda.device(device):
        for plan in plans:
            loaded(plan, architecture(device.index)).prepare(device.index)


def plans(
    rows: int,
    columns: int,
    groups: int,
    out_dtype: torch.dtype,
    max_tokens: int,
    *,
    swiglu: bool = False,
) -> list[Tcgen05Plan]:
    """The configurations that a GEMM takes for 1 to ``max_tokens`` tokens, each once.

    Args:
        rows: N, of all groups, a multiple of 16, and of 128 in each of several groups.
        columns: K, a multiple of 32.
        groups: Groups of rows with an input each.
        out_dtype: bfloat16 or float32.
        max_tokens: At least 1.
        swiglu: Whether for ``gemm_swiglu``, else for ``gemm``.
    """
    problem = GemmProblem(rows, columns, groups, out_dtype == torch.float32, swiglu)
    return _plans.plans(problem, max_tokens)
