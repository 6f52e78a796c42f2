"""Content of a file of results of either kind: rows of operators, or a whole model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4.bench import results
from dsv4.bench.problem import UsageError
from dsv4.bench.results import Row
from dsv4.bench.suites.model import document
from dsv4.bench.suites.model.document import ModelResults


@dataclass(frozen=True)
class Content:
    """A file's content.

    Attributes:
        header: Where the numbers come from.
        rows: Rows of operators; empty for a whole model.
        model: Results of a whole model; None for operators.
    """

    header: dict[str, Any]
    rows: tuple[Row, ...] = ()
    model: ModelResults | None = None


def load(path: Path) -> Content:
    """Read a file.

    Raises:
        UsageError: if it cannot be read or is no file of results; says which and why.
    """
    try:
        content = json.loads(path.read_text())
        if isinstance(content, dict) and content.get("schema") == document.SCHEMA:
            return Content(content["header"], model=document.parse(content))
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(f"{path}: {error}") from error
    read = results.read_json(str(path))
    return Content(read.header, read.rows)
