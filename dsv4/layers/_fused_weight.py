"""A matrix whose rows belong to several layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsv4.layers._in_place import packing
from dsv4.layers._module import FixedDtypeModule
from dsv4.quant.formats import FRAGMENTS, LINEAR, SWIZZLED, QuantizedTensor, swizzled_size


class FusedWeight(FixedDtypeModule):
    """Packed NVFP4 weights of several layers in one matrix: one after another, or interleaved.

    It is a submodule of each of those layers, so moving or copying a model moves or copies it once
    and the layers still share it. Its tensors are buffers that no state dict holds, because every
    layer writes its own rows.

    Args:
        weight: A matrix with one segment, and so one global scale, per layer; or a result of
            ``interleaved_rows``.
        rows: Rows of each of the n layers.
        interleaved: Whether row ``r`` is one of layer ``r % n``.
    """

    stored = frozenset({"codes", "scales", "global_scale"})
    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor
    row_exponent: torch.Tensor | None

    def __init__(
        self, weight: QuantizedTensor, rows: tuple[int, ...], *, interleaved: bool
    ) -> None:
        super().__init__()
        self.format, self.layout = weight.format, weight.layout
        self.rows, self.interleaved = rows, interleaved
        self.register_buffer("codes", weight.codes, persistent=False)
        self.register_buffer("scales", weight.scales, persistent=False)
        self.register_buffer("global_scale", weight.global_scale, persistent=False)
        self.register_buffer("row_exponent", weight.row_exponent, persistent=False)

    def whole(self) -> QuantizedTensor:
        """All rows: a segment per layer, or interleaved; each layer's have its global scale."""
        segments, tensors = () if self.interleaved else self.rows, self._buffers
        codes, scales, global_scale = tensors["codes"], tensors["scales"], tensors["global_scale"]
        rest = (self.format, self.layout, segments, tensors["row_exponent"])
        return self.value_of(codes, scales, global_scale, *rest)

    def part(self, index: int) -> QuantizedTensor:
        """Return the rows of one layer: a packed view, or, if they are interleaved, a copy.

        The copy is not packed, because interleaved layers share tiles. Every layout keeps whole
        tiles of rows in one piece.
        """
        scale = self.global_scale[
            index : index + 1
        ]  # interleaved, these are the scales of the first rows
        if self.interleaved:
            linear, rows = self.whole().with_layout(LINEAR), slice(index, None, len(self.rows))
            return QuantizedTensor(linear.codes[rows], linear.scales[rows], scale, self.format)
        first = sum(self.rows[:index])
        rows = slice(first, first + self.rows[index])
        scale_rows = rows
        if self.layout == SWIZZLED:
            blocks = self.codes.shape[1] // 8
            scale_rows = slice(*(swizzled_size(n, blocks) for n in (rows.start, rows.stop)))
        exponent = None if self.row_exponent is None else self.row_exponent[rows]
        parts = (self.codes[rows], self.scales[scale_rows], scale, self.format, self.layout)
        return QuantizedTensor(*parts, row_exponent=exponent)

    def extra_repr(self) -> str:
        """Rows of each layer."""
        return f"rows={self.rows}"


def interleaved_rows(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Interleave n parts: row ``r`` is row ``r // n`` of part ``r % n``, with its scales.

    In addition to the result, memory holds one part unpacked and the buffers of
    ``dsv4.quant.fragments``, or a second copy of the result's swizzled scales.

    Args:
        parts: n packed NVFP4 matrices of one shape and layout with one global scale each.
    """
    first, count = parts[0], len(parts)
    codes, scales = (
        torch.empty(
            (count * first.rows, first.columns // n), dtype=torch.uint8, device=first.device
        )
        for n in (2, 16)
    )
    for i, part in enumerate([] if codes.is_meta else parts):
        linear = part.with_layout(LINEAR)
        codes[i::count] = linear.codes
        scales[i::count] = linear.scales.view(torch.uint8)
    layer_scales = [part.global_scale for part in parts if part.global_scale is not None]
    row_scale = torch.cat(layer_scales).repeat(first.rows)
    if first.layout == SWIZZLED:
        linear = QuantizedTensor(codes, scales.view(torch.float8_e4m3fn), row_scale, first.format)
        return linear.with_layout(SWIZZLED)
    for target, source in [] if codes.is_meta else packing(codes, scales, pairs=False):
        target.copy_(source)
    exponents = [part.row_exponent for part in parts if part.row_exponent is not None]
    exponent = torch.stack(exponents, -1).flatten() if len(exponents) == count else None
    parts_of_it = (codes, scales, row_scale, first.format, FRAGMENTS)
    return QuantizedTensor(*parts_of_it, row_exponent=exponent)
