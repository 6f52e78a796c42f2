"""CuTeDSL kernels of ``dsv4.ops.indexer``: scores of MXFP4 keys, and the choice from long rows.

What they do not take the Triton kernels do.
"""

from __future__ import annotations

import functools
from threading import get_ident

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
from dsv4.ops.indexer import IndexerSelectArgs
from dsv4.triton._launch import multiprocessors
from dsv4.triton.indexer import Keys, launch_scores, scored, select

_WHOLE = 16384  # entries up to which a row is looked at without groups
_GROUP = 8  # entries per group, or twice as many
_LONG = 131072  # entries from which groups are the larger ones
_PAIR = 128  # entries that are scored at a time


def indexer_select(args: IndexerSelectArgs) -> torch.Tensor:
    """See ``dsv4.ops.indexer.indexer_select``."""
    q, visible = args.q, args.visible
    keys = Keys(args.data, args.page_size, args.entry_format, args.page_table)
    capacity, k = keys.capacity, min(args.top_k, keys.capacity)
    integers = supports_int8(
        q, args.weights, args.data, args.page_size, args.entry_format, args.query_scales, capacity
    )
    scorer = indexer_logits if integers else launch_scores
    if not is_long(capacity, k):
        rest = (keys, args.sequence_of_token, visible, args.top_k, scorer)
        return select(q, args.query_scales, args.weights, *rest)
    out = q.new_empty((q.shape[0], k), dtype=torch.int64)
    if out.numel() == 0:
        return out
    group = 0 if capacity <= _WHOLE else _GROUP if capacity < _LONG else 2 * _GROUP
    groups = _whole(-(-capacity // group)) if group else 0
    visible, row = visible.contiguous(), (_whole(capacity), group, groups)
    parts = scored(
        q, args.query_scales, args.weights, keys, args.sequence_of_token, visible, k, *row, scorer
    )
    for part, scores, maxima in parts:
        topk(scores, maxima, visible[part], out[part], capacity, group)
    return out


def _whole(number: int) -> int:
    """So many numbers, rounded up to a multiple of 16 bytes."""
    return -(-number // 4) * 4


def topk(
    keys: torch.Tensor,
    maxima: torch.Tensor,
    visible: torch.Tensor,
    out: torch.Tensor,
    capacity: int,
    group: int,
) -> None:
    """Select the positions of the highest keys of each row.

    Args:
        keys: int32 ``[at least T, width]``, ``width`` a multiple of 4: unsigned keys.
        maxima: int32 ``[at least T, any]``, the highest of every ``group`` neighbours.
        visible: ``[T]``, int32 or int64.
        out: int64 ``[T, k]``, k at most 1024.
        capacity: Entries of a row, at most.
        group: 8 or 16; 0: there are no maxima.
    """
    device, strides = out.get_device(), (keys.stride(0), maxima.stride(0))
    with on(device):
        sizes = (*out.shape, capacity, group, visible.element_size())
        launch = _topk_launch(*sizes, *strides, device, get_ident())
        run_noted(launch, stream_of(device), (keys, maxima, visible, out))


@functools.lru_cache(maxsize=1024)
def _topk_launch(
    tokens: int,
    k: int,
    capacity: int,
    group: int,
    visible_bytes: int,
    key_stride: int,
    maxima_stride: int,
    device: int,
    thread: int,
) -> Launch:
    """The launch of ``topk``, made once in every thread; its pointers are in the order of ``topk``.

    At least k keys reach the threshold for candidates. ``slack`` of k / 8 more end its search.
    """
    plan = topk_plan(tokens, group)
    kernel = loaded(plan, HOPPER)
    kernel.prepare(device)
    return TOPK_ABI.launch(
        kernel,
        tokens * plan.ctas,
        key_stride=key_stride,
        maxima_stride=maxima_stride,
        visible_bytes=visible_bytes,
        capacity=capacity,
        k=k,
        slack=max(16, k // 8),
        direct=_WHOLE if group else capacity,
    )


def indexer_logits(
    q: torch.Tensor,
    query_scales: torch.Tensor | None,
    weights: torch.Tensor,
    keys: Keys,
    sequences: torch.Tensor,
    visible: torch.Tensor,
    scores: torch.Tensor,
    maxima: torch.Tensor,
    k: int,
    group: int,
) -> None:
    """As ``dsv4.triton.indexer.launch_scores``, of arguments that ``supports_int8`` supports."""
    assert query_scales is not None
    query_scales, table, device = query_scales.contiguous(), keys.page_table, q.get_device()
    launch = _logits_launch(
        q.shape[0],
        q.shape[1],
        keys.capacity,
        k,
        group,
        keys.page_size,
        table.shape[0],
        # Strides, in the units of ``IndexerLogitsArgs``.
        q.stride(0),
        q.stride(1),
        keys.data.stride(0),
        table.stride(0),
        scores.stride(0),
        maxima.stride(0),
        # Bytes of an element.
        table.element_size(),
        sequences.element_size(),
        visible.element_size(),
        q.device,
        get_ident(),
    )
    operands = (q, query_scales, weights, keys.data, table, sequences, visible, scores, maxima)
    with on(device):
        run_noted(launch, stream_of(device), operands)


@functools.lru_cache(maxsize=1024)
def _logits_launch(
    tokens: int,
    heads: int,
    capacity: int,
    k: int,
    group: int,
    page_size: int,
    table_rows: int,
    token_stride: int,
    head_stride: int,
    page_stride: int,
    table_stride: int,
    score_stride: int,
    maxima_stride: int,
    table_bytes: int,
    sequence_bytes: int,
    visible_bytes: int,
    device: torch.device,
    thread: int,
) -> Launch:
    """The launch of ``indexer_logits``, made once in every thread.

    Its pointers are in the order of ``IndexerLogitsArgs``.
    """
    plan, splits = _logits_plan(tokens, capacity, group, multiprocessors(device))
    kernel = loaded(plan, HOPPER)
    kernel.prepare(device.index)
    return INDEXER_LOGITS_ABI.launch(
        kernel,
        tokens * splits,
        token_stride=token_stride,
        head_stride=head_stride,
        page_stride=page_stride,
        table_stride=table_stride,
        score_stride=score_stride,
        maxima_stride=maxima_stride,
        heads=heads,
        capacity=capacity,
        k=k,
        page_shift=page_size.bit_length() - 1,
        splits=splits,
        table_bytes=table_bytes,
        sequence_bytes=sequence_bytes,
        visible_bytes=visible_bytes,
        shift16=1 << 16,
        inverse_splits=(1 << 31) // splits + 1,
        table_rows=table_rows,
    )


def _logits_plan(tokens: int, capacity: int, group: int, sms: int) -> tuple[IndexerLogitsPlan, int]:
    """The kernel's configuration, and the CTAs that share a token's entries."""
    # CTAs of four warpgroups take a whole SM; they must leave few without one.
    fills = 10 * tokens * (sms // tokens) >= 9 * sms
    plan = IndexerLogitsPlan(group, 4 if fills else 2)
    splits = max(1, plan.ctas_per_sm * sms // tokens)
    pairs = -(-capacity // _PAIR)
    return plan, min(splits, -(-pairs // plan.warpgroups))
