"""Read safetensors shards: their headers, and single tensors as private copies.

The safetensors package does the reading. This module adds errors that name the file, and closes
handles early: the pages of a mapped file stay in memory until it is unmapped, so that reading a
checkpoint would fill the memory with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dsv4.config.json_file import irregular
from dsv4.parallel.windows import Window

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
# Number of parts of a shard. It is unmapped after each part: often enough that few of its pages are
# in memory, rarely enough that parsing the header again costs little compared with reading.
_PARTS = 32


# Bounds of a header: the published checkpoint with the most tensors, in one file, would have 22 MB
# and 145,116 of them.
_MAX_HEADER = 32 << 20
_MAX_TENSORS = 200_000


class CheckpointError(ValueError):
    """A checkpoint that cannot be read: the message names the file or tensor and what is wrong."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """A folder that does not exist or holds no config.json; also a FileNotFoundError."""


@dataclass(frozen=True)
class TensorInfo:
    """The description of a tensor in its file's header.

    Attributes:
        name: The tensor's name.
        file: The file's name.
        dtype: Its dtype.
        shape: Its shape, of the window if there is one.
        mark: Value that distinguishes the file from a later one of its name, see ``file_mark``.
        window: The part of the file's tensor that this stands for; None: all of it.
        file_shape: Shape of the file's tensor; None: ``shape``.
    """

    name: str
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    mark: tuple[int, ...] | None = field(default=None, compare=False, repr=False)
    window: Window | None = None
    file_shape: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """The number of bytes of data."""
        return math.prod(self.shape) * self.dtype.itemsize

    def part(self, window: Window) -> TensorInfo:
        """Return the description of a part of this tensor."""
        shape = window.shape(self.shape)
        return replace(self, shape=shape, window=window, file_shape=self.shape)

    def __str__(self) -> str:
        return f"{self.name} ({DTYPE_NAMES[self.dtype]} {list(self.shape)})"


def file_mark(path: Path) -> tuple[int, ...] | None:
    """Return device, number, size and time of change of a file; None if it has no status."""
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


def read_header(path: Path, name: str | None = None) -> dict[str, TensorInfo]:
    """Read the header of a safetensors file, whose data must fill it to the last byte.

    Args:
        path: The file.
        name: Name in messages; the default is the last part of ``path``.

    Raises:
        CheckpointError: if the file is missing, no regular file, truncated, not a safetensors file,
            has a header longer than any published one, or holds a tensor whose dtype is not one of
            ``DTYPES``.
    """
    name = name or path.name
    mark = file_mark(path)
    _check_header(path, name)
    with _open(path, name) as file:
        return {key: _info(name, key, file.get_slice(key), mark) for key in file.keys()}  # noqa: SIM118


def _check_header(path: Path, name: str) -> None:
    """Raise if a header would take long or much memory to open, before it is opened."""
    try:
        kind = irregular(path.stat().st_mode)
        if kind is not None:
            raise CheckpointError(f"{name}: cannot be opened: it is {kind}, wanted a regular file")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MAX_HEADER:
                raise CheckpointError(
                    f"{name}: truncated or not a safetensors file: its header would have {length} "
                    f"bytes, wanted at most {_MAX_HEADER}"
                )
            header = file.read(length)
    except FileNotFoundError as error:
        raise CheckpointError(f"{name}: the shard is missing from {path.parent}") from error
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be opened: {error}") from error
    tables = header.count(b"{")
    if tables > _MAX_TENSORS:
        raise CheckpointError(
            f"{name}: its header names {tables} tensors, wanted at most {_MAX_TENSORS}"
        )


def _open(path: Path, name: str) -> safe_open:
    """Open a handle; the package compares header and length of the file and finds damage."""
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise CheckpointError(f"{name}: the shard is missing from {path.parent}") from error
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be opened: {error}") from error
    except SafetensorError as error:
        mark = file_mark(path)
        size = mark[2] if mark else 0
        raise CheckpointError(
            f"{name}: truncated or not a safetensors file ({size} bytes): {str(error)[:300]}"
        ) from error


def _info(file: str, name: str, tensor: Any, mark: tuple[int, ...] | None) -> TensorInfo:
    dtype = tensor.get_dtype()
    if dtype not in DTYPES:
        raise CheckpointError(f"{file}: {name} has dtype {dtype}, wanted {', '.join(DTYPES)}")
    return TensorInfo(name, file, DTYPES[dtype], tuple(tensor.get_shape()), mark)


class Shards:
    """The files of one folder, mapped when first read.

    Args:
        folder: The folder.
        paths: Paths of files that are elsewhere, by name.

    Attributes:
        bytes_read: Bytes of all tensors that were read.
    """

    def __init__(self, folder: Path, paths: Mapping[str, Path] | None = None) -> None:
        self.folder = folder
        self._paths = dict(paths or {})
        self._handles: dict[str, safe_open] = {}
        self.bytes_read = 0
        self._left: dict[str, int] = {}  # bytes to read before the handle is closed

    def read(
        self, info: TensorInfo, device: torch.device | str = "cpu", part: int | None = None
    ) -> torch.Tensor:
        """Copy one tensor, or ``part`` of it, to ``device``; the file may then be removed.

        Raises:
            CheckpointError: if the file is damaged or was replaced since its header was read.
        """
        mapped = self._mapped(info)
        if info.window is not None:
            mapped = mapped[info.window.index]
        view = mapped if part is None else mapped[part]
        copy = view.to(device, copy=True, memory_format=torch.contiguous_format)
        self.bytes_read += copy.nbytes
        del mapped, view  # this view would keep the file mapped
        self._left[info.file] -= copy.nbytes
        if self._left[info.file] <= 0:
            del self._handles[info.file]
        return copy

    def _mapped(self, info: TensorInfo) -> torch.Tensor:
        if info.file not in self._handles:
            path = self._paths.get(info.file, self.folder / info.file)
            self._handles[info.file] = self._sound(info, path)
            self._left[info.file] = info.mark[2] // _PARTS if info.mark else 0
        try:
            mapped = self._handles[info.file].get_tensor(info.name)
        except SafetensorError as error:
            raise CheckpointError(f"{info.file}: {info} cannot be read: {error}") from error
        if mapped.dtype != info.dtype or mapped.shape != (info.file_shape or info.shape):
            raise CheckpointError(
                f"{info.file}: has changed since it was opened: {info} is now "
                f"{DTYPE_NAMES.get(mapped.dtype, mapped.dtype)} {list(mapped.shape)}"
            )
        return mapped

    @staticmethod
    def _sound(info: TensorInfo, path: Path) -> safe_open:
        """Return a handle of the file whose header was read, not of a later one of its name.

        Tensors of two files of one name would make a mixture of two models.
        """
        # Before, because a pipe would block; after, because a mapped file does not change any more.
        changed = info.mark is not None and file_mark(path) != info.mark
        handle = None if changed else _open(path, info.file)
        if handle is None or (info.mark is not None and file_mark(path) != info.mark):
            raise CheckpointError(
                f"{info.file}: has changed since it was opened, when {info} was in it: "
                "open the checkpoint again"
            )
        return handle

    def close(self) -> None:
        """Unmap every file; reading maps them again."""
        self._handles.clear()
