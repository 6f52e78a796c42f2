"""Random models, and independent transformers models that hold the same weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dsv4.config import ModelConfig
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.layers.linear import Linear
from dsv4.layers.router import DeepseekV4HashRouter
from dsv4.model import DeepseekV4ForCausalLM


@torch.no_grad()
def randomize_(model: nn.Module, seed: int = 0, scale: float = 1.0) -> nn.Module:
    """Give every parameter and persistent buffer a random value that matters.

    Norm weights lie around 1, biases, sinks and hyper-connection parameters away from 0, matrices
    keep the magnitude of what passes through them, and hash tables hold distinct experts.

    Args:
        model: Plain (unquantised) modules, changed in place.
        seed: Seed of the generator; the same seed and shapes give the same values.
        scale: Multiplies all matrices.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [m.num_experts for m in model.modules() if isinstance(m, DeepseekV4HashRouter)]
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor.copy_(_random(name, tensor, max(counts, default=1), generator, scale))
    return model


def _random(
    name: str, like: torch.Tensor, experts: int, generator: torch.Generator, scale: float
) -> torch.Tensor:
    if name.endswith("tid2eid"):
        rows = [torch.randperm(experts, generator=generator) for _ in range(like.shape[0])]
        return torch.stack(rows)[:, : like.shape[1]]
    return random_values(name, like.shape, generator, scale)


def random_values(
    name: str, shape: Sequence[int], generator: torch.Generator, scale: float = 1.0
) -> torch.Tensor:
    """Draw a floating tensor of a model, float32, on the generator's device.

    Args:
        name: The tensor's; norm weights lie around 1, vectors away from 0.
        shape: Shape of the tensor.
        generator: Source of randomness.
        scale: Multiplies matrices, whose entries otherwise have variance 1 / columns.
    """
    draw = torch.randn(tuple(shape), generator=generator, device=generator.device)
    if name.endswith(("norm.weight", "layernorm.weight", "enorm.weight", "hnorm.weight")):
        return 1 + 0.2 * draw
    if len(shape) <= 1 or name.endswith("position_bias"):
        return 0.5 * draw
    return draw * (scale * shape[-1] ** -0.5)


def random_model(
    config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32, mtp: bool = False
) -> DeepseekV4ForCausalLM:
    """A plain model with ``randomize_``d weights, in evaluation mode."""
    model = DeepseekV4ForCausalLM(config, mtp=mtp).to(dtype)
    randomize_(model, seed)
    return model.eval().requires_grad_(False)


def dense_state_dict(model: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The state of a model with every quantised matrix dequantised, under the plain names.

    Args:
        model: Holds ``Linear`` and ``DeepseekV4Experts`` layers, plain or quantised.
        dtype: Dtype of the dequantised matrices; other tensors keep theirs.
    """
    state = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.format is not None:
            _replace(state, _prefix(name), "weight", module.dense_weight(dtype))
        if isinstance(module, DeepseekV4Experts) and module.format is not None:
            for projection in ("gate_up_proj", "down_proj"):
                dense = module.dense_weight(projection, dtype)
                _replace(state, _prefix(name), projection, dense)
    return state


def _prefix(name: str) -> str:
    return f"{name}." if name else ""


def _replace(state: dict[str, Any], prefix: str, stem: str, dense: torch.Tensor) -> None:
    for suffix in ("", "_scale", "_scale_2", "_input_scale"):
        state.pop(prefix + stem + suffix, None)
    if stem == "weight":
        state.pop(prefix + "input_scale", None)
    state[prefix + stem] = dense


def transformers_twin(
    model: DeepseekV4ForCausalLM, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """A transformers ``DeepseekV4ForCausalLM`` that holds the (dequantised) weights of ``model``.

    Independent of dsv4 from there on: transformers' own modules run.
    """
    from transformers import DeepseekV4Config
    from transformers import DeepseekV4ForCausalLM as Theirs

    values = model.config.to_transformers_dict()
    if model.config.swiglu_limit is None:
        values["swiglu_limit"] = math.inf
    config = DeepseekV4Config(**values)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    theirs: nn.Module = Theirs(config)
    theirs = theirs.to(dtype).eval().requires_grad_(False)
    state = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in dense_state_dict(model, dtype).items()
        if not name.startswith("mtp.")
    }
    theirs.load_state_dict(state, strict=True)
    return theirs
