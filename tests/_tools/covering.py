"""A sample of configurations in which every pair of values that two fields have stands once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection
from typing import Any

import pytest


def values(plan: Any) -> list[tuple[str, Any]]:
    """Fields of a configuration with their values; its type is one of them."""
    fields = [(field.name, getattr(plan, field.name)) for field in dataclasses.fields(plan)]
    return [("type", type(plan).__name__), *fields]


def covering(plans: Collection[Any]) -> list[Any]:
    """The sample: each time the configuration that has the most pairs not seen yet.

    A configuration that is wrong because of one or two of its fields has another one in the sample
    that is wrong for the same reason. The same plans give the same sample, in any order.
    """
    pairs = {plan: set(itertools.combinations(values(plan), 2)) for plan in plans}
    ordered = sorted(pairs, key=repr)
    missing = set().union(*pairs.values())
    sample = []
    while missing:
        best = max(ordered, key=lambda plan: len(pairs[plan] & missing))
        sample.append(best)
        missing -= pairs[best]
    return sample


def batches(plans: Collection[Any], size: int) -> list[Any]:
    """Parameters of a test: the sample ``size`` at a time, then the others, marked ``nightly``."""
    sample = sorted(covering(plans), key=repr)
    others = sorted(set(plans) - set(sample), key=repr)
    marked = [pytest.param(batch, id=named(batch)) for batch in _cut(sample, size)]
    nightly = pytest.mark.nightly
    return marked + [pytest.param(b, id=named(b), marks=nightly) for b in _cut(others, size)]


def named(batch: list[Any]) -> str:
    """Name of a batch: its first configuration and how many follow."""
    return f"{batch[0]!r} and {len(batch) - 1} more"


def _cut(plans: list[Any], size: int) -> list[list[Any]]:
    return [plans[start : start + size] for start in range(0, len(plans), size)]
