"""Loads, stores and atomics of global and shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Int64, Uint32

from dsv4.cute.device.ptx._emit import _ins, _outs, assembly

Value = Any  # a DSL scalar


def load_shared(address: Value, words: int, offset: int = 0) -> tuple[Value, ...]:
    """``words`` (2 or 4) 32-bit words from shared memory; ``offset``: see ``load_matrices4``."""
    code = f"ld.shared.v{words}.u32 {_outs(words)}, [{{$r0}}+{offset}];"
    return assembly(code, [Uint32] * words, [address])


def load_shared_int(address: Value) -> Value:
    """One 32-bit integer from shared memory."""
    return assembly("ld.shared.s32 {$w0}, [{$r0}];", [Int32], [address])


def load_shared_word(address: Value, offset: int) -> Value:
    """One 32-bit word from shared memory; ``offset``: see ``load_matrices4``."""
    return assembly(f"ld.shared.u32 {{$w0}}, [{{$r0}}+{offset}];", [Uint32], [address])


def store_shared_int(address: Value, value: Value) -> None:
    """One 32-bit integer to shared memory."""
    assembly("st.shared.s32 [{$r0}], {$r1};", (), [address, value])


def load_shared_float4(address: Value) -> tuple[Value, ...]:
    """Four float32 from shared memory."""
    return assembly(f"ld.shared.v4.f32 {_outs(4)}, [{{$r0}}];", [Float32] * 4, [address])


def prefetch(address: Value) -> None:
    """Bring a line to the level-2 cache."""
    assembly("prefetch.global.L2 [{$r0}];", (), [address])


def load_global(address: Value) -> Value:
    """One 32-bit word."""
    return assembly("ld.global.u32 {$w0}, [{$r0}];", [Uint32], [address])


def load_weights(
    address: Value, words: int, wanted: Value | None = None, offset: int = 0
) -> tuple[Value, ...]:
    """``words`` (2 or 4) 32-bit words of weights, which no kernel beside this one writes.

    The assembler may move such loads (``.nc``) to before the wait for the kernel in front, where
    what that kernel writes would be read too early.

    Args:
        address: Of the first, less ``offset``.
        words: How many.
        wanted: 0 to load nothing and return what is not to be looked at; else it is loaded.
        offset: Bytes, part of the instruction: see ``load_matrices4``.
    """
    code = f"ld.global.nc.L1::no_allocate.v{words}.u32 {_outs(words)}, [{{$r0}}+{offset}];"
    if wanted is None:
        return assembly(code, [Uint32] * words, [address])
    code = f"{{ .reg .pred p; setp.ne.s32 p, {{$r1}}, 0; @p {code} }}"
    return assembly(code, [Uint32] * words, [address, wanted])


def load_streamed(address: Value, words: int, offset: int = 0) -> tuple[Value, ...]:
    """``words`` (2 or 4) 32-bit words that are read once; ``offset``: see ``load_matrices4``."""
    code = f"ld.global.L1::no_allocate.v{words}.u32 {_outs(words)}, [{{$r0}}+{offset}];"
    return assembly(code, [Uint32] * words, [address])


def load_global_float(address: Value) -> Value:
    """One float32."""
    return assembly("ld.global.f32 {$w0}, [{$r0}];", [Float32], [address])


def store_global4(address: Value, words: Sequence[Value]) -> None:
    """Four 32-bit words to a 16-byte aligned address."""
    assembly(f"st.global.v4.u32 [{{$r0}}], {_ins(1, 4)};", (), [address, *words])


def store_shared_float(address: Value, value: Value) -> None:
    """One float32 to shared memory."""
    assembly("st.shared.f32 [{$r0}], {$r1};", (), [address, value])


def store_shared_float2(address: Value, a: Value, b: Value) -> None:
    """Two float32 to shared memory."""
    assembly("st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};", (), [address, a, b])


def store_shared_halves(address: Value, word: Value, offset: int) -> None:
    """The lower half of a word to shared memory, and the upper one ``offset`` bytes beyond."""
    assembly(
        "{ .reg .b16 l, h; mov.b32 {l, h}, {$r1}; st.shared.b16 [{$r0}], l; "
        f"st.shared.b16 [{{$r0}}+{offset}], h; }}",
        (),
        [address, word],
    )


def store_shared_bfloat16(address: Value, value: Value) -> None:
    """One float32 to shared memory, rounded to nearest even."""
    assembly(
        "{ .reg .b16 h; cvt.rn.bf16.f32 h, {$r1}; st.shared.b16 [{$r0}], h; }",
        (),
        [address, value],
    )


def load_shared_float2(address: Value) -> tuple[Value, ...]:
    """Two float32 from shared memory."""
    return assembly(f"ld.shared.v2.f32 {_outs(2)}, [{{$r0}}];", [Float32] * 2, [address])


def store_shared_float4(address: Value, values: Sequence[Value]) -> None:
    """Four float32 to shared memory."""
    assembly(f"st.shared.v4.f32 [{{$r0}}], {_ins(1, 4)};", (), [address, *values])


def store_global_float(address: Value, value: Value) -> None:
    """One float32."""
    assembly("st.global.f32 [{$r0}], {$r1};", (), [address, value])


def load_or_zero(address: Value, words: int, wanted: Value, offset: int = 0) -> tuple[Value, ...]:
    """``words`` (2 or 4) 32-bit words, zeros and no load where ``wanted`` is 0.

    ``offset``: bytes, part of the instruction.
    """
    return _load_or("0", words, address, wanted, offset)


def load2_or_ones(address: Value, wanted: Value) -> tuple[Value, ...]:
    """Two 32-bit words, all bits set and no load where ``wanted`` is 0."""
    return _load_or("0xFFFFFFFF", 2, address, wanted, 0)


def _load_or(
    default: str, words: int, address: Value, wanted: Value, offset: int
) -> tuple[Value, ...]:
    moves = " ".join(f"mov.u32 {{$w{i}}}, {default};" for i in range(words))
    load = f"ld.global.v{words}.u32 {_outs(words)}, [{{$r0}}+{offset}];"
    code = f"{{ .reg .pred p; setp.ne.s32 p, {{$r1}}, 0; {moves} @p {load} }}"
    return assembly(code, [Uint32] * words, [address, wanted])


def store_shared4(address: Value, words: Sequence[Value], offset: int = 0) -> None:
    """Four 32-bit words to shared memory; ``offset`` is part of the instruction."""
    assembly(f"st.shared.v4.u32 [{{$r0}}+{offset}], {_ins(1, 4)};", (), [address, *words])


def store_global_float2(address: Value, a: Value, b: Value) -> None:
    """Two float32 to an address that is a multiple of 8."""
    assembly("st.global.v2.f32 [{$r0}], {{$r1}, {$r2}};", (), [address, a, b])


def load_global_float2(address: Value) -> tuple[Value, ...]:
    """Two float32."""
    return assembly(f"ld.global.v2.f32 {_outs(2)}, [{{$r0}}];", [Float32] * 2, [address])


def store_global2(address: Value, words: Sequence[Value]) -> None:
    """Two 32-bit words to an address that is a multiple of 8."""
    assembly(f"st.global.v2.u32 [{{$r0}}], {_ins(1, 2)};", (), [address, *words])


def load_shared_float(address: Value) -> Value:
    """One float32 from shared memory."""
    return assembly("ld.shared.f32 {$w0}, [{$r0}];", [Float32], [address])


def take_number(counter: Value) -> Value:
    """The number in global memory, which becomes one more."""
    return assembly("atom.global.add.u32 {$w0}, [{$r0}], 1;", [Uint32], [counter])


def store_global(address: Value, word: Value) -> None:
    """One 32-bit word."""
    assembly("st.global.u32 [{$r0}], {$r1};", (), [address, word])


def store_global_if(address: Value, word: Value, wanted: Value) -> None:
    """One 32-bit word, if it is wanted."""
    assembly(
        "{ .reg .pred p; setp.ne.s32 p, {$r2}, 0; @p st.global.u32 [{$r0}], {$r1}; }",
        (),
        [address, word, Int32(wanted)],
    )


def store_global_byte(address: Value, word: Value) -> None:
    """The lowest byte of a word."""
    assembly(
        "{ .reg .b16 h; cvt.u16.u32 h, {$r1}; st.global.u8 [{$r0}], h; }",
        (),
        [address, word],
    )


def generic(address: Value) -> Value:
    """The address of shared memory as one that any load understands."""
    code = "{ .reg .u64 a; cvt.u64.u32 a, {$r0}; cvta.shared.u64 {$w0}, a; }"
    return assembly(code, [Int64], [address])


def store_shared2(address: Value, words: Sequence[Value]) -> None:
    """Two 32-bit words to shared memory."""
    assembly(f"st.shared.v2.u32 [{{$r0}}], {_ins(1, 2)};", (), [address, *words])


def store_global_int64(address: Value, value: Value) -> None:
    """One 64-bit integer."""
    assembly("st.global.s64 [{$r0}], {$r1};", (), [address, value])


def number_at(address: Value, width: Value) -> Value:
    """An integer of 4 or 8 bytes, the largest of 4 if it is above that, negative if it is."""
    return assembly(
        "{ .reg .pred p, q; .reg .s32 l, h; ld.global.s32 l, [{$r0}]; setp.eq.s32 p, {$r1}, 8; "
        "mov.s32 h, 0; @p ld.global.s32 h, [{$r0}+4]; setp.gt.s32 q, h, 0; "
        "@q mov.s32 l, 0x7FFFFFFF; setp.eq.and.s32 q, h, 0, p; setp.lt.and.s32 q, l, 0, q; "
        "@q mov.s32 l, 0x7FFFFFFF; setp.lt.s32 q, h, 0; @q mov.s32 l, -1; mov.s32 {$w0}, l; }",
        [Int32],
        [address, width],
    )


def load_once(address: Value, offset: int) -> Value:
    """A 32-bit word that is read once; ``offset`` as in ``load_streamed``."""
    code = f"ld.global.L1::no_allocate.u32 {{$w0}}, [{{$r0}}+{offset}];"
    return assembly(code, [Uint32], [address])


def set_shared_bits(address: Value, bits: Value) -> None:
    """Set bits of a word of shared memory, whoever else does."""
    assembly("red.shared.or.b32 [{$r0}], {$r1};", (), [address, bits])


def place(start: Value, number: Value, size: Value) -> Value:
    """The address of one of several things of so many bytes."""
    return assembly(
        "mad.wide.s32 {$w0}, {$r0}, {$r1}, {$r2};", [Int64], [number, Int32(size), start]
    )


def load_shared_pair(address: Value, offset: int) -> Value:
    """Two bytes from shared memory, in a word; ``offset``: see ``load_matrices4``."""
    return assembly(f"ld.shared.u16 {{$w0}}, [{{$r0}}+{offset}];", [Uint32], [address])


def load_byte(address: Value) -> Value:
    """One byte of global memory, in a word."""
    code = "{ .reg .b32 a; ld.global.u8 a, [{$r0}]; mov.b32 {$w0}, a; }"
    return assembly(code, [Uint32], [address])
