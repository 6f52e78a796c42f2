"""Write a checkpoint in another layout, then verify what was written.

    pip install dsv4
    python examples/convert_checkpoint.py DeepSeek-V4-Flash-NVFP4 converted --layout bf16

Tensors are read, converted and written one after another, so memory holds a few of them. An
interrupted conversion leaves the target as it was. On the command line: python -m dsv4 convert.
"""

from __future__ import annotations

import argparse
from collections import Counter

from dsv4.checkpoint import Checkpoint, convert, verify

LAYOUTS = ("nvidia", "deepseek", "transformers", "compressed-tensors", "bf16")


def describe(path: str) -> None:
    """Print who wrote a checkpoint, and how many tensors of each format it has."""
    with Checkpoint.open(path) as checkpoint:
        formats = Counter(
            str(entry.weight.dtype) if entry.format is None else entry.format.name
            for entry in checkpoint.entries.values()
        )
        print(f"{path}: by {checkpoint.producer}, {checkpoint.nbytes / 1e6:.1f} MB")
        for name, number in formats.most_common():
            print(f"  {number} x {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert a checkpoint and verify the result.")
    parser.add_argument("path", help="folder of a checkpoint in any known layout")
    parser.add_argument("target", help="another folder")
    parser.add_argument("--layout", choices=LAYOUTS, default="compressed-tensors")
    options = parser.parse_args()

    describe(options.path)
    # Compares what it wrote with the source, tensor by tensor.
    convert(options.path, options.target, layout=options.layout)
    # Reads all values again, as load would: names, shapes, scales, NaN.
    nbytes = verify(options.target)
    describe(options.target)
    print(f"{options.target}: {nbytes / 1e6:.1f} MB read, sound")


if __name__ == "__main__":
    main()
