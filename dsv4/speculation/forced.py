"""Acceptance by a seed in place of the model's, to measure speed with random weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4.serving.philox import token_words
from dsv4.serving.sampler import Parameters, Variant, greedy
from dsv4.speculation.verify import NO_DRAFT, Verified, verify_sampled

_FORCED = 4  # purpose of random words, see ``verify.py``


@dataclass(frozen=True)
class ForcedAcceptance:
    """Counts drafts as right at random, so that a share of all of them is accepted.

    Drafts are made and verified as usual, so a step takes its usual time; then the result is
    replaced. If all drafts before it are right, each draft is right with the same probability. It
    is a function for the argument ``verify`` of ``dsv4.serving.Runner``.

    Attributes:
        share: Accepted drafts of all drafts, 0 to 1: with D drafts a step has ``1 + share * D``
            tokens on average.
        seed: Added to the seeds of the requests.

    Raises:
        ValueError: if ``share`` is not within 0 to 1.
    """

    share: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"ForcedAcceptance: share is {self.share}, wanted 0 to 1")

    def __call__(
        self,
        logits: torch.Tensor,
        drafts: torch.Tensor,
        parameters: Parameters,
        variant: Variant,
        draft_probabilities: torch.Tensor | None,
    ) -> Verified:
        """Verify as ``verify_sampled`` does, and return what the seeds say."""
        verify_sampled(logits, drafts, parameters, variant, draft_probabilities)  # for its time
        count = drafts.shape[1]
        column = torch.arange(count + 1, device=drafts.device)
        positions = parameters.position.unsqueeze(1) + column[:count]
        seeds = (parameters.seed + self.seed).unsqueeze(1).expand_as(positions)
        words = token_words(seeds.flatten(), positions.flatten(), range(1), _FORCED)
        right = words.view_as(drafts) < chance(self.share, count) * 2.0**32
        accepted = (right & (drafts >= 0)).long().cumprod(1).sum(1)
        last = accepted.unsqueeze(1)
        padded = torch.cat((drafts, torch.full_like(drafts[:, :1], NO_DRAFT)), 1)
        after = torch.where(column == last, greedy(logits), NO_DRAFT)
        tokens = torch.where(column < last, padded, after)
        return Verified(accepted, tokens)


def chance(share: float, drafts: int) -> float:
    """Return the probability of a draft after right ones, by which a share of all is accepted."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        mean = sum(middle**i for i in range(1, drafts + 1)) / drafts
        low, high = (middle, high) if mean < share else (low, middle)
    return high
