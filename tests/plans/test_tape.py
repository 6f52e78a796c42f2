"""Tapes of composite recorders: calls of torch, and memory that allocations share."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4.plans import recorder as _recorder
from dsv4.plans import tape as _tape
from dsv4.testing.assertions import assert_bitwise


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 700)), min_size=1, max_size=9))
def test_memory_of_a_tape_is_that_of_the_call(steps: list[tuple[int, int]]) -> None:
    """Copies from one allocation to another by address: none overlaps another."""
    x = torch.randint(0, 256, (700,), dtype=torch.uint8)

    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = [x]
        for source, size in steps:
            source_tensor = made[source % len(made)]
            out = torch.empty(size, dtype=torch.uint8)
            count = min(size, source_tensor.numel())
            copies(count, source_tensor, out)
            made.append(out)
        # All of them are read in the end, by one that the tape has to give.
        out = torch.empty(sum(map(torch.Tensor.numel, made)), dtype=torch.uint8)
        begin = 0
        for part in made:
            copies(part.numel(), part, out[begin:])
            begin += part.numel()
        return (out,)

    def copies(count: int, source: torch.Tensor, target: torch.Tensor) -> None:
        def run(stream: int, addresses: Any) -> None:
            ctypes.memmove(addresses[1], addresses[0], count)

        recorder = _recorder.current_recorder()
        with recorder.noting(run, (source, target)) if recorder else contextlib.nullcontext():
            run(0, (source.data_ptr(), target.data_ptr()))

    torch.use_deterministic_algorithms(True)  # fills new memory
    try:
        recorder = _recorder.Recorder([x], lambda name, args: None)
        with recorder.watching():
            result = call(x)
        tape = _tape.tape_of(recorder, result)
        other = torch.randint(0, 256, (700,), dtype=torch.uint8)
        [actual] = tape([other], [other.data_ptr()], 0)
        [expected] = call(other)
    finally:
        torch.use_deterministic_algorithms(False)
    begin = 0
    for size in [700, *[size for _, size in steps]]:
        begin += size
    known = written(steps)
    assert torch.equal(actual[known], expected[known])


def written(steps: list[tuple[int, int]]) -> torch.Tensor:
    """Return which bytes of the result of the test above come from its argument."""
    made = [torch.ones(700, dtype=torch.bool)]
    for source, size in steps:
        part = torch.zeros(size, dtype=torch.bool)
        source_tensor = made[source % len(made)][:size]
        part[: len(source_tensor)] = source_tensor
        made.append(part)
    return torch.cat(made)


def test_calls_of_torch_are_made_again() -> None:
    """Products, sums of views and copies of strided tensors, with other tensors."""

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        product = torch.mm(x, weight.t())
        wide = product.double() * 0.5
        both = torch.cat([wide, x.t().reshape(x.shape).double()], dim=1)
        return torch.nn.functional.linear(both[:, 1:9], both[:3, :8])

    tensors = [torch.randn(4, 8), torch.randn(5, 8)]
    with torch.inference_mode():
        recorder = _recorder.Recorder(tensors, lambda name, args: None, composite=True)
        with recorder.watching():
            result = call(*tensors)
        tape = _tape.tape_of(recorder, result)
        for _ in range(2):
            others = [torch.randn(4, 8), torch.randn(5, 8)]
            assert_bitwise(tape.interpreted(others), call(*others))
            addresses = [tensor.data_ptr() for tensor in others]
            assert_bitwise(tape(others, addresses, 0), call(*others))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.add_(1),
        lambda x: torch.rand(3) + x,
        lambda x: x + torch.ones(3),
        lambda x: torch.mm(x.view(1, 3), x.view(3, 1)) if bool(x[0] > -9) else x,
    ],
)
def test_what_cannot_be_repeated_rules_a_tape_out(call: Any) -> None:
    x = torch.randn(3)
    recorder = _recorder.Recorder([x], lambda name, args: None, composite=True)
    with recorder.watching():
        result = call(x)
    assert _tape.tape_of(recorder, result) is None
