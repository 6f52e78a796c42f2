"""Linear layers of vLLM's attention and shared experts on this package's GEMMs.

FP8 weights with scales of 128 x 128 blocks, and NVFP4 weights. vLLM builds its layers and loads
their parameters; then ``adopt``'s methods make a ``Linear`` of them, ``layer.dsv4_linear``, without
copying codes, and multiply with it. Inputs stay bfloat16: nothing is quantised per token. Splitting
over ranks, gathering and reductions stay vLLM's. Every linear layer and the head have a row in the
report.

``wo_a`` of the attention is multiplied by the attention's own code. Its ``dsv4_linear`` is a
``DeepseekV4GroupedLinear``, made if the part ``attention`` has replaced that code. Without that
part nothing asks for it, and vLLM's matrix stays, also with ``DSV4_VLLM_STRICT=1``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import vllm.envs
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
from vllm.model_executor.layers.quantization.modelopt import ModelOptLinearMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Static
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)

from dsv4.cute import supports
from dsv4.integrations.vllm.adoption import Adoption
from dsv4.integrations.vllm.switches import ATTENTION, LINEAR
from dsv4.layers.linear import DeepseekV4GroupedLinear, Linear
from dsv4.quant import fragments
from dsv4.quant.formats import FP8_BLOCK, FRAGMENTS, NVFP4, QuantizedTensor

_BLOCK = [128, 128]
_OURS = "dsv4.integrations.vllm"
_PARAMETERS = ("weight", "weight_scale", "weight_scale_2", "input_scale")
_NO_ATTENTION = "the attention multiplies it itself, and DSV4_VLLM has not attention"
_UNQUANTISED = "the weight is not quantised"
_OTHER_METHOD = "its weight is neither FP8 with scales of 128 x 128 blocks nor NVFP4"


@dataclass(frozen=True)
class Source:
    """A layer of vLLM and its method, which a method of this module replaces after loading.

    Attributes:
        name: Qualified name of the layer.
        method: vLLM's method that it replaces.
        owner: The module that has the layer.
        context: Switches and report of the model.
    """

    name: str
    method: Any
    owner: nn.Module
    context: Adoption


def adopt(model: nn.Module, context: Adoption) -> None:
    """Replace the methods of quantised linear layers; their rows follow when they are loaded.

    Layers that stay vLLM's get their row at once.
    """
    modules = dict(model.named_modules())
    for name, layer in modules.items():
        if not isinstance(layer, LinearBase | ParallelLMHead):
            continue
        kernel = type(layer.quant_method).__name__
        optional, reason = reason_not_asked(layer, context), unsupported_reason(layer)
        if optional:
            context.report.not_asked(LINEAR, name, kernel, optional)
        elif reason:
            context.report.left(LINEAR, name, kernel, reason)
        else:
            owner = modules[name.rpartition(".")[0]]
            _replace_method(layer, Source(name, layer.quant_method, owner, context))


def reason_not_asked(layer: Any, context: Adoption) -> str:
    """Say why nothing is missing if the layer stays vLLM's; empty if something is."""
    if isinstance(layer.quant_method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
        return _UNQUANTISED
    if _is_grouped(layer) and ATTENTION not in context.switches.parts:
        return _NO_ATTENTION if type(layer.quant_method) in _METHODS else ""
    return ""


def _replace_method(layer: LinearBase, source: Source) -> None:
    own_class: Any = _METHODS[type(source.method)]
    own = own_class.__new__(own_class)
    vars(own).update(vars(source.method), dsv4_source=source)
    layer.quant_method = own
    # Whoever reads this gives the layer inputs that are quantised already.
    vars(layer).pop("_input_quant_key", None)


def unsupported_reason(layer: Any) -> str:
    """Say why vLLM's method stays for a layer that is not loaded yet; empty if it need not."""
    if isinstance(layer, ParallelLMHead):
        return "the head's quantised weight has no GEMM of this package"
    if type(layer.quant_method) not in _METHODS:
        return _OTHER_METHOD
    if vllm.envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT=1 asks for vLLM's own kernels"
    if getattr(layer, "bias", None) is not None:
        return "the layer has a bias"
    if layer.params_dtype != torch.bfloat16:
        return f"the model computes in {layer.params_dtype}, wanted torch.bfloat16"
    if isinstance(layer.quant_method, Fp8LinearMethod):
        return _unsupported_fp8(layer)
    return _unsupported_nvfp4(layer)


def _unsupported_fp8(layer: LinearBase) -> str:
    if layer.weight_block_size != _BLOCK:
        return f"FP8 scales are of blocks {layer.weight_block_size}, wanted {_BLOCK}"
    if any(width % _BLOCK[0] for width in layer.logical_widths[:-1]):
        return f"fused matrices have {layer.logical_widths} rows, wanted multiples of 128"
    return ""


def _unsupported_nvfp4(layer: LinearBase) -> str:
    if layer.quant_method.spec.weight != kNvfp4Static:
        return _OTHER_METHOD
    rows, columns = layer.weight.shape[0], 2 * layer.weight.shape[1]
    rows_of_group = rows // getattr(layer, "bmm_batch_size", 1)
    if not fragments.fits(rows_of_group, columns):
        tile = f"{fragments.ROWS} x {fragments.COLUMNS}"
        return f"the matrix is {rows_of_group} x {columns} per rank, no multiple of {tile}"
    device = layer.weight.device
    if device.type == "cpu":
        return ""
    return supports.no_packed_weights(device, layer.params_dtype) or ""


class _Linear:
    """Replacements for parts of vLLM's methods for linear layers."""

    dsv4_source: Source
    dsv4_kernel: str
    supports_pre_processed_weights = False

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        """Build ``layer.dsv4_linear``, or give the layer back to vLLM's method."""
        source = self.dsv4_source
        reason = _unread(layer, source.owner) or self.dsv4_build(layer)
        if not reason:
            source.context.report.replaced(LINEAR, source.name, self.dsv4_kernel)
            return
        source.context.report.left(LINEAR, source.name, type(source.method).__name__, reason)
        layer.quant_method = source.method
        layer.quant_method.process_weights_after_loading(layer)

    def dsv4_build(self, layer: LinearBase) -> str:
        """Build ``layer.dsv4_linear``; return why that cannot be, or nothing."""
        raise NotImplementedError

    def apply(
        self, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``x W^T`` of this rank's part.

        Raises:
            ValueError: with a bias, or for a grouped layer, whose owner calls ``dsv4_linear``.
        """
        if bias is not None or _is_grouped(layer):
            what = "a bias" if bias is not None else "a grouped weight"
            raise ValueError(f"{self.dsv4_source.name}: called with {what}, wanted neither")
        return layer.dsv4_linear(x)


def _is_grouped(layer: LinearBase) -> bool:
    return bool(getattr(layer, "is_bmm", False))


def _unread(layer: LinearBase, owner: nn.Module) -> str:
    """Say that nobody would call the grouped layer."""
    if not _is_grouped(layer) or type(owner).__module__.startswith(_OURS):
        return ""
    return f"{type(owner).__name__} multiplies it itself; the part attention replaces that"


class Dsv4Fp8LinearMethod(_Linear, Fp8LinearMethod):
    """FP8 weights with scales of 128 x 128 blocks, in float32 or powers of two."""

    dsv4_kernel = "gemm (FP8 128 x 128 weights)"

    def dsv4_build(self, layer: LinearBase) -> str:
        """Share vLLM's tensors, which stay where they are."""
        scales = layer.weight_scale_inv.data
        value = QuantizedTensor(layer.weight.data, scales, None, FP8_BLOCK)
        layer.dsv4_linear = _linear_of(layer, value)
        return ""


class Dsv4ModelOptLinearMethod(_Linear, ModelOptLinearMethod):
    """NVFP4 weights, with the global scale of each fused matrix."""

    dsv4_kernel = "gemm (NVFP4 weights)"

    def dsv4_build(self, layer: LinearBase) -> str:
        """Take vLLM's tensors, packed on a GPU."""
        weight, scales = layer.weight.data, layer.weight_scale.data
        value = QuantizedTensor(weight, scales, _global_scale(layer), NVFP4)
        linear = _linear_of(layer, value)
        if weight.device.type != "cpu":
            try:
                linear.pack(FRAGMENTS)
            except ValueError as error:
                return str(error)
        for name in _PARAMETERS:
            if name in layer._parameters:
                del layer._parameters[name]
        layer.dsv4_linear = linear
        return ""


_METHODS: dict[type, type] = {
    Fp8LinearMethod: Dsv4Fp8LinearMethod,
    ModelOptLinearMethod: Dsv4ModelOptLinearMethod,
}


def _global_scale(layer: LinearBase) -> torch.Tensor:
    """Return one scale, or where those of fused matrices differ the scale of every row."""
    scales = layer.weight_scale_2.data
    if bool((scales == scales[0]).all()):
        return scales[:1].clone()
    widths = torch.tensor(layer.logical_widths, dtype=torch.int64, device=scales.device)
    return scales.repeat_interleave(widths)


def _linear_of(layer: LinearBase, value: QuantizedTensor) -> Linear:
    rows, columns = value.shape
    with torch.device("meta"):
        linear = (
            DeepseekV4GroupedLinear(columns, rows, layer.bmm_batch_size)
            if _is_grouped(layer)
            else Linear(columns, rows)
        )
    linear.set_weight(value)
    return linear.requires_grad_(False).eval()
