"""The table of what the plugin replaced in a model, and what it did not, with the reason."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path

from dsv4.cute.runtime import cubin_cache

DRAFT = "draft"


@dataclass(frozen=True)
class Row:
    """One place of the model.

    Attributes:
        part: Of ``switches.PARTS``.
        place: Qualified name of the module, with the layer's number.
        kernel: What runs there: an operator of this package, or vLLM's class.
        reason: Why it was not replaced; empty: it was.
        asked: Whether ``DSV4_VLLM`` asks for it. A place of two parts of which one is switched off,
            or a weight that is not quantised, is not asked for: nothing is missing if it stays.
    """

    part: str
    place: str
    kernel: str
    reason: str = ""
    asked: bool = True

    @property
    def replaced(self) -> bool:
        """Whether this package's kernels run there."""
        return not self.reason


@dataclass
class Report:
    """Rows in the order of the model's modules."""

    rows: list[Row] = field(default_factory=list)

    def replaced(self, part: str, place: str, kernel: str) -> None:
        """Note that ``kernel`` of this package runs at a place."""
        self.rows.append(Row(part, place, kernel))

    def left(self, part: str, place: str, kernel: str, reason: str) -> None:
        """Note that vLLM's ``kernel`` stays, and why."""
        assert reason
        self.rows.append(Row(part, place, kernel, reason))

    def not_asked(self, part: str, place: str, kernel: str, reason: str) -> None:
        """Note that vLLM's ``kernel`` stays, and that nothing is missing for that reason."""
        assert reason
        self.rows.append(Row(part, place, kernel, reason, asked=False))

    def nothing_replaced(self, parts: Iterable[str]) -> None:
        """Note for each of the parts of which nothing was replaced or refused that this is so."""
        known = {row.part for row in self.rows if row.replaced or row.asked}
        for part in sorted(set(parts) - known):
            self.left(part, "*", "vLLM's", "the model has no module that this part replaces")

    @property
    def refused(self) -> bool:
        """Whether a place that is asked for stays vLLM's."""
        return any(row.asked and not row.replaced for row in self.rows)

    @property
    def complete(self) -> bool:
        """Whether every place that is asked for, and something of every part, was replaced."""
        replaced = {row.part for row in self.rows if row.replaced}
        return not self.refused and all(row.part in replaced for row in self.rows)

    def __str__(self) -> str:
        """The table, one line per part, kernel and reason, with the number of places."""
        lines = [f"{'part':<18}{'places':>6}  {'kernel':<34}not replaced because"]
        lines += [
            f"{row.part:<18}{count:>6}  {row.kernel:<34}{row.reason}"
            for row, count in self._kinds()
        ]
        return "\n".join(lines)

    def _kinds(self) -> Iterator[tuple[Row, int]]:
        def kind(row: Row) -> tuple[str, str, str, bool]:
            return row.part, row.kernel, row.reason, row.asked

        for _, rows in groupby(sorted(self.rows, key=kind), key=kind):
            same = list(rows)
            yield same[0], len(same)

    def save(self, path: Path) -> None:
        """Write the rows as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([asdict(row) for row in self.rows], indent=1), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Report:
        """Read what ``save`` wrote."""
        return cls([Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))])


def folder() -> Path | None:
    """Return where engines save their reports; None if there is no folder for caches.

    It is ``vllm`` in the folder of compiled kernels, ``$DSV4_CACHE_DIR`` or
    ``~/.cache/dsv4/kernels``.
    """
    caches = cubin_cache.folder()
    return None if caches is None else caches / "vllm"


def path_of_stage(stage: int | str, stages: int) -> Path | None:
    """Return the file of a report of the last engine that was started.

    Args:
        stage: Number of the pipeline stage, or ``DRAFT``.
        stages: How many there are.
    """
    reports = folder()
    return None if reports is None else reports / f"report-{stage}-of-{stages}.json"
