"""Steps that may need more experts than there are slots: waves, planned on the host.

The experts with a slot come first, without a copy. The others come in batches. ``plan_waves`` puts
them into the two halves of the slots that are not static, in turn: while one half is multiplied,
the other is loaded. ``plan_stream`` puts all of them into a buffer beside the slots
(``dsv4.layers._expert_staging``), and needs no choice of the step for that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Wave:
    """Experts that are multiplied together.

    Attributes:
        start: First slot.
        stop: Slot behind the last.
        first: Place of the first slot's expert in the order of rows; those of the others follow.
        half: Number of the half that the slots are in; None: nothing is loaded to them.
        loads: Experts to load before, and their slots.
        staged: Whether the slots are those of a half of the buffer.
    """

    start: int
    stop: int
    first: int
    half: int | None
    loads: tuple[tuple[int, int], ...] = ()
    staged: bool = False

    @property
    def stop_first(self) -> int:
        """Place behind that of the last slot's expert."""
        return self.first + self.stop - self.start


@dataclass(frozen=True)
class WavePlan:
    """The waves of a step.

    Attributes:
        waves: In their order.
        position: Place of each expert in the order of rows; -1: not needed.
        positions: Number of places, some of which have no expert; not more than experts.
        expert_in: Expert of each slot afterwards; -1: none.
    """

    waves: tuple[Wave, ...]
    position: tuple[int, ...]
    positions: int
    expert_in: tuple[int, ...]


def plan_waves(
    needed: Collection[int], expert_in: Sequence[int], static: int, experts: int
) -> WavePlan:
    """Plan the waves of a step.

    There are never more places than experts, so the kernel of a layer with all experts sorts the
    rows. An interrupted step leaves empty slots. If their places made too many, all slots that are
    not static count as empty, and have no places.

    Args:
        needed: Experts of the step.
        expert_in: Expert in each slot, -1: none; the first ``static`` slots never change.
        static: Number of those.
        experts: Number of experts.
    """
    plan = _planned(needed, expert_in, static, experts)
    if plan.positions <= experts:
        return plan
    emptied = [*expert_in[:static], *[-1] * (len(expert_in) - static)]
    return _planned(needed, emptied, static, experts)


def _planned(
    needed: Collection[int], expert_in: Sequence[int], static: int, experts: int
) -> WavePlan:
    """Plan the waves of a step with what is in the slots; see ``plan_waves``."""
    middle = static + (len(expert_in) - static + 1) // 2
    halves = [range(static, middle), range(middle, len(expert_in))]
    halves = [half for half in halves if half]
    ordered = sorted(set(needed))
    slot_of = {expert: slot for slot, expert in enumerate(expert_in) if expert >= 0}
    builder = _Builder([-1] * experts, list(expert_in))
    residents = [(0, halves[0])] if halves else []
    for number, slots in [*residents, (None, range(static)), *list(enumerate(halves))[1:]]:
        members = [e for e in ordered if slot_of.get(e, -1) in slots]
        if members:
            taken = [slot_of[e] for e in members]
            builder.add(range(min(taken), max(taken) + 1), number, members, slot_of, ())
    missing = [e for e in ordered if e not in slot_of]
    number = 0
    while missing:
        half = halves[number % len(halves)]
        batch, missing = missing[: len(half)], missing[len(half) :]
        loads = tuple(zip(batch, half, strict=False))
        slots = range(half.start, half.start + len(batch))
        builder.add(slots, number % len(halves), batch, dict(loads), loads)
        number += 1
    return WavePlan(
        tuple(builder.waves), tuple(builder.position), builder.positions, tuple(builder.expert_in)
    )


def plan_stream(expert_in: Sequence[int], static: int, experts: int, capacity: int) -> WavePlan:
    """Plan waves of all experts of a layer; those without a slot pass through the buffer.

    The slots keep their experts. An interrupted step leaves empty slots, which would make more
    places than experts. Only the static ones count as filled then.

    Args:
        expert_in: Expert in each slot, -1: none; the first ``static`` slots never change.
        static: Number of those.
        experts: Number of experts.
        capacity: Experts that a half of the buffer holds.
    """
    filled = list(expert_in) if min(expert_in, default=0) >= 0 else list(expert_in[:static])
    position = [-1] * experts
    for slot, expert in enumerate(filled):
        position[expert] = slot
    waves = [Wave(0, len(filled), 0, None)] if filled else []
    missing = [expert for expert in range(experts) if position[expert] < 0]
    for start in range(0, len(missing), capacity):
        batch = missing[start : start + capacity]
        first = len(filled) + start
        loads = tuple((expert, slot) for slot, expert in enumerate(batch))
        for expert, slot in loads:
            position[expert] = first + slot
        waves.append(Wave(0, len(batch), first, None, loads, staged=True))
    return WavePlan(tuple(waves), tuple(position), experts, tuple(expert_in))


@dataclass
class _Builder:
    """Collects waves."""

    position: list[int]
    expert_in: list[int]

    def __post_init__(self) -> None:
        self.waves: list[Wave] = []
        self.positions = 0

    def add(
        self,
        slots: range,
        half: int | None,
        members: Sequence[int],
        slot_of: dict[int, int],
        loads: tuple[tuple[int, int], ...],
    ) -> None:
        """Append the wave of these slots, in which ``members`` are needed."""
        for expert in members:
            self.position[expert] = self.positions + slot_of[expert] - slots.start
        for expert, slot in loads:
            self.expert_in[slot] = expert
        self.waves.append(Wave(slots.start, slots.stop, self.positions, half, loads))
        self.positions += len(slots)
