"""CuTeDSL kernels of ``dsv4.ops.indexer``: scores of MXFP4 keys, and the choice from long rows.

What they do not take the Triton kernels do.
"""

from __future__ import annotations

import functools
import struct
from threading import get_ident

import torch

from dsv4.cute.runtime.architectures import HOPPER
from dsv4.cute.runtime.driver import Launch, Parameters
from dsv4.cute.runtime.launch import PackedLaunch, loaded, on, run_noted, stream_of
from dsv4.cute.sm90.indexer_logits_plan import IndexerLogitsPlan, multiplies
from dsv4.cute.sm90.topk_plan import TOPK_ABI, is_long, topk_plan
from dsv4.ops.indexer import IndexerSelectArgs
from dsv4.triton._launch import multiprocessors
from dsv4.triton.indexer import Keys, launch_scores, scored, select

_SCORE = Parameters(*"qqqqqqqqq", *"qq", *"iiiiiiiiiiiii", "I", "i")
_SCORE_PACKED = struct.Struct("@11q13iIi")
_WHOLE = 16384  # entries up to which a row is looked at without groups
_GROUP = 8  # entries per group, or twice as many
_LONG = 131072  # entries from which groups are the larger ones
_PAIR = 128  # entries that are scored at a time


def indexer_select(args: IndexerSelectArgs) -> torch.Tensor:
    """See ``dsv4.ops.indexer.indexer_select``."""
    q, visible = args.q, args.visible
    keys = Keys(args.data, args.page_size, args.entry_format, args.page_table)
    capacity, k = keys.capacity, min(args.top_k, keys.capacity)
    integers = multiplies(
        q, args.weights, args.data, args.page_size, args.entry_format, args.query_scales, capacity
    )
    scorer = score if integers else launch_scores
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


def score(
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
    """As ``dsv4.triton.indexer.launch_scores``, where ``multiplies`` supports the arguments."""
    assert query_scales is not None
    tokens, heads, _ = q.shape
    query_scales = query_scales.contiguous()
    pairs, all_ = -(-keys.capacity // _PAIR), multiprocessors(q.device)
    # Blocks that take a whole multiprocessor must leave few without one.
    whole = 10 * tokens * (all_ // tokens) >= 9 * all_
    plan = IndexerLogitsPlan(group, 4 if whole else 2)
    splits = max(1, plan.resident * all_ // tokens)
    splits = min(splits, -(-pairs // plan.warpgroups))
    numbers = (
        q.stride(0),
        q.stride(1),
        keys.data.stride(0),
        keys.page_table.stride(0),
        scores.stride(0),
        maxima.stride(0),
        heads,
        keys.capacity,
        k,
        keys.page_size.bit_length() - 1,
        splits,
        keys.page_table.element_size(),
        sequences.element_size(),
        visible.element_size(),
        1 << 16,
        # The upper half of this times twice a block's number is its token, without a division.
        (1 << 31) // splits + 1,
        keys.page_table.shape[0],
    )
    with on(q.get_device()):
        kernel = loaded(plan, HOPPER)
        kernel.prepare(q.device.index)
        run_noted(
            PackedLaunch(kernel, tokens * splits, _SCORE, _SCORE_PACKED, numbers),
            stream_of(q.device.index),
            (
                q,
                query_scales,
                weights,
                keys.data,
                keys.page_table,
                sequences,
                visible,
                scores,
                maxima,
            ),
        )
