"""The formats of a model's weights, by which its steps can be run without its weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from dsv4.compilation import draft_steps
from dsv4.compilation.draft_steps import DraftShape
from dsv4.compilation.meta_model import declare_packed
from dsv4.compilation.step_shapes import StepShape, every_shape
from dsv4.config import ModelConfig
from dsv4.cute.supports import packed_layout_of
from dsv4.layers._expert_stacks import PROJECTIONS
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.layers.host_experts import declare_hosted
from dsv4.layers.linear import Linear
from dsv4.layers.norm import DeepseekV4RMSNorm
from dsv4.layers.pack import join_packed_
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.parallel import mailboxes
from dsv4.parallel.context import ALONE, DATA, Ranks
from dsv4.parallel.emulated import emulated_rank
from dsv4.quant.formats import FP8_BLOCK, FRAGMENTS, NVFP4


@dataclass(frozen=True)
class Weight:
    """The storage of a layer's weights.

    Attributes:
        format: Name of the format; None: plain.
        scale_dtype: Dtype of the scales of FP8 weights; None: the format's own.
        exact: Of packed NVFP4 weights that FP8 activations multiply, whether the matrix, or each
            stack of experts, is exact in FP8; empty of others.
        hosted: With experts in host memory, the numbers of static experts, of slots for the others,
            and of experts in a half of the buffer for long prompts; else empty.
    """

    format: str | None
    scale_dtype: torch.dtype | None = None
    exact: tuple[bool, ...] = ()
    hosted: tuple[int, ...] = ()

    @classmethod
    def of(cls, layer: Linear | DeepseekV4Experts) -> Weight:
        """Return how a layer's weights are stored."""
        weight = cls._of_values(layer)
        if isinstance(layer, DeepseekV4Experts) and layer.hosted is not None:
            hosted = layer.hosted
            staged = 0 if hosted.staging is None else hosted.staging.experts
            return replace(weight, hosted=(hosted.static_slots, hosted.cached_slots, staged))
        return weight

    @classmethod
    def _of_values(cls, layer: Linear | DeepseekV4Experts) -> Weight:
        if layer.format is None:
            return cls(None)
        if layer.format == FP8_BLOCK and isinstance(layer, Linear):
            assert layer.weight_scale is not None
            return cls(layer.format.name, layer.weight_scale.dtype)
        exact: tuple[bool, ...] = ()
        if layer.activation == "fp8" and layer.layout == FRAGMENTS:
            names = PROJECTIONS if isinstance(layer, DeepseekV4Experts) else ("weight",)
            exact = tuple(_row_exponent(layer, name) is not None for name in names)
        return cls(layer.format.name, exact=exact)

    def declare(self, layer: Linear | DeepseekV4Experts, arch: str) -> None:
        """Give a layer on the meta device such weights; NVFP4 as ``pack_`` leaves them."""
        if self.format == NVFP4.name:
            declare_packed(layer, packed_layout_of(arch, layer.activation), self.exact)
        elif isinstance(layer, Linear):
            layer.to_format(self.format, scale_dtype=self.scale_dtype)
        elif self.format is not None:
            layer.to_format(self.format)
        if self.hosted:
            assert isinstance(layer, DeepseekV4Experts)
            declare_hosted(layer, *self.hosted)


class ModelRecipe(Protocol):
    """What a list of kernels needs to know of a model; pickled, and part of the list's key."""

    def shapes(self, max_tokens: int) -> Sequence[Any]:
        """Return the shapes of steps that together launch every kernel."""

    def build(self, arch: str) -> Any:
        """Return the model on the meta device, packed for a GPU."""


@dataclass(frozen=True)
class Recipe:
    """A model with one layer of each kind.

    Attributes:
        config: Configuration of these layers alone.
        dtype: Dtype of what is not quantised.
        weights: Weights of each linear layer and of routed experts, by name.
        ranks: Ranks that share the model; modules have the sizes of one of them.
        norms: Dtypes of norms' weights, by module, where they are not ``dtype``. Loading never
            narrows them.
    """

    config: ModelConfig
    dtype: torch.dtype = torch.bfloat16
    weights: tuple[tuple[str, Weight], ...] = ()
    ranks: Ranks = ALONE
    norms: tuple[tuple[str, torch.dtype], ...] = ()

    @classmethod
    def of(cls, model: Any, ranks: Ranks = ALONE) -> Recipe:
        """Return the recipe of a model; of a configuration, that of a bfloat16 model in NVFP4.

        Its compressors and head are plain, as published checkpoints leave them. With FP8
        activations the weights of a configuration count as exact in FP8.

        Args:
            model: Either of them.
            ranks: Ranks that share a model of the configuration; a model has its own.
        """
        if not isinstance(model, nn.Module):
            config = ModelConfig.of(model)
            has_one = config.dspark is not None or config.num_nextn_predict_layers == 1
            draft = has_one and ranks.mode != DATA  # those with tokens of their own draft nothing
            short = _of_layers(config, _first_of_each(_kinds(config), config, draft), draft)
            with torch.device("meta"):
                names = [name for name, _ in _weights(DeepseekV4ForCausalLM(short))]
            exact = (True, True) if config.activation == "fp8" else ()
            packed = Weight(NVFP4.name, exact=exact)
            weights = tuple((n, Weight(None) if is_plain(n) else packed) for n in names)
            return cls(short, weights=weights, ranks=ranks)
        assert isinstance(model, DeepseekV4ForCausalLM)
        return cls.of_filled(model, model.dtype)

    @classmethod
    def of_filled(
        cls,
        model: DeepseekV4ForCausalLM,
        dtype: torch.dtype,
        weights: Mapping[str, Weight] | None = None,
        norms: Mapping[str, torch.dtype] | None = None,
    ) -> Recipe:
        """Return the recipe of a model when it has its weights.

        Args:
            model: The model, which may be without values still.
            dtype: Dtype of what is not quantised.
            weights: How the weights will be stored, by name; None: as they are.
            norms: Dtypes that the weights of norms will have, by module; None: as they are.
        """
        own = ALONE if model.parallel is None else model.parallel.ranks
        draft = draft_steps.has_draft(model)
        recipe, _ = cls.of_modules(model, model.config, dtype, draft, weights, norms)
        return replace(recipe, ranks=own)

    @classmethod
    def of_modules(
        cls,
        model: Any,
        config: ModelConfig,
        dtype: torch.dtype,
        draft: bool = False,
        weights: Mapping[str, Weight] | None = None,
        norms: Mapping[str, torch.dtype] | None = None,
    ) -> tuple[Recipe, list[int]]:
        """Return the recipe of a module tree with a model's names, and the layers that it takes.

        Args:
            model: The tree, with its layers in ``model.model.layers``.
            config: Its configuration.
            dtype: Dtype of what is not quantised.
            draft: Whether it has a draft.
            weights: See ``of_filled``.
            norms: See ``of_filled``.
        """
        stored, dtypes = _weights(model, weights), _norms(model, dtype, norms)
        layers = [f"model.layers.{i}." for i in range(len(model.model.layers))]
        own = [(_below(stored, layer), _below(dtypes, layer)) for layer in layers]
        chosen = _first_of_each(list(zip(_kinds(config), own, strict=True)), config, draft)
        renamed = {layers[i]: layers[position] for position, i in enumerate(chosen)}
        elsewhere = ("model.layers.",) if draft else ("model.layers.", "mtp.")

        def short(named: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
            inside = [
                (new + name, value)
                for old, new in renamed.items()
                for name, value in _below(named, old)
            ]
            return (*inside, *(pair for pair in named if not pair[0].startswith(elsewhere)))

        layers_alone = _of_layers(config, chosen, draft)
        recipe = cls(layers_alone, dtype, short(stored), norms=short(dtypes))
        return recipe, chosen

    @property
    def has_draft(self) -> bool:
        """Whether the model has a draft."""
        return self.config.draft_layers > 0

    def shapes(self, max_tokens: int) -> list[StepShape | DraftShape]:
        """Return the shapes of steps that together launch every kernel."""
        return every_shape(max_tokens, self.config.max_position_embeddings, self.has_draft)

    def build(self, arch: str) -> DeepseekV4ForCausalLM:
        """The model on the meta device, packed for a GPU; of several ranks, an emulated one."""
        model = _built(self, arch)
        if model.parallel is not None:
            mailboxes.announce(model.parallel.group.name, model.parallel.group.mailbox)
        return model


def is_plain(name: str) -> bool:
    """Return whether NVFP4 checkpoints leave a weight as it is: the head, inputs of compressors.

    Steps launch the same Triton kernels for a head in NVFP4.
    """
    return name == "lm_head" or ("compressor" in name and not name.endswith("q_b_proj"))


@functools.lru_cache(maxsize=4)
def _built(recipe: Recipe, arch: str) -> DeepseekV4ForCausalLM:
    context = emulated_rank(recipe.ranks, recipe.config, "meta")
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(recipe.config, parallel=context).to(recipe.dtype)
        declare_weights(model, recipe.weights, arch)
    for name, dtype in recipe.norms:
        model.get_submodule(name).to(dtype)
    return model


def declare_weights(model: nn.Module, weights: Sequence[tuple[str, Weight]], arch: str) -> None:
    """Give layers on the meta device their weights, by name, packed for a GPU."""
    for name, weight in weights:
        layer = model.get_submodule(name)
        assert isinstance(layer, Linear | DeepseekV4Experts)
        weight.declare(layer, arch)
    join_packed_(model)


def _row_exponent(layer: Linear | DeepseekV4Experts, name: str) -> torch.Tensor | None:
    """Return the exponents of a weight that is exact in FP8, with those of the layers it joined."""
    if isinstance(layer, DeepseekV4Experts):
        return getattr(layer, f"{name}_exponent")
    return layer.weight_exponent if layer.fused is None else layer.fused.row_exponent


def _kinds(config: ModelConfig) -> list[Any]:
    return list(zip(config.layer_types, config.mlp_layer_types, strict=True))


def _first_of_each(kinds: Sequence[Any], config: ModelConfig, draft: bool) -> list[int]:
    """Return the first layer of each kind, and others if a DSpark draft reads more layers."""
    chosen = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    stages = config.dspark.stages if draft and config.dspark is not None else 0
    others = [i for i in range(len(kinds)) if i not in chosen]
    return chosen + others[: max(0, stages - len(chosen))]


def _of_layers(config: ModelConfig, chosen: Sequence[int], draft: bool) -> ModelConfig:
    """Return the configuration of some main layers, with the draft or without."""
    dspark = config.dspark if draft else None
    if dspark is not None:
        dspark = replace(dspark, target_layer_ids=tuple(range(dspark.stages)))
    return config.replace(
        num_hidden_layers=len(chosen),
        layer_types=tuple(config.layer_types[i] for i in chosen),
        mlp_layer_types=tuple(config.mlp_layer_types[i] for i in chosen),
        num_nextn_predict_layers=1 if draft and dspark is None else 0,
        dspark=dspark,
    )


def _weights(
    model: nn.Module, expected: Mapping[str, Weight] | None = None
) -> tuple[tuple[str, Weight], ...]:
    """Return how a model's weights are stored, by name.

    Args:
        model: The model.
        expected: How they will be stored; None: as they are.
    """
    return tuple(
        (name, Weight.of(layer) if expected is None else expected[name])
        for name, layer in model.named_modules()
        if isinstance(layer, Linear | DeepseekV4Experts)
    )


def _norms(
    model: nn.Module, dtype: torch.dtype, expected: Mapping[str, torch.dtype] | None = None
) -> tuple[tuple[str, torch.dtype], ...]:
    """Return the dtypes of norms' weights that are not ``dtype``, by module.

    Args:
        model: The model.
        dtype: Dtype of what is not quantised.
        expected: Dtypes that they will have; None: as they are.
    """
    dtypes = (
        (name, norm.weight.dtype if expected is None else expected[name])
        for name, norm in model.named_modules()
        if isinstance(norm, DeepseekV4RMSNorm)
    )
    return tuple((name, own) for name, own in dtypes if own != dtype)


def _below(named: Sequence[tuple[str, Any]], prefix: str) -> tuple[tuple[str, Any], ...]:
    """Return the pairs whose names begin with a prefix, without it."""
    return tuple(
        (name.removeprefix(prefix), value) for name, value in named if name.startswith(prefix)
    )
