"""The operators' arguments are written once, as records, and read by name."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from dsv4 import dispatch, ops
from dsv4.ops import _library
from dsv4.ops.rope import RopeArgs

PACKAGE = Path(dispatch.__file__).parent
SCHEMAS = (Path(__file__).parents[1] / "fixtures" / "schemas.txt").read_text().splitlines()


def test_schemas_stay_as_they_are() -> None:
    """Traces, exported graphs and caches of torch.compile name them."""
    found = [str(getattr(torch.ops.dsv4, op).default._schema) for op in _library.OPERATIONS]
    assert sorted(found) == SCHEMAS


def test_records_say_what_each_field_is() -> None:
    records = {operation.record for operation in _library.OPERATIONS.values()}
    assert len(records) == len(dispatch.operators())
    for record in records:
        text = inspect.getdoc(record)
        assert text is not None
        lines = text.partition("Attributes:\n")[2].splitlines()
        said = [
            line.split(":")[0].strip() for line in lines if line.startswith("    ") and ":" in line
        ]
        assert [name for name in said if name in record._fields] == list(record._fields), record


class Odd(NamedTuple):
    """A record of all that a schema knows."""

    x: _library.Written
    sizes: Sequence[int]
    state: _library.Written
    k: _library.Symbolic
    scale: float | None
    dtype: torch.dtype


def test_annotations_become_a_schema() -> None:
    assert _library._declared(Odd) == (
        "Tensor(a!) x, int[] sizes, Tensor(b!) state, SymInt k, float? scale, ScalarType dtype"
    )


def test_a_record_of_another_operator() -> None:
    x, args = torch.ones(2), RopeArgs(torch.zeros(2), torch.ones(1), torch.ones(1), True)
    found = _library.as_record(RopeArgs, args, x=x)
    assert found.x is x
    assert found.inverse is True
    assert found.cos is args.cos


def _is_args(node: ast.expr) -> bool:
    """``args`` of a call, or the parameter of an implementation."""
    if isinstance(node, ast.Attribute):
        owner = node.value
        return node.attr == "args" and isinstance(owner, ast.Name) and owner.id in ("call", "found")
    return isinstance(node, ast.Name) and node.id == "args"


def _by_position(tree: ast.AST, takes_record: bool) -> list[int]:
    """Lines that read arguments of an operator by position."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and _is_args(node.value):
            found.append(node.lineno)
        unpacks = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
        if unpacks and _is_args(node.value):
            found.append(node.lineno)
        if takes_record and isinstance(node, ast.Starred) and _is_args(node.value):
            found.append(node.lineno)
    return found


def _functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """Functions that take a call of the dispatcher, or a record."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            kinds = [ast.unparse(a.annotation) for a in node.args.args if a.annotation]
            if any(kind.endswith("Args") or kind in ("Call", "dispatch.Call") for kind in kinds):
                found.append(node)
    return found


@pytest.mark.parametrize("folder", ["reference", "triton", "cute", "blas", "bench", "ops", "."])
def test_nothing_reads_arguments_by_position(folder: str) -> None:
    files = (PACKAGE / folder).glob("*.py" if folder == "." else "**/*.py")
    wrong = []
    for file in files:
        text = file.read_text()
        assert "call.args[" not in text, file
        for function in _functions(ast.parse(text)):
            wrong += [f"{file.name}:{line}" for line in _by_position(function, True)]
    assert not wrong


def test_positions_are_found_where_there_are_some() -> None:
    text = "def f(call: Call):\n    x, y = call.args\n    return call.args[0], g(*call.args)\n"
    (function,) = _functions(ast.parse(text))
    assert sorted(_by_position(function, True)) == [2, 3, 3]


def test_arguments_that_are_missing_or_too_many_raise() -> None:
    with pytest.raises(TypeError):
        RopeArgs(torch.ones(2), torch.ones(1), torch.ones(1))
    with pytest.raises(RuntimeError, match="missing value for argument"):
        torch.ops.dsv4.rope(torch.ones(2), torch.ones(1), torch.ones(1), True)


def test_a_wrong_type_is_what_torch_says() -> None:
    """A plain call whose types are not declared goes through the dispatcher, which refuses it."""
    with pytest.raises((TypeError, RuntimeError)):
        ops.rms_norm(torch.ones(2, 4), None, "1")
