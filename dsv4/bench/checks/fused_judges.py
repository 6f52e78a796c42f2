"""Judges of fused operators: against their parts, which have judges of their own.

A fused operator means the composition of its parts. Where the parts round to codes or bytes, so
does the whole, and it must do so exactly as the parts do on the values that it returns itself or
that the same implementation of its parts returns; where it returns floats, they are held to the
float64 oracle with the budget of the parts, and one rounding to the storage dtype in between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dsv4 import dispatch, ops
from dsv4.bench.checks import budgets
from dsv4.bench.checks.judge import FUNCTION, Judge, U, combine, compare, same, storing, sum_error
from dsv4.bench.problem import Outputs, Problem, Verdict, widen
from dsv4.kv_cache.pages import FP4_GROUP, Pages
from dsv4.testing.assertions import unit_roundoff


def as_parts(parts: Callable[[Problem], Any], *names: str) -> Judge:
    """Make a judge that compares the bits of every output with those that ``parts`` returns.

    ``parts`` calls ``by_same_kernel`` for operators whose rounding depends on the kernel.
    """

    def judge(problem: Problem, actual: Outputs, truth: Outputs) -> Verdict:
        quantized = parts(problem)
        parts_of_it = (quantized.codes, quantized.scales, quantized.global_scale)
        expected = [part for part in parts_of_it if part is not None]
        return combine(*(same(a, w, n) for a, w, n in zip(actual, expected, names, strict=True)))

    return judge


def by_same_kernel(
    problem: Problem, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a part of a fused operator as the fused implementation does.

    The part runs on the implementation of the same name as the fused one, if it supports the call,
    and else on the choice of ``"auto"``. The requested backend does not matter. A self-test
    therefore compares a fused kernel with its own parts. The reference's parts round differently.
    """
    call = dispatch.arguments(function, *args, **kwargs)
    for row in dispatch.implementations(call.op):
        if row.name == problem.backend and row.unsupported_reason(call) is None:
            return row.run(call.args)
    return dispatch.first(call.op, call.args)


def as_reference(problem: Problem, actual: Outputs, truth: Outputs) -> Verdict:
    """Check that every output has the bits that the reference gives for the same inputs."""
    expected = problem.run("reference")
    return combine(
        *(same(a, w, f"output {i}") for i, (a, w) in enumerate(zip(actual, expected, strict=True)))
    )


def rope_tables(problem: Problem, actual: Outputs, truth: Outputs) -> Verdict:
    """Compare with the float32 angle's cosine and sine, up to 2^-23."""
    (positions,), inv_freq = problem.args, problem.kwargs["parameters"]
    angles = (positions.float().unsqueeze(-1) * inv_freq).double()
    return combine(
        compare(actual[0], angles.cos(), 2 * U, "cos"),
        compare(actual[1], angles.sin(), 2 * U, "sin"),
    )


def gemm_swiglu(problem: Problem, actual: Outputs, truth: Outputs) -> Verdict:
    """The errors of both GEMMs through SwiGLU."""
    x, weight, limit = problem.args
    inner = dataclasses.replace(problem, function=ops.gemm, args=(x, weight))
    budget = _through_swiglu(inner, limit) + 1e-5 * truth[0].abs()
    return compare(actual[0], truth[0], budget + storing(truth[0], actual[0].dtype), "the result")


def grouped_gemm_swiglu(problem: Problem, actual: Outputs, truth: Outputs) -> Verdict:
    """Judge ``gemm_swiglu`` for every expert's rows, times the row's weight."""
    budget = grouped_gemm_swiglu_budget(problem, truth[0])
    return compare(actual[0], truth[0], budget + storing(truth[0], actual[0].dtype), "the result")


def grouped_gemm_swiglu_budget(problem: Problem, truth: torch.Tensor) -> torch.Tensor:
    """Error of ``grouped_gemm_swiglu`` before its result is rounded."""
    x, weight, offsets, limit = problem.args
    kwargs = {name: value for name, value in problem.kwargs.items() if name != "row_weight"}
    row_weight = problem.kwargs.get("row_weight")
    of_experts = slice(0, int(offsets[-1]))  # the other rows may hold anything, and are zero
    inner = dataclasses.replace(
        problem,
        function=ops.grouped_gemm,
        args=(_first(x, of_experts), weight, offsets),
        kwargs=kwargs,
    )
    budget = torch.zeros_like(truth)
    budget[of_experts] = _through_swiglu(inner, limit)
    if row_weight is not None:
        budget *= row_weight.double().abs().unsqueeze(-1)
    return budget + 1e-5 * truth.abs()


def _first(x: Any, rows: slice) -> Any:
    if isinstance(x, torch.Tensor):
        return x[rows]
    return dataclasses.replace(x, codes=x.codes[rows], scales=x.scales[rows])


def _through_swiglu(gemm: Problem, limit: float | None) -> torch.Tensor:
    """Error of SwiGLU whose slope in the gate is at most 1.1, of a GEMM that has errors.

    A clamp brings values nearer. exp and the division may be the hardware's, within 1e-5 of the
    result, which is not in here.
    """
    exact = gemm.widened().run("reference")[0]
    error = budgets.gemm(gemm, exact)
    gate, up = exact.unflatten(-1, (-1, 2)).unbind(-1)
    gate_error, up_error = error.unflatten(-1, (-1, 2)).unbind(-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    factor = torch.nn.functional.silu(gate).abs()
    return 1.1 * gate_error * (up.abs() + up_error) + factor * up_error


QUANTIZED = ("codes", "scales", "global scale")


def _norm_error(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Unweighted norm of float64 ``x`` and how far a float32 one may be off it."""
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed, (sum_error(x.shape[-1]) / 2 + FUNCTION + 3 * U) * normed.abs()


def norm_pair(problem: Problem, actual: Outputs, truth: Outputs) -> Verdict:
    """Judge each part like ``rms_norm``."""
    return combine(
        *(
            compare(a, t, budgets.norm(problem, t) + storing(t, a.dtype), name)
            for a, t, name in zip(actual, truth, ("first", "second"), strict=True)
        )
    )


def _rotated_error(
    normed: torch.Tensor, error: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Error of the rotated last dims of ``normed``, whose own error is ``error``."""
    nope_dim = normed.shape[-1] - 2 * cos.shape[-1]
    size = error + 2.02 * U * normed.abs()
    even, odd = size[..., nope_dim:].unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos.abs(), sin.abs()
    rotated = torch.stack((even * cos + odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((error[..., :nope_dim], rotated), -1)


def head_norm_rope(problem: Problem, actual: Outputs, truth: Outputs) -> Verdict:
    """The norm of each head, rounded to the dtype of q, then the rotation."""
    q, cos, sin = (widen(value) for value in problem.args)
    normed, error = _norm_error(q, problem.kwargs["eps"])
    error = error + storing(normed, problem.args[0].dtype)
    budget = _rotated_error(normed, error, cos.unsqueeze(-2), sin.unsqueeze(-2))
    return compare(actual[0], truth[0], budget + storing(truth[0], actual[0].dtype), "q")


def norm_quantized(problem: Problem, actual: Outputs, truth: Outputs) -> Verdict:
    """The norm as ``rms_norm``; the codes are those of the norm returned."""
    expected = ops.quantize(actual[0], "nvfp4", backend="reference", **_scaling(problem))
    parts = (expected.codes, expected.scales, expected.global_scale)
    assert expected.global_scale is not None
    return combine(
        compare(
            actual[0],
            truth[0],
            budgets.norm(problem, truth[0]) + storing(truth[0], actual[0].dtype),
            "the norm",
        ),
        *(
            same(a, w, n)
            for a, w, n in zip(actual[1:], parts, QUANTIZED, strict=True)
            if w is not None
        ),
    )


def norm_fp8(problem: Problem, actual: Outputs, truth: Outputs) -> Verdict:
    """The norm as ``rms_norm``; the codes are those of the norm returned."""
    expected = ops.quantize(actual[0], "fp8_token", backend="reference")
    budget = budgets.norm(problem, truth[0]) + storing(truth[0], actual[0].dtype)
    parts = zip(actual[1:], (expected.codes, expected.scales), QUANTIZED[:2], strict=True)
    return combine(
        compare(actual[0], truth[0], budget, "the norm"), *(same(a, w, n) for a, w, n in parts)
    )


def _scaling(problem: Problem) -> dict[str, Any]:
    names = ("global_scale", "scaling", "layout")
    chosen = {name: problem.kwargs[name] for name in names if name in problem.kwargs}
    return {"scaling": "token", **chosen}


def _half_step(size: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Half the distance of the E4M3 values around magnitudes of up to ``size``, whose group's
    largest is up to ``amax``: the scale matters only where they are subnormal."""
    binade = torch.exp2(torch.floor(torch.log2(size.clamp(min=2.0**-120))))
    scale = torch.exp2(torch.ceil(torch.log2(amax.clamp(min=1e-4) / 448)))
    return torch.maximum(binade * 2.0**-4, scale * 2.0**-10)


def written_entries(problem: Problem, actual: Outputs, truth: Outputs) -> Verdict:
    """Norm, rounding, rotation, rounding, then the nearest E4M3: within its step of the exact."""
    pages, kv, weight, cos, sin, slots = problem.args
    live = slots >= 0
    x, weight, cos, sin = (widen(value) for value in (kv, weight, cos, sin))
    normed, error = _norm_error(x, problem.kwargs["eps"])
    normed, error = normed * weight, error * weight.abs()
    error = error + storing(normed, kv.dtype)
    exact = ops.rope(normed, cos, sin, backend="reference")
    error = _rotated_error(normed, error, cos, sin) + storing(exact, kv.dtype)
    entries = ops.read_kv(
        dataclasses.replace(pages, data=actual[0]), slots, torch.float64, backend="reference"
    )
    budget = error + _rounding(pages, exact, error)
    others = torch.ones(pages.num_slots, dtype=torch.bool, device=slots.device)
    others[slots[live]] = False
    rest = others.nonzero().squeeze(-1)
    untouched, before = (
        ops.read_kv(dataclasses.replace(pages, data=data), rest, torch.float64, backend="reference")
        for data in (actual[0], truth[0])
    )
    return combine(
        compare(entries[live], exact[live], budget[live], "entries"),
        same(untouched, before, "entries that are not written"),
    )


def heads_and_entries(problem: Problem, actual: Outputs, truth: Outputs) -> Verdict:
    """Heads as ``head_norm_rope``, entries as ``written_entries``."""
    q, pages, kv, weight, cos, sin, slots = problem.args
    eps = problem.kwargs
    heads = dataclasses.replace(problem, args=(q, cos, sin), kwargs={"eps": eps["q_eps"]})
    entries = dataclasses.replace(
        problem, args=(pages, kv, weight, cos, sin, slots), kwargs={"eps": eps["kv_eps"]}
    )
    return combine(
        head_norm_rope(heads, actual[:1], truth[:1]),
        written_entries(entries, actual[1:], truth[1:]),
    )


def compressed_entries(problem: Problem, actual: Outputs, truth: Outputs) -> Verdict:
    """State as ``compressor``; entries as the pooled ones, normed, rotated and stored."""
    return combine(
        _stored_entries(problem, actual[1]),
        same(actual[0][:, :, 0], truth[0][:, :, 0], "state kv"),
    )


def paged_entries(
    same_tokens: Problem, problem: Problem, actual: Outputs, truth: Outputs
) -> Verdict:
    """Those of ``compress_write_paged``, of the tokens that ``compress_write`` would take.

    Args:
        same_tokens: The problem of ``compress_write``, which says what the entries are.
        problem: That of ``compress_write_paged``.
        actual: State and pages.
        truth: As ``actual``.
    """
    width = problem.args[0].shape[1]
    return combine(
        _stored_entries(same_tokens, actual[1]),
        same(actual[0][..., :width], truth[0][..., :width], "state kv"),
    )


def _stored_entries(problem: Problem, data: torch.Tensor) -> Verdict:
    """Entries of ``compress_write`` in pages.

    The error e of a pooled row c passes its norm as in ``hyper_norm``.
    """
    head, (weight, pages, table) = problem.args[:7], problem.args[7:]
    update = dataclasses.replace(
        problem,
        function=ops.compressor_update,
        args=head,
        kwargs={"overlap": problem.kwargs["overlap"]},
        mutates=(3,),
    )
    oracle = update.widened().run("reference")
    c, positions, sequence, _ = oracle
    error = budgets.pooling_error(update) + storing(c, torch.bfloat16)
    size = c.square().mean(-1, keepdim=True) + problem.kwargs["eps"]
    carried = c.abs() * (c.abs() * error).mean(-1, keepdim=True) / size
    weight = widen(weight)
    normed = weight * c * torch.rsqrt(size)
    error = weight.abs() * (error + carried) * torch.rsqrt(size) * 1.01
    error = error + budgets.norm(problem, normed) + storing(normed, torch.bfloat16)
    cos, sin = ops.rope_tables(positions.clamp(min=0), problem.kwargs["inv_freq"])
    cos, sin = cos.double(), sin.double()
    exact = ops.rope(normed, cos, sin, backend="reference")
    error = _rotated_error(normed, error + 4 * U * normed.abs(), cos, sin)
    error = error + storing(exact, torch.bfloat16)
    if problem.kwargs.get("rotate_quantize"):
        matrix = budgets.hadamard(exact.shape[-1]).to(exact.device)
        exact, error = exact @ matrix, error @ matrix.abs()
        error = error + sum_error(exact.shape[-1].bit_length()) * exact.abs().amax(-1, keepdim=True)
        error = error + storing(exact, torch.bfloat16)
    number = positions.div(problem.args[2].shape[0], rounding_mode="floor")
    slots = ops.entry_slots(table, pages.page_size, sequence, number, backend="reference")
    live, budget = slots >= 0, error + _rounding(pages, exact, error)
    entries = ops.read_kv(
        dataclasses.replace(pages, data=data), slots, torch.float64, backend="reference"
    )
    return compare(entries[live], exact[live], budget[live], "entries")


def _rounding(pages: Pages, exact: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """Return the rounding that storing entries adds to their ``error``."""
    if pages.entry_format == "plain":
        return storing(exact, pages.data.dtype)
    if pages.entry_format == "index_fp8":
        size = exact.abs() + error
        return _half_step(size, size.amax(-1, keepdim=True))
    if pages.entry_format == "index_mxfp4":
        groups = (exact.abs() + error).unflatten(-1, (-1, FP4_GROUP))
        scale = torch.exp2(torch.ceil(torch.log2(groups.amax(-1, keepdim=True) / 6)))
        # Half the distance of E2M1 values around each.
        binade = torch.exp2(torch.floor(torch.log2(groups / scale)).clamp(min=0))
        return (binade * scale * 0.25).flatten(-2)
    nope_dim = pages.layout.nope_dim
    size = (exact.abs() + error)[..., :nope_dim]
    groups = torch.nn.functional.pad(size, (0, -nope_dim % 64)).unflatten(-1, (-1, 64))
    step = _half_step(groups, groups.amax(-1, keepdim=True)).flatten(-2)[..., :nope_dim]
    return torch.cat((step, unit_roundoff(torch.bfloat16) * exact[..., nope_dim:].abs() * 1.01), -1)


def hyper_norm(problem: Problem, actual: Outputs, truth: Outputs) -> Verdict:
    """Judge like ``hyper_pre``; the norm of the collapsed row carries its error along.

    With c the collapsed row, e its error and r its root mean square, ``w c / r`` is off by
    ``|w| (e + |c| mean(|c| e) / r^2) / r`` to first order, and by the norm's own roundings.
    """
    *args, weight = problem.args
    kwargs = {name: v for name, v in problem.kwargs.items() if name not in ("global_scale",)}
    pre = dataclasses.replace(problem, function=ops.hc_pre, args=tuple(args), kwargs=kwargs)
    layer_input, post, comb = pre.widened().run("reference")
    error = budgets.pre_error(pre, layer_input, problem.args[0].dtype)
    size = layer_input.square().mean(-1, keepdim=True) + problem.kwargs["norm_eps"]
    carried = layer_input.abs() * (layer_input.abs() * error).mean(-1, keepdim=True) / size
    budget = widen(weight).abs() * (error + carried) * torch.rsqrt(size) * 1.01
    budget = budget + budgets.norm(problem, truth[0]) + storing(truth[0], actual[0].dtype)
    return combine(
        compare(actual[0], truth[0], budget, "the norm"),
        budgets.hyper_coefficients(pre, actual[1:], (post, comb)),
    )


def hyper_post_norm(problem: Problem, actual: Outputs, truth: Outputs) -> Verdict:
    """Streams as ``hc_post``; the rest as ``hyper_norm`` of the streams that were returned."""
    y, streams, post, comb, *rest = problem.args
    back = dataclasses.replace(
        problem, function=ops.hc_post, args=(y, streams, post, comb), kwargs={}
    )
    allowed = budgets.write_back(back, truth[0]) + storing(truth[0], actual[0].dtype)
    after = dataclasses.replace(problem, function=ops.hc_pre_norm, args=(actual[0], *rest))
    return combine(
        compare(actual[0], truth[0], allowed, "streams"),
        hyper_norm(after, actual[1:4], after.widened().run("reference")),
    )


def combined_post(problem: Problem, actual: Outputs, truth: Outputs) -> Verdict:
    """Check that streams have the bits of ``moe_combine`` and ``hc_post`` one after the other."""
    after = _behind_combine(problem, ops.hc_post, {})
    return same(actual[0], by_same_kernel(problem, ops.hc_post, *after.args), "streams")


def combined_post_norm(problem: Problem, actual: Outputs, truth: Outputs) -> Verdict:
    """Streams as ``combined_post``; the rest as ``hyper_post_norm``."""
    after = _behind_combine(problem, ops.hc_post_pre_norm, problem.kwargs)
    return combine(
        combined_post(problem, actual[:1], truth[:1]),
        hyper_post_norm(after, actual, after.widened().run("reference")),
    )


def _behind_combine(
    problem: Problem, function: Callable[..., Any], kwargs: dict[str, Any]
) -> Problem:
    """Return the problem that follows ``moe_combine``, whose result replaces the rows."""
    *summed, shared = problem.args[:5]
    y = by_same_kernel(problem, ops.moe_combine, *summed, shared=shared)
    rest = problem.args[5:] if kwargs else problem.args[5:8]
    return dataclasses.replace(problem, function=function, args=(y, *rest), kwargs=kwargs)


def hyper_norm_quantized(problem: Problem, actual: Outputs, truth: Outputs) -> Verdict:
    """Judge like ``hyper_norm``; the codes are those of the norm returned."""
    plain = _unquantized(problem, ops.hc_pre_norm)
    rest, truth = ((normed, *others[3:]) for normed, *others in (actual, truth))
    return combine(hyper_norm(plain, rest, truth), *_codes_of(problem, actual[0], actual[1:4]))


def hyper_post_norm_quantized(problem: Problem, actual: Outputs, truth: Outputs) -> Verdict:
    """Judge like ``hyper_post_norm``; the codes are those of the norm returned."""
    plain = _unquantized(problem, ops.hc_post_pre_norm)
    rest, truth = ((*part[:2], *part[5:]) for part in (actual, truth))
    return combine(hyper_post_norm(plain, rest, truth), *_codes_of(problem, actual[1], actual[2:5]))


def _unquantized(problem: Problem, function: Callable[..., Any]) -> Problem:
    names = ("norm_eps", "hc_eps", "iterations")
    kwargs = {name: problem.kwargs[name] for name in names}
    return dataclasses.replace(problem, function=function, kwargs=kwargs)


def _codes_of(problem: Problem, normed: torch.Tensor, actual: Outputs) -> Iterator[Verdict]:
    """Return whether codes, scales and global scale are those of ``normed``, bit for bit."""
    expected = ops.quantize(normed, "nvfp4", backend="reference", **_scaling(problem))
    assert expected.global_scale is not None
    parts = (expected.codes, expected.scales, expected.global_scale)
    return (same(a, w, n) for a, w, n in zip(actual, parts, QUANTIZED, strict=True))
