"""Write safetensors shards as a stream.

The safetensors package reads the shards (``dsv4.checkpoint.shards``), but can only serialise a
whole shard from memory; here a tensor is written as it comes and need not be held.
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch

from dsv4.checkpoint.shards import DTYPE_NAMES
from dsv4.checkpoint.transaction import INDEX, SINGLE, Transaction

# Bytes set aside for a shard's header; a shard whose header would be longer is closed early.
_HEADER_BYTES = 1 << 20


class ShardWriter:
    """Writes tensors one by one into safetensors shards of a folder.

    Memory holds one tensor at a time, and tensors of odd length, which are written at the end of
    their shard so that every tensor starts at a multiple of its item size. The folder does not
    change until ``finish``, which replaces the checkpoint in it as one step: see
    ``dsv4.checkpoint.transaction``. One file is ``model.safetensors``; several are
    ``model-<i>-of-<n>.safetensors`` with an index.

    Raises:
        FileExistsError: if the folder holds a checkpoint and ``overwrite`` is false, or a file or
            folder is in the way.
        BlockingIOError: if another save into the folder is under way.
    """

    def __init__(
        self, folder: str | Path, *, max_shard_bytes: int = 5 << 30, overwrite: bool = False
    ) -> None:
        if max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes is {max_shard_bytes}, wanted at least 1")
        self.max_shard_bytes = max_shard_bytes
        self.names: dict[str, int] = {}
        self.total = 0
        self._drafts: list[str] = []
        self._open: _Shard | None = None
        self._files = Transaction(Path(folder), overwrite)

    @property
    def folder(self) -> Path:
        """Return where the checkpoint goes."""
        return self._files.folder

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.close()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append one tensor.

        Raises:
            ValueError: if the name was written before.
        """
        if name in self.names:
            raise ValueError(f"{name} is written twice")
        if self._open is not None and self._open.is_full(name, tensor, self.max_shard_bytes):
            self._close_shard()
        if self._open is None:
            self._drafts.append(f"shard-{len(self._drafts):05d}")
            self._open = _Shard(self._files.create(self._drafts[-1]))
        self.names[name] = len(self._drafts)
        self.total += tensor.numel() * tensor.element_size()
        self._open.add(name, tensor)

    def _close_shard(self) -> None:
        if self._open is not None:
            self._open.complete()
            self._files.close_file(self._open.file)
            self._open = None

    def finish(self, documents: dict[str, Any]) -> None:
        """Write the index and ``documents`` (name to JSON value) and replace the old checkpoint.

        Raises:
            FileExistsError: if a file that is not the old checkpoint's is in the way.
        """
        self._close_shard()
        count = len(self._drafts)
        finals = [SINGLE]
        if count != 1:
            finals = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
            index = {
                "metadata": {"total_size": self.total},
                "weight_map": {name: finals[i - 1] for name, i in self.names.items()},
            }
            documents = {INDEX: index, **documents}
        for draft, final in zip(self._drafts, finals, strict=True):
            self._files.rename(draft, final)
        for name, value in documents.items():
            file = self._files.create(name)
            file.write((json.dumps(value, indent=2) + "\n").encode())
            self._files.close_file(file)
        self._files.commit([*finals, *documents])


class _Shard:
    """One file being written: space for the header, then data, then the header in that space."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.file.write(b" " * (8 + _HEADER_BYTES))
        self.rows: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self.header_bytes = 64
        self.data_bytes = 0
        self.waiting: list[tuple[str, torch.Tensor]] = []
        self.waiting_bytes = 0

    @staticmethod
    def _row_bytes(name: str, tensor: torch.Tensor) -> int:
        return len(json.dumps(name)) + 110 + 12 * tensor.dim()

    def is_full(self, name: str, tensor: torch.Tensor, limit: int) -> bool:
        size = tensor.numel() * tensor.element_size()
        if self.data_bytes + self.waiting_bytes + size > limit:
            return self.data_bytes + self.waiting_bytes > 0
        return self.header_bytes + self._row_bytes(name, tensor) > _HEADER_BYTES

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.header_bytes += self._row_bytes(name, tensor)
        size = tensor.numel() * tensor.element_size()
        if size % 8:
            self.waiting.append((name, tensor.detach().cpu().clone()))
            self.waiting_bytes += size
        else:
            self._write(name, tensor)

    def _write(self, name: str, tensor: torch.Tensor) -> None:
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        if flat.numel():
            # The bytes without a copy: torch offers the buffer protocol through numpy only.
            self.file.write((ctypes.c_char * flat.numel()).from_address(flat.data_ptr()))
        stop = self.data_bytes + flat.numel()
        self.rows[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self.data_bytes, stop],
        }
        self.data_bytes = stop

    def complete(self) -> None:
        """Write the tensors that were held back, and the header."""
        for name, tensor in sorted(self.waiting, key=lambda item: -item[1].element_size()):
            self._write(name, tensor)
        self.waiting = []
        header = json.dumps(self.rows, separators=(",", ":")).encode()
        assert len(header) <= _HEADER_BYTES, "the estimate of a row's length is too small"
        self.file.seek(0)
        self.file.write(_HEADER_BYTES.to_bytes(8, "little") + header)
