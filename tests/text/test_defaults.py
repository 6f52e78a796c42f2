"""Sampling as the generation_config.json of a checkpoint asks for it."""

from __future__ import annotations

import json

import pytest

from dsv4.serving import SamplingOptions
from dsv4.text.defaults import sampling_defaults


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (None, {"temperature": 1.0}),
        ({}, {"temperature": 1.0}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95},
            {"temperature": 0.6, "top_p": 0.95},
        ),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.95}, {"temperature": 0.0}),
        ({"top_k": 0, "top_p": None}, {"temperature": 1.0}),
        ({"top_k": 20, "bos_token_id": 0}, {"temperature": 1.0, "top_k": 20}),
        (
            {"min_p": 0.1, "repetition_penalty": 1.2},
            {"temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.2},
        ),
        (
            {"do_sample": False, "min_p": 0.1, "repetition_penalty": 1.2},
            {"temperature": 0.0, "repetition_penalty": 1.2},
        ),
    ],
)
def test_what_a_checkpoint_asks_for(values, expected, tmp_path):
    if values is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert sampling_defaults(tmp_path) == SamplingOptions(**expected)


@pytest.mark.parametrize("text", ['{"temperature": -1}', '{"top_p": "x"}', "{", "[]"])
def test_a_damaged_file_is_named(text, tmp_path):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        sampling_defaults(tmp_path)
