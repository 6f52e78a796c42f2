"""Do jobs in parallel processes.

The workers are fresh interpreters that run ``dsv4._compile_worker``, not forks (CUDA and threads do
not survive one) and no ``multiprocessing``: that would run the user's script once more.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dsv4._compile_jobs import Job
from dsv4._compile_worker import Done, done, receive, send

_MOST_WORKERS = 32
_FEW = 2  # jobs that take less time than the start of a worker
_PATH = "DSV4_WORKER_PATH"
# The search path is the parent's, whatever the current folder holds.
_BOOT = (
    f"import json, os, sys; sys.path[:] = json.loads(os.environ.pop({_PATH!r})); "
    "from dsv4._compile_worker import main; main()"
)


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


def run(jobs: Sequence[Job], workers: int | None = None) -> Iterator[Finished]:
    """Do jobs, in parallel if there are several; each result as soon as it is there.

    A job that fails, or ends its process, fails alone. Where no process can be started the jobs are
    done in this one. To stop early, close the iterator: the workers are ended.

    Args:
        jobs: Longest first, so that no worker ends with one alone.
        workers: Processes; None: as many as processors, at most 32.

    Raises:
        ValueError: if ``workers`` is below 1.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers is {workers}, wanted at least 1 or None")
    if len(jobs) <= _FEW or not can_start():
        for job in jobs:
            yield Finished(job, done(job))
        return
    count = min(processors() if workers is None else workers, len(jobs), _MOST_WORKERS)
    pool = _Pool(jobs)
    threads = [threading.Thread(target=pool.work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        for _ in jobs:
            yield pool.finished.get()
    finally:
        pool.stop()
        for thread in threads:
            thread.join()


class _Pool:
    """Jobs to do and results, shared by threads with a worker process each."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.finished: queue.Queue[Finished] = queue.Queue()
        self._waiting: queue.Queue[Job] = queue.Queue()
        for job in jobs:
            self._waiting.put(job)
        self._lock = threading.Lock()
        self._own = threading.Lock()  # of jobs that this process does itself
        self._stopped = False
        self._processes: list[subprocess.Popen[bytes]] = []

    def work(self) -> None:
        """Do jobs until none is left."""
        process: subprocess.Popen[bytes] | None = None
        while True:
            try:
                job = self._waiting.get_nowait()
            except queue.Empty:
                break
            if process is None:
                process = self._started()
            if process is None:
                with self._own:
                    self.finished.put(Finished(job, done(job)))
                continue
            result = _ask(process, job)
            if process.poll() is not None:
                process = None
            self.finished.put(Finished(job, result))
        if process is not None:
            _end(process)

    def stop(self) -> None:
        """Begin no other job, and end the processes."""
        with self._lock:
            self._stopped = True
            with suppress(queue.Empty):
                while True:
                    self._waiting.get_nowait()
            for process in self._processes:
                if process.poll() is None:
                    process.kill()

    def _started(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._stopped:
                return None
            process = start()
            if process is not None:
                self._processes.append(process)
            return process


def can_start() -> bool:
    """Whether worker processes can be started."""
    return bool(sys.executable)


def start() -> subprocess.Popen[bytes] | None:
    """A worker process; None if this system cannot start one."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {
        _PATH: json.dumps([os.path.abspath(path) for path in sys.path]),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TRITON_DISABLE_LINE_INFO": "1",  # paths of this machine would be in every kernel
    }
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _BOOT], stdin=pipe, stdout=pipe, env=environment
        )
    except OSError:
        return None


def _ask(process: subprocess.Popen[bytes], job: Job) -> Done:
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


def _end(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        with suppress(OSError):
            if stream is not None:
                stream.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
