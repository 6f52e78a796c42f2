"""Routed experts of a layer: both GEMMs as a pair, the block around them, and the whole layer.

The block goes from the router's choice to the output; "around" is the block without its GEMMs:
the sort and the sum, here of the sorted rows themselves. The layer
has its router and its shared expert, too, so its routing is the router's.

Weights are packed for Hopper where they are whole tiles, activations bfloat16 or FP8, numerics
DeepSeek's (the routing weight multiplies before the down projection). With FP8 activations the rows
of the GEMMs are codes already, the weights are exact in FP8, and there is no row of the layer.

A CUDA graph holds several calls, each with tokens and a routing of its own, and the L2 is cleared
before a replay: a call finds weights in the cache only as far as its experts are those of the call
before. Where a rest is asked for, everything is timed sustained and cooled down
(``dsv4.bench.timing``), in separate rows.

Layers, routings and parts are in ``moe_parts``, their checks in ``moe_checks``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from dsv4 import dispatch, ops
from dsv4.bench import timing
from dsv4.bench.baselines import check_names, experts_fp8, is_among
from dsv4.bench.baselines import experts as moe_baselines
from dsv4.bench.cases.own import Shape
from dsv4.bench.checks import moe as moe_checks
from dsv4.bench.environment import Rates
from dsv4.bench.measure import COOLED, SUSTAINED, Options
from dsv4.bench.problem import Draw, UsageError, Verdict
from dsv4.bench.report import baseline_table, number
from dsv4.bench.results import Row
from dsv4.bench.suites import moe_layer, moe_parts
from dsv4.bench.suites.moe_parts import (
    ACTIVATIONS,
    BF16,
    FP8,
    PARTS,
    ROUTINGS,
    Inputs,
    Layer,
    Operand,
    all_inputs,
    config_of,
    draw_layer,
)
from dsv4.bench.tables import plain, wrapped
from dsv4.layers import DeepseekV4SparseMoeBlock
from dsv4.ops.fp8_token import code_layout

ROUTER = "router"  # the layer's routing
WITHOUT_LAYER = "the whole layer is measured with bf16 activations alone"
_OPS = {BF16: "moe", FP8: "moe_fp8"}  # operators of rows, which name files
_CASES = {BF16: "", FP8: " w4a8 (mxfp4 cast)"}  # what follows the part in a row's case
_RATES = {BF16: 1, FP8: 2}  # rate of tensor cores over that of bfloat16


def measure(
    layer: Layer, routing: str, tokens: int, options: Options, rates: Rates
) -> dict[str, Row]:
    """A row for each of ``PARTS``, checked first; one that is wrong has no time."""
    inputs = all_inputs(layer, routing, tokens, options)
    touched = sum(drawn.touched for drawn in inputs) / len(inputs)
    moved = moe_parts.costs(layer, tokens, touched)
    verdicts = moe_checks.verify(layer, inputs[0])
    inners = [moe_parts.gate_up(layer, drawn) for drawn in inputs]
    calls: dict[str, list[Callable[[], Any]]] = {
        part: [partial(getattr(moe_parts, part), layer, drawn) for drawn in inputs]
        for part in PARTS
        if part != "down"
    }
    both = zip(inputs, inners, strict=True)
    calls["down"] = [partial(moe_parts.down, layer, *pair) for pair in both]
    rows = {}
    for part in PARTS:
        row = _row(layer, routing, tokens, part, round(touched), moved[part], rates)
        row = dataclasses.replace(row, **_explained(layer, inputs[0], inners[0], part))
        rows[part] = _timed(row, verdicts[part], calls[part], options, rates)
    return rows


def measure_layer(
    layer: Layer, whole: DeepseekV4SparseMoeBlock, tokens: int, options: Options, rates: Rates
) -> Row:
    """The row of the whole layer, likewise."""
    draws = moe_parts.draws(layer.config, tokens, options)
    inputs = [draw.normal(tokens, layer.config.hidden_size) for draw in draws]
    touched = sum(len(whole.gate(x)[2].unique()) for x in inputs) / len(inputs)
    moved = moe_layer.costs(whole, tokens, touched)
    row = _row(layer, ROUTER, tokens, "layer", round(touched), moved, rates)
    calls = [partial(moe_layer.forward, whole, x) for x in inputs]
    return _timed(row, moe_checks.verify_layer(layer, whole, inputs[0]), calls, options, rates)


def _timed(
    row: Row,
    verdict: Verdict,
    calls: Sequence[Callable[[], Any]],
    options: Options,
    rates: Rates,
) -> Row:
    row = dataclasses.replace(row, case=options.named(row.case), **_checked(verdict))
    if not row.match:
        return row
    timed = timing.measure(calls, options.device, options.repeat, options.rest)
    share = rates.copy_share(row.bytes, timed.us)
    row = dataclasses.replace(row, us=timed.us, timer=timed.timer, copy_share=share)
    return dataclasses.replace(row, message=timed.note)


def _row(
    layer: Layer,
    routing: str,
    tokens: int,
    part: str,
    touched: int,
    moved: tuple[int, int],
    rates: Rates,
) -> Row:
    c = layer.config
    sizes = {"E": c.n_routed_experts, "H": c.hidden_size, "I": c.moe_intermediate_size}
    flops = moved[1] // _RATES[layer.activation]  # in operations of bfloat16
    return Row(
        op=_OPS[layer.activation],
        case=f"{layer.preset} {routing} {part}{_CASES[layer.activation]}",
        shape={**sizes, "k": c.num_experts_per_tok, "touched": touched},
        tokens=tokens,
        backend="auto",
        reason="each operator's own choice",
        us=None,
        bound_us=rates.bound_us(moved[0], flops),
        bytes=moved[0],
        flops=moved[1],
    )


def _explained(layer: Layer, inputs: Inputs, inner: Operand, part: str) -> dict[str, Any]:
    """Return an operator's implementation and why it runs; nothing for a part of several."""
    c, offsets = layer.config, inputs.offsets
    fused = ops.grouped_gemm_swiglu if inputs.codes is None else ops.grouped_gemm_swiglu_fp8
    rows = inputs.rows if inputs.codes is None else inputs.codes
    first: tuple[Any, ...] = (rows, layer.gate_up, offsets, c.swiglu_limit)
    named: dict[str, Any] = {"row_weight": inputs.row_weight}
    if inputs.codes is not None:
        named["result_layout"] = code_layout(layer.down)
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
        "gate_up": (fused, first, named),
        "down": (ops.grouped_gemm, (inner, layer.down, offsets), {}),
        "sort": (ops.moe_sort, (inputs.x, inputs.ids, inputs.weights, c.n_routed_experts), {}),
        "combine": (
            ops.moe_combine,
            (inputs.rows, inputs.positions, offsets, None),
            {"shared": inputs.shared},
        ),
    }
    if part not in calls or (part == "sort" and inputs.codes is not None):
        return {}
    function, args, named = calls[part]
    explanation = dispatch.explain(function, *args, **named)
    return {"backend": explanation.chosen or "none", "reason": explanation.reason}


def _checked(verdict: Verdict) -> dict[str, Any]:
    error = "bitwise" if verdict.match and verdict.error is None else verdict.error
    fields = {"match": verdict.match, "error": error, "message": verdict.message}
    return {**fields, "ratio": verdict.ratio}


Calls = dict[str, list[Callable[[], Any]]]
# Preset, routing (ROUTER for the layer), tokens, seconds of rest before each timed run.
Point = tuple[str, str, int, float]
Measured = dict[Point, dict[str, Row]]


def rows_of(measured: Measured) -> list[Row]:
    """Return the rows of all points."""
    return [row for parts in measured.values() for row in parts.values()]


def check(
    presets: Sequence[str | Shape],
    routings: Sequence[str],
    options: Options,
    activation: str = BF16,
) -> None:
    """Check every name of a request, which costs nothing.

    Raises:
        UsageError: if one is unknown.
    """
    if activation not in ACTIVATIONS:
        raise UsageError(f"--activation is {activation!r}, wanted one of {', '.join(ACTIVATIONS)}")
    _baselines(options, activation)
    unknown = [name for name in routings if name not in ROUTINGS]
    if unknown:
        raise UsageError(f"--routings has {unknown[0]!r}, wanted some of {', '.join(ROUTINGS)}")
    for preset in presets:
        config_of(preset)


def run(
    presets: Sequence[str | Shape],
    routings: Sequence[str],
    tokens: Sequence[int],
    options: Options,
    rates: Rates,
    measured: Measured,
    activation: str = BF16,
) -> Iterator[None]:
    """Measure everything into ``measured``, a point at a time, then the baselines.

    Baselines come last, because one that writes out of bounds ends the process's use of a GPU, and
    one that compiles in threads of its own can hold up an interrupt.

    Yields:
        When the points of a layer, or a baseline, are done.

    Raises:
        UsageError: if a name is unknown.
    """
    check(presets, routings, options, activation)
    for preset in presets:
        layer = draw_layer(preset, Draw(options.seed, options.device), activation)
        for routing in routings:
            for count, timed in itertools.product(tokens, options.conditions()):
                rows = measure(layer, routing, count, timed, rates)
                _keep(measured, (layer.preset, routing, count, timed.rest), rows)
        if activation == BF16:
            _measure_layers(layer, tokens, options, rates, measured)
        else:
            print(WITHOUT_LAYER, flush=True)
        del layer
        yield
    for preset in presets:
        layer = draw_layer(preset, Draw(options.seed, options.device), activation)
        for name, prepare in _baselines(options, activation).items():
            _run_baseline(layer, name, prepare, options, measured)
            yield
        del layer


def _measure_layers(
    layer: Layer, tokens: Sequence[int], options: Options, rates: Rates, measured: Measured
) -> None:
    """Measure the whole layer by tokens."""
    draw = Draw(options.seed, options.device)
    whole = moe_layer.build(layer.config, layer.gate_up, layer.down, draw)
    for count, timed in itertools.product(tokens, options.conditions()):
        rows = {"layer": measure_layer(layer, whole, count, timed, rates)}
        _keep(measured, (layer.preset, ROUTER, count, timed.rest), rows)


def _baselines(options: Options, activation: str) -> dict[str, moe_baselines.Prepare]:
    """Return the requested baselines, or all."""
    known, asked = moe_baselines.BASELINES, options.baselines
    if activation == FP8:
        known = {**experts_fp8.BASELINES, **known}
    if asked is None:
        return known
    check_names(asked, known)
    return {name: prepare for name, prepare in known.items() if is_among(name, asked)}


def _keep(measured: Measured, point: Point, rows: dict[str, Row]) -> None:
    measured[point] = rows
    print("  ".join(cells(point, rows)), flush=True)


def _run_baseline(
    layer: Layer, name: str, prepare: moe_baselines.Prepare, options: Options, measured: Measured
) -> None:
    """Time one baseline at every point of a preset; why it could not is said in the pair's row."""
    points = [point for point in measured if point[0] == layer.preset and point[1] != ROUTER]
    print(f"{layer.preset}: {name}", flush=True)
    made = moe_baselines.attempt(lambda: prepare(layer.gate_up, layer.down))
    for point in points:
        rows = measured[point]
        if not all(row.match for row in rows.values()):
            continue
        if isinstance(made, str):
            taken: dict[str, float] | str = made
        else:
            timed = dataclasses.replace(options, rest=point[3])
            taken = moe_baselines.attempt(partial(_baseline_times, layer, made, point, timed))
        if isinstance(taken, str):
            said = "; ".join(filter(None, (rows["pair"].message, f"{name}: {taken}")))
            rows["pair"] = dataclasses.replace(rows["pair"], message=said)
            continue
        for part, us in taken.items():
            baselines = {**rows[part].baselines, name: us}
            rows[part] = dataclasses.replace(rows[part], baselines=baselines)
    del made
    moe_baselines.release(options.device)


def _baseline_times(
    layer: Layer, made: moe_baselines.Baseline, point: Point, options: Options
) -> dict[str, float]:
    """Microseconds of each GEMM and of both, with this package's SwiGLU kernel; or of all."""
    inputs = all_inputs(layer, point[1], point[2], options)
    if isinstance(made, moe_baselines.Whole):
        return _whole_times(layer, made, inputs, options)
    if isinstance(made, moe_baselines.Own):
        return _own_times(layer.in_bfloat16(), inputs, options)
    if isinstance(made, moe_baselines.Operands):
        return _operand_times(made, inputs, options)
    limit = layer.config.swiglu_limit
    moe_baselines.compare(made, inputs[0].rows, inputs[0].offsets, (layer.gate_up, layer.down))
    ends = [made.offsets(drawn.offsets) for drawn in inputs]
    both = list(zip(inputs, ends, strict=True))

    def first(drawn: Inputs, end: Any) -> torch.Tensor:
        gate_up = made.gate_up(drawn.rows, end)
        return ops.swiglu(gate_up, limit, layout="interleaved", row_weight=drawn.row_weight)

    def pair_of(drawn: Inputs, end: Any) -> torch.Tensor:
        return made.down(first(drawn, end), end)

    inners = [first(*pair) for pair in both]
    calls: Calls = {
        "gate_up": [partial(first, *pair) for pair in both],
        "down": [partial(made.down, i, end) for i, end in zip(inners, ends, strict=True)],
        "pair": [partial(pair_of, *pair) for pair in both],
    }
    return _times(calls, options)


def _times(calls: Calls, options: Options) -> dict[str, float]:
    how = (options.device, options.repeat, options.rest)
    return {part: timing.measure(part_calls, *how).us for part, part_calls in calls.items()}


def _own_times(layer: Layer, inputs: list[Inputs], options: Options) -> dict[str, float]:
    """Time this package's bfloat16 kernels with the same weights and routing."""
    plain = [dataclasses.replace(drawn, codes=None) for drawn in inputs]
    calls: Calls = {
        part: [partial(getattr(moe_parts, part), layer, drawn) for drawn in plain]
        for part in ("gate_up", "pair", "block")
    }
    inners = [moe_parts.gate_up(layer, drawn) for drawn in plain]
    both = zip(plain, inners, strict=True)
    calls["down"] = [partial(moe_parts.down, layer, *pair) for pair in both]
    return _times(calls, options)


def _operand_times(
    made: moe_baselines.Operands, inputs: list[Inputs], options: Options
) -> dict[str, float]:
    """Time GEMMs alone, on operands that are ready: no SwiGLU, no rounding."""
    pairs = [made.calls(drawn.rows, drawn.offsets) for drawn in inputs]
    calls: Calls = {
        "gate_up": [first for first, _ in pairs],
        "down": [second for _, second in pairs],
        "pair": [partial(_both, *pair) for pair in pairs],
    }
    return _times(calls, options)


def _both(first: Callable[[], Any], second: Callable[[], Any]) -> None:
    first()
    second()


def _whole_times(
    layer: Layer, made: moe_baselines.Whole, inputs: list[Inputs], options: Options
) -> dict[str, float]:
    """Time the block at the same routing."""
    limit = layer.config.swiglu_limit
    routed = [(drawn.x, drawn.ids, drawn.weights) for drawn in inputs]
    moe_baselines.compare_whole(made, routed[0], limit, (layer.gate_up, layer.down))
    calls = [partial(made.forward, *drawn, limit) for drawn in routed]
    taken = timing.measure(calls, options.device, options.repeat, options.rest)
    return {"block": taken.us}


HEADINGS = (
    "shapes",
    "routing",
    "tokens",
    "timed",
    "experts",
    "bound us",
    "gate_up us",
    "down us",
    "pair us",
    "pair / bound",
    "around us",
    "block us",
    "around / block",
    "layer us",
    "layer / bound",
    "check",
)


def cells(point: Point, rows: dict[str, Row]) -> tuple[str, ...]:
    """The texts of a point, in the order of ``HEADINGS``; the bound is that of pair or layer."""
    whose = rows["layer" if point[1] == ROUTER else "pair"]
    us = {part: rows[part].us if part in rows else None for part in (*PARTS, "layer")}
    times = {part: "-" if value is None else number(value) for part, value in us.items()}
    return (
        point[0],
        point[1],
        str(point[2]),
        COOLED if point[3] else SUSTAINED,
        str(whose.shape["touched"]),
        number(whose.bound_us),
        times["gate_up"],
        times["down"],
        times["pair"],
        _over(us["pair"], whose.bound_us),
        times["around"],
        times["block"],
        _over(us["around"], us["block"], digits=3),
        times["layer"],
        _over(us["layer"], whose.bound_us),
        "ok" if all(row.match for row in rows.values()) else "WRONG",
    )


def _over(us: float | None, other: float | None, digits: int = 2) -> str:
    return "-" if us is None or other is None else f"{us / other:.{digits}f}"


def lines(measured: Measured) -> list[str]:
    """A line a point, then baselines and why some have no time."""
    table = plain(HEADINGS, [cells(*item) for item in measured.items()], keys=4)
    rows = [row for parts in measured.values() for row in parts.values()]
    notes = dict.fromkeys(row.message for row in rows if row.message and row.match is not False)
    return [*table, *baseline_table(rows), *(line for note in notes for line in wrapped(note))]
