"""What a wheel and a source distribution may hold."""

from __future__ import annotations

from pathlib import Path

import pytest

import dsv4
from tools import release_contents as contents

ROOT = Path(dsv4.__file__).resolve().parent.parent
ABOUT = "dsv4-1.2.dist-info"
PACKAGE = ["dsv4/__init__.py", "dsv4/py.typed"]
WHEEL = [
    *PACKAGE,
    *(f"{ABOUT}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt")),
    f"{ABOUT}/licenses/LICENSE",
]
SDIST = [f"dsv4-1.2/{name}" for name in (*contents.NEEDED, "dsv4/py.typed", "tests/conftest.py")]
METADATA = "Metadata-Version: 2.4\nName: dsv4\nVersion: 1.2\n\nText\n"


def test_sound_distributions_pass() -> None:
    contents.check_wheel(WHEEL, METADATA, PACKAGE, "1.2")
    contents.check_sdist(SDIST, "1.2")


@pytest.mark.parametrize("name", [*PACKAGE, f"{ABOUT}/licenses/LICENSE", f"{ABOUT}/METADATA"])
def test_what_a_wheel_lacks_is_named(name: str) -> None:
    with pytest.raises(contents.ContentError, match=f"the wheel lacks {name}"):
        contents.check_wheel([n for n in WHEEL if n != name], METADATA, PACKAGE, "1.2")


@pytest.mark.parametrize("name", ["tests/conftest.py", "notes/a.md", "dsv4/forgotten.py"])
def test_what_does_not_belong_into_a_wheel_is_named(name: str) -> None:
    with pytest.raises(contents.ContentError, match=f"the wheel has {name}"):
        contents.check_wheel([*WHEEL, name], METADATA, PACKAGE, "1.2")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (METADATA.replace("1.2", "1.1"), "version is 1.1, wanted 1.2"),
        (METADATA.replace("\n\n", "\nProject-URL: Home, there\n\n"), "names a URL"),
    ],
)
def test_metadata_is_checked(metadata: str, message: str) -> None:
    with pytest.raises(contents.ContentError, match=message):
        contents.check_wheel(WHEEL, metadata, PACKAGE, "1.2")


@pytest.mark.parametrize("name", ["notes/index.md", "results/a.json", "tests/__pycache__/a.pyc"])
def test_what_a_source_distribution_leaves_out(name: str) -> None:
    with pytest.raises(contents.ContentError, match=f"the source distribution has {name}"):
        contents.check_sdist([*SDIST, f"dsv4-1.2/{name}"], "1.2")


def test_what_a_source_distribution_lacks_is_named() -> None:
    for name in SDIST[:-1]:
        with pytest.raises(contents.ContentError, match="the source distribution lacks"):
            contents.check_sdist([n for n in SDIST if n != name], "1.2")


def test_the_command_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert contents.main([str(tmp_path)]) == 1
    assert f"dsv4-{dsv4.__version__}-py3-none-any.whl" in capsys.readouterr().err


def test_the_version_is_that_of_the_package() -> None:
    assert contents.version() == dsv4.__version__
    assert {"dsv4/__init__.py", "dsv4/py.typed"} <= contents.tracked("dsv4")


def test_the_newest_heading_of_the_changelog_is_unreleased_or_this_version() -> None:
    headings = [
        line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")
    ]
    assert headings[0] == "## [Unreleased]" or headings[0].startswith(f"## [{dsv4.__version__}] - ")
