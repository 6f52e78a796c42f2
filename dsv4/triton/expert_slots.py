"""Kernels of ``dsv4.ops.expert_slots``: one CTA decides, many copy from host memory.

``_decide_kernel`` is one CTA, which holds the experts of the layer and the slots that are not
static in registers, an element per thread. Lists that cross from experts to slots go through the
plan in memory, between barriers. Only a step that misses sorts the slots' keys.

``_load_kernel``: CTA p copies chunks p, p + P, ... of each expert to load, 16 bytes per thread
and load, straight from mapped host memory. PCIe at 55 GB/s and 2 us needs about 110 KB in flight;
64 CTAs with 8 KB each have 512. GEMMs load weights before they wait for the preceding kernel, so
this kernel neither starts early nor lets the next one do so (``launch_options.in_order``). That one
may let a GEMM start before it has waited itself: what this kernel stored is then visible, because
each of its threads ends with a fence.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dsv4.ops.expert_slots import (
    DECAY_STEPS,
    LAST_STEP,
    MOST_USES,
    ExpertDecideArgs,
    ExpertGatherArgs,
    plan_size,
)
from dsv4.triton._lib.numerics import INTERPRETED, wait_for_inputs
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch

_WORDS = 2048  # of a chunk that a CTA copies at a time: 16 bytes per thread, four times
_CTAS = 64
_ID_TILE = 16  # choices that are compared with all experts at a time; listed experts per read
_DECAY_STEPS = tl.constexpr(DECAY_STEPS)
_MOST_USES = tl.constexpr(MOST_USES)
_LAST_STEP = tl.constexpr(LAST_STEP)
_NEVER = tl.constexpr((1 << 63) - 1)


@triton.jit
def _counts(ids, choices, experts, ID_TILE: tl.constexpr, EXPERTS: tl.constexpr):
    """Return how often each expert was chosen, int32 ``[EXPERTS]``."""
    expert = tl.arange(0, EXPERTS)
    counts = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, choices, ID_TILE):
        index = start + tl.arange(0, ID_TILE)
        chosen = tl.load(ids + index, mask=index < choices, other=-1).to(tl.int64)
        counts += tl.sum((chosen[:, None] == expert[None, :]).to(tl.int32), 0)
    return tl.where(expert < experts, counts, 0)


@fast_launch
@triton.jit(do_not_specialize=["choices", "experts", "cached", "static_slots", "size"])
def _decide_kernel(
    ids,
    slot_of,
    expert_in,
    used,
    last,
    totals,
    counters,
    slots,
    loaded,
    targets,
    choices,
    experts,
    cached,
    static_slots,
    size,
    ID_TILE: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    expert = tl.arange(0, EXPERTS)
    exists = expert < experts
    counts = _counts(ids, choices, experts, ID_TILE, EXPERTS)
    needed = counts > 0
    steps = tl.load(counters)
    wraps = steps >= _LAST_STEP
    step = tl.where(wraps, 1, steps + 1).to(tl.int32)
    uses = tl.load(used + expert, mask=exists, other=0)
    uses = tl.where(step % _DECAY_STEPS == 0, uses // 2, uses)
    uses = tl.minimum(uses + counts, _MOST_USES)
    age = tl.load(last + expert, mask=exists, other=0)
    age = tl.where(needed, step, tl.where(wraps, 0, age))
    total = tl.load(totals + expert, mask=exists, other=0)
    missing = needed & (tl.load(slot_of + expert, mask=exists, other=0) < 0)
    misses = tl.sum(missing.to(tl.int32), 0)
    asked = tl.load(counters + 1) + tl.sum(needed.to(tl.int32), 0)
    misses_before = tl.load(counters + 2)
    index = tl.arange(0, SLOTS)
    tl.store(loaded + index, tl.full((SLOTS,), -1, tl.int32), mask=index < size)
    tl.store(targets + index, tl.full((SLOTS,), -1, tl.int32), mask=index < size)
    # All threads have read what is written from here on, or wrote it before the others read it.
    tl.debug_barrier()
    tl.store(used + expert, uses, mask=exists)
    tl.store(last + expert, age, mask=exists)
    tl.store(totals + expert, total + counts, mask=needed)
    tl.store(counters, step.to(tl.int64))
    tl.store(counters + 1, asked)
    tl.store(counters + 2, misses_before + misses)
    if misses > 0:
        miss = tl.cumsum(missing.to(tl.int32), 0) - 1
        tl.store(loaded + miss, expert, mask=missing)
        tl.debug_barrier()
        real = index < cached
        occupant = tl.load(expert_in + static_slots + index, mask=real, other=-1)
        held = real & (occupant >= 0)
        key = tl.load(used + occupant, mask=held, other=0).to(tl.int64) << 41
        unused = tl.load(last + occupant, mask=held, other=0)
        key |= (unused.to(tl.int64) << 10) | index
        # An expert that this step needs, and no other, was used last in this step.
        key = tl.where(held, tl.where(unused == step, _NEVER, key), index - cached)
        key = tl.where(real, key, _NEVER)
        ordered = tl.sort(key)
        largest = tl.sum(tl.where(index == misses - 1, ordered, 0), 0)
        victim = key <= largest
        order = tl.cumsum(victim.to(tl.int32), 0) - 1
        tl.store(targets + order, static_slots + index, mask=victim)
        arriving = tl.load(loaded + order, mask=victim, other=-1)
        tl.store(expert_in + static_slots + index, arriving, mask=victim)
        tl.store(slot_of + occupant, -1, mask=victim & held)
        tl.debug_barrier()
        slot = tl.load(targets + miss, mask=missing, other=-1)
        tl.store(slot_of + expert, slot, mask=missing)
        tl.debug_barrier()
    for start in range(0, choices, ID_TILE):
        at = start + tl.arange(0, ID_TILE)
        chosen = tl.load(ids + at, mask=at < choices, other=-1).to(tl.int64)
        valid = (chosen >= 0) & (chosen < experts)
        slot = tl.load(slot_of + chosen, mask=valid, other=-1)
        tl.store(slots + at, slot, mask=at < choices)


def expert_decide(args: ExpertDecideArgs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.expert_slots.expert_decide``."""
    ids, device = args.ids.contiguous(), args.ids.device
    cached = args.expert_in.shape[0] - args.static_slots
    size = plan_size(ids.numel(), args.expert_in.shape[0], args.static_slots)
    slots = torch.empty(ids.shape, dtype=torch.int32, device=device)
    loaded, targets = (torch.empty(size, dtype=torch.int32, device=device) for _ in range(2))
    with launch_options.on(ids):
        _decide_kernel[(1,)](
            ids,
            args.slot_of,
            args.expert_in,
            args.used,
            args.last,
            args.totals,
            args.counters,
            slots,
            loaded,
            targets,
            ids.numel(),
            args.slot_of.shape[0],
            cached,
            args.static_slots,
            size,
            ID_TILE=_ID_TILE,
            EXPERTS=launch_options.power_of_two(args.slot_of.shape[0]),
            SLOTS=launch_options.power_of_two(cached),
            num_warps=8,
            **launch_options.options(ids),
        )
    return slots, loaded, targets


@triton.jit
def _copy(source, target, words, WORDS: tl.constexpr):
    for start in range(0, words, WORDS):
        at = start + tl.arange(0, WORDS)
        tl.store(target + at, tl.load(source + at, mask=at < words), mask=at < words)


@fast_launch
@triton.jit(do_not_specialize=["size", "chunk_count"])
def _load_kernel(
    slots,
    rows,
    row_of,
    experts,
    targets,
    chunks,
    row_words,
    size,
    chunk_count,
    WORDS: tl.constexpr,
    ID_TILE: tl.constexpr,
):
    # Usually a step misses nothing; it then reads the list once instead of entry by entry.
    end = 0
    for start in range(0, size, ID_TILE):
        index = start + tl.arange(0, ID_TILE)
        listed = tl.load(experts + index, mask=index < size, other=-1)
        end = tl.maximum(end, tl.max(tl.where(listed >= 0, index + 1, 0), 0))
    for i in range(end):
        expert = tl.load(experts + i)
        if expert >= 0:
            target = tl.load(targets + i).to(tl.int64)
            row = rows + tl.load(row_of + expert).to(tl.int64) * row_words
            for chunk in range(tl.program_id(0), chunk_count, tl.num_programs(0)):
                source = tl.load(chunks + 4 * chunk)
                first = tl.load(chunks + 4 * chunk + 1)
                stride = tl.load(chunks + 4 * chunk + 2)
                words = tl.load(chunks + 4 * chunk + 3)
                to = first + target * stride
                if (source | first | stride | words) % 4 == 0:
                    # New values, because tl.multiple_of would mark those of the other branch, too.
                    aligned = (source // 4) * 4
                    _copy(row + aligned, slots + (to // 4) * 4, (words // 4) * 4, WORDS)
                else:
                    _copy(row + source, slots + to, words, WORDS)
    tl.debug_barrier()
    _fence(size)


@triton.jit
def _fence(value):
    """Make what each thread stored visible to the GPU before its CTA ends."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.u32 $0, $1;",
            "=r,r",
            [value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def expert_gather(args: ExpertGatherArgs) -> None:
    """See ``dsv4.ops.expert_slots.expert_gather``."""
    size, chunks = args.experts.shape[0], args.chunks.shape[0]
    if not size or not chunks:
        return
    with launch_options.on(args.slots):
        _load_kernel[(min(_CTAS, chunks),)](
            args.slots.view(torch.int32),
            args.rows.view(torch.int32),
            args.row_of,
            args.experts,
            args.targets,
            args.chunks,
            args.rows.shape[1] // 4,
            size,
            chunks,
            WORDS=_WORDS,
            ID_TILE=_ID_TILE,
            num_warps=4,
            **launch_options.in_order(args.slots),
        )
