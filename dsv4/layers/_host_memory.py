"""Host memory that a GPU reads by itself: large, in huge pages, page-locked and mapped."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

_GB = 1e9
KEPT_BYTES = 4_000_000_000  # of the host, for Python, page tables and files that are read
_MEMORY_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_bytes() -> int:
    """Return the bytes of host memory that are free for this process, its cgroup's limit included.

    Raises:
        OSError: if /proc/meminfo cannot be read.
    """
    fields = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text("ascii").splitlines()
    )
    free = int(fields["MemAvailable"].split()[0]) * 1024
    for limit, usage in _MEMORY_FILES:
        if Path(limit).exists() and Path(usage).exists():
            most = Path(limit).read_text("ascii").strip()
            if most.isdigit():
                free = min(free, max(0, int(most) - int(Path(usage).read_text("ascii"))))
    return free


def check_available(nbytes: int, available: Callable[[], int] = available_bytes) -> None:
    """Check that host memory holds this many bytes more.

    Raises:
        MemoryError: if it does not; the message says how much there is.
    """
    free = available()
    if nbytes + KEPT_BYTES > free:
        raise MemoryError(
            f"host_experts: experts need {nbytes / _GB:.1f} GB of host memory and "
            f"{KEPT_BYTES / _GB:.0f} GB stay free, but {free / _GB:.1f} GB are available: wanted "
            "fewer experts in host memory (more static ones), or a machine with more"
        )


def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return host memory, uint8 ``[nbytes]``, that kernels on ``device`` read at its own address.

    It does not come from PyTorch's allocator, whose pinned blocks are powers of two: 1.1 GB would
    take 2. Memory for a model on a CPU, or of 0 bytes, is plain memory.

    Raises:
        MemoryError: if there is not as much, or it cannot be page-locked; the message says how
            much there is.
    """
    if device.type != "cuda" or not nbytes:
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    check_available(nbytes)
    tensor = _mapped(nbytes)
    cudart = torch.cuda.cudart()
    with torch.cuda.device(device):
        status = int(cudart.cudaHostRegister(tensor.data_ptr(), nbytes, _PORTABLE_MAPPED))
        if status:
            _forget_error(device)
            raise _refused(nbytes, f"cudaHostRegister returned {status}")
    return tensor


def _mapped(nbytes: int) -> torch.Tensor:
    """Return zeros in private pages of the process, huge pages if the system has them."""
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise _refused(nbytes, str(error)) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):  # fewer pages to fault in and to lock
        memory.madvise(mmap.MADV_HUGEPAGE)
    with torch.inference_mode(False):
        tensor = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)
    return tensor.zero_()  # in PyTorch's threads: the lock would fault in one page after another


def _forget_error(device: torch.device) -> None:
    """Clear CUDA's last error, which a failed call leaves and the next launch would raise."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, dtype=torch.int32, device=device).add_(1)


_PORTABLE_MAPPED = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped


def release(tensor: torch.Tensor, device: torch.device) -> None:
    """Unlock memory of ``allocate``, when ``device`` has done its work; nothing for plain memory.

    It stays readable for the CPU until the tensor is gone.
    """
    if torch.cuda.is_available() and tensor.is_pinned():
        torch.cuda.synchronize(device)
        torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())


class BlocksAhead:
    """Host memory in blocks of one size: each next one is allocated in a thread meanwhile.

    To get and lock the memory of a layer's experts takes longer than to copy them there. A context
    manager, which releases the block that nobody has taken.

    Args:
        count: Number of blocks that will be requested.
        take: Function that allocates a block.
        give: Function that releases one.
    """

    def __init__(
        self,
        count: int,
        take: Callable[[int, torch.device], torch.Tensor] = allocate,
        give: Callable[[torch.Tensor, torch.device], None] = release,
    ) -> None:
        self._left = count
        self._take, self._give = take, give
        self._next: tuple[Future[torch.Tensor], int, torch.device] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dsv4 host memory")

    def __enter__(self) -> BlocksAhead:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown()
        self._forget()

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Return a block, and start to allocate another one if more will be requested.

        Raises:
            MemoryError: as the function ``allocate``.
        """
        block = None
        if self._next is not None and self._next[1:] == (nbytes, device):
            block = self._next[0].result()
            self._next = None
        self._forget()
        if block is None:
            block = self._take(nbytes, device)
        self._left -= 1
        if self._left > 0:
            self._next = self._thread.submit(self._take, nbytes, device), nbytes, device
        return block

    def _forget(self) -> None:
        """Release the block that was allocated ahead, if there is one."""
        if self._next is None:
            return
        future, _, device = self._next
        self._next = None
        if future.exception() is None:
            self._give(future.result(), device)


def _refused(nbytes: int, reason: str) -> MemoryError:
    return MemoryError(
        f"host_experts: {nbytes / _GB:.1f} GB of host memory cannot be locked for the GPU "
        f"({reason}); {available_bytes() / _GB:.1f} GB are available"
    )
