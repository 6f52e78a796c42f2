"""Describe the source of the plans of a call's kernel, for ``dsv4.explain``.

``dsv4.implementations`` names these functions. Nothing here imports CuTeDSL.
"""

from __future__ import annotations

from dsv4.cute.sm90.gemm_small_m_plan import SmallMPlan
from dsv4.cute.sm90.plans import GemmProblem, choose
from dsv4.cute.sm90.tuned import said
from dsv4.implementations import Call
from dsv4.ops.gemm import GemmArgs
from dsv4.ops.gemm_swiglu import GemmSwigluArgs
from dsv4.quant.formats import FP8_BLOCK

_HOPPER = (9, 0)


def gemm(call: Call) -> str | None:
    """Of the GEMMs in bfloat16."""
    args: GemmArgs | GemmSwigluArgs = call.args
    if call.capability != _HOPPER:
        return None
    if args.format == FP8_BLOCK.name:
        return said("gemm_fp8_wgmma")
    rows, half = args.codes.shape
    groups = args.groups if isinstance(args, GemmArgs) else 1
    plan = choose(GemmProblem(rows, 2 * half, groups, False, False), max(1, args.x.shape[0]))
    return said("gemm_small_m" if isinstance(plan, SmallMPlan) else "gemm_wgmma")


def gemm_fp8_small_m(call: Call) -> str | None:
    """Of the GEMMs of few tokens with FP8 weights."""
    return said("gemm_fp8_small_m") if call.capability == _HOPPER else None


def gemm_e4m3(call: Call) -> str | None:
    """Of the GEMMs with FP8 arithmetic, and of experts."""
    return said("gemm_e4m3") if call.capability == _HOPPER else None


def grouped_gemm(call: Call) -> str | None:
    """Of the GEMMs of routed experts."""
    return said("grouped_gemm") if call.capability == _HOPPER else None


def attention(call: Call) -> str | None:
    """Of sparse attention."""
    return said("attention") if call.capability == _HOPPER else None
