"""Request and position of each token of vLLM's batch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsv4.boundaries import to_host


@dataclass(frozen=True)
class Token:
    """A row of the batch.

    Attributes:
        row: Its number.
        request: Id of its request; empty: this engine does not say.
        number: Of its request in the batch, from 0; -1: unknown.
        position: In its request; -1: unknown.
    """

    row: int
    request: str = ""
    number: int = -1
    position: int = -1

    def __str__(self) -> str:
        request = f"request {self.request}" if self.request else "a request that is not known"
        if not self.request and self.number >= 0:
            request = f"request number {self.number} of the batch"
        position = f" at position {self.position}" if self.position >= 0 else ""
        return f"row {self.row}, {request}{position}"


@dataclass(frozen=True)
class Batch:
    """The requests of one step.

    Attributes:
        step: Number of the step, from 1.
        requests: Their ids, in the order of the batch; empty: not known.
        tokens: ``requests + 1`` numbers: rows of tokens of a request, from, up to.
        logits: Likewise rows of logits.
        positions: ``[T]`` on the host, on its way there with the marks; None: not known.
    """

    step: int
    requests: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    logits: tuple[int, ...] = ()
    positions: torch.Tensor | None = None

    @classmethod
    def of_input_batch(cls, step: int, batch: Any) -> Batch:
        """Read Model Runner V2's ``InputBatch``; its arrays are used again by the next step."""
        return cls(
            step,
            tuple(batch.req_ids),
            tuple(batch.query_start_loc_np[: batch.num_reqs + 1].tolist()),
            tuple(batch.cu_num_logits_np[: batch.num_reqs + 1].tolist()),
            to_host(batch.positions[: batch.num_tokens]),
        )

    @classmethod
    def of_metadata(cls, step: int, metadata: Any, positions: torch.Tensor) -> Batch:
        """Read the attention metadata of Model Runner V1, which has no ids.

        Args:
            step: Its number.
            metadata: By name of the layer, each with ``query_start_loc``; None: a dummy run.
            positions: ``[T]``.
        """
        starts = () if not isinstance(metadata, dict) else _starts(metadata.values())
        return cls(step, tokens=starts, positions=to_host(positions))

    def token(self, row: int) -> Token:
        """Find the request of a token, and its position."""
        number = _interval(self.tokens, row)
        position = -1
        if self.positions is not None and row < self.positions.shape[0]:
            position = int(self.positions[row])
        return Token(row, self._id(number), number, position)

    def logit(self, row: int) -> Token:
        """Find the request whose next token a row of logits is for, and that row's own position."""
        number = _interval(self.logits, row)
        if number < 0 or number + 1 >= len(self.tokens):
            return Token(row)
        # Rows of logits are those of the last tokens of a request.
        last = self.tokens[number + 1] - (self.logits[number + 1] - row)
        return Token(row, self._id(number), number, self.token(last).position)

    def _id(self, number: int) -> str:
        return self.requests[number] if 0 <= number < len(self.requests) else ""


def _interval(starts: Sequence[int], row: int) -> int:
    """Number of the interval that has ``row``; -1: none has."""
    number = bisect_right(starts, row) - 1
    return number if number + 1 < len(starts) else -1


def _starts(metadata: Any) -> tuple[int, ...]:
    """``query_start_loc`` on the host, of the first layer that has it there."""
    for layer in metadata:
        starts = getattr(layer, "query_start_loc_cpu", None)
        if starts is not None and starts.device.type == "cpu":
            return tuple(starts.tolist())
    return ()
