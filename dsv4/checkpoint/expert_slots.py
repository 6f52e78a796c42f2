"""Routed experts: the slot that takes all matrices of a layer's experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from dsv4.checkpoint.entries import Entry
from dsv4.checkpoint.mxfp4 import pair_to_nvfp4
from dsv4.checkpoint.options import Matrix, Options, narrowed
from dsv4.checkpoint.problems import Problem
from dsv4.checkpoint.shards import CheckpointError, Reading
from dsv4.checkpoint.slots import (
    Entries,
    Expected,
    Slot,
    dense,
    is_packed,
    packed_layer,
    target_device,
    wrong_dtype,
)
from dsv4.quant.formats import FP8_BLOCK, MXFP4, NVFP4

_T = TypeVar("_T")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_SCALED_TOGETHER = (("gate_proj", "up_proj"), ("down_proj",))  # projections of one activation
_FORMATS = "formats of experts"
INPUT_SCALES = "input scales"
WAYS_OUT = (
    "without calibration pass input_scales='token' for a scale per token, from which "
    "dsv4.layers.calibrate can go on, or activation='bf16'"
)


@dataclass(frozen=True)
class InputScales:
    """Calibrated scales of the activations, one per expert of a layer.

    Attributes:
        gate_up: Scales of the input of gate and up.
        down: Scales of the input of down.
    """

    gate_up: Sequence[torch.Tensor]
    down: Sequence[torch.Tensor]

    def of(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both scales of an expert, as ``set_expert`` takes them."""
        return self.gate_up[expert], self.down[expert]


@dataclass
class ExpertsSlot(Slot):
    """Stacked experts, of this package (``set_expert``) or of transformers (plain parameters).

    The checkpoint holds one matrix per expert and projection, or two plain stacks.
    """

    name: str
    module: Any

    @property
    def count(self) -> int:
        """Number of experts of the stack, those in host memory included."""
        if getattr(self.module, "hosted", None) is not None:
            return int(self.module.num_experts)
        return int(self.module.gate_up_proj.shape[0])

    @property
    def held(self) -> range:
        """Numbers of the experts of the stack."""
        first = getattr(self.module, "first_expert", 0)
        return range(first, first + self.count)

    @property
    def of_layer(self) -> range:
        """Numbers of the experts of the layer, those of other ranks included."""
        if not hasattr(self.module, "first_expert"):
            return self.held
        return range(self.module.num_experts)

    def names_of(self, expert: int) -> tuple[str, str, str]:
        """Return the canonical names of gate, up and down of an expert of the stack."""
        return self._names(self.held[expert])

    def _names(self, number: int) -> tuple[str, str, str]:
        """Return the names of the matrices of an expert of the layer."""
        gate, up, down = (f"{self.name}.{number}.{p}.weight" for p in PROJECTIONS)
        return gate, up, down

    def left_to_others(self) -> Iterator[str]:
        """Return the names of the experts of the layer that the stack does not hold."""
        for number in self.of_layer:
            if number not in self.held:
                yield from self._names(number)

    def stack_names(self) -> tuple[str, str]:
        """Names of the two stacks."""
        return f"{self.name}.gate_up_proj", f"{self.name}.down_proj"

    def _is_stacked(self, entries: Entries) -> bool:
        return self.stack_names()[0] in entries

    def expected(self, entries: Entries) -> Iterator[Expected]:
        """The entries that it takes."""
        inner, hidden = self.module.intermediate_dim, self.module.hidden_dim
        if self._is_stacked(entries):
            gate_up, down = self.stack_names()
            yield Expected(gate_up, (self.count, 2 * inner, hidden))
            yield Expected(down, (self.count, hidden, inner))
            return
        for expert in range(self.count):
            gate, up, down = self.names_of(expert)
            yield Expected(gate, (inner, hidden))
            yield Expected(up, (inner, hidden))
            yield Expected(down, (hidden, inner))

    def _entries(self, entries: Entries) -> list[Entry]:
        return [entries[entry.name] for entry in self.expected(entries)]

    def problems(self, entries: Entries, options: Options) -> Iterator[Problem]:
        """Return what is wrong with entries of the right shape."""
        if is_packed(self.module):
            yield packed_layer(self.name)
        own = self._entries(entries)
        several = self._several_formats(own, options)
        if several is not None:
            yield several
            return
        for entry in own:
            if entry.format is None and not entry.weight.dtype.is_floating_point:
                yield wrong_dtype(entry)
        yield from self._scale_problems(own, options)
        if _calibrated(options) and self._holds_quantised:
            yield from _missing_input_scales(own)

    def _several_formats(self, own: Sequence[Entry], options: Options) -> Problem | None:
        """Return the problem of a layer whose experts have several formats, or None."""
        formats = [options.format_of(entry) for entry in own]
        if len(set(formats)) <= 1 and not any(e.format and len(e.shape) == 3 for e in own):
            return None
        words = ", ".join(sorted({entry.kind for entry in own}))
        odd = _rarest(own, formats)
        return Problem(
            _FORMATS,
            f"{self.name}: experts are {words}, wanted one format in a layer; "
            f"{odd.weight} is {odd.kind}",
        )

    def _scale_problems(self, own: Sequence[Entry], options: Options) -> Iterator[Problem]:
        scaled = [entry for entry in own if entry.scales]
        dtypes = [options.scale_dtype(entry) for entry in scaled]
        if len(set(dtypes)) > 1:
            odd = _rarest(scaled, dtypes).scales
            yield Problem(
                _FORMATS,
                f"{self.name}: experts have block scales of several dtypes, wanted one; "
                f"one is {odd}",
            )
        inner = self.module.intermediate_dim
        is_fp8 = own[0].format == FP8_BLOCK if own else False
        if is_fp8 and inner % 128 and self._holds_quantised:
            yield Problem(
                _FORMATS,
                f"{self.name}: FP8 experts need an intermediate size that is a multiple of 128, "
                f"found {inner}",
            )

    @property
    def _holds_quantised(self) -> bool:
        """Return whether the module can hold quantised weights."""
        return hasattr(self.module, "set_expert")

    def check_values(self, entries: Entries, options: Options) -> None:
        """Read everything once, and raise CheckpointError where ``fill`` would."""
        super().check_values(entries, options)
        if self._holds_quantised:
            self._input_scales(entries, options)

    def fill(self, entries: Entries, options: Options) -> None:
        """Take the values."""
        device = target_device(self.module.gate_up_proj, options)
        first = self._entries(entries)[0]
        quantised = self._holds_quantised and first.format is not None
        scales = self._input_scales(entries, options) if quantised else None
        self._allocate(first, options, device, scales is not None)
        if self._is_stacked(entries):
            self._fill_stacks(entries, device)
        elif not self._holds_quantised:
            self._fill_plain(entries, options, device)
        elif not self._fill_quantised(entries, options, device, scales):
            self._check_alike(entries, options)
            options = replace(options, mxfp4="keep")
            self._allocate(first, options, device, scales is not None)
            self._fill_quantised(entries, options, device, scales)

    def readings(self, entries: Entries, options: Options) -> Iterator[Reading]:
        """Yield what ``fill`` reads, in its order; what it reads twice only once."""
        own = self._entries(entries)
        if self._is_stacked(entries):
            for entry in own:
                yield from entry.matrix_readings()
            return
        if self._holds_quantised and own[0].format is not None and _has_scales(own, options):
            for members in _SCALED_TOGETHER:
                for number in self.of_layer:
                    for entry in self._of(number, entries, members):
                        if entry.input_scale is not None:
                            yield Reading(entry.input_scale)
        for entry in own:
            yield from entry.readings()

    def _fill_quantised(
        self,
        entries: Entries,
        options: Options,
        device: torch.device,
        scales: InputScales | None,
    ) -> bool:
        """Set every expert; return False if one must stay MXFP4 while others became NVFP4."""
        experts = [[entries[name] for name in self.names_of(e)] for e in range(self.count)]
        count = sum(options.converts(entry) for three in experts for entry in three)
        before = len(options.conversion.inexact)
        # One expert is read at a time, so that memory holds little more than the model.
        for expert, three in enumerate(experts):
            matrices = _converted(three, [options.read(e, device) for e in three], options)
            if matrices is not None:
                own = None if scales is None else scales.of(expert)
                self.module.set_expert(expert, *matrices, input_scales=own)
        stays = options.mxfp4 == "lossless" and len(options.conversion.inexact) > before
        options.conversion.count(count, stays=stays)
        return not stays

    def _check_alike(self, entries: Entries, options: Options) -> None:
        """Raise CheckpointError if not all experts of the layer are MXFP4."""
        others = [entry for entry in self._entries(entries) if entry.format != MXFP4]
        if others:
            raise CheckpointError(
                f"{self.name}: experts are MXFP4 and {others[0].kind}, wanted one format in a "
                f"layer; {options.conversion.inexact[-1]} has values that NVFP4 does not: pass "
                "mxfp4='nvfp4' to round them"
            )

    def _allocate(
        self, first: Entry, options: Options, device: torch.device, input_scale: bool
    ) -> None:
        """Give the module storage of the right format and device; its values are not set yet."""
        grad = self.module.gate_up_proj.requires_grad
        name = options.format_of(first) if self._holds_quantised else None
        if name is not None:
            as_stored = first.scales is not None and name == first.kind
            dtype = first.scale_dtype if as_stored else None
            self.module.to_format(name, scale_dtype=dtype, input_scale=input_scale)
            self.module.to_empty(device=device)
            return
        if self._holds_quantised:
            self.module.to_format(None)
        stored = first.weight.dtype if first.format is None else torch.bfloat16
        dtype = options.dtype or stored
        for attribute in ("gate_up_proj", "down_proj"):
            shape = getattr(self.module, attribute).shape
            empty = torch.empty(shape, dtype=dtype, device=device)
            setattr(self.module, attribute, nn.Parameter(empty, requires_grad=grad))

    @torch.no_grad()
    def _fill_stacks(self, entries: Entries, device: torch.device) -> None:
        for attribute, name in zip(("gate_up_proj", "down_proj"), self.stack_names(), strict=True):
            stack = getattr(self.module, attribute)
            for expert, matrix in enumerate(entries[name].matrices(device)):
                what = f"{entries[name].weight}, matrix {expert},"
                stack[expert].copy_(narrowed(matrix, stack.dtype, what))

    @torch.no_grad()
    def _fill_plain(self, entries: Entries, options: Options, device: torch.device) -> None:
        dtype = self.module.gate_up_proj.dtype
        for expert in range(self.count):
            matrices = [options.read(entries[name], device) for name in self.names_of(expert)]
            gate, up, down = (dense(matrix, dtype) for matrix in matrices)
            inner = gate.shape[0]
            self.module.gate_up_proj[expert, :inner] = gate
            self.module.gate_up_proj[expert, inner:] = up
            self.module.down_proj[expert] = down

    def _input_scales(self, entries: Entries, options: Options) -> InputScales | None:
        """Return activation scales of gate/up and of down for every expert, or None if unknown.

        Gate and up read the same activation: the larger of their scales is used, because the
        smaller one would clip the other's range (pitfall 27). An expert without calibration data
        gets the largest scale of its projection, as NVIDIA's exporter does (specification, section
        11.5.2).
        """
        if not _has_scales(self._entries(entries), options):
            return None
        gate_up, down = (self._largest(entries, members) for members in _SCALED_TOGETHER)
        if gate_up is not None and down is not None:
            return InputScales(gate_up, down)
        if _calibrated(options):
            raise CheckpointError(
                f"{self.name}: no expert has a calibrated input scale, "
                f"which activation='nvfp4' needs; {WAYS_OUT}"
            )
        return None

    def _of(self, number: int, entries: Entries, members: Sequence[str]) -> list[Entry]:
        """Return the entries of some projections of an expert of the layer."""
        named = zip(PROJECTIONS, self._names(number), strict=True)
        return [entries[name] for p, name in named if p in members and name in entries]

    def _largest(self, entries: Entries, members: Sequence[str]) -> list[torch.Tensor] | None:
        """Return per expert the largest scale of some projections, or of all experts, or None."""
        best: dict[int, torch.Tensor | None] = {}
        for number in self.of_layer:  # those of other ranks, too, so that all ranks agree
            row = [entry.read_input_scale() for entry in self._of(number, entries, members)]
            best[number] = max((s for s in row if s is not None), default=None, key=float)
        known = [scale for scale in best.values() if scale is not None]
        if not known:
            return None
        largest = max(known, key=float)
        scales = [best[number] for number in self.held]
        return [largest if scale is None else scale for scale in scales]


def _has_scales(own: Sequence[Entry], options: Options) -> bool:
    """Return whether the input scales of a layer's experts are to be read."""
    if options.input_scales == "token":
        return False
    return all(e.format == NVFP4 and e.input_scale is not None for e in own)


def _missing_input_scales(own: Sequence[Entry]) -> Iterator[Problem]:
    for entry in own:
        if entry.format == NVFP4 and entry.input_scale is None:
            yield Problem(
                INPUT_SCALES,
                f"{entry.input_scale_name} is missing, which activation='nvfp4' needs",
            )


def _converted(
    three: Sequence[Entry], stored: Sequence[Matrix], options: Options
) -> list[Matrix] | None:
    """Return gate, up and down of an expert in memory formats; None if one must stay MXFP4.

    Gate and up that become NVFP4 get one global scale if that changes no value.
    """
    out: list[Matrix | None] = list(stored)
    waiting = [i for i, entry in enumerate(three) if options.converts(entry)]
    if waiting[:2] == [0, 1]:
        pair = pair_to_nvfp4(*stored[:2])  # type: ignore[arg-type]
        if pair is not None:
            out[:2] = pair
            del waiting[:2]
    for i in waiting:
        out[i] = options.converted(three[i], stored[i])  # type: ignore[arg-type]
    return None if any(matrix is None for matrix in out) else out  # type: ignore[return-value]


def _calibrated(options: Options) -> bool:
    """Return whether NVFP4 experts need an input scale from the checkpoint."""
    return options.activation == "nvfp4" and options.input_scales == "stored"


def _rarest(items: Sequence[_T], keys: Sequence[object]) -> _T:
    """Return the first item whose key is the rarest."""
    counts = Counter(keys)
    return min(zip(items, keys, strict=True), key=lambda pair: counts[pair[1]])[0]
