"""Files of results, ``<folder>/<machine>/<date>-<suite>.json``, and published figures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dsv4.bench.content import load
from dsv4.bench.problem import UsageError
from dsv4.bench.results import Row, gpus_of, machine
from dsv4.bench.suites.crossover_results import Times
from dsv4.bench.suites.model.document import ModelResults, gpus_of_model

PUBLISHED = "published.json"
_NAME = re.compile(r"(?P<date>\d{4}-\d\d-\d\d)-(?P<suite>[a-z0-9_.-]+)\.json")
_DATE = re.compile(r"\d{4}-\d\d(-\d\d)?")


@dataclass(frozen=True)
class ResultFile:
    """One file of results.

    Attributes:
        path: Where it is.
        date: Day of the measurement.
        suite: What was measured, as the name of the file says.
        header: Where the numbers come from.
        rows: Rows of operators; empty for a whole model.
        model: Results of a whole model; None for operators.
        crossovers: GEMMs in FP8 and bfloat16 by tokens, which are rows, too; or none.
    """

    path: Path
    date: str
    suite: str
    header: dict[str, Any]
    rows: tuple[Row, ...] = ()
    model: ModelResults | None = None
    crossovers: tuple[Times, ...] = ()

    @property
    def gpus(self) -> int:
        """The number of GPUs that it was measured on."""
        if self.model is None:
            return gpus_of(self.rows)
        named = [row.model for row in (*self.model.rows, *self.model.prompts)]
        return max(map(gpus_of_model, named), default=1)

    @property
    def machine(self) -> str:
        """What it was measured on, for readers."""
        name = str(self.header["gpu"])
        return name if self.gpus == 1 else f"{self.gpus} x {name}"


@dataclass(frozen=True)
class Published:
    """A figure that others published.

    Attributes:
        system: Software, with its version where it is known.
        gpus: Number and kind of GPUs.
        model: Checkpoint and format of its weights.
        drafts: Drafting of tokens; ``"none"`` without it.
        ms_per_token: Milliseconds of one request between two of its tokens.
        note: How it was measured or computed.
        source: Address of the publication.
        published: Day or month of the publication.
        read: Day on which it was read.
    """

    system: str
    gpus: str
    model: str
    drafts: str
    ms_per_token: float
    note: str
    source: str
    published: str
    read: str

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "ms_per_token":
                if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                    raise ValueError(f"ms_per_token is {value!r}, wanted a number > 0")
            elif not isinstance(value, str) or not value:
                raise ValueError(f"{field.name} is {value!r}, wanted a text")
        if not self.source.startswith("https://"):
            raise ValueError(f"source is {self.source!r}, wanted an address with https://")
        for name in ("published", "read"):
            if not _DATE.fullmatch(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)!r}, wanted YYYY-MM or YYYY-MM-DD")


@dataclass(frozen=True)
class ResultsFolder:
    """All files of a folder of results.

    Attributes:
        root: The folder.
        gpus: Files of each GPU by the name of its folder, the suites in alphabetical order and the
            newest file of each first.
        published: Figures of others.
    """

    root: Path
    gpus: dict[str, tuple[ResultFile, ...]]
    published: tuple[Published, ...]

    @classmethod
    def read(cls, root: Path) -> ResultsFolder:
        """Read a folder.

        Raises:
            UsageError: if it does not exist, or a file's name or content is wrong.
        """
        if not root.is_dir():
            raise UsageError(f"{root} is no folder, wanted one with <gpu>/<date>-<suite>.json")
        gpus = {}
        for folder in sorted(path for path in root.iterdir() if path.is_dir()):
            files = [_read(path) for path in sorted(folder.glob("*.json"))]
            files.sort(key=lambda file: file.date, reverse=True)
            files.sort(key=lambda file: file.suite)
            if files:
                gpus[folder.name] = tuple(files)
        return cls(root, gpus, tuple(_published(root / PUBLISHED)))

    def newest(self, gpu: str) -> Iterator[ResultFile]:
        """Yield the newest file of each suite of a GPU."""
        suites = set[str]()
        for file in self.gpus.get(gpu, ()):
            if file.suite not in suites:
                suites.add(file.suite)
                yield file

    def find(self, gpu: str, suite: str) -> ResultFile | None:
        """Return the newest file of a suite, or None."""
        return next((file for file in self.newest(gpu) if file.suite == suite), None)


def _read(path: Path) -> ResultFile:
    named = _NAME.fullmatch(path.name)
    if named is None:
        raise UsageError(f"{path}: the name is {path.name!r}, wanted <date>-<suite>.json")
    content = load(path)
    read = (content.header, content.rows, content.model, content.crossovers)
    file = ResultFile(path, named["date"], named["suite"], *read)
    for what, of_path, of_header in (
        ("date", named["date"], str(file.header["date"])[:10]),
        ("folder", path.parent.name, machine(file.header, file.gpus)),
    ):
        if of_path != of_header:
            raise UsageError(f"{path}: the {what} is {of_path!r}, its header says {of_header!r}")
    return file


def _published(path: Path) -> Iterator[Published]:
    if not path.exists():
        return
    try:
        for entry in json.loads(path.read_text())["figures"]:
            yield Published(**entry)
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path}: {error}") from error
