"""One matrix that several layers hold the rows of."""

from __future__ import annotations

import torch

from dsv4.formats import QuantizedTensor
from dsv4.layers._module import FixedDtypeModule


class JointWeight(FixedDtypeModule):
    """Packed NVFP4 weights of several layers, one after another in the rows of one matrix.

    It is a submodule of each of those layers, so moving or copying a model moves or copies it once
    and the layers still share it. Its tensors are buffers that no state dict holds, because every
    layer writes its own rows.

    Args:
        weight: With one segment, and so one global scale, per layer.

    Attributes:
        rows: Rows of each layer.
    """

    stored = frozenset({"codes", "scales", "global_scale"})
    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor

    def __init__(self, weight: QuantizedTensor) -> None:
        super().__init__()
        self.format, self.layout = weight.format, weight.layout
        self.rows = weight.segments or (weight.rows,)
        self.register_buffer("codes", weight.codes, persistent=False)
        self.register_buffer("scales", weight.scales, persistent=False)
        self.register_buffer("global_scale", weight.global_scale, persistent=False)

    def whole(self) -> QuantizedTensor:
        """All rows, a segment per layer."""
        return QuantizedTensor(
            self.codes, self.scales, self.global_scale, self.format, self.layout, self.rows
        )

    def part(self, index: int) -> QuantizedTensor:
        """The rows of one layer, a view. Whole tiles of rows stay in one piece in every layout."""
        first = sum(self.rows[:index])
        rows = slice(first, first + self.rows[index])
        scale = self.global_scale[index : index + 1]
        return QuantizedTensor(self.codes[rows], self.scales[rows], scale, self.format, self.layout)

    def extra_repr(self) -> str:
        """Rows of each layer."""
        return f"rows={self.rows}"
