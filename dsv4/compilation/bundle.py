"""A file with the compiled kernels of models for one GPU architecture.

``python -m dsv4 warmup --arch sm_90a --out FILE`` writes one. It is used if ``$DSV4_KERNELS``
names it, if ``dsv4.warmup`` is given it, or if the installed package ``dsv4-kernels`` has it, and
only for the versions it was made for. Where it cannot be used that is logged once, and kernels are
compiled.

Little-endian, without padding::

    bytes  field
    8      magic, b"dsv4bdl\\n"
    32     SHA-256 of the index
    8      length of the index
    ...    index, JSON: version, architecture, versions, and of each image its key, name, offset,
           length and SHA-256
    ...    images, each as its file in the folder of compiled kernels

A file is read once, from a place that ``dsv4.cute.runtime.trusted`` accepts; an image is verified
by its length and SHA-256 when it is looked up, before anything decodes it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import logging
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dsv4.compilation.versions import Versions
from dsv4.cute.runtime import trusted
from dsv4.cute.runtime.architectures import EVERY_ARCHITECTURE

VARIABLE = "DSV4_KERNELS"
PACKAGE, ENDING = "dsv4_kernels", ".dsv4"
MAGIC, VERSION = b"dsv4bdl\n", 1
MOST_BYTES = 1 << 30
_HEAD = struct.Struct("<8s32sQ")
_log = logging.getLogger(__name__)


class BundleError(RuntimeError):
    """A bundle that cannot be used; says why."""


@dataclass(frozen=True)
class Entry:
    """An image of a bundle.

    Attributes:
        key: What it was compiled from, hexadecimal.
        name: Name of the kernel.
        offset: Bytes from the first image.
        length: Bytes of the image.
        sha256: Hexadecimal.
    """

    key: str
    name: str
    offset: int
    length: int
    sha256: str


@dataclass(frozen=True, eq=False)
class Bundle:
    """An open bundle.

    Attributes:
        arch: Architecture of its kernels.
        versions: What they were made from and with.
        entries: By key.
        images: All images, one after another.
    """

    arch: str
    versions: Versions
    entries: Mapping[bytes, Entry]
    images: bytes

    def image(self, key: bytes) -> bytes | None:
        """A kernel's file, verified; None if there is none.

        Raises:
            BundleError: if it is damaged.
        """
        entry = self.entries.get(key)
        if entry is None:
            return None
        image = self.images[entry.offset : entry.offset + entry.length]
        if len(image) != entry.length:
            raise BundleError(f"{entry.name} has {len(image)} bytes, wanted {entry.length}")
        if hashlib.sha256(image).hexdigest() != entry.sha256:
            raise BundleError(f"the SHA-256 of {entry.name} differs")
        return image


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel that goes into a bundle.

    Attributes:
        key: What it was compiled from, 32 bytes.
        name: Name of the kernel.
        content: The content of its file in the folder of compiled kernels.
    """

    key: bytes
    name: str
    content: bytes


def encode(arch: str, compiled: Iterable[Compiled], versions: Versions) -> bytes:
    """The contents of a bundle. Equal kernels give equal bytes, in whatever order they come."""
    images, entries, offset = [], [], 0
    for kernel in sorted({image.key: image for image in compiled}.values(), key=lambda c: c.key):
        digest = hashlib.sha256(kernel.content).hexdigest()
        entries.append(Entry(kernel.key.hex(), kernel.name, offset, len(kernel.content), digest))
        images.append(kernel.content)
        offset += len(kernel.content)
    index = {
        "version": VERSION,
        "arch": arch,
        "made_for": asdict(versions),
        "images": [asdict(entry) for entry in entries],
    }
    words = json.dumps(index, sort_keys=True).encode()
    head = _HEAD.pack(MAGIC, hashlib.sha256(words).digest(), len(words))
    return b"".join((head, words, *images))


def decode(content: bytes) -> Bundle:
    """The bundle in a file's contents, its index verified.

    Raises:
        BundleError: if they are not what ``encode`` made.
    """
    if len(content) < _HEAD.size:
        raise BundleError(f"it has {len(content)} bytes, wanted at least {_HEAD.size}")
    magic, digest, size = _HEAD.unpack_from(content)
    if magic != MAGIC:
        raise BundleError(f"it begins with {magic!r}, wanted {MAGIC!r}")
    words, images = content[_HEAD.size : _HEAD.size + size], content[_HEAD.size + size :]
    if hashlib.sha256(words).digest() != digest:
        raise BundleError("the SHA-256 of its index differs")
    index = json.loads(words)
    if index["version"] != VERSION:
        raise BundleError(f"its format is {index['version']}, wanted {VERSION}")
    entries = [Entry(**entry) for entry in index["images"]]
    total = sum(entry.length for entry in entries)
    if len(images) != total:
        raise BundleError(f"its images have {len(images)} bytes, its index says {total}")
    by_key = {bytes.fromhex(entry.key): entry for entry in entries}
    return Bundle(index["arch"], Versions(**index["made_for"]), by_key, images)


def read(path: str | os.PathLike[str], arch: str | None = None) -> Bundle:
    """A bundle from a file that no other ordinary user controls.

    Args:
        path: Path of the file.
        arch: Architecture that the bundle must be compiled for; None: any.

    Raises:
        BundleError: if it cannot be used here, naming the file and the reason.
    """
    file = Path(path).expanduser().absolute()
    try:
        trusted.check_folder(str(file.parent))
        bundle = decode(trusted.read_file(str(file), MOST_BYTES))
    except (BundleError, trusted.UntrustedError, OSError) as reason:
        said = reason.strerror if isinstance(reason, OSError) and reason.strerror else reason
        raise BundleError(f"the bundle {file} cannot be used: {said}") from reason
    difference = bundle.versions.difference(Versions.current())
    if arch is not None and bundle.arch != arch:
        difference = f"arch is {bundle.arch}, here {arch}"
    if difference is not None:
        raise BundleError(f"the bundle {file} was made for something else: {difference}")
    return bundle


def write(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a bundle in one step.

    Raises:
        BundleError: if another user's file or something that is no file is there.
        OSError: if it cannot be written.
    """
    try:
        trusted.write_file(str(Path(path).expanduser().absolute()), content)
    except trusted.UntrustedError as reason:
        raise BundleError(f"{path} is not written: {reason}") from reason


@dataclass
class Active:
    """Bundles that this process uses, by architecture.

    Attributes:
        explicit: By ``use``.
        discovered: By the environment or an installed package; None where there is none.
        fresh: Files of kernels that were compiled and could not be kept on disk, by key.
    """

    explicit: dict[str, Bundle] = field(default_factory=dict)
    discovered: dict[str, Bundle | None] = field(default_factory=dict)
    fresh: dict[bytes, bytes] = field(default_factory=dict)

    def of(self, arch: str) -> Bundle | None:
        """The one for an architecture."""
        if arch in self.explicit:
            return self.explicit[arch]
        if arch not in self.discovered:
            self.discovered[arch] = _find(arch)
        return self.discovered[arch]


@functools.cache
def active() -> Active:
    """Bundles of this process."""
    return Active()


def use(path: str | os.PathLike[str], arch: str | None = None) -> Bundle:
    """Look kernels up in a bundle from now on, before any other source.

    Raises:
        BundleError: if it cannot be used.
    """
    bundle = read(path, arch)
    active().explicit[bundle.arch] = bundle
    return bundle


def has(arch: str, key: bytes) -> bool:
    """Return whether the bundle for an architecture has a kernel's file, which is not read."""
    bundle = active().of(arch)
    return key in active().fresh or (bundle is not None and key in bundle.entries)


def image(arch: str, key: bytes) -> bytes | None:
    """A kernel's file from the bundle for an architecture, verified; None if it is not there."""
    fresh = active().fresh.get(key)
    if fresh is not None:
        return fresh
    bundle = active().of(arch)
    try:
        return None if bundle is None else bundle.image(key)
    except BundleError as reason:
        _say(f"the bundle for {arch} is damaged: {reason}. The kernel is compiled")
        return None


def _find(arch: str) -> Bundle | None:
    """The bundle that the environment names, or that of the installed package."""
    path = os.environ.get(VARIABLE) or installed(arch)
    if path is None or arch not in EVERY_ARCHITECTURE.values():
        return None
    try:
        return read(path, arch)
    except BundleError as reason:
        _say(f"kernels are compiled, because {reason}")
        return None


def installed(arch: str) -> str | None:
    """The file for an architecture of the package ``dsv4-kernels``, which is not imported."""
    try:
        spec: Any = importlib.util.find_spec(PACKAGE)
    except (ImportError, ValueError):
        return None
    for folder in (spec and spec.submodule_search_locations) or ():
        file = Path(folder) / f"{arch}{ENDING}"
        if file.is_file():
            return str(file)
    return None


@functools.cache
def _say(text: str) -> None:
    """Log a warning, each text once per process."""
    _log.warning("%s", text)
