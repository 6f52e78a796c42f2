"""Rows and files of results: ``{"header": {...}, "rows": [...]}``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dsv4.bench.environment import slug
from dsv4.bench.problem import UsageError

_RANKS = re.compile(r"(?P<ranks>\d+) ranks")  # the case of sums over processes, not virtual ones
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
    "bound_us": _NUMBER,
    "copy_share": _OPTIONAL_NUMBER,
    "bytes": int,
    "flops": int,
    "baselines": dict,
    "error": (*_OPTIONAL_NUMBER, str),
    "match": (bool, type(None)),
    "timer": str,
    "message": str,
}


# Absent from files written before they were measured.
_ADDED: dict[str, Any] = {"ratio": (*_OPTIONAL_NUMBER, str)}
# Names of fields, and how names of cases ended, in files of earlier versions.
_FORMER_FIELDS = {"rivals": "baselines", "floor_us": "bound_us"}
_FORMER_ENDING, _ENDING = "rested", "cooled"
_FORMER_CASE, _CASE = "between the products", "between the GEMMs"
_FORMER_BASELINE, _BASELINE = "kernels that are no products", "kernels that are no GEMMs"


@dataclass(frozen=True)
class Row:
    """A measured case.

    Attributes:
        op: Operator.
        case: Which of its uses in the model; empty if there is one.
        shape: Names and sizes.
        tokens: Tokens in the batch.
        backend: The implementation that ran.
        reason: Why that one.
        us: Median microseconds; None if the check failed.
        bound_us: What the machine's measured rates allow at best.
        copy_share: ``bytes`` over what a plain copy moves in ``us``; None without a time.
        bytes: Bytes that have to be moved, each once.
        flops: Operations of the GEMMs.
        baselines: Microseconds of other implementations, by name; empty if the check failed.
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
    bound_us: float = 0.0
    bytes: int = 0
    flops: int = 0
    baselines: dict[str, float] = field(default_factory=dict)
    error: float | str | None = None
    match: bool | None = None
    timer: str = ""
    message: str = ""
    copy_share: float | None = None
    ratio: float | None = None

    @property
    def baseline_ratio(self) -> float | None:
        """Time of the fastest baseline over ``us``; None if either is missing."""
        return min(self.baselines.values()) / self.us if self.us and self.baselines else None


def document(header: dict[str, Any], rows: Iterable[Row]) -> dict[str, Any]:
    """Return a file's content. An infinite error, which JSON lacks, is the string ``"inf"``."""
    return {"header": dict(header), "rows": [_plain(row) for row in rows]}


def _plain(row: Row) -> dict[str, Any]:
    values = asdict(row)
    for name in ("error", "ratio"):
        if values[name] == float("inf"):
            values[name] = "inf"
    return values


def upgraded(content: Any) -> Any:
    """A document of any version with the field and case names of this one.

    What is not shaped like a document is returned as it is, for ``validate`` to refuse.
    """
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list):
        return content
    return {**content, "rows": [_upgraded_row(row) for row in content["rows"]]}


def _upgraded_row(row: Any) -> Any:
    if not isinstance(row, dict):
        return row
    fields = {_FORMER_FIELDS.get(name, name): value for name, value in row.items()}
    case = fields.get("case")
    if len(fields) != len(row):
        return row  # both names of one field: unknown to the schema
    if isinstance(case, str):
        if case.split(" ")[-1] == _FORMER_ENDING:
            case = case.removesuffix(_FORMER_ENDING) + _ENDING
        fields["case"] = case.replace(_FORMER_CASE, _CASE)
    times = fields.get("baselines")
    if isinstance(times, dict):
        renamed = {name.replace(_FORMER_BASELINE, _BASELINE): us for name, us in times.items()}
        fields["baselines"] = renamed
    return fields


def validate(content: Any) -> None:
    """Check a document against the schema.

    Raises:
        ValueError: naming the first field that is missing, unknown or of the wrong type, and a row
            that has a time although its check failed.
    """
    if not isinstance(content, dict) or set(content) != {"header", "rows"}:
        raise ValueError("results: wanted exactly the fields header and rows")
    _fields("header", content["header"], _HEADER)
    if not isinstance(content["rows"], list):
        raise ValueError("results: rows is not a list")
    for i, row in enumerate(content["rows"]):
        where = f"rows[{i}]"
        _fields(where, row, _ROW, _ADDED)
        for name in ("shape", "baselines"):
            kinds = int if name == "shape" else _NUMBER
            for key, value in row[name].items():
                _typed(f"{where}.{name}.{key}", value, kinds)
        if isinstance(row["error"], str) and row["error"] not in ("bitwise", "inf"):
            raise ValueError(f"results: {where}.error is {row['error']!r}, wanted 'bitwise'")
        if isinstance(row.get("ratio"), str) and row["ratio"] != "inf":
            raise ValueError(f"results: {where}.ratio is {row['ratio']!r}, wanted a number")
        if row["match"] is False and (row["us"] is not None or row["baselines"]):
            raise ValueError(f"results: {where} has a time although its check failed")


def _fields(
    where: str, values: Any, schema: dict[str, Any], optional: dict[str, Any] | None = None
) -> None:
    if not isinstance(values, dict):
        raise ValueError(f"results: {where} is {type(values).__name__}, wanted named fields")
    known = {**schema, **(optional or {})}
    for name in [*schema, *values]:
        if name not in values or name not in known:
            kind = "unknown" if name in values else "missing"
            raise ValueError(f"results: {where}.{name} is {kind}")
    for name, value in values.items():
        _typed(f"{where}.{name}", value, known[name])


def _typed(where: str, value: Any, kinds: Any) -> None:
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ValueError(f"results: {where} is {value!r}, wanted {kinds}")


@dataclass(frozen=True)
class Results:
    """The content of a results file.

    Attributes:
        header: Where the numbers come from.
        rows: Rows in the order of the file.
    """

    header: dict[str, Any]
    rows: tuple[Row, ...]


def read_json(path: str) -> Results:
    """Read a file that ``write_json`` wrote, by this version or an older one.

    Raises:
        UsageError: if it cannot be read or is no file of results; says which and why.
    """
    try:
        content = upgraded(json.loads(Path(path).read_text()))
        validate(content)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: {error}") from error
    rows = []
    for row in content["rows"]:
        numbers = {n: float("inf") for n in ("error", "ratio") if row.get(n) == "inf"}
        rows.append(Row(**{**row, **numbers}))
    return Results(content["header"], tuple(rows))


def write_json(target: str, header: dict[str, Any], rows: list[Row]) -> list[Path]:
    """Write a file, or, if ``target`` ends with a slash, files in ``results/<machine>`` below it.

    ``results/`` itself is that folder; ``machine`` names the one in it. Files are named by
    ``file_name``, one per operator.

    Returns:
        The files written.
    """
    if not target.endswith("/"):
        return [_write(Path(target), document(header, rows))]
    base = Path(target)
    folder = (base if base.name == "results" else base / "results") / machine(header, gpus_of(rows))
    by_op: dict[str, list[Row]] = {}
    for row in rows:
        by_op.setdefault(row.op, []).append(row)
    return [
        _write(folder / file_name(header, op), document(header, of_op))
        for op, of_op in by_op.items()
    ]


def write_document(target: str, suite: str, content: dict[str, Any]) -> Path:
    """Write a document that has no rows to a file, or, as ``write_json``, below a folder."""
    path = Path(target)
    if target.endswith("/"):
        folder = path if path.name == "results" else path / "results"
        path = folder / machine(content["header"]) / file_name(content["header"], suite)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(content))
    return path


def gpus_of(rows: Iterable[Row]) -> int:
    """Return the number of GPUs that rows were measured on together."""
    several = (_RANKS.fullmatch(row.case) for row in rows if row.op == "all_reduce")
    return max((int(match["ranks"]) for match in several if match), default=1)


def machine(header: dict[str, Any], gpus: int = 1) -> str:
    """Return the folder of results on some GPUs: ``"nvidia-h200"``, ``"nvidia-h200-x2"``."""
    name = slug(str(header["gpu"]))
    return f"{name}-x{gpus}" if gpus > 1 else name


def file_name(header: dict[str, Any], suite: str) -> str:
    """``"2026-11-28-gemm.json"``: the header's date and the suite."""
    return f"{str(header['date'])[:10]}-{suite}.json"


def _write(path: Path, content: dict[str, Any]) -> Path:
    validate(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(content))
    return path


def text_of(content: dict[str, Any]) -> str:
    """Return a document as JSON: a line for each row, so that files stay small and differ by rows.

    A field is a line, or as many lines as it has entries if it is a list; a header is indented.
    """
    fields = []
    for name, value in content.items():
        if isinstance(value, list) and value:
            shown = "[\n" + ",\n".join(f"  {_dumped(entry)}" for entry in value) + "\n ]"
        elif isinstance(value, dict) and value:
            entries = [f"  {_dumped(key)}: {_dumped(entry)}" for key, entry in value.items()]
            shown = "{\n" + ",\n".join(entries) + "\n }"
        else:
            shown = _dumped(value)
        fields.append(f" {_dumped(name)}: {shown}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _dumped(value: Any) -> str:
    return json.dumps(value, allow_nan=False)
