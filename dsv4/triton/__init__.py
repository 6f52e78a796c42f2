"""Triton kernels for memory-bound steps. None yet: the reference runs."""
