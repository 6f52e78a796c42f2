"""Progress bar on stderr; without a terminal, a line every 10 seconds."""

from __future__ import annotations

import sys
import time

_WIDTH = 30


class Progress:
    """Counts bytes towards a total.

    Args:
        label: Shown before the bar.
        total: Bytes to come.
        shown: False prints nothing.
    """

    def __init__(self, label: str, total: int, shown: bool = True) -> None:
        self.label = label
        self.total = max(total, 1)
        self.shown = shown
        self.done = 0
        self.start = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._next = self.start + (0.2 if self._terminal else 10.0)

    def advance(self, count: int) -> None:
        """Add ``count`` bytes."""
        self.done += count
        now = time.monotonic()
        if self.shown and now >= self._next:
            self._next = now + (0.2 if self._terminal else 10.0)
            self._print("\r" if self._terminal else "", "" if self._terminal else "\n")

    def finish(self) -> None:
        """Print the final state, if anything was printed or there is a terminal."""
        if self.shown and self._terminal:
            self._print("\r", "\n")

    def _print(self, before: str, after: str) -> None:
        share = min(self.done / self.total, 1.0)
        filled = round(share * _WIDTH)
        seconds = max(time.monotonic() - self.start, 1e-6)
        sys.stderr.write(
            f"{before}{self.label} [{'#' * filled}{'.' * (_WIDTH - filled)}] {share:4.0%} "
            f"{self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB, "
            f"{self.done / 1e9 / seconds:.2f} GB/s{after}"
        )
        sys.stderr.flush()
