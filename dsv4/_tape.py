"""Record what a function launches and allocates on a GPU, to do it again without the function.

A ``Recorder`` watches one call. Where the call did nothing with tensors but allocate them, view
them and launch Triton kernels on them, ``tape`` gives a ``Tape``, which does the same for other
tensors of the same metadata. Every tensor is traced by object: to an argument or to an allocation,
and a byte offset. So nothing depends on which addresses happen to be equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass, replace
from operator import itemgetter, or_
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ALIGNMENT = 16  # bytes: launchers and compiled kernels look at no more of an address
_data_ptr = torch.Tensor.data_ptr
_recording: ContextVar[Recorder | None] = ContextVar("dsv4_recording", default=None)
current_recorder = _recording.get

_aten = torch.ops.aten
_ALLOCATIONS = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)
_ALIASES = frozenset({_aten.alias.default, _aten.detach.default, _aten._unsafe_view.default})


@dataclass(frozen=True)
class Place:
    """Where a recorded tensor lies.

    Attributes:
        slot: Number of the argument or, after the arguments, of the allocation.
        offset: Bytes from its first element.
    """

    slot: int
    offset: int


@dataclass(frozen=True)
class View:
    """A tensor inside the memory of a slot."""

    place: Place
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def of(self, slot: int) -> View:
        """The same part of another slot."""
        return replace(self, place=Place(slot, self.place.offset))

    def __call__(self, slots: Sequence[torch.Tensor]) -> torch.Tensor:
        whole = slots[self.place.slot]
        if whole.dtype == self.dtype:
            begin = whole.storage_offset() + self.place.offset // whole.element_size()
            return whole.as_strided(self.shape, self.strides, begin)
        storage = whole.untyped_storage()
        begin = whole.data_ptr() - storage.data_ptr() + self.place.offset
        made = torch.empty(0, dtype=self.dtype, device=whole.device)
        return made.set_(storage, begin // made.element_size(), self.shape, self.strides)


@dataclass(frozen=True)
class KernelLaunch:
    """A kernel launch as it was recorded.

    Attributes:
        kernel: The ``FastKernel``.
        launch: What launches it through the driver; None where it is interpreted.
        grid: Number of programs.
        scalars: Arguments of ``launch`` other than addresses.
        args: Positional arguments, with ``View`` in place of tensors, also inside of tuples.
        options: Arguments by name.
    """

    kernel: Any
    launch: Any
    grid: Any
    scalars: tuple[Any, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class DriverLaunch:
    """Launches of a compiled kernel as they were recorded.

    Attributes:
        run: Launches, given a stream and the addresses of all places.
        places: Of its tensors; None where it takes 0 in place of an address.
    """

    run: Callable[[int, Sequence[int]], None]
    places: tuple[Place | None, ...]


@dataclass(frozen=True)
class OperatorCall:
    """A registered operator that the function called, and what it returned."""

    name: str
    args: tuple[Any, ...]
    result: Any


class Recorder(TorchDispatchMode):
    """Watches a call with given tensors, all of them different objects.

    Attributes:
        operators: Registered operators of this package that it called.
        outside: The last operation outside of ``operators`` that a plan cannot repeat, or None.
        inside: The last operation of the whole call that a plan cannot repeat, or None.
        launches: Launches, in order.
        allocated: Allocations, in order; they follow the arguments in ``Place.slot``.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        run: Callable[[str, tuple[Any, ...]], Any],
    ) -> None:
        """Prepare it.

        Args:
            tensors: Of the call.
            run: Runs a registered operator of this package, given its name and its arguments.
        """
        super().__init__()
        self._run = run
        self.tensors = list(tensors)
        self.operators: list[OperatorCall] = []
        self.outside: str | None = None
        self.inside: str | None = None
        self.launches: list[KernelLaunch | DriverLaunch] = []
        self.allocated: list[torch.Tensor] = []
        self._places: dict[int, Place] = {}
        self._alive: list[torch.Tensor] = []  # no object may take the identity of another
        self._depth = 0
        self._is_new = self._is_paused = self._is_noting = False
        for i, tensor in enumerate(self.tensors):
            self._places[id(tensor)] = Place(i, 0)
        assert len(self._places) == len(self.tensors), "a tensor is given twice"

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record what is done inside."""
        token = _recording.set(self)
        try:
            with self:
                yield
        finally:
            _recording.reset(token)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not look at what is done inside: an interpreter's own work."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._is_paused:
            return func(*args, **(kwargs or {}))
        if func.namespace == "dsv4":
            return self._operator(func, args)
        result = func(*args, **(kwargs or {}))
        if self._is_ruled_out():
            return result
        if func in _ALLOCATIONS:
            self._add(result)
        elif (func.is_view or func in _ALIASES) and self._is_view(args[0], result):
            self._viewed(args[0], result)
        else:
            self.inside = str(func)
            if not self._depth:
                self.outside = str(func)
            return result
        self._alive.extend(t for t in _flat(result) if isinstance(t, torch.Tensor))
        return result

    def _is_ruled_out(self) -> bool:
        """Whether nothing can repeat what runs now.

        Its tensors are not kept then: all temporary tensors of a reference implementation, alive
        at the same time, would take many times its memory.
        """
        return self.outside is not None or (self._depth > 0 and self.inside is not None)

    def _operator(self, func: Any, args: tuple[Any, ...]) -> Any:
        self._depth += 1
        try:
            with self:
                result = self._run(func._opname, args)
        finally:
            self._depth -= 1
        if not self._depth:
            self.operators.append(OperatorCall(func._opname, args, result))
            for tensor in _flat(result):
                if isinstance(tensor, torch.Tensor) and id(tensor) not in self._places:
                    self.refuse(f"{func} returns a tensor of unknown origin")
                    self._add(tensor)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        self._places[id(tensor)] = Place(len(self.tensors) + len(self.allocated), 0)
        self.allocated.append(tensor)

    def _is_view(self, base: Any, result: Any) -> bool:
        """Whether all results lie in the memory of a known tensor.

        ``contiguous``, ``reshape`` and ``to`` count as views for torch, but copy where they must.
        """
        if id(base) not in self._places:
            return False
        storage = base.untyped_storage()._cdata
        return all(tensor.untyped_storage()._cdata == storage for tensor in _flat(result))

    def _viewed(self, base: torch.Tensor, result: Any) -> None:
        place = self._places[id(base)]
        for tensor in _flat(result):
            shift = tensor.data_ptr() - base.data_ptr() if tensor.numel() else 0
            self._places.setdefault(id(tensor), Place(place.slot, place.offset + shift))

    def launched(
        self,
        kernel: Any,
        launch: Any,
        grid: Any,
        scalars: tuple[Any, ...],
        args: Sequence[Any],
        options: dict[str, Any],
    ) -> None:
        """Note a launch; see ``KernelLaunch``."""
        if any(isinstance(value, torch.Tensor) for value in options.values()):
            self.refuse(f"{kernel.__name__} takes a tensor by name")
            return
        try:
            given = tuple([self._given(argument) for argument in args])
        except KeyError:
            self.refuse(f"{kernel.__name__} takes a tensor of unknown origin")
            return
        self.launches.append(KernelLaunch(kernel, launch, grid, scalars, given, options))

    @contextmanager
    def noting(
        self,
        run: Callable[[int, Sequence[int]], None],
        tensors: Sequence[torch.Tensor | None],
    ) -> Iterator[None]:
        """Launches inside are what ``run`` does; see ``DriverLaunch``.

        Args:
            run: Launches; it must depend on nothing but its arguments and the current thread.
            tensors: Whose addresses ``run`` takes.
        """
        try:
            places = tuple([None if t is None else self.view(t).place for t in tensors])
        except KeyError:
            self.refuse("a kernel takes a tensor of unknown origin")
        else:
            self.launches.append(DriverLaunch(run, places))
        self._is_noting = True
        try:
            yield
        finally:
            self._is_noting = False

    def driver_launched(self) -> None:
        """The driver was called: outside of ``noting`` nothing can repeat that."""
        if not self._is_noting:
            self.refuse("a kernel was launched by itself")

    def _given(self, argument: Any) -> Any:
        if isinstance(argument, tuple):
            return tuple([self._given(part) for part in argument])
        return self.view(argument) if isinstance(argument, torch.Tensor) else argument

    def refuse(self, reason: str, *, is_new: bool = False) -> None:
        """Note that something was launched which cannot be repeated.

        Args:
            reason: Why.
            is_new: Whether it can be when it is launched another time.
        """
        self.inside = reason
        self._is_new = self._is_new or is_new

    @property
    def is_settled(self) -> bool:
        """Whether another recording would find the same: nothing was compiled in between."""
        return not self._is_new

    def view(self, tensor: torch.Tensor) -> View:
        """Where a tensor lies.

        Raises:
            KeyError: if it is neither an argument nor allocated by the call, or inside of one.
        """
        place = self._places[id(tensor)]
        return View(place, tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def tape(self, result: Any) -> Tape | None:
        """A tape of the call, which returned ``result``; None where there cannot be one."""
        if self.inside is not None or not self.launches:
            return None
        try:
            return Tape(self, result)
        except KeyError:
            return None


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for part in value:
            yield from _flat(part)
    else:
        yield value


Slots = Sequence[torch.Tensor]
Build = Callable[[Slots], Any]


@dataclass(frozen=True)
class Pick:
    """Takes the tensor of a slot."""

    slot: int

    def __call__(self, slots: Slots) -> torch.Tensor:
        return slots[self.slot]


def builder(value: Any, find: Callable[[torch.Tensor], Build]) -> Build:
    """A function that makes what ``value`` is from other tensors.

    Args:
        value: A tensor, a tuple or a dataclass of values, or anything that is the same each time.
        find: Gives the function that makes a tensor; a ``Pick`` where it is one of the slots.

    Raises:
        KeyError: if ``find`` does, or a part of ``value`` is of another type.
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
    """Whether a value has no tensors, and nobody would change it."""
    if type(value) in (tuple, list):
        return all(map(_is_constant, value))
    if is_dataclass(value) and not isinstance(value, type):
        return all(_is_constant(getattr(value, f.name)) for f in fields(value))
    return value is None or isinstance(value, int | float | str | torch.dtype)


class _Allocation:
    """How memory of a recorded allocation is allocated again."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.as_view = View(Place(0, 0), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        self.is_final = False  # a result has this shape and dtype

    def becomes(self, view: View) -> bool:
        """Allocate it in the shape and dtype of a result that is a view of all of it.

        Then the result is the allocation itself. False where another result has another shape, or
        the view leaves out a part.
        """
        wanted = replace(view, place=Place(0, 0))
        if self.is_final:
            return wanted == self.as_view
        tensor = self.tensor
        whole = torch.empty(view.shape, dtype=view.dtype, device="meta")
        fits = whole.stride() == view.strides and whole.nbytes == tensor.nbytes
        if view.place.offset or not tensor.is_contiguous() or not fits:
            return False
        self.as_view, self.is_final = wanted, True
        return True

    def function(self) -> Callable[[], torch.Tensor]:
        """Allocates it."""
        view = self.as_view
        return functools.partial(
            torch.empty_strided,
            view.shape,
            view.strides,
            dtype=view.dtype,
            device=self.tensor.device,
        )


class Tape:
    """The allocations and launches of one call, for calls with tensors of the same metadata."""

    def __init__(self, recorder: Recorder, result: Any) -> None:
        """Prepare it.

        Raises:
            KeyError: if the result is not made of arguments and allocations, or one of these does
                not begin at a multiple of 16 bytes.
        """
        if any(tensor.data_ptr() % ALIGNMENT for tensor in recorder.allocated):
            raise KeyError("an allocation is not aligned")
        count = len(recorder.tensors)
        made = [_Allocation(t) for t in recorder.allocated]
        whole = {id(t): i for i, t in enumerate([*recorder.tensors, *recorder.allocated])}

        def find(tensor: torch.Tensor) -> Build:
            slot = whole.get(id(tensor))
            if slot is None:
                view = recorder.view(tensor)
                slot = view.place.slot
                if slot < count:
                    raise KeyError("the result is a view of an argument")
                if not made[slot - count].becomes(view):
                    return view
            elif slot >= count:
                made[slot - count].is_final = True
            return Pick(slot)

        self._result = builder(result, find)
        self._allocate = [allocation.function() for allocation in made]
        self.launches = recorder.launches
        of_triton = [one for one in self.launches if isinstance(one, KernelLaunch)]
        self.is_native = all(one.launch is not None for one in of_triton)
        self.is_free = of_triton[0].kernel.is_free if of_triton else lambda: True
        self._steps = [_step(one) for one in self.launches] if self.is_native else []

    def __call__(
        self, tensors: Sequence[torch.Tensor], addresses: Sequence[int], stream: int
    ) -> Any:
        """Do it again with kernels that the driver launches.

        ``NotImplemented`` if memory is allocated at other alignment than when it was recorded.

        Args:
            tensors: As the recorded call's.
            addresses: Of their first elements.
            stream: Of the current GPU, where the tensors are.
        """
        slots = [*tensors, *[allocate() for allocate in self._allocate]]
        begins = [*addresses, *map(_data_ptr, slots[len(addresses) :]), 0]
        if functools.reduce(or_, begins[len(addresses) :]) % ALIGNMENT:
            return NotImplemented
        for step in self._steps:
            step(stream, begins)
        return self._result(slots)

    def interpreted(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The same with kernels that Triton launches, or its interpreter runs."""
        slots = [*tensors, *[allocate() for allocate in self._allocate]]
        for launch in self.launches:
            assert isinstance(launch, KernelLaunch)
            given = [_rebuilt(argument, slots) for argument in launch.args]
            launch.kernel.kernel[launch.grid](*given, **launch.options)
        return self._result(slots)


def _rebuilt(argument: Any, slots: Slots) -> Any:
    if isinstance(argument, tuple):
        return tuple([_rebuilt(part, slots) for part in argument])
    return argument(slots) if isinstance(argument, View) else argument


Step = Callable[[int, Sequence[int]], None]


def _step(recorded: KernelLaunch | DriverLaunch) -> Step:
    """What repeats a launch, given a stream, and the addresses of all slots followed by 0."""
    if isinstance(recorded, DriverLaunch):
        run, pick = recorded.run, _addresses(recorded.places)
        return lambda stream, begins: run(stream, pick(begins))
    views = [a for a in _flat(recorded.args) if isinstance(a, View)]
    pick = _addresses([view.place for view in views])
    launch, grid, scalars = recorded.launch, recorded.grid, recorded.scalars
    return lambda stream, begins: launch(grid, stream, pick(begins), scalars)


def _addresses(places: Sequence[Place | None]) -> Callable[[Sequence[int]], Sequence[int]]:
    """A function that gives the addresses of these places."""
    slots = [-1 if place is None else place.slot for place in places]
    if any(place is not None and place.offset for place in places):
        offsets = [0 if place is None else place.offset for place in places]
        pairs = list(zip(slots, offsets, strict=True))
        return lambda begins: [begins[slot] + offset for slot, offset in pairs]
    return itemgetter(*slots) if len(slots) > 1 else lambda begins: [begins[slots[0]]]
