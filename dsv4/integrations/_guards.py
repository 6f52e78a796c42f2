"""Hooks that raise for what swapped modules cannot do, where transformers would be silent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dsv4.integrations._report import Replaced
from dsv4.layers._mask import is_bias, refuse_bias


class NoAttentionWeights:
    """Forward pre-hook: asking for attention weights is an error instead of an empty answer."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Raise for a call that records attention weights."""
        if kwargs.get("output_attentions", getattr(self.config, "output_attentions", False)):
            raise ValueError(
                "output_attentions is True, wanted False: dsv4's attention never materialises its "
                "weights. Leave 'attention' out of parts, or undo the swap, to get them"
            )


class ModelGuard:
    """Forward pre-hook of transformers' model around attention that is dsv4's."""

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Raise for another attention implementation, and for masks that are not supported."""
        check_implementation(module.config)
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        if isinstance(mask, dict):
            mask = next(iter(mask.values()), None)
        if not isinstance(mask, torch.Tensor) or mask.dim() != 4:
            return
        if mask.dtype == torch.bool:
            raise ValueError(
                "attention_mask is bool with 4 dimensions, wanted an additive one: transformers' "
                "eager attention would add its 0 and 1 to the logits, which hides nothing"
            )
        if bool(is_bias(mask)):
            refuse_bias()


def check_implementation(config: Any) -> None:
    """Raise if a configuration selects another attention than transformers' eager one.

    Raises:
        ValueError: if it does.
    """
    name = getattr(config, "_attn_implementation", None)
    if name not in (None, "eager"):
        raise ValueError(
            f"attn_implementation is {name!r}, wanted 'eager': dsv4's attention stands in its "
            "place. Leave 'attention' out of parts, or undo the swap, to use another"
        )


class SavePretrained:
    """``save_pretrained`` of a swapped model: transformers' own while no weight is quantised.

    An attribute of the instance; a deep copy of the model gets one that saves the copy.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Save like transformers' ``save_pretrained``.

        Raises:
            ValueError: if a weight is quantised; nothing is written then.
        """
        for name, module in self.model.named_modules():
            weights = getattr(module, "format", None)
            if type(module).__module__.startswith("dsv4.") and weights is not None:
                raise ValueError(
                    f"save_pretrained: {name} has {weights.name} weights, which transformers "
                    "cannot read back; wanted plain ones. Use dsv4.save(model, folder)"
                )
        return type(self.model).save_pretrained(self.model, *args, **kwargs)


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


@dataclass
class Guards:
    """Checks that a swap installs around a model."""

    hooks: list[Any]
    savers: list[Any]

    @classmethod
    def install(cls, model: nn.Module, modeling: Any, replaced: Iterable[Replaced]) -> Guards:
        """Guard masks where attention was replaced, and ``save_pretrained`` where anything was."""
        parts = {entry.part for entry in replaced}
        guards = cls([], [])
        for module in model.modules():
            if "attention" in parts and isinstance(module, modeling.DeepseekV4Model):
                hook = module.register_forward_pre_hook(ModelGuard(), with_kwargs=True)
                guards.hooks.append(hook)
            saves = isinstance(module, modeling.DeepseekV4PreTrainedModel)
            if parts and saves and "save_pretrained" not in vars(module):
                module.save_pretrained = SavePretrained(module)  # type: ignore[assignment]
                guards.savers.append(module)
        return guards

    def remove(self) -> None:
        """Remove all guards."""
        for hook in self.hooks:
            hook.remove()
        for module in self.savers:
            del module.save_pretrained
