"""Re-lay the NVFP4 weights of a model for tensor cores, and back."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from dsv4.formats import FRAGMENTS, LINEAR
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.layers.linear import PACKED_LAYOUTS, Linear, join_weights

_KINDS = (Linear, DeepseekV4Experts)


@dataclass
class Packing:
    """What ``pack_`` did.

    Attributes:
        packed: Names of the linear layers and routed experts that are packed now.
        joined: Names of the linear layers that share one matrix, per matrix.
        kept: Names of the others, and why each is as it was.
    """

    packed: list[str] = field(default_factory=list)
    joined: list[tuple[str, ...]] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)


def pack_(model: nn.Module, layout: str = FRAGMENTS) -> Packing:
    """Pack every ``Linear`` and ``DeepseekV4Experts`` that can be, and join what goes together.

    The values stay bit for bit. Memory holds the model and at most one more copy of one matrix (of
    a joined one the rows of all its layers, of gate and up half as much more); routed experts
    change in place, one after another. Packed experts, routed and shared, round one step less
    (``DeepseekV4Experts``, ``DeepseekV4MLP``). Pack after loading, quantising and moving; CUDA
    graphs that were captured before must be captured again.

    Args:
        model: Any module; changed in place.
        layout: See ``Linear.pack``. Layers that leave their inputs as they are get fragments in any
            case: the kernels for those take no other.

    Raises:
        ValueError: if the layout is none that ``Linear.pack`` knows.
    """
    if layout not in PACKED_LAYOUTS:
        raise ValueError(f"pack_: layout is {layout!r}, wanted one of {PACKED_LAYOUTS}")
    report = Packing()
    for name, layer in model.named_modules():
        if isinstance(layer, _KINDS):
            try:
                layer.pack(layout if layer.activation == "nvfp4" else FRAGMENTS)
                report.packed.append(name)
            except ValueError as error:
                report.kept[name] = str(error)
    report.joined += join_packed_(model)
    return report


def join_packed_(model: nn.Module) -> list[tuple[str, ...]]:
    """Let packed layers that go together share one matrix; their names, per matrix."""
    joined = []
    for name, module in model.named_modules():
        for how in ("joined", "joined_in_turn"):
            for group in getattr(module, how, ()):
                parts = [getattr(module, part) for part in group]
                if _join(parts, in_turn=how == "joined_in_turn"):
                    joined.append(tuple(f"{name}.{part}".lstrip(".") for part in group))
    return joined


def _join(parts: list[nn.Module], *, in_turn: bool) -> bool:
    layers = [part for part in parts if isinstance(part, Linear)]
    return len(layers) == len(parts) and join_weights(layers, in_turn=in_turn)


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
        if isinstance(module, _KINDS) and module.layout != LINEAR
    }
    for layer in layers.values():
        layer.unpack()
    return tuple(layers)
