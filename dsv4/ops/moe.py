"""Rows of the routed experts: sort by expert, gather, and combine back per token.

All operators here use the same order. Slot ``t * k + j`` is the j-th choice of token t;
``order[r]`` is the slot of sorted row r, and ``rows[t, j]`` the sorted row of a slot.
``moe_gather`` makes the sorted rows, the grouped GEMM works on ``offsets[e]:offsets[e + 1]``,
``moe_combine`` brings them back. ``moe_sort`` is the sort and the gather in one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from dsv4.ops import _check
from dsv4.ops._library import define, define_out
from dsv4.ops._plans import planned
from dsv4.ops.quantize import empty_nvfp4, positive
from dsv4.quant.formats import (
    LINEAR,
    NVFP4,
    SWIZZLED_EXPERTS,
    QuantizedTensor,
    check_scale_layout,
    expert_tiles,
    swizzled_size,
)

Sorted = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_INT32 = (torch.int32,)


class MoePermuteArgs(NamedTuple):
    """Arguments of ``moe_permute``: sorting of the chosen experts.

    Attributes:
        ids: ``[T, k]`` int32 or int64.
        num_experts: Number of experts of the whole layer.
        first_expert: First expert held here.
        num_local_experts: Number of experts held here.
    """

    ids: torch.Tensor
    num_experts: int
    first_expert: int
    num_local_experts: int


class MoeGatherArgs(NamedTuple):
    """Arguments of ``moe_gather``: copying of tokens to their sorted rows.

    Attributes:
        x: ``[T, H]`` floating.
        rows: int32 ``[T, k]``, sorted row of each slot.
    """

    x: torch.Tensor
    rows: torch.Tensor


class MoeSortArgs(NamedTuple):
    """Arguments of ``moe_sort``: ``moe_permute`` and ``moe_gather`` in one.

    Attributes:
        x: ``[T, H]`` floating.
        ids: ``[T, k]`` int32 or int64.
        weights: ``[T, k]`` floating.
        num_experts: Number of experts of the whole layer.
        first_expert: First expert held here.
        num_local_experts: Number of experts held here.
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    num_experts: int
    first_expert: int
    num_local_experts: int


class MoeGatherQuantizeArgs(NamedTuple):
    """Arguments of ``moe_gather_quantize``: sorted rows in NVFP4.

    Attributes:
        x: ``[T, H]`` floating.
        rows: int32 ``[T, k]``, sorted row of each slot.
        offsets: int32 ``[E_local + 1]``, first row of each expert.
        input_scale: float32 ``[E_local]``, static global scales; None: one per row.
        layout: Layout of the block scales.
    """

    x: torch.Tensor
    rows: torch.Tensor
    offsets: torch.Tensor
    input_scale: torch.Tensor | None
    layout: str


class MoeCombineArgs(NamedTuple):
    """Arguments of ``moe_combine``: sum of each token's expert rows.

    Attributes:
        y: ``[T k, H]`` floating, in sorted order.
        rows: int32 ``[T, k]``, sorted row of each slot.
        offsets: int32 ``[E_local + 1]``, first row of each expert.
        weights: ``[T, k]`` floating; None: the rows are weighted already.
        shared: ``[T, H]`` floating, the shared expert's result, or None.
        out_dtype: Dtype of the result, floating.
    """

    y: torch.Tensor
    rows: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None
    shared: torch.Tensor | None
    out_dtype: torch.dtype


def _fake_permute(args: MoePermuteArgs) -> Sorted:
    return _empty_permutation(args.ids, args.num_local_experts)


def _empty_permutation(ids: torch.Tensor, experts: int) -> Sorted:
    order = ids.new_empty([ids.shape[0] * ids.shape[1]], dtype=torch.int32)
    offsets = ids.new_empty([experts + 1], dtype=torch.int32)
    return order, offsets, ids.new_empty(ids.shape, dtype=torch.int32)


def _fake_gather(args: MoeGatherArgs) -> torch.Tensor:
    return _empty_rows(args.x, args.rows)


def _empty_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return x.new_empty([rows.shape[0] * rows.shape[1], x.shape[1]])


def _fake_sort(args: MoeSortArgs) -> Rows:
    order, offsets, rows = _empty_permutation(args.ids, args.num_local_experts)
    return _empty_rows(args.x, rows), args.weights.new_empty(order.shape), offsets, rows


def _fake_gather_quantize(
    args: MoeGatherQuantizeArgs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    known = LINEAR if args.layout == SWIZZLED_EXPERTS else args.layout
    gathered = _empty_rows(args.x, args.rows)
    codes, scales, total = empty_nvfp4(gathered, None, "token", known)
    if args.layout == SWIZZLED_EXPERTS:
        tiles = expert_tiles(gathered.shape[0], args.offsets.shape[0] - 1)
        scales = scales.new_empty((swizzled_size(128 * tiles, scales.shape[1]),))
    return codes, scales, total


def _fake_combine(args: MoeCombineArgs) -> torch.Tensor:
    return args.y.new_empty([args.rows.shape[0], args.y.shape[1]], dtype=args.out_dtype)


def _check_permuted(op: str, args: MoeGatherArgs | MoeGatherQuantizeArgs | MoeCombineArgs) -> None:
    _check.within(op, "rows", args.rows, args.rows.numel())


def check_sorted(op: str, args: Any) -> None:
    """Check values of ``rows`` and ``offsets`` of an operator's record, on the CPU alone."""
    _check_permuted(op, args)
    _check.within(op, "offsets", args.offsets, args.rows.numel() + 1)


_moe_permute = define("moe_permute", MoePermuteArgs, _fake_permute)
_moe_gather = define("moe_gather", MoeGatherArgs, _fake_gather, _check_permuted)
_moe_gather_out = define_out("moe_gather", MoeGatherArgs, _fake_gather, _check_permuted)
_moe_sort = define("moe_sort", MoeSortArgs, _fake_sort)
_moe_sort_out = define_out("moe_sort", MoeSortArgs, _fake_sort)
_moe_gather_quantize = define(
    "moe_gather_quantize", MoeGatherQuantizeArgs, _fake_gather_quantize, check_sorted
)
_moe_combine = define("moe_combine", MoeCombineArgs, _fake_combine, check_sorted)


@planned
def moe_permute(
    ids: torch.Tensor,
    num_experts: int,
    *,
    first_expert: int = 0,
    num_local_experts: int | None = None,
    backend: str = "auto",
) -> Sorted:
    """Sort the chosen experts by counting.

    The sort is stable: rows of one expert keep the order of their slots. Slots whose id is no local
    expert (another rank's, or -1 or ``num_experts``, which choose none) come last, after every
    expert, in slot order. A token may choose an expert twice.

    Any other id is an error, which raises on the CPU. Other devices are not checked, because that
    would wait for the device: such a slot chooses no expert, and ``dsv4.debug.count_dropped``
    counts it.

    Args:
        ids: ``[T, k]``, int32 or int64.
        num_experts: Experts of the whole layer, E.
        first_expert: First expert held here.
        num_local_experts: Experts held here; None for all from ``first_expert`` on.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``(order [T k] int32, offsets [num_local_experts + 1] int32, rows [T, k] int32)``: local
        expert e owns the sorted rows ``offsets[e]`` to ``offsets[e + 1]``, and ``offsets[0]`` is 0;
        ``order[r]`` is the slot of sorted row r, and ``rows`` the inverse, the row of each slot.

    Raises:
        TypeError: if ``ids`` is not int32 or int64.
        ValueError: if ``ids`` is not 2-D, has 2^31 slots or more, the local experts are not
            within the layer's, or (on the CPU) an id is out of range.
    """
    _check.tensors("moe_permute", ("ids", ids, _check.INTEGERS, ("T", "k")))
    local = _local_experts("moe_permute", ids, num_experts, first_expert, num_local_experts)
    return _moe_permute(MoePermuteArgs(ids, num_experts, first_expert, local), backend)


def _local_experts(
    op: str, ids: torch.Tensor, num_experts: int, first: int, num_local_experts: int | None
) -> int:
    """Return the number of experts held here; raise unless they and the number of ids fit."""
    local = num_experts - first if num_local_experts is None else num_local_experts
    if first < 0 or local < 1 or first + local > num_experts:
        raise ValueError(
            f"{op}: local experts are {first} to {first + local - 1}, "
            f"wanted at least one, within 0 to {num_experts - 1}"
        )
    if not torch.compiler.is_compiling() and ids.numel() >= 2**31:
        raise ValueError(f"{op}: ids has {ids.numel()} slots, wanted fewer than 2^31")
    return local


def out_of_range(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return which ids are neither an expert's nor -1 or ``num_experts``, bool of their shape."""
    return (ids < -1) | (ids > num_experts)


def check_ids(ids: torch.Tensor, num_experts: int, op: str = "moe_permute") -> None:
    """Check ids for an operator's CPU implementations, which know the values.

    On another device, and while ``torch.compile`` traces, it does nothing: values are not known
    there.

    Raises:
        ValueError: if an id is neither an expert's nor -1 or ``num_experts``.
    """
    if ids.device.type != "cpu" or torch.compiler.is_compiling():
        return
    bad = out_of_range(ids, num_experts)
    if bool(bad.any()):
        token, slot = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{op}: ids[{token}, {slot}] is {int(ids[token, slot])}, wanted an expert, 0 to "
            f"{num_experts - 1}, or -1 or {num_experts} for none"
        )


@planned
def moe_gather(
    x: torch.Tensor,
    rows: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Copy each token to its sorted rows, bit for bit: ``out[rows[t, j]] = x[t]``.

    Args:
        x: ``[T, H]``, bfloat16, float16, float32 or float64.
        rows: ``[T, k]`` int32 from ``moe_permute``: a permutation of the T k rows.
        out: Tensor for the result, contiguous, at a multiple of 16 bytes, sharing no memory with
            the other tensors; None to allocate it.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[T k, H]`` in ``x.dtype``; ``out`` if it was given.

    Raises:
        TypeError: if ``x`` is not floating, ``rows`` is not int32 or ``out`` has another dtype.
        ValueError: if shapes do not fit, tensors are on different devices or ``out`` is not as
            stated.
        IndexError: if one of ``rows`` is no sorted row (on the CPU; undefined on a GPU).
    """
    _check.tensors(
        "moe_gather",
        ("x", x, _check.FLOATS, ("T", "H")),
        ("rows", rows, _INT32, ("T", "k")),
    )
    check_slots("moe_gather", "rows", rows)
    if out is None:
        return _moe_gather(MoeGatherArgs(x, rows), backend)
    _check.result("moe_gather", out, (rows.numel(), x.shape[1]), x.dtype, x)
    _moe_gather_out(MoeGatherArgs(x, rows), backend, out)
    return out


@planned
def moe_sort(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    *,
    first_expert: int = 0,
    num_local_experts: int | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> Rows:
    """Run ``moe_permute`` and ``moe_gather``, and sort the slots' weights, as one operator.

    The bits are those of the operators one after the other.

    Args:
        x: ``[T, H]``, as in ``moe_gather``.
        ids: ``[T, k]``, as in ``moe_permute``.
        weights: ``[T, k]``, bfloat16, float16, float32 or float64.
        num_experts: See ``moe_permute``.
        first_expert: Likewise.
        num_local_experts: Likewise.
        out: Tensor for the sorted rows, as in ``moe_gather``.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``(sorted rows [T k, H], their weights [T k], offsets, rows)``, the last two as of
        ``moe_permute``.

    Raises:
        TypeError: if a dtype does not fit.
        ValueError: as ``moe_permute`` and ``moe_gather``, and if ``weights`` has another shape or
            device.
    """
    op = "moe_sort"
    _check.tensors(
        op,
        ("x", x, _check.FLOATS, ("T", "H")),
        ("ids", ids, _check.INTEGERS, ("T", "k")),
        ("weights", weights, _check.FLOATS, ("T", "k")),
    )
    local = _local_experts(op, ids, num_experts, first_expert, num_local_experts)
    check_slots(op, "ids", ids)
    args = MoeSortArgs(x, ids, weights, num_experts, first_expert, local)
    if out is None:
        return _moe_sort(args, backend)
    _check.result(op, out, (ids.numel(), x.shape[1]), x.dtype, x)
    return (out, *_moe_sort_out(args, backend, out))


@planned
def moe_gather_quantize(
    x: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    *,
    input_scale: torch.Tensor | None = None,
    layout: str = LINEAR,
    backend: str = "auto",
) -> QuantizedTensor:
    """Gather the sorted rows in NVFP4, one global scale per row, for the experts' first GEMM.

    ``quantize(moe_gather(x, rows), "nvfp4", ...)``: with ``scaling="token"``, or with ``"static"``
    and the scale of the expert that owns the row. Rows from ``offsets[-1]`` on, which no local
    expert owns, are zeros: codes 0, block scales 0, global scale 1.

    Args:
        x: ``[T, H]``, bfloat16, float16, float32 or float64; H is a multiple of 16.
        rows: ``[T, k]`` int32 from ``moe_permute``.
        offsets: ``[E_local + 1]`` int32 from ``moe_permute``.
        input_scale: float32 ``[E_local]``, finite and above 0, or None for scales from the data. An
            invalid scale on another device than the CPU makes the block scales of its rows NaN.
        layout: Layout of the block scales, see ``quantize``; or ``"swizzled_128x4_experts"``, as in
            ``grouped_gemm_swiglu_quantize``.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        The matrix ``[T k, H]``; its global scale is ``[T k]``.

    Raises:
        TypeError: if a dtype does not fit.
        ValueError: if a shape or ``layout`` does not fit, a tensor is on another device, or (on the
            CPU) ``input_scale`` is not finite and above 0.
        IndexError: if one of ``rows`` is no sorted row, or one of ``offsets`` is not from 0 to T k
            (on the CPU; undefined on a GPU).
    """
    op = "moe_gather_quantize"
    experts = offsets.shape[0] - 1 if offsets.dim() else 0
    _check.tensors(
        op,
        ("x", x, _check.FLOATS, ("T", "H")),
        ("rows", rows, _INT32, ("T", "k")),
        ("offsets", offsets, _INT32, ("E + 1",)),
        ("input_scale", input_scale, (torch.float32,), (experts,)),
    )
    check_slots(op, "rows", rows)
    check_offsets(op, offsets)
    if layout != SWIZZLED_EXPERTS:
        check_scale_layout(NVFP4, layout)
    if not torch.compiler.is_compiling() and (x.shape[1] == 0 or x.shape[1] % 16):
        raise ValueError(f"{op}: x has {x.shape[1]} columns, wanted a positive multiple of 16")
    if input_scale is not None:
        positive(f"{op}: input_scale", input_scale)
    codes, scales, total = _moe_gather_quantize(
        MoeGatherQuantizeArgs(x, rows, offsets, input_scale, layout), backend
    )
    return QuantizedTensor(codes, scales, total, NVFP4, layout)


@planned
def moe_combine(
    y: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    *,
    shared: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Sum each token's expert rows, then add the shared expert (specification, section 8.2).

    ``out[t] = sum_j weights[t, j] * y[rows[t, j]] + shared[t]``, in float32 (float64 for float64
    ``y``), in slot order j = 0 .. k-1 and the shared expert last: the bits are the same in every
    run, whatever other tokens are in the batch. Sorted rows from ``offsets[-1]`` on belong to no
    local expert and are skipped, whatever they hold, so the results of the ranks add up to the
    whole.

    Args:
        y: ``[T k, H]``, floating, in sorted order.
        rows: ``[T, k]`` int32 from ``moe_permute``.
        offsets: ``[E_local + 1]`` int32 from ``moe_permute``.
        weights: ``[T, k]``, floating; None where the rows are weighted already.
        shared: ``[T, H]``, floating, or None.
        out_dtype: Dtype of the result; None for ``y.dtype``.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[T, H]`` in ``out_dtype``.

    Raises:
        TypeError: if a dtype does not fit.
        ValueError: if a shape does not fit or a tensor is on another device.
        IndexError: if one of ``rows`` is no sorted row, or one of ``offsets`` is not from 0 to T k
            (on the CPU; undefined on a GPU).
    """
    op = "moe_combine"
    _check.tensors(
        op,
        ("rows", rows, _INT32, ("T", "k")),
        ("y", y, _check.FLOATS, (rows.numel(), "H")),
        ("offsets", offsets, _INT32, ("E + 1",)),
        ("weights", weights, _check.FLOATS, ("T", "k")),
        ("shared", shared, _check.FLOATS, ("T", "H")),
    )
    check_slots(op, "rows", rows)
    check_offsets(op, offsets)
    out_dtype = y.dtype if out_dtype is None else out_dtype
    if out_dtype not in _check.FLOATS:
        raise TypeError(f"{op}: out_dtype is {out_dtype}, wanted a floating type")
    return _moe_combine(MoeCombineArgs(y, rows, offsets, weights, shared, out_dtype), backend)


def check_slots(op: str, name: str, slots: torch.Tensor) -> None:
    """Raise ValueError unless each token has at least one slot in ``slots [T, k]``."""
    if not torch.compiler.is_compiling() and slots.shape[1] < 1:
        raise ValueError(f"{op}: {name} has shape {list(slots.shape)}, wanted a slot at least")


def check_offsets(op: str, offsets: torch.Tensor) -> None:
    """Raise ValueError unless ``offsets [E_local + 1]`` are of one expert at least."""
    if not torch.compiler.is_compiling() and offsets.shape[0] < 2:
        raise ValueError(f"{op}: offsets has {offsets.shape[0]} entries, wanted 2 at least")
