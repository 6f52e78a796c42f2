"""Compare the entries that a module tree expects with those of a checkpoint, before any is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsv4.checkpoint import names
from dsv4.checkpoint.entries import Entry
from dsv4.checkpoint.expert_slots import INPUT_SCALES, WAYS_OUT
from dsv4.checkpoint.options import Options
from dsv4.checkpoint.problems import Problem, nearest
from dsv4.checkpoint.slots import Entries, Slot

_MISSING, _EXTRA, _SHAPE = "missing", "not part of the model", "wrong shape"
# Missing names for which similar names in the file are looked for.
_SOUGHT = 20


@dataclass(frozen=True)
class DryRun:
    """The effects that filling would have, from the headers alone.

    Attributes:
        problems: All problems.
        notes: For each kind of problem, a line to add to it.
        nbytes: Bytes that would be read.
    """

    problems: list[Problem]
    notes: dict[str, str]
    nbytes: int


def dry_run(
    slots: Sequence[Slot],
    entries: Entries,
    stray: Sequence[str],
    options: Options,
    ignored: Callable[[str], bool],
) -> DryRun:
    """Compare the entries that slots expect with the headers of a checkpoint."""
    problems: list[Problem] = []
    taken: set[str] = set()
    elsewhere: set[str] = set()
    missing: list[str] = []
    for slot in slots:
        bad = []
        for expected in slot.expected(entries):
            name = expected.name
            taken.add(name)
            if name not in entries:
                missing.append(name)
                bad.append(Problem(_MISSING, f"{name} is missing{_original(name)}"))
            elif entries[name].shape != expected.shape:
                bad.append(_wrong_shape(entries[name], expected.shape))
        problems += bad or slot.problems(entries, options)
        elsewhere.update(slot.left_to_others())
    # An ignored name is still shown as similar to a missing one.
    unclaimed = [entries[n].weight.name for n in entries if n not in taken]
    others = [n for n in entries if n not in taken and n not in elsewhere]
    extra = [entries[n].weight.name for n in others if not ignored(n)]
    extra += [name for name in stray if not ignored(name)]
    problems += [Problem(_EXTRA, f"{name} is not part of the model") for name in extra]
    notes = {INPUT_SCALES: WAYS_OUT}
    if missing:
        spellings = [names.to_original(name) or name for name in missing[:_SOUGHT]]
        notes[_MISSING] = nearest(spellings, [*stray, *unclaimed])
    nbytes = sum(entries[name].nbytes for name in taken if name in entries)
    return DryRun(problems, notes, nbytes)


def _wrong_shape(entry: Entry, shape: tuple[int, ...]) -> Problem:
    text = (
        f"{entry.weight.name} has shape {list(entry.shape)}, wanted {list(shape)} "
        "by the configuration"
    )
    return Problem(_SHAPE, text)


def _original(name: str) -> str:
    original = names.to_original(name)
    return "" if original is None else f" ({original} in DeepSeek's names)"
