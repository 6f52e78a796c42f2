"""Re-lay the NVFP4 weights of a model for Hopper's tensor cores, and back."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from dsv4.formats import LINEAR
from dsv4.layers.linear import Linear, join_weights


@dataclass
class Packing:
    """What ``pack_`` did.

    Attributes:
        packed: Names of the linear layers that are packed now.
        joined: Names of those that share one matrix, per matrix.
        kept: Names of the others, and why each is as it was.
    """

    packed: list[str] = field(default_factory=list)
    joined: list[tuple[str, ...]] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)


def pack_(model: nn.Module) -> Packing:
    """Pack every ``Linear`` that can be, and join what is multiplied together.

    The values stay bit for bit. Memory holds the model and at most one more copy of one matrix (of
    a joined one the rows of all its layers). Pack after loading, quantising and moving; CUDA graphs
    that were captured before must be captured again. Routed experts are not packed.

    Args:
        model: Any module; changed in place.
    """
    report = Packing()
    for name, layer in model.named_modules():
        if isinstance(layer, Linear):
            try:
                layer.pack()
                report.packed.append(name)
            except ValueError as error:
                report.kept[name] = str(error)
    for name, module in model.named_modules():
        for group in getattr(module, "joined", ()):
            parts = [getattr(module, part) for part in group]
            if all(isinstance(part, Linear) for part in parts) and join_weights(parts):
                report.joined.append(tuple(f"{name}.{part}".lstrip(".") for part in group))
    return report


def unpack_(model: nn.Module) -> tuple[str, ...]:
    """Undo ``pack_``, bit for bit, one matrix at a time.

    Args:
        model: Any module; changed in place.

    Returns:
        The names of the layers that were packed.
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Linear) and module.layout != LINEAR
    }
    for layer in layers.values():
        layer.unpack()
    return tuple(layers)
