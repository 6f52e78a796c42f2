"""Gate and up projections with one NVFP4 global scale.

Engines multiply gate and up of an MLP as one matrix and take one ``weight_scale_2`` for both: vLLM
takes that of ``w1``. NVIDIA's exporter writes the same value for both. So a stream of tensors is
written in pairs: plain matrices are quantised together, and quantised ones get a common global
scale wherever the block scales can be re-encoded without changing a value.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch

from dsv4.checkpoint import names
from dsv4.checkpoint.layouts import Layout, Matrix
from dsv4.layers._module import quantize_pair
from dsv4.quant.formats import NVFP4, QuantizedTensor

_logger = logging.getLogger("dsv4.checkpoint")
# Global scales further apart than this have no common one: E4M3 holds 2^-9 to 1.75 * 2^8.
_SHIFTS = 20

Item = tuple[str, Matrix, torch.Tensor | None]


def tie(
    gate: QuantizedTensor, up: QuantizedTensor
) -> tuple[QuantizedTensor, QuantizedTensor] | None:
    """Give two NVFP4 matrices one global scale; None if their values would change.

    The ratio of the scales must be a power of two (or, rarely, another ratio that E4M3 can
    represent), and block scales must stay inside E4M3's range. Blocks whose codes are all zero may
    have any scale.
    """
    first, second = _scalar(gate), _scalar(up)
    if first == second:
        return gate, up
    larger = max(first, second)
    # The largest common scale that works, so that small block scales stay normal numbers.
    for common in (first, second, *(larger * 2.0**-k for k in range(_SHIFTS))):
        scales = [_encoded(part, own, common) for part, own in ((gate, first), (up, second))]
        exact = ctypes.c_float(common).value == common
        if exact and scales[0] is not None and scales[1] is not None:
            shared = torch.tensor([common], dtype=torch.float32, device=gate.device)
            return (
                replace(gate, scales=scales[0], global_scale=shared),
                replace(up, scales=scales[1], global_scale=shared.clone()),
            )
    return None


def _scalar(q: QuantizedTensor) -> float:
    assert q.global_scale is not None
    return q.global_scale.item()


def _encoded(q: QuantizedTensor, own: float, common: float) -> torch.Tensor | None:
    """Return block scales for another global scale, None if a value would change."""
    if own == common:
        return q.scales
    # An 8-bit float times a 32-bit one is exact in float64.
    scales = q.scales.double() * own
    coded = (scales / common).clamp(max=448.0).float().to(torch.float8_e4m3fn)
    same = coded.double() * common == scales
    if not bool(same.all()):
        zero = (q.codes.unflatten(-1, (q.scales.shape[-1], 8)) & 0x77).amax(-1) == 0
        if not bool((same | zero).all()):
            return None
    return coded


@dataclass
class Pairing:
    """Converts the items of a stream for a layout, gate and up of an MLP together.

    A gate or up projection is held until its counterpart comes; all others pass at once.

    Attributes:
        layout: Layout that stores the items.
        pairs: Number of pairs in NVFP4 so far.
        untied: Names of the gates of those whose global scales remain different.
    """

    layout: Layout
    pairs: int = 0
    untied: list[str] = field(default_factory=list)
    _waiting: dict[str, Item] = field(default_factory=dict)

    def convert(self, stream: Iterable[Item]) -> Iterator[Item]:
        """Yield the items as the layout stores them.

        Raises:
            ValueError: if the layout cannot express the format of a value.
        """
        for item in stream:
            other = names.pair_of(item[0])
            if other is None:
                yield self._alone(item)
            elif other in self._waiting:
                yield from self._together(self._waiting.pop(other), item)
            else:
                self._waiting[item[0]] = item
        for item in self._waiting.values():
            yield self._alone(item)
        self._waiting.clear()

    def report(self, where: object) -> None:
        """Log once how many pairs have different global scales."""
        if self.untied:
            _logger.warning(
                "%s: gate and up of %d of %d NVFP4 pairs keep different weight_scale_2, because no "
                "common one holds their values exactly; engines that take one for both, as vLLM "
                "does, read up wrongly. Quantise from plain weights to tie them. The first: %s",
                where,
                len(self.untied),
                self.pairs,
                self.untied[0],
            )

    def _alone(self, item: Item) -> Item:
        name, value, input_scale = item
        return name, self.layout.convert(name, value), input_scale

    def _together(self, left: Item, right: Item) -> Iterator[Item]:
        gate, up = (left, right) if "gate_proj" in left[0] else (right, left)
        values = self._values(gate, up)
        for item in (left, right):
            value = values[0] if item is gate else values[1]
            yield item[0], value, item[2]

    def _values(self, gate: Item, up: Item) -> tuple[Matrix, Matrix]:
        plain = isinstance(gate[1], torch.Tensor) and isinstance(up[1], torch.Tensor)
        formats = {self.layout.format_of(item[0]) for item in (gate, up)}
        if plain and formats == {NVFP4}:
            self.pairs += 1
            return quantize_pair(gate[1], up[1], NVFP4.name)  # type: ignore[arg-type]
        first, second = (self._alone(item)[1] for item in (gate, up))
        if not (_is_nvfp4(first) and _is_nvfp4(second)):
            return first, second
        self.pairs += 1
        tied = tie(first.with_layout("linear"), second.with_layout("linear"))  # type: ignore[union-attr]
        if tied is None:
            self.untied.append(gate[0])
            return first, second
        return tied


def _is_nvfp4(value: Matrix) -> bool:
    """Return whether a matrix is NVFP4 with one global scale."""
    if isinstance(value, torch.Tensor) or value.format != NVFP4 or value.global_scale is None:
        return False
    return value.global_scale.numel() == 1
