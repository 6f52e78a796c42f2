"""Reasons why a GEMM with FP8 arithmetic cannot run a call, or is slower; None: no reason.

``tokens_note`` and ``rows_note`` name both estimated times, for ``dsv4.explain``.

``dsv4.implementations`` names these functions. Nothing here imports CuTeDSL.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dsv4.cute import e4m3_costs
from dsv4.cute.grouped_problem import MOST_EXPERTS
from dsv4.cute.sm90.gemm_e4m3_plan import K_BLOCK, ROWS
from dsv4.cute.supports import not_hopper
from dsv4.implementations import Call
from dsv4.ops._grouped_operands import chosen_for
from dsv4.ops.gemm import GemmArgs
from dsv4.ops.gemm_swiglu import GemmSwigluArgs
from dsv4.ops.grouped_gemm import GroupedGemmArgs
from dsv4.ops.grouped_gemm_swiglu import GroupedGemmSwigluArgs
from dsv4.ops.grouped_gemm_swiglu_fp8 import GroupedGemmSwigluFp8Args
from dsv4.ops.unsupported import (
    dense_gemm_dtypes,
    gapped,
    gemm_dtypes,
    many_segments,
    misaligned,
    not_in_fragments,
)
from dsv4.quant.formats import FP8_BLOCK, FP8_TOKEN, FRAGMENTS, LINEAR, NVFP4

_GroupedArgs = GroupedGemmArgs | GroupedGemmSwigluArgs | GroupedGemmSwigluFp8Args


def gemm(call: Call) -> str | None:
    """Return why ``gemm`` by FP8 tensor cores is unsupported, or None."""
    args: GemmArgs = call.args
    reason = _input(args) or dense_gemm_dtypes(args)
    reason = reason or not_hopper(call.device)
    if reason:
        return reason
    if args.format == FP8_BLOCK.name:
        return _block_weight(args)
    return _dense(args, args.groups)


def gemm_swiglu(call: Call) -> str | None:
    """Return why ``gemm_swiglu`` by FP8 tensor cores is unsupported, or None."""
    args: GemmSwigluArgs = call.args
    reason = _input(args) or dense_gemm_dtypes(args)
    return reason or not_hopper(call.device) or _dense(args, 1)


def _input(args: GemmArgs | GemmSwigluArgs) -> str | None:
    """Return why the input of a dense GEMM is not FP8, or its columns not in the right order."""
    if args.x_scales is None:
        return _activation(args.activation)
    layout = LINEAR if args.format == FP8_BLOCK.name else FRAGMENTS
    if args.x_layout != layout:
        return f"the columns of codes are {args.x_layout!r}, wanted {layout!r}"
    return None


def _activation(activation: str) -> str | None:
    return None if activation == "fp8" else f"activation is {activation!r}, wanted 'fp8'"


def _inexact(args: Any) -> str | None:
    """Return why a weight has no E4M3 codes of its own, or None."""
    if args.format != NVFP4.name:
        return f"the weight is in {args.format!r}, wanted {NVFP4.name!r}"
    if args.row_exponent is None:
        return "the weight is not exact in FP8, or was not packed by its layer"
    return not_in_fragments(args.layout) or many_segments(len(args.segments))


def _sizes(rows: int, columns: int, groups: int) -> str | None:
    if columns % K_BLOCK or (groups > 1 and rows // groups % ROWS):
        return (
            f"a group is {rows // groups} x {columns}, wanted a multiple of {K_BLOCK} columns and, "
            f"with several groups, a multiple of {ROWS} rows"
        )
    return None


def _dense(args: GemmArgs | GemmSwigluArgs, groups: int) -> str | None:
    reason = _inexact(args) or _sizes(args.codes.shape[0], 2 * args.codes.shape[1], groups)
    if reason:
        return reason
    assert args.global_scale is not None
    whole = gapped("codes or scales", args.codes, args.scales, args.global_scale)
    return whole or misaligned(args.codes, args.scales)


def _block_weight(args: GemmArgs) -> str | None:
    codes = args.codes
    reason = _sizes(codes.shape[0], codes.shape[1], args.groups)
    if reason:
        return reason
    if codes.stride(0) % 16 or codes.stride(1) != 1 or codes.data_ptr() % 16:
        return "rows of codes do not begin at multiples of 16 bytes"
    return gapped("scales", args.scales)


def grouped_gemm(call: Call) -> str | None:
    """Return why a grouped GEMM by FP8 tensor cores is unsupported, or None."""
    args: _GroupedArgs = call.args
    coded = args.x_scales is not None
    if coded and (args.x.dtype != FP8_TOKEN.codes_dtype or args.x_layout != FRAGMENTS):
        return f"rows are {args.x.dtype} codes, {args.x_layout}, wanted FP8 in {FRAGMENTS!r}"
    reason = None if coded else _activation(args.activation)
    reason = reason or not_hopper(call.device) or _inexact(args)
    if reason:
        return reason
    experts, rows, half = args.weight.shape
    dtype = torch.bfloat16 if coded else args.x.dtype
    out_dtype = torch.bfloat16 if isinstance(args, GroupedGemmSwigluFp8Args) else args.out_dtype
    reason = gemm_dtypes(dtype, out_dtype)
    reason = reason or _sizes(rows, 2 * half, 1)
    if reason is None and experts > MOST_EXPERTS:
        reason = f"there are {experts} experts, wanted at most {MOST_EXPERTS}"
    if reason:
        return reason
    assert args.scales is not None
    assert args.global_scale is not None
    whole = gapped("codes or scales", args.weight, args.scales, args.global_scale)
    return whole or misaligned(args.weight, args.scales)


def grouped_gemm_swiglu_fp8(call: Call) -> str | None:
    """Return why ``grouped_gemm_swiglu_fp8`` by FP8 tensor cores is unsupported, or None."""
    args: GroupedGemmSwigluFp8Args = call.args
    reason = grouped_gemm(call)
    if reason is None and args.result_layout == LINEAR:
        reason = f"columns of the result are linear, wanted the layout {FRAGMENTS!r}"
    return reason


def few_tokens(call: Call) -> str | None:
    """Return why a later row multiplies few tokens faster by estimated times, or None."""
    compared = _tokens_compared(call)
    return None if compared is None or compared.times.is_faster else str(compared)


def few_rows(call: Call) -> str | None:
    """Return why a later row is faster for few rows per expert by estimated times, or None."""
    compared = _rows_compared(call)
    return None if compared is None or compared.times.is_faster else str(compared)


def tokens_note(call: Call) -> str | None:
    """Return a sentence with the estimated times of a dense GEMM, or None without tokens."""
    compared = _tokens_compared(call)
    return None if compared is None else str(compared)


def rows_note(call: Call) -> str | None:
    """Return a sentence with the estimated times of a grouped GEMM, or None without rows."""
    compared = _rows_compared(call)
    return None if compared is None else str(compared)


class _Compared(NamedTuple):
    """Estimated times, and what they are for."""

    times: e4m3_costs.Estimate
    what: str

    def __str__(self) -> str:
        return (
            f"FP8 arithmetic takes an estimated {self.times.fp8:.0f} us for {self.what}, "
            f"bfloat16's {self.times.bfloat16:.0f}"
        )


def _tokens_compared(call: Call) -> _Compared | None:
    args: GemmArgs | GemmSwigluArgs = call.args
    rows, tokens, columns = args.codes.shape[0], args.x.shape[0], args.x.shape[-1]
    if not tokens:
        return None
    is_block = args.format == FP8_BLOCK.name
    times = e4m3_costs.estimate(rows, columns, tokens, is_block=is_block)
    return _Compared(times.of_codes(tokens, args.x.numel()), f"{tokens} tokens")


def _rows_compared(call: Call) -> _Compared | None:
    args: _GroupedArgs = call.args
    _, rows, half = args.weight.shape
    count, experts = chosen_for(args)
    if not count:
        return None
    is_fp8 = isinstance(args, GroupedGemmSwigluFp8Args)
    times = e4m3_costs.estimate_experts(rows, 2 * half, experts, count, quantized_out=is_fp8)
    times = times.of_codes(count, count * 2 * half)
    return _Compared(times, f"{count} rows of {experts} experts")
