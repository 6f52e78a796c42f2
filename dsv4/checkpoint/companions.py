"""Files that belong to a checkpoint beside its tensors: tokenizer, generation defaults, encoder.

``save`` copies them from the folder that a model was loaded from, once the new checkpoint is
complete, each file as one step. They are no part of the checkpoint's transaction: a save that is
killed in between leaves a whole checkpoint without some of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from dsv4.checkpoint.folder import existing
from dsv4.checkpoint.shards import CheckpointError
from dsv4.config.json_file import JsonError, irregular, read_bytes

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
ENCODING = "encoding"
_logger = logging.getLogger("dsv4.checkpoint")


def source_of(companions: str | Path | bool | None, loaded_from: Path | None) -> Path | None:
    """The folder to copy from; None: nothing is copied.

    Args:
        companions: As ``dsv4.save`` gets it.
        loaded_from: Folder that the model was loaded from, if it was.

    Raises:
        FileNotFoundError: if ``companions`` names a folder that is not there.
        TypeError: if it is True or of another kind.
    """
    if companions is False:
        return None
    if companions is True:
        raise TypeError("companions is True, wanted a folder, None or False")
    if companions is not None:
        return existing(companions)
    if loaded_from is not None and not loaded_from.is_dir():
        _logger.warning(
            "%s is gone, from which the model was loaded: its tokenizer is not copied", loaded_from
        )
        return None
    return loaded_from


def read(source: Path | None, target: Path) -> dict[str, bytes]:
    """Contents of the companions of a checkpoint by their names, ``/`` between folder and file.

    Raises:
        CheckpointError: if one cannot be read.
    """
    if source is None or (target.exists() and os.path.samefile(source, target)):
        return {}
    names = [name for name in FILES if os.path.lexists(source / name)]
    folder = source / ENCODING
    if folder.is_dir():
        names += [f"{ENCODING}/{path.name}" for path in sorted(folder.iterdir()) if path.is_file()]
    try:
        return {name: read_bytes(source / name) for name in names}
    except (JsonError, FileNotFoundError) as error:
        raise CheckpointError(str(error)) from error


def check(target: Path, contents: Mapping[str, bytes], overwrite: bool) -> None:
    """Raise if a file that is there stands in the way.

    Raises:
        FileExistsError: if one has another content and ``overwrite`` is false, or cannot be
            replaced.
    """
    folder = target / ENCODING
    is_in_the_way = os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir())
    if is_in_the_way and any("/" in name for name in contents):
        raise FileExistsError(f"{folder} is in the way, wanted a folder or nothing")
    for name, content in contents.items():
        path = target / name
        if not os.path.lexists(path):
            continue
        mode = os.lstat(path).st_mode
        if not stat.S_ISLNK(mode) and irregular(mode) is not None:
            raise FileExistsError(f"{path} is {irregular(mode)}, wanted a file or nothing")
        if not overwrite and not _holds(path, content):
            raise FileExistsError(
                f"{path} is there with another content, wanted overwrite=True to replace it, or "
                "companions=False to leave it"
            )


def write(target: Path, contents: Mapping[str, bytes]) -> None:
    """Write companions beside a complete checkpoint; those that are there already stay.

    Raises:
        OSError: if it fails; the checkpoint is complete.
    """
    for name, content in contents.items():
        path = target / name
        if _holds(path, content):
            continue
        path.parent.mkdir(exist_ok=True)
        draft = path.with_name(f".dsv4-copy-{secrets.token_hex(8)}")
        try:
            with open(draft, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(draft)


def _holds(path: Path, content: bytes) -> bool:
    """Whether a file has this content already."""
    try:
        return path.stat().st_size == len(content) and read_bytes(path) == content
    except (JsonError, OSError):
        return False
