"""Launchers of the CuTeDSL kernels of ``dsv4.ops.attention``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from threading import get_ident
from typing import Any, NamedTuple

import torch

from dsv4.cute.runtime.architectures import HOPPER
from dsv4.cute.runtime.driver import Kernel, Launch
from dsv4.cute.runtime.launch import aligned, loaded, on, run_noted, stream_of
from dsv4.cute.sm90.attention_args import ATTENTION_ABI, CLUSTER_ATTENTION_ABI, MERGE_ABI
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
    attention_plan,
    head_tiles,
    narrow_plan,
    scans_slots,
)
from dsv4.device import sms
from dsv4.ops.attention import SparseAttentionArgs

_attention_pointers = ATTENTION_ABI.pointers
_cluster_pointers = CLUSTER_ATTENTION_ABI.pointers
_merge_pointers = MERGE_ABI.pointers


class _Problem(NamedTuple):
    """Sizes and strides of a call, which with the plan determine every scalar of its launches."""

    tokens: int
    heads: int
    token_stride: int
    head_stride: int
    window_stride: int
    compressed_stride: int
    window_width: int
    compressed_width: int
    window_page_size: int
    compressed_page_size: int
    scale: float
    device: int

    @property
    def widths(self) -> tuple[int, int]:
        """Slots of a token in each cache."""
        return self.window_width, self.compressed_width


def sparse_attention(args: SparseAttentionArgs) -> torch.Tensor:
    """See ``dsv4.ops.attention.sparse_attention``."""
    q, compressed, compressed_page_size = args.q, args.compressed, args.compressed_page_size
    compressed_slots = args.compressed_slots
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    if compressed is None or compressed_slots is None:
        compressed, compressed_page_size = args.window, args.window_page_size
        compressed_slots = args.window_slots[:, :0]
    # Converted tensors are referenced by ``inputs`` until after the launch.
    window_slots = args.window_slots.long().contiguous()
    compressed_slots = compressed_slots.long().contiguous()
    cos, sin = (
        None if table is None else table.float().contiguous() for table in (args.cos, args.sin)
    )
    q, sink = aligned(q, q.shape[0])[0], args.sink.float().contiguous()
    # In the order of the fields: by keyword it takes 1 us more in every call.
    problem = _Problem(
        q.shape[0],
        q.shape[1],
        q.stride(0),
        q.stride(1),
        args.window.stride(0),
        compressed.stride(0),
        window_slots.shape[1],
        compressed_slots.shape[1],
        args.window_page_size,
        compressed_page_size,
        args.scale,
        q.device.index,
    )
    inputs = (q, args.window, window_slots, compressed, compressed_slots, sink)
    with on(q.get_device()):
        _attend(problem, inputs, (cos, sin), out)
    return out


def _attend(
    problem: _Problem,
    inputs: tuple[torch.Tensor, ...],
    angles: tuple[torch.Tensor | None, torch.Tensor | None],
    out: torch.Tensor,
) -> None:
    """Choose and launch kernels on the current device.

    Args:
        problem: Sizes of the tensors.
        inputs: Queries, then pages and slots of each cache, and sinks.
        angles: Cosines and sines, or None.
        out: Where results go.
    """
    count = _sms(problem.device)
    plan, splits = attention_plan(problem.tokens, problem.heads, problem.widths, count)
    if not isinstance(plan, AttentionPlan):
        if isinstance(plan, NarrowPlan):
            clusters = problem.tokens * -(-problem.heads // plan.heads)
            plan = _fitting_plan(plan, problem.widths, clusters, problem.device)
        run = functools.partial(_launch_cluster, (plan, problem))
        run_noted(run, stream_of(problem.device), (*inputs, out, *angles))
        return
    stream = stream_of(problem.device)
    shape = (problem.tokens, splits, problem.heads) if plan.split else (0,)
    partials = out.new_empty((*shape, PACKED_BYTES), dtype=torch.uint8)
    statistics = out.new_empty((*shape, 2), dtype=torch.float32)
    written = partials if plan.split else out
    run = functools.partial(_launch_attention, (plan, splits, problem, count))
    run_noted(run, stream, (*inputs, written, statistics, *angles))
    if plan.split:
        run = functools.partial(_launch_merge, (problem.tokens, problem.heads, splits, problem[-1]))
        run_noted(run, stream, (partials, statistics, inputs[-1], out, *angles))


def _launch_attention(key: tuple[Any, ...], stream: int, addresses: Sequence[int]) -> None:
    """Launch ``AttentionKernel`` on the current GPU.

    Args:
        key: What ``_attention_launch`` takes, but for the thread.
        stream: The driver's handle.
        addresses: Addresses of the pointers of ``AttentionArgs``, in their order; 0 for None.
    """
    (
        q,
        window,
        window_slots,
        compressed,
        compressed_slots,
        sink,
        out,
        statistics,
        cos,
        sin,
    ) = addresses
    pointers = _attention_pointers(
        q=q,
        window=window,
        window_slots=window_slots,
        compressed=compressed,
        compressed_slots=compressed_slots,
        sink=sink,
        out=out,
        statistics=statistics,
        cos=cos,
        sin=sin,
    )
    _attention_launch(*key, get_ident())(stream, pointers)


def _launch_cluster(key: tuple[Any, ...], stream: int, addresses: Sequence[int]) -> None:
    """Launch ``NarrowKernel`` or ``ColumnsKernel`` likewise."""
    q, window, window_slots, compressed, compressed_slots, sink, out, cos, sin = addresses
    pointers = _cluster_pointers(
        q=q,
        window=window,
        window_slots=window_slots,
        compressed=compressed,
        compressed_slots=compressed_slots,
        sink=sink,
        out=out,
        cos=cos,
        sin=sin,
    )
    _cluster_launch(*key, get_ident())(stream, pointers)


def _launch_merge(key: tuple[int, ...], stream: int, addresses: Sequence[int]) -> None:
    """Launch ``MergeKernel`` likewise."""
    partials, statistics, sink, out, cos, sin = addresses
    pointers = _merge_pointers(
        partials=partials, statistics=statistics, sink=sink, out=out, cos=cos, sin=sin
    )
    _merge_launch(*key, get_ident())(stream, pointers)


@functools.lru_cache(maxsize=4096)
def _attention_launch(
    plan: AttentionPlan, splits: int, problem: _Problem, count: int, thread: int
) -> Launch:
    """Make a launch, once in every thread, because it has buffers and making it takes long.

    Args:
        plan: Plan of the kernel.
        splits: KV splits of a token.
        problem: Sizes and strides.
        count: SMs of the GPU.
        thread: Number of the caller's thread.
    """
    tiles = head_tiles(problem.heads)
    items = problem.tokens * splits * tiles
    # CTAs are persistent, but for pairs: both of one run, and neither has a next item.
    most = items if plan.paired else count
    return ATTENTION_ABI.launch(
        _ready(plan, problem.device),
        min(items, most),
        (),  # no TMA copies
        **_scalars(problem),
        splits=splits,
        head_tiles=tiles,
        items=items,
        scan=scans_slots(splits if plan.split else 1, problem.widths),
    )


@functools.lru_cache(maxsize=4096)
def _cluster_launch(plan: NarrowPlan | ColumnsPlan, problem: _Problem, thread: int) -> Launch:
    """A cluster for every token and tile of heads."""
    tiles = -(-problem.heads // plan.heads)
    return CLUSTER_ATTENTION_ABI.launch(
        _ready(plan, problem.device),
        problem.tokens * tiles * plan.ctas,
        (),  # no TMA copies
        **_scalars(problem),
        head_tiles=tiles,
    )


@functools.lru_cache(maxsize=4096)
def _merge_launch(tokens: int, heads: int, splits: int, device: int, thread: int) -> Launch:
    """A CTA for every token and head."""
    kernel = _ready(MergePlan(), device)
    return MERGE_ABI.launch(kernel, tokens * heads, heads=heads, splits=splits)


def _scalars(problem: _Problem) -> dict[str, float]:
    """Scalars that the kernels with queries have in common."""
    return {
        "token_stride": problem.token_stride,
        "head_stride": problem.head_stride,
        "window_stride": problem.window_stride,
        "compressed_stride": problem.compressed_stride,
        "window_width": problem.window_width,
        "compressed_width": problem.compressed_width,
        "window_shift": problem.window_page_size.bit_length() - 1,
        "compressed_shift": problem.compressed_page_size.bit_length() - 1,
        "heads": problem.heads,
        "scale": problem.scale,
    }


def _ready(plan: Plan, device: int) -> Kernel:
    """The kernel of a plan, made ready on the current GPU."""
    kernel = loaded(plan, HOPPER)
    kernel.prepare(device)
    return kernel


@functools.cache
def _fitting_plan(
    plan: NarrowPlan, widths: tuple[int, int], clusters: int, device: int
) -> NarrowPlan:
    """The plan, or one of smaller clusters if not all clusters run at once on the current GPU."""
    if loaded(plan, HOPPER).prepare(device) >= clusters:
        return plan
    smaller = [ctas for ctas in NARROW_CLUSTERS if ctas < plan.ctas]
    fitting = [c for c in smaller if loaded(NarrowPlan(c), HOPPER).prepare(device) >= clusters]
    return narrow_plan(widths, fitting or NARROW_CLUSTERS[:1])


def _sms(device: int) -> int:
    return sms(torch.device("cuda", device))


def plans() -> list[Plan]:
    """All kernels, for ``dsv4.warmup``."""
    return [
        AttentionPlan(False),
        AttentionPlan(False, dequant_warps=4),
        AttentionPlan(True),
        AttentionPlan(False, paired=True),
        MergePlan(),
        *(NarrowPlan(ctas, step) for ctas in NARROW_CLUSTERS for step in NARROW_STEPS),
        *map(ColumnsPlan, COLUMN_CLUSTERS),
    ]
