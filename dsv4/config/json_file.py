"""Reading JSON files that may be damaged or hostile, within bounds of size, count and depth.

A file of a checkpoint comes from elsewhere. Python's own reader accepts NaN, takes the last of two
equal keys, leaves integers of any length to later code, waits for ever on a pipe, and ends in a
RecursionError on deep nesting: each is one ``ValueError`` here that names the file.
"""

from __future__ import annotations

import json
import os
import reprlib
import stat
from pathlib import Path
from typing import Any, NoReturn

# The largest published index (145,116 tensors) has 16 MB; half a million values need 150 MB.
MAX_BYTES = 32 << 20
MAX_ITEMS = 500_000
# Nested tables of quantization_config are six levels deep.
MAX_DEPTH = 32
_MAX_DIGITS = 18  # fits 64 bits
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class JsonError(ValueError):
    """A JSON file that cannot be read: the message names it and says what is wrong."""


def irregular(mode: int) -> str | None:
    """Return the kind of a file that is not a regular one; None for a regular file."""
    if stat.S_ISREG(mode):
        return None
    return next((words for test, words in _KINDS if test(mode)), "no regular file")


def read_bytes(path: Path) -> bytes:
    """Read a regular file of at most ``MAX_BYTES``.

    Raises:
        FileNotFoundError: if there is no such file.
        JsonError: if it is no regular file, too long or unreadable.
    """
    try:
        kind = irregular(path.stat().st_mode)
        if kind is not None:
            raise JsonError(f"{path} is {kind}, wanted a regular file")
        # A pipe that replaced the file meanwhile must not block.
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(fd, "rb") as file:
            size = os.fstat(fd).st_size
            if size > MAX_BYTES:
                raise JsonError(f"{path} has {size} bytes, wanted at most {MAX_BYTES}")
            return file.read(MAX_BYTES)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise JsonError(f"{path} cannot be read: {error}") from error


def parse(text: bytes | str, what: str) -> dict[str, Any]:
    """Parse a JSON text that holds a table.

    Args:
        text: UTF-8.
        what: Name of the file, for messages.

    Raises:
        JsonError: if it is not strict JSON or holds no table, or if it has a key twice, an integer
            of more than 18 digits, or more values or levels than any published file.
    """
    try:
        plain = text if isinstance(text, str) else text.decode("utf-8-sig")
        items = sum(plain.count(mark) for mark in ",[{")
        if items > MAX_ITEMS:
            raise JsonError(f"{what} holds {items} values, wanted at most {MAX_ITEMS}")
        values = json.loads(
            plain,
            parse_int=lambda digits: _integer(digits, what),
            parse_constant=lambda name: _not_a_number(name, what),
            object_pairs_hook=lambda pairs: _table(pairs, what),
        )
    except RecursionError:
        raise JsonError(f"{what} is nested more than {MAX_DEPTH} levels deep") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise JsonError(f"{what} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise JsonError(f"{what} holds {type(values).__name__}, wanted a table of fields")
    if _depth(values) > MAX_DEPTH:
        raise JsonError(f"{what} is nested more than {MAX_DEPTH} levels deep")
    return values


def _integer(digits: str, what: str) -> int:
    if len(digits) > _MAX_DIGITS + 1:
        raise JsonError(
            f"{what} holds an integer of {len(digits)} digits ({digits[:12]}...), "
            f"wanted at most {_MAX_DIGITS}"
        )
    return int(digits)


def _not_a_number(name: str, what: str) -> NoReturn:
    raise JsonError(f"{what} is not JSON: it holds {name}")


def _table(pairs: list[tuple[str, Any]], what: str) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise JsonError(f"{what} holds {show(twice)} twice, wanted each name once")
    return table


def _depth(values: Any) -> int:
    depth, level = 0, [values]
    while level and depth <= MAX_DEPTH:
        depth += 1
        inner = (node.values() if isinstance(node, dict) else node for node in level)
        level = [child for node in inner for child in node if isinstance(child, (dict, list))]
    return depth


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 6
_SHORT.maxlevel = 3


def show(value: Any) -> str:
    """Return the ``repr`` of a value found in a file, shortened to a bounded length."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return _SHORT.repr(value)
