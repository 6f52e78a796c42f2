"""Problem sizes of the exchange of tokens with the ranks of their experts; of one rank: copies."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsv4 import ops
from dsv4.bench.checks import budgets
from dsv4.bench.checks.judge import bitwise, within
from dsv4.bench.problem import Case, Draw, Problem, nbytes
from dsv4.config import ModelConfig


def moe_send(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Tokens with their ids and weights."""
    experts, k = c.n_routed_experts, c.num_experts_per_tok

    def build(draw: Draw) -> Problem:
        x, ids = draw.normal(tokens, c.hidden_size), draw.distinct(tokens, k, experts)
        weights = draw.normal(tokens, k, dtype=torch.float32).softmax(-1)
        judge = bitwise("rows", "ids", "weights")
        args = (x, ids, weights)
        return Problem(ops.moe_send, (*args, experts), {}, judge, nbytes(*args))

    sizes = {"E": experts, "H": c.hidden_size, "k": k}
    yield Case("moe_send", "one rank", sizes, tokens, build)


def moe_return(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """A token's results of all ranks, and the shared expert."""
    experts, k = c.n_routed_experts, c.num_experts_per_tok

    def build(draw: Draw) -> Problem:
        y, ids = draw.normal(tokens, c.hidden_size), draw.distinct(tokens, k, experts)
        shared = draw.normal(tokens, c.hidden_size)
        args = (y, ids.int(), ids)
        return Problem(
            ops.moe_return,
            (*args, experts),
            {"shared": shared},
            within(budgets.returned),
            nbytes(*args, shared),
        )

    sizes = {"E": experts, "H": c.hidden_size, "k": k}
    yield Case("moe_return", "one rank", sizes, tokens, build)
