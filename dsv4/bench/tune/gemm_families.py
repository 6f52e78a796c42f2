"""Families of dense GEMMs whose plans are measured."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from dsv4.bench.cases.gemm import Matrix, gemm_case, matrices
from dsv4.bench.problem import Case, Problem
from dsv4.bench.tune.work import Baseline, Candidate, Work
from dsv4.config import ModelConfig
from dsv4.cute import e4m3_costs
from dsv4.cute.sm90 import (
    e4m3_times,
    gemm_fp8_small_m_plan,
    gemm_fp8_wgmma_plan,
    gemm_small_m_plan,
    gemm_wgmma_plan,
)
from dsv4.cute.sm90.costs import Costs, E4m3Costs, TileTimes
from dsv4.cute.sm90.e4m3_converted_plan import CONVERT
from dsv4.cute.sm90.gemm_small_m_plan import SmallMPlan
from dsv4.cute.sm90.gemm_wgmma_plan import WgmmaPlan
from dsv4.cute.sm90.plans import GemmProblem, choose, counted_as
from dsv4.cute.sm90.tuned import tuned
from dsv4.cute.sm90.tuned_records import (
    Configuration,
    E4m3Configuration,
    E4m3Key,
    Fp8WgmmaKey,
    SmallMConfiguration,
    SmallMFp8Key,
    SmallMKey,
    TunedData,
    WgmmaKey,
)
from dsv4.ops.gemm import GemmArgs
from dsv4.quant.exact_fp8 import MOST_CONVERTED
from dsv4.quant.formats import FP8_BLOCK, FP8_TOKEN, FRAGMENTS, LINEAR, NVFP4, Format

# Projections whose GEMM takes part of a step's time, the longest first; others are smaller.
_MATRICES = ("q_b", "o_b", "o_a", "gate_up", "down", "q_a+kv", "indexer_q")
_FEW_TOKENS, _MANY_TOKENS = (1, 16), (32, 128, 1024, 64, 4096, 256, 512)
_FP8_FEW_TOKENS = (8, 16, 32)
_FP8_TOKENS, _E4M3_TOKENS = (1, 16, 64, 1024, 256), (1024, 4096, 256)
_BEST = 8  # candidates with the least estimates that are measured
_OTHERS = 4  # candidates spread over the other estimates, for the fit
_WARPS = (4, 6, 8, 12, 16)
_NEAR = 2  # numbers of warps that are tried, near the one that fills the SMs once
_STAGES, _RINGS = (7, 4, 6, 5, 3, 2, 1), (8, 16, 4)

C = TypeVar("C")


def _sizes(
    configs: Mapping[str, ModelConfig], tokens: Sequence[int]
) -> Iterator[tuple[str, Matrix, int]]:
    """Return names, matrices and tokens, each size once; all matrices of the first tokens first."""
    named: dict[tuple[int, ...], tuple[str, Matrix]] = {}
    for name in _MATRICES:
        for preset, config in configs.items():
            matrix = matrices(config)[name]
            named.setdefault(matrix[:3], (f"{preset} {name}", matrix))
    for count in tokens:
        for name, matrix in named.values():
            yield f"{name}, {count} token{'s' * (count != 1)}", matrix, count


def _problem(matrix: Matrix) -> GemmProblem:
    rows, columns, groups, _ = matrix
    return GemmProblem(rows * groups, columns, groups, False, False)


def _case(matrix: Matrix, tokens: int, activation: str, format: Format) -> Case:
    return gemm_case(tokens, matrix, "tune", activation, format)


def spread(ranked: Sequence[C]) -> tuple[C, ...]:
    """Return the best candidates of a ranking and a sample of the others."""
    rest = ranked[_BEST:]
    step = max(1, len(rest) // _OTHERS)
    return (*ranked[:_BEST], *rest[step - 1 :: step][:_OTHERS])


def _first(first: Candidate, others: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the distinct candidates, the plan of the rule first."""
    return tuple(dict.fromkeys((first, *others)))


class _Gemm:
    """Base of the families of dense GEMMs.

    Attributes:
        op: The operator.
        scaled: See ``Family``.
    """

    op = "gemm"
    scaled = True

    def call(self, candidate: Candidate, problem: Problem) -> Callable[[], Any]:
        """Return the call that is timed."""
        return functools.partial(problem.fresh().run, self.backend(candidate))

    def backend(self, candidate: Candidate) -> str:
        """Name of the implementation."""
        return "cute"

    def estimate(self, costs: Costs, data: TunedData, work: Work, candidate: Any) -> float:
        """Return the cost of a candidate; see ``Family``."""
        raise NotImplementedError

    def _ranked(self, work: Work, rule: Candidate, every: Sequence[Candidate]) -> Work:
        """Return the work with a selection of candidates by estimated time, the rule's first."""
        ranked = sorted(every, key=lambda c: self.estimate(tuned().costs, tuned(), work, c))
        return dataclasses.replace(work, candidates=_first(rule, spread(ranked)))


class SmallM(_Gemm):
    """GEMM of few tokens, NVFP4 weights: no cost model, the fastest of a list of plans.

    Attributes:
        name: As in data files.
    """

    name = "gemm_small_m"

    def works(self, configs: Mapping[str, ModelConfig]) -> Iterator[Work]:
        """Problems for which dispatch takes the small-M kernel."""
        for name, matrix, tokens in _sizes(configs, _FEW_TOKENS):
            problem = _problem(matrix)
            plan = choose(problem, tokens)
            if isinstance(plan, SmallMPlan):
                tiles = problem.rows // 16
                key = SmallMKey(plan.token_tiles, tiles, tiles // problem.groups, problem.columns)
                rule = gemm_small_m_plan.configuration_of(plan)
                case = _case(matrix, tokens, "bf16", NVFP4)
                yield Work(self.name, name, case, key, _first(rule, _small_m_candidates(key)))

    def chosen(self, work: Work) -> Configuration | None:
        """Return the plan that dispatch takes."""
        assert isinstance(work.key, SmallMKey)
        groups = work.key.row_tiles // work.key.group_tiles
        problem = GemmProblem(16 * work.key.row_tiles, work.key.columns, groups, False, False)
        plan = choose(problem, 1 if work.key.token_tiles == 1 else 16)
        return gemm_small_m_plan.configuration_of(plan) if isinstance(plan, SmallMPlan) else None

    def plans(self, work: Work, candidate: Any) -> list[Any]:
        """Return the kernel's configuration."""
        assert isinstance(work.key, SmallMKey)
        kind = (work.key.token_tiles, False, False)
        return [gemm_small_m_plan.plan_of(candidate, work.key.columns, kind)]

    def estimate(self, costs: Costs, data: TunedData, work: Work, candidate: Candidate) -> float:
        """Return 0: there is no model."""
        return 0.0


def _small_m_candidates(key: SmallMKey) -> list[SmallMConfiguration]:
    """Return plans around those that fill the GPU's SMs once, by both kernels."""
    plans = []
    for ctas in (1, 2, 4, 8):
        filling = math.ceil(key.row_tiles * ctas / tuned().sms)
        near = sorted((abs(warps - filling), warps) for warps in {*_WARPS, filling})
        for _, warps in near[:_NEAR]:
            for rounds, ring in ((1, False), (2, False), (1, True)):
                stages = _RINGS if ring else _STAGES
                able = [SmallMConfiguration(ctas, warps, s, rounds, ring) for s in stages]
                fitting = [c for c in able if gemm_small_m_plan.fits(key, c)]
                plans += fitting[:1] if rounds == 2 else fitting[:2]
    return plans


class Wgmma(_Gemm):
    """GEMM of many tokens, NVFP4 weights.

    Attributes:
        name: As in data files.
    """

    name = "gemm_wgmma"

    def works(self, configs: Mapping[str, ModelConfig]) -> Iterator[Work]:
        """Problems for which dispatch takes the large-M kernel."""
        for name, matrix, tokens in _sizes(configs, _MANY_TOKENS):
            problem = _problem(matrix)
            plan = choose(problem, tokens)
            if not isinstance(plan, WgmmaPlan):
                continue
            key = WgmmaKey(problem.rows, problem.groups, problem.columns, tokens)
            case = _case(matrix, tokens, "bf16", NVFP4)
            work = Work(self.name, name, case, key, ())
            sizes = (problem.rows, problem.rows // problem.groups, problem.columns, tokens)
            able = gemm_wgmma_plan.candidates(*sizes, False, False)
            every = [gemm_wgmma_plan.configuration_of(plan) for plan in able]
            yield self._ranked(work, gemm_wgmma_plan.configuration_of(plan), every)

    def chosen(self, work: Work) -> Configuration | None:
        """Return the plan that dispatch takes."""
        assert isinstance(work.key, WgmmaKey)
        problem = GemmProblem(work.key.rows, work.key.columns, work.key.groups, False, False)
        plan = choose(problem, work.key.tokens)
        return gemm_wgmma_plan.configuration_of(plan) if isinstance(plan, WgmmaPlan) else None

    def plans(self, work: Work, candidate: Any) -> list[Any]:
        """Return the kernel's configuration."""
        return [gemm_wgmma_plan.plan_of(candidate)]

    def estimate(self, costs: Costs, data: TunedData, work: Work, candidate: Any) -> float:
        """Return estimated cycles."""
        assert isinstance(work.key, WgmmaKey)
        sizes = (work.key.rows, work.key.columns, work.key.tokens)
        plan = gemm_wgmma_plan.plan_of(candidate)
        return gemm_wgmma_plan.estimated_cycles(plan, *sizes, costs.gemm_wgmma, data)


class Fp8Wgmma(_Gemm):
    """GEMM of FP8 weights in bfloat16; their scales are E8M0, as of published models.

    Attributes:
        name: As in data files.
    """

    name = "gemm_fp8_wgmma"

    def works(self, configs: Mapping[str, ModelConfig]) -> Iterator[Work]:
        """All projections whose columns are whole blocks."""
        for name, matrix, tokens in _sizes(configs, _FP8_TOKENS):
            problem = _problem(matrix)
            plan = gemm_fp8_wgmma_plan.fp8_plan(problem, tokens, True)
            if plan is None:
                continue
            key = Fp8WgmmaKey(
                problem.rows, problem.groups, problem.columns, counted_as(tokens), True
            )
            work = Work(self.name, name, _case(matrix, tokens, "bf16", FP8_BLOCK), key, ())
            able = gemm_fp8_wgmma_plan.candidates(problem, key.tokens, True)
            every = [gemm_fp8_wgmma_plan.configuration_of(plan) for plan in able]
            yield self._ranked(work, gemm_fp8_wgmma_plan.configuration_of(plan), every)

    def chosen(self, work: Work) -> Configuration | None:
        """Return the plan that dispatch takes."""
        assert isinstance(work.key, Fp8WgmmaKey)
        problem = GemmProblem(work.key.rows, work.key.columns, work.key.groups, False, False)
        plan = gemm_fp8_wgmma_plan.fp8_plan(problem, work.key.tokens, True)
        return None if plan is None else gemm_fp8_wgmma_plan.configuration_of(plan)

    def plans(self, work: Work, candidate: Any) -> list[Any]:
        """Return the kernel's configuration."""
        return [gemm_fp8_wgmma_plan.plan_of(candidate, True)]

    def estimate(self, costs: Costs, data: TunedData, work: Work, candidate: Any) -> float:
        """Return estimated cycles."""
        assert isinstance(work.key, Fp8WgmmaKey)
        problem = GemmProblem(work.key.rows, work.key.columns, work.key.groups, False, False)
        plan = gemm_fp8_wgmma_plan.plan_of(candidate, True)
        fitted = costs.gemm_fp8_wgmma
        return gemm_fp8_wgmma_plan.estimated_cycles(plan, problem, work.key.tokens, fitted, data)


class SmallMFp8(_Gemm):
    """GEMM of few tokens with FP8 weights; their scales are E8M0, as of published models.

    Attributes:
        name: As in data files.
    """

    name = "gemm_fp8_small_m"

    def works(self, configs: Mapping[str, ModelConfig]) -> Iterator[Work]:
        """All projections whose columns are whole blocks."""
        for name, matrix, tokens in _sizes(configs, _FP8_FEW_TOKENS):
            problem = _problem(matrix)
            plan = gemm_fp8_small_m_plan.fp8_small_m_plan(problem, tokens, True)
            if plan is None:
                continue
            key = SmallMFp8Key(problem.rows, problem.groups, problem.columns, plan.token_tiles)
            work = Work(self.name, name, _case(matrix, tokens, "bf16", FP8_BLOCK), key, ())
            able = gemm_fp8_small_m_plan.candidates(problem, tokens, True)
            every = [gemm_fp8_small_m_plan.configuration_of(plan) for plan in able]
            yield self._ranked(work, gemm_fp8_small_m_plan.configuration_of(plan), every)

    def chosen(self, work: Work) -> Configuration | None:
        """Return the plan that dispatch takes."""
        problem, tokens = _small_m_fp8(work)
        plan = gemm_fp8_small_m_plan.fp8_small_m_plan(problem, tokens, True)
        return None if plan is None else gemm_fp8_small_m_plan.configuration_of(plan)

    def backend(self, candidate: Candidate) -> str:
        """Name of the implementation."""
        return "small_m"

    def plans(self, work: Work, candidate: Any) -> list[Any]:
        """Return the kernel's configuration."""
        return [gemm_fp8_small_m_plan.plan_of(candidate, *_small_m_fp8(work), True)]

    def estimate(self, costs: Costs, data: TunedData, work: Work, candidate: Any) -> float:
        """Return estimated microseconds."""
        problem, tokens = _small_m_fp8(work)
        plan = gemm_fp8_small_m_plan.plan_of(candidate, problem, tokens, True)
        return gemm_fp8_small_m_plan.estimated_us(
            plan, problem, costs.gemm_fp8_small_m, data.clusters
        )


def _small_m_fp8(work: Work) -> tuple[GemmProblem, int]:
    """Return the GEMM of a work, and the most tokens of its key."""
    assert isinstance(work.key, SmallMFp8Key)
    problem = GemmProblem(work.key.rows, work.key.columns, work.key.groups, False, False)
    return problem, 8 * work.key.token_tiles


class E4m3(_Gemm):
    """GEMM with FP8 arithmetic, timed on activations that are quantised already.

    The bfloat16 kernel is timed, too: dispatch chooses between both by their estimates.

    Attributes:
        name: As in data files.
    """

    name = "gemm_e4m3"
    scaled = False

    def works(self, configs: Mapping[str, ModelConfig]) -> Iterator[Work]:
        """Projections with NVFP4 weights that are exact in FP8, and with FP8 weights."""
        for name, matrix, tokens in _sizes(configs, _E4M3_TOKENS):
            problem = _problem(matrix)
            if problem.columns % 128 or (problem.groups > 1 and matrix[0] % 128):
                continue
            for format in (NVFP4, FP8_BLOCK):
                is_block = format == FP8_BLOCK
                key = E4m3Key(problem.rows, problem.columns, tokens, is_block)
                case = _case(matrix, tokens, "fp8", format)
                named = f"{name}, {format.name} weights"
                work = Work(self.name, named, case, key, ())
                rule = self.chosen(work)
                able: list[Candidate] = [*_forms(key), Baseline()]
                yield dataclasses.replace(work, candidates=_first(rule, able))

    def chosen(self, work: Work) -> Configuration:
        """Return the plan that dispatch takes."""
        return e4m3_costs.configuration_of(_e4m3_plan(work))

    def plans(self, work: Work, candidate: Any) -> list[Any]:
        """Return the configurations of the GEMM and of the conversion; none of the baseline."""
        if isinstance(candidate, Baseline):
            return []
        assert isinstance(work.key, E4m3Key)
        is_block = work.key.is_block
        able = e4m3_costs.plans_of(work.key.rows, work.key.columns, is_block, False, is_block)
        plan = next(p for p in able if e4m3_costs.configuration_of(p) == candidate)
        return [plan, CONVERT] if candidate.converted else [plan]

    def backend(self, candidate: Candidate) -> str:
        """Name of the implementation."""
        return "cute" if isinstance(candidate, Baseline) else "fp8"

    def call(self, candidate: Candidate, problem: Problem) -> Callable[[], Any]:
        """Return the GEMM on quantised activations, or the baseline on bfloat16 ones."""
        if isinstance(candidate, Baseline):
            plain = dataclasses.replace(problem, kwargs={**problem.kwargs, "activation": "bf16"})
            return functools.partial(plain.run, "cute")
        from dsv4 import dispatch
        from dsv4.cute.gemm_e4m3 import multiply
        from dsv4.ops.quantize import quantize

        args = dispatch.arguments(problem.function, *problem.args, **problem.kwargs).args
        assert isinstance(args, GemmArgs)
        layout = LINEAR if args.format == FP8_BLOCK.name else FRAGMENTS
        x = quantize(args.x, FP8_TOKEN, layout=layout)
        return lambda: multiply(x, args, math.inf, swiglu=False)

    def estimate(self, costs: Costs, data: TunedData, work: Work, candidate: Any) -> float:
        """Return estimated microseconds."""
        assert isinstance(work.key, E4m3Key)
        own, key = costs.gemm_e4m3, work.key
        sizes = (key.rows, key.columns, key.tokens)
        if isinstance(candidate, Baseline):
            return e4m3_costs.bfloat16_us(*sizes, key.is_block, costs, data)
        tile = _tile_times(own, candidate, key.is_block)
        us = e4m3_times.dense_us(tile, candidate.token_rows, *sizes, data.sms)
        if candidate.converted:
            us += e4m3_costs.conversion_us(key.rows * key.columns, costs=own)
        return us


def _e4m3_plan(work: Work) -> Any:
    assert isinstance(work.key, E4m3Key)
    sizes = (work.key.rows, work.key.columns, work.key.tokens)
    if work.key.is_block:
        return e4m3_costs.block_plan(*sizes, False, True)
    return e4m3_costs.nvfp4_plan(*sizes, False, False)


def _forms(key: E4m3Key) -> list[E4m3Configuration]:
    """Return all forms of a GEMM."""
    converts = not key.is_block and key.rows * key.columns <= MOST_CONVERTED
    return [
        E4m3Configuration(token_rows, converted)
        for converted in ((False, True) if converts else (False,))
        for token_rows in (2, 1)
    ]


def _tile_times(costs: E4m3Costs, form: E4m3Configuration, is_block: bool) -> TileTimes:
    kind = "block" if is_block else "converted" if form.converted else "loop"
    return getattr(costs, f"{kind}_{'narrow' if form.token_rows == 1 else 'wide'}")
