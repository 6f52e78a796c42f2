"""Waiting for a device on which other ranks may be waited for."""

from __future__ import annotations

import time

import pytest
import torch

from dsv4.parallel import agreement, mailboxes, process_group
from dsv4.parallel.agreement import wait_for_device
from dsv4.parallel.context import RankError
from dsv4.parallel.process_group import DistributedGroup
from dsv4.serving.readback import Readback
from dsv4.testing.ranks import ThreadGroup


class Event:
    """An event of a device that ends after some looks, or with an error."""

    def __init__(self, looks: int, error: str = "") -> None:
        self.looks, self.error = looks, error

    def query(self) -> bool:
        self.looks -= 1
        if self.error and self.looks <= 0:
            raise RuntimeError(self.error)
        return self.looks <= 0

    def record(self, stream=None) -> None:
        pass

    def synchronize(self) -> None:
        assert self.looks <= 0, "it would wait for a rank that is gone"


def test_it_returns_when_the_work_has_ended():
    event = Event(5)
    wait_for_device(event.query)
    assert event.looks == 0


def test_a_kernel_that_ended_with_an_error_is_a_rank_that_is_gone():
    event = Event(2, "CUDA error: unspecified launch failure\nCUDA kernel errors might be")
    with pytest.raises(RankError, match="if a rank is gone: CUDA error: unspecified launch failur"):
        wait_for_device(event.query)


def test_it_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(agreement, "DEVICE_PATIENCE", 0.05)
    began = time.monotonic()
    with pytest.raises(RankError, match="did not end a step in 0 s: a rank ended or did not"):
        wait_for_device(lambda: False)
    assert time.monotonic() - began < 5


class Watch:
    """Stands in for the watch of other ranks."""

    def __init__(self, looks: int = 0, lost: int | None = None) -> None:
        self.looks, self.lost = looks, lost

    @property
    def others_compile(self) -> bool:
        """Whether they compile, some times."""
        self.looks -= 1
        return self.looks >= 0


def test_patience_does_not_count_while_another_rank_compiles(monkeypatch):
    monkeypatch.setattr(agreement, "DEVICE_PATIENCE", 0.05)
    monkeypatch.setattr(agreement, "_LONGEST", 0.02)
    monkeypatch.setattr(agreement, "_SHORTEST", 0.02)
    began = time.monotonic()
    with pytest.raises(RankError, match="did not end a step"):
        wait_for_device(lambda: False, Watch(looks=10))
    assert time.monotonic() - began > 0.2
    wait_for_device(Event(12).query, Watch(looks=10))


def test_a_rank_that_is_gone_is_not_waited_for(monkeypatch):
    """But for what the device does without it."""
    monkeypatch.setattr(agreement, "GRACE", 20.0)
    wait_for_device(Event(3).query, Watch(lost=2))
    monkeypatch.setattr(agreement, "GRACE", 0.05)
    with pytest.raises(RankError, match="rank 2 ended while the device waited for it"):
        wait_for_device(lambda: False, Watch(lost=2, looks=10**9))


@pytest.mark.parametrize("has_peers", [False, True])
def test_tokens_of_a_step_with_peers_are_waited_for_with_patience(monkeypatch, has_peers):
    peers = ThreadGroup(0, None) if has_peers else None
    readback = Readback(2, 2, torch.device("cpu"), peers)
    for looks in (3, 10**9):
        monkeypatch.setattr(agreement, "DEVICE_PATIENCE", 20.0 if looks == 3 else 0.02)
        step = readback.start(torch.tensor([4, 5]), None)
        step.slot.ready = Event(looks)
        kind = AssertionError if not has_peers else RankError
        if has_peers and looks == 3:
            assert step.wait([None, None]).tokens == [4, 5]
            continue
        with pytest.raises(kind):
            step.wait([None, None])


class Backend:
    """Stands in for NCCL's group."""

    aborts = 0

    def abort(self) -> None:
        self.aborts += 1


@pytest.mark.parametrize(
    ("event", "aborts"),
    [(Event(3), 0), (Event(2, "CUDA error"), 0), (Event(10**9), 1)],
    ids=["ends", "fails", "waits"],
)
def test_kernels_are_ended_only_where_they_wait(monkeypatch, event, aborts):
    backend = Backend()
    group = object.__new__(DistributedGroup)
    group.mailbox = mailboxes.virtual(2, 64)[1]
    group._group = type("Group", (), {"_get_backend": lambda self, device: backend})()
    monkeypatch.setattr(process_group, "_GRACE", 0.1 if aborts else 20.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(process_group.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(process_group.dist, "ProcessGroupNCCL", Backend, raising=False)
    group.abandon(torch.device("cpu"))
    assert backend.aborts == 0
    assert not group.mailbox.flags[1].any()
    group.abandon(torch.device("cuda", 0))
    assert backend.aborts == aborts
    assert bool((group.mailbox.flags[1] == mailboxes.GONE).all()) == bool(aborts)
