"""Re-lay the NVFP4 weights of a model for tensor cores, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from dsv4.layers.experts import DeepseekV4Experts
from dsv4.layers.fusion import join_weights
from dsv4.layers.linear import PACKED_LAYOUTS, Linear
from dsv4.quant.exact_fp8 import Exactness
from dsv4.quant.formats import FP8_BLOCK, FRAGMENTS, LINEAR

_KINDS = (Linear, DeepseekV4Experts)
_Layer = Linear | DeepseekV4Experts


@dataclass
class Packing:
    """The result of ``pack_``.

    Attributes:
        packed: Names of the linear layers and routed experts that are packed now.
        joined: Names of the linear layers that share one matrix, per matrix.
        kept: Names of the other layers, and why each is unchanged.
        fp8: Counts of what keeps quantised weights from being exact in FP8, by name of a linear
            layer or of a stack of experts: of weights packed for Hopper, and of FP8 ones. Those
            that are exact (``Exactness.is_exact``) lose nothing on FP8 tensor cores. A stack is
            exact if all its experts are; ``Exactness.inexact`` has the numbers of those that are
            not, with their counts of blocks.
    """

    packed: list[str] = field(default_factory=list)
    joined: list[tuple[str, ...]] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    fp8: dict[str, Exactness] = field(default_factory=dict)


def pack_(model: nn.Module, layout: str = FRAGMENTS) -> Packing:
    """Pack every ``Linear`` and ``DeepseekV4Experts`` that can be packed, and join weights.

    Values keep their bits. Memory holds the model and at most one more copy of one matrix (for a
    joined matrix the rows of all its layers, and for gate and up half as much more); routed experts
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
            _pack(report, name, layer, layout)
    report.joined += join_packed_(model)
    return report


class Packer:
    """Packs the layers of a model one after another, as they get their weights.

    The final model is the same as after ``pack_``. Memory holds at most one more copy of one matrix
    at any time, as in ``pack_``.

    Args:
        model: Any module.
        layout_for: The layout of a layer that has its weight.

    Attributes:
        report: The layers that were packed so far.
    """

    def __init__(self, model: nn.Module, layout_for: Callable[[_Layer], str]) -> None:
        self.report = Packing()
        self._layout_for = layout_for
        self._names = {layer: name for name, layer in model.named_modules()}
        self._groups: dict[nn.Module, list[_Group]] = {}
        for group in _groups(model):
            for part in group.parts:
                self._groups.setdefault(part, []).append(group)

    def pack(self, layer: nn.Module) -> None:
        """Pack a layer if it can be packed, and join it when the last of its group is packed.

        For a layer that is to stay unchanged ``layout_for`` raises ValueError with the reason.
        """
        if not isinstance(layer, _KINDS):
            return
        name = self._names[layer]
        try:
            layout = self._layout_for(layer)
        except ValueError as error:
            self.report.kept[name] = str(error)
            self.report.fp8 |= exactness_of(name, layer)
            return
        _pack(self.report, name, layer, layout)
        for group in self._groups.get(layer, ()):
            if all(isinstance(p, Linear) and p.layout != LINEAR for p in group.parts):
                self.report.joined += group.join()


def _pack(report: Packing, name: str, layer: _Layer, layout: str) -> None:
    try:
        layer.pack(layout if layer.activation == "nvfp4" else FRAGMENTS)
        report.packed.append(name)
    except ValueError as error:
        report.kept[name] = str(error)
    report.fp8 |= exactness_of(name, layer)


def exactness_of(name: str, layer: _Layer) -> dict[str, Exactness]:
    """Return what keeps a layer's weights from being exact in FP8, by name; see ``Packing``."""
    if isinstance(layer, DeepseekV4Experts):
        return {f"{name}.{stack}".lstrip("."): of for stack, of in layer.exactness.items()}
    if layer.format == FP8_BLOCK and layer.weight_scale is not None:
        return {name: Exactness(layer.weight_scale.numel())}
    return {} if layer.exactness is None else {name: layer.exactness}


def join_packed_(model: nn.Module) -> list[tuple[str, ...]]:
    """Make packed layers that go together share one matrix, and return their names, per matrix."""
    return [names for group in _groups(model) for names in group.join()]


@dataclass(frozen=True)
class _Group:
    """Layers that may share a matrix."""

    names: tuple[str, ...]
    parts: Sequence[nn.Module]
    interleaved: bool

    def join(self) -> list[tuple[str, ...]]:
        """Share the matrix and return the names, or nothing if the layers cannot share it."""
        layers = [part for part in self.parts if isinstance(part, Linear)]
        if len(layers) < len(self.parts):
            return []
        return [self.names] if join_weights(layers, interleaved=self.interleaved) else []


def _groups(model: nn.Module) -> Iterator[_Group]:
    for name, module in model.named_modules():
        for how in ("joined", "joined_interleaved"):
            for group in getattr(module, how, ()):
                names = tuple(f"{name}.{part}".lstrip(".") for part in group)
                parts = [getattr(module, part) for part in group]
                yield _Group(names, parts, how == "joined_interleaved")


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
