"""CuTeDSL kernels of ``dsv4.ops.attention``."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

import torch

from dsv4.cute.runtime.architectures import HOPPER
from dsv4.cute.runtime.driver import Parameters
from dsv4.cute.runtime.launch import PackedLaunch, aligned, loaded, on, run_noted, stream_of
from dsv4.cute.sm90.attention_plan import (
    COLUMN_CLUSTERS,
    NARROW_CLUSTERS,
    NARROW_STEPS,
    PACKED_BYTES,
    AttentionPlan,
    ColumnsPlan,
    MergePlan,
    NarrowPlan,
    Plan,
    choose,
    is_scanned,
    narrow,
    tiles,
)
from dsv4.device import sms
from dsv4.ops.attention import SparseAttentionArgs

# Parameters of the kernels, in their order; before the first's come three without any content.
_ATTEND = Parameters("s", "s", "s", *"qqqqqqqqqq", *"qqqq", *"iiiiiiiii", "f")
_MERGE = Parameters(*"qqqqqq", *"ii")
_CLUSTERS = Parameters(*"qqqqqqqqq", *"qqqq", *"iiiiii", "f")
_CLUSTERS_PACKED = struct.Struct("@13q6if")
_ATTEND_PACKED, _MERGE_PACKED = struct.Struct("@sss14q9if"), struct.Struct("@6q2i")


def sparse_attention(args: SparseAttentionArgs) -> torch.Tensor:
    """See ``dsv4.ops.attention.sparse_attention``."""
    q, compressed, compressed_page_size = args.q, args.compressed, args.compressed_page_size
    compressed_slots, sink = args.compressed_slots, args.sink
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    if compressed is None or compressed_slots is None:
        compressed, compressed_page_size = args.window, args.window_page_size
        compressed_slots = args.window_slots[:, :0]
    pools = (args.window, args.window_page_size, compressed, compressed_page_size)
    slots = (args.window_slots.long().contiguous(), compressed_slots.long().contiguous())
    # Kept until after the launch.
    angles = [
        None if table is None else table.float().contiguous() for table in (args.cos, args.sin)
    ]
    q, sink = aligned(q, q.shape[0])[0], sink.float().contiguous()
    with on(q.get_device()):
        _attend(q, pools, slots, sink, args.scale, angles, out)
    return out


def _attend(
    q: torch.Tensor,
    pools: tuple[torch.Tensor, int, torch.Tensor, int],
    slots: tuple[torch.Tensor, torch.Tensor],
    sink: torch.Tensor,
    scale: float,
    angles: Sequence[torch.Tensor | None],
    out: torch.Tensor,
) -> None:
    """On the current device."""
    widths = (slots[0].shape[1], slots[1].shape[1])
    plan, count = choose(*q.shape[:2], widths, _multiprocessors(q.device.index))
    if isinstance(plan, NarrowPlan | ColumnsPlan):
        _attend_clusters(plan, q, pools, slots, sink, scale, angles, out)
    else:
        _attend_wide(plan, count, q, pools, slots, sink, scale, angles, out)


def _attend_wide(
    plan: AttentionPlan,
    count: int,
    q: torch.Tensor,
    pools: tuple[torch.Tensor, int, torch.Tensor, int],
    slots: tuple[torch.Tensor, torch.Tensor],
    sink: torch.Tensor,
    scale: float,
    angles: Sequence[torch.Tensor | None],
    out: torch.Tensor,
) -> None:
    tokens, heads, _ = q.shape
    window, page, compressed, second_page = pools
    widths = (slots[0].shape[1], slots[1].shape[1])
    kept = (tokens, count, heads) if plan.split else (0,)
    parts = q.new_empty((*kept, PACKED_BYTES), dtype=torch.uint8)
    known = q.new_empty((*kept, 2), dtype=torch.float32)
    items = tokens * count * tiles(heads)
    numbers = (
        q.stride(0),
        q.stride(1),
        window.stride(0),
        compressed.stride(0),
        *widths,
        page.bit_length() - 1,
        second_page.bit_length() - 1,
        heads,
        count,
        tiles(heads),
        items,
        int(is_scanned(count if plan.split else 1, widths)),
        scale,
    )
    device = q.device.index
    stream = stream_of(device)
    kernel = loaded(plan, HOPPER)
    kernel.prepare(device)
    # Of two that add their sums, both are there, and neither has a next token.
    most = items if plan.together else _multiprocessors(device)
    written = parts if plan.split else out
    run_noted(
        PackedLaunch(kernel, min(items, most), _ATTEND, _ATTEND_PACKED, numbers, (b"",) * 3),
        stream,
        (q, window, slots[0], compressed, slots[1], sink, written, known, *angles),
    )
    if plan.split:
        kernel = loaded(MergePlan(), HOPPER)
        kernel.prepare(device)
        run_noted(
            PackedLaunch(kernel, tokens * heads, _MERGE, _MERGE_PACKED, (heads, count)),
            stream,
            (parts, known, sink, out, *angles),
        )


def _attend_clusters(
    plan: NarrowPlan | ColumnsPlan,
    q: torch.Tensor,
    pools: tuple[torch.Tensor, int, torch.Tensor, int],
    slots: tuple[torch.Tensor, torch.Tensor],
    sink: torch.Tensor,
    scale: float,
    angles: Sequence[torch.Tensor | None],
    out: torch.Tensor,
) -> None:
    tokens, heads, _ = q.shape
    window, page, compressed, second_page = pools
    count = -(-heads // plan.heads)
    numbers = (
        q.stride(0),
        q.stride(1),
        window.stride(0),
        compressed.stride(0),
        slots[0].shape[1],
        slots[1].shape[1],
        page.bit_length() - 1,
        second_page.bit_length() - 1,
        heads,
        count,
        scale,
    )
    device = q.device.index
    if isinstance(plan, NarrowPlan):
        widths = (slots[0].shape[1], slots[1].shape[1])
        plan = _with_room(plan, widths, tokens * count, device)
    kernel = loaded(plan, HOPPER)
    kernel.prepare(device)
    blocks = tokens * count * plan.blocks
    run_noted(
        PackedLaunch(kernel, blocks, _CLUSTERS, _CLUSTERS_PACKED, numbers),
        stream_of(device),
        (q, window, slots[0], compressed, slots[1], sink, out, *angles),
    )


@functools.cache
def _with_room(plan: NarrowPlan, widths: tuple[int, int], clusters: int, device: int) -> NarrowPlan:
    """The plan, or one of smaller clusters if the current GPU has no room for all of them."""
    if loaded(plan, HOPPER).prepare(device) >= clusters:
        return plan
    smaller = [blocks for blocks in NARROW_CLUSTERS if blocks < plan.blocks]
    room = [b for b in smaller if loaded(NarrowPlan(b), HOPPER).prepare(device) >= clusters]
    return narrow(widths, room or NARROW_CLUSTERS[:1])


def _multiprocessors(device: int) -> int:
    return sms(torch.device("cuda", device))


def plans() -> list[Plan]:
    """All kernels, for ``dsv4.warmup``."""
    return [
        AttentionPlan(False),
        AttentionPlan(False, expand_warps=4),
        AttentionPlan(True),
        AttentionPlan(False, together=True),
        MergePlan(),
        *(NarrowPlan(blocks, step) for blocks in NARROW_CLUSTERS for step in NARROW_STEPS),
        *map(ColumnsPlan, COLUMN_CLUSTERS),
    ]
