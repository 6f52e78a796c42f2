"""Sums over ranks by libraries: NCCL, and the kernels of torch's symmetric memory."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dsv4 import dispatch
from dsv4.ops._library import as_record
from dsv4.ops.all_reduce import AllReduceArgs, HcReducePostArgs, HcReducePostPreNormArgs
from dsv4.ops.hyper_connection import HcPostArgs, HcPostPreNormArgs
from dsv4.parallel import groups, mailboxes


def nccl(args: AllReduceArgs) -> torch.Tensor:
    """Sum with NCCL, which all ranks give the same bits: an element is summed once, then copied."""
    total = args.partial.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=groups.resolve(args.group))
    return total


def one_shot(args: AllReduceArgs) -> torch.Tensor:
    """Copy to symmetric memory and read all ranks' copies, in one launch.

    torch adds in rank order, whatever the rank, and rounds every addition to bfloat16.
    """
    buffer = _workspace(args)
    return torch.ops.symm_mem.one_shot_all_reduce_copy(
        buffer, args.partial.contiguous(), "sum", args.group
    )


def two_shot(args: AllReduceArgs) -> torch.Tensor:
    """Sum a part of the elements on each rank in symmetric memory, then collect all parts.

    torch adds in rank order and rounds every addition to bfloat16.
    """
    buffer = _workspace(args)
    buffer.copy_(args.partial)
    torch.ops.symm_mem.two_shot_all_reduce_(buffer, "sum", args.group)
    return buffer.clone()


def _workspace(args: AllReduceArgs) -> torch.Tensor:
    """Return the beginning of the group's symmetric buffer in the shape of the partial sum."""
    mailbox = mailboxes.of_group(args.group)
    assert mailbox is not None, "supports asks for it"
    assert mailbox.workspace is not None, "supports asks for it"
    return mailbox.workspace[: args.partial.numel()].view(args.partial.shape)


def hc_reduce_post(args: HcReducePostArgs) -> torch.Tensor:
    """Run both operators, one after the other, as ``"auto"`` chooses each."""
    y = dispatch.first("all_reduce", as_record(AllReduceArgs, args))
    return dispatch.first("hc_post", as_record(HcPostArgs, args, y=y))


def hc_reduce_post_pre_norm(
    args: HcReducePostPreNormArgs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run both operators, one after the other, as ``"auto"`` chooses each."""
    y = dispatch.first("all_reduce", as_record(AllReduceArgs, args))
    return dispatch.first("hc_post_pre_norm", as_record(HcPostPreNormArgs, args, y=y))
