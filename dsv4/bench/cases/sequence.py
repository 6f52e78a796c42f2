"""Problem sizes of compressor, indexer, attention and cache; see ``dsv4.bench.cases``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dsv4 import ops
from dsv4.bench.checks import budgets, fused_judges
from dsv4.bench.checks.judge import bitwise, within
from dsv4.bench.problem import Case, Draw, Problem, nbytes
from dsv4.config import ModelConfig
from dsv4.kv_cache.layer_cache import ROLLBACK
from dsv4.kv_cache.pages import COMPACT_FORMATS, Pages, entry_layout
from dsv4.ops.indexer import QUERY_FORMATS

_PAGE = 64
_SEQUENCES = 4  # at most: tokens share sequences, as in a prefill
_POISON = 0xA5


def _context(c: ModelConfig) -> int:
    """Tokens before the batch: 8192, or a few windows of a tiny model."""
    return min(8192, c.max_position_embeddings // 8)


def _compression(c: ModelConfig) -> tuple[tuple[str, int, bool], ...]:
    return (("csa", c.compress_rates.csa, True), ("hca", c.compress_rates.hca, False))


def pool_windows(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Cases of the whole windows of a prefill."""
    for name, ratio, overlap in _compression(c):
        yield _pool(c.head_dim, tokens, name, ratio, overlap)


def _pool(d: int, tokens: int, name: str, ratio: int, overlap: bool) -> Case:
    windows, width = max(1, tokens // ratio), d * (2 if overlap else 1)

    def build(draw: Draw) -> Problem:
        kv = draw.normal(1, windows, ratio, width, dtype=torch.float32)
        score = draw.normal(1, windows, ratio, width, dtype=torch.float32)
        before = [draw.normal(1, ratio, d, dtype=torch.float32) for _ in range(2)]
        args = (kv, score, *(before if overlap else (None, None)))
        judge = within(budgets.pooled)
        return Problem(ops.pool_windows, args, {"overlap": overlap}, judge, nbytes(*args))

    return Case("pool_windows", name, {"m": ratio, "d": d, "W": windows}, tokens, build)


def compressor_update(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """A ragged batch: one new sequence, the others in the middle."""
    for name, ratio, overlap in _compression(c):
        yield _update(c.head_dim, tokens, name, ratio, overlap)


def _update(d: int, tokens: int, name: str, ratio: int, overlap: bool) -> Case:
    width, batch = d * (2 if overlap else 1), min(tokens, _SEQUENCES)

    def build(draw: Draw) -> Problem:
        lengths = [tokens // batch] * batch
        lengths[0] += tokens % batch
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(draw.device)
        starts = torch.full((batch,), 3 * ratio - 1, device=draw.device)
        sequences = draw.permutation(batch + 1)[:batch].contiguous()
        state = _state(draw, batch + 1, ratio, width, overlap)
        if tokens > 1:
            # A new sequence ignores its old state, so that is poisoned.
            starts[0] = 0
            state[sequences[0]] = torch.nan
        kv, score = (draw.normal(tokens, width) for _ in range(2))
        ape = draw.normal(ratio, width, dtype=torch.float32)
        args = (kv, score, ape, state, bounds, starts, sequences)
        slots = state.shape[1]
        used = state[0].nbytes // slots * (slots - ROLLBACK) * batch
        stored = sum(min(length, slots) for length in lengths) * (state[0].nbytes // slots)
        entries = 4 * d * (tokens // ratio)
        return Problem(
            ops.compressor_update,
            args,
            {"overlap": overlap},
            budgets.compressor,
            nbytes(kv, score, ape) + used,
            writes=stored + entries,
            mutates=(3,),
        )

    sizes = {"m": ratio, "d": d, "B": batch}
    return Case("compressor_update", name, sizes, tokens, build)


def compress_write(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """The same on to the cache: norm, rotation, FP8, pages; and to compact index keys."""
    yield from compress_write_entries(c, tokens, "fp8")
    for name in COMPACT_FORMATS:
        ratio, d = c.compress_rates.csa, c.index_head_dim
        yield _compress_write(c, d, tokens, name, ratio, True, name)


def compress_write_entries(c: ModelConfig, tokens: int, entry_format: str) -> Iterator[Case]:
    """Cases of ``compress_write`` whose entries attention reads."""
    for name, ratio, overlap in _compression(c):
        yield _compress_write(c, c.head_dim, tokens, name, ratio, overlap, entry_format)


def _compress_write(
    c: ModelConfig,
    d: int,
    tokens: int,
    name: str,
    ratio: int,
    overlap: bool,
    entry_format: str,
) -> Case:
    inner = _update(d, tokens, name, ratio, overlap)
    size = max(1, 256 // ratio)

    def build(draw: Draw) -> Problem:
        update = inner.build(draw)
        batch = update.args[6].shape[0]
        count = -(-(3 + tokens // ratio + 1) // size)
        table = draw.permutation((batch + 1) * count).view(batch + 1, count)
        pages = Pages.allocate(
            table.numel(), size, d, c.qk_rope_head_dim, entry_format, device=draw.device
        )
        weight = draw.normal(d)
        frequencies = torch.as_tensor(c.rope_compress.inv_freq(), dtype=torch.float32)
        kwargs: dict[str, Any] = {"overlap": overlap, "eps": 1e-6}
        kwargs["inv_freq"] = frequencies.to(draw.device)
        if entry_format in COMPACT_FORMATS:
            kwargs["rotate_quantize"] = True
        entry = entry_bytes(pages)
        assert update.writes is not None
        return Problem(
            _write_compressed,
            (*update.args, weight, pages, table),
            kwargs,
            fused_judges.compressed_entries,
            update.reads + nbytes(weight),
            writes=update.writes + (entry - 4 * d) * (tokens // ratio),
            mutates=(3, 8),
        )

    return Case("compress_write", name, inner.shape, tokens, build)


def _write_compressed(*args: Any, inv_freq: torch.Tensor, **kwargs: Any) -> None:
    """``compress_write`` with the frequencies by name: they stay float32 in the oracle."""
    write: Any = ops.compress_write
    write(*args[:-2], inv_freq, *args[-2:], **kwargs)


def _state(draw: Draw, rows: int, ratio: int, width: int, overlap: bool) -> torch.Tensor:
    """Fill every slot but that of the next token, the last one of the third window."""
    slots = (2 * ratio if overlap else ratio) + ROLLBACK
    state = draw.normal(rows, slots, 2, width, dtype=torch.float32)
    state[:, (3 * ratio - 1) % slots, 0], state[:, (3 * ratio - 1) % slots, 1] = 0, -torch.inf
    return state


def indexer_rotate_quantize(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """The indexer's queries."""

    def build(draw: Draw) -> Problem:
        x = draw.normal(tokens, c.index_n_heads, c.index_head_dim)
        judge = budgets.rotated_fp4
        return Problem(ops.indexer_rotate_quantize, (x,), {}, judge, nbytes(x))

    sizes = {"h": c.index_n_heads, "d": c.index_head_dim}
    yield Case("indexer_rotate_quantize", "q", sizes, tokens, build)


def indexer_select(c: ModelConfig, tokens: int, capacity: int | None = None) -> Iterator[Case]:
    """Entries of a few sequences; the first token sees fewer than it wants."""
    for name in ("", *QUERY_FORMATS):
        yield _select(c, tokens, name, capacity)


def _select(c: ModelConfig, tokens: int, name: str, entries: int | None) -> Case:
    """Queries and keys in the same format, bfloat16 if it has no name."""
    h, d = c.index_n_heads, c.index_head_dim
    per_sequence = -(-(entries or _context(c) // c.compress_rates.csa) // _PAGE)
    batch, capacity = min(tokens, _SEQUENCES), per_sequence * _PAGE

    def build(draw: Draw) -> Problem:
        pages = _index_keys(draw, batch * per_sequence, d, f"index_{name}" if name else "plain")
        table = draw.permutation(batch * per_sequence).view(batch, per_sequence).to(torch.int32)
        sequence = torch.arange(tokens, device=draw.device) % batch
        visible = draw.integers(capacity - _PAGE, capacity + 1, (tokens,))
        visible[0] = visible[0] if tokens == 1 else c.index_topk // 2
        q: Any = draw.normal(tokens, h, d)
        weights = draw.normal(tokens, h, dtype=torch.float32, scale=(d * h) ** -0.5)
        if name:
            none = q.new_empty((tokens, 0))
            q, weights = ops.quantize_index_queries(
                q, none, none, weights, rotate=False, query_format=name, backend="reference"
            )
        args = (q, weights, pages, table, sequence, visible)
        flops = 2 * h * d * int(visible.sum())
        reads = nbytes(pages.data, q, weights, table)
        return Problem(
            ops.indexer_select, args, {"top_k": c.index_topk}, budgets.selection, reads, flops
        )

    sizes = {"h": h, "d": d, "C": capacity, "k": c.index_topk}
    return Case("indexer_select", name, sizes, tokens, build)


def _index_keys(draw: Draw, count: int, d: int, entry_format: str) -> Pages:
    """Pages that hold random keys."""
    pages = Pages.allocate(count, _PAGE, d, 0, entry_format, device=draw.device)
    slots = torch.arange(pages.num_slots, device=draw.device)
    ops.write_kv(pages, draw.normal(pages.num_slots, d), slots, backend="reference")
    return pages


def _paging(c: ModelConfig, tokens: int, draw: Draw, pages: int) -> tuple:
    """A page table of random pages and each token's sequence."""
    batch = min(tokens, _SEQUENCES)
    table = draw.permutation(batch * pages).view(batch, pages)
    return table, torch.arange(tokens, device=draw.device) % batch


def entry_slots(c: ModelConfig, tokens: int, chosen: int | None = None) -> Iterator[Case]:
    """Slots of the entries that the indexer chose."""
    count = max(_context(c) // c.compress_rates.csa, chosen or 0)
    k = chosen or min(c.index_topk, count)

    def build(draw: Draw) -> Problem:
        table, sequences = _paging(c, tokens, draw, -(-count // _PAGE))
        entries = draw.integers(-1, count, (tokens, k))
        args = (table, _PAGE, sequences, entries)
        reads = nbytes(table, sequences, entries)
        return Problem(ops.entry_slots, args, {}, bitwise("slots"), reads)

    yield Case("entry_slots", "", {"k": k}, tokens, build)


def prefix_slots(c: ModelConfig, tokens: int, entries: int | None = None) -> Iterator[Case]:
    """Slots of all entries of a layer of the higher ratio."""
    count = entries or _context(c) // c.compress_rates.hca

    def build(draw: Draw) -> Problem:
        table, sequences = _paging(c, tokens, draw, -(-count // 2))
        counts = draw.integers(0, count + 1, (tokens,))
        args = (table, 2, sequences, counts)
        reads = nbytes(table, sequences, counts)
        return Problem(ops.prefix_slots, args, {}, bitwise("slots"), reads)

    yield Case("prefix_slots", "", {"C": count}, tokens, build)


def window_slots(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """Slots of the tokens before each token."""

    def build(draw: Draw) -> Problem:
        table, sequences = _paging(c, tokens, draw, c.sliding_window // _PAGE + 1)
        positions = draw.integers(0, _context(c), (tokens,))
        args = (table, _PAGE, sequences, positions, c.sliding_window)
        reads = nbytes(table, sequences, positions)
        return Problem(ops.window_slots, args, {}, bitwise("slots"), reads)

    yield Case("window_slots", "", {"window": c.sliding_window}, tokens, build)


def entry_bytes(pages: Pages) -> int:
    """Bytes of an entry with its scales."""
    if pages.entry_format == "plain":
        return pages.head_dim * pages.data.element_size()
    layout = entry_layout(pages.entry_format, pages.head_dim, pages.rope_dim)
    return layout.data_bytes + layout.scale_bytes


def _filled(c: ModelConfig, entries: int, draw: Draw, entry_format: str) -> Pages:
    """Pages that hold random entries."""
    count, sizes = -(-entries // _PAGE), (c.head_dim, c.qk_rope_head_dim)
    pages = Pages.allocate(count, _PAGE, *sizes, entry_format, device=draw.device)
    slots = torch.arange(count * _PAGE, device=draw.device)
    ops.write_kv(pages, draw.normal(count * _PAGE, c.head_dim), slots, backend="reference")
    return pages


def angles(c: ModelConfig, draw: Draw, tokens: int) -> dict[str, torch.Tensor]:
    """Tables of any positions, by which attention's result is rotated back."""
    angle = 3 * draw.normal(tokens, c.qk_rope_head_dim // 2, dtype=torch.float32)
    return {"cos": angle.cos(), "sin": angle.sin()}


def sparse_attention(c: ModelConfig, tokens: int, entry_format: str = "fp8") -> Iterator[Case]:
    """The three layer types: the window alone, with chosen entries, with all entries."""
    context = _context(c)
    entries = {
        "swa": 0,
        "csa": min(c.index_topk, context // c.compress_rates.csa),
        "hca": context // c.compress_rates.hca,
    }
    for name, count in entries.items():
        yield attention_case(c, tokens, name, count, entry_format)


def attention_case(
    c: ModelConfig, tokens: int, name: str, count: int, entry_format: str = "fp8"
) -> Case:
    """A case that attends to the window and ``count`` compressed entries."""
    heads, d, reach = c.num_attention_heads, c.head_dim, c.sliding_window
    batch = min(tokens, _SEQUENCES)

    def build(draw: Draw) -> Problem:
        q, sink = draw.normal(tokens, heads, d), draw.normal(heads, dtype=torch.float32)
        window = _filled(c, batch * reach, draw, entry_format)
        slots = draw.integers(0, window.num_slots, (tokens, reach))
        slots[0, reach // 2 :] = -1  # a young sequence
        rest = batch * max(count, _PAGE)
        compressed = _filled(c, rest, draw, entry_format) if count else None
        chosen = draw.integers(0, compressed.num_slots, (tokens, count)) if compressed else None
        used = [s[s >= 0] for s in (slots, chosen) if s is not None]
        distinct = sum(int(s.unique().numel()) for s in used)
        return Problem(
            ops.sparse_attention,
            (q, window, slots, compressed, chosen, sink),
            {"scale": d**-0.5, **angles(c, draw, tokens)},
            within(budgets.attention),
            nbytes(q, slots, chosen, sink) + distinct * entry_bytes(window),
            4 * heads * d * sum(s.numel() for s in used),
        )

    sizes = {"h": heads, "D": d, "window": reach, "entries": count}
    return Case("sparse_attention", name, sizes, tokens, build)


def write_kv(c: ModelConfig, tokens: int, entry_format: str = "fp8") -> Iterator[Case]:
    """New entries to random slots of poisoned pages; the last one is skipped."""

    def build(draw: Draw) -> Problem:
        count, sizes = tokens // _PAGE + 2, (c.head_dim, c.qk_rope_head_dim)
        pages = Pages.allocate(count, _PAGE, *sizes, entry_format, device=draw.device)
        pages.data.fill_(_POISON)
        slots = draw.permutation(pages.num_slots)[:tokens].contiguous()
        if tokens > 1:
            slots[-1] = -1
        entries = draw.normal(tokens, c.head_dim)
        written = int((slots >= 0).sum()) * entry_bytes(pages)
        return Problem(
            ops.write_kv,
            (pages, entries, slots),
            {},
            bitwise("pages"),
            nbytes(entries, slots),
            writes=written,
            mutates=(0,),
        )

    yield Case("write_kv", "", {"D": c.head_dim, "R": c.qk_rope_head_dim}, tokens, build)


def read_kv(c: ModelConfig, tokens: int, entry_format: str = "fp8") -> Iterator[Case]:
    """Cases that read each token's window; the last slot is empty."""
    reach = c.sliding_window

    def build(draw: Draw) -> Problem:
        pages = _filled(c, min(tokens, _SEQUENCES) * reach, draw, entry_format)
        slots = draw.integers(0, pages.num_slots, (tokens, reach))
        slots[-1, -1] = -1
        reads = nbytes(slots) + int(slots.unique().numel()) * entry_bytes(pages)
        kwargs = {"dtype": torch.bfloat16}
        return Problem(ops.read_kv, (pages, slots), kwargs, bitwise("entries"), reads)

    yield Case("read_kv", "", {"D": c.head_dim, "window": reach}, tokens, build)


def fake_quantize_kv(c: ModelConfig, tokens: int) -> Iterator[Case]:
    """New entries rounded as the cache rounds them."""

    def build(draw: Draw) -> Problem:
        x = draw.normal(tokens, c.head_dim)
        args = (x, c.qk_rope_head_dim)
        return Problem(ops.fake_quantize_kv, args, {}, bitwise("entries"), nbytes(x))

    yield Case("fake_quantize_kv", "", {"D": c.head_dim, "R": c.qk_rope_head_dim}, tokens, build)
