"""Launch Triton kernels: options, the launcher, and the store of compiled kernels."""
