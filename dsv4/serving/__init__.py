"""Serving: a runner that decodes many requests together, in captured CUDA graphs on a GPU.

Public names are loaded on first use, so that a model may import the checks of its arguments.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_LAZY = {
    "LogitsError": "request",
    "Prepared": "kept_runner",
    "Request": "request",
    "RequestError": "request",
    "Runner": "runner",
    "Sampler": "sampling",
    "SamplingOptions": "options",
    "TokenLogprobs": "request",
    "prepare": "kept_runner",
    "release": "kept_runner",
}

__all__ = [
    "LogitsError",
    "Prepared",
    "Request",
    "RequestError",
    "Runner",
    "Sampler",
    "SamplingOptions",
    "TokenLogprobs",
    "prepare",
    "release",
]

if TYPE_CHECKING:  # the same names as in _LAZY, so that type checkers see them
    from dsv4.serving.kept_runner import Prepared as Prepared
    from dsv4.serving.kept_runner import prepare as prepare
    from dsv4.serving.kept_runner import release as release
    from dsv4.serving.options import SamplingOptions as SamplingOptions
    from dsv4.serving.request import LogitsError as LogitsError
    from dsv4.serving.request import Request as Request
    from dsv4.serving.request import RequestError as RequestError
    from dsv4.serving.request import TokenLogprobs as TokenLogprobs
    from dsv4.serving.runner import Runner as Runner
    from dsv4.serving.sampling import Sampler as Sampler


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'dsv4.serving' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dsv4.serving.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
