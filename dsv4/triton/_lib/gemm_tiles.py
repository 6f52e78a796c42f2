"""Parts that GEMM kernels share, apart from sums: tile order, scales, and non-finite values.

A tile is ``[ROWS, TOKENS]``: rows of the weight by tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.triton._lib.numerics import narrow, widen
from dsv4.triton.swiglu import swiglu_of

# Number of global scales of a weight: none, one, one per segment, or one per row.
NO_SCALE, ONE_SCALE, SEGMENT_SCALES, ROW_SCALES = range(4)
_NONE, _SINGLE = tl.constexpr(NO_SCALE), tl.constexpr(ONE_SCALE)
_SEGMENTS = tl.constexpr(SEGMENT_SCALES)
_BLOCK = tl.constexpr(128)


@triton.jit
def tile_of_program(tiles, token_tiles, TOGETHER: tl.constexpr):
    """Row tile and token tile of this program: TOGETHER token tiles, then the next row tile.

    Programs that run at one time then share both operands in L2.
    """
    number = tl.program_id(0)
    band = number // (TOGETHER * tiles)
    wide = tl.minimum(token_tiles - band * TOGETHER, TOGETHER)
    number -= band * (TOGETHER * tiles)
    return number // wide, band * TOGETHER + number % wide


@triton.jit
def nan_if_not_finite(total, x, token_offset, inside, columns, TOKENS: tl.constexpr):
    """``total [N, T]`` with NaN in the columns whose rows of ``x`` hold a non-finite value.

    ``token_offset [T]``, int64, is the offset of each row. A NaN in x makes every sum NaN. An
    infinity makes sums infinite or NaN. The function therefore reads x again only if a sum is
    infinite, to tell an infinite x from a sum that passed float32's range.
    """
    infinite = (tl.abs(total) == float("inf")).to(tl.int32)
    if tl.max(tl.max(infinite, 1), 0) > 0:
        # Small pieces, because the sums occupy registers.
        BLOCK: tl.constexpr = max(16, min(_BLOCK, 2048 // TOKENS))
        bad = tl.zeros([TOKENS], tl.int32)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = inside[:, None] & (column < columns)[None, :]
            value = tl.load(x + token_offset[:, None] + column[None, :], mask=mask, other=0.0)
            value = widen(value)
            # Neither an infinity nor a NaN is below infinity.
            finite = tl.abs(value) < float("inf")
            bad = tl.maximum(bad, tl.max(tl.where(finite, 0, 1), 1))
        total = tl.where((bad > 0)[None, :], float("nan"), total)
    return total


@triton.jit
def _weight_scaled(total, weight_scale, row, owned, SCALES: tl.constexpr):
    """``total [N, T]`` times the weight's global scale of each row ``row [N]``."""
    global_scale, cut0, cut1, cut2 = weight_scale
    if SCALES == _NONE:
        return total
    elif SCALES == _SINGLE:  # noqa: RET505  (a choice of the compiler)
        return total * tl.load(global_scale)
    else:
        position = row
        if SCALES == _SEGMENTS:
            position = (row >= cut0).to(tl.int32) + (row >= cut1) + (row >= cut2)
        return total * tl.load(global_scale + position, mask=owned, other=0.0)[:, None]


@triton.jit
def store_result(
    total,
    weight_scale,
    matrix,
    tokens,
    token_scale,
    result,
    limit,
    SCALES: tl.constexpr,
    SWIGLU: tl.constexpr,
    CLAMPED: tl.constexpr,
    UNBOUNDED: tl.constexpr,
):
    """Scale sums of a matrix, apply SwiGLU, and store them.

    Args:
        total: The sums ``[ROWS, TOKENS]``.
        weight_scale: The weight's scales, as SCALES says, and the first rows of its second, third
            and fourth segments.
        matrix: First row of the sums in the matrix; rows of the matrix; int64, rows of the weight
            before the matrix, which belong to other groups.
        tokens: ``x``, of which a row is read again if one of its sums is infinite; int64
            ``[TOKENS]``, offset of each token's row of ``x``; columns of ``x``. None if finite
            operands cannot give an infinite sum.
        token_scale: float32, scale of each token at its position; factor of each token's result
            after SwiGLU, likewise. None for ones.
        result: The output; int64 ``[TOKENS]``, position of each token, a row of the output;
            ``[TOKENS]``, whether the token exists.
        limit: Clamp of SwiGLU.
    """
    ROWS: tl.constexpr = total.shape[0]
    TOKENS: tl.constexpr = total.shape[1]
    first, rows, rows_before = matrix
    row_scale, row_weight = token_scale
    out, position, inside = result
    row = first + tl.arange(0, ROWS)
    owned = row < rows
    # SwiGLU gives NaN for a gate or up that is no number, whatever made it.
    if not SWIGLU and tokens is not None:
        x, token_offset, columns = tokens
        total = nan_if_not_finite(total, x, token_offset, inside, columns, TOKENS)
    if row_scale is not None:
        total *= tl.load(row_scale + position, mask=inside, other=0.0)[None, :]
    total = _weight_scaled(total, weight_scale, rows_before + row, owned, SCALES)
    if SWIGLU:
        # Even rows are gates, odd ones ups.
        pairs = tl.permute(tl.reshape(total, (ROWS // 2, 2, TOKENS)), (0, 2, 1))
        gate, up = tl.split(pairs)
        total = swiglu_of(gate, up, limit, CLAMPED, UNBOUNDED)
        if row_weight is not None:
            total *= tl.load(row_weight + position, mask=inside, other=0.0)[None, :]
        row = first // 2 + tl.arange(0, ROWS // 2)
        owned = row < rows // 2
        address = out + (position * (rows // 2))[:, None] + row[None, :]
    else:
        address = out + (position * rows)[:, None] + row[None, :]
    values = tl.trans(narrow(total, out.dtype.element_ty))
    tl.store(address, values, mask=inside[:, None] & owned[None, :])
