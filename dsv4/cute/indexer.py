"""Launchers of the CuTeDSL kernels of ``dsv4.ops.indexer``: logits of MXFP4 keys, and top-k.

Triton's kernels compute logits of other keys, and select from short rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from threading import get_ident
from typing import NamedTuple

import torch

from dsv4.cute.runtime.architectures import HOPPER
from dsv4.cute.runtime.driver import Launch
from dsv4.cute.runtime.launch import loaded, on, run_noted, stream_of
from dsv4.cute.sm90.indexer_logits_plan import (
    INDEXER_LOGITS_ABI,
    IndexerLogitsPlan,
    supports_int8,
)
from dsv4.cute.sm90.topk_plan import TOPK_ABI, is_long, topk_plan
from dsv4.device import sms
from dsv4.ops.indexer import IndexerSelectArgs
from dsv4.triton._runtime import launch_options
from dsv4.triton.indexer_select import (
    ScoreRow,
    Scoring,
    Selected,
    SlotTable,
    launch_scores,
    scored,
    select,
    slots_of,
)

_DIRECT = 16384  # entries up to which a row is read as a whole, without maxima of groups
_GROUP = 8  # entries of a group in rows shorter than ``_LONG``, else twice as many
_LONG = 131072
_PAIR = 128  # entries of two blocks, which a warpgroup takes at a time

_topk_pointers, _logits_pointers = TOPK_ABI.pointers, INDEXER_LOGITS_ABI.pointers


class _TopkProblem(NamedTuple):
    """Sizes and strides of a call of ``topk``, which determine every scalar of its launch."""

    tokens: int
    k: int
    capacity: int
    group: int
    visible_bytes: int
    key_stride: int
    maxima_stride: int
    device: int
    pages: _PagesProblem | None


class _PagesProblem(NamedTuple):
    """The same of the table of slots."""

    page_size: int
    table_stride: int
    table_bytes: int
    sequence_bytes: int


class _LogitsProblem(NamedTuple):
    """Sizes and strides of a call of ``indexer_logits``, which determine every scalar likewise."""

    tokens: int
    heads: int
    capacity: int
    k: int
    group: int
    page_size: int
    table_rows: int
    token_stride: int
    head_stride: int
    page_stride: int
    table_stride: int
    score_stride: int
    maxima_stride: int
    table_bytes: int
    sequence_bytes: int
    visible_bytes: int
    sms: int
    device: int


def indexer_select(args: IndexerSelectArgs) -> torch.Tensor:
    """See ``dsv4.ops.indexer.indexer_select``."""
    q, operands = args.q, Scoring.of(args)
    capacity = operands.keys.capacity
    k = min(args.top_k, capacity)
    integers = supports_int8(
        q, args.weights, args.data, args.page_size, args.entry_format, args.query_scales, capacity
    )
    scorer = indexer_logits if integers else launch_scores
    if not is_long(capacity, k):
        return select(operands, args.top_k, scorer, args.slots)
    out = q.new_empty((q.shape[0], k), dtype=torch.int64)
    if out.numel() == 0:
        return out
    group = 0 if capacity <= _DIRECT else _GROUP if capacity < _LONG else 2 * _GROUP
    groups = _rounded(-(-capacity // group)) if group else 0
    row = ScoreRow(_rounded(capacity), group, groups)
    looks_up = args.slots and args.page_size == launch_options.power_of_two(args.page_size)
    slot_table = SlotTable.of(operands) if looks_up else None
    for part, scores, maxima in scored(operands, k, row, scorer):
        rows = Selected(operands.visible[part], out[part], slot_table and slot_table.part(part))
        topk(scores, maxima, rows, capacity, group)
    return slots_of(operands, out) if args.slots and slot_table is None else out


def _rounded(number: int) -> int:
    """``number`` words, rounded up to a multiple of 16 bytes."""
    return -(-number // 4) * 4


def topk(
    keys: torch.Tensor, maxima: torch.Tensor, rows: Selected, capacity: int, group: int
) -> None:
    """Select the positions, or slots, of the highest keys of each row.

    Args:
        keys: int32 ``[at least T, width]``, ``width`` a multiple of 4: unsigned keys.
        maxima: int32 ``[at least T, any]``, the highest of every ``group`` neighbours.
        rows: Rows; k is at most 1024, and pages of a table have a power of two of entries.
        capacity: Entries of a row, at most.
        group: 8 or 16; 0: there are no maxima.
    """
    visible, out, slot_table = rows
    device = out.get_device()
    tokens, k = out.shape
    tensors: tuple[torch.Tensor, ...] = (keys, maxima, visible, out)
    pages = None
    if slot_table is not None:
        table, sequences = slot_table.page_table, slot_table.sequences
        sizes = table.stride(0), table.element_size(), sequences.element_size()
        pages = _PagesProblem(slot_table.page_size, *sizes)
        tensors = (*tensors, table, sequences)
    # In the order of the fields: by keyword it takes 1 us more in every call.
    problem = _TopkProblem(
        tokens,
        k,
        capacity,
        group,
        visible.element_size(),
        keys.stride(0),
        maxima.stride(0),
        device,
        pages,
    )
    with on(device):
        run_noted(functools.partial(_launch_topk, problem), stream_of(device), tensors)


def _launch_topk(problem: _TopkProblem, stream: int, addresses: Sequence[int]) -> None:
    """Launch a top-k kernel on the current GPU.

    Args:
        problem: Sizes and strides.
        stream: The driver's handle.
        addresses: Addresses of keys, maxima, numbers of visible entries and results, then, with
            ``problem.pages``, of table and sequences.
    """
    keys, maxima, visible, out, *of_slots = addresses
    table, sequences = of_slots or (0, 0)
    pointers = _topk_pointers(
        keys=keys, maxima=maxima, visible=visible, table=table, sequences=sequences, out=out
    )
    _topk_launch(problem, get_ident())(stream, pointers)


@functools.lru_cache(maxsize=4096)
def _topk_launch(problem: _TopkProblem, thread: int) -> Launch:
    """Make a launch, once in every thread, because it has buffers and making it takes long."""
    pages = problem.pages
    plan = topk_plan(problem.tokens, problem.group, pages is not None)
    kernel = loaded(plan, HOPPER)
    kernel.prepare(problem.device)
    return TOPK_ABI.launch(
        kernel,
        problem.tokens * plan.ctas,
        key_stride=problem.key_stride,
        maxima_stride=problem.maxima_stride,
        table_stride=0 if pages is None else pages.table_stride,
        page_shift=0 if pages is None else pages.page_size.bit_length() - 1,
        visible_bytes=problem.visible_bytes,
        table_bytes=0 if pages is None else pages.table_bytes,
        sequence_bytes=0 if pages is None else pages.sequence_bytes,
        capacity=problem.capacity,
        k=problem.k,
        slack=max(16, problem.k // 8),
        direct=_DIRECT if problem.group else problem.capacity,
    )


def indexer_logits(
    operands: Scoring, scores: torch.Tensor, maxima: torch.Tensor, k: int, group: int
) -> None:
    """Do what ``triton.indexer_select.launch_scores`` does, if ``supports_int8`` supports it."""
    q, query_scales, weights, keys, sequences, visible = operands
    assert query_scales is not None
    query_scales, table, device = query_scales.contiguous(), keys.page_table, q.get_device()
    tokens, heads, _ = q.shape
    # In the order of the fields, as above.
    problem = _LogitsProblem(
        tokens,
        heads,
        keys.capacity,
        k,
        group,
        keys.page_size,
        table.shape[0],
        q.stride(0),
        q.stride(1),
        keys.data.stride(0),
        table.stride(0),
        scores.stride(0),
        maxima.stride(0),
        table.element_size(),
        sequences.element_size(),
        visible.element_size(),
        sms(q.device),
        device,
    )
    tensors = (q, query_scales, weights, keys.data, table, sequences, visible, scores, maxima)
    with on(device):
        run_noted(functools.partial(_launch_logits, problem), stream_of(device), tensors)


def _launch_logits(problem: _LogitsProblem, stream: int, addresses: Sequence[int]) -> None:
    """Launch ``IndexerLogitsKernel`` on the current GPU.

    Args:
        problem: Sizes and strides.
        stream: The driver's handle.
        addresses: Addresses of the pointers of ``IndexerLogitsArgs``, in their order.
    """
    q, q_scales, weights, cache, table, sequences, visible, scores, maxima = addresses
    pointers = _logits_pointers(
        q=q,
        q_scales=q_scales,
        weights=weights,
        cache=cache,
        table=table,
        sequences=sequences,
        visible=visible,
        scores=scores,
        maxima=maxima,
    )
    _logits_launch(problem, get_ident())(stream, pointers)


@functools.lru_cache(maxsize=4096)
def _logits_launch(problem: _LogitsProblem, thread: int) -> Launch:
    """Make a launch, once in every thread, as ``_topk_launch`` does."""
    plan, splits = _logits_plan(problem)
    kernel = loaded(plan, HOPPER)
    kernel.prepare(problem.device)
    return INDEXER_LOGITS_ABI.launch(
        kernel,
        problem.tokens * splits,
        token_stride=problem.token_stride,
        head_stride=problem.head_stride,
        page_stride=problem.page_stride,
        table_stride=problem.table_stride,
        score_stride=problem.score_stride,
        maxima_stride=problem.maxima_stride,
        heads=problem.heads,
        capacity=problem.capacity,
        k=problem.k,
        page_shift=problem.page_size.bit_length() - 1,
        splits=splits,
        table_bytes=problem.table_bytes,
        sequence_bytes=problem.sequence_bytes,
        visible_bytes=problem.visible_bytes,
        shift16=1 << 16,
        inverse_splits=(1 << 31) // splits + 1,
        table_rows=problem.table_rows,
    )


def _logits_plan(problem: _LogitsProblem) -> tuple[IndexerLogitsPlan, int]:
    """The kernel's configuration, and the CTAs that share a token's entries."""
    tokens, count = problem.tokens, problem.sms
    # A CTA of four warpgroups takes a whole SM: they must leave at most a tenth of the SMs idle.
    fills = 10 * tokens * (count // tokens) >= 9 * count
    plan = IndexerLogitsPlan(problem.group, 4 if fills else 2)
    splits = max(1, plan.ctas_per_sm * count // tokens)
    pairs = -(-problem.capacity // _PAIR)
    return plan, min(splits, -(-pairs // plan.warpgroups))
