"""Arguments that callers may spell in more than one way."""

from __future__ import annotations

from typing import Any

import torch


def as_dtype(value: Any, what: str = "dtype") -> torch.dtype | None:
    """A floating dtype given as such or by name, such as ``"bfloat16"``; None stays None.

    Args:
        value: The argument.
        what: Its name, for messages.

    Raises:
        ValueError: if it is no floating dtype of plain weights.
    """
    found = value
    if isinstance(value, str):
        found = getattr(torch, value.removeprefix("torch."), None)
    if found is None and not isinstance(value, str):
        return None
    plain = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    if not isinstance(found, torch.dtype) or found not in plain:
        names = ", ".join(map(str, plain))
        raise ValueError(f"{what} is {value!r}, wanted one of {names}, or None")
    return found


def check_reserve(tokens: Any) -> None:
    """Check the argument ``reserve_tokens``.

    Raises:
        TypeError: if it is no integer.
        ValueError: if it is negative.
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int):
        raise TypeError(f"reserve_tokens is {tokens!r}, wanted an integer")
    if tokens < 0:
        raise ValueError(f"reserve_tokens is {tokens}, wanted 0 or more")


def check_prepare(value: Any) -> None:
    """Check the argument ``prepare``.

    Raises:
        ValueError: if it is none of its values.
    """
    if not isinstance(value, bool) and value != "kernels":
        raise ValueError(f"prepare is {value!r}, wanted True, 'kernels' or False")
