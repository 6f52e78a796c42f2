"""The routed experts' weights: stacked matrices that can be packed for tensor cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from dsv4.layers._expert_stacks import HALF_PACKED, PROJECTIONS, ExpertStacks, as_bytes
from dsv4.layers._in_place import Writes, packing, swizzling, unpacking, unswizzling
from dsv4.layers._module import frozen, refused_while_packed
from dsv4.layers.linear import PACKED_LAYOUTS
from dsv4.quant import fragments
from dsv4.quant.exact_fp8 import with_row_exponent
from dsv4.quant.formats import FRAGMENTS, LINEAR, NVFP4, SWIZZLED

# Rows and columns of a whole tile of a matrix.
_TILES = {FRAGMENTS: (fragments.ROWS, fragments.COLUMNS), SWIZZLED: (128, 64)}


class ExpertWeights(ExpertStacks):
    """Layouts of the parameters of ``DeepseekV4Experts``; arguments as in ``ExpertStacks``."""

    @torch.no_grad()
    def pack(self, layout: str = FRAGMENTS) -> None:
        """Re-lay NVFP4 weights for tensor cores, gate and up rows interleaved, losing nothing.

        This is done in place, expert by expert: codes and scales keep their memory, and at most one
        expert's gate and up and the buffers of ``dsv4.quant.fragments`` are needed in addition.
        Other owners of the tensors, a state dict for instance, then hold packed bytes. CUDA graphs
        captured before must be captured again. A layer that has this layout already stays as it is.

        Args:
            layout: ``"fragments_16x64"`` for Hopper, and for bfloat16 and FP8 activations on
                Blackwell; ``"swizzled_128x4"`` for NVFP4 activations there.

        Raises:
            ValueError: if the layout is none of these, the weights are not NVFP4, a matrix is not a
                whole number of tiles (16 rows, 64 columns; swizzled 128 rows), a block scale is
                negative or the weights are on the meta device; nothing is changed then.
        """
        if layout not in PACKED_LAYOUTS:
            raise ValueError(f"Experts: layout is {layout!r}, wanted one of {PACKED_LAYOUTS}")
        self._check_whole()
        if self.layout == layout:
            return
        self.check_on_device()
        self._check_packable(layout)
        self.unpack()
        scale = self.quantized_weight("gate_up_proj").global_scale
        assert scale is not None
        for name in PROJECTIONS:
            self._own(name)
            self._own(name + "_scale")
        self._rewrite(packing if layout == FRAGMENTS else swizzling)
        self._finish(layout)
        self.gate_up_row_scale = scale.detach().repeat(1, self.intermediate_dim)
        if layout == FRAGMENTS:
            self._examine()

    def _examine(self) -> None:
        """Find out which stacks FP8 tensor cores can multiply without a rounding.

        One launch multiplies all experts, so one expert that is not exact keeps the stack in
        bfloat16; ``Exactness.inexact`` names it.
        """
        for name in PROJECTIONS:
            weight, exactness = with_row_exponent(self.quantized_weight(name))
            self.exactness[name] = replace(exactness, first=self.first_expert)
            setattr(self, name + "_exponent", weight.row_exponent)

    @torch.no_grad()
    def unpack(self) -> None:
        """Undo ``pack``, bit for bit and likewise in place. An unpacked layer stays as it is.

        Raises:
            ValueError: if ``pack`` or ``unpack`` was interrupted before.
        """
        self._check_whole()
        if self.layout == LINEAR:
            return
        self.check_on_device()
        self._rewrite(unpacking if self.layout == FRAGMENTS else unswizzling)
        self._finish(LINEAR)
        self.gate_up_row_scale = None
        self._forget_exponents()

    def _check_packable(self, layout: str) -> None:
        if self.format != NVFP4:
            present = "plain" if self.format is None else self.format.name
            raise ValueError(f"Experts: the weights are {present}, wanted nvfp4 for {layout!r}")
        if self.gate_up_proj.is_meta:
            raise ValueError("Experts: the weights are on the meta device, wanted ones with values")
        self._check_tiles(layout)
        for name in PROJECTIONS if self.layout == LINEAR else ():
            if int(getattr(self, name + "_scale").view(torch.int8).amin()) < 0:
                raise ValueError(
                    f"Experts: a block scale of {name} is negative, wanted scales with their sign "
                    "bit 0"
                )

    def _check_tiles(self, layout: str) -> None:
        high, wide = _TILES[layout]
        for name in PROJECTIONS:
            rows, columns = self.quantized_weight(name).shape[1:]
            if rows % high or columns % wide:
                raise ValueError(
                    f"Experts: a matrix of {name} is {rows} x {columns}, wanted multiples of "
                    f"{high} x {wide} for layout {layout!r}"
                )

    def _own(self, name: str) -> None:
        """Make a parameter writable in place."""
        tensor = getattr(self, name)
        if not tensor.is_contiguous() or tensor.is_inference():
            new = tensor.detach().clone(memory_format=torch.contiguous_format)
            self.forget_value()
            setattr(self, name, frozen(new))

    def _rewrite(self, how: Callable[..., Writes]) -> None:
        for expert in range(self.num_local_experts):
            for name in PROJECTIONS:
                codes, scales = (as_bytes(getattr(self, name + s))[expert] for s in ("", "_scale"))
                for target, source in how(codes, scales, pairs=name == "gate_up_proj"):
                    self.layout = HALF_PACKED
                    target.copy_(source)

    def _finish(self, layout: str) -> None:
        """Record the layout that the bytes have now."""
        self.forget_value()
        for name in PROJECTIONS:
            dtype = torch.uint8 if layout == FRAGMENTS else torch.float8_e4m3fn
            scales = getattr(self, name + "_scale").detach().view(dtype)
            scales = scales.view(self._scales_shape(name, layout))
            setattr(self, name + "_scale", frozen(scales))
        self.layout = layout

    def _scales_shape(self, name: str, layout: str) -> tuple[int, ...]:
        experts, rows, half = getattr(self, name).shape
        return (experts, rows * half // 8) if layout == SWIZZLED else (experts, rows, half // 8)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.check_on_device()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.layout == LINEAR:
            return
        for name in PROJECTIONS:
            codes, scales = (torch.empty_like(getattr(self, name + s)) for s in ("", "_scale"))
            scales = scales.view(torch.uint8).view(self._scales_shape(name, LINEAR))
            for expert in range(self.num_local_experts):
                matrix = self._linear(name, expert)
                codes[expert], scales[expert] = matrix.codes, as_bytes(matrix.scales)
            destination[prefix + name] = codes
            destination[prefix + name + "_scale"] = scales.view(torch.float8_e4m3fn)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        self.check_on_device()
        if self.layout == LINEAR:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)
            return
        lists[-1].append(refused_while_packed(f"{prefix}gate_up_proj"))

    def declare_packed(self, layout: str = FRAGMENTS, exact: Sequence[bool] = ()) -> None:
        """Declare the parameters of packed NVFP4 weights, uninitialised, as ``to_format`` does.

        Args:
            layout: See ``pack``.
            exact: Whether gate and up, and down, are exact in FP8; empty: neither is.

        Raises:
            ValueError: if a matrix is not a whole number of tiles.
        """
        self.to_format(NVFP4)
        self._check_tiles(layout)
        self._finish(layout)
        rows = (self.num_local_experts, 2 * self.intermediate_dim)
        self.gate_up_row_scale = torch.empty(
            rows, dtype=torch.float32, device=self.gate_up_proj.device
        )
        for name, is_exact in zip(PROJECTIONS, exact, strict=False):
            codes = getattr(self, name)
            exponent = torch.empty(codes.shape[:-1], dtype=torch.int8, device=codes.device)
            setattr(self, name + "_exponent", exponent if is_exact else None)
