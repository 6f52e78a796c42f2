"""Blackwell's kernels: compute capability 10.0 and 10.3."""
