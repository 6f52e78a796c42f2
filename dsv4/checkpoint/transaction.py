"""Replace the files of a checkpoint in a folder as one step.

A save has four phases. At every moment the folder holds the whole old checkpoint or the whole new
one, whatever fails, even if the process is killed:

1. New files are written under their final names into a folder of their own inside the checkpoint's
   (``.dsv4-writing-<random>``), and reach the disk. Nothing else has changed.
2. That folder gets a list of its files and of the old ones, and is renamed to ``.dsv4-committed``.
   This one rename is the commit: from here on dsv4 reads the new checkpoint, through the list.
3. The old files are removed, config.json first, and the new ones move up, config.json last. Between
   the two the folder has no config.json, so that no other tool can open it and mix the two.
4. The list and its folder are removed.

A save that was killed in phase 3 or 4 is completed by ``finish``, which the next save calls. A save
that failed in phase 1 or 2 leaves at most a ``.dsv4-writing-*`` folder, which the next save
removes. The final files have the usual names, so other tools need not know about this. The
disk must have room for both checkpoints.

Old files are those that the old index names, ``model.safetensors``, the index, config.json and
hf_quant_config.json. Each is removed only if it is still the file of the commit. No other file is
touched.

One save at a time: the folder is locked (``flock``, which ends with its process). A file system
that knows no locks still lets only one save commit at a time.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from dsv4.checkpoint.shards import CheckpointError
from dsv4.config.json_file import JsonError, irregular, parse, read_bytes

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
COMMITTED = ".dsv4-committed"
_WRITING = ".dsv4-writing-"
_LIST = "files.json"
_DOCUMENTS = (CONFIG, "hf_quant_config.json", INDEX)
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL)
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)


def is_plain_name(name: Any) -> bool:
    """Return whether a value is the name of a file, not a path that could leave the folder."""
    if not isinstance(name, str) or name in ("", ".", "..") or len(name) > 255:
        return False
    return PurePosixPath(name).name == name and "\\" not in name and name.isprintable()


@dataclass(frozen=True)
class Commit:
    """The content of ``.dsv4-committed``.

    Attributes:
        files: Names of the new checkpoint's files, config.json last.
        old: Marks of the old files by name, see ``_mark``.
    """

    files: tuple[str, ...]
    old: Mapping[str, Sequence[int]]


def committed(folder: Path) -> dict[str, Path] | None:
    """Locate each file of a checkpoint whose save was interrupted after the commit, by name.

    Returns:
        None if there is no such save: the folder's files are what they are.

    Raises:
        CheckpointError: if the list cannot be read.
    """
    inner = folder / COMMITTED
    commit = _read_list(inner)
    if commit is None:
        return None
    paths = {name: inner / name for name in commit.files if (inner / name).exists()}
    if not paths:
        return None
    for name in paths:
        mark = _mark(folder / name)
        if mark is not None and mark != commit.old.get(name):
            raise CheckpointError(
                f"{folder / name} was written after a save was interrupted, whose files are in "
                f"{inner}: remove the ones or the others"
            )
    return {name: paths.get(name, folder / name) for name in commit.files}


def finish(folder: Path) -> bool:
    """Complete a save that was interrupted after its commit; can be repeated at any point.

    Returns:
        Whether there was such a save.

    Raises:
        FileExistsError: if another program has written a file of the same name since.
        OSError: if a file cannot be moved or removed; nothing is lost, and the checkpoint is read
            where it is.
    """
    inner = folder / COMMITTED
    commit = _read_list(inner)
    if commit is None:
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(inner)
            return True
        return False
    staged = [name for name in commit.files if os.path.lexists(inner / name)]
    if staged:
        _remove_old(folder, commit.old)
        for name in staged:
            if os.path.lexists(folder / name):
                raise FileExistsError(f"{folder / name} was written by another program meanwhile")
            if name == CONFIG:
                _sync(folder)
            os.rename(inner / name, folder / name)
        _sync(folder)
    os.unlink(inner / _LIST)
    os.rmdir(inner)
    _sync(folder)
    return True


def _remove_old(folder: Path, old: Mapping[str, Sequence[int]]) -> None:
    for name in sorted(old, key=lambda name: name != CONFIG):
        if _mark(folder / name) == list(old[name]):
            os.unlink(folder / name)


def _mark(path: Path) -> list[int] | None:
    """Return what tells a file from a later one of its name; None if there is no file."""
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return None
    return [info.st_ino, info.st_size, info.st_mtime_ns]


def _read_list(inner: Path) -> Commit | None:
    try:
        if inner.is_symlink():
            raise CheckpointError(f"{inner} is a symbolic link, wanted a folder of an earlier save")
        values = parse(read_bytes(inner / _LIST), str(inner / _LIST))
    except FileNotFoundError:
        return None
    except JsonError as error:
        raise CheckpointError(str(error)) from error
    files, old = values.get("files"), values.get("old")
    if not isinstance(files, list) or not isinstance(old, dict):
        raise CheckpointError(f"{inner / _LIST} is no list of the files of a save")
    if not all(map(is_plain_name, [*files, *old])):
        raise CheckpointError(f"{inner / _LIST} names files outside the folder")
    return Commit(tuple(files), old)


class Transaction:
    """New files of a folder, which replace its old checkpoint at ``commit`` or not at all.

    Raises:
        FileExistsError: if the folder holds a checkpoint and ``overwrite`` is false, or something
            is in the way of one.
        BlockingIOError: if another save into the folder is under way.
    """

    def __init__(self, folder: Path, overwrite: bool) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise FileExistsError(f"{folder} or a part of it is a file, wanted a folder") from None
        self._lock = _locked(folder)
        try:
            self._tidy()
            self.overwrite = overwrite
            self.old = _old_files(folder, overwrite)
            self.staging = folder / f"{_WRITING}{secrets.token_hex(8)}"
            os.mkdir(self.staging, 0o700)
        except BaseException:
            self._unlock()
            raise
        self._open: list[IO[bytes]] = []

    def _tidy(self) -> None:
        """Complete or remove files of earlier saves; without a lock one of them may be alive."""
        if self._lock is not None and self._lock.held:
            finish(self.folder)
            for left in self.folder.glob(_WRITING + "*"):
                if not left.is_symlink():
                    _remove_folder(left)
        elif os.path.lexists(self.folder / COMMITTED):
            raise BlockingIOError(f"{self.folder / COMMITTED} exists: another save is under way")

    def create(self, name: str) -> IO[bytes]:
        """Create a file, to be closed with ``close_file``; a link at its name is not followed."""
        file = os.fdopen(os.open(self.staging / name, _CREATE, 0o666), "wb")
        self._open.append(file)
        return file

    def close_file(self, file: IO[bytes]) -> None:
        """Write the bytes of a file of ``create`` to the disk and close it."""
        file.flush()
        os.fsync(file.fileno())
        file.close()
        self._open.remove(file)

    def rename(self, name: str, final: str) -> None:
        """Give a new file another name before the commit."""
        os.rename(self.staging / name, self.staging / final)

    def commit(self, names: Sequence[str]) -> None:
        """Replace the old checkpoint by the new files.

        Raises:
            FileExistsError: if a file that is not the old checkpoint's has one of the names, or the
                old one has changed since this save began.
            OSError: if it fails; the message says whether the old or the new checkpoint is there.
        """
        if _old_files(self.folder, self.overwrite) != self.old:
            raise FileExistsError(
                f"the checkpoint in {self.folder} has changed since this save began: another "
                "program wrote it"
            )
        for name in names:
            if name not in self.old and os.path.lexists(self.folder / name):
                raise FileExistsError(
                    f"{self.folder / name} is in the way: no file of the checkpoint that is there"
                )
        files = sorted(names, key=lambda name: name == CONFIG)
        text = json.dumps({"files": files, "old": self.old})
        file = self.create(_LIST)
        file.write(text.encode())
        self.close_file(file)
        _sync(self.staging)
        try:
            os.rename(self.staging, self.folder / COMMITTED)
            _sync(self.folder)
            finish(self.folder)
        except BaseException as error:
            if os.path.lexists(self.staging):
                raise
            self._finish_after(error)

    def _finish_after(self, error: BaseException) -> None:
        """Complete a commit that an error or an interrupt stopped; each step can be repeated."""
        try:
            finish(self.folder)
        except OSError as second:
            raise OSError(
                second.errno,
                f"the new checkpoint is complete, and dsv4 reads it, but its files could not all "
                f"be moved out of {self.folder / COMMITTED} ({second}); the next save, or "
                "dsv4.checkpoint.recover, moves them",
            ) from error
        if not isinstance(error, OSError):
            raise error

    def close(self) -> None:
        """Remove files that were not committed, and release the lock."""
        try:
            for file in self._open:
                with contextlib.suppress(OSError):
                    file.close()
            with contextlib.suppress(OSError):
                _remove_folder(self.staging)
        finally:
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock.fd)
            self._lock = None


def recover(folder: Path) -> bool:
    """Run ``finish`` under the folder's lock.

    Raises:
        BlockingIOError: if a save into the folder is under way.
    """
    lock = _locked(folder)
    try:
        return finish(folder)
    finally:
        if lock is not None:
            os.close(lock.fd)


@dataclass(frozen=True)
class _Lock:
    """An open folder, and whether its file system gave the lock."""

    fd: int
    held: bool


def _locked(folder: Path) -> _Lock | None:
    if fcntl is None:
        return None
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise BlockingIOError(
            f"another save into {folder} is under way, wanted one at a time"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(fd)
            raise
        return _Lock(fd, held=False)
    return _Lock(fd, held=True)


def _sync(folder: Path) -> None:
    """Write the names in a folder to the disk, where the file system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(fd)


def _remove_folder(folder: Path) -> None:
    """Remove a folder of plain files, if it is there."""
    if not folder.is_dir():
        return
    for name in os.listdir(folder):
        os.unlink(folder / name)
    os.rmdir(folder)


def _old_files(folder: Path, overwrite: bool) -> dict[str, list[int]]:
    """Return the files of the checkpoint that a save would replace, and their marks."""
    shards = sorted(p.name for p in folder.glob("*.safetensors") if not p.name.startswith("."))
    present = [name for name in (*_DOCUMENTS, SINGLE) if os.path.lexists(folder / name)]
    if not overwrite:
        if present or shards:
            raise FileExistsError(
                f"{folder} holds a checkpoint ({[*present, *shards][0]}), "
                "wanted an empty folder or overwrite=True"
            )
        return {}
    old = dict.fromkeys(present)
    if INDEX in old:
        old.update(dict.fromkeys(name for name in _indexed(folder) if name in shards))
    for name in shards:
        if _SHARD.fullmatch(name) and name not in old:
            raise FileExistsError(
                f"{folder / name} is a shard that no index there names, and would be read beside "
                "the new ones: move it away first"
            )
    for name in old:
        kind = None if (folder / name).is_symlink() else irregular(os.lstat(folder / name).st_mode)
        if kind is not None:
            raise FileExistsError(f"{folder / name} is {kind}, wanted a file that can be replaced")
    marks = {name: _mark(folder / name) for name in old}
    return {name: mark for name, mark in marks.items() if mark is not None}


def _indexed(folder: Path) -> Iterator[str]:
    """Return the names of shards in the index of a folder."""
    path = folder / INDEX
    try:
        table = parse(read_bytes(path), str(path)).get("weight_map")
    except (JsonError, FileNotFoundError) as error:
        raise FileExistsError(
            f"{error}: which shards belong to the checkpoint in {folder} is not known; remove it "
            "by hand, or save elsewhere"
        ) from error
    values = set(map(str, table.values())) if isinstance(table, dict) else set()
    return (name for name in values if is_plain_name(name) and name.endswith(".safetensors"))
