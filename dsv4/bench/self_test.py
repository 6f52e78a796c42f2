"""Cases of the self-test: small calls of every operator, with the head sizes of published models.

The self-test runs each case twice, because a race may spare the first run, and compares the results
with the float64 reference as the bench does.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import torch

from dsv4 import dispatch, self_test
from dsv4.bench.cases import MAKERS, operators
from dsv4.bench.cases.other_formats import other_formats
from dsv4.bench.measure import verify
from dsv4.bench.problem import Case, Draw, Problem
from dsv4.config import ModelConfig
from dsv4.self_check import is_of_a_capture, is_of_memory
from dsv4.self_test import Unfinished

# One token, numbers that fill no tile, and enough tokens for large tiles and tensor descriptors.
TOKENS = (1, 19, 1100)
_RUNS = 2


@functools.cache
def config() -> ModelConfig:
    """Return a small model whose heads have the published dims."""
    heads = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    return ModelConfig.tiny(
        hidden_size=512, moe_intermediate_size=128, q_lora_rank=128, o_lora_rank=128, **heads
    )


def wrong(op: str, name: str, device: torch.device, tokens: tuple[int, ...] = TOKENS) -> str | None:
    """Test an implementation of an operator on a device; return the error that it found, or None.

    Args:
        op: The operator.
        name: Name of the implementation.
        device: Device of the test.
        tokens: Numbers of tokens to test.

    Raises:
        Unfinished: if memory is missing, a CUDA graph is captured elsewhere, or no case is
            supported on the device.
    """
    count = 0
    with torch.no_grad(), dispatch.use_backend("reference"):
        for case, problem in problems(op, name, device, tokens):
            reason = _wrong(problem, name, device)
            if reason is not None:
                return f"{case.name or case.op} with {case.tokens} tokens: {reason}"
            count += 1
    if not count:
        raise Unfinished("the self-test has no case that the kernel supports here")
    return None


def problems(
    op: str, name: str, device: torch.device, tokens: tuple[int, ...] = TOKENS
) -> Iterator[tuple[Case, Problem]]:
    """Cases that an implementation supports on a device.

    Raises:
        Unfinished: if memory is missing, or a CUDA graph is captured elsewhere.
    """
    [row] = [row for row in dispatch.implementations(op) if row.name == name]
    makers = [maker for function, maker in MAKERS.items() if op in operators(function)]
    for count in tokens:
        usual = (case for maker in makers for case in maker(config(), count))
        for case in chain(usual, other_formats(op, config(), count)):
            with _no_verdict():
                problem = case.build(Draw(0, device))
            call = dispatch.arguments(problem.function, *problem.args, **problem.kwargs)
            if call.op == op and row.unsupported_reason(call) is None:
                yield case, problem


def _wrong(problem: Problem, name: str, device: torch.device) -> str | None:
    try:
        with _no_verdict():
            for _ in range(_RUNS):
                verdict = verify(problem, name)
                if device.type == "cuda":  # the device's other streams may be captured
                    torch.cuda.current_stream(device).synchronize()
                if not verdict.match:
                    return verdict.message
    except Unfinished:
        raise
    except Exception as error:
        return f"it raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


@contextmanager
def _no_verdict() -> Iterator[None]:
    """Raise ``Unfinished`` for errors that say nothing of the kernel."""
    try:
        yield
    except Exception as error:
        if is_of_memory(error):
            raise Unfinished("too little free memory for the self-test") from error
        if is_of_a_capture(error):
            raise Unfinished(f"a CUDA graph was captured during the self-test: {error}") from error
        raise


@dataclass(frozen=True)
class Tested:
    """A family that was tested.

    Attributes:
        op: The operator.
        name: Name of the implementation.
        wrong: What it does wrong, or None.
        untested: Why it was not tested, or None.
        seconds: How long it took, most of it to compile.
    """

    op: str
    name: str
    wrong: str | None
    untested: str | None
    seconds: float

    def __str__(self) -> str:
        verdict = "WRONG" if self.wrong else "right" if self.untested is None else "-"
        said = self.wrong or self.untested or ""
        return f"{verdict:<6}{self.op:<30}{self.name:<11}{self.seconds:6.1f} s  {said}".rstrip()


def run_all(
    device: torch.device, tokens: tuple[int, ...] = TOKENS, ops: Sequence[str] = ()
) -> Iterator[Tested]:
    """Test all kernels that a device supports; earlier verdicts do not matter.

    Args:
        device: Where they run.
        tokens: Numbers of tokens.
        ops: Operators; none: all.
    """
    for op in ops or dispatch.operators():
        for row in dispatch.implementations(op):
            if row.proven is not None:
                keep = row.self_test is not None
                result = tested(row.op, row.name, device, tokens, keep=keep)
                if result is not None:
                    yield result


def tested(
    op: str, name: str, device: torch.device, tokens: tuple[int, ...], *, keep: bool
) -> Tested | None:
    """Test a family, or return None if the device supports no case of it.

    Earlier verdicts do not matter.

    Args:
        op: The operator.
        name: Name of the implementation.
        device: Where it runs.
        tokens: Numbers of tokens.
        keep: Whether the result becomes the verdict on the family.
    """

    def test(op: str, name: str, device: torch.device) -> str | None:
        return wrong(op, name, device, tokens)

    start, untested, reason = time.perf_counter(), None, None
    try:
        if not any(problems(op, name, device, tokens)):
            return None
        reason = self_test.retested(op, name, device, test, keep=keep)
    except Unfinished as why:
        untested = str(why)
    return Tested(op, name, reason, untested, time.perf_counter() - start)
