"""Sampling that a checkpoint asks for: its generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsv4.config.json_file import parse, read_bytes
from dsv4.serving.options import SamplingOptions

FILE = "generation_config.json"
_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(folder: str | Path) -> SamplingOptions:
    """Options of a checkpoint's folder; where it says nothing, DeepSeek's: temperature 1, top_p 1.

    Raises:
        ValueError: if the file is damaged, or a value is out of range.
    """
    file = Path(folder) / FILE
    try:
        values: dict[str, Any] = parse(read_bytes(file), str(file))
    except FileNotFoundError:
        values = {}
    own = {name: values[name] for name in _FIELDS if values.get(name) is not None}
    if own.get("top_k") == 0:  # transformers writes 0 for all tokens
        del own["top_k"]
    if values.get("do_sample") is False:
        penalty = {name: value for name, value in own.items() if name == "repetition_penalty"}
        own = {"temperature": 0.0, **penalty}
    try:
        return SamplingOptions(**{"temperature": 1.0, **own})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error
