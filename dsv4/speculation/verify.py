"""Verify drafted tokens: which are accepted, and the token after them.

All functions are tensor operations of fixed shapes, so that a captured graph can hold them. A step
has n = D + 1 rows of logits per sequence: row j is of the token after draft j, row 0 of the token
after the one that was sampled last. Random numbers are hashes of (seed, position, token), with a
purpose of their own, so that the batch, its order and the cut into steps change no draw.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from dsv4.serving.philox import token_words
from dsv4.serving.sampler import (
    FAILED,
    Parameters,
    Variant,
    exponential_log,
    greedy,
    keep_mask,
    penalized,
    relative_to_largest,
    sample,
)

NO_DRAFT = -1  # in place of a draft; never accepted
# Purposes of random words; 0 is that of a plain draw.
_ACCEPT, _RESIDUAL, _DRAFT = 1, 2, 3


class Verified(NamedTuple):
    """Result of a verification.

    Attributes:
        accepted: ``[B]`` int64, 0 to D: how many drafts are accepted.
        tokens: ``[B, D + 1]`` int64: the accepted drafts, then one token more, which corrects the
            first wrong draft or follows the last; then ``NO_DRAFT``. That token is ``FAILED`` if
            its row of logits is not finite.
    """

    accepted: torch.Tensor
    tokens: torch.Tensor


class Drafted(NamedTuple):
    """Drafted tokens with the distributions that they were drawn from.

    Attributes:
        tokens: ``[B]`` int64; ``NO_DRAFT`` for a row of logits that is not finite.
        probabilities: ``[B, vocab]`` float32, or float64 of such logits.
    """

    tokens: torch.Tensor
    probabilities: torch.Tensor


def draw_draft(logits: torch.Tensor, parameters: Parameters, variant: Variant) -> Drafted:
    """Draw a draft of each row, and return what it was drawn from.

    Args:
        logits: ``[B, vocab]`` of the draft.
        parameters: Of the requests; ``position`` is that of the drafted token.
        variant: Variant that covers the needs of every row.
    """
    p = probabilities(logits, parameters, variant)
    drawn = _draw(p, parameters.seed, parameters.position, _DRAFT)
    return Drafted(torch.where(p.isnan().any(-1), NO_DRAFT, drawn), p)


def verify_equal(targets: torch.Tensor, drafts: torch.Tensor) -> Verified:
    """Accept the drafts that are the target's own tokens, up to the first that is not.

    With ``greedy`` targets this is greedy verification. With targets of ``sample`` the result is,
    token for token, that of decoding without drafts, for any draft.

    Args:
        targets: ``[B, D + 1]`` int64, the target's token of each row.
        drafts: ``[B, D]`` int64, ``NO_DRAFT`` where there is none.
    """
    right = (drafts == targets[:, :-1]) & (drafts >= 0)
    return _verified(right, drafts, targets)


def verify_greedy(logits: torch.Tensor, drafts: torch.Tensor) -> Verified:
    """Accept drafts that have the largest logit, the lowest id of equal ones.

    Args:
        logits: ``[B, D + 1, vocab]`` of the target.
        drafts: ``[B, D]`` int64, ``NO_DRAFT`` where there is none.
    """
    _check(logits, drafts, None)
    return verify_equal(greedy(logits), drafts)


def verify_same_draws(
    logits: torch.Tensor, drafts: torch.Tensor, parameters: Parameters, variant: Variant
) -> Verified:
    """Accept drafts that plain sampling would have drawn with the request's seed.

    The text of a seed is then the same with and without drafts. Fewer drafts are accepted than by
    ``verify_sampled``.

    Args:
        logits: See ``verify_sampled``.
        drafts: See there.
        parameters: See there.
        variant: See there.
    """
    _check(logits, drafts, None)
    rows = _rows_of(parameters, drafts, logits.shape[-1])
    targets = sample(logits.flatten(0, 1), rows, variant).view(drafts.shape[0], -1)
    return verify_equal(targets, drafts)


def verify_sampled(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    parameters: Parameters,
    variant: Variant,
    draft_probabilities: torch.Tensor | None = None,
) -> Verified:
    """Accept and correct drafts so that emitted tokens have the target's distribution.

    With p of the target and q of the draft, draft d is accepted with probability ``min(1, p(d) /
    q(d))``. The first rejected one is replaced by a draw from ``max(p - q, 0)``, normalised. After
    D accepted ones a token is drawn from p. A row without a draft is drawn as plain sampling draws
    it.

    Args:
        logits: ``[B, D + 1, vocab]`` of the target.
        drafts: ``[B, D]`` int64, ``NO_DRAFT`` where there is none.
        parameters: Of the B requests; ``position`` is that of the first token to be emitted.
        variant: Variant that covers the needs of every request.
        draft_probabilities: ``[B, D, vocab]``, q, from which drafts were drawn; None: each draft
            was certain. A draft is dropped if its q is not finite.
    """
    _check(logits, drafts, draft_probabilities)
    if variant.plain:
        return verify_greedy(logits, drafts)
    batch, count, vocab = logits.shape
    rows = _rows_of(parameters, drafts, vocab)
    p = probabilities(logits.flatten(0, 1), rows, variant)
    plain = sample(logits.flatten(0, 1), rows, variant).view(batch, count)
    p = p.view(batch, count, vocab)
    q = _certain(drafts, vocab, p.dtype) if draft_probabilities is None else draft_probabilities
    q = q.to(p.dtype)
    there = (drafts >= 0) & q.isfinite().all(-1)
    chosen = drafts.clamp(min=0).unsqueeze(-1)
    p_draft, q_draft = (x.gather(-1, chosen).squeeze(-1) for x in (p[:, :-1], q))
    seeds, positions = (x.view(batch, count)[:, :-1].flatten() for x in (rows.seed, rows.position))
    words = token_words(seeds, positions, range(1), _ACCEPT).view(batch, count - 1)
    uniform = (words.to(torch.float64) + 0.5) * 2.0**-32
    right = there & (p_draft.double() > uniform * q_draft.double())  # false for NaN
    residual = (p[:, :-1] - q).clamp(min=0)
    # Where p and q differ by roundings alone nothing may be left.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p[:, :-1])
    corrected = _draw(residual.flatten(0, 1), seeds, positions, _RESIDUAL).view(batch, count - 1)
    corrected = torch.where(there & (plain[:, :-1] != FAILED), corrected, plain[:, :-1])
    targets = torch.cat((corrected, plain[:, -1:]), 1)
    return _verified(right, drafts, targets)


def probabilities(logits: torch.Tensor, parameters: Parameters, variant: Variant) -> torch.Tensor:
    """Return the distribution that ``dsv4.serving.sampler.sample`` draws from.

    Args:
        logits: ``[B, vocab]``.
        parameters: Parameters of each row.
        variant: Variant that covers the needs of every row.

    Returns:
        ``[B, vocab]``; NaN for a row whose logits have no finite maximum.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    finite = logits.amax(-1, keepdim=True).isfinite()
    if variant.penalty:
        logits = penalized(logits, parameters)
    best = _certain(logits.argmax(-1), logits.shape[-1], logits.dtype)
    if not variant.draw:
        return torch.where(finite, best, torch.nan)
    relative = relative_to_largest(logits, parameters)
    if variant.filters:
        relative = torch.where(keep_mask(relative, parameters), relative, -math.inf)
    drawn = parameters.temperature.unsqueeze(1) > 0
    return torch.where(finite, torch.where(drawn, relative.softmax(-1), best), torch.nan)


def _certain(tokens: torch.Tensor, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Return distributions ``[..., vocab]`` with all probability on a token; 0 for no token."""
    return (tokens.unsqueeze(-1) == torch.arange(vocab, device=tokens.device)).to(dtype)


def _draw(
    weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, purpose: int
) -> torch.Tensor:
    """Draw a token of each row with probabilities in proportion to ``weights [R, vocab]``."""
    words = token_words(seeds, positions, range(weights.shape[-1]), purpose)
    return (weights.log() - exponential_log(words, weights.dtype)).argmax(-1)


def _rows_of(parameters: Parameters, drafts: torch.Tensor, vocab: int) -> Parameters:
    """Return the parameters of all rows ``[B * (D + 1)]``: positions, and tokens seen so far."""
    count = drafts.shape[1] + 1
    repeated = parameters._replace(
        **{
            name: x.repeat_interleave(count, 0)
            for name, x in parameters._asdict().items()
            if x is not None
        }
    )
    step = torch.arange(count, device=drafts.device).repeat(drafts.shape[0])
    repeated = repeated._replace(position=repeated.position + step)
    if repeated.present is None:
        return repeated
    # A row counts only if all drafts before it are accepted.
    drafted = _certain(drafts, vocab, torch.int64).cumsum(1) > 0
    seen = torch.cat((drafted.new_zeros(drafts.shape[0], 1, vocab), drafted), 1)
    return repeated._replace(present=repeated.present | seen.flatten(0, 1))


def _verified(right: torch.Tensor, drafts: torch.Tensor, targets: torch.Tensor) -> Verified:
    """Cut at the first draft that is not right; ``targets [B, D + 1]`` stand there."""
    accepted = right.long().cumprod(1).sum(1)
    column = torch.arange(targets.shape[1], device=targets.device)
    last = accepted.unsqueeze(1)
    padded = torch.cat((drafts, torch.full_like(targets[:, :1], NO_DRAFT)), 1)
    tokens = torch.where(column < last, padded, torch.where(column == last, targets, NO_DRAFT))
    return Verified(accepted, tokens)


def _check(
    logits: torch.Tensor, drafts: torch.Tensor, draft_probabilities: torch.Tensor | None
) -> None:
    if logits.dim() != 3 or drafts.dim() != 2:
        raise ValueError(
            f"verify: logits have shape {list(logits.shape)} and drafts {list(drafts.shape)}, "
            "wanted [B, D + 1, vocab] and [B, D]"
        )
    batch, count, vocab = logits.shape
    if tuple(drafts.shape) != (batch, count - 1):
        raise ValueError(
            f"verify: drafts have shape {list(drafts.shape)}, wanted [{batch}, {count - 1}] for "
            f"logits of shape {list(logits.shape)}"
        )
    if draft_probabilities is None:
        return
    shape = tuple(draft_probabilities.shape)
    if shape != (batch, count - 1, vocab):
        raise ValueError(
            f"verify: draft_probabilities have shape {list(shape)}, wanted "
            f"[{batch}, {count - 1}, {vocab}]"
        )
