"""A process that does jobs of ``dsv4.compilation.jobs``.

It reads jobs from stdin and answers on stdout. A message is its length in 8 bytes and a pickle; an
answer is a ``Done``. The process ends with its input. It never uses a GPU, and what libraries print
goes to stderr.

``main_of_forks`` is a process that imports what jobs need, once, and forks workers, which answer on
sockets: the imports take seconds of a processor in each worker otherwise.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import pkgutil
import signal
import socket
import struct
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

_LENGTH = struct.Struct("<Q")
ENDED = struct.Struct("<qq")  # number of a process that ended, and its status


@dataclass(frozen=True)
class Done:
    """The result of a job.

    Attributes:
        result: What its ``run`` returned.
        error: Why it failed; empty if it did not.
        details: The traceback then.
    """

    result: Any = None
    error: str = ""
    details: str = ""


def send(stream: IO[bytes], message: Any) -> None:
    """Write a message."""
    words = pickle.dumps(message)
    stream.write(_LENGTH.pack(len(words)) + words)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Read a message.

    Raises:
        EOFError: if the other side has ended.
    """
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError("the other process has ended")
    size = _LENGTH.unpack(head)[0]
    words = stream.read(size)
    if len(words) < size:
        raise EOFError("the other process has ended")
    return pickle.loads(words)


def done(job: Any) -> Done:
    """Do a job."""
    try:
        return Done(job.run())
    except Exception as error:
        line = str(error).strip().partition("\n")[0]
        return Done(None, f"{type(error).__name__}: {line}", traceback.format_exc())


def main() -> None:
    """Do jobs until there are no more."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of libraries are no answers
    serve(sys.stdin.buffer, answers)


def serve(jobs: IO[bytes], answers: IO[bytes]) -> None:
    """Do jobs of a stream until it ends."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder  # the parent keeps what is compiled
        while True:
            try:
                job = receive(jobs)
            except (EOFError, ConnectionError):
                return
            send(answers, done(job))


def main_of_forks(handles: Sequence[int], packages: Sequence[str]) -> None:
    """Fork a worker for each socket, and write to stdout how each of them ends.

    A worker sends its process number first. No worker is forked where a library has started a
    thread, which a fork would not survive.

    Args:
        handles: Handles of the sockets.
        packages: Whose modules jobs use.
    """
    ends = os.dup(1)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who is interrupted ends the workers
    import_all(packages)
    if _threads() > 1:
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from now on it ends with its workers
    gc.freeze()  # what was imported stays in memory that all workers share
    for handle in handles:
        number = os.fork()
        if number == 0:
            others = [ends, *(other for other in handles if other > handle)]
            _serve_socket(handle, others)
        os.close(handle)
    with suppress(ChildProcessError):
        while True:  # until there is none
            number, status = os.wait()
            os.write(ends, ENDED.pack(number, os.waitstatus_to_exitcode(status)))
    os._exit(0)  # what libraries do at exit is nobody's concern


def _serve_socket(handle: int, others: Sequence[int]) -> None:
    """Do the jobs of a socket and end the process, which a fork is."""
    try:
        for other in others:  # whose other sides would not notice that their worker has ended
            os.close(other)
        with socket.socket(fileno=handle) as connection:
            jobs, answers = connection.makefile("rb"), connection.makefile("wb")
            send(answers, os.getpid())
            serve(jobs, answers)
    except BrokenPipeError:
        pass  # nobody waits for the answer any more
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    finally:
        os._exit(0)


def import_all(packages: Sequence[str]) -> None:
    """Import all modules of packages, and what compiles kernels; nothing if there are none.

    What cannot be imported fails in the job that needs it.
    """
    names = ["dsv4.compilation.jobs"] if packages else []
    for package in packages:
        with suppress(Exception):
            path = importlib.import_module(package).__path__
            names += [module.name for module in pkgutil.iter_modules(path, f"{package}.")]
    for name in names:
        with suppress(Exception):
            importlib.import_module(name)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


if __name__ == "__main__":
    main()
