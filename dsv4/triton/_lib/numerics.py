"""Conversions that Triton's interpreter gets wrong, made right and the same everywhere.

What the interpreter of Triton 3.6 to 3.9 was seen to do: float32 to bfloat16 truncates, and both
directions are wrong for subnormal numbers; float32 to float8e4nv rounds subnormals wrongly and
wraps past 448. So kernels convert through these functions alone. Compiled, each is the hardware's
own conversion; interpreted, integer arithmetic with the same result, NaN's bits apart. Both are
tested over every bit pattern of the narrow type and its neighbourhood.

Before compute capability 8.9 GPUs have no conversion to and from E4M3. Kernels compiled for them
take the integer arithmetic too (``converts_e4m3``).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import cuda as tl_cuda

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
# Warps of all programs up to which a kernel lets the next one become resident before it waits.
_SMALL = tl.constexpr(320)
# Four float32 values as a word of E4M3.
_WORD = tl.constexpr(
    "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; "
    "cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; mov.b32 $0, {a, b}; }"
)


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """First statement of every kernel, before any load or store; of those with ``once``, within it.

    With programmatic dependent launch the kernel is resident while the preceding one still runs;
    here it waits until that one's stores are visible, and lets the next one become resident.
    """
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()


@triton.jit
def once(PDL: tl.constexpr):
    """1: of ``for _ in range(once(PDL))``, whose body begins with ``wait_for_inputs``.

    Where programs are few (``launch_options.options``) it is opaque to the compiler. What does not
    depend on inputs, the addresses above all, does not change from pass to pass, so it is
    computed before the first, while the kernel has to wait. Kernels that wait take
    slots of SMs, so that programs spread less evenly; so only a small kernel lets the next one in
    before its own inputs are there.
    """
    if PDL == 2:
        programs = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * tl.num_programs(2)
        if programs * tl_cuda.num_warps() <= _SMALL:
            tl_cuda.gdc_launch_dependents()
        return tl.where(tl.program_id(0) < tl.num_programs(0), 1, tl.num_programs(0))
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        return 1


@triton.jit
def widen(x):
    """bfloat16, float16 or float32 to float32, exactly.

    bfloat16 by its bits, compiled too: of two in a register each takes one instruction then, where
    the conversion of the upper one would take two.
    """
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 to ``dtype`` (bfloat16, float16 or float32), to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x != x, 0x7FC0, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def convert(values, dtype: tl.constexpr):
    """``values`` in ``dtype``; bit for bit, NaN payloads too, where they have it already."""
    if values.dtype == dtype:
        return values
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        return narrow(widen(values), dtype)


@triton.jit
def dot(a, b, total):
    """``a b + total`` of bfloat16 operands, in float32; with or without a batch axis."""
    if INTERPRETED:
        return tl.dot(widen(a), widen(b), total, input_precision="ieee")
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        return tl.dot(a, b, total)


@tl.core.builtin
def has_wgmma(_semantic=None):
    """Return whether a kernel is compiled for Hopper, whose tensor cores run asynchronously."""
    return tl.constexpr(getattr(_semantic.builder.options, "arch", None) == "sm90")


@triton.jit
def finished(total):
    """``total`` of a ``dot`` in a loop whose left operand is computed, once Hopper has summed it.

    ``wgmma`` reads a left operand from registers after it was issued. Triton 3.6 leaves up to three
    instructions unfinished at the end of an iteration, and the next iteration overwrites their
    registers: results were wrong on an H200. The empty assembly uses the sum, so that Triton waits
    for it. It is no instruction. Call it right after the ``dot``, in the loop.
    """
    if INTERPRETED or not has_wgmma():
        return total
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        return tl.inline_asm_elementwise(
            "", "=f,0", [total], dtype=tl.float32, is_pure=False, pack=1
        )


@tl.core.builtin
def converts_e4m3(_semantic=None):
    """Return whether the GPU that a kernel is compiled for has conversions to and from E4M3.

    Triton knows it from the target's compute capability; ``launch_options.options`` passes it where
    the GPU has none.
    """
    return tl.constexpr("fp8e4nv" in _semantic.builder.options.supported_fp8_dtypes)


@triton.jit
def e4m3_bits_by_integers(x):
    """``e4m3_bits`` for GPUs without the conversion."""
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    # Normal: keep 3 of 23 mantissa bits, move the exponent bias from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Subnormal (below 2^-6): adding 2^14 rounds to multiples of 2^-9 in the low mantissa bits.
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(x != x, 0x7F, code | sign).to(tl.uint8)


@triton.jit
def e4m3_bits(x):
    """float32 to the nearest E4M3 (ties to even, saturating at 448, NaN to 0x7F), uint8 bits."""
    if INTERPRETED or not converts_e4m3():
        return e4m3_bits_by_integers(x)
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def e4m3_tile(x):
    """``e4m3_bits`` of a tile of which a thread has neighbours: four of them make a word."""
    if INTERPRETED or not converts_e4m3():
        return e4m3_bits_by_integers(x)
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        return tl.inline_asm_elementwise(
            _WORD,
            "=r,f,f,f,f",
            [x],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )


@triton.jit
def e4m3_word(first, second, third, fourth):
    """``e4m3_bits`` of four values as the bytes of a uint32 word, the first one lowest."""
    if INTERPRETED or not converts_e4m3():
        low = e4m3_bits_by_integers(first).to(tl.uint32)
        low |= e4m3_bits_by_integers(second).to(tl.uint32) << 8
        high = e4m3_bits_by_integers(third).to(tl.uint32)
        high |= e4m3_bits_by_integers(fourth).to(tl.uint32) << 8
        return low | (high << 16)
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        return tl.inline_asm_elementwise(
            _WORD, "=r,f,f,f,f", [first, second, third, fourth], tl.uint32, is_pure=True, pack=1
        )


@triton.jit
def e4m3_value_by_integers(bits):
    """``e4m3_value`` for GPUs without the conversion.

    Shifted, the bits are those of float32, of the value times 2^-120; subnormal numbers as well.
    """
    wide = bits.to(tl.int32)
    shifted = ((wide & 0x7F) << 20) | ((wide & 0x80) << 24)
    value = shifted.to(tl.float32, bitcast=True) * 2.0**120
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def e4m3_value(bits):
    """Value of E4M3 bits (uint8) as float32; 0x7F and 0xFF are NaN."""
    if INTERPRETED or not converts_e4m3():
        return e4m3_value_by_integers(bits)
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        return bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def power_of_two(exponent):
    """``2 ** exponent`` as float32 for int32 exponents -126 to 127, by its bits."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def ceil_log2(value):
    """``ceil(log2(value))`` of positive, finite, normal float32 values, int32, exactly."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).to(tl.int32)
