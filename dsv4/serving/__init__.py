"""Serving: a runner that decodes many requests together, in captured CUDA graphs on a GPU."""

from __future__ import annotations

from dsv4.serving.kept_runner import Prepared, prepare, release
from dsv4.serving.options import SamplingOptions
from dsv4.serving.request import LogitsError, Request, RequestError, TokenLogprobs
from dsv4.serving.runner import Runner

__all__ = [
    "LogitsError",
    "Prepared",
    "Request",
    "RequestError",
    "Runner",
    "SamplingOptions",
    "TokenLogprobs",
    "prepare",
    "release",
]
