"""The recipe of a transformers model with this package's modules, see ``compilation.recipe``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dsv4.compilation.recipe import Recipe, declare_weights
from dsv4.config import ModelConfig
from dsv4.integrations._applying import modeling_module, swap_modules
from dsv4.integrations._arguments import transformers_version
from dsv4.integrations._configs import transformers_config
from dsv4.integrations._steps import SwappedShape, swapped_shapes


@dataclass(frozen=True)
class SwappedRecipe:
    """A model with one layer of each kind, from ``from_pretrained``.

    Attributes:
        ours: Configuration and weights of this package's modules.
        parts: The parts that were swapped.
        dtypes: Dtype of each tensor that is no quantised weight, by name.
        version: transformers' version, whose code calls the modules.
    """

    ours: Recipe
    parts: tuple[str, ...]
    dtypes: tuple[tuple[str, torch.dtype], ...]
    version: str

    @classmethod
    def of(cls, model: Any, config: ModelConfig, parts: tuple[str, ...]) -> SwappedRecipe:
        """Return the recipe of a model whose experts are all in this process.

        Args:
            model: transformers' model, swapped and filled.
            config: Configuration of its modules.
            parts: The parts that were swapped.
        """
        main = config.without_draft()
        dtype = model.get_input_embeddings().weight.dtype
        ours, chosen = Recipe.of_modules(model, main, dtype)
        names = {f"{i}.": f"model.layers.{n}." for n, i in enumerate(chosen)}
        dtypes = []
        for name, tensor in _tensors(model):
            _, layer, rest = name.partition("model.layers.")
            number, dot, tail = rest.partition(".")
            if not layer:
                short = name
            elif number + dot in names:
                short = names[number + dot] + tail
            else:
                continue
            if tensor.is_floating_point() and tensor.element_size() > 1:
                dtypes.append((short, tensor.dtype))
        return cls(ours, parts, tuple(dtypes), str(transformers_version()))

    @property
    def config(self) -> ModelConfig:
        """Configuration of the layers."""
        return self.ours.config

    def shapes(self, max_tokens: int) -> list[SwappedShape]:
        """Return the shapes of steps that together launch every kernel."""
        return swapped_shapes(max_tokens, self.config.max_position_embeddings)

    def build(self, arch: str) -> Any:
        """The model on the meta device, packed for a GPU."""
        modeling = modeling_module()
        with torch.device("meta"):
            model = modeling.DeepseekV4ForCausalLM(
                transformers_config(self.config, self.ours.dtype)
            )
            swap_modules(model, modeling, self.config, self.parts)
            declare_weights(model, self.ours.weights, arch)
        for name, dtype in self.dtypes:
            path, _, attribute = name.rpartition(".")
            tables: Any = model.get_submodule(path)
            table = tables._parameters if attribute in tables._parameters else tables._buffers
            if table.get(attribute) is not None:
                value = torch.empty_like(table[attribute], dtype=dtype)
                is_parameter = table is tables._parameters
                table[attribute] = (
                    nn.Parameter(value, requires_grad=False) if is_parameter else value
                )
        return model.eval().requires_grad_(False)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
