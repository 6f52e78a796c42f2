"""Compiled kernels: which a model needs, compiling them in parallel, bundles and their versions."""
