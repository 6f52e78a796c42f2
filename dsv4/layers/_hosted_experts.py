"""The routed experts of a layer in slots: state of the slots, and what fills them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NoReturn

import torch

from dsv4.layers import _host_memory
from dsv4.layers._expert_rows import ExpertRows
from dsv4.layers._expert_staging import ExpertStaging, Load
from dsv4.layers._expert_waves import Wave, WavePlan, plan_stream, plan_waves
from dsv4.ops.expert_slots import (
    COUNTERS,
    DECAY_STEPS,
    LAST_STEP,
    MOST_USES,
    expert_decide,
    expert_gather,
)
from dsv4.ops.moe import check_ids


@dataclass(frozen=True)
class SlotState:
    """What ``expert_decide`` keeps of a layer, on the layer's device; see there."""

    slot_of: torch.Tensor
    expert_in: torch.Tensor
    used: torch.Tensor
    last: torch.Tensor
    totals: torch.Tensor
    counters: torch.Tensor

    @classmethod
    def of(cls, expert_in: Sequence[int], experts: int, device: torch.device) -> SlotState:
        """Return the state in which slots hold these experts and nothing was counted."""

        def filled(count: int, value: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((count,), value, dtype=dtype, device=device)

        int32, int64 = torch.int32, torch.int64
        with torch.inference_mode(False):
            state = cls(
                filled(experts, -1, int32),
                filled(len(expert_in), -1, int32),
                filled(experts, 0, int32),
                filled(experts, 0, int32),
                filled(experts, 0, int64),
                filled(COUNTERS, 0, int64),
            )
        state.set_slots(expert_in)
        return state

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them, in the order of ``expert_decide``."""
        return tuple(self.__dict__.values())

    def set_slots(self, expert_in: Sequence[int]) -> None:
        """Say which expert is in each slot, -1 for none; nothing is loaded."""
        slot_of = [-1] * self.slot_of.shape[0]
        for slot, expert in enumerate(expert_in):
            if expert >= 0:
                slot_of[expert] = slot
        for table, values in ((self.slot_of, slot_of), (self.expert_in, expert_in)):
            table.copy_(torch.tensor(values, dtype=torch.int32, device="cpu"))

    def count(self, counts: torch.Tensor, loaded: int) -> None:
        """Count a step's choices ``[E]`` int64 as ``expert_decide`` does, and loaded experts."""
        steps, asked, loads = self.counters.unbind()
        wraps, needed = steps >= LAST_STEP, counts > 0
        step = torch.where(wraps, 1, steps + 1)
        halved = torch.where(step % DECAY_STEPS == 0, self.used // 2, self.used)
        self.used.copy_((halved.long() + counts).clamp(max=MOST_USES))
        old = torch.where(wraps, 0, self.last.long())
        self.last.copy_(torch.where(needed, step, old))
        self.totals.add_(counts)
        self.counters.copy_(torch.stack((step, asked + needed.sum(), loads + loaded)))


@dataclass(frozen=True)
class StepPlan:
    """A step that the host plans.

    Attributes:
        waves: Its waves.
        bounds: First row of each of the E places in order, then the number of rows.
        loads: Experts that pass through the buffer, one for each of its waves.
        following: The first of those of the next layer.
    """

    waves: WavePlan
    bounds: Sequence[int]
    loads: Sequence[Load] = ()
    following: Sequence[Load] = ()


@dataclass(frozen=True)
class LoadedWave:
    """A wave whose experts are loaded.

    Attributes:
        wave: The wave.
        tensors: Tensors of the half of the buffer that it reads, by name; None: the layer's slots.
    """

    wave: Wave
    tensors: Mapping[str, torch.Tensor] | None = None


class HostedExperts:
    """The experts of a layer: some static in slots, the others in host memory, some of them cached.

    Attributes:
        layout: Layout of rows and slots.
        static_slots: Number of slots whose experts have no host copy, the first ones.
        memory: uint8, the memory of the slots.
        rows: uint8 ``[H, B]``, a row per expert that is not static.
        row_of: int32 ``[E]`` on the layer's device: row of each expert; -1: it is static.
        state: State of the slots.
        staging: Buffer for the experts of long prompts, shared with other layers, or None.
        unasked: Experts that were copied there in vain, because no token chose them.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        static: Sequence[int],
        cached: int,
        allocate: Callable[[int, torch.device], torch.Tensor] = _host_memory.allocate,
    ) -> None:
        """Copy experts to host memory and to slots.

        Args:
            tensors: Tensors ``[E, ...]`` of all experts, by name.
            static: Experts that are static.
            cached: Number of slots for the others.
            allocate: Function that returns host memory.

        Raises:
            MemoryError: if host memory does not suffice.
            ValueError: if the tensors cannot be rows.
        """
        first = next(iter(tensors.values()))
        experts, device = first.shape[0], first.device
        chosen = set(static)
        others = [e for e in range(experts) if e not in chosen]
        self.static_slots = len(chosen)
        self.layout = ExpertRows.of(tensors, self.static_slots + cached)
        self._row_of = [-1] * experts
        for row, expert in enumerate(others):
            self._row_of[expert] = row
        expert_in = [*sorted(chosen), *others[:cached]]
        size = self.layout.row_bytes
        rows = allocate(len(others) * size, device)
        self.rows = rows.view(len(others), size)
        # The memory must be unlocked before it is unmapped, and outlives this object until then.
        self._unlock = weakref.finalize(self, _host_memory.release, rows, device)
        self._unlock.atexit = False
        with torch.inference_mode(False):
            self.memory = torch.empty(self.layout.slot_bytes, dtype=torch.uint8, device=device)
            self.row_of = torch.tensor(self._row_of, dtype=torch.int32, device="cpu").to(device)
        self.tensors = self.layout.in_slots(self.memory)
        self._targets = self.layout.in_slots(self.memory)  # what is written, with other versions
        self.chunks = self.layout.chunks(device)
        self.state = SlotState.of(expert_in, experts, device)
        if device.type != "meta":
            self._fill(tensors, others, expert_in)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the stacks are freed next
        self._side: torch.cuda.Stream | None = None
        self.staging: ExpertStaging | None = None
        self.unasked = 0
        self._next: weakref.ref[HostedExperts] | None = None

    def stage(self, staging: ExpertStaging, before: HostedExperts | None) -> None:
        """Pass the experts of long prompts through a buffer.

        Args:
            staging: The buffer.
            before: The layer before this one, which starts to copy this one's; or None.
        """
        staging.add(self.layout)
        self.staging = staging
        if before is not None:
            before._next = weakref.ref(self)

    @torch.no_grad()
    def _fill(
        self, tensors: Mapping[str, torch.Tensor], others: Sequence[int], expert_in: Sequence[int]
    ) -> None:
        for expert in others:
            for name, target in self.layout.in_row(self._row(expert)).items():
                target.copy_(tensors[name].detach()[expert], non_blocking=True)
        for slot, expert in enumerate(expert_in):
            for name, target in self._targets.items():
                target[slot].copy_(tensors[name].detach()[expert])

    @property
    def experts(self) -> int:
        """Number of experts of the layer."""
        return len(self._row_of)

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self.layout.slots

    @property
    def cached_slots(self) -> int:
        """Number of slots that are not static."""
        return self.slots - self.static_slots

    @property
    def device(self) -> torch.device:
        """Device of the slots."""
        return self.memory.device

    def obstacle(self, choices: int) -> str | None:
        """Return why a step of this number of choices is planned on the host, or None."""
        needed = min(choices, self.experts - self.static_slots)
        if needed <= self.cached_slots:
            return None
        return (
            f"a step chooses up to {needed} experts that are not static, but {self.cached_slots} "
            "slots are for those: its waves are planned on the host"
        )

    def fetch(self, ids: torch.Tensor) -> torch.Tensor:
        """Load what a step lacks and return the slots ``[T, k]`` of its experts; reads no values.

        Raises:
            ValueError: if there are too few slots (``obstacle``).
        """
        try:
            slots, experts, targets = expert_decide(
                ids, *self.state.tensors, static_slots=self.static_slots
            )
            expert_gather(self.memory, self.rows, self.row_of, experts, targets, self.chunks)
        except BaseException:
            self._forget(range(self.static_slots, self.slots))
            raise
        return slots

    def _forget(self, slots: Iterable[int]) -> None:
        """Say that these slots hold no expert: a copy was interrupted, or is under way."""
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing or self.device.type == "meta":
            return  # nothing was copied
        expert_in = self.state.expert_in.tolist()
        for slot in slots:
            expert_in[slot] = -1
        self.state.set_slots(expert_in)

    def plan(self, ids: torch.Tensor) -> StepPlan:
        """Plan the waves of a step and count its choices; waits for the device.

        A step of many choices passes all experts without a slot through the buffer. Its copies
        need no choice, and those of the first halves run already. The host reads the choices
        because the GEMMs of a wave take the rows of its experts as a slice. On the meta device,
        where kernels are listed, one wave has all rows.

        Raises:
            RuntimeError: if the step is being captured.
            ValueError: if an id is out of range (on a CPU; elsewhere it chooses no expert).
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"host_experts: {self.obstacle(ids.numel())}, wanted an eager step")
        check_ids(ids, self.experts, "host_experts")
        if ids.is_meta:
            chosen, expert_in = [0] * self.experts, list(range(self.slots))
            chosen[0] = ids.numel()
            return self._waves_of(chosen, expert_in)
        flat = self.numbers(ids).flatten()
        counts = torch.zeros(self.experts + 1, dtype=torch.int64, device=flat.device)
        counts = counts.scatter_add_(0, flat, torch.ones_like(flat))[:-1]
        following = None if self._next is None else self._next()
        layers = [self] if following is None else [self, following]
        tables = [layer.state.expert_in.long() for layer in layers]
        values = torch.cat((counts, *tables)).tolist()
        chosen, expert_in = values[: self.experts], values[self.experts :][: self.slots]
        if self.staging is not None and self.staging.takes(sum(chosen), self.experts):
            step = self._stream_of(chosen, expert_in)
            if following is not None:
                loads = following._loads(values[self.experts + self.slots :])[1]
                step = replace(step, following=loads)
        else:
            step = self._waves_of(chosen, expert_in)
        copied = [expert for wave in step.waves.waves for expert, _ in wave.loads]
        asked = sum(chosen[expert] > 0 for expert in copied)
        self.state.count(counts, asked)
        self.unasked += len(copied) - asked
        return step

    def _waves_of(self, chosen: Sequence[int], expert_in: Sequence[int]) -> StepPlan:
        """Plan waves of the chosen experts from the number of choices of each; see ``plan``."""
        needed = [e for e, count in enumerate(chosen) if count]
        plan = plan_waves(needed, expert_in, self.static_slots, self.experts)
        return StepPlan(plan, _bounds(plan, chosen))

    def _stream_of(self, chosen: Sequence[int], expert_in: Sequence[int]) -> StepPlan:
        """Plan waves of all experts, of which those without a slot pass through the buffer."""
        plan, loads = self._loads(expert_in)
        return StepPlan(plan, _bounds(plan, chosen), loads)

    def _loads(self, expert_in: Sequence[int]) -> tuple[WavePlan, list[Load]]:
        """Return the waves of all experts, and what they pass through the buffer."""
        assert self.staging is not None
        plan = plan_stream(expert_in, self.static_slots, self.experts, self.staging.experts)
        own, loads = weakref.ref(self), []
        for wave in plan.waves:
            if wave.staged:
                experts = tuple(expert for expert, _ in wave.loads)
                loads.append(Load(own, experts, tuple(self._row_of[e] for e in experts)))
        return plan, loads

    def numbers(self, ids: torch.Tensor) -> torch.Tensor:
        """Return expert ids as int64 from 0 to E; E stands for none."""
        ids = ids.long()
        return torch.where((ids >= 0) & (ids < self.experts), ids, self.experts)

    def run(self, step: StepPlan) -> Iterator[LoadedWave]:
        """Yield the waves of a step, each with its experts loaded; the next ones load meanwhile.

        What multiplies a wave is to be launched before the next one is asked for.
        """
        return self._stream(step) if step.loads else self._waves(step.waves)

    def _stream(self, step: StepPlan) -> Iterator[LoadedWave]:
        """Yield waves of which some read the buffer; the slots keep their experts."""
        staging, loads = self.staging, iter(step.loads)
        assert staging is not None
        staging.begin(step.loads, step.following)
        try:
            for wave in step.waves.waves:
                if wave.staged:
                    yield LoadedWave(wave, staging.take(next(loads)))
                    staging.leave()
                else:
                    yield LoadedWave(wave)
        finally:
            staging.end()

    def _waves(self, plan: WavePlan) -> Iterator[LoadedWave]:
        """Yield waves that read the slots, to which experts are loaded."""
        self._forget(slot for wave in plan.waves for _, slot in wave.loads)
        waiting = [wave for wave in plan.waves if wave.loads]
        ready: dict[int, Any] = {}
        busy = {wave.half for wave in plan.waves if not wave.loads}

        def load_next(half: int | None) -> None:
            following = next((w for w in waiting if w.half == half), None)
            if following is not None:
                waiting.remove(following)
                ready[id(following)] = self._load(following.loads)

        try:
            for half in (0, 1):
                if half not in busy:
                    load_next(half)
            for wave in plan.waves:
                if wave.loads and ready[id(wave)] is not None:
                    torch.cuda.current_stream(self.device).wait_event(ready[id(wave)])
                yield LoadedWave(wave)
                if wave.half is not None:
                    load_next(wave.half)
        finally:
            # After an error copies may still run; the next step must wait for them.
            if self._side is not None:
                torch.cuda.current_stream(self.device).wait_stream(self._side)
        self.state.set_slots(plan.expert_in)

    def _load(self, loads: Sequence[tuple[int, int]]) -> Any:
        """Copy experts to slots behind what is launched now; return the event at the end, or None.

        On a GPU its copy engines do that, on a stream of their own.
        """
        if self.device.type != "cuda":
            self._copy(loads)
            return None
        if self._side is None:
            self._side = torch.cuda.Stream(self.device)
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            self._copy(loads)
            return self._side.record_event()

    def _copy(self, loads: Sequence[tuple[int, int]]) -> None:
        if self.device.type == "meta":
            return
        for expert, slot in loads:
            for name, source in self.layout.in_row(self._row(expert)).items():
                self._targets[name][slot].copy_(source, non_blocking=True)

    def _row(self, expert: int) -> torch.Tensor:
        return self.rows[self._row_of[expert]]

    def tensors_of(self, expert: int) -> dict[str, torch.Tensor]:
        """Return the tensors ``[1, ...]`` of one expert on the layer's device."""
        if self._row_of[expert] >= 0:
            parts = self.layout.in_row(self._row(expert))
            return {name: part.to(self.device).unsqueeze(0) for name, part in parts.items()}
        slot = int(self.state.slot_of[expert])
        return {name: tensor[slot : slot + 1] for name, tensor in self.tensors.items()}

    def static_experts(self) -> list[int]:
        """Return the static experts, ascending."""
        return [expert for expert, row in enumerate(self._row_of) if row < 0]

    @torch.no_grad()
    def repin(self, static: Sequence[int]) -> int:
        """Make these experts the static ones, as many as before; return how many changed.

        Between steps alone. An expert that is no longer static gets the row of the one that takes
        its slot. All tensors stay where they are, so captured graphs go on.

        Raises:
            ValueError: if their number is another, or one is no expert.
        """
        chosen = set(static)
        if len(chosen) != self.static_slots or not chosen <= set(range(self.experts)):
            raise ValueError(
                f"repin: static has {len(chosen)} experts, wanted {self.static_slots} different "
                f"ones of 0 to {self.experts - 1}"
            )
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        expert_in = self.state.expert_in.tolist()
        old_experts = [e for e in expert_in[: self.static_slots] if e not in chosen]
        new_experts = [e for e in sorted(chosen) if self._row_of[e] >= 0]
        for old, new in zip(old_experts, new_experts, strict=True):
            slot, row = expert_in.index(old), self._row(new)
            arrived = row.clone()
            for name, target in self.layout.in_row(row).items():
                target.copy_(self.tensors[name][slot])
            for name, source in self.layout.in_row(arrived).items():
                self._targets[name][slot].copy_(source)
            self._row_of[old], self._row_of[new] = self._row_of[new], -1
            expert_in = [-1 if e == new else e for e in expert_in]
            expert_in[slot] = new
        self.row_of.copy_(torch.tensor(self._row_of, dtype=torch.int32, device="cpu"))
        self.state.set_slots(expert_in)
        return len(old_experts)

    def check_stays(
        self, change: Callable[[torch.Tensor], torch.Tensor], fixed: frozenset[str]
    ) -> None:
        """Raise unless a change of a module's tensors, such as ``to``, leaves them as they are."""
        for name, tensor in self.tensors.items():
            empty = tensor[:0]
            changed = change(empty)
            moved = changed.device != empty.device
            if moved or (changed.dtype != empty.dtype and name not in fixed):
                raise ValueError(
                    f"Experts: {name} is to become {changed.dtype} on {changed.device}, but "
                    f"experts in host memory stay {empty.dtype} on {empty.device}: load the model "
                    "again"
                )

    def release(self) -> None:
        """Unlock the host memory now; no step may run any more."""
        self._unlock()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise ValueError("Experts: experts in host memory cannot be copied, load the model again")

    def __reduce__(self) -> NoReturn:
        raise ValueError("Experts: experts in host memory cannot be pickled, use dsv4.save")


def _bounds(plan: WavePlan, chosen: Sequence[int]) -> list[int]:
    """Return the first row of each place of a plan, then the number of rows.

    Args:
        plan: The plan.
        chosen: Number of choices of each expert.
    """
    sizes = [0] * len(chosen)
    for expert, count in enumerate(chosen):
        if count:
            sizes[plan.position[expert]] = count
    return [0, *accumulate(sizes)]
