"""Launch Triton kernels through the CUDA driver, without Triton's Python for every call.

``JITFunction.run`` binds arguments, computes a cache key from strings and calls a generic launcher:
tens of microseconds of host time. ``@fast_launch`` puts a cache in front of it. The first call of
a specialisation asks Triton to compile and load it; what that returns says which function was
loaded and how its parameters are laid out. A launch writes the parameters and calls
``cuLaunchKernelEx``. Triton's own launcher is not even made: Triton 3.6 compiles C for each.

Triton's own path runs whenever something else might be wanted of the call: tensors that are not on
the current GPU, the interpreter, a replaced ``JITFunction.run``, launch hooks of a profiler, and
kernels with features that are not handled here (``_unsupported``).
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, or_
from typing import Any

import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from dsv4.cute.runtime import driver as cuda_driver
from dsv4.cute.runtime.launch import current_device, stream_of
from dsv4.plans.recorder import current_recorder
from dsv4.triton._runtime.kernel_store import keep_images, load

_ALIGNMENT = 16  # bytes of a pointer, and the divisor of an integer, that Triton specialises on
_MOST = 1024  # specialisations of a kernel that are kept
_LARGEST_SHARED = 227 * 1024  # above, Triton asks for another shared memory mode
_POINTER = 8
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_RUNTIME = frozenset((int, float, bool, type(None)))
_NEW: Any = object()  # in place of what a cache has: nothing was found out yet
_RUN = JITFunction.run
_SETTINGS = knobs.runtime

# How ``struct`` writes a parameter of a Triton type.
_SCALARS = {
    "i1": "b",
    "i8": "b",
    "i16": "h",
    "i32": "i",
    "i64": "q",
    "u1": "B",
    "u8": "B",
    "u16": "H",
    "u32": "I",
    "u64": "Q",
    "fp32": "f",
    "f32": "f",
    "fp64": "d",
}
_data_ptr, _get_device = torch.Tensor.data_ptr, torch.Tensor.get_device
_dtype = attrgetter("dtype")


@functools.lru_cache(maxsize=1 << 16, typed=True)
def integer_class(value: int) -> tuple[Any, ...]:
    """Return what a compiled kernel may assume of an integer: no coarser than Triton's rules."""
    width = 32 if -(2**31) <= value < 2**31 else 64 if value < 2**63 else 65
    return (int, value == 1, value % _ALIGNMENT == 0, width)


def scalar_class(value: Any) -> Any:
    """The part of a cache key that stands for a runtime argument other than a tensor."""
    kind = type(value)
    if kind is int:
        return integer_class(value)
    if kind is float:
        return float
    return (kind, value)  # bool, None


class Layout:
    """Positions of tensors, runtime scalars and constants among a call's positional arguments.

    Arguments that are tuples count as their members.

    Attributes:
        positions: Positions of each kind, among all members.
        launches: Launch of each specialisation, by its key; None where only Triton can launch it.
    """

    def __init__(self, kernel: Any, args: Sequence[Any]) -> None:
        self.has_tuples = any(type(arg) is tuple for arg in args)
        kinds: list[str] = []
        for parameter, arg in zip(kernel.params, args, strict=False):
            if parameter.is_constexpr:
                kinds.append("constant")
            else:
                parts = flat(arg) if type(arg) is tuple else (arg,)
                kinds += ["tensor" if type(part) in _TENSORS else "scalar" for part in parts]
        self.positions = {
            target: [i for i, kind in enumerate(kinds) if kind == target]
            for target in ("tensor", "scalar", "constant")
        }
        self.tensors = _getter(self.positions["tensor"])
        self.scalars = _getter(self.positions["scalar"])
        self.constants = _getter(self.positions["constant"])
        self.launches: dict[Any, Launch | None] = {}


def flat(value: Any) -> list[Any]:
    """The parts of nested tuples."""
    if type(value) is not tuple:
        return [value]
    return [part for piece in value for part in flat(piece)]


def _types(values: Sequence[Any]) -> tuple[Any, ...]:
    """Types of values, those of a tuple's parts in a tuple."""
    return tuple([_types(v) if type(v) is tuple else type(v) for v in values])


def _getter(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that takes the items at these positions out of a sequence."""
    if not positions:
        return lambda items: ()
    start, end = positions[0], positions[-1] + 1
    if list(positions) == list(range(start, end)):
        return lambda items: tuple(items[start:end])
    return lambda items: tuple([items[i] for i in positions])


@dataclass(frozen=True)
class Function:
    """A compiled kernel as a launch needs it.

    Attributes:
        compiled: Triton's object, which owns the loaded module.
        types: Triton's type of each parameter that the machine code has, in order.
        sources: Where each comes from: an index into tensors or, negative, ``~index`` into scalars.
        hidden: Pointers that Triton appends for scratch memory, of which there is none.
    """

    compiled: Any
    types: tuple[str, ...]
    sources: tuple[int, ...]
    hidden: int


class Launch:
    """Launches one compiled kernel; every thread has its own parameter buffer.

    Attributes:
        compiled: Triton's object.
        passed: Takes those of a call's runtime scalars that the machine code has as parameters.
    """

    def __init__(self, function: Function) -> None:
        self.compiled = function.compiled
        self.passed = _getter([~source for source in function.sources if source < 0])
        self._mine = _Buffers(function)

    def __call__(
        self, grid: tuple[int, ...], stream: int, addresses: Sequence[int], passed: Sequence[Any]
    ) -> None:
        """Launch on a stream of the current GPU; nothing for a grid without programs.

        Raises:
            OverflowError: if a scalar does not fit its parameter; nothing is launched.
            RuntimeError: if the driver refuses.
        """
        if 0 in grid:
            return
        mine = self._mine
        mine.write(*addresses, *passed)
        config = mine.config
        if mine.grid != grid:
            config.grid[0:3] = (*grid, 1, 1)[:3]
            mine.grid = grid
        config.stream = stream
        status = mine.start(*mine.arguments)
        if status:
            cuda_driver.check(status, f"launching {self.compiled.name}")


class _Buffers(threading.local):
    """A thread's buffer, which the driver reads, with addresses first and then scalars.

    The driver is given an address per parameter, so their order in the buffer is free.
    """

    def __init__(self, function: Function) -> None:
        metadata = function.compiled.metadata
        pointers = [i for i, source in enumerate(function.sources) if source >= 0]
        others = [i for i, source in enumerate(function.sources) if source < 0]
        kinds = ["Q" for _ in pointers] + [_SCALARS[function.types[i]] for i in others]
        parameters = cuda_driver.Parameters(*kinds, *"Q" * function.hidden)
        buffer = (ctypes.c_char * max(parameters.size, 1))()
        order = [*pointers, *others, *range(len(kinds), len(kinds) + function.hidden)]
        start = ctypes.addressof(buffer)
        positions = {i: start + offset for i, offset in zip(order, parameters.offsets, strict=True)}
        addresses = (ctypes.c_void_p * max(len(positions), 1))(
            *[positions[i] for i in sorted(positions)]
        )
        self.write = functools.partial(struct.Struct("@" + "".join(kinds)).pack_into, buffer, 0)
        self.grid: tuple[int, ...] | None = None
        programmatic, plain = cuda_driver.programmatic_launch, cuda_driver.no_attributes
        self.config = cuda_driver.config(
            threads=32 * metadata.num_warps,
            shared_bytes=metadata.shared,
            attributes=(programmatic if metadata.launch_pdl else plain)(),
        )
        handle = ctypes.c_void_p(function.compiled.function)
        self.arguments = (ctypes.byref(self.config), handle, addresses, None)
        self.start = cuda_driver.launcher()
        self.buffer = buffer


class FastKernel:
    """A Triton kernel that launches what it has launched before without Triton.

    Called as the kernel itself: ``kernel[grid](*args, **options)``. Anything else that is asked of
    it is the kernel's. Settings of Triton that change what is compiled (``triton.knobs``) are read
    when a specialisation is first launched; ``forget`` lets them be read again.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._is_jit = isinstance(kernel, JITFunction)
        if self._is_jit:
            keep_images(kernel)
        self._layouts: dict[tuple[Any, ...], Layout | None] = {}
        self.__name__, self.__doc__ = kernel.__name__, kernel.__doc__

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return functools.partial(self._launch, grid)

    def forget(self) -> None:
        """Launch every specialisation through Triton once more."""
        self._layouts.clear()

    def _launch(self, grid: Any, *args: Any, **options: Any) -> Any:
        if not self._is_jit:
            return self._by_triton(grid, args, options)
        types = (*map(type, args), *options, *map(type, options.values()))
        if tuple in types:
            types = (_types(args), *options, *_types(tuple(options.values())))
        layout = self._layouts.get(types, _NEW)
        if layout is _NEW:
            layout = self._new_layout(types, args)
        if layout is None or not _is_ours(layout, grid, args):
            return self._by_triton(grid, args, options)
        parts = flat(args) if layout.has_tuples else args
        tensors, scalars = layout.tensors(parts), layout.scalars(parts)
        addresses = list(map(_data_ptr, tensors))
        unaligned = functools.reduce(or_, addresses) % _ALIGNMENT
        key = (
            unaligned and tuple([address % _ALIGNMENT == 0 for address in addresses]),
            *map(_get_device, tensors),
            *map(_dtype, tensors),
            *map(scalar_class, scalars),
            *layout.constants(parts),
            *options.values(),
        )
        launch = layout.launches.get(key, _NEW)
        if launch is _NEW:
            launch = self._learned(layout, key, grid, args, options)
        if launch is None:
            return self._by_triton(grid, args, options)
        passed = launch.passed(scalars)
        try:
            launch(grid, stream_of(tensors[0].get_device()), addresses, passed)
        except (OverflowError, struct.error):  # Triton's conversions wrap around or give infinity
            return self._by_triton(grid, args, options)
        recorder = current_recorder()
        if recorder is not None:
            recorder.launched(self, launch, grid, passed, args, options)
        return launch.compiled

    @property
    def is_free(self) -> Callable[[], bool]:
        """Says whether launches may leave out Triton."""
        return nobody_watches

    def _by_triton(self, grid: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
        recorder = current_recorder()
        if recorder is None:
            return self.kernel[grid](*args, **options)
        if self._is_jit:
            recorder.refuse(f"{self.kernel.__name__} was launched by Triton")
        else:
            recorder.launched(self, None, grid, (), args, options)
        with recorder.paused():
            return self.kernel[grid](*args, **options)

    def _new_layout(self, types: tuple[Any, ...], args: Sequence[Any]) -> Layout | None:
        """None where no tensor comes, or a runtime argument of another kind, by name or not."""
        named = [p for p in self.kernel.params[len(args) :] if not p.is_constexpr]
        layout = Layout(self.kernel, args)
        parts = flat(tuple(args)) if layout.has_tuples else args
        scalars = {type(parts[i]) for i in layout.positions["scalar"]}
        understood = layout.positions["tensor"] and scalars <= _RUNTIME and not named
        return _keep(self._layouts, types, layout if understood else None)

    def _learned(
        self, layout: Layout, key: Any, grid: Any, args: Sequence[Any], options: dict[str, Any]
    ) -> Launch | None:
        """Compile and load a new specialisation; return its launch, or None if only Triton can."""
        recorder = current_recorder()
        if recorder is None:
            compiled = self.kernel.run(*args, grid=grid, warmup=True, **options)
        else:
            recorder.refuse(f"{self.kernel.__name__} was compiled", is_new=True)
            with recorder.paused():
                compiled = self.kernel.run(*args, grid=grid, warmup=True, **options)
        if not isinstance(compiled, CompiledKernel):  # a hook took it, or it compiles elsewhere
            return None
        load(compiled)
        function = describe(self.kernel, layout, compiled)
        return _keep(layout.launches, key, None if function is None else Launch(function))


def _keep(cache: dict[Any, Any], key: Any, value: Any) -> Any:
    """Store and return ``value``; a full cache is emptied first."""
    if len(cache) >= _MOST:
        cache.clear()
    cache[key] = value
    return value


def fast_launch(kernel: Any) -> Any:
    """``kernel`` with ``FastKernel``'s launches."""
    return FastKernel(kernel)


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on a CUDA GPU: one place, for tests without one to replace."""
    return tensor.is_cuda


def _is_ours(layout: Layout, grid: Any, args: Sequence[Any]) -> bool:
    """Return whether nothing but the launch itself is wanted, on the current GPU."""
    first = layout.positions["tensor"][0]
    tensor = flat(tuple(args))[first] if layout.has_tuples else args[first]
    return (
        type(grid) is tuple
        and is_on_gpu(tensor)
        and current_device() == tensor.get_device()
        and nobody_watches()
    )


def nobody_watches() -> bool:
    """Return whether launches may bypass Triton: nobody has replaced its launcher or hooked it."""
    enter, leave = _SETTINGS.launch_enter_hook, _SETTINGS.launch_exit_hook
    return JITFunction.run is _RUN and not (
        getattr(enter, "calls", enter) or getattr(leave, "calls", leave)
    )


def describe(kernel: Any, layout: Layout, compiled: Any) -> Function | None:
    """Return how to launch a compiled kernel; None, with a warning the first time, if unknown.

    Args:
        kernel: The ``JITFunction``.
        layout: Layout of the call's positional arguments.
        compiled: The ``CompiledKernel``.
    """
    try:
        function = _described(kernel, layout, compiled)
        reason = _unsupported(function)
    except (AttributeError, KeyError, ValueError) as error:
        function, reason = None, f"{type(error).__name__}: {error}"
    if reason is None:
        return function
    _warn(f"{kernel.__name__} is launched by Triton, which takes the host longer: {reason}")
    return None


def _described(kernel: Any, layout: Layout, compiled: Any) -> Function:
    tensors, scalars = layout.positions["tensor"], layout.positions["scalar"]
    signature = [part for name in kernel.arg_names for part in flat(compiled.src.signature[name])]
    types, sources = [], []
    for i, kind in enumerate(signature):
        if kind == "constexpr":  # a constant, None, or an integer that is 1
            continue
        types.append(kind)
        sources.append(tensors.index(i) if kind[0] == "*" else ~scalars.index(i))
    sizes = parameter_sizes(compiled.asm["ptx"])
    return Function(compiled, tuple(types), tuple(sources), len(sizes) - len(types))


def _unsupported(function: Function) -> str | None:
    """Return why only Triton can launch it, or None."""
    metadata = function.compiled.metadata
    if any(kind[0] != "*" and kind not in _SCALARS for kind in function.types):
        return f"parameters are {function.types}"
    if metadata.num_ctas != 1 or metadata.launch_cooperative_grid:
        return "it has clusters or a cooperative grid"
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        return "it wants scratch memory"
    if metadata.shared > _LARGEST_SHARED:
        return f"it has {metadata.shared} bytes of shared memory"
    sizes = parameter_sizes(function.compiled.asm["ptx"])
    ours = [
        _POINTER if kind[0] == "*" else struct.calcsize(_SCALARS[kind]) for kind in function.types
    ]
    if sizes != [*ours, *[_POINTER] * function.hidden] or function.hidden > 2:
        return f"parameters are {function.types}, but those of the machine code have {sizes} bytes"
    return None


def parameter_sizes(ptx: str) -> list[int]:
    """Bytes of each parameter of a PTX module's entry.

    Raises:
        ValueError: if there is no entry, or a parameter is an array.
    """
    entry = re.search(r"\.entry\s+\S+?\s*\((.*?)\)", ptx, re.DOTALL)
    if entry is None:
        raise ValueError("the PTX has no entry")
    sizes = []
    for line in filter(None, map(str.strip, entry[1].split(","))):
        match = re.match(
            r"\.param\s+\.[busf](\d+)\s+(?:\.ptr\s+(?:\.\w+\s+)*(?:\d+\s+)?)?\w+$", line
        )
        if match is None:
            raise ValueError(f"the PTX has a parameter {line!r}")
        sizes.append(int(match[1]) // 8)
    return sizes


@functools.cache
def _warn_once() -> list[str]:
    return []


def _warn(message: str) -> None:
    if not _warn_once():
        _warn_once().append(message)
        warnings.warn(message, RuntimeWarning, stacklevel=4)
