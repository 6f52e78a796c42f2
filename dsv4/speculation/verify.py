"""Verify drafted tokens: which are accepted, and the token after them.

No function reads a tensor on the host, and all shapes are fixed, so a captured graph can hold it.
A step has n = D + 1 rows of logits per sequence: row j is of the token after draft j, row 0 of the
token after the one that was sampled last. Random numbers are hashes of (seed, position, token),
with a purpose of their own, so that the batch, its order and the cut into steps change no draw.
Verification and drawn drafts are operators (``dsv4.ops.verify``), with kernels on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4 import ops
from dsv4.reference.verify import certain, up_to_first_wrong
from dsv4.serving.sampler import Parameters, Variant, penalized, sample

NO_DRAFT = -1  # in place of a draft; never accepted


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
    """Draw a draft for each row, and return it with the distribution that it was drawn from.

    Args:
        logits: ``[B, vocab]`` of the draft.
        parameters: Of the requests; ``position`` is that of the drafted token.
        variant: Variant that covers the needs of every row.
    """
    if variant.penalty:
        logits = penalized(_wide(logits), parameters)
    return Drafted(*ops.draw_draft(logits, *_numbers(parameters, variant), filters=variant.filters))


def verify_equal(targets: torch.Tensor, drafts: torch.Tensor) -> Verified:
    """Accept the drafts that are the target's own tokens, up to the first that is not.

    With ``greedy`` targets this is greedy verification. With targets of ``sample`` the result is,
    token for token, that of decoding without drafts, for any draft.

    Args:
        targets: ``[B, D + 1]`` int64, the target's token of each row.
        drafts: ``[B, D]`` int64, ``NO_DRAFT`` where there is none.
    """
    right = (drafts == targets[:, :-1]) & (drafts >= 0)
    return Verified(*up_to_first_wrong(right, drafts, targets))


def verify_greedy(logits: torch.Tensor, drafts: torch.Tensor) -> Verified:
    """Accept drafts that have the largest logit, the lowest id of equal ones.

    Args:
        logits: ``[B, D + 1, vocab]`` of the target.
        drafts: ``[B, D]`` int64, ``NO_DRAFT`` where there is none.
    """
    _check(logits, drafts, None)
    return Verified(*ops.verify_greedy(logits, drafts))


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
    if variant.penalty:
        rows = _rows_of(parameters, drafts, logits.shape[-1])
        logits = penalized(_wide(logits).flatten(0, 1), rows).view(logits.shape)
    return Verified(
        *ops.verify_sampled(
            logits,
            drafts,
            draft_probabilities,
            *_numbers(parameters, variant),
            filters=variant.filters,
        )
    )


def probabilities(logits: torch.Tensor, parameters: Parameters, variant: Variant) -> torch.Tensor:
    """Return the distribution that ``dsv4.serving.sampler.sample`` draws from.

    Args:
        logits: ``[B, vocab]``.
        parameters: Parameters of each row.
        variant: Variant that covers the needs of every row.

    Returns:
        ``[B, vocab]``; NaN for a row whose logits have no finite maximum.
    """
    return draw_draft(logits, parameters, variant).probabilities


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _numbers(parameters: Parameters, variant: Variant) -> tuple[torch.Tensor, ...]:
    """Return the parameters that the operators take; without a draw all rows are greedy."""
    temperature = parameters.temperature
    return (
        temperature if variant.draw else torch.zeros_like(temperature),
        parameters.top_p,
        parameters.log_min_p,
        parameters.top_k,
        parameters.seed,
        parameters.position,
    )


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
    drafted = certain(drafts, vocab, torch.int64).cumsum(1) > 0
    seen = torch.cat((drafted.new_zeros(drafts.shape[0], 1, vocab), drafted), 1)
    return repeated._replace(present=repeated.present | seen.flatten(0, 1))


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
