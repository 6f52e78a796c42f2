"""Hooks that turn what swapped modules cannot do into errors, where silence would mislead."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class NoAttentionWeights:
    """Forward pre-hook: asking for attention weights is an error instead of an empty answer."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Refuse a call that records attention weights."""
        if kwargs.get("output_attentions", getattr(self.config, "output_attentions", False)):
            raise ValueError(
                "output_attentions is True, wanted False: dsv4's attention never materialises its "
                "weights. Leave 'attention' out of parts, or undo the swap, to get them"
            )


def no_gradient(module: nn.Module, args: Any, output: Any) -> None:
    """Forward hook: a backward pass that reaches the output is an error.

    The operators have no gradient, and torch by itself would warn and leave the gradients out.
    """
    for tensor in output if isinstance(output, tuple) else (output,):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(_refuse)


def _refuse(gradient: torch.Tensor) -> None:
    raise RuntimeError("dsv4's layers are for inference only: a backward pass reached one of them")


def guard(module: nn.Module, config: Any, *, attention: bool) -> None:
    """Install the guards on a module that replaces another.

    Args:
        module: The new module.
        config: transformers' configuration, which may ask for attention weights.
        attention: Whether the module is an attention.
    """
    module.register_forward_hook(no_gradient)
    if attention:
        module.register_forward_pre_hook(NoAttentionWeights(config), with_kwargs=True)
