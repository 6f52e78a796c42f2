"""Check that a model's tensors are the ones that CUDA graphs were captured with."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, compress
from operator import attrgetter
from typing import Any

import torch
from torch import nn

_data_ptr = torch.Tensor.data_ptr
_version = attrgetter("_version")


class Weights:
    """Addresses of a model's tensors and how often they were written to, at one time.

    Every call of ``generate`` compares twice. Before it launches anything, it calls
    ``are_in_place``: graphs hold addresses, so the memory there must still be the model's. While
    the GPU works, it calls ``are_those_of`` for the rest. For 2078 tensors of 1477 modules (43
    layers) the first takes 0.20 ms and the second 0.70 ms on a CPU on which a walk over the modules
    takes 2.1 ms. Changes of inference tensors cannot be seen.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        tables: list[dict[str, Any]]
        tables = [d for module in modules for d in (module._parameters, module._buffers)]
        children: list[Any] = [module._modules for module in modules]
        self._model = id(model)
        # Held, including tensors of replaced modules, so that their memory is not used otherwise.
        self._full = [d for d in tables if any(value is not None for value in d.values())]
        self._rest = [d for d in tables if d and all(value is None for value in d.values())]
        self._rest += filter(None, children)
        self._empty = [d for d in (*tables, *children) if not d]
        self._has_tensor = [value is not None for value in _values(self._full)]
        tensors = list(self._tensors())
        self._is_tracked = [not tensor.is_inference() for tensor in tensors]
        self._addresses = list(map(_data_ptr, tensors))
        self._versions = list(map(_version, compress(tensors, self._is_tracked)))
        self._ids = list(map(id, _values(self._full)))
        self._others = list(map(id, _values(self._rest)))

    def are_in_place(self, model: nn.Module) -> bool:
        """Return whether memory that graphs read is still the model's, or of modules it had."""
        return self._model == id(model) and self._lie_there(self._tensors())

    def are_those_of(self, model: nn.Module) -> bool:
        """Return whether the model has the same modules, with the same tensors, unchanged."""
        if self._model != id(model) or any(self._empty):
            return False
        if list(map(id, _values(self._rest))) != self._others:
            return False
        tensors = list(self._tensors())
        if list(map(id, _values(self._full))) != self._ids or not self._lie_there(tensors):
            return False
        return list(map(_version, compress(tensors, self._is_tracked))) == self._versions

    def _lie_there(self, tensors: Iterable[Any]) -> bool:
        try:
            return list(map(_data_ptr, tensors)) == self._addresses
        except TypeError:  # a tensor is None now
            return False

    def _tensors(self) -> Iterable[Any]:
        return compress(_values(self._full), self._has_tensor)


def _values(tables: list[dict[str, Any]]) -> Iterable[Any]:
    return chain.from_iterable(map(dict.values, tables))
