"""Options that say how the values of a checkpoint become those of a model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch

from dsv4.checkpoint import names
from dsv4.checkpoint.entries import Entry
from dsv4.checkpoint.mxfp4 import Conversion, to_nvfp4
from dsv4.checkpoint.shards import CheckpointError
from dsv4.quant.formats import MXFP4, NVFP4, QuantizedTensor

Matrix = torch.Tensor | QuantizedTensor


@dataclass(frozen=True)
class Options:
    """Options of filling: see ``dsv4.checkpoint.fill``.

    Attributes:
        conversion: Counts of the conversions by ``mxfp4``.
    """

    device: torch.device | None = None
    dtype: torch.dtype | None = None
    activation: str = "bf16"
    mxfp4: str = "keep"
    input_scales: str = "stored"
    float32: Collection[str] = ()
    conversion: Conversion = field(default_factory=Conversion)

    def plain_dtype(self, name: str, stored: torch.dtype) -> torch.dtype:
        """Return the dtype of a plain tensor in memory."""
        if not stored.is_floating_point:
            return torch.int64
        dtype = self.dtype or stored
        if names.is_float32(name) or name in self.float32:
            return torch.promote_types(dtype, torch.float32)
        return torch.promote_types(dtype, stored) if names.is_norm(name) else dtype

    def format_of(self, entry: Entry) -> str | None:
        """Return the name of the format an entry has in memory, None if plain."""
        if entry.format is None:
            return None
        return NVFP4.name if self.converts(entry) else entry.format.name

    def scale_dtype(self, entry: Entry) -> torch.dtype | None:
        """Return the dtype of the block scales that an entry has in memory, None if plain."""
        return NVFP4.scale_dtypes[0] if self.converts(entry) else entry.scale_dtype

    def converts(self, entry: Entry) -> bool:
        """Return whether an entry is to become NVFP4 if that is possible."""
        return self.mxfp4 != "keep" and entry.format == MXFP4

    def read(self, entry: Entry, device: torch.device) -> Matrix:
        """Read an entry in the dtype it has in memory, or in the format it is stored in."""
        value = entry.read(device)
        if isinstance(value, torch.Tensor):
            return narrowed(value, self.plain_dtype(entry.name, value.dtype), str(entry.weight))
        return value

    def converted(self, entry: Entry, value: QuantizedTensor) -> QuantizedTensor | None:
        """Convert an MXFP4 value to NVFP4, rounded if requested; None if rounding is needed."""
        exact = to_nvfp4(value)
        if exact is None:
            self.conversion.inexact.append(entry.weight.name)
            return to_nvfp4(value, rounds=True) if self.mxfp4 == "nvfp4" else None
        return exact


def narrowed(value: torch.Tensor, dtype: torch.dtype, what: str) -> torch.Tensor:
    """Cast a tensor to another dtype.

    Raises:
        CheckpointError: if a finite value is beyond the range of a narrower dtype.
    """
    out = value.to(dtype)
    if not dtype.is_floating_point or torch.finfo(dtype).max >= torch.finfo(value.dtype).max:
        return out
    if bool((torch.isinf(out) & torch.isfinite(value)).any()):
        largest = value[torch.isfinite(value)].abs().max().item()
        raise CheckpointError(
            f"{what} holds {largest:g}, which {dtype} cannot, wanted at most "
            f"{torch.finfo(dtype).max:g} or another dtype"
        )
    return out
