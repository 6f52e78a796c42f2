"""Waiting for a device on which other ranks may be waited for."""

from __future__ import annotations

import time

import pytest
import torch

from dsv4.parallel import agreement, process_group
from dsv4.parallel.agreement import wait_for_device
from dsv4.parallel.context import RankError
from dsv4.parallel.process_group import DistributedGroup
from dsv4.serving.readback import Readback


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


@pytest.mark.parametrize("has_peers", [False, True])
def test_tokens_of_a_step_with_peers_are_waited_for_with_patience(monkeypatch, has_peers):
    monkeypatch.setattr(agreement, "DEVICE_PATIENCE", 0.02)
    readback = Readback(2, 2, torch.device("cpu"), has_peers)
    for looks in (3, 10**9):
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
def test_nccl_is_ended_only_where_its_kernels_wait(monkeypatch, event, aborts):
    backend = Backend()
    group = object.__new__(DistributedGroup)
    group._group = type("Group", (), {"_get_backend": lambda self, device: backend})()
    monkeypatch.setattr(process_group, "_GRACE", 0.1)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(process_group.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(process_group.dist, "ProcessGroupNCCL", Backend, raising=False)
    group.abandon(torch.device("cpu"))
    assert backend.aborts == 0
    group.abandon(torch.device("cuda", 0))
    assert backend.aborts == aborts
