"""Compiled kernels, kept on disk.

A file is named by a hash of the configuration, the architecture, the compiler's version and this
package's kernel sources, so a changed source is another file. What is found there is loaded without
importing CuTeDSL. The folder is ``$DSV4_CACHE_DIR`` or ``~/.cache/dsv4/kernels``.

``cubin_file`` has the format: a header with the key, lengths and a SHA-256 of all that follows,
then the cubin. A kernel is read once, verified in memory, and the driver gets those bytes. The
hash gives integrity, not authenticity; ownership gives the latter: nothing is read from or written
to a folder that another ordinary user controls (``trusted``).

Whatever is wrong with the folder or a file is logged once, and the kernel is compiled: a damaged
file is replaced, and where the folder cannot be used the kernel stays in memory. Hashing a cubin
of 20 to 55 kB took 35 to 55 us on a CPU (once per process and kernel), compiling it 0.5 to 2 s.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from dsv4.compilation import bundle, counts, sealed_file
from dsv4.compilation.versions import CUTEDSL as _PACKAGE
from dsv4.compilation.versions import compiler, digest
from dsv4.cute.runtime import cubin_file, trusted
from dsv4.cute.runtime.architectures import FAMILIES
from dsv4.cute.runtime.driver import Image

CACHE_VARIABLE = "DSV4_CACHE_DIR"
_DAMAGED = (cubin_file.DamagedError, sealed_file.DamagedError)
_Decoded = TypeVar("_Decoded")
_log = logging.getLogger(__name__)


def folder() -> Path | None:
    """Return the folder of compiled kernels; None if the folder it would be in does not exist."""
    chosen = os.environ.get(CACHE_VARIABLE)
    try:
        if chosen:
            return Path(chosen).expanduser().absolute()
        return (Path.home() / ".cache" / "dsv4" / "kernels").absolute()
    except (RuntimeError, OSError):  # no home directory, or no current one
        return None


def _sources() -> str:
    """Hash of every source that can change a CuTeDSL kernel."""
    return digest(("cute",))


def target(plan: Any, arch: str) -> str:
    """Return the target of a configuration: ``arch``, or its family if the kernel is for that."""
    return FAMILIES.get(arch, arch) if getattr(plan, "for_family", False) else arch


def key(plan: Any, arch: str) -> bytes:
    """SHA-256 of everything that a compiled kernel depends on."""
    made_for = target(plan, arch)
    what = [type(plan).__name__, dataclasses.asdict(plan), made_for, compiler(), _sources()]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).digest()


def file_name(key: bytes) -> str:
    """The name of a kernel's file in ``folder()``."""
    return f"{key.hex()[:32]}.cubin"


def image(plan: Any, arch: str) -> Image:
    """The compiled kernel of a configuration: from disk, or compiled now and kept.

    Args:
        plan: A frozen dataclass with ``kernel`` (``"module:class"``), ``threads``, ``ctas`` and
            ``shared_bytes``, and ``for_family`` if one image is for a family of architectures.
        arch: One of ``architectures.ARCHITECTURES``.

    Raises:
        RuntimeError: if it has to be compiled and CuTeDSL is not installed.
    """
    return stored(plan, arch) or compile_and_store(plan, arch)


def stored(plan: Any, arch: str) -> Image | None:
    """The compiled kernel from a bundle or from disk, verified; None if it has to be compiled."""
    made_from = key(plan, arch)

    def decode(content: bytes) -> Image:
        return cubin_file.decode(content, made_from)

    return find(arch, made_from, file_name(made_from), decode)


def find(arch: str, key: bytes, name: str, decode: Callable[[bytes], _Decoded]) -> _Decoded | None:
    """Return what ``decode`` makes of a kernel's file, from a bundle or from disk, or None.

    Args:
        arch: What the kernel is compiled for.
        key: Key of the kernel.
        name: Name of its file in ``folder()``.
        decode: Verifies and decodes the contents of a file; raises ``DamagedError``.
    """
    content = bundle.image(arch, key)
    if content is not None:
        try:
            return decode(content)
        except _DAMAGED as reason:
            _say(f"a kernel of the bundle for {arch} is damaged: {reason}. It is compiled again")
    path = folder()
    if path is None:
        _warn_not_stored("there is no home directory, or no current one")
        return None
    file = path / name
    try:
        trusted.check_folder(str(path))
        return decode(trusted.read_file(str(file)))
    except FileNotFoundError:
        return None
    except _DAMAGED as reason:
        _say(f"{file} is damaged: {reason}. The kernel is compiled again")
    except (trusted.UntrustedError, OSError) as reason:
        _warn_not_stored(_words(reason), path)
    return None


def is_kept(arch: str, key: bytes, name: str) -> bool:
    """Return whether ``find`` would find a file, if it is not damaged; see there."""
    path = folder()
    return bundle.has(arch, key) or (path is not None and (path / name).is_file())


def keep(name: str, content: bytes) -> bool:
    """Write a kernel's file; whether the folder of compiled kernels can be used."""
    path = folder()
    if path is None:
        return False
    try:
        _prepare_folder(str(path))
        trusted.write_file(str(path / name), content)
    except (trusted.UntrustedError, OSError) as reason:
        _warn_not_stored(_words(reason), path)
        return False
    return True


def compile_and_store(plan: Any, arch: str) -> Image:
    """Compile a configuration and keep it on disk if its folder can be used.

    Raises:
        RuntimeError: if CuTeDSL is not installed.
    """
    made = compile_image(plan, target(plan, arch))
    made_from = key(plan, arch)
    keep(file_name(made_from), cubin_file.encode(made, made_from))
    return made


def _prepare_folder(path: str) -> None:
    """Check the folder, making it if the folders that exist above it are trusted."""
    try:
        trusted.check_folder(path)
    except FileNotFoundError:
        trusted.make_folder(path)
        trusted.check_folder(path)


def _warn_not_stored(reason: str, path: Path | None = None) -> None:
    where = f" in {path}" if path else ""
    _say(
        f"compiled kernels are not kept{where}: {reason}. Every process compiles them again; "
        f"set {CACHE_VARIABLE} to a folder that you alone can write"
    )


def _words(reason: Exception) -> str:
    """A reason without names of temporary files, so that it is the same every time."""
    return (isinstance(reason, OSError) and reason.strerror) or str(reason)


@functools.cache
def _say(text: str) -> None:
    """Log a warning, each text once per process."""
    _log.warning("%s", text)


def require_compiler(plan: Any) -> None:
    """Raise if a configuration has to be compiled here and CuTeDSL is not installed.

    Raises:
        RuntimeError: naming the kernel.
    """
    if compiler() is None:
        raise RuntimeError(
            f"{type(plan).__name__}: the kernel is not in {folder() or 'a cache'} and "
            f"{_PACKAGE} is not installed to compile it; pip install 'dsv4[cute]'"
        )


def kernel_of(plan: Any) -> Any:
    """The CuTeDSL kernel of a configuration, which holds it; imports CuTeDSL."""
    module, name = plan.kernel.split(":")
    return getattr(importlib.import_module(module), name)(plan)


def compile_image(plan: Any, arch: str) -> Image:
    """Compile a configuration; needs no GPU.

    Raises:
        RuntimeError: if CuTeDSL is not installed.
    """
    require_compiler(plan)
    with counts.of_this_process().compiling(type(plan).__name__):
        return _compiled_image(plan, arch)


def _compiled_image(plan: Any, arch: str) -> Image:
    os.environ.setdefault("CUTE_DSL_ARCH", arch)  # read at import, where there is no GPU to ask
    kernel = kernel_of(plan)
    with tempfile.TemporaryDirectory() as dump_folder:
        made = kernel.compile(f"--gpu-arch {arch} --keep-cubin --keep-ptx --dump-dir {dump_folder}")
        entry = re.search(r"\.entry (\w+)\(", made.__ptx__)
        assert entry is not None
        return Image(
            cubin=made.__cubin__,
            name=entry.group(1),
            threads=plan.threads,
            cluster=plan.ctas,
            shared_bytes=plan.shared_bytes,
        )
