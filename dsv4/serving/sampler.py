"""Choose the next token of each row: the reference, in plain PyTorch.

Sums of probabilities are sums of integers, and random numbers are hashes of (seed, position,
token), so a row's token depends on the row alone: not on the batch, its order or its padding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dsv4.serving.options import MAX_LOGPROBS, SamplingOptions
from dsv4.serving.philox import token_words

FAILED = -1  # stands for a token if the logits of the row are not finite
# Probabilities relative to the largest one, as integers: the sum over 2**22 tokens fits 63 bits.
WEIGHT_BITS = 40
_SMALL = 2.0**-8  # below it, -log(1 - v) is computed by its series


@dataclass(frozen=True)
class Variant:
    """The features that a batch of rows needs; the sampler skips the rest.

    Attributes:
        draw: Whether a row has a temperature above 0.
        filters: Whether a row has top-k, top-p or min-p.
        penalty: Whether a row has a repetition penalty.
        logprobs: Whether a row reports log-probabilities.
    """

    draw: bool = False
    filters: bool = False
    penalty: bool = False
    logprobs: bool = False

    @classmethod
    def of(cls, options: SamplingOptions) -> Variant:
        """Return the variant that one request needs."""
        draw = options.temperature > 0
        chosen = options.top_k is not None or options.top_p < 1 or options.min_p > 0
        return cls(
            draw=draw,
            filters=draw and chosen,  # the most probable token is always kept
            penalty=options.repetition_penalty != 1,
            logprobs=options.logprobs is not None,
        )

    def __or__(self, other: Variant) -> Variant:
        return Variant(
            draw=self.draw or other.draw,
            filters=self.filters or other.filters,
            penalty=self.penalty or other.penalty,
            logprobs=self.logprobs or other.logprobs,
        )

    @property
    def plain(self) -> bool:
        """Return whether the token is the argmax of the logits."""
        return not (self.draw or self.penalty)


class Parameters(NamedTuple):
    """Sampling parameters of each of B rows; see ``RowState`` for the neutral values.

    Attributes:
        temperature: ``[B]`` float64, 0 for greedy.
        top_p: ``[B]`` float64.
        log_min_p: ``[B]`` float64.
        penalty: ``[B]`` float64.
        top_k: ``[B]`` int64.
        seed: ``[B]`` int64.
        position: ``[B]`` int64, of the token to be chosen.
        present: ``[B, vocab]`` bool, tokens of the prompt and the answer; None without penalties.
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    log_min_p: torch.Tensor
    penalty: torch.Tensor
    top_k: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    present: torch.Tensor | None


class Logprobs(NamedTuple):
    """Log-probabilities of B rows.

    Attributes:
        chosen: ``[B]``.
        ids: ``[B, n]`` int64, the most probable tokens in descending order.
        values: ``[B, n]``, their log-probabilities.
    """

    chosen: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor


def sample(logits: torch.Tensor, parameters: Parameters, variant: Variant) -> torch.Tensor:
    """Choose the next token of each row; ``SamplingOptions`` explains the parameters.

    A token is drawn as the argmax of ``logit / temperature - log(E)``, where the E are independent
    exponential variates of (seed, position, token), which is a draw from the softmax.

    Args:
        logits: ``[B, vocab]``; computed in float32, or in float64 if they are.
        parameters: Parameters of each row.
        variant: Variant that covers the needs of every row.

    Returns:
        ``[B]`` int64; ``FAILED`` for a row with NaN, +inf or nothing but -inf.
    """
    if variant.plain:
        return greedy(logits)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    tokens = _scores(logits, parameters, variant).argmax(-1)
    return torch.where(logits.amax(-1).isfinite(), tokens, FAILED)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Return the token with the largest logit, the lowest of equal ones, or ``FAILED``."""
    largest = logits.max(-1)
    return torch.where(largest.values.isfinite(), largest.indices, FAILED)


def _scores(logits: torch.Tensor, parameters: Parameters, variant: Variant) -> torch.Tensor:
    if variant.penalty:
        logits = penalized(logits, parameters)
    if not variant.draw:
        return logits
    drawn = parameters.temperature.unsqueeze(1) > 0
    relative = relative_to_largest(logits, parameters)
    noise = exponential_log(
        token_words(parameters.seed, parameters.position, range(logits.shape[1])), logits.dtype
    )
    scores = relative - noise
    if variant.filters:
        scores = torch.where(keep_mask(relative, parameters), scores, -math.inf)
    return torch.where(drawn, scores, logits)


def penalized(logits: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    """Return logits after the repetition penalty."""
    assert parameters.present is not None
    factor = parameters.penalty.to(logits.dtype).unsqueeze(1)
    changed = torch.where(logits > 0, logits / factor, logits * factor)
    return torch.where(parameters.present, changed, logits)


def relative_to_largest(logits: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    """Return logits over the temperature, relative to the largest: small ones cannot overflow."""
    temperature = parameters.temperature.to(logits.dtype).unsqueeze(1)
    divisor = torch.where(temperature > 0, temperature, 1)
    return (logits - logits.amax(-1, keepdim=True)) / divisor


def exponential_log(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``log(E)``, ``E = -log(1 - v)`` with ``v = (word + 1/2) / 2**32``, exponential.

    The smallest E decide a draw. Near 0 they are as fine as the words, also in float32.
    """
    v = (words.to(dtype) + 0.5) * 2.0**-32
    v = v.clamp(max=1 - 2.0**-24)  # float32 rounds the last words up to 1
    series = v + v * v * (0.5 + v * (1 / 3))
    return torch.where(v < _SMALL, series, -torch.log(1 - v)).log()


def keep_mask(relative: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    """Return which tokens top-k, top-p and min-p keep: ``[B, vocab]`` bool.

    Args:
        relative: Logits less the largest of their row, over the temperature: 0 and below.
        parameters: Parameters of each row.
    """
    ordered = relative.sort(dim=-1, descending=True).values
    last = parameters.top_k.clamp(max=relative.shape[1]) - 1
    floor = ordered.gather(1, last.unsqueeze(1))  # the smallest value that top-k keeps
    weights = weight(ordered).masked_fill(ordered < floor, 0)
    total = weights.sum(-1, keepdim=True)
    more_probable = weights.cumsum(-1) - weights
    # Of equal values the first has the smallest sum before it, and decides for all.
    within = (more_probable < needed(total, parameters.top_p.unsqueeze(1))) & (ordered >= floor)
    count = within.sum(-1, keepdim=True)
    floor = ordered.gather(1, (count - 1).clamp(min=0))  # a row of NaN keeps none
    lowest = parameters.log_min_p.to(relative.dtype).unsqueeze(1)
    return (relative >= floor) & (relative >= lowest)


def weight(relative: torch.Tensor) -> torch.Tensor:
    """Return probabilities relative to the largest as integers, given logits relative to it."""
    return (relative.exp() * 2.0**WEIGHT_BITS).to(torch.int64)


def needed(total: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the bound: tokens are kept while those before hold less of ``total``; int64."""
    part = (total.to(torch.float64) * top_p).ceil().to(torch.int64)
    # top_p 1 keeps everything, also tokens whose weight is 0.
    return torch.where(top_p < 1, part.clamp(min=1), total + 1)


def logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> Logprobs:
    """Return log-probabilities of the chosen tokens and of the most probable ones.

    Args:
        logits: ``[B, vocab]``, the model's, unmodified.
        tokens: ``[B]``, ``FAILED`` included.
    """
    values = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    top = values.topk(min(MAX_LOGPROBS, values.shape[1]), dim=-1)
    chosen = values.gather(1, tokens.clamp(min=0).unsqueeze(1)).squeeze(1)
    return Logprobs(chosen, top.indices, top.values)
