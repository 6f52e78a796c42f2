"""Measured times of tiles of the GEMMs with FP8 arithmetic, and sums of them.

The default constants (``costs.E4m3Costs``) are of one H200, from two runs:

* The third run of ``notes/2026-11_fp8_gemm.md`` (2026-11-28) has every form of each GEMM. Tiles and
  stages of dense GEMMs, conversion and FP8 weights are fitted to it, within 5 % (FP8 weights 9 %),
  and so is the ratio of the two forms of experts, within 6 %. Narrow tiles that dequantize in the
  loop were not in that run: their stage is from the first one.
* ``bench crossover`` (2026-11-29; results/nvidia-h200) has the form that was chosen, of GEMMs of
  Flash and Pro at 64 to 8192 tokens. Launches are fitted to it, which were 3.7 us longer before,
  and so are experts that are dequantized in the loop. Estimates differ from its times by 6 %
  (dense) and 3 % (experts) in root mean square, by 16 % at most.

``tests/cute/test_e4m3_times.py`` compares estimates with both.
"""

from __future__ import annotations

import math

from dsv4.cute.sm90.costs import TileTimes
from dsv4.cute.sm90.tuned import tuned

_ROWS = 128
_BLOCK = 64  # rows of X that a stage of experts multiplies or leaves out
_FAR = 5  # standard deviations that hardly any expert is above


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
    """Microseconds of a grouped GEMM, with rows of X that belong to experts drawn uniformly.

    A stage of a tile takes a fixed time, and more for each block of 64 rows that it has.

    Args:
        times: Times of its kernel and tiles.
        token_rows: As in ``dense_us``.
        rows: N of an expert.
        columns: K.
        experts: Number of experts.
        rows_of_x: Rows of all experts.
    """
    mean, size = rows_of_x / experts, 128 * token_rows
    tiles = expected_blocks(mean, size)
    shares = expected_blocks(mean, _BLOCK) * _BLOCK / size
    stages = times.fixed * tiles + (1 - times.fixed) * shares
    of_expert = tiles * times.tile + stages * times.stages_us(columns)
    return times.launch + experts * -(-rows // _ROWS) / tuned().sms * of_expert


def expected_blocks(mean: float, size: int) -> float:
    """Blocks of ``size`` rows that an expert has on average, the last one filled or not.

    Its rows are Poisson distributed around ``mean``. The number of blocks is the sum of the
    probabilities of more than 0, ``size``, 2 ``size`` ... rows; those but the first are of the
    normal distribution.
    """
    deviation = math.sqrt(mean)
    sure = max(1, int((mean - _FAR * deviation) // size))  # of every expert that has rows
    blocks = sure - math.exp(-mean)
    for above in range(sure * size, math.ceil(mean + _FAR * deviation), size):
        blocks += math.erfc((above + 0.5 - mean) / (deviation * math.sqrt(2))) / 2
    return blocks
