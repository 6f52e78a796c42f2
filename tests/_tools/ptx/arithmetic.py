"""Arithmetic of PTX instructions, for the values of all threads at once: arrays of numpy.

Of 16 bits and of pairs the arrays hold bits. Approximations of the hardware (``rcp.approx``,
``ex2.approx``, ``rsqrt.approx``) are the nearest float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch


def unsigned(bits: int) -> type:
    return {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[bits]


def kind_of(name: str) -> type:
    """The numpy type of PTX's type; of pairs and of bfloat16 that of the bits."""
    if name in ("bf16", "f16"):
        return np.uint16
    if name in ("bf16x2", "f16x2", "s16x2", "u16x2"):
        return np.uint32
    bits = int(name[1:])
    if name[0] == "f":
        return {32: np.float32, 64: np.float64}[bits]
    return (
        {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}[bits]
        if name[0] == "s"
        else (unsigned(bits))
    )


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    return (
        torch.from_numpy(x.astype(np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)
    )


def to_float16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).view(np.uint16)


def from_float16(bits: np.ndarray) -> np.ndarray:
    return bits.view(np.float16).astype(np.float32)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_byte(x: np.ndarray, kind: torch.dtype, most: float) -> np.ndarray:
    """The nearest, ties to even, saturated; NaN is 0x7F."""
    clamped = torch.from_numpy(np.where(np.isnan(x), 0, np.clip(x, -most, most)))
    result = clamped.to(kind).view(torch.uint8).numpy()
    return np.where(np.isnan(x), 0x7F, result).astype(np.uint16)


def to_e2m1(x: np.ndarray) -> np.ndarray:
    """Codes of the nearest, ties to even, saturated at 6; NaN is 6."""
    magnitude = np.where(np.isnan(x), 6, np.abs(x))
    borders = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    code = np.searchsorted(borders, magnitude)
    tie = (magnitude == borders[np.minimum(code, 6)]) & (code % 2 == 1)
    return (code + tie).astype(np.uint16) | np.where(np.signbit(x) & ~np.isnan(x), 8, 0).astype(
        np.uint16
    )


def halves_of(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return (x & 0xFFFF).astype(np.uint16), (x >> 16).astype(np.uint16)


def paired(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.astype(np.uint32) | high.astype(np.uint32) << 16


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """``x * y + z`` of float32 arrays, rounded once.

    The product is exact in float64. The sum is rounded to odd: of two neighbours, the one with an
    odd last bit where it is neither. So the second rounding, to float32, sees on which side of a
    tie it was.
    """
    product = x.astype(np.float64) * y
    total = product + z
    rest = total - product
    error = (product - (total - rest)) + (z - rest)
    even = total.view(np.int64) & 1 == 0
    lost = np.isfinite(total) & even & (error != 0) & np.isfinite(error)
    neighbour = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(lost, neighbour, total).astype(np.float32)


def _by_halves(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def both(*words):
        halves = [halves_of(w) for w in words]
        return paired(*(function(*(h[i] for h in halves)) for i in range(2)))

    return both


def _larger_bfloat16(a, b):
    x, y = from_bfloat16(a), from_bfloat16(b)
    return np.where(np.fmax(x, y) == x, a, b)


def _smaller_bfloat16(a, b):
    x, y = from_bfloat16(a), from_bfloat16(b)
    return np.where(np.isnan(y) | (x <= y), a, b)


def _larger_float16(a, b):
    """``max.NaN``: 0x7FFF where one is NaN."""
    x, y = a.view(np.float16), b.view(np.float16)
    result = np.where(x >= y, a, b)
    return np.where(np.isnan(x) | np.isnan(y), np.uint16(0x7FFF), result)


def _larger_magnitude(a, b):
    """``max.xorsign.abs``, likewise."""
    return _larger_bfloat16(a & 0x7FFF, b & 0x7FFF) | ((a ^ b) & 0x8000)


def _smaller_magnitude(a, b):
    """``min.xorsign.abs``: a NaN counts as nothing unless both are."""
    return _smaller_bfloat16(a & 0x7FFF, b & 0x7FFF) | ((a ^ b) & 0x8000)


def _fused(widen: Callable[..., np.ndarray], narrow: Callable[..., np.ndarray]) -> Callable:
    """``fma`` of 16 bits, rounded once: exact but for sums of very different magnitude."""

    def fused(a, b, c):
        x, y, z = map(widen, (a, b, c))
        return narrow(_odd(fma(x, y, z), x.astype(np.float64) * y + z))

    return fused


def _odd(near: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """``near``, or the float32 beside it with an odd last bit where ``exact`` is neither."""
    lost = np.isfinite(near) & (near.astype(np.float64) != exact)
    lost &= near.view(np.uint32) & 1 == 0
    neighbour = np.nextafter(near, np.where(exact > near, np.inf, -np.inf).astype(np.float32))
    return np.where(lost, neighbour, near)


def larger_or_nan(a, b):
    return np.where(np.isnan(a) | np.isnan(b), np.float32(np.nan), np.fmax(a, b))


def in_64_bits(x: np.ndarray) -> np.ndarray:
    """An integer in 64 bits."""
    return x.astype(np.int64 if x.dtype.kind == "i" else np.uint64)


def high_product(a, b):
    bits = 8 * a.dtype.itemsize
    products = [int(x) * int(y) >> bits for x, y in zip(a, b, strict=True)]
    return np.array([p & (1 << bits) - 1 for p in products], unsigned(bits)).view(a.dtype)


def _shift(left: bool) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    def shifted(a, b):
        bits = 8 * a.dtype.itemsize
        by = np.minimum(b.astype(np.int64), bits)
        over = by >= bits
        by = np.where(over, bits - 1, by).astype(a.dtype)
        if left:
            return np.where(over, 0, a << by).astype(a.dtype)
        rest = a >> by
        return (rest if a.dtype.kind == "i" else np.where(over, 0, rest)).astype(a.dtype)

    return shifted


def _divided(a, b):
    if a.dtype.kind == "f":
        return a / b
    return np.trunc(a.astype(np.longdouble) / b.astype(np.longdouble)).astype(a.dtype)


def _remainder(a, b):
    return (a - _divided(a, b) * b).astype(a.dtype)


BINARY: dict[str, Callable[..., np.ndarray]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": _divided,
    "rem": _remainder,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shl": _shift(left=True),
    "shr": _shift(left=False),
}
UNARY: dict[str, Callable[..., np.ndarray]] = {
    "mov": lambda a: a,
    "not": lambda a: ~a,
    "neg": lambda a: -a,
    "abs": np.abs,
    "rcp": lambda a: np.float32(1) / a,
    "ex2": np.exp2,
    "lg2": np.log2,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: np.float32(1) / np.sqrt(a),
    "popc": lambda a: np.bitwise_count(a).astype(np.uint32),
    "brev": lambda a: np.array([int(f"{x:032b}"[::-1], 2) for x in a], np.uint32),
    "clz": lambda a: np.array([32 - int(x).bit_length() for x in a], np.uint32),
}
ORDERS: dict[str, Callable[..., np.ndarray]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
OF_PAIRS: dict[str, Callable[..., np.ndarray]] = {
    "max.s16x2": _by_halves(
        lambda a, b: np.maximum(a.view(np.int16), b.view(np.int16)).view(np.uint16)
    ),
    "max.u16x2": _by_halves(np.maximum),
    "add.s16x2": _by_halves(lambda a, b: a + b),
    "max.NaN.f16x2": _by_halves(_larger_float16),
    "max.bf16x2": _by_halves(_larger_bfloat16),
    "min.bf16x2": _by_halves(_smaller_bfloat16),
    "min.xorsign.abs.bf16x2": _by_halves(_smaller_magnitude),
    "max.xorsign.abs.bf16x2": _by_halves(_larger_magnitude),
    "mul.rn.bf16x2": _by_halves(
        lambda a, b: _fused(from_bfloat16, to_bfloat16)(a, b, np.full_like(a, 0x8000))
    ),
    "fma.rn.bf16": _fused(from_bfloat16, to_bfloat16),
    "fma.rn.bf16x2": _by_halves(_fused(from_bfloat16, to_bfloat16)),
    "fma.rn.f16": _fused(from_float16, to_float16),
    "fma.rn.f16x2": _by_halves(_fused(from_float16, to_float16)),
    "abs.bf16x2": lambda a: a & 0x7FFF7FFF,
    "abs.bf16": lambda a: a & 0x7FFF,
    "abs.f16x2": lambda a: a & 0x7FFF7FFF,
    "abs.f16": lambda a: a & 0x7FFF,
}


def permuted(a, b, selector):
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(a)
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = both >> (8 * (nibble & 7)).astype(np.uint64) & np.uint64(255)
        byte = np.where(nibble & 8, np.where(byte & np.uint64(128), 255, 0), byte)
        result |= byte.astype(np.uint32) << np.uint32(8 * i)
    return result


def looked_up(a, b, c, table):
    """``lop3``: bit i of the table is the result for bits i of a, b and c, a the highest."""
    result = np.zeros_like(a)
    for i in range(8):
        if int(table[0]) >> i & 1:
            terms = (x if i >> shift & 1 else ~x for x, shift in ((a, 2), (b, 1), (c, 0)))
            result |= functools.reduce(np.bitwise_and, terms)
    return result


def bit_field(a, start, length):
    """``bfe``: bits from ``start`` on, of a signed number with the sign that they have."""
    bits = 8 * a.dtype.itemsize
    top = [min(bits, int(s) + int(n)) for s, n in zip(start, length, strict=True)]
    assert all(t == int(s) + int(n) for t, s, n in zip(top, start, length, strict=True))
    up = np.array([bits - t for t in top], a.dtype)
    down = np.array([bits - int(n) for n in length], a.dtype)
    return (a << up) >> down
