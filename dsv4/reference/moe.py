"""Reference implementation of ``dsv4.ops.moe``."""

from __future__ import annotations

import torch

from dsv4.ops._library import as_record
from dsv4.ops.moe import (
    MoeCombineArgs,
    MoeGatherArgs,
    MoeGatherQuantizeArgs,
    MoePermuteArgs,
    MoeSortArgs,
    check_ids,
)
from dsv4.ops.quantize import QuantizeNvfp4Args
from dsv4.quant.formats import LINEAR, SWIZZLED_EXPERTS, swizzle_expert_scales
from dsv4.reference._precision import compute_dtype
from dsv4.reference.quantize import quantize_nvfp4


def moe_permute(args: MoePermuteArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.moe.moe_permute``."""
    ids = args.ids
    check_ids(ids, args.num_experts)
    local = ids.flatten().long() - args.first_expert
    here = (local >= 0) & (local < args.num_local_experts)
    values, order = torch.where(here, local, args.num_local_experts).sort(stable=True)
    experts = torch.arange(args.num_local_experts + 1, device=ids.device)
    offsets = torch.searchsorted(values, experts)
    rows = torch.empty_like(order)
    rows[order] = torch.arange(order.shape[0], device=ids.device)
    return order.to(torch.int32), offsets.to(torch.int32), rows.view(ids.shape).to(torch.int32)


def moe_gather(args: MoeGatherArgs, out: torch.Tensor | None = None) -> torch.Tensor:
    """See ``dsv4.ops.moe.moe_gather``."""
    tokens, top_k = args.rows.shape
    out = args.x.new_empty((tokens * top_k, args.x.shape[1])) if out is None else out
    out[args.rows.flatten().long()] = args.x.repeat_interleave(top_k, 0)
    return out


def moe_sort(
    args: MoeSortArgs, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.moe.moe_sort``."""
    order, offsets, rows = moe_permute(as_record(MoePermuteArgs, args))
    return (
        moe_gather(MoeGatherArgs(args.x, rows), out),
        args.weights.reshape(-1)[order.long()],
        offsets,
        rows,
    )


def moe_gather_quantize(
    args: MoeGatherQuantizeArgs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.moe.moe_gather_quantize``."""
    if args.layout == SWIZZLED_EXPERTS:
        codes, scales, total = moe_gather_quantize(args._replace(layout=LINEAR))
        return codes, swizzle_expert_scales(scales, args.offsets), total
    row = torch.arange(args.rows.numel(), device=args.x.device)
    local = row < args.offsets[-1]
    gathered = torch.where(local.unsqueeze(-1), moe_gather(MoeGatherArgs(args.x, args.rows)), 0.0)
    if args.input_scale is None:
        return quantize_nvfp4(QuantizeNvfp4Args(gathered, None, "token", args.layout))
    expert = torch.searchsorted(args.offsets[1:].contiguous(), row.to(torch.int32), right=True)
    scale = args.input_scale[expert.clamp(max=args.input_scale.shape[0] - 1)]
    return quantize_nvfp4(
        QuantizeNvfp4Args(gathered, torch.where(local, scale, 1.0), "static", args.layout)
    )


def moe_combine(args: MoeCombineArgs) -> torch.Tensor:
    """See ``dsv4.ops.moe.moe_combine``."""
    row = args.rows.long()
    wide = compute_dtype(args.y)
    out = torch.zeros(row.shape[0], args.y.shape[1], dtype=wide, device=args.y.device)
    for j in range(row.shape[1]):
        term = args.y[row[:, j]].to(wide)
        if args.weights is not None:
            term = term * args.weights[:, j, None].to(wide)
        # A select, not a product by 0: rows that no expert wrote may hold anything.
        out = torch.where((row[:, j] < args.offsets[-1]).unsqueeze(-1), out + term, out)
    if args.shared is not None:
        out = out + args.shared.to(wide)
    return out.to(args.out_dtype)
