"""Tokens to the ranks of their experts and back by NCCL, with sizes that the host knows.

Every rank gets all tokens, whether it has one of their experts or not, and sends back a row for
each: nothing is read on the host, and a CUDA graph can hold both.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from dsv4.ops.moe_exchange import MoeReturnArgs, MoeSendArgs, Received, empty_rows
from dsv4.parallel import groups
from dsv4.reference.moe_exchange import packed, summed, unpacked


def nccl_send(args: MoeSendArgs) -> Received:
    """Send by one all-gather of tokens, ids and weights."""
    ranks = groups.size(args.group)
    if args.x.shape[0] == 0:
        return empty_rows(args, ranks)
    own = packed(args)
    whole = own.new_empty((ranks * own.shape[0], own.shape[1]))
    dist.all_gather_into_tensor(whole, own, group=groups.resolve(args.group))
    return unpacked(whole, args, groups.rank(args.group), ranks)


def nccl_return(args: MoeReturnArgs) -> torch.Tensor:
    """Return by one all-to-all of equal parts; the sum, in the order of ranks, is torch's."""
    own = args.y.contiguous()
    parts = torch.empty_like(own)
    if own.numel():
        dist.all_to_all_single(parts, own, group=groups.resolve(args.group))
    shape = (groups.size(args.group), args.ids.shape[0], own.shape[1])
    return summed(parts.view(shape).unbind(0), args)
