"""Reading safetensors shards: what they hold, and single tensors as private copies.

The safetensors package does the reading. Added here: one error that names the file, and handles
that are closed early, because the pages of a mapped file stay in memory until it is unmapped and
reading a checkpoint would otherwise fill the memory with the checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# A shard is unmapped after each of so many parts of it: often enough that few of its pages are in
# memory, seldom enough that parsing the header again costs little beside the reading.
_PARTS = 32


class CheckpointError(ValueError):
    """A checkpoint that cannot be read: the message names the file or tensor and what is wrong."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its file's header describes it: its name, file's name, dtype and shape."""

    name: str
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} ({DTYPE_NAMES[self.dtype]} {list(self.shape)})"


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, whose data must fill it to the last byte.

    Raises:
        CheckpointError: if the file is missing, truncated, not a safetensors file, or holds a
            tensor whose dtype is not one of ``DTYPES``.
    """
    with _open(path) as file:
        return {name: _info(path.name, name, file.get_slice(name)) for name in file.keys()}  # noqa: SIM118


def _open(path: Path) -> safe_open:
    """A handle; the package compares header and length of the file, so damage shows here."""
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.name}: the shard is missing from {path.parent}") from error
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be opened: {error}") from error
    except SafetensorError as error:
        raise CheckpointError(
            f"{path.name}: truncated or not a safetensors file "
            f"({path.stat().st_size} bytes): {error}"
        ) from error


def _info(file: str, name: str, tensor: Any) -> TensorInfo:
    dtype = tensor.get_dtype()
    if dtype not in DTYPES:
        raise CheckpointError(f"{file}: {name} has dtype {dtype}, wanted {', '.join(DTYPES)}")
    return TensorInfo(name, file, DTYPES[dtype], tuple(tensor.get_shape()))


class Shards:
    """The files of one folder, mapped when first read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._handles: dict[str, safe_open] = {}
        self._left: dict[str, int] = {}  # bytes to read before the handle is closed

    def read(
        self, info: TensorInfo, device: torch.device | str = "cpu", part: int | None = None
    ) -> torch.Tensor:
        """A private copy of one tensor, or of ``part`` of it, on ``device``; the file may go.

        Raises:
            CheckpointError: if the file is damaged or no longer what its header was.
        """
        mapped = self._mapped(info)
        copy = (mapped if part is None else mapped[part]).to(device, copy=True)
        del mapped  # a view, which would keep the file mapped
        self._left[info.file] -= copy.nbytes
        if self._left[info.file] <= 0:
            del self._handles[info.file]
        return copy

    def _mapped(self, info: TensorInfo) -> torch.Tensor:
        if info.file not in self._handles:
            path = self.folder / info.file
            self._handles[info.file] = _open(path)
            self._left[info.file] = path.stat().st_size // _PARTS
        try:
            mapped = self._handles[info.file].get_tensor(info.name)
        except SafetensorError as error:
            raise CheckpointError(f"{info.file}: {info} cannot be read: {error}") from error
        if mapped.dtype != info.dtype or mapped.shape != info.shape:
            raise CheckpointError(
                f"{info.file}: has changed since it was opened: {info} is now "
                f"{DTYPE_NAMES.get(mapped.dtype, mapped.dtype)} {list(mapped.shape)}"
            )
        return mapped

    def close(self) -> None:
        """Unmap every file; reading maps them again."""
        self._handles.clear()
