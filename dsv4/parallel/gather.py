"""Gather small tensors of all ranks, by their mailboxes where there are some.

In a captured step this takes one launch and one trip over NVLink, and no library: the candidates of
the sampler are a few bytes.
"""

from __future__ import annotations

import torch

from dsv4.device import no_triton
from dsv4.parallel import groups, mailboxes
from dsv4.parallel.mailboxes import Mailbox

_ELEMENT = 2  # bytes of a mailbox's elements


def gather(tensor: torch.Tensor, name: str) -> list[torch.Tensor]:
    """Return the tensors of all ranks, in the order of ranks; all have one shape and dtype."""
    pushed = pushed_gather(tensor, name)
    return groups.gather(tensor, name) if pushed is None else pushed


def pushed_gather(tensor: torch.Tensor, name: str) -> list[torch.Tensor] | None:
    """Gather by the mailboxes of a group; None where they cannot be used, on all ranks alike."""
    mailbox = mailboxes.of_group(name)
    if mailbox is None or unfit(mailbox, tensor) is not None:
        return None
    from dsv4.triton.all_reduce import gathered

    bits = tensor.contiguous().view(-1).view(torch.bfloat16)
    parts = gathered(mailbox, bits).unbind(0)
    return [part.view(tensor.dtype).view(tensor.shape) for part in parts]


def unfit(mailbox: Mailbox, tensor: torch.Tensor) -> str | None:
    """Return why a tensor cannot be gathered by mailboxes, or None; bits are copied as they are."""
    if mailbox.defect is not None:
        return mailbox.defect
    if tensor.device != mailbox.device:
        return f"the mailboxes are on {mailbox.device}, the tensor is on {tensor.device}"
    if tensor.element_size() % _ELEMENT or not tensor.numel():
        return f"the tensor has {tensor.numel()} elements of {tensor.element_size()} bytes"
    reason = no_triton(tensor.device) if tensor.device.type != "meta" else None
    return reason or mailbox.unfit(1, tensor.nbytes // _ELEMENT)
