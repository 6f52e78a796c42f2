"""Reference implementation of ``dsv4.ops.head_norm_rope_write_kv``."""

from __future__ import annotations

from dsv4.ops._library import as_record
from dsv4.ops.head_norm_rope_write_kv import HeadNormRopeWriteKvArgs
from dsv4.ops.kv_cache import NormRopeWriteKvArgs
from dsv4.ops.norm import HeadNormRopeArgs
from dsv4.reference.kv_cache import norm_rope_write_kv
from dsv4.reference.norm import head_norm_rope_


def head_norm_rope_write_kv(args: HeadNormRopeWriteKvArgs) -> None:
    """See ``dsv4.ops.head_norm_rope_write_kv.head_norm_rope_write_kv``."""
    head_norm_rope_(as_record(HeadNormRopeArgs, args, eps=args.q_eps))
    norm_rope_write_kv(as_record(NormRopeWriteKvArgs, args, eps=args.kv_eps))
