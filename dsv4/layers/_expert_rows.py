"""How the tensors of one expert lie in a row of host memory, and those of all slots on a GPU.

A row is one piece: codes, block scales and global scales of gate, up and down one after another, so
that an expert is loaded by one contiguous read. GEMMs want each tensor of all slots together, so
the memory of the slots is a region per tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

_ALIGNMENT = 256  # bytes of regions and rows
_VECTOR = 16
_WORD = 4
_CHUNK_WORDS = 2048  # that a CTA of the loading kernel copies at a time


@dataclass(frozen=True)
class Part:
    """A tensor of an expert.

    Attributes:
        name: Its parameter or buffer.
        shape: Shape of one expert's.
        dtype: Its dtype.
        start: First byte in a row.
        region: First byte of slot 0 in the memory of the slots.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    region: int

    @property
    def nbytes(self) -> int:
        """Bytes of one expert's."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ExpertRows:
    """The layout of rows and slots.

    Attributes:
        parts: Tensors of an expert: those of whole 16 bytes first.
        slots: Number of slots.
        row_bytes: Bytes of a row.
        slot_bytes: Bytes of the memory of all slots.
    """

    parts: tuple[Part, ...]
    slots: int
    row_bytes: int
    slot_bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], slots: int) -> ExpertRows:
        """Return the layout for tensors ``[E, ...]``.

        Raises:
            ValueError: if a tensor of an expert is not a whole number of 4-byte words.
        """
        sizes = {
            name: tensor[0].numel() * tensor.element_size() for name, tensor in tensors.items()
        }
        for name, nbytes in sizes.items():
            if nbytes % _WORD:
                raise ValueError(
                    f"host_experts: {name} of an expert has {nbytes} bytes, wanted a multiple of 4"
                )
        names = sorted(sizes, key=lambda name: sizes[name] % _VECTOR != 0)
        parts, start = [], 0
        for name in names:
            tensor = tensors[name]
            parts.append(Part(name, tuple(tensor.shape[1:]), tensor.dtype, start, 0))
            start += sizes[name]
        return cls(tuple(parts), 0, _aligned(start), 0).with_slots(slots)

    def with_slots(self, slots: int) -> ExpertRows:
        """Return the layout of the same rows with another number of slots."""
        parts, region = [], 0
        for part in self.parts:
            parts.append(replace(part, region=region))
            region = _aligned(region + slots * part.nbytes)
        return ExpertRows(tuple(parts), slots, self.row_bytes, region)

    def in_slots(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors ``[slots, ...]`` of the memory of the slots, by name.

        They share its bytes but count their own versions: loading an expert is no change of a
        model's weights, for which graphs would be captured again.
        """
        tensors = {}
        with torch.inference_mode(False):
            for part in self.parts:
                shape = (self.slots, *part.shape)
                tensor = torch.empty(0, dtype=part.dtype, device=memory.device)
                first = (memory.storage_offset() + part.region) // part.dtype.itemsize
                tensors[part.name] = tensor.set_(
                    memory.untyped_storage(), first, shape, _contiguous(shape)
                )
        return tensors

    def in_row(self, row: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors of an expert in its row, by name; views."""
        return {
            part.name: row[part.start : part.start + part.nbytes].view(part.dtype).view(part.shape)
            for part in self.parts
        }

    def chunks(self, device: torch.device) -> torch.Tensor:
        """Return the table of ``expert_gather``; layers of one layout share it."""
        return _chunks(self, device)


@functools.lru_cache(maxsize=64)
def _chunks(rows: ExpertRows, device: torch.device) -> torch.Tensor:
    table = []
    for part in rows.parts:
        words = part.nbytes // _WORD
        step = words if device.type == "cpu" else _CHUNK_WORDS
        for first in range(0, words, max(step, 1)):
            size = min(step, words - first)
            row, slot = part.start // _WORD + first, part.region // _WORD + first
            table.append((row, slot, words, size))
    with torch.inference_mode(False):
        return torch.tensor(table, dtype=torch.int32, device="cpu").to(device)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
