"""Tiles of the GEMMs of ``dsv4.triton.gemm_packed`` and ``grouped_gemm``; needs no compiler.

For small M (``parts`` above 1) the warps of a program share its columns, and the program multiplies
one or two row tiles. As many bytes are in flight as with one program per warp, but there is one
store. For large M the warps share the rows of the program. A tile of 64 columns is bound by memory
bandwidth, by the instructions that dequantise (some 100 of a warp for 16 x 64 weights; counted in
machine code of Triton 3.6, sm_90a), or by the tensor cores.

Plans depend on powers of two of tokens and on token tiles, so that the steps that
``dsv4.compilation`` runs launch every kernel.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

SMALL_M = 16  # tokens up to which the warps of a program share its columns
_MOST_PARTS = 8
_MOST_SPLITS = 16
# Bytes per cycle that memory delivers to an SM, on a GPU with little memory bandwidth per SM.
_BYTES_PER_CYCLE = 16
_INSTRUCTIONS = 100  # instructions of a warp for 16 x 64 weights
_SMALL_M_LATENCY = 325  # cycles of a block of 64 columns if a program is alone on its SM
_SECOND_LAUNCH = 2500  # cycles
_MOST_PREFETCHED = 16
# Tokens up to which the last program of a tile adds its partial sums. Flash's q_a + kv, gate_up,
# o_a and o_b took 5.25, 6.53, 9.58 and 9.58 us for 8 tokens, by two launches 7.18, 6.94, 9.91 and
# 9.88; for 16 tokens 6.50, 8.32, 11.4 and 11.7, by two launches 5.35, 7.58, 11.1 and 12.3 (H200).
_MOST_JOINED = 8
_FULL = 0.9  # programs for each SM from which columns are not split
# Programs for each SM up to which 64 tokens take tiles of half the rows. 12 programs for 1536 x
# 4096 on 132 SMs took 8.76 us, 24 of half the rows 7.38; 32 for 4096 x 4096 took 12.6, 64 13.0.
_SPARSE = 0.125
_OF_A_TOKEN = 4  # experts that have rows wherever there is a token, or one more or less


@dataclass(frozen=True)
class PackedPlan:
    """Tiling of one GEMM.

    Attributes:
        tiles: Row tiles of 16 rows in one program.
        tokens: Tokens in one program.
        parts: Warps that share the columns of a program, or 1: they share its rows.
        warps: Warps of a program.
        stages: Pipeline stages, of 64 ``parts blocks`` columns each. One stage of fragments:
            registers, not shared memory, hold the next iteration's operands.
        length: Columns of a program by 64.
        splits: Split-K: programs that share one tile of the result.
        blocks: Blocks of 64 columns that a warp multiplies in one iteration; above 1, only of
            fragments.
        prefetched: Blocks of 64 columns of a program that are prefetched before the preceding
            kernel has ended; a power of two, or 0.
        is_joined: Whether the last program of a tile adds its partial sums; else a launch does.
        is_overlapped: Whether two programs of experts share an SM, so that one dequantizes while
            the other's product is computed: threads have few registers. Where an expert has at
            most 3/4 of ``tokens``, no more are multiplied. Only of fragments, where there is
            ``wgmma``; the bits are the same.
    """

    tiles: int
    tokens: int
    parts: int
    warps: int
    stages: int
    length: int
    splits: int = 1
    blocks: int = 1
    prefetched: int = 0
    is_joined: bool = False
    is_overlapped: bool = False


@dataclass(frozen=True)
class Weight:
    """Sizes of a weight, of one group or expert.

    Attributes:
        rows: A multiple of 16.
        columns: A multiple of 64.
        is_fragments: Whether lanes load their own operands; else lanes exchange them.
    """

    rows: int
    columns: int
    is_fragments: bool

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 rows."""
        return self.rows // 16

    @property
    def k_tiles(self) -> int:
        """Columns by 64."""
        return self.columns // 64


@dataclass(frozen=True)
class _Tile:
    """A program's share of the result, and how long a block of 64 columns takes it.

    Attributes:
        tiles: As in ``PackedPlan``; so are ``tokens``, ``warps``, ``stages``, ``blocks`` and
            ``is_overlapped``.
        latency: Cycles of a block if a program is alone on its SM.
        resident: Programs that work at a time on an SM.
    """

    tiles: int
    tokens: int
    warps: int
    stages: int
    blocks: int = 1
    latency: int = 500
    resident: int = 2
    is_overlapped: bool = False

    def programs(self, weight: Weight, groups: int) -> int:
        """Tiles of rows, of all groups."""
        return -(-weight.row_tiles // self.tiles) * groups

    def plan(self, weight: Weight, length: int, prefetched: int = 0) -> PackedPlan:
        """Return the plan of programs of ``length`` blocks of columns."""
        splits = -(-weight.k_tiles // length)
        return PackedPlan(
            tiles=self.tiles,
            tokens=self.tokens,
            parts=1,
            warps=self.warps,
            stages=self.stages,
            length=length,
            splits=splits,
            blocks=self.blocks,
            prefetched=prefetched,
            is_joined=splits > 1 and self.tokens <= _MOST_JOINED,
            is_overlapped=self.is_overlapped,
        )


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def _shared_columns(weight: Weight, tokens: int, copies: int, sms: int) -> PackedPlan:
    """Return the plan whose warps share columns, for at most ``SMALL_M`` tokens.

    Args:
        weight: Sizes of the weight.
        tokens: Tokens of a program, 8 or 16.
        copies: Groups, or the least number of experts that have rows.
        sms: SMs of the GPU.
    """
    parts = min(_MOST_PARTS, weight.k_tiles & -weight.k_tiles)
    programs = weight.row_tiles // 2 * copies
    # Two row tiles halve the reads of x; operands that lanes exchange take twice the registers.
    tiles = 2 if weight.is_fragments and programs >= 0.9 * sms else 1
    stages = 4 if tokens == 8 else 3
    return PackedPlan(tiles, tokens, parts, parts, stages, weight.k_tiles)


def _small_m(weight: Weight, tokens: int) -> _Tile:
    """Return the tile for fragments and at most ``SMALL_M`` tokens.

    Each of four warps has one row tile. At 8 tokens registers hold the next four blocks of columns.
    At 16 tokens x takes twice the registers, so shared memory holds the next blocks.
    """
    most, stages = (4, 1) if tokens <= 8 else (2, 4)
    blocks = min(most, weight.k_tiles & -weight.k_tiles)
    return _Tile(4, 8 if tokens <= 8 else 16, 4, stages, blocks, _SMALL_M_LATENCY, 4)


def _wide(tokens: int, has_wgmma: bool) -> _Tile:
    """Return the tile of a program that multiplies ``tokens`` tokens."""
    if tokens >= (64 if has_wgmma else 128):
        return _Tile(8, tokens, 8, 3)
    return _Tile(4, tokens, 4, 4)


def _medium_m(weight: Weight, tokens: int, groups: int, sms: int) -> _Tile:
    """Return the tile for fragments and 32 or 64 tokens where there is ``wgmma``."""
    if weight.k_tiles % 2 == 0:
        for tiles in (8, 4):
            whole = _Tile(tiles, tokens, tiles, 3, 2)
            if whole.programs(weight, groups) >= _FULL * sms:
                return whole
    wide = _Tile(8, tokens, 8, 4)
    if tokens == 64 and weight.k_tiles % 2 == 0 and wide.programs(weight, groups) <= _SPARSE * sms:
        return _Tile(4, tokens, 4, 3, 2)
    return wide


@functools.lru_cache(maxsize=4096)
def dense_plan(weight: Weight, tokens: int, groups: int, sms: int, has_wgmma: bool) -> PackedPlan:
    """Choose tiles by tokens, and the split of the columns by an estimate of cycles.

    Args:
        weight: Sizes of one group's weight.
        tokens: At least 1.
        groups: Groups of rows with tokens of their own.
        sms: SMs of the GPU.
        has_wgmma: Whether tensor cores take the right operand from shared memory (9.0).
    """
    if tokens <= SMALL_M and not weight.is_fragments:
        return _shared_columns(weight, 8 if tokens <= 8 else 16, groups, sms)
    wide = min(128, max(32, _power_of_two(tokens)))
    if has_wgmma and tokens >= 1024:
        wide = 256
    if tokens <= SMALL_M:
        tile = _small_m(weight, tokens)
    elif wide <= 64 and has_wgmma and weight.is_fragments:
        tile = _medium_m(weight, wide, groups, sms)
    else:
        tile = _wide(wide, has_wgmma)
    length = _length(weight, tile, -(-tokens // tile.tokens), groups, sms, has_wgmma)
    # Programs that leave room on their SMs begin while the preceding kernel runs.
    is_light = length == weight.k_tiles and tile.programs(weight, groups) <= sms
    if tokens > SMALL_M or not is_light:
        return tile.plan(weight, length)
    return tile.plan(weight, length, min(_MOST_PREFETCHED, _power_of_two(length)))


def _length(
    weight: Weight, tile: _Tile, token_tiles: int, groups: int, sms: int, has_wgmma: bool
) -> int:
    """Return how many blocks of columns a program takes: the longest of those with least cycles.

    With several blocks in an iteration, a program has two iterations or all columns. With one
    iteration, 1536 x 4096 took 4.88 and 5.24 us for 1 and 8 tokens; with two 4.74 and 4.92 (H200).
    """
    programs = tile.programs(weight, groups) * token_tiles
    tensor = 2048 if has_wgmma else 512
    block = max(
        576 * tile.tiles / _BYTES_PER_CYCLE,
        tile.tiles * _INSTRUCTIONS / 4,
        tile.tiles * tile.tokens * 1024 / tensor,
    )

    def cycles(length: int) -> float:
        splits = -(-weight.k_tiles // length)
        busy = -(-programs * splits // sms) * length * block
        waves = -(-programs * splits // (tile.resident * sms))
        alone = waves * length * max(float(tile.latency), block)
        values = tile.tokens * token_tiles * groups * weight.rows * splits
        sums = 8 * values / (_BYTES_PER_CYCLE * sms)
        return max(busy, alone) + (_SECOND_LAUNCH + sums if splits > 1 else 0.0)

    steps = -(-weight.k_tiles // tile.blocks)
    most = _MOST_SPLITS if tile.blocks == 1 else max(1, min(_MOST_SPLITS, steps // 2))
    lengths = {tile.blocks * -(-steps // splits) for splits in range(1, most + 1)}
    return min(sorted(lengths, reverse=True), key=cycles)


# Mean rows of an expert up to which overlapped tiles have 64 tokens. Flash's gate_up took, in tiles
# of 64 and 128 tokens, 1234 and 1804 us for 48 rows, 1749 and 1708 for 64, 2354 and 1645 for 80;
# in tiles of ``_wide(64)`` 1394, 2178 and 3010 (H200).
_MOST_NARROW = 60


def _overlapped(tokens: int) -> _Tile:
    """Return the tile of experts with more than 24 and fewer than 1024 rows each.

    Flash's gate_up, with SwiGLU, and down at 4096 tokens (96 rows) took 1729, 1734 and 921 us, in
    the tiles of ``_wide``, of which an SM holds one, 2723, 2708 and 1516 (H200).
    """
    return _Tile(8, tokens, 8, 4, is_overlapped=True)


@functools.lru_cache(maxsize=4096)
def grouped_plan(weight: Weight, rows: int, experts: int, sms: int, has_wgmma: bool) -> PackedPlan:
    """Choose tiles for ``rows`` rows of x that are spread over ``experts`` experts.

    Results are right for any routing; the plan assumes a uniform one. Only the warps of a program
    split columns, because the experts with rows make enough programs for every GPU.
    """
    mean = rows / experts
    if mean <= 10:
        copies, wide = min(_OF_A_TOKEN, experts), 8 if mean <= 4 else 16
        tile = _small_m(weight, wide)
        # A program of four row tiles sums its columns alone, where that makes programs enough.
        if weight.is_fragments and tile.programs(weight, copies) >= _FULL * sms:
            return tile.plan(weight, weight.k_tiles)
        return _shared_columns(weight, wide, copies, sms)
    if has_wgmma and weight.is_fragments and 24 < mean < 1024:
        tile = _overlapped(64 if mean <= _MOST_NARROW else 128)
        return tile.plan(weight, weight.k_tiles)
    wide = 32 if mean <= 24 else 64 if mean <= 80 else 128
    if has_wgmma and mean >= 1024:
        wide = 256
    return _wide(wide, has_wgmma).plan(weight, weight.k_tiles)
