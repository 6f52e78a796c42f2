"""Compare the metadata of tensors with that of others in well under a microsecond.

``torch.compile`` has a compiled function for this, under a private name. A torch without it gets
the same answer from Python, which takes some microseconds more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dsv4.ops._library import unobserved

Guards = Callable[..., bool]  # takes the tensors one by one


def guards_of(tensors: Sequence[torch.Tensor]) -> Guards:
    """Return a function that says whether tensors are like these, which it does not keep alive.

    Tensors are alike if their classes, dtypes, shapes, strides and devices are equal, whether they
    require a gradient, are inference tensors or negated views, and the modes that a call would run
    under. If these tensors are all different objects, those must be, too.
    """
    made = _compiled(tensors)
    return _interpreted(tensors) if made is None else made


def _compiled(tensors: Sequence[torch.Tensor]) -> Guards | None:
    kind = _tensor_guards()
    if kind is None:
        return None
    try:
        check = kind(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        if check(*tensors) is not True:
            return None
    except (TypeError, RuntimeError):
        return None
    return check


@functools.cache
def _tensor_guards() -> Any:
    try:
        from torch._C._dynamo.guards import TensorGuards
    except ImportError:
        return None
    return TensorGuards


def _interpreted(tensors: Sequence[torch.Tensor]) -> Guards:
    expected = [_metadata(tensor) for tensor in tensors]
    least = len(tensors) if _are_different(tensors) else 0

    def is_like(*others: torch.Tensor) -> bool:
        if not unobserved() or len(set(map(id, others))) < least:
            return False
        return [_metadata(tensor) for tensor in others] == expected

    return is_like


def _are_different(tensors: Sequence[torch.Tensor]) -> bool:
    return len(set(map(id, tensors))) == len(tensors)


def _metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        type(tensor),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.device,
        tensor.requires_grad,
        tensor.is_inference(),
        tensor.is_neg(),
        torch.is_inference_mode_enabled(),
    )
