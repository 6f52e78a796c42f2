"""Set the activation global scales of NVFP4 layers from a warm-up pass, then freeze them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from dsv4.layers._module import frozen
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.layers.linear import Linear
from dsv4.layers.observer import AmaxObserver
from dsv4.quant.formats import NVFP4

_EXPERT_INPUTS = ("gate_up_proj", "down_proj")


@dataclass
class Calibration:
    """The result of a calibration; filled when its ``with`` block ends.

    Attributes:
        calibrated: Names of the modules whose scales were set.
        unseen: Names of the modules that no activation reached; their scales are as before.
    """

    calibrated: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)


@contextmanager
def calibrate(model: nn.Module) -> Iterator[Calibration]:
    """Record the largest activation of every NVFP4 layer while the block runs the model.

    Inside the block activations are not quantised. At its end each layer that saw data gets
    ``input_scale = amax / 2688`` (specification, section 11.1), fixed from then on; an expert that
    saw no token takes the largest scale of its projection. If the block raises, nothing is changed.

    Args:
        model: Any module that holds ``Linear`` or ``DeepseekV4Experts`` layers in NVFP4.

    Yields:
        A report.

    Raises:
        ValueError: if the model has no NVFP4 layer, or is being calibrated already.
    """
    layers = {name: m for name, m in model.named_modules() if _is_nvfp4(m)}
    if not layers:
        raise ValueError("calibrate: the model has no NVFP4 layer, wanted at least one")
    report = Calibration()
    for name, layer in layers.items():
        _observe(name, layer)
    try:
        yield report
        for name, layer in layers.items():
            (report.calibrated if _freeze(layer) else report.unseen).append(name)
    finally:
        for layer in layers.values():
            _forget(layer)


def _is_nvfp4(module: nn.Module) -> bool:
    return isinstance(module, (Linear, DeepseekV4Experts)) and module.format == NVFP4


def _observe(name: str, layer: nn.Module) -> None:
    if isinstance(layer, Linear):
        busy, layer.observer = layer.observer is not None, AmaxObserver()
    else:
        assert isinstance(layer, DeepseekV4Experts)
        busy = layer.observers is not None
        layer.observers = {p: AmaxObserver(layer.num_local_experts) for p in _EXPERT_INPUTS}
    if busy:
        raise ValueError(f"calibrate: {name} is being calibrated already")


def _forget(layer: nn.Module) -> None:
    if isinstance(layer, Linear):
        layer.observer = None
    elif isinstance(layer, DeepseekV4Experts):
        layer.observers = None


def _freeze(layer: nn.Module) -> bool:
    """Set the scales of one layer; return False if it saw nothing."""
    if isinstance(layer, Linear):
        assert layer.observer is not None
        if not _seen(layer.observer):
            return False
        layer.input_scale = frozen(layer.observer.scale().to(layer.device))
        return True
    assert isinstance(layer, DeepseekV4Experts)
    assert layer.observers is not None
    if not all(_seen(observer) for observer in layer.observers.values()):
        return False
    for name, observer in layer.observers.items():
        scale = observer.scale().to(layer.gate_up_proj.device)
        setattr(layer, name + "_input_scale", frozen(scale))
    return True


def _seen(observer: AmaxObserver) -> bool:
    return bool(torch.any(observer.amax > 0))
