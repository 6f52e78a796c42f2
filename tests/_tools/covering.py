"""A sample of configurations: every value of a field, with every value of a field that has two."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import pytest


def values(plan: Any) -> list[tuple[str, Any]]:
    """Fields of a configuration with their values; its type is one of them."""
    fields = [(field.name, getattr(plan, field.name)) for field in dataclasses.fields(plan)]
    return [("type", type(plan).__name__), *fields]


# Fields of more values are not combined with each other: a kernel is made wrong by a size, or by an
# option for some sizes. All combinations are compiled in the profile nightly.
OPTION = 2
ALL = 1 << 30  # as ``option``: all fields are combined


def covering(plans: Collection[Any], option: int = OPTION) -> list[Any]:
    """The sample: each time the configuration that has the most not seen yet.

    That is values of a field, and pairs of values of two fields of which one is an option. A
    configuration that is wrong because of these has another one in the sample that is wrong for the
    same reason. The same plans give the same sample, in any order.

    Args:
        plans: All configurations.
        option: Most values of a field that is combined with others; 0: none is.
    """
    counts = Counter(name for name, _ in set().union(*map(values, plans)))
    combinations = {plan: _combinations(values(plan), counts, option) for plan in plans}
    ordered = sorted(combinations, key=repr)
    missing = set().union(*combinations.values())
    sample = []
    while missing:
        best = max(ordered, key=lambda plan: len(combinations[plan] & missing))
        sample.append(best)
        missing -= combinations[best]
    return sample


def _combinations(
    fields: list[tuple[str, Any]], counts: Mapping[str, int], option: int
) -> set[tuple[Any, ...]]:
    """Values alone, and in pairs if one of their fields has few."""
    pairs = itertools.combinations(fields, 2)
    paired = (pair for pair in pairs if min(counts[name] for name, _ in pair) <= option)
    return {*((field,) for field in fields), *paired}


def batches(plans: Collection[Any], size: int, option: int = OPTION) -> list[Any]:
    """Parameters of a test: the sample ``size`` at a time, then the others, marked ``nightly``."""
    sample = sorted(covering(plans, option), key=repr)
    others = sorted(set(plans) - set(sample), key=repr)
    marked = [pytest.param(batch, id=named(batch)) for batch in _cut(sample, size)]
    nightly = pytest.mark.nightly
    return marked + [pytest.param(b, id=named(b), marks=nightly) for b in _cut(others, size)]


def named(batch: list[Any]) -> str:
    """Name of a batch: its first configuration and how many follow."""
    return f"{batch[0]!r} and {len(batch) - 1} more"


def _cut(plans: list[Any], size: int) -> list[list[Any]]:
    return [plans[start : start + size] for start in range(0, len(plans), size)]
