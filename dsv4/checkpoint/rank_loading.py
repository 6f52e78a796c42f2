"""Steps of ``load`` on several ranks: they agree on the model, share it out and are connected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch

from dsv4.checkpoint.filling import FillRequest
from dsv4.checkpoint.load_request import LoadRequest
from dsv4.checkpoint.rank_part import check_split, entries_of_rank
from dsv4.checkpoint.reader import Checkpoint
from dsv4.config import ModelConfig
from dsv4.parallel.agreement import agree, digest, reported
from dsv4.parallel.context import ParallelContext, has_own_tokens
from dsv4.parallel.kernel_facts import kernel_facts

if TYPE_CHECKING:
    from dsv4.model import DeepseekV4ForCausalLM


def context_of(request: LoadRequest, mesh: Any, parallel: str | None) -> ParallelContext | None:
    """Return the rank of this process in the group that loads a model; None: there is no group.

    Args:
        request: The request.
        mesh: The argument ``device_mesh`` of ``load``.
        parallel: See ``load``.

    Raises:
        TypeError: if ``mesh`` is of a wrong type.
        ValueError: if ``parallel`` is unknown, either is given alone, or experts are to be in host
            memory beside them.
    """
    if mesh is None and parallel is None:
        return None
    from dsv4.parallel import process_group  # imports torch.distributed

    context = process_group.context_of(mesh, parallel, _device(request.values))
    if request.host_experts is not None and context is not None:
        with reported(context):  # the others may have no such argument, and wait
            raise ValueError(
                f"host_experts is {request.host_experts!r} and parallel is {parallel!r}, wanted "
                "host_experts=None on several ranks"
            )
    return context


@contextmanager
def arguments_checked(mesh: Any, parallel: str | None) -> Iterator[None]:
    """Tell the other ranks, if there are any, of an error in the block, which checks arguments."""
    if mesh is None:
        yield
        return
    from dsv4.parallel import process_group  # imports torch.distributed

    with process_group.announced(mesh, parallel):
        yield


def request_of_rank(request: LoadRequest, context: ParallelContext | None) -> LoadRequest:
    """Return the request of one rank: only rank 0 shows progress."""
    if context is None or context.rank == 0:
        return request
    return replace(request, values=replace(request.values, progress=False))


def drafts_of_ranks(
    checkpoint: Checkpoint, mtp: bool | None, context: ParallelContext | None
) -> bool | None:
    """Return whether drafts are loaded: ranks with tokens of their own leave DSpark out."""
    if context is None or not checkpoint.has_dspark or not has_own_tokens(context):
        return mtp
    if mtp:
        raise ValueError(
            "mtp is True, wanted None or False: with parallel='dp' ranks have no DSpark draft"
        )
    return False


def split_checkpoint(
    checkpoint: Checkpoint, config: ModelConfig, request: FillRequest, context: ParallelContext
) -> None:
    """Reduce the entries of a checkpoint to this rank's, when all ranks load one model.

    Raises:
        ValueError: if the ranks differ, or the model cannot be split over them.
    """
    _check_ranks(checkpoint, config, request, context)
    if not has_own_tokens(context):
        from dsv4.parallel.opening import open_mailboxes  # imports torch.distributed

        open_mailboxes(context, _device(request))
    checkpoint.entries = entries_of_rank(checkpoint.entries, context)


def connect(model: DeepseekV4ForCausalLM, context: ParallelContext) -> None:
    """Wait until all ranks are filled, and open the mailboxes of routed experts.

    Raises:
        RankError: if another rank failed.
    """
    from dsv4.parallel.exchange_mailboxes import open_exchange  # imports torch.distributed

    context.group.exchange(None)  # a rank that failed ends all of them here
    open_exchange(context, model.config, model.device, model.dtype)


def _check_ranks(
    checkpoint: Checkpoint, config: ModelConfig, request: FillRequest, context: ParallelContext
) -> None:
    """Check that the ranks load one model, and that it can be split over them."""
    tensors = sorted((e.name, e.kind, e.shape) for e in checkpoint.entries.values())
    options, choice = request.resolved(checkpoint)
    agree(
        context,
        {
            "parallel": context.mode,
            **kernel_facts(_device(request)),
            **{f"{f.name} of config.json": getattr(config, f.name) for f in fields(config)},
            "a hash of the checkpoint's tensors": digest(tensors),
            "activation": options.activation,
            "dtype": options.dtype,
            "mxfp4": options.mxfp4,
            "pack": (choice.enabled, choice.layout),
            "input_scales": options.input_scales,
        },
    )
    check_split(checkpoint.entries, config, context, choice, _device(request))


def _device(request: FillRequest) -> torch.device:
    """Return the device of the values."""
    return torch.device("cpu" if request.device is None else request.device)
