"""Launcher of routed experts in one launch, NVFP4 weights in the layout ``fragments_16x64``."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch

from dsv4.cute.grouped_problem import Experts
from dsv4.cute.runtime.driver import Launch
from dsv4.cute.runtime.launch import aligned, architecture, cuts, loaded, on, run_noted, stream_of
from dsv4.cute.sm90.expert_mlp_plan import EXPERT_MLP_ABI, expert_mlp_plan, problems
from dsv4.ops._grouped_operands import chosen_for
from dsv4.ops.expert_mlp import ExpertMlpArgs

_pointers = EXPERT_MLP_ABI.pointers


def expert_mlp(args: ExpertMlpArgs) -> torch.Tensor:
    """See ``dsv4.ops.expert_mlp.expert_mlp``.

    Allocates the result and the rows between the GEMMs.
    """
    gate_up, down = problems(args)
    x, row_weight = args.x, args.row_weight
    tokens = x.shape[0]
    out = x.new_empty((tokens, down.rows))
    if not tokens:
        return out
    with on(x.get_device()):
        x, _, token_stride = aligned(x, tokens)
        inner = x.new_empty((tokens, down.columns))
        if row_weight is not None:
            row_weight = row_weight.float().contiguous()
        global_scale, down_global_scale = args.global_scale, args.down_global_scale
        assert global_scale is not None
        assert down_global_scale is not None
        kind = (
            gate_up,
            down,
            tokens,
            chosen_for(args),
            token_stride,
            tuple(args.segments),
            (global_scale.shape[-1], down_global_scale.shape[-1]),
            math.inf if args.limit is None else args.limit,
            x.get_device(),
        )
        operands = (
            *(args.weight, args.scales, global_scale),
            *(args.down, args.down_scales, down_global_scale),
            *(x, row_weight, inner, out, args.offsets, args.counters),
        )
        run_noted(functools.partial(_launch, kind), stream_of(x.get_device()), operands)
    return out


def _launch(kind: tuple[Any, ...], stream: int, addresses: Sequence[int]) -> None:
    """Launch on the current GPU.

    Args:
        kind: First arguments of ``_prepared``.
        stream: The driver's handle.
        addresses: Addresses of ``operands`` in ``expert_mlp``; 0 for None.
    """
    codes, scales, global_scale, *others = addresses
    down_codes, down_scales, down_global_scale, x, row_weight, *others = others
    inner, out, offsets, counters = others
    pointers = _pointers(
        codes=codes,
        scales=scales,
        global_scale=global_scale,
        down_codes=down_codes,
        down_scales=down_scales,
        down_global_scale=down_global_scale,
        x=x,
        row_weight=row_weight,
        inner=inner,
        out=out,
        offsets=offsets,
        counters=counters,
    )
    _prepared(*kind, get_ident())(stream, pointers)


@functools.lru_cache(maxsize=4096)
def _prepared(
    gate_up: Experts,
    down: Experts,
    tokens: int,
    chosen: tuple[int, int],
    token_stride: int,
    segments: tuple[int, ...],
    scales: tuple[int, int],
    limit: float,
    device: int,
    thread: int,
) -> Launch:
    """The launch, made once in every thread, because that takes longer than a launch.

    Args:
        gate_up: The first GEMM.
        down: The second.
        tokens: Rows of X.
        chosen: Rows and experts that the launch is chosen for.
        token_stride: Elements from one row of X to the next.
        segments: Rows of gate_up that share a global scale each.
        scales: Global scales of an expert's gate_up and of its down weight.
        limit: Clamp of SwiGLU.
        device: Index of the GPU.
        thread: Identifier of the thread; a launch is for one thread at a time.
    """
    rows, experts = chosen
    arch = architecture(device)
    step = (gate_up._replace(experts=experts), down._replace(experts=experts))
    plan = expert_mlp_plan(*step, rows)
    assert plan is not None
    kernel = loaded(plan, arch)
    cut0, cut1, cut2 = cuts(segments)
    return EXPERT_MLP_ABI.launch(
        kernel,
        # As many CTAs as the GPU holds: all have to run at a time, because they wait for others.
        kernel.prepare(device),
        (),
        clear_end=tokens,
        experts=gate_up.experts,
        units=gate_up.rows // 16,
        down_units=down.rows // 16,
        token_stride=token_stride,
        inner_stride=down.columns,
        expert_scales=scales[0],
        down_expert_scales=scales[1],
        cut0=cut0,
        cut1=cut1,
        cut2=cut2,
        scale_rows=not segments and scales[0] > 1,
        no_cut=cuts(())[0],
        down_scale_rows=scales[1] > 1,
        opaque_16=16,
        limit=limit,
    )


def plans(gate_up: Experts, down: Experts, max_tokens: int) -> list[Any]:
    """The configurations taken for 1 to ``max_tokens`` rows of X, each once."""
    chosen = (expert_mlp_plan(gate_up, down, rows) for rows in range(1, max_tokens + 1))
    return list(dict.fromkeys(plan for plan in chosen if plan is not None))
