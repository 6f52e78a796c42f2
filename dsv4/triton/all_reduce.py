"""Push all-reduce: each rank stores its partial sum in all ranks' mailboxes, and adds what it got.

A program has one chunk of up to 1024 elements of a row: it stores the chunk in the N mailboxes over
NVLink, sets one flag in each, waits for the N flags of this chunk in its own mailbox, and adds the
slots in rank order in float32. One launch, no barrier over the GPU, one trip over NVLink between
the last rank's store and everybody's sum. For ``hc_reduce_post`` and ``hc_reduce_post_pre_norm``
the launch only pushes, and the kernel of the hyper-connection waits and adds.

No deadlock: a program pushes before it waits, and what it waits for are programs of the same number
on the peers, of launches whose programs all fit on a GPU (``supports.push`` bounds their number).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.ops._library import as_record
from dsv4.ops.all_reduce import AllReduceArgs, HcReducePostArgs, HcReducePostPreNormArgs
from dsv4.ops.hyper_connection import HcPostArgs, HcPostPreNormArgs
from dsv4.parallel import mailboxes
from dsv4.parallel.mailboxes import Mailbox
from dsv4.triton._lib.mailbox import (
    CHUNK,
    GENERATIONS,
    PushedSum,
    add_slots,
    count_call,
    next_call,
    push_chunk,
    wait_for_chunk,
)
from dsv4.triton._lib.numerics import wait_for_inputs
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch
from dsv4.triton.hyper_connection import (
    hc_post,
    hc_post_pre_norm,
    reduced_post,
    reduced_post_pre_norm,
)

_WARPS = 4  # 16 bytes of a chunk to a thread


@fast_launch
@triton.jit(do_not_specialize=["rank", "chunks_of_row"])
def _push_kernel(
    partial,
    out,
    slots,
    flags,
    own_slots,
    own_flags,
    counter,
    rank,
    width,
    chunks_of_row,
    capacity,
    chunks,
    RANKS: tl.constexpr,
    PUSH: tl.constexpr,
    SUM: tl.constexpr,
    GATHER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Push a chunk (PUSH), and wait for it and add it up (SUM); without PUSH another launch did.

    With GATHER ``out`` gets what each rank pushed, one after another, in place of the sum.
    """
    wait_for_inputs(PDL)
    chunk = tl.program_id(0)
    row = (chunk // chunks_of_row).to(tl.int64)
    column = (chunk % chunks_of_row) * CHUNK + tl.arange(0, CHUNK)
    inside = column < width
    offset = row * width + column
    if PUSH:
        call = next_call(counter)
        values = tl.load(partial + offset, mask=inside, other=0.0)
        push_chunk(values, slots, flags, call, rank, offset, inside, chunk, capacity, chunks, RANKS)
    else:
        call = tl.load(counter)
    if SUM:
        wait_for_chunk(own_flags, call, chunk, chunks, RANKS)
        dtype: tl.constexpr = out.dtype.element_ty
        total = add_slots(own_slots, call, offset, inside, capacity, dtype, RANKS)
        tl.store(out + offset, total, mask=inside)
    if GATHER:
        wait_for_chunk(own_flags, call, chunk, chunks, RANKS)
        at = own_slots + ((call % GENERATIONS) * RANKS).to(tl.int64) * capacity + offset
        for i in tl.static_range(RANKS):
            bits = tl.load(at + i * capacity, mask=inside)
            tl.store(out + i * width + offset, bits, mask=inside)
    if PUSH:
        count_call(counter, call)


def _launch(
    mailbox: Mailbox,
    rows: torch.Tensor,
    out: torch.Tensor | None,
    *,
    is_push: bool,
    is_sum: bool,
    is_gather: bool = False,
) -> None:
    """Launch for a contiguous ``rows [R, W]``.

    Raises:
        ValueError: if it does not fit a slot.
    """
    width = rows.shape[1]
    unfit = mailbox.unfit(rows.shape[0], width)
    if unfit:
        raise ValueError(unfit)
    chunks_of_row = -(-width // mailboxes.CHUNK)
    own = mailbox.rank
    with launch_options.on(rows):
        _push_kernel[(rows.shape[0] * chunks_of_row,)](
            rows,
            out,
            tuple(mailbox.slots[peer] for peer in mailbox.peers),
            tuple(mailbox.flags[peer] for peer in mailbox.peers),
            mailbox.slots[own],
            mailbox.flags[own],
            mailbox.counter,
            own,
            width,
            chunks_of_row,
            mailbox.capacity,
            mailbox.chunks,
            RANKS=mailbox.ranks,
            PUSH=is_push,
            SUM=is_sum,
            GATHER=is_gather,
            num_warps=_WARPS,
            **launch_options.options(rows),
        )


def push(mailbox: Mailbox, partial: torch.Tensor) -> PushedSum:
    """Store a partial sum ``[..., H]`` in all mailboxes, by rows; return what the ranks pushed."""
    _launch(mailbox, _rows(partial), None, is_push=True, is_sum=False)
    return PushedSum(mailbox)


def push_flat(mailbox: Mailbox, partial: torch.Tensor) -> None:
    """Store a partial sum in all mailboxes, for ``sum_pushed``."""
    _launch(mailbox, _flat(partial), None, is_push=True, is_sum=False)


def sum_pushed(mailbox: Mailbox, partial: torch.Tensor) -> torch.Tensor:
    """Return the sum of what all ranks pushed with ``push_flat``, in the shape of ``partial``."""
    out = torch.empty_like(partial, memory_format=torch.contiguous_format)
    if partial.numel():
        _launch(mailbox, _flat(partial), _flat(out), is_push=False, is_sum=True)
    return out


def exchange(mailbox: Mailbox, partial: torch.Tensor) -> torch.Tensor:
    """Push a partial sum and return the sum of all ranks', in one launch."""
    out = torch.empty_like(partial, memory_format=torch.contiguous_format)
    if partial.numel():
        _launch(mailbox, _flat(partial), _flat(out), is_push=True, is_sum=True)
    return out


def gathered(mailbox: Mailbox, values: torch.Tensor) -> torch.Tensor:
    """Push bfloat16 ``values [n]`` and return those of all ranks ``[N, n]``, in one launch."""
    out = values.new_empty((mailbox.ranks, values.shape[0]))
    _launch(mailbox, _flat(values), out, is_push=True, is_sum=False, is_gather=True)
    return out


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(1, -1)


def _mailbox(group: str) -> Mailbox:
    mailbox = mailboxes.of_group(group)
    assert mailbox is not None, "supports.push asks for it"
    return mailbox


def all_reduce(args: AllReduceArgs) -> torch.Tensor:
    """See ``dsv4.ops.all_reduce.all_reduce``."""
    return exchange(_mailbox(args.group), args.partial)


def hc_reduce_post_pre_norm(
    args: HcReducePostPreNormArgs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.all_reduce.hc_reduce_post_pre_norm``."""
    after = as_record(HcPostPreNormArgs, args, y=args.partial)
    if args.partial.numel() == 0:
        return hc_post_pre_norm(after)
    return reduced_post_pre_norm(after, push(_mailbox(args.group), args.partial))


def hc_reduce_post(args: HcReducePostArgs) -> torch.Tensor:
    """See ``dsv4.ops.all_reduce.hc_reduce_post``."""
    after = as_record(HcPostArgs, args, y=args.partial)
    if args.partial.numel() == 0:
        return hc_post(after)
    return reduced_post(after, push(_mailbox(args.group), args.partial))
