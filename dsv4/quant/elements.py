"""E2M1 codes: packing, rounding, and the move from E8M0 to E4M3 block scales.

Written with comparisons and integer arithmetic only, so that every device gives the same bits and
nothing is copied to the device (no lookup table). Specification, section 11.1.
"""

from __future__ import annotations

import torch

# Magnitudes above which (even code below: strictly above) the next code is nearer. At a midpoint
# the even code wins: 0.25 -> 0, 0.75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4.
_STRICT = (0.25, 1.25, 2.5, 5.0)
_INCLUSIVE = (0.75, 1.75, 3.5)
_E4M3_NAN = 0x7F


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 code (ties to even, saturating at 6), one uint8 0..15 per value.

    The sign of zero is kept: -0.0 is code 8. NaN has no code; it becomes 0 or 8, and callers mark
    its block by a NaN scale.
    """
    magnitude = values.abs()
    code = torch.zeros_like(values, dtype=torch.uint8)
    for bound in _STRICT:
        code += (magnitude > bound).to(torch.uint8)
    for bound in _INCLUSIVE:
        code += (magnitude >= bound).to(torch.uint8)
    return code | (torch.signbit(values).to(torch.uint8) << 3)


def decode_e2m1(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Value of E2M1 codes 0..15, exact in every floating dtype; code 8 is -0.0.

    Sign, exponent and mantissa become those of a float16, whose exponents begin 14 lower.
    """
    bits = codes.to(torch.int16) << 12 >> 3 & ~0x7000  # the sign is extended, then alone
    return bits.view(torch.float16).to(dtype) * 2.0**14


def pack(codes: torch.Tensor) -> torch.Tensor:
    """``[..., K]`` codes 0..15 to ``[..., K/2]`` bytes; the low nibble is the even column."""
    pairs = codes.unflatten(-1, (codes.shape[-1] // 2, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """``[..., K/2]`` bytes to ``[..., K]`` codes 0..15, the inverse of ``pack``."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def encode_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Nearest float8_e4m3fn (ties to even), saturating at 448; NaN stays NaN.

    The clamp precedes the cast because the cast of a value past 464 gives NaN in some versions of
    torch and 448 in others.
    """
    return values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def mxfp4_as_nvfp4(
    packed: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, E4M3 scales, global scale and inexact blocks; see ``formats.mxfp4_to_nvfp4``.

    Args:
        packed: uint8 ``[*batch, N, K/2]``.
        scales: float8_e8m0fnu ``[*batch, N, K/32]``, linear.
    """
    exponent = scales.contiguous().view(torch.uint8).to(torch.int32) - 127
    blocks = packed.unflatten(-1, (scales.shape[-1], 16))
    invalid = exponent == 128
    counts = ((blocks & 0x77) != 0).any(-1) & ~invalid
    largest = _largest_exponent(exponent, counts)
    relative = exponent - largest[..., None, None] + 8
    shift = torch.where(counts, (-9 - relative).clamp(0, 24), 0)
    rounded, inexact = packed, torch.zeros_like(counts)
    if bool(shift.any()):
        rounded, inexact = _shifted(packed, shift)
    power = relative.clamp(-9, 8)
    # E4M3 has exponent bits above 3 of the mantissa, and subnormal numbers below 2^-6.
    block_scale = torch.where(power >= -6, (power + 7) << 3, 1 << (power + 9))
    block_scale = torch.where(invalid, _E4M3_NAN, block_scale).to(torch.uint8)
    doubled = block_scale.repeat_interleave(2, -1).view(torch.float8_e4m3fn)
    global_scale = _power_of_two(largest - 8)[..., None]
    return rounded, doubled, global_scale, inexact


def _shifted(packed: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of the values times ``2 ^ -shift`` of their block, and the blocks that were rounded."""
    wide = decode_e2m1(unpack(packed).unflatten(-1, (shift.shape[-1], 32)))
    rounded = encode_e2m1(wide * _power_of_two(-shift)[..., None])
    inexact = (decode_e2m1(rounded) * _power_of_two(shift)[..., None] != wide).any(-1)
    return pack(rounded.flatten(-2)), inexact


def _largest_exponent(exponent: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Largest exponent among the blocks that count, per matrix; 8 where none does."""
    masked = torch.where(counts, exponent, -128).flatten(-2)
    if masked.shape[-1] == 0:
        return masked.new_full(masked.shape[:-1], 8)
    largest = masked.amax(-1)
    return torch.where(largest == -128, 8, largest)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """float32 ``2 ** exponent`` for int32 -149 to 127, exactly (``exp2`` need not be exact)."""
    subnormal = 1 << (exponent + 149).clamp(0, 22)
    return torch.where(exponent >= -126, (exponent + 127) << 23, subnormal).view(torch.float32)
