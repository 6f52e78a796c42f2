"""An open checkpoint: the tensors of a folder, each read on request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from dsv4.checkpoint import bounds, names
from dsv4.checkpoint.entries import group
from dsv4.checkpoint.folder import open_folder
from dsv4.checkpoint.items import Item
from dsv4.checkpoint.read_ahead import Slabs
from dsv4.checkpoint.shards import Reading, Shards, TensorInfo
from dsv4.config import ModelConfig, config_json
from dsv4.quant.formats import QuantizedTensor


class Checkpoint:
    """The tensors of a folder, none of them read yet.

    Attributes:
        path: The folder.
        values: config.json as it is.
        entries: Logical tensors by canonical name (transformers' names with one entry per expert,
            see ``dsv4.checkpoint.names``).
        stray: Names of tensors that belong to no known entry.
        unused: Names of known tensors that have no effect here, by the reason.
    """

    def __init__(
        self,
        path: Path,
        values: Mapping[str, Any],
        tensors: Mapping[str, TensorInfo],
        paths: Mapping[str, Path] | None = None,
    ) -> None:
        self.path = path
        self.values = dict(values)
        self._shards = Shards(path, paths)
        grouped = group(tensors, self._shards)
        self.entries, self.stray, self.unused = grouped.entries, grouped.stray, grouped.unused

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Read config.json, the index and all headers of a folder; no tensor data.

        If a save was killed while it moved its files into the folder, the new checkpoint is read,
        wherever its files are.

        Raises:
            MissingCheckpointError: if there is no such folder or no config.json in it; it is a
                CheckpointError and a FileNotFoundError.
            CheckpointError: if a shard is missing or truncated, a file is not regular or changes
                meanwhile, the index leaves the folder or disagrees with the shards, a tensor has
                two spellings, or the tensors of a matrix do not fit together.
        """
        folder = open_folder(path)
        return cls(folder.path, folder.values, folder.tensors, folder.paths)

    def config(self, *, numerics: str = "deepseek", activation: str = "bf16") -> ModelConfig:
        """The model's configuration; see ``ModelConfig.from_dict``."""
        return ModelConfig.from_dict(self.values, numerics=numerics, activation=activation)

    @property
    def bytes_read(self) -> int:
        """Bytes of all tensors that were read so far."""
        return self._shards.bytes_read

    def check_size(self, config: ModelConfig) -> None:
        """Raise if a configuration has more layers, experts or dimensions than the tensors.

        Call this before a model is built from it: nothing else bounds the work of building.

        Raises:
            CheckpointError: naming the first such field.
        """
        bounds.check(config, self.entries, self.stray)

    @property
    def producer(self) -> str:
        """The tool that quantised it, by config.json: ``"nvidia"``, ``"compressed-tensors"``,
        ``"modelopt"``, ``"deepseek"`` or ``"none"``. Only for display: the format of a tensor
        follows from the tensor itself.
        """
        return config_json.producer(self.values)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of a model that keeps the stored dtypes: that of the embedding."""
        entry = self.entries.get("model.embed_tokens.weight")
        return torch.bfloat16 if entry is None or entry.format else entry.weight.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(entry.nbytes for entry in self.entries.values())

    @property
    def has_mtp(self) -> bool:
        """Return whether there are tensors of a multi-token-prediction layer."""
        return self.mtp_layers > 0

    @property
    def mtp_layers(self) -> int:
        """Number of multi-token-prediction layers, found in the tensors; 0 for a DSpark draft."""
        return 0 if self.has_dspark else len(self._draft_layers())

    @property
    def has_dspark(self) -> bool:
        """Whether there are tensors of a DSpark draft, which takes the place of MTP."""
        return any(map(names.is_dspark, (*self.entries, *self.stray)))

    @property
    def dspark_stages(self) -> int:
        """Number of stages of a DSpark draft, found in the tensors."""
        return len(self._draft_layers()) if self.has_dspark else 0

    @property
    def has_confidence_head(self) -> bool:
        """Whether there are tensors of a DSpark draft's confidence head."""
        return any(map(names.is_confidence, (*self.entries, *self.stray)))

    def _draft_layers(self) -> set[str]:
        return {names.layer_of(name) for name in self.entries if names.is_mtp(name)}

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def read(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor | QuantizedTensor:
        """Read one tensor by its canonical name.

        Raises:
            KeyError: if there is none of that name.
            CheckpointError: if its values are not finite.
        """
        return self.entries[name].read(device)

    def items(self) -> Iterator[Item]:
        """Yield all tensors, one at a time, for ``write``."""
        for name, entry in self.entries.items():
            yield name, entry.read(), entry.read_input_scale()

    def reading_ahead(
        self, plan: Sequence[Reading], slabs: Slabs, device: torch.device
    ) -> AbstractContextManager[None]:
        """Read what a plan lists in threads before it is requested; see ``Shards``."""
        return self._shards.reading_ahead(plan, slabs, device)

    def close(self) -> None:
        """Close the files; reading opens them again."""
        self._shards.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"Checkpoint({str(self.path)!r}, {len(self.entries)} tensors, "
            f"{self.nbytes / 1e9:.2f} GB, producer={self.producer!r})"
        )
