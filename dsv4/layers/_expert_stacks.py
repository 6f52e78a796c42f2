"""The routed experts' weights as stacked matrices, plain or quantised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dsv4.config import ModelConfig
from dsv4.layers._hosted_experts import HostedExperts
from dsv4.layers._module import (
    FixedDtypeModule,
    empty_quantized,
    empty_weight,
    frozen,
    quantize_pair,
    quantize_weight,
)
from dsv4.ops.quantize import dequantize, positive
from dsv4.quant import fragments
from dsv4.quant.exact_fp8 import Exactness
from dsv4.quant.formats import FRAGMENTS, LINEAR, Format, QuantizedTensor, format_named
from dsv4.reference.fragments import deinterleaved

PROJECTIONS = ("gate_up_proj", "down_proj")
HALF_PACKED = "half packed"
_SUFFIXES = ("", "_scale", "_scale_2", "_input_scale")


class ExpertStacks(FixedDtypeModule):
    """The stacked parameters of ``DeepseekV4Experts``: formats, values, views of single experts.

    Args:
        config: A ``ModelConfig`` or transformers' configuration.
        first_expert: The first expert held here.
        num_local_experts: How many are; None for all from ``first_expert`` on.

    Raises:
        ValueError: if there are no such experts.
    """

    stored = frozenset(p + s for p in PROJECTIONS for s in _SUFFIXES if s) | {"gate_up_row_scale"}
    gate_up_row_scale: torch.Tensor | None
    gate_up_proj_exponent: torch.Tensor | None
    down_proj_exponent: torch.Tensor | None
    gate_up_proj_input_scale: torch.Tensor | None
    down_proj_input_scale: torch.Tensor | None

    def __init__(
        self, config: Any, first_expert: int = 0, num_local_experts: int | None = None
    ) -> None:
        super().__init__()
        config = ModelConfig.of(config)
        self.num_experts = config.n_routed_experts
        self.first_expert = first_expert
        self.num_local_experts = _local(self.num_experts, first_expert, num_local_experts)
        self.hidden_dim = config.hidden_size
        self.intermediate_dim = config.moe_intermediate_size
        self.gate_up_rows = (self.intermediate_dim, self.intermediate_dim)
        self.format: Format | None = None
        self.layout = LINEAR
        self.gate_up_proj = empty_weight(
            self.num_local_experts, 2 * self.intermediate_dim, self.hidden_dim
        )
        self.down_proj = empty_weight(
            self.num_local_experts, self.hidden_dim, self.intermediate_dim
        )
        for name in sorted(self.stored - {"gate_up_row_scale"}):
            self.register_parameter(name, None)
        self.hosted: HostedExperts | None = None
        # In a packed layer [E, 2 I]: gate_up_proj_scale_2 for every row, which GEMMs need.
        self.register_buffer("gate_up_row_scale", None, persistent=False)
        # Of packed stacks that are exact in E4M3 [E, N], see ``QuantizedTensor.row_exponent``.
        for name in PROJECTIONS:
            self.register_buffer(name + "_exponent", None, persistent=False)
        self.exactness: dict[str, Exactness] = {}

    def quantized_weight(
        self,
        name: str,
        slots: slice | None = None,
        tensors_elsewhere: Mapping[str, torch.Tensor] | None = None,
    ) -> QuantizedTensor:
        """``gate_up_proj`` or ``down_proj`` as one value ``[E, N, K]``, or some experts' as a view.

        Gate rows come first. In a packed layer the value is packed, and even rows are gate rows,
        odd rows up rows.

        Args:
            name: Which of the two.
            slots: Which experts, by their places in the stacks; None: all.
            tensors_elsewhere: Stacks that have these places, by name, instead of the layer's.

        Raises:
            ValueError: if the weights are plain, or were left half packed.
        """
        if self.format is None:
            raise ValueError("Experts: the weights are plain, wanted quantised ones")
        self._check_whole()
        tensors: Any = self._parameters  # see ``FixedDtypeModule``
        global_scale = tensors[name + "_scale_2"]
        segments: tuple[int, ...] = ()
        if name == "gate_up_proj" and global_scale is not None:
            if self.layout == LINEAR:
                segments = self.gate_up_rows
            else:
                global_scale = self._buffers["gate_up_row_scale"]
        codes, scales = tensors[name], tensors[name + "_scale"]
        parts = (codes, scales, global_scale, self.format, self.layout, segments)
        whole = self.value_of(*parts, self._buffers[name + "_exponent"], name=name)
        if slots is None:
            return whole
        if tensors_elsewhere is not None:
            scale_name = "gate_up_row_scale" if self._is_interleaved(name) else name + "_scale_2"
            whole = replace(
                whole,
                codes=tensors_elsewhere[name],
                scales=tensors_elsewhere[name + "_scale"],
                global_scale=tensors_elsewhere.get(scale_name),
                row_exponent=tensors_elsewhere.get(name + "_exponent"),
            )
        return _experts_of(whole, slots)

    def dense_weight(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """``gate_up_proj`` (gate rows first) or ``down_proj`` as a plain tensor ``[E, N, K]``."""
        self.check_on_device()
        if self.format is None:
            return getattr(self, name).to(dtype)
        dense = dequantize(self.quantized_weight(name), dtype)
        return deinterleaved(dense) if self._is_interleaved(name) else dense

    def _is_interleaved(self, name: str) -> bool:
        """Return whether gate and up rows are interleaved."""
        return name == "gate_up_proj" and self.layout != LINEAR

    def _check_whole(self) -> None:
        if self.layout == HALF_PACKED:
            raise ValueError(
                "Experts: the weights are half packed, pack or unpack was interrupted: "
                "call to_format and set them again"
            )

    def get_expert(self, expert: int) -> tuple[QuantizedTensor, QuantizedTensor, QuantizedTensor]:
        """Return gate, up and down of one expert as ``set_expert`` takes them, never packed.

        They are views of the stack, or copies if it is packed; of experts in host memory copies.

        Raises:
            ValueError: if the weights are plain.
        """
        if self.hosted is not None:
            return self.single(expert).get_expert(0)
        both, down = (self._linear(name, expert) for name in PROJECTIONS)
        return self._part(both, 0), self._part(both, 1), down

    def _linear(self, name: str, expert: int) -> QuantizedTensor:
        """Return one expert's matrix as an unpacked layer has it."""
        matrix = self.quantized_weight(name)[expert]
        if not self._is_interleaved(name):
            return matrix.with_layout(LINEAR)
        if self.layout == FRAGMENTS:
            codes, scales = fragments.unpack(matrix.codes, matrix.scales, pairs=True)
        else:
            linear = matrix.with_layout(LINEAR)
            codes, scales = deinterleaved(linear.codes), deinterleaved(as_bytes(linear.scales))
            scales = scales.view(linear.scales.dtype)
        global_scale = getattr(self, name + "_scale_2")[expert]
        segments = self.gate_up_rows
        return QuantizedTensor(codes, scales, global_scale, matrix.format, segments=segments)

    def _part(self, both: QuantizedTensor, part: int) -> QuantizedTensor:
        """Return gate (0) or up (1), a view."""
        rows = slice(part * self.intermediate_dim, (part + 1) * self.intermediate_dim)
        step = both.format.block[0]
        blocks = slice(rows.start // step, rows.stop // step)
        scale = None if both.global_scale is None else both.global_scale[part : part + 1]
        return QuantizedTensor(both.codes[rows], both.scales[blocks], scale, both.format)

    def single(self, expert: int) -> ExpertStacks:
        """Return a layer that holds one expert alone, wherever that is; for reading its weights."""
        assert self.hosted is not None
        own = {name: value for name, value in self.__dict__.items() if name != "_kept"}
        tensors = self.hosted.tensors_of(expert)
        for group in ("_parameters", "_buffers"):
            own[group] = {name: tensors.get(name) for name in own[group]}
        layer = type(self).__new__(type(self))
        layer.__dict__.update(own, hosted=None, num_local_experts=1)
        return layer

    def check_on_device(self) -> None:
        """Raise ValueError if some of the experts lie in host memory."""
        if self.hosted is not None:
            raise ValueError(
                f"Experts: {self.hosted.rows.shape[0]} of {self.num_experts} experts are in host "
                "memory, wanted all on one device: load the model with host_experts=None"
            )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        if self.hosted is None:
            return super()._apply(fn, recurse)
        self.hosted.check_stays(fn, self.stored)
        return self

    def to_format(
        self,
        format: str | Format | None,
        *,
        scale_dtype: torch.dtype | None = None,
        input_scale: bool = False,
    ) -> None:
        """Declare the parameters of a format, uninitialised, on the device of the present weights.

        Args:
            format: Name or descriptor, or None for plain weights.
            scale_dtype: Dtype of the block scales, where the format allows several.
            input_scale: Whether to declare the activation scales.

        Raises:
            ValueError: if gate and up would share block scales; nothing is changed then.
        """
        self.check_on_device()
        device = self.gate_up_proj.device
        chosen = None if format is None else format_named(format)
        if chosen is not None and self.intermediate_dim % chosen.block[0]:
            raise ValueError(
                f"Experts: the intermediate size is {self.intermediate_dim}, wanted a multiple of "
                f"{chosen.block[0]}: the {chosen.name} blocks of gate and up would overlap"
            )
        self.forget_value()
        self.format, self.layout, self.gate_up_row_scale = chosen, LINEAR, None
        self._forget_exponents()
        self.stored = ExpertStacks.stored | (set(PROJECTIONS) if chosen else set())
        for name in PROJECTIONS:
            self._declare(name, chosen, scale_dtype, input_scale, device)

    def _forget_exponents(self) -> None:
        self.gate_up_proj_exponent, self.down_proj_exponent, self.exactness = None, None, {}

    def _declare(
        self,
        name: str,
        chosen: Format | None,
        scale_dtype: torch.dtype | None,
        input_scale: bool,
        device: torch.device,
    ) -> None:
        gate_up = name == "gate_up_proj"
        inner, hidden = self.intermediate_dim, self.hidden_dim
        shape = (self.num_local_experts, *((2 * inner, hidden) if gate_up else (hidden, inner)))
        for suffix in _SUFFIXES:
            setattr(self, name + suffix, None)
        if chosen is None:
            weight = torch.empty(shape, dtype=torch.get_default_dtype(), device=device)
            setattr(self, name, nn.Parameter(weight))
            return
        empty = empty_quantized(shape, chosen, scale_dtype, device)
        setattr(self, name, frozen(empty.codes))
        setattr(self, name + "_scale", frozen(empty.scales))
        if empty.global_scale is not None:
            count = 2 if gate_up else 1
            per_expert = (self.num_local_experts, count)
            scale_2 = torch.empty(per_expert, dtype=torch.float32, device=device)
            setattr(self, name + "_scale_2", frozen(scale_2))
        if input_scale:
            scale = torch.empty(self.num_local_experts, dtype=torch.float32, device=device)
            setattr(self, name + "_input_scale", frozen(scale))

    @torch.no_grad()
    def set_expert(
        self,
        expert: int,
        gate: torch.Tensor | QuantizedTensor,
        up: torch.Tensor | QuantizedTensor,
        down: torch.Tensor | QuantizedTensor,
        input_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Copy one expert's matrices into the stack.

        Args:
            expert: Its index in the stack: its number less ``first_expert``.
            gate: ``[I, H]``, plain or of this layer's format, in the linear layout.
            up: ``[I, H]``, likewise.
            down: ``[H, I]``, likewise.
            input_scales: Activation scales of gate/up and of down, scalars; required if, and only
                if, the layer declares them.

        Raises:
            ValueError: if an index, a shape, a format, a layout or a dtype of scales differs, a
                scalar scale is missing, superfluous or (checked on a CPU) not finite and above 0,
                or the layer is packed; nothing is changed then.
        """
        self.check_on_device()
        inner, hidden = self.intermediate_dim, self.hidden_dim
        if self.layout != LINEAR:
            raise ValueError(
                "Experts: the layer is packed, wanted an unpacked one: call dsv4.layers.unpack_ "
                "first"
            )
        if not 0 <= expert < self.num_local_experts:
            raise ValueError(f"Experts: expert is {expert}, wanted 0..{self.num_local_experts - 1}")
        for name, matrix in (("gate", gate), ("up", up), ("down", down)):
            self._check_matrix(name, matrix, (hidden, inner) if name == "down" else (inner, hidden))
        self._check_input_scales(input_scales)
        self._copy("gate_up_proj", expert, slice(0, inner), 0, gate)
        self._copy("gate_up_proj", expert, slice(inner, 2 * inner), 1, up)
        self._copy("down_proj", expert, slice(0, hidden), 0, down)
        if input_scales is not None:
            for name, scale in zip(PROJECTIONS, input_scales, strict=True):
                getattr(self, name + "_input_scale")[expert] = scale.reshape(())

    def set_stacks(self, gate_up: QuantizedTensor, down: QuantizedTensor) -> None:
        """Replace the weights of all experts, without a copy, and with them the format.

        Args:
            gate_up: ``[E, 2I, H]``, gate rows first, in the linear layout; global scales, if the
                format has them, are ``[E, 2]``, of gate and up.
            down: ``[E, H, I]``, likewise, with global scales ``[E, 1]``.

        Raises:
            ValueError: if a shape, a format or a layout is none this layer can have; nothing is
                changed then.
        """
        self.check_on_device()
        inner, hidden = self.intermediate_dim, self.hidden_dim
        shapes = ((2 * inner, hidden), (hidden, inner))
        stacks = dict(zip(PROJECTIONS, (gate_up, down), strict=True))
        for (name, stack), shape in zip(stacks.items(), shapes, strict=True):
            self._check_stack(name, stack, (self.num_local_experts, *shape))
        if gate_up.format != down.format:
            words = f"{gate_up.format.name} and {down.format.name}"
            raise ValueError(f"Experts: the formats are {words}, wanted the same")
        self.forget_value()
        self.format, self.layout, self.gate_up_row_scale = gate_up.format, LINEAR, None
        self._forget_exponents()
        self.stored = ExpertStacks.stored | set(PROJECTIONS)
        for name, stack in stacks.items():
            tensors = (stack.codes, stack.scales, stack.global_scale, None)
            for suffix, tensor in zip(_SUFFIXES, tensors, strict=True):
                setattr(self, name + suffix, None if tensor is None else frozen(tensor))

    def _check_stack(self, name: str, stack: QuantizedTensor, shape: tuple[int, ...]) -> None:
        if tuple(stack.shape) != shape:
            raise ValueError(f"Experts: {name} has shape {list(stack.shape)}, wanted {list(shape)}")
        if stack.layout != LINEAR:
            raise ValueError(f"Experts: {name} has layout {stack.layout!r}, wanted {LINEAR!r}")
        halves = (self.intermediate_dim, self.intermediate_dim) if name == "gate_up_proj" else ()
        if stack.format.has_global_scale and stack.segments != halves:
            raise ValueError(
                f"Experts: {name} has segments {stack.segments} of global scales, wanted {halves}"
            )
        if self.intermediate_dim % stack.format.block[0]:
            raise ValueError(
                f"Experts: the intermediate size is {self.intermediate_dim}, wanted a multiple of "
                f"{stack.format.block[0]}: the {stack.format.name} blocks of gate and up would "
                "overlap"
            )
        stack.validate()

    def _check_matrix(
        self, name: str, matrix: torch.Tensor | QuantizedTensor, shape: tuple[int, int]
    ) -> None:
        if tuple(matrix.shape) != shape:
            raise ValueError(
                f"Experts: {name} has shape {list(matrix.shape)}, wanted {list(shape)}"
            )
        own = matrix.format if isinstance(matrix, QuantizedTensor) else None
        if own != self.format:
            words = ["plain" if f is None else f.name for f in (own, self.format)]
            raise ValueError(f"Experts: {name} is {words[0]}, wanted {words[1]}")
        if isinstance(matrix, QuantizedTensor):
            self._check_scales(name, matrix)

    def _check_scales(self, name: str, matrix: QuantizedTensor) -> None:
        """Raise if storing a matrix would change the numbers that it means."""
        if matrix.layout != LINEAR:
            raise ValueError(f"Experts: {name} has layout {matrix.layout!r}, wanted {LINEAR!r}")
        projection = "down_proj" if name == "down" else "gate_up_proj"
        stack = getattr(self, projection + "_scale")
        high, wide = matrix.format.block
        blocks = [-(-n // step) for n, step in zip(matrix.shape, (high, wide), strict=True)]
        if list(matrix.scales.shape) != blocks or matrix.scales.dtype != stack.dtype:
            raise ValueError(
                f"Experts: {name} has scales {list(matrix.scales.shape)} of {matrix.scales.dtype}, "
                f"wanted {blocks} of {stack.dtype}"
            )
        declared = getattr(self, projection + "_scale_2") is not None
        _check_scalar(f"{name}'s global scale", matrix.global_scale, declared)

    def _check_input_scales(self, input_scales: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        for i, name in enumerate(PROJECTIONS):
            scale = None if input_scales is None else input_scales[i]
            declared = getattr(self, name + "_input_scale") is not None
            _check_scalar(f"the input scale of {name}", scale, declared)

    def _copy(
        self,
        name: str,
        expert: int,
        rows: slice,
        segment: int,
        source: torch.Tensor | QuantizedTensor,
    ) -> None:
        target = getattr(self, name)
        if isinstance(source, torch.Tensor):
            target[expert, rows] = source
            return
        target[expert, rows] = source.codes
        scales = getattr(self, name + "_scale")
        step = source.format.block[0]
        block_rows = slice(rows.start // step, -(-rows.stop // step))
        # Copy bytes, because a copy by value converts between 8-bit float types (pitfall 33).
        as_bytes(scales)[expert, block_rows] = as_bytes(source.scales).to(scales.device)
        if source.global_scale is not None:
            getattr(self, name + "_scale_2")[expert, segment] = source.global_scale.reshape(())

    def quantize(self, format: str = "nvfp4") -> None:
        """Quantise plain weights in place; gate and up of an expert share one global scale.

        This is done expert by expert: memory holds the plain stacks, which cannot be freed in part
        and are freed at the end, the quantised ones, and the buffers of one matrix. To hold less,
        fill an empty layer by ``set_expert`` and drop each source, as loading a checkpoint does.

        Raises:
            ValueError: if they are quantised already.
        """
        self.check_on_device()
        if self.format is not None:
            raise ValueError(f"Experts: the weights are {self.format.name} already, wanted plain")
        inner = self.intermediate_dim
        gate_up, down = self.gate_up_proj.detach(), self.down_proj.detach()
        self.to_format(format)
        for e in range(self.num_local_experts):
            gate, up = quantize_pair(gate_up[e, :inner], gate_up[e, inner:], format)
            self.set_expert(e, gate, up, quantize_weight(down[e], format))

    def _range(self) -> str:
        """Return which experts of how many it holds."""
        if self.num_local_experts == self.num_experts:
            return str(self.num_experts)
        last = self.first_expert + self.num_local_experts - 1
        return f"{self.first_expert} to {last} of {self.num_experts}"


def _check_scalar(what: str, scale: torch.Tensor | None, declared: bool) -> None:
    if declared and scale is None:
        raise ValueError(f"Experts: {what} is missing, wanted one")
    if not declared and scale is not None:
        raise ValueError(f"Experts: {what} is given, wanted none: the layer declares none")
    if scale is None:
        return
    if scale.numel() != 1:
        raise ValueError(f"Experts: {what} has shape {list(scale.shape)}, wanted one value")
    positive(f"Experts: {what}", scale)


def _local(experts: int, first: int, count: int | None) -> int:
    count = experts - first if count is None else count
    if first < 0 or count < 1 or first + count > experts:
        raise ValueError(
            f"Experts: first_expert is {first} and num_local_experts {count}, wanted a range of "
            f"0..{experts - 1}"
        )
    return count


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor of one-byte elements as bytes; return others as they are."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _experts_of(whole: QuantizedTensor, slots: slice) -> QuantizedTensor:
    """Return the matrices of some experts of a stack, a view."""
    scale, exponent = whole.global_scale, whole.row_exponent
    return replace(
        whole,
        codes=whole.codes[slots],
        scales=whole.scales[slots],
        global_scale=None if scale is None else scale[slots],
        row_exponent=None if exponent is None else exponent[slots],
    )
