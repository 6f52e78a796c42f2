"""Measured times of tiles of the GEMMs with FP8 arithmetic, and sums of them.

Constants are fitted to times of one H200, 2026-11-28 (``notes/2026-11_fp8_gemm.md``, third run):
4096 x 8192, 32768 x 1024, 7168 x 16384 and 4096 x 4096 of 1024 and 4096 tokens, FP8 weights of 256,
too, and 64 experts of 512 to 2048 rows. Narrow tiles that dequantize in the loop were not in that
run: their stage is from the first one. The constants rank configurations; the fit is within 5 % of
the times, of FP8 weights within 8 % (``tests/cute/test_e4m3_times.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from dsv4.cute.sm90.tuned import tuned

_K_BLOCK, _ROWS = 128, 128


class TileTimes(NamedTuple):
    """Microseconds of a GEMM's parts.

    Attributes:
        launch: Constant part.
        tile: Constant part of a tile: arrival of the first stage, and results.
        stage: Time of a stage of 128 columns of a tile.
        stage_column: Further time of a stage for each column of the weight.
        last: Experts only: further time of the stages of an expert's last tile beyond its share of
            tokens, as a share of a stage's time.
    """

    launch: float
    tile: float
    stage: float
    stage_column: float = 0.0
    last: float = 0.0

    def tile_us(self, columns: int) -> float:
        """Microseconds of a full tile of a number of columns."""
        return self.tile + self.stages_us(columns)

    def stages_us(self, columns: int) -> float:
        """Microseconds of the stages of a full tile."""
        return columns // _K_BLOCK * (self.stage + self.stage_column * columns)


# Keys: blocks of 128 tokens of a tile.
LOOP: Mapping[int, TileTimes] = MappingProxyType(
    {1: TileTimes(8.5, 1.8, 0.73), 2: TileTimes(8.5, 1.8, 0.993)}
)
CONVERTED: Mapping[int, TileTimes] = MappingProxyType(
    {1: TileTimes(2.2, 1.55, 0.388), 2: TileTimes(2.2, 2.96, 0.673, 5.7e-6)}
)
# FP8 weights. Narrow tiles are faster at 16384 columns, and if one round holds all tiles.
BLOCK: Mapping[int, TileTimes] = MappingProxyType(
    {1: TileTimes(5.7, 1.5, 0.452), 2: TileTimes(5.7, 2.8, 0.689, 1.55e-5)}
)
GROUPED_LOOP: Mapping[int, TileTimes] = MappingProxyType(
    {1: TileTimes(8.0, 1.0, 0.73, last=0.4), 2: TileTimes(8.0, 1.0, 1.103, last=0.39)}
)
# Keys: stages of the ring. Results in FP8 leave room for three.
GROUPED_CONVERTED: Mapping[int, TileTimes] = MappingProxyType(
    {3: TileTimes(2.5, 1.0, 0.882, last=0.556), 4: TileTimes(2.5, 1.0, 0.805, last=0.556)}
)


def dense_us(times: TileTimes, token_rows: int, rows: int, columns: int, tokens: int) -> float:
    """Microseconds of a dense GEMM: rounds of tiles.

    Args:
        times: Times of its kernel and tiles.
        token_rows: Blocks of 128 tokens of a tile, 1 or 2.
        rows: N, of all groups.
        columns: K.
        tokens: At least 1.
    """
    tiles = -(-rows // _ROWS) * -(-tokens // (128 * token_rows))
    return times.launch + -(-tiles // tuned().sms) * times.tile_us(columns)


def grouped_us(
    times: TileTimes, token_rows: int, rows: int, columns: int, experts: int, rows_of_x: int
) -> float:
    """Microseconds of a grouped GEMM whose experts have about as many rows each.

    Args:
        times: Times of its kernel and tiles.
        token_rows: As in ``dense_us``.
        rows: N of an expert.
        columns: K.
        experts: Number of experts.
        rows_of_x: Rows of all experts.
    """
    full = rows_of_x / experts / (128 * token_rows)
    # Half of the experts have a tile more than that, rounded down.
    tile = (full + times.last) * times.stages_us(columns) + (full + 0.5) * times.tile
    return times.launch + experts * -(-rows // _ROWS) / tuned().sms * tile
