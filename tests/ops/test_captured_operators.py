"""Every operator in a captured CUDA graph: with other inputs it replays what an eager call gives.

The operators, what the model uses each for and their inputs are those of the bench. Nothing of a
replay may come from when the graph was captured: neither an input nor what is left in a result.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch

from dsv4 import dispatch
from dsv4.bench.cases import MAKERS
from dsv4.bench.problem import Case, Draw, Outputs, Problem
from dsv4.config import ModelConfig
from dsv4.testing.assertions import assert_bitwise

CPU = torch.device("cpu")
# So wide that products have kernels too; of ModelConfig.tiny() most have the reference alone.
WIDE = ModelConfig.tiny(
    hidden_size=256, moe_intermediate_size=128, q_lora_rank=128, o_lora_rank=128
)
# What results hold before each replay: NaN in every float format and -1, a number, zero.
POISON = (0xFF, 0xA5, 0x00)

Record = Callable[[Problem], tuple[Outputs, Callable[[], None]]]


def captured(problem: Problem) -> tuple[Outputs, Callable[[], None]]:
    """The results of a call in a CUDA graph, and what replays it."""
    problem.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = problem.run()
    return outputs, graph.replay


def called_again(problem: Problem) -> tuple[Outputs, Callable[[], None]]:
    """The same without a graph: a call whose results go to where those of the first one are."""
    outputs = problem.run()

    def replay() -> None:
        copy_each(outputs, problem.run())

    return outputs, replay


def frozen(problem: Problem) -> tuple[Outputs, Callable[[], None]]:
    """A graph of inputs that nothing can change any more: it gives the same results for ever."""
    outputs = problem.run()
    first = copy.deepcopy(outputs)
    return outputs, lambda: copy_each(outputs, first)


def without_last(problem: Problem) -> tuple[Outputs, Callable[[], None]]:
    """A graph that leaves its last result as it was."""
    outputs, replay = called_again(problem)

    def replay_others() -> None:
        before = outputs[-1].clone()
        replay()
        outputs[-1].copy_(before)

    return outputs, replay_others


def assert_follows(case: Case, device: torch.device, record: Record) -> None:
    """Replays with the inputs of other seeds give the bits of eager calls, each time."""
    held = own_copy(case.build(Draw(0, device)))  # the bench keeps weights by seed
    outputs, replay = record(held)
    for seed, byte in enumerate(POISON, start=1):
        problem = case.build(Draw(seed, device))
        expected = problem.fresh().run()
        for _ in range(2):
            for output in outputs:
                in_bytes(output).fill_(byte)
            # After the poison, because what is changed in place is an input and a result.
            copy_each(held.tensors, problem.tensors)
            replay()
            assert_same(outputs, expected, f"{case.op} {case.name}: replay")
        assert_same(problem.fresh().run(), expected, f"{case.op} {case.name}: second call")


def own_copy(problem: Problem) -> Problem:
    """A copy with tensors of its own; those in pinned memory stay in such memory."""
    copied = copy.deepcopy(problem)
    args = [
        mine.pin_memory() if isinstance(mine, torch.Tensor) and theirs.is_pinned() else mine
        for mine, theirs in zip(copied.args, problem.args, strict=True)
    ]
    return dataclasses.replace(copied, args=tuple(args))


def assert_same(actual: Outputs, expected: Outputs, what: str) -> None:
    for i, (tensor, other) in enumerate(zip(actual, expected, strict=True)):
        assert (tensor.shape, tensor.dtype) == (other.shape, other.dtype)
        assert_bitwise(in_bytes(tensor), in_bytes(other), f"{what}, result {i}")


def copy_each(to: Outputs, new: Outputs) -> None:
    for mine, other in zip(to, new, strict=True):
        mine.copy_(other)


def in_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def has_kernel(problem: Problem) -> bool:
    return dispatch.explain(problem.function, *problem.args, **problem.kwargs).chosen != "reference"


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 130, 1100])
@pytest.mark.parametrize("op", MAKERS)
def test_a_captured_graph_follows_its_inputs(op: str, tokens: int) -> None:
    device = torch.device("cuda")
    cases = [c for c in MAKERS[op](WIDE, tokens) if has_kernel(c.build(Draw(0, device)))]
    if not cases:
        pytest.skip("this GPU has the reference alone, which may wait for it")
    for case in cases:
        assert_follows(case, device, captured)


@pytest.mark.parametrize("op", MAKERS)
def test_calls_follow_their_inputs(op: str) -> None:
    """By the reference, without a graph: inputs are copied and results compared as above."""
    for case in MAKERS[op](WIDE, 5):
        assert_follows(case, CPU, called_again)


@pytest.mark.parametrize("wrong", [frozen, without_last])
@pytest.mark.parametrize("op", MAKERS)
def test_a_graph_that_does_not_follow_is_seen(op: str, wrong: Record) -> None:
    for case in MAKERS[op](WIDE, 5):
        with pytest.raises(AssertionError, match=r"replay, result \d differs"):
            assert_follows(case, CPU, wrong)
