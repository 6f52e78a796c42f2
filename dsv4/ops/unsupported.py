"""Reasons why calls are unsupported, shared by implementations; None where there is none."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dsv4.quant.formats import FRAGMENTS, NVFP4, SWIZZLED

LARGEST_ROW = 65536  # columns of a row that a program of a Triton kernel holds
LARGEST_GRID = 65535  # programs along the second and third axis of a launch
MOST_SEGMENTS = 4  # segments of a fused weight, whose borders a kernel takes as arguments
ONLY_REFERENCE = "which only the reference computes in"


def float64_tensor(values: Iterable[object]) -> str | None:
    """Return a reason if any argument is a float64 tensor."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.dtype == torch.float64:
            return f"a tensor is float64, {ONLY_REFERENCE}"
    return None


def float64_result(dtype: torch.dtype) -> str | None:
    """Return a reason if a result shall be float64."""
    return f"the result is float64, {ONLY_REFERENCE}" if dtype == torch.float64 else None


def wide_row(columns: int) -> str | None:
    """Return a reason if one program cannot hold a row."""
    if columns > LARGEST_ROW:
        return f"a row has {columns} columns, and a kernel holds at most {LARGEST_ROW}"
    return None


def too_many(count: int, what: str) -> str | None:
    """Return a reason if an axis of a launch's grid is too long."""
    if count > LARGEST_GRID:
        return f"there are {count} {what}, wanted at most {LARGEST_GRID}"
    return None


def gapped_pages(pages: torch.Tensor) -> str | None:
    """Return a reason if a page has gaps within; pages themselves may lie apart."""
    step = 1
    for size, stride in zip(pages.shape[:0:-1], pages.stride()[:0:-1], strict=True):
        if size > 1 and stride != step:
            return f"the pages have strides {pages.stride()}, wanted each page contiguous"
        step *= size
    return None


def odd_dims(dims: int) -> str | None:
    """Return a reason if entries, whose dims are rotated in pairs, have an odd number."""
    return f"entries have {dims} dims, wanted an even number" if dims % 2 else None


def gemm_dtypes(x: torch.dtype, result: torch.dtype) -> str | None:
    """Return a reason if ``x`` is not bfloat16, or the result neither bfloat16 nor float32."""
    if x != torch.bfloat16:
        return f"x is {x}, wanted bfloat16"
    if result not in (torch.bfloat16, torch.float32):
        return f"the result is {result}, wanted bfloat16 or float32"
    return None


def not_in_fragments(layout: str) -> str | None:
    """Return a reason if a weight is not packed."""
    if layout == FRAGMENTS:
        return None
    return (
        f"the weight has layout {layout!r}, wanted {FRAGMENTS!r}: "
        "QuantizedTensor.with_layout or the layer's pack()"
    )


def not_swizzled(layout: str) -> str | None:
    """Return a reason if block scales do not have the layout of Blackwell's tensor cores."""
    if layout == SWIZZLED:
        return None
    return f"the weight has layout {layout!r}, wanted {SWIZZLED!r}: QuantizedTensor.with_layout"


def not_both_nvfp4(weight: str, activation: str) -> str | None:
    """Return a reason if weight and activations are not both NVFP4."""
    if weight == activation == NVFP4.name:
        return None
    formats = f"the weight is {weight!r} and activations are {activation!r}"
    return f"{formats}, and both operands have to be NVFP4"


def many_segments(count: int) -> str | None:
    """Return a reason if a fused weight has too many segments."""
    if count > MOST_SEGMENTS:
        return f"the weight has {count} segments, wanted at most {MOST_SEGMENTS}"
    return None


def ragged_groups(rows: int, columns: int) -> str | None:
    """Return a reason if a group of rows is not a whole number of tiles."""
    if rows % 16 or columns % 32:
        return f"a group is {rows} x {columns}, wanted multiples of 16 x 32"
    return None


def gapped(names: str, *tensors: torch.Tensor) -> str | None:
    """Return a reason if a tensor is not contiguous; ``names`` such as ``"codes or scales"``."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return None
    return f"the {names} are not contiguous"


def misaligned(codes: torch.Tensor, scales: torch.Tensor) -> str | None:
    """Return a reason if codes or scales do not begin at multiples of 16 bytes, as loads need."""
    if codes.data_ptr() % 16 or scales.data_ptr() % 16:
        return "the codes or scales do not begin at multiples of 16 bytes"
    return None
