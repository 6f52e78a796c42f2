"""The one place where operators are registered with torch, and called.

A call in plain eager mode runs the operator's body at once: torch's dispatcher would do nothing but
convert twelve arguments there and back, which takes longer than some kernels run. Whenever anything
might want to see the call or would change its arguments (``_observer``), the registered operator is
called, which ends in the same body. A kernel that somebody else registers for one of
these operators is therefore not seen in plain eager mode: another way to run an operator is a row
of ``dispatch.IMPLEMENTATIONS``.

Every schema ends in ``str backend`` and has no default values (torch drops trailing defaults before
it calls a Python implementation, which would shift the arguments). Inference only: no autograd
formula is registered, so torch warns when a backward pass reaches an operator, and no gradient
passes through it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dsv4 import dispatch

_LIBRARY = torch.library.Library("dsv4", "DEF")

# What a schema's types are in Python, where the dispatcher has nothing to convert.
_TYPES: dict[str, tuple[type, ...]] = {
    "Tensor": (torch.Tensor, torch.nn.Parameter),
    "List[int]": (list,),
    "str": (str,),
    "int": (int,),
    "float": (float,),
    "bool": (bool,),
    "ScalarType": (torch.dtype,),
}


def _watcher() -> Callable[[], bool]:
    """What says whether a function mode or torch's profiler sees calls in this thread."""
    try:
        function_modes = torch._C._len_torch_function_stack
        profiler_enabled = torch.autograd._profiler_enabled
    except AttributeError:
        return lambda: True
    return lambda: bool(function_modes() or profiler_enabled())


def _observer() -> Callable[[], bool]:
    """What says that nothing in this thread wants to see operators: no mode, transform or trace.

    It asks torch by private names; to a torch that has others, every call is one to be seen.
    """
    try:
        key, keys = torch._C.DispatchKey, torch._C.DispatchKeySet
        # What the dispatcher adds to the keys of tensors, in and out of inference mode. Modes,
        # functorch's transforms and tracers add theirs.
        least: Any = keys(key.BackendSelect)
        most: Any = least | keys(key.ADInplaceOrView)
        plain = frozenset((least.raw_repr(), most.raw_repr()))
        include_set = torch._C._dispatch_tls_local_include_set
    except AttributeError:
        return lambda: False

    def unobserved() -> bool:
        found: Any = include_set()
        return found.raw_repr() in plain and not is_watched()

    return unobserved


is_watched = _watcher()
unobserved = _observer()
_is_grad_enabled = torch.is_grad_enabled  # in one place: the look-up takes as long as the call


def define(
    schema: str, fake: Callable[..., Any], values: Callable[..., None] | None = None
) -> Callable[..., Any]:
    """Register ``schema`` with the dispatcher as its body and ``fake`` as its shape function.

    Args:
        schema: As above.
        fake: Takes what the operator takes.
        values: Raises where values of arguments are out of range. It is given the operator's name,
            and the arguments by name, when a call runs whose first tensor is on the CPU: elsewhere
            it would wait for the device, and while torch traces there are no values.

    Returns:
        What calls it, with all arguments by position.
    """
    name = schema.split("(", 1)[0]
    assert schema.rstrip().split("->")[0].rstrip().endswith("str backend)"), schema
    _LIBRARY.define(schema)
    return _register(Operation(name, name, _by_name(schema, values)), fake)


def define_out(
    schema: str,
    fake: Callable[..., Any] | None = None,
    values: Callable[..., None] | None = None,
) -> Callable[..., Any]:
    """Register ``name_out``: the operator of ``schema`` with its first result in a given tensor.

    The schema has ``Tensor(a!) out`` before ``backend``, and no result but those after the first.
    The implementations are those of the operator itself, which take ``out``, and dispatch chooses
    among them as there.

    Args:
        schema: What ``define`` got for the operator.
        fake: Its shape function, where it has several results.
        values: Its check of values.
    """
    name, rest = schema.split("(", 1)
    arguments, results = rest.split("str backend)")
    others = ", ".join(["Tensor"] * results.count(","))
    _LIBRARY.define(f"{name}_out({arguments}Tensor(a!) out, str backend) -> ({others})")

    def shapes(*args: Any) -> Any:
        return None if fake is None else fake(*args[:-2], args[-1])[1:]

    check = _by_name(schema, values)
    return _register(Operation(f"{name}_out", name, check, True, bool(others)), shapes)


def _by_name(
    schema: str, values: Callable[..., None] | None
) -> Callable[[tuple[Any, ...]], None] | None:
    """``values`` for the arguments of a call, which it wants by name, without ``backend``."""
    if values is None:
        return None
    parsed = torch._C.parse_schema(schema)
    names = [argument.name for argument in parsed.arguments][:-1]

    def check(args: tuple[Any, ...]) -> None:
        values(parsed.name, **dict(zip(names, args, strict=False)))

    return check


@dataclass(frozen=True)
class Operation:
    """How a registered operator runs.

    Attributes:
        name: As registered.
        op: Whose implementations run it.
        check: Raises where values of arguments are out of range, on the CPU; or None.
        has_out: Whether the last argument before ``backend`` takes the first result.
        has_others: Whether there are results besides that one.
    """

    name: str
    op: str
    check: Callable[[tuple[Any, ...]], None] | None
    has_out: bool = False
    has_others: bool = False

    def run(self, args: tuple[Any, ...]) -> Any:
        """Choose an implementation and run it; ``args`` are the registered operator's."""
        self.check_values(args)
        if not self.has_out:
            return dispatch.run(self.op, args)
        return self._others(dispatch.run(self.op, (*args[:-2], args[-1]), out=args[-2]))

    def run_with(self, implementation: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a given implementation."""
        self.check_values(args)
        if not self.has_out:
            return implementation(*args[:-1])
        return self._others(implementation(*args[:-2], out=args[-2]))

    def implementation(self, args: tuple[Any, ...]) -> Callable[..., Any]:
        """What ``"auto"`` chooses."""
        return dispatch.implementation(self.op, args[:-2] if self.has_out else args[:-1])

    def check_values(self, args: tuple[Any, ...]) -> None:
        """Raise where values on the CPU are out of range."""
        if self.check is not None and args[0].is_cpu:
            self.check(args)

    def _others(self, found: Any) -> Any:
        return found[1:] if self.has_others else None


OPERATIONS: dict[str, Operation] = {}


def _register(operation: Operation, fake: Callable[..., Any]) -> Callable[..., Any]:
    """What runs at once where the registered operator would do no more, else that operator."""
    name, run = operation.name, operation.run
    OPERATIONS[name] = operation

    def body(*args: Any) -> Any:
        if not _is_grad_enabled():
            return run(args)
        # Without this the reference would build autograd's graph of its own intermediate tensors.
        with torch.no_grad():
            return run(args)

    _LIBRARY.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dsv4::{name}", fake, lib=_LIBRARY)
    registered = getattr(torch.ops.dsv4, name).default
    declared = [_in_python(str(argument.real_type)) for argument in registered._schema.arguments]
    tensors = [i for i, types in enumerate(declared) if torch.Tensor in types]
    as_declared: set[tuple[type, ...]] = set()

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or not unobserved():
            return registered(*args)
        types = tuple(map(type, args))
        if types not in as_declared:
            if len(types) != len(declared) or any(map(_missing, types, declared)):
                return registered(*args)
            as_declared.add(types)
        grad = _is_grad_enabled()
        for i in tensors:
            tensor = args[i]
            if tensor is not None and (
                tensor.is_neg() or tensor.is_meta or (grad and tensor.requires_grad)
            ):
                return registered(*args)
        return run(args)

    return call


def _in_python(declared: str) -> tuple[type, ...]:
    """Types of an argument that the dispatcher passes on as they are."""
    inner = declared.removeprefix("Optional[")
    if inner == declared:
        return _TYPES[declared]
    return (*_TYPES[inner[:-1]], type(None))


def _missing(kind: type, among: tuple[type, ...]) -> bool:
    return kind not in among
