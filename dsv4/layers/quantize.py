"""Quantise the layers of a model in place."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from dsv4.layers.experts import DeepseekV4Experts
from dsv4.layers.linear import Linear


def quantize_(
    model: nn.Module, format: str = "nvfp4", names: Iterable[str] = ("*",)
) -> tuple[str, ...]:
    """Quantise every plain ``Linear`` and ``DeepseekV4Experts`` whose name matches.

    Args:
        model: Any module; changed in place.
        format: ``"nvfp4"``, ``"mxfp4"`` or ``"fp8_block"``.
        names: Shell patterns over qualified module names, e.g. ``["*.mlp.experts"]``.

    Returns:
        The names of the layers that were quantised.

    Raises:
        TypeError: if ``names`` is one string, whose letters would be patterns, or holds another
            thing than strings.
        ValueError: if no layer matches, or a matching one cannot have the format.
    """
    if isinstance(names, str | bytes):
        raise TypeError(f"quantize_: names is {names!r}, wanted a list of patterns: [{names!r}]")
    patterns = tuple(names)
    for i, pattern in enumerate(patterns):
        if not isinstance(pattern, str):
            raise TypeError(f"quantize_: names[{i}] is {pattern!r}, wanted a pattern as str")
    chosen = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (Linear, DeepseekV4Experts))
        and module.format is None
        and any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    if not chosen:
        raise ValueError(f"quantize_: no plain layer matches {patterns}, wanted at least one")
    for module in chosen.values():
        module.quantize(format)
    return tuple(chosen)
