"""One row: explain, check on fresh inputs, then time."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dsv4 import dispatch
from dsv4.bench import timing
from dsv4.bench.baselines import fp8, prepare_baselines
from dsv4.bench.environment import Rates
from dsv4.bench.problem import Case, Draw, Problem, UsageError, Verdict, nbytes
from dsv4.bench.results import Row

_MEMORY = 8 << 30  # bytes of inputs that timing may hold
_MOST_COPIES = 8
_SMALL = 1 << 30  # bytes within which small problems are copied more often
_MOST_SMALL_COPIES = 64  # as many as the empty node is timed of: a graph's launch costs as much
_TOKENS_JUDGED = 16
SUSTAINED, COOLED = "sustained", "cooled"


@dataclass(frozen=True)
class Options:
    """Options of a measurement.

    Attributes:
        device: Where.
        backend: Implementation by name, or ``"auto"``.
        check: Whether to check before timing.
        repeat: Timed runs.
        seed: Seed of the inputs.
        baselines: Names of the baselines to time; None for all that are quick to prepare.
        rest: Seconds of rest before each timed run, of baselines too; 0: they follow one another.
    """

    device: torch.device
    backend: str = "auto"
    check: bool = True
    repeat: int = 5
    seed: int = 0
    baselines: tuple[str, ...] | None = None
    rest: float = 0.0

    def conditions(self) -> list[Options]:
        """Sustained load, and, if a rest is requested, cooled down before each run."""
        sustained = dataclasses.replace(self, rest=0.0)
        return [sustained, self] if self.rest else [sustained]

    def named(self, case: str) -> str:
        """Name of the row of a case under these options."""
        return f"{case} {COOLED}".strip() if self.rest else case


def attempt(case: Case, options: Options, rates: Rates) -> Row:
    """``measure``, where an implementation that raises is a row whose check failed.

    The traceback goes to stderr.

    Raises:
        UsageError: as ``measure`` does.
    """
    try:
        return measure(case, options, rates)
    except UsageError:
        raise
    except Exception as error:  # whatever it is, the other operators are still measured
        traceback.print_exc()
        said = f"raised {type(error).__name__}: {error}"
        row = Row(case.op, options.named(case.name), case.shape, case.tokens, options.backend)
        return dataclasses.replace(row, match=False, message=said)


def measure(case: Case, options: Options, rates: Rates) -> Row:
    """Run one case. A row whose check fails has no time.

    Raises:
        UsageError: if ``options.backend`` names no implementation of the operator, or one that
            objects to the case; with the reason.
    """
    problem = case.build(Draw(options.seed, options.device))
    chosen, reason = _choice(problem, options.backend)
    moved = problem.reads + _writes(problem)
    verdict = verify(problem, options.backend) if options.check else None
    row: dict[str, Any] = {
        "op": case.op,
        "case": options.named(case.name),
        "shape": case.shape,
        "tokens": case.tokens,
        "backend": chosen,
        "reason": reason,
        "bound_us": rates.bound_us(moved, _bfloat16_operations(problem)),
        "bytes": moved,
        "flops": problem.flops,
    }
    if verdict is not None:
        row |= {"match": verdict.match, "message": verdict.message, "ratio": verdict.ratio}
        row["error"] = verdict.error
        if verdict.match and verdict.error is None:
            row["error"] = "bitwise"
        if not verdict.match:
            return Row(us=None, **row)
    times = _times(case, problem, options)
    return Row(**{**row, **times, "copy_share": rates.copy_share(moved, times["us"])})


def _bfloat16_operations(problem: Problem) -> int:
    """Return the operations that tensor cores do in bfloat16 in the time of a problem's."""
    return problem.flops // (2 if fp8.takes_fp8(problem) else 1)


def explained(problem: Problem, backend: str) -> dispatch.Explanation:
    """Return which implementation a problem would run, and why.

    Raises:
        UsageError: if the operator has no implementation of that name.
    """
    try:
        return dispatch.explain(problem.function, *problem.args, **problem.kwargs, backend=backend)
    except dispatch.UnknownBackendError as error:
        raise UsageError(str(error)) from None


def _choice(problem: Problem, backend: str) -> tuple[str, str]:
    explanation = explained(problem, backend)
    if explanation.chosen is None:
        raise UsageError(f"{explanation.op}: {explanation.reason}")
    return explanation.chosen, explanation.reason


def _writes(problem: Problem) -> int:
    if problem.writes is not None:
        return problem.writes
    return nbytes(*problem.fresh().run("reference"))


def verify(problem: Problem, backend: str) -> Verdict:
    """Compare with the float64 oracle, both on copies of what the operator changes in place.

    Judges get the name of the implementation that ran: budgets of FP8 tensor cores are wider.
    """
    oracle, tested = problem.widened(), problem.fresh()
    actual = tested.run(backend)
    judged = dataclasses.replace(problem, backend=_choice(problem, backend)[0])
    if problem.of_tokens:
        sample = chosen(actual[0].shape[0]).to(actual[0].device)
        judged, oracle = judged.only(sample), problem.only(sample).widened()
        actual = (actual[0][sample],)
    return problem.judge(judged, actual, oracle.run("reference"))


def chosen(tokens: int) -> torch.Tensor:
    """The tokens that are judged for all, the first and the last among them."""
    return torch.linspace(0, tokens - 1, min(tokens, _TOKENS_JUDGED)).round().long()


def _times(case: Case, problem: Problem, options: Options) -> dict[str, Any]:
    problems = [problem, *copies(case, options, problem)]
    taken = timing.measure(
        [_call(copied, options.backend) for copied in problems],
        options.device,
        options.repeat,
        options.rest,
    )
    note = taken.note
    times: dict[str, Any] = {"us": taken.us, "timer": taken.timer, "baselines": {}}
    refused: dict[str, str] = {}
    op = dispatch.arguments(problem.function, *problem.args, **problem.kwargs).op
    able = prepare_baselines(op, problem, options.baselines, refused)
    # Who cannot do the first is not asked again: a compiler takes seconds to say so each time.
    others = [prepare_baselines(op, copied, tuple(able)) for copied in problems[1:]]
    for name, call in able.items():
        if not all(name in calls for calls in others):
            continue  # it did not fit the memory as often as the problem does
        calls = [call, *(calls[name] for calls in others)]
        taken = timing.measure(calls, options.device, options.repeat, options.rest)
        times["baselines"][name] = taken.us
    # Of those that were asked for by name, and those for FP8, it is said why they have no time.
    said = refused if options.baselines else fp8.unnamed(op, problem, refused)
    notes = [note, *(f"baseline {name} was not timed: {why}" for name, why in said.items())]
    times["message"] = "; ".join(filter(None, notes))
    return times


def copies(case: Case, options: Options, problem: Problem) -> list[Problem]:
    """Return more inputs of the same kind, so that timed calls find nothing in a GPU's cache."""
    if options.device.type != "cuda":
        return []
    held = max(1, problem.held)
    count = max(1, min(_MOST_COPIES, _MEMORY // held), min(_MOST_SMALL_COPIES, _SMALL // held))
    seeds = range(options.seed + 1, options.seed + count)
    return [case.build(Draw(seed, options.device)) for seed in seeds]


def _call(problem: Problem, backend: str) -> Callable[[], Any]:
    call = problem.fresh()
    return lambda: call.run(backend)
