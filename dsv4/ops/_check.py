"""Argument checks shared by the public functions of ``dsv4.ops``.

Each names the operator, the argument, the value found and the value expected. ``tensors`` checks
all tensors of a call in one Python frame. Shapes are not checked while ``torch.compile`` traces,
because they are symbolic there and the eager call has checked them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)

# A tensor's dimensions: sizes, names of sizes (equal wherever they stand in one call of
# ``tensors``), or None for any size. "..." in front stands for any dimensions, the same everywhere.
Dims = Sequence[int | str | None]
# An argument as ``tensors`` takes it: its name, its value, dtypes, and dimensions or None for any.
Expected = tuple[str, torch.Tensor | None, Sequence[torch.dtype], Dims | None]


def tensors(op: str, *expected: Expected) -> None:
    """Raise unless all tensors have their dtypes and dimensions and are on one device.

    Args:
        op: Name of the operator.
        *expected: The arguments in the order in which they are checked; None is skipped.

    Raises:
        TypeError: if a dtype differs.
        ValueError: if a shape or a device differs.
    """
    device, is_one_device = None, True
    for name, tensor, dtypes, _ in expected:
        if tensor is None:
            continue
        if tensor.dtype not in dtypes:
            dtype(op, name, tensor, *dtypes)
        if device is None:
            device = tensor.device
        elif tensor.device != device:
            is_one_device = False
    if not torch.compiler.is_compiling():
        sizes: dict[str, Any] = {}
        for name, tensor, _, dims in expected:
            if tensor is None or dims is None:
                continue
            own, before = tensor.shape, dict(sizes)
            if dims and dims[0] == "...":
                rank = len(dims) - 1
                lead = own[: len(own) - rank]
                fits = len(own) >= rank and sizes.setdefault("...", lead) == lead
                own, rest = own[len(own) - rank :], dims[1:]
            else:
                fits, rest = len(own) == len(dims), dims
            if fits:
                for size, dim in zip(own, rest, strict=True):
                    if dim.__class__ is str:
                        dim = sizes.setdefault(dim, size)
                    if size != dim and dim is not None:
                        fits = False
            if not fits:
                raise ValueError(_wrong_shape(op, name, tensor, dims, before))
    if not is_one_device:
        same_device(op, **{name: tensor for name, tensor, _, _ in expected})


def _wrong_shape(
    op: str, name: str, tensor: torch.Tensor, dims: Dims, sizes: dict[str, Any]
) -> str:
    """Return the message for dimensions that differ; ``sizes`` are those of earlier tensors."""
    words: list[str] = []
    for dim in dims:
        if dim == "...":
            words += map(str, sizes[dim]) if dim in sizes else [dim]
        else:
            unknown = dim if "..." in dims and dim is not None else "any"
            size = sizes.get(dim, unknown) if isinstance(dim, str) else dim
            words.append("any" if size is None else str(size))
    return f"{op}: {name} has shape {list(tensor.shape)}, wanted [{', '.join(words)}]"


def shape(op: str, name: str, tensor: torch.Tensor, dims: Sequence[int | None]) -> None:
    """Raise ValueError unless ``tensor`` has the expected shape; None matches any size."""
    if torch.compiler.is_compiling():
        return
    own = tensor.shape
    fits = len(own) == len(dims)
    if fits:
        for size, dim in zip(own, dims, strict=True):
            if size != dim and dim is not None:
                fits = False
    if not fits:
        raise ValueError(_wrong_shape(op, name, tensor, dims, {}))


def rows(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError if ``tensor`` is a single number, which has no last axis."""
    if tensor.dim() == 0:
        raise ValueError(f"{op}: {name} has shape [], wanted [..., D]")


def dtype(op: str, name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Raise TypeError unless ``tensor.dtype`` is one of ``dtypes``."""
    if tensor.dtype not in dtypes:
        words = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        own = str(tensor.dtype).removeprefix("torch.")
        raise TypeError(f"{op}: {name} has dtype {own}, wanted {words}")


def floating(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raise TypeError unless ``tensor`` is bfloat16, float16, float32 or float64."""
    if tensor.dtype not in FLOATS:
        dtype(op, name, tensor, *FLOATS)


def integer(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raise TypeError unless ``tensor`` is int32 or int64."""
    dtype(op, name, tensor, *INTEGERS)


def one_of(op: str, name: str, value: str, names: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``names``."""
    if value not in names:
        raise ValueError(f"{op}: {name} is {value!r}, wanted one of {', '.join(map(repr, names))}")


def same_device(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless all given tensors are on one device."""
    first = None
    for tensor in tensors.values():
        if tensor is None:
            continue
        if first is None:
            first = tensor.device
        elif tensor.device != first:
            present = {name: t.device for name, t in tensors.items() if t is not None}
            words = ", ".join(f"{name} on {device}" for name, device in present.items())
            raise ValueError(f"{op}: tensors are on different devices ({words}), wanted one device")


def no_overlap(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless the elements of ``tensor``, which is written, share no memory.

    Each stride has to be larger than the span of the dimensions with smaller strides, as in every
    view of a contiguous tensor but expanded ones and sliding windows. Interleaved dimensions are
    not supported, even if no two elements share memory.
    """
    if tensor.is_contiguous() or torch.compiler.is_compiling():
        return
    span = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride <= span:
            raise ValueError(
                f"{op}: {name} has shape {list(tensor.shape)} and strides "
                f"{list(tensor.stride())}, wanted strides that pass what smaller ones span: "
                f"{name} is written and must not overlap itself"
            )
        span += (size - 1) * stride


def below(op: str, name: str, values: torch.Tensor, bound: int) -> None:
    """Raise IndexError unless all integers are below ``bound``; negative ones stand for nothing."""
    bad = values.to(torch.int64) >= bound
    if bool(bad.any()):
        none_bad(op, name, values, bad, f"below {bound}")


def within(op: str, name: str, values: torch.Tensor, bound: int) -> None:
    """Raise IndexError unless all integers are from 0 on and below ``bound``."""
    bad = (values < 0) | (values.to(torch.int64) >= bound)
    if bool(bad.any()):
        none_bad(op, name, values, bad, f"from 0 on, below {bound}")


def none_bad(op: str, name: str, values: torch.Tensor, bad: torch.Tensor, rule: str) -> None:
    """Raise IndexError if any is ``bad``.

    It reads values, as the two functions above do, so only checks that run on the CPU call it.
    """
    if bool(bad.any()):
        index = bad.nonzero()[0].tolist()
        raise IndexError(f"{op}: {name}{index} is {int(values[tuple(index)])}, wanted {rule}")


def result(
    op: str, out: torch.Tensor, dims: Sequence[int], out_dtype: torch.dtype, x: torch.Tensor
) -> None:
    """Raise unless ``out`` can take a result of this shape and dtype, on the device of ``x``.

    Raises:
        TypeError: if the dtype differs.
        ValueError: if the shape or the device differs, ``out`` is not contiguous, or it does not
            begin at a multiple of 16 bytes, which kernels write at a time.
    """
    dtype(op, "out", out, out_dtype)
    shape(op, "out", out, dims)
    same_device(op, x=x, out=out)
    if torch.compiler.is_compiling():
        return
    if not out.is_contiguous() or out.data_ptr() % 16:
        raise ValueError(
            f"{op}: out has strides {list(out.stride())} and begins at address {out.data_ptr()}, "
            "wanted a contiguous tensor that begins at a multiple of 16 bytes"
        )
