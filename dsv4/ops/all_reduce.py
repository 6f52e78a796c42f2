"""Sums over the ranks of a group: of a sublayer's partial outputs, alone and with what follows."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4.ops import _check
from dsv4.ops._hyper_connection_operands import (
    check_rank,
    empty_pre,
    expected_post,
    expected_pre,
)
from dsv4.ops._library import define


class AllReduceArgs(NamedTuple):
    """Arguments of ``all_reduce``.

    Attributes:
        partial: This rank's part of the sum, floating.
        group: ``group_name`` of a process group; empty: this process alone.
    """

    partial: torch.Tensor
    group: str


class HcReducePostArgs(NamedTuple):
    """Arguments of ``hc_reduce_post``: ``all_reduce``, then ``hc_post``.

    Attributes:
        partial: ``[..., H]`` floating, this rank's part of the output of the sublayer before.
        streams: ``[..., n, H]`` floating.
        post: ``[..., n]`` floating.
        comb: ``[..., n, n]`` floating.
        group: ``group_name`` of a process group; empty: this process alone.
    """

    partial: torch.Tensor
    streams: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    group: str


class HcReducePostPreNormArgs(NamedTuple):
    """Arguments of ``hc_reduce_post_pre_norm``: ``all_reduce``, then ``hc_post_pre_norm``.

    Attributes:
        partial: ``[..., H]`` floating, this rank's part of the output of the sublayer before.
        streams: ``[..., n, H]`` floating.
        post: ``[..., n]`` floating.
        comb: ``[..., n, n]`` floating.
        fn: ``[(2 + n) n, n H]`` floating.
        scale: ``[3]`` floating.
        base: ``[(2 + n) n]`` floating.
        norm_weight: ``[H]`` floating.
        norm_eps: Epsilon of the norm, added to mean squares.
        hc_eps: The Sinkhorn epsilon.
        iterations: Column normalisations, at least 1.
        group: ``group_name`` of a process group; empty: this process alone.
    """

    partial: torch.Tensor
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
    group: str


def _fake(args: AllReduceArgs) -> torch.Tensor:
    return torch.empty_like(args.partial, memory_format=torch.contiguous_format)


def _fake_reduce_post(args: HcReducePostArgs) -> torch.Tensor:
    return torch.empty_like(args.streams, memory_format=torch.contiguous_format)


def _fake_reduce_post_pre_norm(
    args: HcReducePostPreNormArgs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    mixed = torch.empty_like(args.streams, memory_format=torch.contiguous_format)
    return mixed, *empty_pre(args.streams)


_all_reduce = define("all_reduce", AllReduceArgs, _fake)
_hc_reduce_post = define("hc_reduce_post", HcReducePostArgs, _fake_reduce_post)
_hc_reduce_post_pre_norm = define(
    "hc_reduce_post_pre_norm", HcReducePostPreNormArgs, _fake_reduce_post_pre_norm
)


def all_reduce(partial: torch.Tensor, group: str = "", *, backend: str = "auto") -> torch.Tensor:
    """Sum a tensor over the ranks of a group.

    Collective: all ranks call it in the same order with the same shape and dtype. The reference
    adds in float32 (float64 for float64 partial sums) in the order of the ranks and rounds once.

    ====================  ======================  ==============================================
    backend               additions               the same bits on all ranks
    ====================  ======================  ==============================================
    ``push``              float32, rank order     yes: those of the reference
    ``one_shot``          bfloat16, rank order    yes: every addition is rounded to bfloat16
    ``two_shot``          bfloat16, rank order    yes: each element is summed by one rank
    ``nccl``              NCCL's                  yes with one NCCL version and topology on all
                                                  ranks: each element is summed once, then copied
    ``gloo``              float32, rank order     yes: those of the reference
    ``reference``         float32, rank order     yes
    ====================  ======================  ==============================================

    ``multimem`` is refused: NVLink multicast is never used.

    Args:
        partial: This rank's part: bfloat16, float16, float32 or float64, any shape.
        group: ``group_name`` of a process group; empty: this process alone; ``"emulated:4"``: one
            of four ranks that are copies of this process, for measurements.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        The sum, a new contiguous tensor of the shape and dtype of ``partial``.

    Raises:
        TypeError: if the dtype is not a floating type of at least 16 bits.
        ValueError: if no group has that name.
    """
    _check.floating("all_reduce", "partial", partial)
    return _all_reduce(AllReduceArgs(partial, group), backend)


def hc_reduce_post(
    partial: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    *,
    group: str = "",
    backend: str = "auto",
) -> torch.Tensor:
    """Sum a sublayer's partial outputs over ranks, then write them back to the streams.

    The same numbers as ``hc_post(all_reduce(partial, group), ...)``: the sum is rounded to the
    dtype of ``partial`` first.

    Args:
        partial: ``[..., H]``, this rank's part of the output of the sublayer before.
        streams: ``[..., n, H]`` that its ``hc_pre`` saw.
        post: ``[..., n]`` from there.
        comb: ``[..., n, n]`` from there.
        group: See ``all_reduce``.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[..., n, H]`` as ``hc_post``; the same on all ranks if their streams are.

    Raises:
        TypeError: if a dtype is not a floating type of at least 16 bits.
        ValueError: if a shape does not fit, a tensor is on another device, or no group has that
            name.
    """
    op = "hc_reduce_post"
    if streams.ndim < 2:  # while torch.compile traces, too
        check_rank(op, streams)
    _check.tensors(op, *expected_post(partial, streams, post, comb, name="partial"))
    return _hc_reduce_post(HcReducePostArgs(partial, streams, post, comb, group), backend)


def hc_reduce_post_pre_norm(
    partial: torch.Tensor,
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
    group: str = "",
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum a sublayer's partial outputs over ranks, then do what is between two sublayers.

    The same numbers as ``hc_post_pre_norm(all_reduce(partial, group), ...)``: the sum is rounded to
    the dtype of ``partial`` first.

    Args:
        partial: ``[..., H]``, this rank's part of the output of the sublayer before.
        streams: ``[..., n, H]`` that its ``hc_pre`` saw.
        post: ``[..., n]`` from there.
        comb: ``[..., n, n]`` from there.
        fn: ``[(2 + n) n, n H]`` of the next sublayer, like the following arguments.
        scale: ``[3]``.
        base: ``[(2 + n) n]``.
        norm_weight: ``[H]``.
        norm_eps: See ``hc_pre_norm``.
        hc_eps: The Sinkhorn epsilon.
        iterations: Column normalisations in total.
        group: See ``all_reduce``.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``(streams [..., n, H], normed [..., H], post [..., n], comb [..., n, n])``, as
        ``hc_post_pre_norm``; the same on all ranks if their streams and parameters are.

    Raises:
        TypeError: if a dtype is not a floating type of at least 16 bits.
        ValueError: if a shape does not fit, ``iterations`` is below 1, a tensor is on another
            device, or no group has that name.
    """
    op = "hc_reduce_post_pre_norm"
    pre = expected_pre(op, streams, fn, scale, base, iterations, norm_weight)
    _check.tensors(op, *expected_post(partial, streams, post, comb, name="partial"), *pre)
    return _hc_reduce_post_pre_norm(
        HcReducePostPreNormArgs(
            partial,
            streams,
            post,
            comb,
            fn,
            scale,
            base,
            norm_weight,
            norm_eps,
            hc_eps,
            iterations,
            group,
        ),
        backend,
    )
