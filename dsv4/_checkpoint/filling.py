"""Passing over the slots of a model, with the files of one layer mapped at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsv4._checkpoint import names
from dsv4._checkpoint.mxfp4 import Conversion
from dsv4._checkpoint.progress import Progress
from dsv4._checkpoint.slots import Entries, ExpertsSlot, Slot
from dsv4.layers.pack import Packing


@dataclass(frozen=True)
class Filled:
    """What ``fill`` did.

    Attributes:
        packing: Which layers are packed and which are not; None if none was to be.
        conversion: What became of MXFP4 matrices.
    """

    packing: Packing | None
    conversion: Conversion


def each_slot(
    slots: Sequence[Slot],
    entries: Entries,
    close: Callable[[], None],
    bar: Progress,
    action: Callable[[Slot], None],
) -> None:
    """Pass every slot to ``action``, and unmap the files by ``close`` after each layer."""
    layer = ""
    try:
        for slot in slots:
            if names.layer_of(slot.name) != layer:
                layer = names.layer_of(slot.name)
                close()
            action(slot)
            bar.advance(_bytes_of(slot, entries))
    finally:
        close()
    bar.finish()


def _bytes_of(slot: Slot, entries: Entries) -> int:
    stacked = isinstance(slot, ExpertsSlot) and slot.stacked()[0] in entries
    wanted = slot.wanted_stacked() if stacked else slot.wanted()  # type: ignore[attr-defined]
    return sum(entries[name].nbytes for name, _ in wanted)
