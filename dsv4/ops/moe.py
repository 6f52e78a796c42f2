"""Rows of the routed experts: sort by expert, gather, and combine back per token.

The three agree on one order. Slot ``t * k + j`` is the j-th choice of token t; ``order[r]`` is the
slot of sorted row r. ``moe_gather`` makes the sorted rows, the grouped GEMM works on
``offsets[e]:offsets[e + 1]``, ``moe_combine`` brings them back.
"""

from __future__ import annotations

import torch

from dsv4.ops import _check
from dsv4.ops._library import define


def _fake_permute(
    ids: torch.Tensor, num_experts: int, first_expert: int, num_local_experts: int, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    order = ids.new_empty([ids.shape[0] * ids.shape[1]], dtype=torch.int32)
    return order, ids.new_empty([num_local_experts + 1], dtype=torch.int32)


def _fake_gather(x: torch.Tensor, order: torch.Tensor, top_k: int, backend: str) -> torch.Tensor:
    return x.new_empty([order.shape[0], x.shape[1]])


def _fake_combine(
    y: torch.Tensor,
    order: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None,
    top_k: int,
    out_dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    return y.new_empty([order.shape[0] // top_k, y.shape[1]], dtype=out_dtype)


_moe_permute = define(
    "moe_permute(Tensor ids, int num_experts, int first_expert, int num_local_experts, "
    "str backend) -> (Tensor, Tensor)",
    _fake_permute,
)
_moe_gather = define(
    "moe_gather(Tensor x, Tensor order, int top_k, str backend) -> Tensor", _fake_gather
)
_moe_combine = define(
    "moe_combine(Tensor y, Tensor order, Tensor offsets, Tensor? weights, Tensor? shared, "
    "int top_k, ScalarType out_dtype, str backend) -> Tensor",
    _fake_combine,
)


def moe_permute(
    ids: torch.Tensor,
    num_experts: int,
    *,
    first_expert: int = 0,
    num_local_experts: int | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Counting sort of the chosen experts.

    Stable: rows of one expert keep the order of their slots. Slots whose id is no local expert
    (another rank's, -1, ``num_experts`` or anything else out of range) go last, behind every
    expert, in slot order. One token may choose an expert twice.

    Args:
        ids: ``[T, k]``, int32 or int64.
        num_experts: Experts of the whole layer, E.
        first_expert: First expert held here.
        num_local_experts: Experts held here; None for all from ``first_expert`` on.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``(order [T k] int32, offsets [num_local_experts + 1] int32)``: local expert e owns the
        sorted rows ``offsets[e]`` to ``offsets[e + 1]``, and ``offsets[0]`` is 0.

    Raises:
        TypeError: if ``ids`` is not int32 or int64.
        ValueError: if ``ids`` is not 2-D, has 2^31 slots or more, or the local experts are not
            within the layer's.
    """
    _check.integer("moe_permute", "ids", ids)
    _check.shape("moe_permute", "ids", ids, [None, None])
    local = num_experts - first_expert if num_local_experts is None else num_local_experts
    if first_expert < 0 or local < 1 or first_expert + local > num_experts:
        raise ValueError(
            f"moe_permute: local experts are {first_expert} to {first_expert + local - 1}, "
            f"wanted at least one, within 0 to {num_experts - 1}"
        )
    if not torch.compiler.is_compiling() and ids.numel() >= 2**31:
        raise ValueError(f"moe_permute: ids has {ids.numel()} slots, wanted fewer than 2^31")
    return _moe_permute(ids, num_experts, first_expert, local, backend)


def moe_gather(
    x: torch.Tensor, order: torch.Tensor, top_k: int, *, backend: str = "auto"
) -> torch.Tensor:
    """Copy each slot's token row into sorted order: ``x[order // top_k]``, bit for bit.

    Args:
        x: ``[T, H]``, bfloat16, float16, float32 or float64.
        order: ``[T top_k]`` int32 from ``moe_permute``.
        top_k: Slots per token.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[T top_k, H]`` in ``x.dtype``.

    Raises:
        TypeError: if ``x`` is not floating or ``order`` is not int32.
        ValueError: if shapes do not fit or tensors are on different devices.
    """
    _check.floating("moe_gather", "x", x)
    _check.shape("moe_gather", "x", x, [None, None])
    _check_top_k("moe_gather", top_k)
    _check_order("moe_gather", order, x.shape[0] * top_k)
    _check.same_device("moe_gather", x=x, order=order)
    return _moe_gather(x, order, top_k, backend)


def moe_combine(
    y: torch.Tensor,
    order: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    *,
    shared: torch.Tensor | None = None,
    top_k: int | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Sum each token's expert rows, weighted, then add the shared expert (section 8.2).

    ``out[t] = sum_j weights[t, j] * y[row of slot t k + j] + shared[t]``, in float32 (float64 for
    float64 ``y``), in slot order j = 0 .. k-1 and the shared expert last: the same bits from run to
    run, whatever other tokens are in the batch. Sorted rows from ``offsets[-1]`` on belong to no
    local expert and are skipped whatever they hold, so the results of the ranks add up to the
    whole.

    Args:
        y: ``[T k, H]``, floating, in sorted order.
        order: ``[T k]`` int32 from ``moe_permute``.
        offsets: ``[E_local + 1]`` int32 from ``moe_permute``.
        weights: ``[T, k]``, floating; None where the rows are weighted already.
        shared: ``[T, H]``, floating, or None.
        top_k: Slots per token, k; needed only where ``weights`` is None.
        out_dtype: Dtype of the result; None for ``y.dtype``.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[T, H]`` in ``out_dtype``.

    Raises:
        TypeError: if a dtype does not fit.
        ValueError: if a shape does not fit, ``top_k`` is missing or contradicts ``weights``, or a
            tensor is on another device.
    """
    _check.floating("moe_combine", "y", y)
    _check.shape("moe_combine", "y", y, [None, None])
    _check_order("moe_combine", order, y.shape[0])
    _check.dtype("moe_combine", "offsets", offsets, torch.int32)
    _check.shape("moe_combine", "offsets", offsets, [None])
    _check.same_device("moe_combine", y=y, order=order, offsets=offsets)
    top_k = _combine_top_k(y, weights, top_k)
    for name, tensor, width in (("weights", weights, top_k), ("shared", shared, y.shape[1])):
        if tensor is not None:
            _check.floating("moe_combine", name, tensor)
            _check.shape("moe_combine", name, tensor, [y.shape[0] // top_k, width])
            _check.same_device("moe_combine", y=y, **{name: tensor})
    out_dtype = y.dtype if out_dtype is None else out_dtype
    if out_dtype not in _check.FLOATS:
        raise TypeError(f"moe_combine: out_dtype is {out_dtype}, wanted a floating type")
    return _moe_combine(y, order, offsets, weights, shared, top_k, out_dtype, backend)


def _check_order(op: str, order: torch.Tensor, rows: int) -> None:
    _check.dtype(op, "order", order, torch.int32)
    _check.shape(op, "order", order, [rows])


def _check_top_k(op: str, top_k: int) -> None:
    if top_k < 1:
        raise ValueError(f"{op}: top_k is {top_k}, wanted at least 1")


def _combine_top_k(y: torch.Tensor, weights: torch.Tensor | None, top_k: int | None) -> int:
    if weights is not None:
        _check.shape("moe_combine", "weights", weights, [None, top_k])
        top_k = weights.shape[1]
    if top_k is None:
        raise ValueError("moe_combine: top_k is None, wanted a number where weights is None")
    _check_top_k("moe_combine", top_k)
    if not torch.compiler.is_compiling() and y.shape[0] % top_k:
        raise ValueError(f"moe_combine: y has {y.shape[0]} rows, wanted a multiple of {top_k}")
    return top_k
