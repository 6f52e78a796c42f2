"""Kernel of ``dsv4.ops.head_norm_rope_write_kv``: some programs have entries, the others heads.

Programs are those of ``norm_rope_write_kv`` and ``head_norm_rope_`` for few tokens, so the bits are
theirs. Both kinds have one warp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.ops._library import as_record
from dsv4.ops.head_norm_rope_write_kv import HeadNormRopeWriteKvArgs
from dsv4.ops.kv_cache import NormRopeWriteKvArgs
from dsv4.ops.norm import HeadNormRopeArgs
from dsv4.triton import kv_cache, norm
from dsv4.triton._runtime import launch_options
from dsv4.triton._runtime.launcher import fast_launch
from dsv4.triton.kv_cache import SharedEntries, write_shared_entry
from dsv4.triton.norm import Heads, norm_rotate_heads


@fast_launch
@triton.jit(do_not_specialize=["entry_programs", "count"])
def _heads_and_entries_kernel(
    entry_programs,
    data,
    data_stride,
    kv,
    stride,
    weight,
    cos,
    sin,
    table_stride,
    slots,
    kv_eps,
    q,
    token_stride,
    head_stride,
    head_cos,
    head_sin,
    head_table_stride,
    heads,
    count,
    q_eps,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SHARES: tl.constexpr,
    WHOLE: tl.constexpr,
    UNROTATED: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Entries come first: theirs are the longer programs."""
    program = tl.program_id(0)
    if program < entry_programs:
        write_shared_entry(
            program,
            data,
            data_stride,
            kv,
            stride,
            weight,
            cos,
            sin,
            table_stride,
            slots,
            kv_eps,
            NOPE,
            ROPE,
            PAGE_SIZE,
            SHARES,
            WHOLE,
            PDL,
        )
    else:
        norm_rotate_heads(
            program - entry_programs,
            q,
            token_stride,
            head_stride,
            head_cos,
            head_sin,
            head_table_stride,
            heads,
            count,
            q_eps,
            UNROTATED,
            HALF,
            ROWS,
            BLOCK,
            PDL,
        )


def head_norm_rope_write_kv(args: HeadNormRopeWriteKvArgs) -> None:
    """See ``dsv4.ops.head_norm_rope_write_kv.head_norm_rope_write_kv``.

    Many tokens, and dims that one warp does not hold, take a launch for heads and one for entries.
    """
    of_heads = as_record(HeadNormRopeArgs, args, eps=args.q_eps)
    of_entries = as_record(NormRopeWriteKvArgs, args, eps=args.kv_eps)
    heads = Heads.of(of_heads) if args.q.numel() and args.data.shape[0] else None
    entries = None if heads is None or heads.warps > 1 else SharedEntries.of(of_entries)
    if heads is None or entries is None:
        norm.head_norm_rope_(of_heads)
        kv_cache.norm_rope_write_kv(of_entries)
        return
    programs = entries.programs + heads.programs
    small = launch_options.is_small(programs, 1)
    with launch_options.on(args.q):
        _heads_and_entries_kernel[(programs,)](
            entries.programs,
            *entries.arguments,
            args.kv_eps,
            *heads.arguments,
            args.q_eps,
            **entries.constants,
            **heads.constants,
            num_warps=1,
            **launch_options.options(args.q, small=small),
        )
