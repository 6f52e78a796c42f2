"""Sums over ranks, with the same bits on all of them."""

from __future__ import annotations

import torch

from dsv4.ops.all_reduce import all_reduce as all_reduce_operator
from dsv4.parallel import groups
from dsv4.parallel.context import ParallelContext
from dsv4.plans.recorder import current_recorder


def all_reduce(context: ParallelContext | None, partial: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over the ranks: in float32 or wider, in the order of ranks, rounded once.

    All ranks add the same numbers in the same order, so that the residual streams, which follow
    from the sums, are bitwise equal on all ranks. With others every rank would choose experts of
    its own, and the sum over ranks would lose some and count others twice.

    On a GPU it is the operator ``dsv4.ops.all_reduce``, which has several implementations.

    Args:
        context: This rank; None: this process alone, whose ``partial`` is the sum.
        partial: This rank's part, floating, of one shape and dtype on all ranks.

    Returns:
        The sum in the dtype of ``partial``.
    """
    if context is None:
        return partial
    if by_operator(context, partial):
        return all_reduce_operator(partial, context.group.name)
    # On the host by the group's own exchange, which ends when another rank fails. Plans do not see
    # it, so that they could not repeat it.
    recorder = current_recorder()
    if recorder is not None:
        recorder.refuse("a sum over ranks on the host")
    parts = context.group.all_gather(partial)
    wide = torch.promote_types(partial.dtype, torch.float32)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(partial.dtype)


def by_operator(context: ParallelContext, partial: torch.Tensor) -> bool:
    """Return whether operators of this package sum a tensor over the ranks of a context."""
    name = context.group.name
    return bool(name) and (partial.is_cuda or groups.emulated_ranks(name) is not None)


def sum_integers(context: ParallelContext, values: torch.Tensor) -> torch.Tensor:
    """Sum an integer tensor over the ranks, which is exact."""
    return torch.stack(context.group.all_gather(values)).sum(0)
