"""Recorded figures: a difference fails and says how to record it, ``--update`` records it."""

from __future__ import annotations

import pytest

from tests._tools.snapshots import Snapshots, file_of

FIGURES = {"Plan(1)": {"HGMMA": 8, "LDS": 2}, "Plan(2)": {"HGMMA": 4}}


@pytest.fixture
def module(tmp_path):
    return tmp_path / "test_compile.py"


def recorded(module, **options):
    Snapshots(module, update=True).check("dense", FIGURES)
    return Snapshots(module, **options)


def test_what_was_recorded_passes(module):
    recorded(module).check("dense", FIGURES)
    assert file_of(module).parent.name == "snapshots"
    assert file_of(module).read_text().count("Plan(") == 2


@pytest.mark.parametrize(
    "actual",
    [
        {"Plan(1)": {"HGMMA": 8, "LDS": 3}},
        {"Plan(1)": {"HGMMA": 8}},
        {"Plan(1)": {"HGMMA": 8, "LDS": 2, "STS": 1}},
        {"Plan(3)": {"HGMMA": 8}},
    ],
)
def test_a_difference_fails_and_says_how_to_record_it(module, actual):
    snapshots = recorded(module)
    with pytest.raises(AssertionError, match=r"pytest --update .*/test_compile\.py"):
        snapshots.check("dense", actual)
    Snapshots(module, update=True).check("dense", actual)
    snapshots.check("dense", {**FIGURES, **actual})


def test_a_difference_is_named(module):
    with pytest.raises(AssertionError, match=r"Plan\(2\): HGMMA is 5, recorded is 4"):
        recorded(module).check("dense", {"Plan(2)": {"HGMMA": 5}})


def test_groups_are_apart(module):
    snapshots = recorded(module)
    Snapshots(module, update=True).check("grouped", {"Plan(1)": {"HGMMA": 9}})
    snapshots.check("dense", FIGURES)
    with pytest.raises(AssertionError, match="nothing is recorded"):
        snapshots.check("grouped", {"Plan(2)": {"HGMMA": 4}})


def test_the_nightly_profile_may_have_more(module):
    more = {**FIGURES, "Plan(3)": {"HGMMA": 1}}
    snapshots = recorded(module, complete=False)
    snapshots.check("dense", more)
    before = file_of(module).read_text()
    Snapshots(module, update=True, complete=False).check("dense", more)
    assert file_of(module).read_text() == before


def test_what_no_test_has_any_more_is_removed(module):
    snapshots = recorded(module)
    snapshots.check_no_others("dense", FIGURES)
    with pytest.raises(AssertionError, match=r"Plan\(2\): recorded, but no test has it"):
        snapshots.check_no_others("dense", ["Plan(1)"])
    Snapshots(module, update=True).check_no_others("dense", ["Plan(1)"])
    snapshots.check_no_others("dense", ["Plan(1)"])
