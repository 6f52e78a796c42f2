"""Checkpoints with random damage load, or are refused by an error that names file and field."""

from __future__ import annotations

import os

import pytest

from dsv4.checkpoint import load
from dsv4.model import DeepseekV4ForCausalLM
from tests.checkpoint.cases import LAYOUTS
from tests.checkpoint.fuzz import TARGETS, Subject

# 200 cases, or 3000 in the nightly profile.
CASES = (3000 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 200) // (
    len(LAYOUTS) * len(TARGETS)
)


@pytest.fixture(scope="module")
def subjects(tmp_path_factory) -> dict[str, Subject]:
    return {name: Subject.make(tmp_path_factory.mktemp(name), name) for name in LAYOUTS}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_damage_is_refused_by_name(subjects, layout, target):
    outcomes = {number: subjects[layout].case(target, number) for number in range(CASES)}
    assert {number: words for number, words in outcomes.items() if words} == {}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_subject_is_sound_and_mended(subjects, layout):
    subject = subjects[layout]
    assert isinstance(load(subject.folder, progress=False), DeepseekV4ForCausalLM)
    assert {p.name: p.read_bytes() for p in subject.folder.iterdir()} == subject.files
