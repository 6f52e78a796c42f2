"""Choose tokens from logits that are split over ranks by the vocabulary.

Ranks exchange their best token with its value, the sums of a few hundred classes of tokens where a
filter needs them, and never their logits. Tokens are those that ``dsv4.serving.sampler`` chooses
from all logits, bit for bit, because the largest value and sums of integers do not depend on the
split. All ranks get the same tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dsv4.parallel.context import ParallelContext
from dsv4.parallel.reduce import sum_integers
from dsv4.serving.options import MAX_LOGPROBS
from dsv4.serving.philox import token_words
from dsv4.serving.sampler import (
    FAILED,
    Logprobs,
    Parameters,
    Variant,
    exponential_log,
    needed,
    penalized,
    weight,
)

_DIGIT = 8  # bits of a value that one exchange of class sums decides


@dataclass(frozen=True, eq=False)
class VocabularyPart:
    """The tokens whose logits a rank has.

    Attributes:
        context: This rank.
        tokens: The ids.
    """

    context: ParallelContext
    tokens: range

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Return the largest of all ranks' ``values [B, V]``: ``[B]``."""
        return self._gathered(values.amax(-1)).amax(0)

    def best(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest score of all ranks and its token, the lowest of equal ones: ``[B]``.

        A row with NaN has NaN and any token.
        """
        top = scores.max(-1)
        # float64 holds both exactly, so that one exchange takes both.
        own = torch.stack([top.values.double(), (top.indices + self.tokens.start).double()])
        values, ids = self._gathered(own).unbind(1)
        largest = values.amax(0)
        is_largest = values == largest
        tokens = torch.where(is_largest, ids, math.inf).amin(0)
        return largest, tokens.nan_to_num(posinf=0).long()

    def _gathered(self, values: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.context.group.all_gather(values))

    def local(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the index of each token here, 0 for other ranks', and whether it is here."""
        own = tokens - self.tokens.start
        here = (own >= 0) & (own < len(self.tokens))
        return torch.where(here, own, 0), here


def sample(
    part: VocabularyPart, logits: torch.Tensor, parameters: Parameters, variant: Variant
) -> torch.Tensor:
    """Choose the next token of each row; see ``dsv4.serving.sampler.sample``.

    Args:
        part: The tokens of the logits.
        logits: ``[B, V]`` of this rank's tokens.
        parameters: Parameters of each row; ``present`` is of this rank's tokens.
        variant: Variant that covers the needs of every row.
    """
    if variant.plain:
        return greedy(part, logits)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    _, tokens = part.best(_scores(part, logits, parameters, variant))
    return torch.where(part.largest(logits).isfinite(), tokens, FAILED)


def greedy(part: VocabularyPart, logits: torch.Tensor) -> torch.Tensor:
    """Return the token with the largest logit, the lowest of equal ones, or ``FAILED``."""
    largest, tokens = part.best(logits)
    return torch.where(largest.isfinite(), tokens, FAILED)


def _scores(
    part: VocabularyPart, logits: torch.Tensor, parameters: Parameters, variant: Variant
) -> torch.Tensor:
    if variant.penalty:
        logits = penalized(logits, parameters)
    if not variant.draw:
        return logits
    temperature = parameters.temperature.to(logits.dtype).unsqueeze(1)
    drawn = temperature > 0
    relative = (logits - part.largest(logits).unsqueeze(1)) / torch.where(drawn, temperature, 1)
    words = token_words(parameters.seed, parameters.position, part.tokens)
    scores = relative - exponential_log(words, logits.dtype)
    if variant.filters:
        scores = torch.where(keep_mask(part, relative, parameters), scores, -math.inf)
    return torch.where(drawn, scores, logits)


def keep_mask(part: VocabularyPart, relative: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    """Return which of this rank's tokens top-k, top-p and min-p keep: ``[B, V]`` bool."""
    keys = _descending(relative)
    bits = 8 * relative.element_size()
    first = _prefix_with(part, keys, bits, torch.ones_like(keys), parameters.top_k)
    weights = weight(relative).masked_fill(keys > first.unsqueeze(1), 0)
    total = sum_integers(part.context, weights.sum(-1))
    second = _prefix_with(part, keys, bits, weights, needed(total, parameters.top_p))
    last = torch.minimum(first, second).unsqueeze(1)
    lowest = parameters.log_min_p.to(relative.dtype).unsqueeze(1)
    return (keys <= last) & (relative >= lowest)


def _descending(relative: torch.Tensor) -> torch.Tensor:
    """Return integers, 0 and up, that ascend where the values, 0 and below, descend."""
    integers = torch.int64 if relative.dtype == torch.float64 else torch.int32
    return relative.abs().contiguous().view(integers).long()  # the magnitude's bits


def _prefix_with(
    part: VocabularyPart,
    keys: torch.Tensor,
    bits: int,
    weights: torch.Tensor,
    bound: torch.Tensor,
) -> torch.Tensor:
    """Return the smallest key up to which the weights of all ranks reach a bound: ``[B]``.

    It is the largest integer where they do not reach it. Digits are decided one after another,
    the highest first, by the sums of the weights of each digit.
    """
    classes = 1 << _DIGIT
    prefix = torch.zeros_like(bound)
    before = torch.zeros_like(bound)  # weight of smaller keys
    for shift in range(bits - _DIGIT, -1, -_DIGIT):
        above = keys >> min(shift + _DIGIT, 63)  # a shift of 64 bits is undefined
        own = torch.where(above == prefix.unsqueeze(1), weights, 0)
        digits = (keys >> shift) & (classes - 1)
        sums = own.new_zeros((len(own), classes)).scatter_add_(1, digits, own)
        upto = before.unsqueeze(1) + sum_integers(part.context, sums).cumsum(1)
        if shift == bits - _DIGIT:
            reached = upto[:, -1] >= bound
        digit = (upto < bound.unsqueeze(1)).sum(1).clamp(max=classes - 1)
        smaller = upto.gather(1, (digit - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
        before = torch.where(digit > 0, smaller, before)
        prefix = (prefix << _DIGIT) | digit
    return torch.where(reached, prefix, torch.iinfo(torch.int64).max)


def logprobs(part: VocabularyPart, logits: torch.Tensor, tokens: torch.Tensor) -> Logprobs:
    """Return log-probabilities as ``dsv4.serving.sampler.logprobs`` does, up to rounding.

    Args:
        part: The tokens of the logits.
        logits: ``[B, V]`` of this rank's tokens, unmodified.
        tokens: ``[B]``, ``FAILED`` included.
    """
    group, vocabulary = part.context.group, part.context.size * len(part.tokens)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    relative = logits - part.largest(logits).unsqueeze(1)
    sums = torch.stack(group.all_gather(relative.exp().sum(-1)))
    normaliser = sums.sum(0).log()
    count = min(MAX_LOGPROBS, vocabulary)
    own = relative.topk(min(count, len(part.tokens)), dim=-1)
    values = torch.cat(group.all_gather(own.values), dim=-1)
    ids = torch.cat(group.all_gather(own.indices + part.tokens.start), dim=-1)
    top = values.topk(count, dim=-1)
    index, here = part.local(tokens.clamp(min=0))
    chosen = relative.gather(1, index.unsqueeze(1)).squeeze(1).masked_fill(~here, 0)
    chosen = torch.stack(group.all_gather(chosen)).sum(0)
    return Logprobs(
        chosen - normaliser, ids.gather(1, top.indices), top.values - normaliser.unsqueeze(1)
    )
