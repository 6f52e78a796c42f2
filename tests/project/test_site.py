"""The site: every page is in its navigation, every public name has a place, links work there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from dsv4 import layers, ops

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
pytestmark = pytest.mark.skipif(not (ROOT / "mkdocs.yml").exists(), reason="no mkdocs.yml here")


def hook():
    spec = importlib.util.spec_from_file_location("site_links", ROOT / "tools" / "site_links.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_navigation_has_every_page_once() -> None:
    named = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())
    pages = [str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md")]
    pages += [str(p.relative_to(ROOT)) for p in (ROOT / "results").rglob("*.md")]
    assert sorted(named) == sorted(pages)


@pytest.mark.parametrize(("package", "page"), [(ops, "ops"), (layers, "layers")])
def test_every_public_name_has_a_place_in_the_reference(package, page: str) -> None:
    listed = re.findall(r"^::: [\w.]+\.(\w+)$", (DOCS / "api" / f"{page}.md").read_text(), re.M)
    elsewhere = {"Pages"}  # in api/cache.md
    assert sorted(listed) == sorted({*package.__all__} - elsewhere)


@pytest.mark.parametrize("page", sorted((DOCS / "api").glob("*.md")), ids=lambda p: p.stem)
def test_names_in_the_reference_exist(page: Path) -> None:
    for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.M):
        module, _, attribute = name.rpartition(".")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), attribute), name


def test_links_of_llms_txt_are_pages() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", (DOCS / "llms.txt").read_text()):
        page = ROOT / hook().in_repository(target).rstrip("/")
        assert page.with_suffix(".md").exists() or (page / "index.md").exists(), target


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](../dsv4/ops/gemm.py)", "a (`dsv4/ops/gemm.py`)"),
        ("[`gemm.py`](../dsv4/ops/gemm.py#x)", "`dsv4/ops/gemm.py`"),
        ("[design](design.md#here)", "[design](design.md#here)"),
        ("[[1]](../notes/a.md) and ![p](../x.png)", "[1] (`notes/a.md`) and ![p](../x.png)"),
        ("```\n[a](../b.md)\n```\n[a](../b/c.md)", "```\n[a](../b.md)\n```\na (`b/c.md`)"),
    ],
)
def test_links_that_leave_the_site_become_paths(text: str, expected: str) -> None:
    assert hook().rewrite(text, "docs/page.md") == expected


@pytest.mark.parametrize(
    ("document", "text", "expected"),
    [
        ("docs/page.md", "[a](../results/index.md)", "[a](results/index.md)"),
        ("docs/kernels/k.md", "[a](../../results/g/index.md#b)", "[a](../results/g/index.md#b)"),
        ("results/g/index.md", "[a](../../docs/page.md#b)", "[a](../../page.md#b)"),
        ("results/g/index.md", "[a](../index.md) [b](x.json)", "[a](../index.md) [b](x.json)"),
        ("results/index.md", "[a](../notes/index.md)", "a (`notes/index.md`)"),
    ],
)
def test_pages_of_results_are_in_the_site(document: str, text: str, expected: str) -> None:
    assert hook().rewrite(text, document) == expected
    assert hook().in_repository(document.removeprefix("docs/")) == document


def test_links_between_folders_of_the_site_stay() -> None:
    text = "[s](../specification.md) [n](../../notes/index.md)"
    expected = "[s](../specification.md) n (`notes/index.md`)"
    assert hook().rewrite(text, "docs/kernels/page.md") == expected
