"""GEMMs of the shared and of routed experts for ``run gemm --check``.

The cases of the bench with fewer experts, at several token counts with routings drawn uniformly,
with all rows on the last expert, and with rows that hold a NaN and an infinity; NVFP4 results with
swizzled scales, too. Each result has its operator's judge; where that asks for equal bits an error
is 0 or infinite.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dsv4 import dispatch
from dsv4.bench import timing
from dsv4.bench.cases import MAKERS, PRESETS
from dsv4.bench.cases.gemm import ACTIVATION_CASES
from dsv4.bench.problem import Case, Draw, Problem
from dsv4.bench.validate.kernel import REFERENCE, Kernel, Refused, Request
from dsv4.config import ModelConfig
from dsv4.quant import fragments
from dsv4.quant.formats import FRAGMENTS, LINEAR, SWIZZLED, SWIZZLED_EXPERTS, QuantizedTensor

# Operator and name of its case, which has another one with NVFP4 activations.
CASES = {
    "gate_up swiglu": ("gemm_swiglu", "gate_up"),
    "experts gate_up": ("grouped_gemm", "gate_up"),
    "experts down": ("grouped_gemm", "down"),
    "experts gate_up swiglu": ("grouped_gemm_swiglu", "gate_up"),
    "experts gate_up swiglu quantize": ("grouped_gemm_swiglu_quantize", "gate_up"),
}
_EXPERTS = 16  # whose weights are small enough to be widened for every point
_ODD_TOKENS = 17


@dataclass(frozen=True)
class _Point:
    """A problem with linear scales, what of it differs from the usual, and the float64 truth."""

    what: str
    problem: Problem
    truth: tuple[torch.Tensor, ...]


def validated(preset: str, request: Request, refused: Refused) -> Iterator[Kernel]:
    """Validate each implementation of each requested GEMM; add refusals to ``refused``."""
    config = PRESETS[preset]()
    config = dataclasses.replace(config, n_routed_experts=min(_EXPERTS, config.n_routed_experts))
    for name, (op, case_name) in CASES.items():
        if not request.includes(name):
            continue
        for suffix, activation in ACTIVATION_CASES:
            if activation == "fp8" and op.endswith("_quantize"):
                continue  # whose result is NVFP4
            projection = _Projection(f"{preset} {name}", op, case_name + suffix, activation, config)
            for kernel in projection.kernels(request, refused):
                if not kernel.failed:
                    kernel.us = projection.times(kernel, request)
                yield kernel


@dataclass(frozen=True)
class _Projection:
    """One operator and projection."""

    name: str
    op: str
    case_name: str
    activation: str
    config: ModelConfig

    def case(self, tokens: int) -> Case:
        """Return the case of that many tokens."""
        candidates = MAKERS[self.op](self.config, tokens)
        return next(case for case in candidates if case.name == self.case_name)

    def problem(self, tokens: int, request: Request) -> Problem:
        """Return the problem; its weight has linear scales and does not depend on the tokens."""
        built = self.case(tokens).build(Draw(request.seed, request.device))
        return _with(built, 1, built.args[1].with_layout(LINEAR))

    def kernels(self, request: Request, refused: Refused) -> list[Kernel]:
        """Validate every implementation at every point; the truth of each is computed once."""
        by_key: dict[tuple[str, str], Kernel] = {}
        shape = self.case(1).shape
        for point in self._points(request):
            weight = point.problem.args[1]
            for layout in _layouts(weight):
                problem = _with(point.problem, 1, weight.with_layout(layout))
                call = (problem.function, problem.args, problem.kwargs)
                for backend in request.available(*call, layout, refused):
                    key = (layout, backend)
                    if key not in by_key:
                        by_key[key] = Kernel(self.name, shape, layout, self.activation, backend)
                    _compare(by_key[key], point, problem)
        return [by_key[key] for key in sorted(by_key)]

    def _points(self, request: Request) -> Iterator[_Point]:
        for count in request.tokens:
            yield _point(f"{count} tokens", self.problem(count, request))
        usual = self.problem(_ODD_TOKENS, request)
        if self.op != "gemm_swiglu":
            offsets = torch.zeros_like(usual.args[2])
            offsets[-1] = usual.args[0].shape[0]
            yield _point("one expert", _with(usual, 2, offsets))
        x = usual.args[0].clone()
        x[3, 5], x[11, -1] = float("nan"), float("-inf")
        yield _point("a NaN and an infinity", _with(usual, 0, x))
        if self.op.endswith("_quantize") and usual.args[1].rows % 128 == 0:
            kwargs = {**usual.kwargs, "scale_layout": SWIZZLED_EXPERTS}
            yield _point("swizzled results", dataclasses.replace(usual, kwargs=kwargs))

    def times(self, kernel: Kernel, request: Request) -> dict[int, float]:
        """Return microseconds by tokens; on a GPU with the L2 cleared before."""
        measured = {}
        for count in request.tokens:
            problem = self.problem(count, request)
            problem = _with(problem, 1, problem.args[1].with_layout(kernel.layout))
            call = dispatch.arguments(problem.function, *problem.args, **problem.kwargs)
            row = next(r for r in dispatch.implementations(self.op) if r.name == kernel.backend)
            if row.unsupported_reason(call) is None:

                def run(problem: Problem = problem) -> object:
                    return problem.run(kernel.backend)

                measured[count] = timing.measure([run], request.device, request.repeat).us
        return measured


def _with(problem: Problem, index: int, value: object) -> Problem:
    args = (*problem.args[:index], value, *problem.args[index + 1 :])
    return dataclasses.replace(problem, args=args)


def _point(what: str, problem: Problem) -> _Point:
    return _Point(what, problem, problem.widened().run(REFERENCE))


def _layouts(weight: QuantizedTensor) -> list[str]:
    """Return the layouts that the weight can have."""
    packed = [FRAGMENTS] if fragments.fits(weight.rows, weight.columns) else []
    return [LINEAR, SWIZZLED, *packed]


def _compare(kernel: Kernel, point: _Point, problem: Problem) -> None:
    """Codes, or results in bfloat16 and in float32.

    Codes are held to those of the same GEMM quantised afterwards, so by the same layout.
    """
    judged = dataclasses.replace(problem, backend=kernel.backend)
    quantized = problem.function.__name__.endswith("_quantize")
    for dtype in (torch.uint8,) if quantized else (torch.bfloat16, torch.float32):
        kwargs = problem.kwargs if quantized else {**problem.kwargs, "out_dtype": dtype}
        try:
            actual = dataclasses.replace(problem, kwargs=kwargs).run(kernel.backend)
            verdict = judged.judge(judged, actual, point.truth)
            kernel.add(point.what, dtype, verdict.ratio, verdict.message)
        except Exception as error:  # whatever it is, the others are validated and it is reported
            words = str(error).splitlines() or [""]
            kernel.add(point.what, dtype, float("inf"), f"{type(error).__name__}: {words[0]}")
