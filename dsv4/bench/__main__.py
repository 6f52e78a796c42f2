"""Entry point of ``python -m dsv4.bench``."""

from __future__ import annotations

import warnings

# PyTorch warns when it is imported, in spawned processes, too; the bench needs no NumPy.
if __name__ in ("__main__", "__mp_main__"):
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)

from dsv4.bench.cli import main
from dsv4.parallel.processes import run

if __name__ == "__main__":
    run(main)
