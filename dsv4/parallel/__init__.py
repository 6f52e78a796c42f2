"""Several GPUs: groups of ranks, their symmetric buffers, and sums of partial results over them.

This file imports nothing, because operators import modules of this package.
"""
