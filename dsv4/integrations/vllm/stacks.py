"""Parameters of vLLM's routed experts as stacked NVFP4 matrices of this package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dsv4.quant.formats import MXFP4, NVFP4, QuantizedTensor, mxfp4_to_nvfp4

# Experts of a projection that are converted at once, which bounds the memory of temporaries.
_EXPERTS_AT_ONCE = 16


@dataclass(frozen=True)
class Stacks:
    """Weights of all experts of a rank.

    Attributes:
        gate_up: ``[E, 2I, H]``, gate rows first, a global scale for gate and for up.
        down: ``[E, H, I]``.
    """

    gate_up: QuantizedTensor
    down: QuantizedTensor


def nvfp4_stacks(layer: Any) -> Stacks:
    """Return the parameters of ``ModelOptNvFp4FusedMoE``, not copied."""
    inner = layer.w13_weight.shape[1] // 2
    w13, w2 = (
        (getattr(layer, name).data, getattr(layer, name + "_scale").data)
        for name in ("w13_weight", "w2_weight")
    )
    return Stacks(
        QuantizedTensor(*w13, layer.w13_weight_scale_2.data, NVFP4, segments=(inner, inner)),
        QuantizedTensor(*w2, layer.w2_weight_scale_2.data.reshape(-1, 1), NVFP4),
    )


def mxfp4_stacks(layer: Any) -> Stacks | None:
    """Return the parameters of ``Mxfp4MoEMethod`` in NVFP4; None if a value would change.

    Codes stay where they are. Few blocks need other codes for the same value, which are written
    when the whole layer is known to be convertible.
    """
    inner = layer.w13_weight.shape[1] // 2
    parts = [
        _converted(layer.w13_weight.data[:, :inner], layer.w13_weight_scale.data[:, :inner]),
        _converted(layer.w13_weight.data[:, inner:], layer.w13_weight_scale.data[:, inner:]),
        _converted(layer.w2_weight.data, layer.w2_weight_scale.data),
    ]
    if any(part is None for part in parts):
        return None
    gate, up, down = (part for part in parts if part is not None)
    for part in (gate, up, down):
        part.write_codes()
    scales = torch.cat([gate.scale_bytes, up.scale_bytes], 1).view(torch.float8_e4m3fn)
    global_scales = torch.cat([gate.global_scales, up.global_scales], 1)
    w13, w2 = layer.w13_weight.data, layer.w2_weight.data
    return Stacks(
        QuantizedTensor(w13, scales, global_scales, NVFP4, segments=(inner, inner)),
        QuantizedTensor(w2, down.scale_bytes.view(torch.float8_e4m3fn), down.global_scales, NVFP4),
    )


@dataclass(frozen=True)
class _Converted:
    """A projection of all experts in NVFP4.

    Attributes:
        scale_bytes: E4M3 block scales, uint8 ``[E, N, K / 16]``.
        global_scales: float32 ``[E, 1]``.
        changes: Views of the codes and what is to be written there.
    """

    scale_bytes: torch.Tensor
    global_scales: torch.Tensor
    changes: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    def write_codes(self) -> None:
        """Write the codes that differ."""
        for target, codes in self.changes:
            target.copy_(codes)


def _converted(codes: torch.Tensor, exponents: torch.Tensor) -> _Converted | None:
    """Return one projection, ``[E, N, K / 2]`` codes with uint8 exponents ``[E, N, K / 32]``."""
    scales, global_scales, changes = [], [], []
    for start in range(0, codes.shape[0], _EXPERTS_AT_ONCE):
        chunk = slice(start, start + _EXPERTS_AT_ONCE)
        blocks = exponents[chunk].contiguous().view(torch.float8_e8m0fnu)
        nvfp4, report = mxfp4_to_nvfp4(QuantizedTensor(codes[chunk], blocks, None, MXFP4))
        if not report.exact:
            return None
        if nvfp4.codes.data_ptr() != codes[chunk].data_ptr():
            changes.append((codes[chunk], nvfp4.codes))
        assert nvfp4.global_scale is not None
        scales.append(nvfp4.scales.view(torch.uint8))
        global_scales.append(nvfp4.global_scale)
    return _Converted(torch.cat(scales), torch.cat(global_scales), tuple(changes))
