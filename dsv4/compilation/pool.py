"""Do jobs in parallel processes.

The workers are no forks of this process (CUDA and threads do not survive one) and no
``multiprocessing``: that would run the user's script once more. Several of them are forks of a
fresh interpreter that has imported what jobs need (``dsv4.compilation.forks``). One or two
workers, and one in place of a worker that ended, are fresh interpreters that run
``dsv4.compilation.worker``.
"""

from __future__ import annotations

import heapq
import itertools
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from dsv4.compilation import forks
from dsv4.compilation.jobs import Job
from dsv4.compilation.worker import Done, done, receive, send

_MOST_WORKERS = 32
_SMALL_COUNT = 2  # jobs that take less time than the start of a worker
_Process = subprocess.Popen[bytes] | forks.Fork


@dataclass(frozen=True)
class Finished:
    """A job and what came of it."""

    job: Any
    done: Done


def processors() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run(jobs: Sequence[Job], workers: int | None = None, arch: str = "") -> Iterator[Finished]:
    """Do jobs, in parallel if there are several; each result as soon as it is there.

    A job that fails, or ends its process, fails alone. Where no process can be started the jobs are
    done in this one. To stop early, close the iterator: the workers are ended.

    Args:
        jobs: The jobs. The longest are started first, so that none runs alone at the end.
        workers: Processes; None: as many as processors, at most 32.
        arch: Architecture that kernels are compiled for, if any are.

    Raises:
        ValueError: if ``workers`` is below 1.
    """
    with Pool(workers, arch) as pool:
        pool.add(jobs)
        yield from pool.finished()


class Pool:
    """Jobs to do and their results; a context, at whose end the workers are ended.

    Jobs can be added while others are done. Threads of this process each have a worker process.
    """

    def __init__(self, workers: int | None = None, arch: str = "", *, here: bool = True) -> None:
        """Make one without any process; see ``run`` for the other arguments.

        Args:
            workers: See there.
            arch: See there.
            here: Whether this process does jobs that are not worth a worker, and those for which
                none can be started. If not, the former have a worker and the latter fail.
        """
        if workers is not None and workers < 1:
            raise ValueError(f"workers is {workers}, wanted at least 1 or None")
        self.workers = min(processors() if workers is None else workers, _MOST_WORKERS)
        self._arch, self._here = arch, here
        self._finished: queue.Queue[Finished | Job | None] = queue.Queue()
        self._order = itertools.count()
        self._waiting: list[tuple[float, int, Job]] = []
        self._open = 0  # jobs whose results nobody has taken
        self._changed = threading.Condition()
        self._stopped = False
        self._threads: list[threading.Thread] = []
        self._forks: forks.Forks | None = None
        self._processes: list[_Process] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def is_stopped(self) -> bool:
        """Whether ``stop`` was called, so that jobs may have no result."""
        return self._stopped

    def add(self, jobs: Iterable[Job]) -> None:
        """Do these jobs, too."""
        with self._changed:
            for job in jobs:
                entry = (-getattr(job, "seconds", 0.0), next(self._order), job)
                heapq.heappush(self._waiting, entry)
                self._open += 1
            self._changed.notify_all()
            begins = len(self._waiting) > _SMALL_COUNT or not self._here
        if begins:
            self.start(min(self.workers, self._open))

    def start(self, count: int | None = None) -> None:
        """Start worker processes, if that can be and they were not started yet.

        Args:
            count: How many; None: all.
        """
        count = self.workers if count is None else count
        if self._threads or self._stopped or not can_start():
            return
        if count > _SMALL_COUNT:
            self._forks = forks.start(count, self._arch)
        self._threads = [
            threading.Thread(target=self._work, args=(i,), daemon=True) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def finished(self) -> Iterator[Finished]:
        """Results as they come, until there is one of every job that was added, or ``stop``."""
        while self._open and not self._stopped:
            # A job comes back where no process can be started.
            entry = self._finished.get() if self._threads else self._taken()
            if entry is None:
                return
            result = entry if isinstance(entry, Finished) else Finished(entry, self._done(entry))
            self._open -= 1
            yield result

    def _done(self, job: Job) -> Done:
        """Do a job that no process does."""
        return done(job) if self._here else Done(error="no worker process can be started")

    def _taken(self) -> Job | None:
        """The next job to do, the longest; None if there will be no more."""
        with self._changed:
            if self._threads:
                self._changed.wait_for(lambda: self._waiting or self._stopped)
            return heapq.heappop(self._waiting)[-1] if self._waiting else None

    def _work(self, number: int) -> None:
        """Do jobs until there are no more."""
        process = self._forked(number) or self._started()
        while (job := self._taken()) is not None:
            if process is None:
                process = self._started()
            if process is None:
                self._finished.put(job)
                continue
            result = _ask(process, job)
            if process.poll() is not None:
                process = None
            self._finished.put(Finished(job, result))
        if process is not None:
            _end(process)

    def stop(self) -> None:
        """Begin no other job, and end the processes, by force where jobs were not done.

        Another thread that waits for results gets no more of them.
        """
        with self._changed:
            self._stopped = True
            self._waiting.clear()
            self._changed.notify_all()
            if self._open:
                for process in self._processes:
                    if process.poll() is None:
                        process.kill()
                if self._forks is not None:
                    self._forks.stop()
        for thread in self._threads:
            thread.join()
        self._finished.put(None)
        if self._forks is not None:
            self._forks.end()

    def _forked(self, number: int) -> _Process | None:
        return None if self._forks is None else self._known(self._forks.worker(number))

    def _started(self) -> _Process | None:
        with self._changed:
            return None if self._stopped else self._known(start())

    def _known(self, process: _Process | None) -> _Process | None:
        """Register a process, so that ``stop`` ends it."""
        with self._changed:
            if process is not None:
                self._processes.append(process)
                if self._stopped and self._open:
                    process.kill()
            return process


def can_start() -> bool:
    """Return whether worker processes can be started."""
    return bool(sys.executable)


def start() -> subprocess.Popen[bytes] | None:
    """A worker process that is a fresh interpreter; None if this system cannot start one."""
    return forks.interpreter("from dsv4.compilation.worker import main; main()")


def _ask(process: _Process, job: Job) -> Done:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        send(process.stdin, job)
        return receive(process.stdout)
    except (OSError, EOFError):
        _end(process)
        return Done(error=f"its process ended with status {process.returncode}")
    except Exception as error:  # a job or a result that cannot be pickled: nobody else would know
        _end(process)
        return Done(error=f"{type(error).__name__}: {error}")


def _end(process: _Process) -> None:
    for stream in (process.stdin, process.stdout):
        with suppress(OSError):
            if stream is not None:
                stream.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
