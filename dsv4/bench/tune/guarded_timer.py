"""Measure candidates in a child process, so that a kernel that hangs or crashes fails alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsv4.bench.child import Child
from dsv4.bench.measure import Options
from dsv4.bench.tune.families import named
from dsv4.bench.tune.gpu_timer import GpuTimer
from dsv4.bench.tune.work import Candidate, Family, Work, WrongError
from dsv4.compilation import pool
from dsv4.compilation.jobs import CuteJob
from dsv4.config import ModelConfig
from dsv4.cute.runtime import cubin_cache
from dsv4.cute.runtime.architectures import HOPPER
from dsv4.cute.sm90.tuned_records import TunedData
from dsv4.device import MACHINE

_Name = tuple[str, str]  # a problem's family and name: its case cannot be pickled


@dataclass(frozen=True)
class Limits:
    """Seconds that a call may take. Compilation is no part of them: the parent compiles.

    Attributes:
        draw: To start a process, make the inputs of a problem and run its reference in float64.
        candidate: To check a candidate and to time it, which takes a second or two.
    """

    draw: float = 600.0
    candidate: float = 60.0


@dataclass(frozen=True)
class Setup:
    """What a child process makes its measurer of.

    Attributes:
        families: Names of the families.
        configs: Models whose sizes are measured.
        base: Constants and plans of everything except the candidate.
        options: Device, timed runs and seed.
    """

    families: tuple[str, ...]
    configs: Mapping[str, ModelConfig]
    base: TunedData
    options: Options

    def measurer(self) -> Measurer:
        """Make the measurer, in the child process."""
        return Measurer(self)


class Measurer:
    """The part of ``GuardedTimer`` that runs in the child process."""

    def __init__(self, setup: Setup) -> None:
        """List the problems again, with the plans of the parent from now on."""
        MACHINE.pretend(plans=setup.base)
        families = named(setup.families)
        works = [work for family in families for work in family.works(setup.configs)]
        self._works = {_name(work): work for work in works}
        self._timer = GpuTimer(families, setup.base, setup.options)

    def clusters(self) -> dict[int, int]:
        """Return the number of resident clusters for each cluster size."""
        return self._timer.clusters()

    def draw(self, name: _Name) -> None:
        """Make the inputs of a problem, unless they are those of the last call."""
        self._timer.draw(self._works[name])

    def us(self, name: _Name, candidate: Candidate) -> tuple[float, str]:
        """Return the time of a candidate and an empty text, or 0 and why it is wrong."""
        try:
            return self._timer.us(self._works[name], candidate), ""
        except WrongError as error:
            return 0.0, str(error)


class GuardedTimer:
    """A ``Timer`` whose candidates run in a child process."""

    def __init__(
        self, child: Child, families: Sequence[Family], limits: Limits | None = None
    ) -> None:
        """Make a timer.

        Args:
            child: Calls a ``Measurer``.
            families: Families of the candidates.
            limits: Time limits.
        """
        self._child = child
        self._families = {family.name: family for family in families}
        self._limits = limits or Limits()

    def prepare(self, works: Sequence[Work]) -> None:
        """Compile kernels that are not kept yet, in parallel; one that fails is wrong later."""
        plans = {
            plan: None
            for work in works
            for candidate in work.candidates
            for plan in self._families[work.family].plans(work, candidate)
        }
        jobs = [CuteJob(plan, HOPPER) for plan in plans]
        missing = [job for job in jobs if not cubin_cache.is_kept(HOPPER, job.key, job.file_name)]
        for finished in pool.run(missing, arch=HOPPER):
            if not finished.done.error:
                cubin_cache.keep(finished.job.file_name, finished.done.result.content)

    def clusters(self) -> dict[int, int]:
        """Return the number of resident clusters for each cluster size."""
        return self._child.call("clusters", seconds=self._limits.draw)

    def us(self, work: Work, candidate: Candidate) -> float:
        """Check a candidate, then time it; see ``Timer``."""
        name = _name(work)
        self._child.call("draw", name, seconds=self._limits.draw)
        us, wrong = self._child.call("us", name, candidate, seconds=self._limits.candidate)
        if wrong:
            raise WrongError(wrong)
        return us


def _name(work: Work) -> _Name:
    return work.family, work.name
