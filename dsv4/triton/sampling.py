"""Kernels of ``dsv4.serving.sampler``: the next token of each row, without sorting.

Three launches. ``_largest_kernel`` and ``_scores_kernel`` split a row over several CTAs: the
largest logit; then for every token its logit relative to the largest and its score, a logit with
noise. The token with the best score is the draw. ``_filter_kernel`` has one CTA per row. Where a
row has filters it rejects: if top-k, top-p or min-p drop the token with the best score, they drop
every token that is not more probable, so the next candidate is the best score among those that are.
On average a rejection halves the probability that is left outside. Counts and sums of weights are
integers, so no order of a sum changes a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.triton._lib.draws import (
    NONE,
    best_of,
    better_of,
    log_exponential,
    mass_above,
    needed_mass,
)
from dsv4.triton._lib.numerics import wait_for_inputs, widen
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

_SPLITS = 16  # most CTAs per row
_BLOCK = 8192  # tokens of a tile of the filters
_QUADS = 512  # groups of four tokens, which share a call of Philox, of a tile of the scores


@triton.jit
def _penalised(logits, present, mask, penalty, row, entry, token, vocab, PENALTY: tl.constexpr):
    """Logits of some tokens as the model gave them, and with the repetition penalty."""
    x = widen(tl.load(logits + row * vocab + token, mask=mask, other=float("-inf")))
    if not PENALTY:
        return x, x
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        repeated = tl.load(present + entry * vocab + token, mask=mask, other=0) != 0
        changed = tl.where(x > 0, x / penalty, x * penalty)
        return x, tl.where(repeated, changed, x)


@fast_launch
@triton.jit(do_not_specialize=["vocab", "span"])
def _largest_kernel(
    logits, entries, numbers, present, largest, vocab, span,
    PENALTY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Largest logit of a split of a row, as given (+inf for NaN) and with the penalty."""
    wait_for_inputs(PDL)
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry = tl.load(entries + row)
    penalty = tl.load(numbers + entry * 4 + 3).to(tl.float32)
    end = tl.minimum((split + 1) * span, vocab)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    changed = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(split * span, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x, y = _penalised(logits, present, token < end, penalty, row, entry, token, vocab, PENALTY)
        top = tl.maximum(top, tl.where(x == x, x, float("inf")))
        changed = tl.maximum(changed, tl.where(y == y, y, float("-inf")))
    address = largest + (row * tl.num_programs(1) + split) * 2
    tl.store(address, tl.max(top, 0))
    tl.store(address + 1, tl.max(changed, 0))


@triton.jit
def _scored(x, top, temperature, word, mask):
    """Relative logits and scores; scores are logits where the row is greedy."""
    relative = (x - top) / tl.where(temperature > 0, temperature, 1.0)
    score = tl.where(temperature > 0, relative - log_exponential(word), x)
    return relative, tl.where(mask, score, float("-inf"))


@fast_launch
@triton.jit(do_not_specialize=["vocab", "span"])
def _scores_kernel(
    logits, entries, numbers, integers, positions, present, largest, relatives, scores,
    best_scores, best_tokens, vocab, span,
    PENALTY: tl.constexpr, FILTERS: tl.constexpr, SPLITS: tl.constexpr, QUADS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Scores of a split of a row, and its best token."""
    wait_for_inputs(PDL)
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry = tl.load(entries + row)
    temperature = tl.load(numbers + entry * 4).to(tl.float32)
    penalty = tl.load(numbers + entry * 4 + 3).to(tl.float32)
    seed, position = tl.load(integers + entry * 2 + 1), tl.load(positions + row)
    tops = tl.load(largest + (row * SPLITS + tl.arange(0, SPLITS)) * 2 + 1)
    top = tl.max(tops, 0)
    end = tl.minimum((split + 1) * span, vocab)
    best = tl.full([QUADS], float("-inf"), tl.float32)
    at = tl.full([QUADS], NONE, tl.int32)
    for first in range(split * span, end, 4 * QUADS):
        quad = first // 4 + tl.arange(0, QUADS)
        zero = tl.zeros([QUADS], tl.uint32)
        words = tl.philox(seed, quad.to(tl.uint32), zero + position.to(tl.uint32), zero, zero)
        for i in tl.static_range(4):
            token = 4 * quad + i
            mask = token < end
            _, x = _penalised(logits, present, mask, penalty, row, entry, token, vocab, PENALTY)
            relative, score = _scored(x, top, temperature, words[i], mask)
            best, at = better_of(best, at, score, token)
            if FILTERS:
                tl.store(relatives + row * vocab + token, relative, mask=mask)
                tl.store(scores + row * vocab + token, score, mask=mask)
    best, at = best_of(best, at)
    tl.store(best_scores + row * SPLITS + split, best)
    tl.store(best_tokens + row * SPLITS + split, at)


@triton.jit
def _best_above(relatives, scores, bound, vocab, BLOCK: tl.constexpr):
    """The token with the best score of those above ``bound``."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.full([BLOCK], NONE, tl.int32)
    for first in range(0, vocab, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = tl.load(relatives + token, mask=token < vocab, other=float("-inf"))
        score = tl.load(scores + token, mask=token < vocab, other=float("-inf"))
        best, at = better_of(best, at, tl.where(x > bound, score, float("-inf")), token)
    return best_of(best, at)[1]


@fast_launch
@triton.jit(do_not_specialize=["vocab"])
def _filter_kernel(
    entries, numbers, integers, largest, relatives, scores, best_scores, best_tokens, out, vocab,
    FILTERS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The token of a row: the best score of those that the filters keep."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    split = row * SPLITS + tl.arange(0, SPLITS)
    top = tl.max(tl.load(largest + split * 2), 0)
    _, token = best_of(tl.load(best_scores + split), tl.load(best_tokens + split))
    finite = (top < float("inf")) & (top > float("-inf"))
    if FILTERS:
        entry = tl.load(entries + row)
        temperature = tl.load(numbers + entry * 4)
        top_p = tl.load(numbers + entry * 4 + 1)
        lowest = tl.load(numbers + entry * 4 + 2).to(tl.float32)
        top_k = tl.load(integers + entry * 2)
        filtered = (top_k < vocab) | (top_p < 1) | (lowest > float("-inf"))
        if finite & (temperature > 0) & filtered:
            relatives += row * vocab
            scores += row * vocab
            needed = needed_mass(relatives, top_k, top_p, vocab, BLOCK)
            passes = tl.full([], 0, tl.int32)
            while passes == 0:
                bound = tl.load(relatives + token)
                passes = (bound >= lowest).to(tl.int32)
                if (passes != 0) & ((top_k < vocab) | (top_p < 1)):
                    count, mass = mass_above(relatives, bound, vocab, BLOCK)
                    passes = ((count < top_k) & (mass < needed)).to(tl.int32)
                if passes == 0:
                    token = _best_above(relatives, scores, bound, vocab, BLOCK)
    tl.store(out + row, tl.where(finite, token, -1).to(tl.int64))


def sample(
    logits: torch.Tensor,
    entries: torch.Tensor,
    numbers: torch.Tensor,
    integers: torch.Tensor,
    positions: torch.Tensor,
    present: torch.Tensor | None,
    *,
    filters: bool,
) -> torch.Tensor:
    """The next token of each row; see ``dsv4.serving.sampler.sample``.

    Args:
        logits: ``[B, vocab]`` float32, bfloat16 or float16, contiguous.
        entries: ``[B]`` int64, rows of the arrays that follow.
        numbers: ``[N, 4]`` float64: temperature, top_p, log_min_p, penalty.
        integers: ``[N, 2]`` int64: top_k, seed.
        positions: ``[B]`` int64.
        present: ``[N, vocab]`` bool, or None if no row has a penalty.
        filters: Whether a row has top-k, top-p or min-p.

    Returns:
        ``[B]`` int64; -1 for a row whose logits are not finite.
    """
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    splits = min(_SPLITS, launch_options.power_of_two(triton.cdiv(vocab, 4 * _QUADS)))
    largest = torch.empty(rows, splits, 2, dtype=torch.float32, device=logits.device)
    best_scores = torch.empty(rows, splits, dtype=torch.float32, device=logits.device)
    best_tokens = torch.empty(rows, splits, dtype=torch.int32, device=logits.device)
    filtered_rows = rows if filters else 0  # rows whose scores the filters read
    relatives = torch.empty(filtered_rows, vocab, dtype=torch.float32, device=logits.device)
    scores = torch.empty_like(relatives)
    span = 4 * triton.cdiv(vocab, 4 * splits)
    quads = min(_QUADS, launch_options.power_of_two(span // 4))
    block = min(_BLOCK, launch_options.power_of_two(vocab))
    penalty = present is not None
    mask = present.view(torch.uint8) if present is not None else logits
    options = launch_options.options(logits)
    with launch_options.on(logits):
        _largest_kernel[(rows, splits)](
            logits, entries, numbers, mask, largest, vocab, span,
            PENALTY=penalty, BLOCK=4 * quads, num_warps=4, **options,
        )  # fmt: skip
        _scores_kernel[(rows, splits)](
            logits, entries, numbers, integers, positions, mask, largest, relatives, scores,
            best_scores, best_tokens, vocab, span,
            PENALTY=penalty, FILTERS=filters, SPLITS=splits, QUADS=quads, num_warps=4, **options,
        )  # fmt: skip
        _filter_kernel[(rows,)](
            entries, numbers, integers, largest, relatives, scores, best_scores, best_tokens, out,
            vocab, FILTERS=filters, SPLITS=splits, BLOCK=block, num_warps=16, **options,
        )  # fmt: skip
    return out
