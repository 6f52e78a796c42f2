"""An object in a process of its own, which is replaced after a hang or a crash.

This module imports no PyTorch, so that a process starts as fast as its object allows.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

_END_SECONDS = 30.0  # of a killed process: the driver ends its kernels first
_STATUS_SECONDS = 5.0  # between a crash and its exit status
_SPAWN = multiprocessing.get_context("spawn")  # CUDA does not survive a fork


class FailedError(Exception):
    """A call hung, ended its process or raised; the message says which."""


class KilledError(FailedError):
    """Something outside the process killed it while a call ran."""


class Child:
    """Calls methods of an object that lives in another process; a context, which ends the process.

    If a call fails, its process is killed. The next call starts another process, with a new object.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        """Start nothing yet.

        Args:
            make: Makes the object; it can be pickled.
        """
        self._make = make
        self._changing = threading.Lock()
        self._is_over = False
        self._running: tuple[multiprocessing.process.BaseProcess, Connection] | None = None

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def stop(self) -> None:
        """Kill the process, and start no other; a call that waits in another thread fails."""
        with self._changing:
            self._is_over = True
            if self._running is not None:
                self._running[0].kill()

    def end(self) -> None:
        """End the process, if there is one; the next call starts another."""
        self._end()

    def call(self, method: str, *arguments: Any, seconds: float) -> Any:
        """Call a method of the object and return its result.

        Args:
            method: Name of the method.
            *arguments: Its arguments.
            seconds: Time limit. If this call starts the process, the limit includes the start.

        Raises:
            FailedError: if the call fails.
            KilledError: if something else killed the process meanwhile.
            RuntimeError: if a killed process does not end.
        """
        connection = self._started()
        try:
            connection.send((method, arguments))
            if not connection.poll(seconds):
                raise FailedError(f"hung: {method} has no result after {seconds:g} seconds")
            result, error = connection.recv()
            if error:
                raise FailedError(error)
        except (EOFError, OSError):
            status = self._end(patience=_STATUS_SECONDS)
            kind = KilledError if status == -signal.SIGKILL else FailedError
            raise kind(f"crashed: its process ended with {_said(status)}") from None
        except BaseException:
            self._end()
            raise
        return result

    def _started(self) -> Connection:
        """Return the connection to the process, which is started if there is none."""
        with self._changing:
            if self._is_over:
                raise FailedError("was stopped")
            if self._running is None:
                ours, theirs = _SPAWN.Pipe()
                process = _SPAWN.Process(target=_serve, args=(theirs, self._make), daemon=True)
                process.start()
                theirs.close()
                self._running = process, ours
            return self._running[1]

    def _end(self, patience: float = 0.0) -> int | None:
        """End the process, if there is one; return its status, or None if it had to be killed."""
        with self._changing:
            if self._running is None:
                return None
            process, connection = self._running
            self._running = None
        connection.close()
        process.join(patience)
        status = process.exitcode
        process.kill()
        process.join(_END_SECONDS)
        if process.exitcode is None:
            raise RuntimeError(f"the killed process {process.pid} still runs: the GPU is stuck")
        return status


def _said(status: int | None) -> str:
    if status is None:
        return "no status in time"
    if status < 0:
        return f"signal {signal.Signals(-status).name}"
    return f"status {status}"


def _serve(connection: Connection, make: Callable[[], Any]) -> None:
    """Answer calls until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both; the parent kills this one
    instance = make()
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = getattr(instance, method)(*arguments), ""
        except Exception as error:  # whatever it is, the parent gives the reason
            traceback.print_exc()
            line = str(error).strip().partition("\n")[0]
            answer = None, f"raised {type(error).__name__}: {line}"
        connection.send(answer)
