"""Arguments and configurations of the GEMMs whose NVFP4 weights are converted to E4M3 first.

Needs no compiler.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from dsv4.cute.runtime.kernel_abi import Int32, KernelAbi, Pointer
from dsv4.cute.sm90 import e4m3_times
from dsv4.cute.sm90.e4m3_times import TileTimes
from dsv4.cute.sm90.gemm_e4m3_plan import (
    K_BLOCK,
    BlockE4m3Tma,
    E4m3Args,
    E4m3Plan,
    GroupedE4m3Args,
    GroupedE4m3Plan,
)


class ConvertArgs(NamedTuple):
    """Arguments of the conversion of NVFP4 weights, in fragments, to E4M3.

    Attributes:
        codes: Packed codes of whole row tiles; matrices follow one another.
        scales: Their packed block scales.
        row_exponent: int8, one per row (``dsv4.quant.exact_fp8``).
        out: E4M3 ``[rows, K]``, columns in the order of fragments.
        k_blocks: K / 128.
        chunks: CTAs of a row tile.
        opaque_16: 16; an argument, so that the compiler cannot replace multiplications by shifts.
    """

    codes: Pointer
    scales: Pointer
    row_exponent: Pointer
    out: Pointer
    k_blocks: Int32
    chunks: Int32
    opaque_16: Int32


CONVERT_ABI = KernelAbi(ConvertArgs)
CONVERTED_E4M3_ABI = KernelAbi(BlockE4m3Tma, E4m3Args)
GROUPED_CONVERTED_E4M3_ABI = KernelAbi(BlockE4m3Tma, GroupedE4m3Args)


@dataclass(frozen=True)
class ConvertE4m3Plan:
    """The kernel in ``e4m3_convert``."""

    kernel = "dsv4.cute.sm90.e4m3_convert:ConvertE4m3Kernel"
    ctas = 1
    threads = 256
    shared_bytes = 0
    pieces = 4  # pieces of 128 columns that a warp converts
    k_blocks = pieces * threads // 64  # blocks of 128 columns of a CTA; two warps share the rows


@dataclass(frozen=True)
class ConvertedE4m3Plan(E4m3Plan):
    """One configuration of the kernel in ``gemm_e4m3_converted``; ``dequantized_stages`` is 0."""

    @property
    def kernel(self) -> str:
        """The kernel's class, as ``module:class``."""
        return "dsv4.cute.sm90.gemm_e4m3_converted:ConvertedE4m3Kernel"

    @property
    def times(self) -> TileTimes:
        """Measured times of its tiles."""
        return e4m3_times.CONVERTED[self.token_rows]


@dataclass(frozen=True)
class GroupedConvertedE4m3Plan(GroupedE4m3Plan):
    """One configuration of the kernel in ``grouped_gemm_e4m3_converted``, like the dense one."""

    @property
    def kernel(self) -> str:
        """The kernel's class, as ``module:class``."""
        return "dsv4.cute.sm90.grouped_gemm_e4m3_converted:GroupedConvertedE4m3Kernel"

    @property
    def times(self) -> TileTimes:
        """Measured times of its tiles."""
        return e4m3_times.GROUPED_CONVERTED[self.stages]


CONVERT = ConvertE4m3Plan()
_dense = functools.cache(ConvertedE4m3Plan)
_grouped = functools.cache(GroupedConvertedE4m3Plan)


def converted_plan(
    rows: int, columns: int, tokens: int, float32_out: bool, swiglu: bool
) -> ConvertedE4m3Plan:
    """The configuration of a GEMM on converted weights; see ``e4m3_plan``."""
    plans = [
        _dense(token_rows, stages, 0, float32_out, swiglu)
        for token_rows, stages in ((2, 4), (1, 6))
    ]
    return min(plans, key=lambda plan: plan.dense_us(rows, columns, tokens))


def grouped_converted_plan(
    columns: int, float32_out: bool, swiglu: bool, row_weighted: bool, quantized_out: bool
) -> GroupedConvertedE4m3Plan:
    """The configuration of a grouped GEMM on converted weights; see ``grouped_e4m3_plan``."""
    stages = 3 if quantized_out else 4
    return _grouped(2, stages, 0, float32_out, swiglu, row_weighted, quantized_out)


def convert_grid(rows: int, columns: int) -> tuple[int, int]:
    """CTAs of the conversion of a number of rows, and CTAs of a row tile."""
    chunks = -(-(columns // K_BLOCK) // CONVERT.k_blocks)
    return rows // 16 * chunks, chunks
