"""Groups of ranks over ``torch.distributed``: tensors by NCCL or gloo, host values by gloo.

A rank that fails writes its error to the store of the processes and closes its connections. Every
wait of the others ends then, and raises an error that quotes it. So does the wait for a process
that was killed, whose connections the system closes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dsv4.parallel import multicast
from dsv4.parallel.context import MODES, TENSOR, ParallelContext, RankError
from dsv4.parallel.gather import pushed_gather
from dsv4.parallel.mailboxes import Mailbox
from dsv4.parallel.meeting import Meeting, named
from dsv4.parallel.peer_watch import PeerWatch, connected

# Seconds that a rank waits for the others inside a step. Between steps it waits for longer, because
# rank 0 may have no requests.
STEP_PATIENCE = 45.0
_IDLE_PATIENCE = timedelta(days=7)
_POLL = timedelta(seconds=0.5)  # time between two looks at the store
_GRACE = 5.0  # seconds until connections to a rank that failed are closed
_INLINE = 4096  # bytes of a host value that need no second message
_logger = logging.getLogger(__name__)


def context_of(
    device_mesh: Any, parallel: str | None, device: torch.device
) -> ParallelContext | None:
    """Return this rank's context for the arguments of ``dsv4.load``; None for one process.

    Args:
        device_mesh: A ``DeviceMesh`` of one dimension, or of ``"dp"`` and ``"tp"``; a
            ``ProcessGroup``, a ``ParallelContext``, or None.
        parallel: ``"tp"``, ``"dp"``, or None.
        device: Device of the model.

    Raises:
        TypeError: if ``device_mesh`` is none of these.
        RankError: if another rank failed, or does not call this.
        ValueError: if one of the two is missing, ``parallel`` is unknown, the mesh has other
            dimensions, is of another kind of device or without this process, or the environment
            asks for NVLink multicast.
    """
    with announced(device_mesh, parallel):
        group = _group_of_arguments(device_mesh, parallel, device)
    if group is None or isinstance(group, ParallelContext):
        return group
    if group.size() == 1:
        return None
    own = DistributedGroup(group)
    if device.type == "cuda":
        own.watch_peers()
    assert parallel is not None, "a group has a mode"
    return ParallelContext(group.rank(), group.size(), own, parallel)


@contextmanager
def announced(device_mesh: Any, parallel: str | None) -> Iterator[None]:
    """Tell the ranks that call ``context_of`` of an error in the block, which comes before it.

    Without it they would wait for this rank. They raise ``RankError``; all can try again.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(device_mesh, ParallelContext):
            device_mesh.group.report(error)
        else:
            group = _group_or_none(device_mesh, parallel)
            if group is not None and group.size() > 1:
                with contextlib.suppress(RuntimeError):  # the store's process may be gone
                    Meeting.next_of(group).fail(named(error))
        raise


def _group_of_arguments(device_mesh: Any, parallel: str | None, device: torch.device) -> Any:
    """Return the process group, a ``ParallelContext``, or None for one process."""
    if parallel is not None and parallel not in MODES:
        reason = ": NVLink multicast is never used" if parallel == "multicast" else ""
        raise ValueError(f"parallel is {parallel!r}, wanted 'tp', 'dp' or None{reason}")
    if device_mesh is None and parallel is None:
        return None
    if device_mesh is None:
        raise ValueError(f"parallel is {parallel!r} and device_mesh is None, wanted a DeviceMesh")
    if parallel is None:
        raise ValueError("device_mesh is given and parallel is None, wanted 'tp' or 'dp'")
    if isinstance(device_mesh, ParallelContext):
        return replace(device_mesh, mode=parallel)
    _refuse_multicast(device)
    return _process_group(device_mesh, parallel, device)


def _process_group(mesh: Any, parallel: str, device: torch.device) -> Any:
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    if not isinstance(mesh, dist.device_mesh.DeviceMesh):
        raise TypeError(
            f"device_mesh is {type(mesh).__name__}, wanted a torch.distributed DeviceMesh or a "
            "ProcessGroup"
        )
    name = _dimension(mesh, parallel)
    if mesh.device_type != device.type:
        raise ValueError(
            f"device_mesh is of {mesh.device_type} and device is {device}, wanted the same kind"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"device_mesh has the ranks {mesh.mesh.flatten().tolist()}, wanted one with this "
            f"process, rank {dist.get_rank()}"
        )
    return mesh.get_group(name)


def _dimension(mesh: Any, parallel: str) -> str | int:
    """Return the dimension of a mesh whose ranks share the model.

    With ``"tp"`` each row of the dimension ``"dp"`` has a whole model, and rows know nothing of
    each other. With ``"dp"`` attention is whole on every rank, so ``"tp"`` must be one rank.
    """
    if mesh.ndim == 1:
        return 0
    if parallel not in MODES:
        raise ValueError(f"parallel is {parallel!r}, wanted one of {', '.join(MODES)}")
    names = tuple(mesh.mesh_dim_names or ())
    if sorted(names) != sorted(MODES):
        raise ValueError(
            f"device_mesh has {mesh.ndim} dimensions {names}, wanted one, or ('dp', 'tp')"
        )
    tensor_ranks = mesh.size(names.index(TENSOR))
    if parallel != TENSOR and tensor_ranks > 1:
        raise ValueError(
            f"parallel is {parallel!r} and device_mesh has {tensor_ranks} ranks in dimension "
            f"'{TENSOR}', wanted 1, because attention is not split then; or parallel='{TENSOR}'"
        )
    return parallel


def _group_or_none(mesh: Any, parallel: str | None) -> Any:
    """Return the process group that other ranks have for their arguments; None: not known."""
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    if not isinstance(mesh, dist.device_mesh.DeviceMesh) or mesh.get_coordinate() is None:
        return None
    for mode in (parallel, TENSOR):  # this rank's may be wrong
        with contextlib.suppress(ValueError):
            return mesh.get_group(_dimension(mesh, mode or TENSOR))
    return None


def _refuse_multicast(device: torch.device) -> None:
    reason = multicast.requested(os.environ)
    if reason is not None:
        raise ValueError(reason)
    if device.type != "cuda":
        return
    was_unset = multicast.NCCL not in os.environ
    multicast.turn_off()
    if was_unset:
        _logger.warning(
            "%s was unset, wanted '0' before init_process_group: groups that NCCL connected before "
            "may use NVLink multicast; later ones do not",
            multicast.NCCL,
        )


class DistributedGroup:
    """The ranks of a process group.

    Attributes:
        name: ``group_name`` of the process group.
        mailbox: This rank's mailboxes (``dsv4.parallel.opening``), which live as long as the group;
            None without.
        watch: Watch of the other ranks while this one waits for its GPU; None: no watch.
    """

    def __init__(self, group: Any) -> None:
        """Make the groups for host values; every rank of ``group`` does so at the same time."""
        self._rank = group.rank()
        self._size = group.size()
        self._group = group
        self.name: str = group.group_name
        self.mailbox: Mailbox | None = None
        self.watch: PeerWatch | None = None
        self._meeting = Meeting.next_of(group)
        self._failure: RankError | None = None
        self._meeting.wait()
        # Both have time limits of their own, whatever those of the caller's group are.
        self._steps = self._gloo("steps", timedelta(seconds=STEP_PATIENCE))
        self._control = self._gloo("control", _IDLE_PATIENCE)

    def _gloo(self, name: str, timeout: timedelta) -> Any:
        store = dist.PrefixStore(f"{self._meeting.prefix}/{name}", self._meeting.store)
        return dist.ProcessGroupGloo(store, self._rank, self._size, timeout=timeout)

    def __getstate__(self) -> Any:
        raise TypeError("a model of several ranks cannot be pickled: save the whole model's files")

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, in the order of ranks.

        Raises:
            RankError: if another rank failed or does not answer.
        """
        own = tensor.contiguous()
        if own.numel() == 0:
            return [own] * self._size
        if own.is_cuda:
            pushed = pushed_gather(own, self.name)
            if pushed is not None:
                return pushed
            whole = own.new_empty((self._size, *own.shape))
            dist.all_gather_into_tensor(whole, own, group=self._group)
            return list(whole.unbind(0))
        # As bytes: not every version of gloo knows every dtype.
        flat = own.view(-1).view(torch.uint8)
        parts = [torch.empty_like(flat) for _ in range(self._size)]
        self._run(lambda: self._steps.allgather(parts, flat))
        return [part.view(own.dtype).view(own.shape) for part in parts]

    def exchange(self, value: Any) -> list[Any]:
        """Return a value of each rank; waits for as long as no rank fails.

        Raises:
            RankError: if another rank failed.
        """
        data = pickle.dumps(value)
        head = _head(data)
        heads = [torch.empty_like(head) for _ in range(self._size)]
        self._run(lambda: self._control.allgather(heads, head))
        lengths = [_length(part) for part in heads]
        if max(lengths) > _INLINE:
            body = _padded(data, max(lengths))
            bodies = [torch.empty_like(body) for _ in range(self._size)]
            self._run(lambda: self._control.allgather(bodies, body))
        else:
            bodies = [part[8:] for part in heads]
        return [_value(part, length) for part, length in zip(bodies, lengths, strict=True)]

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0; waits for as long as no rank fails.

        Raises:
            RankError: if another rank failed.
        """
        data = pickle.dumps(value) if self._rank == 0 else b""
        head = _head(data)
        self._run(lambda: self._control.broadcast(head, 0))
        length = _length(head)
        if length <= _INLINE:
            return _value(head[8:], length)
        body = _padded(data, length)
        self._run(lambda: self._control.broadcast(body, 0))
        return _value(body, length)

    def report(self, error: BaseException) -> None:
        """Tell the others that this rank failed, and close its connections."""
        if self._failure is None:
            self._meeting.fail(named(error))
            self._close(RankError(f"this rank failed before, with {named(error)}"))

    def abandon(self, device: torch.device) -> None:
        """End kernels that still run on the GPU after some seconds, because they wait for a rank.

        The process group and its mailboxes cannot be used afterwards.
        """
        if device.type != "cuda" or _is_idle(device, _GRACE):
            return
        with contextlib.suppress(RuntimeError):
            self._end_waits()
        with contextlib.suppress(RuntimeError):
            backend: Any = self._group._get_backend(device)
            if dist.is_nccl_available() and isinstance(backend, dist.ProcessGroupNCCL):
                # By another thread: nothing of NCCL says how long it takes.
                thread = threading.Thread(target=backend.abort, daemon=True)
                thread.start()
                thread.join(_GRACE)

    def watch_peers(self) -> None:
        """Watch the other ranks from now on, if all are on this host; every rank calls it."""
        self.watch = connected(self, self._rank, self._size)
        if self.watch is not None:
            self.watch.on_loss(self._end_waits)

    def _end_waits(self) -> None:
        if self.mailbox is not None:
            self.mailbox.end_waits()

    def _close(self, failure: RankError) -> None:
        self._failure = failure
        if self.watch is not None:
            self.watch.fail()
        self._steps = self._control = None  # their connections with them

    def _run(self, collective: Callable[[], Any]) -> None:
        """Run a collective that the function starts; look for failures while it waits."""
        if self._failure is not None:
            raise self._failure
        try:
            self._wait(collective())
        except RuntimeError as error:
            failure = self._failed(error)
            self._close(failure)
            raise failure from error

    def _wait(self, work: Any) -> None:
        try:
            failed_at: float | None = None
            while True:
                try:
                    work.wait(_POLL)
                    return
                except RuntimeError:
                    if work.is_completed():
                        raise
                if failed_at is None and self._meeting.has_failed():
                    failed_at = time.monotonic()
                if failed_at is not None and time.monotonic() - failed_at > _GRACE:
                    raise RuntimeError("it waits for a rank that failed")
        finally:
            # An error's traceback keeps this frame, and the work keeps connections, for whose end
            # other ranks wait.
            del work

    def _failed(self, error: RuntimeError) -> RankError:
        """Return the error that says which rank failed, and why if it is known."""
        try:
            # The failing rank's neighbours may see its closed connection before its report.
            deadline = time.monotonic() + _POLL.total_seconds()
            while not self._meeting.has_failed() and time.monotonic() < deadline:
                time.sleep(0.02)
            failure = self._meeting.failure()
            if failure is not None:
                return failure
        except RuntimeError as gone:  # the store's process, too
            error = gone
        first = str(error).partition("\n")[0]
        self._meeting.fail(f"RankError: a rank ended or did not answer: {first}")
        return RankError(
            f"a rank ended without a report, or did not answer for {STEP_PATIENCE:.0f} s, as rank "
            f"{self._rank} sees it: {first}"
        )


def _is_idle(device: torch.device, seconds: float) -> bool:
    """Return whether a GPU ends what it was given within some seconds, in an error or not."""
    deadline = time.monotonic() + seconds
    try:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        while not event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
    except RuntimeError:  # of a kernel that ended with an error
        return True
    return True


def _head(data: bytes) -> torch.Tensor:
    """Return the first message for a value: its length, and the value if it is short."""
    short = data if len(data) <= _INLINE else b""
    return _padded(len(data).to_bytes(8, "little") + short, 8 + _INLINE)


def _padded(data: bytes, size: int) -> torch.Tensor:
    buffer = bytearray(data.ljust(size, b"\0"))
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _length(head: torch.Tensor) -> int:
    return int.from_bytes(head[:8].numpy().tobytes(), "little")


def _value(data: torch.Tensor, length: int) -> Any:
    return pickle.loads(data[:length].numpy().tobytes())
