"""Reference implementation of ``dsv4.ops.router``."""

from __future__ import annotations

import torch

from dsv4.ops.router import RouteHashArgs, RouteTopkArgs, check_ids
from dsv4.reference._precision import compute_dtype

# Keeps a row whose scores all underflow at 0 instead of 0/0 (pitfall 10).
_SUM_FLOOR = 1e-20


def route_topk(args: RouteTopkArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.router.route_topk``."""
    logits = _logits(args.x, args.weight, args.logits_dtype)
    scores = _sqrt_softplus(logits.to(compute_dtype(args.x)))
    biased = scores if args.bias is None else scores + args.bias.to(scores.dtype)
    # A stable sort, because topk leaves the order of equal scores open.
    ids = biased.sort(dim=-1, descending=True, stable=True).indices[:, : args.top_k].contiguous()
    weights = _weights(scores, ids, args.scaling_factor)
    return logits, _poison(weights, logits.isfinite().all(-1)), _chosen(ids, args.routed)


def route_hash(args: RouteHashArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.router.route_hash``."""
    logits = _logits(args.x, args.weight, args.logits_dtype)
    scores = _sqrt_softplus(logits.to(compute_dtype(args.x)))
    ids, known = _look_up(args.tid2eid, args.input_ids, args.weight.shape[0])
    weights = _weights(scores, ids, args.scaling_factor)
    good = logits.isfinite().all(-1) & known
    return logits, _poison(weights, good), _chosen(ids, args.routed)


def _logits(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.nn.functional.linear(x.to(dtype), weight.to(dtype))


def _sqrt_softplus(logits: torch.Tensor) -> torch.Tensor:
    # log(1 + exp(x)) itself is 0 below -16.6 and inf above 88 in float32.
    return (torch.log1p(torch.exp(-logits.abs())) + logits.clamp(min=0)).sqrt()


def _weights(scores: torch.Tensor, ids: torch.Tensor, scaling_factor: float) -> torch.Tensor:
    chosen = scores.gather(-1, ids)
    return chosen / (chosen.sum(-1, keepdim=True) + _SUM_FLOOR) * scaling_factor


def _poison(weights: torch.Tensor, good: torch.Tensor) -> torch.Tensor:
    return torch.where(good.unsqueeze(-1), weights, torch.nan)


def _chosen(ids: torch.Tensor, routed: torch.Tensor | None) -> torch.Tensor:
    return ids if routed is None else ids.masked_fill((routed < 0).unsqueeze(-1), -1)


def _look_up(
    tid2eid: torch.Tensor, input_ids: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each token, and whether token and experts are in range."""
    check_ids(tid2eid, input_ids, num_experts)
    vocabulary = tid2eid.shape[0]
    token_ok = (input_ids >= 0) & (input_ids < vocabulary)
    ids = tid2eid[input_ids.clamp(0, vocabulary - 1)].long()
    experts_ok = ((ids >= 0) & (ids < num_experts)).all(-1)
    return ids.clamp(0, num_experts - 1), token_ok & experts_ok
