"""Loads, stores and atomics of global and shared memory."""

from __future__ import annotations

from collections.abc import Sequence

from cutlass import Float32, Int32, Int64, Uint32

from dsv4.cute.device.ptx._emit import Float, Word, _ins, _outs, assembly


def load_shared(address: Uint32, words: int, offset: int = 0) -> tuple[Uint32, ...]:
    """``ld.shared.v2/.v4.u32``: ``words`` (2 or 4) words from an aligned address."""
    code = f"ld.shared.v{words}.u32 {_outs(words)}, [{{$r0}}+{offset}];"
    return assembly(code, [Uint32] * words, [address])


def load_shared_int(address: Uint32) -> Int32:
    """``ld.shared.s32``."""
    return assembly("ld.shared.s32 {$w0}, [{$r0}];", [Int32], [address])


def load_shared_word(address: Uint32, offset: int) -> Uint32:
    """``ld.shared.u32``."""
    return assembly(f"ld.shared.u32 {{$w0}}, [{{$r0}}+{offset}];", [Uint32], [address])


def store_shared_int(address: Uint32, value: Int32) -> None:
    """``st.shared.s32``."""
    assembly("st.shared.s32 [{$r0}], {$r1};", (), [address, value])


def load_shared_float4(address: Uint32) -> tuple[Float32, ...]:
    """``ld.shared.v4.f32`` from a multiple of 16."""
    return assembly(f"ld.shared.v4.f32 {_outs(4)}, [{{$r0}}];", [Float32] * 4, [address])


def prefetch_l2(address: Int64) -> None:
    """``prefetch.global.L2``: ask for one line of global memory in L2; nothing waits."""
    assembly("prefetch.global.L2 [{$r0}];", (), [address])


def load_global(address: Int64) -> Uint32:
    """``ld.global.u32``."""
    return assembly("ld.global.u32 {$w0}, [{$r0}];", [Uint32], [address])


def load_global_nc(
    address: Int64, words: int, predicate: Int32 | None = None, offset: int = 0
) -> tuple[Uint32, ...]:
    """``ld.global.nc.L1::no_allocate.v2/.v4.u32``: weights, which no running kernel writes.

    ptxas may move ``.nc`` loads to before ``griddepcontrol.wait``, where results of the preceding
    kernel would be read too early: only for data that no kernel of the stream writes.

    Args:
        address: Global address of the first word, less ``offset``.
        words: 2 or 4.
        predicate: 0 to load nothing, which leaves the result undefined; None to load always.
        offset: Immediate offset in bytes.
    """
    code = f"ld.global.nc.L1::no_allocate.v{words}.u32 {_outs(words)}, [{{$r0}}+{offset}];"
    if predicate is None:
        return assembly(code, [Uint32] * words, [address])
    code = f"{{ .reg .pred p; setp.ne.s32 p, {{$r1}}, 0; @p {code} }}"
    return assembly(code, [Uint32] * words, [address, predicate])


def load_streaming(address: Int64, words: int, offset: int = 0) -> tuple[Uint32, ...]:
    """``ld.global.L1::no_allocate.v2/.v4.u32``: words that are read once."""
    code = f"ld.global.L1::no_allocate.v{words}.u32 {_outs(words)}, [{{$r0}}+{offset}];"
    return assembly(code, [Uint32] * words, [address])


def load_global_float(address: Int64) -> Float32:
    """``ld.global.f32``."""
    return assembly("ld.global.f32 {$w0}, [{$r0}];", [Float32], [address])


def store_global4(address: Int64, words: Sequence[Uint32]) -> None:
    """``st.global.v4.u32`` to a multiple of 16."""
    assembly(f"st.global.v4.u32 [{{$r0}}], {_ins(1, 4)};", (), [address, *words])


def store_shared_float(address: Uint32, value: Float32) -> None:
    """``st.shared.f32``."""
    assembly("st.shared.f32 [{$r0}], {$r1};", (), [address, value])


def store_shared_float2(address: Uint32, a: Float32, b: Float32) -> None:
    """``st.shared.v2.f32`` to a multiple of 8."""
    assembly("st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};", (), [address, a, b])


def store_shared_halves(address: Uint32, word: Uint32, offset: int) -> None:
    """Two ``st.shared.b16``: the low half of a word, the high one ``offset`` bytes on."""
    assembly(
        "{ .reg .b16 l, h; mov.b32 {l, h}, {$r1}; st.shared.b16 [{$r0}], l; "
        f"st.shared.b16 [{{$r0}}+{offset}], h; }}",
        (),
        [address, word],
    )


def store_shared_bfloat16(address: Uint32, value: Float32) -> None:
    """``cvt.rn.bf16.f32``, then ``st.shared.b16``: a float32 as bfloat16."""
    assembly(
        "{ .reg .b16 h; cvt.rn.bf16.f32 h, {$r1}; st.shared.b16 [{$r0}], h; }",
        (),
        [address, value],
    )


def load_shared_float2(address: Uint32) -> tuple[Float32, Float32]:
    """``ld.shared.v2.f32`` from a multiple of 8."""
    return assembly(f"ld.shared.v2.f32 {_outs(2)}, [{{$r0}}];", [Float32] * 2, [address])


def store_shared_float4(address: Uint32, values: Sequence[Float]) -> None:
    """``st.shared.v4.f32`` to a multiple of 16."""
    assembly(f"st.shared.v4.f32 [{{$r0}}], {_ins(1, 4)};", (), [address, *values])


def store_global_float(address: Int64, value: Float32) -> None:
    """``st.global.f32``."""
    assembly("st.global.f32 [{$r0}], {$r1};", (), [address, value])


def load_global_or_zero(
    address: Int64, words: int, predicate: Int32, offset: int = 0
) -> tuple[Uint32, ...]:
    """Predicated ``ld.global.v2/.v4.u32``: zeros, and no access, where ``predicate`` is 0."""
    return _load_or("0", words, address, predicate, offset)


def load_global2_or_ones(address: Int64, predicate: Int32) -> tuple[Uint32, ...]:
    """Predicated ``ld.global.v2.u32``: all bits set, no access, where ``predicate`` is 0."""
    return _load_or("0xFFFFFFFF", 2, address, predicate, 0)


def _load_or(
    default: str, words: int, address: Int64, predicate: Int32, offset: int
) -> tuple[Uint32, ...]:
    moves = " ".join(f"mov.u32 {{$w{i}}}, {default};" for i in range(words))
    load = f"ld.global.v{words}.u32 {_outs(words)}, [{{$r0}}+{offset}];"
    code = f"{{ .reg .pred p; setp.ne.s32 p, {{$r1}}, 0; {moves} @p {load} }}"
    return assembly(code, [Uint32] * words, [address, predicate])


def store_shared4(address: Uint32, words: Sequence[Word], offset: int = 0) -> None:
    """``st.shared.v4.u32`` to a multiple of 16."""
    assembly(f"st.shared.v4.u32 [{{$r0}}+{offset}], {_ins(1, 4)};", (), [address, *words])


def store_global_float2(address: Int64, a: Float32, b: Float32) -> None:
    """``st.global.v2.f32`` to a multiple of 8."""
    assembly("st.global.v2.f32 [{$r0}], {{$r1}, {$r2}};", (), [address, a, b])


def load_global_float2(address: Int64) -> tuple[Float32, Float32]:
    """``ld.global.v2.f32`` from a multiple of 8."""
    return assembly(f"ld.global.v2.f32 {_outs(2)}, [{{$r0}}];", [Float32] * 2, [address])


def store_global2(address: Int64, words: Sequence[Uint32]) -> None:
    """``st.global.v2.u32`` to a multiple of 8."""
    assembly(f"st.global.v2.u32 [{{$r0}}], {_ins(1, 2)};", (), [address, *words])


def load_shared_float(address: Uint32) -> Float32:
    """``ld.shared.f32``."""
    return assembly("ld.shared.f32 {$w0}, [{$r0}];", [Float32], [address])


def atomic_increment(counter: Int64) -> Uint32:
    """``atom.global.add.u32`` of 1, relaxed at GPU scope; returns the value before."""
    return assembly("atom.global.add.u32 {$w0}, [{$r0}], 1;", [Uint32], [counter])


def store_global(address: Int64, word: Uint32) -> None:
    """``st.global.u32``."""
    assembly("st.global.u32 [{$r0}], {$r1};", (), [address, word])


def store_global_if(address: Int64, word: Uint32, predicate: Int32) -> None:
    """Predicated ``st.global.u32``: no access where ``predicate`` is 0."""
    assembly(
        "{ .reg .pred p; setp.ne.s32 p, {$r2}, 0; @p st.global.u32 [{$r0}], {$r1}; }",
        (),
        [address, word, Int32(predicate)],
    )


def store_global_byte(address: Int64, word: Uint32) -> None:
    """``st.global.u8`` of the lowest byte of a word."""
    assembly(
        "{ .reg .b16 h; cvt.u16.u32 h, {$r1}; st.global.u8 [{$r0}], h; }",
        (),
        [address, word],
    )


def shared_to_generic(address: Uint32) -> Int64:
    """``cvta.shared.u64``: the generic 64-bit address of a shared-memory address."""
    code = "{ .reg .u64 a; cvt.u64.u32 a, {$r0}; cvta.shared.u64 {$w0}, a; }"
    return assembly(code, [Int64], [address])


def store_shared2(address: Uint32, words: Sequence[Uint32]) -> None:
    """``st.shared.v2.u32`` to a multiple of 8."""
    assembly(f"st.shared.v2.u32 [{{$r0}}], {_ins(1, 2)};", (), [address, *words])


def store_global_int64(address: Int64, value: Int64) -> None:
    """``st.global.s64``."""
    assembly("st.global.s64 [{$r0}], {$r1};", (), [address, value])


def load_index_saturated(address: Int64, width: Int32) -> Int32:
    """``ld.global.s32`` of an index of 4 or 8 bytes (``width``), saturated to int32.

    A value above the int32 range gives 0x7FFFFFFF, a negative one a negative number.
    """
    return assembly(
        "{ .reg .pred p, q; .reg .s32 l, h; ld.global.s32 l, [{$r0}]; setp.eq.s32 p, {$r1}, 8; "
        "mov.s32 h, 0; @p ld.global.s32 h, [{$r0}+4]; setp.gt.s32 q, h, 0; "
        "@q mov.s32 l, 0x7FFFFFFF; setp.eq.and.s32 q, h, 0, p; setp.lt.and.s32 q, l, 0, q; "
        "@q mov.s32 l, 0x7FFFFFFF; setp.lt.s32 q, h, 0; @q mov.s32 l, -1; mov.s32 {$w0}, l; }",
        [Int32],
        [address, width],
    )


def load_streaming_word(address: Int64, offset: int) -> Uint32:
    """``ld.global.L1::no_allocate.u32``: one word that is read once."""
    code = f"ld.global.L1::no_allocate.u32 {{$w0}}, [{{$r0}}+{offset}];"
    return assembly(code, [Uint32], [address])


def reduce_or_shared(address: Uint32, bits: Uint32) -> None:
    """``red.shared.or.b32``: set bits of a word; relaxed, atomic within the CTA."""
    assembly("red.shared.or.b32 [{$r0}], {$r1};", (), [address, bits])


def element_address(start: Int64, number: Int32, size: Int32 | int) -> Int64:
    """``mad.wide.s32``: ``start + number * size`` as a 64-bit address."""
    return assembly(
        "mad.wide.s32 {$w0}, {$r0}, {$r1}, {$r2};", [Int64], [number, Int32(size), start]
    )


def load_shared_u16(address: Uint32, offset: int) -> Uint32:
    """``ld.shared.u16``, zero-extended to a word."""
    return assembly(f"ld.shared.u16 {{$w0}}, [{{$r0}}+{offset}];", [Uint32], [address])


def load_global_byte(address: Int64) -> Uint32:
    """``ld.global.u8``, zero-extended to a word."""
    code = "{ .reg .b32 a; ld.global.u8 a, [{$r0}]; mov.b32 {$w0}, a; }"
    return assembly(code, [Uint32], [address])


def store_shared_u16(address: Uint32, word: Uint32) -> None:
    """``st.shared.u16`` of the low half of a word."""
    assembly(
        "{ .reg .b16 h; cvt.u16.u32 h, {$r1}; st.shared.u16 [{$r0}], h; }", (), [address, word]
    )
