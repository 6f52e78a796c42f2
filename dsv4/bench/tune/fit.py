"""Fit the constants of a cost model to measured times, by least squares of relative errors."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

from dsv4.cute.sm90.tuned_records import Residual

# Model: the times of all points for some constants.
Model = Callable[[Mapping[str, float]], Sequence[float]]
_STEPS = 25  # of Levenberg and Marquardt, at most
_DIFFERENCE = 1e-6  # relative change of a constant by which slopes are taken
# Weight of staying at the start, relative to a measured time: for constants that no time depends
# on. A constant that times do depend on moves by less than this because of it.
_PULL = 1e-9
_ENOUGH = 1e-4  # relative decrease of the sum of squares at which the fit ends
# Least share of its start that a constant keeps: models divide by some of them, and one that became
# 0 would be no part of the model in the next fit.
_LEAST = 1e-3
_EXACT = 1e-12  # mean square of the errors at which it ends: no time is measured as exactly


def least_squares(model: Model, times: Sequence[float], start: Mapping[str, float]) -> dict:
    """Return the constants with the least sum of squared relative errors.

    Constants that are 0 at the start stay 0, because they are no part of the model there. The
    others stay positive. Constants that no time depends on stay as they are.

    Args:
        model: The model.
        times: Measured times, above 0, in the unit of the model.
        start: Constants that the search begins with.
    """
    names = [name for name, value in start.items() if value > 0]
    measured = torch.tensor(times, dtype=torch.float64)

    def errors(shares: torch.Tensor) -> torch.Tensor:
        values = {n: start[n] * float(s) for n, s in zip(names, shares, strict=True)}
        estimates = torch.tensor(model({**start, **values}), dtype=torch.float64)
        pulled = _PULL**0.5 * (shares - 1)
        return torch.cat((estimates / measured - 1, pulled))

    shares, damping = torch.ones(len(names), dtype=torch.float64), 1e-3
    now = errors(shares)
    for _ in range(_STEPS):
        slopes = _slopes(errors, shares, now)
        better = None
        while better is None and damping < 1e12:
            moved = _moved(shares, slopes, now, damping)
            then = errors(moved)
            if float(then @ then) < float(now @ now):
                better = moved, then
            else:
                damping *= 4
        if better is None:
            break
        gain = 1 - float(better[1] @ better[1]) / float(now @ now)
        (shares, now), damping = better, max(damping / 10, 1e-14)
        if gain < _ENOUGH or float(now @ now) < _EXACT * len(times):
            break
    fitted = {name: start[name] * float(s) for name, s in zip(names, shares, strict=True)}
    return {**start, **fitted}


def _slopes(
    errors: Callable[[torch.Tensor], torch.Tensor], shares: torch.Tensor, now: torch.Tensor
) -> torch.Tensor:
    """Return the derivatives of all errors by each constant."""
    columns = []
    for i in range(len(shares)):
        step = _DIFFERENCE * max(1.0, float(shares[i]))
        other = shares.clone()
        other[i] += step
        columns.append((errors(other) - now) / step)
    return torch.stack(columns, 1)


def _moved(
    shares: torch.Tensor, slopes: torch.Tensor, now: torch.Tensor, damping: float
) -> torch.Tensor:
    """Return the constants after one damped step of Gauss and Newton, all of them positive."""
    sizes = slopes.norm(dim=0)
    held = torch.diag(damping**0.5 * sizes)
    system = torch.cat((slopes, held))
    right_side = torch.cat((-now, torch.zeros(len(shares), dtype=torch.float64)))
    step = torch.linalg.lstsq(system, right_side[:, None], driver="gelsd").solution[:, 0]
    return (shares + step).clamp_min(_LEAST)


def residual(estimates: Sequence[float], times: Sequence[float], *, scaled: bool) -> Residual:
    """Return the errors of estimates.

    Args:
        estimates: Estimated times.
        times: Measured times.
        scaled: Whether estimates may be off by a factor, which ranks nothing: their median is then
            brought to that of the times.
    """
    factor = 1.0
    if scaled:
        factor = statistics.median(t / e for e, t in zip(estimates, times, strict=True))
    errors = [abs(factor * e / t - 1) for e, t in zip(estimates, times, strict=True)]
    return Residual(len(errors), statistics.fmean(e * e for e in errors) ** 0.5, max(errors))
