"""Choose the layers to pack while a checkpoint is read, and report those that are not."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from dsv4.checkpoint.mxfp4 import MODES
from dsv4.cute import supports
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.layers.linear import PACKED_LAYOUTS, Linear
from dsv4.layers.pack import Packer, Packing
from dsv4.quant.formats import FP8_BLOCK

_logger = logging.getLogger("dsv4.checkpoint")
# Formats of linear weights for which other kernels take the layout of the checkpoint.
_UNPACKED = (None, FP8_BLOCK)


@dataclass(frozen=True)
class PackChoice:
    """The checked argument ``pack``.

    Attributes:
        enabled: Whether layers are packed.
        layout: The layout of all packed layers; None for the one that the device's kernels take.
        dtype: Dtype of the inputs of the layers.
    """

    enabled: bool
    layout: str | None
    dtype: torch.dtype

    @classmethod
    def of(cls, pack: bool | str, dtype: torch.dtype) -> PackChoice:
        """Check the argument and return it.

        Raises:
            ValueError: if it is neither True, False nor a layout.
        """
        if isinstance(pack, bool):
            return cls(pack, None, dtype)
        if pack not in PACKED_LAYOUTS:
            layouts = " or ".join(map(repr, PACKED_LAYOUTS))
            raise ValueError(f"pack is {pack!r}, wanted True, False, {layouts}")
        return cls(True, pack, dtype)

    def experts_packed(self, device: torch.device) -> bool:
        """Return whether NVFP4 experts on a device are packed."""
        if not self.enabled or self.layout is not None:
            return self.enabled
        return supports.no_packed_weights(device, self.dtype) is None

    def packer(self, model: nn.Module) -> Packer | None:
        """Return the packer of a model's layers; None if none is to be packed."""
        return Packer(model, self._layout_for) if self.enabled else None

    def _layout_for(self, layer: Linear | DeepseekV4Experts) -> str:
        """Return the layout of a layer; raise ValueError if no kernel takes it packed."""
        if self.layout is not None:
            return self.layout
        device = layer.gate_up_proj.device if isinstance(layer, DeepseekV4Experts) else layer.device
        reason = supports.no_packed_weights(device, self.dtype)
        if reason is not None:
            raise ValueError(reason)
        return supports.packed_layout(device, layer.activation)


def mxfp4_mode(mxfp4: str | None, choice: PackChoice, device: torch.device) -> str:
    """Check the argument ``mxfp4``; None means to convert if the result is packed.

    Raises:
        ValueError: if it is unknown.
    """
    if mxfp4 is None:
        return "lossless" if choice.experts_packed(device) else "keep"
    if mxfp4 not in MODES:
        raise ValueError(f"mxfp4 is {mxfp4!r}, wanted one of {', '.join(map(repr, MODES))}")
    return mxfp4


def report_packing(path: Path, model: nn.Module, packing: Packing) -> None:
    """Log the number of packed layers, and for each reason the layers that are not packed.

    It is a warning if a GPU runs a layer without a kernel for it.
    """
    layers = dict(model.named_modules())
    _logger.info("%s: %d layers are packed", path, len(packing.packed))
    reasons: dict[tuple[bool, str], list[str]] = {}
    for name, reason in packing.kept.items():
        reasons.setdefault((_slow(layers[name]), reason), []).append(name)
    for (slow, reason), names in reasons.items():
        level = logging.WARNING if slow else logging.INFO
        text = "%s: %d layers are not packed: %s. The first: %s"
        _logger.log(level, text, path, len(names), reason, names[0])


def report_fp8(
    path: Path, model: nn.Module, packing: Packing, activation: str, *, shown: bool = False
) -> None:
    """Log how many quantised weights are exact in FP8, and why the others are not.

    With other activations than FP8 it gives the line of ``fp8_hint`` alone.

    Args:
        path: The checkpoint's folder.
        model: The model.
        packing: Its packed layers.
        activation: What quantised weights multiply.
        shown: Whether stderr gets the hint if the logger, as by default, drops INFO.
    """
    if activation == "fp8":
        _report_exact(path, model, packing)
    hint = fp8_hint(model, packing, activation)
    if hint is None:
        return
    if shown and not _logger.isEnabledFor(logging.INFO):
        print(f"{path}: {hint}", file=sys.stderr, flush=True)
    else:
        _logger.info("%s: %s", path, hint)


def fp8_hint(model: nn.Module, packing: Packing, activation: str) -> str | None:
    """Return a line that names FP8 activations, if FP8 tensor cores could multiply weights.

    None if FP8 activations were requested, no weight is exact in FP8 or the GPU has no kernel.
    """
    exact = sum(counts.is_exact for counts in packing.fp8.values())
    if activation == "fp8" or not exact or supports.no_fp8_gemm(_device(model)) is not None:
        return None
    return (
        f"{exact} of {len(packing.fp8)} quantised weights are exact in FP8: activation='fp8' "
        "multiplies them by FP8 tensor cores where that is faster (long prompts), with "
        "activations rounded as DeepSeek's code rounds them"
    )


def _report_exact(path: Path, model: nn.Module, packing: Packing) -> None:
    """Log which weights FP8 tensor cores multiply without rounding, and why not the others."""
    others = [counts for counts in packing.fp8.values() if not counts.is_exact]
    number = len(packing.fp8)
    _logger.info(
        "%s: %d of %d quantised weights are exact in FP8", path, number - len(others), number
    )
    reason = supports.no_fp8_gemm(_device(model))
    if reason is not None:
        _logger.info("%s: FP8 activations are multiplied as bfloat16: %s", path, reason)
    if others:
        total = sum(others[1:], others[0])
        _logger.info(
            "%s: %d weights are not exact in FP8, and are multiplied as bfloat16: %d of %d block "
            "scales are no power of two, %d blocks are too far below the largest of their row",
            *(path, len(others), total.no_power, total.blocks, total.wide_blocks),
        )
    for name, counts in packing.fp8.items():
        if 0 < len(counts.inexact) < len(counts.by_matrix):
            text = "%s: %s is multiplied as bfloat16 because of some experts: %s"
            _logger.info(text, path, name, counts.where)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _slow(layer: nn.Module) -> bool:
    if isinstance(layer, DeepseekV4Experts):
        return layer.gate_up_proj.device.type != "cpu"
    assert isinstance(layer, Linear)
    return layer.device.type != "cpu" and layer.format not in _UNPACKED
