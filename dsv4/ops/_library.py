"""The one place where operators are registered with torch, and called.

The arguments of an operator are written once, as the fields of a ``NamedTuple`` beside its public
function (``GemmArgs``). ``define`` makes the schema from their annotations. The shape function, the
check of values and every implementation take the record, and so does ``dispatch.Call.args``.

A call in plain eager mode runs the operator's body at once: torch's dispatcher would do nothing but
convert twelve arguments there and back, which takes longer than some kernels run. Whenever anything
might want to see the call (``unobserved``) or would change its arguments, the registered operator
is called, which ends in the same body. A kernel that somebody else registers for one of these
operators is therefore not seen in plain eager mode: another way to run an operator is a row of
``dsv4.implementations``.

Every schema ends in ``str backend`` and has no default values (torch drops trailing defaults before
it calls a Python implementation, which would shift the arguments). Inference only: no autograd
formula is registered. torch alone would warn when a backward pass reaches an operator and leave its
gradients out, so results that require a gradient get a hook that raises (``_refuse_gradients``).
"""

from __future__ import annotations

import string
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from dsv4 import dispatch

_LIBRARY = torch.library.Library("dsv4", "DEF")

# Python types of a schema's types, which the dispatcher need not convert.
_TYPES: dict[str, tuple[type, ...]] = {
    "Tensor": (torch.Tensor, torch.nn.Parameter),
    "List[int]": (list,),
    "str": (str,),
    "int": (int,),
    "float": (float,),
    "bool": (bool,),
    "ScalarType": (torch.dtype,),
}


# Annotations of a record's fields that say more than a type.
Written = Annotated[torch.Tensor, "written in place"]
Symbolic = Annotated[int, "may be symbolic while torch.compile traces"]
_SCHEMA_TYPES: dict[Any, str] = {
    torch.Tensor: "Tensor",
    Sequence[int]: "int[]",
    str: "str",
    int: "int",
    float: "float",
    bool: "bool",
    torch.dtype: "ScalarType",
}

A = TypeVar("A", bound=tuple[Any, ...])
A_contra = TypeVar("A_contra", contravariant=True)
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Call(Protocol[A_contra, R_co]):
    """A callable of an operator."""

    def __call__(
        self,
        args: A_contra,
        backend: str,
        out: torch.Tensor | None = None,
        reserve_sms: int = 0,
    ) -> R_co:
        """Call the operator.

        Args:
            args: The operator's record.
            backend: Name of an implementation, or ``"auto"``.
            out: Tensor for the first result, if the operator has this argument.
            reserve_sms: See ``dispatch.run``; calls through torch's dispatcher ignore it.
        """
        ...


@dataclass(frozen=True)
class _Observers:
    """Private names of torch that tell which observers of this thread see operators.

    Attributes:
        function_modes: Counts them.
        is_profiling: Whether torch's profiler runs.
        keys: The dispatch keys that are added to those of tensors.
        plain_keys: What the dispatcher itself adds, in and out of inference mode, as ``raw_repr``.
            Modes, functorch's transforms and tracers add theirs.
    """

    function_modes: Callable[[], int]
    is_profiling: Callable[[], bool]
    keys: Callable[[], Any]
    plain_keys: frozenset[int]


def _observers() -> _Observers:
    """Those of this torch; with one that has other names, every call is one to be seen."""
    try:
        key, keys = torch._C.DispatchKey, torch._C.DispatchKeySet
        least: Any = keys(key.BackendSelect)
        most: Any = least | keys(key.ADInplaceOrView)
        return _Observers(
            torch._C._len_torch_function_stack,
            torch.autograd._profiler_enabled,
            torch._C._dispatch_tls_local_include_set,
            frozenset((least.raw_repr(), most.raw_repr())),
        )
    except AttributeError:
        return _Observers(lambda: 1, lambda: True, lambda: None, frozenset())


# Names of this module, because a call asks all three and each function between would take longer.
_OBSERVERS = _observers()
_function_modes, _is_profiling = _OBSERVERS.function_modes, _OBSERVERS.is_profiling
_keys, _PLAIN_KEYS = _OBSERVERS.keys, _OBSERVERS.plain_keys


def is_watched() -> bool:
    """Whether a function mode or torch's profiler sees calls in this thread."""
    return bool(_function_modes() or _is_profiling())


def unobserved() -> bool:
    """Whether nothing in this thread wants to see operators: no mode, transform or trace."""
    return not (_function_modes() or _is_profiling() or _keys().raw_repr() not in _PLAIN_KEYS)


_new_tuple: Any = tuple.__new__  # makes a record of its fields; ``_make`` takes twice as long
_is_grad_enabled = torch.is_grad_enabled  # in one place: the look-up takes as long as the call


def define(
    op: str,
    record: type[A],
    fake: Callable[[A], R],
    check: Callable[[str, A], None] | None = None,
) -> Call[A, R]:
    """Register an operator with the dispatcher as its body and ``fake`` as its shape function.

    Args:
        op: Its name.
        record: ``NamedTuple`` of its arguments; their annotations make the schema.
        fake: Takes the record, returns results without contents; its return annotation makes the
            schema's.
        check: Raises if values of arguments are out of range. It takes the operator's name and the
            record, and is called only if the first tensor is on the CPU: elsewhere it would wait
            for the device, and while torch traces there are no values.

    Returns:
        A function that calls the operator.
    """
    _LIBRARY.define(f"{op}({_declared(record)}, str backend) -> {_results(fake)}")

    def shapes(*args: Any) -> R:
        return fake(record(*args[:-1]))

    return _register(Operation(op, op, record, check), shapes)


def define_out(
    op: str,
    record: type[A],
    fake: Callable[[A], Any],
    check: Callable[[str, A], None] | None = None,
) -> Call[A, Any]:
    """Register ``op_out``: an operator with its first result in a given tensor.

    The schema has ``Tensor(a!) out`` before ``backend``, and no result but those after the first.
    The implementations are those of the operator itself, which take ``out``, and dispatch chooses
    among them as for the operator.

    Args:
        op: Name of the operator.
        record: An argument of ``define``, like the rest.
        fake: Its shape function.
        check: Its check of values.
    """
    others = _results(fake).strip("()").split(", ")[1:]
    results = f"({', '.join(others)})"
    _LIBRARY.define(f"{op}_out({_declared(record)}, Tensor(a!) out, str backend) -> {results}")

    def shapes(*args: Any) -> Any:
        return fake(record(*args[:-2]))[1:] if others else None

    return _register(Operation(f"{op}_out", op, record, check, True, bool(others)), shapes)


def as_record(record: type[A], args: Any, **changed: Any) -> A:
    """Make another operator's record from the fields of the same name.

    Args:
        record: ``NamedTuple`` to make.
        args: ``NamedTuple`` that has these fields, except those in ``changed``.
        **changed: Fields with other values.
    """
    names: tuple[str, ...] = record._fields  # type: ignore[attr-defined]
    return record(*[changed[n] if n in changed else getattr(args, n) for n in names])


def _declared(record: type[Any]) -> str:
    """Return the arguments of a schema, from the fields of a record."""
    letters = iter(string.ascii_lowercase)
    hints = get_type_hints(record, include_extras=True)
    return ", ".join(f"{_in_schema(kind, letters)} {name}" for name, kind in hints.items())


def _in_schema(annotation: Any, letters: Iterator[str]) -> str:
    """Return the schema's type for an annotation; written tensors take the next letter."""
    if annotation == Written:
        return f"Tensor({next(letters)}!)"
    if annotation == Symbolic:
        return "SymInt"
    if get_origin(annotation) in (Union, types.UnionType):
        inner, none = get_args(annotation)
        assert none is type(None), annotation
        return f"{_SCHEMA_TYPES[inner]}?"
    return _SCHEMA_TYPES[annotation]


def _results(fake: Callable[..., Any]) -> str:
    """Return the results of a schema, from a shape function's return annotation."""
    returned = get_type_hints(fake)["return"]
    if returned is type(None):
        return "()"
    if get_origin(returned) is tuple:
        return f"({', '.join(_SCHEMA_TYPES[kind] for kind in get_args(returned))})"
    return _SCHEMA_TYPES[returned]


@dataclass(frozen=True)
class Operation:
    """A registered operator: how it runs.

    Attributes:
        name: The registered name.
        op: Operator whose implementations run it.
        record: ``NamedTuple`` of its arguments, without ``out`` and ``backend``.
        check: Raises if values of arguments are out of range, on the CPU; or None.
        has_out: Whether the last argument before ``backend`` is the tensor for the first result.
        has_others: Whether there are results besides that one.
    """

    name: str
    op: str
    record: type[Any]
    check: Callable[[str, Any], None] | None
    has_out: bool = False
    has_others: bool = False

    def run(self, flat: Sequence[Any]) -> Any:
        """Choose an implementation and run it.

        Args:
            flat: All arguments of the registered operator, as torch passes them.
        """
        out = flat[-2] if self.has_out else None
        return self.run_record(self.arguments(flat), flat[-1], out)

    def run_record(
        self,
        args: Any,
        backend: str,
        out: torch.Tensor | None = None,
    ) -> Any:
        """Choose an implementation and run it.

        Args:
            args: A ``record``.
            backend: Name of an implementation, or ``"auto"``.
            out: Tensor for the first result, if ``has_out``.
        """
        if self.check is not None:
            self.check_values(args)
        if self.has_out:
            return self._others(dispatch.run(self.op, args, backend, out=out))
        return dispatch.run(self.op, args, backend)

    def run_with(self, implementation: Callable[..., Any], flat: Sequence[Any]) -> Any:
        """Run a given implementation; ``flat`` as in ``run``."""
        if self.has_out:
            args = _new_tuple(self.record, flat[:-2])
            self.check_values(args)
            return self._others(implementation(args, out=flat[-2]))
        args = _new_tuple(self.record, flat[:-1])
        if self.check is not None:
            self.check_values(args)
        return implementation(args)

    def implementation(self, flat: Sequence[Any]) -> Callable[..., Any]:
        """Return the implementation that ``"auto"`` chooses; ``flat`` as in ``run``."""
        return dispatch.implementation(self.op, self.arguments(flat))

    def arguments(self, flat: Sequence[Any]) -> Any:
        """Return the record; ``flat`` as in ``run``."""
        return _new_tuple(self.record, flat[:-2] if self.has_out else flat[:-1])

    def check_values(self, args: Any) -> None:
        """Raise if values on the CPU are out of range; ``args`` is a ``record``."""
        if self.check is not None and args[0].is_cpu:
            self.check(self.op, args)

    def _others(self, results: Any) -> Any:
        return results[1:] if self.has_others else None


OPERATIONS: dict[str, Operation] = {}


def _register(operation: Operation, fake: Callable[..., Any]) -> Call[Any, Any]:
    """Register an operator; the result runs it at once where torch would do nothing else."""
    name, op, has_out = operation.name, operation.op, operation.has_out
    OPERATIONS[name] = operation

    def body(*flat: Any) -> Any:
        if not _is_grad_enabled():
            return operation.run(flat)
        # Without this, autograd would record the reference's intermediate tensors.
        with torch.no_grad():
            return operation.run(flat)

    _LIBRARY.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dsv4::{name}", fake, lib=_LIBRARY)
    registered = getattr(torch.ops.dsv4, name).default
    schema_types = [str(argument.real_type) for argument in registered._schema.arguments]
    declared = [_in_python(kind) for kind in schema_types[: len(operation.record._fields)]]
    tensors = [i for i, kinds in enumerate(declared) if torch.Tensor in kinds]
    aliases = [argument.alias_info for argument in registered._schema.arguments]
    written = [i for i, alias in enumerate(aliases) if alias is not None and alias.is_write]
    as_declared: set[tuple[type, ...]] = set()

    def call(args: Any, backend: str, out: torch.Tensor | None = None, reserve_sms: int = 0) -> Any:
        if torch.compiler.is_compiling():
            return through_torch(args, backend, out)
        if _function_modes() or _is_profiling() or _keys().raw_repr() not in _PLAIN_KEYS:
            return through_torch(args, backend, out)  # ``unobserved``, in this frame
        kinds = tuple(map(type, args))
        if kinds not in as_declared:
            if any(map(_missing, kinds, declared)):
                return through_torch(args, backend, out)
            as_declared.add(kinds)
        if type(backend) is not str or (out is not None and type(out) not in _TYPES["Tensor"]):
            return through_torch(args, backend, out)
        grad = _is_grad_enabled()
        for i in tensors:
            tensor = args[i]
            if tensor is not None and (
                tensor.is_neg() or tensor.is_meta or (grad and tensor.requires_grad)
            ):
                return through_torch(args, backend, out)
        if out is not None and (out.is_neg() or (grad and out.requires_grad)):
            return through_torch(args, backend, out)
        if has_out:
            return operation.run_record(args, backend, out)
        check = operation.check
        if check is not None and args[0].is_cpu:  # ``check_values``, in this frame
            check(op, args)
        return dispatch.run(op, args, backend, None, reserve_sms)

    def through_torch(args: Any, backend: str, out: torch.Tensor | None) -> Any:
        flat = (*args, out, backend) if has_out else (*args, backend)
        if not _is_grad_enabled() or torch.compiler.is_compiling():
            return registered(*flat)
        # Before the call: torch does not know afterwards what a view written in place came from.
        _refuse_gradients(name, [flat[i] for i in written])
        results = registered(*flat)
        _refuse_gradients(name, results if type(results) is tuple else (results,))
        return results

    return call


def _refuse_gradients(name: str, tensors: Sequence[Any]) -> None:
    """Make a backward pass that reaches one of these tensors of an operator raise."""

    def refuse(gradient: torch.Tensor) -> None:
        raise RuntimeError(
            f"dsv4.ops.{name}: a backward pass reached this operator, which is for inference "
            "only and has no gradient; wanted torch.no_grad(), or requires_grad_(False) of what "
            "needs no gradient"
        )

    for tensor in tensors:
        if type(tensor) is torch.Tensor and tensor.requires_grad:
            tensor.register_hook(refuse)


def _in_python(declared: str) -> tuple[type, ...]:
    """Return the types of an argument that the dispatcher passes on unchanged."""
    inner = declared.removeprefix("Optional[")
    if inner == declared:
        return _TYPES[declared]
    return (*_TYPES[inner[:-1]], type(None))


def _missing(kind: type, among: tuple[type, ...]) -> bool:
    return kind not in among
