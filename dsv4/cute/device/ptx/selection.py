"""Steps of the indexer's top-k selection."""

from __future__ import annotations

from collections.abc import Sequence

from cutlass import Float32, Int32, Int64, Uint32

from dsv4.cute.device.ptx._emit import Word, _outs, assembly


def load_keys4(address: Int64, there: Int32) -> tuple[Uint32, ...]:
    """Predicated ``ld.v4.u32`` of generic memory: ``there`` words count, the others are 0."""
    selects = " ".join(
        f"setp.gt.s32 p, {{$r1}}, {i}; selp.u32 {{$w{i}}}, {{$w{i}}}, 0, p;" for i in range(1, 4)
    )
    code = (
        "{ .reg .pred p; setp.gt.s32 p, {$r1}, 0; "
        + " ".join(f"mov.u32 {{$w{i}}}, 0;" for i in range(4))
        + f" @p ld.v4.u32 {_outs(4)}, [{{$r0}}]; {selects} }}"
    )
    return assembly(code, [Uint32] * 4, [address, there])


def count_bucket(counts: Uint32, distance: Uint32, span: Uint32, shift: Uint32) -> None:
    """Predicated ``red.shared.add.u32``: count a key's distance in its bucket.

    Buckets are ``2^shift`` long; bucket 0 and distances beyond ``span`` are not counted. All
    unsigned.
    """
    assembly(
        "{ .reg .pred p; .reg .u32 part; shr.u32 part, {$r1}, {$r3}; setp.le.u32 p, {$r1}, {$r2}; "
        "setp.ne.and.u32 p, part, 0, p; mad.lo.u32 part, part, 4, {$r0}; "
        "@p red.shared.add.u32 [part], 1; }",
        (),
        [counts, distance, span, shift],
    )


def ordered_key(score: Float32) -> Uint32:
    """A word above 0 that orders, unsigned, as scores do: zeros are equal, NaN is highest."""
    return assembly(
        # The sum of zeros is the positive one.
        "{ .reg .pred p; .reg .b32 b, m; .reg .f32 s; add.rn.f32 s, {$r0}, 0f00000000; "
        "mov.b32 b, s; shr.s32 m, b, 31; or.b32 m, m, 0x80000000; xor.b32 b, b, m; "
        "setp.nan.f32 p, {$r0}, {$r0}; @p mov.b32 b, 0xFFFFFFFE; mov.b32 {$w0}, b; }",
        [Uint32],
        [score],
    )


def add_if_above(number: Int32, key: Uint32, bound: Uint32, more: int) -> Int32:
    """``setp.gt.u32``, predicated ``add.s32``: ``number``, plus ``more`` if key > bound."""
    return assembly(
        "{ .reg .pred p; setp.gt.u32 p, {$r1}, {$r2}; mov.b32 {$w0}, {$r0}; "
        f"@p add.s32 {{$w0}}, {{$w0}}, {more}; }}",
        [Int32],
        [number, key, bound],
    )


def append_if_above(
    address: Uint32, words: Sequence[Word], bound: Uint32, key_offset: int
) -> Uint32:
    """Predicated ``st.shared.b32`` of an index, and of its key, if the key is above a bound.

    Args:
        address: Shared-memory address of the index.
        words: The index and its key.
        bound: Unsigned.
        key_offset: Bytes from the index to its key; 0 to store no key.

    Returns:
        The address of the next index.
    """
    key = f"@p st.shared.b32 [{{$r0}}+{key_offset}], {{$r2}}; " if key_offset else ""
    return assembly(
        "{ .reg .pred p; setp.gt.u32 p, {$r2}, {$r3}; @p st.shared.b32 [{$r0}], {$r1}; "
        + key
        + "mov.b32 {$w0}, {$r0}; @p add.u32 {$w0}, {$w0}, 4; }",
        [Uint32],
        [address, *words, bound],
    )
