"""Reference implementation of ``dsv4.ops.expert_slots``."""

from __future__ import annotations

import torch

from dsv4.ops.expert_slots import (
    DECAY_STEPS,
    LAST_STEP,
    MOST_USES,
    ExpertDecideArgs,
    ExpertGatherArgs,
    plan_size,
)

_NEVER = torch.iinfo(torch.int64).max  # key of a slot whose expert stays


def expert_decide(args: ExpertDecideArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.expert_slots.expert_decide``. Reads nothing on the host."""
    experts, static = args.slot_of.shape[0], args.static_slots
    device = args.ids.device
    ids = args.ids.flatten().long()
    valid = (ids >= 0) & (ids < experts)
    ids = torch.where(valid, ids, experts)
    count = torch.zeros(experts + 1, dtype=torch.int64, device=device)
    count = count.scatter_add_(0, ids, torch.ones_like(ids))[:experts]
    needed = count > 0

    wraps = args.counters[0] >= LAST_STEP
    step = torch.where(wraps, 1, args.counters[0] + 1)
    halved = torch.where(step % DECAY_STEPS == 0, args.used // 2, args.used)
    used = (halved.long() + count).clamp(max=MOST_USES)
    last = torch.where(needed, step, torch.where(wraps, 0, args.last.long()))

    missing = needed & (args.slot_of < 0)
    misses = missing.sum()
    size = plan_size(args.ids.numel(), args.expert_in.shape[0], static)
    victims = _victims(args.expert_in[static:].long(), used, last, needed, misses)
    number = torch.arange(experts, device=device)
    slot = torch.arange(static, args.expert_in.shape[0], device=device)
    loaded = _compacted(number, missing, size)
    targets = _compacted(slot, victims, size)

    args.used.copy_(used)
    args.last.copy_(last)
    args.totals.add_(count)
    _, asked, loads = args.counters.unbind()
    args.counters.copy_(torch.stack((step, asked + needed.sum(), loads + misses)))
    evicted = args.expert_in[static:]
    evicted = torch.where(victims & (evicted >= 0), evicted.long(), experts)
    slot_of = torch.cat((args.slot_of, args.slot_of.new_full((1,), -1))).long()
    slot_of[evicted] = -1
    slot_of[torch.where(loaded >= 0, loaded, experts)] = targets
    slot_of[experts] = -1
    args.slot_of.copy_(slot_of[:experts])
    now = torch.cat((args.expert_in.long(), loaded.new_full((1,), -1)))
    now[torch.where(targets >= 0, targets, args.expert_in.shape[0])] = loaded
    args.expert_in.copy_(now[:-1])
    slots = slot_of[ids].view(args.ids.shape)
    return slots.to(torch.int32), loaded.to(torch.int32), targets.to(torch.int32)


def _victims(
    occupant: torch.Tensor,
    used: torch.Tensor,
    last: torch.Tensor,
    needed: torch.Tensor,
    misses: torch.Tensor,
) -> torch.Tensor:
    """Return which of the slots that are not static get another expert."""
    index = torch.arange(occupant.shape[0], device=occupant.device)
    if not occupant.shape[0]:
        return index > 0
    expert = occupant.clamp(min=0)
    key = (used[expert] << 41) | (last[expert] << 10) | index
    key = torch.where(needed[expert], _NEVER, key)
    key = torch.where(occupant < 0, index - occupant.shape[0], key)
    largest = key.sort().values[(misses - 1).clamp(min=0)]
    return (key <= largest) & (misses > 0)


def _compacted(values: torch.Tensor, chosen: torch.Tensor, size: int) -> torch.Tensor:
    """Return the chosen values in order, ``[size]``, and -1 after them."""
    out = torch.full((size + 1,), -1, dtype=torch.int64, device=values.device)
    position = torch.where(chosen, chosen.cumsum(0) - 1, size)
    out[position] = torch.where(chosen, values, -1)
    return out[:size]


def expert_gather(args: ExpertGatherArgs) -> None:
    """See ``dsv4.ops.expert_slots.expert_gather``. Reads the plan on the host."""
    slots, rows = args.slots.view(torch.int32), args.rows.view(torch.int32)
    row_of, chunks = args.row_of.tolist(), args.chunks.tolist()
    for expert, target in zip(args.experts.tolist(), args.targets.tolist(), strict=True):
        if expert < 0:
            continue
        row = rows[row_of[expert]]
        for source, first, stride, words in chunks:
            at = first + target * stride
            slots[at : at + words] = row[source : source + words]
