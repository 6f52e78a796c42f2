"""Repeat what a recorded call launched, allocated and computed, without its Python code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from operator import itemgetter
from typing import Any

import torch

from dsv4.plans.recorded import (
    DriverLaunch,
    KernelLaunch,
    Location,
    Step,
    TorchCall,
    View,
    WholeOperator,
    flat,
)
from dsv4.plans.recorder import Recorder

ALIGNMENT = 16  # bytes: launchers and compiled kernels depend on nothing else of an address
_BLOCK = 512  # bytes: alignment of CUDA's allocator
_data_ptr = torch.Tensor.data_ptr

Slots = Sequence[torch.Tensor]
Build = Callable[[Slots], Any]


@dataclass(frozen=True)
class Pick:
    """Returns the tensor of a slot."""

    slot: int

    def __call__(self, slots: Slots) -> torch.Tensor:
        """The tensor, given the tensors of all slots."""
        return slots[self.slot]


def builder(value: Any, find: Callable[[torch.Tensor], Build]) -> Build:
    """Return a function that makes a value like ``value`` from other tensors.

    Args:
        value: A tensor, a tuple or a dataclass of values, or anything that is the same each time.
        find: Returns the function that makes a tensor; a ``Pick`` if it is one of the slots.

    Raises:
        KeyError: if ``find`` raises it, or a part of ``value`` is of another type.
    """
    if isinstance(value, torch.Tensor):
        return find(value)
    if _is_constant(value):
        return lambda slots: value
    if type(value) is tuple:
        parts = [builder(part, find) for part in value]
        slots = [part.slot for part in parts if isinstance(part, Pick)]
        if len(parts) > 1 and len(slots) == len(parts):
            return itemgetter(*slots)
        return lambda slots: tuple([part(slots) for part in parts])
    if is_dataclass(value) and not isinstance(value, type):
        named = [(f.name, builder(getattr(value, f.name), find)) for f in fields(value)]
        kind = type(value)
        return lambda slots: kind(**{name: part(slots) for name, part in named})
    raise KeyError(f"a {type(value).__name__}")


def _is_constant(value: Any) -> bool:
    """Return whether a value has no tensors and cannot change."""
    if type(value) in (tuple, list):
        return all(map(_is_constant, value))
    if is_dataclass(value) and not isinstance(value, type):
        return all(_is_constant(getattr(value, f.name)) for f in fields(value))
    return value is None or isinstance(value, int | float | str | torch.dtype)


class _Allocation:
    """A recorded allocation, to be made again."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.as_view = _whole(0, tensor)
        self.is_final = False  # whether a result has this shape and dtype

    def becomes(self, view: View) -> bool:
        """Allocate memory in the shape and dtype of a result that is a view of all of it.

        Then the result is the allocation itself. Return False if another result has another shape,
        or the view leaves out a part.
        """
        own = replace(view, location=Location(0, 0))
        if self.is_final:
            return own == self.as_view
        tensor = self.tensor
        whole = torch.empty(view.shape, dtype=view.dtype, device="meta")
        fits = whole.stride() == view.strides and whole.nbytes == tensor.nbytes
        if view.location.offset or not tensor.is_contiguous() or not fits:
            return False
        self.as_view, self.is_final = own, True
        return True

    def function(self) -> Callable[[], torch.Tensor]:
        """Allocate the memory."""
        view = self.as_view
        return functools.partial(
            torch.empty_strided,
            view.shape,
            view.strides,
            dtype=view.dtype,
            device=self.tensor.device,
        )


Again = Callable[[tuple[Any, ...]], Any]  # calls an operator again, given its arguments


class Tape:
    """The allocations and steps of one call, for calls with tensors of the same metadata.

    Allocations that only kernels use are parts of a single one, because each takes the host of an
    H100 2.2 us, and a decoder layer has about 30 of them.

    Attributes:
        launches: Number of steps that launch kernels.
        is_native: Whether the driver launches all of them, and Triton's interpreter none.
        is_free: Returns whether launches may bypass Triton.
    """

    def __init__(
        self,
        recorder: Recorder,
        result: Any,
        again: Callable[[WholeOperator], Again] | None = None,
    ) -> None:
        """Make a tape.

        Args:
            recorder: Recorder of the call.
            result: The result of the call.
            again: Returns a function that calls an operator again; for tapes of composite
                recorders.

        Raises:
            KeyError: if the result is not made of arguments and allocations, or an allocation does
                not begin at a multiple of 16 bytes.
        """
        if any(tensor.data_ptr() % ALIGNMENT for tensor in recorder.allocated):
            raise KeyError("an allocation is not aligned")
        steps, whole = recorder.steps, [*recorder.tensors, *recorder.allocated]
        computed = {slot for step in steps for slot in _results(step)}
        made = {
            slot: _Allocation(tensor)
            for slot, tensor in enumerate(whole)
            if slot >= len(recorder.tensors) and slot not in computed
        }
        self._result, seen = _result_of(recorder, result, made)
        triton = [step for step in steps if isinstance(step, KernelLaunch)]
        self.launches = len(triton) + sum(isinstance(step, DriverLaunch) for step in steps)
        self.is_native = all(step.launch is not None for step in triton)
        self.is_free = triton[0].kernel.is_free if triton else lambda: True
        seen |= {slot for step in steps for slot in _seen(step, self.is_native)}
        hidden = [slot for slot in made if slot not in seen]
        if len(hidden) < 2 or len({whole[slot].device for slot in hidden}) > 1:
            hidden = []
        self._allocate = [(i, made[i].function()) for i in made if i not in hidden]
        self._offsets, self._arena = _arena(recorder, hidden)
        layouts = [made[i].as_view if i in made else _whole(i, t) for i, t in enumerate(whole)]
        self._steps = [_step(step, layouts, again) for step in steps]

    def __call__(
        self, tensors: Sequence[torch.Tensor], addresses: Sequence[int], stream: int
    ) -> Any:
        """Repeat the call with kernels that the driver launches.

        Return ``NotImplemented`` if memory has another alignment than in the recording.

        Args:
            tensors: Tensors of the call, in the order of the recorded call's.
            addresses: Addresses of their first elements.
            stream: Stream of the current GPU, where the tensors are.
        """
        slots: list[Any] = [*tensors, *self._offsets]
        if self._arena is None:
            unaligned = 0
            begins = [*addresses, *self._offsets, 0]
        else:
            arena = self._arena()
            unaligned = first = _data_ptr(arena)
            begins = [*addresses, *[first + offset for offset in self._offsets], 0]
        for slot, allocate in self._allocate:
            slots[slot] = tensor = allocate()
            begins[slot] = begin = _data_ptr(tensor)
            unaligned |= begin
        if unaligned % ALIGNMENT:
            return NotImplemented
        for step in self._steps:
            step(stream, begins, slots)
        return self._result(slots)

    def interpreted(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Repeat the call with kernels that Triton launches, or its interpreter runs."""
        slots: list[Any] = [*tensors, *self._offsets]
        begins = [0] * (len(slots) + 1)
        for slot, allocate in self._allocate:
            slots[slot] = allocate()
        for step in self._steps:
            step(0, begins, slots)
        return self._result(slots)


def tape_of(
    recorder: Recorder, result: Any, again: Callable[[WholeOperator], Again] | None = None
) -> Tape | None:
    """Make a tape of the call that a recorder saw; None if that is impossible. See ``Tape``."""
    if recorder.inside is not None or recorder.outside is not None or not recorder.steps:
        return None
    try:
        return Tape(recorder, result, again)
    except KeyError:
        return None


def _result_of(
    recorder: Recorder, result: Any, made: dict[int, _Allocation]
) -> tuple[Build, set[int]]:
    """Return a function that makes the result, and the slots that it is made of."""
    slots = {id(t): i for i, t in enumerate([*recorder.tensors, *recorder.allocated])}
    seen = set()

    def find(tensor: torch.Tensor) -> Build:
        slot = slots.get(id(tensor))
        if slot is None:
            view = recorder.view(tensor)
            slot = view.location.slot
            if slot < len(recorder.tensors):
                raise KeyError("the result is a view of an argument")
            seen.add(slot)
            if slot not in made or not made[slot].becomes(view):
                return view
        elif slot in made:
            made[slot].is_final = True
        seen.add(slot)
        return Pick(slot)

    return builder(result, find), seen


def _whole(slot: int, tensor: torch.Tensor) -> View:
    """Return the recorded tensor of a slot."""
    return View(Location(slot, 0), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _results(step: Step) -> tuple[int, ...]:
    """Return slots of the tensors that a step makes."""
    if isinstance(step, TorchCall):
        return (step.slot,)
    return step.slots if isinstance(step, WholeOperator) else ()


def _seen(step: Step, is_native: bool) -> list[int]:
    """Return slots that a step needs as tensors; of others it needs the address alone."""
    if isinstance(step, DriverLaunch) or (is_native and isinstance(step, KernelLaunch)):
        return []
    views = step.views if isinstance(step, WholeOperator) else step.args
    return [view.location.slot for view in flat(views) if isinstance(view, View)]


def _arena(
    recorder: Recorder, hidden: Sequence[int]
) -> tuple[list[int], Callable[[], torch.Tensor] | None]:
    """Return the offset of each slot after the arguments in common memory, and its allocation."""
    count, total = len(recorder.tensors), 0
    offsets = [0] * len(recorder.allocated)
    for slot in hidden:
        offsets[slot - count] = total
        total += -(-recorder.allocated[slot - count].untyped_storage().nbytes() // _BLOCK) * _BLOCK
    if not total:
        return offsets, None
    device = recorder.allocated[hidden[0] - count].device
    return offsets, functools.partial(torch.empty, total, dtype=torch.uint8, device=device)


# Takes a stream, the addresses of all slots followed by 0, and their tensors if they exist.
_Step = Callable[[int, list[int], list[Any]], None]


def _step(
    recorded: Step, layouts: Sequence[View], again: Callable[[WholeOperator], Again] | None
) -> _Step:
    """Return a function that repeats a step."""
    if isinstance(recorded, DriverLaunch):
        run, of_run = recorded.run, _addresses(recorded.locations)
        return lambda stream, begins, slots: run(stream, of_run(begins))
    if isinstance(recorded, KernelLaunch):
        return _kernel_step(recorded, layouts)
    if isinstance(recorded, TorchCall):
        return _torch_step(recorded, layouts)
    assert again is not None
    call, args, made = again(recorded), _rebuild(recorded.views, layouts), recorded.slots

    def operator(stream: int, begins: list[int], slots: list[Any]) -> None:
        result = call(args(slots))
        tensors = () if result is None else result if isinstance(result, tuple) else (result,)
        for slot, tensor in zip(made, tensors, strict=True):
            _hold(tensor, slot, begins, slots)

    return operator


def _kernel_step(recorded: KernelLaunch, layouts: Sequence[View]) -> _Step:
    launch, grid, scalars = recorded.launch, recorded.grid, recorded.scalars
    if launch is None:
        kernel, options, args = recorded.kernel.kernel, recorded.options, recorded.args
        build = _rebuild(args, layouts)
        return lambda stream, begins, slots: kernel[grid](*build(slots), **options)
    views = [a for a in flat(recorded.args) if isinstance(a, View)]
    pick = _addresses([view.location for view in views])
    return lambda stream, begins, slots: launch(grid, stream, pick(begins), scalars)


def _torch_step(recorded: TorchCall, layouts: Sequence[View]) -> _Step:
    run, options, made = recorded.run, recorded.options, recorded.slot
    build = _rebuild(recorded.args, layouts)

    def call(stream: int, begins: list[int], slots: list[Any]) -> None:
        _hold(run(*build(slots), **options), made, begins, slots)

    return call


def _hold(tensor: torch.Tensor, slot: int, begins: list[int], slots: list[Any]) -> None:
    """Store a tensor that a step made in a slot."""
    slots[slot], begins[slot] = tensor, _data_ptr(tensor)
    if begins[slot] % ALIGNMENT:
        raise RuntimeError(
            f"a tape: memory of a new tensor begins at {begins[slot]}, wanted a multiple of "
            f"{ALIGNMENT}"
        )


def _rebuild(value: Any, layouts: Sequence[View]) -> Build:
    """Return a function that makes arguments again; a ``View`` stands for each tensor."""
    if isinstance(value, View):
        return _tensor(value, layouts[value.location.slot])
    if not _has_views(value):
        return lambda slots: value
    kind, constants = type(value), list(value)
    parts = [(i, _rebuild(p, layouts)) for i, p in enumerate(value) if _has_views(p)]
    picked = [(i, part.slot) for i, part in parts if isinstance(part, Pick)]
    others = [(i, part) for i, part in parts if not isinstance(part, Pick)]

    def build(slots: Slots) -> Any:
        made = constants.copy()
        for i, slot in picked:
            made[i] = slots[slot]
        for i, part in others:
            made[i] = part(slots)
        return made if kind is list else kind(made)

    return build


def _has_views(value: Any) -> bool:
    return any(isinstance(part, View) for part in flat(value))


def _tensor(view: View, whole: View) -> Build:
    """Return a function that makes a view of a slot's tensor, ``whole``, in one call if it can."""
    slot = view.location.slot
    if view == whole:
        return Pick(slot)
    transposed = replace(whole, shape=whole.shape[::-1], strides=whole.strides[::-1])
    if len(whole.shape) == 2 and view == transposed:
        return lambda slots: slots[slot].t()
    shape = view.shape
    if view.dtype == whole.dtype and not view.location.offset and _contiguous(view, whole):
        return lambda slots: slots[slot].view(shape)
    return view


def _contiguous(*views: View) -> bool:
    """Return whether all are whole and contiguous, and have equally many elements."""
    made = [torch.empty(view.shape, dtype=view.dtype, device="meta") for view in views]
    same = all(tensor.stride() == view.strides for tensor, view in zip(made, views, strict=True))
    return same and len({tensor.numel() for tensor in made}) == 1


def _addresses(locations: Sequence[Location | None]) -> Callable[[Sequence[int]], Sequence[int]]:
    """Return a function that gives the addresses of these locations."""
    slots = [-1 if location is None else location.slot for location in locations]
    if any(location is not None and location.offset for location in locations):
        offsets = [0 if location is None else location.offset for location in locations]
        pairs = list(zip(slots, offsets, strict=True))
        return lambda begins: [begins[slot] + offset for slot, offset in pairs]
    return itemgetter(*slots) if len(slots) > 1 else lambda begins: [begins[slots[0]]]
