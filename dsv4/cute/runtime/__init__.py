"""Compiled kernels on disk, loaded and launched through the CUDA driver; needs no compiler."""
