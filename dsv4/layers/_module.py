"""Base of every layer with tensors of fixed dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_not
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from dsv4.ops.quantize import quantize
from dsv4.quant.formats import NVFP4, Format, QuantizedTensor, format_named

_WIDE = (torch.float32, torch.float64)
_NARROW = (torch.bfloat16, torch.float16)
_GLOBAL_HOOKS = (nn_module._global_forward_hooks, nn_module._global_forward_pre_hooks)


class FixedDtypeModule(nn.Module):
    """A module some of whose tensors keep their dtype in ``.to(dtype)`` and similar calls.

    Casting FP8 block scales or 4-bit codes would destroy the weight without an error, and the
    hyper-connection, router-bias and sink parameters are float32 by specification, section 14.

    Code that a decode step runs several times per layer looks tensors up in ``_parameters`` and
    ``_buffers`` and submodules in ``_modules``, because each attribute costs a call of
    ``Module.__getattr__``. There were 100 of these calls per layer, a tenth of the layers' host
    time.

    Attributes:
        stored: Names of tensors whose dtype is part of their meaning: never cast.
        wide: Names of tensors that may be float32 or float64 and nothing narrower.
    """

    stored: frozenset[str] = frozenset()
    wide: frozenset[str] = frozenset()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        self.forget_value()
        own = {**self._parameters, **self._buffers}
        stored = {id(t) for name, t in own.items() if name in self.stored}
        wide = {id(t) for name, t in own.items() if name in self.wide}

        def guarded(tensor: torch.Tensor) -> torch.Tensor:
            out = fn(tensor)
            if out.dtype == tensor.dtype:
                return out
            if id(tensor) in stored or (id(tensor) in wide and out.dtype not in _WIDE):
                return tensor.to(out.device)
            return out

        return super()._apply(guarded, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: 8-bit floats as bytes, because torch cannot read theirs back."""
        state = {name: value for name, value in self.__dict__.items() if name != "_kept"}
        for group in ("_parameters", "_buffers"):
            state[group] = {name: _as_bytes(tensor) for name, tensor in state[group].items()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state that ``__getstate__`` returned."""
        for group in ("_parameters", "_buffers"):
            tensors = state[group].items()
            state[group] = {
                name: value.tensor() if isinstance(value, _Bytes) else value
                for name, value in tensors
            }
        super().__setstate__(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy in which shared tensors stay shared."""
        made = memo[id(self)] = type(self).__new__(type(self))
        own = {name: value for name, value in self.__dict__.items() if name != "_kept"}
        nn.Module.__setstate__(made, copy.deepcopy(own, memo))
        return made

    def value_of(self, *parts: Any, name: str = "weight") -> QuantizedTensor:
        """Return ``QuantizedTensor(*parts)``, and for the same parts the same object as before.

        Making one takes the host longer than looking whether the parts are the same.

        Args:
            *parts: The parts, as many in each call with a name.
            name: Name of the value, in a module that has several.
        """
        if torch.compiler.is_compiling():
            return QuantizedTensor(*parts)
        values = self.__dict__.get("_kept")
        if values is None:
            values = self.__dict__["_kept"] = {}
        last = values.get(name)
        if last is None or any(map(is_not, last[0], parts)):
            last = values[name] = (parts, QuantizedTensor(*parts))
        return last[1]

    def forget_value(self) -> None:
        """Let go of the tensors of every ``value_of``, before they are replaced."""
        self.__dict__.get("_kept", {}).clear()


@dataclass(frozen=True, eq=False)
class _Bytes:
    """A tensor of 8-bit floats in a pickle.

    Attributes:
        values: Its bytes, uint8.
        dtype: The dtype that these bytes stand for.
        parameter: Whether it is a parameter.
    """

    values: torch.Tensor
    dtype: torch.dtype
    parameter: bool

    def tensor(self) -> torch.Tensor:
        """Return the tensor as it was."""
        values = self.values.view(self.dtype)
        return frozen(values) if self.parameter else values


def _as_bytes(tensor: torch.Tensor | None) -> Any:
    if tensor is None or not (tensor.is_floating_point() and tensor.element_size() == 1):
        return tensor
    return _Bytes(tensor.detach().view(torch.uint8), tensor.dtype, isinstance(tensor, nn.Parameter))


def frozen(tensor: torch.Tensor) -> nn.Parameter:
    """A parameter that takes no gradient: integer and 8-bit float tensors can have none."""
    return nn.Parameter(tensor, requires_grad=False)


def wider(x: torch.dtype, y: torch.dtype) -> torch.dtype:
    """Memoise ``torch.promote_types``, which a step calls several times per layer."""
    if x is y or x is torch.float64:
        return x
    if y is torch.float64 or (y is torch.float32 and x in _NARROW):
        return y
    return torch.promote_types(x, y)


def wide_dtype() -> torch.dtype:
    """The dtype of new tensors that are never narrower than float32, whatever the default is."""
    return torch.promote_types(torch.get_default_dtype(), torch.float32)


def empty_weight(*shape: int, std: float = 0.02, dtype: torch.dtype | None = None) -> nn.Parameter:
    """A weight drawn from N(0, std), or left unset on the meta device."""
    weight = torch.empty(*shape, dtype=dtype)
    return nn.Parameter(weight if weight.is_meta else weight.normal_(0.0, std))


def empty_quantized(
    shape: Sequence[int], format: Format, scale_dtype: torch.dtype | None, device: torch.device
) -> QuantizedTensor:
    """Make an uninitialised quantised matrix ``[*batch, N, K]``, one global scale each.

    Raises:
        ValueError: if the format does not allow ``scale_dtype`` or the shape.
    """
    dtype = scale_dtype or format.scale_dtypes[0]
    if dtype not in format.scale_dtypes:
        allowed = " or ".join(map(str, format.scale_dtypes))
        raise ValueError(f"{format.name}: scale_dtype is {dtype}, wanted {allowed}")
    codes = torch.empty(format.codes_shape(shape), dtype=format.codes_dtype, device=device)
    scales = torch.empty(format.scales_shape(shape), dtype=dtype, device=device)
    scale = None
    if format.has_global_scale:
        scale = torch.empty((*shape[:-2], 1), dtype=torch.float32, device=device)
    return QuantizedTensor(codes, scales, scale, format)


def quantize_weight(weight: torch.Tensor, format: str) -> QuantizedTensor:
    """A weight in ``format``, NVFP4 by the rule for weights (specification, section 11.1)."""
    chosen = format_named(format)
    return quantize(weight, chosen, scaling="weight" if chosen == NVFP4 else "tensor")


def quantize_pair(
    gate: torch.Tensor, up: torch.Tensor, format: str
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Gate and up of an MLP in ``format``, with one global scale in NVFP4.

    Engines take one for both, and NVIDIA's exporter writes them so.
    """
    if format_named(format) != NVFP4:
        return quantize_weight(gate, format), quantize_weight(up, format)
    both = quantize_weight(torch.cat([gate, up]), format)
    assert both.global_scale is not None
    rows = gate.shape[0]
    halves = [
        QuantizedTensor(
            both.codes[part].contiguous(),
            # Sliced as bytes: not every operation exists for 8-bit floats.
            both.scales.view(torch.uint8)[part].contiguous().view(both.scales.dtype),
            both.global_scale.clone(),
            NVFP4,
        )
        for part in (slice(0, rows), slice(rows, None))
    ]
    return halves[0], halves[1]


def refused_while_packed(tensor: str) -> str:
    """Return the message about a layer's ``tensor`` that is not in the layout of files."""
    remedy = "wanted an unpacked one: call dsv4.layers.unpack_ first"
    return f"{tensor}: the layer is packed, {remedy}"


def is_unwatched(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a module is exactly of a class, and nobody watches or replaces its forward.

    Its work may then be done without a call of it. Not while ``torch.compile`` traces.
    """
    if torch.compiler.is_compiling() or type(module) is not kind or "forward" in module.__dict__:
        return False
    is_compiled = module._compiled_call_impl is not None  # by ``module.compile()``
    return not (is_compiled or hooked(module, module) or any(_GLOBAL_HOOKS))


def hooked(module: nn.Module, other: nn.Module) -> bool:
    """Whether someone watches a module, whose parts then must not be run without it."""
    before, after = module._forward_pre_hooks, module._forward_hooks
    return any((before, after, other._forward_pre_hooks, other._forward_hooks))
