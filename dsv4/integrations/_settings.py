"""State of transformers' modules besides tensors: numbers, activations, rotary frequencies."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from dsv4.config import ModelConfig
from dsv4.layers.rotary import LABELS, DeepseekV4RotaryEmbedding

_SILU = ("SiLU", "SiLUActivation")
_SCORES = ("SqrtSoftplusActivation", "SqrtSoftplus")
_ROTARY = "DeepseekV4RotaryEmbedding"
# Numeric attributes that change nothing in inference, or that ours use for another purpose.
_FREE = frozenset({"training", "layer_idx", "layout", "activation", "numerics", "cache_name"})


def settings_differ(old: nn.Module, new: nn.Module, *, container: bool = False) -> str | None:
    """Return how the numbers that two modules compute with differ, in words; None if they do not.

    A module of transformers may have been changed after it was made; the configuration, from which
    the new one is made, does not say so. A container's children are judged by themselves.
    """
    theirs, ours = dict(old.named_modules()), dict(new.named_modules())
    if container:
        theirs = {"": old}
    for path, module in theirs.items():
        where = f"{path}." if path else ""
        for name, problem in _problems(module, ours.get(path)):
            return f"{where}{name} {problem}"
    return None


def _problems(old: nn.Module, new: nn.Module | None) -> Any:
    for name, kinds in (("act_fn", _SILU), ("score_fn", _SCORES)):
        function = old._modules.get(name) or vars(old).get(name)
        if function is not None and type(function).__name__ not in kinds:
            yield name, f"is a {type(function).__name__}, wanted {kinds[0]}"
    if type(old).__name__ == _ROTARY:
        for label in LABELS:
            scaling = getattr(old, f"{label}_attention_scaling", 1.0)
            if scaling != 1.0:
                yield f"{label}_attention_scaling", f"is {scaling}, wanted 1.0"
    for name, value in vars(old).items():
        if new is None or name in _FREE or name.startswith("_") or name not in vars(new):
            continue
        expected = vars(new)[name]
        if _is_setting(value) and _is_setting(expected) and _number(value) != _number(expected):
            yield name, f"is {value}, by the configuration {expected}"


def _is_setting(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _number(value: Any) -> Any:
    """Return the value; no clamp is None in our modules and infinity in transformers'."""
    return None if isinstance(value, float) and math.isinf(value) else value


def changed_frequencies(model: nn.Module, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Return inverse frequencies of a model's rotary tables that its configuration does not give.

    With DeepSeek's numerics tables are float32, and a buffer that was only rounded to the model's
    dtype counts as unchanged.

    Raises:
        ValueError: if two modules of the model have different ones.
    """
    changed: dict[str, tuple[str, torch.Tensor]] = {}
    for name, module in model.named_modules():
        if type(module).__name__ != _ROTARY or isinstance(module, DeepseekV4RotaryEmbedding):
            continue
        for label in LABELS:
            buffer = module._buffers.get(f"{label}_inv_freq")
            if buffer is None or buffer.is_meta:
                continue
            first, known = changed.setdefault(label, (name, buffer))
            if known.shape != buffer.shape or not torch.equal(known.cpu(), buffer.cpu()):
                raise ValueError(
                    f"{name}.{label}_inv_freq differs from {first}.{label}_inv_freq, wanted the "
                    "same frequencies in the whole model"
                )
    return {
        label: buffer
        for label, (_, buffer) in changed.items()
        if not _by_configuration(config, label, buffer)
    }


def _by_configuration(config: ModelConfig, label: str, buffer: torch.Tensor) -> bool:
    exact = DeepseekV4RotaryEmbedding(config).inv_freq(torch.device("cpu"), label)
    values = buffer.detach().cpu()
    if exact.shape != values.shape:
        return False
    if config.numerics == "deepseek" and torch.equal(exact.to(values.dtype), values):
        return True
    return torch.allclose(exact, values.float(), rtol=1e-6, atol=0.0)


def adopt_frequencies(module: nn.Module, frequencies: dict[str, torch.Tensor]) -> None:
    """Make the rotary tables of a module of ours use these."""
    for rotary in module.modules():
        if isinstance(rotary, DeepseekV4RotaryEmbedding):
            for label, values in frequencies.items():
                rotary.set_inv_freq(label, values)
