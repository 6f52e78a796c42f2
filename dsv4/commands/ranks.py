"""The processes of a command that ``torchrun`` started, one per GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Process:
    """Where a command runs.

    Attributes:
        device: Device of this process.
        mesh: All processes, for ``dsv4.load``; None: this one alone.
        leads: Whether this process prints.
        parallel: How they share the model.
    """

    device: str
    mesh: Any = None
    leads: bool = True
    parallel: str = "tp"

    @property
    def load_options(self) -> dict[str, Any]:
        """Arguments of ``dsv4.load``."""
        several = {} if self.mesh is None else {"device_mesh": self.mesh, "parallel": self.parallel}
        return {"device": self.device, **several}


@contextmanager
def joined_process(device: str, parallel: str = "tp") -> Iterator[Process]:
    """Join the processes that ``torchrun`` started, if it did, for the time of a command.

    Args:
        device: ``cuda`` or ``cpu``; a process of several takes the GPU of its local rank.
        parallel: How they share the model, ``"tp"`` or ``"dp"``.

    Raises:
        ValueError: if a GPU is named by its number beside several processes.
    """
    from dsv4.parallel import processes

    own = processes.launched()
    if own is None:
        yield Process(device)
        return
    if device not in ("cuda", "cpu"):
        raise ValueError(f"--device is {device!r}, wanted cuda or cpu with {own.size} processes")
    import torch.distributed as dist

    with processes.joined(device) as where:
        mesh = dist.init_device_mesh(device, (own.size,), mesh_dim_names=(parallel,))
        yield Process(str(where), mesh, own.rank == 0, parallel)
