"""Paged KV cache: write, read, and the rounding that a round trip causes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dsv4.kv_cache.pages import (
    DIMS_MULTIPLES,
    ENTRY_FORMATS,
    PAGE_FORMATS,
    EntryLayout,
    Pages,
    bytes_per_page,
)
from dsv4.ops import _check
from dsv4.ops._library import Written, define
from dsv4.ops._plans import planned

__all__ = ["EntryLayout", "Pages", "fake_quantize_kv", "norm_rope_write_kv", "read_kv", "write_kv"]

_ENTRY_FLOATS = (torch.bfloat16, torch.float32, torch.float64)
_BYTES = (torch.uint8,)


class WriteKvArgs(NamedTuple):
    """Arguments of ``write_kv``: storing of entries in their slots.

    Attributes:
        data: ``[pages, ...]``, the pages' storage.
        page_size: Entries of a page.
        entry_format: Format of the pages, see ``dsv4.kv_cache.pages``.
        head_dim: D, dims of an entry.
        rope_dim: Trailing dims that ``"fp8"`` entries keep in bfloat16.
        entries: ``[M, D]``, bfloat16, float32 or float64.
        slots: ``[M]`` int, ``page * page_size + entry``; negative: skip.
    """

    data: Written
    page_size: int
    entry_format: str
    head_dim: int
    rope_dim: int
    entries: torch.Tensor
    slots: torch.Tensor


class ReadKvArgs(NamedTuple):
    """Arguments of ``read_kv``: loading of entries.

    Attributes:
        data: ``[pages, ...]``, the pages' storage.
        page_size: Entries of a page.
        entry_format: Format of the pages, see ``dsv4.kv_cache.pages``.
        head_dim: D, dims of an entry.
        rope_dim: Trailing dims that ``"fp8"`` entries keep in bfloat16.
        slots: ``[...]`` int, ``page * page_size + entry``; negative: zeros.
        dtype: Dtype of the result: bfloat16, float32 or float64.
    """

    data: torch.Tensor
    page_size: int
    entry_format: str
    head_dim: int
    rope_dim: int
    slots: torch.Tensor
    dtype: torch.dtype


class FakeQuantizeKvArgs(NamedTuple):
    """Arguments of ``fake_quantize_kv``: a round trip through ``"fp8"`` pages.

    Attributes:
        x: ``[..., D]``, bfloat16, float32 or float64.
        rope_dim: Trailing dims left in bfloat16.
    """

    x: torch.Tensor
    rope_dim: int


class NormRopeWriteKvArgs(NamedTuple):
    """Arguments of ``norm_rope_write_kv``: norm, rotation and storing of entries.

    Attributes:
        data: ``[pages, ...]``, the pages' storage.
        page_size: Entries of a page.
        entry_format: Format of the pages, see ``dsv4.kv_cache.pages``.
        head_dim: D, dims of an entry.
        rope_dim: Trailing dims that ``"fp8"`` entries keep in bfloat16.
        kv: ``[T, D]``, bfloat16, float32 or float64.
        weight: ``[D]`` floating, weight of the norm.
        cos: ``[T, R/2]``, floating, see ``rope_tables``.
        sin: Like ``cos``.
        slots: ``[T]`` int; negative: skip.
        eps: Added to the mean square.
    """

    data: Written
    page_size: int
    entry_format: str
    head_dim: int
    rope_dim: int
    kv: torch.Tensor
    weight: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor
    eps: float


def _write_fake(args: WriteKvArgs) -> None:
    return None


def _read_fake(args: ReadKvArgs) -> torch.Tensor:
    return args.data.new_empty((*args.slots.shape, args.head_dim), dtype=args.dtype)


def _fake_quantize_fake(args: FakeQuantizeKvArgs) -> torch.Tensor:
    return torch.empty_like(args.x, memory_format=torch.contiguous_format)


def _check_slots(op: str, args: WriteKvArgs | ReadKvArgs | NormRopeWriteKvArgs) -> None:
    _check.below(op, "slots", args.slots, args.data.shape[0] * args.page_size)


_write_kv = define("write_kv", WriteKvArgs, _write_fake, _check_slots)
_read_kv = define("read_kv", ReadKvArgs, _read_fake, _check_slots)
_fake_quantize_kv = define("fake_quantize_kv", FakeQuantizeKvArgs, _fake_quantize_fake)


def _norm_rope_write_fake(args: NormRopeWriteKvArgs) -> None:
    return None


_norm_rope_write_kv = define(
    "norm_rope_write_kv", NormRopeWriteKvArgs, _norm_rope_write_fake, _check_slots
)


def expected_pages(
    op: str, name: str, pages: Pages, formats: Sequence[str] = ENTRY_FORMATS
) -> _check.Expected:
    """Return what the fields of ``pages`` require of ``pages.data``, for ``_check.tensors``.

    Args:
        op: Name of the operator.
        name: Name of the argument.
        pages: Value of the argument.
        formats: Formats that the operator supports.

    Raises:
        ValueError: if the format is not one of these, or does not fit ``head_dim``.
    """
    entry_format, head_dim = pages.entry_format, pages.head_dim
    if entry_format not in formats:
        _check.one_of(op, f"{name}.entry_format", entry_format, formats)
    if entry_format == "plain":
        return f"{name}.data", pages.data, _check.FLOATS, (None, pages.page_size, head_dim)
    multiple = DIMS_MULTIPLES.get(entry_format, 1)
    if head_dim % multiple:
        raise ValueError(
            f"{op}: {name}.head_dim is {head_dim}, wanted a multiple of {multiple} for "
            f"{entry_format!r}"
        )
    if torch.compiler.is_compiling():
        return f"{name}.data", pages.data, _BYTES, None
    page_bytes = bytes_per_page(entry_format, head_dim, pages.rope_dim, pages.page_size)
    return f"{name}.data", pages.data, _BYTES, (None, page_bytes)


def check_pages(op: str, name: str, pages: Pages, formats: Sequence[str] = ENTRY_FORMATS) -> None:
    """Raise unless ``pages.data`` has what the fields of ``pages`` require (``expected_pages``)."""
    _check.tensors(op, expected_pages(op, name, pages, formats))


@planned
def write_kv(
    pages: Pages, entries: torch.Tensor, slots: torch.Tensor, *, backend: str = "auto"
) -> None:
    """Store entries in their slots (specification, sections 4.2 and 7). Mutates the pages.

    ``"fp8"``: the first ``D - R`` dims are stored as E4M3 in groups of 64 with the E8M0 scale byte
    ``ceil(log2(max(amax, 1e-4) / 448)) + 127``, the last R dims as bfloat16. Values are first
    rounded to float32. The scale is the smallest power of two under which the group fits, so
    nothing saturates. A group with a NaN or an Inf gets scale byte 255 and code 0x7F, both NaN, and
    so reads back as NaN; other groups and entries are unaffected. A NaN in the RoPE dims is stored
    as 0x7FC0. ``"plain"``: cast to the pages' dtype.

    Index keys (specification, section 6), rounded to float32 first: ``"index_fp8"`` is E4M3 with
    one scale ``2 ^ ceil(log2(max(amax, 1e-4) / 448))``; an entry with a NaN or an Inf is code 0x7F
    and scale NaN. ``"index_mxfp4"`` is MXFP4 as ``quantize`` makes it, whose groups of 32 with a
    NaN or an Inf have codes 0 and scale byte 255. All of them read back as NaN.

    Args:
        pages: Pages to write to.
        entries: ``[M, D]``, bfloat16, float32 or float64, after RMS norm and RoPE.
        slots: ``[M]`` int64 or int32, ``page * page_size + entry``; negative: skip that entry.
            Slots that are not negative should be distinct: of equal ones it is undefined which
            entry stays.
        backend: Implementation name, see ``dsv4.dispatch``.

    Raises:
        TypeError: if a dtype is none of these.
        ValueError: if a shape differs, the tensors are on different devices, or the pages' data
            overlaps itself.
        IndexError: if a slot lies past the last page (on the CPU; undefined on a GPU).
    """
    op = "write_kv"
    _check.tensors(
        op,
        ("entries", entries, _ENTRY_FLOATS, ("M", pages.head_dim)),
        ("slots", slots, _check.INTEGERS, ("M",)),
        expected_pages(op, "pages", pages, PAGE_FORMATS),
    )
    if not pages.data.is_contiguous():
        _check.no_overlap(op, "pages.data", pages.data)
    _write_kv(
        WriteKvArgs(
            pages.data,
            pages.page_size,
            pages.entry_format,
            pages.head_dim,
            pages.rope_dim,
            entries,
            slots,
        ),
        backend,
    )


@planned
def read_kv(
    pages: Pages,
    slots: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Load the entries of the given slots (specification, section 7).

    A value of a byte format is its code times its scale, exact in every result dtype but for
    underflow; scale byte 255 gives NaN.

    Args:
        pages: Pages to read from.
        slots: ``[...]`` int64 or int32; a negative slot reads as zeros.
        dtype: Dtype of the result: bfloat16, float32 or float64.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[..., D]`` in ``dtype``.

    Raises:
        TypeError: if a dtype is none of these.
        ValueError: if the pages' data has the wrong shape, or is on another device than ``slots``.
        IndexError: if a slot lies past the last page (on the CPU; undefined on a GPU).
    """
    _check.tensors(
        "read_kv",
        ("slots", slots, _check.INTEGERS, None),
        expected_pages("read_kv", "pages", pages, PAGE_FORMATS),
    )
    if dtype not in _ENTRY_FLOATS:
        raise TypeError(f"read_kv: dtype is {dtype}, wanted bfloat16, float32 or float64")
    return _read_kv(
        ReadKvArgs(
            pages.data,
            pages.page_size,
            pages.entry_format,
            pages.head_dim,
            pages.rope_dim,
            slots,
            dtype,
        ),
        backend,
    )


@planned
def fake_quantize_kv(x: torch.Tensor, rope_dim: int, *, backend: str = "auto") -> torch.Tensor:
    """Return what ``x`` reads back as after ``"fp8"`` pages, bit for bit.

    Specification, section 4.2, step 5. The first ``D - rope_dim`` dims are quantised to E4M3 in
    groups of 64 with power-of-two scales; the last ``rope_dim`` are rounded to bfloat16, whatever
    the dtype of ``x``. A group with a NaN or an Inf comes out as NaN.

    Args:
        x: ``[..., D]``, bfloat16, float32 or float64.
        rope_dim: Trailing dims left in bfloat16.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[..., D]`` in ``x.dtype``, contiguous.

    Raises:
        TypeError: if ``x`` has another dtype.
        ValueError: if ``x`` has no axis, or unless ``0 <= rope_dim <= D``.
    """
    _check.tensors("fake_quantize_kv", ("x", x, _ENTRY_FLOATS, ("...", "D")))
    if not 0 <= rope_dim <= x.shape[-1]:
        raise ValueError(
            f"fake_quantize_kv: rope_dim is {rope_dim}, wanted 0 to {x.shape[-1]} (dims of x)"
        )
    return _fake_quantize_kv(FakeQuantizeKvArgs(x, rope_dim), backend)


@planned
def norm_rope_write_kv(
    pages: Pages,
    kv: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    *,
    eps: float = 1e-6,
    backend: str = "auto",
) -> None:
    """Write projections to the cache in one step (specification, section 4.2, steps 4 and 5).

    This is ``write_kv(pages, rope(rms_norm(kv, weight, eps), cos, sin), slots)``, with roundings to
    ``kv.dtype`` after the norm and after the rotation. Mutates the pages.

    Args:
        pages: Pages to write to.
        kv: ``[T, D]``, bfloat16, float32 or float64; rows may lie further apart than D.
        weight: ``[D]``, weight of the norm.
        cos: ``[T, R/2]``, see ``dsv4.ops.rope.rope_tables``. R is taken from this argument.
        sin: Like ``cos``.
        slots: ``[T]`` int64 or int32, as for ``write_kv``; negative: skip that token.
        eps: Added to the mean square.
        backend: Implementation name, see ``dsv4.dispatch``.

    Raises:
        TypeError: if a dtype is none of these, or that of ``weight``, ``cos`` or ``sin`` is not
            floating.
        ValueError: if a shape differs, R is more than D, the tensors are on different devices, or
            the pages' data overlaps itself.
        IndexError: if a slot lies past the last page (on the CPU; undefined on a GPU).
    """
    op = "norm_rope_write_kv"
    _check.tensors(
        op,
        ("kv", kv, _ENTRY_FLOATS, ("T", pages.head_dim)),
        ("slots", slots, _check.INTEGERS, ("T",)),
        ("weight", weight, _check.FLOATS, (pages.head_dim,)),
        ("cos", cos, _check.FLOATS, ("T", "R/2")),
        ("sin", sin, _check.FLOATS, ("T", "R/2")),
        expected_pages(op, "pages", pages),
    )
    if not pages.data.is_contiguous():
        _check.no_overlap(op, "pages.data", pages.data)
    if 2 * cos.shape[1] > pages.head_dim:
        raise ValueError(
            f"{op}: cos has shape {list(cos.shape)}, wanted [{kv.shape[0]}, R/2] with R <= "
            f"{pages.head_dim} (dims of kv)"
        )
    _norm_rope_write_kv(
        NormRopeWriteKvArgs(
            pages.data,
            pages.page_size,
            pages.entry_format,
            pages.head_dim,
            pages.rope_dim,
            kv,
            weight,
            cos,
            sin,
            slots,
            eps,
        ),
        backend,
    )
