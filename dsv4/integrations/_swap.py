"""Exchange of transformers' modules for this package's, tensor by tensor the same objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dsv4 import layers
from dsv4.config import ModelConfig
from dsv4.integrations._arguments import check_signatures
from dsv4.integrations._expert_parallel import ExpertRange
from dsv4.integrations._guards import guard
from dsv4.integrations._modules import DeepseekV4Attention, DeepseekV4DecoderLayer, OutputHead
from dsv4.integrations._report import NotReplaced, Replaced
from dsv4.integrations._settings import adopt_frequencies, settings_differ

_FOREIGN_FORWARD = "its forward was replaced on the instance (an offload hook or another patch)"
_ALREADY = "it is dsv4's already; undo first to change its numerics or activation"
_SUMMED = "its experts are summed over ranks, and the shared expert is added after that"
_RECORDER = "output_capturing_hook"
_KNOWN_HOMES = (
    "torch.nn.modules.",
    "transformers.models.deepseek_v4.",
    "transformers.activations",
    "dsv4.layers.",
)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass(frozen=True)
class Rule:
    """The rule by which one class of transformers is replaced.

    Attributes:
        part: The part it belongs to.
        build: Makes the new module, on meta, from the configuration and the old module.
        ours: The class of the new module.
        container: Name of the child that must be this package's for the rule to apply. The new
            module then takes over the children of the old one, replaced or not.
    """

    part: str
    ours: type[nn.Module]
    build: Callable[[ModelConfig, Any], nn.Module]
    container: str | None = None


def _norm(config: ModelConfig, old: Any) -> nn.Module:
    return layers.DeepseekV4RMSNorm(old.weight.shape[0], eps=old.variance_epsilon)


def _head(config: ModelConfig, old: Any) -> nn.Module:
    head = layers.Linear if config.numerics == "transformers" else OutputHead
    return head(config.hidden_size, config.vocab_size)


def _of_config(part: str, ours: Any) -> Rule:
    return Rule(part, ours, lambda config, old: ours(config))


def _of_layer(part: str, ours: Any, container: str | None = None) -> Rule:
    return Rule(part, ours, lambda config, old: ours(config, old.layer_idx), container)


RULES: dict[str, Rule] = {
    "DeepseekV4RotaryEmbedding": _of_config("attention", layers.DeepseekV4RotaryEmbedding),
    "DeepseekV4Attention": _of_layer("attention", DeepseekV4Attention),
    "DeepseekV4TopKRouter": _of_config("router", layers.DeepseekV4TopKRouter),
    "DeepseekV4HashRouter": _of_config("router", layers.DeepseekV4HashRouter),
    "DeepseekV4Experts": _of_config("experts", layers.DeepseekV4Experts),
    "DeepseekV4MLP": _of_config("mlp", layers.DeepseekV4MLP),
    "DeepseekV4SparseMoeBlock": Rule(
        "experts",
        layers.DeepseekV4SparseMoeBlock,
        lambda config, old: _moe_block(config, old),
        "experts",
    ),
    "DeepseekV4HyperConnection": _of_config("hyper_connection", layers.DeepseekV4HyperConnection),
    "DeepseekV4HyperHead": _of_config("hyper_connection", layers.DeepseekV4HyperHead),
    "DeepseekV4DecoderLayer": _of_layer("hyper_connection", DeepseekV4DecoderLayer, "attn_hc"),
    "DeepseekV4RMSNorm": Rule("norm", layers.DeepseekV4RMSNorm, _norm),
    "Linear": Rule("lm_head", layers.Linear, _head),
}
# Places of each class: a module of another class there is reported as kept.
_SUBMODULES = {
    "rotary_emb": "DeepseekV4RotaryEmbedding",
    "self_attn": "DeepseekV4Attention",
    "gate": "DeepseekV4TopKRouter",
    "experts": "DeepseekV4Experts",
    "shared_experts": "DeepseekV4MLP",
    "mlp": "DeepseekV4SparseMoeBlock",
    "attn_hc": "DeepseekV4HyperConnection",
    "ffn_hc": "DeepseekV4HyperConnection",
    "hc_head": "DeepseekV4HyperHead",
    "input_layernorm": "DeepseekV4RMSNorm",
    "post_attention_layernorm": "DeepseekV4RMSNorm",
    "lm_head": "Linear",
}
PARTS = ("attention", "experts", "router", "mlp", "hyper_connection", "norm", "lm_head")


def _moe_block(config: ModelConfig, old: Any) -> nn.Module:
    kind = "hash_moe" if old.is_hash else "moe"
    return layers.DeepseekV4SparseMoeBlock(config, config.mlp_layer_types.index(kind))


@dataclass
class Swap:
    """A replacement of one module."""

    parent: nn.Module
    attribute: str
    name: str
    part: str
    old: nn.Module
    new: nn.Module
    container: bool

    def do(self) -> None:
        """Share the tensors, or take over the children, and put the new module in place."""
        if self.container:
            self.new._modules = dict(self.old._modules)
        else:
            share_tensors(self.old, self.new)
        for hook in self.old._forward_hooks.values():
            self.new.register_forward_hook(hook)
        if not self.container:
            self.new.train(self.old.training)
        self.new.training = self.old.training
        setattr(self.parent, self.attribute, self.new)

    def undoable(self) -> str | None:
        """Return why this cannot be undone, or None."""
        if self.parent._modules.get(self.attribute) is not self.new:
            return "was replaced again since; undo that first"
        if self.container:
            same = self.old._modules.keys() == self.new._modules.keys() and all(
                self.old._modules[k] is self.new._modules[k] for k in self.new._modules
            )
            return None if same else "has children that were replaced since; undo that first"
        problem = tensors_differ(self.old, self.new)
        return None if problem is None else f"has other tensors since: {problem}"

    def undo(self) -> None:
        """Put the old module back, with the tensors of the new one."""
        if not self.container:
            share_tensors(self.new, self.old)
            _follow(self.old, self.new)
        self.old.training = self.new.training
        setattr(self.parent, self.attribute, self.old)


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers of a tree by name; shared ones under every name."""
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    for path, sub in module.named_modules():
        for name, tensor in sub._buffers.items():
            if tensor is not None and name not in sub._non_persistent_buffers_set:
                tensors[f"{path}.{name}" if path else name] = tensor
    return tensors


def tensors_differ(old: nn.Module, new: nn.Module) -> str | None:
    """Describe how the tensors of two modules differ in name, shape or kind; None if not."""
    theirs, ours = _own(old), _own(new)
    for name in sorted(theirs.keys() ^ ours.keys()):
        return f"{name} is {'not expected' if name in theirs else 'missing'}"
    for name, tensor in theirs.items():
        if tensor.shape != ours[name].shape:
            return f"{name} has shape {list(tensor.shape)}, wanted {list(ours[name].shape)}"
        if tensor.dtype != ours[name].dtype and not (_plain(tensor) and _plain(ours[name])):
            return f"{name} has dtype {tensor.dtype}, wanted {ours[name].dtype}"
        if type(tensor) not in (nn.Parameter, torch.Tensor, nn.Buffer):
            return f"{name} is a {type(tensor).__name__}, wanted a plain tensor"
    return None


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 1


def share_tensors(source: nn.Module, target: nn.Module) -> None:
    """Make ``target`` hold the very tensors of ``source``; names and shapes are known to agree."""
    for name, tensor in _own(source).items():
        path, _, attribute = name.rpartition(".")
        owner = target.get_submodule(path)
        table: dict[str, Any] = owner._buffers
        if attribute in owner._parameters:
            table = owner._parameters
        table[attribute] = tensor


def _follow(module: nn.Module, like: nn.Module) -> None:
    """Move tables that only ``module`` has (rotary frequencies) to where ``like`` went."""
    tensor = next(iter(_own(like).values()), None)
    for sub in module.modules():
        for name in sub._non_persistent_buffers_set:
            buffer = sub._buffers.get(name)
            if buffer is not None and tensor is not None:
                sub._buffers[name] = buffer.to(tensor.device)


def _obstacle(module: nn.Module, container: bool) -> str | None:
    """Return why a module must stay, judged by what others did to it; None if nothing."""
    for path, sub in module.named_modules() if not container else [("", module)]:
        where = f"{path}: " if path else ""
        if "forward" in vars(sub):
            return where + _FOREIGN_FORWARD
        for hook in (h for kind in _HOOKS for h in getattr(sub, kind).values()):
            if _RECORDER not in getattr(hook, "__qualname__", ""):
                return f"{where}it has hooks, which a swap would drop"
        home = type(sub).__module__
        if not home.startswith(_KNOWN_HOMES):
            return f"{where}it is a {type(sub).__module__}.{type(sub).__qualname__}"
    return None


def _kind(module: nn.Module, attribute: str) -> str:
    """Return which rule a module falls under, by its class or by its place; "" if none."""
    for base in type(module).__mro__:
        if base.__name__ in RULES and base.__name__ != "Linear":
            return base.__name__
    return _SUBMODULES.get(attribute, "")


@dataclass
class Plan:
    """The modules that will be swapped; nothing is changed while it is made.

    Attributes:
        config: Configuration of the new modules.
        modeling: transformers' module of model code, whose classes are the expected ones.
        parts: The requested parts.
        frequencies: Inverse frequencies by label, where they are not the configuration's.
        experts: The experts that this process has of a model distributed over ranks; None: all.
    """

    config: ModelConfig
    modeling: Any
    parts: tuple[str, ...]
    frequencies: dict[str, torch.Tensor] = field(default_factory=dict)
    experts: ExpertRange | None = None
    swaps: list[Swap] = field(default_factory=list)
    not_replaced: list[NotReplaced] = field(default_factory=list)

    def check(self) -> None:
        """Compare the arguments of the modules to replace with those of their replacements.

        Raises:
            TypeError: if ours does not take one of them.
        """
        pairs = [(type(swap.old), type(swap.new)) for swap in self.swaps]
        check_signatures(pair for pair in pairs if pair[0] is not nn.Linear)

    def visit(self, parent: nn.Module, prefix: str = "") -> None:
        """Plan for the descendants of ``parent``, children before containers."""
        for attribute, module in parent._modules.items():
            if module is None:
                continue
            name = f"{prefix}{attribute}"
            kind = _kind(module, attribute)
            rule = RULES.get(kind)
            if rule is None or rule.container is not None:
                self.visit(module, name + ".")
            if rule is None:
                continue
            done = self._try(parent, attribute, name, kind)
            if not done and rule.container is None:
                self.visit(module, name + ".")

    def _try(self, parent: nn.Module, attribute: str, name: str, kind: str) -> bool:
        """Plan one swap, or note why not; True if the tree below needs no visit."""
        rule = RULES[kind]
        old = parent._modules[attribute]
        assert old is not None
        if rule.part not in self.parts:
            self.not_replaced.append(
                NotReplaced(name, rule.part, f"{rule.part!r} was not asked for")
            )
            return False
        if type(old).__module__.startswith("dsv4."):
            self.not_replaced.append(NotReplaced(name, rule.part, _ALREADY))
            return True
        reason, new = self._candidate(old, kind)
        if new is None:
            self.not_replaced.append(NotReplaced(name, rule.part, reason))
            return False
        container = rule.container is not None
        self.swaps.append(Swap(parent, attribute, name, rule.part, old, new, container))
        return True

    def _candidate(self, old: nn.Module, kind: str) -> tuple[str, nn.Module | None]:
        rule = RULES[kind]
        expected = nn.Linear if kind == "Linear" else getattr(self.modeling, kind)
        if type(old) is not expected:
            return f"it is a {type(old).__module__}.{type(old).__qualname__}", None
        container = rule.container is not None
        if self.experts is not None and rule.container == "experts":
            return _SUMMED, None
        obstacle = _obstacle(old, container)
        if obstacle is not None:
            return obstacle, None
        if rule.container is not None and not self._ours(old, rule.container):
            return f"its {rule.container} was not replaced", None
        with torch.device("meta"):
            new = self._built(rule, old)
        problem = settings_differ(old, new, container=container)
        if problem is None and not container:
            problem = tensors_differ(old, new)
        return ("", new) if problem is None else (problem, None)

    def _built(self, rule: Rule, old: nn.Module) -> nn.Module:
        if self.experts is not None and rule.ours is layers.DeepseekV4Experts:
            return self.experts.build(self.config)
        return rule.build(self.config, old)

    def _ours(self, module: nn.Module, child: str) -> bool:
        present = module._modules[child]
        planned = any(swap.old is present for swap in self.swaps)
        return planned or type(present).__module__.startswith("dsv4.")

    def execute(self) -> tuple[Replaced, ...]:
        """Make all swaps."""
        for swap in self.swaps:
            swap.do()
            adopt_frequencies(swap.new, self.frequencies)
            attention = type(swap.old).__name__ == "DeepseekV4Attention"
            guard(swap.new, getattr(swap.old, "config", None), attention=attention)
        return tuple(self._replaced())

    def _replaced(self) -> Iterator[Replaced]:
        for swap in self.swaps:
            old, new = type(swap.old).__name__, type(swap.new)
            yield Replaced(swap.name, swap.part, old, f"{new.__module__}.{new.__qualname__}")

    def undo(self) -> None:
        """Put all originals back, or raise before changing anything."""
        for swap in reversed(self.swaps):
            reason = swap.undoable()
            if reason is not None:
                raise RuntimeError(f"undo: {swap.name} {reason}")
        for swap in reversed(self.swaps):
            swap.undo()
