"""Hook of mkdocs: links that leave ``docs/`` become the path in the repository.

Documents link to source files, the notebook and results, which the site does not hold. In the
repository these links work, and ``tests/project/test_citations.py`` follows them.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])+)\]\(((?:\.\./)+[^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page; mkdocs calls it before it renders one."""
    return rewrite(markdown, posixpath.join("docs", page.file.src_uri))


def rewrite(markdown: str, document: str) -> str:
    """``markdown`` without links that leave ``docs/``.

    Args:
        markdown: Text of a document.
        document: Its path in the repository.
    """
    folder = posixpath.dirname(document)
    pieces, start = [], 0
    for fence in _FENCE.finditer(markdown):
        pieces += [_links(markdown[start : fence.start()], folder), fence[0]]
        start = fence.end()
    return "".join([*pieces, _links(markdown[start:], folder)])


def _links(text: str, folder: str) -> str:
    def replacement(match: re.Match[str]) -> str:
        title, target = match[1], match[2].partition("#")[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if path.startswith("docs/"):
            return match[0]
        plain = title.strip("`")
        return f"`{path}`" if path.endswith(plain) else f"{title} (`{path}`)"

    return _LINK.sub(replacement, text)
