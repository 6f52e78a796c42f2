"""Several GPUs: groups of ranks, their symmetric buffers, and what sums partial results over them.

This file imports nothing, because operators import modules of this package.
"""
