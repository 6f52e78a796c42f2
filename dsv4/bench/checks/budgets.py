"""Judges of the operators: how far from the float64 oracle each may be, and why."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F

from dsv4.bench.checks.judge import (
    FP8_SUM,
    FUNCTION,
    U,
    combine,
    compare,
    ranked,
    row_error,
    same,
    storing,
    sum_error,
)
from dsv4.bench.problem import Outputs, Problem, Verdict, widen
from dsv4.dispatch import explain
from dsv4.kv_cache.pages import Pages
from dsv4.ops import dequantize, read_kv
from dsv4.quant.formats import FRAGMENTS, LINEAR, QuantizedTensor
from dsv4.testing.assertions import unit_roundoff

_CHUNK = 64 << 20  # bytes of gathered entries at a time
_LONG = 1 << 14  # keys of a sequence from which on they are kept of one sequence alone


def gemm(problem: Problem, truth: torch.Tensor) -> torch.Tensor:
    """``sum_error(K)`` and 3 roundings by scales, on the GEMM of the operands' magnitudes.

    FP8 tensor cores (the implementation ``"fp8"``) add ``FP8_SUM``.
    Taking the sign bits off codes and activations gives the magnitudes; NVFP4 quantisation of
    activations commutes with it.
    """
    x, weight, *rest = problem.widened().args
    magnitudes = dataclasses.replace(
        problem.widened(), args=(_magnitude(x), _magnitude(weight), *rest)
    ).run("reference")[0]
    own = FP8_SUM if problem.backend == "fp8" else 0.0
    return (sum_error(x.shape[-1]) + 3 * U + own) * magnitudes


def _magnitude(operand: Any) -> Any:
    if isinstance(operand, torch.Tensor):
        return operand.abs()
    assert isinstance(operand, QuantizedTensor)
    if operand.layout == FRAGMENTS:
        operand = operand.with_layout(LINEAR)
    signless = 0x77 if operand.format.packed else 0x7F
    codes = (operand.codes.view(torch.uint8) & signless).view(operand.codes.dtype)
    return dataclasses.replace(operand, codes=codes)


def copied(problem: Problem, truth: torch.Tensor) -> torch.Tensor:
    """For what moves numbers as they are."""
    return torch.zeros_like(truth)


def norm(problem: Problem, truth: torch.Tensor) -> torch.Tensor:
    """Budget: half the error of a sum of D squares under the root, the root, three roundings."""
    return (sum_error(truth.shape[-1]) / 2 + FUNCTION + 3 * U) * truth.abs()


def dequantized(problem: Problem, truth: torch.Tensor) -> torch.Tensor:
    """Budget: one float32 rounding, by the global scale."""
    return 1.01 * U * truth.abs()


def rotation(problem: Problem, truth: torch.Tensor) -> torch.Tensor:
    """Two products and a sum, each rounded: 2 u on the magnitudes. The other dims: exact."""
    x, cos, sin = (widen(value).abs() for value in problem.args)
    nope_dim = x.shape[-1] - 2 * cos.shape[-1]
    even, odd = x[..., nope_dim:].unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((even * cos + odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return 2.02 * U * F.pad(rotated, (nope_dim, 0))


def activation(problem: Problem, truth: torch.Tensor) -> torch.Tensor:
    """exp, whose argument may be off by a rounding (a relative error |g| u), a sum, two divisions
    or products, the last product."""
    gate = widen(problem.args[0]).chunk(2, -1)[0]
    return (2 * FUNCTION + 4 * U + 2 * U * gate.abs()) * truth.abs()


def combination(problem: Problem, truth: torch.Tensor) -> torch.Tensor:
    """A sum of k products and the shared expert, on magnitudes."""
    y, order, offsets, weights = problem.widened().args
    shared = widen(problem.kwargs["shared"])
    magnitude = dataclasses.replace(
        problem.widened(),
        args=(y.abs(), order, offsets, weights.abs()),
        kwargs={**problem.widened().kwargs, "shared": shared.abs()},
    ).run("reference")[0]
    return sum_error(weights.shape[1] + 1) * magnitude


def returned(problem: Problem, truth: torch.Tensor) -> torch.Tensor:
    """A sum of one rank's part and the shared expert, on magnitudes."""
    magnitude = widen(problem.args[0]).abs() + widen(problem.kwargs["shared"]).abs()
    return sum_error(2) * magnitude


def pooled(problem: Problem, truth: torch.Tensor) -> torch.Tensor:
    """See ``_pooling_error``."""
    kv, score = (widen(value) for value in problem.args[:2])
    slots = kv.shape[2] * (2 if problem.kwargs["overlap"] else 1)
    return _pooling_error(slots, score, kv.abs().amax())


def _pooling_error(slots: int, score: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """A softmax over the slots (argument off by 2 u of the largest score, exp, sum, division), then
    their mean, whose magnitude is at most the largest value."""
    argument = 4 * U * score.abs().amax()
    return (2 * argument + 2 * sum_error(slots) + 3 * FUNCTION) * largest


def compressor(problem: Problem, actual: Outputs, truth: Outputs) -> Verdict:
    """Entries as ``pooled``; state: kv exact, score + ape rounded once; positions exact."""
    budget = pooling_error(problem)
    return combine(
        compare(actual[0], truth[0], budget + storing(truth[0], actual[0].dtype), "entries"),
        same(actual[1], truth[1], "positions"),
        same(actual[2], truth[2], "sequences"),
        same(actual[3][:, :, 0], truth[3][:, :, 0], "state kv"),
        compare(
            actual[3][:, :, 1],
            truth[3][:, :, 1],
            storing(truth[3][:, :, 1], actual[3].dtype).nan_to_num(posinf=0.0),
            "state scores",
        ),
    )


def pooling_error(problem: Problem) -> torch.Tensor:
    """Budget of a pooled value of ``compressor_update``."""
    kv, score, ape, state = (widen(value) for value in problem.args[:4])
    live = torch.where(state.isfinite(), state, 0)
    largest = torch.maximum(kv.abs().amax(), live.abs().amax())
    biased = score.abs().amax() + ape.abs().amax() + live.abs().amax()
    return _pooling_error(state.shape[1], biased, largest)


def routing(problem: Problem, actual: Outputs, truth: Outputs) -> Verdict:
    """Logits as those of a GEMM; ids exact but for ties; weights follow from the actual ids.

    ``s = sqrt(softplus(l))`` has the relative error ``(dl + softplus's own) / 2``, because
    ``sigmoid(l) <= softplus(l)``; a weight has that of its score and of the sum.
    """
    x, gate = (widen(value) for value in problem.args[:2])
    logits, ids = truth[0], actual[2]
    slack = sum_error(x.shape[-1]) * (x.abs() @ gate.abs().T) + storing(logits, actual[0].dtype)
    relative = (slack + 3 * FUNCTION + 2 * U * logits.abs()) / 2 + FUNCTION
    scores = F.softplus(logits, threshold=1e9).sqrt()
    weights = scores.gather(1, ids.clamp(0, scores.shape[1] - 1))
    weights = weights / weights.sum(-1, keepdim=True) * problem.kwargs["scaling_factor"]
    worst = relative.amax(-1, keepdim=True)
    budget = (2 * worst + (ids.shape[1] + 4) * U) * weights
    return combine(
        compare(actual[0], logits, slack, "logits"),
        _routed_ids(problem, scores, relative, ids, truth[2]),
        compare(actual[1], weights, budget, "weights"),
    )


def _routed_ids(
    problem: Problem,
    scores: torch.Tensor,
    relative: torch.Tensor,
    ids: torch.Tensor,
    expected: torch.Tensor,
) -> Verdict:
    if "top_k" not in problem.kwargs:
        return same(ids, expected, "ids")
    biased = scores + widen(problem.args[2])
    error = relative * scores + U * biased.abs()
    return ranked(biased, ids, expected, error.amax(-1, keepdim=True))


def _mix_error(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mixes of the flattened streams before scale and base, with their budgets.

    A GEMM of length n H, times the inverse root mean square, whose relative error is as in
    ``norm``.
    """
    streams, fn = (widen(value) for value in problem.args[:2])
    flat = streams.flatten(-2)
    inverse = torch.rsqrt(flat.square().mean(-1, keepdim=True) + problem.kwargs["norm_eps"])
    relative = 1.5 * sum_error(flat.shape[-1]) + FUNCTION + 2 * U
    return (flat @ fn.T) * inverse, relative * (flat.abs() @ fn.abs().T) * inverse


def _gate_error(mixes: torch.Tensor, error: torch.Tensor, scale: float, base: torch.Tensor) -> Any:
    """A sigmoid, whose slope is at most 1/4, of ``mix * scale + base``."""
    argument = abs(scale) * (error + U * mixes.abs()) + U * (mixes * scale + base).abs()
    return argument / 4 + 2 * FUNCTION + 2 * U


def _pre_budget(
    problem: Problem, error: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """A sum over n streams with weights of at most 1 that are each off by ``error [..., n]``."""
    streams = widen(problem.args[0]).abs()
    weights = error + sum_error(streams.shape[-2])
    return (weights.unsqueeze(-1) * streams).sum(-2) + storing(truth, dtype)


def hyper_head(problem: Problem, actual: Outputs, truth: Outputs) -> Verdict:
    """Gates as in ``_gate_error``, then the sum over the streams."""
    mixes, error = _mix_error(problem)
    scale, base = (widen(value) for value in problem.args[2:4])
    error = _gate_error(mixes, error, float(scale[0]), base)
    budget = _pre_budget(problem, error, truth[0], actual[0].dtype)
    return compare(actual[0], truth[0], budget, "the result")


def hyper_pre(problem: Problem, actual: Outputs, truth: Outputs) -> Verdict:
    """Gates as in ``_gate_error``; the mixing matrix by its sensitivity to its logits.

    Sinkhorn's steps do not expand relative differences, so the roundings of its ``2 iterations``
    half-steps, (n + 3) u each on rows and columns, add up.
    """
    allowed = pre_error(problem, truth[0], actual[0].dtype)
    return combine(
        compare(actual[0], truth[0], allowed, "streams"),
        hyper_coefficients(problem, actual[1:], truth[1:]),
    )


def pre_error(problem: Problem, truth: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Budget of the first output of ``hc_pre``, the layer's input."""
    n = problem.args[0].shape[-2]
    mixes, error = _mix_error(problem)
    scale, base = (widen(value) for value in problem.args[2:4])
    pre = _gate_error(mixes[..., :n], error[..., :n], float(scale[0]), base[:n])
    return _pre_budget(problem, pre, truth, dtype)


def hyper_coefficients(problem: Problem, actual: Outputs, truth: Outputs) -> Verdict:
    """Post and comb of ``hc_pre``, see ``hyper_pre``."""
    n = problem.args[0].shape[-2]
    mixes, error = _mix_error(problem)
    scale, base = (widen(value) for value in problem.args[2:4])
    middle = slice(n, 2 * n)
    post = 2 * _gate_error(mixes[..., middle], error[..., middle], float(scale[1]), base[middle])
    logits = mixes[..., 2 * n :] * scale[2] + base[2 * n :]
    slack = scale[2].abs() * error[..., 2 * n :] + 2 * U * (
        logits.abs() + mixes[..., 2 * n :].abs()
    )
    steps = 4 * problem.kwargs["iterations"] * (n + 3) * U
    comb = _sensitivity(problem, truth[1], slack) + (steps + 2 * FUNCTION) * truth[1]
    return combine(
        compare(actual[0], truth[0], post, "post"), compare(actual[1], truth[1], comb, "comb")
    )


def _sensitivity(problem: Problem, comb: torch.Tensor, slack: torch.Tensor) -> torch.Tensor:
    """First-order change of the mixing matrix if every logit is off by ``slack``.

    The base is added to the logits, so a difference quotient of the float64 oracle in each entry
    of the base gives the derivative; a factor 2 covers the second order.
    """
    wide, step, n = problem.widened(), 1e-6, comb.shape[-1]
    total = torch.zeros_like(comb)
    for i in range(n * n):
        base = wide.args[3].clone()
        base[2 * n + i] += step
        moved = dataclasses.replace(wide, args=(*wide.args[:3], base)).run("reference")[2]
        total += ((moved - comb) / step).abs() * slack[..., i, None, None]
    return 2 * total


def write_back(problem: Problem, truth: torch.Tensor) -> torch.Tensor:
    """A sum of n + 1 products, on magnitudes."""
    wide = problem.widened()
    magnitudes = dataclasses.replace(wide, args=tuple(value.abs() for value in wide.args))
    return sum_error(problem.args[1].shape[-2] + 1) * magnitudes.run("reference")[0]


def rotated_fp4(problem: Problem, actual: Outputs, truth: Outputs) -> Verdict:
    """Check that each value is a nearest FP4 value of the exact transform, up to its roundings.

    The exact transform v is known to d = the error of a sum and of the rounding to the input's
    dtype, so the result lies within half the spacing of E2M1 at ``|v| + d`` plus d; where the
    group's largest value lies within d of a border between two scales, of either.
    """
    x = widen(problem.args[0])
    exact = x @ hadamard(x.shape[-1]).to(x.device)
    summed = sum_error(x.shape[-1].bit_length()) * x.abs().sum(-1, keepdim=True)
    slack = summed * x.shape[-1] ** -0.5 + storing(exact, problem.args[0].dtype)
    groups, loose = exact.unflatten(-1, (-1, 32)).abs(), slack.unflatten(-1, (-1, 32))
    budget = torch.zeros_like(groups)
    for sign in (-1, 1):
        largest = (groups + sign * loose).amax(-1, keepdim=True).clamp(min=6 * 2.0**-126)
        scale = torch.exp2(torch.ceil(torch.log2(largest / 6)))
        reach = (groups + loose) / scale
        half = torch.where(reach < 2, 0.25, torch.where(reach < 4, 0.5, 1.0))
        budget = torch.maximum(budget, half * scale + loose)
    verdict = compare(actual[0], exact, budget.flatten(-2), "the result")
    # The definition rounds to the input's dtype in between; float64 input has nothing to round.
    nearest = _nearest_fp4(exact.to(problem.args[0].dtype).to(torch.float64))
    return dataclasses.replace(verdict, error=row_error(actual[0], nearest) or None)


def _nearest_fp4(x: torch.Tensor) -> torch.Tensor:
    groups = x.unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126)
    scale = torch.exp2(torch.ceil(torch.log2(largest / 6)))
    size = groups.abs() / scale
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return ((size / step).round() * step * scale).copysign(groups).flatten(-2)


def hadamard(d: int) -> torch.Tensor:
    """Sylvester's matrix times ``d^-0.5``, float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < d:
        top = torch.cat((matrix, matrix), 1)
        matrix = torch.cat((top, torch.cat((matrix, -matrix), 1)))
    return matrix * d**-0.5


def selection(problem: Problem, actual: Outputs, truth: Outputs) -> Verdict:
    """Ids exact but for ties within the error of two nested sums."""
    q, weights, pages, table, sequence, visible = problem.args
    if isinstance(q, QuantizedTensor):
        q = dequantize(q, torch.float64, backend="reference")
    q, weights, size = q.to(torch.float64), widen(weights), pages.page_size
    within_page = torch.arange(size, device=q.device)
    tokens, capacity = q.shape[0], table.shape[1] * size
    scores = torch.full((tokens, capacity), -torch.inf, dtype=torch.float64, device=q.device)
    error = torch.zeros(tokens, 1, dtype=torch.float64, device=q.device)
    relative = sum_error(q.shape[2]) + sum_error(q.shape[1])
    keys: dict[int, torch.Tensor] = {}
    for t in range(tokens):
        seen, row = int(visible[t]), int(sequence[t])
        if row not in keys:
            slots = table[row].long()[:, None] * size + within_page
            read = read_kv(pages, slots.flatten(), torch.float64, backend="reference")
            keys = {row: read} if capacity > _LONG else {**keys, row: read}
        key = keys[row]
        key = key[:seen]
        scores[t, :seen] = (weights[t, :, None] * torch.relu(q[t] @ key.T)).sum(0)
        size_of = (weights[t, :, None].abs() * (q[t].abs() @ key.abs().T)).sum(0)
        error[t] = relative * size_of.amax() if seen else 0.0
    return ranked(scores, actual[0], truth[0], error)


def attention(problem: Problem, truth: torch.Tensor) -> torch.Tensor:
    """Weights p are off by twice the error of a logit, exp and the sum; then a sum of p |v|.

    The kernel rounds p to bfloat16, where it multiplies and in the sum alike, which moves the mean
    of v by at most ``u p |v - mean|`` for each.
    """
    q, window, window_slots, compressed, compressed_slots, sink = problem.args
    pools = [(window, window_slots)]
    if compressed is not None:
        pools.append((compressed, compressed_slots))
    width = sum(slots.shape[1] for _, slots in pools)
    step = max(1, _CHUNK // (8 * width * q.shape[-1]))
    scale, rounds = problem.kwargs["scale"], _rounds_weights(problem)
    parts = []
    for begin in range(0, q.shape[0], step):
        part = slice(begin, begin + step)
        chunk = [(pages, slots[part]) for pages, slots in pools]
        parts.append(_attention_part(widen(q[part]), chunk, widen(sink), scale, rounds))
    budget = torch.cat(parts) if parts else torch.zeros_like(truth)
    cos, sin = (problem.kwargs.get(name) for name in ("cos", "sin"))
    if cos is None or sin is None:
        return budget
    # An error of either dim of a pair reaches both. The rotation adds 2 u of |a cos| + |b sin|,
    # which is at most sqrt(2) of the length of the pair.
    cos, sin = widen(cos).abs().unsqueeze(1), widen(sin).abs().unsqueeze(1)
    nope_dim = truth.shape[-1] - 2 * cos.shape[-1]
    even, odd = budget[..., nope_dim:].unflatten(-1, (-1, 2)).unbind(-1)
    length = truth[..., nope_dim:].unflatten(-1, (-1, 2)).norm(dim=-1)
    both = torch.stack((even * cos + odd * sin, odd * cos + even * sin), -1)
    both = both + (3 * U * length).unsqueeze(-1)
    return torch.cat((budget[..., :nope_dim], both.flatten(-2)), -1)


def _rounds_weights(problem: Problem) -> bool:
    explanation = explain(
        problem.function, *problem.args, **problem.kwargs, backend=problem.backend
    )
    return explanation.chosen in ("cute", "triton")


def _attention_part(
    q: torch.Tensor,
    pools: list[tuple[Pages, torch.Tensor]],
    sink: torch.Tensor,
    scale: float,
    rounds: bool,
) -> torch.Tensor:
    kv = torch.cat(
        [read_kv(pages, slots, torch.float64, backend="reference") for pages, slots in pools], 1
    )
    absent = torch.cat([slots for _, slots in pools], 1).unsqueeze(1) < 0
    logits = (q @ kv.transpose(1, 2) * scale).masked_fill(absent, -torch.inf)
    sinks = sink.view(1, -1, 1).expand(q.shape[0], -1, 1)
    probabilities = torch.cat((logits, sinks), -1).softmax(-1)[..., :-1]
    size = q.abs() @ kv.abs().transpose(1, 2) * scale
    wrong = (sum_error(q.shape[-1]) + 4 * U) * size.masked_fill(absent, 0).amax(-1, keepdim=True)
    relative = 2 * wrong + 2 * sum_error(kv.shape[1]) + 3 * FUNCTION
    budget = relative * (probabilities @ kv.abs())
    if rounds:
        budget += 1.01 * unit_roundoff(torch.bfloat16) * _spread(probabilities, kv)
    return budget


def _spread(probabilities: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """``sum_j p_j |v_j - mean|``, a head at a time: ``[t, h, K]`` and ``[t, K, D]``."""
    deviation = torch.empty_like(probabilities @ kv)
    for head in range(deviation.shape[1]):
        p = probabilities[:, head : head + 1]
        deviation[:, head] = (p @ (kv - p @ kv).abs()).squeeze(1)
    return deviation
