"""``python -m dsv4 vllm-report``: what the vLLM plugin knows, and what it replaced."""

from __future__ import annotations

import argparse

from dsv4.integrations.vllm import command_line


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "vllm-report",
        help="what the vLLM plugin knows, and what it replaced",
        description=command_line.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--last", action="store_true", help="the last saved table alone")


def run(options: argparse.Namespace) -> int:
    """Print the report."""
    print(command_line.text(options.last))
    return 0
