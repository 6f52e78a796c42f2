"""Count the kernels that this process compiled, and tell observers when it compiles."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Compilations:
    """Names of kernels and how often a specialisation of each was compiled in this process.

    Attributes:
        names: Classes of CuTeDSL kernels and functions of Triton kernels.
    """

    names: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _telling: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _running: int = field(default=0, repr=False)
    _observers: list[weakref.WeakMethod[Callable[[bool], None]]] = field(
        default_factory=list, repr=False
    )

    @contextmanager
    def compiling(self, name: str) -> Iterator[None]:
        """Count a kernel that is compiled in the block, and notify observers of begin and end."""
        with self._lock:
            self.names[name] += 1
        with self._telling:  # in the order in which they happen
            self._running += 1
            if self._running == 1:
                self._tell(True)
        try:
            yield
        finally:
            with self._telling:
                self._running -= 1
                if self._running == 0:
                    self._tell(False)

    def observe(self, method: Callable[[bool], None]) -> None:
        """Call a method when compilation begins (True) or ends (False), while its object lives."""
        with self._telling:
            self._observers.append(weakref.WeakMethod(method))
            if self._running:
                method(True)

    def _tell(self, compiles: bool) -> None:
        self._observers[:] = [known for known in self._observers if known() is not None]
        for known in self._observers:
            method = known()
            if method is not None:
                method(compiles)

    def copy(self) -> Counter[str]:
        """The counts so far."""
        with self._lock:
            return Counter(self.names)


@functools.cache
def of_this_process() -> Compilations:
    """The counts of this process."""
    return Compilations()
