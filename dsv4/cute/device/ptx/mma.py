"""Tensor-core products of a warp, and moves of their operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Uint32

from dsv4.cute.device.ptx._emit import _ins, _outs, assembly

Value = Any  # a DSL scalar


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


def mma_m16n8k16(d: Sequence[Value], a: Sequence[Value], b: Sequence[Value]) -> list[Value]:
    """``d + a b``: bfloat16 fragments, float32 sums."""
    code = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        f"{_outs(4)}, {_ins(0, 4)}, {_ins(4, 2)}, {_ins(6, 4)};"
    )
    return list(assembly(code, [Float32] * 4, [*a, *b, *d]))


def store_matrices2_turned(address: Value, a: Value, b: Value) -> None:
    """Two 8 x 8 matrices of 16-bit values, transposed; lane ``8 i + r`` says where column r is."""
    code = "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [{$r0}], "
    assembly(code + _ins(1, 2) + ";", (), [address, a, b])


def store_matrices4_turned(address: Value, words: Sequence[Value]) -> None:
    """Four 8 x 8 matrices of 16-bit values, transposed; lane ``8 i + r`` says where column r is."""
    code = "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], "
    assembly(code + _ins(1, 4) + ";", (), [address, *words])


def store_matrices4(address: Value, words: Sequence[Value]) -> None:
    """Four 8 x 8 matrices of 16-bit values; lane ``8 i + r`` says where row r of the i-th is."""
    code = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], "
    assembly(code + _ins(1, 4) + ";", (), [address, *words])


def mma_m16n8k32(d: Sequence[Value], a: Sequence[Value], b: Sequence[Value]) -> tuple[Value, ...]:
    """``d`` and the product of 16 x 32 and 32 x 8 signed bytes."""
    code = (
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        f"{_outs(4)}, {_ins(4, 4)}, {_ins(8, 2)}, {_ins(0, 4)};"
    )
    return assembly(code, [Int32] * 4, [*d, *a, *b])
