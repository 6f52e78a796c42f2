"""Reference implementation of ``dsv4.ops.all_reduce``."""

from __future__ import annotations

import torch

from dsv4.ops._library import as_record
from dsv4.ops.all_reduce import AllReduceArgs, HcReducePostArgs, HcReducePostPreNormArgs
from dsv4.ops.hyper_connection import HcPostArgs, HcPostPreNormArgs
from dsv4.parallel import groups
from dsv4.reference._precision import compute_dtype
from dsv4.reference.hyper_connection import hc_post, hc_post_pre_norm


def all_reduce(args: AllReduceArgs) -> torch.Tensor:
    """See ``dsv4.ops.all_reduce.all_reduce``."""
    return rank_ordered_sum(groups.gather(args.partial, args.group))


def rank_ordered_sum(partials: list[torch.Tensor]) -> torch.Tensor:
    """Add partial sums in their order in float32, in float64 if they are, and round once."""
    first, *others = partials
    total = first.to(compute_dtype(first), copy=True)
    for partial in others:
        total += partial
    return total.to(first.dtype).contiguous()


def hc_reduce_post(args: HcReducePostArgs) -> torch.Tensor:
    """See ``dsv4.ops.all_reduce.hc_reduce_post``."""
    y = all_reduce(as_record(AllReduceArgs, args))
    return hc_post(as_record(HcPostArgs, args, y=y))


def hc_reduce_post_pre_norm(
    args: HcReducePostPreNormArgs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.all_reduce.hc_reduce_post_pre_norm``."""
    y = all_reduce(as_record(AllReduceArgs, args))
    return hc_post_pre_norm(as_record(HcPostPreNormArgs, args, y=y))
