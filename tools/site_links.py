"""Hook of mkdocs: pages of ``results/`` join the site, and other links that leave it become paths.

Documents link to source files and the notebook, which the site does not hold. In the repository
these links work, and ``tests/project/test_citations.py`` follows them. Pages and data of
``results/`` lie beside ``docs/`` in the repository and below it in the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = "results"

_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])+)\]\(((?:\.\./)+[^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the files of ``results/``; mkdocs calls it once."""
    from mkdocs.structure.files import File

    folder = ROOT / RESULTS
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(ROOT).as_posix()
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page; mkdocs calls it before it renders one."""
    return rewrite(markdown, in_repository(page.file.src_uri))


def in_repository(uri: str) -> str:
    """Path of a page of the site in the repository."""
    return uri if uri.startswith(f"{RESULTS}/") else posixpath.join("docs", uri)


def in_site(path: str) -> str | None:
    """Path in the site of a file of the repository; None if the site does not hold it."""
    if path.startswith(f"{RESULTS}/"):
        return path
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def rewrite(markdown: str, document: str) -> str:
    """``markdown`` with links that hold in the site.

    Args:
        markdown: Text of a document.
        document: Its path in the repository.
    """
    pieces, start = [], 0
    for fence in _FENCE.finditer(markdown):
        pieces += [_links(markdown[start : fence.start()], document), fence[0]]
        start = fence.end()
    return "".join([*pieces, _links(markdown[start:], document)])


def _links(text: str, document: str) -> str:
    folder = posixpath.dirname(document)
    from_here = posixpath.dirname(in_site(document) or "")

    def replacement(match: re.Match[str]) -> str:
        title = match[1]
        target, anchor, section = match[2].partition("#")
        path = posixpath.normpath(posixpath.join(folder, target))
        address = in_site(path)
        if address is not None:
            link = posixpath.relpath(address, from_here or ".")
            return f"[{title}]({link}{anchor}{section})"
        plain = title.strip("`")
        return f"`{path}`" if path.endswith(plain) else f"{title} (`{path}`)"

    return _LINK.sub(replacement, text)
