"""Grouped GEMM with FP8 arithmetic and exact NVFP4 weights, for many rows an expert.

``out[r, n] = sum_k x[r, k] w[e, n, k]`` for ``offsets[e] <= r < offsets[e + 1]``, or its SwiGLU.
Warps, rings, arithmetic and results are those of ``gemm_e4m3``; what differs:

Tiling and ownership. A tile is 128 rows of an expert's weight and up to ``token_block`` rows of X
that belong to the expert, in blocks of 64. Blocks without rows are neither copied nor multiplied;
rows of the next expert that lie in the last one are multiplied, not stored. Tiles of an expert
follow one another, the tokens of a block of rows first, so that its weights come from memory once
and from L2 for the other tiles. CTAs are persistent. Each CTA takes one
tile in every round; ``next_tile`` gives it full tiles and smaller tiles alternately.

FP8 results. A scale belongs to 128 results, those of 256 rows of gate and up: a unit of two tiles
for the same tokens, which a CTA computes one after the other (``e4m3_results``).

Warps. All CTAs count the experts' tiles into a table in shared memory first (one warp); every warp
finds the expert of a tile there. Three copy warps clear rows of no expert.

Barriers: those of ``gemm_e4m3``. Numerics: as ``gemm_e4m3``.
"""

from __future__ import annotations

from dsv4.cute.sm90.e4m3_walks import GroupedTiles
from dsv4.cute.sm90.gemm_e4m3 import E4m3Kernel
from dsv4.cute.sm90.gemm_e4m3_plan import GROUPED_E4M3_ABI


class GroupedE4m3Kernel(GroupedTiles, E4m3Kernel):
    """The kernel of one configuration; ``kernel`` is that of ``E4m3Kernel``."""

    abi = GROUPED_E4M3_ABI
