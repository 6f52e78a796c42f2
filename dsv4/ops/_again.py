"""Products that need no checks and no choice, because the same was asked of the same weight before.

A product of one token takes a GPU five microseconds; asking whether operands fit and which
implementation takes them takes Python ten. The answers depend on the weight, on the type and shape
of the input and on options, so they are kept with the weight. They are used for contiguous tensors
on a GPU alone, where nothing watches the call and nobody has chosen an implementation by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dsv4 import dispatch
from dsv4.formats import QuantizedTensor
from dsv4.ops._library import is_plain

_NAME = "_calls"
_MOST = 64  # of a weight: a prompt of yet another length is not kept for ever
_is_grad_enabled = torch.is_grad_enabled  # in one place: the look-up takes as long as the call


def known(
    x: Any, weight: Any, input_scale: Any, kind: tuple[Any, ...], backend: str
) -> Callable[..., Any] | None:
    """The implementation that a product like this one had before, or None.

    Args:
        x: The input, checked by nobody yet.
        weight: Likewise.
        input_scale: Likewise; a product with one is not kept.
        kind: The operator and its options.
        backend: As in every operator.
    """
    if torch.compiler.is_compiling() or input_scale is not None:
        return None
    if type(weight) is not QuantizedTensor:
        return None
    calls = weight.__dict__.get(_NAME)
    if calls is None or not _is_ordinary(x, weight, backend):
        return None
    found: Callable[..., Any] | None = calls.get(_key(x, kind))
    return found


def learn(
    x: torch.Tensor,
    weight: QuantizedTensor,
    input_scale: torch.Tensor | None,
    kind: tuple[Any, ...],
    backend: str,
    arguments: tuple[Any, ...],
) -> None:
    """Keep what a product that has run was given to; ``arguments`` are the operator's."""
    if torch.compiler.is_compiling() or input_scale is not None:
        return
    parts = _parts(weight)
    if not (_is_ordinary(x, weight, backend) and all(map(is_plain, parts))):
        return
    calls = weight.__dict__.setdefault(_NAME, {})
    if len(calls) >= _MOST:
        calls.clear()
    calls[_key(x, kind)] = dispatch.implementation(kind[0], arguments)


def _key(x: torch.Tensor, kind: tuple[Any, ...]) -> tuple[Any, ...]:
    return (x.dtype, x.shape, *kind)


def _is_ordinary(x: Any, weight: QuantizedTensor, backend: str) -> bool:
    return (
        is_plain(x)
        and _is_worth_it(x)
        and x.is_contiguous()
        and x.device == weight.codes.device
        and dispatch.is_free(backend)
        and not (_is_grad_enabled() and _wants_gradient(weight))
    )


def _wants_gradient(weight: QuantizedTensor) -> bool:
    """Asked at every call where gradients are on: a list of the parts would take longer."""
    scale = weight.global_scale
    of_blocks = weight.codes.requires_grad or weight.scales.requires_grad
    return of_blocks or (scale is not None and scale.requires_grad)


def _parts(weight: QuantizedTensor) -> list[torch.Tensor]:
    parts = (weight.codes, weight.scales, weight.global_scale)
    return [part for part in parts if part is not None]


def _is_worth_it(x: torch.Tensor) -> bool:
    """On the CPU a product takes longer than any question."""
    return x.is_cuda
