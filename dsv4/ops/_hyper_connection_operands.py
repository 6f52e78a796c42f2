"""Checks of the operands of hyper-connections, and their results without contents."""

from __future__ import annotations

import torch

from dsv4.ops import _check

Pre = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def empty_pre(streams: torch.Tensor) -> Pre:
    """Allocate the results of ``hc_pre``, uninitialised."""
    *lead, n, hidden = streams.shape
    wide = torch.float64 if streams.dtype == torch.float64 else torch.float32
    return (
        streams.new_empty([*lead, hidden]),
        streams.new_empty([*lead, n], dtype=wide),
        streams.new_empty([*lead, n, n], dtype=wide),
    )


def expected_pre(
    op: str,
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    iterations: int,
    norm_weight: torch.Tensor | None = None,
) -> tuple[_check.Expected, ...]:
    """Return what ``_check.tensors`` is to check of the arguments that collapse streams."""
    n = check_rank(op, streams)
    if iterations < 1:
        raise ValueError(f"{op}: iterations is {iterations}, wanted at least 1")
    rows = (2 + n) * n
    return (
        ("streams", streams, _check.FLOATS, ("...", "n", "H")),
        ("fn", fn, _check.FLOATS, (rows, n * streams.shape[-1])),
        ("scale", scale, _check.FLOATS, (3,)),
        ("base", base, _check.FLOATS, (rows,)),
        ("norm_weight", norm_weight, _check.FLOATS, ("H",)),
    )


def expected_post(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    name: str = "y",
) -> tuple[_check.Expected, ...]:
    """Return what ``_check.tensors`` is to check of the arguments that write back.

    ``name`` is that of the argument ``y``.
    """
    return (
        ("streams", streams, _check.FLOATS, ("...", "n", "H")),
        (name, y, _check.FLOATS, ("...", "H")),
        ("post", post, _check.FLOATS, ("...", "n")),
        ("comb", comb, _check.FLOATS, ("...", "n", "n")),
    )


def check_rank(op: str, streams: torch.Tensor) -> int:
    """Check that streams have two axes or more; return n."""
    if streams.ndim < 2:
        raise ValueError(f"{op}: streams has shape {list(streams.shape)}, wanted [..., n, H]")
    return streams.shape[-2]
