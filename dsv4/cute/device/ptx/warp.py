"""Exchanges and reductions among the lanes of a warp."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Uint32

from dsv4.cute.device.ptx._emit import _outs, assembly

Value = Any  # a DSL scalar


def told_words(address: Value, words: int, lane: Value) -> list[Value]:
    """The first ``words`` of four 32-bit words of shared memory, read by lane 0, told to its warp.

    So no other lane's read has to be before what lane 0 does next.
    """
    moves = " ".join(f"mov.u32 {{$w{i}}}, 0;" for i in range(4))
    code = f"ld.shared.v4.u32 {_outs(4)}, [{{$r0}}];"
    code = f"{{ .reg .pred p; setp.eq.s32 p, {{$r1}}, 0; {moves} @p {code} }}"
    found = assembly(code, [Uint32] * 4, [address, lane])
    return [Uint32(cute.arch.shuffle_sync(word, 0)) for word in found[:words]]


def sum_of_warp(value: Value) -> Value:
    """The sum of all lanes' integers."""
    return assembly("redux.sync.add.s32 {$w0}, {$r0}, 0xffffffff;", [Int32], [value])


def highest_of_warp(value: Value) -> Value:
    """The highest of all lanes' unsigned integers."""
    return assembly("redux.sync.max.u32 {$w0}, {$r0}, 0xffffffff;", [Uint32], [value])


def lowest_of_warp(value: Value) -> Value:
    """The lowest of all lanes' unsigned integers."""
    return assembly("redux.sync.min.u32 {$w0}, {$r0}, 0xffffffff;", [Uint32], [value])


def any_bits_of_warp(value: Value) -> Value:
    """The bits that any lane has set."""
    return assembly("redux.sync.or.b32 {$w0}, {$r0}, 0xffffffff;", [Uint32], [value])


def from_lane(value: Value, distance: int) -> Value:
    """The word of the lane whose number differs by these bits."""
    code = f"shfl.sync.bfly.b32 {{$w0}}, {{$r0}}, {distance}, 31, 0xffffffff;"
    return assembly(code, [Uint32], [value])
