"""Old paths of public modules work for one release, with a warning."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import dsv4

FOLDER = Path(dsv4.__file__).parent / "_moved"
MOVED = sorted(
    ".".join(file.relative_to(FOLDER).with_suffix("").parts)
    for file in FOLDER.rglob("*.py")
    if file.stem != "__init__"
)


@pytest.mark.parametrize("name", MOVED)
def test_an_old_path_is_the_new_module_and_warns(name: str) -> None:
    sys.modules.pop(f"dsv4.{name}", None)
    with pytest.warns(DeprecationWarning, match=rf"dsv4\.{name} is now dsv4\.\w+\.\w+") as found:
        module = importlib.import_module(f"dsv4.{name}")
    new = str(found[0].message).split(" is now ")[1].split(";")[0]
    assert module is importlib.import_module(new)
    assert module.__name__ == new


def test_the_warning_names_the_line_that_imports() -> None:
    code = "import dsv4\nfrom dsv4.formats import NVFP4\nassert NVFP4 is dsv4.NVFP4"
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "<string>:2: DeprecationWarning: dsv4.formats is now dsv4.quant.formats" in done.stderr


def test_nothing_of_the_package_uses_them() -> None:
    code = "import dsv4, dsv4.serving, dsv4.checkpoint, dsv4.layers, dsv4.ops, dsv4.debug"
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:dsv4", "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
