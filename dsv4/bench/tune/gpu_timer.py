"""Measure candidates on a GPU, as the bench times operators."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from dsv4.bench import timing
from dsv4.bench.measure import Options, copies
from dsv4.bench.problem import Draw, Outputs, Problem
from dsv4.bench.tune.work import Baseline, Candidate, Family, Work, WrongError
from dsv4.cute.runtime.architectures import HOPPER
from dsv4.cute.runtime.launch import loaded
from dsv4.cute.sm90.gemm_wgmma_plan import WgmmaPlan
from dsv4.cute.sm90.tuned_records import CLUSTERS, Entry, TunedData
from dsv4.device import pretend
from dsv4.ops._plans import PLANS


class BrokenGpuError(RuntimeError):
    """A kernel broke the CUDA context: no kernel runs after it."""


class GpuTimer:
    """Checks a candidate against the reference in float64, then times it in a CUDA graph.

    It keeps the inputs of the last problem, because the candidates of a problem follow one another.
    """

    def __init__(self, families: Sequence[Family], base: TunedData, options: Options) -> None:
        """Make a timer.

        Args:
            families: Families of the candidates.
            base: Constants and plans of everything except the candidate.
            options: Device, timed runs and seed.
        """
        self._families = {family.name: family for family in families}
        self._base = base
        self._options = options
        self._work: Work | None = None
        self._problems: list[Problem] = []
        self._expected: Outputs = ()

    def clusters(self) -> dict[int, int]:
        """Return the number of clusters that the GPU holds at a time, by their CTAs."""
        device = self._options.device
        with torch.cuda.device(device):
            plans = {ctas: WgmmaPlan(128, 2, ctas, 2, False, False) for ctas in CLUSTERS}
            index = torch.cuda.current_device()
            return {ctas: loaded(plan, HOPPER).prepare(index) for ctas, plan in plans.items()}

    def us(self, work: Work, candidate: Candidate) -> float:
        """Check a candidate, then time it; see ``Timer``."""
        family = self._families[work.family]
        self.draw(work)
        entries = dict(self._base.entries)
        if not isinstance(candidate, Baseline):
            entries[work.key] = Entry(candidate)
        with pretend(plans=dataclasses.replace(self._base, entries=entries)):
            PLANS.forget()
            try:
                if not isinstance(candidate, Baseline) and family.chosen(work) != candidate:
                    raise WrongError("it is not the plan that dispatch takes")
                return self._checked(family, candidate)
            finally:
                PLANS.forget()

    def draw(self, work: Work) -> None:
        """Make the inputs of a problem and its result by the reference implementation, once."""
        if work is self._work:
            return
        self._work, self._problems = None, []
        problem = work.case.build(Draw(self._options.seed, self._options.device))
        self._problems = [problem, *copies(work.case, self._options, problem)]
        self._expected = problem.widened().run("reference")
        self._work = work

    def _checked(self, family: Family, candidate: Candidate) -> float:
        problem, device = self._problems[0], self._options.device
        backend = family.backend(candidate)
        try:
            actual = problem.fresh().run(backend)
            torch.cuda.synchronize(device)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._require_gpu(error)
            said = str(error).partition("\n")[0]
            raise WrongError(f"raised {type(error).__name__}: {said}") from error
        judged = dataclasses.replace(problem, backend=backend)
        verdict = problem.judge(judged, actual, self._expected)
        if not verdict.match:
            raise WrongError(verdict.message)
        calls = [family.call(candidate, copied) for copied in self._problems]
        return timing.measure(calls, device, self._options.repeat).us

    def _require_gpu(self, error: Exception) -> None:
        """Raise if an error of a candidate broke the CUDA context."""
        try:
            torch.cuda.synchronize(self._options.device)
        except RuntimeError as broken:
            raise BrokenGpuError(f"no kernel runs any more after: {error}") from broken
