"""``run gemm --check``: validates every GEMM kernel of this machine and prints a report."""
