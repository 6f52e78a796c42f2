"""Problem sizes of the routers and the routed experts; see ``dsv4.bench.cases``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from dsv4 import ops
from dsv4.bench.cases.gemm import ACTIVATION_CASES
from dsv4.bench.checks import budgets, fused_judges
from dsv4.bench.checks.judge import bitwise, within
from dsv4.bench.problem import Case, Draw, Problem, nbytes
from dsv4.config import ModelConfig
from dsv4.cute.runtime.architectures import ARCHITECTURES, HOPPER
from dsv4.cute.supports import packed_layout_of
from dsv4.ops.fp8_token import code_layout
from dsv4.quant import fragments
from dsv4.quant.exact_fp8 import with_row_exponent
from dsv4.quant.formats import (
    FRAGMENTS,
    LINEAR,
    NVFP4,
    SWIZZLED,
    SWIZZLED_EXPERTS,
    Format,
    QuantizedTensor,
    swizzle_expert_scales,
)


def route_topk(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """The learned router."""
    experts, k = c.n_routed_experts, c.num_experts_per_tok

    def build(draw: Draw) -> Problem:
        x = draw.normal(tokens, c.hidden_size)
        weight = draw.normal(experts, c.hidden_size, scale=c.hidden_size**-0.5)
        bias = draw.normal(experts, dtype=torch.float32, scale=0.1)
        kwargs = {"top_k": k, "scaling_factor": c.routed_scaling_factor}
        return _router(ops.route_topk, (x, weight, bias), kwargs, nbytes(x, weight, bias))

    sizes = {"E": experts, "H": c.hidden_size, "k": k}
    yield Case("route_topk", "", sizes, tokens, build)


def route_hash(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """The table of the first layers."""
    experts, k = c.n_routed_experts, c.num_experts_per_tok

    def build(draw: Draw) -> Problem:
        x = draw.normal(tokens, c.hidden_size)
        weight = draw.normal(experts, c.hidden_size, scale=c.hidden_size**-0.5)
        table = draw.distinct(c.vocab_size, k, experts)
        ids = draw.integers(0, c.vocab_size, (tokens,))
        kwargs = {"scaling_factor": c.routed_scaling_factor}
        reads = nbytes(x, weight, ids) + tokens * k * table.element_size()
        return _router(ops.route_hash, (x, weight, table, ids), kwargs, reads)

    sizes = {"E": experts, "H": c.hidden_size, "k": k, "V": c.vocab_size}
    yield Case("route_hash", "", sizes, tokens, build)


def _router(function: Any, args: tuple, kwargs: dict[str, Any], reads: int) -> Problem:
    x, weight = args[:2]
    kwargs = {**kwargs, "logits_dtype": torch.float32}
    flops = 2 * x.shape[0] * weight.numel()
    return Problem(function, args, kwargs, budgets.routing, reads, flops)


def _sorted(c: ModelConfig, tokens: int, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and offsets of tokens that each chose distinct experts at random."""
    ids = draw.distinct(tokens, c.num_experts_per_tok, c.n_routed_experts)
    _, offsets, rows = ops.moe_permute(ids, c.n_routed_experts, backend="reference")
    return rows, offsets


def moe_permute(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Sort by expert."""
    experts, k = c.n_routed_experts, c.num_experts_per_tok

    def build(draw: Draw) -> Problem:
        ids = draw.distinct(tokens, k, experts)
        judge = bitwise("order", "offsets", "rows")
        return Problem(ops.moe_permute, (ids, experts), {}, judge, nbytes(ids))

    yield Case("moe_permute", "", {"E": experts, "k": k}, tokens, build)


def moe_gather(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Rows into sorted order."""
    k = c.num_experts_per_tok

    def build(draw: Draw) -> Problem:
        x, (rows, _) = draw.normal(tokens, c.hidden_size), _sorted(c, tokens, draw)
        return Problem(ops.moe_gather, (x, rows), {}, bitwise("gathered"), nbytes(x, rows))

    yield Case("moe_gather", "", {"H": c.hidden_size, "k": k}, tokens, build)


def moe_sort(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Sort by expert, and rows and weights into that order."""
    experts, k = c.n_routed_experts, c.num_experts_per_tok

    def build(draw: Draw) -> Problem:
        x, ids = draw.normal(tokens, c.hidden_size), draw.distinct(tokens, k, experts)
        weights = draw.normal(tokens, k, dtype=torch.float32).softmax(-1)
        judge = bitwise("sorted", "weights", "offsets", "rows")
        args = (x, ids, weights)
        return Problem(ops.moe_sort, (*args, experts), {}, judge, nbytes(*args))

    yield Case("moe_sort", "", {"E": experts, "H": c.hidden_size, "k": k}, tokens, build)


def moe_combine(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Weighted sum of each token's rows, and the shared expert."""
    k = c.num_experts_per_tok

    def build(draw: Draw) -> Problem:
        rows, offsets = _sorted(c, tokens, draw)
        y = draw.normal(tokens * k, c.hidden_size)
        weights = draw.normal(tokens, k, dtype=torch.float32).softmax(-1)
        shared = draw.normal(tokens, c.hidden_size)
        args = (y, rows, offsets, weights)
        judge = within(budgets.combination)
        reads = nbytes(*args, shared)
        return Problem(ops.moe_combine, args, {"shared": shared}, judge, reads)

    yield Case("moe_combine", "", {"H": c.hidden_size, "k": k}, tokens, build)


def grouped_gemm(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Both projections of the routed experts, gate and up with a global scale each."""
    inner, hidden = c.moe_intermediate_size, c.hidden_size
    for name, rows, columns, segments in (
        ("gate_up", 2 * inner, hidden, (inner, inner)),
        ("down", hidden, inner, ()),
    ):
        for suffix, activation in ACTIVATION_CASES:
            yield experts_case(c, tokens, name + suffix, (rows, columns), segments, activation)


def experts_case(
    c: ModelConfig,
    tokens: int,
    name: str,
    shape: tuple[int, int],
    segments: tuple[int, ...],
    activation: str,
    format: Format = NVFP4,
) -> Case:
    """A case of ``grouped_gemm``."""
    experts, k = c.n_routed_experts, c.num_experts_per_tok
    rows, columns = shape

    def build(draw: Draw) -> Problem:
        _, offsets = _sorted(c, tokens, draw)
        x = draw.normal(tokens * k, columns)
        weight = _stack(draw, (experts, rows, columns), activation, segments, format)
        live = int((offsets.diff() > 0).sum())
        return Problem(
            ops.grouped_gemm,
            (x, weight, offsets),
            {"activation": activation},
            within(budgets.gemm),
            nbytes(x, offsets) + live * weight.nbytes // experts,
            2 * tokens * k * rows * columns,
        )

    sizes = {"E": experts, "N": rows, "K": columns, "k": k}
    return Case("grouped_gemm", name, sizes, tokens, build, activation != "fp8")


def grouped_gemm_swiglu(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """The routed experts' gate and up projections, interleaved, and their SwiGLU."""
    for name, activation in ACTIVATION_CASES:
        yield experts_swiglu_case(c, tokens, f"gate_up{name}", activation, NVFP4)


def experts_swiglu_case(
    c: ModelConfig, tokens: int, name: str, activation: str, format: Format
) -> Case:
    """A case of ``grouped_gemm_swiglu``."""
    experts, k = c.n_routed_experts, c.num_experts_per_tok
    inner, hidden = c.moe_intermediate_size, c.hidden_size

    def build(draw: Draw) -> Problem:
        _, offsets = _sorted(c, tokens, draw)
        x = draw.normal(tokens * k, hidden)
        weight = _stack(draw, (experts, 2 * inner, hidden), activation, format=format)
        live = int((offsets.diff() > 0).sum())
        return Problem(
            ops.grouped_gemm_swiglu,
            (x, weight, offsets, c.swiglu_limit),
            {"activation": activation},
            fused_judges.grouped_gemm_swiglu,
            nbytes(x, offsets) + live * weight.nbytes // experts,
            4 * tokens * k * inner * hidden,
        )

    sizes = {"E": experts, "N": 2 * inner, "K": hidden, "k": k}
    return Case("grouped_gemm_swiglu", name, sizes, tokens, build, activation != "fp8")


def grouped_gemm_swiglu_fp8(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """The same with FP8 rows, of weights that are exact in FP8, and an FP8 result."""
    experts, k = c.n_routed_experts, c.num_experts_per_tok
    inner, hidden = c.moe_intermediate_size, c.hidden_size

    def parts(problem: Problem) -> QuantizedTensor:
        result = fused_judges.by_same_kernel(problem, ops.grouped_gemm_swiglu, *problem.args)
        layout = problem.kwargs["result_layout"]
        return ops.quantize(result, "fp8_token", layout=layout, backend="reference")

    def build(draw: Draw) -> Problem:
        _, offsets = _sorted(c, tokens, draw)
        weight = _stack(draw, (experts, 2 * inner, hidden), "fp8")
        x = ops.quantize(draw.normal(tokens * k, hidden), "fp8_token", layout=code_layout(weight))
        live = int((offsets.diff() > 0).sum())
        return Problem(
            ops.grouped_gemm_swiglu_fp8,
            (x, weight, offsets, c.swiglu_limit),
            {"result_layout": FRAGMENTS if inner % 128 == 0 else LINEAR},
            fused_judges.as_parts(parts, "codes", "scales"),
            nbytes(x, offsets) + live * weight.nbytes // experts,
            4 * tokens * k * inner * hidden,
        )

    sizes = {"E": experts, "N": 2 * inner, "K": hidden, "k": k}
    yield Case("grouped_gemm_swiglu_fp8", "gate_up w4a8 (mxfp4 cast)", sizes, tokens, build)


def grouped_gemm_swiglu_quantize(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Cases of ``grouped_gemm_swiglu`` whose result is quantised with static scales."""
    experts, k = c.n_routed_experts, c.num_experts_per_tok
    inner, hidden = c.moe_intermediate_size, c.hidden_size

    def parts(problem: Problem) -> QuantizedTensor:
        activation = problem.kwargs["activation"]
        result = fused_judges.by_same_kernel(
            problem, ops.grouped_gemm_swiglu, *problem.args, activation=activation
        )
        of_rows = torch.ones(result.shape[0], device=result.device)
        for expert, (start, end) in enumerate(pairwise(problem.args[2].tolist())):
            of_rows[start:end] = problem.kwargs["result_scale"][expert]
        quantized = ops.quantize(
            result, "nvfp4", scaling="static", global_scale=of_rows, backend="reference"
        )
        if problem.kwargs.get("scale_layout") == SWIZZLED_EXPERTS:
            scales = swizzle_expert_scales(quantized.scales, problem.args[2])
            quantized = replace(quantized, scales=scales, layout=SWIZZLED_EXPERTS)
        return quantized

    def build(draw: Draw, activation: str) -> Problem:
        _, offsets = _sorted(c, tokens, draw)
        x = draw.normal(tokens * k, hidden)
        weight = _stack(draw, (experts, 2 * inner, hidden), activation)
        scale = 0.001 * (1 + draw.normal(experts, dtype=torch.float32).abs())
        live = int((offsets.diff() > 0).sum())
        return Problem(
            ops.grouped_gemm_swiglu_quantize,
            (x, weight, offsets, c.swiglu_limit),
            {"result_scale": scale, "activation": activation},
            fused_judges.as_parts(parts, *fused_judges.QUANTIZED),
            nbytes(x, offsets, scale) + live * weight.nbytes // experts,
            4 * tokens * k * inner * hidden,
        )

    for name, activation in (("gate_up", "bf16"), ("gate_up w4a4", "nvfp4")):
        sizes = {"E": experts, "N": 2 * inner, "K": hidden, "k": k}
        made = functools.partial(build, activation=activation)
        yield Case("grouped_gemm_swiglu_quantize", name, sizes, tokens, made)


def _stack(
    draw: Draw,
    shape: tuple[int, int, int],
    activation: str,
    segments: tuple[int, ...] = (),
    format: Format = NVFP4,
) -> QuantizedTensor:
    """Packed NVFP4 weights of experts; for FP8 activations they are exact in FP8."""
    if format != NVFP4:
        return draw.quantized(*shape, format=format)
    cast = activation == "fp8"
    weight = _packed(draw.quantized(*shape, segments=segments, mxfp4_cast=cast), activation)
    return with_row_exponent(weight)[0] if cast and weight.layout == FRAGMENTS else weight


def _packed(weight: QuantizedTensor, activation: str = "bf16") -> QuantizedTensor:
    """Pack a weight as layers do on its GPU, where it is a whole number of tiles."""
    layout = packed_layout_of(_architecture(weight.device), activation)
    if layout == SWIZZLED:
        fits = weight.rows % 128 == weight.columns % 256 == 0
    else:
        fits = fragments.fits(weight.rows, weight.columns)
    return weight.with_layout(layout) if fits else weight


def _architecture(device: torch.device) -> str:
    if device.type != "cuda":
        return HOPPER
    return ARCHITECTURES.get(torch.cuda.get_device_capability(device), HOPPER)
