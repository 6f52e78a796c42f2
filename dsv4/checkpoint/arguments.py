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


def as_device(value: Any) -> torch.device:
    """Return the device of a model, given as such or by name, e.g. ``"cuda:0"``.

    Raises:
        TypeError: if it is neither a device nor a name.
        ValueError: if there is no such device, or it is ``"meta"``, which holds no values.
    """
    expected = "wanted a device such as 'cuda', 'cuda:0' or 'cpu'"
    if not isinstance(value, (str, int, torch.device)) or isinstance(value, bool):
        raise TypeError(f"device is {value!r}, {expected}")
    try:
        device = torch.device(value)
    except RuntimeError as error:
        raise ValueError(f"device is {value!r}, {expected}") from error
    if device.type == "meta":
        raise ValueError(f"device is {value!r}, which holds no values, {expected}")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(f"device is {value!r}, and PyTorch finds {count} GPUs, {expected}")
    return device


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


class Patterns:
    """Shell patterns of names, and which of them matched.

    Args:
        patterns: The patterns.
        argument: Name of the argument that they are, for messages.

    Raises:
        TypeError: if they are no sequence of texts.
    """

    def __init__(self, patterns: Sequence[str], argument: str) -> None:
        if isinstance(patterns, str) or not all(isinstance(p, str) for p in patterns):
            raise TypeError(f"{argument} is {patterns!r}, wanted a sequence of patterns")
        self._patterns = tuple(patterns)
        self._argument = argument
        self._unmatched = set(self._patterns)

    def __call__(self, name: str) -> bool:
        """Return whether a name matches one of them."""
        matching = {pattern for pattern in self._patterns if fnmatchcase(name, pattern)}
        self._unmatched -= matching
        return bool(matching)

    def check_all_matched(self) -> None:
        """Raise if one of them matched no name so far.

        Raises:
            ValueError: naming it.
        """
        for pattern in self._patterns:
            if pattern in self._unmatched:
                raise ValueError(
                    f"{self._argument} has {pattern!r}, which no name matches, wanted patterns of "
                    "canonical names such as 'mtp.*'"
                )


def name_matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Return a function that says whether a name matches one of some shell patterns."""
    return lambda name: any(fnmatchcase(name, pattern) for pattern in patterns)
