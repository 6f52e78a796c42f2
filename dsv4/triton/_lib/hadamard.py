"""The indexer's Hadamard transform and FP4 rounding, for a block of rows held in registers.

Bit for bit what ``dsv4.reference.indexer`` computes: float32 additions in the order of its
butterflies, one rounding to the dtype of the input, then E2M1 codes in groups of 32.

Rows of bfloat16 that are loaded 16 bytes at a time come as a tuple of tiles ``[ROWS, WIDTH]``,
neighbours in the row. With tiles of 32 columns a thread has 8 of each tile, so that of the 7 steps
of 128 dims 3 pair columns of a thread, 2 those of its neighbours (a shuffle each) and 2 the tiles.
A tile as wide as the row has more threads to it.

All others, as ``*_row``, are one tile of which threads may have any columns. In tiles they must not
come: with 4 columns to a thread Triton (3.6) spreads the lanes of a group, to pair 8 columns, and
its ``tl.max`` exchanges with others than these.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.triton._lib.numerics import INTERPRETED, narrow, power_of_two, widen
from dsv4.triton._lib.nvfp4 import largest, narrowed

GROUP = tl.constexpr(32)
_VECTOR = tl.constexpr(8)  # columns of a thread: 16 bytes of bfloat16, one access
_MOST_STEPS = tl.constexpr(16)
_FLOOR = tl.constexpr(0x01C00000)  # bits of 6 * 2^-126, the least magnitude that sets a scale
_NAN = tl.constexpr(0x7FC0)  # bfloat16


@triton.jit
def _within(x, LOW: tl.constexpr):
    """The butterfly of columns LOW apart, of one thread."""
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    parts = tl.reshape(x, [ROWS, WIDTH // (2 * LOW), 2, LOW])
    a, b = tl.split(tl.permute(parts, (0, 1, 3, 2)))
    parts = tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2))
    return tl.reshape(parts, [ROWS, WIDTH])


@triton.jit
def _across(x, STEP: tl.constexpr):
    """The butterfly of threads STEP apart: the product with -1 is exact, the sum rounds."""
    ROWS: tl.constexpr = x.shape[0]
    VECTORS: tl.constexpr = x.shape[1] // _VECTOR
    parts = tl.reshape(x, [ROWS, VECTORS, _VECTOR])
    vector = tl.arange(0, VECTORS)[None, :, None]
    other = tl.gather(parts, tl.broadcast_to(vector ^ STEP, parts.shape), 1)
    sign = tl.broadcast_to(tl.where((vector & STEP) == 0, 1.0, -1.0), parts.shape)
    return tl.reshape(tl.fma(parts, sign, other), x.shape)


@triton.jit
def hadamard(tiles, TILES: tl.constexpr):
    """Sylvester's matrix times ``D ** -0.5``, of TILES float32 tiles, along all their columns.

    As in the reference, neighbouring columns are added and subtracted first.
    """
    WIDTH: tl.constexpr = tiles[0].shape[1]
    done = ()
    for tile in tl.static_range(TILES):
        x = _within(_within(_within(tiles[tile], 1), 2), 4)
        for step in tl.static_range(_MOST_STEPS):
            if (_VECTOR << step) < WIDTH:
                x = _across(x, 1 << step)
        done += (x,)  # type: ignore[assignment]
    for step in tl.static_range(_MOST_STEPS):
        if (1 << step) < TILES:
            made = ()
            for tile in tl.static_range(TILES):
                pair = (done[tile & ~(1 << step)], done[tile | (1 << step)])  # type: ignore[misc]
                if tile & (1 << step):
                    made += (pair[0] - pair[1],)  # type: ignore[assignment]
                else:
                    made += (pair[0] + pair[1],)  # type: ignore[assignment]
            done = made
    made = ()
    for tile in tl.static_range(TILES):
        made += (done[tile] * ((TILES * WIDTH) ** -0.5),)  # type: ignore[misc, assignment]
    return made


@triton.jit
def fp4_exponents(peak):
    """Scale exponents ``ceil(log2(max(peak, 6 * 2^-126) / 6))`` of largest magnitudes, float32.

    Returns ``(exponent, finite)``; the exponent is 0 where the peak is NaN or Inf. 6 is 1.5 * 2^2,
    so the exponent rises by one where the mantissa exceeds 1.5.
    """
    finite = peak < float("inf")
    bits = tl.maximum(peak.to(tl.int32, bitcast=True), _FLOOR)
    return tl.where(finite, ((bits + 0x3FFFFF) >> 23) - 129, 0), finite


@triton.jit
def round_e2m1(x):
    """Round to the nearest E2M1, ties to the even code; ``|x| <= 6``. The sign of zero is kept.

    Adding 2^22, 2^23 or 2^24 leaves multiples of 0.5, 1 or 2 in float32.
    """
    magnitude = tl.abs(x)
    large = tl.where(magnitude < 2, 4194304.0, tl.where(magnitude < 4, 8388608.0, 16777216.0))
    rounded = (magnitude + large) - large
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


# The same for words of two bfloat16 values $1, scaled by $2 and back by $3: 64 times the power of
# two below a magnitude (1 at least), added and subtracted, leaves multiples of half that power.
_WORDS_BEFORE = """{ .reg .b32 x, a, power, signs, one, up, down;
    mov.b32 signs, 0x80008000; mov.b32 one, 0x3F803F80;
    mov.b32 up, 0x42804280; mov.b32 down, 0xC280C280;
    fma.rn.bf16x2 x, $1, $2, signs;
    """
_WORDS_AFTER = """ and.b32 power, power, 0xFF80FF80;
    fma.rn.bf16x2 a, power, up, x; fma.rn.bf16x2 a, power, down, a;
    lop3.b32 a, a, x, signs, 0xF8;
    fma.rn.bf16x2 $0, a, $3, signs; }"""
_ROUNDED_WORDS = tl.constexpr(
    _WORDS_BEFORE + "max.xorsign.abs.bf16x2 power, x, one;" + _WORDS_AFTER
)
# Compute capability 8.0 has no xorsign: take the maximum of the magnitude, then the sign of x.
_ROUNDED_WORDS_OF_SM80 = tl.constexpr(
    _WORDS_BEFORE
    + "lop3.b32 a, x, signs, 0, 0x30; max.bf16x2 power, a, one; "
    + "lop3.b32 power, power, x, signs, 0xF8;"
    + _WORDS_AFTER
)


@triton.jit
def _power_of_two(exponent, SHAPE: tl.constexpr):
    """``2 ** exponent`` of each row in bfloat16, for -126 to 127; NaN for 128."""
    bits = tl.where(exponent == 128, _NAN, (exponent + 127) << 7)
    power = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.broadcast_to(power[:, None], SHAPE)


@triton.jit
def fp4_values(groups, SM: tl.constexpr):
    """``[N, 32]`` to FP4 and back; NaN where a group has a NaN or an Inf.

    ``SM`` is the result of ``launch_options.sm``.
    """
    exponent, finite = fp4_exponents(largest(groups))
    if groups.dtype == tl.bfloat16 and not INTERPRETED:
        inverse = _power_of_two(-exponent, groups.shape)
        factor = _power_of_two(tl.where(finite, exponent, 128), groups.shape)
        return tl.inline_asm_elementwise(
            _ROUNDED_WORDS if SM >= 86 else _ROUNDED_WORDS_OF_SM80,
            "=r,r,r,r",
            [groups, inverse, factor],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        factor = tl.where(finite, power_of_two(exponent), float("nan"))
        value = round_e2m1(widen(groups) * power_of_two(-exponent)[:, None])
        return narrow(value * factor[:, None], groups.dtype)


@triton.jit
def rotate_quantize(tiles, TILES: tl.constexpr, DTYPE: tl.constexpr, SM: tl.constexpr):
    """Hadamard transform, rounding to ``DTYPE``, quantisation to FP4 and back.

    ``tiles``: float32, see ``hadamard``; a power of two of columns, at least 32. Returns the same
    in ``DTYPE``. A NaN or an Inf makes its row NaN. ``SM`` as in ``fp4_values``.
    """
    SHAPE: tl.constexpr = tiles[0].shape
    rotated = hadamard(tiles, TILES)
    made = ()
    for tile in tl.static_range(TILES):
        groups = tl.reshape(rotated[tile], [SHAPE[0] * SHAPE[1] // GROUP, GROUP])
        made += (tl.reshape(fp4_values(narrowed(groups, DTYPE), SM), SHAPE),)  # type: ignore[assignment]
    return made


@triton.jit
def group_exponents(groups):
    """``fp4_exponents`` of float32 ``[ROWS, G, 32]``, each result ``[ROWS, G, 1]``."""
    amax = tl.max(groups.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2, keep_dims=True)
    return fp4_exponents(amax.to(tl.float32, bitcast=True))


@triton.jit
def hadamard_row(values, D: tl.constexpr):
    """Sylvester's matrix times ``D ** -0.5``, of float32 ``[ROWS, D]`` along D.

    Each step adds and subtracts neighbours and moves the lowest bit of the column number to the
    top, so that after log2(D) steps every bit has been served once, lowest first, and columns are
    back in their places.
    """
    ROWS: tl.constexpr = values.shape[0]
    STEPS: tl.constexpr = D.bit_length() - 1
    for _ in tl.static_range(STEPS):
        even, odd = tl.split(tl.reshape(values, [ROWS, D // 2, 2]))
        pair = tl.join(even + odd, even - odd)
        values = tl.reshape(tl.permute(pair, (0, 2, 1)), [ROWS, D])
    return values * (D**-0.5)


@triton.jit
def rotate_quantize_row(values, D: tl.constexpr, DTYPE: tl.constexpr = tl.bfloat16):
    """Hadamard transform, rounding to ``DTYPE``, quantisation to FP4 and back.

    ``values``: float32 ``[ROWS, D]``, D a power of two >= 32. Returns the same shape in float32;
    every value is one of ``DTYPE``. A NaN or an Inf makes its row NaN.
    """
    ROWS: tl.constexpr = values.shape[0]
    rotated = widen(narrow(hadamard_row(values, D), DTYPE))
    groups = tl.reshape(rotated, [ROWS, D // GROUP, GROUP])
    exponent, finite = group_exponents(groups)
    value = round_e2m1(groups * power_of_two(-exponent)) * power_of_two(exponent)
    return tl.reshape(tl.where(finite, value, float("nan")), [ROWS, D])
