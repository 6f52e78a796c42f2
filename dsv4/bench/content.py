"""Content of a file of results: rows of operators, a whole model, or crossovers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4.bench import results
from dsv4.bench.problem import UsageError
from dsv4.bench.results import Row
from dsv4.bench.suites import crossover_results
from dsv4.bench.suites.crossover_results import Times
from dsv4.bench.suites.model import document
from dsv4.bench.suites.model.document import ModelResults


@dataclass(frozen=True)
class Content:
    """A file's content.

    Attributes:
        header: Where the numbers come from.
        rows: Rows of operators; empty for a whole model.
        model: Results of a whole model; None for operators.
        crossovers: GEMMs in FP8 and bfloat16 by tokens, which are rows, too; or none.
    """

    header: dict[str, Any]
    rows: tuple[Row, ...] = ()
    model: ModelResults | None = None
    crossovers: tuple[Times, ...] = ()


def load(path: Path) -> Content:
    """Read a file.

    Raises:
        UsageError: if it cannot be read or is no file of results; says which and why.
    """
    try:
        content = json.loads(path.read_text())
        if isinstance(content, dict) and content.get("schema") == document.SCHEMA:
            return Content(content["header"], model=document.parse(content))
        if isinstance(content, dict) and content.get("schema") == crossover_results.SCHEMA:
            gemms = crossover_results.parse(content)
            return Content(content["header"], crossover_results.rows(gemms), crossovers=gemms)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(f"{path}: {error}") from error
    read = results.read_json(str(path))
    return Content(read.header, read.rows)
