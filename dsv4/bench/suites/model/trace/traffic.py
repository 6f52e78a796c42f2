"""Bytes that the operator calls of a step have to read and write.

Most operators read all of their arguments once (``_WHOLE``): the bytes follow from sizes. Others
read some experts, entries or states. Which ones, numbers on the device say: the experts' offsets,
slots, lengths. These bytes are counted after the step has run, from the numbers that it has left
(``_COUNTED``). All other operators have no bytes.

These are the least bytes, not measured ones: each is counted once, though a kernel may load it
again or from L2, and what launches of one call pass to each other is not counted. Exact in this
sense are GEMMs, routed experts (those that have rows), entries that attention reads, entries and
states that are written. Estimates are:

* ``sparse_attention``: all slots are counted, also empty ones, where a kernel may stop early.
* ``indexer_select``: visible keys alone, where a kernel reads whole tiles of them.
* ``compress_write``: states of the window that closes first. It is exact for one token of each
  sequence; calls that close several overlapping windows read some states twice.
* Slots of entries: page numbers are not counted.
* ``moe_sort``, ``moe_combine`` and the like: on several ranks rows of other ranks are counted, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import torch

from dsv4.kv_cache.pages import entry_layout
from dsv4.ops._library import Written
from dsv4.ops.attention import SparseAttentionArgs
from dsv4.ops.compressor import CompressWriteArgs
from dsv4.ops.grouped_gemm import GroupedGemmArgs
from dsv4.ops.grouped_gemm_swiglu import GroupedGemmSwigluArgs, GroupedGemmSwigluQuantizeArgs
from dsv4.ops.grouped_gemm_swiglu_fp8 import GroupedGemmSwigluFp8Args
from dsv4.ops.head_norm_rope_write_kv import HeadNormRopeWriteKvArgs
from dsv4.ops.indexer import IndexerSelectArgs
from dsv4.ops.kv_cache import NormRopeWriteKvArgs, WriteKvArgs
from dsv4.ops.router import RouteHashArgs

GroupedArgs = (
    GroupedGemmArgs
    | GroupedGemmSwigluArgs
    | GroupedGemmSwigluQuantizeArgs
    | GroupedGemmSwigluFp8Args
)
# Counts bytes once the step has run. It holds the numbers that they depend on, and no operands.
Count = Callable[[], int]

# Operators that read all of their arguments once.
_WHOLE = frozenset(
    (
        *("gemm", "gemm_swiglu", "compressor_projections", "route_topk", "rms_norm"),
        *("rms_norm_pair", "rms_norm_quantize", "head_norm_rope_", "swiglu", "swiglu_quantize"),
        *("hc_pre", "hc_post", "hc_head", "hc_pre_norm", "hc_post_pre_norm", "quantize_nvfp4"),
        *("hc_combine_post", "hc_combine_post_pre_norm"),
        *("hc_pre_norm_quantize", "hc_post_pre_norm_quantize", "quantize_index_queries"),
        *("rope", "rope_quantize", "rope_tables", "quantize_fp8_token", "all_reduce"),
        *("rms_norm_fp8", "swiglu_fp8", "indexer_queries", "indexer_rotate_quantize"),
        *("moe_permute", "moe_gather", "moe_sort", "moe_combine"),
        *("moe_gather_quantize", "moe_gather_fp8", "mark_nonfinite_"),
    )
)


def traffic_of(op: str, args: Any, result: Any) -> int | Count | None:
    """Return the bytes of a call, or what counts them after the step; None if nothing does.

    Args:
        op: Name of the operator.
        args: Its record.
        result: Its results.
    """
    if op in _WHOLE:
        return moved_bytes((args, result)) + moved_bytes(written(args))
    count = _COUNTED.get(op)
    return None if count is None else count(args, result)


def moved_bytes(values: Any) -> int:
    """Return the bytes of all distinct tensors in nested tuples and lists."""
    sizes: dict[tuple[int, int], int] = {}
    stack = [values]
    while stack:
        value = stack.pop()
        if isinstance(value, torch.Tensor):
            sizes[value.data_ptr(), value.nbytes] = value.nbytes
        elif isinstance(value, (tuple, list)):
            stack.extend(value)
    return sum(sizes.values())


def written(args: Any) -> list[torch.Tensor]:
    """Return the tensors of a record that the operator changes in place."""
    record: Any = type(args)
    return [getattr(args, name) for name in _written_names(record)]


@functools.cache
def _written_names(record: Any) -> tuple[str, ...]:
    hints = get_type_hints(record, include_extras=True)
    return tuple(name for name, kind in hints.items() if kind == Written)


def entry_bytes(entry_format: str, data: torch.Tensor, head_dim: int, rope_dim: int) -> int:
    """Return the bytes of an entry with its scales, given its format and the pages' storage."""
    if entry_format == "plain":
        return head_dim * data.element_size()
    layout = entry_layout(entry_format, head_dim, rope_dim)
    return layout.data_bytes + layout.scale_bytes


def _experts(args: GroupedArgs, result: Any) -> Count:
    """Weights of the experts that have rows, and these rows."""
    experts, rows = args.weight.shape[0], max(args.x.shape[0], 1)
    of_experts = [args.weight, args.scales, args.global_scale, args.row_exponent, args.input_scale]
    of_experts.append(getattr(args, "result_scale", None))
    of_rows = [args.x, args.x_scales, args.row_scale, getattr(args, "row_weight", None), result]
    weight, row, offsets = (
        moved_bytes(of_experts) / experts,
        moved_bytes(of_rows) / rows,
        args.offsets,
    )

    def count() -> int:
        chosen = int((offsets.diff() > 0).sum())
        return round(weight * chosen + row * int(offsets[-1] - offsets[0])) + offsets.nbytes

    return count


def _attention(args: SparseAttentionArgs, result: Any) -> Count:
    """Queries, results, slots, and each entry that a slot names."""
    fixed = moved_bytes((args.q, result, args.sink, args.cos, args.sin))
    fixed += moved_bytes((args.window_slots, args.compressed_slots))
    dims = args.q.shape[-1], args.rope_dim
    pools = [(args.window_slots, entry_bytes(args.window_format, args.window, *dims))]
    if args.compressed is not None and args.compressed_slots is not None:
        size = entry_bytes(args.compressed_format, args.compressed, *dims)
        pools.append((args.compressed_slots, size))
    return lambda: fixed + sum(_distinct(slots) * size for slots, size in pools)


def _distinct(slots: torch.Tensor) -> int:
    return int(slots[slots >= 0].unique().numel())


def _selection(args: IndexerSelectArgs, result: Any) -> Count:
    """Queries, chosen entries, and each sequence's visible keys."""
    visible, sequences = args.visible, args.sequence_of_token
    fixed = moved_bytes((args.q, args.query_scales, args.weights, visible, sequences, result))
    head_dim = args.q.shape[-1] * (1 if args.query_scales is None else 2)
    size = entry_bytes(args.entry_format, args.data, head_dim, args.rope_dim)
    rows, most = args.page_table.shape[0], args.page_table.shape[1] * args.page_size

    def count() -> int:
        keys = visible.new_zeros(rows, dtype=torch.int64)
        longest = visible.long().clamp(0, most)
        keys.scatter_reduce_(0, sequences.long().clamp(min=0), longest, "amax")
        return fixed + size * int(keys.sum())

    return count


def _compressed(args: CompressWriteArgs, result: Any) -> Count:
    """New tokens, their states, and of each window that closes its states and its entry."""
    ratio, slots, overlap = args.ape.shape[0], args.state.shape[1], args.overlap
    token = moved_bytes((args.kv[:1], args.score[:1], args.ape[:1]))
    state = args.state[0, 0].nbytes if args.state.shape[0] else 0
    entry = entry_bytes(args.entry_format, args.data, args.head_dim, args.rope_dim)
    of_entries = moved_bytes((args.norm_weight, args.inv_freq))
    bounds, starts, sequences = args.cu_seqlens, args.starts, args.sequences

    def count() -> int:
        tokens = torch.where(sequences >= 0, bounds.diff(), 0)
        closed = (starts + tokens) // ratio - starts // ratio
        before = starts % ratio + (ratio if overlap else 0) * (starts >= ratio)
        read = int(torch.where(closed > 0, before, 0).sum()) * state // (1 + overlap)
        stored = int(tokens.clamp(max=slots).sum()) * state
        entries = int(closed.sum())
        return (
            int(tokens.sum()) * token + stored + read + entries * entry + of_entries * (entries > 0)
        )

    return count


def _entries(args: NormRopeWriteKvArgs | WriteKvArgs | HeadNormRopeWriteKvArgs, _: Any) -> Count:
    """Write an entry for each slot that is not negative; queries are read and written."""
    operands = [value for name, value in args._asdict().items() if name != "data"]
    in_place = [tensor for tensor in written(args) if tensor is not args.data]
    fixed, slots = moved_bytes(operands) + moved_bytes(in_place), args.slots
    size = entry_bytes(args.entry_format, args.data, args.head_dim, args.rope_dim)
    return lambda: fixed + size * int((slots >= 0).sum())


def _slots(args: Any, result: Any) -> int:
    """Results and all arguments but the page table."""
    return moved_bytes(([value for value in args if value is not args.page_table], result))


def _hash(args: RouteHashArgs, result: Any) -> int:
    """One row of experts for each token."""
    rest: Sequence[Any] = [value for value in args if value is not args.tid2eid]
    return moved_bytes((rest, result)) + args.tid2eid[:1].nbytes * args.input_ids.shape[0]


_COUNTED: dict[str, Callable[[Any, Any], int | Count]] = {
    "grouped_gemm": _experts,
    "grouped_gemm_swiglu": _experts,
    "grouped_gemm_swiglu_quantize": _experts,
    "grouped_gemm_swiglu_fp8": _experts,
    "sparse_attention": _attention,
    "indexer_select": _selection,
    "compress_write": _compressed,
    "norm_rope_write_kv": _entries,
    "head_norm_rope_write_kv": _entries,
    "write_kv": _entries,
    "entry_slots": _slots,
    "prefix_slots": _slots,
    "window_slots": _slots,
    "route_hash": _hash,
}
