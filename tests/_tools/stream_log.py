"""Streams that only write down what is asked of them, so that order is seen without a GPU."""

from __future__ import annotations

import contextlib

import torch

from dsv4 import dispatch, overlap


def written_down(monkeypatch):
    """A list that gets, in order, which operator ran on which stream, and who waited for whom."""
    found, active = [], ["current"]

    class Stream:
        device_index = 0

        def __init__(self, name):
            self.name, self.cuda_stream = name, hash(name)

        def wait_stream(self, other):
            found.append(f"{self.name} waits for {other.name}")

        def record_event(self):
            found.append(f"{self.name} ended")
            return f"end {found.count(found[-1])} of {self.name}"

        def wait_event(self, event):
            found.append(f"{self.name} waits for {event}")

    @contextlib.contextmanager
    def stream(which):
        active.append(which.name)
        yield
        active.pop()

    run = dispatch.run

    def record(op, args, *rest):
        found.append(f"{op} on {active[-1]}")
        return run(op, args, *rest)

    monkeypatch.setattr(overlap, "uses_side_streams", lambda x: True)
    monkeypatch.setattr(
        overlap,
        "_side_stream",
        lambda device, current, number: Stream("side" if number == 1 else f"side {number}"),
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("current"))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda t, s: found.append(f"memory kept for {s.name}")
    )
    monkeypatch.setattr(dispatch, "run", record)
    return found
