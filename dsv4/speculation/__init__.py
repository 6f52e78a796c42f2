"""Speculative decoding: drafts of tokens that the model then verifies (specification, section 18).

Public names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_LAZY = {
    "Drafted": "dspark",
    "DSparkDraft": "dspark",
    "argmax": "dspark",
}

__all__ = ["DSparkDraft", "Drafted", "argmax"]

if TYPE_CHECKING:  # the same names as in _LAZY, so that type checkers see them
    from dsv4.speculation.dspark import Drafted as Drafted
    from dsv4.speculation.dspark import DSparkDraft as DSparkDraft
    from dsv4.speculation.dspark import argmax as argmax


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'dsv4.speculation' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dsv4.speculation.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
