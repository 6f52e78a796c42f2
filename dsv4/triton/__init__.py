"""Triton kernels for memory-bound steps, a file for each row of operators."""
