"""Projections of a layer's compressor and indexer, whose weights are small and not quantised."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4.ops import _check
from dsv4.ops._library import define
from dsv4.ops._plans import planned


class CompressorProjectionsArgs(NamedTuple):
    """Arguments of ``compressor_projections``.

    Attributes:
        x: ``[T, H]`` floating.
        kv: ``[C, H]`` floating, the compressor's values.
        gate: ``[C, H]`` floating, the compressor's scores.
        index_kv: ``[c, H]`` floating, the values of the indexer's compressor; None without one.
        index_gate: ``[c, H]`` floating, its scores; None without one.
        heads: ``[n, H]`` floating, the weights of the indexer's heads; None without one.
        out_dtype: Dtype of values and scores, floating.
    """

    x: torch.Tensor
    kv: torch.Tensor
    gate: torch.Tensor
    index_kv: torch.Tensor | None
    index_gate: torch.Tensor | None
    heads: torch.Tensor | None
    out_dtype: torch.dtype

    @property
    def pooled(self) -> tuple[torch.Tensor, ...]:
        """Weights of values and scores, in the order of the first result's columns."""
        index = (self.index_kv, self.index_gate)
        return (self.kv, self.gate, *(weight for weight in index if weight is not None))


def _fake(args: CompressorProjectionsArgs) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = args.x.shape[0]
    columns = sum(weight.shape[0] for weight in args.pooled)
    heads = 0 if args.heads is None else args.heads.shape[0]
    return (
        args.x.new_empty((tokens, columns), dtype=args.out_dtype),
        args.x.new_empty((tokens, heads)),
    )


_compressor_projections = define("compressor_projections", CompressorProjectionsArgs, _fake)


@planned
def compressor_projections(
    x: torch.Tensor,
    kv: torch.Tensor,
    gate: torch.Tensor,
    index_kv: torch.Tensor | None = None,
    index_gate: torch.Tensor | None = None,
    heads: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply tokens by all weights of a compressor and an indexer.

    These are projections of the hidden states (specification, sections 5.1 and 6).

    Each result is ``x @ weight.T``, summed in float32 (float64 if a tensor is float64) and rounded
    once. A non-finite value makes its own row non-finite, and no other.

    Args:
        x: ``[T, H]``, bfloat16, float16, float32 or float64.
        kv: ``[C, H]``, floating.
        gate: ``[C, H]``, floating.
        index_kv: ``[c, H]``, floating; None without an indexer, like the next two.
        index_gate: ``[c, H]``, floating.
        heads: ``[n, H]``, floating.
        out_dtype: Dtype of values and scores, floating; ``x.dtype`` if None.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``([T, 2C + 2c] in out_dtype, [T, n] in x.dtype)``: values and scores of the compressor,
        then those of the indexer's, as columns of one tensor, and the weights of the heads. Without
        an indexer c and n are 0.

    Raises:
        TypeError: if a dtype is not floating.
        ValueError: if a shape does not fit, some of the indexer's weights are None and others are
            not, or a tensor is on another device.
    """
    op = "compressor_projections"
    _check.tensors(
        op,
        ("x", x, _check.FLOATS, ("T", "H")),
        ("kv", kv, _check.FLOATS, ("C", "H")),
        ("gate", gate, _check.FLOATS, ("C", "H")),
        ("index_kv", index_kv, _check.FLOATS, ("c", "H")),
        ("index_gate", index_gate, _check.FLOATS, ("c", "H")),
        ("heads", heads, _check.FLOATS, ("n", "H")),
    )
    present = [weight is not None for weight in (index_kv, index_gate, heads)]
    if any(present) and not all(present):
        missing = ("index_kv", "index_gate", "heads")[present.index(False)]
        raise ValueError(f"{op}: {missing} is None, wanted all weights of the indexer or none")
    out_dtype = x.dtype if out_dtype is None else out_dtype
    if out_dtype not in _check.FLOATS:
        raise TypeError(f"{op}: out_dtype is {out_dtype}, wanted a float of 16 bits or more")
    args = CompressorProjectionsArgs(x, kv, gate, index_kv, index_gate, heads, out_dtype)
    return _compressor_projections(args, backend)
