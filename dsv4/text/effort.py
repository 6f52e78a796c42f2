"""Reasoning effort: the text before a prompt, which depends on the release of a checkpoint.

The releases use the same names for other texts, so that the table is a property of the checkpoint.
``EffortTable.from_path`` takes it from the checkpoint's ``encoding/encoding_dsv4.py``, which is
read as text and never run.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4.config.json_file import JsonError, read_bytes, show

ENCODER = Path("encoding") / "encoding_dsv4.py"
DEFAULT = "high"
_TEXTS = "REASONING_EFFORT_PROMPTS"  # of releases from 0731 on: a table
_MAXIMUM = "REASONING_EFFORT_MAX"  # of the first release: the text of "max"

_ABSOLUTE = """\
Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve \
the root cause, rigorously stress-testing your logic against all potential paths, edge cases, and \
adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, \
considered alternative, and rejected hypothesis to ensure absolutely no assumption is left \
unchecked.

"""
_BEYOND = """\
Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: \
exhaustively decompose the problem into its most fundamental components, trace every causal chain \
to its root, and resolve the underlying cause rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and \
are certain that no assumption remains unchecked and no error remains undiscovered.

"""


@dataclass(frozen=True)
class EffortTable:
    """Texts of a release by the name of the effort.

    Attributes:
        name: Of the release, for messages.
        texts: What a prompt begins with; empty: nothing.
    """

    name: str
    texts: Mapping[str, str]

    def text(self, effort: str | None) -> str:
        """The text of an effort; None is ``"high"``, as in DeepSeek's API.

        Raises:
            ValueError: if this release has no such effort.
        """
        effort = DEFAULT if effort is None else effort
        if effort not in self.texts:
            raise ValueError(
                f"effort is {effort!r}, wanted one of {', '.join(self.texts)} (table {self.name!r})"
            )
        return self.texts[effort]

    @classmethod
    def from_path(cls, folder: str | Path) -> EffortTable | None:
        """The table of a checkpoint; None if its folder has no ``encoding/encoding_dsv4.py``.

        Raises:
            ValueError: if the file has no table that can be read.
        """
        file = Path(folder) / ENCODER
        try:
            source = read_bytes(file).decode()
            values = _constants(ast.parse(source))
        except FileNotFoundError:
            return None
        except (JsonError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"{file} cannot be read: {error}") from error
        texts = values.get(_TEXTS)
        if texts is None and isinstance(values.get(_MAXIMUM), str):
            texts = {"high": "", "max": values[_MAXIMUM]}
        if (
            not isinstance(texts, dict)
            or DEFAULT not in texts
            or not all(isinstance(text, str) for item in texts.items() for text in item)
        ):
            raise ValueError(
                f"{file}: {_TEXTS} is {show(texts)}, wanted a table of texts with {DEFAULT!r}, or "
                f"{_MAXIMUM}, a text"
            )
        for known in (ORIGINAL, RELEASE_0731):
            if texts == known.texts:
                return known
        return cls(str(file), texts)


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Names that a module binds to literals, at its top level."""
    values: dict[str, Any] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            targets: list[ast.expr] = statement.targets
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets = [statement.target]
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Name) and target.id in (_TEXTS, _MAXIMUM):
                values[target.id] = ast.literal_eval(statement.value)  # type: ignore[arg-type]
    return values


ORIGINAL = EffortTable("original", {"high": "", "max": _ABSOLUTE})
RELEASE_0731 = EffortTable("0731", {"low": "", "high": _ABSOLUTE, "max": _BEYOND})
TABLES = {table.name: table for table in (ORIGINAL, RELEASE_0731)}
