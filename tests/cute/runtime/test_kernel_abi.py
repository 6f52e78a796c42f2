"""Arguments of a kernel from one declaration: packing, placeholders, errors."""

from __future__ import annotations

import ctypes
import math
import struct
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4.cute.runtime import driver as cuda_driver
from dsv4.cute.runtime.driver import Image, Kernel, Matrix
from dsv4.cute.runtime.kernel_abi import (
    Empty,
    Float32,
    Int32,
    Int64,
    KernelAbi,
    Pointer,
    TmaDescriptor,
    TmaSizes,
)


class Args(NamedTuple):
    rows: Int32
    source: Pointer
    out: Pointer
    stride: Int64
    flag: Int32
    factor: Float32


class Copies(NamedTuple):
    of_x: TmaDescriptor
    of_codes: TmaDescriptor
    x: TmaSizes
    codes: TmaSizes
    layout: Empty


MAP = bytes(range(128))
INT32, INT64 = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)


class Driver:
    """Keeps the bytes of every argument of a launch."""

    def __init__(self, abi):
        self.abi, self.launches = abi, []

    def __getattr__(self, name):
        return lambda *arguments: 0

    def cuLaunchKernelEx(self, config, kernel, pointers, extra):  # noqa: N802
        result = {}
        for (name, field), address in zip(self.abi.fields.items(), pointers, strict=True):
            kind = "@" + field.format
            result[name] = struct.unpack(kind, ctypes.string_at(address, struct.calcsize(kind)))
        self.launches.append(result)
        return 0


class Descriptors(NamedTuple):
    of_codes: TmaDescriptor
    of_scales: TmaDescriptor


def launched(abi, pointers, values, matrices=(), described=(), describe=None):
    """Values that the kernel of each launch finds, by name."""
    driver = Driver(abi)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_driver, "_driver", lambda: driver)
        patch.setattr(cuda_driver, "tensor_map", lambda *what: MAP)
        launch = abi.launch(Kernel(Image(b"", "name", 32, 1, 0)), 1, matrices, describe, **values)
        for addresses in pointers:
            launch(0, abi.pointers(**addresses), described)
    return driver.launches


@given(INT32, st.lists(st.tuples(INT64, INT64), min_size=1, max_size=3), INT64, INT32)
def test_every_argument_is_found_by_its_name(rows, addresses, stride, flag):
    values = {"factor": math.inf, "flag": flag, "stride": stride, "rows": rows}
    pointers = [{"out": out, "source": source} for source, out in addresses]
    result = launched(KernelAbi(Args), pointers, values)
    assert result == [
        {
            **{name: (value,) for name, value in values.items()},
            **{name: (value,) for name, value in pointer.items()},
        }
        for pointer in pointers
    ]


def test_tma_copies_come_first():
    """Descriptors, then the tensors' sizes, which are those of the matrices."""
    abi = KernelAbi(Copies, Args)
    matrices = (Matrix(300, 512, 512, 64), Matrix(1024, 256, 256, 128))
    values = {"rows": 7, "stride": 1, "flag": 0, "factor": 2.0}
    [result] = launched(abi, [{"source": 16, "out": 32}], values, matrices, (16, 48))
    assert (result["of_x"], result["of_codes"]) == ((MAP,), (MAP,))
    assert (result["x"], result["codes"], result["layout"]) == ((300, 512), (1024, 256), (b"\0",))
    assert (result["rows"], result["source"], result["out"]) == ((7,), (16,), (32,))


def test_a_kernel_describes_its_own_operands():
    """Copies of other operands than ``Matrix``: no sizes among the parameters, other maps."""

    def describe(address, operand):
        return f"{operand} at {address}".encode().ljust(128)

    values = {"rows": 7, "stride": 1, "flag": 0, "factor": 2.0}
    abi, where = KernelAbi(Descriptors, Args), [{"source": 16, "out": 32}]
    [arguments] = launched(abi, where, values, ("codes", "scales"), (64, 80), describe)
    assert arguments["of_codes"][0].rstrip() == b"codes at 64"
    assert arguments["of_scales"][0].rstrip() == b"scales at 80"
    assert (arguments["rows"], arguments["source"], arguments["out"]) == ((7,), (16,), (32,))


def test_a_wrong_name_is_said():
    abi = KernelAbi(Args)
    with pytest.raises(TypeError, match=r"Args: missing .*'flag'.*unknown .*'flags'"):
        abi.launch(None, 1, rows=1, stride=1, flags=1, factor=1.0)
    with pytest.raises(TypeError, match="source"):
        abi.pointers(out=1)


class SeparatedPointers(NamedTuple):
    source: Pointer
    rows: Int32
    out: Pointer


class Untyped(NamedTuple):
    source: Pointer
    rows: int


def test_a_declaration_that_cannot_be_packed_is_refused():
    with pytest.raises(ValueError, match="all pointers next to each other"):
        KernelAbi(SeparatedPointers)
    with pytest.raises(TypeError, match="argument rows of Untyped"):
        KernelAbi(Untyped)
    with pytest.raises(TypeError, match="declared twice"):
        KernelAbi(Args, Args)


def test_placeholders_have_the_types_of_the_declaration():
    cutlass = pytest.importorskip("cutlass")
    made = KernelAbi(Copies, Args).placeholders()
    assert type(made) is Args
    assert [type(value) for value in made] == [
        cutlass.Int32, cutlass.Int64, cutlass.Int64, cutlass.Int64, cutlass.Int32, cutlass.Float32,
    ]  # fmt: skip
