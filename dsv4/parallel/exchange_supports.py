"""Reasons why an exchange of tokens over ranks cannot run a call; None where it can.

Named in ``dsv4.implementations``; all ranks come to the same reasons, see
``dsv4.parallel.supports``.
"""

from __future__ import annotations

import torch

from dsv4.device import no_triton
from dsv4.implementations import Call
from dsv4.ops.moe_exchange import MoeReturnArgs, MoeSendArgs
from dsv4.parallel import groups, mailboxes
from dsv4.parallel.mailboxes import Mailbox
from dsv4.parallel.token_rows import RowLayout

_MOST_CHOICES = 64  # experts of a token, which a program holds in registers


def gloo(call: Call) -> str | None:
    """Return why gloo does not carry these tokens, or None."""
    return _carried_by(call, "gloo")


def nccl(call: Call) -> str | None:
    """Return why NCCL does not carry these tokens, or None."""
    if call.args.group != groups.ALONE and call.device.type != "cuda":
        return f"NCCL moves tensors of CUDA GPUs, the tokens are on {call.device}"
    return _carried_by(call, "nccl")


def _carried_by(call: Call, name: str) -> str | None:
    if call.args.group == groups.ALONE:
        return "group is '', which is this process alone, and there is nothing to exchange"
    transport = groups.transport(call.args.group, call.device)
    if transport != name:
        return f"the group's backend for {call.device.type} tensors is {transport!r}"
    return None


def push_send(call: Call) -> str | None:
    """Return why the push kernels cannot run ``moe_send``, or None."""
    args: MoeSendArgs = call.args
    if args.weights.dtype == torch.float64:
        return "weights are torch.float64, and mailboxes hold float32"
    return _push(call, args.x, args.ids)


def push_return(call: Call) -> str | None:
    """Return why the push kernels cannot run ``moe_return``, or None."""
    args: MoeReturnArgs = call.args
    if args.shared is not None and args.shared.dtype == torch.float64:
        return "shared is torch.float64, which only the reference computes in"
    return _push(call, args.y, args.ids)


def _push(call: Call, rows: torch.Tensor, ids: torch.Tensor) -> str | None:
    """Return why mailboxes cannot take rows like these, each with ids, or None."""
    if call.args.group == groups.ALONE:
        return "group is '', which is this process alone, and there is nothing to exchange"
    if rows.dtype != torch.bfloat16:
        return f"the rows are {rows.dtype}, and mailboxes hold bfloat16"
    if ids.shape[1] > _MOST_CHOICES:
        return f"a token has {ids.shape[1]} experts, wanted at most {_MOST_CHOICES}"
    mailbox = mailboxes.of_group(call.args.group)
    if mailbox is None:
        return (
            f"group {call.args.group!r} has no mailboxes, which "
            "dsv4.parallel.mailboxes.symmetric makes"
        )
    return _no_kernel(call, mailbox, rows) or RowLayout.of(rows, ids).unfit(mailbox, ids.shape[0])


def _no_kernel(call: Call, mailbox: Mailbox, rows: torch.Tensor) -> str | None:
    # While kernels are listed both are on the meta device, whatever device the call is for.
    if mailbox.device not in (call.device, rows.device):
        return f"the mailboxes are on {mailbox.device}, the tokens are on {call.device}"
    return no_triton(call.device) or mailbox.defect
