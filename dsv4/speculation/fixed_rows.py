"""Steps of a fixed number of rows, whose bits do not depend on how many tokens a step has.

A verified step has D + 1 tokens of a sequence where plain decoding has one, and greedy text is the
same with and without drafts only up to ties: kernels, their plans and the order of their sums
follow from the number of rows. Rows of a verified step are those of single-token steps, bit for
bit, under these conditions:

1. Every step has the same number of rows, filled up with padding, so kernels and plans are equal:
   tiles of a GEMM's tokens, splits of K and of attention, paths for few rows.
2. Padding rows have the same content always, and sequence -1, so they write nothing.
3. No kernel adds over rows, nor in an order that a row's place decides. This holds for the kernels
   of this package by construction, and for cuBLAS at one shape as far as is known. On a CPU it
   holds for bfloat16 weights; in float32 and float64 its BLAS treats the last rows of a matrix
   otherwise. It does not hold for plain routed experts on a GPU: without a kernel they are
   multiplied one after another, each at its own number of rows.
4. State that later tokens read is addressed by position (``PagedCache``), so rejected tokens leave
   no trace.

A deterministic runner has one sequence per step, so these are steps of ``D + 1`` rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsv4.kv_cache.batch import Batch


@dataclass(frozen=True)
class FixedRows:
    """Fills steps up to a fixed number of rows.

    Attributes:
        rows: Rows of each step, at least its tokens.
    """

    rows: int

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"FixedRows: rows is {self.rows}, wanted 1 or more")

    def filled(self, values: torch.Tensor, padding: int = 0) -> torch.Tensor:
        """Return values ``[T]`` of a step's tokens with ``padding`` in the missing rows.

        Raises:
            ValueError: if there are more than rows.
        """
        return torch.cat((values, values.new_full((self._missing(values),), padding)))

    def padded(self, batch: Batch) -> Batch:
        """Return the batch with an entry of padding, one of the missing rows each.

        Raises:
            ValueError: if it has more tokens than there are rows.
        """
        missing = self._missing(batch.positions)
        zeros = batch.starts.new_zeros(missing)
        more = torch.arange(1, missing + 1, device=zeros.device)
        return Batch(
            torch.cat((batch.cu_seqlens, batch.cu_seqlens[-1:] + more)),
            torch.cat((batch.starts, zeros)),
            torch.cat((batch.sequences, zeros - 1)),
            torch.cat((batch.positions, zeros)),
            torch.cat((batch.sequence_of_token, zeros - 1)),
        )

    def _missing(self, tokens: torch.Tensor) -> int:
        missing = self.rows - tokens.shape[0]
        if missing < 0:
            raise ValueError(
                f"FixedRows: the step has {tokens.shape[0]} tokens, wanted at most {self.rows}"
            )
        return missing
