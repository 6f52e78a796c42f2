"""Find the slots of a module tree."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from dsv4.checkpoint.expert_slots import ExpertsSlot
from dsv4.checkpoint.slots import LinearSlot, PlainSlot, Slot


def slots_of(root: nn.Module, prefix: str = "") -> list[Slot]:
    """Return the slots of a module tree, in its order; shared parameters come once."""
    slots: list[Slot] = []
    done: set[int] = set()
    for path, module in root.named_modules(prefix=prefix.rstrip(".")):
        dot = f"{path}." if path else ""
        if _is_experts(module):
            slots.append(ExpertsSlot(path, module))
        elif hasattr(module, "set_weight"):
            slots.append(LinearSlot(dot + "weight", module))
        else:
            for attribute, tensor in _own_tensors(module):
                if id(tensor) not in done:
                    done.add(id(tensor))
                    slots.append(PlainSlot(dot + attribute, module, attribute))
    return slots


def _is_experts(module: nn.Module) -> bool:
    stack = getattr(module, "gate_up_proj", None)
    return isinstance(stack, torch.Tensor) and stack.dim() == 3


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return parameters and persistent buffers of a module without those of its children."""
    skipped = module._non_persistent_buffers_set
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and name not in skipped:
            yield name, tensor
