"""A debug check that the residual streams are bitwise equal on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dsv4.parallel.agreement import reported
from dsv4.parallel.context import ParallelContext, has_own_tokens

_logger = logging.getLogger(__name__)
_EVERY = 64  # steps between two checks
_MULTIPLIERS = (0x1F8B0C5D3A7E9B47, 0x5851F42D4C957F2D)  # odd


class StreamsDifferError(RuntimeError):
    """The residual streams are not the same on all ranks."""


@contextmanager
def guard(model: Any, every: int = _EVERY) -> Iterator[None]:
    """Compare the streams behind each layer over the ranks, in every n-th step of the block.

    Ranks with other streams choose experts of their own, and the sum over ranks then loses some and
    counts others twice, without an error. Each rank hashes the streams behind the embedding and
    behind each layer to 64 bits; the hashes are exchanged at the end of the step, which waits for
    the device. It sees eager steps alone: make the runner with ``capture=False``. A block in which
    nothing was compared logs a warning.

    Args:
        model: A model of ``dsv4.load`` on several ranks; all of them use the guard.
        every: n, at least 1; the first step is checked.

    Raises:
        StreamsDifferError: on all ranks, naming the first module behind which streams differ.
        ValueError: if the model is not on several ranks, these have tokens of their own, or
            ``every`` is below 1.
    """
    context = getattr(model, "parallel", None)
    if context is None:
        raise ValueError("guard: the model is in one process, wanted one of several ranks")
    if every < 1:
        raise ValueError(f"guard: every is {every}, wanted 1 or more")
    if has_own_tokens(context):
        raise ValueError(
            "guard: the model has parallel='dp', wanted 'tp': with 'dp' each rank has tokens, and "
            "so streams, of its own"
        )
    watch = _Watch(context, every)
    handles = [model.model.register_forward_hook(watch.end)]
    for i, layer in enumerate(model.model.layers):
        if i == 0:
            handles.append(layer.register_forward_pre_hook(watch.begin))
        handles.append(layer.register_forward_hook(watch.behind(f"model.layers.{i}")))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if watch.compared == 0:
        _logger.warning(
            "guard: no eager step ran, so nothing was compared; wanted a runner with capture=False"
        )


class _Watch:
    """Hashes of the streams in the current step.

    Attributes:
        compared: Number of steps whose hashes were compared.
    """

    def __init__(self, context: ParallelContext, every: int) -> None:
        self.compared = 0
        self._context, self._every = context, every
        self._step = -1
        self._is_watched = False
        self._hashes: dict[str, torch.Tensor] = {}

    def begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Count a step, unless a graph captures it, and hash what the first layer gets."""
        capturing = _is_captured(args[0])
        self._step += not capturing
        self._is_watched = not capturing and self._step % self._every == 0
        self._hashes.clear()
        self._take("model.embed_tokens", args[0])

    def behind(self, name: str) -> Any:
        """Return a hook that hashes the output of a layer."""

        def hook(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            self._take(name, output)

        return hook

    def _take(self, name: str, streams: torch.Tensor) -> None:
        if self._is_watched:
            self._hashes[name] = hash64(streams)

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Compare the hashes of all ranks."""
        if not self._hashes:
            return
        names = list(self._hashes)
        own = torch.stack(list(self._hashes.values()))
        self._hashes.clear()
        hashes = self._context.group.all_gather(own)
        self.compared += 1
        with reported(self._context):
            for rank, theirs in enumerate(hashes):
                differs = (theirs != hashes[0]).nonzero().flatten().tolist()
                if differs:
                    raise StreamsDifferError(
                        f"step {self._step}: the streams behind {names[differs[0]]} differ between "
                        f"rank 0 and rank {rank}, wanted equal bits on all ranks"
                    )


def _is_captured(streams: torch.Tensor) -> bool:
    return streams.is_cuda and torch.cuda.is_current_stream_capturing()


def hash64(values: torch.Tensor) -> torch.Tensor:
    """Return a hash of a tensor's bits: int64 ``[]``, on its device, without waiting for it."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = values.detach().contiguous().view(width[values.element_size()]).flatten().long()
    positions = torch.arange(1, bits.numel() + 1, dtype=torch.int64, device=bits.device)
    # Sums and products of 64 bits wrap around; each place has an odd factor of its own.
    first, second = _MULTIPLIERS
    mixed = (bits + second) * (2 * positions * first + 1)
    mixed = (mixed ^ (mixed >> 29)) * second
    return mixed.sum()
