"""What the launches of all products share."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dsv4.cute._architectures import ARCHITECTURES
from dsv4.cute._driver import Kernel, Parameters
from dsv4.cute._images import image

_NO_CUTS = (2**31 - 1,) * 3  # rows that there are not: there are at most four segments


class Prepared(NamedTuple):
    """A launch but for its addresses and stream."""

    kernel: Kernel
    blocks: int
    kinds: Parameters
    before: bytes
    after: bytes
    matrix: tuple[int, ...]  # rows, columns, stride and box of X, where tensor copies read it


def cuts(segments: Sequence[int]) -> tuple[int, ...]:
    """First rows of the second, third and fourth segment."""
    ends = tuple(itertools.accumulate(segments))[:-1]
    return (*ends, *_NO_CUTS[len(ends) :])


@functools.cache
def architecture(device: int) -> str:
    """What kernels of a GPU are compiled for."""
    return ARCHITECTURES[torch.cuda.get_device_capability(device)]


@functools.cache
def loaded(plan: Any, arch: str) -> Kernel:
    """The kernel of a configuration, compiled or from disk, loaded once."""
    return Kernel(image(plan, arch))


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x itself if bulk and tensor copies can read its rows, else a copy."""
    strides = x.stride()
    fits = x.data_ptr() % 16 == 0 and strides[-1] == 1 and strides[0] > 0 == strides[0] % 8
    fits = fits and (x.dim() == 2 or strides[1] == x.shape[2])
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def stream_of(index: int) -> int:
    """The current stream's handle; what Triton's launcher calls, a tenth of the public object."""
    return torch._C._cuda_getCurrentRawStream(index)
