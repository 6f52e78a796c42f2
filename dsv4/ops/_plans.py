"""Plan cache: repeats a public operator for metadata of arguments that it has seen before.

Checks of arguments, the choice of an implementation and what a launcher computes depend on
metadata alone: dtypes, shapes, strides, devices, alignment, and plain values. For the metadata of a
call that succeeded, ``@planned`` keeps one of these:

* a ``Tape``: the kernel launches and allocations of an implementation, replayed;
* a ``Direct`` call of the implementation with the arguments that it got;
* nothing, if the function did anything else with its tensors. It then runs as without plans.

The first call with some metadata runs the function. The second runs it under a ``Recorder``, which
sees every torch operation; one that is neither an allocation nor a view rules a plan out. So
checks that read values are never skipped.

Only plain calls on a GPU are planned: tensors of torch's own classes that require no gradient,
nothing that traces or observes operators, and no implementation requested by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import or_
from typing import Any, ParamSpec, TypeVar

import torch

from dsv4 import device, dispatch
from dsv4.cute.runtime.launch import current_device, stream_of
from dsv4.kv_cache.pages import Pages
from dsv4.ops import _library
from dsv4.ops._guards import Guards, guards_of
from dsv4.plans.recorder import Recorder
from dsv4.plans.tape import ALIGNMENT, Build, Pick, Tape, builder, tape_of
from dsv4.quant.formats import FORMATS, Format, QuantizedTensor

P = ParamSpec("P")
R = TypeVar("R")

PLANNED_DEVICES = frozenset({"cuda"})  # on the CPU an operator takes longer than any check
_MOST = 4096  # keys of the cache
_MOST_OF_KEY = 16  # plans of a key, whose calls differ in shapes, strides or alignment
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_VALUES = frozenset((int, bool, str, torch.dtype, type(None)))
_RUN = dispatch.run  # a test that replaces it sees every call

_data_ptr = torch.Tensor.data_ptr
_is_grad_enabled = torch.is_grad_enabled
_interpreting = device.is_interpreting


@dataclass
class Plan:
    """A way to repeat calls with certain tensors.

    Attributes:
        is_like: Returns whether other tensors have the same metadata.
        remainders: Remainders of their addresses, see ``remainders``.
        again: Repeats the call, given tensors and addresses; None before the call was recorded.
        is_final: Whether it was recorded.
    """

    is_like: Guards
    remainders: Any
    again: Callable[[Sequence[torch.Tensor], Sequence[int]], Any] | None = None
    is_final: bool = False


@dataclass(frozen=True)
class Direct:
    """Calls an implementation with the arguments that the operator got when it was recorded."""

    operation: _library.Operation
    implementation: Callable[..., Any]
    args: Build
    result: Callable[[Sequence[torch.Tensor], Any], Any]

    def __call__(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> Any:
        result = self.operation.run_with(self.implementation, self.args(tensors))
        return self.result(tensors, result)


@dataclass(frozen=True)
class Replay:
    """Replays a tape on the current stream, where the tensors' GPU is the current one."""

    tape: Tape

    def __call__(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> Any:
        device = tensors[0].get_device()
        if current_device() != device or not self.tape.is_free():
            return NotImplemented
        return self.tape(tensors, addresses, stream_of(device))


@dataclass(frozen=True)
class Interpreted:
    """Replays a tape whose kernels Triton's interpreter runs."""

    tape: Tape

    def __call__(self, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> Any:
        return self.tape.interpreted(tensors)


class Arguments:
    """Positions of tensors, other values and structures of both among a call's arguments."""

    def __init__(self, function: Any, values: Sequence[Any]) -> None:
        """Sort the arguments.

        Raises:
            TypeError: if an argument has a type that is not known here.
        """
        self.function = function
        kinds = [_kind(value) for value in values]
        self._tensors = [i for i, kind in enumerate(kinds) if kind == "tensor"]
        self._values = [i for i, kind in enumerate(kinds) if kind == "value"]
        self._others = [
            (i, _CONSTANTS[type(values[i])]) for i, kind in enumerate(kinds) if kind == "constant"
        ]
        self._structures = [
            (i, _STRUCTURES[type(values[i])]) for i, kind in enumerate(kinds) if kind == "structure"
        ]

    def tensors(self, values: Sequence[Any]) -> list[torch.Tensor]:
        """Return all tensors, those of structures last."""
        tensors = []
        for i in self._tensors:
            tensors.append(values[i])
        for i, names in self._structures:
            structure = values[i]
            for name in names:
                part = getattr(structure, name)
                if part is not None:
                    tensors.append(part)
        return tensors

    def constants(self, values: Sequence[Any]) -> list[Any]:
        """Everything else that the call depends on, hashable."""
        constants = []
        for i in self._values:
            constants.append(values[i])
        for i, constant in self._others:
            constants.append(constant(values[i]))
        for i, _ in self._structures:
            constants.append(_FIELDS[type(values[i])](values[i]))
        return constants

    def with_tensors(self, values: Sequence[Any], tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Return the same arguments with other tensors, in the order of ``tensors``."""
        replaced, left = list(values), list(tensors)
        for i in self._tensors:
            replaced[i] = left.pop(0)
        for i, names in self._structures:
            present = [name for name in names if getattr(replaced[i], name) is not None]
            replaced[i] = replace(replaced[i], **{name: left.pop(0) for name in present})
        return replaced


def _kind(value: Any) -> str:
    kind = type(value)
    for name, kinds in _KINDS.items():
        if kind in kinds:
            return name
    raise TypeError(f"a {kind.__name__}")


def _format_name(format: Format) -> Any:
    return format.name if FORMATS.get(format.name) is format else format


_CONSTANTS: dict[type, Callable[[Any], Any]] = {
    float: float.hex,  # distinguishes -0.0 from 0.0
    Format: _format_name,
}
# Structures of tensors: the names of their tensors and of their other fields.
_STRUCTURES = {
    QuantizedTensor: ("codes", "scales", "global_scale", "row_exponent"),
    Pages: ("data",),
}
_FIELDS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    QuantizedTensor: lambda q: (
        q.global_scale is None,
        q.row_exponent is None,
        _format_name(q.format),
        q.layout,
        q.segments,
    ),
    Pages: lambda p: (p.page_size, p.entry_format, p.head_dim, p.rope_dim),
}
_KINDS = {
    "tensor": _TENSORS,
    "value": _VALUES,
    "constant": _CONSTANTS.keys(),
    "structure": _STRUCTURES.keys(),
}


class PlanCache:
    """Plans of all operators of a process; a full cache is emptied."""

    def __init__(self) -> None:
        self._arguments: dict[tuple[Any, ...], Arguments | None] = {}
        self._plans: dict[Any, list[Plan]] = {}

    def forget(self) -> None:
        """Forget all plans: check, choose and record everything again."""
        self._arguments.clear()
        self._plans.clear()

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``function(*args, **kwargs)`` by its plan; without one, make it."""
        values = (*args, *kwargs.values())
        types = (function, len(args), *map(type, values), *kwargs)
        arguments = self._arguments.get(types, _NEW)
        if arguments is _NEW:
            arguments = self._look_at(types, function, values)
        if arguments is None:
            return function(*args, **kwargs)
        tensors = arguments.tensors(values)
        if not tensors or tensors[0].device.type not in PLANNED_DEVICES:
            return function(*args, **kwargs)
        key = (
            arguments,
            tensors[0].shape,
            _is_grad_enabled(),
            _interpreting(),
            *arguments.constants(values),
        )
        for plan in self._plans.get(key, ()):
            if plan.is_like(*tensors):
                addresses = list(map(_data_ptr, tensors))
                if plan.remainders != remainders(addresses):
                    continue
                if plan.again is not None:
                    result = plan.again(tensors, addresses)
                    if result is not NotImplemented:
                        return result
                elif not plan.is_final:
                    return _recorded(plan, arguments, args, kwargs)
                return function(*args, **kwargs)
        result = function(*args, **kwargs)
        if are_plain(tensors):
            addresses = list(map(_data_ptr, tensors))
            self._add(key, Plan(guards_of(tensors), remainders(addresses)))
        return result

    def _look_at(
        self, types: tuple[Any, ...], function: Any, values: Sequence[Any]
    ) -> Arguments | None:
        try:
            arguments = Arguments(function, values)
        except TypeError:
            arguments = None
        if len(self._arguments) >= _MOST:
            self.forget()
        self._arguments[types] = arguments
        return arguments

    def _add(self, key: Any, plan: Plan) -> None:
        if len(self._plans) >= _MOST:
            self._plans.clear()
        self._plans[key] = [plan, *self._plans.get(key, ())][:_MOST_OF_KEY]


_NEW: Any = object()  # marks a key that was not looked up yet
PLANS = PlanCache()


def planned(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public operator so that plans repeat it; see the module.

    The function must depend on its arguments alone, and return tensors, tuples or dataclasses of
    them.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, Pages):
            first = first.data
        if isinstance(first, torch.Tensor) and first.device.type not in PLANNED_DEVICES:
            return function(*args, **kwargs)
        if not is_plain_call(kwargs.get("backend", "auto")):
            return function(*args, **kwargs)
        if kwargs.get("reserve_sms"):  # recorders see registered operators, which do not have it
            return function(*args, **kwargs)
        return PLANS.call(function, args, kwargs)

    return call


def is_plain_call(backend: Any) -> bool:
    """Return whether ``"auto"`` chooses, and nobody but a mode of tensors watches calls.

    Such modes are part of what ``guards_of`` compares.
    """
    return dispatch.is_free(backend) and dispatch.run is _RUN and not _library.is_watched()


def are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether plans may be made of calls with these tensors, in the present mode."""
    grad = _is_grad_enabled()
    return _library.unobserved() and not any(
        type(t) not in _TENSORS or t.is_neg() or t.is_meta or (grad and t.requires_grad)
        for t in tensors
    )


def remainders(addresses: Sequence[int]) -> Any:
    """Return each address modulo 16; 0 if all are aligned.

    Launchers and Triton's specialisations depend on nothing else of an address.
    """
    if functools.reduce(or_, addresses) % ALIGNMENT:
        return [address % ALIGNMENT for address in addresses]
    return 0


def _recorded(
    plan: Plan, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call the function, and complete the plan."""
    values = (*args, *kwargs.values())
    tensors: list[torch.Tensor] = []
    for tensor in arguments.tensors(values):
        # A tensor that is passed twice becomes two objects, as other calls may pass two.
        is_there = any(tensor is other for other in tensors)
        tensors.append(tensor.detach() if is_there else tensor)
    own = arguments.with_tensors(values, tensors)
    named = dict(zip(kwargs, own[len(args) :], strict=True))
    recorder = Recorder(tensors, lambda name, flat: _library.OPERATIONS[name].run(flat))
    with recorder.watching():
        result = arguments.function(*own[: len(args)], **named)
    plan.again, plan.is_final = _again(recorder, result), recorder.is_repeatable
    return result


def _again(recorder: Recorder, result: Any) -> Any:
    """Return how to repeat what was recorded; None if there is no way."""
    tape = tape_of(recorder, result)
    if tape is not None and not tape.is_native:
        return Interpreted(tape)
    if tape is not None:
        return Replay(tape)
    if recorder.outside is not None or len(recorder.operators) != 1:
        return None
    [called] = recorder.operators
    operation = _library.OPERATIONS[called.name]
    results = list(_results(called.result))
    slots = {id(t): i for i, t in enumerate([*recorder.tensors, *results])}
    whole = [*recorder.tensors, *recorder.allocated]

    def argument(tensor: torch.Tensor) -> Build:
        slot = slots.get(id(tensor))
        if slot is not None:
            return Pick(slot)
        view = recorder.view(tensor)
        return view.of(slots[id(whole[view.location.slot])])

    def returned(tensor: torch.Tensor) -> Build:
        if id(tensor) not in slots and recorder.view(tensor).location.slot < len(recorder.tensors):
            raise KeyError("the result is a view of an argument")
        return argument(tensor)

    try:
        args, build = builder(tuple(called.args), argument), builder(result, returned)
    except KeyError:
        return None
    implementation = operation.implementation(called.args)
    return Direct(
        operation, implementation, args, lambda tensors, out: build([*tensors, *_results(out)])
    )


def _results(result: Any) -> Sequence[torch.Tensor]:
    """Return all tensors that an operator returned."""
    if result is None:
        return ()
    return (result,) if isinstance(result, torch.Tensor) else result
