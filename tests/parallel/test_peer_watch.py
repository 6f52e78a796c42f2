"""A rank learns that the others compile, leave, fail, or are killed."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsv4.compilation import counts
from dsv4.parallel import mailboxes, peer_watch
from dsv4.parallel.context import RankError
from dsv4.parallel.mailboxes import GONE
from dsv4.parallel.peer_watch import PeerWatch, connected
from dsv4.testing.ranks import run_ranks


@pytest.fixture(autouse=True)
def no_grace(monkeypatch):
    monkeypatch.setattr(peer_watch, "GRACE", 0.05)
    monkeypatch.setattr(peer_watch, "_POLL", 0.02)


def watches(size: int) -> list[PeerWatch]:
    made = run_ranks(size, lambda own: connected(own.group, own.rank, size))
    assert None not in made
    return made  # type: ignore[return-value]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Kernels:
    """Stands in for kernels that wait for a rank."""

    ended = 0

    def end(self) -> None:
        """End them."""
        self.ended += 1


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_compiles_tells_all_others(size):
    first, *others = watches(size)
    first.tell(True)
    until(lambda: all(other.others_compile for other in others))
    assert not first.others_compile
    first.tell(False)
    until(lambda: not any(other.others_compile for other in others))
    assert [watch.lost for watch in (first, *others)] == [None] * size


def test_the_outermost_compilation_tells():
    class Observer:
        def __init__(self) -> None:
            self.heard: list[bool] = []

        def tell(self, compiles: bool) -> None:
            self.heard.append(compiles)

    compilations, observer = counts.Compilations(), Observer()
    compilations.observe(observer.tell)
    with compilations.compiling("a"), compilations.compiling("b"):
        assert observer.heard == [True]
    assert observer.heard == [True, False]
    with pytest.raises(ZeroDivisionError), compilations.compiling("a"):
        raise ZeroDivisionError
    assert observer.heard == [True, False] * 2
    assert compilations.copy() == {"a": 2, "b": 1}
    with compilations.compiling("c"):
        late = Observer()
        compilations.observe(late.tell)
    assert late.heard == [True, False]
    del observer, late
    gc.collect()
    with compilations.compiling("a"):
        pass
    assert not compilations._observers


def test_the_end_of_one_compilation_is_not_told_after_the_begin_of_the_next():
    """The others would not know that the next one runs."""
    compilations, heard = counts.Compilations(), []

    def compile_another() -> None:
        with compilations.compiling("another"):
            pass

    another = threading.Thread(target=compile_another)

    class Observer:
        def tell(self, compiles: bool) -> None:
            if not compiles and another.ident is None:
                another.start()
                another.join(0.2)
            heard.append(compiles)

    observer = Observer()
    compilations.observe(observer.tell)
    with compilations.compiling("one"):
        pass
    another.join(20)
    assert heard == [True, False, True, False]


def test_a_rank_that_fails_is_lost_to_the_others_and_their_waits_end():
    first, second, last = watches(3)
    kernels = Kernels()
    first.on_loss(kernels.end)
    last.tell(True)
    last.fail()
    until(lambda: first.lost == 2 == second.lost)
    assert not first.others_compile
    until(lambda: kernels.ended == 1)


def test_a_rank_that_leaves_is_not_lost():
    first, last = watches(2)
    kernels = Kernels()
    first.on_loss(kernels.end)
    del last
    gc.collect()
    until(lambda: 1 in first._links.left)
    time.sleep(0.2)
    assert (first.lost, kernels.ended) == (None, 0)


class Pipes:
    """A group of two processes."""

    def __init__(self, rank: int, pipe: Any) -> None:
        self.rank, self.pipe = rank, pipe

    def exchange(self, value: Any) -> list[Any]:
        """Return both values."""
        self.pipe.send(value)
        values = [value, self.pipe.recv()]
        return values if self.rank == 0 else values[::-1]


def child(pipe: Any) -> None:
    watch = connected(Pipes(1, pipe), 1, 2)
    assert watch is not None
    watch.tell(True)
    pipe.recv()


@pytest.mark.slow
def test_a_rank_that_is_killed_is_lost_at_once_even_while_it_compiles():
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=child, args=(theirs,))
    process.start()
    watch = connected(Pipes(0, ours), 0, 2)
    assert watch is not None
    kernels = Kernels()
    watch.on_loss(kernels.end)
    until(lambda: watch.others_compile)
    assert watch.lost is None
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    began = time.monotonic()
    until(lambda: watch.lost == 1)
    assert time.monotonic() - began < 5
    assert not watch.others_compile
    until(lambda: kernels.ended == 1)
    process.join()


def test_ranks_that_cannot_connect_have_no_watch(monkeypatch):
    """All ranks go without a watch, for instance if one is on another host."""

    def refuse(name: str, rank: int) -> None:
        raise ConnectionRefusedError("on another host")

    monkeypatch.setattr(peer_watch, "_PATIENCE", 60.0)
    monkeypatch.setattr(peer_watch, "_connect", refuse)
    began = time.monotonic()
    assert run_ranks(3, lambda own: connected(own.group, own.rank, 3)) == [None] * 3
    assert time.monotonic() - began < 30  # nobody waits for a call that was refused


def test_a_rank_that_fails_meanwhile_leaves_no_socket_open(monkeypatch):
    links, connect = [], peer_watch._connect

    def noted(name: str, rank: int) -> socket.socket:
        links.append(connect(name, rank))
        return links[-1]

    class Group:
        """The other rank's address, and then its failure."""

        def exchange(self, value: Any) -> list[Any]:
            if links:
                raise RankError("rank 0 failed")
            return ["dsv4/test of peer_watch", value]

    monkeypatch.setattr(peer_watch, "_connect", noted)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind("\0dsv4/test of peer_watch")
        server.listen(1)
        with pytest.raises(RankError):
            connected(Group(), 1, 2)
    assert [link.fileno() for link in links] == [-1]


def test_waits_end_in_the_own_mailbox_alone():
    first, last = mailboxes.virtual(2, 4096)
    first.end_waits()
    assert bool((first.flags[0] == GONE).all())
    assert bool((last.flags[1] == 0).all())
    assert torch.equal(first.flags[1], last.flags[1])
