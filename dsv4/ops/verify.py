"""Verification of drafted tokens, and drafts drawn from a distribution.

A sequence has n = D + 1 rows of logits: row i is of the token after draft i, row 0 of the token
after the one that was sampled last. Random numbers are Philox words of (seed, position, token) with
a purpose of their own, as the sampler's (``dsv4.serving.sampler``), so the batch changes no token.
Sums of probabilities are sums of integers, so the order of a sum changes none, either.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4.ops import _check
from dsv4.ops._library import define
from dsv4.ops._plans import planned

__all__ = ["draw_draft", "verify_greedy", "verify_sampled"]

Pair = tuple[torch.Tensor, torch.Tensor]

# Purposes of random words; 0 is that of a plain draw.
PLAIN, ACCEPT, RESIDUAL, DRAFT = 0, 1, 2, 3
_WIDE = (torch.float32, torch.float64)


class VerifyGreedyArgs(NamedTuple):
    """Arguments of ``verify_greedy``: drafts that have the largest logit.

    Attributes:
        logits: ``[B, D + 1, V]`` floating.
        drafts: ``[B, D]`` int64, negative for none.
    """

    logits: torch.Tensor
    drafts: torch.Tensor


class VerifySampledArgs(NamedTuple):
    """Arguments of ``verify_sampled``: rejection sampling.

    Attributes:
        logits: ``[B, D + 1, V]`` floating.
        drafts: ``[B, D]`` int64, negative for none.
        probabilities: ``[B, D, V]`` float32 or float64, from which drafts were drawn, or None.
        temperature: ``[B]`` float64, 0 for greedy.
        top_p: ``[B]`` float64.
        log_min_p: ``[B]`` float64.
        top_k: ``[B]`` int64.
        seed: ``[B]`` int64.
        position: ``[B]`` int64, of the first token to be emitted.
        filters: Whether a sequence has top-k, top-p or min-p.
    """

    logits: torch.Tensor
    drafts: torch.Tensor
    probabilities: torch.Tensor | None
    temperature: torch.Tensor
    top_p: torch.Tensor
    log_min_p: torch.Tensor
    top_k: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    filters: bool


class DrawDraftArgs(NamedTuple):
    """Arguments of ``draw_draft``: a token of each row, and what it was drawn from.

    Attributes:
        logits: ``[B, V]`` floating.
        temperature: ``[B]`` float64, 0 for greedy.
        top_p: ``[B]`` float64.
        log_min_p: ``[B]`` float64.
        top_k: ``[B]`` int64.
        seed: ``[B]`` int64.
        position: ``[B]`` int64, of the drafted token.
        filters: Whether a row has top-k, top-p or min-p.
    """

    logits: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    log_min_p: torch.Tensor
    top_k: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    filters: bool


def _verified(logits: torch.Tensor) -> Pair:
    batch, rows = logits.shape[:2]
    return (
        logits.new_empty([batch], dtype=torch.int64),
        logits.new_empty([batch, rows], dtype=torch.int64),
    )


def _fake_greedy(args: VerifyGreedyArgs) -> Pair:
    return _verified(args.logits)


def _fake_sampled(args: VerifySampledArgs) -> Pair:
    return _verified(args.logits)


def _fake_draft(args: DrawDraftArgs) -> Pair:
    logits = args.logits
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return (
        logits.new_empty([logits.shape[0]], dtype=torch.int64),
        logits.new_empty(logits.shape, dtype=wide),
    )


def _check_drafts(op: str, args: VerifyGreedyArgs | VerifySampledArgs) -> None:
    _check.below(op, "drafts", args.drafts, args.logits.shape[2])


_verify_greedy = define("verify_greedy", VerifyGreedyArgs, _fake_greedy, _check_drafts)
_verify_sampled = define("verify_sampled", VerifySampledArgs, _fake_sampled, _check_drafts)
_draw_draft = define("draw_draft", DrawDraftArgs, _fake_draft)


@planned
def verify_greedy(logits: torch.Tensor, drafts: torch.Tensor, *, backend: str = "auto") -> Pair:
    """Accept drafts that have the largest logit, the lowest id of equal ones.

    Args:
        logits: ``[B, D + 1, V]`` of the target, bfloat16, float16, float32 or float64.
        drafts: ``[B, D]`` int64, negative where there is none.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``(accepted [B] int64, tokens [B, D + 1] int64)``: how many drafts are accepted, and these,
        then the token with the largest logit of the row after them, then -1. That token is -1, too,
        if the row has NaN, +inf or nothing but -inf.

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if a shape differs or a tensor is on another device.
        IndexError: if a draft is no token (on the CPU; never accepted on a GPU).
    """
    _check.tensors(
        "verify_greedy",
        ("logits", logits, _check.FLOATS, ("B", None, "V")),
        ("drafts", drafts, (torch.int64,), ("B", None)),
    )
    _check_rows("verify_greedy", logits, drafts)
    return _verify_greedy(VerifyGreedyArgs(logits, drafts), backend)


@planned
def verify_sampled(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    probabilities: torch.Tensor | None,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    log_min_p: torch.Tensor,
    top_k: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    filters: bool,
    backend: str = "auto",
) -> Pair:
    """Accept and correct drafts so that emitted tokens have the target's distribution.

    With p of the target and q of the draft, draft d is accepted if ``p(d) > u q(d)``, u uniform.
    The first rejected one is replaced by a draw from ``max(p - q, 0)``, and by one from p if
    nothing is left of that. A row without a draft, and that after D accepted ones, is drawn from p
    by the random numbers of a plain draw. A sequence with temperature 0 is verified greedily.

    Args:
        logits: ``[B, D + 1, V]`` of the target, bfloat16, float16, float32 or float64; repetition
            penalties are applied already.
        drafts: ``[B, D]`` int64, negative where there is none.
        probabilities: ``[B, D, V]`` float32 or float64, q; None: each draft was certain. A draft is
            dropped if its row of q is not finite.
        temperature: ``[B]`` float64, 0 for greedy.
        top_p: ``[B]`` float64, 1 for all.
        log_min_p: ``[B]`` float64, logarithm of min-p, -inf for all.
        top_k: ``[B]`` int64, V for all.
        seed: ``[B]`` int64.
        position: ``[B]`` int64, of the first token to be emitted, below 2**32 - D.
        filters: Whether a sequence has top-k, top-p or min-p; they are not looked at otherwise.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        As ``verify_greedy``.

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if a shape differs or a tensor is on another device.
        IndexError: if a draft is no token (on the CPU; never accepted on a GPU).
    """
    op = "verify_sampled"
    _check.tensors(
        op,
        ("logits", logits, _check.FLOATS, ("B", None, "V")),
        ("drafts", drafts, (torch.int64,), ("B", "D")),
        ("probabilities", probabilities, _WIDE, ("B", "D", "V")),
        *_expected(temperature, top_p, log_min_p, top_k, seed, position),
    )
    _check_rows(op, logits, drafts)
    numbers = (temperature, top_p, log_min_p, top_k, seed, position)
    return _verify_sampled(
        VerifySampledArgs(logits, drafts, probabilities, *numbers, filters), backend
    )


@planned
def draw_draft(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    log_min_p: torch.Tensor,
    top_k: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    filters: bool,
    backend: str = "auto",
) -> Pair:
    """Draw a draft of each row, and return the distribution that it was drawn from.

    Args:
        logits: ``[B, V]`` of the draft, bfloat16, float16, float32 or float64; repetition penalties
            are applied already.
        temperature: ``[B]`` float64, 0 for greedy.
        top_p: ``[B]`` float64, 1 for all.
        log_min_p: ``[B]`` float64, logarithm of min-p, -inf for all.
        top_k: ``[B]`` int64, V for all.
        seed: ``[B]`` int64.
        position: ``[B]`` int64, of the drafted token, below 2**32.
        filters: Whether a row has top-k, top-p or min-p; they are not looked at otherwise.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``(tokens [B] int64, probabilities [B, V] float32, or float64 of such logits)``. The token
        of a row with NaN, +inf or nothing but -inf is -1 and its probabilities are NaN.

    Raises:
        TypeError: if a dtype is wrong.
        ValueError: if a shape differs or a tensor is on another device.
    """
    _check.tensors(
        "draw_draft",
        ("logits", logits, _check.FLOATS, ("B", "V")),
        *_expected(temperature, top_p, log_min_p, top_k, seed, position),
    )
    numbers = (temperature, top_p, log_min_p, top_k, seed, position)
    return _draw_draft(DrawDraftArgs(logits, *numbers, filters), backend)


def _expected(
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    log_min_p: torch.Tensor,
    top_k: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> tuple[_check.Expected, ...]:
    """Return what each parameter of sampling has to be."""
    floats, integers = (torch.float64,), (torch.int64,)
    return (
        ("temperature", temperature, floats, ("B",)),
        ("top_p", top_p, floats, ("B",)),
        ("log_min_p", log_min_p, floats, ("B",)),
        ("top_k", top_k, integers, ("B",)),
        ("seed", seed, integers, ("B",)),
        ("position", position, integers, ("B",)),
    )


def _check_rows(op: str, logits: torch.Tensor, drafts: torch.Tensor) -> None:
    if not torch.compiler.is_compiling() and logits.shape[1] != drafts.shape[1] + 1:
        raise ValueError(
            f"{op}: logits have {logits.shape[1]} rows a sequence, wanted {drafts.shape[1] + 1}: "
            "one more than drafts"
        )
