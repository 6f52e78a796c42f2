"""Helpers that the launches of all GEMMs share."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dsv4.cute.runtime.architectures import ARCHITECTURES
from dsv4.cute.runtime.cubin_cache import image
from dsv4.cute.runtime.driver import Kernel
from dsv4.plans.recorder import current_recorder

_NO_CUTS = (2**31 - 1,) * 3  # rows that there are not: there are at most four segments


def cuts(segments: Sequence[int]) -> tuple[int, ...]:
    """First rows of the second, third and fourth segment."""
    ends = tuple(itertools.accumulate(segments))[:-1]
    return (*ends, *_NO_CUTS[len(ends) :])


@functools.cache
def architecture(device: int) -> str:
    """Return the architecture that kernels of a GPU are compiled for."""
    return ARCHITECTURES[torch.cuda.get_device_capability(device)]


@functools.cache
def loaded(plan: Any, arch: str) -> Kernel:
    """The kernel of a configuration, compiled or from disk, loaded once."""
    return Kernel(image(plan, arch))


def aligned(x: torch.Tensor, tokens: int) -> tuple[torch.Tensor, int, int]:
    """x itself if bulk and TMA copies can read its rows, else a copy.

    Args:
        x: ``[T, K]`` or ``[T, G, K]``, K a multiple of 8.
        tokens: T, above 0.

    Returns:
        x or the copy, its address, and elements between its rows.
    """
    start = x.data_ptr()
    if start % 16 == 0 and x.is_contiguous():
        return x, start, x.numel() // tokens
    strides = x.stride()
    fits = start % 16 == 0 and strides[-1] == 1 and strides[0] > 0 == strides[0] % 8
    fits = fits and (x.dim() == 2 or strides[1] == x.shape[2])
    x = x if fits else x.clone(memory_format=torch.contiguous_format)
    return x, x.data_ptr(), x.stride(0)


def run_noted(
    run: Callable[[int, Sequence[int]], None],
    stream: int,
    tensors: Sequence[torch.Tensor | None],
) -> None:
    """Launch kernels in a way that a tape can repeat.

    Args:
        run: Launches, given the stream and the addresses of the tensors (0 for None). It must
            depend on nothing else but the current thread.
        stream: Stream of the current GPU.
        tensors: What the kernels read and write.
    """
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    recorder = current_recorder()
    if recorder is None:
        run(stream, addresses)
        return
    with recorder.noting(run, tensors):
        run(stream, addresses)


def on(device: int) -> contextlib.AbstractContextManager[Any]:
    """Make a GPU the current one; nothing where it is, which most launches find."""
    is_current = current_device is not None and current_device() == device
    return _HERE if is_current else torch.cuda.device(device)


_HERE = contextlib.nullcontext()

# The handle of a device's current stream, as Triton's launcher asks for it, a tenth of the public
# object; and the index of the current device. A torch without CUDA has neither, nor calls them.
stream_of: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
