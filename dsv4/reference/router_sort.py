"""Reference implementation of ``dsv4.ops.router_sort``."""

from __future__ import annotations

import torch

from dsv4.ops._library import as_record
from dsv4.ops.moe import MoeSortArgs
from dsv4.ops.router import RouteTopkArgs
from dsv4.ops.router_sort import RoutedSort, RouteTopkSortArgs
from dsv4.reference.moe import moe_sort
from dsv4.reference.router import route_topk


def route_topk_sort(args: RouteTopkSortArgs, out: torch.Tensor | None = None) -> RoutedSort:
    """See ``dsv4.ops.router_sort.route_topk_sort``."""
    logits, weights, ids = route_topk(as_record(RouteTopkArgs, args))
    experts = args.weight.shape[0]
    sort = as_record(MoeSortArgs, args, ids=ids, weights=weights, num_experts=experts)
    return *moe_sort(sort, out), logits, weights, ids
