"""Blackwell's tensor-core instructions as functions on DSL values, and the numbers they are told.

A tensor-memory address has the lane in its upper and the column in its lower half. What copies,
multiplies or announces is for one thread of a warp; what loads, allocates or frees is for all of
one. ``group`` is how many blocks of a cluster an instruction works in: 1 or 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32

from dsv4.cute.sm100.dense_plan import CODES_DESCRIPTOR, SCALES_DESCRIPTOR

Value = Any  # a DSL scalar


def _asm(code: str, outputs: Sequence[Any] = (), inputs: Sequence[Value] = ()) -> Any:
    return cute.arch.inline_ptx(
        code, write_only_types=list(outputs) or None, read_only_args=list(inputs)
    )


def allocate(address: Value, columns: int, group: int) -> None:
    """Allocate columns of tensor memory; where they begin is written to shared memory."""
    kind = f"tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32"
    _asm(f"{kind} [{{$r0}}], {columns};", (), [address])
    _asm(f"tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;")


def free(start: Value, columns: int, group: int) -> None:
    """Give columns back, by the warp that allocated them."""
    kind = f"tcgen05.dealloc.cta_group::{group}.sync.aligned.b32"
    _asm(f"{kind} {{$r0}}, {columns};", (), [start])


def before_arrival() -> None:
    """What this thread did in tensor memory comes before what it announces next."""
    _asm("tcgen05.fence::before_thread_sync;")


def after_wait() -> None:
    """What this thread does in tensor memory next comes after what it waited for."""
    _asm("tcgen05.fence::after_thread_sync;")


def codes_descriptor(address: Value) -> Value:
    """Rows of 128 bytes in shared memory as an operand: 256 codes, the first 64 of them."""
    return Int64(address >> Uint32(4)) | Int64(CODES_DESCRIPTOR)


def copy_scales(target: Value, address: Value, group: int) -> None:
    """512 bytes of block scales (128 rows, 4 blocks) to 4 columns, for all four warps' lanes."""
    source = Int64(address >> Uint32(4)) | Int64(SCALES_DESCRIPTOR)
    kind = f"tcgen05.cp.cta_group::{group}.32x128b.warpx4"
    _asm(f"{kind} [{{$r0}}], {{$r1}};", (), [target, source])


def multiply(
    sums: Value,
    left: Value,
    right: Value,
    scales: tuple[Value, Value],
    accumulate: Value,
    kind: int,
    group: int,
) -> None:
    """64 columns of NVFP4 operands, with a scale for 16 of them.

    Args:
        sums: Tensor memory of the sums.
        left: ``codes_descriptor`` of the rows, plus 2 for every 64 columns.
        right: The same of the tokens.
        scales: Tensor memory of the left and of the right operand's scales.
        accumulate: 0 to begin a sum.
        kind: ``dense_plan.instruction``.
        group: See the module.
    """
    name = f"tcgen05.mma.cta_group::{group}.kind::mxf4nvf4.block_scale.block16"
    _asm(
        "{ .reg .pred p; setp.ne.u32 p, {$r5}, 0; "
        f"{name} [{{$r0}}], {{$r1}}, {{$r2}}, {kind:#x}, [{{$r3}}], [{{$r4}}], p; }}",
        (),
        [sums, left, right, *scales, accumulate],
    )


def commit(barrier: Value, group: int) -> None:
    """Arrive, in all blocks of the group, when what this thread asked for so far is done."""
    name = f"tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster"
    if group == 1:
        _asm(f"{name}.b64 [{{$r0}}];", (), [barrier])
    else:
        both = f"{{ .reg .b16 m; mov.b16 m, 3; {name}.multicast::cluster.b64 [{{$r0}}], m; }}"
        _asm(both, (), [barrier])


def arrive_first(barrier: Value) -> None:
    """Arrive in the first block of the cluster.

    It is told nothing of what was written here, but for shared memory that the tensor core reads,
    after ``fence_shared``: that stays in this block.
    """
    _asm(
        "{ .reg .b32 a; mapa.shared::cluster.u32 a, {$r0}, 0; "
        "mbarrier.arrive.shared::cluster.b64 _, [a]; }",
        (),
        [barrier],
    )


def load(address: Value, tiles: int) -> list[list[list[Value]]]:
    """A warp's 32 rows of 8 ``tiles`` columns, as fragments of 16 rows and 8 columns.

    ``[half][tile]`` are row ``lane // 4`` in columns ``2 (lane % 4)`` and the next, then row
    ``lane // 4 + 8`` in the same: what a Hopper product leaves in registers.

    Args:
        address: Of the warp's first lane and the first column.
        tiles: 1, 2, 4 or 8.
    """
    count, upper = 4 * tiles, Uint32(16 << 16)
    outs = [", ".join(f"{{$w{h * count + i}}}" for i in range(count)) for h in range(2)]
    name = f"tcgen05.ld.sync.aligned.16x256b.x{tiles}.b32"
    # In one piece, so that nothing can look at the registers before they are loaded.
    found = _asm(
        f"{name} {{{outs[0]}}}, [{{$r0}}]; {name} {{{outs[1]}}}, [{{$r1}}]; "
        "tcgen05.wait::ld.sync.aligned;",
        [Float32] * (2 * count),
        [address, address + upper],
    )
    return [
        [list(found[h * count + 4 * n : h * count + 4 * n + 4]) for n in range(tiles)]
        for h in range(2)
    ]
