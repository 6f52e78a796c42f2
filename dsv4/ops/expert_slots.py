"""Slots for routed experts whose weights lie in host memory: decide what to load, and load it.

A layer has N slots in GPU memory. The first ones hold static experts and never change; the others
are a cache. ``expert_decide`` finds the slot of every chosen expert and plans which experts replace
which; ``expert_gather`` copies these from host memory. Neither reads anything on the host, so a
CUDA graph holds both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4.ops import _check
from dsv4.ops._library import Written, define
from dsv4.ops._plans import planned
from dsv4.ops.moe import check_ids

__all__ = ["expert_decide", "expert_gather"]

DECAY_STEPS = 64  # use counts are halved after this number of steps
MOST_USES = (1 << 20) - 1  # use counts stay here
LAST_STEP = (1 << 31) - 1  # steps are counted up to here, and from 1 again
MOST_SLOTS = 1024
CHUNK_COLUMNS = 4  # of ``expert_gather``'s table
COUNTERS = 3  # steps, distinct experts that steps asked for, experts loaded

Plan = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class ExpertDecideArgs(NamedTuple):
    """Arguments of ``expert_decide``: the experts of a step and the state of the slots.

    Attributes:
        ids: ``[T, k]`` int32 or int64, chosen experts.
        slot_of: int32 ``[E]``, slot of each expert; -1: none.
        expert_in: int32 ``[N]``, expert in each slot; -1: none.
        used: int32 ``[E]``, decayed use counts.
        last: int32 ``[E]``, step of the last use.
        totals: int64 ``[E]``, all uses.
        counters: int64 ``[3]``: steps, distinct experts of all steps, experts loaded.
        static_slots: Number of slots that never change, the first ones.
    """

    ids: torch.Tensor
    slot_of: Written
    expert_in: Written
    used: Written
    last: Written
    totals: Written
    counters: Written
    static_slots: int


class ExpertGatherArgs(NamedTuple):
    """Arguments of ``expert_gather``: rows of experts to copy to slots.

    Attributes:
        slots: uint8 ``[bytes]``, memory of all slots.
        rows: uint8 ``[H, B]`` in host memory, a row per expert.
        row_of: int32 ``[E]``, row of each expert; -1: none.
        experts: int32 ``[M]``, experts to load; negative: nothing.
        targets: int32 ``[M]``, their slots.
        chunks: int32 ``[C, 4]``, pieces of a row: first word in the row, first word of the piece
            in slot 0, words from one slot to the next, words.
    """

    slots: Written
    rows: torch.Tensor
    row_of: torch.Tensor
    experts: torch.Tensor
    targets: torch.Tensor
    chunks: torch.Tensor


def plan_size(choices: int, slots: int, static_slots: int) -> int:
    """Return the most experts that a step with this number of choices can load."""
    return min(choices, slots - static_slots)


def _fake_decide(args: ExpertDecideArgs) -> Plan:
    ids = args.ids
    size = plan_size(ids.shape[0] * ids.shape[1], args.expert_in.shape[0], args.static_slots)
    slots = ids.new_empty(ids.shape, dtype=torch.int32)
    experts = ids.new_empty([size], dtype=torch.int32)
    return slots, experts, ids.new_empty([size], dtype=torch.int32)


def _fake_gather(args: ExpertGatherArgs) -> None:
    return None


def _check_choices(op: str, args: ExpertDecideArgs) -> None:
    check_ids(args.ids, args.slot_of.shape[0], op)


def _check_loads(op: str, args: ExpertGatherArgs) -> None:
    loads = args.experts >= 0
    experts, targets = args.experts[loads], args.targets[loads]
    _check.within(op, "experts", experts, args.row_of.shape[0])
    _check.within(op, "row_of[experts]", args.row_of[experts.long()], args.rows.shape[0])
    _check.within(op, "targets", targets, MOST_SLOTS)
    ends = args.chunks[:, 0] + args.chunks[:, 3]
    _check.below(op, "ends of chunks in a row", ends, args.rows.shape[1] // 4 + 1)
    at = args.chunks[:, 1].long() + targets.long().unsqueeze(1) * args.chunks[:, 2].long()
    ends = at + args.chunks[:, 3].long()
    _check.below(op, "ends of chunks in slots", ends, args.slots.shape[0] // 4 + 1)


_expert_decide = define("expert_decide", ExpertDecideArgs, _fake_decide, _check_choices)
_expert_gather = define("expert_gather", ExpertGatherArgs, _fake_gather, _check_loads)


@planned
def expert_decide(
    ids: torch.Tensor,
    slot_of: torch.Tensor,
    expert_in: torch.Tensor,
    used: torch.Tensor,
    last: torch.Tensor,
    totals: torch.Tensor,
    counters: torch.Tensor,
    *,
    static_slots: int,
    backend: str = "auto",
) -> Plan:
    """Find the slots of a step's experts, and plan which experts are loaded in place of which.

    Experts without a slot are loaded in ascending order, into the victims' slots in ascending
    order. Victims are the empty slots, then the slots whose experts have the smallest use counts,
    of equal ones the longest unused, of these the lowest slot; never a static slot, nor the expert
    of another choice of this step. ``used`` counts choices; every 64 steps all are halved first, so
    that it follows changes. The tables are written as if the plan were carried out already.

    Ids of -1 or E choose no expert: they count nothing, load nothing and have slot -1. Any other id
    out of range raises on a CPU and chooses no expert elsewhere.

    Args:
        ids: ``[T, k]`` int32 or int64.
        slot_of: int32 ``[E]``, slot of each expert or -1; written.
        expert_in: int32 ``[N]``, expert in each slot or -1, the inverse; written.
        used: int32 ``[E]``, decayed use counts; written.
        last: int32 ``[E]``, step of the last use; written.
        totals: int64 ``[E]``, all choices of each expert; written.
        counters: int64 ``[3]``: steps, distinct experts that steps asked for (summed over steps),
            and experts loaded; written.
        static_slots: Slots that never change, the first ones.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``(slots [T, k], experts [M], targets [M])``, int32: the slot of each choice, and the
        experts to load with their slots, -1 from the last on. M is the smaller of T k and the slots
        that are not static.

    Raises:
        TypeError: if a dtype is not as stated.
        ValueError: if a shape or a device does not fit, there are more than 1024 slots, or fewer
            that are not static than the step may need: T k, or all experts that are not static; or
            (on a CPU) an id is out of range.
    """
    op, int32, int64 = "expert_decide", (torch.int32,), (torch.int64,)
    _check.tensors(
        op,
        ("ids", ids, _check.INTEGERS, ("T", "k")),
        ("slot_of", slot_of, int32, ("E",)),
        ("expert_in", expert_in, int32, ("N",)),
        ("used", used, int32, ("E",)),
        ("last", last, int32, ("E",)),
        ("totals", totals, int64, ("E",)),
        ("counters", counters, int64, (COUNTERS,)),
    )
    slots, experts = expert_in.shape[0], slot_of.shape[0]
    if not torch.compiler.is_compiling():
        if not 0 <= static_slots <= slots <= MOST_SLOTS:
            raise ValueError(
                f"{op}: there are {slots} slots, {static_slots} of them static, wanted at most "
                f"{MOST_SLOTS}, and at most as many static ones as slots"
            )
        needed = min(ids.numel(), experts - static_slots)
        if slots - static_slots < needed:
            raise ValueError(
                f"{op}: {slots - static_slots} slots are not static, wanted {needed} or more for "
                f"{ids.numel()} choices among {experts} experts"
            )
    args = ExpertDecideArgs(ids, slot_of, expert_in, used, last, totals, counters, static_slots)
    return _expert_decide(args, backend)


@planned
def expert_gather(
    slots: torch.Tensor,
    rows: torch.Tensor,
    row_of: torch.Tensor,
    experts: torch.Tensor,
    targets: torch.Tensor,
    chunks: torch.Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Copy experts from host memory to their slots, bit for bit.

    A slot is not one piece of memory: GEMMs want each tensor of all slots together. ``chunks`` says
    where the pieces of a row go: words ``row ... row + words`` of an expert's row become words
    ``first + slot * stride ... + words`` of ``slots``. Words have 4 bytes. Kernels copy 16 bytes at
    a time where all four numbers of a chunk are multiples of 4.

    Args:
        slots: uint8 ``[bytes]``, contiguous, at a multiple of 16 bytes; written.
        rows: uint8 ``[H, B]``, contiguous, at a multiple of 16 bytes, B a multiple of 16. For
            ``slots`` on a GPU it is in host memory that the GPU reads (pinned and mapped), or on
            that GPU.
        row_of: int32 ``[E]``, row of each expert.
        experts: int32 ``[M]``, experts to load; negative ones load nothing.
        targets: int32 ``[M]``, their slots, all different.
        chunks: int32 ``[C, 4]``.
        backend: Implementation name, see ``dsv4.dispatch``.

    Raises:
        TypeError: if a dtype is not as stated.
        ValueError: if a shape or a device does not fit, or ``slots`` or ``rows`` is not laid out as
            stated.
        IndexError: if an expert has no row or a chunk is outside of the row or the slots (on a CPU;
            undefined on a GPU).
    """
    op, int32, uint8 = "expert_gather", (torch.int32,), (torch.uint8,)
    _check.tensors(
        op,
        ("slots", slots, uint8, ("bytes",)),
        ("row_of", row_of, int32, ("E",)),
        ("experts", experts, int32, ("M",)),
        ("targets", targets, int32, ("M",)),
        ("chunks", chunks, int32, ("C", CHUNK_COLUMNS)),
    )
    _check.tensors(op, ("rows", rows, uint8, ("H", "B")))
    if not torch.compiler.is_compiling():
        if rows.device.type != "cpu" and rows.device != slots.device:
            raise ValueError(
                f"{op}: rows are on {rows.device}, wanted the CPU or {slots.device}, where slots is"
            )
        if rows.shape[1] % 16 or slots.shape[0] % 4:
            raise ValueError(
                f"{op}: rows have {rows.shape[1]} bytes and slots {slots.shape[0]}, wanted "
                "multiples of 16 and 4"
            )
        for name, tensor in (("slots", slots), ("rows", rows), ("chunks", chunks)):
            if not tensor.is_contiguous():
                raise ValueError(f"{op}: {name} is not contiguous, wanted it contiguous")
            if not tensor.is_meta and tensor.data_ptr() % 16 and tensor.numel():
                raise ValueError(f"{op}: {name} begins at no multiple of 16 bytes, wanted one")
    _expert_gather(ExpertGatherArgs(slots, rows, row_of, experts, targets, chunks), backend)
