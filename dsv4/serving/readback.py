"""Copies of tokens from the device to the host, which does not wait for the newest step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dsv4.parallel.agreement import wait_for_device
from dsv4.parallel.context import Group
from dsv4.serving.options import MAX_LOGPROBS
from dsv4.serving.request import Emitted, TokenLogprobs
from dsv4.serving.sampler import Logprobs

NOTHING = -2  # in place of a draft that was rejected
UNVERIFIED = -3  # where there was no draft to verify


@dataclass(eq=False)
class _Slot:
    """Host memory for one step's results; pinned for a GPU, always filled as a whole."""

    tokens: torch.Tensor
    chosen: torch.Tensor
    values: torch.Tensor
    ids: torch.Tensor
    ready: torch.cuda.Event | None


@dataclass(frozen=True)
class Results:
    """One step's results on the host.

    Attributes:
        tokens: One per row.
        logprobs: One per row, None for those that ask for none; or nothing.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]

    def emitted(self, rows: range) -> list[Emitted]:
        """Return the tokens of some rows, without entries that hold no token."""
        reports = self.logprobs or [None] * len(self.tokens)
        return [Emitted(self.tokens[i], reports[i]) for i in rows if self.tokens[i] > NOTHING]


class Readback:
    """A ring of host buffers; a buffer is used by another step only after it was read.

    Args:
        rows: Rows of a buffer.
        depth: Number of buffers.
        device: Where the results are.
        peers: The group of other ranks. Steps wait for them, and they may be gone; None: no other
            ranks.

    Attributes:
        depth: Most steps that may be in flight.
        peers: See the arguments.
    """

    def __init__(
        self, rows: int, depth: int, device: torch.device, peers: Group | None = None
    ) -> None:
        self.depth = depth
        self.peers = peers
        self._pinned = device.type == "cuda"
        self._free = [self._slot(rows) for _ in range(depth)]

    def _slot(self, rows: int) -> _Slot:
        return _Slot(
            tokens=self._host(rows, torch.int64),
            chosen=self._host(rows, torch.float32),
            values=self._host(rows * MAX_LOGPROBS, torch.float32),
            ids=self._host(rows * MAX_LOGPROBS, torch.int64),
            ready=torch.cuda.Event() if self._pinned else None,
        )

    def _host(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device="cpu", pin_memory=self._pinned)

    def start(self, tokens: torch.Tensor, logprobs: Logprobs | None) -> Pending:
        """Copy a step's results to the host in stream order, without waiting."""
        slot, count = self._free.pop(), tokens.shape[0]
        slot.tokens[:count].copy_(tokens, non_blocking=True)
        if logprobs is not None:
            # Both sides are contiguous: a strided copy to the host would wait, or come too late.
            number = logprobs.ids.numel()
            slot.chosen[:count].copy_(logprobs.chosen, non_blocking=True)
            slot.values[:number].copy_(logprobs.values.flatten(), non_blocking=True)
            slot.ids[:number].copy_(logprobs.ids.flatten(), non_blocking=True)
        if slot.ready is not None:
            slot.ready.record()
        width = None if logprobs is None else logprobs.ids.shape[1]
        return Pending(self, slot, count, width)

    def give_back(self, slot: _Slot) -> None:
        """Give a buffer back, for another step to use."""
        self._free.append(slot)


@dataclass(frozen=True, eq=False)
class Pending:
    """Results of one step that may not have arrived yet."""

    owner: Readback
    slot: _Slot
    count: int
    width: int | None  # alternatives per row

    def wait(self, requested: Sequence[int | None]) -> Results:
        """Wait for the step; ``requested`` is the number of alternatives of each row, or None.

        Raises:
            RankError: if the step waits for a rank that is gone.
        """
        if self.slot.ready is not None:
            if self.owner.peers is not None:
                wait_for_device(self.slot.ready.query, self.owner.peers.watch)
            self.slot.ready.synchronize()
        tokens = self.slot.tokens[: self.count].tolist()
        logprobs = [] if self.width is None else self._logprobs(tokens, requested, self.width)
        self.owner.give_back(self.slot)
        return Results(tokens, logprobs)

    def _logprobs(
        self, tokens: Sequence[int], requested: Sequence[int | None], width: int
    ) -> list[TokenLogprobs | None]:
        chosen = self.slot.chosen[: self.count].tolist()
        values = self.slot.values[: self.count * width].view(-1, width).tolist()
        ids = self.slot.ids[: self.count * width].view(-1, width).tolist()
        reports: list[TokenLogprobs | None] = []
        for row, token in enumerate(tokens):
            asked = requested[row]
            if asked is None or token <= NOTHING:
                reports.append(None)
                continue
            count = min(asked, width)
            top = tuple(zip(ids[row][:count], values[row][:count], strict=True))
            reports.append(TokenLogprobs(token, chosen[row], top))
        return reports
