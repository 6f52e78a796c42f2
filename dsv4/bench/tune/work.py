"""Records of a search: problems, candidates, times, and the interfaces of timers and families."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dsv4.bench.problem import Case
from dsv4.config import ModelConfig
from dsv4.cute.sm90.costs import Costs
from dsv4.cute.sm90.tuned_records import Configuration, Key, TunedData


@dataclass(frozen=True)
class Baseline:
    """The bfloat16 kernel, the alternative to a family's kernel; it is no plan of the family.

    Dispatch chooses between the two by estimates. The times of the baseline fit its constants.
    """


Candidate = Configuration | Baseline


@dataclass(frozen=True)
class Work:
    """A problem whose plans are measured.

    Attributes:
        family: Name of the family.
        name: Preset, case and tokens.
        case: Makes its inputs.
        key: Key of its entry in a data file.
        candidates: Plans to measure; the first one is the plan of the rule.
    """

    family: str
    name: str
    case: Case = field(compare=False, repr=False)
    key: Key
    candidates: tuple[Candidate, ...]


@dataclass
class Measured:
    """The times of a problem.

    Attributes:
        work: The problem.
        us: Median microseconds of the candidates that are right.
        wrong: Reasons why candidates are wrong.
        failed: Reasons why candidates have no result: they hung or crashed.
        is_whole: Whether all candidates were tried.
    """

    work: Work
    us: dict[Candidate, float] = field(default_factory=dict)
    wrong: dict[Candidate, str] = field(default_factory=dict)
    failed: dict[Candidate, str] = field(default_factory=dict)
    is_whole: bool = False

    @property
    def plans(self) -> dict[Configuration, float]:
        """Times of the family's own plans."""
        return {plan: us for plan, us in self.us.items() if not isinstance(plan, Baseline)}

    @property
    def rule_us(self) -> float | None:
        """The time of the plan that the rule gives; None if it was wrong."""
        return self.us.get(self.work.candidates[0])


class WrongError(Exception):
    """A candidate raises, or its result is outside its error budget; the message has the reason."""


class Timer(Protocol):
    """Measures candidates. Tests implement it without a GPU."""

    def prepare(self, works: Sequence[Work]) -> None:
        """Compile the kernels of some problems in parallel."""

    def clusters(self) -> dict[int, int]:
        """Return the number of resident clusters of the GPU for each cluster size."""

    def us(self, work: Work, candidate: Candidate) -> float:
        """Check a candidate against the reference, then time it.

        Raises:
            WrongError: if it is not right.
            FailedError: if it hangs or crashes.
        """


class Family(Protocol):
    """A family of kernels whose plans can be measured.

    Attributes:
        name: As in data files.
        op: The operator.
        scaled: Whether estimates have an arbitrary unit; False: microseconds.
    """

    name: str
    op: str
    scaled: bool

    def works(self, configs: Mapping[str, ModelConfig]) -> Iterator[Work]:
        """Yield problems, the most important first, with candidates by the current constants."""

    def chosen(self, work: Work) -> Candidate | None:
        """Return the plan that dispatch takes for a problem with the current constants."""

    def plans(self, work: Work, candidate: Candidate) -> list[Any]:
        """Return configurations of kernels that have to be compiled."""

    def call(self, candidate: Candidate, problem: Any) -> Callable[[], Any]:
        """Return the timed call, with its own inputs."""

    def backend(self, candidate: Candidate) -> str:
        """Return the name of the implementation that runs a candidate."""

    def estimate(self, costs: Costs, data: TunedData, work: Work, candidate: Candidate) -> float:
        """Return the cost of a candidate by some constants."""
