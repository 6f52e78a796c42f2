"""Compilation of the replaced layers' kernels in parallel processes.

``warm`` launches each of them once, which without this compiles them one after another: some 400
kernels of one to eight seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_tp_group

from dsv4.compilation.kernel_calls import Call, attentions, indexers
from dsv4.compilation.launch_recorder import impossible
from dsv4.compilation.meta_model import of_each_kind
from dsv4.compilation.recipe import Recipe, Weight
from dsv4.compilation.warmup import target_of, warm_loaded
from dsv4.config import ModelConfig
from dsv4.cute.runtime.architectures import EVERY_ARCHITECTURE
from dsv4.device import capability
from dsv4.integrations.vllm._log import logger
from dsv4.integrations.vllm.adoption import Adoption
from dsv4.integrations.vllm.listed import Listed
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.layers.linear import Linear
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.parallel.context import Ranks


def compile_replaced(
    model: nn.Module,
    context: Adoption,
    tokens: int,
    *,
    steps: bool = True,
    listed: Listed | None = None,
) -> None:
    """Compile the kernels of steps, or load them from disk or a bundle.

    CuTeDSL's GEMMs follow from the replaced modules, and the rest of its kernels from a model of
    this package with the same configuration and ranks. Triton's are those that ``listed`` finds;
    where vLLM's code cannot be listed, those of that model. All are compiled by the same processes.
    Of a tensor-parallel group the first rank compiles, and the others then find the kernels on
    disk.

    Args:
        model: vLLM's model with replaced modules, on a GPU.
        context: Of the adoption.
        tokens: Most tokens of a step.
        steps: Whether kernels of this package's model are compiled, too: CuTeDSL's of attention and
            the indexer, and Triton's if there is no list.
        listed: Lists the kernels that the warm-up launches; None: there is no list.
    """
    group = get_tp_group()
    try:
        if group.rank_in_group == 0:
            _compile(model, context, tokens, steps, listed)
    finally:  # so that the others do not wait for a rank that failed
        if group.world_size > 1:
            group.barrier()
    if group.rank_in_group != 0:
        _compile(model, context, tokens, steps, listed)


def _compile(
    model: nn.Module, context: Adoption, tokens: int, steps: bool, listed: Listed | None
) -> None:
    own = _own_steps(model, context) if steps else None
    others: list[Call] = [] if own is None else [*indexers(own), *attentions(own)]
    target = target_of(next(model.parameters()).device)
    if listed is not None and target is not None and impossible() is None:
        parts = listed.parts(target)
        warm_loaded(
            model, tokens, progress=False, recipe=listed.settings, others=others, parts=parts
        )
        if not listed.problems:
            return
    recipe = None if own is None else Recipe.of(own)
    warm_loaded(model, tokens, progress=False, recipe=recipe, others=others)


def _own_steps(model: nn.Module, context: Adoption) -> DeepseekV4ForCausalLM | None:
    """``same_steps`` for the model's GPU; None, and maybe a warning, if there are no such steps."""
    arch = EVERY_ARCHITECTURE.get(capability(next(model.parameters()).device))
    if arch is None:
        return None
    ranks = context.vllm_config.parallel_config.tensor_parallel_size
    try:
        config = ModelConfig.of(context.vllm_config.model_config.hf_config)
        return same_steps(model, config, arch, ranks)
    except (RuntimeError, TypeError, ValueError) as error:
        logger().warning("dsv4's kernels are compiled at their first launch: %s", error)
        return None


def same_steps(
    model: nn.Module, config: ModelConfig, arch: str, ranks: int = 1
) -> DeepseekV4ForCausalLM:
    """A model on the meta device whose steps launch what the replaced modules launch.

    Args:
        model: vLLM's model with replaced modules.
        config: Of the whole model.
        arch: The GPU's.
        ranks: Tensor-parallel ranks, one of which the model is.
    """
    # vLLM's pages hold FP8 entries, and its drafts are models of their own.
    main = config.replace(numerics="deepseek", num_nextn_predict_layers=0, dspark=None)
    short = of_each_kind(main)
    with torch.device("meta"):
        own = DeepseekV4ForCausalLM(short, mtp=False)
    return Recipe(short, weights=tuple(_weights(model, own)), ranks=Ranks(ranks)).build(arch)


def _weights(model: nn.Module, own: nn.Module) -> Iterator[tuple[str, Weight]]:
    """Yield how vLLM's checkpoint stores each layer of ``own``, as replaced modules show."""
    formats: dict[type, Weight] = {}
    for module in model.modules():
        if isinstance(module, Linear | DeepseekV4Experts) and module.format is not None:
            formats.setdefault(_base(module), Weight.of(module))
    for name, module in own.named_modules():
        if isinstance(module, Linear | DeepseekV4Experts):
            stored = formats.get(_base(module), Weight(None))
            yield name, stored if _is_quantized(name) else Weight(None)


def _base(module: Any) -> type:
    return Linear if isinstance(module, Linear) else DeepseekV4Experts


def _is_quantized(name: str) -> bool:
    """Return whether published checkpoints quantize a layer, by its name in this package."""
    if name == "lm_head":
        return False
    return "compressor" not in name or name.endswith("q_b_proj")
