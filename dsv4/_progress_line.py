"""Shows on stderr how many kernels are ready."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(total: int | None, shown: bool, what: str = "kernels") -> Iterator[Callable[[], None]]:
    """Give a function to call after each kernel.

    Args:
        total: How many there are; None: it is not known.
        shown: Whether to show anything.
        what: Name of what is counted.
    """
    if not shown or total == 0:
        yield lambda: None
    elif importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task(what, total=total)
            yield lambda: bar.advance(task)
    else:
        line = Line(total, what)
        try:
            yield line.advance
        finally:
            line.end()


class Line:
    """Counts on a terminal in one line that is written over; elsewhere in one line at the end."""

    def __init__(self, total: int | None, what: str = "kernels") -> None:
        self.total, self.what, self.done, self.start = total, what, 0, time.perf_counter()
        self.terminal = sys.stderr.isatty()

    def advance(self) -> None:
        self.done += 1
        if self.terminal:
            self._write("\r", "")

    def end(self) -> None:
        self._write("\r" if self.terminal else "", "\n")

    def _write(self, before: str, after: str) -> None:
        seconds = time.perf_counter() - self.start
        of = "" if self.total is None else f" of {self.total}"
        sys.stderr.write(f"{before}{self.what} {self.done}{of}, {seconds:.1f} s{after}")
        sys.stderr.flush()
