"""Routed experts of sorted rows: gate_up GEMM, SwiGLU and down GEMM as one operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dsv4.ops import _check
from dsv4.ops._grouped_operands import Rows, check_step, checked_rows, checked_weight
from dsv4.ops._library import Written, as_record, define
from dsv4.ops._plans import planned
from dsv4.ops.grouped_gemm import GroupedGemmArgs
from dsv4.ops.grouped_gemm_swiglu import GroupedGemmSwigluArgs, check_grouped_swiglu
from dsv4.quant.formats import LINEAR, QuantizedTensor

# int32 of ``counters``: eight, a sector of the L2, for each of the most rows that one launch takes,
# and eight for the ranges that CTAs take.
COUNTERS = 520


class ExpertMlpArgs(NamedTuple):
    """Arguments of ``expert_mlp``: ``grouped_gemm_swiglu``, then ``grouped_gemm`` of its result.

    Attributes:
        x: ``[R, K]`` sorted rows, floating.
        weight: ``[E, 2 I, K]`` floating, or codes ``[E, 2 I, K/2]``, of gate and up.
        scales: Block scales of codes in the weight's layout, else None.
        global_scale: float32, of each expert's weight ``[E, 1]``, or of each of its parts; or None.
        segments: Rows of each part of a fused weight; empty: one part.
        down: ``[E, N, I]`` floating, or codes ``[E, N, I/2]``.
        down_scales: Block scales of these codes, else None.
        down_global_scale: float32 ``[E, 1]``, or of each part; or None.
        down_segments: Rows of each part of a fused down weight; empty: one part.
        offsets: int32 ``[E + 1]``: expert e owns the rows ``offsets[e]`` to ``offsets[e + 1]``.
        format: Name of the weights' format, or ``"plain"``.
        layout: Layout of the weights' codes and block scales.
        limit: Clamp bound above 0, or None for no clamp.
        row_weight: ``[R]`` floating, multiplies the rows between the GEMMs; or None.
        counters: int32 ``[COUNTERS]`` zeros, which are zeros again when the call has ended.
        out_dtype: Dtype of the result, floating.
        step_rows: See ``GroupedGemmArgs``.
        step_experts: Likewise.
    """

    x: torch.Tensor
    weight: torch.Tensor
    scales: torch.Tensor | None
    global_scale: torch.Tensor | None
    segments: Sequence[int]
    down: torch.Tensor
    down_scales: torch.Tensor | None
    down_global_scale: torch.Tensor | None
    down_segments: Sequence[int]
    offsets: torch.Tensor
    format: str
    layout: str
    limit: float | None
    row_weight: torch.Tensor | None
    counters: Written
    out_dtype: torch.dtype
    step_rows: int = 0
    step_experts: int = 0


def gate_up_record(args: ExpertMlpArgs) -> GroupedGemmSwigluArgs:
    """Return the record of the first GEMM."""
    plain = {"row_exponent": None, "activation": "bf16", "input_scale": None, "x_scales": None}
    plain |= {"x_layout": LINEAR, "row_scale": None}
    return as_record(GroupedGemmSwigluArgs, args, **plain)


def down_record(args: ExpertMlpArgs, inner: torch.Tensor) -> GroupedGemmArgs:
    """Return the record of the second GEMM, of the first one's results."""
    return as_record(
        GroupedGemmArgs,
        args,
        x=inner,
        weight=args.down,
        scales=args.down_scales,
        global_scale=args.down_global_scale,
        row_exponent=None,
        segments=args.down_segments,
        activation="bf16",
        input_scale=None,
        x_scales=None,
        x_layout=LINEAR,
        row_scale=None,
        settled=True,
    )


def _fake(args: ExpertMlpArgs) -> torch.Tensor:
    return args.x.new_empty((args.x.shape[0], args.down.shape[1]), dtype=args.out_dtype)


_expert_mlp = define("expert_mlp", ExpertMlpArgs, _fake)


@planned
def expert_mlp(
    x: torch.Tensor,
    gate_up: QuantizedTensor | torch.Tensor,
    down: QuantizedTensor | torch.Tensor,
    offsets: torch.Tensor,
    limit: float | None,
    counters: torch.Tensor,
    *,
    row_weight: torch.Tensor | None = None,
    step_rows: int = 0,
    step_experts: int = 0,
    backend: str = "auto",
) -> torch.Tensor:
    """Compute ``grouped_gemm_swiglu`` of the rows, then ``grouped_gemm`` of the result.

    The result of SwiGLU is rounded to the dtype of ``x`` between the GEMMs.

    Args:
        x: ``[R, K]``, rows sorted by expert (``moe_permute``).
        gate_up: ``[E, 2 I, K]``, as in ``grouped_gemm_swiglu``: gate in the even rows.
        down: ``[E, N, I]``, as in ``grouped_gemm``, in the format and layout of ``gate_up``.
        offsets: See ``grouped_gemm``.
        limit: Clamp bound, greater than 0, or None for no clamp.
        counters: int32 ``[520]`` zeros, by which CTAs of a launch wait for one another. They are
            zeros again when the call has ended. Calls that may run at a time, on several streams
            for instance, have counters of their own.
        row_weight: ``[R]``, floating: multiplies its row between the GEMMs. None for no weight.
        step_rows: See ``grouped_gemm``.
        step_experts: Likewise.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[R, N]`` in ``x.dtype``; rows past ``offsets[E]`` are zeros.

    Raises:
        TypeError: as ``grouped_gemm_swiglu``, and if ``counters`` is not int32.
        ValueError: as ``grouped_gemm_swiglu`` and ``grouped_gemm``, and if the weights have
            different formats or layouts or ``counters`` has another shape or device.
    """
    op = "expert_mlp"
    rows, out_dtype = checked_rows(op, x, "bf16", None)
    first = checked_weight(op, rows, gate_up, offsets, "bf16", None)
    high = first.codes.shape[1]
    if high % 2:
        raise ValueError(f"{op}: gate_up has {high} rows, wanted an even number")
    if not torch.compiler.is_compiling() and len(down.shape) == 3 and down.shape[2] != high // 2:
        raise ValueError(f"{op}: down has {down.shape[2]} columns, wanted {high // 2}")
    second = checked_weight(op, Rows(rows.x, high // 2), down, offsets, "bf16", None)
    kinds = (first.format, first.layout), (second.format, second.layout)
    if kinds[0] != kinds[1]:
        raise ValueError(f"{op}: gate_up and down are {kinds[0]} and {kinds[1]}, wanted the same")
    if step_rows or step_experts:
        check_step(op, step_rows, step_experts)
    check_grouped_swiglu(op, rows.x, limit, row_weight)
    _check.tensors(
        op,
        ("offsets", offsets, (torch.int32,), ("E + 1",)),
        ("counters", counters, (torch.int32,), (COUNTERS,)),
    )
    args = ExpertMlpArgs(
        rows.x,
        first.codes,
        first.scales,
        first.global_scale,
        first.segments,
        second.codes,
        second.scales,
        second.global_scale,
        second.segments,
        offsets,
        first.format,
        first.layout,
        limit,
        row_weight,
        counters,
        out_dtype,
        step_rows,
        step_experts,
    )
    return _expert_mlp(args, backend)
