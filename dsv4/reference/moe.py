"""Meaning of ``dsv4.ops.moe``."""

from __future__ import annotations

import torch

from dsv4.reference._precision import compute_dtype


def moe_permute(
    ids: torch.Tensor, num_experts: int, first_expert: int, num_local_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.moe.moe_permute``."""
    local = ids.flatten().long() - first_expert
    here = (local >= 0) & (local < num_local_experts)
    sorted_local = torch.where(here, local, num_local_experts).sort(stable=True)
    experts = torch.arange(num_local_experts + 1, device=ids.device)
    offsets = torch.searchsorted(sorted_local.values, experts)
    return sorted_local.indices.to(torch.int32), offsets.to(torch.int32)


def moe_gather(x: torch.Tensor, order: torch.Tensor, top_k: int) -> torch.Tensor:
    """See ``dsv4.ops.moe.moe_gather``."""
    return x[torch.div(order.long(), top_k, rounding_mode="floor")]


def moe_combine(
    y: torch.Tensor,
    order: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None,
    top_k: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """See ``dsv4.ops.moe.moe_combine``."""
    rows = torch.empty_like(order, dtype=torch.int64)
    rows[order.long()] = torch.arange(order.shape[0], device=order.device)
    rows = rows.view(-1, top_k)
    wide = compute_dtype(y)
    out = torch.zeros(rows.shape[0], y.shape[1], dtype=wide, device=y.device)
    for j in range(top_k):
        term = y[rows[:, j]].to(wide)
        if weights is not None:
            term = term * weights[:, j, None].to(wide)
        # A select, not a product by 0: rows that no expert wrote may hold anything.
        out = torch.where((rows[:, j] < offsets[-1]).unsqueeze(-1), out + term, out)
    if shared is not None:
        out = out + shared.to(wide)
    return out.to(out_dtype)
