"""The parts of a module tree that take values from a checkpoint: linear layers and tensors.

There are three kinds of slot: stacked routed experts (``dsv4.checkpoint.expert_slots``), a linear
layer that can hold a quantised weight, and a plain parameter or buffer. The first two are
recognised by their methods, so the same code fills this package's modules, transformers' modules,
and a mixture of the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dsv4.checkpoint.entries import Entry
from dsv4.checkpoint.options import Matrix, Options
from dsv4.checkpoint.problems import Problem
from dsv4.checkpoint.shards import CheckpointError, Reading
from dsv4.quant.formats import LINEAR, NVFP4

Entries = Mapping[str, Entry]
_DTYPE, _LAYOUT = "wrong dtype", "packed layers"


@dataclass(frozen=True)
class Expected:
    """An entry that a slot takes.

    Attributes:
        name: Its canonical name.
        shape: Its logical shape.
    """

    name: str
    shape: tuple[int, ...]


class Slot:
    """A part of a module that takes one or more entries."""

    name: str
    module: Any

    def expected(self, entries: Entries) -> Iterator[Expected]:
        """Return its entries; ``entries`` decides if a checkpoint may hold several forms."""
        raise NotImplementedError

    def left_to_others(self) -> Iterator[str]:
        """Return names of entries that belong to the same layer on other ranks."""
        return iter(())

    def problems(self, entries: Entries, options: Options) -> Iterator[Problem]:
        """Return what is wrong with entries that exist and have the right shape."""
        raise NotImplementedError

    def check_values(self, entries: Entries, options: Options) -> None:
        """Read everything once, and raise CheckpointError where ``fill`` would."""
        for entry in self.expected(entries):
            entries[entry.name].check_values()

    def check_readings(self, entries: Entries, options: Options) -> Iterator[Reading]:
        """Yield what ``check_values`` reads first of every tensor, in its order."""
        for entry in self.expected(entries):
            yield from entries[entry.name].check_readings()

    def fill(self, entries: Entries, options: Options) -> None:
        """Read the values and store them in the module."""
        raise NotImplementedError

    def readings(self, entries: Entries, options: Options) -> Iterator[Reading]:
        """Yield what ``fill`` reads, in its order; of a layer that it reads twice the first time.

        Only speed depends on it.
        """
        for entry in self.expected(entries):
            yield from entries[entry.name].readings()


def target_device(tensor: torch.Tensor, options: Options) -> torch.device:
    """Return the device on which a tensor of a module gets its values."""
    if options.device is not None:
        return options.device
    return torch.device("cpu") if tensor.is_meta else tensor.device


def dense(value: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """Return a plain tensor as it is, a quantised one dequantised to ``dtype``."""
    if isinstance(value, torch.Tensor):
        return value
    from dsv4.ops.quantize import dequantize

    return dequantize(value, dtype)


@dataclass
class PlainSlot(Slot):
    """A parameter or buffer; a quantised entry is dequantised into it."""

    name: str
    module: nn.Module
    attribute: str

    @property
    def tensor(self) -> torch.Tensor:
        """The parameter or buffer."""
        return getattr(self.module, self.attribute)

    def expected(self, entries: Entries) -> Iterator[Expected]:
        """The entries that it takes."""
        yield Expected(self.name, tuple(self.tensor.shape))

    def problems(self, entries: Entries, options: Options) -> Iterator[Problem]:
        """Return what is wrong with entries of the right shape."""
        entry = entries[self.name]
        floating = entry.format is not None or entry.weight.dtype.is_floating_point
        if floating != self.tensor.is_floating_point():
            dtype = "a floating dtype" if self.tensor.is_floating_point() else "I64"
            yield Problem(_DTYPE, f"{entry.weight}: wrong dtype, wanted {dtype}")

    def check_values(self, entries: Entries, options: Options) -> None:
        """Read everything once, and raise CheckpointError where ``fill`` would."""
        super().check_values(entries, options)
        if self.attribute == "tid2eid":
            value = entries[self.name].read()
            assert isinstance(value, torch.Tensor)
            self._check_table(value)

    def _check_table(self, value: torch.Tensor) -> None:
        if self.attribute != "tid2eid" or value.numel() == 0:
            return
        low, high, count = int(value.min()), int(value.max()), int(self.module.num_experts)  # type: ignore[arg-type]
        if low < 0 or high >= count:
            raise CheckpointError(f"{self.name} holds {low} to {high}, wanted 0 to {count - 1}")

    def fill(self, entries: Entries, options: Options) -> None:
        """Read the values and store them in the module."""
        value = options.read(entries[self.name], target_device(self.tensor, options))
        plain = dense(value, options.dtype or torch.bfloat16)
        self._check_table(plain)
        if self.attribute in self.module._buffers:
            self.module._buffers[self.attribute] = plain
            return
        grad = self.tensor.requires_grad and plain.is_floating_point()
        self.module._parameters[self.attribute] = nn.Parameter(plain, requires_grad=grad)


@dataclass
class LinearSlot(Slot):
    """A module with ``set_weight``."""

    name: str
    module: Any

    def expected(self, entries: Entries) -> Iterator[Expected]:
        """The entries that it takes."""
        yield Expected(self.name, (self.module.out_features, self.module.in_features))

    def problems(self, entries: Entries, options: Options) -> Iterator[Problem]:
        """Return what is wrong with entries of the right shape."""
        entry = entries[self.name]
        if entry.format is None and not entry.weight.dtype.is_floating_point:
            yield wrong_dtype(entry)
        if is_packed(self.module):
            yield packed_layer(self.name)

    def fill(self, entries: Entries, options: Options) -> None:
        """Read the values and store them in the module."""
        entry = entries[self.name]
        device = target_device(self.module.weight, options)
        value = options.read(entry, device)
        if isinstance(value, torch.Tensor):
            self.module.set_weight(value.requires_grad_(self.module.weight.requires_grad))
            return
        if options.converts(entry):
            converted = options.converted(entry, value)
            options.conversion.count(1, stays=converted is None)
            self.module.set_weight(value if converted is None else converted)
        else:
            scale = entry.read_input_scale(device) if _takes_scale(entry, options) else None
            self.module.set_weight(value, scale)

    def readings(self, entries: Entries, options: Options) -> Iterator[Reading]:
        """Yield what ``fill`` reads, in its order."""
        entry = entries[self.name]
        yield from entry.readings(input_scale=_takes_scale(entry, options))


def _takes_scale(entry: Entry, options: Options) -> bool:
    """Return whether a linear layer takes the input scale of its entry."""
    return entry.format == NVFP4 and options.input_scales == "stored"


def is_packed(module: Any) -> bool:
    """Return whether a layer's weight has the layout of a kernel, in which it cannot be filled."""
    return getattr(module, "layout", LINEAR) != LINEAR


def wrong_dtype(entry: Entry) -> Problem:
    """Return the problem of an integer tensor where a weight is expected."""
    return Problem(_DTYPE, f"{entry.weight}: wrong dtype, wanted a floating or a quantised one")


def packed_layer(name: str) -> Problem:
    """Return the problem of a packed layer."""
    return Problem(_LAYOUT, f"{name}: the layer is packed, call dsv4.layers.unpack_ first")
