"""Checks that operators share: memory that is written, and integers that name something."""

from __future__ import annotations

import re
from contextlib import suppress

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from dsv4.ops import _check
from dsv4.testing import strategies

SHAPES = st.lists(st.integers(0, 4), min_size=0, max_size=4)


def meets_itself(tensor: torch.Tensor) -> bool:
    """Return whether elements share memory, by the addresses of all."""
    positions = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        positions = positions.unsqueeze(-1) + stride * torch.arange(size)
    return positions.unique().numel() < tensor.numel()


@given(shape=SHAPES, data=st.data())
def test_no_tensor_that_overlaps_itself_passes(shape, data):
    """A view without overlap may raise as well if its dimensions interleave."""
    strides = data.draw(st.lists(st.integers(0, 12), min_size=len(shape), max_size=len(shape)))
    tensor = torch.zeros(1000).as_strided(shape, strides)
    words = re.escape(f"op: x has shape {shape} and strides {strides}, wanted")
    refused = (
        pytest.raises(ValueError, match=words) if meets_itself(tensor) else suppress(ValueError)
    )
    with refused:
        _check.no_overlap("op", "x", tensor)


@given(shape=SHAPES, data=st.data())
def test_views_of_a_contiguous_tensor_pass(shape, data):
    """Axes in any order, every second index, parts, single elements and axes of size 1."""
    tensor = torch.zeros(shape).permute(data.draw(st.permutations(range(len(shape)))))
    for axis, size in enumerate(tensor.shape):
        step, start = data.draw(st.integers(1, 3)), data.draw(st.integers(0, size))
        tensor = tensor[(slice(None),) * axis + (slice(start, None, step),)]
    _check.no_overlap("op", "x", tensor)
    _check.no_overlap("op", "x", tensor.unsqueeze(data.draw(st.integers(0, tensor.ndim))))


@given(data=st.data(), shape=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_drawn_overlaps_are_overlaps(data, shape):
    assume(max(shape) > 1)
    assert meets_itself(data.draw(strategies.overlapping(torch.empty(shape))))


LARGE = 2**31


@given(
    values=st.lists(st.integers(-LARGE, LARGE - 1), max_size=6),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    bound=st.sampled_from([0, 1, 7, LARGE - 1, LARGE, 2**40]),
    check=st.sampled_from([_check.below, _check.within]),
)
@example(values=[-1], dtype=torch.int32, bound=LARGE, check=_check.within)
def test_the_first_integer_outside_is_named(values, dtype, bound, check):
    least = 0 if check is _check.within else -LARGE
    bad = [i for i, value in enumerate(values) if not least <= value < bound]
    tensor = torch.tensor(values, dtype=dtype)
    if not bad:
        check("op", "x", tensor, bound)
        return
    result = rf"^op: x\[{bad[0]}\] is {values[bad[0]]}, wanted .*below {bound}$"
    with pytest.raises(IndexError, match=result):
        check("op", "x", tensor, bound)


def test_all_indices_of_a_value_are_named():
    with pytest.raises(IndexError, match=r"x\[1, 0\] is 4, wanted from 0 on, below 4"):
        _check.within("op", "x", torch.tensor([[3, 0], [4, 9]]), 4)
