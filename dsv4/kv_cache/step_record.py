"""Records to undo an unfinished step of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from dsv4.kv_cache.page_tables import PageTable, TableRecord, to_device
from dsv4.kv_cache.row_counts import RowCount

if TYPE_CHECKING:
    from dsv4.kv_cache.batch import Batch


@dataclass(frozen=True, eq=False)
class SavedRows:
    """Saved rows of a tensor.

    Attributes:
        tensor: The tensor that they belong to.
        dim: Dimension along which they are counted.
        rows: ``[R]`` int64.
        values: Their saved values.
    """

    tensor: torch.Tensor
    dim: int
    rows: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor, dim: int, rows: torch.Tensor) -> SavedRows:
        """Copy rows, in stream order."""
        return cls(tensor, dim, rows, tensor.index_select(dim, rows))

    def restore(self) -> None:
        """Write them back."""
        self.tensor.index_copy_(self.dim, self.rows, self.values)


@dataclass(eq=False)
class StepRecord:
    """The changes that one ``PagedCache.prepare`` and the step after it make.

    Attributes:
        tables: Page tables and their old state, in the order of the changes.
        counts: Tokens of each row before.
        grown: Rows of the step before.
        saved: Contents that the step overwrites although they are needed to repeat it.
        batch: The batch whose lengths were advanced, or None.
    """

    counts: dict[int, RowCount]
    grown: frozenset[int]
    tables: list[tuple[PageTable, TableRecord]] = field(default_factory=list)
    saved: list[SavedRows] = field(default_factory=list)
    batch: Batch | None = None


def save(
    tensors: Sequence[torch.Tensor], dim: int, rows: Sequence[int] | torch.Tensor
) -> list[SavedRows]:
    """Copy the same rows of some tensors."""
    if len(rows) == 0 or not tensors:
        return []
    there = rows if isinstance(rows, torch.Tensor) else to_device(rows, tensors[0].device)
    return [SavedRows.of(tensor, dim, there) for tensor in tensors]
