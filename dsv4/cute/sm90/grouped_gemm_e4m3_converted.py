"""Grouped GEMM with FP8 arithmetic on experts' weights that ``e4m3_convert`` has converted.

It has the tiles of ``grouped_gemm_e4m3``, and the warps and rings of ``gemm_e4m3_converted``.
"""

from __future__ import annotations

from dsv4.cute.sm90.e4m3_converted_plan import GROUPED_CONVERTED_E4M3_ABI
from dsv4.cute.sm90.e4m3_walks import GroupedTiles
from dsv4.cute.sm90.gemm_e4m3_converted import ConvertedE4m3Kernel


class GroupedConvertedE4m3Kernel(GroupedTiles, ConvertedE4m3Kernel):
    """The kernel of one configuration."""

    abi = GROUPED_CONVERTED_E4M3_ABI
