"""A file format for bytes that are verified before they are used.

Little-endian, without padding::

    bytes  field
    8      magic, which names the kind of content
    32     SHA-256 of everything that follows
    4      format version
    32     key: SHA-256 of what the content was made from
    8      length of the content
    ...    content

The hash shows damage; it is no signature. Who can write a file is what
``dsv4.cute.runtime.trusted`` checks.
"""

from __future__ import annotations

import hashlib
import struct

VERSION = 1
_HASHED = struct.Struct("<8s32s")
_FIELDS = struct.Struct("<I32sQ")
_START = _HASHED.size + _FIELDS.size


class DamagedError(Exception):
    """The bytes are not what ``encode`` made for this key; says how."""


def encode(magic: bytes, key: bytes, content: bytes) -> bytes:
    """The contents of a file.

    Args:
        magic: 8 bytes.
        key: 32 bytes.
        content: Any bytes.
    """
    rest = _FIELDS.pack(VERSION, key, len(content)) + content
    return _HASHED.pack(magic, hashlib.sha256(rest).digest()) + rest


def decode(magic: bytes, key: bytes, file: bytes) -> bytes:
    """The content of a file, every byte of which is verified.

    Raises:
        DamagedError: if it is not what ``encode`` made for ``magic`` and ``key``.
    """
    if len(file) < _START:
        raise DamagedError(f"it has {len(file)} bytes, wanted at least {_START}")
    stored, digest = _HASHED.unpack_from(file)
    version, made_for, size = _FIELDS.unpack_from(file, _HASHED.size)
    if (stored, version) != (magic, VERSION):
        raise DamagedError(
            f"it begins with {stored!r} version {version}, wanted {magic!r} {VERSION}"
        )
    if len(file) != _START + size:
        raise DamagedError(f"it has {len(file)} bytes, its header says {_START + size}")
    if hashlib.sha256(memoryview(file)[_HASHED.size :]).digest() != digest:
        raise DamagedError("its SHA-256 differs")
    if made_for != key:
        raise DamagedError("it was made from something else")
    return file[_START:]
