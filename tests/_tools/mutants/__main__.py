"""``python -m tests._tools.mutants [9 ...]``: the numbered pitfalls, or all; see ``watch.main``."""

from __future__ import annotations

import sys

from .watch import main

raise SystemExit(main(sys.argv[1:]))
