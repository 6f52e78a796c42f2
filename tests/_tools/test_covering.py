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


def combinations(plans, option):
    """Values of fields, and pairs of them of which one's field has few."""
    fields = [[("", type(plan)), *vars(plan).items()] for plan in plans]
    every = {field for of_plan in fields for field in of_plan}
    options = {f for f in every if sum(name == f[0] for name, _ in every) <= option}
    pairs = {pair for of_plan in fields for pair in itertools.combinations(of_plan, 2)}
    return every | {pair for pair in pairs if options & set(pair)}


@given(PLANS, st.integers(0, 5))
@example({Plan(1, 1, False), Plan(1, 1, True), Plan(2, 1, True), Plan(2, 1, False)}, 2)
def test_every_value_with_every_option_stands_in_the_sample(plans, option):
    sample = covering(plans, option)
    assert set(sample) <= plans
    assert len(set(sample)) == len(sample)
    assert combinations(plans, option) <= combinations(sample, 99)
    assert covering(sorted(plans, key=repr, reverse=True), option) == sample


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
