"""Processes that ``torchrun`` started: the place of this one, their process group, and their end.

No other module of this package makes a process group. A process that fails must not wait for the
others: they may be gone, or wait for it. A process therefore leaves a group on a GPU only after its
work has ended well, and waits for some seconds at most. ``run`` ends a process without destructors.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import torch

from dsv4.parallel.context import RankError

BAD_INPUT, FAILED = 2, 1  # exit statuses
_PATIENCE = 10.0  # seconds for NCCL to end
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launched:
    """A process among those that were started together.

    Attributes:
        rank: Its number.
        size: Number of processes.
        local_rank: Its number on this host, which is that of its GPU.
    """

    rank: int
    size: int
    local_rank: int


def launched() -> Launched | None:
    """Return the place of this process among those of ``torchrun``; None if it runs alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or not {"RANK", "MASTER_ADDR"} <= os.environ.keys():
        return None
    return Launched(int(os.environ["RANK"]), size, int(os.environ.get("LOCAL_RANK", "0")))


def is_first() -> bool:
    """Return whether this process prints: the first of those started together, or the only one."""
    own = launched()
    return own is None or own.rank == 0


@contextmanager
def joined(kind: str) -> Iterator[torch.device]:
    """Join the processes that were started together for the duration of the block.

    All ranks have errors of bad input and errors that name another rank. Only rank 0 raises these;
    the others end with the same status.

    Args:
        kind: ``"cuda"`` or ``"cpu"``.

    Yields:
        This process's device: the GPU of its local rank, or the CPU.

    Raises:
        RuntimeError: if there is no such GPU.
        ValueError: if the environment asks for NVLink multicast.
    """
    import torch.distributed as dist

    from dsv4.parallel import multicast

    own = launched()
    assert own is not None, "the caller asks whether it is one of several"
    device = torch.device(kind)
    if kind == "cuda":
        if own.local_rank >= torch.cuda.device_count():
            raise RuntimeError(
                f"LOCAL_RANK is {own.local_rank}, and there are {torch.cuda.device_count()} GPUs; "
                "wanted a GPU for each process"
            )
        device = torch.device(kind, own.local_rank)
        torch.cuda.set_device(device)
    multicast.turn_off()
    is_new = not dist.is_initialized()
    if is_new and kind == "cuda":
        dist.init_process_group("nccl", device_id=device)
    elif is_new:
        dist.init_process_group("gloo")
    try:
        yield device
    except Exception as error:
        if is_new and kind != "cuda":  # gloo waits for nobody
            dist.destroy_process_group()
        status = _status_without_words(error, own)
        if status is None:
            raise
        _logger.info("rank %d does not print this error, because rank 0 does: %s", own.rank, error)
        raise SystemExit(status) from error
    if is_new:
        _leave(device)


def _status_without_words(error: Exception, own: Launched) -> int | None:
    """Return the status of a process whose error rank 0 prints; None if it prints its own."""
    if own.rank == 0:
        return None
    if isinstance(error, RankError):
        return None if error.failed in (None, 0) else FAILED
    return BAD_INPUT if isinstance(error, (ValueError, OSError, ImportError)) else None


def _leave(device: torch.device) -> None:
    """End the process group, after work that has ended on all ranks."""
    import torch.distributed as dist

    if device.type != "cuda":
        dist.destroy_process_group()
        return
    gc.collect()  # NCCL waits until graphs with its sums are gone
    torch.cuda.synchronize(device)

    def end() -> None:
        with contextlib.suppress(RuntimeError):
            torch.cuda.set_device(device)
            dist.destroy_process_group()

    thread = threading.Thread(target=end, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    if thread.is_alive():
        _logger.warning("NCCL did not end within %.0f s: the process ends without it", _PATIENCE)


def run(main: Callable[[], int]) -> NoReturn:
    """Run a command and end the process with its status.

    If there are several processes, this one ends without destructors, because these could wait for
    the others. An error that the command does not handle is printed.
    """
    if launched() is None:
        sys.exit(_while_read(main))
    status = FAILED
    try:
        status = main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else FAILED * (end.code is not None)
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _while_read(main: Callable[[], int]) -> int:
    """Run a command; its status. A reader of its output may end early, as ``head`` does."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        if not _has_no_reader(sys.stdout.fileno()):
            raise
        # Python flushes once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return status


def _has_no_reader(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
