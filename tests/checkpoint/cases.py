"""Models, checkpoints and comparisons that the checkpoint tests share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dsv4.checkpoint import loading, rank_loading, save
from dsv4.checkpoint.filling import FillRequest
from dsv4.checkpoint.load_request import LoadRequest
from dsv4.compilation.ahead import KernelsAhead
from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.layers.linear import Linear
from dsv4.model import DeepseekV4ForCausalLM
from tests.layers.experts_cases import quantize_apart

LAYOUTS = ("nvidia", "deepseek", "transformers", "compressed-tensors", "bf16")
SMALL = ModelConfig.tiny(
    layer_types=(SLIDING, CSA, HCA), n_routed_experts=4, vocab_size=64, hidden_size=64
)


def make_model(config: ModelConfig = SMALL, seed: int = 0) -> DeepseekV4ForCausalLM:
    """A model with random values in every tensor, biases and tables included."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = DeepseekV4ForCausalLM(config)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("tid2eid"):
                rows = torch.rand(tensor.shape[0], config.n_routed_experts).argsort(1)
                tensor.copy_(rows[:, : tensor.shape[1]])
            else:
                tensor.data.normal_(0, 0.05)
    return model


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().reshape(tensor.shape or 1).contiguous().view(torch.uint8)


def state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_same_state(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(raw(left[name]), raw(right[name])), name


def quantised_modules(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    kinds = (Linear, DeepseekV4Experts)
    return [(n, m) for n, m in model.named_modules() if isinstance(m, kinds)]


def loaded_ahead(path, mesh: Any = None, *, input_scales: str = "stored"):
    """Do as ``load``, with a mesh as ``load`` with ``parallel="tp"``; files are read ahead."""
    options: Any = {"mxfp4": None, "pack": True, "input_scales": input_scales, "progress": False}
    values = FillRequest.of_new_model("cpu", None, "bf16", **options)
    request = LoadRequest(
        path=path,
        values=replace(values, read_ahead=True),
        numerics="deepseek",
        mtp=None,
        reserve_tokens=0,
        prepare=False,
        host_experts=None,
    )
    parallel = None if mesh is None else "tp"
    context = rank_loading.context_of(request, mesh, parallel)
    with KernelsAhead() as ahead:
        return loading._filled(request, context, ahead)


def saved(model, folder, **options):
    save(model, folder, **options)
    return folder


def edit(folder: Path, change) -> Path:
    """Rewrite a one-file checkpoint with its tensors changed by ``change(tensors)``."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


def calibrated(folder: Path, **options) -> Path:
    """A checkpoint in NVIDIA's layout with input scales, as NVIDIA's have."""
    model = make_model()
    for layer in model.model.layers:
        experts = layer.mlp.experts
        quantize_apart(experts)
        for name in ("gate_up_proj", "down_proj"):
            scale = torch.nn.Parameter(torch.full((4,), 0.01), False)
            setattr(experts, name + "_input_scale", scale)
    save(model, folder, layout="nvidia", **options)
    return folder
