"""Device code that kernels of several architectures share."""
