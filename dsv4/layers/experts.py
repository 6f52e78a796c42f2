"""The routed experts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn

from dsv4.config import ModelConfig
from dsv4.formats import Format, QuantizedTensor, format_named
from dsv4.layers._module import (
    FixedDtypeModule,
    empty_quantized,
    empty_weight,
    frozen,
    quantize_weight,
)
from dsv4.layers.observer import AmaxObserver
from dsv4.ops.grouped_gemm import grouped_gemm
from dsv4.ops.moe import moe_combine, moe_gather, moe_permute
from dsv4.ops.quantize import dequantize
from dsv4.ops.swiglu import swiglu

_PROJECTIONS = ("gate_up_proj", "down_proj")
_SUFFIXES = ("", "_scale", "_scale_2", "_input_scale")


class DeepseekV4Experts(FixedDtypeModule):
    """All routed experts of a layer, stacked.

    Parameters of plain experts: ``gate_up_proj [E, 2I, H]`` (gate rows first) and
    ``down_proj [E, H, I]``. Of quantised ones: the same names for the codes, and with the suffixes
    ``_scale`` (block scales), ``_scale_2`` (global scales, ``[E, 2]`` for gate and up, ``[E, 1]``
    for down; multiply) and ``_input_scale [E]`` (activation global scales; multiply).

    With DeepSeek's numerics the routing weight multiplies before the down projection, with
    transformers' after it: equal in exact arithmetic, not after rounding (section 8.2).
    """

    stored = frozenset(p + s for p in _PROJECTIONS for s in _SUFFIXES if s)

    def __init__(self, config: Any) -> None:
        super().__init__()
        config = ModelConfig.of(config)
        self.num_experts = config.n_routed_experts
        self.hidden_dim = config.hidden_size
        self.intermediate_dim = config.moe_intermediate_size
        self.limit = config.swiglu_limit
        self.numerics = config.numerics
        self.activation = config.activation
        self.format: Format | None = None
        self.observers: dict[str, AmaxObserver] | None = None
        self.gate_up_proj = empty_weight(
            self.num_experts, 2 * self.intermediate_dim, self.hidden_dim
        )
        self.down_proj = empty_weight(self.num_experts, self.hidden_dim, self.intermediate_dim)
        for name in sorted(self.stored):
            self.register_parameter(name, None)

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        shared: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sum of the chosen experts' outputs, each times its weight.

        Args:
            hidden_states: ``[T, H]``.
            top_k_index: ``[T, k]`` int64; an index outside ``0..E-1`` means "no expert".
            top_k_weights: ``[T, k]``.
            shared: ``[T, H]``, the shared expert's output, added in float32 before rounding.

        Returns:
            ``[T, H]`` in ``hidden_states.dtype``.
        """
        order, offsets, places = moe_permute(top_k_index, self.num_experts)
        rows = moe_gather(hidden_states, places)
        gate_up = self._project("gate_up_proj", rows, offsets)
        weights: torch.Tensor | None = top_k_weights
        row_weight = None
        if self.numerics == "deepseek":
            row_weight, weights = top_k_weights.reshape(-1)[order.long()], None
        inner = swiglu(gate_up, self.limit, row_weight=row_weight)
        out = self._project("down_proj", inner, offsets)
        return moe_combine(out, places, offsets, weights, shared=shared)

    def _project(self, name: str, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        if self.observers is not None:
            self._observe(name, rows, offsets)
        if self.format is None:
            return grouped_gemm(rows, getattr(self, name), offsets)
        quantises = self.activation == "nvfp4" and self.observers is None
        return grouped_gemm(
            rows,
            self.quantized_weight(name),
            offsets,
            activation="nvfp4" if quantises else "bf16",
            input_scale=getattr(self, name + "_input_scale") if quantises else None,
        )

    def _observe(self, name: str, rows: torch.Tensor, offsets: torch.Tensor) -> None:
        assert self.observers is not None
        bounds = offsets.tolist()
        for expert, (start, stop) in enumerate(pairwise(bounds)):
            self.observers[name].see(rows[start:stop], expert)

    def quantized_weight(self, name: str) -> QuantizedTensor:
        """``gate_up_proj`` or ``down_proj`` as one value ``[E, N, K]``.

        Raises:
            ValueError: if the weights are plain.
        """
        if self.format is None:
            raise ValueError("Experts: the weights are plain, wanted quantised ones")
        global_scale = getattr(self, name + "_scale_2")
        two = name == "gate_up_proj" and global_scale is not None
        segments = (self.intermediate_dim, self.intermediate_dim) if two else ()
        return QuantizedTensor(
            getattr(self, name),
            getattr(self, name + "_scale"),
            global_scale,
            self.format,
            segments=segments,
        )

    def dense_weight(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """``gate_up_proj`` or ``down_proj`` as a plain tensor ``[E, N, K]``."""
        if self.format is None:
            return getattr(self, name).to(dtype)
        return dequantize(self.quantized_weight(name), dtype)

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
        device = self.gate_up_proj.device
        chosen = None if format is None else format_named(format)
        if chosen is not None and self.intermediate_dim % chosen.block[0]:
            raise ValueError(
                f"Experts: the intermediate size is {self.intermediate_dim}, wanted a multiple of "
                f"{chosen.block[0]}: the {chosen.name} blocks of gate and up would overlap"
            )
        self.format = chosen
        self.stored = DeepseekV4Experts.stored | (set(_PROJECTIONS) if chosen else set())
        for name in _PROJECTIONS:
            self._declare(name, chosen, scale_dtype, input_scale, device)

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
        shape = (self.num_experts, *((2 * inner, hidden) if gate_up else (hidden, inner)))
        for suffix in _SUFFIXES:
            setattr(self, name + suffix, None)
        if chosen is None:
            setattr(self, name, nn.Parameter(torch.empty(shape, device=device)))
            return
        empty = empty_quantized(shape, chosen, scale_dtype, device)
        setattr(self, name, frozen(empty.codes))
        setattr(self, name + "_scale", frozen(empty.scales))
        if empty.global_scale is not None:
            count = 2 if gate_up else 1
            scale_2 = torch.empty(self.num_experts, count, device=device)
            setattr(self, name + "_scale_2", frozen(scale_2))
        if input_scale:
            scale = torch.empty(self.num_experts, device=device)
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
            expert: Its index in the stack.
            gate: ``[I, H]``, plain or of this layer's format.
            up: ``[I, H]``, likewise.
            down: ``[H, I]``, likewise.
            input_scales: Activation scales of gate/up and of down, scalars.

        Raises:
            ValueError: if an index, a shape or a format differs; nothing is changed then.
        """
        inner, hidden = self.intermediate_dim, self.hidden_dim
        if not 0 <= expert < self.num_experts:
            raise ValueError(f"Experts: expert is {expert}, wanted 0..{self.num_experts - 1}")
        self._check_matrix("gate", gate, (inner, hidden))
        self._check_matrix("up", up, (inner, hidden))
        self._check_matrix("down", down, (hidden, inner))
        self._copy("gate_up_proj", expert, slice(0, inner), 0, gate)
        self._copy("gate_up_proj", expert, slice(inner, 2 * inner), 1, up)
        self._copy("down_proj", expert, slice(0, hidden), 0, down)
        if input_scales is not None:
            for name, scale in zip(_PROJECTIONS, input_scales, strict=True):
                getattr(self, name + "_input_scale")[expert] = scale.reshape(())

    def _check_matrix(
        self, name: str, matrix: torch.Tensor | QuantizedTensor, shape: tuple[int, int]
    ) -> None:
        if tuple(matrix.shape) != shape:
            raise ValueError(
                f"Experts: {name} has shape {list(matrix.shape)}, wanted {list(shape)}"
            )
        found = matrix.format if isinstance(matrix, QuantizedTensor) else None
        if found != self.format:
            words = ["plain" if f is None else f.name for f in (found, self.format)]
            raise ValueError(f"Experts: {name} is {words[0]}, wanted {words[1]}")

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
        # Copy bytes: a copy by value between 8-bit float types is not one of them (trap T33).
        _bytes(scales)[expert, block_rows] = _bytes(source.scales).to(scales.device)
        if source.global_scale is not None:
            getattr(self, name + "_scale_2")[expert, segment] = source.global_scale.reshape(())

    def quantize(self, format: str = "nvfp4") -> None:
        """Quantise plain weights in place, gate and up with a global scale of their own each.

        Raises:
            ValueError: if they are quantised already.
        """
        if self.format is not None:
            raise ValueError(f"Experts: the weights are {self.format.name} already, wanted plain")
        inner = self.intermediate_dim
        gate_up, down = self.gate_up_proj.detach(), self.down_proj.detach()
        self.to_format(format)
        for e in range(self.num_experts):
            parts = (gate_up[e, :inner], gate_up[e, inner:], down[e])
            gate, up, out = (quantize_weight(part, format) for part in parts)
            self.set_expert(e, gate, up, out)

    def extra_repr(self) -> str:
        """Sizes, format and activation."""
        name = "plain" if self.format is None else self.format.name
        return (
            f"{self.num_experts} experts, {self.hidden_dim} -> {self.intermediate_dim}, {name}, "
            f"activation={self.activation}"
        )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
