"""Slots of partial sums in the grouped GEMM for few rows: no order of warps mixes two units.

A model of the kernel's barriers runs the warps in every order. mbarriers tell phases by their
parity, as the hardware's do.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4.cute.grouped_problem import Experts
from dsv4.cute.sm90.grouped_gemm_plans import launch_plans
from dsv4.cute.sm90.grouped_gemm_small_m_plan import SUM_SLOTS, GroupedSmallMPlan
from tests._tools.deepseek_sizes import ROUTED

UNITS = 40
ROUNDS = [(16, 2), (16, 4), (16, 8), (16, 16), (12, 2), (12, 3), (12, 4), (12, 6), (8, 2)]


def plan_of(warps, jobs):
    return GroupedSmallMPlan(64 * jobs, 1, warps, 1, False, False, 1, splits=jobs)


class BrokenError(Exception):
    """A warp wrote to a slot whose sums of another unit nobody had read, or all warps wait."""


class Slot:
    """A slot and the phases that its two mbarriers have completed."""

    def __init__(self):
        self.unit, self.parts, self.written, self.read = None, 0, 0, 0

    def is_read(self, parity):
        """``mbarrier.try_wait.parity`` of the barrier of sums read."""
        return self.read & 1 != parity

    def write(self, unit, jobs):
        """A job's sums; the last ones of a unit are followed by reading all."""
        if self.unit not in (None, unit):
            raise BrokenError(f"unit {unit} in the slot of unit {self.unit}")
        self.unit, self.parts = unit, self.parts + 1
        if self.parts == jobs:
            self.unit, self.parts = None, 0
            self.written, self.read = self.written + 1, self.read + 1


def run(warps, jobs, slots, first, order):
    """Run all jobs of a segment whose units are numbered from ``first``; the first in ``order``
    that does not wait takes the next step."""
    memory = [Slot() for _ in range(slots)]
    for number in range(first):  # units of the segments before
        memory[number % slots].written += 1
        memory[number % slots].read += 1
    jobs_of = {warp: warp for warp in range(warps)}
    while jobs_of:
        for warp in order:
            if warp not in jobs_of:
                continue
            number = first + jobs_of[warp] // jobs
            slot = memory[number % slots]
            if not slot.is_read(number // slots & 1 ^ 1):
                continue
            slot.write(number, jobs)
            jobs_of[warp] += warps
            if jobs_of[warp] >= UNITS * jobs:
                del jobs_of[warp]
            break
        else:
            raise BrokenError("all warps wait")


@given(st.sampled_from(ROUNDS), st.integers(0, 20), st.data())
def test_no_order_of_warps_mixes_units(shape, first, data):
    warps, jobs = shape
    order = data.draw(st.permutations(range(warps)))
    run(warps, jobs, plan_of(warps, jobs).sum_slots, first, order)


@pytest.mark.parametrize(
    ("slow", "words"), [([4, 5], "all warps wait"), ([4], "in the slot of unit")]
)
def test_eight_slots_are_wrong_for_twelve_warps(slow, words):
    """Warps of unit 2 are slow: those of unit 18 take its open phase for the one of unit 10."""
    order = [warp for warp in range(12) if warp not in slow] + slow
    with pytest.raises(BrokenError, match=words):
        run(12, 2, SUM_SLOTS, 0, order)
    run(12, 2, plan_of(12, 2).sum_slots, 0, order)


@pytest.mark.parametrize("sizes", ROUTED, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 6, 24, 48, 64])
def test_rounds_have_whole_units(sizes, rows):
    """Also where the results are quantized, whose units have two row tiles."""
    experts, inner, hidden = sizes
    problems = [
        Experts(2 * inner, hidden, experts, False, False, True),
        Experts(2 * inner, hidden, experts, False, False, True, quantized_out=True),
        Experts(hidden, inner, experts, False, False),
    ]
    for problem in problems:
        for launch in launch_plans(problem, rows):
            plan = launch.plan
            if isinstance(plan, GroupedSmallMPlan) and plan.unit_jobs > 1:
                in_round, rest = divmod(plan.warps, plan.unit_jobs)
                assert not rest
                assert plan.sum_slots % in_round == 0 < plan.sum_slots <= SUM_SLOTS


def test_a_unit_of_no_whole_round_is_refused():
    with pytest.raises(AssertionError):
        plan_of(16, 3)
