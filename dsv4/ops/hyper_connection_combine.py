"""Hyper-connections that add up the routed experts' rows themselves, behind an expert block."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4.ops import _check
from dsv4.ops._hyper_connection_operands import check_rank, empty_pre, expected_pre
from dsv4.ops._library import define
from dsv4.ops._plans import planned
from dsv4.ops.moe import check_offsets, check_slots, check_sorted

PostPre = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class HcCombinePostArgs(NamedTuple):
    """Arguments of ``hc_combine_post``: ``moe_combine``, then ``hc_post``.

    Attributes:
        y: ``[T k, H]`` floating, in sorted order.
        rows: int32 ``[T, k]``, sorted row of each slot.
        offsets: int32 ``[E_local + 1]``, first row of each expert.
        weights: ``[T, k]`` floating; None: the rows are weighted already.
        shared: ``[T, H]`` floating, the shared expert's result, or None.
        streams: ``[..., n, H]`` floating, of T tokens.
        post: ``[..., n]`` floating.
        comb: ``[..., n, n]`` floating.
    """

    y: torch.Tensor
    rows: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None
    shared: torch.Tensor | None
    streams: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


class HcCombinePostPreNormArgs(NamedTuple):
    """Arguments of ``hc_combine_post_pre_norm``: ``moe_combine``, then ``hc_post_pre_norm``.

    Attributes:
        y: ``[T k, H]`` floating, in sorted order.
        rows: int32 ``[T, k]``, sorted row of each slot.
        offsets: int32 ``[E_local + 1]``, first row of each expert.
        weights: ``[T, k]`` floating; None: the rows are weighted already.
        shared: ``[T, H]`` floating, the shared expert's result, or None.
        streams: ``[..., n, H]`` floating, of T tokens.
        post: ``[..., n]`` floating.
        comb: ``[..., n, n]`` floating.
        fn: ``[(2 + n) n, n H]`` floating.
        scale: ``[3]`` floating.
        base: ``[(2 + n) n]`` floating.
        norm_weight: ``[H]`` floating.
        norm_eps: Epsilon of the norm, added to mean squares.
        hc_eps: The Sinkhorn epsilon.
        iterations: Column normalisations, at least 1.
    """

    y: torch.Tensor
    rows: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None
    shared: torch.Tensor | None
    streams: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    fn: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor
    norm_weight: torch.Tensor
    norm_eps: float
    hc_eps: float
    iterations: int


def _fake_post(args: HcCombinePostArgs) -> torch.Tensor:
    return torch.empty_like(args.streams, memory_format=torch.contiguous_format)


def _fake_post_pre_norm(args: HcCombinePostPreNormArgs) -> PostPre:
    mixed = torch.empty_like(args.streams, memory_format=torch.contiguous_format)
    return mixed, *empty_pre(args.streams)


_hc_combine_post = define("hc_combine_post", HcCombinePostArgs, _fake_post, check_sorted)
_hc_combine_post_pre_norm = define(
    "hc_combine_post_pre_norm", HcCombinePostPreNormArgs, _fake_post_pre_norm, check_sorted
)


@planned
def hc_combine_post(
    y: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """Run ``moe_combine``, whose result has the dtype of ``y``, and ``hc_post`` with that result.

    The bits are those of the operators one after the other.

    Args:
        y: ``[T k, H]``, see ``moe_combine``, also for the following arguments.
        rows: ``[T, k]`` int32.
        offsets: ``[E_local + 1]`` int32.
        weights: ``[T, k]``, or None.
        shared: ``[T, H]``, or None.
        streams: ``[..., n, H]`` of T tokens, see ``hc_post``, also for the following arguments.
        post: ``[..., n]``.
        comb: ``[..., n, n]``.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[..., n, H]`` in ``streams.dtype``, contiguous.

    Raises:
        TypeError: if a dtype does not fit.
        ValueError: if a shape does not fit or a tensor is on another device.
        IndexError: as ``moe_combine``.
    """
    op = "hc_combine_post"
    summed = _expected_combined(y, rows, offsets, weights, shared)
    _check.tensors(op, *summed, *_expected_streams(op, streams, post, comb))
    _check_tokens(op, rows, offsets, streams)
    args = HcCombinePostArgs(y, rows, offsets, weights, shared, streams, post, comb)
    return _hc_combine_post(args, backend)


@planned
def hc_combine_post_pre_norm(
    y: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    backend: str = "auto",
) -> PostPre:
    """Run ``moe_combine``, whose result has the dtype of ``y``, and ``hc_post_pre_norm`` with it.

    The bits are those of the operators one after the other.

    Args:
        y: ``[T k, H]``, see ``moe_combine``, also for the following arguments.
        rows: ``[T, k]`` int32.
        offsets: ``[E_local + 1]`` int32.
        weights: ``[T, k]``, or None.
        shared: ``[T, H]``, or None.
        streams: ``[..., n, H]`` of T tokens, see ``hc_post_pre_norm``, also for the following
            arguments.
        post: ``[..., n]``.
        comb: ``[..., n, n]``.
        fn: ``[(2 + n) n, n H]``.
        scale: ``[3]``.
        base: ``[(2 + n) n]``.
        norm_weight: ``[H]``.
        norm_eps: See ``hc_pre_norm``.
        hc_eps: The Sinkhorn epsilon.
        iterations: Column normalisations in total.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``(streams [..., n, H], normed [..., H], post [..., n], comb [..., n, n])``, all new.

    Raises:
        TypeError: if a dtype does not fit.
        ValueError: if a shape does not fit, ``iterations`` is below 1, or a tensor is on another
            device.
        IndexError: as ``moe_combine``.
    """
    op = "hc_combine_post_pre_norm"
    summed = _expected_combined(y, rows, offsets, weights, shared)
    back = _expected_streams(op, streams, post, comb)
    pre = expected_pre(op, streams, fn, scale, base, iterations, norm_weight)
    _check.tensors(op, *summed, *back, *pre)
    _check_tokens(op, rows, offsets, streams)
    return _hc_combine_post_pre_norm(
        HcCombinePostPreNormArgs(
            *(y, rows, offsets, weights, shared, streams, post, comb),
            *(fn, scale, base, norm_weight, norm_eps, hc_eps, iterations),
        ),
        backend,
    )


def _expected_combined(
    y: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None,
) -> tuple[_check.Expected, ...]:
    """Return what ``_check.tensors`` is to check of the arguments of ``moe_combine``."""
    return (
        ("rows", rows, (torch.int32,), ("T", "k")),
        ("y", y, _check.FLOATS, (rows.numel(), "H")),
        ("offsets", offsets, (torch.int32,), ("E + 1",)),
        ("weights", weights, _check.FLOATS, ("T", "k")),
        ("shared", shared, _check.FLOATS, ("T", "H")),
    )


def _expected_streams(
    op: str, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> tuple[_check.Expected, ...]:
    """Return what ``_check.tensors`` is to check of streams and their coefficients."""
    check_rank(op, streams)
    return (
        ("streams", streams, _check.FLOATS, ("...", "n", "H")),
        ("post", post, _check.FLOATS, ("...", "n")),
        ("comb", comb, _check.FLOATS, ("...", "n", "n")),
    )


def _check_tokens(
    op: str, rows: torch.Tensor, offsets: torch.Tensor, streams: torch.Tensor
) -> None:
    """Raise ValueError unless rows are of as many tokens as streams, and there are some."""
    check_slots(op, "rows", rows)
    check_offsets(op, offsets)
    if torch.compiler.is_compiling():
        return
    tokens = streams.shape[:-2].numel()
    if rows.shape[0] != tokens:
        raise ValueError(
            f"{op}: rows has shape {list(rows.shape)}, wanted [{tokens}, k]: "
            f"streams has shape {list(streams.shape)}"
        )
