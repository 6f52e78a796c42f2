"""GEMMs with NVFP4 weights: cuBLAS on the dequantised weight, and two libraries.

The libraries multiply bfloat16 activations with packed weights and compile kernels for each matrix,
in seconds to a minute. Both take one global scale for a matrix: "(one global scale)" is given that
of the first segment, where the operator applies one for each. Neither has groups of inputs, nor
quantises activations to NVFP4. Each is compared with the dequantised weight before it is timed; a
wrong one is left out with a warning.

Seen with quack-kernels 0.6.5 and humming-kernels 0.1.19: QuACK's kernel is Hopper's, and its tiles
want rows by 128. Humming works on the first GPU.

cuBLAS "(bf16 weight)" has a weight of 3.6 times the bytes, leaves activations as they are, and
applies no scale afterwards.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from dsv4 import ops
from dsv4.bench.baselines._prepare import Call, FromLibrary, Table
from dsv4.ops.gemm import GemmArgs
from dsv4.quant.formats import FP8_TOKEN, LINEAR, NVFP4, QuantizedTensor, format_named

SLOW = ("QuACK (one global scale)", "Humming (one global scale)")
_ROWS = 4  # of x, whose results are compared
TOLERANCE = 0.01  # relative to the norm; a rounding to bfloat16 is 0.002
_log = logging.getLogger(__name__)
_T = TypeVar("_T")
# What was made of a weight, for as long as its codes live: the next problem may have the same.
_made: Any = WeakTensorKeyDictionary()


def once(codes: torch.Tensor, what: str, make: Callable[[], _T]) -> _T:
    """Return what ``make`` made of a weight, the first time or now."""
    held = _made.setdefault(codes, {})
    if what not in held:
        held[what] = make()
    return held[what]


def _linear(weight: QuantizedTensor) -> QuantizedTensor:
    """Return the weight in linear layout with the global scale of the first segment alone."""
    assert weight.global_scale is not None
    scale = weight.global_scale[:1].contiguous()
    return dataclasses.replace(weight.with_layout(LINEAR), global_scale=scale, segments=())


def _dense(weight: QuantizedTensor, *, one_scale: bool = False) -> torch.Tensor:
    """bfloat16, made once; with ``one_scale`` that of ``_linear``."""
    first = one_scale and len(weight.segments) > 1

    def make() -> torch.Tensor:
        chosen = _linear(weight) if first else weight
        return ops.dequantize(chosen, torch.bfloat16, backend="reference")

    return once(weight.codes, "dense of one scale" if first else "dense", make)


def _cublas(library: Any, args: GemmArgs) -> Call:
    known, parts = format_named(args.format), tuple(args.segments)
    weight = _dense(
        QuantizedTensor(args.codes, args.scales, args.global_scale, known, args.layout, parts)
    )
    x = _values(args)
    if args.groups == 1:
        return lambda: F.linear(x, weight)
    stacked = weight.view(args.groups, -1, weight.shape[-1]).transpose(1, 2)
    return lambda: torch.bmm(x.transpose(0, 1), stacked)


def _values(args: GemmArgs) -> torch.Tensor:
    """Return the activations; those of codes in bfloat16."""
    if args.x_scales is None:
        return args.x
    codes = QuantizedTensor(args.x, args.x_scales, None, FP8_TOKEN, args.x_layout)
    return ops.dequantize(codes, torch.bfloat16, backend="reference")


def _checked(make: Callable[[Any, QuantizedTensor], Callable[[torch.Tensor], Any]]) -> Any:
    """``prepare`` of a library whose ``make`` turns a weight into a function of x."""

    def prepare(library: Any, args: GemmArgs) -> Call:
        x, format, activation, groups = args.x, args.format, args.activation, args.groups
        dtypes = f"{x.dtype} to {args.out_dtype}"
        plain = format == NVFP4.name and activation == "bf16" and groups == 1
        if not plain or x.dtype != args.out_dtype:
            raise ValueError(f"{format}, {activation}, {groups} groups, {dtypes}")
        parts = tuple(args.segments)
        codes, scales = args.codes, args.scales
        packed = QuantizedTensor(codes, scales, args.global_scale, NVFP4, args.layout, parts)
        multiply = once(codes, library.__name__, lambda: make(library, _linear(packed)))
        _compare(library.__name__, multiply(x), x, packed)
        return lambda: multiply(x)

    return prepare


def _compare(name: str, result: torch.Tensor, x: torch.Tensor, weight: QuantizedTensor) -> None:
    """Raise ValueError unless the first and last rows of ``x`` were multiplied rightly."""
    dense = _dense(weight, one_scale=True)
    try:
        require_close(ends(result), ends(x).float() @ dense.float().T)
    except ValueError as problem:
        _log.warning("%s: %s: %s, left out", name, weight, problem)
        raise


def ends(values: torch.Tensor) -> torch.Tensor:
    """Return the first and last rows, whose results are compared."""
    return torch.cat((values[:_ROWS], values[-_ROWS:]))


def require_close(result: torch.Tensor, truth: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    """Raise ValueError if the norm of the error is more than ``tolerance`` times the truth's."""
    error = float((result.float() - truth).norm() / truth.norm())
    if not error <= tolerance:
        raise ValueError(f"off by {error:.1e}")


def _quack(library: Any, weight: QuantizedTensor) -> Callable[[torch.Tensor], Any]:
    packed, scales = library.prepare_w4_weight(weight.codes, weight.scales, "nvfp4")
    assert weight.global_scale is not None
    options = {"tensor_scale": float(weight.global_scale), "n_out": weight.rows}
    return lambda x: library.gemm_w4a16(x, packed, scales, wformat="nvfp4", **options)


def _humming(library: Any, weight: QuantizedTensor) -> Callable[[torch.Tensor], Any]:
    layer = library.HummingLayer(
        shape_n=weight.rows,
        shape_k=weight.columns,
        weight_config={"quant_method": "modelopt", "quant_algo": "nvfp4"},
        torch_dtype=torch.bfloat16,
    )
    layer = layer.to(weight.device)
    assert weight.global_scale is not None
    stored = {"weight": weight.codes, "weight_scale": weight.scales}
    layer.load_from_tensors({**stored, "weight_scale_2": weight.global_scale})
    layer.transform()
    return layer


BASELINES: Table = {
    "gemm": {
        "cuBLAS (bf16 weight)": FromLibrary("torch", _cublas),
        SLOW[0]: FromLibrary("quack.gemm_w4", _checked(_quack)),
        SLOW[1]: FromLibrary("humming.layer", _checked(_humming)),
    }
}
