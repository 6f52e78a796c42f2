"""A process that does jobs of ``_compile_jobs``: it reads them from stdin and answers on stdout.

A message is its length in 8 bytes and a pickle; an answer is a ``Done``. The process ends with its
input. It never uses a GPU, and what libraries print goes to stderr.
"""

from __future__ import annotations

import os
import pickle
import struct
import sys
import tempfile
import traceback
from dataclasses import dataclass
from typing import IO, Any

_LENGTH = struct.Struct("<Q")


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
    jobs = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of libraries are no answers
    with tempfile.TemporaryDirectory() as room:
        os.environ["TRITON_CACHE_DIR"] = room  # the parent keeps what is compiled
        while True:
            try:
                job = receive(jobs)
            except EOFError:
                return
            send(answers, done(job))


if __name__ == "__main__":
    main()
