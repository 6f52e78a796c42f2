"""The two routers: learned top-k with a selection bias, and the fixed table of the hash layers."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4.ops import _check
from dsv4.ops._library import define
from dsv4.ops._plans import planned

Routing = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_ROUTED = (torch.int64,)


class RouteTopkArgs(NamedTuple):
    """Arguments of ``route_topk``: the learned router.

    Attributes:
        x: ``[T, H]`` floating.
        weight: ``[E, H]`` floating.
        bias: ``[E]`` floating, for the selection only; or None.
        top_k: Experts per token.
        scaling_factor: Multiplied into the weights.
        logits_dtype: Dtype of the logits, floating.
        routed: ``[T]`` int64, negative for a token that goes to no expert; None: all go to some.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    top_k: int
    scaling_factor: float
    logits_dtype: torch.dtype
    routed: torch.Tensor | None


class RouteHashArgs(NamedTuple):
    """Arguments of ``route_hash``: the router of the hash layers.

    Attributes:
        x: ``[T, H]`` floating.
        weight: ``[E, H]`` floating.
        tid2eid: ``[V, k]`` int, experts of each token id.
        input_ids: ``[T]`` int, token ids.
        scaling_factor: Multiplied into the weights.
        logits_dtype: Dtype of the logits, floating.
        routed: See ``RouteTopkArgs``.
    """

    x: torch.Tensor
    weight: torch.Tensor
    tid2eid: torch.Tensor
    input_ids: torch.Tensor
    scaling_factor: float
    logits_dtype: torch.dtype
    routed: torch.Tensor | None


def _outputs(
    x: torch.Tensor, weight: torch.Tensor, top_k: int, logits_dtype: torch.dtype
) -> Routing:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    tokens = x.shape[0]
    return (
        x.new_empty([tokens, weight.shape[0]], dtype=logits_dtype),
        x.new_empty([tokens, top_k], dtype=wide),
        x.new_empty([tokens, top_k], dtype=torch.int64),
    )


def _fake_topk(args: RouteTopkArgs) -> Routing:
    return _outputs(args.x, args.weight, args.top_k, args.logits_dtype)


def _fake_hash(args: RouteHashArgs) -> Routing:
    return _outputs(args.x, args.weight, args.tid2eid.shape[1], args.logits_dtype)


_route_topk = define("route_topk", RouteTopkArgs, _fake_topk)
_route_hash = define("route_hash", RouteHashArgs, _fake_hash)


@planned
def route_topk(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    top_k: int,
    scaling_factor: float,
    logits_dtype: torch.dtype = torch.float32,
    routed: torch.Tensor | None = None,
    backend: str = "auto",
) -> Routing:
    """Choose each token's experts by their learned scores (specification, section 8.1).

    ``score = sqrt(softplus(x W^T))``; the ``top_k`` experts of largest ``score + bias`` are chosen,
    and weighted by their score without the bias: ``score / (sum + 1e-20) * scaling_factor``.
    Equal biased scores go to the lowest expert number. Everything after the GEMM is in float32
    (float64 for float64 ``x``).

    A token with a NaN or infinite logit gets NaN weights; its experts are still distinct and valid.
    A token whose scores all underflow gets zero weights.

    Args:
        x: ``[T, H]``, bfloat16, float16, float32 or float64.
        weight: ``[E, H]``, floating.
        bias: ``[E]``, floating, added for the selection only; None for no bias.
        top_k: Experts per token, 1 to E.
        scaling_factor: ``routed_scaling_factor`` of the configuration.
        logits_dtype: Dtype that the operands are cast to and the product is rounded to; float64
            ``x`` is always multiplied in float64.
        routed: ``[T]`` int64: the ids of a token with a negative number are -1, which ``moe_sort``
            leaves out; its weights mean nothing. None: all tokens have experts.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``(logits [T, E] in logits_dtype, weights [T, top_k] float32 (float64 for float64 x),
        ids [T, top_k] int64)``; experts by descending biased score.

    Raises:
        TypeError: if a dtype is not a floating type of at least 16 bits.
        ValueError: if a shape does not fit, ``top_k`` is out of range, or a tensor is on another
            device.
    """
    _check.tensors(
        "route_topk",
        ("x", x, _check.FLOATS, ("T", "H")),
        ("weight", weight, _check.FLOATS, ("E", "H")),
        ("bias", bias, _check.FLOATS, ("E",)),
        ("routed", routed, _ROUTED, ("T",)),
    )
    logits_dtype = _logits_dtype("route_topk", x, logits_dtype)
    experts = weight.shape[0]
    if not 1 <= top_k <= experts:
        raise ValueError(f"route_topk: top_k is {top_k}, wanted 1 to {experts} (the experts)")
    return _route_topk(
        RouteTopkArgs(x, weight, bias, top_k, scaling_factor, logits_dtype, routed), backend
    )


@planned
def route_hash(
    x: torch.Tensor,
    weight: torch.Tensor,
    tid2eid: torch.Tensor,
    input_ids: torch.Tensor | None,
    *,
    scaling_factor: float,
    logits_dtype: torch.dtype = torch.float32,
    routed: torch.Tensor | None = None,
    backend: str = "auto",
) -> Routing:
    """Look up each token's experts by its token id (specification, section 8.1, layers 0 to 2).

    The experts are ``tid2eid[input_ids]``, in the table's order; their weights still come from the
    learned scores, as in ``route_topk``.

    A token id outside the table, or a table entry that is no expert, raises on the CPU. Other
    devices are not checked, because that would wait for the device: such a token gets NaN weights
    and valid expert numbers.

    Args:
        x: ``[T, H]``, bfloat16, float16, float32 or float64.
        weight: ``[E, H]``, floating.
        tid2eid: ``[V, k]``, int32 or int64, expert numbers 0 to E-1.
        input_ids: ``[T]``, int32 or int64, token ids 0 to V-1, also for padding tokens.
        scaling_factor: ``routed_scaling_factor`` of the configuration.
        logits_dtype: See ``route_topk``.
        routed: See there.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        As ``route_topk``, with k experts per token.

    Raises:
        TypeError: if ``x`` or ``weight`` is not floating, or an id is not int32 or int64.
        ValueError: if ``input_ids`` is None, a shape does not fit, a tensor is on another device,
            or (on the CPU) an id is out of range.
    """
    if input_ids is None:
        raise ValueError("route_hash: input_ids is None, wanted [T]: the token ids choose experts")
    _check.tensors(
        "route_hash",
        ("x", x, _check.FLOATS, ("T", "H")),
        ("weight", weight, _check.FLOATS, ("E", "H")),
        ("tid2eid", tid2eid, _check.INTEGERS, ("V", "k")),
        ("input_ids", input_ids, _check.INTEGERS, ("T",)),
        ("routed", routed, _ROUTED, ("T",)),
    )
    logits_dtype = _logits_dtype("route_hash", x, logits_dtype)
    return _route_hash(
        RouteHashArgs(x, weight, tid2eid, input_ids, scaling_factor, logits_dtype, routed), backend
    )


def _logits_dtype(op: str, x: torch.Tensor, logits_dtype: torch.dtype) -> torch.dtype:
    """Check the dtype of the logits and return it."""
    if logits_dtype not in _check.FLOATS:
        raise TypeError(f"{op}: logits_dtype is {logits_dtype}, wanted a floating type")
    return torch.float64 if x.dtype == torch.float64 else logits_dtype


def check_ids(tid2eid: torch.Tensor, input_ids: torch.Tensor, num_experts: int) -> None:
    """Check ids for ``route_hash``'s CPU implementations, which know the values.

    Does nothing on another device.

    Raises:
        ValueError: if a token id is not in the table, or an entry of a token is no expert.
    """
    if input_ids.device.type != "cpu":
        return
    vocabulary = tid2eid.shape[0]
    good = (input_ids >= 0) & (input_ids < vocabulary)
    _raise_unless(good, "input_ids", input_ids, f"token ids from 0 to {vocabulary - 1}")
    ids = tid2eid[input_ids]
    good = ((ids >= 0) & (ids < num_experts)).all(-1)
    _raise_unless(good, "tid2eid", ids, f"expert ids from 0 to {num_experts - 1}")


def _raise_unless(good: torch.Tensor, name: str, values: torch.Tensor, rule: str) -> None:
    if not bool(good.all()):
        row = int((~good).nonzero()[0])
        raise ValueError(
            f"route_hash: {name} of token {row} is {values[row].tolist()}, wanted {rule}"
        )
