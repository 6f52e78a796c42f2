"""CuTeDSL kernels for tensor-core steps. None yet: the reference runs."""
