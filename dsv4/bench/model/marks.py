"""When the decode steps of a call began, seen from outside.

``generate`` returns all tokens at once. Its steps are those of a runner, or forwards of the decoder
stack, and both are noticed here without changing what they do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving.graphs import DecodeStep


@dataclass(frozen=True)
class Mark:
    """Something that began.

    Attributes:
        tokens: Sequences of a runner's decode step, or tokens of a forward.
        seconds: Reading of ``time.perf_counter``.
    """

    tokens: int
    seconds: float


@dataclass
class Marks:
    """What began within a call, in order.

    Attributes:
        steps: Decode steps of a runner, captured or not.
        forwards: Of the decoder stack; a captured step has none.
    """

    steps: list[Mark] = field(default_factory=list)
    forwards: list[Mark] = field(default_factory=list)

    def decode_ms(self, sequences: int, skip: int, steps: int) -> float | None:
        """Median milliseconds between decode steps of all sequences; None if there are too few.

        A runner decodes some sequences while it processes the prompts of others, but all of them
        only when no prompt is left.

        Args:
            sequences: That decode together.
            skip: Steps left out at the beginning.
            steps: That are timed.
        """
        times = [mark.seconds for mark in self._decoding(sequences) if mark.tokens == sequences]
        times = times[skip : skip + steps + 1]
        if len(times) < steps + 1:
            return None
        return 1e3 * statistics.median(b - a for a, b in zip(times, times[1:], strict=False))

    def _decoding(self, sequences: int) -> Sequence[Mark]:
        """Marks of decode steps: what follows the last forward of a prompt, without a runner."""
        if self.steps:
            return self.steps
        prompts = [i for i, mark in enumerate(self.forwards) if mark.tokens > sequences]
        return self.forwards[prompts[-1] + 1 :] if prompts else self.forwards


@contextmanager
def marked(model: DeepseekV4ForCausalLM) -> Iterator[Marks]:
    """Within it, every decode step and every forward of the model leaves a mark."""
    marks = Marks()
    run = DecodeStep.run

    def marked_run(self: DecodeStep, rows: Sequence[int], *arguments: Any, **named: Any) -> Any:
        marks.steps.append(Mark(len(rows), time.perf_counter()))
        return run(self, rows, *arguments, **named)

    def forward(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        marks.forwards.append(Mark(inputs[0].numel(), time.perf_counter()))

    handle = model.model.register_forward_pre_hook(forward)
    try:
        with mock.patch.object(DecodeStep, "run", marked_run):
            yield marks
    finally:
        handle.remove()
