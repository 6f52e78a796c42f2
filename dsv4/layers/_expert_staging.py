"""A buffer on the GPU through which the experts of long prompts pass, shared by all layers.

It has two halves. While the GEMMs of one half run, the copy engine fills the other one on a stream
of its own, and goes on with the first experts of the next layer while that layer's attention runs.
A copy waits until the last GEMM that read its half has ended, and GEMMs wait for the copy of their
half. Which experts are copied depends on the slots alone, not on the tokens, so no copy waits for
a router.

For 16384 tokens of Flash a layer takes the longer one of two times. Its compute takes 22 ms (an
all-resident model took 1928 ms for 32768 tokens in 43 layers on an H100). Its bytes, at the 50.8
GB/s that an H200 measured, take 36 experts x 14.16 MB = 10 ms with 156 static experts and 64 slots,
and 144 experts 40 ms with the 80 and 32 that fit an H100. On an H200 compute decides: computed 0.95
s, measured 0.91 s; with waves in slots 1.0 s (computed). On an H100, where nothing of this has run,
copies decide: computed 43 x 40 ms = 1.7 s. If they waited during attention (13 ms a layer), as
waves in slots do, it would be 2.3 s.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dsv4.layers._expert_rows import ExpertRows

# Below 16 choices per expert (683 tokens of Flash) steps are in waves, because they would copy
# experts that no token chooses. At 16 choices these are 1.3 % of all with Zipf 1 popularity.
CHOICES_PER_EXPERT = 16
# Tokens of a step of a prompt by default. Each step copies all experts without a slot, however many
# tokens it has. A layer's copies take 10 ms on an H200 and 40 ms on an H100, and it computes 16384
# tokens of Flash in 22 ms (computed): shorter steps wait for copies. A prompt of 16384 tokens took
# 912 ms on an H200 in one step, and 1958 ms in four. Twice as many tokens need twice the memory.
STAGED_STEP_TOKENS = 16384


@dataclass(frozen=True)
class Load:
    """Experts of a layer that are copied to a half together, in the order of its slots.

    Attributes:
        layer: The layer, with the layout of its rows and the rows in host memory; not kept alive.
        experts: The experts.
        rows: Their rows in host memory.
    """

    layer: weakref.ref[Any]
    experts: tuple[int, ...]
    rows: tuple[int, ...]


@dataclass(eq=False)
class _Half:
    """A half of the buffer.

    Attributes:
        memory: uint8, its memory.
        copied: Event behind the last copy to it; None: no stream is used.
        read: Event behind the last GEMM that read it; None: it was not read yet.
        views: Its tensors by layout.
    """

    memory: torch.Tensor
    copied: Any = None
    read: Any = None
    views: dict[ExpertRows, dict[str, torch.Tensor]] = field(default_factory=dict)

    def tensors(self, layout: ExpertRows, experts: int) -> dict[str, torch.Tensor]:
        """Return the tensors ``[experts, ...]`` of the slots of this half, by name."""
        own = layout.with_slots(experts)
        if own not in self.views:
            self.views[own] = own.in_slots(self.memory)
        return self.views[own]


class ExpertStaging:
    """Two halves of memory, what was copied to them, and the stream that copies.

    Attributes:
        experts: Experts that a half holds.
        choices_per_expert: Least choices of a step per expert of the layer for which all experts
            pass through the buffer; steps with fewer choices are in waves.
        step_tokens: Most tokens of a step by default (``dsv4.layers.step_tokens``).
        nbytes: Bytes of both halves.
    """

    def __init__(self, experts: int, device: torch.device) -> None:
        """Make an empty buffer; ``add`` gives it memory.

        Args:
            experts: Experts that a half holds, at least 1.
            device: Device of the layers.
        """
        self.experts = experts
        self.device = device
        self.choices_per_expert: float = CHOICES_PER_EXPERT
        self.step_tokens = STAGED_STEP_TOKENS
        self.nbytes = 0
        self._halves: list[_Half] = []
        self._side: torch.cuda.Stream | None = None
        self._waiting: deque[Load] = deque()
        self._staged: deque[tuple[_Half, Load]] = deque()
        self._taken: _Half | None = None

    def add(self, layout: ExpertRows) -> None:
        """Make the halves as large as a layer needs; layers of equal formats allocate once.

        Args:
            layout: Layout of the layer's rows.
        """
        half = layout.with_slots(self.experts).slot_bytes
        if 2 * half <= self.nbytes:
            return
        self.nbytes = 2 * half
        with torch.inference_mode(False):
            memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
            self._halves = [_Half(part) for part in memory.split(half)]

    def takes(self, choices: int, experts: int) -> bool:
        """Return whether all experts of a step pass through the buffer.

        Args:
            choices: Tokens times experts per token, without padding.
            experts: Experts of the layer.
        """
        return choices >= self.choices_per_expert * experts

    def begin(self, loads: Sequence[Load], following: Sequence[Load]) -> None:
        """Start the first copies of a layer, as far as they were not started before.

        Args:
            loads: Experts of the layer, in the order in which they are taken.
            following: Those of the next layer, which are copied when those of this one are.
        """
        self._release()
        upcoming = [*loads, *following]
        staged = [load for _, load in self._staged]
        if staged != upcoming[: len(staged)]:  # of a step that did not go on
            self._staged.clear()
        self._waiting = deque(upcoming[len(self._staged) :])
        self._fill()

    def take(self, load: Load) -> dict[str, torch.Tensor]:
        """Make the current stream wait for a load; return its tensors, by name.

        What reads them is to be launched before ``leave``.
        """
        half, copied = self._staged.popleft()
        assert copied == load, "loads are taken in their order"
        self._taken = half
        if half.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(half.copied)
        layer = load.layer()
        assert layer is not None
        return half.tensors(layer.layout, self.experts)

    def leave(self) -> None:
        """Say that all that reads the taken half is launched, and start the next copy to it."""
        self._release()
        self._fill()

    def end(self) -> None:
        """End a layer's step, also after an error: what read a half may still run."""
        self._release()
        self._waiting.clear()

    def _release(self) -> None:
        if self._taken is None:
            return
        if self._side is not None:
            self._taken.read = torch.cuda.current_stream(self.device).record_event()
        self._taken = None

    def _fill(self) -> None:
        """Start copies to the halves that hold no experts which are still to be read."""
        while self._waiting:
            used = [half for half, _ in self._staged]
            free = next((half for half in self._halves if half not in used), None)
            if free is None:
                return
            load = self._waiting.popleft()
            self._start(free, load)
            self._staged.append((free, load))

    def _start(self, half: _Half, load: Load) -> None:
        """Copy a load to a half when its last reader has ended."""
        if self.device.type != "cuda":
            self._copy(half, load)
            return
        current = torch.cuda.current_stream(self.device)
        if self._side is None:
            self._side = torch.cuda.Stream(self.device)
        if half.read is None:  # its memory may have been another tensor's
            self._side.wait_stream(current)
            half.memory.record_stream(self._side)
        else:
            self._side.wait_event(half.read)
        with torch.cuda.stream(self._side):
            self._copy(half, load)
            half.copied = self._side.record_event()

    def _copy(self, half: _Half, load: Load) -> None:
        """Copy the rows of a load to the slots of a half, a copy for each tensor of each expert.

        On an H200 such copies of 32 experts of Flash ran at 50.3 GB/s.
        """
        layer = load.layer()
        assert layer is not None
        for part in layer.layout.with_slots(self.experts).parts:
            stop = part.region + self.experts * part.nbytes
            targets = half.memory[part.region : stop].view(self.experts, part.nbytes).unbind()
            sources = layer.rows[:, part.start : part.start + part.nbytes]
            for target, row in zip(targets, load.rows, strict=False):
                target.copy_(sources[row], non_blocking=True)
