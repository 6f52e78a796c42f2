"""The table of mistakes fits the code: ``python -m tests._tools.mutants`` makes each of them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests._tools.mutants import MUTANTS, REQUIRED, Mutant
from tests._tools.mutants.watch import outcome

ROOT = Path(__file__).resolve().parents[2]


CASE = '<testsuites><testsuite><testcase name="x">{}</testcase></testsuite></testsuites>'


@cache
def source(file: str) -> str:
    return (ROOT / file).read_text()


@cache
def names_of_tests(file: str) -> frozenset[str]:
    """``test_x`` and ``TestY::test_x``, as pytest names them."""
    found = []
    for node in ast.parse(source(file)).body:
        if isinstance(node, ast.FunctionDef):
            found.append(node.name)
        elif isinstance(node, ast.ClassDef):
            inner = [n.name for n in node.body if isinstance(n, ast.FunctionDef)]
            found += [f"{node.name}::{name}" for name in inner]
    return frozenset(name for name in found if name.rpartition("::")[2].startswith("test_"))


def test_every_required_trap_has_a_mistake() -> None:
    assert set(REQUIRED) <= {m.trap for m in MUTANTS}


def test_no_mistake_is_made_twice() -> None:
    assert len({(m.trap, m.what) for m in MUTANTS}) == len(MUTANTS)
    assert len({(m.file, m.old, m.new, m.test) for m in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.trap} {m.what}")
def test_a_mistake_can_still_be_made(mutant: Mutant) -> None:
    text = source(mutant.file)
    assert text.count(mutant.old) == 1
    broken = text.replace(mutant.old, mutant.new)
    assert broken != text
    ast.parse(broken)
    file, _, name = mutant.test.partition("::")
    assert name in names_of_tests(file)


@pytest.mark.parametrize(
    ("code", "result", "killed"),
    [
        (1, '<failure message="assert 1 == 2">E assert 1 == 2</failure>', True),
        (1, '<failure message="Failed: DID NOT RAISE">E Failed</failure>', True),
        (1, "<failure message=\"NameError: name 'x'\">E NameError: name 'x'</failure>", False),
        (1, '<failure message="ExceptionGroup: two">| AttributeError: no x</failure>', False),
        (1, '<error message="RuntimeError: fixture">E RuntimeError</error>', False),
        (0, '<skipped message="needs a GPU">skipped</skipped>', False),
        (0, "", False),
        (2, '<error message="collection failure">SyntaxError: x</error>', False),
        (-11, "", False),
    ],
)
def test_only_a_test_that_fails_kills(tmp_path, code, result, killed) -> None:
    """Not one that passes, is skipped or cannot run, nor code that is broken beside the point."""
    report = tmp_path / "report.xml"
    report.write_text(CASE.format(result))
    found = outcome(code, report)
    assert found.killed == killed
    assert str(found).startswith("killed by" if killed else "SURVIVED")
