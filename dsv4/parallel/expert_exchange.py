"""The routed experts of a layer whose tokens and experts are on several ranks (``parallel="dp"``).

Each rank routes its own tokens, sends them to the ranks of their experts, runs its own experts on
all that it received, and adds up what comes back. All ranks do so at the same time with equally
many tokens, of which some may be padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dsv4.ops.moe_exchange import (
    MoeReturnArgs,
    MoeSendArgs,
    Received,
    experts_of_rank,
    moe_return,
    moe_send,
)
from dsv4.overlap import IN_ORDER, Streams
from dsv4.parallel import groups
from dsv4.parallel.context import ParallelContext
from dsv4.reference.moe_exchange import Rank, collect, send

# Rows that a rank's experts are given at once, from all ranks: longer prompts go in pieces, which
# bounds the memory of the sorted rows (403 MB for Flash).
ROWS = 8192
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def piece_of(ranks: int) -> int:
    """Return the tokens of each rank that are sent at once."""
    return max(1, ROWS // ranks)


def rows_of(tokens: int, ranks: int) -> int:
    """Return the most rows that the experts of a rank get at once in a step of ``tokens`` each."""
    return ranks * min(tokens, piece_of(ranks))


@dataclass(frozen=True, eq=False)
class ExpertExchange:
    """Runs the experts of all ranks on the tokens of all ranks.

    Attributes:
        context: This rank.
        num_experts: Experts of all ranks.
    """

    context: ParallelContext
    num_experts: int

    def __post_init__(self) -> None:
        experts_of_rank(self.num_experts, self.context.size, "ExpertExchange")

    @property
    def piece(self) -> int:
        """Tokens of a rank that are sent at once."""
        return piece_of(self.context.size)

    def rows_of(self, tokens: int) -> int:
        """Return the most rows that the experts of a rank get at once in a step."""
        return rows_of(tokens, self.context.size)

    def run(
        self,
        experts: Experts,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None = None,
        streams: Streams = IN_ORDER,
    ) -> torch.Tensor:
        """Return the sum of the chosen experts' outputs of this rank's tokens.

        Args:
            experts: Adds up this rank's experts of given rows, ids and weights.
            x: ``[T, H]``, this rank's tokens.
            ids: ``[T, k]``, experts of all ranks.
            weights: ``[T, k]``.
            shared: ``[T, H]``, the shared expert's output, added last; or None.
            streams: Side streams on which the work ``"shared"`` makes it; it is joined when the
                first results are on their way.

        Raises:
            ValueError: if the ranks have not equally many tokens (on the CPU; undefined on a GPU).
        """
        tokens = x.shape[0]
        if not self._is_by_operators(x):
            self._check_tokens(tokens)
        results = []
        for start in range(0, max(tokens, 1), self.piece):
            part = slice(start, start + self.piece)
            rows, received, row_weights = self._send(x[part], ids[part], weights[part])
            y = experts(rows, received, row_weights)
            if shared is not None and start == 0:
                streams.join("shared", shared)
            own = None if shared is None else shared[part]
            results.append(self._return(y, received, ids[part], own))
        return results[0] if len(results) == 1 else torch.cat(results)

    def _is_by_operators(self, x: torch.Tensor) -> bool:
        """Return whether the operators exchange; else the group's own exchange of tensors does.

        That one ends when another rank fails, which GPUs leave to the step's end.
        """
        group = self.context.group.name
        return bool(group) and (x.device.type != "cpu" or groups.emulated_ranks(group) is not None)

    def _check_tokens(self, tokens: int) -> None:
        own = torch.tensor([tokens], dtype=torch.int64, device="cpu")
        counts = [int(count) for count in self.context.group.all_gather(own)]
        for rank, count in enumerate(counts):
            if count != counts[0]:
                raise ValueError(
                    f"parallel='dp': a step has {counts[0]} tokens on rank 0 and {count} on rank "
                    f"{rank}, wanted as many on all ranks: dsv4.serving.Runner pads them"
                )

    def _send(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Received:
        group = self.context.group.name
        if self._is_by_operators(x):
            return moe_send(x, ids, weights, self.num_experts, group)
        return send(MoeSendArgs(x, ids, weights, self.num_experts, group), self._rank)

    def _return(
        self,
        y: torch.Tensor,
        received: torch.Tensor,
        ids: torch.Tensor,
        shared: torch.Tensor | None,
    ) -> torch.Tensor:
        group = self.context.group.name
        if self._is_by_operators(y):
            return moe_return(y, received, ids, self.num_experts, group, shared=shared)
        args = MoeReturnArgs(y, received, ids, shared, self.num_experts, group)
        return collect(args, self._rank)

    @property
    def _rank(self) -> Rank:
        """This rank over the group's exchange, which ends when another rank fails."""
        context = self.context
        return Rank(context.rank, context.size, context.group.all_gather)
