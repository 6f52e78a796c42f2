"""Reference implementation of ``dsv4.ops.verify``.

What it draws by is ``dsv4.serving.sampler``, whose functions need torch alone.
"""

from __future__ import annotations

import math

import torch

from dsv4.ops.verify import (
    ACCEPT,
    DRAFT,
    RESIDUAL,
    DrawDraftArgs,
    Pair,
    VerifyGreedyArgs,
    VerifySampledArgs,
)
from dsv4.serving.philox import token_words
from dsv4.serving.sampler import (
    FAILED,
    WEIGHT_BITS,
    Parameters,
    Variant,
    exponential_log,
    greedy,
    keep_mask,
    relative_to_largest,
    sample,
    weight,
)


def verify_greedy(args: VerifyGreedyArgs) -> Pair:
    """See ``dsv4.ops.verify.verify_greedy``."""
    targets = greedy(args.logits)
    return up_to_first_wrong(_is_equal(args.drafts, targets), args.drafts, targets)


def verify_sampled(args: VerifySampledArgs) -> Pair:
    """See ``dsv4.ops.verify.verify_sampled``."""
    logits, drafts = args.logits, args.drafts
    batch, count, vocab = logits.shape
    step = torch.arange(count, device=drafts.device).repeat(batch)
    rows = Parameters(
        temperature=args.temperature.repeat_interleave(count),
        top_p=args.top_p.repeat_interleave(count),
        log_min_p=args.log_min_p.repeat_interleave(count),
        penalty=args.temperature.new_ones(batch * count),
        top_k=args.top_k.repeat_interleave(count),
        seed=args.seed.repeat_interleave(count),
        position=args.position.repeat_interleave(count) + step,
        present=None,
    )
    variant = Variant(draw=True, filters=args.filters)
    flat = logits.flatten(0, 1)
    p = distributions(flat, rows, args.filters).view(batch, count, vocab)
    plain = sample(flat, rows, variant).view(batch, count)
    q = args.probabilities
    q = certain(drafts, vocab, p.dtype) if q is None else q.to(p.dtype)
    there = (drafts >= 0) & q.isfinite().all(-1)
    chosen = drafts.clamp(min=0).unsqueeze(-1)
    p_draft, q_draft = (x.gather(-1, chosen).squeeze(-1) for x in (p[:, :-1], q))
    seeds, positions = (x.view(batch, count)[:, :-1].flatten() for x in (rows.seed, rows.position))
    words = token_words(seeds, positions, range(1), ACCEPT).view(batch, count - 1)
    uniform = (words.to(torch.float64) + 0.5) * 2.0**-32
    right = there & (p_draft.double() > uniform * q_draft.double())  # false for NaN
    residual = (p[:, :-1] - q).clamp(min=0)
    # Where p and q differ by roundings alone nothing may be left.
    is_left = (residual > 0).any(-1, keepdim=True)
    residual = torch.where(is_left, residual, p[:, :-1])
    corrected = _draw(residual.flatten(0, 1), seeds, positions, RESIDUAL).view(batch, count - 1)
    corrected = torch.where(there & (plain[:, :-1] != FAILED), corrected, plain[:, :-1])
    return up_to_first_wrong(right, drafts, torch.cat((corrected, plain[:, -1:]), 1))


def draw_draft(args: DrawDraftArgs) -> Pair:
    """See ``dsv4.ops.verify.draw_draft``."""
    numbers = (args.temperature, args.top_p, args.log_min_p, torch.ones_like(args.temperature))
    rows = Parameters(*numbers, args.top_k, args.seed, args.position, None)
    p = distributions(args.logits, rows, args.filters)
    drawn = _draw(p, args.seed, args.position, DRAFT)
    return torch.where(p.isnan().any(-1), -1, drawn), p


def distributions(logits: torch.Tensor, rows: Parameters, filters: bool) -> torch.Tensor:
    """Return what ``dsv4.serving.sampler.sample`` draws from.

    The sum of a row is one of integers, so that its order changes no bit.

    Args:
        logits: ``[R, V]``, with penalties.
        rows: Parameters of each row.
        filters: Whether a row has top-k, top-p or min-p.

    Returns:
        ``[R, V]``; NaN for a row whose logits have no finite maximum.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    finite = logits.amax(-1, keepdim=True).isfinite()
    best = certain(logits.argmax(-1), logits.shape[-1], logits.dtype)
    relative = relative_to_largest(logits, rows)
    if filters:
        relative = torch.where(keep_mask(relative, rows), relative, -math.inf)
    # A row that is not finite has no integers.
    total = weight(torch.where(finite, relative, 0)).sum(-1, keepdim=True)
    sums = (total.to(torch.float64) * 2.0**-WEIGHT_BITS).to(logits.dtype)
    drawn = rows.temperature.unsqueeze(1) > 0
    return torch.where(finite, torch.where(drawn, relative.exp() / sums, best), torch.nan)


def certain(tokens: torch.Tensor, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Return distributions ``[..., V]`` with all probability on a token; 0 for no token."""
    return (tokens.unsqueeze(-1) == torch.arange(vocab, device=tokens.device)).to(dtype)


def _draw(
    weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, purpose: int
) -> torch.Tensor:
    """Draw a token of each row with probabilities in proportion to ``weights [R, V]``."""
    words = token_words(seeds, positions, range(weights.shape[-1]), purpose)
    return (weights.log() - exponential_log(words, weights.dtype)).argmax(-1)


def _is_equal(drafts: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (drafts == targets[:, :-1]) & (drafts >= 0)


def up_to_first_wrong(right: torch.Tensor, drafts: torch.Tensor, targets: torch.Tensor) -> Pair:
    """Cut at the first draft that is not right; ``targets [B, D + 1]`` stand there."""
    accepted = right.long().cumprod(1).sum(1)
    column = torch.arange(targets.shape[1], device=targets.device)
    last = accepted.unsqueeze(1)
    padded = torch.cat((drafts, torch.full_like(targets[:, :1], -1)), 1)
    tokens = torch.where(column < last, padded, torch.where(column == last, targets, -1))
    return accepted, tokens
