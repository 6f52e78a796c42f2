"""Linear layers whose weight is plain or quantised."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn import functional as F

from dsv4.layers._fused_weight import FusedWeight
from dsv4.layers._module import (
    FixedDtypeModule,
    empty_quantized,
    empty_weight,
    frozen,
    quantize_weight,
    refused_while_packed,
    wider,
)
from dsv4.layers.observer import AmaxObserver
from dsv4.ops.gemm import ACTIVATIONS, gemm
from dsv4.ops.quantize import dequantize
from dsv4.quant import fragments
from dsv4.quant.exact_fp8 import Exactness, with_row_exponent
from dsv4.quant.formats import (
    FRAGMENTS,
    LINEAR,
    NVFP4,
    SWIZZLED,
    Format,
    QuantizedTensor,
    format_named,
)

PACKED_LAYOUTS = (FRAGMENTS, SWIZZLED)
_OWN = ("weight", "weight_scale", "weight_scale_2")


class Linear(FixedDtypeModule):
    """``y = x W^T`` with a plain, NVFP4, MXFP4 or FP8 weight, without bias.

    Parameters of a plain layer: ``weight [out, in]``. Of a quantised one, under the names of
    NVIDIA's checkpoints: ``weight`` (codes), ``weight_scale`` (block scales) and, for NVFP4,
    ``weight_scale_2 [1]`` (global scale, multiplies) and, where known, ``input_scale [1]``
    (activation global scale, multiplies).

    ``pack`` re-lays an NVFP4 weight for Hopper's tensor cores, where ``weight_scale`` becomes
    uint8, or its scales alone for Blackwell's. Several packed layers of one input can share one
    matrix (``join_weights``); their first three parameters are None then. State dicts do not depend
    on this: a packed layer writes what an unpacked one writes, and raises on loading.

    Attributes:
        format: None for a plain weight, else its ``Format``.
        layout: Layout of the weight: ``"linear"``, or ``"fragments_16x64"`` or ``"swizzled_128x4"``
            when packed.
        fused: A matrix of several layers, whose part ``fused_part`` is this layer's weight, or
            None.
        activation: ``"bf16"`` leaves x as it is; ``"nvfp4"`` quantises x, with ``input_scale`` or,
            without one, with a scale per token; ``"fp8"`` rounds x to FP8 by tokens. Plain weights
            never quantise x.
        exactness: Of a weight packed for Hopper, whether FP8 tensor cores can multiply it without
            a rounding, and what is in the way; None of others.
    """

    stored = frozenset({"weight_scale", "weight_scale_2", "input_scale"})
    weight_exponent: torch.Tensor | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, *, activation: str = "bf16"
    ) -> None:
        super().__init__()
        if bias:
            raise ValueError("Linear: bias is True, wanted False: DeepSeek-V4 has no linear bias")
        if activation not in ACTIVATIONS:
            raise ValueError(f"Linear: activation is {activation!r}, wanted one of {ACTIVATIONS}")
        self.in_features = in_features
        self.out_features = out_features
        self.groups = 1
        self.activation = activation
        self.format: Format | None = None
        self.layout = LINEAR
        self.fused: FusedWeight | None = None
        self.fused_part = 0
        self.observer: AmaxObserver | None = None
        self.weight = empty_weight(out_features, in_features)
        self.register_parameter("weight_scale", None)
        self.register_parameter("weight_scale_2", None)
        self.register_parameter("input_scale", None)
        # Of a weight that is exact in E4M3, see ``QuantizedTensor.row_exponent``.
        self.register_buffer("weight_exponent", None, persistent=False)
        self.exactness: Exactness | None = None

    def forward(
        self,
        x: torch.Tensor | QuantizedTensor,
        out_dtype: torch.dtype | None = None,
        *,
        reserve_sms: int = 0,
    ) -> torch.Tensor:
        """Multiply ``x`` by the weight.

        Args:
            x: ``[..., in_features]``, or ``[..., groups, in_features]`` when grouped; or the same
                in ``"fp8_token"`` if the layer would round it so (``takes_codes``).
            out_dtype: Dtype of the result; float32 also multiplies in float32. Default ``x.dtype``,
                bfloat16 for codes.
            reserve_sms: SMs that the GEMM leaves to other streams, see ``dsv4.ops.gemm``.

        Raises:
            ValueError: if the last axes of ``x`` differ from these, or it is quantised and the
                layer wants values.
            TypeError: if ``x`` is not floating, or not of a plain weight's dtype.
        """
        if isinstance(x, QuantizedTensor):
            return self._of_codes(x, out_dtype, reserve_sms)
        is_plain = self.format is None
        if (
            x.shape[-1] != self.in_features
            or not x.is_floating_point()
            or (is_plain and out_dtype is None and x.dtype != self.weight.dtype)
        ):
            self._refuse(x)
        if self.observer is not None:
            self.observer.see(x)
        if is_plain and out_dtype is None and self.groups == 1:
            return F.linear(x, self.weight)
        if is_plain:
            return self._plain(x, out_dtype)
        activation = self.activation if self.observer is None else "bf16"
        return gemm(
            x,
            self.quantized_weight(),
            activation=activation,
            input_scale=self.input_scale if activation == "nvfp4" else None,
            groups=self.groups,
            out_dtype=out_dtype,
            reserve_sms=reserve_sms,
        )

    @property
    def takes_codes(self) -> bool:
        """Whether the layer rounds its input to FP8 now, and so takes one that is rounded."""
        return self.activation == "fp8" and self.format is not None and self.observer is None

    def _of_codes(
        self, x: QuantizedTensor, out_dtype: torch.dtype | None, reserve_sms: int
    ) -> torch.Tensor:
        if not self.takes_codes:
            name = type(self).__name__
            seen = "plain" if self.format is None else f"activation {self.activation!r}"
            seen = seen if self.observer is None else "being calibrated"
            raise ValueError(f"{name}: x is in {x.format.name!r} and the layer is {seen}")
        return gemm(
            x,
            self.quantized_weight(),
            groups=self.groups,
            out_dtype=out_dtype,
            reserve_sms=reserve_sms,
        )

    def _refuse(self, x: torch.Tensor) -> NoReturn:
        """Raise with the reason why ``x`` does not fit."""
        name = type(self).__name__
        if x.shape[-1] != self.in_features:
            raise ValueError(
                f"{name}: x has shape {list(x.shape)}, wanted [..., {self.in_features}]"
            )
        if not x.is_floating_point():
            raise TypeError(f"{name}: x has dtype {x.dtype}, wanted a floating type")
        raise TypeError(f"{name}: x has dtype {x.dtype}, wanted the weight's, {self.weight.dtype}")

    def _plain(self, x: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
        assert out_dtype is not None
        wide, weight = wider(x.dtype, out_dtype), self.weight
        if x.is_cuda and wide == torch.float32 and x.dtype == weight.dtype != wide:
            # Sums are float32 in both cases, and the weight is not copied.
            if x.dim() == 2 and out_dtype == wide:
                return torch.mm(x, weight.t(), out_dtype=wide)
            rows = x.reshape(-1, self.in_features)
            result = torch.mm(rows, weight.t(), out_dtype=wide)
            return result.view(*x.shape[:-1], self.out_features).to(out_dtype)
        return F.linear(x.to(wide), self.weight.to(wide)).to(out_dtype)

    @property
    def device(self) -> torch.device:
        """Return where the weight is."""
        return self.weight.device if self.fused is None else self.fused.codes.device

    @property
    def joint(self) -> FusedWeight | None:
        """Former name of ``fused``."""
        warnings.warn("Linear.joint is now Linear.fused", DeprecationWarning, stacklevel=2)
        return self.fused

    def quantized_weight(self) -> QuantizedTensor:
        """The weight as one value.

        Raises:
            ValueError: if the weight is plain.
        """
        if self.format is None:
            raise ValueError("Linear: the weight is plain, wanted a quantised one")
        fused: Any = self._modules.get("fused")  # see ``FixedDtypeModule``
        if fused is not None:
            return fused.part(self.fused_part).with_layout(self.layout)
        tensors = self._parameters  # see ``FixedDtypeModule``
        codes, scales = tensors["weight"], tensors["weight_scale"]
        assert scales is not None
        rest = (self.format, self.layout, (), self._buffers["weight_exponent"])
        return self.value_of(codes, scales, tensors["weight_scale_2"], *rest)

    def dense_weight(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight as a plain tensor ``[out, in]``."""
        if self.format is None:
            return self.weight.to(dtype)
        return dequantize(self.quantized_weight(), dtype)

    def set_weight(
        self, weight: torch.Tensor | QuantizedTensor, input_scale: torch.Tensor | None = None
    ) -> None:
        """Replace the weight and its format, without a copy.

        Args:
            weight: ``[out_features, in_features]``, plain or quantised, in any layout.
            input_scale: Activation global scale, ``[]`` or ``[1]`` float32, or None.

        Raises:
            ValueError: if this layer cannot have the shape or the layout; nothing is changed then.
        """
        if tuple(weight.shape) != (self.out_features, self.in_features):
            raise ValueError(
                f"Linear: weight has shape {list(weight.shape)}, "
                f"wanted [{self.out_features}, {self.in_features}]"
            )
        if isinstance(weight, torch.Tensor):
            self._hold(weight)
            self.input_scale = None
            return
        if weight.segments:
            raise ValueError(f"Linear: weight has segments {weight.segments}, wanted none")
        self._check_tiles(weight.layout)
        self._hold(weight)
        self.input_scale = None if input_scale is None else frozen(input_scale.reshape(1).float())

    def _hold(self, weight: torch.Tensor | QuantizedTensor) -> None:
        """Take these tensors as parameters of this layer alone."""
        self._leave()
        if isinstance(weight, torch.Tensor):
            self.format, self.layout, self.stored = None, LINEAR, Linear.stored
            parameter = nn.Parameter(weight, requires_grad=weight.requires_grad)
            parts: tuple[torch.Tensor | None, ...] = (None, None)
        else:
            self.format, self.layout = weight.format, weight.layout
            self.stored = Linear.stored | {"weight"}
            parameter, parts = frozen(weight.codes), (weight.scales, weight.global_scale)
        self.weight = parameter
        self.weight_scale, self.weight_scale_2 = (None if t is None else frozen(t) for t in parts)
        exponent = None if isinstance(weight, torch.Tensor) else weight.row_exponent
        self.weight_exponent, self.exactness = exponent, None

    def _leave(self) -> None:
        """Give up the part of a fused weight; the other layers keep theirs."""
        self.forget_value()
        if self.fused is not None:
            del self.fused  # out of the submodules, which would keep and print a None
            self.fused, self.fused_part = None, 0

    def _enter(self, fused: FusedWeight, part: int) -> None:
        """Replace the weight by a part of a fused one."""
        self._leave()
        for name in _OWN:
            self.register_parameter(name, None)
        self.weight_exponent = None  # the fused weight has all rows'
        self.fused, self.fused_part = fused, part

    def _check_tiles(self, layout: str) -> None:
        rows = self.out_features // self.groups
        per_group = " per group" if self.groups > 1 else ""
        if layout == FRAGMENTS and not fragments.fits(rows, self.in_features):
            tile = f"{fragments.ROWS} x {fragments.COLUMNS}"
        elif layout == SWIZZLED and self.groups > 1 and rows % 128:
            tile = "128 x 16"
        else:
            return
        raise ValueError(
            f"{type(self).__name__}: the weight is {rows} x {self.in_features}{per_group}, wanted "
            f"multiples of {tile} for layout {layout!r}"
        )

    def pack(self, layout: str = FRAGMENTS) -> None:
        """Re-lay an NVFP4 weight for tensor cores, in place; nothing is lost.

        The old parameters are freed: graphs captured with them must be captured again. A layer that
        has this layout already stays as it is; a layer in another layout leaves its fused weight.

        Args:
            layout: ``"fragments_16x64"`` for Hopper, and for bfloat16 and FP8 activations on
                Blackwell; ``"swizzled_128x4"`` for NVFP4 activations there.

        Raises:
            ValueError: if the weight is not NVFP4, is on the meta device, or for fragments is not a
                whole number of tiles (16 rows of each group, 64 columns) or has a negative block
                scale, or swizzled has groups that are not whole blocks of 128 rows; nothing is
                changed then.
        """
        name = type(self).__name__
        if layout not in PACKED_LAYOUTS:
            raise ValueError(f"{name}: layout is {layout!r}, wanted one of {PACKED_LAYOUTS}")
        if self.layout == layout:
            return
        if self.format != NVFP4:
            present = "plain" if self.format is None else self.format.name
            raise ValueError(f"{name}: the weight is {present}, wanted nvfp4 for {layout!r}")
        if self.device.type == "meta":
            raise ValueError(f"{name}: the weight is on the meta device, wanted one with values")
        self._check_tiles(layout)
        weight = self.quantized_weight() if self.layout == LINEAR else self._unpacked()
        packed, exactness = weight.with_layout(layout), None
        if layout == FRAGMENTS:
            packed, exactness = with_row_exponent(packed)
        self._hold(packed)
        self.exactness = exactness

    def unpack(self) -> None:
        """Undo ``pack``, bit for bit; leaves a fused weight. An unpacked layer stays as it is."""
        if self.layout == LINEAR:
            return
        self._hold(self._unpacked())

    def _unpacked(self) -> QuantizedTensor:
        """Return the weight of a packed layer as an unpacked one has it, in tensors of its own."""
        fused = self.fused
        weight = self.quantized_weight() if fused is None else fused.part(self.fused_part)
        weight = weight.with_layout(LINEAR)
        assert weight.global_scale is not None
        return replace(
            weight,
            codes=weight.codes.contiguous(),
            scales=weight.scales.contiguous(),
            global_scale=weight.global_scale.clone(),
            row_exponent=None,
        )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self.layout == LINEAR:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        weight = self._unpacked()
        parts = (weight.codes, weight.scales, weight.global_scale, self.input_scale)
        for name, tensor in zip((*_OWN, "input_scale"), parts, strict=True):
            if tensor is not None:
                destination[prefix + name] = tensor.detach()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        if self.layout == LINEAR:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)
            return
        lists[-1].append(refused_while_packed(f"{prefix}weight"))

    def to_format(
        self,
        format: str | Format | None,
        *,
        scale_dtype: torch.dtype | None = None,
        input_scale: bool = False,
    ) -> None:
        """Declare the parameters of a format, uninitialised, on the device of the present weight.

        Args:
            format: Name or descriptor, or None for a plain weight. Its dtype is that of the present
                weight if that is plain, else torch's default.
            scale_dtype: Dtype of the block scales, where the format allows several.
            input_scale: Whether to declare ``input_scale``.
        """
        device = self.device
        shape = (self.out_features, self.in_features)
        if format is None:
            dtype = torch.get_default_dtype() if self.format is not None else self.weight.dtype
            self.set_weight(torch.empty(shape, dtype=dtype, device=device))
            return
        empty = empty_quantized(shape, format_named(format), scale_dtype, device)
        scale = torch.empty(1, dtype=torch.float32, device=device) if input_scale else None
        self.set_weight(empty, scale)

    def quantize(self, format: str = "nvfp4") -> None:
        """Quantise a plain weight in place.

        Raises:
            ValueError: if the weight is quantised already.
        """
        if self.format is not None:
            raise ValueError(
                f"Linear: the weight is {self.format.name} already, wanted a plain one"
            )
        self.set_weight(quantize_weight(self.weight.detach(), format))

    def extra_repr(self) -> str:
        """Shape, format, activation, and the layout of a packed weight."""
        name = "plain" if self.format is None else self.format.name
        layout = "" if self.layout == LINEAR else f", layout={self.layout}"
        return (
            f"{self.in_features}, {self.out_features}, {name}, activation={self.activation}{layout}"
        )


class DeepseekV4GroupedLinear(Linear):
    """``n_groups`` projections of as many inputs (``wo_a`` of specification, section 4.1).

    Rows ``g * out_features / n_groups`` and following of the weight belong to group ``g``.
    """

    def __init__(
        self,
        in_features_per_group: int,
        out_features: int,
        n_groups: int,
        bias: bool = False,
        *,
        activation: str = "bf16",
    ) -> None:
        super().__init__(in_features_per_group, out_features, bias, activation=activation)
        if out_features % n_groups:
            raise ValueError(
                f"GroupedLinear: out_features is {out_features}, wanted a multiple of {n_groups}"
            )
        self.n_groups = n_groups
        self.groups = n_groups

    def forward(
        self,
        x: torch.Tensor | QuantizedTensor,
        out_dtype: torch.dtype | None = None,
        *,
        reserve_sms: int = 0,
    ) -> torch.Tensor:
        """Map ``[..., n_groups, in]`` to ``[..., n_groups, out_features / n_groups]``."""
        if len(x.shape) < 2 or x.shape[-2] != self.n_groups:
            raise ValueError(
                f"GroupedLinear: x has shape {list(x.shape)}, "
                f"wanted [..., {self.n_groups}, {self.in_features}]"
            )
        return super().forward(x, out_dtype, reserve_sms=reserve_sms)

    def _plain(self, x: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
        dtype = x.dtype if out_dtype is None else wider(x.dtype, out_dtype)
        per_group = self.out_features // self.n_groups
        weight = self.weight.view(self.n_groups, per_group, self.in_features).to(dtype)
        flat = x.to(dtype).reshape(-1, self.n_groups, self.in_features).transpose(0, 1)
        out = torch.bmm(flat, weight.transpose(1, 2)).transpose(0, 1)
        return out.reshape(*x.shape[:-1], per_group).to(out_dtype or x.dtype)


_MOVED = {
    "fused_linear": "fused_linear",
    "join_weights": "join_weights",
    "joint_linear": "concatenated_linear",
    "joint_swiglu": "fused_swiglu",
}


def __getattr__(name: str) -> Any:
    """Return functions that moved to ``dsv4.layers.fusion``."""
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    message = f"{__name__}.{name} is now dsv4.layers.fusion.{_MOVED[name]}"
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module("dsv4.layers.fusion"), _MOVED[name])
