"""Reference implementation of ``dsv4.ops.compressor``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4.kv_cache.pages import COMPACT_FORMATS
from dsv4.ops._library import as_record
from dsv4.ops.compressor import CompressorUpdateArgs, CompressWriteArgs, PoolWindowsArgs
from dsv4.ops.indexer import IndexerRotateQuantizeArgs
from dsv4.ops.kv_cache import WriteKvArgs
from dsv4.ops.norm import RmsNormArgs
from dsv4.ops.rope import RopeArgs, RopeTablesArgs
from dsv4.ops.slots import EntrySlotsArgs
from dsv4.reference._precision import compute_dtype
from dsv4.reference._scatter import merge_skipped
from dsv4.reference.indexer import indexer_rotate_quantize, rotated
from dsv4.reference.kv_cache import write_kv
from dsv4.reference.norm import rms_norm
from dsv4.reference.rope import rope, rope_tables
from dsv4.reference.slots import entry_slots

_ABSENT = float("-inf")


def pool_windows(args: PoolWindowsArgs) -> torch.Tensor:
    """See ``dsv4.ops.compressor.pool_windows``."""
    kv, score = args.kv, args.score
    wide = compute_dtype(kv, score)
    kv, score = kv.to(wide), score.to(wide)
    if args.overlap:
        kv = _with_window_before(kv, args.previous_kv, 0.0)
        score = _with_window_before(score, args.previous_score, _ABSENT)
    return _pool(kv, score)


def _with_window_before(
    x: torch.Tensor, previous: torch.Tensor | None, absent: float
) -> torch.Tensor:
    # [R, W, m, 2d] -> [R, W, 2m, d]: the Ca half of window w - 1, then the Cb half of window w.
    ca, cb = x.chunk(2, dim=-1)
    before = torch.full_like(ca[:, :1], absent)
    if previous is not None and before.shape[1]:
        before = previous.to(x.dtype).unsqueeze(1)
    return torch.cat((torch.cat((before, ca[:, :-1]), dim=1), cb), dim=2)


def _pool(kv: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    # [..., slots, d] -> [..., d]: a softmax over the slots for each channel.
    return (torch.softmax(score, dim=-2) * kv).sum(-2)


@dataclass(frozen=True)
class _Source:
    """The tokens a sequence of the batch can see: the new ones, and those in its state.

    ``kv`` and ``score`` are [T + B * slots + 1, c * d]: the tokens, the state rows of every
    sequence of the batch, and the absent token.
    """

    kv: torch.Tensor
    score: torch.Tensor
    first_token: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor
    state_base: torch.Tensor
    slots: int
    ratio: int

    def rows(self, b: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Row of ``kv`` that holds ``position`` of sequence ``b`` (same shapes)."""
        start = self.start[b]
        row = torch.where(
            position >= start,
            self.first_token[b] + position - start,
            self.state_base[b] + position.remainder(self.slots),
        )
        present = (position >= 0) & (position < self.end[b])
        return torch.where(present, row, self.kv.shape[0] - 1)


def compressor_update(
    args: CompressorUpdateArgs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.compressor.compressor_update``."""
    ratio, batch = args.ape.shape[0], args.starts.shape[0]
    bound = args.kv.shape[0] // ratio + batch
    if batch == 0:
        none = torch.full((bound,), -1, dtype=torch.int64, device=args.kv.device)
        return (
            args.state.new_zeros(bound, args.kv.shape[-1] // (1 + args.overlap)),
            none,
            none.clone(),
        )
    cu = args.cu_seqlens.to(torch.int64)
    source = _source(
        args.kv, args.score, args.ape, args.state, cu, args.starts.to(torch.int64), args.sequences
    )
    padding = (args.sequences < 0) | (cu.diff() <= 0)
    b, window, used = _closed_windows(source, padding, bound)
    pooled = _pool_rows(source, b, window, args.overlap).masked_fill(~used.unsqueeze(-1), 0)
    _store_state(source, args.state, args.sequences)
    positions = torch.where(used, window * ratio, -1)
    sequence = torch.where(used, args.sequences.to(torch.int64)[b], -1)
    return pooled, positions, sequence


def _source(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    state: torch.Tensor,
    cu: torch.Tensor,
    starts: torch.Tensor,
    sequences: torch.Tensor,
) -> _Source:
    tokens, slots = kv.shape[0], state.shape[1]
    index = torch.arange(tokens, device=kv.device)
    b = torch.searchsorted(cu[1:], index, right=True).clamp(max=starts.shape[0] - 1)
    phase = (starts[b] + index - cu[b]) % ape.shape[0]
    score = score.to(state.dtype) + ape.to(state.dtype)[phase]
    old = state[sequences.to(torch.int64).clamp(0, state.shape[0] - 1)].flatten(0, 1)
    absent = torch.zeros_like(old[:1, 0])
    base = tokens + slots * torch.arange(starts.shape[0], device=kv.device)
    return _Source(
        kv=torch.cat((kv.to(state.dtype), old[:, 0], absent)),
        score=torch.cat((score, old[:, 1], torch.full_like(absent, _ABSENT))),
        first_token=cu[:-1],
        start=starts,
        end=starts + cu.diff(),
        state_base=base,
        slots=slots,
        ratio=ape.shape[0],
    )


def _closed_windows(
    source: _Source, padding: torch.Tensor, bound: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # For each of the output rows: entry of the batch, window number, and whether it is used.
    first = source.start // source.ratio
    count = (source.end // source.ratio - first).masked_fill(padding, 0)
    total = count.cumsum(0)
    row = torch.arange(bound, device=total.device)
    b = torch.searchsorted(total, row, right=True).clamp(max=total.shape[0] - 1)
    before = total[b] - count[b]
    return b, first[b] + row - before, row < total[-1]


def _pool_rows(
    source: _Source, b: torch.Tensor, window: torch.Tensor, overlap: bool
) -> torch.Tensor:
    phase = torch.arange(source.ratio, device=b.device)
    position = (window * source.ratio).unsqueeze(-1) + phase
    b = b.unsqueeze(-1).expand_as(position)
    rows = source.rows(b, position)
    kv, score = source.kv[rows], source.score[rows]
    if not overlap:
        return _pool(kv, score)
    width = source.kv.shape[-1] // 2
    rows = source.rows(b, position - source.ratio)
    kv = torch.cat((source.kv[:, :width][rows], kv[..., width:]), dim=1)
    score = torch.cat((source.score[:, :width][rows], score[..., width:]), dim=1)
    return _pool(kv, score)


def _store_state(source: _Source, state: torch.Tensor, sequences: torch.Tensor) -> None:
    # The last new tokens, as many as there are slots. No other slot changes, so that a step of one
    # token leaves all that the same step reads once more.
    slot = torch.arange(source.slots, device=state.device)
    position = (source.end - source.slots).unsqueeze(-1) + slot
    b = torch.arange(position.shape[0], device=state.device).unsqueeze(-1).expand_as(position)
    rows = source.rows(b, position)
    new = torch.stack((source.kv[rows], source.score[rows]), dim=2)
    owner = sequences.to(torch.int64).unsqueeze(-1)
    written = position >= source.start.unsqueeze(-1)
    state_row = owner * source.slots + position.remainder(source.slots)
    state_row = torch.where(written & (owner >= 0), state_row, -1).flatten()
    if state_row.shape[0] == 0 or state.shape[0] == 0:
        return
    state_row, new = merge_skipped(state_row, new.flatten(0, 1), state[0, :1])
    state[state_row // source.slots, state_row % source.slots] = new


def compress_write(args: CompressWriteArgs) -> None:
    """See ``dsv4.ops.compressor.compress_write``."""
    pooled, positions, sequence = compressor_update(as_record(CompressorUpdateArgs, args))
    normed = rms_norm(RmsNormArgs(pooled.to(args.dtype), args.norm_weight, args.eps))
    # A row that is not used holds -1; a position below 0 has no table.
    cos, sin = rope_tables(RopeTablesArgs(positions.clamp(min=0), args.inv_freq))
    entries = rope(RopeArgs(normed, cos.to(args.table_dtype), sin.to(args.table_dtype), False))
    if args.rotate_quantize:
        compact = args.entry_format in COMPACT_FORMATS
        if compact:
            entries = rotated(entries)
        else:
            entries = indexer_rotate_quantize(IndexerRotateQuantizeArgs(entries))
    number = positions.div(args.ape.shape[0], rounding_mode="floor")
    slots = entry_slots(EntrySlotsArgs(args.page_table, args.page_size, sequence, number))
    write_kv(as_record(WriteKvArgs, args, entries=entries, slots=slots))
