"""Yield the tensors of a model one after another, as ``dsv4.save`` writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from dsv4.checkpoint.expert_slots import ExpertsSlot
from dsv4.checkpoint.module_tree import slots_of
from dsv4.checkpoint.mxfp4 import to_mxfp4
from dsv4.quant.formats import MXFP4, NVFP4, Format, QuantizedTensor

# One tensor of a stream: canonical name, value, activation scale (float32, multiplies) or None.
Item = tuple[str, torch.Tensor | QuantizedTensor, torch.Tensor | None]


def items_of(model: nn.Module, format_of: Callable[[str], Format | None]) -> Iterator[Item]:
    """Yield a model's tensors, in the order of its modules.

    Args:
        model: A model of this package or of transformers.
        format_of: Function that returns a layout's format for the matrix of a canonical name. If
            that is MXFP4, NVFP4 experts are converted to MXFP4 unless a value of their layer would
            change: this restores experts that were converted on loading.
    """
    for slot in slots_of(model):
        if isinstance(slot, ExpertsSlot):
            yield from _experts_items(slot, format_of)
        elif hasattr(slot.module, "set_weight"):
            module = slot.module
            plain = module.format is None
            value = module.weight.detach() if plain else module.quantized_weight()
            yield slot.name, value, module.input_scale
        else:
            yield slot.name, slot.tensor.detach(), None  # type: ignore[attr-defined]


def _experts_items(slot: ExpertsSlot, format_of: Callable[[str], Format | None]) -> Iterator[Item]:
    module = slot.module
    quantised = getattr(module, "format", None) is not None
    back = _returns(slot, format_of)
    for expert in range(slot.count):
        parts = _expert_parts(module, expert, quantised)
        if back:
            parts = tuple(map(to_mxfp4, parts))
        first, last = _input_scales(module, expert)
        yield from zip(slot.names_of(expert), parts, (first, first, last), strict=True)


def _input_scales(module: Any, expert: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the activation scales of one expert, ``[1]`` or None."""
    if getattr(module, "hosted", None) is not None:
        module, expert = module.single(expert), 0
    scales = [getattr(module, f"{p}_input_scale", None) for p in ("gate_up_proj", "down_proj")]
    first, last = (None if s is None else s[expert : expert + 1] for s in scales)
    return first, last


def _returns(slot: ExpertsSlot, format_of: Callable[[str], Format | None]) -> bool:
    """Return whether a layer's NVFP4 experts are converted to MXFP4."""
    module = slot.module
    formats = {format_of(name) for name in slot.names_of(0)}
    if getattr(module, "format", None) != NVFP4 or formats != {MXFP4}:
        return False
    if module.gate_up_proj_input_scale is not None or module.down_proj_input_scale is not None:
        return False
    return all(
        to_mxfp4(part) is not None
        for expert in range(slot.count)
        for part in _expert_parts(module, expert, True)
    )


def _expert_parts(module: Any, expert: int, quantised: bool) -> tuple[Any, ...]:
    """Yield gate, up and down of one expert."""
    inner = module.intermediate_dim
    if not quantised:
        if getattr(module, "hosted", None) is not None:
            module, expert = module.single(expert), 0
        both = module.gate_up_proj[expert].detach()
        return both[:inner], both[inner:], module.down_proj[expert].detach()
    return module.get_expert(expert)
