"""Norm, rotation and storage of a pooled window, in both forms of compressors' kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.triton._lib.cache_entries import store_entries
from dsv4.triton._lib.index_keys import store_keys
from dsv4.triton._lib.numerics import narrow, widen
from dsv4.triton._lib.rms import inverse_rms
from dsv4.triton._lib.rotation import rotate


@triton.jit
def norm_and_rotate(
    values, scale, eps, c, s, column, DIM: tl.constexpr, ROTATED: tl.constexpr, DTYPE: tl.constexpr
):
    """Entry ``[1, BLOCK]`` in DTYPE of a pooled row ``values``, of which ROTATED dims turn.

    Args:
        values: float32 ``[1, BLOCK]``, 0 past DIM.
        scale: float32 ``[1, BLOCK]``, weight of the norm.
        eps: Of the norm.
        c: Cosines ``[1, BLOCK // 2]`` of all pairs; 1 of those that do not turn.
        s: Their sines; 0 of those.
        column: ``[1, BLOCK]``.
        DIM: Numbers of an entry.
        ROTATED: How many of them turn, the last.
        DTYPE: Of the entry, to which the row and what is normed are rounded, too.
    """
    values = widen(narrow(values, DTYPE))
    rms = inverse_rms(tl.sum(values * values, 1), DIM, eps)
    normed = widen(narrow(scale * (values * rms[:, None]), DTYPE))
    return narrow(tl.where(column < DIM - ROTATED, normed, rotate(normed, c, s)), DTYPE)


@triton.jit
def store_entry(
    pages,
    where,
    entry,
    DIM: tl.constexpr,
    NOPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    COMPACT: tl.constexpr,
    CONVERT: tl.constexpr,
):
    """Store ``entry [1, BLOCK]`` to slot ``where [1]``; ``pages``: pointer and stride of a page.

    COMPACT: the format of pages that round index keys by themselves, else None.
    """
    data, data_stride = pages
    if COMPACT is not None:
        store_keys(data, data_stride, where, widen(entry), DIM, PAGE_SIZE, COMPACT, CONVERT)
    else:
        store_entries(data, data_stride, where, entry, NOPE, DIM - NOPE, PAGE_SIZE)
