"""Make a data file of measured times: fitted constants, and the fastest plan of each problem."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsv4.bench.tune import fit
from dsv4.bench.tune.work import Family, Measured
from dsv4.cute.sm90.costs import Costs, flat, with_values
from dsv4.cute.sm90.tuned_records import TUNED, Entry, Key, Origin, Residual, TunedData

CYCLES_PER_US = 1980.0  # unit of models in cycles: only ratios of their results matter
_POINTS_PER_CONSTANT = 2  # times that a fit needs for each constant


@dataclass(frozen=True)
class Fitted:
    """The constants of a family.

    Attributes:
        family: Name of the family.
        constants: The constants.
        before: Errors of the constants that the rule has; None without times.
        after: Errors of the fitted ones; None if they were not fitted or are not used.
        words: Why they were not fitted or are not used; empty if they are.
    """

    family: str
    constants: Any
    before: Residual | None
    after: Residual | None
    words: str = ""


def entries(measured: Sequence[Measured]) -> dict[Key, Entry]:
    """Return the fastest of the measured plans of each problem whose candidates all were tried."""
    fastest: dict[Key, Entry] = {}
    for times in measured:
        if times.is_whole and times.plans:
            best = min(times.plans, key=lambda plan: times.plans[plan])
            fastest[times.work.key] = Entry(best, times.plans[best], times.rule_us)
    return fastest


def fitted(family: Family, base: TunedData, measured: Sequence[Measured]) -> Fitted:
    """Fit the constants of a family to all of its times.

    Fitted constants are used if the plans that they rank first are as fast, by the measured times,
    as those of the constants before.
    """
    constants = getattr(base.costs, family.name)
    now = flat(constants)
    points = [(m.work, candidate, us) for m in measured for candidate, us in m.us.items()]
    times = [(CYCLES_PER_US if family.scaled else 1.0) * us for _, _, us in points]

    def estimates(numbers: Mapping[str, float]) -> list[float]:
        costs = replaced(base.costs, family.name, numbers)
        return [family.estimate(costs, base, work, candidate) for work, candidate, _ in points]

    if not points:
        return Fitted(family.name, constants, None, None, "nothing was measured")
    if not any(estimates(now)):
        return Fitted(family.name, constants, None, None, "the family has no cost model")
    before = fit.residual(estimates(now), times, scaled=family.scaled)
    used = sum(_matters(estimates, now, name) for name, value in now.items() if value > 0)
    if len(points) < _POINTS_PER_CONSTANT * used:
        words = f"{len(points)} times are too few for {used} constants"
        return Fitted(family.name, constants, before, None, words)
    numbers = fit.least_squares(estimates, times, now)
    after = fit.residual(estimates(numbers), times, scaled=False)
    lost = [_lost(family, base, n, measured) for n in (now, numbers)]
    if lost[1] > lost[0]:
        words = f"plans by fitted constants lose {lost[1]:.2%}, by those before {lost[0]:.2%}"
        return Fitted(family.name, constants, before, None, words)
    return Fitted(family.name, with_values(constants, numbers), before, after)


def replaced(costs: Costs, family: str, numbers: Mapping[str, float]) -> Costs:
    """Return all constants, with those of a family replaced."""
    return with_values(costs, {f"{family}.{name}": value for name, value in numbers.items()})


def _matters(
    estimates: Callable[[Mapping[str, float]], list[float]], numbers: Mapping[str, float], name: str
) -> bool:
    """Return whether an estimate depends on a constant."""
    return estimates({**numbers, name: 1.5 * numbers[name]}) != estimates(numbers)


def _lost(
    family: Family, base: TunedData, numbers: Mapping[str, float], measured: Sequence[Measured]
) -> float:
    """Return how much longer plans of the least estimate take than the fastest, on average."""
    costs, losses = replaced(base.costs, family.name, numbers), []
    for times in measured:
        if len(times.plans) > 1:
            estimates = {p: family.estimate(costs, base, times.work, p) for p in times.plans}
            chosen = min(estimates, key=lambda plan: estimates[plan])
            losses.append(times.plans[chosen] / min(times.plans.values()) - 1)
    return statistics.fmean(losses) if losses else 0.0


def data(
    base: TunedData,
    fits: Sequence[Fitted],
    measured: Sequence[Measured],
    *,
    date: str,
    versions: Mapping[str, str],
    source: str,
    clusters: Mapping[int, int],
) -> TunedData:
    """Return the figures for a data file: families of which a problem was measured whole."""
    own = entries(measured)
    families = {m.work.family for m in measured if m.is_whole and m.plans}
    own_fits = [own_fit for own_fit in fits if own_fit.family in families]
    constants = {own_fit.family: own_fit.constants for own_fit in own_fits}
    residuals = {own_fit.family: own_fit.after for own_fit in own_fits}
    names = tuple(constants)
    return dataclasses.replace(
        base,
        date=date,
        versions=versions,
        source=source,
        clusters=clusters,
        costs=dataclasses.replace(base.costs, **constants),
        entries=own,
        residuals={name: after for name, after in residuals.items() if after is not None},
        families=names,
        origins=dict.fromkeys(names, Origin(TUNED, date, date)),
    )
