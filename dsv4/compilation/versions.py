"""Versions of what compiled kernels are made from and with."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass, fields
from pathlib import Path

import dsv4

CUTEDSL = "nvidia-cutlass-dsl"
_PACKAGE = Path(__file__).parent.parent


@dataclass(frozen=True)
class Versions:
    """The versions that a set of compiled kernels depends on.

    Attributes:
        dsv4: Version of this package.
        sources: SHA-256 of the kernels' sources.
        triton: Version of Triton; empty if it is not installed.
        cutedsl: Version of CuTeDSL; empty if it is not installed.
    """

    dsv4: str
    sources: str
    triton: str
    cutedsl: str

    @classmethod
    def current(cls) -> Versions:
        """Return the versions of this process."""
        return cls(dsv4.__version__, sources(), _version("triton"), compiler() or "")

    def difference(self, other: Versions) -> str | None:
        """Names and values of the first field that differs, or None."""
        for field in fields(self):
            own, its = getattr(self, field.name), getattr(other, field.name)
            if own != its:
                return f"{field.name} is {own or 'not installed'}, here {its or 'not installed'}"
        return None


def compiler() -> str | None:
    """Version of the installed CuTeDSL, None if it is not installed."""
    return None if importlib.util.find_spec("cutlass") is None else _compiler_version()


@functools.cache
def _compiler_version() -> str:
    """Read from files once: the key of each kernel has it."""
    return _version(CUTEDSL) or "unknown"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def sources() -> str:
    """SHA-256 of every source that can change a kernel, CuTeDSL's and Triton's."""
    return digest(("cute", "triton"))


@functools.cache
def digest(folders: tuple[str, ...]) -> str:
    """SHA-256 of the sources in some folders of this package and of the layouts they share."""
    files = [file for folder in folders for file in sorted((_PACKAGE / folder).rglob("*.py"))]
    files.append(_PACKAGE / "quant" / "fragments.py")
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
