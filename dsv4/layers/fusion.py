"""Several projections of one input as one GEMM; their weights share a matrix or are copied."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from dsv4.layers._fused_weight import FusedWeight, interleaved_rows
from dsv4.layers._rounded import rounded_once
from dsv4.layers.linear import Linear
from dsv4.ops.gemm import gemm
from dsv4.ops.gemm_swiglu import gemm_swiglu
from dsv4.quant.formats import LINEAR, NVFP4, SWIZZLED, QuantizedTensor, cat_rows


def fused_linear(
    layers: Sequence[Linear], x: torch.Tensor, out_dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Return the parts of ``concatenated_linear``: one ``[..., out_features]`` per layer.

    They are columns of one tensor if one GEMM computes all layers.

    Args:
        layers: Layers of equal ``in_features``.
        x: ``[..., in_features]``.
        out_dtype: See ``Linear.forward``.
    """
    whole = _one_gemm(layers, x, out_dtype)
    if whole is None:
        rounded = rounded_once(x, layers) if layers[0].activation == "fp8" else x
        return [layer(rounded, out_dtype) for layer in layers]
    # ``Tensor.split`` comes to the same after six more calls of Python.
    return list(whole.split_with_sizes([layer.out_features for layer in layers], dim=-1))


def concatenated_linear(
    layers: Sequence[Linear], x: torch.Tensor, *, reserve_sms: int = 0
) -> torch.Tensor:
    """Compute several projections of one input, by one GEMM where their weights allow it.

    NVFP4 weights are concatenated by rows, without a copy if they share a matrix
    (``join_weights``). Every row segment keeps its own global scale, because one shared maximum
    would scale the other segments wrongly by the ratio (pitfall 28); the input is quantised once,
    with the largest of the input scales, because a smaller one would clip.

    Args:
        layers: Layers of equal ``in_features``.
        x: ``[..., in_features]``.
        reserve_sms: SMs that the GEMM leaves to other streams, see ``dsv4.ops.gemm``.

    Returns:
        ``[..., sum of out_features]``.
    """
    whole = _one_gemm(layers, x, reserve_sms=reserve_sms)
    if whole is None:
        rounded = rounded_once(x, layers) if layers[0].activation == "fp8" else x
        return torch.cat([layer(rounded, reserve_sms=reserve_sms) for layer in layers], dim=-1)
    return whole


def _one_gemm(
    layers: Sequence[Linear],
    x: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    reserve_sms: int = 0,
) -> torch.Tensor | None:
    """All projections side by side; None where one GEMM cannot take all weights and the input."""
    activation = layers[0].activation
    for layer in layers:
        if layer.format is not NVFP4 and layer.format != NVFP4:
            return None
        if layer.activation != activation:
            return None
        if layer.observer is not None:  # calibrating
            return None
    weight = _joined(layers)
    return gemm(
        x,
        weight,
        activation=activation,
        input_scale=_common_input_scale(layers) if activation == "nvfp4" else None,
        out_dtype=out_dtype,
        reserve_sms=reserve_sms,
    )


def fused_swiglu(
    gate: Linear, up: Linear, x: torch.Tensor, limit: float | None, *, reserve_sms: int = 0
) -> torch.Tensor | None:
    """Compute SwiGLU of two projections in one operator, without a rounding in between.

    The input is quantised as in ``concatenated_linear``.

    Args:
        gate: ``[I, K]``.
        up: ``[I, K]``.
        x: ``[..., K]``.
        limit: Clamp bound, greater than 0, or None for no clamp.
        reserve_sms: SMs that the GEMM leaves to other streams, see ``dsv4.ops.gemm``.

    Returns:
        ``[..., I]``; None where the rows are not interleaved (``join_weights``) or the layers
        differ in what they do to ``x``.
    """
    layers, activation = (gate, up), gate.activation
    fused: Any = gate._modules.get("fused")  # see ``FixedDtypeModule``
    if fused is None or not fused.interleaved or not _share(layers, fused):
        return None
    if up.activation != activation:
        return None
    scale = _common_input_scale(layers) if activation == "nvfp4" else None
    for layer in layers:
        if layer.observer is not None:
            layer.observer.see(x)
            activation, scale = "bf16", None
    weight = fused.whole()
    return gemm_swiglu(
        x, weight, limit, activation=activation, input_scale=scale, reserve_sms=reserve_sms
    )


def _joined(layers: Sequence[Linear]) -> QuantizedTensor:
    """The rows of all layers: their fused weight, or a copy."""
    fused: Any = layers[0]._modules.get("fused")  # see ``FixedDtypeModule``
    if fused is not None and not fused.interleaved and _share(layers, fused):
        return fused.whole()
    return cat_rows([layer.quantized_weight() for layer in layers])


def _share(layers: Sequence[Linear], fused: FusedWeight) -> bool:
    """Return whether the layers are the parts of ``fused``, all of them and in this order."""
    if len(layers) != len(fused.rows):
        return False
    for i, layer in enumerate(layers):
        if layer._modules.get("fused") is not fused or layer.fused_part != i:
            return False
    return True


def join_weights(
    layers: Sequence[Linear], *, interleaved: bool = False, in_turn: bool | None = None
) -> bool:
    """Make packed layers share one matrix, so that a GEMM of all of them copies nothing.

    This needs memory for one copy of the matrix and, for interleaved rows, of one layer's rows.
    Layers that share it already stay as they are.

    Args:
        layers: Layers of one input, in the order in which ``concatenated_linear`` gets them.
        interleaved: Whether their rows are interleaved, for the SwiGLU of gate and up in one
            operator; a GEMM of one layer then needs a copy. By default the layers' rows follow each
            other.
        in_turn: Former name of ``interleaved``.

    Returns:
        Whether they share it now: only layers packed alike, of equal ``in_features``, on one
        device, each with one global scale, can; interleaved only layers of equal
        ``out_features``; swizzled ones after each other only if all but the last have whole blocks
        of 128 rows.
    """
    if in_turn is not None:
        message = "join_weights: in_turn is now interleaved"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        interleaved = in_turn
    fused = layers[0].fused
    if fused is not None and fused.interleaved == interleaved and _share(layers, fused):
        return True
    layout = layers[0].layout
    if layout == LINEAR or any(layer.layout != layout for layer in layers):
        return False
    parts = [layer.quantized_weight() for layer in layers]
    if len({(part.columns, part.device) for part in parts}) > 1:
        return False
    if any(part.global_scale is None or part.global_scale.numel() != 1 for part in parts):
        return False
    rows = tuple(part.rows for part in parts)
    if interleaved and len(set(rows)) > 1:
        return False
    if layout == SWIZZLED and not interleaved and any(n % 128 for n in rows[:-1]):
        return False  # a block would hold scales of two layers
    whole = interleaved_rows(parts) if interleaved else cat_rows(parts)
    shared = FusedWeight(whole, rows, interleaved=interleaved)
    for i, layer in enumerate(layers):
        layer._enter(shared, i)
    return True


def _common_input_scale(layers: Sequence[Linear]) -> torch.Tensor | None:
    """Return the largest input scale, or None (a scale per token) if a layer has none."""
    scales: list[torch.Tensor | None] = [layer.input_scale for layer in layers]
    present = [scale for scale in scales if scale is not None]
    return torch.cat(present).amax(0, keepdim=True) if len(present) == len(scales) else None
