"""Reference implementation of ``dsv4.ops.compressor_paged``."""

from __future__ import annotations

import torch

from dsv4.ops._library import as_record
from dsv4.ops.compressor_paged import CompressWritePagedArgs
from dsv4.ops.kv_cache import WriteKvArgs
from dsv4.ops.norm import RmsNormArgs
from dsv4.ops.rope import RopeArgs
from dsv4.reference._scatter import merge_skipped
from dsv4.reference.kv_cache import write_kv
from dsv4.reference.norm import rms_norm
from dsv4.reference.rope import rope

_ABSENT = float("-inf")
_WORK_NUMBERS = 1 << 24  # of windows gathered at a time


def compress_write_paged(args: CompressWritePagedArgs) -> None:
    """See ``dsv4.ops.compressor_paged.compress_write_paged``."""
    if args.kv.shape[0] == 0 or args.state.shape[0] == 0:
        return
    _store_state(args)
    ratio = args.ape.shape[0]
    closes = (args.slots >= 0) & (args.state_slots >= 0) & ((args.positions + 1) % ratio == 0)
    tokens = closes.nonzero().flatten()
    step = max(1, _WORK_NUMBERS // ((1 + args.overlap) * ratio * args.head_dim))
    for part in tokens.split(step):
        _store_entries(args, part)


def _store_state(args: CompressWritePagedArgs) -> None:
    state, block_size = args.state, args.state.shape[1]
    phase = args.positions.to(torch.int64) % args.ape.shape[0]
    score = args.score.to(state.dtype) + args.ape.to(state.dtype)[phase]
    rows = torch.cat((args.kv.to(state.dtype), score), dim=1)
    slot, rows = merge_skipped(args.state_slots, rows, state[0, :1])
    state[slot // block_size, slot % block_size] = rows


def _store_entries(args: CompressWritePagedArgs, tokens: torch.Tensor) -> None:
    ratio = args.ape.shape[0]
    last = args.positions[tokens].to(torch.int64)
    pooled = _pool(args, tokens, last)
    normed = rms_norm(RmsNormArgs(pooled.to(args.dtype), args.norm_weight, args.eps))
    cos, sin = args.angles[last + 1 - ratio].chunk(2, dim=-1)
    entries = rope(RopeArgs(normed, cos, sin, False))
    write_kv(as_record(WriteKvArgs, args, entries=entries, slots=args.slots[tokens]))


def _pool(args: CompressWritePagedArgs, tokens: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Entries ``[n, d]`` of the windows that end with these tokens, at the positions ``last``."""
    ratio, d, state = args.ape.shape[0], args.head_dim, args.state
    count = (1 + args.overlap) * ratio
    position = last.unsqueeze(1) + torch.arange(1 - count, 1, device=last.device)
    present = (position >= 0).unsqueeze(-1)
    inside = position.clamp(min=0)
    block = args.state_table[
        args.sequences[tokens].to(torch.int64).unsqueeze(1), inside // state.shape[1]
    ]
    rows = state[block.to(torch.int64), inside % state.shape[1]]
    kv, score = rows.chunk(2, dim=-1)
    if args.overlap:  # the first half of the columns of the window before, the second of its own
        kv = torch.cat((kv[:, :ratio, :d], kv[:, ratio:, d:]), dim=1)
        score = torch.cat((score[:, :ratio, :d], score[:, ratio:, d:]), dim=1)
    weights = torch.softmax(score.masked_fill(~present, _ABSENT), dim=1)
    return (weights * kv.masked_fill(~present, 0)).sum(1)
