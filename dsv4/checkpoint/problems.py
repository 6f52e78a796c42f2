"""An error for everything that is wrong with a checkpoint, grouped by kind."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dsv4.checkpoint.shards import CheckpointError

_EXAMPLES = 5
_NEAREST = 5
# Comparing names costs some 20 us each.
_COMPARED = 2000


@dataclass(frozen=True)
class Problem:
    """A problem that was found.

    Attributes:
        kind: Heading under which problems of the same kind are counted.
        text: The names and values found and expected.
    """

    kind: str
    text: str


def raise_all(what: str, problems: Iterable[Problem], notes: dict[str, str] | None = None) -> None:
    """Raise one CheckpointError: per kind the number of problems and the first examples.

    Args:
        what: Summary of all problems.
        problems: All problems; nothing is raised if there is none.
        notes: For each kind, a line to add below its examples.
    """
    kinds: dict[str, list[str]] = {}
    for problem in problems:
        kinds.setdefault(problem.kind, []).append(problem.text)
    if not kinds:
        return
    lines = []
    for kind, texts in kinds.items():
        lines.append(f"  {kind}: {len(texts)}")
        lines += [f"    {text}" for text in texts[:_EXAMPLES]]
        if len(texts) > _EXAMPLES:
            lines.append(f"    and {len(texts) - _EXAMPLES} more")
        if notes and kind in notes:
            lines.append(f"    {notes[kind]}")
    count = sum(map(len, kinds.values()))
    plural = "s" if count != 1 else ""
    raise CheckpointError(f"{what} ({count} problem{plural}):\n" + "\n".join(lines))


def nearest(missing: Sequence[str], unused: Sequence[str]) -> str:
    """Return a note with the names of the file that are most similar to the missing ones.

    Args:
        missing: Names that were looked for, in every spelling known.
        unused: Names of the file that the model does not use.
    """
    if not unused:
        return "the checkpoint holds no other names"
    pool = unused[:_COMPARED]
    close: dict[str, None] = {}
    for name in missing:
        close.update(dict.fromkeys(difflib.get_close_matches(name, pool, n=2, cutoff=0.6)))
        if len(close) >= _NEAREST:
            break
    if close:
        return "nearest names found: " + ", ".join(list(close)[:_NEAREST])
    return "names found instead: " + ", ".join(unused[:_NEAREST])
