"""Open the mailboxes of a model's ranks, where its GPUs can share memory."""

from __future__ import annotations

import logging

import torch

from dsv4.ops.all_reduce import AllReduceArgs
from dsv4.parallel import all_reduce, groups, mailboxes, supports
from dsv4.parallel.context import Group, ParallelContext
from dsv4.parallel.mailboxes import Mailbox
from dsv4.parallel.process_group import DistributedGroup

_logger = logging.getLogger(__name__)
_CHECKED_ELEMENTS = 1 << 16  # of each torch kernel's sum that is checked


def open_mailboxes(context: ParallelContext, device: torch.device) -> None:
    """Make the mailboxes of a context's group, which keeps them; nothing on a CPU.

    Collective. Where one rank cannot have them none has, which is logged with the reason, and sums
    are NCCL's.

    Args:
        context: This rank.
        device: The model's device.
    """
    group = context.group
    if device.type != "cuda" or not isinstance(group, DistributedGroup):
        return
    if group.mailbox is not None:  # of an earlier model on the same group
        return
    device = torch.device(
        "cuda", torch.cuda.current_device() if device.index is None else device.index
    )
    reason = ""
    try:
        group.mailbox = _made(context, group, device)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
    said = [text for text in group.exchange(reason) if text]
    if said:
        group.mailbox = None
        _logger.warning("sums over ranks are those of the process group: %s", said[0])


def _made(context: ParallelContext, group: DistributedGroup, device: torch.device) -> Mailbox:
    """Make mailboxes for sums, and check torch's own kernels if there is memory for them."""
    nbytes = supports.pushed_bytes(context.size)
    mailbox = make(group, nbytes, device, supports.TWO_SHOT_BYTES)
    if mailbox.workspace is not None and _torch_kernels_are_wrong(context, mailbox):
        _logger.warning("torch's sums in symmetric memory failed their check and are not used")
        mailbox.workspace = None
    return mailbox


def make(group: Group, nbytes: int, device: torch.device, workspace_bytes: int = 0) -> Mailbox:
    """Make mailboxes in symmetric memory, or by IPC handles if all ranks are on one GPU.

    Collective; see ``mailboxes.symmetric`` for the arguments.

    Raises:
        RuntimeError: if the GPUs cannot share memory.
    """
    transport = groups.transport(group.name, device)
    if transport == "nccl":
        return mailboxes.symmetric(group.name, nbytes, device, workspace_bytes)
    gpus = set(group.exchange(str(torch.cuda.get_device_properties(device).uuid)))
    if len(gpus) > 1:
        raise RuntimeError(
            f"the group's backend for cuda tensors is {transport!r}, wanted 'nccl' for mailboxes "
            "between GPUs"
        )
    return mailboxes.ipc(group.name, nbytes, device)


def _torch_kernels_are_wrong(context: ParallelContext, mailbox: Mailbox) -> bool:
    """Return whether torch's one-shot or two-shot sum is wrong on any rank."""
    generator = torch.Generator(mailbox.device).manual_seed(context.rank)
    partial = torch.randn(
        _CHECKED_ELEMENTS, generator=generator, dtype=torch.float32, device=mailbox.device
    ).bfloat16()
    args = AllReduceArgs(partial, context.group.name)
    parts = torch.stack(groups.gather(partial, context.group.name)).float()
    # Each addition rounds to bfloat16, whose unit roundoff is 2^-9 of what it adds.
    allowed = context.size * 2.0**-8 * parts.abs().sum(0)
    wrong = False
    for kernel in (all_reduce.one_shot, all_reduce.two_shot):
        wrong |= bool(((kernel(args).float() - parts.sum(0)).abs() > allowed).any())
    return any(context.group.exchange(wrong))
