"""Reasons why sums over ranks cannot run a call; None where they can.

Named in ``dsv4.implementations``. All ranks of a group come to the same reasons, because these
follow from sizes, dtypes and what the ranks have agreed on: a rank that chose otherwise than its
peers would wait for ever.
"""

from __future__ import annotations

import torch

from dsv4.device import no_triton, sms
from dsv4.implementations import Call
from dsv4.ops.all_reduce import AllReduceArgs
from dsv4.parallel import groups, mailboxes
from dsv4.parallel.mailboxes import Mailbox

# Bytes that a rank receives up to which one exchange is chosen, and above which each element is
# summed by one rank: 1 MB, 512 KB and 256 KB of a sum over 2, 4 and 8 ranks. On two H200 a sum of
# 1 MB takes 10.0 us by push and 13.5 by two-shot, the next best. The bounds for more ranks follow
# published figures of other kernels on H100 (vllm#24111, sglang#2904); they are not measured here.
ONE_SHOT_RECEIVED = 2 << 20
# Bytes of a sum from which NCCL is chosen. On two H200 two-shot and NCCL take 76 and 84 us for
# 16 MB, 281 and 279 for 64 MB.
TWO_SHOT_BYTES = 32 << 20
# Programs of a push launch: all of them are on the GPU at once, of which each SM holds 8 at least.
_MOST_PROGRAMS, _PROGRAMS_OF_SM = 1024, 8
_SYMM_ALIGNMENT = 16
# torch's two-shot kernel cuts the elements into ranges for these numbers of ranks.
_TWO_SHOT_RANKS = (2, 4, 8)


def pushed_bytes(ranks: int) -> int:
    """Return the bytes of the largest sum over ``ranks`` ranks that is pushed, by choice."""
    return ONE_SHOT_RECEIVED // ranks


def _received(call: Call) -> int:
    """Return the bytes that a rank gets where every rank sends all it has to everybody."""
    partial = call.args.partial
    return groups.size(call.args.group) * partial.numel() * partial.element_size()


def _alone(args: AllReduceArgs) -> str | None:
    if args.group == groups.ALONE:
        return "group is '', which is this process alone, and there is nothing to exchange"
    return None


def gloo(call: Call) -> str | None:
    """Return why gloo does not carry this sum, or None."""
    reason = _alone(call.args)
    if reason is None:
        transport = groups.transport(call.args.group, call.device)
        if transport != "gloo":
            return f"the group's backend for {call.device.type} tensors is {transport!r}"
    return reason


def nccl(call: Call) -> str | None:
    """Return why NCCL does not carry this sum, or None."""
    reason = _alone(call.args)
    if reason is None and call.device.type != "cuda":
        return f"NCCL sums tensors of CUDA GPUs, the tensor is on {call.device}"
    if reason is None:
        transport = groups.transport(call.args.group, call.device)
        if transport != "nccl":
            return f"the group's backend for cuda tensors is {transport!r}"
    return reason


def _no_mailbox(call: Call) -> str | None:
    """Return why a group's mailboxes cannot take a bfloat16 tensor of a GPU, or None."""
    reason = _alone(call.args)
    partial = call.args.partial
    if reason is None and partial.dtype != torch.bfloat16:
        return f"the partial sum is {partial.dtype}, and mailboxes hold bfloat16"
    mailbox = mailboxes.of_group(call.args.group)
    if reason is None and mailbox is None:
        return (
            f"group {call.args.group!r} has no mailboxes, which "
            "dsv4.parallel.mailboxes.symmetric makes"
        )
    # While kernels are listed both are on the meta device, whatever device the call is for.
    if (
        reason is None
        and mailbox is not None
        and mailbox.device not in (call.device, partial.device)
    ):
        return f"the mailboxes are on {mailbox.device}, the tensor is on {call.device}"
    return reason


def _mailbox(call: Call) -> Mailbox:
    mailbox = mailboxes.of_group(call.args.group)
    assert mailbox is not None, "_no_mailbox comes first"
    return mailbox


def push(call: Call) -> str | None:
    """Return why the push kernel cannot run ``all_reduce``, or None."""
    return _push(call, 1, call.args.partial.numel())


def push_rows(call: Call) -> str | None:
    """Return why the push kernel cannot run a sum with the hyper-connection behind it, or None."""
    partial, streams = call.args.partial, call.args.streams
    if streams.shape[-2] != 4:
        return f"there are {streams.shape[-2]} streams, the kernels mix 4"
    floats = [value.dtype for value in call.args if isinstance(value, torch.Tensor)]
    if torch.float64 in floats:
        return "a tensor is float64, which only the reference computes in"
    return _push(call, partial.shape[:-1].numel(), partial.shape[-1])


def _push(call: Call, rows: int, width: int) -> str | None:
    reason = _no_mailbox(call) or no_triton(call.device)
    if reason is None:
        reason = _mailbox(call).defect or _mailbox(call).unfit(rows, width)
    programs = mailboxes.chunks_of(rows, width)
    most = _most_programs(call.device)
    if reason is None and programs > most:
        return f"the sum has {programs} chunks, wanted at most {most}, a program each"
    return reason


def _most_programs(device: torch.device) -> int:
    """Return the programs of a push launch that a device certainly holds at once."""
    if device.type != "cuda":
        return _MOST_PROGRAMS
    return min(_MOST_PROGRAMS, _PROGRAMS_OF_SM * sms(device))


def push_is_slower(call: Call) -> str | None:
    """Return why another implementation than the push kernel is faster, or None."""
    received = _received(call)
    if received <= ONE_SHOT_RECEIVED or (two_shot(call) and nccl(call)):
        return None
    return f"each rank would receive {received} bytes, and two passes move fewer"


def _symmetric(call: Call) -> str | None:
    """Return why torch's kernels on symmetric memory cannot run a call, or None."""
    reason = _no_mailbox(call)
    if reason is not None:
        return reason
    partial, workspace = call.args.partial, _mailbox(call).workspace
    if workspace is None:
        return "the mailboxes have no workspace, which workspace_bytes= of symmetric() makes"
    if partial.numel() > workspace.numel():
        return f"the sum has {partial.numel()} elements, the workspace has {workspace.numel()}"
    if partial.numel() == 0:
        return "the sum has no elements"
    nbytes = partial.numel() * partial.element_size()
    if nbytes % _SYMM_ALIGNMENT or partial.data_ptr() % _SYMM_ALIGNMENT:
        return f"the sum has {nbytes} bytes, wanted multiples of {_SYMM_ALIGNMENT}, aligned so"
    return None


def one_shot(call: Call) -> str | None:
    """Return why torch's one-shot kernel cannot run a call, or None."""
    return _symmetric(call)


def one_shot_is_slower(call: Call) -> str | None:
    """Return why another implementation than torch's one-shot kernel is faster, or None."""
    return push_is_slower(call)


def two_shot(call: Call) -> str | None:
    """Return why torch's two-shot kernel cannot run a call, or None."""
    reason = _symmetric(call)
    if reason is None and groups.size(call.args.group) not in _TWO_SHOT_RANKS:
        ranks = groups.size(call.args.group)
        return f"there are {ranks} ranks, wanted one of {_TWO_SHOT_RANKS}"
    return reason


def two_shot_is_slower(call: Call) -> str | None:
    """Return why NCCL is faster than torch's two-shot kernel, or None."""
    partial = call.args.partial
    nbytes = partial.numel() * partial.element_size()
    if nbytes < TWO_SHOT_BYTES or nccl(call):
        return None
    return f"the sum has {nbytes} bytes, and from {TWO_SHOT_BYTES} on NCCL is chosen"


def parts(call: Call) -> str | None:
    """Return why an operator composed of other operators is unsupported, or None."""
    if call.device.type == "cpu":
        return "on the CPU the reference does the same"
    return None
