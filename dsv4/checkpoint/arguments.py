"""Checks of arguments of ``load``, ``fill`` and ``save``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch


def as_dtype(value: Any, what: str = "dtype") -> torch.dtype | None:
    """Return a floating dtype given as such or by name, e.g. ``"bfloat16"``; None stays None.

    Args:
        value: The argument.
        what: Name of the argument, for messages.

    Raises:
        ValueError: if plain weights cannot have it.
    """
    if value is None:
        return None
    dtype = value
    if isinstance(value, str):
        dtype = getattr(torch, value.removeprefix("torch."), None)
    plain = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    if not isinstance(dtype, torch.dtype) or dtype not in plain:
        names = ", ".join(map(str, plain))
        raise ValueError(f"{what} is {value!r}, wanted one of {names}, or None")
    return dtype


def check_reserve(tokens: Any) -> None:
    """Check the argument ``reserve_tokens``.

    Raises:
        TypeError: if it is neither an integer nor None.
        ValueError: if it is negative.
    """
    if tokens is None:
        return
    if isinstance(tokens, bool) or not isinstance(tokens, int):
        raise TypeError(f"reserve_tokens is {tokens!r}, wanted an integer")
    if tokens < 0:
        raise ValueError(f"reserve_tokens is {tokens}, wanted 0 or more")


def check_prepare(value: Any) -> None:
    """Check the argument ``prepare``.

    Raises:
        ValueError: if it has an unknown value.
    """
    if not isinstance(value, bool) and value != "kernels":
        raise ValueError(f"prepare is {value!r}, wanted True, 'kernels' or False")


def name_matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Return a function that says whether a name matches one of some shell patterns."""
    return lambda name: any(fnmatchcase(name, pattern) for pattern in patterns)
