"""Rows of the routed experts, whose sum for each token is the output of an expert block."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4.ops.moe import moe_combine


class RoutedRows(NamedTuple):
    """What ``moe_combine`` adds up; the fields are its arguments in their order.

    A hyper-connection can add it up while it writes streams back.

    Attributes:
        y: ``[T k, H]``, in sorted order.
        rows: int32 ``[T, k]``, sorted row of each slot.
        offsets: int32 ``[E_local + 1]``, first row of each expert.
        weights: ``[T, k]``, or None.
        shared: ``[T, H]``, the shared expert's result, or None.
    """

    y: torch.Tensor
    rows: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None
    shared: torch.Tensor | None

    def combined(self) -> torch.Tensor:
        """Return the sums, ``[T, H]`` in the dtype of ``y``."""
        return moe_combine(self.y, self.rows, self.offsets, self.weights, shared=self.shared)
