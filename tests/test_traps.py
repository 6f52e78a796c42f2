"""The table of mistakes fits the code: ``python -m tests.traps`` makes each of them."""

from __future__ import annotations

import pytest
from traps import MUTANTS, REQUIRED, ROOT, Mutant


def test_every_required_trap_has_a_mistake() -> None:
    assert {m.trap for m in MUTANTS} >= set(REQUIRED)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.trap} {m.what}")
def test_a_mistake_can_still_be_made(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    assert mutant.old != mutant.new
    file, *names = mutant.test.split("::")
    source = (ROOT / file).read_text()
    assert all(f"{name}(" in source or f"class {name}" in source for name in names)
