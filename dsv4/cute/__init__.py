"""CuTeDSL kernels for tensor-core steps, compiled on first use and kept on disk."""
