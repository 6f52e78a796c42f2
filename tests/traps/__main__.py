"""``python -m tests.traps [T9 ...]``: the named traps, or all; see ``watch.main``."""

from __future__ import annotations

import sys

from .watch import main

raise SystemExit(main(sys.argv[1:]))
