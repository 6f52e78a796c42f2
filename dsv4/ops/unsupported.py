"""Reasons why an implementation cannot run a call, that several share; each None where it can."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dsv4.device import capability
from dsv4.quant.formats import FRAGMENTS, NVFP4, SWIZZLED

LARGEST_ROW = 65536  # columns of a row that a program of a Triton kernel holds
LARGEST_GRID = 65535  # programs along the second and third axis of a launch
MOST_SEGMENTS = 4  # parts of a fused weight, whose borders a kernel takes as arguments
ONLY_REFERENCE = "which only the reference computes in"


def float64_tensor(values: Iterable[object]) -> str | None:
    """Of any tensor among arguments."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.dtype == torch.float64:
            return f"a tensor is float64, {ONLY_REFERENCE}"
    return None


def float64_result(dtype: torch.dtype) -> str | None:
    """Of the dtype that a result is to have."""
    return f"the result is float64, {ONLY_REFERENCE}" if dtype == torch.float64 else None


def no_e4m3(device: torch.device) -> str | None:
    """Of a GPU whose instructions do not convert to E4M3; those for E2M1 are as new."""
    if device.type == "cuda" and capability(device) < (8, 9):
        return "the GPU has no E4M3 conversions, which need compute capability 8.9"
    return None


def wide_row(columns: int) -> str | None:
    """Of rows that one program has to hold."""
    if columns > LARGEST_ROW:
        return f"a row has {columns} columns, and a kernel holds at most {LARGEST_ROW}"
    return None


def many(count: int, what: str) -> str | None:
    """Of what is one axis of a launch's grid."""
    if count > LARGEST_GRID:
        return f"there are {count} {what}, wanted at most {LARGEST_GRID}"
    return None


def gapped_pages(pages: torch.Tensor) -> str | None:
    """Of pages that do not lie one after another."""
    if not pages.is_contiguous():
        return f"the pages have strides {pages.stride()}, wanted contiguous ones"
    return None


def odd_dims(dims: int) -> str | None:
    """Of entries whose dims are turned in pairs."""
    return f"entries have {dims} dims, wanted an even number" if dims % 2 else None


def gemm_dtypes(x: torch.dtype, result: torch.dtype) -> str | None:
    """Of activations that are not bfloat16, or results that are neither that nor float32."""
    if x != torch.bfloat16:
        return f"x is {x}, wanted bfloat16"
    if result not in (torch.bfloat16, torch.float32):
        return f"the result is {result}, wanted bfloat16 or float32"
    return None


def not_in_fragments(layout: str) -> str | None:
    """Of a weight that is not packed."""
    if layout == FRAGMENTS:
        return None
    return (
        f"the weight has layout {layout!r}, wanted {FRAGMENTS!r}: "
        "QuantizedTensor.with_layout or the layer's pack()"
    )


def not_swizzled(layout: str) -> str | None:
    """Of a weight whose block scales do not lie as Blackwell's tensor cores want them."""
    if layout == SWIZZLED:
        return None
    return f"the weight has layout {layout!r}, wanted {SWIZZLED!r}: QuantizedTensor.with_layout"


def not_both_nvfp4(weight: str, activation: str) -> str | None:
    """Of a weight's format and that of activations, as tensor cores of Blackwell take them."""
    if weight == activation == NVFP4.name:
        return None
    formats = f"the weight is {weight!r} and activations are {activation!r}"
    return f"{formats}, and both operands have to be NVFP4"


def many_segments(count: int) -> str | None:
    """Of a weight of many parts."""
    if count > MOST_SEGMENTS:
        return f"the weight has {count} segments, wanted at most {MOST_SEGMENTS}"
    return None


def ragged_groups(rows: int, columns: int) -> str | None:
    """Of a group of rows that is no whole number of tiles."""
    if rows % 16 or columns % 32:
        return f"a group is {rows} x {columns}, wanted multiples of 16 x 32"
    return None


def gapped(names: str, *tensors: torch.Tensor) -> str | None:
    """Of tensors that are not contiguous, by their names, e.g. ``"codes or scales"``."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return None
    return f"the {names} are not contiguous"


def misaligned(codes: torch.Tensor, scales: torch.Tensor) -> str | None:
    """Of codes and block scales that are loaded 16 bytes at a time."""
    if codes.data_ptr() % 16 or scales.data_ptr() % 16:
        return "the codes or scales do not begin at multiples of 16 bytes"
    return None
