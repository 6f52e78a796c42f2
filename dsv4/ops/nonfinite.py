"""Find the first row of a tensor with a value that is not finite."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4.ops import _check
from dsv4.ops._library import Written, define
from dsv4.ops._plans import planned

NO_ROW = 2**31 - 1  # a mark of a tensor whose values are all finite


class MarkNonfiniteArgs(NamedTuple):
    """Arguments of ``mark_nonfinite_``: lower a mark to the first row that is not finite.

    Attributes:
        mark: ``[1]`` int32; changed.
        x: ``[T, ...]`` floating.
        padding: ``[T]`` bool, True for rows that do not count; None: all rows count.
        first_row: Number of the first row of x.
    """

    mark: Written
    x: torch.Tensor
    padding: torch.Tensor | None
    first_row: int


def _fake(args: MarkNonfiniteArgs) -> None:
    return None


_mark_nonfinite_ = define("mark_nonfinite_", MarkNonfiniteArgs, _fake)


@planned
def mark_nonfinite_(
    mark: torch.Tensor,
    x: torch.Tensor,
    padding: torch.Tensor | None = None,
    *,
    first_row: int = 0,
    backend: str = "auto",
) -> None:
    """``mark = min(mark, first_row + t)`` of the first row t of ``x`` with a NaN or an infinity.

    Nothing is read on the host, so a CUDA graph can hold the call. A mark that is ``NO_ROW`` at
    first still is after any number of calls whose rows were finite.

    Args:
        mark: ``[1]`` int32; changed.
        x: ``[T, ...]``, bfloat16, float16, float32 or float64.
        padding: ``[T]`` bool, True for rows that do not count; None: all rows count.
        first_row: Number of the first row, at least 0.
        backend: Implementation name, see ``dsv4.dispatch``.

    Raises:
        TypeError: if a dtype differs.
        ValueError: if ``x`` has no axis, a shape does not fit, ``first_row`` is negative, or a
            tensor is on another device.
    """
    op = "mark_nonfinite_"
    _check.tensors(
        op,
        ("mark", mark, (torch.int32,), (1,)),
        ("x", x, _check.FLOATS, None),
        ("padding", padding, (torch.bool,), ("T",)),
    )
    if x.ndim == 0:
        raise ValueError(f"{op}: x has shape [], wanted [T, ...]")
    if padding is not None:
        _check.shape(op, "padding", padding, [x.shape[0]])
    if first_row < 0:
        raise ValueError(f"{op}: first_row is {first_row}, wanted at least 0")
    _mark_nonfinite_(MarkNonfiniteArgs(mark, x, padding, first_row), backend)
