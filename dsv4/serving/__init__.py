"""Serving: a runner that decodes many requests together, in captured CUDA graphs on a GPU."""

from __future__ import annotations

from dsv4.serving.options import SamplingOptions
from dsv4.serving.request import Request, RequestError, TokenLogprobs
from dsv4.serving.runner import Runner

__all__ = ["Request", "RequestError", "Runner", "SamplingOptions", "TokenLogprobs"]
