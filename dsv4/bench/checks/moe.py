"""Checks of ``dsv4.bench.suites.moe``: each part and the layer against the float64 oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from dsv4 import ops
from dsv4.bench.checks import budgets, fused_judges
from dsv4.bench.checks import judge as check
from dsv4.bench.checks.judge import Judge
from dsv4.bench.problem import Outputs, Problem, Verdict
from dsv4.bench.suites import moe_layer, moe_parts
from dsv4.bench.suites.moe_parts import FP8, Inputs, Layer, Operand
from dsv4.layers import DeepseekV4SparseMoeBlock
from dsv4.quant.formats import FP8_TOKEN, QuantizedTensor

_ROWS_CHECKED, _TOKENS_CHECKED = 8, 64
# Half a unit of an E4M3 number relative to it, and half of the smallest subnormal one.
_E4M3, _E4M3_SMALLEST = 2.0**-4, 2.0**-10


def verify(layer: Layer, inputs: Inputs) -> dict[str, Verdict]:
    """Compare each of ``PARTS`` with the float64 oracle, in rows of a few experts and a few tokens.

    Every other value has to be finite. A GEMM is checked on the actual output of the one before,
    the block as the sum of the pair's actual output.
    """
    inner = moe_parts.gate_up(layer, inputs)
    out = moe_parts.down(layer, inputs, inner)
    verdicts = {
        "gate_up": check.combine(_finite(inner), *_verify_gate_up(layer, inputs, inner)),
        "down": check.combine(_finite(out), *_verify_down(layer, inputs, inner, out)),
    }
    verdicts["pair"] = check.combine(verdicts["gate_up"], verdicts["down"])
    rows, row_weight, offsets, positions = moe_parts.sort(layer, inputs)
    verdicts["sort"] = check.combine(
        _same_rows(rows, inputs),
        check.same(row_weight, inputs.row_weight, "their weights"),
        check.same(offsets, inputs.offsets, "offsets"),
        check.same(positions, inputs.positions, "places"),
    )
    for name in ("combine", "around"):
        sums = getattr(moe_parts, name)(layer, inputs)
        verdicts[name] = _verify_sum(inputs, inputs.rows, sums)
    summed = _verify_sum(inputs, out, moe_parts.block(layer, inputs))
    verdicts["block"] = check.combine(verdicts["pair"], summed)
    return verdicts


def verify_gemm(layer: Layer, inputs: Inputs, part: str, gemm: Problem, backend: str) -> Verdict:
    """Compare one of the two GEMMs, by a named implementation, with the float64 oracle.

    Args:
        layer: Weights.
        inputs: Rows and their routing.
        part: ``"gate_up"`` or ``"down"``.
        gemm: The call; its first argument is the rows.
        backend: Name of an implementation.
    """
    result = _whole(gemm.run(backend), gemm)
    if part == "gate_up":
        return check.combine(_finite(result), *_verify_gate_up(layer, inputs, result))
    assert isinstance(result, torch.Tensor)
    return check.combine(_finite(result), *_verify_down(layer, inputs, gemm.args[0], result))


def _whole(parts: Outputs, gemm: Problem) -> Operand:
    """Return the result of a GEMM: a tensor, or FP8 codes with their scales."""
    if len(parts) == 1:
        return parts[0]
    codes, scales = parts
    return QuantizedTensor(codes, scales, None, FP8_TOKEN, gemm.kwargs["result_layout"])


def verify_layer(layer: Layer, whole: DeepseekV4SparseMoeBlock, x: torch.Tensor) -> Verdict:
    """Like ``verify``: router and shared expert in a few tokens, the block on their real results.

    The layer's output is held to the sum of what the pair and the shared expert gave.
    """
    sample = _chosen(x)
    assert whole.shared_experts is not None
    routed, shared = whole.gate(x), whole.shared_experts(x)
    inputs = moe_parts.sorted_by(layer.config, x, shared, routed[2], routed[1])
    return check.combine(
        moe_layer.verify_router(whole, x, routed, sample),
        moe_layer.verify_shared(whole, x, shared, sample),
        verify(layer, inputs)["block"],
        _verify_sum(inputs, moe_parts.pair(layer, inputs), moe_layer.forward(whole, x)),
    )


def _same_rows(rows: Operand, inputs: Inputs) -> Verdict:
    if isinstance(rows, torch.Tensor):
        return check.same(rows, inputs.rows, "the sorted rows")
    assert inputs.codes is not None
    return check.combine(
        check.same(rows.codes, inputs.codes.codes, "the codes of the sorted rows"),
        check.same(rows.scales, inputs.codes.scales, "the scales of the sorted rows"),
    )


def _finite(values: Operand) -> Verdict:
    if isinstance(values, QuantizedTensor):
        return check.combine(_finite(values.codes.float()), _finite(values.scales.float()))
    bad = values.numel() - int(values.isfinite().sum())
    return Verdict(not bad, None, f"{bad} values are not finite" if bad else "")


def _sampled(offsets: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """The experts with the most and the fewest rows, the first and the last; some rows of each."""
    bounds = offsets.tolist()
    live = [e for e, (a, b) in enumerate(pairwise(bounds)) if a < b]
    by_size = sorted(live, key=lambda e: bounds[e + 1] - bounds[e])
    for expert in sorted({by_size[0], by_size[-1], live[0], live[-1]}):
        start, end = bounds[expert : expert + 2]
        rows = torch.linspace(start, end - 1, min(end - start, _ROWS_CHECKED))
        yield expert, rows.round().long().to(offsets.device)


def _expert(weight: QuantizedTensor, expert: int) -> QuantizedTensor:
    """Return one expert's matrix, still ``[1, N, K]``."""
    part = slice(expert, expert + 1)
    assert weight.global_scale is not None
    scale, exponent = weight.global_scale[part], weight.row_exponent
    return dataclasses.replace(
        weight,
        codes=weight.codes[part],
        scales=weight.scales[part],
        global_scale=scale,
        row_exponent=None if exponent is None else exponent[part],
    )


def _taken(values: Operand, rows: torch.Tensor) -> Operand:
    """Return some rows of a GEMM's operand."""
    if isinstance(values, torch.Tensor):
        return values[rows]
    return dataclasses.replace(values, codes=values.codes[rows], scales=values.scales[rows])


def _judged(problem: Problem, actual: torch.Tensor) -> Verdict:
    return problem.judge(problem, (actual,), problem.widened().run("reference"))


def _all(rows: torch.Tensor) -> torch.Tensor:
    """Offsets of one expert that owns every row."""
    return torch.tensor([0, rows.shape[0]], dtype=torch.int32, device=rows.device)


def _verify_gate_up(layer: Layer, inputs: Inputs, inner: Operand) -> Iterator[Verdict]:
    for expert, rows in _sampled(inputs.offsets):
        weight, row_weight = _expert(layer.gate_up, expert), inputs.row_weight[rows]
        operand = inputs.rows if inputs.codes is None else inputs.codes
        args = (_taken(operand, rows), weight, _all(rows), layer.config.swiglu_limit)
        actual = _taken(inner, rows)
        if isinstance(actual, torch.Tensor):
            kwargs: dict[str, Any] = {"activation": "bf16", "row_weight": row_weight}
            judge = fused_judges.grouped_gemm_swiglu
            yield _judged(Problem(ops.grouped_gemm_swiglu, args, kwargs, judge, 0), actual)
        else:
            kwargs = {"out_dtype": torch.bfloat16, "row_weight": row_weight}
            problem = Problem(ops.grouped_gemm_swiglu, args, kwargs, _rounded(actual), 0)
            values = ops.dequantize(actual, torch.float64, backend="reference")
            yield _judged(dataclasses.replace(problem, backend=FP8), values)


def _rounded(actual: QuantizedTensor) -> Judge:
    """Return the judge of an FP8 result: that of ``grouped_gemm_swiglu``, and the rounding."""
    scales = actual.scales.double().repeat_interleave(128, -1)[:, : actual.columns]

    def judge(problem: Problem, values: Outputs, truth: Outputs) -> Verdict:
        budget = fused_judges.grouped_gemm_swiglu_budget(problem, truth[0])
        budget = budget + check.storing(truth[0], torch.bfloat16)
        budget += _E4M3 * (truth[0].abs() + budget) + _E4M3_SMALLEST * scales
        return check.compare(values[0], truth[0], budget, "the result")

    return judge


def _verify_down(
    layer: Layer, inputs: Inputs, inner: Operand, out: torch.Tensor
) -> Iterator[Verdict]:
    for expert, rows in _sampled(inputs.offsets):
        args = (_taken(inner, rows), _expert(layer.down, expert), _all(rows))
        judge = check.within(budgets.gemm)
        problem = Problem(ops.grouped_gemm, args, {}, judge, 0)
        if isinstance(inner, QuantizedTensor):
            kwargs = {"out_dtype": torch.bfloat16}
            problem = dataclasses.replace(problem, kwargs=kwargs, backend=FP8)
        yield _judged(problem, out[rows])


def _verify_sum(inputs: Inputs, out: torch.Tensor, sums: torch.Tensor) -> Verdict:
    chosen = _chosen(sums)
    positions = inputs.positions[chosen]
    y = out[positions.flatten().long()]
    rows = torch.arange(y.shape[0], dtype=torch.int32, device=y.device).view(positions.shape)
    ones = torch.ones(positions.shape, device=y.device)
    kwargs = {"shared": inputs.shared[chosen]}
    judge = check.within(budgets.combination)
    summed = Problem(ops.moe_combine, (y, rows, _all(y), ones), kwargs, judge, 0)
    return check.combine(_finite(sums), _judged(summed, sums[chosen]))


def _chosen(x: torch.Tensor) -> torch.Tensor:
    """The tokens of ``[T, ...]`` that are checked."""
    tokens = torch.linspace(0, x.shape[0] - 1, min(x.shape[0], _TOKENS_CHECKED))
    return tokens.round().long().to(x.device)
