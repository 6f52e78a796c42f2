"""Index keys and queries to their codes and back (specification, section 6), any leading axes."""

from __future__ import annotations

import torch

from dsv4.kv_cache.pages import IndexLayout
from dsv4.ops.quantize import QuantizeMxfp4Args
from dsv4.quant.elements import encode_e4m3
from dsv4.quant.formats import LINEAR, MXFP4
from dsv4.reference._exponent import ceil_log2, power_of_two
from dsv4.reference.quantize import operand, quantize_mxfp4

_LEAST = 1e-4  # the smallest maximum a row of E4M3 is scaled by


def quantize_fp8_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[..., d]`` as float8_e4m3fn, and one float32 power of two per row ``[...]``.

    The smallest under which the row fits. Both are NaN where the row holds a NaN or an Inf.
    """
    wide = x.to(torch.float32)
    amax = wide.abs().amax(-1)
    finite = amax.isfinite()
    exponent = ceil_log2(amax.clamp(_LEAST) / 448)
    inverse = power_of_two(torch.where(finite, -exponent, 0), torch.float32)
    values = (wide * inverse.unsqueeze(-1)).masked_fill(~finite.unsqueeze(-1), float("nan"))
    scale = power_of_two(torch.where(finite, exponent, 0), torch.float32)
    codes = encode_e4m3(values).view(torch.uint8)
    # A cast of NaN may keep its sign; the stored bytes must not depend on it.
    codes = codes.masked_fill(~finite.unsqueeze(-1), 0x7F).view(torch.float8_e4m3fn)
    return codes, scale.masked_fill(~finite, float("nan"))


def decode_fp4_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 ``[..., d]`` of packed MXFP4."""
    return operand(codes, scales, MXFP4.name, LINEAR, torch.float32)


def encode_keys(x: torch.Tensor, layout: IndexLayout) -> torch.Tensor:
    """``[..., d]`` to the bytes of each entry, ``[..., data_bytes + scale_bytes]``."""
    if layout.entry_format == "index_fp8":
        codes, scales = quantize_fp8_rows(x)
        scales = scales.unsqueeze(-1)
    else:
        codes, scales = quantize_mxfp4(QuantizeMxfp4Args(x, LINEAR))
    return torch.cat((codes.view(torch.uint8), scales.contiguous().view(torch.uint8)), -1)


def decode_keys(entries: torch.Tensor, layout: IndexLayout) -> torch.Tensor:
    """Inverse of ``encode_keys``, float32."""
    codes, scales = (
        part.contiguous() for part in entries.split((layout.data_bytes, layout.scale_bytes), -1)
    )
    if layout.entry_format == "index_fp8":
        return codes.view(torch.float8_e4m3fn).to(torch.float32) * scales.view(torch.float32)
    return decode_fp4_rows(codes, scales.view(torch.float8_e8m0fnu))
