"""Baselines of routed experts with FP8 activations, for ``dsv4.bench.suites.moe``.

``dsv4.bench.baselines.fp8`` says what each library multiplies. Those that are named "rate only" are
timed without SwiGLU, without rounding of rows, and without this package's kernels between the two
GEMMs; DeepGEMM's rows are padded, each expert's to its multiple of rows, before they are timed.
Humming rounds its rows itself, and this package's SwiGLU kernel follows its first GEMM.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from itertools import pairwise

import torch

from dsv4 import ops
from dsv4.bench.baselines import experts
from dsv4.bench.baselines.fp8 import (
    FP8_ROUNDING,
    HUMMING,
    OWN,
    ROUNDED_DEEP_GEMM,
    columns_first,
    humming_layer,
    rounded_blocks,
)
from dsv4.bench.baselines.packed import require_close
from dsv4.quant.exact_fp8 import to_e4m3
from dsv4.quant.formats import FP8_BLOCK, FP8_TOKEN, QuantizedTensor

SCALED_GROUPED_MM = "torch._scaled_grouped_mm (rate only: a scale for each row)"
_Call = Callable[[], torch.Tensor]
_ROWS = 8  # of an expert, whose results are compared


def own(gate_up: QuantizedTensor, down: QuantizedTensor) -> experts.Own:
    """This package's kernels for bfloat16 activations."""
    return experts.Own()


def scaled_grouped_mm(gate_up: QuantizedTensor, down: QuantizedTensor) -> experts.Operands:
    """PyTorch's grouped GEMM of FP8 rows and weights; all scales are 1.

    Raises:
        RuntimeError: if the weights do not fit the GPU.
    """
    _check_memory(gate_up, down)
    multiply = getattr(torch, "_scaled_grouped_mm")  # noqa: B009, not in torch's annotations
    weights = [_e4m3(weight).transpose(1, 2) for weight in (gate_up, down)]
    ones = [weight.new_ones(weight.shape[::2], dtype=torch.float32) for weight in weights]

    def call_of(x: torch.Tensor, offsets: torch.Tensor, index: int) -> _Call:
        codes, scale = ops.quantize(x, FP8_TOKEN).codes, x.new_ones(len(x), dtype=torch.float32)
        named = {"offs": offsets[1:].contiguous(), "out_dtype": torch.bfloat16}
        operands = (codes, weights[index], scale, ones[index])
        return lambda: multiply(*operands, **named, use_fast_accum=True)

    def calls(rows: torch.Tensor, offsets: torch.Tensor) -> tuple[_Call, _Call]:
        inner = rows[:, : down.columns].contiguous()
        return call_of(rows, offsets, 0), call_of(inner, offsets, 1)

    return experts.Operands(calls)


def deep_gemm(gate_up: QuantizedTensor, down: QuantizedTensor) -> experts.Operands:
    """DeepGEMM's grouped GEMM of rows that lie expert by expert.

    Raises:
        ImportError: if it is not installed.
        RuntimeError: if the weights do not fit the GPU.
    """
    library = importlib.import_module("deep_gemm")
    _check_memory(gate_up, down)
    weights = [_in_blocks(weight) for weight in (gate_up, down)]
    step = int(library.get_mk_alignment_for_contiguous_layout())

    def call_of(x: torch.Tensor, offsets: torch.Tensor, weight: QuantizedTensor) -> _Call:
        slots, expert_of_row = padded(offsets, step)
        rows = ops.quantize(x, FP8_TOKEN)
        codes = _placed(rows, slots, len(expert_of_row))
        left = (codes.codes, columns_first(codes.scales.float()))
        right = (weight.codes, weight.scales.float())
        out = x.new_empty((len(expert_of_row), weight.rows), dtype=torch.bfloat16)

        def call() -> torch.Tensor:
            library.m_grouped_fp8_gemm_nt_contiguous(left, right, out, expert_of_row)
            return out

        _compare(call()[slots], rows, offsets, weight)
        return call

    def calls(rows: torch.Tensor, offsets: torch.Tensor) -> tuple[_Call, _Call]:
        inner = rows[:, : down.columns].contiguous()
        return call_of(rows, offsets, weights[0]), call_of(inner, offsets, weights[1])

    return experts.Operands(calls)


def humming(gate_up: QuantizedTensor, down: QuantizedTensor) -> experts.Pair:
    """Humming's grouped kernel with FP8 activations.

    Raises:
        ImportError: if it is not installed.
        RuntimeError: if the weights do not fit the GPU twice.
    """
    library = importlib.import_module("humming.layer")
    experts.check_memory(gate_up.device, 2 * gate_up.nbytes + down.nbytes)
    config = {"gemm_type": "grouped_contiguous"}

    def multiplier(weight: QuantizedTensor) -> experts.Multiply:
        layer = humming_layer(library, weight, weight.shape[0])
        return lambda x, offsets: layer(x, expert_layout=offsets, compute_config=config)

    first, second = (multiplier(weight) for weight in (gate_up, down))
    return experts.Pair(first, second, lambda offsets: offsets.long(), experts.NONE, FP8_ROUNDING)


def padded(offsets: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Place the rows of experts so that each expert begins at a multiple of ``step``.

    Args:
        offsets: int32 ``[E + 1]``.
        step: At least 1.

    Returns:
        The place of each row, int64 ``[R]``, and of each place its expert, int32; -1 where no row
        is.
    """
    bounds = offsets.tolist()
    slots, experts_of, begin = [], [], 0
    for expert, (start, end) in enumerate(pairwise(bounds)):
        count = -(-(end - start) // step) * step
        slots.append(torch.arange(begin, begin + end - start))
        owner = torch.full((count,), -1, dtype=torch.int32)
        owner[: end - start] = expert
        experts_of.append(owner)
        begin += count
    device = offsets.device
    return torch.cat(slots).to(device), torch.cat(experts_of).to(device)


def _placed(codes: QuantizedTensor, slots: torch.Tensor, count: int) -> QuantizedTensor:
    """Return rows of codes at their slots, zeros elsewhere; padding has the scale 2^-127."""

    def placed(part: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros((count, part.shape[1]), dtype=torch.uint8, device=part.device)
        wide[slots] = part.view(torch.uint8)
        return wide.view(part.dtype)

    return dataclasses.replace(codes, codes=placed(codes.codes), scales=placed(codes.scales))


def _compare(
    result: torch.Tensor, codes: QuantizedTensor, offsets: torch.Tensor, weight: QuantizedTensor
) -> None:
    """Raise ValueError unless the expert with most rows multiplied its first ones rightly."""
    expert = int(offsets.diff().argmax())
    start, end = offsets[expert : expert + 2].tolist()
    sample = slice(start, min(end, start + _ROWS))
    rows = dataclasses.replace(codes, codes=codes.codes[sample], scales=codes.scales[sample])
    values = ops.dequantize(rows, backend="reference")
    dense = ops.dequantize(weight[expert], backend="reference")
    require_close(result[sample], values @ dense.T)


def _check_memory(*weights: QuantizedTensor) -> None:
    """Raise RuntimeError unless FP8 copies of the weights fit the GPU."""
    experts.check_memory(weights[0].device, sum(2 * weight.codes.numel() for weight in weights))


def _e4m3(weight: QuantizedTensor) -> torch.Tensor:
    """``[E, N, K]`` in E4M3, without scales."""
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    for expert in range(weight.shape[0]):
        codes[expert] = to_e4m3(weight[expert])
    return codes


def _in_blocks(weight: QuantizedTensor) -> QuantizedTensor:
    """``[E, N, K]`` rounded to FP8 with scales by 128 x 128, an expert at a time."""
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    shape = FP8_BLOCK.scales_shape(weight.shape)
    scales = torch.empty(shape, dtype=torch.float8_e8m0fnu, device=weight.device)
    for expert in range(weight.shape[0]):
        rounded = rounded_blocks(weight[expert])
        codes[expert], scales[expert] = rounded.codes, rounded.scales
    return QuantizedTensor(codes, scales, None, FP8_BLOCK)


BASELINES: dict[str, experts.Prepare] = {
    OWN: own,
    SCALED_GROUPED_MM: scaled_grouped_mm,
    ROUNDED_DEEP_GEMM: deep_gemm,
    HUMMING: humming,
}
