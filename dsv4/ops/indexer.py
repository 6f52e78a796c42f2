"""The lightning indexer: which compressed entries a token attends to."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4.kv_cache.pages import FP4_GROUP, PAGE_FORMATS, Pages
from dsv4.ops import _check
from dsv4.ops._library import Symbolic, define
from dsv4.ops._plans import planned
from dsv4.ops.kv_cache import expected_pages
from dsv4.quant.formats import LINEAR, MXFP4, QuantizedTensor

QUERY_FORMATS = ("fp8", "mxfp4")
_ROTATED = (torch.bfloat16, torch.float32, torch.float64)  # dtypes of Hadamard transform and FP4


class IndexerRotateQuantizeArgs(NamedTuple):
    """Arguments of ``indexer_rotate_quantize``: Hadamard transform and rounding to FP4.

    Attributes:
        x: ``[..., d]``, bfloat16, float32 or float64.
    """

    x: torch.Tensor


class IndexerQueriesArgs(NamedTuple):
    """Arguments of ``indexer_queries``: rotation of index queries.

    Attributes:
        q: ``[T, h, d]`` floating.
        cos: ``[T, R/2]``, floating, see ``rope_tables``.
        sin: Like ``cos``.
        rotate_quantize: Whether Hadamard transform and rounding to FP4 follow.
    """

    q: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    rotate_quantize: bool


class QuantizeIndexQueriesArgs(NamedTuple):
    """Arguments of ``quantize_index_queries``: index queries in 8 or 4 bits.

    Attributes:
        q: ``[T, h, d]`` floating.
        cos: ``[T, R/2]``, floating, see ``rope_tables``.
        sin: Like ``cos``.
        weights: ``[T, h]`` floating, weights of the heads.
        rotate: Whether the Hadamard transform is applied.
        query_format: ``"fp8"`` or ``"mxfp4"``.
        weight_scale: Multiplied into the weights.
    """

    q: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    weights: torch.Tensor
    rotate: bool
    query_format: str
    weight_scale: float


class IndexerSelectArgs(NamedTuple):
    """Arguments of ``indexer_select``: top-k selection of index keys.

    Attributes:
        q: ``[T, h, d]`` floating or float8_e4m3fn, or MXFP4 codes ``[T, h, d/2]`` uint8.
        weights: ``[T, h]`` floating.
        data: ``[pages, ...]``, the pages' storage.
        page_size: Entries of a page.
        entry_format: Format of the pages, see ``dsv4.kv_cache.pages``.
        rope_dim: Trailing dims that ``"fp8"`` entries keep in bfloat16.
        page_table: ``[S, P]`` int: page of the entries ``p * page_size`` and on.
        sequence_of_token: ``[T]`` int, rows of the table.
        visible: ``[T]`` int: entries ``0 .. visible - 1`` may be chosen.
        top_k: Entries per token at most.
        query_scales: float8_e8m0fnu ``[T, h, d/32]`` of MXFP4 queries, else None.
        slots: Whether the result is slots, not entry numbers.
    """

    q: torch.Tensor
    weights: torch.Tensor
    data: torch.Tensor
    page_size: int
    entry_format: str
    rope_dim: int
    page_table: torch.Tensor
    sequence_of_token: torch.Tensor
    visible: torch.Tensor
    top_k: Symbolic
    query_scales: torch.Tensor | None
    slots: bool


def _rotate_fake(args: IndexerRotateQuantizeArgs) -> torch.Tensor:
    return torch.empty_like(args.x, memory_format=torch.contiguous_format)


def _queries_fake(args: IndexerQueriesArgs) -> torch.Tensor:
    return torch.empty_like(args.q, memory_format=torch.contiguous_format)


def _quantize_fake(
    args: QuantizeIndexQueriesArgs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, heads, d = args.q.shape
    wide = torch.float64 if args.weights.dtype == torch.float64 else torch.float32
    folded = args.weights.new_empty((tokens, heads), dtype=wide)
    if args.query_format == "mxfp4":
        codes = args.q.new_empty((tokens, heads, d // 2), dtype=torch.uint8)
    else:
        codes = args.q.new_empty((tokens, heads, d), dtype=torch.float8_e4m3fn)
    groups = d // FP4_GROUP if args.query_format == "mxfp4" else 0
    return codes, args.q.new_empty((tokens, heads, groups), dtype=torch.float8_e8m0fnu), folded


def _select_fake(args: IndexerSelectArgs) -> torch.Tensor:
    k = torch.sym_min(args.top_k, args.page_table.shape[1] * args.page_size)
    return args.q.new_empty((args.q.shape[0], k), dtype=torch.int64)


def _check_pages_of_rows(op: str, args: IndexerSelectArgs) -> None:
    _check.below(op, "sequence_of_token", args.sequence_of_token, args.page_table.shape[0])
    _check.below(op, "page_table", args.page_table, args.data.shape[0])


_indexer_rotate_quantize = define(
    "indexer_rotate_quantize", IndexerRotateQuantizeArgs, _rotate_fake
)
_indexer_queries = define("indexer_queries", IndexerQueriesArgs, _queries_fake)
_quantize_index_queries = define("quantize_index_queries", QuantizeIndexQueriesArgs, _quantize_fake)
_indexer_select = define("indexer_select", IndexerSelectArgs, _select_fake, _check_pages_of_rows)


@planned
def indexer_rotate_quantize(x: torch.Tensor, *, backend: str = "auto") -> torch.Tensor:
    """Apply the Hadamard transform, then round to FP4 (specification, section 6, step 3).

    The transform is Sylvester's matrix times ``d^-0.5``, so it is orthonormal and its own inverse:
    applied to queries and keys alike it leaves their products unchanged, and only spreads
    outliers. Its result is rounded to ``x.dtype``, then quantised and dequantised: E2M1 codes in
    groups of 32 with the scale ``2^ceil(log2(max(amax, 6 * 2^-126) / 6))``, which bfloat16 holds
    exactly. Computed in float32, or float64 for float64 input. A NaN or Inf makes its whole last
    axis NaN.

    Args:
        x: ``[..., d]`` queries or keys after RoPE, bfloat16, float32 or float64.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[..., d]`` in ``x.dtype``, contiguous.

    Raises:
        TypeError: if ``x`` has another dtype.
        ValueError: if ``x`` has no axis, or d is not a power of two, or below 32.
    """
    _check.tensors("indexer_rotate_quantize", ("x", x, _ROTATED, ("...", "d")))
    _check_power("indexer_rotate_quantize", "x", x.shape[-1])
    return _indexer_rotate_quantize(IndexerRotateQuantizeArgs(x), backend)


@planned
def indexer_queries(
    q: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    rotate_quantize: bool,
    backend: str = "auto",
) -> torch.Tensor:
    """Rotate and round index queries (specification, section 6, steps 1 and 3).

    This is ``rope`` on the last R dims, rounded to ``q.dtype``, followed by
    ``indexer_rotate_quantize`` if ``rotate_quantize`` is set. The result has the bits of the two
    operators called one after the other.

    Args:
        q: ``[T, h, d]``, d even; float16 only without ``rotate_quantize``.
        cos: ``[T, R/2]`` with ``R <= d``, one row for all heads of a token.
        sin: Like ``cos``.
        rotate_quantize: Whether the Hadamard transform and FP4 rounding follow.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[T, h, d]`` in ``q.dtype``, contiguous.

    Raises:
        TypeError: if a dtype is not a floating type of at least 16 bits, or ``q`` is float16 and
            ``rotate_quantize`` is set.
        ValueError: if a shape differs, d is odd, or with ``rotate_quantize`` is not a power of two
            of at least 32, or the tensors are on different devices.
    """
    _check.tensors("indexer_queries", *_expected_queries(q, cos, sin, rotate_quantize))
    _check_dims("indexer_queries", q, cos, rotate_quantize)
    return _indexer_queries(IndexerQueriesArgs(q, cos, sin, rotate_quantize), backend)


@planned
def quantize_index_queries(
    q: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weights: torch.Tensor,
    *,
    rotate: bool,
    query_format: str,
    weight_scale: float = 1.0,
    backend: str = "auto",
) -> tuple[torch.Tensor | QuantizedTensor, torch.Tensor]:
    """Quantise index queries to 8 or 4 bits, and scale their weights (specification, section 6).

    The steps are ``rope`` on the last R dims, then, with ``rotate``, the Hadamard transform, each
    rounded to ``q.dtype``, then rounding to codes. ``"fp8"``: E4M3 with one scale ``2 ^
    ceil(log2(max(amax, 1e-4) / 448))`` per token and head, which is multiplied into the weight,
    because ``w * relu(s q . k) = w s * relu(q . k)``. ``"mxfp4"``: MXFP4 as ``quantize`` makes it;
    its scales stay with the codes. The values are then those of ``indexer_queries`` with
    ``rotate_quantize``.

    A head with a NaN or an Inf has NaN codes and a NaN weight, or NaN scales.

    Args:
        q: ``[T, h, d]``, d even; float16 only without ``rotate``.
        cos: ``[T, R/2]`` with ``R <= d``, one row for all heads of a token.
        sin: Like ``cos``.
        weights: ``[T, h]``, weights of the heads.
        rotate: Whether the Hadamard transform is applied; it must be the same for the keys.
        query_format: ``"fp8"`` or ``"mxfp4"``, whatever the format of the keys.
        weight_scale: Factor on the weights: ``d^-0.5 * h^-0.5`` unless they include it.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``(queries, weights)`` for ``indexer_select``: queries ``[T, h, d]`` in float8_e4m3fn, or
        as a linear MXFP4 matrix; weights ``[T, h]`` in float32 (float64 if they were).

    Raises:
        TypeError: if a dtype is not a floating type of at least 16 bits, or ``q`` is float16 and
            ``rotate`` is set.
        ValueError: if a shape differs, d is odd, with ``rotate`` not a power of two of at least
            32 or for ``"mxfp4"`` no multiple of 32, the format is neither, or the tensors are on
            different devices.
    """
    op = "quantize_index_queries"
    _check.one_of(op, "query_format", query_format, QUERY_FORMATS)
    _check.tensors(
        op,
        *_expected_queries(q, cos, sin, rotate),
        ("weights", weights, _check.FLOATS, ("T", "h")),
    )
    _check_dims(op, q, cos, rotate)
    if query_format == "mxfp4" and q.shape[-1] % FP4_GROUP:
        raise ValueError(f"{op}: q has {q.shape[-1]} dims, wanted a multiple of {FP4_GROUP}")
    codes, scales, folded = _quantize_index_queries(
        QuantizeIndexQueriesArgs(q, cos, sin, weights, rotate, query_format, weight_scale), backend
    )
    if query_format == "fp8":
        return codes, folded
    return QuantizedTensor(codes, scales, None, MXFP4), folded


def _expected_queries(
    q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotate: bool
) -> tuple[_check.Expected, ...]:
    """Return what ``_check.tensors`` is to check of queries and tables."""
    return (
        ("q", q, _ROTATED if rotate else _check.FLOATS, ("T", "h", "d")),
        ("cos", cos, _check.FLOATS, ("T", "R/2")),
        ("sin", sin, _check.FLOATS, ("T", "R/2")),
    )


def _check_dims(op: str, q: torch.Tensor, cos: torch.Tensor, rotate: bool) -> None:
    d = q.shape[-1]
    if d % 2 or 2 * cos.shape[-1] > d:
        raise ValueError(
            f"{op}: q has {d} dims and cos {cos.shape[-1]}, wanted an even number and at most "
            "half of it"
        )
    if rotate:
        _check_power(op, "q", d)


def _check_power(op: str, name: str, d: int) -> None:
    if d < 32 or d & (d - 1):
        raise ValueError(f"{op}: last axis of {name} is {d}, wanted a power of two >= 32")


@planned
def indexer_select(
    q: torch.Tensor | QuantizedTensor,
    weights: torch.Tensor,
    keys: Pages,
    page_table: torch.Tensor,
    sequence_of_token: torch.Tensor,
    visible: torch.Tensor,
    *,
    top_k: int,
    slots: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """Select the ``top_k`` visible entries with the highest scores.

    ``score_c = sum_h weights_h * relu(q_h . key_c)`` in float32, float64 for float64 input
    (specification, section 6, step 5).
    The selection is exact for the computed scores: of equal scores the lower entry comes first. A
    NaN score counts as the highest, so that a NaN reaches the attention of its own token; ids are
    in range whatever the input holds. ``visible`` is read on the device, so a captured graph may
    later run with more visible entries. Queries and keys in 8 or 4 bits stand for their values,
    whose products are exact.

    Args:
        q: ``[T, h, d]``, floating, or the result of ``quantize_index_queries``.
        weights: ``[T, h]``, already scaled by ``d^-0.5 * h^-0.5`` and by the scales of FP8 queries.
        keys: Pages of key entries of d dims, of any format.
        page_table: ``[S, P]`` int: page ``c // page_size`` of a sequence holds its entry c. Pages
            without a visible entry may have the number of any page, or -1.
        sequence_of_token: ``[T]`` int, row of the table; negative ones mean row 0.
        visible: ``[T]`` int: entries ``0 .. visible - 1`` may be chosen.
        top_k: Number of entries to select.
        slots: Whether to return slots in place of entry numbers, as ``entry_slots`` of the table
            does: attention's entries lie in the same slots of their own pages.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[T, min(top_k, P * page_size)]`` int64: entry numbers within the sequence, ascending,
        then -1 where fewer are visible. With ``slots``, slots in the order of the entries; -1 for a
        token of a negative sequence, too, and negative where there is no page.

    Raises:
        TypeError: if a dtype is none of these.
        ValueError: if a shape or a format differs, the tensors are on different devices,
            ``top_k < 1``, or there are tokens and the table has no rows.
        IndexError: if a sequence is no row of the table, or a page of the table lies past the last
            (on the CPU; undefined on a GPU).
    """
    op = "indexer_select"
    pages = expected_pages(op, "keys", keys, PAGE_FORMATS)
    q, scales, expected = _parts(op, q, keys.head_dim)
    _check.tensors(
        op,
        *expected,
        ("weights", weights, _check.FLOATS, ("T", "h")),
        pages,
        ("page_table", page_table, _check.INTEGERS, ("S", "P")),
        ("sequence_of_token", sequence_of_token, _check.INTEGERS, ("T",)),
        ("visible", visible, _check.INTEGERS, ("T",)),
    )
    if not torch.compiler.is_compiling() and top_k < 1:
        raise ValueError(f"{op}: top_k is {top_k}, wanted >= 1")
    if not torch.compiler.is_compiling() and q.shape[0] and not page_table.shape[0]:
        raise ValueError(
            f"{op}: page_table has shape {list(page_table.shape)}, wanted a row at least for "
            f"{q.shape[0]} tokens"
        )
    return _indexer_select(
        IndexerSelectArgs(
            q,
            weights,
            keys.data,
            keys.page_size,
            keys.entry_format,
            keys.rope_dim,
            page_table,
            sequence_of_token,
            visible,
            top_k,
            scales,
            slots,
        ),
        backend,
    )


def _parts(
    op: str, q: torch.Tensor | QuantizedTensor, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor | None, tuple[_check.Expected, ...]]:
    """Return the queries or their codes, the codes' scales, and what to check of both."""
    if isinstance(q, torch.Tensor):
        dtypes = (*_check.FLOATS, torch.float8_e4m3fn)
        return q, None, (("q", q, dtypes, ("T", "h", head_dim)),)
    if q.format != MXFP4 or q.layout != LINEAR:
        raise ValueError(
            f"{op}: q is a {q.layout} {q.format.name} matrix, wanted a {LINEAR} {MXFP4.name} one"
        )
    expected: tuple[_check.Expected, ...] = (
        ("q.codes", q.codes, (MXFP4.codes_dtype,), ("T", "h", head_dim // 2)),
        ("q.scales", q.scales, MXFP4.scale_dtypes, ("T", "h", head_dim // FP4_GROUP)),
    )
    return q.codes, q.scales, expected
