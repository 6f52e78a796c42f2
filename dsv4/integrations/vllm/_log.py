"""The plugin's logger, with the format and level of vLLM's own."""

from __future__ import annotations

from logging import Logger


def logger() -> Logger:
    """Return it; imports vLLM's logger, because its handlers serve names below ``vllm`` alone."""
    from vllm.logger import init_logger

    return init_logger("vllm.plugins.dsv4")
