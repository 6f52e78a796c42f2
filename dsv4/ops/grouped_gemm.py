"""GEMM of sorted rows with the weights of their experts, and its fused forms with SwiGLU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dsv4.ops import _check
from dsv4.ops._library import define, define_out
from dsv4.ops._plans import planned
from dsv4.ops.gemm import check_columns, check_options
from dsv4.ops.quantize import positive
from dsv4.quant.formats import LINEAR, NVFP4, SWIZZLED_EXPERTS, QuantizedTensor, expert_tiles

PLAIN = "plain"


class GroupedGemmArgs(NamedTuple):
    """Arguments of ``grouped_gemm``: GEMM of sorted rows with the weights of their experts.

    Attributes:
        x: ``[R, K]`` sorted rows, floating, or their NVFP4 codes ``[R, K/2]`` uint8.
        weight: ``[E, N, K]`` floating, or codes ``[E, N, K/2]``.
        scales: Block scales of codes in the weight's layout, else None.
        global_scale: float32, of each expert's weight ``[E, 1]``, or of each of its parts; or None.
        segments: Rows of each part of a fused weight; empty: one part.
        offsets: int32 ``[E + 1]``: expert e owns the rows ``offsets[e]`` to ``offsets[e + 1]``.
        format: Name of the weight's format, or ``"plain"``.
        layout: Layout of the weight's codes and block scales.
        activation: ``"bf16"`` or ``"nvfp4"``: ``x`` is quantised first.
        input_scale: float32 ``[E]``, static global scales of quantised ``x``, or None.
        x_scales: float8_e4m3fn ``[R, K/16]``, linear block scales where ``x`` is codes, else None.
        row_scale: float32 ``[R]``, global scale of each row of codes, else None.
        out_dtype: Dtype of the result, floating.
        settled: Whether another GEMM already waited for the offsets.
    """

    x: torch.Tensor
    weight: torch.Tensor
    scales: torch.Tensor | None
    global_scale: torch.Tensor | None
    segments: Sequence[int]
    offsets: torch.Tensor
    format: str
    layout: str
    activation: str
    input_scale: torch.Tensor | None
    x_scales: torch.Tensor | None
    row_scale: torch.Tensor | None
    out_dtype: torch.dtype
    settled: bool


class GroupedGemmSwigluArgs(NamedTuple):
    """Arguments of ``grouped_gemm_swiglu``: ``grouped_gemm``, and SwiGLU of the result.

    Attributes:
        x: ``[R, K]`` sorted rows, floating, or their NVFP4 codes ``[R, K/2]`` uint8.
        weight: ``[E, N, K]`` floating, or codes ``[E, N, K/2]``.
        scales: Block scales of codes in the weight's layout, else None.
        global_scale: float32, of each expert's weight ``[E, 1]``, or of each of its parts; or None.
        segments: Rows of each part of a fused weight; empty: one part.
        offsets: int32 ``[E + 1]``: expert e owns the rows ``offsets[e]`` to ``offsets[e + 1]``.
        format: Name of the weight's format, or ``"plain"``.
        layout: Layout of the weight's codes and block scales.
        activation: ``"bf16"`` or ``"nvfp4"``: ``x`` is quantised first.
        input_scale: float32 ``[E]``, static global scales of quantised ``x``, or None.
        x_scales: float8_e4m3fn ``[R, K/16]``, linear block scales where ``x`` is codes, else None.
        row_scale: float32 ``[R]``, global scale of each row of codes, else None.
        limit: Clamp bound above 0, or None for no clamp.
        row_weight: ``[R]`` floating, multiplies the rows of the result; or None.
        out_dtype: Dtype of the result, floating.
    """

    x: torch.Tensor
    weight: torch.Tensor
    scales: torch.Tensor | None
    global_scale: torch.Tensor | None
    segments: Sequence[int]
    offsets: torch.Tensor
    format: str
    layout: str
    activation: str
    input_scale: torch.Tensor | None
    x_scales: torch.Tensor | None
    row_scale: torch.Tensor | None
    limit: float | None
    row_weight: torch.Tensor | None
    out_dtype: torch.dtype


class GroupedGemmSwigluQuantizeArgs(NamedTuple):
    """Arguments of ``grouped_gemm_swiglu_quantize``: ``grouped_gemm_swiglu`` with an NVFP4 result.

    Attributes:
        x: ``[R, K]`` sorted rows, floating, or their NVFP4 codes ``[R, K/2]`` uint8.
        weight: ``[E, N, K]`` floating, or codes ``[E, N, K/2]``.
        scales: Block scales of codes in the weight's layout, else None.
        global_scale: float32, of each expert's weight ``[E, 1]``, or of each of its parts; or None.
        segments: Rows of each part of a fused weight; empty: one part.
        offsets: int32 ``[E + 1]``: expert e owns the rows ``offsets[e]`` to ``offsets[e + 1]``.
        format: Name of the weight's format, or ``"plain"``.
        layout: Layout of the weight's codes and block scales.
        activation: ``"bf16"`` or ``"nvfp4"``: ``x`` is quantised first.
        input_scale: float32 ``[E]``, static global scales of quantised ``x``, or None.
        x_scales: float8_e4m3fn ``[R, K/16]``, linear block scales where ``x`` is codes, else None.
        row_scale: float32 ``[R]``, global scale of each row of codes, else None.
        limit: Clamp bound above 0, or None for no clamp.
        row_weight: ``[R]`` floating, multiplies the rows of the result; or None.
        result_scale: float32 ``[E]``, static global scale of each expert's results.
        scale_layout: Layout of the result's block scales.
    """

    x: torch.Tensor
    weight: torch.Tensor
    scales: torch.Tensor | None
    global_scale: torch.Tensor | None
    segments: Sequence[int]
    offsets: torch.Tensor
    format: str
    layout: str
    activation: str
    input_scale: torch.Tensor | None
    x_scales: torch.Tensor | None
    row_scale: torch.Tensor | None
    limit: float | None
    row_weight: torch.Tensor | None
    result_scale: torch.Tensor
    scale_layout: str


def _fake(args: GroupedGemmArgs) -> torch.Tensor:
    return args.x.new_empty((args.x.shape[0], args.weight.shape[1]), dtype=args.out_dtype)


def _fake_swiglu(args: GroupedGemmSwigluArgs) -> torch.Tensor:
    return args.x.new_empty((args.x.shape[0], args.weight.shape[1] // 2), dtype=args.out_dtype)


def _fake_swiglu_quantize(
    args: GroupedGemmSwigluQuantizeArgs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return empty_codes(args.x, args.weight, args.scale_layout)


def empty_codes(
    x: torch.Tensor, weight: torch.Tensor, scale_layout: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate codes, block scales and rows' scales for ``grouped_gemm_swiglu_quantize``.

    Args:
        x: Sorted rows, ``[R, any]``.
        weight: Weight of the experts, ``[E, 2 I, any]``.
        scale_layout: Layout of the block scales.
    """
    (experts, high, _), rows = weight.shape, x.shape[0]
    columns = high // 2
    shape = [rows, columns // 16]
    if scale_layout == SWIZZLED_EXPERTS:
        shape = [expert_tiles(rows, experts) * 128 * (columns // 16)]
    return (
        x.new_empty((rows, columns // 2), dtype=torch.uint8),
        x.new_empty(shape, dtype=torch.float8_e4m3fn),
        x.new_empty((rows,), dtype=torch.float32),
    )


_grouped_gemm = define("grouped_gemm", GroupedGemmArgs, _fake)
_grouped_gemm_out = define_out("grouped_gemm", GroupedGemmArgs, _fake)


_grouped_gemm_swiglu = define("grouped_gemm_swiglu", GroupedGemmSwigluArgs, _fake_swiglu)
_grouped_gemm_swiglu_out = define_out("grouped_gemm_swiglu", GroupedGemmSwigluArgs, _fake_swiglu)


_grouped_gemm_swiglu_quantize = define(
    "grouped_gemm_swiglu_quantize", GroupedGemmSwigluQuantizeArgs, _fake_swiglu_quantize
)


@planned
def grouped_gemm(
    x: torch.Tensor | QuantizedTensor,
    weight: QuantizedTensor | torch.Tensor,
    offsets: torch.Tensor,
    *,
    activation: str = "bf16",
    input_scale: torch.Tensor | None = None,
    settled: bool = False,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Compute ``out[r] = x[r] @ weight[e].T`` for ``offsets[e] <= r < offsets[e + 1]``.

    Each expert's GEMM has the numerics of ``gemm``. Rows past ``offsets[E]`` give zeros, whatever
    they hold. An expert without rows costs nothing (specification, section 8.2).

    Args:
        x: ``[R, K]``, rows sorted by expert (``moe_permute``). NVFP4 rows are equal to rows that
            the GEMM quantises itself; ``activation`` is ``"bf16"`` then.
        weight: ``[E, N, K]``, quantised or a plain floating tensor.
        offsets: int32 ``[E + 1]`` on the device of ``x``: 0, then non-decreasing, at most R. Its
            values are data: the reference checks them, a kernel need not.
        activation: ``"bf16"`` or ``"nvfp4"``; see ``gemm``.
        input_scale: float32 ``[E]``, one per expert, finite and above 0, or None (dynamic, per
            row); only with ``"nvfp4"``.
        settled: Promises that another GEMM with these offsets was launched between the kernel that
            wrote them and this one: a kernel may then read them, and their experts' weights, while
            that GEMM still runs. The second GEMM of the experts passes True.
        out_dtype: Floating; ``x.dtype`` if None, bfloat16 for NVFP4 rows.
        out: Tensor for the result, of ``out_dtype``, contiguous, at a multiple of 16 bytes, sharing
            no memory with the other tensors; None to allocate it.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[R, N]``; ``out`` if it was given.

    Raises:
        TypeError: if a dtype is not as stated.
        ValueError: if shapes or devices do not fit, offsets are out of order, or ``input_scale`` is
            not finite and above 0 or is given with ``"bf16"``, or ``out`` is not as stated.
    """
    rows, out_dtype = _rows("grouped_gemm", x, activation, out_dtype)
    parts = _checked("grouped_gemm", rows, weight, offsets, activation, input_scale)
    args = GroupedGemmArgs(
        rows.x,
        parts.codes,
        parts.scales,
        parts.global_scale,
        parts.segments,
        offsets,
        parts.format,
        parts.layout,
        activation,
        input_scale,
        rows.scales,
        rows.row_scale,
        out_dtype,
        settled,
    )
    if out is None:
        return _grouped_gemm(args, backend)
    _check.result("grouped_gemm", out, (x.shape[0], parts.codes.shape[1]), out_dtype, rows.x)
    _grouped_gemm_out(args, backend, out)
    return out


@planned
def grouped_gemm_swiglu(
    x: torch.Tensor | QuantizedTensor,
    weight: QuantizedTensor | torch.Tensor,
    offsets: torch.Tensor,
    limit: float | None,
    *,
    row_weight: torch.Tensor | None = None,
    activation: str = "bf16",
    input_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Compute ``swiglu(x[r] @ weight[e].T)``, gate in a weight's even rows, up in odd ones.

    The result is that of ``grouped_gemm`` and ``swiglu`` (specification, section 8.2) without a
    rounding between them: the intermediate result stays float32 (float64 for float64 ``x``).

    Args:
        x: See ``grouped_gemm``.
        weight: ``[E, 2 I, K]``, likewise.
        offsets: Likewise.
        limit: Clamp bound, greater than 0, or None for no clamp.
        row_weight: ``[R]``, floating: multiplies its row before the rounding, as DeepSeek's routing
            weight does. None for no weight.
        activation: See ``grouped_gemm``.
        input_scale: Likewise.
        out_dtype: Likewise.
        out: Likewise.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[R, I]``; ``out`` if it was given.

    Raises:
        TypeError: as ``grouped_gemm``, and if ``row_weight`` is not floating.
        ValueError: as ``grouped_gemm``, and if a weight has an odd number of rows, ``limit`` is not
            above 0, or ``row_weight`` has another shape or device.
    """
    op = "grouped_gemm_swiglu"
    rows, out_dtype = _rows(op, x, activation, out_dtype)
    parts = _checked(op, rows, weight, offsets, activation, input_scale)
    high = parts.codes.shape[1]
    if high % 2:
        raise ValueError(f"{op}: weight has {high} rows, wanted an even number")
    _check_swiglu(op, rows.x, limit, row_weight)
    args = GroupedGemmSwigluArgs(
        rows.x,
        parts.codes,
        parts.scales,
        parts.global_scale,
        parts.segments,
        offsets,
        parts.format,
        parts.layout,
        activation,
        input_scale,
        rows.scales,
        rows.row_scale,
        limit,
        row_weight,
        out_dtype,
    )
    if out is None:
        return _grouped_gemm_swiglu(args, backend)
    _check.result(op, out, (x.shape[0], high // 2), out_dtype, rows.x)
    _grouped_gemm_swiglu_out(args, backend, out)
    return out


@planned
def grouped_gemm_swiglu_quantize(
    x: torch.Tensor | QuantizedTensor,
    weight: QuantizedTensor | torch.Tensor,
    offsets: torch.Tensor,
    limit: float | None,
    result_scale: torch.Tensor,
    *,
    row_weight: torch.Tensor | None = None,
    activation: str = "bf16",
    input_scale: torch.Tensor | None = None,
    scale_layout: str = LINEAR,
    backend: str = "auto",
) -> QuantizedTensor:
    """Compute ``grouped_gemm_swiglu`` in its default dtype and ``quantize`` the result to NVFP4.

    A second GEMM with ``activation="nvfp4"`` and these input scales would quantise its rows to the
    same codes. The bits are those of the two operators of the same implementation, one after the
    other.

    ``grouped_gemm`` takes linear block scales. ``"swizzled_128x4_experts"`` is the layout that
    other grouped GEMMs take: each expert's scales are in the layout of ``swizzle_scales`` from tile
    ``sum(ceil(n / 128) for the n rows of each expert before)`` on, padding is zeros, and there are
    as many tiles as any offsets can need (``dsv4.quant.formats.swizzle_expert_scales``; the inverse
    is ``unswizzle_expert_scales``).

    Args:
        x: See ``grouped_gemm``.
        weight: ``[E, 2 I, K]``, as in ``grouped_gemm_swiglu``; I is a multiple of 16, of 64 for
            ``"swizzled_128x4_experts"``.
        offsets: See ``grouped_gemm``.
        limit: See ``grouped_gemm_swiglu``.
        result_scale: float32 ``[E]``, the static global scale of each expert's results, finite and
            above 0.
        row_weight: See ``grouped_gemm_swiglu``.
        activation: Activation of ``x``, as in ``grouped_gemm``.
        input_scale: Likewise.
        scale_layout: Layout of the block scales, ``"linear"`` or ``"swizzled_128x4_experts"``.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        NVFP4 ``[R, I]`` with a global scale per row, that of its expert. Rows past ``offsets[E]``
        are zeros, of global scale 1.

    Raises:
        TypeError: as ``grouped_gemm_swiglu``, and if ``result_scale`` is not float32.
        ValueError: as ``grouped_gemm_swiglu``, and if a weight's rows are no multiple of 32 (of
            128), ``scale_layout`` is unknown, or ``result_scale`` has another shape or device or is
            not finite and above 0.
    """
    op = "grouped_gemm_swiglu_quantize"
    rows, _ = _rows(op, x, activation, None)
    parts = _checked(op, rows, weight, offsets, activation, input_scale)
    high = parts.codes.shape[1]
    _check.one_of(op, "scale_layout", scale_layout, (LINEAR, SWIZZLED_EXPERTS))
    multiple = 32 if scale_layout == LINEAR else 128
    if high == 0 or high % multiple:
        raise ValueError(f"{op}: weight has {high} rows, wanted a positive multiple of {multiple}")
    _check_swiglu(op, rows.x, limit, row_weight)
    _check.tensors(
        op,
        ("weight", parts.codes, (parts.codes.dtype,), ("E", "N", None)),
        ("result_scale", result_scale, (torch.float32,), ("E",)),
    )
    positive(f"{op}: result_scale", result_scale)
    args = GroupedGemmSwigluQuantizeArgs(
        rows.x,
        parts.codes,
        parts.scales,
        parts.global_scale,
        parts.segments,
        offsets,
        parts.format,
        parts.layout,
        activation,
        input_scale,
        rows.scales,
        rows.row_scale,
        limit,
        row_weight,
        result_scale,
        scale_layout,
    )
    codes, scales, total = _grouped_gemm_swiglu_quantize(args, backend)
    return QuantizedTensor(codes, scales, total, NVFP4, scale_layout)


class _Weight(NamedTuple):
    """A weight in the form that operators take; see ``GroupedGemmArgs``."""

    codes: torch.Tensor
    scales: torch.Tensor | None
    global_scale: torch.Tensor | None
    segments: list[int]
    format: str
    layout: str


class _Rows(NamedTuple):
    """Sorted rows in the form that operators take.

    Attributes:
        x: ``[R, K]``, or NVFP4 codes ``[R, K/2]``.
        scales: Linear block scales of codes, else None.
        row_scale: float32 ``[R]``, the global scale of each row of codes, else None.
    """

    x: torch.Tensor
    scales: torch.Tensor | None = None
    row_scale: torch.Tensor | None = None


def _rows(
    op: str, x: torch.Tensor | QuantizedTensor, activation: str, out_dtype: torch.dtype | None
) -> tuple[_Rows, torch.dtype]:
    """Check the rows and return them with the dtype of the result."""
    if isinstance(x, torch.Tensor):
        check_options(op, activation, out_dtype)
        return _Rows(x), x.dtype if out_dtype is None else out_dtype
    if x.format != NVFP4 or len(x.shape) != 2:
        raise ValueError(f"{op}: x is {x!r}, wanted a matrix in nvfp4")
    if activation != "bf16":
        raise ValueError(f"{op}: x is quantised, but activation is {activation!r}")
    if not torch.compiler.is_compiling():
        x.validate()
    linear = x.with_layout(LINEAR)
    rows = _Rows(linear.codes, linear.scales, linear.row_scale().contiguous())
    check_options(op, activation, out_dtype)
    return rows, torch.bfloat16 if out_dtype is None else out_dtype


def _checked(
    op: str,
    rows: _Rows,
    weight: QuantizedTensor | torch.Tensor,
    offsets: torch.Tensor,
    activation: str,
    input_scale: torch.Tensor | None,
) -> _Weight:
    """Raise unless the operands fit; the weight in parts."""
    x, compiling = rows.x, torch.compiler.is_compiling()
    if isinstance(weight, torch.Tensor) or compiling:
        shape: Sequence[int] = weight.shape
    else:
        shape = weight.valid_shape
    if len(shape) != 3:
        raise ValueError(f"{op}: weight has shape {list(shape)}, wanted [E, N, K]")
    if isinstance(weight, torch.Tensor):
        parts = _Weight(weight, None, None, [], PLAIN, LINEAR)
        dtypes: Sequence[torch.dtype] = _check.FLOATS
    else:
        parts = _Weight(
            weight.codes,
            weight.scales,
            weight.global_scale,
            list(weight.segments),
            weight.format.name,
            weight.layout,
        )
        dtypes = (weight.codes.dtype,)
    x_dtypes = _check.FLOATS if rows.scales is None else (x.dtype,)
    if input_scale is not None and activation != "nvfp4":
        raise ValueError(f"{op}: input_scale is given, but activation is {activation!r}")
    _check.tensors(
        op,
        ("x", x, x_dtypes, ("R", "K")),
        ("weight", parts.codes, dtypes, None),
        ("offsets", offsets, (torch.int32,), (shape[0] + 1,)),
        ("input_scale", input_scale, (torch.float32,), (shape[0],)),
    )
    columns = x.shape[-1] if rows.scales is None else 2 * x.shape[-1]
    if not compiling and (columns != shape[2] or (activation == "nvfp4" and columns % 16)):
        check_columns(op, columns, shape[2], activation)
    if input_scale is not None:
        positive(f"{op}: input_scale", input_scale)
    return parts


def _check_swiglu(
    op: str, x: torch.Tensor, limit: float | None, row_weight: torch.Tensor | None
) -> None:
    if limit is not None and not limit > 0:
        raise ValueError(f"{op}: limit is {limit}, wanted one above 0 or None")
    if row_weight is not None:
        _check.tensors(
            op,
            ("x", x, (x.dtype,), ("R", "K")),
            ("row_weight", row_weight, _check.FLOATS, ("R",)),
        )
