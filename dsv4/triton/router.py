"""Kernels of ``dsv4.ops.router``: top-k and weights of logits, or weights of a table's experts.

``_lib/router_logits.py`` has the split-K GEMM of the logits. A program of the kernels here owns a
token: it sums the token's partial logits, chooses experts and computes their weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.ops.router import RouteHashArgs, RouteTopkArgs, check_ids
from dsv4.triton._lib.numerics import narrow, wait_for_inputs, widen
from dsv4.triton._lib.prefetch import prefetch_row
from dsv4.triton._lib.router_logits import partial_logits
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

_NONE = tl.constexpr(-0x80000000)  # below the key of every score
_INFINITY = tl.constexpr(0x7F800000)
_LOG2E = tl.constexpr(1.4426950408889634)
_LOG2E_LOW = tl.constexpr(1.925963033500011e-08)  # log2(e) less its float32 value
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _exp_of_minus(a):
    """``exp(-a)`` for a >= 0, float32 with its subnormal numbers, to 5 units of 2^-24.

    The exponent of 2 is a sum of two numbers: rounded to one, an exponent near 100 would be off by
    as much as the result has bits. Results that a power instruction would flush to zero are
    computed at 2^32 times their size.
    """
    a = tl.minimum(a, 200.0)
    high = a * _LOG2E
    low = tl.fma(a, _LOG2E, -high) + a * _LOG2E_LOW
    small = high > 100.0
    power = tl.exp2(tl.where(small, 32.0, 0.0) - high)
    return tl.fma(power, low * -_LN2, power) * tl.where(small, 2.0**-32, 1.0)


@triton.jit
def _quotient(a, b):
    """``a / b`` for b that is neither tiny nor huge: an approximate one and its remainder."""
    inverse = 1.0 / b
    quotient = a * inverse
    return tl.fma(tl.fma(-quotient, b, a), inverse, quotient)


@triton.jit
def _log1p(t):
    """``log(1 + t)`` for t in [0, 1], to 4 units of 2^-24.

    ``2 artanh(t / (2 + t))``, whose series in the square of that quotient, at most 1/9, is cut off
    below 2^-26.
    """
    double = _quotient(t, tl.fma(t, 0.5, 1.0))
    square = double * double * 0.25
    series = tl.fma(square, 1.0 / 13.0, 1.0 / 11.0)
    series = tl.fma(square, series, 1.0 / 9.0)
    series = tl.fma(square, series, 1.0 / 7.0)
    series = tl.fma(square, series, 0.2)
    series = tl.fma(square, series, 1.0 / 3.0)
    return tl.fma(double, square * series, double)


@triton.jit
def _sqrt_softplus(logit):
    """``sqrt(log(1 + exp(logit)))``; it underflows where the softplus does in float32.

    The instruction for roots, too, takes subnormal numbers for zero.
    """
    soft = _log1p(_exp_of_minus(tl.abs(logit))) + tl.maximum(logit, 0.0)
    small = soft < 2.0**-64
    root = tl.sqrt(soft * tl.where(small, 2.0**64, 1.0)) * tl.where(small, 2.0**-32, 1.0)
    return tl.where(logit != logit, float("nan"), root)


@triton.jit
def _key_of(score):
    """int32 that orders as float32 does: zeros are equal, every NaN is the highest."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(score != score, 0x7FFFFFFF, key)


@triton.jit
def _token_logits(
    partials,
    logits,
    token,
    tokens,
    EXPERTS: tl.constexpr,
    SPLITS: tl.constexpr,
    STORED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Summed logits of a token, ``[BLOCK]``, stored unless they are; and 1 if all are finite."""
    expert = tl.arange(0, BLOCK)
    inside = expert < EXPERTS
    logit = _summed(partials, token, tokens, expert, inside, EXPERTS, SPLITS)
    logit = narrow(logit, logits.dtype.element_ty)
    if not STORED:
        tl.store(logits + token * EXPERTS + expert, logit, mask=inside)
    logit = widen(logit)
    # As integers, magnitudes order with NaN above Inf above every number.
    largest = tl.max(logit.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    return logit, tl.where(largest < _INFINITY, 1, 0)


@triton.jit
def _summed(partials, token, tokens, expert, inside, EXPERTS: tl.constexpr, SPLITS: tl.constexpr):
    partials += token * EXPERTS + expert
    logit = tl.load(partials, mask=inside, other=0.0)
    for i in tl.static_range(1, SPLITS):
        logit += tl.load(partials + i * (tokens.to(tl.int64) * EXPERTS), mask=inside, other=0.0)
    return logit


@triton.jit
def _is_left_out(routed, token, may_leave_out):
    """Whether a token goes to no expert; nothing is read if that holds for none."""
    return tl.load(routed + token, mask=may_leave_out != 0, other=0) < 0


@triton.jit
def _store_experts(weights, ids, offset, mask, left_out, experts, chosen, total, factor, good):
    experts = tl.where(left_out, -1, experts)
    weight = _quotient(chosen, total + 1e-20) * factor
    tl.store(weights + offset, tl.where(good == 1, weight, float("nan")), mask=mask)
    tl.store(ids + offset, experts.to(tl.int64), mask=mask)


@fast_launch
@triton.jit(do_not_specialize=["tokens", "top_k", "may_leave_out"])
def _topk_kernel(
    partials,
    logits,
    bias,
    routed,
    weights,
    ids,
    tokens,
    top_k,
    may_leave_out,
    factor,
    EXPERTS: tl.constexpr,
    SPLITS: tl.constexpr,
    STORED: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one token's logits, experts and weights. Scores and keys stay in registers.

    A round takes the highest key and of those that have it the lowest expert, and removes it.
    """
    if BIASED and tl.program_id(0) == 0:
        prefetch_row(bias, EXPERTS, BLOCK)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    left_out = _is_left_out(routed, token, may_leave_out)
    expert = tl.arange(0, BLOCK)
    inside = expert < EXPERTS
    logit, good = _token_logits(partials, logits, token, tokens, EXPERTS, SPLITS, STORED, BLOCK)
    scores = _sqrt_softplus(logit)
    biased = scores
    if BIASED:
        biased = scores + widen(tl.load(bias + expert, mask=inside, other=0.0))
    keys = tl.where(inside, _key_of(biased), _NONE)
    bits = tl.where(inside, scores, 0.0).to(tl.int32, bitcast=True)
    slot = tl.arange(0, SLOTS)
    experts = tl.zeros([SLOTS], tl.int32)
    chosen = tl.zeros([SLOTS], tl.float32)
    total = 0.0
    for j in range(top_k):
        best = tl.min(tl.where(keys == tl.max(keys, 0), expert, BLOCK), 0)
        keys = tl.where(expert == best, _NONE, keys)
        # No score is negative, so that its bits order as it does.
        score = tl.max(tl.where(expert == best, bits, 0), 0).to(tl.float32, bitcast=True)
        total += score
        experts = tl.where(slot == j, best, experts)
        chosen = tl.where(slot == j, score, chosen)
    offset, mask = token * top_k + slot, slot < top_k
    _store_experts(weights, ids, offset, mask, left_out, experts, chosen, total, factor, good)


# Ids are read one by one, and those of a decode step may be a slice of all tokens, at any address.
@fast_launch
@triton.jit(
    do_not_specialize=["tokens", "vocabulary", "top_k", "may_leave_out"],
    do_not_specialize_on_alignment=["input_ids"],
)
def _hash_kernel(
    partials,
    logits,
    table,
    input_ids,
    routed,
    weights,
    ids,
    tokens,
    vocabulary,
    top_k,
    may_leave_out,
    factor,
    EXPERTS: tl.constexpr,
    SPLITS: tl.constexpr,
    STORED: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one token's logits, and the scores of the experts that the table has for its word."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    left_out = _is_left_out(routed, token, may_leave_out)
    word = tl.load(input_ids + token).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    offset = tl.maximum(tl.minimum(word, vocabulary - 1), 0) * top_k + slot
    entry = tl.load(table + offset, mask=slot < top_k, other=0).to(tl.int64)
    expert = tl.maximum(tl.minimum(entry, EXPERTS - 1), 0).to(tl.int32)
    _, good = _token_logits(partials, logits, token, tokens, EXPERTS, SPLITS, STORED, BLOCK)
    good = tl.where((word >= 0) & (word < vocabulary), good, 0)
    good = tl.minimum(good, tl.min((entry == expert).to(tl.int32), 0))
    mask = slot < top_k
    own = _summed(partials, token, tokens, expert, mask, EXPERTS, SPLITS)
    scores = _sqrt_softplus(widen(narrow(own, logits.dtype.element_ty)))
    scores = tl.where(mask, scores, 0.0)
    offset = token * top_k + slot
    total = tl.sum(scores, 0)
    _store_experts(weights, ids, offset, mask, left_out, expert, scores, total, factor, good)


def _topk_warps(block: int) -> int:
    """Return the warps: one needs no exchange through shared memory, but few logits a thread."""
    return min(16, max(1, block // 1024))


def _route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    table: torch.Tensor | None,
    input_ids: torch.Tensor | None,
    top_k: int,
    scaling_factor: float,
    logits_dtype: torch.dtype,
    routed: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, experts = x.shape[0], weight.shape[0]
    logits = x.new_empty((tokens, experts), dtype=logits_dtype)
    weights = x.new_empty((tokens, top_k), dtype=torch.float32)
    ids = x.new_empty((tokens, top_k), dtype=torch.int64)
    if logits.numel() == 0:
        return logits, weights, ids
    partials = partial_logits(x, weight, logits)
    block = launch_options.power_of_two(experts)
    options = {
        "EXPERTS": experts,
        "SPLITS": partials.shape[0],
        # From sizes, not from addresses: kernels are listed on the meta device, where all are 0.
        "STORED": x.shape[1] > 0 and partials.shape[0] == 1 and logits.dtype == torch.float32,
        "BLOCK": block,
        "SLOTS": launch_options.power_of_two(top_k),
        "num_warps": _topk_warps(block),
        **launch_options.options(x),
    }
    # Without it any int64 tensor stands for it, so that there is no further kernel.
    may_leave_out = int(routed is not None)
    routed = ids if routed is None else routed.contiguous()
    with launch_options.on(x):
        if table is None:
            _topk_kernel[(tokens,)](
                partials,
                logits,
                None if bias is None else bias.contiguous(),
                routed,
                weights,
                ids,
                tokens,
                top_k,
                may_leave_out,
                scaling_factor,
                BIASED=bias is not None,
                **options,
            )
        else:
            _hash_kernel[(tokens,)](
                partials,
                logits,
                table,
                input_ids,
                routed,
                weights,
                ids,
                tokens,
                table.shape[0],
                top_k,
                may_leave_out,
                scaling_factor,
                **options,
            )
    return logits, weights, ids


def route_topk(args: RouteTopkArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.router.route_topk``."""
    return _route(
        args.x,
        args.weight,
        args.bias,
        None,
        None,
        args.top_k,
        args.scaling_factor,
        args.logits_dtype,
        args.routed,
    )


def route_hash(args: RouteHashArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.router.route_hash``."""
    check_ids(args.tid2eid, args.input_ids, args.weight.shape[0])
    table, words = args.tid2eid.contiguous(), args.input_ids.contiguous()
    top_k = args.tid2eid.shape[1]
    return _route(
        args.x,
        args.weight,
        None,
        table,
        words,
        top_k,
        args.scaling_factor,
        args.logits_dtype,
        args.routed,
    )
