"""A small tokenizer, whose ids fit a model of a few hundred."""

from __future__ import annotations

from dsv4.text import markers


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
