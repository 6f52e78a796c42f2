"""Make the mailboxes through which tokens reach the ranks of their experts, and check them once."""

from __future__ import annotations

import logging

import torch

from dsv4.config import ModelConfig
from dsv4.ops.moe_exchange import MoeReturnArgs, MoeSendArgs
from dsv4.parallel import groups, mailboxes, opening
from dsv4.parallel import moe_exchange as collectives
from dsv4.parallel.context import ParallelContext, has_own_tokens
from dsv4.parallel.mailboxes import Mailbox
from dsv4.parallel.token_rows import RowLayout

# Tokens of a rank and step that are pushed; more go to NCCL. 50 MB of mailboxes for Flash on 8
# ranks. The bound was not measured.
PUSHED_TOKENS = 256
_CHECKED_TOKENS = 4
_logger = logging.getLogger(__name__)


def open_exchange(
    context: ParallelContext, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> None:
    """Make the mailboxes of a rank's tokens, as ``open_for`` does, and keep them with the group.

    Call this before any graph is captured.
    """
    mailbox, earlier = open_for(context, config, device, dtype), context.group.mailbox
    if mailbox is not None and mailbox is not earlier:
        mailbox.owner = (mailbox.owner, earlier)  # captured steps of earlier models write to it
        context.group.mailbox = mailbox


def open_for(
    context: ParallelContext | None, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> Mailbox | None:
    """Make the mailboxes of a rank, if it exchanges bfloat16 tokens with GPUs.

    Collective over the ranks. Those of an earlier model of the group are used again. Where the GPUs
    cannot share memory, that is logged on rank 0, and the process group moves the tokens.
    """
    if context is None or not has_own_tokens(context) or dtype != torch.bfloat16:
        return None
    group = context.group.name
    if device.type != "cuda" or not group:
        return None
    layout = RowLayout.of_model(config)
    mailbox, reason = mailboxes.of_group(group), ""
    holds = mailbox is not None and layout.unfit(mailbox, PUSHED_TOKENS) is None
    if all(context.group.exchange(holds)):
        return mailbox
    try:
        mailbox = opening.make(context.group, layout.nbytes(PUSHED_TOKENS), device)
    except RuntimeError as error:
        reason = str(error)
    reasons = list(filter(None, context.group.exchange(reason)))
    if not reasons and mailbox is not None and groups.transport(group, device) == "nccl":
        mailbox.defect = mailbox.defect or checked(mailbox, group, layout, config.n_routed_experts)
        reasons = list(filter(None, [mailbox.defect]))
    if reasons and context.rank == 0:
        _logger.warning("tokens are exchanged by the process group, not pushed: %s", reasons[0])
    return None if reasons else mailbox


def checked(mailbox: Mailbox, group: str, layout: RowLayout, num_experts: int) -> str | None:
    """Return what was wrong with an exchange by the push kernels, on any rank; None if nothing."""
    from dsv4.triton import moe_exchange as kernels

    device, good = mailbox.device, True
    generator = torch.Generator(device).manual_seed(mailbox.rank)
    for _ in range(2 * mailboxes.GENERATIONS):
        sent = _random_tokens(layout, num_experts, group, generator)
        kernels.push_tokens(mailbox, sent)
        rows, ids, weights = kernels.receive_tokens(mailbox, sent)
        right = collectives.nccl_send(sent)
        here = (ids >= 0).any(1)
        good = good and torch.equal(ids, right[1]) and torch.equal(weights, right[2])
        good = good and torch.equal(rows[here], right[0][here])
        returned = MoeReturnArgs(right[0], right[1], sent.ids, sent.x, num_experts, group)
        kernels.push_results(mailbox, returned)
        total = kernels.sum_results(mailbox, returned)
        good = good and torch.equal(total, collectives.nccl_return(returned))
    verdict = torch.tensor([float(not good)], dtype=torch.float32, device=device)
    wrong = sum(bool(of_rank) for of_rank in groups.gather(verdict, group))
    return f"its check found wrong rows on {wrong} of {mailbox.ranks} ranks" if wrong else None


def _random_tokens(
    layout: RowLayout, num_experts: int, group: str, generator: torch.Generator
) -> MoeSendArgs:
    device, shape = generator.device, (_CHECKED_TOKENS, layout.choices)
    x = torch.randn(
        (_CHECKED_TOKENS, layout.hidden), generator=generator, dtype=torch.float32, device=device
    )
    ids = torch.randint(num_experts, shape, generator=generator, dtype=torch.int64, device=device)
    weights = torch.rand(shape, generator=generator, dtype=torch.float32, device=device)
    return MoeSendArgs(x.bfloat16(), ids, weights, num_experts, group)
