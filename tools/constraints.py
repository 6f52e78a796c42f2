"""Write the exact versions of an environment to a constraints file, or fit such a file to a torch.

``python tools/constraints.py write FILE`` writes what is installed beside the Python that runs it.
``python tools/constraints.py fit FILE`` prints the constraints that the installed torch admits.

A constraints file names neither torch nor the CUDA libraries that come with a build of it: the
Makefile's ``TORCH`` chooses those. Builds with CUDA also bound the versions of other packages, of
Triton for example; there torch's own version stays, and ``fit`` leaves the constraint out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

# pip is in every environment that the Makefile makes; packaging alone is not yet.
from pip._vendor.packaging.requirements import Requirement

_NOT_LISTED = re.compile(r"dsv4|pip|torch|cuda-toolkit|nvidia-(?!cutlass-dsl).*")


def canonical(name: str) -> str:
    """Name of a package as package indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(installed: Mapping[str, str]) -> list[str]:
    """``name==version`` of every package but torch, what comes with its build, and dsv4.

    Args:
        installed: Version of each package, without a local part such as ``+cpu``.
    """
    named = {canonical(name): version for name, version in installed.items()}
    return [f"{n}=={v}" for n, v in sorted(named.items()) if not _NOT_LISTED.fullmatch(n)]


def fitting(constraints: Iterable[str], requires: Iterable[str]) -> list[str]:
    """Constraints whose versions the requirements admit, or that no requirement names.

    Args:
        constraints: Lines of a constraints file; comments and empty lines are left out.
        requires: Requirements of an installed package, as its metadata has them.
    """
    bounds: dict[str, list[Requirement]] = {}
    for line in requires:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            bounds.setdefault(canonical(requirement.name), []).append(requirement)
    fitting_pins = []
    for line in constraints:
        pin = line.partition("#")[0].strip()
        name, equal, version = pin.partition("==")
        if not pin:
            continue
        if not equal:
            raise ValueError(f"a constraint is {pin!r}, wanted name==version")
        admitted = [r.specifier.contains(version, prereleases=True) for r in bounds.get(name, [])]
        if all(admitted):
            fitting_pins.append(pin)
    return fitting_pins


def _installed() -> dict[str, str]:
    return {d.metadata["Name"]: d.version for d in metadata.distributions()}


def _write(path: Path) -> None:
    python, torch = sys.version_info[:2], metadata.version("torch")
    header = [
        f"# Versions that the tests passed with: Python {python[0]}.{python[1]}, torch {torch}.",
        "# Written by `make constraints`.",
    ]
    path.write_text("\n".join([*header, *pins(_installed())]) + "\n")


def _main(arguments: list[str]) -> int:
    match arguments:
        case ["write", path]:
            _write(Path(path))
        case ["fit", path]:
            lines = Path(path).read_text().splitlines()
            print("\n".join(fitting(lines, metadata.requires("torch") or [])))
        case _:
            print(f"arguments are {arguments}, wanted: write FILE, or fit FILE", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
