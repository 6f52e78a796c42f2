"""Whether a model's tensors are the ones that CUDA graphs were captured with."""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn

_data_ptr = torch.Tensor.data_ptr


class Weights:
    """Where a model's tensors lie, and how often they were written to, at one time.

    ``generate`` compares before every call. For a model of 4 layers that takes 59 us on a CPU, and
    a walk over the modules 155 us. Changes of inference tensors cannot be seen.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._children = [module._modules for module in modules]
        tables = [d for module in modules for d in (module._parameters, module._buffers)]
        self._full = [table for table in tables if table]
        self._empty = [table for table in tables if not table]
        self._model = id(model)
        self._state = self._now()

    def are_those_of(self, model: nn.Module) -> bool:
        """Whether the model has the same modules, with the same tensors, unchanged."""
        return self._model == id(model) and self._now() == self._state

    def _now(self) -> tuple[list[int], ...]:
        tensors = [t for table in self._full for t in table.values() if t is not None]
        return (
            list(map(id, chain.from_iterable(map(dict.values, self._children)))),
            list(map(id, tensors)),
            list(map(_data_ptr, tensors)),
            [0 if tensor.is_inference() else tensor._version for tensor in tensors],
            list(filter(None, map(len, self._empty))),
        )
