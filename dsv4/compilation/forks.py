"""Start interpreters for ``dsv4.compilation.pool``: one alone, or one that forks many workers.

The imports of a worker take seconds of a processor. Where several workers are wanted one fresh
interpreter imports all that jobs need and forks them (``worker.main_of_forks``). It has no
thread and no GPU, so that its forks are whole.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from dsv4.compilation.worker import ENDED, receive
from dsv4.cute.runtime.architectures import ARCHITECTURES, BLACKWELL_NAMES

_PATH = "DSV4_WORKER_PATH"
# The search path is the parent's, whatever the current folder holds.
_BOOT = f"import json, os, sys; sys.path[:] = json.loads(os.environ.pop({_PATH!r})); "
_UNKNOWN = -1  # status of a process of which nobody tells


def interpreter(
    code: str, *, handles: Sequence[int] = (), arch: str = ""
) -> subprocess.Popen[bytes] | None:
    """A fresh interpreter with this process's search path; None if the system cannot start one.

    Args:
        code: What it runs.
        handles: Files that it inherits.
        arch: What CuTeDSL, which reads that when it is imported, compiles for by default.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {
        _PATH: json.dumps([os.path.abspath(path) for path in sys.path]),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "TRITON_DISABLE_LINE_INFO": "1",  # paths of this machine would be in every kernel
    }
    if arch:
        environment.setdefault("CUTE_DSL_ARCH", arch)
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _BOOT + code],
            stdin=pipe,
            stdout=pipe,
            env=environment,
            pass_fds=handles,
        )
    except OSError:
        return None


def start(count: int, arch: str = "") -> Forks | None:
    """A process that forks ``count`` workers; None where that is not possible.

    Args:
        count: How many.
        arch: Architecture that kernels are compiled for, whose modules the workers then have
            imported; or none.
    """
    if not sys.platform.startswith("linux"):
        return None
    try:
        pairs = [socket.socketpair() for _ in range(count)]
    except OSError:  # too many open files
        return None
    handles = [theirs.fileno() for _, theirs in pairs]
    packages = ["dsv4.triton"] if arch else []
    if arch in ARCHITECTURES.values():
        packages.append(f"dsv4.cute.{'sm100' if arch in BLACKWELL_NAMES else 'sm90'}")
    arguments = f"{handles}, {packages}"
    code = f"from dsv4.compilation.worker import main_of_forks; main_of_forks({arguments})"
    process = interpreter(code, handles=handles, arch=arch)
    for _, theirs in pairs:
        theirs.close()
    if process is None:
        return None
    return Forks(process, [ours for ours, _ in pairs])


class Forks:
    """A process that forks workers."""

    def __init__(self, process: subprocess.Popen[bytes], sockets: Sequence[socket.socket]) -> None:
        self._process, self._sockets = process, sockets
        self._lock = threading.Lock()  # of what it tells
        self._ended: dict[int, int] = {}

    def worker(self, number: int) -> Fork | None:
        """A worker when it has begun; None if it does not."""
        connection = self._sockets[number]
        answers, jobs = connection.makefile("rb"), connection.makefile("wb")
        connection.close()  # when these are
        try:
            return Fork(self, receive(answers), jobs, answers)
        except (EOFError, OSError):
            answers.close()
            jobs.close()
            return None

    def status(self, number: int, seconds: float | None) -> int:
        """Return how a process ended.

        Args:
            number: Number of the process.
            seconds: How long to wait; None: until it ends.

        Raises:
            subprocess.TimeoutExpired: if it has not ended by then.
        """
        end = None if seconds is None else time.monotonic() + seconds
        with self._lock:
            assert self._process.stdout is not None
            pipe = self._process.stdout.fileno()
            while number not in self._ended:
                left = None if end is None else max(0.0, end - time.monotonic())
                if not select.select([pipe], [], [], left)[0]:
                    raise subprocess.TimeoutExpired("a worker", seconds or 0.0)
                message = os.read(pipe, ENDED.size)  # pipes keep short messages whole
                if len(message) < ENDED.size:
                    return self._ended.setdefault(number, _UNKNOWN)
                other, status = ENDED.unpack(message)
                self._ended[other] = status
        return self._ended[number]

    def stop(self) -> None:
        """Fork none, unless there are some already."""
        self._process.terminate()

    def end(self) -> None:
        """Wait until the process and all workers have ended."""
        for connection in self._sockets:
            connection.close()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.wait()


class Fork:
    """A forked worker, with what is used of a ``Popen``."""

    def __init__(self, forks: Forks, number: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.stdin, self.stdout = stdin, stdout
        self.returncode: int | None = None
        self._forks, self._number = forks, number

    def poll(self) -> int | None:
        """Return its status if somebody has waited for its end."""
        return self.returncode

    def kill(self) -> None:
        """End it at once."""
        with suppress(ProcessLookupError):
            os.kill(self._number, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its status; see ``Forks.status``."""
        self.returncode = self._forks.status(self._number, timeout)
        return self.returncode
