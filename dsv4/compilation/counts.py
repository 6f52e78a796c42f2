"""Counts the kernels that this process compiled."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Compilations:
    """Names of kernels and how often a specialisation of each was compiled in this process.

    Attributes:
        names: Classes of CuTeDSL kernels and functions of Triton kernels.
    """

    names: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, name: str) -> None:
        """Count one."""
        with self._lock:
            self.names[name] += 1

    def copy(self) -> Counter[str]:
        """The counts so far."""
        with self._lock:
            return Counter(self.names)


@functools.cache
def of_this_process() -> Compilations:
    """The counts of this process."""
    return Compilations()
