"""``python -m dsv4.bench``: is it right on this machine, and how fast is it."""

from __future__ import annotations

from pathlib import Path

__path__ = [*__path__, str(Path(__file__).parent.parent / "_moved" / "bench")]  # old paths
