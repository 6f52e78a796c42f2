"""Watch the other ranks while this one waits for its GPU: which have ended, and which compile.

A kernel that waits for another rank does not notice that the rank's process is gone. A host that
waits for that kernel cannot tell a rank that is gone from a rank that compiles. Every two ranks of
a host therefore share a socket. The system closes the sockets of a process that ends, however it
ends. A rank sends a message through them when it compiles a kernel and when it failed.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dsv4.compilation import counts

_COMPILES, _COMPILED, _FAILED, _LEAVES = b"C", b"c", b"F", b"L"
_POLL = 0.5  # seconds between checks whether this rank has ended its watch
_PATIENCE = 20.0  # seconds that ranks have to connect
# Seconds from the end of a rank to the end of kernels that wait for it. The rank may have finished
# its work well; kernels can still read its results in this time.
GRACE = 3.0
_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Links:
    """Sockets to the other ranks; a thread reads them."""

    sockets: Mapping[int, socket.socket]
    compiling: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    lost: int | None = None
    on_loss: weakref.WeakMethod[Callable[[], None]] | None = None
    is_closed: bool = False

    def send(self, message: bytes) -> None:
        """Send a message to all other ranks; ignore ranks that are gone."""
        for link in self.sockets.values():
            with contextlib.suppress(OSError):
                link.sendall(message)

    def close(self) -> None:
        """Leave: the others do not wait for this rank any more."""
        if not self.is_closed:
            self.is_closed = True
            self.send(_LEAVES)

    def take(self, rank: int, message: bytes) -> bool:
        """Record a rank's message, or its end if there is none; return whether more may come."""
        for letter in (message[i : i + 1] for i in range(len(message))):
            if letter == _COMPILES:
                self.compiling.add(rank)
            elif letter == _COMPILED:
                self.compiling.discard(rank)
            elif letter == _LEAVES:
                self.left.add(rank)
        if message and _FAILED not in message:
            return True
        self.compiling.discard(rank)
        if rank not in self.left and self.lost is None and not self.is_closed:
            self.lost = rank
        return False


class PeerWatch:
    """Watch the other ranks of a group until the object is deleted; see the module.

    Args:
        sockets: A connected socket to each other rank.
    """

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._links = _Links(sockets)
        weakref.finalize(self, self._links.close)
        threading.Thread(target=_listen, args=(self._links,), daemon=True).start()
        counts.of_this_process().observe(self.tell)

    @property
    def lost(self) -> int | None:
        """The first rank that ended or failed without leaving, or None."""
        return self._links.lost

    @property
    def others_compile(self) -> bool:
        """Whether another rank compiles a kernel."""
        return bool(self._links.compiling)

    def on_loss(self, method: Callable[[], None]) -> None:
        """Call a method, in a thread, ``GRACE`` seconds after a rank was lost."""
        self._links.on_loss = weakref.WeakMethod(method)

    def tell(self, compiles: bool) -> None:
        """Tell the others that this rank begins, or has ended, to compile."""
        self._links.send(_COMPILES if compiles else _COMPILED)

    def fail(self) -> None:
        """Tell the others not to wait for this rank any more."""
        self._links.send(_FAILED)


def _listen(links: _Links) -> None:
    """Record messages of the other ranks until all have ended, or until the owner is gone."""
    ends: float | None = None
    with selectors.DefaultSelector() as selector:
        for rank, link in links.sockets.items():
            selector.register(link, selectors.EVENT_READ, rank)
        while not links.is_closed and (selector.get_map() or ends is not None):
            for key, _ in selector.select(_POLL) if selector.get_map() else ():
                link = key.fileobj  # type: ignore[assignment]
                try:
                    message = link.recv(64)
                except OSError:
                    message = b""
                if not links.take(key.data, message):
                    selector.unregister(link)
            if links.lost is not None and ends is None:
                ends = time.monotonic() + GRACE
            if ends is not None:
                time.sleep(max(0.0, min(_POLL, ends - time.monotonic())))
                if time.monotonic() >= ends:
                    _act(links.on_loss)
                    break
    for link in links.sockets.values():
        link.close()


def _act(known: weakref.WeakMethod[Callable[[], None]] | None) -> None:
    action = None if known is None else known()
    if action is None:
        return
    try:
        action()
    except RuntimeError as error:  # the GPU already has an error
        _logger.info("kernels that wait for a rank that is gone were not ended: %s", error)


def connected(group: Any, rank: int, size: int) -> PeerWatch | None:
    """Connect the ranks of a host; every rank calls it.

    Args:
        group: Has ``exchange``.
        rank: This rank.
        size: Number of ranks.

    Returns:
        The watch; None on all ranks if they are not on one host.
    """
    name = f"dsv4/{uuid.uuid4()}"
    sockets: dict[int, socket.socket] = {}
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server,
        contextlib.ExitStack() as made,
    ):
        server.bind("\0" + name)  # an abstract name: no file
        server.listen(size)
        server.settimeout(_PATIENCE)
        names = group.exchange(name)

        def call() -> None:
            for other in range(rank):
                sockets[other] = made.enter_context(_connect(names[other], rank))

        def answer() -> None:
            while len(sockets) < size - 1:
                link = made.enter_context(server.accept()[0])
                link.settimeout(_PATIENCE)
                sockets[link.recv(1)[0]] = link

        # All connections are made before any is accepted: a refused one is not waited for.
        for part in (call, answer):
            if any(group.exchange(_error_of(part))):
                return None
        made.pop_all()  # they stay open
    for link in sockets.values():
        link.settimeout(None)
    return PeerWatch(sockets)


def _error_of(part: Callable[[], None]) -> str:
    """Return the error of the sockets as text; empty if there is none."""
    try:
        part()
    except (OSError, IndexError) as error:
        return str(error) or type(error).__name__
    return ""


def _connect(name: str, rank: int) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.settimeout(_PATIENCE)
        link.connect("\0" + name)
        link.sendall(bytes([rank]))
    except OSError:
        link.close()
        raise
    return link
