"""PTX instructions that CuTeDSL has no plain word for, as functions on DSL values.

Shared-memory addresses are 32-bit integers, global ones 64-bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

Value = Any  # a DSL scalar


def assembly(code: str, outputs: Sequence[Any] = (), inputs: Sequence[Value] = ()) -> Any:
    """Results of instructions that name them ``{$w0}`` on, what they read ``{$r0}`` on."""
    return cute.arch.inline_ptx(
        code, write_only_types=list(outputs) or None, read_only_args=list(inputs)
    )


def _outs(count: int) -> str:
    return "{" + ", ".join(f"{{$w{i}}}" for i in range(count)) + "}"


def _ins(first: int, count: int) -> str:
    return "{" + ", ".join(f"{{$r{i}}}" for i in range(first, first + count)) + "}"


def anew(value: Value) -> Value:
    """An integer as it is, of which the compiler computes nothing earlier, to keep until here."""
    return assembly("mov.b32 {$w0}, {$r0};", [Int32], [value])


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


def told_words(address: Value, words: int, lane: Value) -> list[Value]:
    """The first ``words`` of four 32-bit words of shared memory, read by lane 0, told to its warp.

    So no other lane's read has to be before what lane 0 does next.
    """
    moves = " ".join(f"mov.u32 {{$w{i}}}, 0;" for i in range(4))
    code = f"ld.shared.v4.u32 {_outs(4)}, [{{$r0}}];"
    code = f"{{ .reg .pred p; setp.eq.s32 p, {{$r1}}, 0; {moves} @p {code} }}"
    found = assembly(code, [Uint32] * 4, [address, lane])
    return [Uint32(cute.arch.shuffle_sync(word, 0)) for word in found[:words]]


def store_shared_int(address: Value, value: Value) -> None:
    """One 32-bit integer to shared memory."""
    assembly("st.shared.s32 [{$r0}], {$r1};", (), [address, value])


def load_shared_float4(address: Value) -> tuple[Value, ...]:
    """Four float32 from shared memory."""
    return assembly(f"ld.shared.v4.f32 {_outs(4)}, [{{$r0}}];", [Float32] * 4, [address])


def load_matrices4(address: Value, offset: int = 0) -> tuple[Value, ...]:
    """Four 8 x 8 matrices of 16-bit values; lane ``8 i + r`` gives where row r of the i-th is.

    Lane ``l`` gets row ``l // 4``, columns ``2 (l % 4)`` and the next, of each. ``offset`` is part
    of the instruction: added outside, the compiler keeps a register for every offset of a loop.
    """
    code = f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {_outs(4)}, [{{$r0}}+{offset}];"
    return assembly(code, [Uint32] * 4, [address])


def turn_matrix(word: Value) -> Value:
    """An 8 x 8 matrix of 16-bit values, a lane's two in a word, transposed."""
    return assembly("movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};", [Uint32], [word])


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


def multiply_by_half(a: Value, b: Value, half: int) -> Value:
    """Both bfloat16 of ``a`` times the low (0) or high (1) one of ``b``; subnormals are kept."""
    one = "lh"[half]
    return assembly(
        "{ .reg .b16 l, h; .reg .b32 d; mov.b32 {l, h}, {$r1}; "
        f"mov.b32 d, {{{one}, {one}}}; mul.rn.bf16x2 {{$w0}}, {{$r0}}, d; }}",
        [Uint32],
        [a, b],
    )


def multiply_add(a: Value, b: Value, c: Value) -> Value:
    """``a b + c``, 32 bits."""
    return assembly("mad.lo.u32 {$w0}, {$r0}, {$r1}, {$r2};", [Uint32], [a, b, c])


def high_product(a: Value, b: Value) -> Value:
    """The upper 32 bits of a product."""
    return assembly("mul.hi.u32 {$w0}, {$r0}, {$r1};", [Uint32], [a, b])


def rotated(word: Value, bits: int) -> Value:
    """The word rotated to the right."""
    return assembly(f"shf.r.wrap.b32 {{$w0}}, {{$r0}}, {{$r0}}, {bits};", [Uint32], [word])


def permute_bytes(word: Value, selector: int) -> Value:
    """Bytes of ``word`` (0 to 3) and zeros (4), four of them named by the selector's nibbles."""
    return assembly("prmt.b32 {$w0}, {$r0}, 0, " + f"{selector:#x};", [Uint32], [word])


def mma_m16n8k16(d: Sequence[Value], a: Sequence[Value], b: Sequence[Value]) -> list[Value]:
    """``d + a b``: bfloat16 fragments, float32 sums."""
    code = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        f"{_outs(4)}, {_ins(0, 4)}, {_ins(4, 2)}, {_ins(6, 4)};"
    )
    return list(assembly(code, [Float32] * 4, [*a, *b, *d]))


def barrier_init(barrier: Value, arrivals: int) -> None:
    """Make a shared-memory barrier that a phase of so many arrivals completes."""
    assembly("mbarrier.init.shared::cta.b64 [{$r0}], " + f"{arrivals};", (), [barrier])


def fence_barrier_init() -> None:
    """Make initialised barriers visible to the cluster and to asynchronous copies."""
    assembly("fence.mbarrier_init.release.cluster;")


def expect_bytes(barrier: Value, count: Any) -> None:
    """Arrive, and let the phase wait for so many bytes as well."""
    assembly(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{$r0}], {$r1};", (), [barrier, Int32(count)]
    )


def wait(barrier: Value, parity: Value) -> None:
    """Wait until the phase of that parity has ended."""
    assembly(
        "{ .reg .pred p; AGAIN: "
        "mbarrier.try_wait.parity.shared::cta.b64 p, [{$r0}], {$r1}, 0x989680; "
        "@!p bra AGAIN; }",
        (),
        [barrier, parity],
    )


def arrive_remote(barrier: Value) -> None:
    """Arrive at a barrier of another block of the cluster: this thread has read what it may."""
    assembly("mbarrier.arrive.shared::cluster.b64 _, [{$r0}];", (), [barrier])


def load_shared_float2(address: Value) -> tuple[Value, ...]:
    """Two float32 from shared memory."""
    return assembly(f"ld.shared.v2.f32 {_outs(2)}, [{{$r0}}];", [Float32] * 2, [address])


def remote(address: Value, rank: Value) -> Value:
    """The cluster-wide address of a shared-memory address in the block of that rank."""
    return assembly("mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", [Uint32], [address, rank])


def store_remote4(address: Value, values: Sequence[Value], barrier: Value, offset: int = 0) -> None:
    """Write four float32 to a block of the cluster, counted there by its barrier."""
    assembly(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
        f"[{{$r0}}+{offset}], {_ins(1, 4)}, [{{$r5}}];",
        (),
        [address, *values, barrier],
    )


def store_cluster4(address: Value, words: Sequence[Value]) -> None:
    """Four 32-bit words to a cluster-wide address of shared memory."""
    assembly(f"st.shared::cluster.v4.u32 [{{$r0}}], {_ins(1, 4)};", (), [address, *words])


def store_cluster(address: Value, word: Value) -> None:
    """One 32-bit word to a cluster-wide address of shared memory."""
    assembly("st.shared::cluster.u32 [{$r0}], {$r1};", (), [address, word])


def copy_bulk(target: Value, source: Value, count: Any, barrier: Value) -> None:
    """Copy bytes (a multiple of 16) from global to shared memory, counted by the barrier."""
    assembly(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
        (),
        [target, source, Int32(count), barrier],
    )


def copy_bulk_remote(target: Value, source: Value, count: int, barrier: Value) -> None:
    """Copy bytes (a multiple of 16) to another block's shared memory, counted by its barrier."""
    assembly(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
        (),
        [target, source, Int32(count), barrier],
    )


def prefetch_bulk(source: Value, count: Any) -> None:
    """Bring bytes (a multiple of 16) of global memory to the level-2 cache."""
    assembly("cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};", (), [source, Int32(count)])


def arrive(barrier: Value) -> None:
    """Arrive; what this thread read or wrote before comes before the phase ends."""
    assembly("mbarrier.arrive.shared::cta.b64 _, [{$r0}];", (), [barrier])


def arrive_counted(barrier: Value) -> Value:
    """Arrive; how many arrivals the phase still wanted, 1 for the last one."""
    return assembly(
        "{ .reg .b64 s; mbarrier.arrive.shared::cta.b64 s, [{$r0}]; "
        "mbarrier.pending_count.b64 {$w0}, s; }",
        [Uint32],
        [barrier],
    )


def store_shared_float4(address: Value, values: Sequence[Value]) -> None:
    """Four float32 to shared memory."""
    assembly(f"st.shared.v4.f32 [{{$r0}}], {_ins(1, 4)};", (), [address, *values])


def load_remote_float4(address: Value) -> tuple[Value, ...]:
    """Four float32 from a cluster-wide address of shared memory."""
    return assembly(f"ld.shared::cluster.v4.f32 {_outs(4)}, [{{$r0}}];", [Float32] * 4, [address])


def store_matrices2_turned(address: Value, a: Value, b: Value) -> None:
    """Two 8 x 8 matrices of 16-bit values, transposed; lane ``8 i + r`` says where column r is."""
    code = "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [{$r0}], "
    assembly(code + _ins(1, 2) + ";", (), [address, a, b])


def store_matrices4_turned(address: Value, words: Sequence[Value]) -> None:
    """Four 8 x 8 matrices of 16-bit values, transposed; lane ``8 i + r`` says where column r is."""
    code = "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], "
    assembly(code + _ins(1, 4) + ";", (), [address, *words])


def same_halves(a: Value, b: Value, half: int) -> Value:
    """The lower (0) or upper (1) halves of two words, in one word."""
    selector = (0x5410, 0x7632)[half]
    return assembly(f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector:#x};", [Uint32], [a, b])


def store_global_float(address: Value, value: Value) -> None:
    """One float32."""
    assembly("st.global.f32 [{$r0}], {$r1};", (), [address, value])


def bfloat16_pair(low: Value, high: Value) -> Value:
    """Two float32 rounded to nearest even, in one word."""
    return assembly("cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", [Uint32], [low, high])


def pack_sums(values: Sequence[Value]) -> tuple[Value, ...]:
    """Eight float32 in five words, as 20 bits each: sign, exponent and 11 bits of the fraction.

    The bits left out are made up for by a factor, so that a value is off by 2^-11.6 of it at most,
    and on average by nothing. Infinities stay such, and NaN, of which arithmetic has one with all
    bits set. Words 0 to 3 are upper halves of two values each; bits 15 to 12 are in word 4, of
    values 4 to 7 in the lower halves of its bytes.
    """
    names = [f"{c}{i}" for c in "xa" for i in range(8)]
    code = [f".reg .f32 {', '.join(names[:8])};", f".reg .b32 {', '.join(names[8:])}, p, q, s, t;"]
    for i in range(8):
        # 1 + 2^-12.5
        code += [f"mul.rn.f32 x{i}, {{$r{i}}}, 0f3F8005A8;", f"mov.b32 a{i}, x{i};"]
    code += [f"prmt.b32 {{$w{i}}}, a{2 * i}, a{2 * i + 1}, 0x7632;" for i in range(4)]
    for first, four in ((0, "s"), (4, "t")):
        code += [
            f"prmt.b32 p, a{first}, a{first + 1}, 0x0051;",
            f"prmt.b32 q, a{first + 2}, a{first + 3}, 0x0051;",
            f"prmt.b32 {four}, p, q, 0x5410;",
        ]
    code += ["shr.u32 t, t, 4;", "lop3.b32 {$w4}, 0x0f0f0f0f, t, s, 0xca;"]
    return assembly("{ " + " ".join(code) + " }", [Uint32] * 5, list(values))


def unpack_sums(words: Sequence[Value], fifth: Value, half: Value) -> tuple[Value, ...]:
    """Four float32 of two of ``pack_sums``' words and the fifth; ``half``: 0 or 1, which four.

    Bits 7 to 4 repeat bits 15 to 12.
    """
    code = [".reg .b32 s;", "shl.b32 s, {$r2}, {$r3};", "and.b32 s, s, 0xf0f0f0f0;"]
    for i, selector in enumerate(("0x1044", "0x3255", "0x1066", "0x3277")):
        code.append(f"prmt.b32 {{$w{i}}}, {{$r{i // 2}}}, s, {selector};")
    return assembly("{ " + " ".join(code) + " }", [Float32] * 4, [*words, fifth, 4 * Int32(half)])


def unpack_all_sums(words: Sequence[Value]) -> list[Value]:
    """The eight float32 of ``pack_sums``' five words."""
    halves = [unpack_sums(words[2 * h : 2 * h + 2], words[4], h) for h in range(2)]
    return [*halves[0], *halves[1]]


def absolute(value: Value) -> Value:
    """The float32 without its sign."""
    return assembly("abs.f32 {$w0}, {$r0};", [Float32], [value])


def nan_if(value: Value, flag: Value) -> Value:
    """NaN where the flag is not zero, else the value."""
    return assembly(
        "{ .reg .pred p; setp.ne.u32 p, {$r1}, 0; selp.f32 {$w0}, 0f7FC00000, {$r0}, p; }",
        [Float32],
        [value, flag],
    )


def choose(condition: Value, yes: Value, no: Value) -> Value:
    """One of two float32."""
    return assembly(
        "{ .reg .pred p; setp.ne.u32 p, {$r0}, 0; selp.f32 {$w0}, {$r1}, {$r2}, p; }",
        [Float32],
        [Uint32(condition), yes, no],
    )


def swiglu(gate: Value, up: Value, limit: Value) -> Value:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)``; NaN unless gate and up are finite.

    exp and the reciprocal are the hardware's; by their documented errors, within 1e-5 together. 0
    for gates below -87.3, whose silu is above -1.2e-36. Zeros may lose their sign.
    """
    # What is not finite makes NaN of a product with 0.
    return assembly(
        "{ .reg .f32 g, u, l, d; "
        "min.f32 g, {$r0}, {$r2}; neg.f32 l, {$r2}; "
        "min.f32 u, {$r1}, {$r2}; max.f32 u, u, l; "
        "mul.f32 d, g, 0fBFB8AA3B; ex2.approx.ftz.f32 d, d; add.f32 d, d, 0f3F800000; "
        "rcp.approx.ftz.f32 d, d; mul.f32 g, g, d; mul.f32 g, g, u; "
        "fma.rn.f32 g, {$r0}, 0f00000000, g; fma.rn.f32 {$w0}, {$r1}, 0f00000000, g; }",
        [Float32],
        [gate, up, limit],
    )


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


def copy_or_zero(target: Value, source: Value, count: Value, to: int = 0, offset: int = 0) -> None:
    """16 bytes from global to shared memory: ``count`` of them (0 or 16), then zeros.

    ``to`` and ``offset``: bytes beyond target and source, parts of the instruction.
    """
    assembly(
        f"cp.async.cg.shared.global [{{$r0}}+{to}], [{{$r1}}+{offset}], 16, {{$r2}};",
        (),
        [target, source, count],
    )


def copy_word_or_zero(target: Value, source: Value, count: Value) -> None:
    """4 bytes from global to shared memory: ``count`` of them (0 or 4), then zeros."""
    code = "cp.async.ca.shared.global [{$r0}], [{$r1}], 4, {$r2};"
    assembly(code, (), [target, source, count])


def copy16(target: Value, source: Value, to: int = 0, offset: int = 0) -> None:
    """16 bytes from global to shared memory; ``to`` and ``offset``: see ``copy_or_zero``."""
    assembly(
        f"cp.async.cg.shared.global [{{$r0}}+{to}], [{{$r1}}+{offset}], 16;", (), [target, source]
    )


def copy8(target: Value, source: Value, to: int = 0, offset: int = 0) -> None:
    """8 bytes from global to shared memory; ``to`` and ``offset``: see ``copy_or_zero``."""
    assembly(
        f"cp.async.ca.shared.global [{{$r0}}+{to}], [{{$r1}}+{offset}], 8;", (), [target, source]
    )


def arrive_copied(barrier: Value) -> None:
    """This thread arrives when its copies so far have arrived."""
    assembly("cp.async.mbarrier.arrive.noinc.shared.b64 [{$r0}];", (), [barrier])


def commit_copies() -> None:
    """This thread's copies since the last such call are a group."""
    assembly("cp.async.commit_group;")


def wait_copies(groups: int) -> None:
    """All but the last so many groups of this thread's copies have arrived."""
    assembly(f"cp.async.wait_group {groups};")


def fence_shared() -> None:
    """What this thread wrote to shared memory comes before what tensor cores read there."""
    assembly("fence.proxy.async.shared::cta;")


def maximum(a: Value, b: Value) -> Value:
    """The larger of two float32; of a NaN and a number the number."""
    return assembly("max.f32 {$w0}, {$r0}, {$r1};", [Float32], [a, b])


def multiply_add_float(a: Value, b: Value, c: Value) -> Value:
    """``a b + c``, rounded once."""
    return assembly("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", [Float32], [a, b, c])


def turn_back(even: Value, odd: Value, cos: Value, sin: Value) -> tuple[Value, ...]:
    """A pair by the opposite of an angle: ``(even cos + odd sin, odd cos - even sin)``."""
    code = (
        "{ .reg .f32 a, b, m; mul.rn.f32 a, {$r1}, {$r3}; neg.f32 m, {$r3}; "
        "mul.rn.f32 b, {$r0}, m; "
        "fma.rn.f32 {$w0}, {$r0}, {$r2}, a; fma.rn.f32 {$w1}, {$r1}, {$r2}, b; }"
    )
    return assembly(code, [Float32, Float32], [even, odd, cos, sin])


def power_of_two(value: Value) -> Value:
    """``2^value`` by the hardware, within 2^-22; subnormals are 0."""
    return assembly("ex2.approx.ftz.f32 {$w0}, {$r0};", [Float32], [value])


def low_float(word: Value) -> Value:
    """The lower bfloat16 of a word, as float32."""
    return assembly("{ .reg .b32 t; shl.b32 t, {$r0}, 16; mov.b32 {$w0}, t; }", [Float32], [word])


def high_float(word: Value) -> Value:
    """The upper bfloat16 of a word, as float32."""
    code = "{ .reg .b32 t; and.b32 t, {$r0}, 0xFFFF0000; mov.b32 {$w0}, t; }"
    return assembly(code, [Float32], [word])


def choose_word(condition: Value, yes: Value, no: Value) -> Value:
    """One of two 32-bit words."""
    return assembly(
        "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; selp.b32 {$w0}, {$r1}, {$r2}, p; }",
        [Uint32],
        [Int32(condition), yes, no],
    )


def e4m3_pair(word: Value, half: int, factor: Value) -> Value:
    """Two E4M3 codes, the lower (0) or upper (1), times a pair of bfloat16, as bfloat16."""
    one = "lh"[half]
    return assembly(
        "{ .reg .b16 l, h, x, y; .reg .b32 d; .reg .f32 a, b; "
        f"mov.b32 {{l, h}}, {{$r0}}; cvt.rn.f16x2.e4m3x2 d, {one}; mov.b32 {{x, y}}, d; "
        "cvt.f32.f16 a, x; cvt.f32.f16 b, y; cvt.rn.bf16x2.f32 d, b, a; "
        "mul.rn.bf16x2 {$w0}, d, {$r1}; }",
        [Uint32],
        [word, factor],
    )


def e8m0_pair(byte: Value) -> Value:
    """``2^(byte - 127)`` as bfloat16, twice; NaN of 255."""
    return assembly(
        "{ .reg .u32 t; .reg .pred p; mul.lo.u32 {$w0}, {$r0}, 0x800080; "
        # Byte 0 is subnormal; of byte 255 the shifted bits are infinity's. Both want bit 6.
        "add.u32 t, {$r0}, 1; and.b32 t, t, 0xFE; setp.eq.u32 p, t, 0; "
        "@p or.b32 {$w0}, {$w0}, 0x400040; }",
        [Uint32],
        [byte],
    )


def store_global2(address: Value, words: Sequence[Value]) -> None:
    """Two 32-bit words to an address that is a multiple of 8."""
    assembly(f"st.global.v2.u32 [{{$r0}}], {_ins(1, 2)};", (), [address, *words])


def load_shared_float(address: Value) -> Value:
    """One float32 from shared memory."""
    return assembly("ld.shared.f32 {$w0}, [{$r0}];", [Float32], [address])


def store_matrices4(address: Value, words: Sequence[Value]) -> None:
    """Four 8 x 8 matrices of 16-bit values; lane ``8 i + r`` says where row r of the i-th is."""
    code = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], "
    assembly(code + _ins(1, 4) + ";", (), [address, *words])


def larger_halves(a: Value, b: Value) -> Value:
    """The larger one of two unsigned 16-bit numbers, in both halves."""
    return assembly("max.u16x2 {$w0}, {$r0}, {$r1};", [Uint32], [a, b])


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


def load_keys4(address: Value, there: Value) -> tuple[Value, ...]:
    """Four words of any memory, of which the first ``there`` count; the others are 0."""
    selects = " ".join(
        f"setp.gt.s32 p, {{$r1}}, {i}; selp.u32 {{$w{i}}}, {{$w{i}}}, 0, p;" for i in range(1, 4)
    )
    code = (
        "{ .reg .pred p; setp.gt.s32 p, {$r1}, 0; "
        + " ".join(f"mov.u32 {{$w{i}}}, 0;" for i in range(4))
        + f" @p ld.v4.u32 {_outs(4)}, [{{$r0}}]; {selects} }}"
    )
    return assembly(code, [Uint32] * 4, [address, there])


def store_shared2(address: Value, words: Sequence[Value]) -> None:
    """Two 32-bit words to shared memory."""
    assembly(f"st.shared.v2.u32 [{{$r0}}], {_ins(1, 2)};", (), [address, *words])


def store_global_int64(address: Value, value: Value) -> None:
    """One 64-bit integer."""
    assembly("st.global.s64 [{$r0}], {$r1};", (), [address, value])


def count_part(counts: Value, distance: Value, span: Value, shift: Value) -> None:
    """Add 1 to the number of a distance's part in shared memory, but of part 0 and beyond ``span``.

    Parts are ``2^shift`` long; all unsigned.
    """
    assembly(
        "{ .reg .pred p; .reg .u32 part; shr.u32 part, {$r1}, {$r3}; setp.le.u32 p, {$r1}, {$r2}; "
        "setp.ne.and.u32 p, part, 0, p; mad.lo.u32 part, part, 4, {$r0}; "
        "@p red.shared.add.u32 [part], 1; }",
        (),
        [counts, distance, span, shift],
    )


def sum_of_warp(value: Value) -> Value:
    """The sum of all lanes' integers."""
    return assembly("redux.sync.add.s32 {$w0}, {$r0}, 0xffffffff;", [Int32], [value])


def highest_of_warp(value: Value) -> Value:
    """The highest of all lanes' unsigned integers."""
    return assembly("redux.sync.max.u32 {$w0}, {$r0}, 0xffffffff;", [Uint32], [value])


def lowest_of_warp(value: Value) -> Value:
    """The lowest of all lanes' unsigned integers."""
    return assembly("redux.sync.min.u32 {$w0}, {$r0}, 0xffffffff;", [Uint32], [value])


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


def signed_codes(word: Value, low: Value, high: Value, half: Value) -> tuple[Value, ...]:
    """Eight E2M1 codes as signed bytes, codes 0 to 3 and 4 to 7.

    ``half`` is 2^16, of which the compiler must not know: products take less time than shifts.

    ``low`` and ``high``: bytes, below 128, that the codes 0 to 3 and 4 to 7 without a sign stand
    for. A selector with the sign's bit gives zero instead of one of them.
    """
    one = (
        "prmt.b32 p, {{$r1}}, {{$r2}}, {0}; prmt.b32 n, {{$r1}}, {{$r2}}, {1}; "
        "add.u32 p, p, 0x80808080; sub.u32 p, p, n; xor.b32 {{$w{2}}}, p, 0x80808080; "
    )
    return assembly(
        "{ .reg .b32 x, y, z, p, n; xor.b32 x, {$r0}, 0x88888888; mul.hi.u32 y, {$r0}, {$r3}; "
        "mul.hi.u32 z, x, {$r3}; " + one.format("{$r0}", "x", 0) + one.format("y", "z", 1) + "}",
        [Uint32, Uint32],
        [word, low, high, half],
    )


def largest_byte(word: Value) -> Value:
    """The largest of four unsigned bytes."""
    return assembly(
        "{ .reg .b32 a, b; shl.b32 a, {$r0}, 8; max.u16x2 a, a, {$r0}; shl.b32 b, a, 16; "
        "max.u32 a, a, b; shr.u32 {$w0}, a, 24; }",
        [Uint32],
        [word],
    )


def largest_bytes(a: Value, b: Value) -> Value:
    """The largest of four unsigned bytes, of two words, each in both bytes of a half."""
    return assembly(
        "{ .reg .b32 x, y, z; shl.b32 x, {$r0}, 8; max.u16x2 x, x, {$r0}; "
        "shl.b32 y, {$r1}, 8; max.u16x2 y, y, {$r1}; prmt.b32 z, x, y, 0x5410; "
        "prmt.b32 x, x, y, 0x7632; max.u16x2 x, x, z; prmt.b32 {$w0}, x, x, 0x3311; }",
        [Uint32],
        [a, b],
    )


def bytes_of(a: Value, b: Value, number: Value) -> Value:
    """The same byte of two words, each in both bytes of a half."""
    code = "{ .reg .b32 s; mad.lo.u32 s, {$r2}, 0x1111, 0x4400; prmt.b32 {$w0}, {$r0}, {$r1}, s; }"
    return assembly(code, [Uint32], [a, b, number])


def halved(number: Value, times: Value) -> Value:
    """The number halved so many times, of which the lower five bits count."""
    code = "{ .reg .b32 z; mov.b32 z, 0; shf.r.wrap.b32 {$w0}, {$r0}, z, {$r1}; }"
    return assembly(code, [Uint32], [number, times])


def highest_half(word: Value) -> Value:
    """The higher one of a word's halves."""
    return assembly(
        "{ .reg .b32 l, h; and.b32 l, {$r0}, 0xFFFF; shr.u32 h, {$r0}, 16; max.u32 {$w0}, l, h; }",
        [Uint32],
        [word],
    )


def e8m0(byte: Value) -> Value:
    """``2^(byte - 127)``; NaN of 255."""
    return assembly(
        "{ .reg .b32 t; .reg .pred p; shl.b32 t, {$r0}, 23; setp.eq.u32 p, {$r0}, 0; "
        "@p mov.b32 t, 0x00400000; setp.eq.u32 p, {$r0}, 255; @p mov.b32 t, 0x7FC00000; "
        "mov.b32 {$w0}, t; }",
        [Float32],
        [byte],
    )


def float_of(word: Value) -> Value:
    """The float32 of these bits."""
    return assembly("mov.b32 {$w0}, {$r0};", [Float32], [word])


def byte_of(word: Value, number: Value) -> Value:
    """One of four bytes."""
    code = "{ .reg .b32 s; or.b32 s, {$r1}, 0x4440; prmt.b32 {$w0}, {$r0}, 0, s; }"
    return assembly(code, [Uint32], [word, number])


def ordered(score: Value) -> Value:
    """An unsigned integer above 0 that orders as scores do: zeros are equal, NaN is the highest."""
    return assembly(
        # The sum of zeros is the positive one.
        "{ .reg .pred p; .reg .b32 b, m; .reg .f32 s; add.rn.f32 s, {$r0}, 0f00000000; "
        "mov.b32 b, s; shr.s32 m, b, 31; or.b32 m, m, 0x80000000; xor.b32 b, b, m; "
        "setp.nan.f32 p, {$r0}, {$r0}; @p mov.b32 b, 0xFFFFFFFE; mov.b32 {$w0}, b; }",
        [Uint32],
        [score],
    )


def mma_m16n8k32(d: Sequence[Value], a: Sequence[Value], b: Sequence[Value]) -> tuple[Value, ...]:
    """``d`` and the product of 16 x 32 and 32 x 8 signed bytes."""
    code = (
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        f"{_outs(4)}, {_ins(4, 4)}, {_ins(8, 2)}, {_ins(0, 4)};"
    )
    return assembly(code, [Int32] * 4, [*d, *a, *b])


def any_bits_of_warp(value: Value) -> Value:
    """The bits that any lane has set."""
    return assembly("redux.sync.or.b32 {$w0}, {$r0}, 0xffffffff;", [Uint32], [value])


def set_shared_bits(address: Value, bits: Value) -> None:
    """Set bits of a word of shared memory, whoever else does."""
    assembly("red.shared.or.b32 [{$r0}], {$r1};", (), [address, bits])


def float_of_int(value: Value) -> Value:
    """The nearest float32."""
    return assembly("cvt.rn.f32.s32 {$w0}, {$r0};", [Float32], [value])


def lowest_bit(low: Value, high: Value) -> Value:
    """The number of the lowest bit that is set of 64, of which one is."""
    return assembly(
        "{ .reg .u64 a; mov.b64 a, {{$r0}, {$r1}}; brev.b64 a, a; clz.b64 {$w0}, a; }",
        [Int32],
        [low, high],
    )


def add_positive(bits: Value, factor: Value, total: Value) -> Value:
    """The sum of a total and a factor times an integer, if that is positive, times 2^-22.

    Bits of negative ones are those of NaN, which a saturating product makes 0.
    """
    return assembly(
        "{ .reg .f32 f; mov.b32 f, {$r0}; mul.rn.sat.f32 f, f, 0f7F000000; "
        "fma.rn.f32 {$w0}, f, {$r1}, {$r2}; }",
        [Float32],
        [bits, factor, total],
    )


def codes_from_tables(word: Value, tables: Sequence[Value], less: Value) -> tuple[Value, ...]:
    """Eight E2M1 codes as the bytes that they stand for, codes 0 to 3 and 4 to 7.

    ``tables``: bytes, below 128, of the codes 0 to 3 and 4 to 7 without a sign, and of 7 to 4 and
    3 to 0 with one. ``less``: -1, of which the compiler must not know: as products the complements,
    whose selectors have no sign where the codes have one, leave the logic pipe alone.
    """
    one = (
        "prmt.b32 p, {{$r1}}, {{$r2}}, {0}; prmt.b32 n, {{$r3}}, {{$r4}}, {1}; "
        "add.u32 {{$w{2}}}, p, n; "
    )
    return assembly(
        "{ .reg .b32 x, y, z, p, n; mad.lo.u32 x, {$r0}, {$r5}, {$r5}; shr.u32 y, {$r0}, 16; "
        "mad.lo.u32 z, y, {$r5}, {$r5}; "
        + one.format("{$r0}", "x", 0)
        + one.format("y", "z", 1)
        + "}",
        [Uint32, Uint32],
        [word, *tables, less],
    )


def sum_of_bytes(word: Value, total: Value) -> Value:
    """A total and the sum of four signed bytes."""
    return assembly("dp4a.s32.s32 {$w0}, {$r0}, 0x01010101, {$r1};", [Int32], [word, total])


def from_lane(value: Value, distance: int) -> Value:
    """The word of the lane whose number differs by these bits."""
    code = f"shfl.sync.bfly.b32 {{$w0}}, {{$r0}}, {distance}, 31, 0xffffffff;"
    return assembly(code, [Uint32], [value])


def place(start: Value, number: Value, size: Value) -> Value:
    """The address of one of several things of so many bytes."""
    return assembly(
        "mad.wide.s32 {$w0}, {$r0}, {$r1}, {$r2};", [Int64], [number, Int32(size), start]
    )


def add_if_above(number: Value, key: Value, bound: Value, more: int) -> Value:
    """A number, and ``more`` if a key is above a bound."""
    return assembly(
        "{ .reg .pred p; setp.gt.u32 p, {$r1}, {$r2}; mov.b32 {$w0}, {$r0}; "
        f"@p add.s32 {{$w0}}, {{$w0}}, {more}; }}",
        [Int32],
        [number, key, bound],
    )


def append_if_above(place: Value, words: Sequence[Value], bound: Value, apart: int) -> Value:
    """Store a position, and ``apart`` bytes behind it its key, if that is above a bound.

    ``apart``: 0: the key is not stored.

    Returns:
        The place of the next in shared memory.
    """
    key = f"@p st.shared.b32 [{{$r0}}+{apart}], {{$r2}}; " if apart else ""
    return assembly(
        "{ .reg .pred p; setp.gt.u32 p, {$r2}, {$r3}; @p st.shared.b32 [{$r0}], {$r1}; "
        + key
        + "mov.b32 {$w0}, {$r0}; @p add.u32 {$w0}, {$w0}, 4; }",
        [Uint32],
        [place, *words, bound],
    )


def load_shared_pair(address: Value, offset: int) -> Value:
    """Two bytes from shared memory, in a word; ``offset``: see ``load_matrices4``."""
    return assembly(f"ld.shared.u16 {{$w0}}, [{{$r0}}+{offset}];", [Uint32], [address])


def e4m3_to_bfloat16(pair: Value) -> Value:
    """The two E4M3 codes in a word's lower half as a pair of bfloat16; NaN stays NaN.

    Through float32: the conversion from float16 to bfloat16 has a sixteenth of its rate.
    """
    return assembly(
        "{ .reg .b16 l, h, x, y; .reg .b32 d; .reg .f32 a, b; "
        "mov.b32 {l, h}, {$r0}; cvt.rn.f16x2.e4m3x2 d, l; mov.b32 {x, y}, d; "
        "cvt.f32.f16 a, x; cvt.f32.f16 b, y; cvt.rn.bf16x2.f32 {$w0}, b, a; }",
        [Uint32],
        [pair],
    )


def load_byte(address: Value) -> Value:
    """One byte of global memory, in a word."""
    code = "{ .reg .b32 a; ld.global.u8 a, [{$r0}]; mov.b32 {$w0}, a; }"
    return assembly(code, [Uint32], [address])


def multiply_pair(a: Value, b: Value) -> Value:
    """Two products of bfloat16, each rounded once."""
    return assembly("mul.bf16x2 {$w0}, {$r0}, {$r1};", [Uint32], [a, b])
