"""Make the model of one rank out of a whole one, without files."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dsv4.layers._module import frozen
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.layers.linear import Linear
from dsv4.layers.pack import join_packed_
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.parallel.context import ParallelContext
from dsv4.parallel.split import axis_of, check_matrices, share
from dsv4.parallel.windows import part_of
from dsv4.quant.formats import LINEAR


@torch.no_grad()
def local_model(whole: DeepseekV4ForCausalLM, context: ParallelContext) -> DeepseekV4ForCausalLM:
    """Return the model of a rank, whose weights are copies of its parts of a whole model's.

    Packed layers are packed again, so that values keep their bits.

    Raises:
        ValueError: if the number of ranks does not divide what is split, or would cut a block of a
            quantised matrix or a tile of a packed one, or experts are in host memory; nothing is
            allocated then.
    """
    pairs = list(whole.named_modules())
    for _, module in pairs:
        if isinstance(module, DeepseekV4Experts):
            module.check_on_device()
    quantised = [
        (f"{name}.weight", (layer.out_features, layer.in_features), layer.format)
        for name, layer in pairs
        if isinstance(layer, Linear) and layer.format is not None
    ]
    packed = any(isinstance(m, Linear) and m.layout != LINEAR for _, m in pairs)
    check_matrices(quantised, context.size, tiles=packed, mode=context.mode)
    with torch.device("meta"):
        local = DeepseekV4ForCausalLM(whole.config, mtp=bool(whole.mtp), parallel=context)
    for name, module in local.named_modules():
        _take(name, module, whole.get_submodule(name), context)
    join_packed_(local)
    return local.train(whole.training)


def _take(name: str, local: nn.Module, whole: nn.Module, context: ParallelContext) -> None:
    if isinstance(local, Linear) and isinstance(whole, Linear):
        _take_linear(name, local, whole, context)
    elif isinstance(local, DeepseekV4Experts) and isinstance(whole, DeepseekV4Experts):
        _take_experts(local, whole, context)
    else:
        for table in ("_parameters", "_buffers"):
            _take_plain(name, table, local, whole, context)


def _take_linear(name: str, local: Linear, whole: Linear, context: ParallelContext) -> None:
    value: Any = whole.weight
    if whole.format is not None:
        value = whole.quantized_weight() if whole.layout == LINEAR else whole._unpacked()
    scale = None if whole.input_scale is None else whole.input_scale.clone()
    part = part_of(value, axis_of(f"{name}.weight", context.mode), context)
    local.set_weight(part.requires_grad_(False) if isinstance(part, torch.Tensor) else part, scale)
    if whole.layout != LINEAR:
        local.pack(whole.layout)


def _take_experts(
    local: DeepseekV4Experts, whole: DeepseekV4Experts, context: ParallelContext
) -> None:
    """Take the matrices of a range of experts, in whatever layout they are."""
    part = share(whole.num_local_experts, context)
    local.format, local.layout, local.stored = whole.format, whole.layout, whole.stored
    for name, tensor in whole._parameters.items():
        local._parameters[name] = None if tensor is None else frozen(tensor[part].clone())
    for name in ("gate_up_row_scale", "gate_up_proj_exponent", "down_proj_exponent"):
        rows = getattr(whole, name)
        setattr(local, name, None if rows is None else rows[part].clone())
    local.exactness = dict(whole.exactness)


def _take_plain(
    prefix: str, table: str, local: nn.Module, whole: nn.Module, context: ParallelContext
) -> None:
    own: dict[str, Any] = getattr(local, table)
    for name, tensor in getattr(whole, table).items():
        if tensor is None or name in whole._non_persistent_buffers_set:
            own[name] = tensor
            continue
        part = part_of(tensor.detach(), axis_of(f"{prefix}.{name}", context.mode), context)
        own[name] = frozen(part) if table == "_parameters" else part
