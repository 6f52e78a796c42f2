"""Open a checkpoint's folder: read config.json, the index and all headers, no tensor data."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4.checkpoint.problems import Problem, raise_all
from dsv4.checkpoint.shards import (
    CheckpointError,
    MissingCheckpointError,
    TensorInfo,
    file_mark,
    read_header,
)
from dsv4.checkpoint.transaction import CONFIG, INDEX, SINGLE, committed, is_plain_name
from dsv4.config.json_file import JsonError, irregular, parse, read_bytes, show

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Folder:
    """The facts that the files of a checkpoint state about it.

    Attributes:
        path: The folder.
        values: config.json as it is.
        tensors: All tensors by their names in the files.
        paths: Path of each file, by name, if a save was interrupted; None if all are in ``path``.
    """

    path: Path
    values: dict[str, Any]
    tensors: dict[str, TensorInfo]
    paths: Mapping[str, Path] | None


def open_folder(path: str | Path) -> Folder:
    """Read config.json, the index and all headers; see ``dsv4.Checkpoint.open``."""
    folder = existing(path)
    paths = committed(folder)
    config, index, single = (_path_of(folder, paths, n) for n in (CONFIG, INDEX, SINGLE))
    mark = None if config is None else file_mark(config)
    if config is None or mark is None:
        raise MissingCheckpointError(f"{CONFIG} is missing from {folder}")
    values = _read_json(config)
    if index is not None:
        tensors = _indexed(folder, paths, _read_json(index))
    elif single is not None:
        tensors = read_header(single, SINGLE)
    else:
        raise CheckpointError(f"{folder} holds neither {INDEX} nor {SINGLE}")
    # A save removes config.json first: as long as it is the same file, so are the others.
    if file_mark(config) != mark:
        raise CheckpointError(f"{config} has changed while it was read, try again")
    return Folder(folder, values, tensors, paths)


def existing(path: str | Path) -> Path:
    """Return a folder that exists.

    Raises:
        MissingCheckpointError: if it does not, or is a file.
        TypeError: if ``path`` is neither a str nor a path object of one.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str):
        kind = type(path if isinstance(path, bytes) else text).__name__
        raise TypeError(f"path is {kind}, wanted a folder: a str or a pathlib.Path")
    folder = Path(text)
    try:
        mode = folder.stat().st_mode
    except (OSError, ValueError) as error:
        why = _hint(path) if isinstance(error, FileNotFoundError) else f" ({error})"
        raise MissingCheckpointError(
            f"there is no folder {str(path)!r}, wanted one with {CONFIG} and safetensors files{why}"
        ) from None
    if not stat.S_ISDIR(mode):
        raise MissingCheckpointError(f"{folder} is {irregular(mode) or 'a file'}, wanted a folder")
    return folder


def _hint(path: str | Path) -> str:
    if not _HUB_NAME.fullmatch(str(path)):
        return ""
    return (
        f". A name on a hub is not enough: download the files first (for example with "
        f"`hf download {path} --local-dir FOLDER`) and give their folder"
    )


def _path_of(folder: Path, paths: Mapping[str, Path] | None, name: str) -> Path | None:
    """Return where a file of a checkpoint is; None if the checkpoint has none of that name."""
    if paths is not None:
        return paths.get(name)
    return folder / name if os.path.lexists(folder / name) else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return parse(read_bytes(path), str(path))
    except (JsonError, FileNotFoundError) as error:
        raise CheckpointError(str(error)) from error


def _indexed(
    folder: Path, paths: Mapping[str, Path] | None, index: Mapping[str, Any]
) -> dict[str, TensorInfo]:
    """Read the headers of the shards that an index names, and check them against it."""
    table = index.get("weight_map")
    if not isinstance(table, dict):
        raise CheckpointError(f"{folder / INDEX} has no weight_map, wanted a table of file names")
    for name, shard in table.items():
        # Only names are allowed, because a path could leave the folder.
        if not is_plain_name(shard):
            raise CheckpointError(
                f"{INDEX} points to {show(shard)} for {show(name)}, wanted the name of a file in "
                f"{folder}"
            )
    tensors: dict[str, TensorInfo] = {}
    problems: list[str] = []
    for shard in sorted(set(table.values())):
        path = (paths or {}).get(shard, folder / shard)
        if not os.path.lexists(path):
            first = next(name for name in table if table[name] == shard)
            raise CheckpointError(
                f"{shard}: the shard is missing from {folder}, {INDEX} puts {show(first)} there"
            )
        for name, info in read_header(path, shard).items():
            if table.get(name) != shard:
                problems.append(f"{name} is in {shard}, the index says {table.get(name)}")
            tensors[name] = info
    problems += [
        f"{name} is not in {table[name]}, where the index puts it"
        for name in table.keys() - tensors
    ]
    listed = [Problem("tensors", text) for text in sorted(problems)]
    raise_all(f"{INDEX} disagrees with the shards", listed)
    return tensors
