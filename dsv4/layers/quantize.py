"""Quantise the layers of a model in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

from torch import nn

from dsv4.layers._module import quantize_pair
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.layers.linear import Linear


def quantize_(
    model: nn.Module, format: str = "nvfp4", names: Iterable[str] = ("*",)
) -> tuple[str, ...]:
    """Quantise every plain ``Linear`` and ``DeepseekV4Experts`` whose name matches.

    Gate and up of an MLP share one global scale in NVFP4 if both match.

    Args:
        model: Any module; changed in place.
        format: ``"nvfp4"``, ``"mxfp4"`` or ``"fp8_block"``.
        names: Shell patterns over qualified module names, e.g. ``["*.mlp.experts"]``.

    Returns:
        The names of the layers that were quantised.

    Raises:
        TypeError: if ``names`` is one string, whose letters would be patterns, or has items that
            are not strings.
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
    paired = set(_pairs(chosen))
    for gate, up in paired:
        parts = quantize_pair(gate.weight.detach(), up.weight.detach(), format)
        for layer, part in zip((gate, up), parts, strict=True):
            layer.set_weight(part)
    quantized = {layer for pair in paired for layer in pair}
    for module in chosen.values():
        if module not in quantized:
            module.quantize(format)
    return tuple(chosen)


def _pairs(chosen: Mapping[str, nn.Module]) -> Iterator[tuple[Linear, Linear]]:
    """Return gate and up of each MLP of which both are chosen."""
    for name, gate in chosen.items():
        stem, is_gate, _ = name.rpartition("gate_proj")
        up = chosen.get(f"{stem}up_proj") if is_gate else None
        if isinstance(gate, Linear) and isinstance(up, Linear):
            yield gate, up
