"""Compile the kernels of a model in worker processes, while this process reads its weights."""

from __future__ import annotations

import logging
import threading
from types import TracebackType

from dsv4.compilation.compiler import Compilation
from dsv4.compilation.listing import Listing
from dsv4.compilation.pool import Pool
from dsv4.compilation.progress_line import Count
from dsv4.compilation.progress_line import progress as progress_line

_log = logging.getLogger(__name__)


class KernelsAhead:
    """Compiles kernels in worker processes; a context, at whose end nothing of it runs.

    A thread of this process hands the jobs out and keeps their results: a list of kernels, and each
    kernel, where ``dsv4.warmup`` looks for them. It runs no operator and uses no GPU. What it could
    not do is left to ``dsv4.warmup``, which says what is wrong.
    """

    def __init__(self) -> None:
        self._pool: Pool | None = None
        self._thread: threading.Thread | None = None
        self._count = _LateCount()

    def __enter__(self) -> KernelsAhead:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.stop()
        if self._thread is not None:
            self._thread.join()

    def begin(self, listing: Listing) -> None:
        """Begin with the kernels of a list; do nothing if the list and its kernels are stored."""
        assert self._pool is None
        if listing.stored() is not None:
            return
        self._pool = Pool(None, listing.target.arch, here=False)
        self._pool.start()
        arguments = (self._pool, listing)
        self._thread = threading.Thread(
            target=self._make, args=arguments, name="dsv4 kernels", daemon=True
        )
        self._thread.start()

    def wait(self, progress: bool) -> None:
        """Wait until all that was begun is done.

        Args:
            progress: Whether to show progress on stderr meanwhile.
        """
        if self._thread is None or not self._thread.is_alive():
            return
        with progress_line(progress) as count:
            self._count.show(count)
            self._thread.join()

    def _make(self, pool: Pool, listing: Listing) -> None:
        """List and compile kernels, and keep them."""
        try:
            with pool:
                work = Compilation(pool, self._count)
                work.plan(listing)
                work.find(listing)
                work.finish()
                if not pool.is_stopped and not work.outcome.failed:
                    listing.keep(work.steps())
        except Exception as error:  # dsv4.warmup finds the same, and says it
            line = str(error).partition("\n")[0]
            _log.info("kernels were not compiled while weights were read: %s", line)


class _LateCount:
    """Counts in one thread what another one begins to show later."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = self._done = 0
        self._shown: Count | None = None

    def expect(self, more: int) -> None:
        """Count further steps."""
        with self._lock:
            self._total += more
            if self._shown is not None:
                self._shown.expect(more)

    def advance(self) -> None:
        """Count a step that is done."""
        with self._lock:
            self._done += 1
            if self._shown is not None:
                self._shown.advance()

    def show(self, count: Count) -> None:
        """Show it from now on."""
        with self._lock:
            count.expect(self._total)
            for _ in range(self._done):
                count.advance()
            self._shown = count
