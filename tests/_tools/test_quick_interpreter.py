"""What replaces functions of Triton's interpreter gives what they give."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime import interpreter

from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.strategies import generator, seeds
from tests._tools.quick_interpreter import Replacement, replacements

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or "DSV4_TESTS_COMPILED" in os.environ,
    reason="kernels are compiled in this process, not interpreted",
)

ROWS, COLUMNS = 4, 8
SCALARS = [
    *(tl.int1, tl.int8, tl.int16, tl.int32, tl.int64, tl.uint8, tl.uint16, tl.uint32, tl.uint64),
    *(tl.float16, tl.bfloat16, tl.float32, tl.float64, tl.float8e4nv, tl.float8e5),
]
SIZES = st.lists(st.sampled_from([1, 2, 4, 8, 64]), min_size=1, max_size=3)


@triton.jit
def _twice(x):
    return x + x


@triton.jit
def _every_kind(ints, floats, ints_out, floats_out, R: tl.constexpr, C: tl.constexpr):
    """Integers that wrap, casts, broadcasts of all kinds, a device function, a loop, sums."""
    row, column = tl.arange(0, R), tl.arange(0, C)
    at = row[:, None] * C + column[None, :]
    a = tl.load(ints + at)
    b = tl.load(ints + R * C + at, mask=column[None, :] > 0, other=7)
    first = tl.load(ints)
    total = a * b - (a + first) + 3
    for i in tl.range(0, 3):
        total += _twice(a) * i
    small = (total.to(tl.int8) + a.to(tl.int8)).to(tl.int32)
    unsigned = total.to(tl.uint32, bitcast=True) // (column[None, :] + 1).to(tl.uint32)
    tl.store(ints_out + at, total)
    tl.store(ints_out + R * C + at, small)
    tl.store(ints_out + 2 * R * C + at, unsigned.to(tl.int32, bitcast=True))
    x = tl.load(floats + at)
    wide = x.to(tl.bfloat16).to(tl.float32) * 2.5 + tl.sum(x, 1)[:, None] - tl.max(x, 0)
    narrow = tl.where(x > 0, wide, row[:, None].to(tl.float32)).to(tl.float16)
    tl.store(floats_out + at, wide)
    tl.store(floats_out + R * C + at, tl.exp2(narrow.to(tl.float32)) / (1 + first))


@contextmanager
def with_functions(choose: Callable[[Replacement], object]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for replacement in replacements():
            patch.setattr(replacement.owner, replacement.name, choose(replacement))
        yield


def with_originals():
    return with_functions(lambda replacement: replacement.original)


def with_replacements():
    return with_functions(lambda replacement: replacement.value)


def results(ints, floats):
    ints_out = torch.zeros(3, ROWS, COLUMNS, dtype=torch.int32)
    floats_out = torch.zeros(2, ROWS, COLUMNS)
    _every_kind[(1,)](ints, floats, ints_out, floats_out, ROWS, COLUMNS)
    return ints_out, floats_out


def of_type(kind):
    """Return what is known of a type and of a tensor of it, but its array."""
    tensor = tl.tensor(None, kind)
    sizes = list(kind.shape.values) if kind.is_block() else []
    return (
        vars(tensor).keys(),
        [size.value for size in tensor.shape.values],
        tensor.numel.value,
        tensor.dtype,
        (kind.name, kind.scalar, sizes, kind.mangle()),
        interpreter._get_np_dtype(kind),
    )


def test_every_function_is_known():
    """Of this version of Triton; those of others are left as they are."""
    assert len(replacements()) == 7


@given(seeds(), st.sampled_from([8, 31, 32]))
@example(0, 32)
def test_results_are_the_interpreters(seed, bits):
    """Bit for bit, and no assertion on integers that overflow."""
    most = 2 ** (bits - 1)
    ints = torch.randint(-most, most, (2, ROWS, COLUMNS), generator=generator(seed))
    ints = ints.to(torch.int32)
    floats = 8 * torch.randn(ROWS, COLUMNS, generator=generator(seed + 1))
    with with_originals():
        expected = results(ints, floats)
    with with_replacements():
        actual = results(ints, floats)
    for first, other in zip(actual, expected, strict=True):
        assert_bitwise(first, other)
    a, b = ints.long()
    b[:, 0] = 7
    total = a * b - (a + ints[0, 0, 0]) + 3 + 6 * a
    assert_bitwise(actual[0][0].long(), (total + 2**31) % 2**32 - 2**31)


@given(st.sampled_from(SCALARS), SIZES, st.booleans(), st.booleans())
def test_types_and_tensors_are_the_interpreters(scalar, sizes, pointers, constants):
    scalar = tl.pointer_type(scalar) if pointers else scalar
    shape = [tl.constexpr(size) if constants else size for size in sizes]
    with with_originals():
        expected = of_type(scalar), of_type(tl.block_type(scalar, shape))
    with with_replacements():
        for _ in range(2):
            assert (of_type(scalar), of_type(tl.block_type(scalar, shape))) == expected
    assert expected[1][2] == math.prod(sizes)


@pytest.mark.parametrize("shape", [[], [3], [2.0], [2**11, 2**11]])
def test_shapes_that_it_refuses_are_refused(shape):
    """Also after the same shape with elements of another type was made."""
    errors = []
    for functions in (with_originals, with_replacements):
        with functions():
            tl.block_type(tl.int32, [2])
            for _ in range(2):
                with pytest.raises((TypeError, ValueError)) as caught:
                    tl.block_type(tl.int32, shape)
                errors.append((caught.type, str(caught.value)))
    assert len(set(errors)) == 1


def test_overflow_is_seen_while_debugging(monkeypatch):
    """The assertion that an integer does not overflow is left out only if it would do nothing."""
    ints = torch.full((2, ROWS, COLUMNS), 2**31 - 1, dtype=torch.int32)
    with with_replacements():
        results(ints, torch.ones(ROWS, COLUMNS))
        options = interpreter.InterpreterOptions(debug=True)
        monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
        with pytest.raises(interpreter.InterpreterError, match="overflow detected"):
            results(ints, torch.ones(ROWS, COLUMNS))


def test_functions_of_other_versions_are_left():
    class Owner:
        def known(self, value): ...

    def make(original):
        return lambda self, value: original

    assert [*Replacement.of(Owner, "known", "self value", make)]
    assert not [*Replacement.of(Owner, "known", "self value other", make)]
    assert not [*Replacement.of(Owner, "other", "self value", make)]
