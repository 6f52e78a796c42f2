"""Sum of a token's sorted rows, for ``moe_combine`` and for kernels that go on with the sum.

A program owns columns of a token: it reads those of the token's sorted rows, whose positions are in
``rows``, and sums them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from dsv4.triton._lib import row_tiles
from dsv4.triton._lib.numerics import narrow, widen


@dataclass(frozen=True)
class CombinedRows:
    """A tensor ``[T, H]`` that a kernel adds up from rows of experts, as ``moe_combine`` would.

    Attributes:
        y: ``[T k, H]``, in sorted order, with unit stride along H.
        rows: ``[T, k]``, contiguous, sorted row of each slot.
        offsets: ``[E_local + 1]``, contiguous, first row of each expert.
        weights: ``[T, k]``, contiguous, or None.
        shared: ``[T, H]``, with unit stride along H, or None.
    """

    y: torch.Tensor
    rows: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None
    shared: torch.Tensor | None

    @classmethod
    def of(cls, args: Any) -> CombinedRows:
        """Return the rows of ``MoeCombineArgs``, or of another record with these fields."""
        weights, shared = args.weights, args.shared
        return cls(
            row_tiles.as_rows(args.y),
            args.rows.contiguous(),
            args.offsets.contiguous(),
            None if weights is None else weights.contiguous(),
            None if shared is None else row_tiles.as_rows(shared),
        )

    @property
    def top_k(self) -> int:
        """Rows of a token."""
        return self.rows.shape[1]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What ``load_combined`` takes, as one argument of a kernel."""
        shared_stride = 0 if self.shared is None else self.shared.stride(0)
        experts = self.offsets.shape[0] - 1
        tensors = (self.y, self.rows, self.offsets, self.weights, self.shared)
        return *tensors, self.y.stride(0), shared_stride, experts


@triton.jit
def sum_rows(
    y,
    rows,
    offsets,
    weights,
    shared,
    stride,
    shared_stride,
    experts,
    token,
    column,
    inside,
    K: tl.constexpr,
    dtype: tl.constexpr,
):
    """The sum of a token's K rows at ``column``, rounded to ``dtype``.

    To be compiled without contraction: a product is rounded, then added.
    """
    BLOCK: tl.constexpr = column.shape[0]
    local = tl.load(offsets + experts)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.range(0, K, loop_unroll_factor=min(K, 8)):
        row = tl.load(rows + token * K + j).to(tl.int64)
        # A condition per column: the interpreter takes a mask & a single one for no mask.
        used = (row + tl.zeros([BLOCK], tl.int64)) < local
        term = widen(tl.load(y + row * stride + column, mask=inside & used, other=0.0))
        if weights is not None:
            term *= widen(tl.load(weights + token * K + j))
        total = tl.where(used, total + term, total)
    if shared is not None:
        address = shared + token * shared_stride + column
        total += widen(tl.load(address, mask=inside, other=0.0))
    return narrow(total, dtype)


@triton.jit
def load_combined(combined, token, column, inside, K: tl.constexpr):
    """Sum columns of a token's rows of ``CombinedRows.arguments``, rounded to their dtype."""
    y, rows, offsets, weights, shared, stride, shared_stride, experts = combined
    dtype: tl.constexpr = y.dtype.element_ty
    return sum_rows(
        y,
        rows,
        offsets,
        weights,
        shared,
        stride,
        shared_stride,
        experts,
        token,
        column,
        inside,
        K,
        dtype,
    )
