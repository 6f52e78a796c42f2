"""The sample of configurations that stands for all of them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import example, given
from hypothesis import strategies as st

from tests._tools.covering import batches, covering


@dataclass(frozen=True)
class Plan:
    size: int
    parts: int
    scaled: bool


@dataclass(frozen=True)
class OtherPlan:
    size: int


PLANS = st.sets(
    st.builds(Plan, st.integers(0, 4), st.integers(0, 3), st.booleans())
    | st.builds(OtherPlan, st.integers(0, 2)),
    min_size=1,
)


def pairs(plans):
    found = set()
    for plan in plans:
        fields = [("", type(plan)), *vars(plan).items()]
        found |= set(itertools.combinations(fields, 2))
    return found


@given(PLANS)
@example({Plan(1, 1, False), Plan(1, 1, True), Plan(2, 1, True), Plan(2, 1, False)})
def test_every_pair_of_values_stands_in_the_sample(plans):
    sample = covering(plans)
    assert set(sample) <= plans
    assert len(set(sample)) == len(sample)
    assert pairs(sample) == pairs(plans)
    assert covering(sorted(plans, key=repr, reverse=True)) == sample


@given(PLANS, st.integers(1, 5))
def test_batches_have_every_plan_once_and_the_sample_in_all_profiles(plans, size):
    params = batches(plans, size)
    every = [plan for param in params for plan in param.values[0]]
    assert len(every) == len(plans)
    assert set(every) == plans
    quick = [plan for param in params if not param.marks for plan in param.values[0]]
    assert set(quick) == set(covering(plans))
    assert all(0 < len(param.values[0]) <= size for param in params)


def test_a_table_of_all_values_needs_few():
    every = [Plan(*row) for row in itertools.product(range(5), range(4), (False, True))]
    assert len(covering(every)) <= 22  # of 40; 20 pairs of the first two fields need as many
