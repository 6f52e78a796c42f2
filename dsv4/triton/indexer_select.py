"""Launchers of ``indexer_select`` of ``dsv4.ops.indexer``: indexer logits and top-k selection.

Logits (scores) go to a scratch buffer as integers that order as they do
(``_lib/index_logits.py``), then one program per token selects the k highest (``_lib/topk.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton

from dsv4.ops.indexer import IndexerSelectArgs
from dsv4.ops.slots import EntrySlotsArgs
from dsv4.triton._lib import row_tiles
from dsv4.triton._lib.index_logits import score_kernel, score_pages_kernel
from dsv4.triton._lib.topk import select_kernel
from dsv4.triton._runtime import launch_options
from dsv4.triton.slots import entry_slots

_SCORE_BYTES = 64 << 20  # of the scratch buffer: more tokens are scored in several launches
_SEARCHED = 8192  # entries up to which a row is searched in registers
_DIRECT = 16384  # entries up to which a row is reduced without groups
_GROUP = 8  # entries per group; 16 from _LONG entries on
_LONG = 131072
_FEWEST, _USUAL, _MOST = 4, 16, 32  # warps of the selection; _MOST for large k of long rows
_SHARED_FROM = 128  # tokens from which neighbours share tiles of their sequence's entries
_COLUMNS = 256  # heads of all tokens that share a tile


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Tiling of the logits kernels.

    Attributes:
        block: Entries of a tile.
        stages: Pipeline stages.
        warps: Warps of a program.
        resident: Programs of an SM, as far as ``shared`` allows.
        shared: Most bytes of shared memory of a program, with 64 heads of 128 dims.
    """

    block: int
    stages: int
    warps: int
    resident: int
    shared: int


# Keys: whether tokens share tiles (``score_kernel``), None for float32 operands; the format of
# pages (``score_pages_kernel``).
_SHAPES = {
    False: _Shape(64, 3, 4, 4, 64 * 1024),
    True: _Shape(64, 3, 8, 4, 82 * 1024),
    None: _Shape(32, 2, 4, 4, 57 * 1024),
    "plain": _Shape(64, 5, 4, 3, 49 * 1024),
    "index_fp8": _Shape(64, 1, 4, 4, 33 * 1024),
    "index_mxfp4": _Shape(64, 1, 4, 4, 33 * 1024),
}


def indexer_select(args: IndexerSelectArgs) -> torch.Tensor:
    """See ``dsv4.ops.indexer.indexer_select``."""
    return select(Scoring.of(args), args.top_k, launch_scores, args.slots)


@dataclasses.dataclass(frozen=True)
class Keys:
    """Index keys of sequences, as ``indexer_select`` is given them."""

    data: torch.Tensor
    page_size: int
    entry_format: str
    page_table: torch.Tensor

    @property
    def capacity(self) -> int:
        """Entries of a sequence, at most."""
        return self.page_table.shape[1] * self.page_size


class Scoring(NamedTuple):
    """Operands of the scores of some tokens; see ``dsv4.ops.indexer.indexer_select``.

    Attributes:
        q: Queries, or their codes.
        query_scales: Scales of MXFP4 queries, else None.
        weights: Weights of the heads.
        keys: Keys of the sequences.
        sequences: The sequence of each token.
        visible: Number of entries that each token sees.
    """

    q: torch.Tensor
    query_scales: torch.Tensor | None
    weights: torch.Tensor
    keys: Keys
    sequences: torch.Tensor
    visible: torch.Tensor

    @classmethod
    def of(cls, args: IndexerSelectArgs) -> Scoring:
        """Take the operands from the operator's arguments; ``visible`` becomes contiguous."""
        keys = Keys(args.data, args.page_size, args.entry_format, args.page_table)
        sequences, visible = args.sequence_of_token, args.visible.contiguous()
        return cls(args.q, args.query_scales, args.weights, keys, sequences, visible)

    def contiguous(self) -> Scoring:
        """Return the operands as ``Scorer`` takes them."""
        q = self.q if self.q.stride(-1) == 1 else self.q.contiguous()
        keys = self.keys
        data = keys.data if keys.data.stride(-1) == 1 else keys.data.contiguous()
        keys = dataclasses.replace(keys, data=data, page_table=keys.page_table.contiguous())
        weights, sequences = self.weights.contiguous(), self.sequences.contiguous()
        return Scoring(q, self.query_scales, weights, keys, sequences, self.visible.contiguous())

    def part(self, tokens: slice) -> Scoring:
        """Return the operands of some of the tokens."""
        scales = None if self.query_scales is None else self.query_scales[tokens]
        weights, sequences = self.weights[tokens], self.sequences[tokens]
        return Scoring(self.q[tokens], scales, weights, self.keys, sequences, self.visible[tokens])


class ScoreRow(NamedTuple):
    """Sizes of a token's row of scores.

    Attributes:
        width: Numbers in a row of scores.
        group: Entries of a group; 0: there are none.
        groups: Numbers in a row of maxima.
    """

    width: int
    group: int
    groups: int


Scorer = Callable[[Scoring, torch.Tensor, torch.Tensor, int, int], None]  # as ``launch_scores``


def select(operands: Scoring, top_k: int, scorer: Scorer, slots: bool) -> torch.Tensor:
    """Run ``indexer_select`` with scores by ``scorer``; ``slots`` as in its record.

    Rows that are searched in registers take no launch of their own for slots.
    """
    q, capacity = operands.q, operands.keys.capacity
    out = torch.empty((q.shape[0], min(top_k, capacity)), dtype=torch.int64, device=q.device)
    if out.numel() == 0:
        return out
    sizes = Sizes.of(capacity, out.shape[1])
    width = 3 * sizes.buffer if sizes.direct else 0
    buffer = scratch(q, min(q.shape[0], rows_at_a_time(sizes.width)), width)
    row = ScoreRow(sizes.width, sizes.group, sizes.groups)
    slot_table = SlotTable.of(operands) if slots and not sizes.direct else None
    for part, scores, maxima in scored(operands, out.shape[1], row, scorer):
        rows = Selected(operands.visible[part], out[part], slot_table and slot_table.part(part))
        launch_selection(scores, maxima, buffer, rows, capacity, sizes)
    return slots_of(operands, out) if slots and slot_table is None else out


def slots_of(operands: Scoring, entries: torch.Tensor) -> torch.Tensor:
    """Return the slots of entries ``[T, k]``, by a launch of their own."""
    keys = operands.keys
    args = EntrySlotsArgs(keys.page_table, keys.page_size, operands.sequences, entries)
    return entry_slots(args)


@dataclasses.dataclass(frozen=True)
class SlotTable:
    """Where the entries of each token lie.

    Attributes:
        page_table: Pages of a sequence, ``[S, P]``, unit stride along P.
        page_size: Entries of a page.
        sequences: ``[T]``, rows of the table; negative: none.
    """

    page_table: torch.Tensor
    page_size: int
    sequences: torch.Tensor

    @classmethod
    def of(cls, operands: Scoring) -> SlotTable:
        """Take the table of the keys."""
        table = operands.keys.page_table
        table = table if table.stride(1) == 1 else table.contiguous()
        return cls(table, operands.keys.page_size, operands.sequences.contiguous())

    def part(self, tokens: slice) -> SlotTable:
        """Return the table of some of the tokens."""
        return dataclasses.replace(self, sequences=self.sequences[tokens])


class Selected(NamedTuple):
    """Rows of a selection.

    Attributes:
        visible: Number of entries that each token sees.
        out: int64 ``[T, k]``: what is selected.
        slot_table: Table of the slots that are stored; None: entry numbers.
    """

    visible: torch.Tensor
    out: torch.Tensor
    slot_table: SlotTable | None


def rows_at_a_time(width: int) -> int:
    """Tokens whose scores are kept at a time, of ``width`` numbers each.

    A multiple of 16 where it can be: parts of aligned tensors are then aligned, and take the same
    compiled kernel as the whole.
    """
    rows = max(1, _SCORE_BYTES // max(1, 4 * width))
    return rows - rows % 16 if rows >= 16 else rows


def scored(
    operands: Scoring, k: int, row: ScoreRow, scorer: Scorer
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Score some tokens at a time, where more than k entries are visible.

    Args:
        operands: Operands of all tokens.
        k: Number of entries to select.
        row: Sizes of a row of scores.
        scorer: Function that launches the kernel.

    Yields:
        Tokens; their scores, int32 ``[at least as many, width]``, as unsigned integers above 0 in
        the order of the scores; and the highest of each group. Valid until the next.
    """
    operands = operands.contiguous()
    tokens, step = operands.q.shape[0], rows_at_a_time(row.width)
    scores = scratch(operands.q, min(step, tokens), row.width)
    maxima = scratch(operands.q, min(step, tokens), row.groups)
    for begin in range(0, tokens, step):
        part = slice(begin, begin + step)
        if k < operands.keys.capacity:
            scorer(operands.part(part), scores, maxima, k, row.group)
        yield part, scores, maxima


def scratch(like: torch.Tensor, tokens: int, width: int) -> torch.Tensor:
    """Uninitialised rows of int32."""
    return torch.empty((tokens, width), dtype=torch.int32, device=like.device)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a selection by ``launch_selection``.

    Attributes:
        exact: Entries up to which a row is searched as it is.
        direct: Entries up to which it is without groups; 0: none is longer than ``exact``.
        group: Entries per group; 0: none is longer than ``direct``.
        width: Numbers in a row of scores: as many as are loaded from it, whatever they are.
        groups: The same of maxima.
        buffer: Capacity of the buffer, in entries and in groups.
        classes: Classes whose maxima give the threshold of the buffer.
        warps: Warps of a program.
    """

    exact: int
    direct: int
    group: int
    width: int
    groups: int
    buffer: int
    classes: int
    warps: int

    @classmethod
    def of(cls, capacity: int, k: int) -> Sizes:
        """Sizes for the k highest of ``capacity`` entries."""
        if k == capacity:  # Nothing is chosen: any k.
            return cls(0, 0, 0, 0, 0, 32 * _FEWEST, 32 * _FEWEST, _FEWEST)
        top = launch_options.power_of_two(k)
        usual = _MOST if capacity >= _LONG and top > 512 else _USUAL
        warps = max(_FEWEST, min(usual, launch_options.power_of_two(capacity) // 256))
        warps = min(_MOST, max(warps, top // 128))
        loaded, buffer = 8 * 32 * warps, max(32 * warps, 2 * top)
        exact = min(_SEARCHED, loaded)
        group = _GROUP if capacity < _LONG else 2 * _GROUP
        # The maxima of fewer groups than k would let all groups in.
        direct = max(_DIRECT, group * top)
        if capacity <= direct:
            group = 0
        if capacity <= exact:
            direct = 0
        width = triton.cdiv(capacity, loaded) * loaded
        groups = triton.cdiv(triton.cdiv(capacity, group), loaded) * loaded if group else 0
        return cls(exact, direct, group, width, groups, buffer, buffer, warps)


_CODES = {torch.float8_e4m3fn: "fp8", torch.uint8: "mxfp4"}
# Narrow types of operands that hold every value of a format; the others are multiplied in float32.
_EXACT: dict[Any, tuple[torch.dtype, ...]] = {
    torch.bfloat16: (torch.bfloat16,),
    torch.float16: (torch.float16,),
    torch.float32: (),
    "fp8": (torch.float16, torch.bfloat16),
    "index_fp8": (torch.float16, torch.bfloat16),
    "mxfp4": (torch.bfloat16,),
    "index_mxfp4": (torch.bfloat16,),
}


def _operand(queries: Any, keys: Any) -> torch.dtype:
    """Return the type in which queries and keys are multiplied; each is a dtype or a format."""
    return next((x for x in _EXACT[queries] if x in _EXACT[keys]), torch.float32)


class _ScoreTile(NamedTuple):
    """Tiling of a launch of the score kernels.

    Attributes:
        operand: Type in which queries and keys are multiplied.
        heads: Heads, padded to a power of two.
        tokens: Tokens that share a program.
        within: Whether blocks lie within a page (``score_pages_kernel``).
        block: Entries of a block.
        stages: Pipeline stages.
        warps: Warps of a program.
        grid: Programs by tokens, and by splits of their entries.
    """

    operand: torch.dtype
    heads: int
    tokens: int
    within: bool
    block: int
    stages: int
    warps: int
    grid: tuple[int, int]


def _score_tile(operands: Scoring, queries: str, d: int) -> _ScoreTile:
    """Choose the tiling; ``d`` is the dims of a key."""
    q, keys = operands.q, operands.keys
    data, entry_format = keys.data, keys.entry_format
    operand = _operand(
        q.dtype if queries == "plain" else queries,
        data.dtype if entry_format == "plain" else entry_format,
    )
    narrow_types = operand != torch.float32
    padded = max(16, launch_options.power_of_two(q.shape[1]))
    large_m = q.shape[0] >= _SHARED_FROM
    shared = max(1, _COLUMNS // padded) if narrow_types and large_m else 1
    within = narrow_types and shared == 1 and _within_pages(data, keys.page_size, entry_format, d)
    shape = entry_format if within else shared > 1 if narrow_types else None
    chosen = _SHAPES[shape]
    memory = launch_options.shared_memory(q)
    resident = launch_options.resident(memory, chosen.resident, chosen.shared)
    programs = triton.cdiv(q.shape[0], shared)
    splits = max(1, resident * launch_options.sm_count(q.device) // programs)
    grid = (programs, min(splits, triton.cdiv(keys.capacity, chosen.block)))
    sizes = (chosen.block, chosen.stages, chosen.warps)
    return _ScoreTile(operand, padded, shared, within, *sizes, grid)


def launch_scores(
    operands: Scoring, scores: torch.Tensor, maxima: torch.Tensor, k: int, group: int
) -> None:
    """Score some tokens; see ``scored``. All but q, its scales and the keys are contiguous."""
    q, query_scales, weights, keys, sequences, visible = operands
    data, page_size, page_table = keys.data, keys.page_size, keys.page_table
    tokens, heads, d = q.shape
    queries = _CODES.get(q.dtype, "plain")
    if query_scales is not None:
        d, query_scales = 2 * d, query_scales.contiguous().view(torch.uint8)
    tile = _score_tile(operands, queries, d)
    pointers = (weights, data, page_table, sequences, visible, scores, maxima)
    strides = (
        *(data.stride(0), data.stride(1), page_table.stride(0)),
        *(scores.stride(0), maxima.stride(0)),
    )
    options = {
        "H": heads,
        "D": d,
        "KEYS": keys.entry_format,
        "QUERIES": queries,
        "OPERAND": row_tiles.TYPES[tile.operand],
        "HEADS": tile.heads,
        "BLOCK": tile.block,
        "GROUP": group,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
        **launch_options.options(q),
    }
    if tile.within and query_scales is not None:
        q, query_scales = _in_words(q), _in_words(query_scales)
    x = q.view(torch.uint8) if queries == "fp8" else q
    with launch_options.on(q):
        if tile.within:
            score_pages_kernel[tile.grid](
                x,
                query_scales,
                *pointers,
                keys.capacity,
                k,
                *q.stride()[:2],
                *strides,
                PAGE=page_size,
                SM=launch_options.sm(q),
                **options,
            )
            return
        score_kernel[tile.grid](
            x,
            query_scales,
            *pointers,
            tokens,
            keys.capacity,
            k,
            page_size,
            *q.stride()[:2],
            *strides,
            PAGE=page_size if page_size == launch_options.power_of_two(page_size) else 0,
            TOKENS=tile.tokens,
            DIMS=max(16, launch_options.power_of_two(d)),
            **options,
        )


def _within_pages(data: torch.Tensor, page_size: int, entry_format: str, d: int) -> bool:
    """Return whether ``score_pages_kernel`` reads such pages."""
    if page_size % _SHAPES[entry_format].block:
        return False
    if entry_format == "plain":
        return d >= 16 and d == launch_options.power_of_two(d)
    return d == 128 and data.data_ptr() % 16 == 0 and data.stride(0) % 16 == 0


def _in_words(x: torch.Tensor) -> torch.Tensor:
    """Bytes that can be read four at a time."""
    aligned = all(number % 4 == 0 for number in (x.data_ptr(), *x.stride()[:-1]))
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def launch_selection(
    scores: torch.Tensor,
    maxima: torch.Tensor,
    buffer: torch.Tensor,
    rows: Selected,
    capacity: int,
    sizes: Sizes,
) -> None:
    """Choose the highest of each row of scores, as ``scored`` gives them, into ``rows.out``."""
    out, slot_table = rows.out, rows.slot_table
    tokens, k = out.shape
    with launch_options.on(out):
        select_kernel[(tokens,)](
            scores,
            maxima,
            buffer,
            rows.visible,
            None if slot_table is None else slot_table.page_table,
            None if slot_table is None else slot_table.sequences,
            out,
            capacity,
            k,
            scores.stride(0),
            maxima.stride(0),
            buffer.stride(0),
            0 if slot_table is None else slot_table.page_table.stride(0),
            PAGE=0 if slot_table is None else slot_table.page_size,
            TOP=launch_options.power_of_two(k),
            GROUP=sizes.group,
            EXACT=sizes.exact,
            DIRECT=sizes.direct,
            BUFFER=sizes.buffer,
            CLASSES=sizes.classes,
            T=32 * sizes.warps,
            num_warps=sizes.warps,
            **launch_options.options(out),
        )
