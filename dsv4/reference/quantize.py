"""Reference implementation of ``dsv4.ops.quantize``.

One definition of every rounding, the same on every device.

Divisions are by tensors on the input's device: torch divides a CUDA tensor by a Python number by
multiplying with its reciprocal, which rounds differently from the CPU's division.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dsv4.ops.quantize import (
    DequantizeArgs,
    QuantizeFp8BlockArgs,
    QuantizeFp8TokenArgs,
    QuantizeMxfp4Args,
    QuantizeNvfp4Args,
)
from dsv4.quant import formats
from dsv4.quant.elements import decode_e2m1, encode_e2m1, encode_e4m3, pack, unpack
from dsv4.quant.formats import ALL_FORMATS, FP8_TOKEN, NVFP4
from dsv4.quant.fragments import fragment_columns, linear_columns
from dsv4.quant.scales import e8m0_to_float, scales_to_float, swizzle_scales, unswizzle_scales
from dsv4.reference import fragments

_E4M3_NAN = 0x7F
_SMALLEST_NORMAL = 2.0**-126
_LEAST_AMAX = 1e-4  # of a token's block, as in DeepSeek's code


def _constant(value: float, like: torch.Tensor) -> torch.Tensor:
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _blocks(x: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks ``[..., Kb, width]``, whether each is finite, and its amax (0 where it is not)."""
    blocks = x.to(torch.float32).contiguous().unflatten(-1, (x.shape[-1] // width, width))
    finite = torch.isfinite(blocks).all(-1)
    return blocks, finite, torch.where(finite, blocks.abs().amax(-1), 0.0)


def dynamic_global_scale(amax: torch.Tensor) -> torch.Tensor:
    """``amax / 2688``: at least the smallest normal number, and 1 where amax is 0."""
    scale = (amax / _constant(2688.0, amax)).clamp(min=_SMALLEST_NORMAL)
    return torch.where(amax == 0, 1.0, scale)


def _global_scale(amax: torch.Tensor, fixed: torch.Tensor | None, scaling: str) -> torch.Tensor:
    """float32 ``[*batch, G]`` from the block maxima ``[*batch, N, Kb]``, or the one given."""
    if fixed is not None:
        return fixed.clone()
    if scaling == "token":
        return dynamic_global_scale(amax.amax(-1))
    if amax.shape[-2] == 0:
        return torch.ones((*amax.shape[:-2], 1), dtype=torch.float32, device=amax.device)
    return dynamic_global_scale(amax.amax((-2, -1)))[..., None]


def _block_scale(amax: torch.Tensor, row: torch.Tensor, scaling: str) -> torch.Tensor:
    """float8_e4m3fn block scales; ``row`` is the global scale ``[*batch, N, 1]``."""
    six = _constant(6.0, amax)
    if scaling == "weight":
        ratio = (amax / (six * row)).clamp(2.0**-9, 448.0)
        return encode_e4m3(torch.where(amax == 0, 1.0, ratio))
    return encode_e4m3((amax / six) / row)


def quantize_nvfp4(args: QuantizeNvfp4Args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.quantize.quantize``."""
    global_scale = args.global_scale
    blocks, finite, amax = _blocks(args.x, 16)
    global_scale = _global_scale(amax, global_scale, args.scaling)
    row = global_scale.expand(args.x.shape[:-1])[..., None]
    usable = finite & torch.isfinite(row) & (row > 0)
    scale = _block_scale(amax, row, args.scaling)
    product = scale.to(torch.float32) * row
    codes = encode_e2m1(blocks / product[..., None])
    codes = torch.where((usable & (product > 0))[..., None], codes, 0)
    bits = torch.where(usable, scale.view(torch.uint8), _E4M3_NAN).view(torch.float8_e4m3fn)
    if args.layout == formats.SWIZZLED:
        bits = swizzle_scales(bits)
    return pack(codes.flatten(-2)), bits, global_scale


def _power_of_two_scale(
    amax: torch.Tensor, element_max: float, least: float | None = None
) -> torch.Tensor:
    """E8M0 bytes (int32) of ``2 ** ceil(log2(max(amax, least) / element_max))``.

    ``least`` is ``element_max * 2^-126`` unless given.
    """
    least = element_max * _SMALLEST_NORMAL if least is None else least
    ratio = amax.clamp(min=least) / _constant(element_max, amax)
    bits = ratio.view(torch.int32)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)


def quantize_mxfp4(args: QuantizeMxfp4Args) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.quantize.quantize``."""
    blocks, finite, amax = _blocks(args.x, 32)
    byte = _power_of_two_scale(amax, 6.0)
    scale = e8m0_to_float(formats.e8m0_from_bytes(byte))
    codes = torch.where(finite[..., None], encode_e2m1(blocks / scale[..., None]), 0)
    scales = formats.e8m0_from_bytes(torch.where(finite, byte, 255))
    if args.layout == formats.SWIZZLED:
        scales = swizzle_scales(scales)
    return pack(codes.flatten(-2)), scales


def quantize_fp8_block(args: QuantizeFp8BlockArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.quantize.quantize``."""
    *batch, rows, columns = args.x.shape
    wide = args.x.to(torch.float32)
    padded = F.pad(wide, (0, -columns % 128, 0, -rows % 128))
    tiles = padded.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128)) if rows else None
    if tiles is None:
        empty = torch.empty(
            (*batch, 0, -(-columns // 128)), dtype=torch.uint8, device=args.x.device
        )
        scales = empty.view(torch.float8_e8m0fnu)
        return encode_e4m3(wide), scales if args.scale_dtype != torch.float32 else empty.float()
    amax = torch.where(torch.isfinite(tiles), tiles.abs(), 0.0).amax((-3, -1))
    if args.scale_dtype == torch.float32:
        scales = (amax / _constant(448.0, amax)).clamp(min=_SMALLEST_NORMAL)
        scales = torch.where(amax == 0, 1.0, scales)
    else:
        scales = formats.e8m0_from_bytes(_power_of_two_scale(amax, 448.0))
    expanded = _expand_tiles(scales_to_float(scales), rows, columns)
    values = torch.where(torch.isfinite(wide), wide / expanded, torch.nan)
    return encode_e4m3(values), scales


def quantize_fp8_token(args: QuantizeFp8TokenArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``dsv4.ops.quantize.quantize``."""
    columns = args.x.shape[-1]
    wide = args.x.to(torch.float32)
    padded = F.pad(wide, (0, -columns % 128))
    blocks = padded.unflatten(-1, (padded.shape[-1] // 128, 128))
    amax = torch.where(torch.isfinite(blocks), blocks.abs(), 0.0).amax(-1)
    scales = formats.e8m0_from_bytes(_power_of_two_scale(amax, 448.0, _LEAST_AMAX))
    values = torch.where(
        torch.isfinite(blocks), blocks / e8m0_to_float(scales)[..., None], torch.nan
    )
    codes = encode_e4m3(values.flatten(-2)[..., :columns].contiguous())
    return codes if args.layout == formats.LINEAR else fragment_columns(codes), scales


def _expand_tiles(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """``[..., ceil(N/128), ceil(K/128)]`` to one scale per element, ``[..., N, K]``."""
    return _expand_row(scales.repeat_interleave(128, -2)[..., :rows, :], columns)


def _expand_row(scales: torch.Tensor, columns: int) -> torch.Tensor:
    """``[..., ceil(K/128)]`` to one scale per column, ``[..., K]``."""
    return scales.repeat_interleave(128, -1)[..., :columns]


def operand(
    codes: torch.Tensor, scales: torch.Tensor, format: str, layout: str, dtype: torch.dtype
) -> torch.Tensor:
    """``code * block scale`` in ``dtype`` (float32 or float64), without the global scale.

    Exact for every format but FP8 with float32 scales, where float32 rounds once.
    """
    description = ALL_FORMATS[format]
    if description == FP8_TOKEN:
        columns = codes.shape[-1]
        codes = codes if layout == formats.LINEAR else linear_columns(codes)
        return codes.to(dtype) * _expand_row(scales_to_float(scales), columns).to(dtype)
    if not description.packed:
        rows, columns = codes.shape[-2:]
        return codes.to(dtype) * _expand_tiles(scales_to_float(scales), rows, columns).to(dtype)
    width = description.block[1]
    if layout == formats.FRAGMENTS:
        codes, scales = fragments.unpack(codes, scales, False)
        scales = scales.view(torch.float8_e4m3fn)
    values = decode_e2m1(unpack(codes), dtype)
    if layout == formats.SWIZZLED:
        scales = unswizzle_scales(scales, codes.shape[-2], values.shape[-1] // width)
    blocks = values.unflatten(-1, (values.shape[-1] // width, width))
    return (blocks * scales_to_float(scales).to(dtype)[..., None]).flatten(-2)


def code_values(
    codes: torch.Tensor, scales: torch.Tensor, layout: str, out_dtype: torch.dtype
) -> torch.Tensor:
    """``code * block scale`` of activations, NVFP4 or FP8 by tokens: the input of a GEMM.

    In bfloat16, which is exact; in float64 for a float64 result, so that sums are, too.
    """
    dtype = torch.float64 if out_dtype == torch.float64 else torch.bfloat16
    compute = torch.promote_types(dtype, torch.float32)
    name = (NVFP4 if codes.dtype == torch.uint8 else FP8_TOKEN).name
    return operand(codes, scales, name, layout, compute).to(dtype)


def dequantize(args: DequantizeArgs) -> torch.Tensor:
    """See ``dsv4.ops.quantize.dequantize``."""
    compute = torch.float64 if args.dtype == torch.float64 else torch.float32
    values = operand(args.codes, args.scales, args.format, args.layout, compute)
    if args.global_scale is not None:
        row = formats.expand_segments(args.global_scale, args.segments, args.codes.shape[-2])
        values = values * row.to(compute)[..., None]
    return values.to(args.dtype)


def fp8_rounded(x: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
    """Activations ``x [R, K]`` rounded to FP8 by tokens, in ``compute``."""
    codes, scales = quantize_fp8_token(QuantizeFp8TokenArgs(x, formats.LINEAR))
    return operand(codes, scales, FP8_TOKEN.name, formats.LINEAR, compute)


def fake_quantized(
    x: torch.Tensor, input_scale: torch.Tensor | None, compute: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """NVFP4 activations ``x [R, K]`` as ``code * block scale`` and the global scale of every row.

    Static with ``input_scale`` (``[1]`` or ``[R]``), else one dynamic global scale per row.
    """
    scaling = "token" if input_scale is None else "static"
    codes, scales, global_scale = quantize_nvfp4(
        QuantizeNvfp4Args(x, input_scale, scaling, formats.LINEAR)
    )
    values = operand(codes, scales, NVFP4.name, formats.LINEAR, compute)
    return values, global_scale.expand(x.shape[0]).to(compute)
