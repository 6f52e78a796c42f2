"""``python -m dsv4 convert``: a checkpoint in another layout."""

from __future__ import annotations

import argparse
import sys

from dsv4.commands.checkpoints import size_text

_LAYOUTS = ("nvidia", "deepseek", "transformers", "compressed-tensors", "bf16")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "convert",
        help="write a checkpoint in another layout",
        description="Write a checkpoint in another layout, tensor by tensor, and compare what was "
        "written with the source. Interrupted, it leaves the target as it was.",
    )
    parser.add_argument("path", metavar="PATH", help="folder of a checkpoint in any known layout")
    parser.add_argument("target", metavar="TARGET", help="another folder, made if missing")
    parser.add_argument("--layout", choices=_LAYOUTS, default="nvidia", help="default: nvidia")
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint in TARGET")


def run(options: argparse.Namespace) -> int:
    """Convert; returns the exit status."""
    from dsv4.checkpoint import convert

    nbytes = convert(
        options.path,
        options.target,
        layout=options.layout,
        overwrite=options.overwrite,
        progress=sys.stderr.isatty(),
    )
    size = size_text(nbytes)
    print(f"{options.target}: {size} of tensors in layout {options.layout}, compared")
    return 0
