"""Text in, text out: tokenizer, chat prompts, parsing of answers, generation of text.

Needs the package ``tokenizers`` (``pip install "dsv4[text]"``), which nothing else in dsv4 imports.
Public names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_LAZY = {
    "TextStream": "stream",
    "Tokenizer": "tokenizer",
}

__all__ = [
    "TextStream",
    "Tokenizer",
]

if TYPE_CHECKING:  # the same names as in _LAZY, so that type checkers see them
    from dsv4.text.stream import TextStream as TextStream
    from dsv4.text.tokenizer import Tokenizer as Tokenizer


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'dsv4.text' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dsv4.text.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
