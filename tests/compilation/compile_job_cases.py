"""Jobs for worker processes that compile nothing, and need not wait for an import of torch."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class Doubled:
    """Doubles a number."""

    number: int
    name: str = "a number"

    def run(self):
        return 2 * self.number


@dataclass(frozen=True)
class Failing:
    """Raises."""

    name: str = "a failing job"

    def run(self):
        raise ValueError("number is 3, wanted 4\nmore")


@dataclass(frozen=True)
class Ending:
    """Ends its process."""

    name: str = "an ending job"

    def run(self):
        os._exit(7)


@dataclass(frozen=True)
class Printing:
    """Prints to where answers go."""

    name: str = "a printing job"

    def run(self):
        print("words", flush=True)
        os.write(1, b"more words")
        return "printed"


@dataclass(frozen=True)
class Seeing:
    """Says what its process has."""

    name: str = "a seeing job"

    def run(self):
        return {
            "process": os.getpid(),
            "parent": os.getppid(),
            "threads": threading.active_count(),
            "path": sys.path,
            "interpreted": "TRITON_INTERPRET" in os.environ,
            "devices": os.environ["CUDA_VISIBLE_DEVICES"],
            "main": getattr(sys.modules["__main__"], "__file__", None),
            "imported": "dsv4.compilation.jobs" in sys.modules,
        }


@dataclass(frozen=True)
class Kernel:
    """A kernel that is made of its name, or is found, or fails."""

    name: str
    state: str = "missing"  # or "stored" or "failing"

    @property
    def key(self):
        return self.name.encode().ljust(32)

    @property
    def file_name(self):
        return f"{self.name}.kernel"

    def stored(self):
        return b"stored " + self.key if self.state == "stored" else None

    def run(self):
        if self.state == "failing":
            raise ValueError("no such instruction")
        from dsv4.compilation.bundle import Compiled

        return Compiled(self.key, self.name, b"compiled " + self.key)
