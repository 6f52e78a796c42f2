"""Exchanges and reductions among the lanes of a warp; all 32 lanes execute them together."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Uint32

from dsv4.cute.device.ptx._emit import _outs, assembly


def load_shared_broadcast(address: Uint32, words: int, lane: Int32) -> list[Uint32]:
    """``ld.shared.v4.u32`` by lane 0, then ``shfl.sync``: up to four words to a warp.

    All 32 lanes execute it. Only lane 0 reads shared memory, so only lane 0's read has to be
    ordered before what lane 0 does next, e.g. an arrival that lets the words be overwritten.
    """
    moves = " ".join(f"mov.u32 {{$w{i}}}, 0;" for i in range(4))
    code = f"ld.shared.v4.u32 {_outs(4)}, [{{$r0}}];"
    code = f"{{ .reg .pred p; setp.eq.s32 p, {{$r1}}, 0; {moves} @p {code} }}"
    loaded = assembly(code, [Uint32] * 4, [address, lane])
    return [Uint32(cute.arch.shuffle_sync(word, 0)) for word in loaded[:words]]


def warp_sum(value: Int32) -> Int32:
    """``redux.sync.add.s32``: the sum of all lanes' integers."""
    return assembly("redux.sync.add.s32 {$w0}, {$r0}, 0xffffffff;", [Int32], [value])


def warp_max(value: Uint32) -> Uint32:
    """``redux.sync.max.u32``: the largest of all lanes' unsigned integers."""
    return assembly("redux.sync.max.u32 {$w0}, {$r0}, 0xffffffff;", [Uint32], [value])


def warp_min(value: Uint32) -> Uint32:
    """``redux.sync.min.u32``: the smallest of all lanes' unsigned integers."""
    return assembly("redux.sync.min.u32 {$w0}, {$r0}, 0xffffffff;", [Uint32], [value])


def warp_or(value: Uint32) -> Uint32:
    """``redux.sync.or.b32``: the bits that any lane has set."""
    return assembly("redux.sync.or.b32 {$w0}, {$r0}, 0xffffffff;", [Uint32], [value])


def shuffle_xor(value: Uint32, distance: int) -> Uint32:
    """``shfl.sync.bfly.b32``: the word of the lane whose number differs by these bits."""
    code = f"shfl.sync.bfly.b32 {{$w0}}, {{$r0}}, {distance}, 31, 0xffffffff;"
    return assembly(code, [Uint32], [value])
