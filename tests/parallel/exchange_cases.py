"""Tokens that ranks exchange, with what each of them receives and gets back by the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4.ops.moe_exchange import MoeReturnArgs, MoeSendArgs
from dsv4.reference import moe_exchange as reference


@dataclass(frozen=True)
class Exchange:
    """What all ranks send, and what their experts make of it."""

    sent: list[MoeSendArgs]
    y: list[torch.Tensor]
    shared: list[torch.Tensor | None]

    @property
    def ranks(self) -> int:
        return len(self.sent)

    def rank(self, number: int, values) -> reference.Rank:
        """A rank that finds the others' values in a list, as bytes or as they are."""
        return reference.Rank(number, self.ranks, lambda own: values)

    def received(self, number: int):
        return reference.send(
            self.sent[number], self.rank(number, [reference.packed(args) for args in self.sent])
        )

    def returning(self, number: int) -> MoeReturnArgs:
        args = self.sent[number]
        return MoeReturnArgs(
            self.y[number],
            self.received(number)[1],
            args.ids,
            self.shared[number],
            args.num_experts,
            "",
        )

    def result(self, number: int) -> torch.Tensor:
        return reference.collect(self.returning(number), self.rank(number, self.y))


def exchange(
    ranks, tokens, hidden, top_k=3, experts=2, seed=0, device="cpu", weights=torch.float32
):
    """Random tokens, of which some choose no expert, or all of one rank."""
    generator = torch.Generator().manual_seed(seed)
    total = ranks * experts
    sent, y, shared = [], [], []
    for rank in range(ranks):
        x = torch.randn(tokens, hidden, generator=generator).bfloat16()
        ids = torch.randint(-1, total + 1, (tokens, top_k), generator=generator)
        if seed % 3 == 1 and rank == 0:
            ids.fill_(-1)  # a rank without tokens
        if seed % 3 == 2:
            ids.clamp_(max=experts - 1)  # ranks whose experts get no token
        w = torch.rand(tokens, top_k, generator=generator).to(weights)
        sent.append(MoeSendArgs(x.to(device), ids.to(device), w.to(device), total, ""))
        part = torch.randn(ranks * tokens, hidden, generator=generator) * 2.0 ** (8 * (rank % 3))
        y.append(part.bfloat16().to(device))
        own = torch.randn(tokens, hidden, generator=generator).bfloat16().to(device)
        shared.append(own if seed % 2 else None)
    return Exchange(sent, y, shared)
