"""Triton's interpreter without work that it repeats, and whether it computes as a GPU does.

More than half of a kernel's time there is no arithmetic. For every launch and every call of a
device function it looks through all of ``triton.language`` for functions to replace by its own;
for every operation it makes types and shapes again; and for every sum of integers it computes the
sum in int64, whether it overflows, and throws both away. What replaces this gives the same bits:
``test_quick_interpreter.py`` compares them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Replacement:
    """An attribute of Triton's and what takes its place."""

    owner: Any
    name: str
    value: Any
    original: Any

    @classmethod
    def of(
        cls, owner: Any, name: str, parameters: str, make: Callable[[Any], Any]
    ) -> Iterator[Replacement]:
        """Yield what ``make`` makes of a function; nothing on versions where it takes others."""
        original = getattr(owner, name, None)
        if original and " ".join(inspect.signature(original).parameters) == parameters:
            yield cls(owner, name, make(original), original)


@functools.cache
def replacements() -> tuple[Replacement, ...]:
    """Return all of them; none without Triton."""
    try:
        from triton.language import core, semantic
        from triton.runtime import interpreter
    except ImportError:
        return ()
    of, semantics = Replacement.of, semantic.TritonSemantic
    sanitize = "binary_op_sanitize_overflow_impl"
    return (
        *of(semantics, sanitize, "self lhs rhs binary_op", _if_debugging),
        *of(semantics, "broadcast_impl_value", "self lhs rhs", _where_shapes_differ),
        *of(interpreter, "_get_np_dtype", "tt_dtype", _by_scalar),
        *of(interpreter, "_patch_lang", "fn", _once_for_a_launch),
        *of(interpreter, "_patch_builtin", "pkg builder scope", _looked_at_once),
        *of(core.block_type, "__init__", "self element_ty shape", _made_once),
        *of(core.tensor, "__init__", "self handle type", _of_shapes_made_once),
    )


@functools.cache
def install() -> None:
    """Put them in place. Idempotent."""
    for replacement in replacements():
        setattr(replacement.owner, replacement.name, replacement.value)


def _if_debugging(original: Callable[..., None]) -> Callable[..., None]:
    """Nobody reads whether a sum overflows but an assertion that only debugging makes."""

    def sanitize(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug:
            original(self, lhs, rhs, binary_op)

    return sanitize


def _by_scalar(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The dtype of an array depends on the scalar type; all pointers have the same."""
    dtypes: dict[str, Any] = {}

    def get_np_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = original(kind)
        return dtypes[name]

    return get_np_dtype


def _once_for_a_launch(original: Callable[..., Any]) -> Callable[..., Any]:
    """A device function's modules were replaced by the launch that calls it."""
    from triton.runtime import interpreter

    language, scope = interpreter.tl, interpreter._LangPatchScope

    @functools.cache
    def seen_by(fn: Any) -> list[Any]:
        return [m for m in fn.__globals__.values() if m is language or m is language.core]

    def patch_lang(fn: Any) -> Any:
        # ``range`` is a class until it is replaced.
        seen = seen_by(fn)
        replaced = seen and not any(inspect.isclass(module.range) for module in seen)
        return scope() if replaced else original(fn)

    return patch_lang


def _looked_at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Functions of a module are the same at every launch."""
    from triton.runtime import interpreter

    members: dict[int, list[tuple[str, Any]]] = {}

    def interpreted(function: Any) -> Any:
        def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
            return function(*args, **kwargs, _semantic=interpreter.interpreter_semantic)

        return call

    def patch_builtin(module: Any, builder: Any, scope: Any) -> None:
        if not members.get(id(module)):
            members[id(module)] = [
                (name, interpreted(function))
                for name, function in inspect.getmembers(module)
                if interpreter.tl.core.is_builtin(function)
            ]
        for name, function in members[id(module)]:
            scope.set_attr(module, name, function)

    return patch_builtin


def _made_once(original: Callable[..., None]) -> Callable[..., None]:
    """Block types of the same elements and shape share what the first found out."""
    made: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [getattr(size, "value", size) for size in shape]
        space = getattr(element_ty, "address_space", None)
        key = (element_ty.name, space, *map(type, sizes), *sizes)
        if key not in made:
            original(self, element_ty, shape)
            made[key] = vars(self).copy()
        vars(self).update(made[key])

    return init


def _of_shapes_made_once(original: Callable[..., None]) -> Callable[..., None]:
    """Tensors of one shape share it, so that two have the same if it is the same object."""
    of_types: dict[str, dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], Any] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        if type.name not in of_types:
            original(self, handle, type)
            sizes = tuple(size.value for size in self.shape)
            shape = shapes.setdefault(sizes, self.shape)
            of_types[type.name] = {**vars(self), "shape": shape}
        vars(self).update(of_types[type.name], handle=handle, type=type, dtype=type.scalar)

    return init


def _where_shapes_differ(original: Callable[..., Any]) -> Callable[..., Any]:
    """Tensors of one shape, which ``_of_shapes_made_once`` gave them, stay as they are."""

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else original(self, lhs, rhs)

    return broadcast_impl_value


def departures() -> str | None:
    """Return which float32 arithmetic it gets wrong, like Triton 3.6's interpreter, or None.

    Codes at a border differ from a GPU's where a fused multiply-add rounds twice, and scales where
    the smaller of a NaN and a number is NaN.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        return None

    def number(value):
        return interpreter.TensorHandle(np.array([value], np.float32), interpreter.tl.float32)

    builder = interpreter.InterpreterBuilder()
    near = number(1 + 2.0**-12)
    if builder.create_fma(near, near, number(-1)).data[0] != 2.0**-11 + 2.0**-24:
        return "a fused multiply-add rounds twice"
    if np.isnan(builder.create_minnumf(number(1), number(np.nan)).data[0]):
        return "the smaller of a number and NaN is NaN"
    return None
