"""Meaning of ``dsv4.ops.moe``."""

from __future__ import annotations

import torch

from dsv4.formats import LINEAR, SWIZZLED_EXPERTS, swizzle_expert_scales
from dsv4.ops.moe import check_ids
from dsv4.reference._precision import compute_dtype
from dsv4.reference.quantize import quantize_nvfp4


def moe_permute(
    ids: torch.Tensor, num_experts: int, first_expert: int, num_local_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.moe.moe_permute``."""
    check_ids(ids, num_experts)
    local = ids.flatten().long() - first_expert
    here = (local >= 0) & (local < num_local_experts)
    values, order = torch.where(here, local, num_local_experts).sort(stable=True)
    experts = torch.arange(num_local_experts + 1, device=ids.device)
    offsets = torch.searchsorted(values, experts)
    rows = torch.empty_like(order)
    rows[order] = torch.arange(order.shape[0], device=ids.device)
    return order.to(torch.int32), offsets.to(torch.int32), rows.view(ids.shape).to(torch.int32)


def moe_gather(
    x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See ``dsv4.ops.moe.moe_gather``."""
    tokens, top_k = rows.shape
    out = x.new_empty((tokens * top_k, x.shape[1])) if out is None else out
    out[rows.flatten().long()] = x.repeat_interleave(top_k, 0)
    return out


def moe_sort(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    first_expert: int,
    num_local_experts: int,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.moe.moe_sort``."""
    order, offsets, rows = moe_permute(ids, num_experts, first_expert, num_local_experts)
    return moe_gather(x, rows, out), weights.reshape(-1)[order.long()], offsets, rows


def moe_gather_quantize(
    x: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    input_scale: torch.Tensor | None,
    layout: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.moe.moe_gather_quantize``."""
    if layout == SWIZZLED_EXPERTS:
        codes, scales, total = moe_gather_quantize(x, rows, offsets, input_scale, LINEAR)
        return codes, swizzle_expert_scales(scales, offsets), total
    row = torch.arange(rows.numel(), device=x.device)
    local = row < offsets[-1]
    gathered = torch.where(local.unsqueeze(-1), moe_gather(x, rows), 0.0)
    if input_scale is None:
        return quantize_nvfp4(gathered, None, "token", layout)
    expert = torch.searchsorted(offsets[1:].contiguous(), row.to(torch.int32), right=True)
    scale = input_scale[expert.clamp(max=input_scale.shape[0] - 1)]
    return quantize_nvfp4(gathered, torch.where(local, scale, 1.0), "static", layout)


def moe_combine(
    y: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """See ``dsv4.ops.moe.moe_combine``."""
    row = rows.long()
    wide = compute_dtype(y)
    out = torch.zeros(row.shape[0], y.shape[1], dtype=wide, device=y.device)
    for j in range(row.shape[1]):
        term = y[row[:, j]].to(wide)
        if weights is not None:
            term = term * weights[:, j, None].to(wide)
        # A select, not a product by 0: rows that no expert wrote may hold anything.
        out = torch.where((row[:, j] < offsets[-1]).unsqueeze(-1), out + term, out)
    if shared is not None:
        out = out + shared.to(wide)
    return out.to(out_dtype)
