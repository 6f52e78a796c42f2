"""Begin with the kernels of a model when the headers of its checkpoint are known.

Which kernels a model needs follows from its configuration and the formats of its weights, so they
are compiled while the weights are read. The formats are those that filling leaves if all MXFP4
weights can be converted and all that FP8 activations multiply are exact in FP8; where that does not
hold, other kernels are compiled after filling.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from dsv4.checkpoint import names
from dsv4.checkpoint.entries import Entry
from dsv4.checkpoint.expert_slots import ExpertsSlot
from dsv4.checkpoint.filling import FillRequest
from dsv4.checkpoint.load_request import LoadRequest
from dsv4.checkpoint.module_tree import slots_of
from dsv4.checkpoint.options import Options
from dsv4.checkpoint.reader import Checkpoint
from dsv4.checkpoint.slots import Entries, LinearSlot, PlainSlot
from dsv4.compilation import warmup
from dsv4.compilation.ahead import KernelsAhead
from dsv4.compilation.launch_recorder import impossible
from dsv4.compilation.listing import Listing
from dsv4.compilation.recipe import ModelRecipe, Recipe, Weight
from dsv4.compilation.target import Target
from dsv4.layers._expert_stacks import PROJECTIONS
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.layers.linear import Linear
from dsv4.layers.pack import join_packed_
from dsv4.layers.step_tokens import step_tokens
from dsv4.quant.formats import FP8_BLOCK, NVFP4

if TYPE_CHECKING:
    from dsv4.model import DeepseekV4ForCausalLM


def begin_kernels(
    ahead: KernelsAhead,
    model: DeepseekV4ForCausalLM,
    checkpoint: Checkpoint,
    request: LoadRequest,
) -> None:
    """Begin with the kernels that ``load`` will prepare; on several ranks, rank 0 does.

    Args:
        ahead: Compiles them.
        model: The model, without values.
        checkpoint: Its checkpoint, whose headers were checked.
        request: The request.
    """
    is_first = model.parallel is None or model.parallel.rank == 0
    target = _target(request.values.device)
    if not (request.prepare and is_first) or target is None:
        return
    options, _ = request.values.resolved(checkpoint)
    recipe = expected_recipe(model, checkpoint.entries, options)
    tokens = max(request.reserve_tokens or 0, step_tokens(model))
    ahead.begin(Listing(recipe, target, tokens))


def begin_kernels_of(
    ahead: KernelsAhead,
    model: nn.Module,
    checkpoint: Checkpoint,
    values: FillRequest,
    recipe_of: Callable[[nn.Module], ModelRecipe],
    reserve_tokens: int | None,
) -> None:
    """Begin with the kernels of a model of other code with modules of this package.

    Args:
        ahead: Compiles them.
        model: The model, on meta.
        checkpoint: Its checkpoint, whose headers were checked.
        values: How values will become those of the model.
        recipe_of: Makes the recipe of a filled model, which may be on meta.
        reserve_tokens: Tokens of the largest step, or None.
    """
    target = _target(values.device)
    if target is None:
        return
    options, _ = values.resolved(checkpoint)
    filled = expected_model(model, checkpoint.entries, options, target.arch)
    tokens = max(reserve_tokens or 0, step_tokens(filled))
    ahead.begin(Listing(recipe_of(filled), target, tokens))


def _target(device: torch.device | str | None) -> Target | None:
    """Return the GPU that kernels can be compiled for in this process, or None."""
    if impossible() is not None:
        return None
    return warmup.target_of(torch.device("cpu" if device is None else device))


def expected_recipe(model: DeepseekV4ForCausalLM, entries: Entries, options: Options) -> Recipe:
    """Return the recipe that a model will have when it is filled.

    Args:
        model: The model, without values.
        entries: Entries of its checkpoint.
        options: How values become those of the model.
    """
    weights, norms = {}, {}
    for slot in slots_of(model):
        name = slot.name.removesuffix(".weight")
        if isinstance(slot, LinearSlot | ExpertsSlot):
            weights[name] = _expected_weight(slot, entries, options)
        elif names.is_norm(slot.name):
            norms[name] = _expected_dtype(entries[slot.name], options)
    dtype = _expected_dtype(entries["model.embed_tokens.weight"], options)
    return Recipe.of_filled(model, dtype, weights, norms)


def expected_model(model: nn.Module, entries: Entries, options: Options, arch: str) -> nn.Module:
    """Return a copy of a model on meta, with the formats and dtypes that filling will leave.

    Args:
        model: The model, on meta.
        entries: Entries of its checkpoint.
        options: How values become those of the model.
        arch: The GPU's, for which weights are packed.
    """
    model = copy.deepcopy(model)
    for slot in slots_of(model):
        own = slot.module
        entry = entries[next(iter(slot.expected(entries))).name]
        if isinstance(own, Linear | DeepseekV4Experts):
            assert isinstance(slot, LinearSlot | ExpertsSlot)
            _expected_weight(slot, entries, options).declare(own, arch)
            if own.format is not None:
                continue
        attributes = (slot.attribute,) if isinstance(slot, PlainSlot) else tuple(own._parameters)
        for attribute in attributes:
            _give_dtype(own, attribute, _expected_dtype(entry, options))
    join_packed_(model)
    return model


def _expected_dtype(entry: Entry, options: Options) -> torch.dtype:
    """Return the dtype of a plain tensor, which may be quantised in the checkpoint."""
    if entry.format is None:
        return options.plain_dtype(entry.name, entry.weight.dtype)
    return options.dtype or torch.bfloat16


def _give_dtype(module: nn.Module, attribute: str, dtype: torch.dtype) -> None:
    """Replace a parameter or buffer on meta by one of a dtype."""
    value = getattr(module, attribute)
    if value is None:
        return
    value = torch.empty_like(value, dtype=dtype)
    if attribute in module._buffers:
        module._buffers[attribute] = value
    else:
        module._parameters[attribute] = nn.Parameter(value, requires_grad=False)


def _expected_weight(slot: LinearSlot | ExpertsSlot, entries: Entries, options: Options) -> Weight:
    entry = entries[next(iter(slot.expected(entries))).name]
    name, is_linear = options.format_of(entry), isinstance(slot, LinearSlot)
    if name == FP8_BLOCK.name and is_linear:
        return Weight(name, options.scale_dtype(entry))
    if name == NVFP4.name and slot.module.activation == "fp8":
        return Weight(name, exact=(True,) * (1 if is_linear else len(PROJECTIONS)))
    return Weight(name)
