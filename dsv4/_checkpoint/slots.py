"""What a module tree wants from a checkpoint, and how each part of it takes its values.

Three kinds of slot: stacked routed experts, a linear layer that can hold a quantised weight, and a
plain parameter or buffer. The first two are recognised by what they can do, so the same code fills
this package's modules, transformers' modules, and a mixture of the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from dsv4._checkpoint.entries import Entry
from dsv4._checkpoint.mxfp4 import pair_to_nvfp4
from dsv4._checkpoint.options import Matrix, Options, narrowed
from dsv4._checkpoint.problems import Problem
from dsv4._checkpoint.shards import CheckpointError
from dsv4.quant.formats import FP8_BLOCK, LINEAR, MXFP4, NVFP4

Entries = Mapping[str, Entry]
_Item = TypeVar("_Item")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_DTYPE, _FORMATS, _LAYOUT = "wrong dtype", "formats of experts", "packed layers"
INPUT_SCALES = "input scales"
WAYS_OUT = (
    "without calibration pass input_scales='token' for a scale per token, from which "
    "dsv4.layers.calibrate can go on, or activation='bf16'"
)


class Slot:
    """A part of a module that takes one or more entries."""

    name: str
    module: Any

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Canonical names and logical shapes."""
        raise NotImplementedError

    def problems(self, entries: Entries, options: Options) -> Iterator[Problem]:
        """What is wrong with entries that exist and have the right shape."""
        raise NotImplementedError

    def check_values(self, entries: Entries, options: Options) -> None:
        """Read everything once, and raise CheckpointError where ``fill`` would."""
        for name, _ in self.wanted():
            entries[name].check_values()

    def fill(self, entries: Entries, options: Options) -> None:
        """Take the values."""
        raise NotImplementedError


def _device(tensor: torch.Tensor, options: Options) -> torch.device:
    if options.device is not None:
        return options.device
    return torch.device("cpu") if tensor.is_meta else tensor.device


def _dense(value: Matrix, dtype: torch.dtype) -> torch.Tensor:
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
        return getattr(self.module, self.attribute)

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.name, tuple(self.tensor.shape)

    def problems(self, entries: Entries, options: Options) -> Iterator[Problem]:
        entry = entries[self.name]
        floating = entry.format is not None or entry.weight.dtype.is_floating_point
        if floating != self.tensor.is_floating_point():
            wanted = "a floating dtype" if self.tensor.is_floating_point() else "I64"
            yield Problem(_DTYPE, f"{entry.weight}: wrong dtype, wanted {wanted}")

    def check_values(self, entries: Entries, options: Options) -> None:
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
        value = options.read(entries[self.name], _device(self.tensor, options))
        plain = _dense(value, options.dtype or torch.bfloat16)
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

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.name, (self.module.out_features, self.module.in_features)

    def problems(self, entries: Entries, options: Options) -> Iterator[Problem]:
        entry = entries[self.name]
        if entry.format is None and not entry.weight.dtype.is_floating_point:
            yield _wrong_dtype(entry)
        if getattr(self.module, "layout", LINEAR) != LINEAR:
            yield _packed(self.name)

    def fill(self, entries: Entries, options: Options) -> None:
        entry = entries[self.name]
        device = _device(self.module.weight, options)
        value = options.read(entry, device)
        if isinstance(value, torch.Tensor):
            self.module.set_weight(value.requires_grad_(self.module.weight.requires_grad))
            return
        if options.converts(entry):
            converted = options.converted(entry, value)
            options.conversion.count(1, kept=converted is None)
            self.module.set_weight(value if converted is None else converted)
        else:
            stored = value.format == NVFP4 and options.input_scales == "stored"
            scale = entry.read_input_scale(device) if stored else None
            self.module.set_weight(value, scale)


@dataclass
class ExpertsSlot(Slot):
    """Stacked experts, of this package (``set_expert``) or of transformers (plain parameters).

    The checkpoint holds one matrix per expert and projection, or two plain stacks.
    """

    name: str
    module: Any

    @property
    def count(self) -> int:
        return int(self.module.gate_up_proj.shape[0])

    def names_of(self, expert: int) -> tuple[str, str, str]:
        """Canonical names of gate, up and down of an expert of the stack."""
        prefix = f"{self.name}.{getattr(self.module, 'first_expert', 0) + expert}"
        gate, up, down = (f"{prefix}.{p}.weight" for p in PROJECTIONS)
        return gate, up, down

    def stacked(self) -> tuple[str, str]:
        """Names of the two stacks."""
        return f"{self.name}.gate_up_proj", f"{self.name}.down_proj"

    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of gate or up, and of down."""
        inner, hidden = self.module.intermediate_dim, self.module.hidden_dim
        return (inner, hidden), (hidden, inner)

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        wide, tall = self.shapes()
        for expert in range(self.count):
            gate, up, down = self.names_of(expert)
            yield from ((gate, wide), (up, wide), (down, tall))

    def wanted_stacked(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The same for a checkpoint with stacks."""
        (inner, hidden), tall = self.shapes()
        gate_up, down = self.stacked()
        yield gate_up, (self.count, 2 * inner, hidden)
        yield down, (self.count, *tall)

    def _entries(self, entries: Entries) -> list[Entry]:
        if self.stacked()[0] in entries:
            return [entries[name] for name in self.stacked()]
        return [entries[name] for e in range(self.count) for name in self.names_of(e)]

    def problems(self, entries: Entries, options: Options) -> Iterator[Problem]:
        if getattr(self.module, "layout", LINEAR) != LINEAR:
            yield _packed(self.name)
        found = self._entries(entries)
        kinds = {options.format_of(entry) for entry in found}
        if len(kinds) > 1 or any(e.format and len(e.shape) == 3 for e in found):
            words = ", ".join(sorted({entry.kind for entry in found}))
            odd = _rarest(found, [options.format_of(entry) for entry in found])
            yield Problem(
                _FORMATS,
                f"{self.name}: experts are {words}, wanted one format in a layer; "
                f"{odd.weight} is {odd.kind}",
            )
            return
        for entry in found:
            if entry.format is None and not entry.weight.dtype.is_floating_point:
                yield _wrong_dtype(entry)
        scaled = [entry for entry in found if entry.scales]
        dtypes = [options.scale_dtype(entry) for entry in scaled]
        if len(set(dtypes)) > 1:
            odd_scale = _rarest(scaled, dtypes).scales
            yield Problem(
                _FORMATS,
                f"{self.name}: experts have block scales of several dtypes, wanted one; "
                f"one is {odd_scale}",
            )
        if kinds == {FP8_BLOCK.name} and self.shapes()[0][0] % 128 and self._quantised:
            yield Problem(
                _FORMATS,
                f"{self.name}: FP8 experts need an intermediate size that is a multiple of 128, "
                f"found {self.shapes()[0][0]}",
            )
        if _calibrated(options) and self._quantised:
            yield from self._missing_input_scales(found)

    @property
    def _quantised(self) -> bool:
        return hasattr(self.module, "set_expert")

    @staticmethod
    def _missing_input_scales(found: Sequence[Entry]) -> Iterator[Problem]:
        for entry in found:
            if entry.format == NVFP4 and entry.input_scale is None:
                yield Problem(
                    INPUT_SCALES,
                    f"{entry.input_scale_name} is missing, which activation='nvfp4' needs",
                )

    def check_values(self, entries: Entries, options: Options) -> None:
        for entry in self._entries(entries):
            entry.check_values()
        if self._quantised:
            self._input_scales(entries, options)

    def fill(self, entries: Entries, options: Options) -> None:
        device = _device(self.module.gate_up_proj, options)
        stacked = self.stacked()[0] in entries
        first = self._entries(entries)[0]
        quantised = self._quantised and first.format is not None
        scales = self._input_scales(entries, options) if quantised else None
        self._declare(first, options, device, scales is not None)
        if stacked:
            self._fill_stacked(entries, options, device)
            return
        if not self._quantised:
            for expert in range(self.count):
                parts = [options.read(entries[name], device) for name in self.names_of(expert)]
                self._copy_dense(expert, parts)
            return
        if not self._fill_quantised(entries, options, device, scales):
            self._check_alike(entries, options)
            options = replace(options, mxfp4="keep")
            self._declare(first, options, device, scales is not None)
            self._fill_quantised(entries, options, device, scales)

    def _fill_quantised(
        self,
        entries: Entries,
        options: Options,
        device: torch.device,
        scales: tuple[list[torch.Tensor], list[torch.Tensor]] | None,
    ) -> bool:
        """Set every expert; False if one has to stay MXFP4 where others became NVFP4."""
        found = [[entries[name] for name in self.names_of(e)] for e in range(self.count)]
        count = sum(options.converts(entry) for three in found for entry in three)
        before = len(options.conversion.inexact)
        for expert, three in enumerate(found):
            parts = _converted(three, [options.read(e, device) for e in three], options)
            if parts is not None:
                given = None if scales is None else (scales[0][expert], scales[1][expert])
                self.module.set_expert(expert, *parts, input_scales=given)
        kept = options.mxfp4 == "lossless" and len(options.conversion.inexact) > before
        options.conversion.count(count, kept=kept)
        return not kept

    def _check_alike(self, entries: Entries, options: Options) -> None:
        """Raise CheckpointError if not all experts of the layer are MXFP4."""
        others = [entry for entry in self._entries(entries) if entry.format != MXFP4]
        if others:
            raise CheckpointError(
                f"{self.name}: experts are MXFP4 and {others[0].kind}, wanted one format in a "
                f"layer; {options.conversion.inexact[-1]} has values that NVFP4 does not: pass "
                "mxfp4='nvfp4' to round them"
            )

    def _declare(
        self, first: Entry, options: Options, device: torch.device, input_scale: bool
    ) -> None:
        """Storage of the right format on the right device; its values are not set yet."""
        old = self.module.gate_up_proj.requires_grad
        name = options.format_of(first) if self._quantised else None
        if name is not None:
            kept = first.scales is not None and name == first.kind
            dtype = first.scale_dtype if kept else None
            self.module.to_format(name, scale_dtype=dtype, input_scale=input_scale)
            self.module.to_empty(device=device)
            return
        if self._quantised:
            self.module.to_format(None)
        stored = first.weight.dtype if first.format is None else torch.bfloat16
        dtype = options.dtype or stored
        for attribute in ("gate_up_proj", "down_proj"):
            shape = getattr(self.module, attribute).shape
            empty = torch.empty(shape, dtype=dtype, device=device)
            setattr(self.module, attribute, nn.Parameter(empty, requires_grad=old))

    @torch.no_grad()
    def _fill_stacked(self, entries: Entries, options: Options, device: torch.device) -> None:
        for attribute, name in zip(("gate_up_proj", "down_proj"), self.stacked(), strict=True):
            stack = getattr(self.module, attribute)
            for expert, matrix in enumerate(entries[name].matrices(device)):
                what = f"{entries[name].weight}, matrix {expert},"
                stack[expert].copy_(narrowed(matrix, stack.dtype, what))

    @torch.no_grad()
    def _copy_dense(self, expert: int, parts: Sequence[Matrix]) -> None:
        dtype = self.module.gate_up_proj.dtype
        gate, up, down = (_dense(part, dtype) for part in parts)
        inner = gate.shape[0]
        self.module.gate_up_proj[expert, :inner] = gate
        self.module.gate_up_proj[expert, inner:] = up
        self.module.down_proj[expert] = down

    def _input_scales(
        self, entries: Entries, options: Options
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
        """Activation scales of gate/up and of down for every expert, or None if not all known.

        Gate and up read the same activation: the larger of their scales is used, because with the
        smaller one the other's range would clip (pitfall 27). An expert without calibration data
        gets the largest scale of its projection, as NVIDIA's exporter does (specification, section
        11.5.2).
        """
        found = self._entries(entries)
        if options.input_scales == "token":
            return None
        if any(entry.format != NVFP4 or entry.input_scale is None for entry in found):
            return None
        gate_up = self._largest(entries, ("gate_proj", "up_proj"))
        down = self._largest(entries, ("down_proj",))
        if gate_up is not None and down is not None:
            return gate_up, down
        if _calibrated(options):
            raise CheckpointError(
                f"{self.name}: no expert has a calibrated input scale, "
                f"which activation='nvfp4' needs; {WAYS_OUT}"
            )
        return None

    def _largest(self, entries: Entries, members: Sequence[str]) -> list[torch.Tensor] | None:
        """Per expert the largest scale of some projections, or of all experts; None if unknown."""
        best: list[torch.Tensor | None] = []
        for expert in range(self.count):
            named = zip(PROJECTIONS, self.names_of(expert), strict=True)
            row = [entries[name].read_input_scale() for p, name in named if p in members]
            best.append(max((s for s in row if s is not None), default=None, key=float))
        known = [scale for scale in best if scale is not None]
        if not known:
            return None
        largest = max(known, key=float)
        return [largest if scale is None else scale for scale in best]


def _converted(
    found: Sequence[Entry], parts: Sequence[Matrix], options: Options
) -> list[Matrix] | None:
    """Gate, up and down of an expert as they are to be in memory; None if one has to stay MXFP4.

    What becomes NVFP4 has one global scale for gate and up where that changes no value.
    """
    out: list[Matrix | None] = list(parts)
    waiting = [i for i, entry in enumerate(found) if options.converts(entry)]
    if waiting[:2] == [0, 1]:
        pair = pair_to_nvfp4(*parts[:2])  # type: ignore[arg-type]
        if pair is not None:
            out[:2] = pair
            del waiting[:2]
    for i in waiting:
        out[i] = options.converted(found[i], parts[i])  # type: ignore[arg-type]
    return None if any(part is None for part in out) else out  # type: ignore[return-value]


def _calibrated(options: Options) -> bool:
    """Whether NVFP4 experts need an input scale from the checkpoint."""
    return options.activation == "nvfp4" and options.input_scales == "stored"


def _wrong_dtype(entry: Entry) -> Problem:
    return Problem(_DTYPE, f"{entry.weight}: wrong dtype, wanted a floating or a quantised one")


def _packed(name: str) -> Problem:
    return Problem(_LAYOUT, f"{name}: the layer is packed, call dsv4.layers.unpack_ first")


def _rarest(items: Sequence[_Item], keys: Sequence[object]) -> _Item:
    """The first item of the key that the fewest have."""
    counts = Counter(keys)
    return min(zip(items, keys, strict=True), key=lambda pair: counts[pair[1]])[0]


def slots_of(root: nn.Module, prefix: str = "") -> list[Slot]:
    """The slots of a module tree, in its order; parameters shared by two modules come once."""
    found: list[Slot] = []
    done: set[int] = set()
    for path, module in root.named_modules(prefix=prefix.rstrip(".")):
        dot = f"{path}." if path else ""
        if _is_experts(module):
            found.append(ExpertsSlot(path, module))
        elif hasattr(module, "set_weight"):
            found.append(LinearSlot(dot + "weight", module))
        else:
            for attribute, tensor in _own(module):
                if id(tensor) not in done:
                    done.add(id(tensor))
                    found.append(PlainSlot(dot + attribute, module, attribute))
    return found


def _is_experts(module: nn.Module) -> bool:
    stack = getattr(module, "gate_up_proj", None)
    return isinstance(stack, torch.Tensor) and stack.dim() == 3


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    skipped = module._non_persistent_buffers_set
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and name not in skipped:
            yield name, tensor
