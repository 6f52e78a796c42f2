"""Begin with the kernels of a model when the headers of its checkpoint are known.

Which kernels a model needs follows from its configuration and the formats of its weights, so they
are compiled while the weights are read. The formats are those that filling leaves if all MXFP4
weights can be converted and all that FP8 activations multiply are exact in FP8; where that does not
hold, other kernels are compiled after filling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dsv4.checkpoint import names
from dsv4.checkpoint.expert_slots import ExpertsSlot
from dsv4.checkpoint.load_request import LoadRequest
from dsv4.checkpoint.module_tree import slots_of
from dsv4.checkpoint.options import Options
from dsv4.checkpoint.reader import Checkpoint
from dsv4.checkpoint.slots import Entries, LinearSlot
from dsv4.compilation import warmup
from dsv4.compilation.ahead import KernelsAhead
from dsv4.compilation.launch_recorder import impossible
from dsv4.compilation.listing import Listing
from dsv4.compilation.recipe import Recipe, Weight
from dsv4.layers._expert_stacks import PROJECTIONS
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
    if not (request.prepare and is_first) or impossible() is not None:
        return
    device = torch.device("cpu" if request.values.device is None else request.values.device)
    target = warmup.target_of(device)
    if target is None:
        return
    options, _ = request.values.resolved(checkpoint)
    recipe = expected_recipe(model, checkpoint.entries, options)
    tokens = max(request.reserve_tokens or 0, step_tokens(model))
    ahead.begin(Listing(recipe, target, tokens))


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
            norms[name] = options.plain_dtype(slot.name, entries[slot.name].weight.dtype)
    embedding = entries["model.embed_tokens.weight"]
    stored = embedding.weight.dtype if embedding.format is None else torch.bfloat16
    return Recipe.of_filled(model, options.plain_dtype(embedding.name, stored), weights, norms)


def _expected_weight(slot: LinearSlot | ExpertsSlot, entries: Entries, options: Options) -> Weight:
    entry = entries[next(iter(slot.expected(entries))).name]
    name, is_linear = options.format_of(entry), isinstance(slot, LinearSlot)
    if name == FP8_BLOCK.name and is_linear:
        return Weight(name, options.scale_dtype(entry))
    if name == NVFP4.name and slot.module.activation == "fp8":
        return Weight(name, exact=(True,) * (1 if is_linear else len(PROJECTIONS)))
    return Weight(name)
