"""Reference implementation of ``dsv4.ops.indexer``."""

from __future__ import annotations

import torch

from dsv4.ops._library import as_record
from dsv4.ops.indexer import (
    IndexerQueriesArgs,
    IndexerRotateQuantizeArgs,
    IndexerSelectArgs,
    QuantizeIndexQueriesArgs,
)
from dsv4.ops.kv_cache import ReadKvArgs
from dsv4.ops.quantize import QuantizeMxfp4Args
from dsv4.ops.rope import RopeArgs
from dsv4.ops.slots import EntrySlotsArgs
from dsv4.quant.formats import LINEAR
from dsv4.reference._exponent import ceil_log2, power_of_two
from dsv4.reference._index_entries import decode_fp4_rows, quantize_fp8_rows
from dsv4.reference._precision import compute_dtype
from dsv4.reference.kv_cache import read_kv
from dsv4.reference.quantize import quantize_mxfp4
from dsv4.reference.rope import rope
from dsv4.reference.slots import entry_slots

_FP4_GROUP = 32
_FP4_MAX = 6.0
_WORK_BYTES = 64 << 20  # of gathered keys and of per-head scores at a time


def indexer_rotate_quantize(args: IndexerRotateQuantizeArgs) -> torch.Tensor:
    """See ``dsv4.ops.indexer.indexer_rotate_quantize``."""
    wide = compute_dtype(args.x)
    groups = rotated(args.x).to(wide).unflatten(-1, (-1, _FP4_GROUP))
    amax = groups.abs().amax(-1, keepdim=True)
    exponent = ceil_log2(amax.clamp(_FP4_MAX * 2.0**-126) / _FP4_MAX)
    exponent = torch.where(amax.isfinite(), exponent, 0)
    value = _round_e2m1(groups * power_of_two(-exponent, wide)) * power_of_two(exponent, wide)
    return value.masked_fill(~amax.isfinite(), float("nan")).flatten(-2).to(args.x.dtype)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """The Hadamard transform alone, rounded to ``x.dtype``."""
    return _hadamard(x.to(compute_dtype(x))).to(x.dtype)


def _hadamard(x: torch.Tensor) -> torch.Tensor:
    # Sylvester's matrix times d^-0.5, by butterflies.
    d = x.shape[-1]
    half = 1
    while half < d:
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        half *= 2
    return x * d**-0.5


def _round_e2m1(x: torch.Tensor) -> torch.Tensor:
    # To 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, ties to the even code; |x| <= 6.
    a = x.abs()
    fine, middle, coarse = (a * 2).round() / 2, a.round(), (a / 2).round() * 2
    return torch.where(a < 2, fine, torch.where(a < 4, middle, coarse)).copysign(x)


def indexer_queries(args: IndexerQueriesArgs) -> torch.Tensor:
    """See ``dsv4.ops.indexer.indexer_queries``."""
    q = rope(RopeArgs(args.q, args.cos.unsqueeze(-2), args.sin.unsqueeze(-2), False))
    if not args.rotate_quantize:
        return q
    return indexer_rotate_quantize(IndexerRotateQuantizeArgs(q))


def quantize_index_queries(
    args: QuantizeIndexQueriesArgs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.indexer.quantize_index_queries``."""
    q = rope(RopeArgs(args.q, args.cos.unsqueeze(-2), args.sin.unsqueeze(-2), False))
    if args.rotate:
        q = rotated(q)
    folded = args.weights.to(compute_dtype(args.weights)) * args.weight_scale
    if args.query_format == "mxfp4":
        return *quantize_mxfp4(QuantizeMxfp4Args(q, LINEAR)), folded
    codes, scale = quantize_fp8_rows(q)
    return codes, torch.empty_like(codes[..., :0], dtype=torch.float8_e8m0fnu), folded * scale


def indexer_select(args: IndexerSelectArgs) -> torch.Tensor:
    """See ``dsv4.ops.indexer.indexer_select``."""
    q = args.q
    if args.query_scales is not None:
        q = decode_fp4_rows(q, args.query_scales)
    tokens, heads, d = q.shape
    capacity = args.page_table.shape[1] * args.page_size
    k = min(args.top_k, capacity)
    out = torch.empty(tokens, k, dtype=torch.int64, device=q.device)
    if tokens == 0 or k == 0:
        return out
    wide = compute_dtype(q, args.weights)
    entry = torch.arange(capacity, device=q.device)
    step = max(1, _WORK_BYTES // (wide.itemsize * capacity * max(d, heads)))
    for begin in range(0, tokens, step):
        part = slice(begin, begin + step)
        sequence = args.sequence_of_token[part].to(torch.int64).clamp(min=0)
        pages = args.page_table[sequence].to(torch.int64).clamp(min=0)
        slots = (pages * args.page_size).unsqueeze(-1) + torch.arange(
            args.page_size, device=q.device
        )
        keys = read_kv(as_record(ReadKvArgs, args, head_dim=d, slots=slots.flatten(1), dtype=wide))
        seen = entry < args.visible[part].unsqueeze(-1)
        scores = _scores(q[part].to(wide), args.weights[part].to(wide), keys)
        scores = torch.where(seen, scores, -torch.inf)
        # A stable sort puts equal scores in index order, and NaN first.
        ids = scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        ids = torch.where(ids < args.visible[part].unsqueeze(-1), ids, capacity).sort(-1).values
        out[part] = torch.where(ids < capacity, ids, -1)
    if args.slots:
        sequences = args.sequence_of_token
        return entry_slots(EntrySlotsArgs(args.page_table, args.page_size, sequences, out))
    return out


def _scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    # [t, h, d], [t, h], [t, C, d] -> [t, C]
    dots = torch.relu(q @ keys.transpose(1, 2))
    return (dots * weights.unsqueeze(-1)).sum(1)
