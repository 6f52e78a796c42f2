"""Quantise and dequantise NVFP4, MXFP4 and FP8, by 128x128 blocks or by tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from dsv4.ops import _check
from dsv4.ops._library import define
from dsv4.ops._plans import planned
from dsv4.quant.formats import (
    ALL_FORMATS,
    FP8_BLOCK,
    FP8_TOKEN,
    LINEAR,
    NVFP4,
    SWIZZLED,
    Format,
    QuantizedTensor,
    check_layout,
    check_positive,
    check_scale_layout,
    check_token_columns,
    format_named,
)
from dsv4.quant.scales import swizzled_size

SCALINGS = ("static", "tensor", "token", "weight")


class QuantizeNvfp4Args(NamedTuple):
    """Arguments of ``quantize_nvfp4``: quantisation to NVFP4.

    Attributes:
        x: ``[*batch, N, K]`` floating, K a multiple of 16.
        global_scale: float32 global scale, ``[*batch, 1]`` or ``[*batch, N]``; None: computed.
        scaling: One of ``SCALINGS``.
        layout: Layout of the block scales.
    """

    x: torch.Tensor
    global_scale: torch.Tensor | None
    scaling: str
    layout: str


class QuantizeMxfp4Args(NamedTuple):
    """Arguments of ``quantize_mxfp4``: quantisation to MXFP4.

    Attributes:
        x: ``[*batch, N, K]`` floating, K a multiple of 32.
        layout: Layout of the block scales.
    """

    x: torch.Tensor
    layout: str


class QuantizeFp8BlockArgs(NamedTuple):
    """Arguments of ``quantize_fp8_block``: quantisation to FP8 in 128 x 128 blocks.

    Attributes:
        x: ``[*batch, N, K]`` floating.
        scale_dtype: float8_e8m0fnu or float32.
    """

    x: torch.Tensor
    scale_dtype: torch.dtype


class QuantizeFp8TokenArgs(NamedTuple):
    """Arguments of ``quantize_fp8_token``: quantisation to FP8 by tokens.

    Attributes:
        x: ``[*batch, N, K]`` floating.
        layout: Order of the columns of codes, ``"linear"`` or ``"fragments_16x64"``.
    """

    x: torch.Tensor
    layout: str


class DequantizeArgs(NamedTuple):
    """Arguments of ``dequantize``: dequantisation.

    Attributes:
        codes: ``[*batch, N, K]`` float8_e4m3fn, or ``[*batch, N, K/2]`` uint8.
        scales: Block scales in the layout.
        global_scale: float32 ``[*batch, G]``, or None where the format has none.
        segments: Rows of each part of a fused matrix; empty: one part.
        format: Name of the format.
        layout: Layout of codes and block scales.
        dtype: Dtype of the result, floating.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor | None
    segments: Sequence[int]
    format: str
    layout: str
    dtype: torch.dtype


def _fake_scales(x: torch.Tensor, width: int, layout: str, dtype: torch.dtype) -> torch.Tensor:
    *batch, rows, columns = x.shape
    if layout == SWIZZLED:
        return x.new_empty((*batch, swizzled_size(rows, columns // width)), dtype=dtype)
    return x.new_empty((*batch, rows, columns // width), dtype=dtype)


def _fake_codes(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8)


def _fake_nvfp4(args: QuantizeNvfp4Args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return empty_nvfp4(args.x, args.global_scale, args.scaling, args.layout)


def empty_nvfp4(
    x: torch.Tensor, global_scale: torch.Tensor | None, scaling: str, layout: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate codes, block scales and global scale of ``x`` in NVFP4, uninitialised."""
    scales = _fake_scales(x, 16, layout, torch.float8_e4m3fn)
    if global_scale is not None:
        return _fake_codes(x), scales, torch.empty_like(global_scale)
    count = x.shape[-2] if scaling == "token" else 1
    return _fake_codes(x), scales, x.new_empty((*x.shape[:-2], count), dtype=torch.float32)


def _fake_mxfp4(args: QuantizeMxfp4Args) -> tuple[torch.Tensor, torch.Tensor]:
    return _fake_codes(args.x), _fake_scales(args.x, 32, args.layout, torch.float8_e8m0fnu)


def _fake_fp8_block(args: QuantizeFp8BlockArgs) -> tuple[torch.Tensor, torch.Tensor]:
    codes = args.x.new_empty(args.x.shape, dtype=torch.float8_e4m3fn)
    *batch, rows, columns = args.x.shape
    tiles = (*batch, (rows + 127) // 128, (columns + 127) // 128)
    return codes, args.x.new_empty(tiles, dtype=args.scale_dtype)


def _fake_fp8_token(args: QuantizeFp8TokenArgs) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_fp8_token(args.x, args.x.shape)


def empty_fp8_token(x: torch.Tensor, shape: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate codes and block scales of a matrix in ``"fp8_token"``, uninitialised.

    Args:
        x: Any tensor of the device.
        shape: ``[*batch, N, K]``.
    """
    blocks = (*shape[:-1], (shape[-1] + 127) // 128)
    codes = x.new_empty(tuple(shape), dtype=torch.float8_e4m3fn)
    return codes, x.new_empty(blocks, dtype=torch.float8_e8m0fnu)


def _fake_dequantize(args: DequantizeArgs) -> torch.Tensor:
    packing = 2 if format_named(args.format, ALL_FORMATS).packed else 1
    return args.codes.new_empty(
        (*args.codes.shape[:-1], args.codes.shape[-1] * packing), dtype=args.dtype
    )


_quantize_nvfp4 = define("quantize_nvfp4", QuantizeNvfp4Args, _fake_nvfp4)
_quantize_mxfp4 = define("quantize_mxfp4", QuantizeMxfp4Args, _fake_mxfp4)
_quantize_fp8_block = define("quantize_fp8_block", QuantizeFp8BlockArgs, _fake_fp8_block)
_quantize_fp8_token = define("quantize_fp8_token", QuantizeFp8TokenArgs, _fake_fp8_token)
_dequantize = define("dequantize", DequantizeArgs, _fake_dequantize)


@planned
def quantize(
    x: torch.Tensor,
    format: Format | str = "nvfp4",
    *,
    global_scale: torch.Tensor | float | None = None,
    scaling: str = "tensor",
    layout: str = LINEAR,
    scale_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> QuantizedTensor:
    """Quantise a matrix, or a batch of matrices.

    Everything is computed in float32 (float64 input is rounded to float32 first), so the bits do
    not depend on the device or on how the input dtype holds the same values.

    **NVFP4**, with ``s`` the global scale and ``a = max|x|`` of a block of 16 along K; divisions in
    the order written, each rounded to float32, the rounded ``SF`` used for the codes:

    - activations (``"static"``, ``"tensor"``, ``"token"``; specification, section 11.2):
      ``SF = e4m3(min((a / 6) / s, 448))``. A block whose SF rounds to 0 has codes 0.
    - weights (``"weight"``; specification, section 11.1): ``SF = e4m3(clamp(a / (6 * s), 2^-9,
      448))``, and 1 for a block of zeros.
    - ``code = e2m1(x / (SF * s))``, to nearest even, saturating at 6.

    ``s`` is given (``"static"``, and optionally ``"weight"``), or ``amax / 2688`` of each matrix
    (``"tensor"``, ``"weight"``) or of each row (``"token"``); it is at least 2^-126, and 1 where
    amax is 0. Static scales saturate: magnitudes above ``2688 * s`` are clipped.

    **MXFP4**: blocks of 32, scale ``2 ^ ceil(log2(max(a, 6 * 2^-126) / 6))`` (specification,
    section 11.2).
    **FP8**: blocks of 128 x 128, ragged at the borders, scale ``2 ^ ceil(log2(max(a, 448 * 2^-126)
    / 448))``, or with ``scale_dtype=torch.float32`` ``a / 448`` (at least 2^-126, 1 for a block of
    zeros).
    **FP8 by tokens** (``"fp8_token"``, for activations; specification, section 11.7): 128 columns
    of a row share the scale ``2 ^ ceil(log2(max(a, 1e-4) / 448))``, the last of a row may be fewer;
    ``code = e4m3(x / scale)``, which never saturates.

    Non-finite values: E2M1 has no NaN, so a block of 16 (32) that holds one gets a NaN scale (0x7F;
    E8M0 0xFF) and codes 0, dequantises to NaN, and does not count towards ``amax``. In FP8 the
    element itself becomes NaN. A global scale on another device than the CPU that is not finite
    and above 0 makes every scale NaN; on the CPU it is an error.

    Args:
        x: ``[*batch, N, K]``, bfloat16, float16, float32 or float64. K is a multiple of 16 (NVFP4)
            or 32 (MXFP4). N may be 0.
        format: A ``Format`` or its name, also ``"fp8_token"``.
        global_scale: NVFP4 only: a number, or float32 ``[]``, ``[1]``, ``[*batch, 1]`` or
            ``[*batch, N]``.
        scaling: NVFP4 only: ``"static"``, ``"tensor"``, ``"token"`` or ``"weight"``.
        layout: Layout of the block scales, ``"linear"`` or (4-bit formats) ``"swizzled_128x4"``;
            of ``"fp8_token"`` that of the codes, ``"linear"`` or ``"fragments_16x64"``, whose
            columns are those of weights in that layout, K a multiple of 128.
        scale_dtype: FP8 only: float8_e8m0fnu (the default) or float32.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        The quantised matrix. Its global scale is ``[*batch, 1]``, or ``[*batch, N]`` per token.

    Raises:
        TypeError: if ``x`` is not floating, or ``global_scale`` is not float32.
        ValueError: if K is not a multiple of the block, the global scale is missing, superfluous,
            of another shape, or not finite and above 0, or a name is unknown.
    """
    fmt = format_named(format, ALL_FORMATS)
    _check.floating("quantize", "x", x)
    _check_matrix(x, fmt)
    check_scale_layout(fmt, layout)
    _check.one_of("quantize", "scaling", scaling, SCALINGS)
    if fmt != NVFP4 and global_scale is not None:
        raise ValueError(f"quantize: global_scale is given, but {fmt.name} has none")
    if fmt != FP8_BLOCK and scale_dtype not in (None, *fmt.scale_dtypes):
        raise ValueError(f"quantize: scale_dtype is {scale_dtype}, wanted {fmt.scale_dtypes[0]}")
    if fmt == FP8_BLOCK:
        return _to_fp8_block(x, scale_dtype or fmt.scale_dtypes[0], backend)
    if fmt == FP8_TOKEN:
        check_token_columns(layout, x.shape[-1])
        codes, scales = _quantize_fp8_token(QuantizeFp8TokenArgs(x, layout), backend)
        return QuantizedTensor(codes, scales, None, fmt, layout)
    if fmt == NVFP4:
        scale = given_scale("quantize", x, global_scale, scaling)
        codes, scales, total = _quantize_nvfp4(
            QuantizeNvfp4Args(x, scale, scaling, layout), backend
        )
        return QuantizedTensor(codes, scales, total, fmt, layout)
    codes, scales = _quantize_mxfp4(QuantizeMxfp4Args(x, layout), backend)
    return QuantizedTensor(codes, scales, None, fmt, layout)


def _to_fp8_block(x: torch.Tensor, scale_dtype: torch.dtype, backend: str) -> QuantizedTensor:
    if scale_dtype not in FP8_BLOCK.scale_dtypes:
        raise ValueError(
            f"quantize: scale_dtype is {scale_dtype}, wanted float8_e8m0fnu or float32"
        )
    codes, scales = _quantize_fp8_block(QuantizeFp8BlockArgs(x, scale_dtype), backend)
    return QuantizedTensor(codes, scales, None, FP8_BLOCK)


def _check_matrix(x: torch.Tensor, fmt: Format) -> None:
    if x.dim() < 2:
        raise ValueError(f"quantize: x has shape {list(x.shape)}, wanted [..., N, K]")
    if torch.compiler.is_compiling():
        return
    if x.shape[-1] == 0 or (fmt.packed and x.shape[-1] % fmt.block[1]):
        raise ValueError(
            f"quantize: x has {x.shape[-1]} columns, wanted a positive multiple of "
            f"{fmt.block[1] if fmt.packed else 1} for {fmt.name}"
        )


def given_scale(
    op: str, x: torch.Tensor, scale: torch.Tensor | float | None, scaling: str
) -> torch.Tensor | None:
    """Check the given global scale; return it as float32 ``[*batch, 1]`` or ``[*batch, N]``.

    Args:
        op: Name of the operator, for messages.
        x: ``[*batch, N, any]``.
        scale: The user's argument.
        scaling: One of ``SCALINGS``.

    Raises:
        TypeError: if it is a tensor of another dtype than float32.
        ValueError: if it is missing or superfluous, or its shape or value is wrong.
    """
    if scale is None:
        if scaling == "static":
            raise ValueError(f"{op}: scaling is 'static' and global_scale is None, wanted one")
        return None
    if scaling in ("tensor", "token"):
        raise ValueError(f"{op}: global_scale is given, but scaling {scaling!r} computes it")
    if not isinstance(scale, torch.Tensor):
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"{op}: global_scale is {scale}, wanted a finite value above 0")
        scale = torch.full((1,), scale, dtype=torch.float32, device=x.device)
    _check.dtype(op, "global_scale", scale, torch.float32)
    _check.same_device(op, x=x, global_scale=scale)
    positive(f"{op}: global_scale", scale)
    batch = x.shape[:-2]
    if scale.dim() <= 1 and scale.numel() == 1:
        return scale.reshape(1).expand(*batch, 1)
    if tuple(scale.shape) not in ((*batch, 1), (*batch, x.shape[-2])):
        raise ValueError(
            f"{op}: global_scale has shape {list(scale.shape)}, wanted {[*batch, 1]} or "
            f"{[*batch, x.shape[-2]]}"
        )
    return scale


def positive(name: str, scale: torch.Tensor) -> None:
    """Raise ValueError unless all values are finite and above 0, on the CPU alone.

    Values on other devices are not read, because that would synchronise; an invalid scale gives
    NaN.
    """
    if scale.device.type == "cpu" and not torch.compiler.is_compiling():
        check_positive(name, scale)


def bfloat16_operand(
    x: torch.Tensor, input_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to NVFP4 as the operands of a bfloat16 GEMM (specification, section 11.2).

    Args:
        x: ``[..., K]``.
        input_scale: Global scale ``[1]``, or None for one per row.

    Returns:
        ``code * block scale`` ``[..., K]`` in bfloat16, which is exact, and the contiguous float32
        global scale of every row, ``[...]``.
    """
    flat = x.reshape(-1, x.shape[-1])
    scaling = "token" if input_scale is None else "static"
    q = quantize(flat, NVFP4, global_scale=input_scale, scaling=scaling)
    assert q.global_scale is not None
    row_scale = q.global_scale.expand(flat.shape[0]).reshape(x.shape[:-1]).contiguous()
    return without_global_scale(q, torch.bfloat16).reshape(x.shape), row_scale


def fp8_values(x: torch.Tensor) -> torch.Tensor:
    """Round activations to FP8 by tokens, ``[..., K]`` in bfloat16: the operand of a GEMM.

    bfloat16 holds each value exactly (specification, section 11.7).
    """
    flat = x.reshape(-1, x.shape[-1])
    return dequantize(quantize(flat, FP8_TOKEN), torch.bfloat16).reshape(x.shape)


def fp8_operand(args: Any) -> torch.Tensor:
    """Return ``x`` of a dense GEMM's record as a bfloat16 GEMM multiplies it, ``[..., K]``.

    Codes are dequantised, values are rounded to FP8 if ``activation`` is ``"fp8"``. Both are exact
    in bfloat16.
    """
    x, scales = args.x, args.x_scales
    if scales is None:
        return fp8_values(x) if args.activation == "fp8" else x
    flat = block_values(
        x.reshape(-1, x.shape[-1]),
        scales.reshape(-1, scales.shape[-1]),
        torch.bfloat16,
        args.x_layout,
    )
    return flat.reshape(x.shape)


def block_values(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, layout: str = LINEAR
) -> torch.Tensor:
    """Return ``code * block scale`` of rows, exact in floating dtypes.

    Args:
        codes: NVFP4, uint8, with linear scales, or FP8 by tokens, float8_e4m3fn.
        scales: Their block scales.
        dtype: Dtype of the result.
        layout: Order of the columns of FP8 codes.
    """
    if codes.dtype == FP8_TOKEN.codes_dtype:
        return dequantize(QuantizedTensor(codes, scales, None, FP8_TOKEN, layout), dtype)
    return without_global_scale(QuantizedTensor(codes, scales, None, NVFP4), dtype)


def without_global_scale(q: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``code * block scale`` of NVFP4, ``[*batch, N, K]``, exact in floating dtypes."""
    ones = torch.ones((*q.shape[:-2], 1), dtype=torch.float32, device=q.device)
    return dequantize(replace(q, global_scale=ones, segments=()), dtype)


@planned
def dequantize(
    q: QuantizedTensor, dtype: torch.dtype = torch.float32, *, backend: str = "auto"
) -> torch.Tensor:
    """Return ``(code * block scale) * global scale``, multiplied in that order.

    The first multiplication is exact for the 4-bit formats and for E8M0 scales; so in float32 there
    is one rounding, of the multiplication by the global scale, in float64 none, and in narrower
    dtypes the float32 value is rounded once more.

    Args:
        q: Any format and layout, shape ``[*batch, N, K]``.
        dtype: bfloat16, float16, float32 or float64.
        backend: Implementation name, see ``dsv4.dispatch``.

    Returns:
        ``[*batch, N, K]`` in ``dtype``.

    Raises:
        TypeError: if a dtype is not the format's, or ``dtype`` is not floating.
        ValueError: if a shape does not fit.
    """
    if dtype not in _check.FLOATS:
        raise TypeError(f"dequantize: dtype is {dtype}, wanted a float of 16 bits or more")
    check_layout(q.format, q.layout)
    if not torch.compiler.is_compiling():
        q.validate()
    return _dequantize(
        DequantizeArgs(
            q.codes, q.scales, q.global_scale, list(q.segments), q.format.name, q.layout, dtype
        ),
        backend,
    )
