"""Sum of NVFP4 weights times NVFP4 activations by the block-scaled tensor cores of 12.0 and 12.1.

``tl.dot_scaled`` becomes ``mma.sync.m16n8k64`` with ``kind::mxf4nvf4.block_scale.scale_vec::4X``:
codes and block scales are its operands, and nothing is dequantised. Codes lie row by row, two in a
byte, as in a checkpoint; block scales lie row by row too, or are swizzled.

Three properties of Triton shape this code. The instruction multiplies 64 columns; a narrower tile
does not compile (triton-lang/triton#11776). Codes are packed along the columns, because with other
packing Triton 3.8.0 was wrong (#11733). Triton's interpreter reads E4M3 scales as E8M0, so the
interpreted form decodes both operands itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.triton._lib.numerics import INTERPRETED, e4m3_value

_FIRST_STEP = tl.constexpr(2.0**126)  # of a code's bits, shifted to a float32's, it makes the code


@triton.jit
def _code_value(code):
    """Value of E2M1 codes in the low four bits of an int32; higher bits do not count."""
    value = ((code & 7) << 22).to(tl.float32, bitcast=True) * _FIRST_STEP
    return tl.where((code & 8) != 0, -value, value)


@triton.jit
def _values(codes, scales):
    """float32 ``code * block scale`` of bytes ``codes [R, K/2]`` and ``scales [R, K/16]``."""
    ROWS: tl.constexpr = codes.shape[0]
    BLOCKS: tl.constexpr = scales.shape[1]
    both = codes.to(tl.int32)
    values = tl.reshape(tl.join(_code_value(both), _code_value(both >> 4)), (ROWS, BLOCKS, 16))
    return tl.reshape(values * e4m3_value(scales)[:, :, None], (ROWS, 16 * BLOCKS))


@triton.jit
def _scaled_dot(weight, weight_scales, x, x_scales, total):
    """``total [N, T]`` plus the products of bytes ``[N, K/2]``, ``[N, K/16]`` and of x likewise."""
    if INTERPRETED:
        values = tl.trans(_values(x, x_scales))
        return tl.dot(_values(weight, weight_scales), values, total, input_precision="ieee")
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        return tl.dot_scaled(
            weight,
            weight_scales.to(tl.float8e4nv, bitcast=True),
            "e2m1",
            tl.trans(x),
            x_scales.to(tl.float8e4nv, bitcast=True),
            "e2m1",
            total,
        )


@triton.jit
def scale_offset(row, block, k_tiles, SWIZZLED: tl.constexpr):
    """Offset of the scale of block ``block [1, B]`` of each row ``[R, 1]``; 4 blocks a tile."""
    if SWIZZLED:
        line = row % 32 * 16 + row // 32 % 4 * 4
        return (row // 128 * k_tiles + block // 4) * 512 + line + block % 4
    return row * (k_tiles * 4) + block


@triton.jit
def block_scaled_sum(
    weight,
    x,
    row,
    token,
    k_tiles,
    SWIZZLED: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """float32 sums ``[N, T]`` of rows of a weight and of tokens.

    Args:
        weight: Pointers to the matrix's codes and block scales, bytes.
        x: Pointers to the tokens' codes and linear block scales, bytes.
        row: int64 ``[N]``, rows of the weight.
        token: int64 ``[T]``, rows of x.
        k_tiles: Columns by 64.
        SWIZZLED: Whether the weight's block scales are swizzled, else linear.
        COLUMNS: Columns of a step, 64 or a multiple of it that divides the columns.
        STAGES: Pipeline stages.
    """
    codes, scales = weight
    x_codes, x_scales = x
    TILES: tl.constexpr = COLUMNS // 64
    byte = tl.arange(0, COLUMNS // 2)[None, :]
    block = tl.arange(0, COLUMNS // 16)[None, :]
    code_addresses = codes + row[:, None] * (k_tiles * 32) + byte
    scale_addresses = scales + scale_offset(row[:, None], block, k_tiles, SWIZZLED)
    x_addresses = x_codes + token[:, None] * (k_tiles * 32) + byte
    x_scale_addresses = x_scales + scale_offset(token[:, None], block, k_tiles, False)
    STEP: tl.constexpr = 512 if SWIZZLED else 4
    total = tl.zeros((row.shape[0], token.shape[0]), tl.float32)
    for k in tl.range(0, k_tiles, TILES, num_stages=STAGES):
        total = _scaled_dot(
            tl.load(code_addresses + k * 32),
            tl.load(scale_addresses + k * STEP),
            tl.load(x_addresses + k * 32),
            tl.load(x_scale_addresses + k * 4),
            total,
        )
    return total
