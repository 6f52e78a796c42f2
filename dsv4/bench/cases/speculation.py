"""Problem sizes of drafts and their verification; see ``dsv4.bench.cases``.

A token of the batch is a sequence here, with two drafts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsv4 import ops
from dsv4.bench.checks.judge import U, bitwise, combine, compare, same
from dsv4.bench.problem import Case, Draw, Outputs, Problem, Verdict, nbytes
from dsv4.config import ModelConfig

_DRAFTS = 2


def verify_greedy(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Drafts of which half are the target's tokens."""

    def build(draw: Draw) -> Problem:
        logits = draw.normal(tokens, _DRAFTS + 1, c.vocab_size, dtype=torch.float32)
        best = logits[:, :-1].argmax(-1)
        drafts = torch.where(draw.integers(0, 2, best.shape) > 0, best, 0)
        judge = bitwise("accepted", "tokens")
        return Problem(ops.verify_greedy, (logits, drafts), {}, judge, nbytes(logits, drafts))

    yield Case("verify_greedy", "", {"V": c.vocab_size}, tokens, build)


def verify_sampled(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Rejection sampling at temperature 1 with a draft whose logits are near the target's."""

    def build(draw: Draw) -> Problem:
        logits = draw.normal(tokens, _DRAFTS + 1, c.vocab_size, dtype=torch.float32, scale=2)
        near = logits[:, :-1] + draw.normal(tokens, _DRAFTS, c.vocab_size, dtype=torch.float32)
        q = near.softmax(-1)
        drafts = near.argmax(-1)
        args = (logits, drafts, q, *_parameters(c, tokens, draw))
        judge = bitwise("accepted", "tokens")
        return Problem(ops.verify_sampled, args, {"filters": False}, judge, nbytes(*args))

    yield Case("verify_sampled", "", {"V": c.vocab_size}, tokens, build)


def draw_draft(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Drafts at temperature 1."""

    def build(draw: Draw) -> Problem:
        logits = draw.normal(tokens, c.vocab_size, dtype=torch.float32, scale=2)
        args = (logits, *_parameters(c, tokens, draw))
        return Problem(ops.draw_draft, args, {"filters": False}, _drawn, nbytes(*args))

    yield Case("draw_draft", "", {"V": c.vocab_size}, tokens, build)


def _parameters(c: ModelConfig, tokens: int, draw: Draw) -> tuple[torch.Tensor, ...]:
    ones = torch.ones(tokens, dtype=torch.float64, device=draw.device)
    top_k = torch.full((tokens,), c.vocab_size, dtype=torch.int64, device=draw.device)
    seeds = draw.integers(0, 1 << 40, (tokens,))
    positions = draw.integers(0, 1 << 20, (tokens,))
    return ones, ones, torch.log(ones * 0), top_k, seeds, positions


def _drawn(problem: Problem, actual: Outputs, truth: Outputs) -> Verdict:
    """Compare tokens exactly, and probabilities.

    A relative logit x is rounded, which changes ``exp(x)`` by ``|x| u`` at most, below 100 u for
    float32; as much again for ``exp`` by a power of two. Weights are cut off at 2^-40 each.
    """
    cut = problem.args[0].shape[1] * 2.0**-40
    allowed = truth[1] * (256 * U + cut) + 2.0**-120
    return combine(
        same(actual[0], truth[0], "tokens"), compare(actual[1], truth[1], allowed, "probabilities")
    )
