"""Record what a function launches and allocates on a GPU, so that a ``Tape`` can repeat it.

A ``Recorder`` watches one call. If the call only allocates tensors, views them and launches kernels
on them, ``dsv4.plans.tape`` makes a tape of it, which does the same for other tensors of the same
metadata. Every tensor is traced by object: to an argument or to an allocation, and a byte offset.
So nothing depends on addresses that happen to be equal.

A composite recorder is for a call of many operators, such as a layer's. It also notes the
operations of torch in ``REPEATED``, whose result follows from their arguments alone, and notes an
operator of this package as a whole if its parts cannot be recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

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
# Operations that a composite recorder notes, and the function that repeats each: usually torch's
# function, because calling the operation itself takes the host some microseconds longer. Each makes
# one new tensor that depends on its arguments and torch's settings alone. Operations that may also
# return a view are noted when they copy.
REPEATED: dict[Any, Callable[..., torch.Tensor]] = {
    _aten.mm.default: torch.mm,
    _aten.mm.dtype: lambda x, y, out_dtype: torch.mm(x, y, out_dtype=out_dtype),
    _aten.bmm.default: torch.bmm,
    _aten.linear.default: lambda *args: F.linear(*args),
    _aten.mul.Tensor: torch.mul,
    _aten.cat.default: torch.cat,
    _aten.amax.default: torch.amax,
    _aten.eq.Scalar: torch.eq,
    _aten.masked_fill.Scalar: torch.masked_fill,
    _aten.clamp.default: torch.clamp,
    _aten.index.Tensor: _aten.index.Tensor,
    _aten.clone.default: _aten.clone.default,
    _aten._to_copy.default: _aten._to_copy.default,
    _aten.to.dtype: _aten.to.dtype,
    _aten.contiguous.default: _aten.contiguous.default,
    _aten.reshape.default: torch.reshape,
    _aten.flatten.using_ints: torch.flatten,
}


@dataclass(frozen=True)
class OperatorCall:
    """A registered operator that the function called, and what it returned."""

    name: str
    args: tuple[Any, ...]
    result: Any


@dataclass(frozen=True)
class _Mark:
    """The lengths of the recording before an operator."""

    steps: int
    slots: int


class Recorder(TorchDispatchMode):
    """Watches a call with given tensors, all of them different objects.

    Attributes:
        operators: Registered operators of this package that it called.
        outside: The last operation outside of ``operators`` that a plan cannot repeat, or None.
        inside: The last operation of the whole call that a plan cannot repeat, or None.
        steps: Launches, and of a composite recorder also other calls, in order.
        allocated: Allocations, and results of calls, in order; they follow the arguments in
            ``Location.slot``.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        run: Callable[[str, tuple[Any, ...]], Any],
        *,
        composite: bool = False,
    ) -> None:
        """Prepare a recording.

        Args:
            tensors: Tensors of the call.
            run: Function that runs a registered operator of this package, given its name and
                arguments.
            composite: See the module.
        """
        super().__init__()
        self._run = run
        self._is_composite = composite
        self.tensors = list(tensors)
        self.operators: list[OperatorCall] = []
        self.outside: str | None = None
        self.inside: str | None = None
        self.steps: list[Step] = []
        self.allocated: list[torch.Tensor] = []
        self._locations: dict[int, Location] = {}
        self._alive: list[torch.Tensor] = []  # so that no object gets the identity of another
        self._depth = 0
        self._is_new = self._is_paused = self._is_noting = False
        for i, tensor in enumerate(self.tensors):
            self._locations[id(tensor)] = Location(i, 0)
        assert len(self._locations) == len(self.tensors), "a tensor is given twice"

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the operations and launches inside."""
        token = _recording.set(self)
        try:
            with self:
                yield
        finally:
            _recording.reset(token)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore operations inside, because they are an interpreter's own."""
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
        elif not self._is_repeated(func, args, kwargs or {}, result):
            self.inside = str(func)
            if not self._depth:
                self.outside = str(func)
            return result
        self._alive.extend(t for t in flat(result) if isinstance(t, torch.Tensor))
        return result

    def _is_repeated(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> bool:
        """Note an operation of torch outside of operators; return whether it can be repeated."""
        run = REPEATED.get(func)
        if run is None or not self._is_composite or self._depth:
            return False
        if id(result) in self._locations or any(map(_is_tensor, kwargs.values())):
            return False
        try:
            views = self._views_of(args)
        except KeyError:
            return False
        self.steps.append(TorchCall(run, views, kwargs, self._add(result)))
        return True

    def _is_ruled_out(self) -> bool:
        """Return whether the present operation cannot be repeated.

        Its tensors are then not kept: all temporary tensors of a reference implementation together
        would take many times its memory.
        """
        return self.outside is not None or (self._depth > 0 and self.inside is not None)

    def _operator(self, func: Any, args: tuple[Any, ...]) -> Any:
        mark = _Mark(len(self.steps), len(self.tensors) + len(self.allocated))
        self._depth += 1
        try:
            with self:
                result = self._run(func._opname, args)
        finally:
            self._depth -= 1
        if self._depth:
            return result
        results = [tensor for tensor in flat(result) if isinstance(tensor, torch.Tensor)]
        if self._is_composite:
            if self.outside is None and (self.inside is not None or self._unknown(results)):
                self._replace_by_call(mark, func._opname, args, results)
            return result
        self.operators.append(OperatorCall(func._opname, args, result))
        for tensor in self._unknown(results):
            self.inside = f"{func} returns a tensor of unknown origin"
            self._add(tensor)
        return result

    def _unknown(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor for tensor in tensors if id(tensor) not in self._locations]

    def _replace_by_call(
        self, mark: _Mark, name: str, args: tuple[Any, ...], results: Sequence[torch.Tensor]
    ) -> None:
        """Forget what an operator did since ``mark``, and note its call."""
        del self.steps[mark.steps :], self.allocated[mark.slots - len(self.tensors) :]
        self._locations = {key: p for key, p in self._locations.items() if p.slot < mark.slots}
        try:
            views = self._views_of(args)
        except KeyError:
            self.inside = self.outside = f"{name} takes a tensor of unknown origin"
            return
        if len(self._unknown(results)) < len(results):
            self.inside = self.outside = f"{name} returns a tensor that it was given"
            return
        self.inside = None
        self.steps.append(WholeOperator(name, args, views, tuple(map(self._add, results))))
        self._alive.extend(results)

    def _add(self, tensor: torch.Tensor) -> int:
        slot = len(self.tensors) + len(self.allocated)
        self._locations[id(tensor)] = Location(slot, 0)
        self.allocated.append(tensor)
        return slot

    def _is_view(self, base: Any, result: Any) -> bool:
        """Return whether all results lie in the memory of a known tensor.

        ``contiguous``, ``reshape`` and ``to`` count as views for torch, but copy where they must.
        """
        if id(base) not in self._locations:
            return False
        storage = base.untyped_storage()._cdata
        return all(tensor.untyped_storage()._cdata == storage for tensor in flat(result))

    def _viewed(self, base: torch.Tensor, result: Any) -> None:
        location = self._locations[id(base)]
        for tensor in flat(result):
            shift = tensor.data_ptr() - base.data_ptr() if tensor.numel() else 0
            self._locations.setdefault(id(tensor), Location(location.slot, location.offset + shift))

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
            views = tuple([self._views_of(argument) for argument in args])
        except KeyError:
            self.refuse(f"{kernel.__name__} takes a tensor of unknown origin")
            return
        self.steps.append(KernelLaunch(kernel, launch, grid, scalars, views, options))

    @contextmanager
    def noting(
        self,
        run: Callable[[int, Sequence[int]], None],
        tensors: Sequence[torch.Tensor | None],
    ) -> Iterator[None]:
        """Note launches inside as those of ``run``; see ``DriverLaunch``.

        Args:
            run: Function that launches; it must depend on its arguments and the current thread
                alone.
            tensors: Tensors whose addresses ``run`` takes.
        """
        try:
            locations = tuple([None if t is None else self.view(t).location for t in tensors])
        except KeyError:
            self.refuse("a kernel takes a tensor of unknown origin")
        else:
            self.steps.append(DriverLaunch(run, locations))
        self._is_noting = True
        try:
            yield
        finally:
            self._is_noting = False

    def driver_launched(self) -> None:
        """Note a call of the driver: outside of ``noting`` it cannot be repeated."""
        if not self._is_noting:
            self.refuse("a kernel was launched by itself")

    def _views_of(self, argument: Any) -> Any:
        if isinstance(argument, tuple | list):
            return type(argument)([self._views_of(part) for part in argument])
        return self.view(argument) if isinstance(argument, torch.Tensor) else argument

    def refuse(self, reason: str, *, is_new: bool = False) -> None:
        """Note a launch that cannot be repeated.

        Args:
            reason: Reason for messages.
            is_new: Whether the next launch of the same can be repeated.
        """
        self.inside = reason
        if not self._depth:
            self.outside = reason
        self._is_new = self._is_new or is_new

    @property
    def is_repeatable(self) -> bool:
        """Return whether another recording would find the same, because nothing was compiled."""
        return not self._is_new

    def view(self, tensor: torch.Tensor) -> View:
        """Return where a tensor lies.

        Raises:
            KeyError: if it is neither an argument nor allocated by the call, or inside of one.
        """
        location = self._locations[id(tensor)]
        return View(location, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
