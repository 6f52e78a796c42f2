"""Entry point of ``python -m dsv4.bench``."""

from __future__ import annotations

import warnings

if __name__ == "__main__":  # PyTorch says so when it is imported; the bench needs no NumPy
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)

from dsv4.bench.cli import main
from dsv4.parallel.processes import run

if __name__ == "__main__":
    run(main)
