"""Measure from how many tokens on FP8 arithmetic is faster than the bfloat16 kernel, by shape.

Both multiply the same weight, which is exact in FP8 and lies as layers pack it. Dense GEMMs and the
second GEMM of routed experts have the same values in both forms: FP8 kernels take codes, as layers
give them, bfloat16 kernels bfloat16. The first GEMM of experts rounds no rows in bfloat16; it
includes SwiGLU and, in FP8, the rounding of its result. Routing is uniform.
``dsv4.cute.e4m3_costs`` has the estimates by which dispatch chooses.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch

from dsv4 import ops
from dsv4.bench import timing
from dsv4.bench.cases.gemm import Matrix, gemm_case, matrices
from dsv4.bench.cases.own import Shape
from dsv4.bench.checks import moe as moe_checks
from dsv4.bench.checks.judge import combine
from dsv4.bench.measure import Options, explained, verify
from dsv4.bench.problem import Draw, Problem, UsageError, Verdict
from dsv4.bench.report import number
from dsv4.bench.suites import moe_parts
from dsv4.bench.suites.crossover_results import Crossovers, Times
from dsv4.bench.suites.moe_parts import FP8, Layer
from dsv4.compilation import pool
from dsv4.compilation.jobs import CuteJob
from dsv4.config import ModelConfig
from dsv4.cute import e4m3_costs
from dsv4.cute.e4m3_costs import Estimate
from dsv4.cute.grouped_problem import Experts
from dsv4.cute.runtime import cubin_cache
from dsv4.cute.runtime.architectures import ARCHITECTURES, HOPPER
from dsv4.cute.sm90.e4m3_converted_plan import CONVERT, ConvertedE4m3Plan, GroupedConvertedE4m3Plan
from dsv4.cute.sm90.grouped_gemm_plans import launch_plans
from dsv4.cute.sm90.plans import GemmProblem, choose
from dsv4.ops.fp8_token import code_layout
from dsv4.quant.formats import FP8_BLOCK, NVFP4

TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
TOKENS_ON_CPU = (1, 8)
EXPERTS = 64  # a second number of experts on a GPU; the first is the model's
_MATRICES = ("q_b", "o_b", "gate_up", "down", "q_a+kv", "o_a", "indexer_q")
_COLUMNS = FP8_BLOCK.block[1]  # of FP8 kernels, whose number of columns is a multiple of it
_CALLS = 3  # of a graph, each with operands of its own
_FIRST = (False, True, True, True)  # kinds of grouped GEMMs, as of ``grouped_e4m3_plan``
_SECOND = (False, False, False, False)


@dataclass(frozen=True)
class Contest:
    """A GEMM of some tokens in both forms.

    Attributes:
        fp8: The call for each drawn input, with FP8 codes.
        bfloat16: Likewise, with the same values in bfloat16.
        check: Checks the results of the two forms on the first input.
    """

    fp8: list[Problem]
    bfloat16: list[Problem]
    check: Callable[[str], Verdict]


@dataclass(frozen=True)
class Subject:
    """A GEMM that is measured by tokens.

    Attributes:
        name: Preset and matrix.
        shape: Names and sizes.
        contest: Makes both forms for a number of tokens.
        estimate: The dispatcher's estimate.
        plans: Configurations of the kernels of both forms on Hopper.
    """

    name: str
    shape: dict[str, int]
    contest: Callable[[int], Contest]
    estimate: Callable[[int], Estimate]
    plans: Callable[[int], list[Any]]


@dataclass(frozen=True)
class Request:
    """What is measured.

    Attributes:
        presets: Names of models.
        experts: Numbers of routed experts; None: the model's own, and on a GPU ``EXPERTS``.
        tokens: Numbers of tokens, rising.
        patterns: Shell patterns over names of GEMMs.
        seconds: No measurement begins later.
        options: Device, timed runs, seed.
    """

    presets: Sequence[str]
    experts: Sequence[int] | None
    tokens: Sequence[int]
    patterns: Sequence[str]
    seconds: float
    options: Options


def run(request: Request, into: Crossovers) -> None:
    """Measure everything into ``into``, a GEMM at a time, and print each when it is done.

    Raises:
        UsageError: if a name is unknown, no GEMM has a name that was asked for, or numbers of
            tokens or experts are none.
    """
    begin = time.monotonic()
    chosen = subjects(request)
    _compile(chosen, request)
    for subject in chosen:
        if time.monotonic() - begin > request.seconds:
            into.left_out.append(subject.name)
            continue
        times = _measured(subject, request, begin)
        into.gemms.append(times)
        print(_line(times), flush=True)


def subjects(request: Request) -> list[Subject]:
    """Return the GEMMs that are measured; dense ones first. Weights are drawn when they are used.

    Raises:
        UsageError: as ``run``.
    """
    configs = {preset: moe_parts.config_of(preset) for preset in request.presets}
    every: list[Subject] = []
    for preset, config in configs.items():
        every += _dense(preset, config, request.options)
    last = _LastLayer(request.options)
    for preset, config in configs.items():
        for count in _expert_counts(request, config):
            every += _experts(preset, config, count, last)
    chosen = [s for s in every if any(fnmatchcase(s.name, p) for p in request.patterns)]
    if not chosen:
        names = ", ".join(subject.name for subject in every)
        raise UsageError(f"--cases matches none of {names}")
    return chosen


def _expert_counts(request: Request, config: ModelConfig) -> list[int]:
    own, top_k = config.n_routed_experts, config.num_experts_per_tok
    usual = [EXPERTS, own] if request.options.device.type == "cuda" else [own]
    counts = list(dict.fromkeys(request.experts or usual))
    for count in counts:
        if count < top_k:
            raise UsageError(f"--experts has {count}, a token has {top_k} experts: wanted as many")
    return counts


def _dense(preset: str, config: ModelConfig, options: Options) -> Iterator[Subject]:
    for name in _MATRICES:
        matrix = matrices(config)[name]
        rows, columns, groups, _ = matrix
        if columns % _COLUMNS or (groups > 1 and rows % _COLUMNS):
            continue
        yield Subject(
            f"{preset} {name}",
            {"N": rows, "K": columns, **({"G": groups} if groups > 1 else {})},
            partial(_dense_contest, matrix, options),
            partial(e4m3_costs.estimate, rows * groups, columns),
            partial(_dense_plans, matrix),
        )


def _dense_contest(matrix: Matrix, options: Options, tokens: int) -> Contest:
    case = gemm_case(tokens, matrix, "", FP8, NVFP4, coded=True)
    seeds = range(options.seed, options.seed + _calls(options))
    coded = [case.build(Draw(seed, options.device)) for seed in seeds]
    coded = [dataclasses.replace(problem, of_tokens=(0,)) for problem in coded]
    plain = [_in_bfloat16(problem) for problem in coded]

    def check(backend: str) -> Verdict:
        return combine(verify(coded[0], backend), verify(plain[0], "auto"))

    return Contest(coded, plain, check)


def _in_bfloat16(problem: Problem) -> Problem:
    """Return a GEMM of codes with their values, which bfloat16 has exactly."""
    codes, weight = problem.args
    x = ops.dequantize(codes, torch.bfloat16, backend="reference")
    return dataclasses.replace(problem, args=(x, weight))


def _dense_plans(matrix: Matrix, tokens: int) -> list[Any]:
    rows, columns, groups, _ = matrix
    fp8 = e4m3_costs.nvfp4_plan(rows * groups, columns, tokens, False, False)
    plain = choose(GemmProblem(rows * groups, columns, groups, False, False), tokens)
    conversion = [CONVERT] if isinstance(fp8, ConvertedE4m3Plan) else []
    return [fp8, *conversion, *([] if plain is None else [plain])]


def _experts(preset: str, config: ModelConfig, count: int, last: _LastLayer) -> Iterator[Subject]:
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    top_k = config.num_experts_per_tok
    of_layer = Shape(preset, {"E": count, "H": hidden, "I": inner, "k": top_k})
    for part, rows, columns, kind in (
        ("gate_up", 2 * inner, hidden, _FIRST),
        ("down", hidden, inner, _SECOND),
    ):
        sizes = (rows, columns, count)
        yield Subject(
            f"{preset} experts {part}",
            {"E": count, "N": rows, "K": columns, "k": top_k},
            partial(_experts_contest, last, of_layer, part),
            partial(_experts_estimate, sizes, top_k, kind),
            partial(_experts_plans, sizes, top_k, kind),
        )


def _experts_estimate(
    sizes: tuple[int, int, int], top_k: int, kind: tuple[bool, ...], tokens: int
) -> Estimate:
    quantized_out = kind[-1]
    return e4m3_costs.estimate_experts(*sizes, tokens * top_k, quantized_out=quantized_out)


def _experts_plans(
    sizes: tuple[int, int, int],
    top_k: int,
    kind: tuple[bool, bool, bool, bool],
    tokens: int,
) -> list[Any]:
    fp8 = e4m3_costs.experts_plan(*sizes, tokens * top_k, kind)
    _, swiglu, weighted, _ = kind
    plain = launch_plans(Experts(*sizes, False, False, swiglu, weighted), tokens * top_k)
    conversion = [CONVERT] if isinstance(fp8, GroupedConvertedE4m3Plan) else []
    return [fp8, *conversion, *(launch.plan for launch in plain)]


@dataclass
class _LastLayer:
    """The routed experts that were drawn last: GEMMs of the same sizes share them.

    Attributes:
        options: Device and seed.
        sizes: Their sizes; None before the first.
        layer: The layer of these sizes.
    """

    options: Options
    sizes: Shape | None = None
    layer: Layer | None = None

    def of(self, sizes: Shape) -> Layer:
        """Return the layer of some sizes."""
        if self.layer is None or sizes != self.sizes:
            self.layer = None  # its memory is free before the next one is drawn
            draw = Draw(self.options.seed, self.options.device)
            self.sizes, self.layer = sizes, moe_parts.draw_layer(sizes, draw, FP8)
        return self.layer


def _experts_contest(last: _LastLayer, sizes: Shape, part: str, tokens: int) -> Contest:
    layer, options = last.of(sizes), last.options
    draws = [Draw(options.seed + 1 + i, options.device) for i in range(_calls(options))]
    inputs = [
        moe_parts.draw_inputs(layer.config, "uniform", tokens, draw, layer.rows_layout)
        for draw in draws
    ]
    made = [(_first_gemms if part == "gate_up" else _second_gemms)(layer, own) for own in inputs]
    coded, plain = ([pair[i] for pair in made] for i in range(2))

    def check(backend: str) -> Verdict:
        return combine(
            moe_checks.verify_gemm(layer, inputs[0], part, coded[0], backend),
            moe_checks.verify_gemm(
                layer.in_bfloat16(),
                dataclasses.replace(inputs[0], codes=None),
                part,
                plain[0],
                "auto",
            ),
        )

    return Contest(coded, plain, check)


def _first_gemms(layer: Layer, inputs: moe_parts.Inputs) -> tuple[Problem, Problem]:
    limit = layer.config.swiglu_limit
    weighted: dict[str, Any] = {"row_weight": inputs.row_weight}
    coded = {**weighted, "result_layout": code_layout(layer.down)}
    operands = (layer.gate_up, inputs.offsets, limit)
    return (
        _unjudged(ops.grouped_gemm_swiglu_fp8, (inputs.codes, *operands), coded),
        _unjudged(ops.grouped_gemm_swiglu, (inputs.rows, *operands), weighted),
    )


def _second_gemms(layer: Layer, inputs: moe_parts.Inputs) -> tuple[Problem, Problem]:
    rows = inputs.rows[:, : layer.config.moe_intermediate_size].contiguous()
    codes = ops.quantize(rows, "fp8_token", layout=code_layout(layer.down), backend="reference")
    operands = (layer.down, inputs.offsets)
    values = ops.dequantize(codes, torch.bfloat16, backend="reference")
    return (
        _unjudged(ops.grouped_gemm, (codes, *operands), {"settled": True}),
        _unjudged(ops.grouped_gemm, (values, *operands), {"settled": True}),
    )


def _unjudged(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Problem:
    """Return a call that ``moe_checks`` judges."""
    return Problem(function, args, kwargs, lambda *_: Verdict(True), 0)


def _calls(options: Options) -> int:
    return _CALLS if options.device.type == "cuda" else 1


def _compile(chosen: Sequence[Subject], request: Request) -> None:
    """Compile kernels that are not kept yet, in parallel; one that fails fails again later."""
    device = request.options.device
    if device.type != "cuda":
        return
    if ARCHITECTURES.get(torch.cuda.get_device_capability(device)) != HOPPER:
        return
    plans = [p for subject in chosen for count in request.tokens for p in subject.plans(count)]
    jobs = [CuteJob(plan, HOPPER) for plan in dict.fromkeys(plans)]
    missing = [job for job in jobs if not cubin_cache.is_kept(HOPPER, job.key, job.file_name)]
    begin = time.monotonic()
    for finished in pool.run(missing, arch=HOPPER):
        if not finished.done.error:
            cubin_cache.keep(finished.job.file_name, finished.done.result.content)
    seconds = time.monotonic() - begin
    print(f"{len(jobs)} kernels, {len(missing)} compiled in {seconds:.1f} s", flush=True)


def _measured(subject: Subject, request: Request, begin: float) -> Times:
    """Measure one GEMM; what is wrong or unsupported has no time, and is said."""
    options = request.options
    backend = "fp8" if options.device.type == "cuda" else "reference"
    tokens: list[int] = []
    fp8: list[float | None] = []
    bfloat16: list[float | None] = []
    estimates, messages = [], []
    for count in request.tokens:
        if time.monotonic() - begin > request.seconds:
            messages.append(f"the time was over before {count} tokens")
            break
        contest = subject.contest(count)
        reason = explained(contest.fp8[0], backend)
        if reason.chosen is None:
            messages.append(f"FP8 arithmetic: {reason.reason}")
            break
        verdict = contest.check(backend)
        left = right = None
        if verdict.match:
            left, right = _us(contest.fp8, backend, options), _us(contest.bfloat16, "auto", options)
        else:
            messages.append(f"{count} tokens: {verdict.message}")
        tokens.append(count)
        fp8.append(left)
        bfloat16.append(right)
        estimates.append(subject.estimate(count))
    return Times(
        subject.name,
        subject.shape,
        tuple(tokens),
        tuple(fp8),
        tuple(bfloat16),
        tuple(estimate.fp8 for estimate in estimates),
        tuple(estimate.bfloat16 for estimate in estimates),
        "; ".join(messages),
    )


def _us(problems: Sequence[Problem], backend: str, options: Options) -> float:
    calls = [partial(problem.run, backend) for problem in problems]
    return timing.measure(calls, options.device, options.repeat).us


def _line(times: Times) -> str:
    """A GEMM's times as they are measured: tokens, FP8, bfloat16."""
    pairs = [
        f"{count}: {'-' if left is None else number(left)}, "
        f"{'-' if right is None else number(right)}"
        for count, left, right in zip(times.tokens, times.fp8, times.bfloat16, strict=True)
    ]
    sizes = " ".join(f"{name}={size}" for name, size in times.shape.items())
    said = f"; {times.message}" if times.message else ""
    return f"{times.name} {sizes}: us FP8, bf16 at tokens {'; '.join(pairs)}{said}"
