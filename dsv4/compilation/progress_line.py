"""Shows on stderr how many kernels are ready."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Count(Protocol):
    """Counts what is ready, and how many there will be."""

    def expect(self, more: int) -> None:
        """Count further steps."""
        """Add ``more`` kernels to come."""

    def advance(self) -> None:
        """Count one more as ready."""


@contextmanager
def progress(shown: bool, what: str = "kernels") -> Iterator[Count]:
    """Yield a counter of kernels, which shows its progress.

    Args:
        shown: Whether to show anything.
        what: Name of what is counted.
    """
    if not shown:
        yield _Silent()
    elif importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True)) as bar:
            yield _Bar(bar, what)
    else:
        line = Line(what)
        try:
            yield line
        finally:
            line.end()


class _Silent:
    def expect(self, more: int) -> None:
        """Count further steps."""

    def advance(self) -> None:
        pass


class _Bar:
    """A bar of rich, once there is something to count."""

    def __init__(self, bar: Any, what: str) -> None:
        self.bar, self.what, self.total = bar, what, 0
        self.task: Any = None

    def expect(self, more: int) -> None:
        """Count further steps."""
        self.total += more
        if self.task is not None:
            self.bar.update(self.task, total=self.total)
        elif self.total:
            self.task = self.bar.add_task(self.what, total=self.total)

    def advance(self) -> None:
        self.bar.advance(self.task)


class Line:
    """Counts on a terminal in one line that is written over; elsewhere in one line at the end."""

    def __init__(self, what: str = "kernels") -> None:
        self.total, self.what, self.done, self.start = 0, what, 0, time.perf_counter()
        self.terminal = sys.stderr.isatty()

    def expect(self, more: int) -> None:
        """Count further steps."""
        self.total += more

    def advance(self) -> None:
        """Count a step that is done."""
        self.done += 1
        if self.terminal:
            self._write("\r", "")

    def end(self) -> None:
        """Write the last line."""
        if self.total:
            self._write("\r" if self.terminal else "", "\n")

    def _write(self, before: str, after: str) -> None:
        seconds = time.perf_counter() - self.start
        sys.stderr.write(f"{before}{self.what} {self.done} of {self.total}, {seconds:.1f} s{after}")
        sys.stderr.flush()
