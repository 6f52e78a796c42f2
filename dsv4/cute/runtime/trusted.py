"""Decides whether a file may be executed: who owns it, and who else can change it.

A compiled kernel runs with the rights of the process that loads it, so it is read only from places
that no other ordinary user controls:

* The file and every folder on the way to it belong to root or to the current user.
* None of them can be written by others. A group that is the current user's private group (same
  name, no other member, no access-control list) counts as the user. A folder with the sticky bit,
  such as ``/tmp``, may be writable, because others cannot exchange its entries there.
* The file is a regular file. Symbolic links are followed for folders alone, and count as entries
  with an owner of their own.

Root's files are trusted, installed packages among them. Where the system has no such owners
(Windows), nothing is trusted.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import stat
from dataclasses import dataclass

MOST_BYTES = 1 << 26  # of a file; the largest compiled kernel has less than 2**17
_MOST_LINKS = 40
_ROOT = 0
_ACL = "system.posix_acl_access"
_OPEN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)


class UntrustedError(Exception):
    """A file or folder that another user controls, or that is of the wrong kind; says why."""


@dataclass(frozen=True)
class User:
    """A user as file permissions see it.

    Attributes:
        uid: Number of the user.
        private_group: Number of the group that has this user alone; None if there is none.
    """

    uid: int
    private_group: int | None = None


def current_user() -> User:
    """The user whose rights this process has.

    Raises:
        UntrustedError: if the system has no owners of files.
    """
    if not hasattr(os, "geteuid"):
        raise UntrustedError("this system does not tell who can change a file")
    return _user(os.geteuid())


@functools.cache
def _user(uid: int) -> User:
    import grp
    import pwd

    try:
        account = pwd.getpwuid(uid)
        group = grp.getgrgid(account.pw_gid)
    except KeyError:
        return User(uid)
    alone = group.gr_name == account.pw_name and set(group.gr_mem) <= {account.pw_name}
    return User(uid, group.gr_gid if alone and group.gr_gid != _ROOT else None)


def others_reason(status: os.stat_result, user: User, *, has_acl: bool = False) -> str | None:
    """Return why others than root and ``user`` can change a file or a folder's entries, or None.

    Args:
        status: Status of the file or folder.
        user: Who is trusted besides root.
        has_acl: Whether an access-control list gives rights that the mode does not name.
    """
    if status.st_uid not in (_ROOT, user.uid):
        allowed = "root" if user.uid == _ROOT else f"root or user {user.uid}"
        return f"belongs to user {status.st_uid}, not to {allowed}"
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISDIR(status.st_mode) and mode & stat.S_ISVTX:
        return None
    if mode & stat.S_IWOTH:
        return f"can be written by every user (mode {mode:04o})"
    own = status.st_gid == user.private_group and not has_acl
    if mode & stat.S_IWGRP and not own:
        return f"can be written by group {status.st_gid} (mode {mode:04o})"
    return None


def check_folder(folder: str) -> None:
    """Check every folder and link on the way to a folder, and itself.

    Args:
        folder: Absolute path.

    Raises:
        UntrustedError: naming the first that another user controls.
        OSError: if one is missing, is no folder or cannot be searched.
    """
    user, links = current_user(), 0
    current, pending = os.sep, _parts(folder)
    _check_entry(current, os.lstat(current), user)
    while pending:
        part = pending.pop()
        if part == os.pardir:
            current = os.path.dirname(current)  # has no links: each was followed
            continue
        entry = os.path.join(current, part)
        status = os.lstat(entry)
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _MOST_LINKS:
                raise UntrustedError(f"{folder} has more than {_MOST_LINKS} symbolic links")
            if status.st_uid not in (_ROOT, user.uid):
                raise UntrustedError(f"{entry} is a symbolic link of user {status.st_uid}")
            target = os.readlink(entry)
            current = os.sep if os.path.isabs(target) else current
            pending += _parts(target)
            continue
        _check_entry(entry, status, user)
        current = entry


def _parts(path: str) -> list[str]:
    """The components of a path, last one first."""
    return [part for part in reversed(path.split(os.sep)) if part not in ("", os.curdir)]


def _check_entry(entry: str, status: os.stat_result, user: User) -> None:
    if not stat.S_ISDIR(status.st_mode):
        raise UntrustedError(f"{entry} is not a folder")
    reason = others_reason(status, user, has_acl=_has_acl(entry, status))
    if reason:
        raise UntrustedError(f"{entry} {reason}")


def _has_acl(entry: str | int, status: os.stat_result) -> bool:
    """Return whether there is an access-control list; asked only where the group can write."""
    if not status.st_mode & stat.S_IWGRP or not hasattr(os, "getxattr"):
        return False
    try:
        return bool(os.getxattr(entry, _ACL))
    except OSError:
        return False  # the file system has none


def make_folder(folder: str) -> None:
    """Make a folder and those above it, writable by the current user alone whatever the umask.

    Raises:
        OSError: if it cannot be made.
    """
    try:
        os.mkdir(folder, 0o755)
    except FileExistsError:
        return
    except FileNotFoundError:
        make_folder(os.path.dirname(folder))
        with contextlib.suppress(FileExistsError):  # another process made it
            os.mkdir(folder, 0o755)


def read_file(path: str, most: int | None = None) -> bytes:
    """The contents of a trusted file in a folder that ``check_folder`` accepted.

    Owner and mode are those of the opened file itself, so that it cannot be exchanged in between.

    Args:
        path: Path of the file.
        most: Bytes that it may have; None: ``MOST_BYTES``.

    Raises:
        UntrustedError: if another user controls it, or it is not a regular file of a sane size.
        OSError: if it is missing or cannot be read.
    """
    most = MOST_BYTES if most is None else most
    user = current_user()
    try:
        handle = os.open(path, os.O_RDONLY | _OPEN)
    except OSError:
        _check_file(os.lstat(path), user, False, most)  # a better reason than the system's, if any
        raise
    try:
        status = os.fstat(handle)
        _check_file(status, user, _has_acl(handle, status), most)
        with os.fdopen(handle, "rb", closefd=False) as stream:
            return stream.read(most)
    finally:
        os.close(handle)


def _check_file(status: os.stat_result, user: User, has_acl: bool, most: int | None = None) -> None:
    # Without its name, so that a folder full of such files is one reason.
    if stat.S_ISLNK(status.st_mode):
        raise UntrustedError("a file there is a symbolic link")
    if not stat.S_ISREG(status.st_mode):
        raise UntrustedError("an entry there is not a regular file")
    reason = others_reason(status, user, has_acl=has_acl)
    if reason:
        raise UntrustedError(f"a file there {reason}")
    if most is not None and status.st_size > most:
        raise UntrustedError(f"a file there has {status.st_size} bytes, above {most}")


def write_file(path: str, content: bytes) -> None:
    """Write a file in one step: readers find the old one, none, or all of the new one.

    A file of another user, a link or a folder at that place is left alone.

    Raises:
        UntrustedError: if such an entry is there.
        OSError: if it cannot be written; nothing is left behind.
    """
    user = current_user()
    with contextlib.suppress(FileNotFoundError):
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (_ROOT, user.uid):
            _check_file(status, user, False)
            raise AssertionError("such an entry has a reason")
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(8)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN, 0o644)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
