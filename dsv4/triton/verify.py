"""Kernels of ``dsv4.ops.verify``: drafts are accepted, corrected and drawn without a host read.

A row is split over several CTAs. ``_highest_kernel`` finds its largest logit, ``_masses_kernel``
the sum of its weights, which are integers, so no order of a sum changes a decision. A CTA of
``_candidates_kernel`` finds the first draft of its sequence that is not accepted, which takes one
probability a draft, and draws from its part of that row alone; ``_emit_kernel`` takes the best of
all parts. Where rows have top-k or top-p, ``_floors_kernel`` finds by bisection the lowest relative
logit that they keep.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dsv4.ops.verify import DrawDraftArgs, Pair, VerifyGreedyArgs, VerifySampledArgs
from dsv4.triton._lib.draws import (
    NONE,
    best_of,
    better_of,
    log_exponential,
    mass_up_to,
    needed_mass,
    weigh,
)
from dsv4.triton._lib.numerics import wait_for_inputs, widen
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

_SPLITS = 16  # most CTAs per row
_BLOCK = 8192  # tokens of a tile of a CTA that has a row alone
_QUADS = 512  # groups of four tokens, which share a call of Philox, of a tile
# Third words of Philox's counters; see ``dsv4.ops.verify``.
_ACCEPT = tl.constexpr(1)
_RESIDUAL = tl.constexpr(2)
_DRAFT = tl.constexpr(3)

# Drafts of one sequence are a slice of its tokens, so their address need not be a multiple of 16.
# They are read one by one.
_ANY_ADDRESS = ["drafts"]


@triton.jit
def _is_finite(top):
    return (top < float("inf")) & (top > float("-inf"))


@triton.jit
def _top_of(tops, top_ids, row, SPLITS: tl.constexpr):
    """Largest logit of a row, +inf if there is a NaN, and the lowest token that has it."""
    split = row * SPLITS + tl.arange(0, SPLITS)
    return best_of(tl.load(tops + split), tl.load(top_ids + split))


@triton.jit
def _sum_of(masses, row, SPLITS: tl.constexpr):
    """Sum of a row's probabilities relative to the largest."""
    mass = tl.sum(tl.load(masses + row * SPLITS + tl.arange(0, SPLITS)), 0)
    return (mass.to(tl.float64) * (2.0**-40)).to(tl.float32)


@triton.jit
def _probability(relative, floor, total):
    """Probability of a relative logit, in the reference's roundings."""
    return tl.where(relative >= floor, tl.math.div_rn(tl.exp(relative), total), 0.0)


@triton.jit
def _words(seed, position, quad, PURPOSE: tl.constexpr):
    """Four random words of each group of four tokens."""
    zero = quad.to(tl.uint32) * 0
    return tl.philox(seed, quad.to(tl.uint32), zero + position.to(tl.uint32), zero + PURPOSE, zero)


@fast_launch
@triton.jit(do_not_specialize=["vocab", "span"])
def _highest_kernel(logits, tops, top_ids, vocab, span, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Largest logit of a split of a row, +inf for NaN, and its token."""
    wait_for_inputs(PDL)
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.minimum((split + 1) * span, vocab)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.full([BLOCK], NONE, tl.int32)
    for first in range(split * span, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = widen(tl.load(logits + row * vocab + token, mask=token < end, other=float("-inf")))
        best, at = better_of(best, at, tl.where(x == x, x, float("inf")), token)
    best, at = best_of(best, at)
    address = row * tl.num_programs(1) + split
    tl.store(tops + address, best)
    tl.store(top_ids + address, at)


@fast_launch
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=_ANY_ADDRESS)
def _greedy_kernel(
    tops, top_ids, drafts, accepted, tokens, count, SPLITS: tl.constexpr, PDL: tl.constexpr
):
    """The drafts of a sequence that are their rows' largest logits, and the token after them."""
    wait_for_inputs(PDL)
    entry = tl.program_id(0).to(tl.int64)
    live = tl.full([], 1, tl.int64)
    number = tl.full([], 0, tl.int64)
    for i in range(count):
        row = entry * count + i
        top, at = _top_of(tops, top_ids, row, SPLITS)
        best = tl.where(_is_finite(top), at, -1).to(tl.int64)
        draft = tl.load(drafts + entry * (count - 1) + i, mask=i < count - 1, other=-1)
        tl.store(tokens + row, tl.where(live != 0, best, -1))
        live = tl.where((draft >= 0) & (draft == best), live, 0)
        number += live
    tl.store(accepted + entry, number)


@fast_launch
@triton.jit(do_not_specialize=["vocab", "span", "count"])
def _relatives_kernel(
    logits, temperatures, tops, top_ids, relatives, vocab, span, count,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Relative logits of a split of a row, for the filters."""
    wait_for_inputs(PDL)
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row // count).to(tl.float32)
    top, _ = _top_of(tops, top_ids, row, SPLITS)
    end = tl.minimum((split + 1) * span, vocab)
    for first in range(split * span, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = widen(tl.load(logits + row * vocab + token, mask=token < end, other=float("-inf")))
        relative = (x - top) / tl.where(temperature > 0, temperature, 1.0)
        tl.store(relatives + row * vocab + token, relative, mask=token < end)


@fast_launch
@triton.jit(do_not_specialize=["vocab", "count"])
def _floors_kernel(
    temperatures, top_ps, log_min_ps, top_ks, tops, top_ids, relatives, floors, vocab, count,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Lowest relative logit that the filters of a row keep.

    A key stays if fewer than top-k tokens have lower ones and these weigh less than is needed.
    """
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    entry = row // count
    temperature, top_p = tl.load(temperatures + entry), tl.load(top_ps + entry)
    top_k = tl.load(top_ks + entry)
    floor = tl.load(log_min_ps + entry).to(tl.float32)
    top, _ = _top_of(tops, top_ids, row, SPLITS)
    if _is_finite(top) & (temperature > 0) & ((top_k < vocab) | (top_p < 1)):
        relatives += row * vocab
        needed = needed_mass(relatives, top_k, top_p, vocab, BLOCK)
        low, high = tl.full([], 0, tl.int32), tl.full([], 0x7F800000, tl.int32)
        while low < high:
            middle = high - (high - low) // 2
            number, mass = mass_up_to(relatives, middle - 1, vocab, BLOCK)
            stays = (number < top_k) & (mass < needed)
            low = tl.where(stays, middle, low)
            high = tl.where(stays, high, middle - 1)
        floor = tl.maximum(floor, 0.0 - low.to(tl.float32, bitcast=True))
    tl.store(floors + row, floor)


@fast_launch
@triton.jit(do_not_specialize=["vocab", "span", "count"])
def _masses_kernel(
    logits, q, temperatures, tops, top_ids, floors, masses, broken, vocab, span, count,
    HAS_Q: tl.constexpr, FILTERS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Sum of the weights of a split of a row, and whether its part of q is not finite."""
    wait_for_inputs(PDL)
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry = row // count
    temperature = tl.load(temperatures + entry).to(tl.float32)
    top, _ = _top_of(tops, top_ids, row, SPLITS)
    floor = tl.load(floors + row) if FILTERS else float("-inf")
    end = tl.minimum((split + 1) * span, vocab)
    mass = tl.zeros([BLOCK], tl.int64)
    bad = tl.zeros([BLOCK], tl.int32)
    last = tl.where(row % count < count - 1, end, 0)  # tokens of q, which the last row lacks
    proposed = q + (row - entry) * vocab  # row i of an entry of count - 1 rows
    for first in range(split * span, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        inside = token < end
        x = widen(tl.load(logits + row * vocab + token, mask=inside, other=float("-inf")))
        relative = (x - top) / tl.where(temperature > 0, temperature, 1.0)
        stays = inside & (relative >= floor)
        mass += tl.where(stays, weigh(tl.where(stays, relative, 0.0)), 0)
        if HAS_Q:
            value = tl.load(proposed + token, mask=token < last, other=0.0)
            bad |= (tl.abs(value) < float("inf")).to(tl.int32) ^ 1
    address = row * SPLITS + split
    tl.store(masses + address, tl.sum(mass, 0))
    if HAS_Q:
        tl.store(broken + address, tl.max(bad, 0))


@triton.jit
def _is_there(drafts, broken, entry, i, count, vocab, HAS_Q: tl.constexpr, SPLITS: tl.constexpr):
    """Draft i of a sequence, and whether it can be accepted at all."""
    draft = tl.load(drafts + entry * (count - 1) + i, mask=i < count - 1, other=-1)
    there = (draft >= 0) & (draft < vocab)
    if HAS_Q:
        split = (entry * count + i) * SPLITS + tl.arange(0, SPLITS)
        there = there & (tl.max(tl.load(broken + split), 0) == 0)
    return draft, there


@triton.jit
def _accepted_drafts(
    logits, q, drafts, tops, top_ids, floors, masses, broken, temperature, seed, position, entry,
    count, vocab,
    HAS_Q: tl.constexpr, FILTERS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Return how many drafts of a sequence are accepted."""
    live = tl.full([], 1, tl.int64)
    number = tl.full([], 0, tl.int64)
    for i in range(count - 1):
        row = entry * count + i
        top, best = _top_of(tops, top_ids, row, SPLITS)
        draft, there = _is_there(drafts, broken, entry, i, count, vocab, HAS_Q, SPLITS)
        floor = tl.load(floors + row) if FILTERS else float("-inf")
        total = _sum_of(masses, row, SPLITS)
        x = widen(tl.load(logits + row * vocab + draft, mask=there, other=float("-inf")))
        relative = (x - top) / tl.where(temperature > 0, temperature, 1.0)
        p = _probability(relative, floor, total)
        p = tl.where(temperature > 0, p, tl.where(draft == best, 1.0, 0.0))
        proposed = tl.full([], 1.0, tl.float32)
        if HAS_Q:
            proposed = tl.load(q + (row - entry) * vocab + draft, mask=there, other=1.0)
        words = _words(seed, position + i, tl.zeros([1], tl.int32), _ACCEPT)
        uniform = tl.max((words[0].to(tl.float64) + 0.5) * (2.0**-32), 0)
        right = there & _is_finite(top) & (p.to(tl.float64) > uniform * proposed.to(tl.float64))
        live = tl.where(right, live, 0)
        number += live
    return number


@triton.jit
def _store_best(scores, chosen, address, best, at):
    best, at = best_of(best, at)
    tl.store(scores + address, best)
    tl.store(chosen + address, at)


@fast_launch
@triton.jit(
    do_not_specialize=["vocab", "span", "count"], do_not_specialize_on_alignment=_ANY_ADDRESS
)
def _candidates_kernel(
    logits, q, drafts, temperatures, seeds, positions, tops, top_ids, floors, masses, broken,
    accepted, scores, chosen, vocab, span, count,
    HAS_Q: tl.constexpr, FILTERS: tl.constexpr, SPLITS: tl.constexpr, QUADS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Best tokens of a split of the row after a sequence's accepted drafts.

    Two of them: by what p has more than q, and, if that is nothing or no draft was there, by p.
    """
    wait_for_inputs(PDL)
    entry, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + entry).to(tl.float32)
    seed, position = tl.load(seeds + entry), tl.load(positions + entry)
    number = _accepted_drafts(
        logits, q, drafts, tops, top_ids, floors, masses, broken, temperature, seed, position,
        entry, count, vocab, HAS_Q, FILTERS, SPLITS,
    )  # fmt: skip
    row = entry * count + number
    draft, there = _is_there(drafts, broken, entry, number, count, vocab, HAS_Q, SPLITS)
    top, _ = _top_of(tops, top_ids, row, SPLITS)
    floor = tl.load(floors + row) if FILTERS else float("-inf")
    total = _sum_of(masses, row, SPLITS)
    purpose = tl.where(there, _RESIDUAL, 0).to(tl.uint32)
    best = tl.full([QUADS], float("-inf"), tl.float32)
    at = tl.full([QUADS], NONE, tl.int32)
    best_residual, at_residual = best, at
    end = tl.minimum((split + 1) * span, vocab)
    first = split * span
    if (temperature <= 0) | (_is_finite(top) == 0):
        end = first  # the largest logit is the token, or none is
    proposed = q + (row - entry) * vocab
    last = tl.where(there, end, 0)  # tokens that the draft proposed
    for begin in range(first, end, 4 * QUADS):
        quad = begin // 4 + tl.arange(0, QUADS)
        words = _words(seed, position + number, quad, purpose)
        for i in tl.static_range(4):
            token = 4 * quad + i
            inside = token < end
            x = widen(tl.load(logits + row * vocab + token, mask=inside, other=float("-inf")))
            relative = (x - top) / temperature
            p = _probability(relative, floor, total)
            noise = log_exponential(words[i])
            plain = tl.where(relative >= floor, relative, float("-inf"))
            score = tl.where(there, tl.log(p), plain) - noise
            best, at = better_of(best, at, tl.where(inside, score, float("-inf")), token)
            other = tl.where(token == draft, 1.0, 0.0)
            if HAS_Q:
                other = tl.load(proposed + token, mask=token < last, other=0.0)
            left = tl.maximum(p - other, 0.0)
            score = tl.where(token < last, tl.log(left) - noise, float("-inf"))
            best_residual, at_residual = better_of(best_residual, at_residual, score, token)
    address = (entry * SPLITS + split) * 2
    _store_best(scores, chosen, address, best_residual, at_residual)
    _store_best(scores, chosen, address + 1, best, at)
    if split == 0:
        tl.store(accepted + entry, number)


@fast_launch
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=_ANY_ADDRESS)
def _emit_kernel(
    drafts, temperatures, tops, top_ids, accepted, scores, chosen, tokens, count,
    SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The accepted drafts of a sequence and the token after them."""
    wait_for_inputs(PDL)
    entry = tl.program_id(0).to(tl.int64)
    number = tl.load(accepted + entry)
    top, largest = _top_of(tops, top_ids, entry * count + number, SPLITS)
    split = (entry * SPLITS + tl.arange(0, SPLITS)) * 2
    residual, first = best_of(tl.load(scores + split), tl.load(chosen + split))
    _, second = best_of(tl.load(scores + split + 1), tl.load(chosen + split + 1))
    token = tl.where(residual > float("-inf"), first, second)
    token = tl.where(tl.load(temperatures + entry) > 0, token, largest)
    token = tl.where(_is_finite(top), token, -1).to(tl.int64)
    for i in range(count):
        draft = tl.load(drafts + entry * (count - 1) + i, mask=i < number, other=-1)
        tl.store(tokens + entry * count + i, tl.where(i == number, token, draft))


@fast_launch
@triton.jit(do_not_specialize=["vocab", "span"])
def _distribution_kernel(
    logits, temperatures, seeds, positions, tops, top_ids, floors, masses, probabilities, scores,
    chosen, vocab, span,
    FILTERS: tl.constexpr, SPLITS: tl.constexpr, QUADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Probabilities of a split of a row, and its best token."""
    wait_for_inputs(PDL)
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row).to(tl.float32)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    top, largest = _top_of(tops, top_ids, row, SPLITS)
    floor = tl.load(floors + row) if FILTERS else float("-inf")
    total = _sum_of(masses, row, SPLITS)
    finite = _is_finite(top)
    best = tl.full([QUADS], float("-inf"), tl.float32)
    at = tl.full([QUADS], NONE, tl.int32)
    end = tl.minimum((split + 1) * span, vocab)
    for begin in range(split * span, end, 4 * QUADS):
        quad = begin // 4 + tl.arange(0, QUADS)
        words = _words(seed, position, quad, _DRAFT)
        for i in tl.static_range(4):
            token = 4 * quad + i
            inside = token < end
            x = widen(tl.load(logits + row * vocab + token, mask=inside, other=float("-inf")))
            relative = (x - top) / tl.where(temperature > 0, temperature, 1.0)
            p = _probability(relative, floor, total)
            p = tl.where(temperature > 0, p, tl.where(token == largest, 1.0, 0.0))
            score = tl.where(inside, tl.log(p) - log_exponential(words[i]), float("-inf"))
            best, at = better_of(best, at, score, token)
            p = tl.where(finite, p, float("nan"))
            tl.store(probabilities + row * vocab + token, p, mask=inside)
    _store_best(scores, chosen, row * SPLITS + split, best, at)


@fast_launch
@triton.jit
def _drawn_kernel(tops, top_ids, scores, chosen, tokens, SPLITS: tl.constexpr, PDL: tl.constexpr):
    """The best token of a row."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    top, _ = _top_of(tops, top_ids, row, SPLITS)
    _, token = _top_of(scores, chosen, row, SPLITS)
    tl.store(tokens + row, tl.where(_is_finite(top), token, -1).to(tl.int64))


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows of logits with their largest, split over CTAs.

    Attributes:
        logits: ``[R, V]``, contiguous.
        count: Rows of each sequence.
        splits: CTAs of a row.
        tops: ``[R, splits]`` float32.
        top_ids: ``[R, splits]`` int32.
    """

    logits: torch.Tensor
    count: int
    splits: int
    tops: torch.Tensor
    top_ids: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, count: int) -> _Rows:
        """Find the largest logit of each row."""
        logits = logits.contiguous()
        rows, vocab = logits.shape
        splits = min(_SPLITS, launch_options.power_of_two(triton.cdiv(vocab, 4 * _QUADS)))
        self = cls(
            logits,
            count,
            splits,
            logits.new_empty((rows, splits), dtype=torch.float32),
            logits.new_empty((rows, splits), dtype=torch.int32),
        )
        with launch_options.on(logits):
            _highest_kernel[(rows, splits)](
                logits, self.tops, self.top_ids, vocab, self.span,
                BLOCK=4 * self.quads, num_warps=4, **launch_options.options(logits),
            )  # fmt: skip
        return self

    @property
    def vocab(self) -> int:
        return self.logits.shape[1]

    @property
    def span(self) -> int:
        """Tokens of a split, a multiple of four."""
        return 4 * triton.cdiv(self.vocab, 4 * self.splits)

    @property
    def quads(self) -> int:
        """Groups of four tokens of a tile."""
        return min(_QUADS, launch_options.power_of_two(self.span // 4))

    def floors(self, args: VerifySampledArgs | DrawDraftArgs) -> torch.Tensor:
        """Return the lowest relative logit that filters keep, ``[R]``; nothing without filters."""
        logits, rows = self.logits, self.logits.shape[0]
        floors = logits.new_empty(rows if args.filters else 0, dtype=torch.float32)
        if not args.filters:
            return floors
        relatives = logits.new_empty(logits.shape, dtype=torch.float32)
        options = launch_options.options(logits)
        temperature = args.temperature.contiguous()
        with launch_options.on(logits):
            _relatives_kernel[(rows, self.splits)](
                logits, temperature, self.tops, self.top_ids, relatives, self.vocab, self.span,
                self.count, SPLITS=self.splits, BLOCK=4 * self.quads, num_warps=4, **options,
            )  # fmt: skip
            _floors_kernel[(rows,)](
                temperature, args.top_p.contiguous(), args.log_min_p.contiguous(),
                args.top_k.contiguous(), self.tops, self.top_ids, relatives, floors, self.vocab,
                self.count, SPLITS=self.splits,
                BLOCK=min(_BLOCK, launch_options.power_of_two(self.vocab)), num_warps=16, **options,
            )  # fmt: skip
        return floors

    def masses(
        self, temperature: torch.Tensor, floors: torch.Tensor, q: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sums of weights ``[R, splits]``, and whether q is not finite, likewise."""
        rows, logits = self.logits.shape[0], self.logits
        masses = logits.new_empty((rows, self.splits), dtype=torch.int64)
        broken = logits.new_empty((rows if q is not None else 0, self.splits), dtype=torch.int32)
        with launch_options.on(logits):
            _masses_kernel[(rows, self.splits)](
                logits, self.tops if q is None else q, temperature, self.tops, self.top_ids, floors,
                masses, broken, self.vocab, self.span, self.count,
                HAS_Q=q is not None, FILTERS=floors.numel() > 0, SPLITS=self.splits,
                BLOCK=4 * self.quads, num_warps=4, **launch_options.options(logits),
            )  # fmt: skip
        return masses, broken


def _results(logits: torch.Tensor) -> Pair:
    batch, count, _ = logits.shape
    accepted = torch.empty(batch, dtype=torch.int64, device=logits.device)
    return accepted, torch.empty((batch, count), dtype=torch.int64, device=logits.device)


def verify_greedy(args: VerifyGreedyArgs) -> Pair:
    """See ``dsv4.ops.verify.verify_greedy``."""
    accepted, tokens = _results(args.logits)
    batch, count = tokens.shape
    if not batch:
        return accepted, tokens
    rows = _Rows.of(args.logits.flatten(0, 1), count)
    with launch_options.on(tokens):
        _greedy_kernel[(batch,)](
            rows.tops, rows.top_ids, args.drafts.contiguous(), accepted, tokens, count,
            SPLITS=rows.splits, num_warps=1, **launch_options.options(tokens),
        )  # fmt: skip
    return accepted, tokens


def verify_sampled(args: VerifySampledArgs) -> Pair:
    """See ``dsv4.ops.verify.verify_sampled``."""
    accepted, tokens = _results(args.logits)
    batch, count = tokens.shape
    if not batch:
        return accepted, tokens
    rows = _Rows.of(args.logits.flatten(0, 1), count)
    drafts, temperature = args.drafts.contiguous(), args.temperature.contiguous()
    q = args.probabilities.contiguous() if args.probabilities is not None and count > 1 else None
    floors = rows.floors(args)
    masses, broken = rows.masses(temperature, floors, q)
    scores = torch.empty((batch, rows.splits, 2), dtype=torch.float32, device=tokens.device)
    chosen = torch.empty((batch, rows.splits, 2), dtype=torch.int32, device=tokens.device)
    options = launch_options.options(tokens)
    with launch_options.on(tokens):
        _candidates_kernel[(batch, rows.splits)](
            rows.logits, rows.tops if q is None else q, drafts, temperature,
            args.seed.contiguous(), args.position.contiguous(), rows.tops, rows.top_ids, floors,
            masses, broken, accepted, scores, chosen, rows.vocab, rows.span, count,
            HAS_Q=q is not None, FILTERS=args.filters, SPLITS=rows.splits, QUADS=rows.quads,
            num_warps=4, **options,
        )  # fmt: skip
        _emit_kernel[(batch,)](
            drafts, temperature, rows.tops, rows.top_ids, accepted, scores, chosen, tokens, count,
            SPLITS=rows.splits, num_warps=1, **options,
        )  # fmt: skip
    return accepted, tokens


def draw_draft(args: DrawDraftArgs) -> Pair:
    """See ``dsv4.ops.verify.draw_draft``."""
    batch, vocab = args.logits.shape
    device = args.logits.device
    tokens = torch.empty(batch, dtype=torch.int64, device=device)
    probabilities = torch.empty((batch, vocab), dtype=torch.float32, device=device)
    if not batch:
        return tokens, probabilities
    rows = _Rows.of(args.logits, 1)
    temperature = args.temperature.contiguous()
    floors = rows.floors(args)
    masses, _ = rows.masses(temperature, floors, None)
    scores = torch.empty((batch, rows.splits), dtype=torch.float32, device=device)
    chosen = torch.empty((batch, rows.splits), dtype=torch.int32, device=device)
    options = launch_options.options(tokens)
    with launch_options.on(tokens):
        _distribution_kernel[(batch, rows.splits)](
            rows.logits, temperature, args.seed.contiguous(), args.position.contiguous(),
            rows.tops, rows.top_ids, floors, masses, probabilities, scores, chosen, vocab,
            rows.span, FILTERS=args.filters, SPLITS=rows.splits, QUADS=rows.quads, num_warps=4,
            **options,
        )  # fmt: skip
        _drawn_kernel[(batch,)](
            rows.tops, rows.top_ids, scores, chosen, tokens,
            SPLITS=rows.splits, num_warps=1, **options,
        )  # fmt: skip
    return tokens, probabilities
