"""Argument checks shared by the public functions of ``dsv4.ops``.

Each names the operator, the argument, the value found and the value wanted. They are skipped while
``torch.compile`` traces, because shapes are symbolic there and the eager call has checked them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def shape(op: str, name: str, tensor: torch.Tensor, wanted: Sequence[int | None]) -> None:
    """Raise ValueError unless ``tensor`` has the wanted shape; None matches any size."""
    if torch.compiler.is_compiling():
        return
    found = tensor.shape
    fits = len(found) == len(wanted)
    if fits:
        for size, w in zip(found, wanted, strict=True):
            if size != w and w is not None:
                fits = False
    if not fits:
        words = "[" + ", ".join("any" if w is None else str(w) for w in wanted) + "]"
        raise ValueError(f"{op}: {name} has shape {list(found)}, wanted {words}")


def rows(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError if ``tensor`` is a single number, without an axis to call its last."""
    if tensor.dim() == 0:
        raise ValueError(f"{op}: {name} has shape [], wanted [..., D]")


def dtype(op: str, name: str, tensor: torch.Tensor, *wanted: torch.dtype) -> None:
    """Raise TypeError unless ``tensor.dtype`` is one of ``wanted``."""
    if tensor.dtype not in wanted:
        words = " or ".join(str(d).removeprefix("torch.") for d in wanted)
        found = str(tensor.dtype).removeprefix("torch.")
        raise TypeError(f"{op}: {name} has dtype {found}, wanted {words}")


FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def floating(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raise TypeError unless ``tensor`` is bfloat16, float16, float32 or float64."""
    if tensor.dtype not in FLOATS:
        dtype(op, name, tensor, *FLOATS)


def integer(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raise TypeError unless ``tensor`` is int32 or int64."""
    dtype(op, name, tensor, torch.int32, torch.int64)


def one_of(op: str, name: str, value: str, wanted: Sequence[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``wanted``."""
    if value not in wanted:
        raise ValueError(f"{op}: {name} is {value!r}, wanted one of {', '.join(map(repr, wanted))}")


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


def apart(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless the elements of ``tensor``, which is written, share no memory.

    Each stride has to pass what the dimensions of smaller strides span, as in every view of a
    contiguous tensor but expanded ones and windows that slide. Interleaved dimensions are refused
    even where no two elements meet.
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
    """Raise IndexError unless all integers are below ``bound``; negative ones name nothing."""
    none_bad(op, name, values, values.to(torch.int64) >= bound, f"below {bound}")


def within(op: str, name: str, values: torch.Tensor, bound: int) -> None:
    """Raise IndexError unless all integers are from 0 on and below ``bound``."""
    bad = (values < 0) | (values.to(torch.int64) >= bound)
    none_bad(op, name, values, bad, f"from 0 on, below {bound}")


def none_bad(op: str, name: str, values: torch.Tensor, bad: torch.Tensor, wanted: str) -> None:
    """Raise IndexError if any is ``bad``.

    Reads values, as the two above do: for what ``define`` calls on the CPU alone.
    """
    if bool(bad.any()):
        place = bad.nonzero()[0].tolist()
        raise IndexError(f"{op}: {name}{place} is {int(values[tuple(place)])}, wanted {wanted}")


def result(
    op: str, out: torch.Tensor, wanted: Sequence[int], wanted_dtype: torch.dtype, x: torch.Tensor
) -> None:
    """Raise unless ``out`` can take a result of this shape and dtype, on the device of ``x``.

    Raises:
        TypeError: if the dtype differs.
        ValueError: if the shape or the device differs, ``out`` is not contiguous, or it does not
            begin at a multiple of 16 bytes, which kernels write at a time.
    """
    dtype(op, "out", out, wanted_dtype)
    shape(op, "out", out, wanted)
    same_device(op, x=x, out=out)
    if torch.compiler.is_compiling():
        return
    if not out.is_contiguous() or out.data_ptr() % 16:
        raise ValueError(
            f"{op}: out has strides {list(out.stride())} and begins at address {out.data_ptr()}, "
            "wanted a contiguous tensor that begins at a multiple of 16 bytes"
        )
