"""Quantisation written a second time, in numpy with ml_dtypes' roundings.

Independent of ``dsv4.reference``: float32 arithmetic of numpy, element and scale roundings of
ml_dtypes. Kernels and the reference must give these bits. Needs the ``test`` extra.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
f32 = np.float32


def blocks_of(x: Array, width: int) -> tuple[Array, Array, Array]:
    """Blocks ``[N, Kb, width]``, which of them are finite, and their amax (0 where not)."""
    shape = (*x.shape[:-1], x.shape[-1] // width, width)
    blocks = x.astype(f32).reshape(shape)
    finite = np.asarray(np.isfinite(blocks).all(-1))
    return blocks, finite, np.where(finite, np.abs(blocks).max(-1), f32(0))


def global_scale(amax: Array) -> Array:
    """``max(amax / 2688, 2^-126)``, 1 where amax is 0 (specification, section 11.1)."""
    scale = np.maximum(amax / f32(2688), f32(2.0**-126))
    return np.where(amax == 0, f32(1), scale).astype(f32)


def e2m1_codes(values: Array, live: Array) -> Array:
    """Codes 0..15, to nearest even and saturating; 0 where not ``live``."""
    clipped = np.clip(np.where(live, values, 0), -6, 6).astype(f32)
    return np.where(live, clipped.astype(ml_dtypes.float4_e2m1fn).view(np.uint8), 0)


def nvfp4(x: Array, scaling: str, static: float | None = None) -> tuple[Array, Array, Array]:
    """Codes ``[N, K]``, scale bytes ``[N, K/16]`` and global scale of ``x [N, K]``.

    See ``dsv4.ops.quantize`` for the formulas (specification, sections 11.1 and 11.2).
    """
    with np.errstate(all="ignore"):
        blocks, finite, amax = blocks_of(x, 16)
        if static is not None:
            scale = np.array([static], f32)
        else:
            per = amax.max(-1) if scaling == "token" else np.array([amax.max(initial=0)], f32)
            scale = global_scale(per)
        row = np.broadcast_to(scale, x.shape[:1])[:, None]
        if scaling == "weight":
            ratio = np.clip(amax / (f32(6) * row), f32(2.0**-9), f32(448))
            ratio = np.where(amax == 0, f32(1), ratio)
        else:
            ratio = np.minimum((amax / f32(6)) / row, f32(448))
        block = ratio.astype(ml_dtypes.float8_e4m3fn)
        product = block.astype(f32) * row
        live = (finite & (product > 0))[..., None]
        codes = e2m1_codes(blocks / product[..., None], live)
    return codes.reshape(x.shape), np.where(finite, block.view(np.uint8), 0x7F), scale


def power_of_two_above(amax: Array, element_max: float) -> Array:
    """``ceil(log2(max(amax, element_max * 2^-126) / element_max))``, in float64."""
    ratio = np.maximum(amax.astype(np.float64), element_max * 2.0**-126) / element_max
    mantissa, exponent = np.frexp(ratio)  # 0.5 <= mantissa < 1
    return np.where(mantissa == 0.5, exponent - 1, exponent)


def mxfp4(x: Array) -> tuple[Array, Array]:
    """Codes ``[N, K]`` and scale bytes ``[N, K/32]`` (specification, section 6, step 3)."""
    blocks, finite, amax = blocks_of(x, 32)
    power = power_of_two_above(amax, 6.0)
    with np.errstate(all="ignore"):
        values = blocks / np.exp2(power.astype(np.float64))[..., None]
    codes = e2m1_codes(values, finite[..., None])
    return codes.reshape(x.shape), np.where(finite, power + 127, 255).astype(np.uint8)


def fp8_tile(tile: Array, power_of_two: bool) -> tuple[Array, Array]:
    """Code bytes of one tile (0x7F where not finite) and its scale."""
    finite = np.isfinite(tile)
    amax = np.abs(np.where(finite, tile, 0)).max()
    if power_of_two:
        scale = np.exp2(power_of_two_above(amax, 448.0)).astype(f32)
    else:
        scale = np.maximum(amax / f32(448), f32(2.0**-126)) if amax else f32(1)
    coded = np.clip(np.where(finite, tile, 0) / scale, -448, 448)
    codes = coded.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(finite, codes, 0x7F), scale
