"""Operands of ``mma.sync.m16n8k64`` with block scales, by the registers of a warp's lanes.

The instruction multiplies 16 x 64 by 64 x 8 codes in E2M1; 16 columns of a row share a scale in
E4M3 without its sign (``ue4m3``). Lane ``4 q + p`` belongs to quad ``q``. Codes are as the PTX
manual has them: a word holds eight neighbours along K, those of position ``p``. Scales are in the
registers of some lanes only, and the operand ``{byte, thread}`` says in which: that of row ``m`` of
the left matrix is in lane ``4 (m % 8) + 2 thread + m // 8``, that of column ``n`` of the right one
in lane ``4 n + thread``. The register holds the scales of the four blocks of K, the first in the
lowest byte, so that the byte's number has to be 0.
"""

from __future__ import annotations

import numpy as np

# What follows ``mma.sync``.
BLOCK_SCALED = ["m16n8k64", "row", "col", "kind::mxf4nvf4", "block_scale", "scale_vec::4X"]
BLOCK_SCALED += ["f32", "e2m1", "e2m1", "f32", "ue4m3"]
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _codes(word: np.ndarray) -> np.ndarray:
    """float64 ``[W, 8, 4, 8]``: the values of a word, by quad and position."""
    code = word.reshape(-1, 8, 4, 1) >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    return _MAGNITUDES[code & 7] * np.where(code & 8, -1.0, 1.0)


def left_operand(words: list[np.ndarray]) -> np.ndarray:
    """float64 ``[W, 16, 64]``: words of rows q and q + 8, then of the upper half of K."""
    lower, upper = (
        np.concatenate([_codes(words[half]), _codes(words[half + 1])], 1).reshape(-1, 16, 32)
        for half in (0, 2)
    )
    return np.concatenate([lower, upper], 2)


def right_operand(words: list[np.ndarray]) -> np.ndarray:
    """float64 ``[W, 8, 64]``: columns q, the lower and the upper half of K."""
    return np.concatenate([_codes(word).reshape(-1, 8, 32) for word in words], 2)


def ue4m3(byte: np.ndarray) -> np.ndarray:
    """Values of E4M3 without sign, float64; 0x7F is NaN, and the highest bit has to be 0."""
    if (byte & 128).any():
        raise ValueError("a block scale has its sign bit set, which ue4m3 has not")
    exponent, mantissa = byte.astype(np.int64) >> 3, byte & 7
    value = np.where(exponent, (8.0 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    return np.where(byte == 127, np.nan, value)


def _scales(word: np.ndarray) -> np.ndarray:
    """float64 ``[W, rows, 64]``: the factor of each column, of words ``[W, rows]``."""
    byte = word[..., None] >> np.arange(0, 32, 8, dtype=np.uint32) & 255
    return np.repeat(ue4m3(byte), 16, -1)


def _selected(where: tuple[str, str], threads: int) -> int:
    byte, thread = (int(part) for part in where)
    if byte or not 0 <= thread < threads:
        raise ValueError(f"scales are in {{{byte}, {thread}}}, wanted {{0, below {threads}}}")
    return thread


def left_scales(register: np.ndarray, where: tuple[str, str]) -> np.ndarray:
    """float64 ``[W, 16, 64]``: of two lanes of a quad, the first has row q, the other q + 8."""
    start = 2 * _selected(where, 2)
    lanes = register.reshape(-1, 8, 4)[..., start : start + 2]
    return _scales(lanes.transpose(0, 2, 1).reshape(-1, 16))


def right_scales(register: np.ndarray, where: tuple[str, str]) -> np.ndarray:
    """float64 ``[W, 8, 64]``: a lane of each quad has column q."""
    return _scales(register.reshape(-1, 8, 4)[..., _selected(where, 4)])


def result_fragments(sums: np.ndarray) -> np.ndarray:
    """``[W, 8, 4, 4]`` of ``[W, 16, 8]``: a lane's sums, two neighbours of rows q and q + 8."""
    parts = sums.reshape(-1, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4)
    return parts.reshape(-1, 8, 4, 4)
