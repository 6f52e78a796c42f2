"""Mailboxes: symmetric buffers in which the ranks of a group leave partial sums for each other.

Each rank has three generations of one slot per source rank, and as many flags: a slot is cut into
chunks, and a chunk has a flag. Rank ``r`` writes its partial sum of call ``c`` (1, 2, ...) to slot
``[c % 3, r]`` of every rank, its own included, and then ``c`` to the flags of these chunks, with
release semantics at system scope. Whoever reads a chunk waits for the flags of all sources.

Why no slot is overwritten before it was read: a rank writes call ``c`` after its own call ``c - 1``
has ended, for which it needed call ``c - 1`` of every peer, which a peer writes after its call
``c - 2`` has ended. So when call ``c`` is written all ranks have read call ``c - 2``; two
generations would do, and the third allows a kernel to push before the preceding consumer has ended.

Calls are counted on the device, so that a CUDA graph can be replayed. Kernels are in
``dsv4/triton/all_reduce.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dsv4.parallel import groups

GENERATIONS = 3
CHUNK = 1024  # elements of a row, at most, that have a flag
MOST_RANKS = 16
_SMALLEST_CHUNK = 64  # elements of a slot for each flag: rows may be shorter than a chunk
_BYTES = 2  # of an element, which is bfloat16
_ALIGNMENT = 16
_EMULATED = "emulated"
_COUNTERS = 2  # calls so far; programs of the running call that have ended
GONE = -1  # a flag of a rank that does not push any more

_OPEN: weakref.WeakValueDictionary[str, Mailbox] = weakref.WeakValueDictionary()


@dataclass(eq=False)
class Mailbox:
    """The mailboxes of a group as one of its ranks sees them.

    Attributes:
        rank: This rank.
        slots: Slots of each rank, in the order of ranks, bfloat16 ``[3, N, capacity]``.
        flags: Likewise int32 ``[3, N, chunks]``.
        counter: int32 ``[2]`` of this rank alone, see ``_COUNTERS``.
        kind: ``"symmetric"``, ``"ipc"``, ``"virtual"`` or ``"emulated"``.
        workspace: Symmetric bfloat16 buffer of torch's own all-reduce kernels; None without.
        defect: Why the push kernels must not be used, found when they were checked; None: nothing.
        owner: Keeps the memory alive.
        ending: Pinned flags of ranks that are gone, and a high-priority stream that shares no queue
            with waiting kernels; None if no kernel waits for another process.
    """

    rank: int
    slots: tuple[torch.Tensor, ...]
    flags: tuple[torch.Tensor, ...]
    counter: torch.Tensor
    kind: str
    workspace: torch.Tensor | None = None
    defect: str | None = None
    owner: Any = field(default=None, repr=False)
    ending: tuple[torch.Tensor, torch.cuda.Stream] | None = field(default=None, repr=False)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.slots)

    @property
    def are_copies(self) -> bool:
        """Whether the other ranks are copies of this one, in an emulated group."""
        return self.kind == _EMULATED

    @property
    def capacity(self) -> int:
        """Elements of a slot."""
        return self.slots[0].shape[2]

    @property
    def chunks(self) -> int:
        """Flags of a slot."""
        return self.flags[0].shape[2]

    @property
    def device(self) -> torch.device:
        """Where the memory is."""
        return self.counter.device

    @property
    def peers(self) -> tuple[int, ...]:
        """The ranks in the order in which this one writes to them: the next one first, itself last.

        So that not all ranks write to the same one at the same time.
        """
        return tuple((self.rank + i) % self.ranks for i in range(1, self.ranks + 1))

    def end_waits(self) -> None:
        """End this rank's kernels that wait for a rank, and all later ones, with an error.

        The host copies the flags; the copy does not wait for any kernel.
        """
        own = self.flags[self.rank]
        if self.ending is None:
            own.fill_(GONE)
            return
        flags, stream = self.ending
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            own.copy_(flags, non_blocking=True)
        stream.synchronize()

    def unfit(self, rows: int, width: int) -> str | None:
        """Return why a partial sum ``[rows, width]`` does not fit, or None."""
        if rows * width > self.capacity:
            return f"the sum has {rows * width} elements, and a slot holds {self.capacity}"
        needed = chunks_of(rows, width)
        if needed > self.chunks:
            return f"the sum has {needed} chunks, and a slot has flags for {self.chunks}"
        return None


def chunks_of(rows: int, width: int) -> int:
    """Return the chunks of rows: each row begins a new one."""
    return rows * -(-width // CHUNK)


@dataclass(frozen=True)
class _Shape:
    """How one allocation is divided into slots and flags.

    Attributes:
        ranks: Number of ranks.
        capacity: Elements of a slot.
    """

    ranks: int
    capacity: int

    @property
    def chunks(self) -> int:
        return -(-self.capacity // _SMALLEST_CHUNK)

    @property
    def slot_elements(self) -> int:
        return GENERATIONS * self.ranks * self.capacity

    @property
    def flag_elements(self) -> int:
        return GENERATIONS * self.ranks * self.chunks

    @property
    def nbytes(self) -> int:
        total = self.slot_elements * _BYTES + 4 * self.flag_elements
        return -(-total // _ALIGNMENT) * _ALIGNMENT

    def slots(self, memory: torch.Tensor) -> torch.Tensor:
        """View uint8 ``memory`` as slots."""
        part = memory[: self.slot_elements * _BYTES].view(torch.bfloat16)
        return part.view(GENERATIONS, self.ranks, self.capacity)

    def flags(self, memory: torch.Tensor) -> torch.Tensor:
        """View uint8 ``memory`` as flags, which lie behind the slots."""
        begin = self.slot_elements * _BYTES
        part = memory[begin : begin + 4 * self.flag_elements].view(torch.int32)
        return part.view(GENERATIONS, self.ranks, self.chunks)


def _shape(ranks: int, nbytes: int) -> _Shape:
    """Return the shape for partial sums of up to ``nbytes``.

    Raises:
        ValueError: if a number is out of range.
    """
    if not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"mailboxes: there are {ranks} ranks, wanted 1 to {MOST_RANKS}")
    if nbytes < 1:
        raise ValueError(f"mailboxes: nbytes is {nbytes}, wanted at least 1")
    return _Shape(ranks, -(-nbytes // (_BYTES * CHUNK)) * CHUNK)


def _mailbox(
    rank: int, shape: _Shape, memories: list[torch.Tensor], kind: str, owner: Any
) -> Mailbox:
    slots = tuple(shape.slots(memory) for memory in memories)
    flags = tuple(shape.flags(memory) for memory in memories)
    counter = torch.zeros(_COUNTERS, dtype=torch.int32, device=memories[rank].device)
    box = Mailbox(rank, slots, flags, counter, kind, owner=owner)
    if counter.is_cuda:  # allocated now: a later allocation could wait for a kernel
        gone = torch.full(flags[rank].shape, GONE, dtype=torch.int32, device="cpu").pin_memory()
        box.ending = gone, torch.cuda.Stream(counter.device, priority=-1)
    return box


def virtual(ranks: int, nbytes: int, device: torch.device | str = "cpu") -> list[Mailbox]:
    """Make the mailboxes of ranks that are all in this process; for tests.

    Args:
        ranks: Number of ranks, 1 to 16.
        nbytes: Bytes of the largest partial sum.
        device: Where all of them are.

    Raises:
        ValueError: if a number is out of range.
    """
    shape = _shape(ranks, nbytes)
    memories = [torch.zeros(shape.nbytes, dtype=torch.uint8, device=device) for _ in range(ranks)]
    return [_mailbox(rank, shape, memories, "virtual", memories) for rank in range(ranks)]


def emulated(ranks: int, nbytes: int, device: torch.device | str = "cpu") -> Mailbox:
    """Make rank 0's mailboxes in an emulated group, which rank 0 fills itself.

    The mailboxes of the peers lie in its own memory, each a slot further than the one before: what
    it pushes to peer ``i`` arrives in its own slot ``i``, as if peer ``i`` had pushed the same. So
    a launch stores, waits and adds as often as with peers, and nothing crosses NVLink.

    Operators find them by ``groups.emulated_name(ranks)`` for as long as the result is kept.

    Args:
        ranks: Number of ranks, 1 to 16.
        nbytes: Bytes of the largest partial sum.
        device: Where they are.

    Raises:
        ValueError: if a number is out of range.
    """
    shape = _shape(ranks, nbytes)
    beyond = shape.ranks - 1  # slots behind the last one, for the mailbox that lies furthest
    slots = torch.zeros(
        shape.slot_elements + beyond * shape.capacity, dtype=torch.bfloat16, device=device
    )
    flags = torch.zeros(
        shape.flag_elements + beyond * shape.chunks, dtype=torch.int32, device=device
    )
    counter = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
    slot_shape = (GENERATIONS, shape.ranks, shape.capacity)
    flag_shape = (GENERATIONS, shape.ranks, shape.chunks)
    mailbox = Mailbox(
        0,
        tuple(
            slots[i * shape.capacity :][: shape.slot_elements].view(slot_shape)
            for i in range(shape.ranks)
        ),
        tuple(
            flags[i * shape.chunks :][: shape.flag_elements].view(flag_shape)
            for i in range(shape.ranks)
        ),
        counter,
        _EMULATED,
        owner=(slots, flags),
    )
    _OPEN[groups.emulated_name(ranks)] = mailbox
    return mailbox


def ipc(group: str, nbytes: int, device: torch.device) -> Mailbox:
    """Make mailboxes of processes that share one GPU, by CUDA IPC handles; for tests.

    Collective: every rank of the group calls it. Handles travel through the group's CPU backend.

    Raises:
        ValueError: if a number is out of range, the device is no GPU or the group is unknown.
    """
    if device.type != "cuda":
        raise ValueError(f"mailboxes: device is {device}, wanted a CUDA GPU for IPC handles")
    from torch.multiprocessing.reductions import reduce_tensor

    process_group = groups.resolve(group)
    shape, rank = _shape(process_group.size(), nbytes), process_group.rank()
    own = torch.zeros(shape.nbytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    handles: list[Any] = [None] * shape.ranks
    dist.all_gather_object(handles, reduce_tensor(own), group=process_group)
    memories = [
        own if source == rank else rebuild(*arguments)
        for source, (rebuild, arguments) in enumerate(handles)
    ]
    mailbox = _mailbox(rank, shape, memories, "ipc", memories)
    _OPEN[group] = mailbox
    dist.barrier(process_group)
    return mailbox


def symmetric(group: str, nbytes: int, device: torch.device, workspace_bytes: int = 0) -> Mailbox:
    """Make a group's mailboxes in torch's symmetric memory, and check the push kernel once.

    Collective: every rank of the group calls it, before any CUDA graph is captured, and keeps the
    result for as long as operators shall use it. The ranks sum random numbers with the push kernel
    and compare with the gathered partial sums; where one rank finds a difference, all of them have
    the ``defect``, so that every rank chooses the same implementation.

    Args:
        group: Name of a process group with NCCL for GPUs.
        nbytes: Bytes of the largest partial sum that is pushed.
        device: This rank's GPU.
        workspace_bytes: Bytes of the largest partial sum for torch's one-shot and two-shot kernels;
            0: none.

    Raises:
        ValueError: if a number is out of range, the device is no GPU, the group is unknown, or the
            environment asks for NVLink multicast.
        RuntimeError: if torch cannot share memory between the GPUs.
    """
    from dsv4.parallel import multicast

    if device.type != "cuda":
        raise ValueError(f"mailboxes: device is {device}, wanted a CUDA GPU")
    process_group = groups.resolve(group)
    shape = _shape(process_group.size(), nbytes)
    multicast.turn_off()
    from torch.distributed import _symmetric_memory as symm_mem

    memory = symm_mem.empty(shape.nbytes, dtype=torch.uint8, device=device)
    try:
        handle = symm_mem.rendezvous(memory, process_group)
    except RuntimeError as error:
        raise RuntimeError(
            f"mailboxes: the GPUs of group {group!r} cannot share memory ({error}); without "
            "mailboxes all_reduce uses NCCL"
        ) from error
    memory.zero_()
    workspace = None
    if workspace_bytes:
        workspace = symm_mem.empty(
            -(-workspace_bytes // _BYTES), dtype=torch.bfloat16, device=device
        )
        symm_mem.rendezvous(workspace, process_group)
    sizes = (shape.nbytes,)
    memories = [handle.get_buffer(peer, sizes, torch.uint8) for peer in range(shape.ranks)]
    mailbox = _mailbox(process_group.rank(), shape, memories, "symmetric", (memory, handle))
    mailbox.workspace = workspace
    torch.cuda.synchronize(device)
    dist.barrier(process_group)
    _OPEN[group] = mailbox
    mailbox.defect = _checked(mailbox, group)
    return mailbox


def _checked(mailbox: Mailbox, group: str) -> str | None:
    """Return what was wrong with a sum by the push kernel, on any rank; None if nothing."""
    from dsv4.triton.all_reduce import exchange

    generator = torch.Generator(mailbox.device).manual_seed(mailbox.rank)
    width = min(4 * CHUNK, mailbox.capacity)
    good = True
    for _ in range(2 * GENERATIONS):
        partial = torch.randn(
            width, generator=generator, dtype=torch.float32, device=mailbox.device
        ).bfloat16()
        total = torch.zeros(width, dtype=torch.float32, device=mailbox.device)
        for source in groups.gather(partial, group):
            total += source.float()
        good = good and torch.equal(exchange(mailbox, partial), total.bfloat16())
    verdict = torch.tensor([float(not good)], dtype=torch.float32, device=mailbox.device)
    wrong = sum(bool(verdict_of_rank) for verdict_of_rank in groups.gather(verdict, group))
    return f"its check found wrong sums on {wrong} of {mailbox.ranks} ranks" if wrong else None


def announce(group: str, mailbox: Mailbox) -> None:
    """Let operators use a group's mailboxes again, where others were made for it since."""
    _OPEN[group] = mailbox


@contextmanager
def kept_open() -> Iterator[None]:
    """Restore the open mailboxes at the end of the block, whatever was opened in it."""
    before = dict(_OPEN)
    try:
        yield
    finally:
        _OPEN.update(before)


def of_group(group: str) -> Mailbox | None:
    """Return the open mailboxes of a group; None without."""
    return _OPEN.get(group)
