"""Compiled kernels, kept on disk.

A file is named by a hash of the configuration, the architecture, the compiler's version and this
package's kernel sources, so a changed source is another file. What is found there is loaded without
importing CuTeDSL. The folder is ``$DSV4_CACHE_DIR`` or ``~/.cache/dsv4/kernels``.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from dsv4.cute._architectures import FAMILIES
from dsv4.cute._driver import Image

CACHE_VARIABLE = "DSV4_CACHE_DIR"
_PACKAGE = "nvidia-cutlass-dsl"


def folder() -> Path:
    """Where compiled kernels are kept."""
    given = os.environ.get(CACHE_VARIABLE)
    return Path(given) if given else Path.home() / ".cache" / "dsv4" / "kernels"


def compiler() -> str | None:
    """Version of the installed CuTeDSL, None if it is not installed."""
    if importlib.util.find_spec("cutlass") is None:
        return None
    try:
        return importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@functools.cache
def _sources() -> str:
    """Hash of every source that can change a kernel."""
    here = Path(__file__).parent
    files = sorted([*here.rglob("*.py"), here.parent / "fragments.py"])
    return hashlib.sha256(b"\0".join(f.read_bytes() for f in files)).hexdigest()


def target(plan: Any, arch: str) -> str:
    """What a configuration is compiled for: ``arch``, or its family if the kernel is for that."""
    return FAMILIES.get(arch, arch) if getattr(plan, "for_family", False) else arch


def path(plan: Any, arch: str) -> Path:
    """The file of a configuration."""
    made_for = target(plan, arch)
    what = [type(plan).__name__, dataclasses.asdict(plan), made_for, compiler(), _sources()]
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]
    return folder() / f"{key}.cubin"


def image(plan: Any, arch: str) -> Image:
    """The compiled kernel of a configuration: from disk, or compiled now and kept.

    Args:
        plan: A frozen dataclass with ``kernel`` (``"module:class"``), ``threads``, ``blocks`` and
            ``shared_bytes``, and ``for_family`` if one image is for a family of architectures.
        arch: One of ``_architectures.ARCHITECTURES``.

    Raises:
        RuntimeError: if it has to be compiled and CuTeDSL is not installed.
    """
    file = path(plan, arch)
    try:
        head, _, cubin = file.read_bytes().partition(b"\n")
        return Image(cubin=cubin, **json.loads(head))
    except (FileNotFoundError, ValueError, TypeError):
        pass
    made = compile_image(plan, target(plan, arch))
    _keep(file, made)
    return made


def _keep(file: Path, made: Image) -> None:
    """Write next to the place and rename, so that no other process reads half a file."""
    fields = dataclasses.asdict(made)
    cubin = fields.pop("cubin")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(handle, "wb") as out:
            out.write(json.dumps(fields).encode() + b"\n" + cubin)
        os.replace(name, file)
    except OSError:
        return  # a folder that cannot be written costs time, nothing else


def compile_image(plan: Any, arch: str) -> Image:
    """Compile a configuration; needs no GPU.

    Raises:
        RuntimeError: if CuTeDSL is not installed.
    """
    if compiler() is None:
        raise RuntimeError(
            f"{type(plan).__name__}: the kernel is not in {folder()} and {_PACKAGE} is not "
            "installed to compile it; pip install 'dsv4[cute]'"
        )
    os.environ.setdefault("CUTE_DSL_ARCH", arch)  # read at import, where there is no GPU to ask
    module, name = plan.kernel.split(":")
    kernel = getattr(importlib.import_module(module), name)(**dataclasses.asdict(plan))
    with tempfile.TemporaryDirectory() as room:
        made = kernel.compile(f"--gpu-arch {arch} --keep-cubin --keep-ptx --dump-dir {room}")
        found = re.search(r"\.entry (\w+)\(", made.__ptx__)
        assert found is not None
        return Image(
            cubin=made.__cubin__,
            name=found.group(1),
            threads=plan.threads,
            cluster=plan.blocks,
            shared_bytes=plan.shared_bytes,
        )
