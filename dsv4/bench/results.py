"""Rows and files of results: ``{"header": {...}, "rows": [...]}``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dsv4.bench.environment import slug
from dsv4.bench.problem import UsageError

_NUMBER = (int, float)
_OPTIONAL_NUMBER = (int, float, type(None))
_HEADER: dict[str, Any] = {
    "gpu": str,
    "driver": str,
    "versions": dict,
    "commit": str,
    "command": str,
    "date": str,
    "copy_tbs": _NUMBER,
    "read_tbs": _NUMBER,
    "bf16_tflops": _NUMBER,
    "node_us": _OPTIONAL_NUMBER,  # None in files from before it was measured
}
_ROW: dict[str, Any] = {
    "op": str,
    "case": str,
    "shape": dict,
    "tokens": int,
    "backend": str,
    "reason": str,
    "us": _OPTIONAL_NUMBER,
    "floor_us": _NUMBER,
    "copy_share": _OPTIONAL_NUMBER,
    "bytes": int,
    "flops": int,
    "rivals": dict,
    "error": (*_OPTIONAL_NUMBER, str),
    "match": (bool, type(None)),
    "timer": str,
    "message": str,
}


# Absent from files written before they were measured.
_ADDED: dict[str, Any] = {"ratio": (*_OPTIONAL_NUMBER, str)}


@dataclass(frozen=True)
class Row:
    """One case measured.

    Attributes:
        op: Operator.
        case: Which of its uses in the model; empty if there is one.
        shape: Names and sizes.
        tokens: Tokens in the batch.
        backend: The implementation that ran.
        reason: Why that one.
        us: Median microseconds; None if the check failed.
        floor_us: What the machine's measured rates allow at best.
        copy_share: ``bytes`` over what a plain copy moves in ``us``; None without a time.
        bytes: Bytes that have to be moved, each once.
        flops: Operations of the products.
        rivals: Microseconds of others, by name; empty if the check failed.
        error: Largest error of a row over the norm of the row against float64, ``"bitwise"``, or
            None if unchecked.
        match: Whether the check passed, or None if unchecked.
        ratio: Largest error in units of what is allowed there; infinite where bits or NaNs are
            wrong, None if unchecked or unknown.
        timer: How ``us`` was taken.
        message: What the check found, or why the timer is not a graph.
    """

    op: str
    case: str
    shape: dict[str, int]
    tokens: int
    backend: str
    reason: str = ""
    us: float | None = None
    floor_us: float = 0.0
    bytes: int = 0
    flops: int = 0
    rivals: dict[str, float] = field(default_factory=dict)
    error: float | str | None = None
    match: bool | None = None
    timer: str = ""
    message: str = ""
    copy_share: float | None = None
    ratio: float | None = None

    @property
    def rival_ratio(self) -> float | None:
        """Time of the fastest rival over ours, above 1 where ours is faster; None without both."""
        return min(self.rivals.values()) / self.us if self.us and self.rivals else None


def document(header: dict[str, Any], rows: Iterable[Row]) -> dict[str, Any]:
    """What a file holds. An infinite error, which JSON lacks, becomes the string ``"inf"``."""
    return {"header": dict(header), "rows": [_plain(row) for row in rows]}


def _plain(row: Row) -> dict[str, Any]:
    values = asdict(row)
    for name in ("error", "ratio"):
        if values[name] == float("inf"):
            values[name] = "inf"
    return values


def validate(found: Any) -> None:
    """Check a document against the schema.

    Raises:
        ValueError: naming the first field that is missing, unknown or of the wrong type, and a row
            that has a time although its check failed.
    """
    if not isinstance(found, dict) or set(found) != {"header", "rows"}:
        raise ValueError("results: wanted exactly the fields header and rows")
    _fields("header", found["header"], _HEADER)
    if not isinstance(found["rows"], list):
        raise ValueError("results: rows is not a list")
    for i, row in enumerate(found["rows"]):
        where = f"rows[{i}]"
        _fields(where, row, _ROW, _ADDED)
        for name in ("shape", "rivals"):
            wanted = int if name == "shape" else _NUMBER
            for key, value in row[name].items():
                _typed(f"{where}.{name}.{key}", value, wanted)
        if isinstance(row["error"], str) and row["error"] not in ("bitwise", "inf"):
            raise ValueError(f"results: {where}.error is {row['error']!r}, wanted 'bitwise'")
        if isinstance(row.get("ratio"), str) and row["ratio"] != "inf":
            raise ValueError(f"results: {where}.ratio is {row['ratio']!r}, wanted a number")
        if row["match"] is False and (row["us"] is not None or row["rivals"]):
            raise ValueError(f"results: {where} has a time although its check failed")


def _fields(
    where: str, found: Any, schema: dict[str, Any], optional: dict[str, Any] | None = None
) -> None:
    if not isinstance(found, dict):
        raise ValueError(f"results: {where} is {type(found).__name__}, wanted named fields")
    known = {**schema, **(optional or {})}
    for name in [*schema, *found]:
        if name not in found or name not in known:
            kind = "unknown" if name in found else "missing"
            raise ValueError(f"results: {where}.{name} is {kind}")
    for name, value in found.items():
        _typed(f"{where}.{name}", value, known[name])


def _typed(where: str, value: Any, wanted: Any) -> None:
    kinds = wanted if isinstance(wanted, tuple) else (wanted,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ValueError(f"results: {where} is {value!r}, wanted {kinds}")


@dataclass(frozen=True)
class Results:
    """What a file holds.

    Attributes:
        header: Where the numbers come from.
        rows: In the order of the file.
    """

    header: dict[str, Any]
    rows: tuple[Row, ...]


def read_json(path: str) -> Results:
    """Read a file that ``write_json`` wrote, by this version or an older one.

    Raises:
        UsageError: if it cannot be read or is no file of results; says which and why.
    """
    try:
        found = json.loads(Path(path).read_text())
        validate(found)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: {error}") from error
    rows = []
    for row in found["rows"]:
        numbers = {n: float("inf") for n in ("error", "ratio") if row.get(n) == "inf"}
        rows.append(Row(**{**row, **numbers}))
    return Results(found["header"], tuple(rows))


def write_json(target: str, header: dict[str, Any], rows: list[Row]) -> list[Path]:
    """Write a file, or, if ``target`` ends with a slash, ``results/<gpu>/<op>.json`` below it.

    ``results/`` itself is that folder.

    Returns:
        The files written.
    """
    if not target.endswith("/"):
        return [_write(Path(target), document(header, rows))]
    base = Path(target)
    folder = (base if base.name == "results" else base / "results") / slug(str(header["gpu"]))
    by_op: dict[str, list[Row]] = {}
    for row in rows:
        by_op.setdefault(row.op, []).append(row)
    return [_write(folder / f"{op}.json", document(header, some)) for op, some in by_op.items()]


def _write(path: Path, content: dict[str, Any]) -> Path:
    validate(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    return path
