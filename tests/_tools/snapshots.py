"""Recorded figures of compiled kernels: ``snapshots/<module>.json`` beside a module of tests.

What a kernel must have (no spills, a wait before the first load, its budgets) is a property in the
test. How many instructions of a kind the compiler makes of it is only recorded here: a difference
fails the test, and ``pytest --update`` records the new figures, to be read in the diff of a commit.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

Figures = Mapping[str, int]


def file_of(module: Path) -> Path:
    """Return the file with the figures of a module of tests."""
    return module.parent / "snapshots" / f"{module.stem.removeprefix('test_')}.json"


@dataclass(frozen=True)
class Snapshots:
    """The figures of one module of tests.

    Attributes:
        module: The module's file.
        update: Record what is found instead of comparing it.
        complete: Every subject must have been recorded. Not in the profile nightly, which compiles
            configurations that no other profile does.
    """

    module: Path
    update: bool = False
    complete: bool = True

    def check(self, group: str, figures: Mapping[str, Figures]) -> None:
        """Compare the figures of each subject with those that are recorded, or record them.

        Args:
            group: Which of the module's snapshots, a test's name say.
            figures: Of each subject, a kernel's configuration say, figures by name.

        Raises:
            AssertionError: A subject's figures are others than those recorded, or none are.
        """
        if self.update:
            with self._locked() as recorded:
                known = recorded.setdefault(group, {})
                known.update(
                    {s: dict(f) for s, f in figures.items() if self.complete or s in known}
                )
            return
        recorded = self._read().get(group, {})
        differences = []
        for subject, actual in figures.items():
            if subject in recorded:
                differences += _differences(subject, actual, recorded[subject])
            elif self.complete:
                differences.append(f"{subject}: nothing is recorded")
        assert not differences, "\n".join([*differences, self._advice(group)])

    def check_no_others(self, group: str, subjects: Collection[str]) -> None:
        """Raise if figures of other subjects are recorded, or remove them from the record."""
        if self.update:
            with self._locked() as recorded:
                known = recorded.get(group, {})
                recorded[group] = {s: f for s, f in known.items() if s in subjects}
            return
        others = sorted(set(self._read().get(group, {})) - set(subjects))
        assert not others, "\n".join(
            [*(f"{s}: recorded, but no test has it" for s in others), self._advice(group)]
        )

    def _advice(self, group: str) -> str:
        path = file_of(self.module)
        return (
            f"({group!r} in {path.parent.name}/{path.name}) If the change is meant, record it by "
            f"`pytest --update {self.module}` and commit the diff."
        )

    def _read(self) -> dict[str, dict[str, dict[str, int]]]:
        path = file_of(self.module)
        return json.loads(path.read_text() or "{}") if path.exists() else {}

    @contextmanager
    def _locked(self) -> Iterator[dict[str, dict[str, dict[str, int]]]]:
        """The record, written back afterwards; workers of pytest-xdist do so one at a time."""
        path = file_of(self.module)
        path.parent.mkdir(exist_ok=True)
        with path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            recorded = self._read()
            yield recorded
            file.truncate(0)
            file.write(_written(recorded))


def _differences(subject: str, actual: Figures, recorded: Figures) -> Iterator[str]:
    for name in sorted(actual.keys() | recorded.keys()):
        if actual.get(name) != recorded.get(name):
            yield (f"{subject}: {name} is {actual.get(name)}, recorded is {recorded.get(name)}")


def _written(recorded: Mapping[str, Mapping[str, Figures]]) -> str:
    """JSON with one subject a line."""
    groups = []
    for group, subjects in sorted(recorded.items()):
        lines = [
            f"    {json.dumps(subject)}: {json.dumps(dict(sorted(figures.items())))}"
            for subject, figures in sorted(subjects.items())
        ]
        groups.append(f"  {json.dumps(group)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(groups) + "\n}\n"
