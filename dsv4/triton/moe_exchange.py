"""Push tokens to the ranks of their experts, and results back, through mailboxes.

Four launches: ``_send_kernel`` stores each token in the mailbox of every rank that holds one of its
experts, and its ids and weights in all; ``_receive_kernel`` waits for them and copies them to
tensors whose addresses a CUDA graph knows. ``_return_kernel`` stores each row's result in the
mailbox of the token's rank, and ``_collect_kernel`` waits and adds.

Row t of a slot of rank s holds token t of rank s on its way out, and on its way back the part of
rank s of the receiver's token t. Every row has a flag, which is set whether the row was stored or
not: so each call needs each peer's, on which the mailboxes' generations rely
(``dsv4/parallel/mailboxes.py``). Kernels that wait push nothing, and those that push wait for
nothing, so ranks cannot wait for each other in a circle, however few programs a GPU holds.

``distinct`` is 1. In an emulated group it is 0: all ranks are rank 0, and hold its experts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dsv4.ops.moe_exchange import (
    MoeReturnArgs,
    MoeSendArgs,
    Received,
    empty_rows,
    experts_of_rank,
)
from dsv4.parallel import mailboxes
from dsv4.parallel.mailboxes import Mailbox
from dsv4.parallel.token_rows import RowLayout
from dsv4.triton._lib.mailbox import (
    GENERATIONS,
    count_call,
    next_call,
    set_flag_of,
    set_flags,
    wait_for_chunk,
)
from dsv4.triton._lib.numerics import narrow, wait_for_inputs, widen
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

_ROW_BLOCK, _ROW_WARPS = 2048, 8  # a row of 4096 values: twice 16 bytes a thread
_SUM_BLOCK, _SUM_WARPS = 1024, 4


@triton.jit
def _owner(ids, at, exists, experts):
    """Load the ids of a token; return them and the ranks that hold them, -1 for none."""
    chosen = tl.load(ids + at, mask=exists, other=-1).to(tl.int32)
    return chosen, tl.where(chosen >= 0, chosen // experts, -1)


@triton.jit
def _is_among(ranks, rank):
    """Return whether a rank is one of them."""
    return tl.sum((ranks == rank).to(tl.int32), 0) > 0


@fast_launch
@triton.jit(do_not_specialize=["rank", "distinct", "experts"])
def _send_kernel(
    x,
    ids,
    weights,
    slots,
    flags,
    counter,
    rank,
    distinct,
    experts,
    hidden,
    row_elements,
    capacity,
    chunks,
    CHOICES: tl.constexpr,
    LANES: tl.constexpr,
    HEAD: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Push one token, with its ids and weights."""
    wait_for_inputs(PDL)
    token = tl.program_id(0)
    choice = tl.arange(0, LANES)
    exists = choice < CHOICES
    chosen, owners = _owner(ids, token.to(tl.int64) * CHOICES + choice, exists, experts)
    weight = widen(tl.load(weights + token.to(tl.int64) * CHOICES + choice, mask=exists, other=0.0))
    call = next_call(counter)
    slot = (call % GENERATIONS) * RANKS + rank
    at = slot.to(tl.int64) * capacity + token.to(tl.int64) * row_elements
    for i in tl.static_range(RANKS):
        head = (slots[i] + at).to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(head + choice, chosen, mask=exists)
        tl.store(head + CHOICES + choice, weight.to(tl.int32, bitcast=True), mask=exists)
    for start in range(0, hidden, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < hidden
        values = tl.load(x + token.to(tl.int64) * hidden + column, mask=inside, other=0.0)
        for i in tl.static_range(RANKS):
            if _is_among(owners, ((rank + 1 + i) % RANKS) * distinct):
                tl.store(slots[i] + at + HEAD + column, values, mask=inside)
    set_flags(flags, slot * chunks + token, call, RANKS)
    count_call(counter, call)


@fast_launch
@triton.jit(do_not_specialize=["rank", "experts", "tokens"])
def _receive_kernel(
    rows,
    received,
    row_weights,
    slots,
    flags,
    counter,
    rank,
    experts,
    tokens,
    hidden,
    row_elements,
    capacity,
    chunks,
    CHOICES: tl.constexpr,
    LANES: tl.constexpr,
    HEAD: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Wait for one token of one rank; copy it if it has an expert here."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    source, token = row // tokens, row % tokens
    call = tl.load(counter)
    wait_for_chunk(flags, call, token, chunks, RANKS)
    slot = (call % GENERATIONS) * RANKS + source
    at = slots + slot.to(tl.int64) * capacity + token.to(tl.int64) * row_elements
    choice = tl.arange(0, LANES)
    exists = choice < CHOICES
    head = at.to(tl.pointer_type(tl.int32), bitcast=True)
    chosen, owners = _owner(head, choice, exists, experts)
    weight = tl.load(head + CHOICES + choice, mask=exists, other=0).to(tl.float32, bitcast=True)
    is_here = _is_among(owners, rank)
    out = row.to(tl.int64) * CHOICES + choice
    tl.store(received + out, tl.where(is_here, chosen, -1), mask=exists)
    weight = narrow(tl.where(is_here, weight, 0.0), row_weights.dtype.element_ty)
    tl.store(row_weights + out, weight, mask=exists)
    if is_here:
        for start in range(0, hidden, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < hidden
            values = tl.load(at + HEAD + column, mask=inside, other=0.0)
            tl.store(rows + row.to(tl.int64) * hidden + column, values, mask=inside)


@fast_launch
@triton.jit(do_not_specialize=["rank", "tokens"])
def _return_kernel(
    y,
    received,
    slots,
    flags,
    counter,
    rank,
    tokens,
    hidden,
    row_elements,
    capacity,
    chunks,
    CHOICES: tl.constexpr,
    LANES: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Push one row's result to the token's rank, if the token has an expert here."""
    wait_for_inputs(PDL)
    peer, token = tl.program_id(0) // tokens, tl.program_id(0) % tokens
    row = ((rank + 1 + peer) % RANKS) * tokens + token
    choice = tl.arange(0, LANES)
    ids = received + row.to(tl.int64) * CHOICES + choice
    is_here = tl.max(tl.load(ids, mask=choice < CHOICES, other=-1), 0) >= 0
    call = next_call(counter)
    slot = (call % GENERATIONS) * RANKS + rank
    at = slot.to(tl.int64) * capacity + token.to(tl.int64) * row_elements
    if is_here:
        for start in range(0, hidden, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < hidden
            values = tl.load(y + row.to(tl.int64) * hidden + column, mask=inside, other=0.0)
            for i in tl.static_range(RANKS):
                if i == peer:
                    tl.store(slots[i] + at + column, values, mask=inside)
    set_flag_of(flags, peer, slot * chunks + token, call, RANKS)
    count_call(counter, call)


@fast_launch
@triton.jit(do_not_specialize=["distinct", "experts"])
def _collect_kernel(
    out,
    ids,
    shared,
    slots,
    flags,
    counter,
    distinct,
    experts,
    hidden,
    row_elements,
    capacity,
    chunks,
    CHOICES: tl.constexpr,
    LANES: tl.constexpr,
    SHARED: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Wait for all ranks' parts of a token; add columns of those that hold one of its experts.

    A sum that began with +0 is never -0, so a rank that is left out may add +0.
    """
    wait_for_inputs(PDL)
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    choice = tl.arange(0, LANES)
    at = token.to(tl.int64) * CHOICES + choice
    _, owners = _owner(ids, at, choice < CHOICES, experts)
    offset = token.to(tl.int64) * hidden + column
    call = tl.load(counter)
    wait_for_chunk(flags, call, token, chunks, RANKS)
    slot = slots + ((call % GENERATIONS) * RANKS).to(tl.int64) * capacity
    slot += token.to(tl.int64) * row_elements
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for source in tl.static_range(RANKS):
        end = tl.where(_is_among(owners, source * distinct), hidden, 0)
        total += widen(tl.load(slot + column, mask=column < end, other=0.0))
        slot += capacity
    if SHARED:
        total += widen(tl.load(shared + offset, mask=inside, other=0.0))
    tl.store(out + offset, narrow(total, out.dtype.element_ty), mask=inside)


def _constants(mailbox: Mailbox, layout: RowLayout) -> dict[str, int]:
    return {
        "CHOICES": layout.choices,
        "LANES": triton.next_power_of_2(layout.choices),
        "RANKS": mailbox.ranks,
    }


def _sizes(mailbox: Mailbox, layout: RowLayout) -> tuple[int, ...]:
    return layout.hidden, layout.elements, mailbox.capacity, mailbox.chunks


def _distinct(mailbox: Mailbox) -> int:
    return int(not mailbox.are_copies)


def _peers(mailbox: Mailbox) -> tuple[Any, Any, torch.Tensor]:
    """Return slots and flags of all ranks in the order of writing, and the counter."""
    return (
        tuple(mailbox.slots[peer] for peer in mailbox.peers),
        tuple(mailbox.flags[peer] for peer in mailbox.peers),
        mailbox.counter,
    )


def _own(mailbox: Mailbox) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return mailbox.slots[mailbox.rank], mailbox.flags[mailbox.rank], mailbox.counter


def _check_fit(mailbox: Mailbox, layout: RowLayout, tokens: int) -> None:
    unfit = layout.unfit(mailbox, tokens)
    if unfit:
        raise ValueError(unfit)


def push_tokens(mailbox: Mailbox, args: MoeSendArgs) -> None:
    """Store this rank's tokens in mailboxes.

    Raises:
        ValueError: if they do not fit a slot, or the ranks do not divide the experts.
    """
    layout, tokens = RowLayout.of(args.x, args.ids), args.x.shape[0]
    _check_fit(mailbox, layout, tokens)
    experts = experts_of_rank(args.num_experts, mailbox.ranks, "moe_send")
    if tokens == 0:
        return
    x = args.x.contiguous()
    with launch_options.on(x):
        _send_kernel[(tokens,)](
            x,
            args.ids.contiguous(),
            args.weights.contiguous(),
            *_peers(mailbox),
            mailbox.rank,
            _distinct(mailbox),
            experts,
            *_sizes(mailbox, layout),
            **_constants(mailbox, layout),
            HEAD=layout.head,
            BLOCK=_ROW_BLOCK,
            num_warps=_ROW_WARPS,
            **launch_options.options(x),
        )


def receive_tokens(mailbox: Mailbox, args: MoeSendArgs) -> Received:
    """Wait for all ranks' ``push_tokens`` and return what is for this one."""
    results = empty_rows(args, mailbox.ranks)
    layout, tokens = RowLayout.of(args.x, args.ids), args.x.shape[0]
    if tokens:
        with launch_options.on(args.x):
            _receive_kernel[(mailbox.ranks * tokens,)](
                *results,
                *_own(mailbox),
                mailbox.rank,
                args.num_experts // mailbox.ranks,
                tokens,
                *_sizes(mailbox, layout),
                **_constants(mailbox, layout),
                HEAD=layout.head,
                BLOCK=_ROW_BLOCK,
                num_warps=_ROW_WARPS,
                **launch_options.options(args.x),
            )
    return results


def push_results(mailbox: Mailbox, args: MoeReturnArgs) -> None:
    """Store the results of received rows in the mailboxes of the tokens' ranks.

    Raises:
        ValueError: if they do not fit a slot.
    """
    layout, tokens = RowLayout.of(args.y, args.ids), args.ids.shape[0]
    _check_fit(mailbox, layout, tokens)
    if tokens == 0:
        return
    y = args.y.contiguous()
    with launch_options.on(y):
        _return_kernel[(mailbox.ranks * tokens,)](
            y,
            args.received.contiguous(),
            *_peers(mailbox),
            mailbox.rank,
            tokens,
            *_sizes(mailbox, layout),
            **_constants(mailbox, layout),
            BLOCK=_ROW_BLOCK,
            num_warps=_ROW_WARPS,
            **launch_options.options(y),
        )


def sum_results(mailbox: Mailbox, args: MoeReturnArgs) -> torch.Tensor:
    """Wait for all ranks' ``push_results`` and return the sums of this rank's tokens."""
    layout, tokens = RowLayout.of(args.y, args.ids), args.ids.shape[0]
    out = args.y.new_empty((tokens, layout.hidden))
    if out.numel():
        with launch_options.on(out):
            _collect_kernel[(tokens, triton.cdiv(layout.hidden, _SUM_BLOCK))](
                out,
                args.ids.contiguous(),
                None if args.shared is None else args.shared.contiguous(),
                *_own(mailbox),
                _distinct(mailbox),
                experts_of_rank(args.num_experts, mailbox.ranks, "moe_return"),
                *_sizes(mailbox, layout),
                **_constants(mailbox, layout),
                SHARED=args.shared is not None,
                BLOCK=_SUM_BLOCK,
                num_warps=_SUM_WARPS,
                **launch_options.options(out),
            )
    return out


def _mailbox(group: str) -> Mailbox:
    mailbox = mailboxes.of_group(group)
    assert mailbox is not None, "supports asks for it"
    return mailbox


def moe_send(args: MoeSendArgs) -> Received:
    """See ``dsv4.ops.moe_exchange.moe_send``."""
    mailbox = _mailbox(args.group)
    push_tokens(mailbox, args)
    return receive_tokens(mailbox, args)


def moe_return(args: MoeReturnArgs) -> torch.Tensor:
    """See ``dsv4.ops.moe_exchange.moe_return``."""
    mailbox = _mailbox(args.group)
    push_results(mailbox, args)
    return sum_results(mailbox, args)
