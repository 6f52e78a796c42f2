"""Reference implementation of ``dsv4.ops.attention``."""

from __future__ import annotations

import torch

from dsv4.ops.attention import SparseAttentionArgs
from dsv4.ops.kv_cache import ReadKvArgs
from dsv4.ops.rope import RopeArgs
from dsv4.reference._precision import compute_dtype
from dsv4.reference.kv_cache import read_kv
from dsv4.reference.rope import rope

_WORK_BYTES = 64 << 20  # of gathered entries and of scores at a time


def sparse_attention(args: SparseAttentionArgs) -> torch.Tensor:
    """See ``dsv4.ops.attention.sparse_attention``."""
    q = args.q
    tokens, heads, d = q.shape
    wide = compute_dtype(q)
    pools = [(args.window, args.window_page_size, args.window_format, args.window_slots)]
    if args.compressed is not None and args.compressed_slots is not None:
        pools.append(
            (
                args.compressed,
                args.compressed_page_size,
                args.compressed_format,
                args.compressed_slots,
            )
        )
    width = sum(slots.shape[1] for *_, slots in pools)
    step = max(1, _WORK_BYTES // (wide.itemsize * max(1, width) * max(d, heads)))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for begin in range(0, tokens, step):
        part = slice(begin, begin + step)
        entries = [
            read_kv(ReadKvArgs(data, page_size, entry_format, d, args.rope_dim, slots[part], wide))
            for data, page_size, entry_format, slots in pools
        ]
        absent = torch.cat([slots[part] for *_, slots in pools], dim=1) < 0
        kv = torch.cat(entries, dim=1)
        attended = _attend(q[part].to(wide), kv, absent, args.sink.to(wide), args.scale)
        if args.cos is not None and args.sin is not None:
            angles = args.cos[part].to(wide).unsqueeze(1), args.sin[part].to(wide).unsqueeze(1)
            attended = rope(RopeArgs(attended, *angles, inverse=True))
        out[part] = attended.to(q.dtype)
    return out


def _attend(
    q: torch.Tensor, kv: torch.Tensor, absent: torch.Tensor, sink: torch.Tensor, scale: float
) -> torch.Tensor:
    # q [t, h, D], kv [t, K, D], absent [t, K], sink [h] -> [t, h, D]
    logits = (q @ kv.transpose(1, 2) * scale).masked_fill(absent.unsqueeze(1), -torch.inf)
    sink = sink.view(1, -1, 1).expand(q.shape[0], -1, 1)
    top = torch.cat((logits, sink), dim=-1).amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0, top)  # nothing to attend to and no sink
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True) + torch.exp(sink - top)
    return torch.where(total == 0, 0, weights @ kv / total)
