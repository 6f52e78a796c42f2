"""A stack of modules in which values can be planted just before every boundary."""

from __future__ import annotations

import torch
from torch import nn


class Planted:
    """What is planted in the next forward pass, and where.

    Attributes:
        where: Module and side, or None.
        rows: Rows that get the value.
        value: NaN or an infinity.
    """

    def __init__(self) -> None:
        self.where: tuple[str, str] | None = None
        self.rows: list[int] = []
        self.value = float("nan")

    def __call__(self, module: str, side: str, x: torch.Tensor) -> torch.Tensor:
        if self.where != (module, side):
            return x
        x = x.clone()
        x.view(-1, *x.shape[x.ndim - 1 :])[self.rows, -1] = self.value
        return x


class Part(nn.Module):
    """Attention or experts: a sum with the neighbours would spread what is planted, so none."""

    def __init__(self, planted: Planted, name: str) -> None:
        super().__init__()
        self.planted, self.name = planted, name
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, positions, x):
        return self.planted(self.name, "output", x * self.weight)


class Layer(nn.Module):
    def __init__(self, planted: Planted, name: str) -> None:
        super().__init__()
        self.planted, self.name = planted, name
        self.attn = Part(planted, f"{name}.attn")
        self.ffn = Part(planted, f"{name}.ffn")

    def forward(self, positions, x, residual):
        x = self.attn(positions, self.planted(f"{self.name}.attn", "input", x))
        x = x + residual
        x = self.ffn(positions, x=self.planted(f"{self.name}.ffn", "input", x))
        return self.planted(self.name, "output", x), residual


class Stack(nn.Module):
    """Embedding and some layers, called as vLLM calls a model."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.planted = Planted()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(Layer(self.planted, f"layers.{i}") for i in range(layers))
        self.lm_head = nn.Linear(8, 5, bias=False)
        self.requires_grad_(False)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        x = residual = self.planted("embed", "output", self.embed(input_ids))
        for layer in self.layers:
            x = self.planted(layer.name, "input", x)
            x, residual = layer(positions, x, residual=residual)
        return x

    def compute_logits(self, hidden_states):
        return self.planted("compute_logits", "output", self.lm_head(hidden_states))


def boundaries(layers: int = 3) -> list[tuple[str, str]]:
    """Names of boundaries in the order of execution, but that of the embedding, which is inside."""
    names = []
    for i in range(layers):
        for part in (f"layers.{i}.attn", f"layers.{i}.ffn"):
            names += [(part, "input"), (part, "output")]
        names.insert(-4, (f"layers.{i}", "input"))
        names.append((f"layers.{i}", "output"))
    return names
