"""Arguments of the sparse-attention kernels; needs no compiler.

A slot is an int64 number of an entry in a paged KV cache; a negative slot names no entry. A page
holds ``2^shift`` entries, first the bytes of each (448 E4M3 codes, 64 bfloat16 rotary dims), then 8
bytes of E8M0 block scales for each.
"""

from __future__ import annotations

from typing import NamedTuple

from dsv4.cute.runtime.kernel_abi import Empty, Float32, Int32, Int64, KernelAbi, Pointer


class AttentionLayouts(NamedTuple):
    """Shared-memory layouts of ``AttentionKernel``, known when compiling.

    Attributes:
        q_layout: Layout of the tile of queries.
        k_layout: Layout of the stages of dequantized entries.
        p_layout: Layout of the softmax weights that one warpgroup gives to the other.
    """

    q_layout: Empty
    k_layout: Empty
    p_layout: Empty


class AttentionArgs(NamedTuple):
    """Arguments of ``AttentionKernel``, whose tiles have 64 heads.

    Attributes:
        q: bfloat16 ``[tokens, heads, 512]``.
        window: Pages of the first KV cache.
        window_slots: int64 ``[tokens, window_width]``.
        compressed: Pages of the second KV cache.
        compressed_slots: int64 ``[tokens, compressed_width]``.
        sink: float32 ``[heads]``, a logit that takes part in the softmax and has no value.
        out: bfloat16 ``[tokens, heads, 512]``; where the plan is ``split``, packed partial sums
            ``[tokens, splits, heads, PACKED_BYTES]``.
        statistics: Where the plan is ``split``, float32 ``[tokens, splits, heads, 2]``: the
            reference of the partial sums (a power of two) and the sum of softmax weights.
        cos: float32 ``[tokens, 32]``, angles by which the last 64 dims are rotated back; 0 for
            none. Not read where the plan is ``split``.
        sin: Like ``cos``.
        token_stride: Elements of q from one token to the next.
        head_stride: Elements of q from one head to the next.
        window_stride: Bytes from one page to the next.
        compressed_stride: Like ``window_stride``.
        window_width: Slots of a token in the first cache.
        compressed_width: Slots of a token in the second cache.
        window_shift: Base-2 logarithm of the entries of a page.
        compressed_shift: Like ``window_shift``.
        heads: Heads of q.
        splits: KV splits of a token.
        head_tiles: Tiles of 64 heads of a token.
        items: Work items, ``tokens * splits * head_tiles``: head tiles vary fastest, then splits.
            Where the plan is ``paired``, splits vary fastest.
        scan: 1 to look for a token's last used slot, 0 to visit all slots.
        scale: Factor on the logits, above 0.
    """

    q: Pointer
    window: Pointer
    window_slots: Pointer
    compressed: Pointer
    compressed_slots: Pointer
    sink: Pointer
    out: Pointer
    statistics: Pointer
    cos: Pointer
    sin: Pointer
    token_stride: Int64
    head_stride: Int64
    window_stride: Int64
    compressed_stride: Int64
    window_width: Int32
    compressed_width: Int32
    window_shift: Int32
    compressed_shift: Int32
    heads: Int32
    splits: Int32
    head_tiles: Int32
    items: Int32
    scan: Int32
    scale: Float32


class ClusterAttentionArgs(NamedTuple):
    """Arguments of ``NarrowKernel`` and ``ColumnsKernel``, whose tiles have 16 heads.

    Those that are not listed are as in ``AttentionArgs``.

    Attributes:
        out: bfloat16 ``[tokens, heads, 512]``.
        cos: float32 ``[tokens, 32]``, angles by which the last 64 dims are rotated back; 0 for
            none.
        head_tiles: Tiles of 16 heads of a token.
    """

    q: Pointer
    window: Pointer
    window_slots: Pointer
    compressed: Pointer
    compressed_slots: Pointer
    sink: Pointer
    out: Pointer
    cos: Pointer
    sin: Pointer
    token_stride: Int64
    head_stride: Int64
    window_stride: Int64
    compressed_stride: Int64
    window_width: Int32
    compressed_width: Int32
    window_shift: Int32
    compressed_shift: Int32
    heads: Int32
    head_tiles: Int32
    scale: Float32


class MergeArgs(NamedTuple):
    """Arguments of ``MergeKernel``.

    Attributes:
        partials: Packed partial sums, ``[tokens, splits, heads, PACKED_BYTES]``.
        statistics: float32 ``[tokens, splits, heads, 2]``: the reference of the partial sums (a
            power of two) and the sum of softmax weights.
        sink: float32 ``[heads]``.
        out: bfloat16 ``[tokens, heads, 512]``.
        cos: float32 ``[tokens, 32]``, angles by which the last 64 dims are rotated back; 0 for
            none.
        sin: Like ``cos``.
        heads: Heads of a token.
        splits: KV splits of a token.
    """

    partials: Pointer
    statistics: Pointer
    sink: Pointer
    out: Pointer
    cos: Pointer
    sin: Pointer
    heads: Int32
    splits: Int32


ATTENTION_ABI = KernelAbi(AttentionLayouts, AttentionArgs)
CLUSTER_ATTENTION_ABI = KernelAbi(ClusterAttentionArgs)
MERGE_ABI = KernelAbi(MergeArgs)
