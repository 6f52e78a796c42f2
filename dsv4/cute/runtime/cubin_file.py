"""The file format of a compiled kernel.

Little-endian, without padding::

    bytes  field
    8      magic, b"dsv4cub\n"
    32     SHA-256 of everything that follows
    4      format version
    32     key: SHA-256 of what the kernel was compiled from
    4 x 3  threads of a block, blocks of a cluster, dynamic shared memory of a block in bytes
    4      length of the name
    8      length of the cubin
    ...    name of the entry, UTF-8
    ...    cubin

The hash shows damage: a half, empty, lengthened or changed file, or one under another kernel's
name. It is not a signature, because whoever can write the file can write a hash that fits. Who can
write it is what ``trusted`` checks.
"""

from __future__ import annotations

import hashlib
import struct

from dsv4.cute.runtime.driver import Image

MAGIC, VERSION = b"dsv4cub\n", 1
_HASHED = struct.Struct("<8s32s")
_FIELDS = struct.Struct("<I32s4IQ")
_START = _HASHED.size + _FIELDS.size


class DamagedError(Exception):
    """The bytes are not what ``encode`` made for this key; says how."""


def encode(image: Image, key: bytes) -> bytes:
    """The contents of a file.

    Args:
        image: The compiled kernel.
        key: 32 bytes.
    """
    name = image.name.encode()
    launch = (image.threads, image.cluster, image.shared_bytes)
    fields = _FIELDS.pack(VERSION, key, *launch, len(name), len(image.cubin))
    rest = fields + name + image.cubin
    return _HASHED.pack(MAGIC, hashlib.sha256(rest).digest()) + rest


def decode(content: bytes, key: bytes) -> Image:
    """The kernel in a file's contents, every byte of which is verified.

    Raises:
        DamagedError: if they are not what ``encode`` made for ``key``.
    """
    if len(content) < _START:
        raise DamagedError(f"it has {len(content)} bytes, wanted at least {_START}")
    magic, digest = _HASHED.unpack_from(content)
    fields = _FIELDS.unpack_from(content, _HASHED.size)
    version, made_for, threads, cluster, shared_bytes, name_bytes, cubin_bytes = fields
    if (magic, version) != (MAGIC, VERSION):
        raise DamagedError(
            f"it begins with {magic!r} version {version}, wanted {MAGIC!r} {VERSION}"
        )
    length = _START + name_bytes + cubin_bytes
    if len(content) != length:
        raise DamagedError(f"it has {len(content)} bytes, its header says {length}")
    if hashlib.sha256(memoryview(content)[_HASHED.size :]).digest() != digest:
        raise DamagedError("its SHA-256 differs")
    if made_for != key:
        raise DamagedError("it is another kernel")
    name, cubin = content[_START : _START + name_bytes], content[_START + name_bytes :]
    return Image(cubin, name.decode(), threads, cluster, shared_bytes)
