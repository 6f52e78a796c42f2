"""Warp-level matrix instructions. All 32 lanes of a warp execute each of them together."""

from __future__ import annotations

from collections.abc import Sequence

from cutlass import Float32, Int32, Uint32

from dsv4.cute.device.ptx._emit import Word, _ins, _outs, assembly


def ldmatrix_x4(address: Uint32, offset: int = 0) -> tuple[Uint32, ...]:
    """``ldmatrix.m8n8.x4.b16``: four 8 x 8 matrices of 16-bit values from shared memory.

    Lane ``8 i + r`` passes the address of row r of matrix i. Lane ``l`` receives row ``l // 4``,
    columns ``2 (l % 4)`` and the next, of each matrix.
    """
    code = f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {_outs(4)}, [{{$r0}}+{offset}];"
    return assembly(code, [Uint32] * 4, [address])


def movmatrix_transpose(word: Uint32) -> Uint32:
    """``movmatrix.trans``: the transpose of an 8 x 8 matrix of 16-bit values.

    Operand and result hold, in lane ``l``, row ``l // 4``, columns ``2 (l % 4)`` and the next.
    """
    return assembly("movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};", [Uint32], [word])


def mma_m16n8k16_bf16(
    d: Sequence[Float32], a: Sequence[Uint32], b: Sequence[Uint32]
) -> list[Float32]:
    """``mma.m16n8k16``: ``d + a b``, bfloat16 operands, float32 accumulators.

    Args:
        d: Four accumulators: row ``lane // 4``, columns ``2 (lane % 4)`` and the next, then row
            ``lane // 4 + 8`` in the same columns.
        a: Four words: rows ``lane // 4`` and ``lane // 4 + 8`` of columns ``2 (lane % 4)`` and the
            next, then the same rows 8 columns on.
        b: Two words: column ``lane // 4``, rows ``2 (lane % 4)`` and the next, then 8 rows on.
    """
    code = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        f"{_outs(4)}, {_ins(0, 4)}, {_ins(4, 2)}, {_ins(6, 4)};"
    )
    return list(assembly(code, [Float32] * 4, [*a, *b, *d]))


def stmatrix_x2_transposed(address: Uint32, a: Uint32, b: Uint32) -> None:
    """``stmatrix.m8n8.x2.trans.b16``: two 8 x 8 matrices to shared memory, transposed.

    Lane ``8 i + r`` (the first 16 count) passes the address where column r of matrix i becomes a
    row.
    """
    code = "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [{$r0}], "
    assembly(code + _ins(1, 2) + ";", (), [address, a, b])


def stmatrix_x4_transposed(address: Uint32, words: Sequence[Uint32]) -> None:
    """``stmatrix.m8n8.x4.trans.b16``: four 8 x 8 matrices, transposed.

    Lane ``8 i + r`` passes the address where column r of matrix i becomes a row.
    """
    code = "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], "
    assembly(code + _ins(1, 4) + ";", (), [address, *words])


def stmatrix_x4(address: Uint32, words: Sequence[Word]) -> None:
    """``stmatrix.m8n8.x4.b16``: four 8 x 8 matrices of 16-bit values to shared memory.

    Lane ``8 i + r`` passes the address of row r of matrix i.
    """
    code = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], "
    assembly(code + _ins(1, 4) + ";", (), [address, *words])


def mma_m16n8k32_s8(
    d: Sequence[Int32], a: Sequence[Uint32], b: Sequence[Uint32]
) -> tuple[Int32, ...]:
    """``mma.m16n8k32``: ``d + a b``, signed bytes, exact int32 accumulators."""
    code = (
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        f"{_outs(4)}, {_ins(4, 4)}, {_ins(8, 2)}, {_ins(0, 4)};"
    )
    return assembly(code, [Int32] * 4, [*d, *a, *b])
