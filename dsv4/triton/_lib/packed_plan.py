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
_LATENCY = 500  # cycles of an iteration if a program is alone on its SM
_SECOND_LAUNCH = 2500  # cycles
_OF_A_TOKEN = 4  # experts that have rows wherever there is a token, or one more or less


@dataclass(frozen=True)
class PackedPlan:
    """Tiling of one GEMM.

    Attributes:
        tiles: Row tiles of 16 rows in one program.
        tokens: Tokens in one program.
        parts: Warps that share the columns of a program, or 1: they share its rows.
        warps: Warps of a program.
        stages: Pipeline stages, of 64 ``parts`` columns each.
        length: Columns of a program by 64.
        splits: Split-K: programs that share one tile of the result.
    """

    tiles: int
    tokens: int
    parts: int
    warps: int
    stages: int
    length: int
    splits: int = 1
    depth: int = 1
    ahead: int = 0


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


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()


def _small_m(weight: Weight, tokens: int, copies: int, sms: int) -> PackedPlan:
    """Return the plan for at most ``SMALL_M`` tokens.

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


def _wide(tokens: int, has_wgmma: bool) -> tuple[int, int, int]:
    """Row tiles, warps and stages of a program that multiplies ``tokens`` tokens."""
    if tokens >= (64 if has_wgmma else 128):
        return 8, 8, 3
    return 4, 4, 4


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
    if tokens <= SMALL_M:
        return _small_m(weight, 8 if tokens <= 8 else 16, groups, sms)
    wide = min(128, max(32, _power_of_two(tokens)))
    if has_wgmma and tokens >= 1024:
        wide = 256
    tiles, warps, stages = _wide(wide, has_wgmma)
    token_tiles = -(-tokens // wide)
    programs = -(-weight.row_tiles // tiles) * groups * token_tiles

    def cycles(length: int) -> float:
        splits = -(-weight.k_tiles // length)
        block = max(
            576 * tiles / _BYTES_PER_CYCLE,
            tiles * _INSTRUCTIONS / 4,
            tiles * wide * 1024 / (2048 if has_wgmma else 512),
        )
        busy = -(-programs * splits // sms) * length * block
        alone = -(-programs * splits // (2 * sms)) * length * max(float(_LATENCY), block)
        sums = 8 * wide * token_tiles * groups * weight.rows * splits / (_BYTES_PER_CYCLE * sms)
        return max(busy, alone) + (_SECOND_LAUNCH + sums if splits > 1 else 0.0)

    lengths = {-(-weight.k_tiles // splits) for splits in range(1, _MOST_SPLITS + 1)}
    length = min(sorted(lengths, reverse=True), key=cycles)
    return PackedPlan(tiles, wide, 1, warps, stages, length, -(-weight.k_tiles // length))


@functools.lru_cache(maxsize=4096)
def grouped_plan(weight: Weight, rows: int, experts: int, sms: int, has_wgmma: bool) -> PackedPlan:
    """Choose tiles for ``rows`` rows of x that are spread over ``experts`` experts.

    Results are right for any routing; the plan assumes a uniform one. Only the warps of a program
    split columns, because the experts with rows make enough programs for every GPU.
    """
    mean = rows / experts
    if mean <= 10:
        return _small_m(weight, 8 if mean <= 4 else 16, min(_OF_A_TOKEN, experts), sms)
    wide = 32 if mean <= 24 else 64 if mean <= 80 else 128
    if has_wgmma and mean >= 1024:
        wide = 256
    tiles, warps, stages = _wide(wide, has_wgmma)
    return PackedPlan(tiles, wide, 1, warps, stages, weight.k_tiles)
