"""FlashMLA: DeepSeek's own kernels of sparse attention, of 64 and 128 heads.

The kernel for decode reads the same entries from the same pages, both caches and the sink in one
call, with slots of int32 in multiples of 64. What it plans by lengths it plans in its first call,
before any timing. The kernel for prompts reads one tensor of bfloat16 entries, which is made
before. A result that is not this package's is refused.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from dsv4.bench.baselines._prepare import Call, FromLibrary, Table
from dsv4.ops.attention import SparseAttentionArgs

MODULE, NAME = "flash_mla", "FlashMLA (no rotation)"
PROMPTS = "FlashMLA prefill (entries in bfloat16; no rotation)"
_HEADS = (64, 128)
_BLOCK = 64  # slots come in multiples of it
_TOLERANCE = 0.01  # relative to the norm; a rounding to bfloat16 is 0.002


def _cache(data: torch.Tensor, size: int, dims: int, rope_dim: int) -> torch.Tensor:
    """Pages ``[P, size, 1, bytes of an entry]``, which lie together only a page at a time."""
    entry = dims + rope_dim + 8
    return data.as_strided((data.shape[0], size, 1, entry), (data.stride(0), entry, entry, 1))


def _indices(slots: torch.Tensor) -> torch.Tensor:
    missing = -slots.shape[1] % _BLOCK
    return F.pad(slots, (0, missing), value=-1).to(torch.int32).unsqueeze(1).contiguous()


def _refuse(entry_format: str, heads: int) -> None:
    if entry_format != "fp8" or heads not in _HEADS:
        raise ValueError(f"entries are {entry_format!r} of {heads} heads")


def _checked(call: Call, args: SparseAttentionArgs) -> Call:
    own = args._replace(cos=None, sin=None)
    expected = torch.ops.dsv4.sparse_attention.default(*own, "auto")
    error = float((call().float() - expected.float()).norm() / expected.float().norm())
    if not error <= _TOLERANCE:
        raise ValueError(f"off by {error:.1e}, left out")
    return call


def _attention(library: Any, args: SparseAttentionArgs) -> Call:
    q, sink, scale = args.q, args.sink, args.scale
    _refuse(args.window_format, q.shape[1])
    plan, _ = library.get_mla_metadata()
    dims = q.shape[-1]
    extra: dict[str, Any] = {}
    if args.compressed is not None and args.compressed_slots is not None:
        pages = (args.compressed, args.compressed_page_size)
        extra["extra_k_cache"] = _cache(*pages, dims, args.rope_dim)
        extra["extra_indices_in_kvcache"] = _indices(args.compressed_slots)
    cache = _cache(args.window, args.window_page_size, dims, args.rope_dim)
    queries, indices = q.unsqueeze(1), _indices(args.window_slots)

    def call() -> torch.Tensor:
        out, _ = library.flash_mla_with_kvcache(
            queries,
            cache,
            None,
            None,
            dims,
            plan,
            softmax_scale=scale,
            is_fp8_kvcache=True,
            indices=indices,
            attn_sink=sink.float(),
            **extra,
        )
        return out.squeeze(1)

    return _checked(call, args)


def _prompts(library: Any, args: SparseAttentionArgs) -> Call:
    q, sink, scale = args.q, args.sink, args.scale
    _refuse(args.window_format, q.shape[1])

    def entries(data: torch.Tensor, size: int) -> torch.Tensor:
        every = torch.arange(data.shape[0] * size, device=q.device)
        sizes = (size, args.window_format, q.shape[-1], args.rope_dim)
        return torch.ops.dsv4.read_kv(data, *sizes, every, torch.bfloat16, "auto")

    kv, named = entries(args.window, args.window_page_size), args.window_slots
    if args.compressed is not None and args.compressed_slots is not None:
        chosen = args.compressed_slots
        named = torch.cat([named, torch.where(chosen < 0, chosen, chosen + kv.shape[0])], 1)
        kv = torch.cat([kv, entries(args.compressed, args.compressed_page_size)])
    kv, indices = kv.unsqueeze(1), _indices(named)

    def call() -> torch.Tensor:
        out, *_ = library.flash_mla_sparse_fwd(q, kv, indices, scale, q.shape[-1], sink.float())
        return out

    return _checked(call, args)


BASELINES: Table = {
    "sparse_attention": {
        NAME: FromLibrary(MODULE, _attention),
        PROMPTS: FromLibrary(MODULE, _prompts),
    }
}
