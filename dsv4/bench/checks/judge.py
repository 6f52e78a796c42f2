"""Judges that compare a result with the float64 oracle, within a derived budget.

The oracle is the reference on float64 inputs of the same values, on the same device. A budget is
what a correct implementation can be off by, whatever order it sums in; each function here states
its derivation. ``u = 2^-24`` is the unit roundoff of float32.

A float32 sum of K terms of magnitude S is off by at most ``(K - 1) u S``, and by ``8 sqrt(K) u S``
but for a chance below 1e-13 if rounding errors have mean zero and are independent (Higham and Mary,
"A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41, 2019, with
lambda = 8). The smaller of the two is used: the first alone lets a long dot product be wrong by
several percent unseen.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dsv4.bench.problem import Outputs, Problem, Verdict
from dsv4.testing.assertions import assert_within_budget, unit_roundoff

U = 2.0**-24
# exp, log1p, rsqrt and division of any device's float32 library, each: 2 ulp and a rounding.
FUNCTION = 5 * U
# Relative to the sum of magnitudes: error of Hopper's sums of E4M3 products over 128 columns. An
# instruction adds 32 products to the running sum, with 13 bits after the leading one of the
# largest, and drops the rest. If all have one sign, each of the 33 loses half a unit on average,
# and the running sum grows by quarters: (1/4 + 1/2 + 3/4) 33/2 2^-13 = 2^-8.4. The largest error
# seen on an H200 is 2^-10. Twice that is allowed.
FP8_SUM = 2.0**-9
Judge = Callable[[Problem, Outputs, Outputs], Verdict]
Budget = Callable[[Problem, torch.Tensor], torch.Tensor]


def sum_error(terms: int) -> float:
    """Relative to the sum of magnitudes: error of a float32 sum of ``terms`` rounded products."""
    return 1.01 * min(terms + 1.0, 8.0 * (terms + 1.0) ** 0.5) * U


def storing(truth: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Error of the last rounding: ``u_out |y|``, and half of the smallest subnormal."""
    info = torch.finfo(dtype)
    return 1.01 * unit_roundoff(dtype) * truth.abs() + info.smallest_normal * unit_roundoff(dtype)


def row_error(actual: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest norm of a row's error over the norm of the row; the last axis is a row.

    Entries that are equal, infinities and NaNs included, count as no error.
    """
    if truth.numel() == 0:
        return 0.0
    wide, truth = actual.to(torch.float64), truth.to(torch.float64)
    same = (wide == truth) | (wide.isnan() & truth.isnan())
    error = torch.where(same, 0.0, wide - truth)
    error = error.reshape(-1, error.shape[-1] if error.ndim else 1).norm(dim=-1)
    size = torch.where(truth.isfinite(), truth, 0.0)
    size = size.reshape(error.shape[0], -1).norm(dim=-1)
    ratio = torch.where(error == 0, 0.0, error / size)
    return float(ratio.nan_to_num(nan=torch.inf).max())


def compare(
    actual: torch.Tensor, truth: torch.Tensor, budget: torch.Tensor | float, what: str
) -> Verdict:
    """Compare an output with its budget; see ``testing.assertions.assert_within_budget``."""
    if actual.shape != truth.shape:
        shapes = f"{list(actual.shape)}, wanted {list(truth.shape)}"
        return Verdict(False, None, f"{what} has shape {shapes}")
    error, ratio = row_error(actual, truth), worst(actual, truth, budget)
    try:
        assert_within_budget(actual, truth, budget, what)
    except AssertionError as problem:
        return Verdict(False, error, str(problem), ratio)
    return Verdict(True, error, ratio=ratio)


def worst(actual: torch.Tensor, truth: torch.Tensor, allowed: torch.Tensor | float) -> float:
    """Largest error over what is allowed there; infinite where NaNs or infinities differ."""
    if truth.numel() == 0:
        return 0.0
    wide, truth = actual.to(torch.float64), truth.to(torch.float64)
    error = (wide - truth).abs()
    ratio = torch.where(error == 0, 0.0, error / allowed)
    same = (wide == truth) | (wide.isnan() & truth.isnan())
    ratio = torch.where(truth.isfinite(), ratio, torch.where(same, 0.0, torch.inf))
    return float(ratio.nan_to_num(nan=torch.inf, posinf=torch.inf).max())


def same(actual: torch.Tensor, truth: torch.Tensor, what: str) -> Verdict:
    """Equal values, NaN equal to NaN; in the dtype of a byte or integer, or widened to float64."""
    if actual.shape != truth.shape:
        shapes = f"{list(actual.shape)}, wanted {list(truth.shape)}"
        return Verdict(False, None, f"{what} has shape {shapes}")
    left, right = _comparable(actual), _comparable(truth)
    differ = left != right
    if left.is_floating_point():
        differ &= ~(left.isnan() & right.isnan())
    count = int(differ.sum())
    if count == 0:
        return Verdict(True)
    first = tuple(differ.nonzero()[0].tolist())
    value, expected = left[first].item(), right[first].item()
    where = f"at {count} of {differ.numel()} places, first at {list(first)}"
    return Verdict(
        False, row_error(left, right), f"{what} differs {where}: {value}, wanted {expected}"
    )


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.element_size() == 1:
        return tensor.contiguous().view(torch.uint8)
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor.to(torch.int64)


def combine(*verdicts: Verdict) -> Verdict:
    """All must match; the largest error and every message."""
    errors = [v.error for v in verdicts if v.error is not None]
    return Verdict(
        all(v.match for v in verdicts),
        max(errors) if errors else None,
        "; ".join(v.message for v in verdicts if v.message),
        max(v.ratio for v in verdicts),
    )


def bitwise(*names: str) -> Judge:
    """Require the oracle's bits: for operators whose definition says every rounding."""

    def judge(problem: Problem, actual: Outputs, truth: Outputs) -> Verdict:
        return combine(*(same(a, t, n) for a, t, n in zip(actual, truth, names, strict=True)))

    return judge


def within(budget: Budget) -> Judge:
    """The one output is inside ``budget``, plus the rounding to its dtype."""

    def judge(problem: Problem, actual: Outputs, truth: Outputs) -> Verdict:
        ((result,), (expected,)) = actual, truth
        allowed = budget(problem, expected)
        return compare(result, expected, allowed + storing(expected, result.dtype), "the result")

    return judge


def ranked(
    scores: torch.Tensor, ids: torch.Tensor, expected: torch.Tensor, error: torch.Tensor
) -> Verdict:
    """``ids`` are the largest scores in order, up to ties within the error of a score.

    The j-th largest of values that are each off by at most d is off by at most d, so the true
    score of the id found at rank j is within 2 d of that of the id wanted there. Ids are compared
    exactly but for such ties, whose largest difference in score becomes the error; they must be
    distinct, and -1 exactly where -1 is wanted.

    Args:
        scores: float64 ``[T, C]``.
        ids: ``[T, k]`` found.
        expected: ``[T, k]`` of the oracle.
        error: float64 ``[T, 1]``, d.
    """
    if ids.shape != expected.shape:
        return Verdict(
            False, None, f"ids have shape {list(ids.shape)}, wanted {list(expected.shape)}"
        )
    none = expected < 0
    valid = torch.where(none, ids == -1, (ids >= 0) & (ids < scores.shape[1]))
    if not bool(valid.all()):
        return Verdict(False, None, f"{int((~valid).sum())} ids are out of range or not -1")
    marks = torch.where(none, -1 - torch.arange(ids.shape[1], device=ids.device), ids)
    sorted_ids = marks.sort(-1).values
    if bool((sorted_ids[:, 1:] == sorted_ids[:, :-1]).any()):
        return Verdict(False, None, "an id occurs twice for one token")
    gap = (scores.gather(1, ids.clamp(min=0)) - scores.gather(1, expected.clamp(min=0))).abs()
    differ = ~none & (ids != expected)
    bad = differ & ~(gap <= 2 * error)
    if bool(bad.any()):
        where = tuple(bad.nonzero()[0].tolist())
        return Verdict(
            False,
            None,
            f"{int(bad.sum())} ids are wrong beyond ties, first at {list(where)}: "
            f"{int(ids[where])}, wanted {int(expected[where])}",
        )
    return Verdict(True, float(gap[differ].max()) if bool(differ.any()) else None)
