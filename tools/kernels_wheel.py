"""Make the wheel ``dsv4-kernels`` of bundles of compiled kernels.

    python tools/kernels_wheel.py FOLDER BUNDLE...

A bundle is what ``python -m dsv4 warmup --out`` wrote, one for each GPU architecture. The wheel is
written to the folder; equal bundles give equal bytes. ``dsv4`` reads the files without importing
the package.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import sys
import zipfile
from pathlib import Path

from dsv4.compilation import bundle as _bundle

_DATE = (1980, 1, 1, 0, 0, 0)  # the first that an archive can hold
_INIT = b'"""Compiled kernels of dsv4, which reads the files beside this one."""\n'


def make(folder: Path, paths: list[Path]) -> Path:
    """Write the wheel; returns where.

    Raises:
        dsv4.compilation.bundle.BundleError: if a bundle cannot be used with the installed dsv4.
        ValueError: if there is no bundle, or two are for one architecture.
    """
    bundles = {path: _bundle.read(path) for path in paths}
    if not bundles:
        raise ValueError("there is no bundle, wanted one or more")
    archs = [bundle.arch for bundle in bundles.values()]
    if len(set(archs)) < len(archs):
        raise ValueError(f"bundles are for {', '.join(archs)}, wanted one for each architecture")
    version = next(iter(bundles.values())).versions.dsv4
    files = {f"{_bundle.PACKAGE}/__init__.py": _INIT}
    for path, bundle in bundles.items():
        files[f"{_bundle.PACKAGE}/{bundle.arch}{_bundle.ENDING}"] = path.read_bytes()
    about = f"{_bundle.PACKAGE}-{version}.dist-info"
    files[f"{about}/METADATA"] = _metadata(version, sorted(archs)).encode()
    files[f"{about}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: dsv4\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    record = [_line(name, content) for name, content in files.items()]
    files[f"{about}/RECORD"] = "".join([*record, f"{about}/RECORD,,\n"]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{_bundle.PACKAGE}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, _DATE)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return wheel


def _metadata(version: str, archs: list[str]) -> str:
    return (
        "Metadata-Version: 2.1\n"
        "Name: dsv4-kernels\n"
        f"Version: {version}\n"
        f"Summary: Compiled kernels of dsv4 for {', '.join(archs)}\n"
        "License: Apache-2.0\n"
        f"Requires-Dist: dsv4=={version}\n"
    )


def _line(name: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}\n"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the wheel goes")
    parser.add_argument("bundles", type=Path, nargs="+", metavar="BUNDLE")
    options = parser.parse_args()
    try:
        print(make(options.folder, options.bundles))
    except (_bundle.BundleError, OSError, ValueError) as error:
        print(f"kernels_wheel: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
