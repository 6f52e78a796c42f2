"""Device functions that several Triton operators share, and the kernels that they split off."""
