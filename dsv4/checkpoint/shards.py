"""Read safetensors shards: their headers, and single tensors as private copies.

The safetensors package reads and checks headers. Data is read, not mapped: faults of mapped pages
take longer than copying, an error of the disk would end the process, and the pages of a mapped file
count as its memory. Errors name file and tensor.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from dsv4.checkpoint.read_ahead import ReadAhead, Slabs, Span
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
_SCRATCH_BYTES = 4 << 20  # of whole rows, of which a window's columns are kept

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
        offset: Position in the file of the first byte of the file's tensor.
    """

    name: str
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    mark: tuple[int, ...] | None = field(default=None, compare=False, repr=False)
    window: Window | None = None
    file_shape: tuple[int, ...] | None = None
    offset: int = field(default=0, compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """The number of bytes of data."""
        return math.prod(self.shape) * self.dtype.itemsize

    def part(self, window: Window) -> TensorInfo:
        """Return the description of a part of this tensor."""
        shape = window.shape(self.shape)
        return replace(self, shape=shape, window=window, file_shape=self.shape)

    def span(self, part: int | None = None) -> Span:
        """Return where the bytes are, of the whole or of matrix ``part`` of a stack."""
        shape, window, offset = self.file_shape or self.shape, self.window, self.offset
        if part is not None:
            if window is not None and window.axis == 0:
                part, window = part + window.start, None
            shape = shape[1:]
            offset += part * math.prod(shape) * self.dtype.itemsize
            if window is not None:
                window = replace(window, axis=window.axis - 1)
        if window is None:
            return Span(self.file, offset, math.prod(shape) * self.dtype.itemsize, tensor=self)
        rows = math.prod(shape[: window.axis])
        element = math.prod(shape[window.axis + 1 :]) * self.dtype.itemsize
        offset += window.start * element
        size, stride = (window.stop - window.start) * element, shape[window.axis] * element
        if rows == 1 or size == stride:
            return Span(self.file, offset, rows * size, tensor=self)
        return Span(self.file, offset, size, rows, stride, tensor=self)

    def __str__(self) -> str:
        return f"{self.name} ({DTYPE_NAMES[self.dtype]} {list(self.shape)})"


def file_mark(path: Path) -> tuple[int, ...] | None:
    """Return device, number, size and time of change of a file; None if it has no status."""
    try:
        info = path.stat()
    except OSError:
        return None
    return _mark(info)


def _mark(info: os.stat_result) -> tuple[int, ...]:
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
    position = _check_header(path, name)
    infos: dict[str, TensorInfo] = {}
    with _open(path, name) as file:
        for key in file.offset_keys():  # the package has checked that they are without a gap
            infos[key] = _info(name, key, file.get_slice(key), mark, position)
            position += infos[key].nbytes
        keys = file.keys()
    if mark is not None and position != mark[2]:
        raise CheckpointError(f"{name}: has changed while its header was read")
    return {key: infos[key] for key in keys}


def _check_header(path: Path, name: str) -> int:
    """Return where the data begins; raise if opening the file would take long or much memory."""
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
    return 8 + length


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


def _info(
    file: str, name: str, tensor: Any, mark: tuple[int, ...] | None, offset: int
) -> TensorInfo:
    dtype = tensor.get_dtype()
    if dtype not in DTYPES:
        raise CheckpointError(f"{file}: {name} has dtype {dtype}, wanted {', '.join(DTYPES)}")
    shape = tuple(tensor.get_shape())
    return TensorInfo(name, file, DTYPES[dtype], shape, mark, offset=offset)


class Reading(NamedTuple):
    """A call of ``Shards.read``: the tensor, and the matrix of a stack or None."""

    tensor: TensorInfo
    part: int | None = None

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        info = self.tensor
        return info.nbytes if self.part is None else info.nbytes // info.shape[0]


class ShardReader:
    """Reads spans of the files of a folder, for one thread; it keeps the last file open.

    Args:
        path_of: Returns the path of a file.
    """

    def __init__(self, path_of: Callable[[str], Path]) -> None:
        self._path_of = path_of
        self._file: FileIO | None = None
        self._name = ""

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; reading opens it again."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def read(self, run: Sequence[Span], memory: torch.Tensor) -> None:
        """Read one span, or several adjacent ones, to ``memory``, uint8 of their size.

        Raises:
            CheckpointError: if the file cannot be read, or was replaced or changed since its header
                was read.
        """
        first = run[0]
        if first.rows == 1:
            self._read(run, first.offset, memory)
            return
        rows = memory.view(first.rows, first.row_bytes)
        step = max(1, _SCRATCH_BYTES // first.stride)
        for row in range(0, first.rows, step):
            target = rows[row : row + step]
            size = (len(target) - 1) * first.stride + first.row_bytes
            scratch = torch.empty(size, dtype=torch.uint8, device="cpu")
            self._read(run, first.offset + row * first.stride, scratch)
            target.copy_(scratch.as_strided(tuple(target.shape), (first.stride, 1)))

    def _read(self, run: Sequence[Span], offset: int, memory: torch.Tensor) -> None:
        """Read adjacent bytes; ``run`` has the tensors for messages."""
        info = run[0].tensor
        try:
            file = self._opened(info)
            left = _view(memory)
            while left:
                count = _read_at(file, offset, left)
                if not count:
                    raise _changed(info)
                left, offset = left[count:], offset + count
            # After, so that what changed until now is found.
            if info.mark is not None and _mark(os.fstat(file.fileno())) != info.mark:
                raise _changed(info)
        except OSError as error:
            names = str(info) if len(run) == 1 else f"{info} to {run[-1].tensor}"
            raise CheckpointError(f"{info.file}: {names} cannot be read: {error}") from error

    def _opened(self, info: TensorInfo) -> FileIO:
        """Return the file, open; ``_read`` compares it with the one whose header was read.

        Tensors of two files of one name would make a mixture of two models.
        """
        if self._file is None or self._name != info.file:
            self.close()
            path = self._path_of(info.file)
            # Before, because a pipe would block.
            if info.mark is not None and file_mark(path) != info.mark:
                raise _changed(info)
            try:
                self._file, self._name = FileIO(path), info.file
            except FileNotFoundError:
                raise _changed(info) from None
        return self._file


def _read_at(file: FileIO, offset: int, memory: memoryview) -> int:
    """Read bytes, not by the file's position where possible: forked processes share it."""
    if hasattr(os, "preadv"):
        return os.preadv(file.fileno(), [memory], offset)
    file.seek(offset)
    return file.readinto(memory)


def _changed(info: TensorInfo) -> CheckpointError:
    return CheckpointError(
        f"{info.file}: has changed since it was opened, when {info} was in it: "
        "open the checkpoint again"
    )


def _view(memory: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, which has to outlive them."""
    return memoryview((ctypes.c_char * memory.nbytes).from_address(memory.data_ptr())).cast("B")


class Shards:
    """The files of one folder, opened when first read.

    Args:
        folder: The folder.
        paths: Paths of files that are elsewhere, by name.

    Attributes:
        bytes_read: Bytes of all tensors that were read.
    """

    def __init__(self, folder: Path, paths: Mapping[str, Path] | None = None) -> None:
        self.folder = folder
        self._paths = dict(paths or {})
        self.bytes_read = 0
        self._ahead: ReadAhead | None = None
        self._reader = ShardReader(self._path_of)
        self._lock = threading.Lock()  # of the reader's position, and of the one who is ahead

    def _path_of(self, file: str) -> Path:
        return self._paths.get(file, self.folder / file)

    def read(
        self, info: TensorInfo, device: torch.device | str = "cpu", part: int | None = None
    ) -> torch.Tensor:
        """Copy one tensor, or ``part`` of it, to ``device``; the file may then be removed.

        Copies to a GPU are parts of its current stream.

        Raises:
            CheckpointError: if the file is damaged or was replaced since its header was read.
        """
        shape = info.shape if part is None else info.shape[1:]
        copy = torch.empty(shape, dtype=info.dtype, device=device)
        data = copy.view(-1).view(torch.uint8)
        with self._lock:
            start = 0
            for piece in self._pieces(Reading(info, part)):
                self._copy(piece, data[start : start + piece.nbytes])
                start += piece.nbytes
            self.bytes_read += copy.nbytes
        return copy

    @contextmanager
    def reading_ahead(
        self, plan: Iterable[Reading], slabs: Slabs, device: torch.device
    ) -> Iterator[None]:
        """Read what a plan lists in threads, before ``read`` is called for it.

        ``read`` returns the same for any plan.

        Args:
            plan: Calls of ``read`` in their order.
            slabs: Memory for what was read and not requested yet.
            device: Device of most calls.
        """
        assert self._ahead is None, "files are read ahead already"
        most = slabs.slab_bytes
        spans = [piece for reading in plan for piece in _pieces_of(reading, most)]
        with ReadAhead(
            spans, slabs, lambda: ShardReader(self._path_of), device=device
        ) as self._ahead:
            try:
                yield
            finally:
                with self._lock:
                    self._ahead = None

    def _pieces(self, reading: Reading) -> Iterator[Span]:
        most = reading.tensor.nbytes if self._ahead is None else self._ahead.slabs.slab_bytes
        return _pieces_of(reading, most)

    def _copy(self, piece: Span, target: torch.Tensor) -> None:
        """Copy bytes that were read ahead, or read them now."""
        if self._ahead is not None and self._ahead.copy_to(piece, target):
            return
        memory = target if target.device.type == "cpu" else torch.empty_like(target, device="cpu")
        self._reader.read([piece], memory)
        if memory is not target:
            target.copy_(memory)

    def close(self) -> None:
        """Close the files; reading opens them again."""
        with self._lock:
            self._reader.close()


def _pieces_of(reading: Reading, most: int) -> Iterator[Span]:
    """Yield where the bytes of a call of ``read`` are, in pieces of at most ``most`` bytes."""
    span = reading.tensor.span(reading.part)
    return span.pieces(most) if span.nbytes else iter(())
