"""Report of a swap of modules, and how to undo it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv4.checkpoint.mxfp4 import Conversion
    from dsv4.layers.pack import Packing


@dataclass(frozen=True)
class Replaced:
    """One module that was replaced: its qualified name, its part, both classes."""

    name: str
    part: str
    old: str
    new: str


@dataclass(frozen=True)
class NotReplaced:
    """One module that was not replaced, and why."""

    name: str
    part: str
    reason: str


@dataclass
class Report:
    """The changes that ``apply`` or ``from_pretrained`` made to a model.

    Holds the replaced modules for ``undo``. They share their tensors with the new ones and cost no
    memory, until a tensor is replaced (by quantising in place, for instance): then the old one
    lives as long as the report.

    Attributes:
        title: First line of the printed report.
        replaced: Modules that were replaced.
        not_replaced: Modules that could have been replaced but were not.
        notes: Differences in behaviour from now on.
        left_out: Names of checkpoint tensors that the model has no place for.
        packing: Layers that ``from_pretrained`` packed, and why others are not packed; None if it
            was to pack none.
        conversion: Conversions of the MXFP4 matrices of its checkpoint.
    """

    title: str
    replaced: tuple[Replaced, ...] = ()
    not_replaced: tuple[NotReplaced, ...] = ()
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    packing: Packing | None = None
    conversion: Conversion | None = None
    _undo: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    @property
    def kept(self) -> tuple[NotReplaced, ...]:
        """The former name of ``not_replaced``."""
        return self.not_replaced

    def undo(self) -> None:
        """Put the original modules back, the same objects, with the tensors the model has now.

        A second call does nothing.

        Raises:
            RuntimeError: if the originals cannot hold the present tensors (quantised since), never
                held any (``from_pretrained``), or a later ``apply`` must be undone first. Nothing
                is changed then.
        """
        if self._undo is not None:
            self._undo()
            self._undo = None

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield self.title
        yield f"replaced {len(self.replaced)}"
        groups = _grouped(self.replaced, lambda r: (r.part, r.old))
        yield from _table((part, old, _abbreviated(names)) for (part, old), names in groups)
        if self.not_replaced:
            yield f"not replaced {len(self.not_replaced)}"
            groups = _grouped(self.not_replaced, lambda k: (k.part, k.reason))
            yield from _table((part, _abbreviated(names), why) for (part, why), names in groups)
        if self.left_out:
            yield f"left out of the checkpoint {len(self.left_out)}"
            yield f"  {_abbreviated(self.left_out)}"
        for note in self.notes:
            yield f"note: {note}"


def _grouped(
    items: Sequence[Any], key: Callable[[Any], tuple[str, str]]
) -> list[tuple[tuple[str, str], list[str]]]:
    groups: dict[tuple[str, str], list[str]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item.name)
    return list(groups.items())


def _table(rows: Any) -> Iterator[str]:
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(2)] if rows else []
    for row in rows:
        yield f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}"


def _abbreviated(names: Sequence[str]) -> str:
    """Two names and the count of the rest."""
    shown = ", ".join(names[:2])
    return shown if len(names) <= 2 else f"{shown} and {len(names) - 2} more"
