"""Routed experts of a layer: both products as a pair, the block around them, and the whole layer.

The block goes from the router's choice to the output; "around" is the block without its products:
the sort, the rows' weights, the gather and the sum, here of the gathered rows themselves. The layer
has its router and its shared expert, too, so its routing is the router's.

Weights are packed for Hopper where they are whole tiles, activations bfloat16, numerics DeepSeek's
(the routing weight multiplies before the down projection). A CUDA graph holds several calls, each
with tokens and a routing of its own, and the level-2 cache is cleared before a replay: a call finds
weights in the cache only as far as its experts are those of the call before.

Routings, each token choosing ``k`` distinct experts:

* ``uniform``: every set of k with the same probability.
* ``zipf``: experts in random order, the i-th with weight 1 / i; a token draws k times without
  putting back, each time in proportion to the weights of what is left.
* ``single``: every token's first choice is the same random expert, the other k - 1 are uniform
  among the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from dsv4 import dispatch, fragments, ops
from dsv4.bench import budgets, check, fused_judges, moe_layer, moe_rivals, timing
from dsv4.bench.cases import PRESETS
from dsv4.bench.environment import Rates
from dsv4.bench.measure import Options
from dsv4.bench.problem import Draw, Problem, UsageError, Verdict
from dsv4.bench.report import number, plain
from dsv4.bench.results import Row
from dsv4.config import ModelConfig
from dsv4.formats import FRAGMENTS, NVFP4, QuantizedTensor
from dsv4.layers import DeepseekV4SparseMoeBlock

PARTS = ("gate_up", "down", "pair", "permute", "gather", "combine", "around", "block")
ROUTER = "router"  # the layer's routing
_MOST_CALLS, _INPUT_BYTES = 8, 4 << 30  # of a graph
_ROWS_CHECKED, _TOKENS_CHECKED = 8, 64
# Bytes of E4M3's 2^-4 to 2^1, whose exponents fragments store with 3 added.
_SCALE_BYTES = (0x18 + (3 << 3), 0x40 + (3 << 3))


@dataclass(frozen=True)
class Layer:
    """The routed experts of a layer.

    Attributes:
        preset: Name of ``config``.
        config: Sizes.
        gate_up: ``[E, 2 I, H]`` in fragments, rows of gate and up in turn, a global scale per row.
        down: ``[E, H, I]`` in fragments, a global scale per expert.
    """

    preset: str
    config: ModelConfig
    gate_up: QuantizedTensor
    down: QuantizedTensor


@dataclass(frozen=True)
class Inputs:
    """Tokens and their routing.

    Attributes:
        x: ``[T, H]``.
        shared: ``[T, H]``, the shared expert's output.
        ids: ``[T, k]`` int64.
        weights: float32 ``[T, k]``.
        places: int32 ``[T, k]``, the sorted row of each choice.
        offsets: int32 ``[E + 1]``.
        rows: ``[T k, H]``, sorted by expert.
        row_weight: float32 ``[T k]``.
    """

    x: torch.Tensor
    shared: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    places: torch.Tensor
    offsets: torch.Tensor
    rows: torch.Tensor
    row_weight: torch.Tensor

    @property
    def touched(self) -> int:
        """Experts that have a row."""
        return int((self.offsets.diff() > 0).sum())


def uniform(draw: Draw, tokens: int, k: int, experts: int) -> torch.Tensor:
    """``[tokens, k]`` int64; see the module."""
    return draw.distinct(tokens, k, experts)


def zipf(draw: Draw, tokens: int, k: int, experts: int) -> torch.Tensor:
    """``[tokens, k]`` int64; see the module. The k largest of log weights with Gumbel noise."""
    rank = draw.permutation(experts) + 1
    noise = torch.rand((tokens, experts), generator=draw.generator, device=draw.device)
    return (-rank.log() - (-noise.log()).log()).topk(k).indices


def single(draw: Draw, tokens: int, k: int, experts: int) -> torch.Tensor:
    """``[tokens, k]`` int64; see the module."""
    first = draw.integers(0, experts, (1, 1)).expand(tokens, 1)
    others = draw.distinct(tokens, k - 1, experts - 1)
    return torch.cat((first, others + (others >= first)), 1)


Sorted = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
ROUTINGS: dict[str, Callable[[Draw, int, int, int], torch.Tensor]] = {
    "uniform": uniform,
    "zipf": zipf,
    "single": single,
}


def config_of(preset: str) -> ModelConfig:
    """Sizes by name; the tiny ones widened to what kernels for packed weights take.

    Raises:
        UsageError: if the name is unknown.
    """
    if preset not in PRESETS:
        raise UsageError(f"shapes are {preset!r}, wanted one of {', '.join(PRESETS)}")
    config = PRESETS[preset]()
    if preset == "tiny":
        return config.replace(hidden_size=128, moe_intermediate_size=128)
    return config


def draw_layer(preset: str, draw: Draw) -> Layer:
    """Random weights; codes are drawn as they are stored, so they alone take memory."""
    c = config_of(preset)
    experts, inner, hidden = c.n_routed_experts, c.moe_intermediate_size, c.hidden_size
    gate_up = _packed(draw, (experts, 2 * inner, hidden), 2 * inner)
    return Layer(preset, c, gate_up, _packed(draw, (experts, hidden, inner), 1))


def _packed(draw: Draw, shape: tuple[int, int, int], global_scales: int) -> QuantizedTensor:
    experts, rows, columns = shape
    assert fragments.fits(rows, columns)
    codes = draw.integers(0, 256, (experts, rows, columns // 2), torch.uint8)
    scales = draw.integers(*_SCALE_BYTES, (experts, rows, columns // 16), torch.uint8)
    spread = torch.rand((experts, global_scales), generator=draw.generator, device=draw.device)
    global_scale = (0.5 + spread) * columns**-0.5
    return QuantizedTensor(codes, scales, global_scale, NVFP4, FRAGMENTS)


def draw_inputs(c: ModelConfig, routing: str, tokens: int, draw: Draw) -> Inputs:
    """Tokens with one of ``ROUTINGS``."""
    k, experts = c.num_experts_per_tok, c.n_routed_experts
    ids = ROUTINGS[routing](draw, tokens, k, experts)
    weights = draw.normal(tokens, k, dtype=torch.float32).softmax(-1) * c.routed_scaling_factor
    x, shared = (draw.normal(tokens, c.hidden_size) for _ in range(2))
    return _sorted(c, x, shared, ids, weights)


def _sorted(
    c: ModelConfig,
    x: torch.Tensor,
    shared: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> Inputs:
    order, offsets, places = ops.moe_permute(ids, c.n_routed_experts, backend="reference")
    rows = ops.moe_gather(x, places, backend="reference")
    row_weight = weights.reshape(-1)[order.long()]
    return Inputs(x, shared, ids, weights, places, offsets, rows, row_weight)


def all_inputs(layer: Layer, routing: str, tokens: int, options: Options) -> list[Inputs]:
    """Those of a graph's calls."""
    draws = _draws(layer.config, tokens, options)
    return [draw_inputs(layer.config, routing, tokens, draw) for draw in draws]


def _draws(c: ModelConfig, tokens: int, options: Options) -> list[Draw]:
    """One for each of a graph's calls, so many as memory allows; on the CPU one."""
    width = c.num_experts_per_tok * (c.hidden_size + c.moe_intermediate_size) + 2 * c.hidden_size
    count = max(2, min(_MOST_CALLS, _INPUT_BYTES // (2 * width * tokens)))
    count = count if options.device.type == "cuda" else 1
    return [Draw(options.seed + 1 + i, options.device) for i in range(count)]


def gate_up(layer: Layer, inputs: Inputs) -> torch.Tensor:
    """The first product and its SwiGLU, ``[T k, I]``."""
    return ops.grouped_gemm_swiglu(
        inputs.rows,
        layer.gate_up,
        inputs.offsets,
        layer.config.swiglu_limit,
        row_weight=inputs.row_weight,
    )


def down(layer: Layer, inputs: Inputs, inner: torch.Tensor) -> torch.Tensor:
    """The second product, ``[T k, H]``."""
    return ops.grouped_gemm(inner, layer.down, inputs.offsets, settled=True)


def pair(layer: Layer, inputs: Inputs) -> torch.Tensor:
    """Both products, ``[T k, H]``."""
    return down(layer, inputs, gate_up(layer, inputs))


def permute(layer: Layer, inputs: Inputs) -> Sorted:
    """The sort by expert: order, offsets, places."""
    return ops.moe_permute(inputs.ids, layer.config.n_routed_experts)


def gather(layer: Layer, inputs: Inputs) -> torch.Tensor:
    """Tokens to rows in sorted order, ``[T k, H]``."""
    return ops.moe_gather(inputs.x, inputs.places)


def combine(layer: Layer, inputs: Inputs) -> torch.Tensor:
    """The sum of each token's rows and the shared expert's output, ``[T, H]``."""
    return ops.moe_combine(inputs.rows, inputs.places, inputs.offsets, None, shared=inputs.shared)


def around(layer: Layer, inputs: Inputs) -> torch.Tensor:
    """The block with the gathered rows as the products' results, ``[T, H]``."""
    return combine(layer, _own(layer, inputs))


def block(layer: Layer, inputs: Inputs) -> torch.Tensor:
    """From the router's choice to the output, ``[T, H]``: what the layer runs."""
    own = _own(layer, inputs)
    return combine(layer, dataclasses.replace(own, rows=pair(layer, own)))


def _own(layer: Layer, inputs: Inputs) -> Inputs:
    """The same sorted and gathered here."""
    order, offsets, places = permute(layer, inputs)
    own = dataclasses.replace(inputs, offsets=offsets, places=places)
    row_weight = inputs.weights.reshape(-1)[order.long()]
    return dataclasses.replace(own, rows=gather(layer, own), row_weight=row_weight)


def verify(layer: Layer, inputs: Inputs) -> dict[str, Verdict]:
    """Each of ``PARTS`` against the float64 oracle, in rows of a few experts and a few tokens.

    Every other value has to be finite. A product is checked on what the one before really gave, and
    the block as the sum of what the pair gave.
    """
    inner = gate_up(layer, inputs)
    out = down(layer, inputs, inner)
    found = {
        "gate_up": check.combine(_finite(inner), *_verify_gate_up(layer, inputs, inner)),
        "down": check.combine(_finite(out), *_verify_down(layer, inputs, inner, out)),
    }
    found["pair"] = check.combine(found["gate_up"], found["down"])
    order, offsets, places = permute(layer, inputs)
    found["permute"] = check.combine(
        check.same(order, inputs.places.flatten().argsort(), "order"),
        check.same(offsets, inputs.offsets, "offsets"),
        check.same(places, inputs.places, "places"),
    )
    found["gather"] = check.same(gather(layer, inputs), inputs.rows, "the gathered rows")
    for name, sums in (("combine", combine), ("around", around)):
        found[name] = _verify_sum(inputs, inputs.rows, sums(layer, inputs))
    summed = _verify_sum(inputs, out, block(layer, inputs))
    found["block"] = check.combine(found["pair"], summed)
    return found


def verify_layer(layer: Layer, whole: DeepseekV4SparseMoeBlock, x: torch.Tensor) -> Verdict:
    """As ``verify``: router and shared expert in a few tokens, the block on what they really gave.

    The layer's output is held to the sum of what the pair and the shared expert gave.
    """
    some = _chosen(x)
    routed, shared = whole.gate(x), whole.shared_experts(x)
    inputs = _sorted(layer.config, x, shared, routed[2], routed[1])
    return check.combine(
        moe_layer.verify_router(whole, x, routed, some),
        moe_layer.verify_shared(whole, x, shared, some),
        verify(layer, inputs)["block"],
        _verify_sum(inputs, pair(layer, inputs), _whole(whole, x)),
    )


def _finite(values: torch.Tensor) -> Verdict:
    bad = values.numel() - int(values.isfinite().sum())
    return Verdict(not bad, None, f"{bad} values are not finite" if bad else "")


def _sampled(offsets: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """The experts with the most and the fewest rows, the first and the last; some rows of each."""
    bounds = offsets.tolist()
    live = [e for e, (a, b) in enumerate(pairwise(bounds)) if a < b]
    by_size = sorted(live, key=lambda e: bounds[e + 1] - bounds[e])
    for expert in sorted({by_size[0], by_size[-1], live[0], live[-1]}):
        start, end = bounds[expert : expert + 2]
        places = torch.linspace(start, end - 1, min(end - start, _ROWS_CHECKED))
        yield expert, places.round().long().to(offsets.device)


def _expert(weight: QuantizedTensor, expert: int) -> QuantizedTensor:
    """One expert, still ``[1, N, K]``."""
    part = slice(expert, expert + 1)
    assert weight.global_scale is not None
    scale = weight.global_scale[part]
    return dataclasses.replace(
        weight, codes=weight.codes[part], scales=weight.scales[part], global_scale=scale
    )


def _judged(problem: Problem, found: torch.Tensor) -> Verdict:
    return problem.judge(problem, (found,), problem.widened().run("reference"))


def _all(rows: torch.Tensor) -> torch.Tensor:
    """Offsets of one expert that owns every row."""
    return torch.tensor([0, rows.shape[0]], dtype=torch.int32, device=rows.device)


def _verify_gate_up(layer: Layer, inputs: Inputs, inner: torch.Tensor) -> Iterator[Verdict]:
    for expert, rows in _sampled(inputs.offsets):
        weight = _expert(layer.gate_up, expert)
        args = (inputs.rows[rows], weight, _all(rows), layer.config.swiglu_limit)
        kwargs = {"activation": "bf16", "row_weight": inputs.row_weight[rows]}
        judge = fused_judges.grouped_gemm_swiglu
        yield _judged(Problem(ops.grouped_gemm_swiglu, args, kwargs, judge, 0), inner[rows])


def _verify_down(
    layer: Layer, inputs: Inputs, inner: torch.Tensor, out: torch.Tensor
) -> Iterator[Verdict]:
    for expert, rows in _sampled(inputs.offsets):
        args = (inner[rows], _expert(layer.down, expert), _all(rows))
        judge = check.within(budgets.product)
        yield _judged(Problem(ops.grouped_gemm, args, {}, judge, 0), out[rows])


def _verify_sum(inputs: Inputs, out: torch.Tensor, found: torch.Tensor) -> Verdict:
    chosen = _chosen(found)
    places = inputs.places[chosen]
    y = out[places.flatten().long()]
    rows = torch.arange(y.shape[0], dtype=torch.int32, device=y.device).view(places.shape)
    ones = torch.ones(places.shape, device=y.device)
    kwargs = {"shared": inputs.shared[chosen]}
    judge = check.within(budgets.combination)
    summed = Problem(ops.moe_combine, (y, rows, _all(y), ones), kwargs, judge, 0)
    return check.combine(_finite(found), _judged(summed, found[chosen]))


def _chosen(x: torch.Tensor) -> torch.Tensor:
    """The tokens of ``[T, ...]`` that are checked."""
    tokens = torch.linspace(0, x.shape[0] - 1, min(x.shape[0], _TOKENS_CHECKED))
    return tokens.round().long().to(x.device)


def costs(layer: Layer, tokens: int, touched: float) -> dict[str, tuple[int, int]]:
    """Bytes that each of ``PARTS`` has to move, and operations of its products.

    Weights of the experts that have rows, once; inputs and results of each operator. Of the block:
    weights, tokens and the result, nothing between them.
    """
    c = layer.config
    rows, inner, hidden = tokens * c.num_experts_per_tok, c.moe_intermediate_size, c.hidden_size
    experts = c.n_routed_experts
    weights = [round(touched * w.nbytes / experts) for w in (layer.gate_up, layer.down)]
    flops = [4 * rows * inner * hidden, 2 * rows * inner * hidden]
    moved = [weight + 2 * rows * (inner + hidden) for weight in weights]
    steps = {
        "permute": 16 * rows + 4 * (experts + 1),
        "gather": 2 * (tokens + rows) * hidden + 4 * rows,
        "combine": 2 * (rows + 2 * tokens) * hidden + 4 * rows + 4 * (experts + 1),
    }
    return {
        "gate_up": (moved[0], flops[0]),
        "down": (moved[1], flops[1]),
        "pair": (sum(moved), sum(flops)),
        **{part: (some, 0) for part, some in steps.items()},
        "around": (sum(steps.values()) + 12 * rows, 0),  # and the rows' weights
        "block": (sum(weights) + 6 * tokens * hidden + 12 * rows, sum(flops)),
    }


def measure(
    layer: Layer, routing: str, tokens: int, options: Options, rates: Rates
) -> dict[str, Row]:
    """A row for each of ``PARTS``, checked first; one that is wrong has no time."""
    inputs = all_inputs(layer, routing, tokens, options)
    touched = sum(one.touched for one in inputs) / len(inputs)
    moved = costs(layer, tokens, touched)
    verdicts = verify(layer, inputs[0])
    inners = [gate_up(layer, one) for one in inputs]
    calls: dict[str, list[Callable[[], Any]]] = {
        "gate_up": [partial(gate_up, layer, one) for one in inputs],
        "down": [partial(down, layer, *both) for both in zip(inputs, inners, strict=True)],
        "pair": [partial(pair, layer, one) for one in inputs],
        "permute": [partial(permute, layer, one) for one in inputs],
        "gather": [partial(gather, layer, one) for one in inputs],
        "combine": [partial(combine, layer, one) for one in inputs],
        "around": [partial(around, layer, one) for one in inputs],
        "block": [partial(block, layer, one) for one in inputs],
    }
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
    draws = _draws(layer.config, tokens, options)
    inputs = [draw.normal(tokens, layer.config.hidden_size) for draw in draws]
    touched = sum(len(whole.gate(x)[2].unique()) for x in inputs) / len(inputs)
    moved = moe_layer.costs(whole, tokens, touched)
    row = _row(layer, ROUTER, tokens, "layer", round(touched), moved, rates)
    calls = [partial(_whole, whole, x) for x in inputs]
    return _timed(row, verify_layer(layer, whole, inputs[0]), calls, options, rates)


def _whole(whole: DeepseekV4SparseMoeBlock, x: torch.Tensor) -> torch.Tensor:
    return whole(x.unsqueeze(0)).squeeze(0)


def _timed(
    row: Row,
    verdict: Verdict,
    calls: Sequence[Callable[[], Any]],
    options: Options,
    rates: Rates,
) -> Row:
    row = dataclasses.replace(row, **_checked(verdict))
    if not row.match:
        return row
    timed = timing.measure(calls, options.device, options.repeat)
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
    return Row(
        op="moe",
        case=f"{layer.preset} {routing} {part}",
        shape={**sizes, "k": c.num_experts_per_tok, "touched": touched},
        tokens=tokens,
        backend="auto",
        reason="each operator's own choice",
        us=None,
        floor_us=rates.floor_us(*moved),
        bytes=moved[0],
        flops=moved[1],
    )


def _explained(layer: Layer, inputs: Inputs, inner: torch.Tensor, part: str) -> dict[str, Any]:
    """Which implementation an operator has, and why; nothing for what has several."""
    c, offsets = layer.config, inputs.offsets
    first: tuple[Any, ...] = (inputs.rows, layer.gate_up, offsets, c.swiglu_limit)
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
        "gate_up": (ops.grouped_gemm_swiglu, first, {"row_weight": inputs.row_weight}),
        "down": (ops.grouped_gemm, (inner, layer.down, offsets), {}),
        "permute": (ops.moe_permute, (inputs.ids, c.n_routed_experts), {}),
        "gather": (ops.moe_gather, (inputs.x, inputs.places), {}),
        "combine": (
            ops.moe_combine,
            (inputs.rows, inputs.places, offsets, None),
            {"shared": inputs.shared},
        ),
    }
    if part not in calls:
        return {}
    function, args, named = calls[part]
    found = dispatch.explain(function, *args, **named)
    return {"backend": found.chosen or "none", "reason": found.reason}


def _checked(verdict: Verdict) -> dict[str, Any]:
    error = "bitwise" if verdict.match and verdict.error is None else verdict.error
    return {"match": verdict.match, "error": error, "message": verdict.message}


Point = tuple[str, str, int]  # preset, routing (ROUTER for the layer), tokens
Found = dict[Point, dict[str, Row]]


def run(
    presets: Sequence[str],
    routings: Sequence[str],
    tokens: Sequence[int],
    options: Options,
    rates: Rates,
    found: Found,
) -> None:
    """Measure everything into ``found``, a point at a time; what rivals take goes there after.

    Rivals come last, because one that writes where it should not ends the process's use of a GPU.

    Raises:
        UsageError: if a name is unknown.
    """
    unknown = [name for name in routings if name not in ROUTINGS]
    if unknown:
        raise UsageError(f"routing is {unknown[0]!r}, wanted one of {', '.join(ROUTINGS)}")
    for preset in presets:
        config_of(preset)
    for preset in presets:
        layer = draw_layer(preset, Draw(options.seed, options.device))
        for routing in routings:
            for count in tokens:
                rows = measure(layer, routing, count, options, rates)
                found[preset, routing, count] = rows
                print("  ".join(cells((preset, routing, count), rows)), flush=True)
        whole = moe_layer.build(
            layer.config, layer.gate_up, layer.down, Draw(options.seed, options.device)
        )
        for count in tokens:
            rows = {"layer": measure_layer(layer, whole, count, options, rates)}
            found[preset, ROUTER, count] = rows
            print("  ".join(cells((preset, ROUTER, count), rows)), flush=True)
        del layer, whole
    for preset in presets:
        layer = draw_layer(preset, Draw(options.seed, options.device))
        for name, prepare in moe_rivals.RIVALS.items():
            _run_rival(layer, name, prepare, options, found)
        del layer


def _run_rival(
    layer: Layer, name: str, prepare: moe_rivals.Prepare, options: Options, found: Found
) -> None:
    """Time one rival at every point of a preset; why it could not is said in the pair's row."""
    points = [point for point in found if point[0] == layer.preset and point[1] != ROUTER]
    print(f"{layer.preset}: {name}", flush=True)
    made = moe_rivals.attempt(lambda: prepare(layer.gate_up, layer.down))
    for point in points:
        rows = found[point]
        if not all(row.match for row in rows.values()):
            continue
        if isinstance(made, str):
            taken: dict[str, float] | str = made
        else:
            taken = moe_rivals.attempt(partial(_rival_times, layer, made, point, options))
        if isinstance(taken, str):
            said = "; ".join(filter(None, (rows["pair"].message, f"{name}: {taken}")))
            rows["pair"] = dataclasses.replace(rows["pair"], message=said)
            continue
        for part, us in taken.items():
            rivals = {**rows[part].rivals, name: us}
            rows[part] = dataclasses.replace(rows[part], rivals=rivals)
    del made
    moe_rivals.release(options.device)


def _rival_times(
    layer: Layer, made: moe_rivals.Rival, point: Point, options: Options
) -> dict[str, float]:
    """Microseconds of each product and of both, SwiGLU by this package's own kernel; or of all."""
    inputs = all_inputs(layer, point[1], point[2], options)
    if isinstance(made, moe_rivals.Whole):
        return _whole_times(layer, made, inputs, options)
    limit = layer.config.swiglu_limit
    moe_rivals.compare(made, inputs[0].rows, inputs[0].offsets, (layer.gate_up, layer.down))
    ends = [made.offsets(one.offsets) for one in inputs]
    both = list(zip(inputs, ends, strict=True))

    def first(one: Inputs, end: Any) -> torch.Tensor:
        product = made.gate_up(one.rows, end)
        return ops.swiglu(product, limit, layout="interleaved", row_weight=one.row_weight)

    def pair_of(one: Inputs, end: Any) -> torch.Tensor:
        return made.down(first(one, end), end)

    inners = [first(*each) for each in both]
    calls: dict[str, list[Callable[[], Any]]] = {
        "gate_up": [partial(first, *each) for each in both],
        "down": [partial(made.down, i, end) for i, end in zip(inners, ends, strict=True)],
        "pair": [partial(pair_of, *each) for each in both],
    }
    return {
        part: timing.measure(some, options.device, options.repeat).us
        for part, some in calls.items()
    }


def _whole_times(
    layer: Layer, made: moe_rivals.Whole, inputs: list[Inputs], options: Options
) -> dict[str, float]:
    """Of the block, at the same routing."""
    limit = layer.config.swiglu_limit
    routed = [(one.x, one.ids, one.weights) for one in inputs]
    moe_rivals.compare_whole(made, routed[0], limit, (layer.gate_up, layer.down))
    calls = [partial(made.forward, *one, limit) for one in routed]
    return {"block": timing.measure(calls, options.device, options.repeat).us}


HEADINGS = (
    "shapes",
    "routing",
    "tokens",
    "experts",
    "floor us",
    "gate_up us",
    "down us",
    "pair us",
    "pair / floor",
    "around us",
    "block us",
    "around / block",
    "layer us",
    "layer / floor",
    "check",
    "rivals' pair us, or block's",
)


def cells(point: Point, rows: dict[str, Row]) -> tuple[str, ...]:
    """The texts of a point, in the order of ``HEADINGS``; the floor is that of pair or layer."""
    whose = rows["layer" if point[1] == ROUTER else "pair"]
    us = {part: rows[part].us if part in rows else None for part in (*PARTS, "layer")}
    times = {part: "-" if value is None else number(value) for part, value in us.items()}
    beside = whose.rivals | (rows["block"].rivals if "block" in rows else {})
    rivals = (f"{name} {number(value)}" for name, value in beside.items())
    return (
        point[0],
        point[1],
        str(point[2]),
        str(whose.shape["touched"]),
        number(whose.floor_us),
        times["gate_up"],
        times["down"],
        times["pair"],
        _over(us["pair"], whose.floor_us),
        times["around"],
        times["block"],
        _over(us["around"], us["block"], digits=3),
        times["layer"],
        _over(us["layer"], whose.floor_us),
        "ok" if all(row.match for row in rows.values()) else "WRONG",
        ", ".join(rivals),
    )


def _over(us: float | None, other: float | None, digits: int = 2) -> str:
    return "-" if us is None or other is None else f"{us / other:.{digits}f}"


def table(found: Found) -> str:
    """A line a point, then what was wrong and why rivals have no time."""
    lines = plain(HEADINGS, [cells(*item) for item in found.items()])
    notes = [row.message for rows in found.values() for row in rows.values() if row.message]
    return "\n".join([*lines, *dict.fromkeys(notes)])
