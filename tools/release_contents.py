"""Check what a wheel and a source distribution hold: ``python tools/release_contents.py DIST``.

Names in the wheel are compared with the files of dsv4/ that git tracks. The first line that is
wrong ends with status 1; otherwise sizes are printed.
"""

from __future__ import annotations

import argparse
import email
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Folders of the repository that a source distribution leaves out: a notebook and measurements.
LEFT_OUT = ("notes/", "results/", ".ci/")
NEEDED = ("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "PKG-INFO", "Makefile")


class ContentError(ValueError):
    """A distribution that lacks something, or has too much."""


def version() -> str:
    """The version that dsv4/__init__.py says."""
    source = (ROOT / "dsv4" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if match is None:
        raise ContentError("dsv4/__init__.py has no __version__")
    return match[1]


def tracked(folder: str) -> set[str]:
    """Files of a folder that git tracks."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", folder]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.split("\0") if name}


def check_wheel(names: Iterable[str], metadata: str, package: Iterable[str], number: str) -> None:
    """Check the names and the metadata of a wheel.

    Args:
        names: Of its files.
        metadata: Text of its METADATA.
        package: Files that dsv4/ has.
        number: The version.

    Raises:
        ContentError: naming what is missing or too much.
    """
    files = set(names)
    about = f"dsv4-{number}.dist-info"
    rest = files - set(package)
    for missing in sorted(set(package) - files):
        raise ContentError(f"the wheel lacks {missing}")
    for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"):
        if f"{about}/{name}" not in files:
            raise ContentError(f"the wheel lacks {about}/{name}")
    for name in sorted(rest):
        if not name.startswith(f"{about}/"):
            raise ContentError(f"the wheel has {name}, which is no file of dsv4/ that git tracks")
    if "dsv4/py.typed" not in files:
        raise ContentError("the wheel lacks dsv4/py.typed")
    fields = email.message_from_string(metadata)
    if fields["Version"] != number:
        raise ContentError(f"the wheel's version is {fields['Version']}, wanted {number}")
    if fields.get_all("Project-URL") or fields["Home-page"]:
        raise ContentError("the wheel names a URL of the project, which the owner chooses")


def check_sdist(names: Iterable[str], number: str) -> None:
    """Check the names of a source distribution.

    Raises:
        ContentError: naming what is missing or too much.
    """
    top = f"dsv4-{number}/"
    files = set()
    for name in names:
        if not name.startswith(top):
            raise ContentError(f"the source distribution has {name}, which is not below {top}")
        files.add(name.removeprefix(top))
    for name in (*NEEDED, "dsv4/py.typed"):
        if name not in files:
            raise ContentError(f"the source distribution lacks {name}")
    for name in sorted(files):
        if name.startswith(LEFT_OUT) or "__pycache__" in name:
            raise ContentError(f"the source distribution has {name}")


def check(folder: Path) -> list[str]:
    """Check both distributions in a folder; a line on each.

    Raises:
        ContentError: naming what is missing or too much.
    """
    number = version()
    wheel = folder / f"dsv4-{number}-py3-none-any.whl"
    sdist = folder / f"dsv4-{number}.tar.gz"
    for file in (wheel, sdist):
        if not file.is_file():
            raise ContentError(f"there is no {file}")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(f"dsv4-{number}.dist-info/METADATA").decode()
        check_wheel(names, metadata, tracked("dsv4"), number)
    lines = [f"{wheel.name}: {len(names)} files, {wheel.stat().st_size / 1e6:.2f} MB"]
    with tarfile.open(sdist) as archive:
        names = [member.name for member in archive.getmembers() if member.isfile()]
        check_sdist(names, number)
    return [*lines, f"{sdist.name}: {len(names)} files, {sdist.stat().st_size / 1e6:.2f} MB"]


def main(arguments: list[str] | None = None) -> int:
    """Check a folder; the exit status."""
    parser = argparse.ArgumentParser(description="Check what a wheel and an sdist hold.")
    parser.add_argument("folder", type=Path, help="that has both, dist for instance")
    try:
        lines = check(parser.parse_args(arguments).folder)
    except ContentError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
