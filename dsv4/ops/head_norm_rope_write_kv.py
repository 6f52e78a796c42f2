"""Norm and rotation of query heads and of new KV entries, which are stored: one step of both."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4.kv_cache.pages import Pages
from dsv4.ops import _check
from dsv4.ops._library import Written, define
from dsv4.ops._plans import planned
from dsv4.ops.kv_cache import expected_pages

__all__ = ["head_norm_rope_write_kv"]

_ENTRY_FLOATS = (torch.bfloat16, torch.float32, torch.float64)


class HeadNormRopeWriteKvArgs(NamedTuple):
    """Arguments of ``head_norm_rope_write_kv``: those of ``head_norm_rope_`` and of the entries.

    Attributes:
        q: ``[T, h, D]`` floating, unit stride along D.
        data: ``[pages, ...]``, the pages' storage.
        page_size: Entries of a page.
        entry_format: Format of the pages, see ``dsv4.kv_cache.pages``.
        head_dim: D, dims of an entry.
        rope_dim: Trailing dims that ``"fp8"`` entries keep in bfloat16.
        kv: ``[T, D]``, bfloat16, float32 or float64.
        weight: ``[D]`` floating, weight of the norm of kv.
        cos: ``[T, R/2]``, floating, see ``rope_tables``; queries and entries share it.
        sin: Like ``cos``.
        slots: ``[T]`` int; negative: skip.
        q_eps: Added to the mean square of a head.
        kv_eps: Added to the mean square of an entry.
    """

    q: Written
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
    q_eps: float
    kv_eps: float


def _fake(args: HeadNormRopeWriteKvArgs) -> None:
    return None


def _check_slots(op: str, args: HeadNormRopeWriteKvArgs) -> None:
    _check.below(op, "slots", args.slots, args.data.shape[0] * args.page_size)


_head_norm_rope_write_kv = define(
    "head_norm_rope_write_kv", HeadNormRopeWriteKvArgs, _fake, _check_slots
)


@planned
def head_norm_rope_write_kv(
    q: torch.Tensor,
    pages: Pages,
    kv: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    *,
    q_eps: float = 1e-6,
    kv_eps: float = 1e-6,
    backend: str = "auto",
) -> None:
    """Norm and rotate query heads in place, and write KV entries to the cache.

    This is ``head_norm_rope_(q, cos, sin, q_eps)`` and ``norm_rope_write_kv(pages, kv, weight, cos,
    sin, slots, eps=kv_eps)`` (specification, section 4.2, steps 2 to 5), with the bits of the two
    operators. They do not depend on each other, so that few tokens take one launch.

    Args:
        q: ``[T, h, D]``, bfloat16, float16, float32 or float64; changed.
        pages: Pages to write to, of entries of D dims; changed.
        kv: ``[T, D]``, bfloat16, float32 or float64; rows may lie further apart than D.
        weight: ``[D]``, weight of the norm of kv.
        cos: ``[T, R/2]``, R at most D; see ``dsv4.ops.rope.rope_tables``.
        sin: Like ``cos``.
        slots: ``[T]`` int64 or int32, as for ``write_kv``; negative: skip the token's entry.
        q_eps: Added to the mean square of a head.
        kv_eps: Added to the mean square of an entry.
        backend: Implementation name, see ``dsv4.dispatch``.

    Raises:
        TypeError: if a dtype is none of these, or that of ``weight``, ``cos`` or ``sin`` is not
            floating.
        ValueError: if a shape does not fit, q or the pages' data overlaps itself, q has no unit
            stride along D, or a tensor is on another device.
        IndexError: if a slot lies past the last page (on the CPU; undefined on a GPU).
    """
    op = "head_norm_rope_write_kv"
    _check.tensors(
        op,
        ("q", q, _check.FLOATS, ("T", "h", pages.head_dim)),
        ("kv", kv, _ENTRY_FLOATS, ("T", pages.head_dim)),
        ("slots", slots, _check.INTEGERS, ("T",)),
        ("weight", weight, _check.FLOATS, (pages.head_dim,)),
        ("cos", cos, _check.FLOATS, ("T", "R/2")),
        ("sin", sin, _check.FLOATS, ("T", "R/2")),
        expected_pages(op, "pages", pages),
    )
    for name, tensor in (("q", q), ("pages.data", pages.data)):
        if not tensor.is_contiguous():
            _check.no_overlap(op, name, tensor)
    if 2 * cos.shape[1] > pages.head_dim:
        raise ValueError(
            f"{op}: cos has shape {list(cos.shape)}, wanted [{kv.shape[0]}, R/2] with R <= "
            f"{pages.head_dim} (dims of kv)"
        )
    if not torch.compiler.is_compiling() and q.numel() and q.stride(2) != 1:
        raise ValueError(f"{op}: q has strides {list(q.stride())}, wanted 1 along the heads")
    _head_norm_rope_write_kv(
        HeadNormRopeWriteKvArgs(
            q,
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
            q_eps,
            kv_eps,
        ),
        backend,
    )
