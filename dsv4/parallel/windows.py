"""Parts of tensors: ranges of one axis, as ranges of codes and block scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dsv4.parallel.context import ParallelContext
from dsv4.parallel.split import Axis, share
from dsv4.quant.formats import Format, QuantizedTensor


@dataclass(frozen=True)
class Window:
    """A range of one axis of a tensor.

    Attributes:
        axis: The axis, not negative.
        start: First index.
        stop: Index behind the last.
    """

    axis: int
    start: int
    stop: int

    @property
    def index(self) -> tuple[slice, ...]:
        """The index that takes the range out of a tensor."""
        return (*[slice(None)] * self.axis, slice(self.start, self.stop))

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the range of a tensor."""
        return (*whole[: self.axis], self.stop - self.start, *whole[self.axis + 1 :])

    def scaled(self, divisor: int) -> Window:
        """Return the range in a tensor whose elements stand for ``divisor`` elements each."""
        return Window(self.axis, self.start // divisor, -(-self.stop // divisor))


@dataclass(frozen=True)
class MatrixWindows:
    """The ranges of a matrix's codes, or plain values, and of its block scales."""

    weight: Window
    scales: Window


def window_of(axis: Axis, shape: tuple[int, ...], context: ParallelContext) -> Window | None:
    """Return a rank's range of a logical tensor; None if it is the whole tensor."""
    if axis is Axis.WHOLE:
        return None
    number = len(shape) - 1 if axis is Axis.COLUMNS else 0
    part = share(shape[number], context)
    return Window(number, part.start, part.stop)


def matrix_windows(window: Window, fmt: Format | None) -> MatrixWindows:
    """Return the ranges of codes and block scales for a range of a matrix ``[N, K]``."""
    if fmt is None:
        return MatrixWindows(window, window)
    per_code = 2 if fmt.packed and window.axis == 1 else 1
    return MatrixWindows(window.scaled(per_code), window.scaled(fmt.block[window.axis]))


def part_of(value: Any, axis: Axis, context: ParallelContext) -> Any:
    """Copy a rank's part of a plain or a quantised matrix in the linear layout."""
    window = window_of(axis, tuple(value.shape), context)
    if window is None:
        return value.clone() if isinstance(value, torch.Tensor) else value
    if isinstance(value, torch.Tensor):
        return value[window.index].clone(memory_format=torch.contiguous_format)
    windows = matrix_windows(window, value.format)
    codes, scales = (
        _bytes(tensor)[own.index].contiguous().view(tensor.dtype)
        for tensor, own in ((value.codes, windows.weight), (value.scales, windows.scales))
    )
    return QuantizedTensor(codes, scales, value.global_scale, value.format)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor of one-byte elements as bytes: not every operation exists for 8-bit floats."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
