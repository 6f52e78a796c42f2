"""Measured times of tiles of the GEMMs with FP8 arithmetic, and sums of them.

The default constants (``costs.E4m3Costs``) are fitted to times of one H200, 2026-11-28
(``notes/2026-11_fp8_gemm.md``, third run): 4096 x 8192, 32768 x 1024, 7168 x 16384 and 4096 x 4096
of 1024 and 4096 tokens, FP8 weights of 256, too, and 64 experts of 512 to 2048 rows. Narrow tiles
that dequantize in the loop were not in that run: their stage is from the first one. The constants
rank configurations; the fit is within 5 % of the times, of FP8 weights within 8 %
(``tests/cute/test_e4m3_times.py``).
"""

from __future__ import annotations

from dsv4.cute.sm90.costs import TileTimes
from dsv4.cute.sm90.tuned import tuned

_ROWS = 128


def loop(token_rows: int) -> TileTimes:
    """Times of NVFP4 weights that are dequantized in the main loop, by blocks of 128 tokens."""
    costs = tuned().costs.gemm_e4m3
    return costs.loop_narrow if token_rows == 1 else costs.loop_wide


def converted(token_rows: int) -> TileTimes:
    """Times of NVFP4 weights that are converted first, likewise."""
    costs = tuned().costs.gemm_e4m3
    return costs.converted_narrow if token_rows == 1 else costs.converted_wide


def block(token_rows: int) -> TileTimes:
    """Times of FP8 weights, likewise."""
    costs = tuned().costs.gemm_e4m3
    return costs.block_narrow if token_rows == 1 else costs.block_wide


def grouped_loop(token_rows: int) -> TileTimes:
    """Times of experts that are dequantized in the main loop, likewise."""
    costs = tuned().costs.gemm_e4m3
    return costs.experts_loop_narrow if token_rows == 1 else costs.experts_loop_wide


def grouped_converted(stages: int) -> TileTimes:
    """Times of experts that are converted first, by stages of the ring, 3 or 4."""
    costs = tuned().costs.gemm_e4m3
    return costs.experts_three_stages if stages == 3 else costs.experts_four_stages


def dense_us(
    times: TileTimes, token_rows: int, rows: int, columns: int, tokens: int, sms: int
) -> float:
    """Microseconds of a dense GEMM: rounds of tiles.

    Args:
        times: Times of its kernel and tiles.
        token_rows: Blocks of 128 tokens of a tile, 1 or 2.
        rows: N, of all groups.
        columns: K.
        tokens: At least 1.
        sms: SMs of the GPU.
    """
    tiles = -(-rows // _ROWS) * -(-tokens // (128 * token_rows))
    return times.launch + -(-tiles // sms) * times.tile_us(columns)


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
