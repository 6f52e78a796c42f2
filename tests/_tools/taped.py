"""Emulate a CUDA graph on a CPU: note torch operations, and run them again on the same memory.

Nothing but operations is repeated. What the host computed while they were noted is a constant in
all replays, and a value that it read from a tensor is an error, as in a capture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Notes operations inside a ``with`` block; ``replay`` runs them again.

    dsv4's operators are operations as a whole. Reading a bool is allowed: checks of values do so,
    on the CPU alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            assert args[0].dtype == torch.bool, "the host reads a tensor"
            return func(*args)
        out = func(*args, **kwargs)
        outputs = _tensors(out)
        # A view of what other operations write; a reshape may be one, or a copy.
        if not func.is_view or _storage(outputs[0]) != _storage(args[0]):
            self.calls.append((func, args, kwargs, outputs))
        return out

    def replay(self) -> None:
        for func, args, kwargs, outputs in self.calls:
            for old, new in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def taped(graphs: Any, work: Callable[[], Any]) -> tuple[Tape, Any]:
    """Replace ``dsv4.serving.graphs.Graphs.captured``."""
    work()
    tape = Tape()
    with tape:
        out = work()
    return tape, out


class Again:
    """Runs the work again, whatever it is made of, and writes its old outputs."""

    def __init__(self, work: Callable[[], Any], out: Any) -> None:
        self.work, self.out = work, out

    def replay(self) -> None:
        new = self.work()
        for old, tensor in zip(_tensors(_fields(self.out)), _tensors(_fields(new)), strict=True):
            old.copy_(tensor)


def replayed(graphs: Any, work: Callable[[], Any]) -> tuple[Again, Any]:
    """Replace ``Graphs.captured`` for models that are no torch operations."""
    work()
    out = work()
    return Again(work, out), out


def _fields(out: Any) -> Any:
    return list(vars(out).values()) if is_dataclass(out) else out


def _tensors(out: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
