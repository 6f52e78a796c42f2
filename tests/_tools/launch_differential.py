"""Compare our launches of Triton kernels with Triton's own, on mock drivers.

    python -m tests._tools.launch_differential EXAMPLES      (without TRITON_INTERPRET)

Random arguments, many of them alike, are given to kernels with parameters of every type. What
Triton would launch is compared with what ``FastKernel`` launches: the compiled kernel, which has
been specialised for alignment and values, the grid, the stream, the attributes, and the bytes of
every parameter where the machine code reads it. Prints a line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget

from dsv4.cute.runtime import driver as cuda_driver
from dsv4.triton._runtime import launcher
from dsv4.triton._runtime.launcher import flat, parameter_sizes
from tests._tools.host_time import MockTritonDriver

_STREAM = 0x5EED
_CODES = {"i1": "b", "i8": "b", "u1": "B", "i32": "i", "u32": "I", "i64": "q", "u64": "Q"}
_CODES |= {"fp32": "f", "fp64": "d"}


@triton.jit(do_not_specialize=["free"])
def _every_type(x, y, none, small, free, wide, flag, factor, out, WIDTH: tl.constexpr):
    i = tl.arange(0, WIDTH)
    value = tl.load(x + i * small).to(tl.float32) * factor + free + wide
    if y is not None:
        value += tl.load(y + i).to(tl.float32)
    tl.store(out + i, tl.where(flag, value, 0.0).to(out.dtype.element_ty))


@triton.jit
def _tuples(first, sizes, x, WIDTH: tl.constexpr, PDL: tl.constexpr):
    i = tl.arange(0, WIDTH)
    value = tl.load(first[0] + i * sizes[0]) + tl.load(first[1] + i * sizes[1])
    tl.store(x + i, value)


@dataclass(frozen=True)
class Launched:
    """The calls that a driver got."""

    kernel: str
    grid: tuple[int, ...]
    stream: int
    threads: int
    shared: int
    early: bool
    parameters: tuple[bytes, ...]


class CudaDriver:
    """Reads every parameter as the machine code would."""

    def __init__(self, compiled: dict[int, Any]) -> None:
        self.compiled, self.launches = compiled, []

    def cuLaunchKernelEx(self, config: Any, handle: Any, pointers: Any, extra: Any) -> int:  # noqa: N802
        config, kernel = config._obj, self.compiled[handle.value]
        sizes = parameter_sizes(kernel.asm["ptx"])
        values = tuple(ctypes.string_at(pointers[i], n) for i, n in enumerate(sizes))
        attributes = [config.attributes[i] for i in range(config.attribute_count)]
        assert all(
            attribute.id == cuda_driver._PROGRAMMATIC_LAUNCH and attribute.value[0] == 1
            for attribute in attributes
        )
        self.launches.append(
            Launched(
                kernel.hash,
                tuple(config.grid),
                config.stream,
                config.block[0],
                config.shared_bytes,
                bool(attributes),
                values,
            )
        )
        return 0


class TritonDriver(MockTritonDriver):
    """Keeps what Triton gives to its launcher."""

    def __init__(self) -> None:
        self.target = GPUTarget("cuda", 90, 32)
        self.compiled: dict[int, Any] = {}
        self.raw: list[Any] = []  # what Triton's launcher was given
        super().__init__(self)
        self.utils.load_binary = self._load

    def _load(self, name: str, code: bytes, shared: int, device: int) -> tuple[int, ...]:
        handle = len(self.compiled) + 100
        self.compiled[handle] = None
        return (1, handle, 32, 0, 1024)

    def get_current_stream(self, device: int) -> int:
        return _STREAM

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            *grid, stream, _, packed, _, _, _ = arguments[:9]
            self.raw.append((tuple(grid), stream, packed, source, metadata, arguments[9:]))

        return launch

    def expected(self, kernel: Any) -> list[Launched]:
        """Return the launches since the last call, as the driver sees them."""
        actual = []
        for grid, stream, (warps, _, shared), source, metadata, args in self.raw:
            sizes = parameter_sizes(kernel.asm["ptx"])
            parts = [part for arg in args for part in flat(arg)]
            kinds = [part for kind in source.signature.values() for part in flat(kind)]
            values = [_bytes(k, v) for k, v in zip(kinds, parts, strict=True) if k != "constexpr"]
            values += [bytes(8)] * (len(sizes) - len(values))
            if all(grid):
                actual.append(
                    Launched(
                        kernel.hash, grid, stream, 32 * warps, shared, metadata.launch_pdl,
                        tuple(values),
                    )
                )  # fmt: skip
        self.raw.clear()
        return actual


def _bytes(kind: str, value: Any) -> bytes:
    if kind[0] == "*":
        return struct.pack("Q", 0 if value is None else value.data_ptr())
    code = _CODES[kind]
    return struct.pack(code, float(value) if code in "fd" else int(value))


@contextmanager
def drivers() -> Iterator[tuple[TritonDriver, CudaDriver]]:
    """Mock drivers of Triton and of CUDA, and CPU tensors in place of a GPU's."""
    triton_driver = TritonDriver()
    cuda = CudaDriver(triton_driver.compiled)
    with ExitStack() as undo:
        for owner, name, value in (
            (cuda_driver, "_driver", lambda: cuda),
            (launcher, "is_on_gpu", lambda tensor: True),
            (launcher, "current_device", lambda: -1),
            (launcher, "stream_of", lambda device: _STREAM),
        ):
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        triton.runtime.driver.set_active(triton_driver)
        yield triton_driver, cuda


_MEMORY = torch.zeros(64, dtype=torch.uint8)


def tensor(dtype: torch.dtype, aligned: bool) -> torch.Tensor:
    start = -_MEMORY.data_ptr() % 16 + (0 if aligned else dtype.itemsize)
    return _MEMORY[start : start + dtype.itemsize].view(dtype)


TENSORS = st.builds(tensor, st.sampled_from([torch.float32, torch.bfloat16]), st.booleans())
INTEGERS = st.sampled_from([0, 1, 3, 16, 48, -16, 2**31 - 1, 2**31, 2**40, -(2**31), -(2**31) - 1])
SMALL = st.sampled_from([0, 1, 2, 5, 16, 32])
EVERY = (
    TENSORS,
    st.one_of(st.none(), TENSORS),
    st.none(),
    SMALL,
    INTEGERS,
    st.sampled_from([1, 16, 2**33, 2**63, 2**64 - 1]),
    st.booleans(),
    st.sampled_from([0.0, -0.0, 1.0, 1e-30, float("inf"), 1e39, 1]),
    TENSORS,
)
TUPLES = st.tuples(
    st.tuples(TENSORS, TENSORS), st.tuples(SMALL, st.sampled_from([1, 2**40])), TENSORS
)
GRIDS = st.sampled_from([(1,), (7,), (3, 2), (1, 2, 3), (0,), (4, 0)])
OPTIONS = st.sampled_from(
    [
        {"WIDTH": 32, "num_warps": 1},
        {"WIDTH": 64, "num_warps": 1},
        {"WIDTH": 32, "num_warps": 2},
        {"WIDTH": 64, "num_warps": 2, "launch_pdl": True, "enable_fp_fusion": True},
    ]
)


@st.composite
def neighbours(draw: Callable[..., Any]) -> list[Any]:
    """Calls of ``_every_type``: one, and some that differ from it in an argument or otherwise."""
    first = [draw(values) for values in EVERY]
    grid, options = draw(st.sampled_from([(1,), (3, 2)])), draw(OPTIONS)
    calls: list[Any] = [(tuple(first), grid, options)]
    for index in draw(st.lists(st.integers(0, len(EVERY) + 1), min_size=2, max_size=5)):
        args = list(first)
        if index < len(EVERY):
            args[index] = draw(EVERY[index])
        other = draw(GRIDS) if index == len(EVERY) else grid
        calls.append((tuple(args), other, draw(OPTIONS) if index > len(EVERY) else options))
    return calls


def compare(
    fast: launcher.FastKernel, actual: tuple[TritonDriver, CudaDriver], call: tuple[Any, ...]
) -> int:
    """Raise unless both launch the same, the second time at the latest by ourselves."""
    by_triton, cuda = actual
    args, grid, options = call
    kernel = fast.kernel[grid](*args, **options)
    by_triton.compiled[kernel.function if kernel.function else -1] = kernel
    expected = by_triton.expected(kernel)
    for _ in range(2):
        cuda.launches.clear()
        assert fast[grid](*args, **options) is kernel
        passed_on = by_triton.expected(kernel)
        assert cuda.launches + passed_on == expected, (call, cuda.launches, passed_on, expected)
    return len(cuda.launches)


def main() -> None:
    counts = {"ours": 0, "triton's": 0}
    with drivers() as result:
        every = launcher.FastKernel(_every_type)
        tuples = launcher.FastKernel(_tuples)
        chosen = settings(
            max_examples=int(sys.argv[1]), deadline=None, database=None, derandomize=True,
            phases=(Phase.generate,),
        )  # fmt: skip

        @chosen
        @given(neighbours())
        def every_type(calls: list[Any]) -> None:
            for call in calls:
                ours = compare(every, result, call)
                counts["ours" if ours else "triton's"] += 1

        @chosen
        @given(st.tuples(TUPLES, GRIDS, OPTIONS))
        def of_tuples(call: Any) -> None:
            args, grid, options = call
            ours = compare(tuples, result, (args, grid, {**options, "PDL": 1}))
            counts["ours" if ours else "triton's"] += 1

        every_type()
        of_tuples()
        counts["specialisations"] = len(result[0].compiled)
        counts["kept"] = sum(
            len(layout.launches) for layout in every._layouts.values() if layout is not None
        )
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
