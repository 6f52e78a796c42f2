"""The table of mutants fits the code: ``python -m tests._tools.mutants`` runs each of them."""

from __future__ import annotations

import ast
import builtins
import symtable
from functools import cache
from pathlib import Path

import pytest

from tests._tools.mutants import MUTANTS, REQUIRED, Mutant
from tests._tools.mutants.mutant import StaleMutantError
from tests._tools.mutants.watch import outcome

ROOT = Path(__file__).resolve().parents[2]


CASE = '<testsuites><testsuite><testcase name="x">{}</testcase></testsuite></testsuites>'


@cache
def source(file: str) -> str:
    return (ROOT / file).read_text()


@cache
def names_of_tests(file: str) -> frozenset[str]:
    """``test_x`` and ``TestY::test_x``, as pytest names them."""
    names = []
    for node in ast.parse(source(file)).body:
        if isinstance(node, ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.ClassDef):
            inner = [n.name for n in node.body if isinstance(n, ast.FunctionDef)]
            names += [f"{node.name}::{name}" for name in inner]
    return frozenset(name for name in names if name.rpartition("::")[2].startswith("test_"))


def test_every_required_pitfall_has_a_mutant() -> None:
    assert set(REQUIRED) <= {m.topic for m in MUTANTS}


def test_mutants_are_distinct() -> None:
    assert len({(m.topic, m.what) for m in MUTANTS}) == len(MUTANTS)
    assert len({(m.where, m.old, m.new, m.test) for m in MUTANTS}) == len(MUTANTS)


def unknown_names(text: str) -> set[str]:
    """Names that functions of a module take for global ones and that the module does not have."""
    module = symtable.symtable(text, "module", "exec")
    names, tables = set(), [module]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        names |= {s.get_name() for s in table.get_symbols() if s.is_global() and s.is_referenced()}
    return names - set(module.get_identifiers()) - set(dir(builtins))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.topic} {m.what}")
def test_a_mutant_still_applies(mutant: Mutant) -> None:
    text = source(mutant.file)
    mutated = mutant.apply(text)
    assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(text))
    assert unknown_names(mutated) <= unknown_names(text), "a NameError kills no mutant"
    file, _, name = mutant.test.partition("::")
    assert name in names_of_tests(file)


MODULE = """
SIZE = 1

@cache
def first(x, y=2 + 1):
    # A comment.
    if x:
        return f(
            x
        )
    return x  # f(x)


class Shape:
    SIZE = 1

    def first(self):
        '''Twice.

        More lines.
        '''
        def inner():
            return f(x)

        a = f(x)
        b = 2
        return a
"""


def mutated(where: str, old: str, new: str) -> str:
    return Mutant("", "", f"module:{where}", old, new, "").apply(MODULE)


@pytest.mark.parametrize(
    ("where", "old", "new", "before", "after"),
    [
        ("first", "f(x)", "g(x)", "f(\n            x\n        )", "g(x)"),
        ("first", "2 + 1", "2", "y=2 + 1", "y=2"),
        ("first", "return x", "return y", "return x  #", "return y  #"),
        ("Shape.first", "a = f(x)\nb = 2", "b = 2", "a = f(x)", ""),
        ("Shape.first.inner", "return f(x)", "", "            return f(x)", "            pass"),
        ("Shape.first.inner", "f(x)", "3", "            return f(x)", "            return 3"),
        ("Shape", "SIZE = 1", "SIZE = 2", "    SIZE = 1", "    SIZE = 2"),
        ("", "SIZE = 1", "SIZE = 2", "\nSIZE = 1", "\nSIZE = 2"),
    ],
)
def test_a_mutant_changes_its_function_alone(where, old, new, before, after) -> None:
    expected = ast.parse(MODULE.replace(before, after, 1))
    assert ast.dump(ast.parse(mutated(where, old, new))) == ast.dump(expected)


def test_what_stands_elsewhere_is_not_replaced() -> None:
    for where in ("first", "Shape"):
        with pytest.raises(StaleMutantError, match=f"module:{where} has no 'b = 2'"):
            mutated(where, "b = 2", "b = 3")
    with pytest.raises(StaleMutantError, match=r"module\.py has no second"):
        mutated("second", "f(x)", "g(x)")


def test_every_occurrence_in_the_function_is_replaced() -> None:
    text = mutated("Shape.first", "f(x)", "g(x)")
    assert (text.count("g(x)"), text.count("f(x)")) == (2, 1)


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
    """A test that passes, is skipped or cannot run does not count, nor code broken elsewhere."""
    report = tmp_path / "report.xml"
    report.write_text(CASE.format(result))
    actual = outcome(code, report)
    assert actual.killed == killed
    assert str(actual).startswith("killed by" if killed else "SURVIVED")
