"""Issue all loads before the first use, for kernels of few programs.

The assembler moves a load down to its use, which saves registers; but a lone thread then waits for
each load: 0.3 us per trip to memory, where a launch takes 1.3. Neither volatile loads nor a barrier
prevent it. So the value that is used first is made to depend on all loads:

    here = arrival(weight, N) | arrival(scale, N)
    values = once_here(values, here)

The zeros of ``arrival`` are opaque to the compiler: the loaded bits ANDed with the program's number
along the third axis of the grid, which such a kernel does not use, so that it is 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

_STEPS = tl.constexpr(8)


@triton.jit
def arrival(loaded, N: tl.constexpr):
    """``[N]`` zeros, int32, once ``loaded [M, C]`` is here, C columns to a thread.

    M is a multiple of N. Of a scalar, a scalar.
    """
    if len(loaded.shape) == 0:
        return _bits(loaded).to(tl.int32) & tl.program_id(2)
    else:  # noqa: RET505  (a choice of the compiler; code after the return would be compiled too)
        M: tl.constexpr = loaded.shape[0]
        bits = _bits(loaded)
        for _ in tl.static_range(_STEPS):
            if bits.shape[1] > 1:
                # One of what was loaded by one instruction is enough.
                bits, _rest = tl.split(tl.reshape(bits, [M, bits.shape[1] // 2, 2]))
                bits = tl.reshape(bits, [M, bits.numel // M])
        zeros = tl.reshape(bits, [M]).to(tl.int32) & tl.program_id(2)
        return tl.reduce(tl.reshape(zeros, [M // N, N]), 0, _either) if M > N else zeros


@triton.jit
def once_here(values, zeros):
    """``values [M, C]`` as they are, once what ``zeros [N]`` come from is here."""
    M: tl.constexpr = values.shape[0]
    N: tl.constexpr = zeros.shape[0]
    of_row = tl.reshape(tl.broadcast_to(zeros[None, :], [M // N, N]), [M])[:, None]
    bits = _bits(values)
    return (bits | of_row.to(bits.dtype)).to(values.dtype, bitcast=True)


@triton.jit
def _bits(values):
    """Reinterpret as integers of the same width; leave integers as they are."""
    if not values.dtype.is_int():
        if values.dtype.primitive_bitwidth == 32:
            values = values.to(tl.int32, bitcast=True)
        else:
            values = values.to(tl.int16, bitcast=True)
    return values


@triton.jit
def _either(a, b):
    return a | b
