"""Entry point of ``python -m dsv4``."""

from __future__ import annotations

import sys

from dsv4._cli import main

if __name__ == "__main__":
    sys.exit(main())
