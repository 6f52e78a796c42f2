"""``tcgen05`` instructions as functions on DSL values.

A TMEM address has the lane in its upper and the column in its lower 16 bits. MMAs, copies and
commits are issued by one thread; loads, allocation and deallocation by all threads of a warp.
``cta_group`` is the number of CTAs whose memories an instruction works on, 1 or 2.

MMAs and copies of one thread are executed in the order in which it issues them, asynchronously to
everything else: ``commit`` says when they are done.
"""

from __future__ import annotations

from cutlass import Float32, Int64, Uint32

from dsv4.cute.device import ptx
from dsv4.cute.sm100.mma_descriptors import CODES_DESCRIPTOR, SCALES_DESCRIPTOR

Fragment = list[Float32]  # a lane's four accumulators of 16 rows and 8 columns
Halves = list[list[Fragment]]  # of a warp's two halves of 16 rows, a fragment for every 8 columns


def allocate(address: Uint32, columns: int, cta_group: int) -> None:
    """Allocate TMEM columns and write the address of the first to shared memory.

    Waits until another CTA of the SM has freed its own, if need be. The CTA allocates only once.
    """
    name = f"tcgen05.alloc.cta_group::{cta_group}.sync.aligned.shared::cta.b32"
    ptx.assembly(f"{name} [{{$r0}}], {columns};", (), [address])
    ptx.assembly(f"tcgen05.relinquish_alloc_permit.cta_group::{cta_group}.sync.aligned;")


def free(start: Uint32, columns: int, cta_group: int) -> None:
    """Free TMEM columns, by the warp that allocated them."""
    name = f"tcgen05.dealloc.cta_group::{cta_group}.sync.aligned.b32"
    ptx.assembly(f"{name} {{$r0}}, {columns};", (), [start])


def fence_before_sync() -> None:
    """Order this thread's accesses of TMEM before its next arrival at a barrier."""
    ptx.assembly("tcgen05.fence::before_thread_sync;")


def fence_after_sync() -> None:
    """Order this thread's next accesses of TMEM after the barrier that it waited for."""
    ptx.assembly("tcgen05.fence::after_thread_sync;")


def codes_descriptor(address: Uint32) -> Int64:
    """Descriptor of rows of 256 codes in shared memory, 128 bytes each, from the first 64 on."""
    return Int64(address >> Uint32(4)) | Int64(CODES_DESCRIPTOR)


def copy_scales(target: Uint32, address: Uint32, cta_group: int) -> None:
    """Copy the scales of 128 rows and 64 columns from shared memory to 4 TMEM columns.

    ``warpx4``: each of the four groups of 32 TMEM lanes gets all of them, as the MMA wants.

    Args:
        target: TMEM address.
        address: Address of 512 bytes in the layout ``swizzled_128x4``.
        cta_group: See the module.
    """
    source = Int64(address >> Uint32(4)) | Int64(SCALES_DESCRIPTOR)
    name = f"tcgen05.cp.cta_group::{cta_group}.32x128b.warpx4"
    ptx.assembly(f"{name} [{{$r0}}], {{$r1}};", (), [target, source])


def multiply(
    sums: Uint32,
    left: Int64,
    right: Int64,
    left_scales: Uint32,
    right_scales: Uint32,
    accumulate: Uint32,
    instruction: int,
    cta_group: int,
) -> None:
    """Multiply 64 columns of NVFP4 operands, whose blocks of 16 columns have a scale each.

    Args:
        sums: TMEM address of the accumulator.
        left: ``codes_descriptor`` of the rows, plus 2 for every 64 columns.
        right: The same of the tokens.
        left_scales: TMEM address of the rows' scales.
        right_scales: TMEM address of the tokens' scales.
        accumulate: 0 to overwrite the accumulator.
        instruction: ``mma_descriptors.instruction_descriptor``.
        cta_group: See the module.
    """
    name = f"tcgen05.mma.cta_group::{cta_group}.kind::mxf4nvf4.block_scale.block16"
    operands = f"[{{$r0}}], {{$r1}}, {{$r2}}, {instruction:#x}, [{{$r3}}], [{{$r4}}]"
    ptx.assembly(
        f"{{ .reg .pred p; setp.ne.u32 p, {{$r5}}, 0; {name} {operands}, p; }}",
        (),
        [sums, left, right, left_scales, right_scales, accumulate],
    )


def commit(barrier: Uint32, cta_group: int) -> None:
    """Arrive at an mbarrier of every CTA of the group when this thread's MMAs and copies are done.

    Implies ``fence_before_sync``.
    """
    name = f"tcgen05.commit.cta_group::{cta_group}.mbarrier::arrive::one.shared::cluster"
    if cta_group == 1:
        ptx.assembly(f"{name}.b64 [{{$r0}}];", (), [barrier])
    else:
        multicast = f"{name}.multicast::cluster.b64 [{{$r0}}], m;"  # to CTAs 0 and 1
        ptx.assembly(f"{{ .reg .b16 m; mov.b16 m, 3; {multicast} }}", (), [barrier])


def arrive_leader(barrier: Uint32) -> None:
    """Arrive at an mbarrier of the cluster's first CTA.

    The arrival has no cluster scope: it orders nothing but shared memory that the tensor core
    reads in this CTA, after ``fence_proxy_async_shared``. With ``release.cluster`` and
    ``acquire.cluster`` the compiler put ``MEMBAR.ALL.GPU`` into every stage, four in the loop.
    DeepGEMM does the same. Whether it is enough for two CTAs is not measured: no such GPU.
    """
    ptx.assembly(
        "{ .reg .b32 a; mapa.shared::cluster.u32 a, {$r0}, 0; "
        "mbarrier.arrive.shared::cluster.b64 _, [a]; }",
        (),
        [barrier],
    )


def load(address: Uint32, tiles: int) -> Halves:
    """Load a warp's 32 rows of ``8 tiles`` columns, as fragments of 16 rows and 8 columns.

    ``[half][tile]`` are row ``lane // 4`` in columns ``2 (lane % 4)`` and the next, then row
    ``lane // 4 + 8`` in the same: what ``wgmma`` leaves in registers, so the epilogue is common.

    Args:
        address: TMEM address of the warp's first lane and the first column.
        tiles: 1, 2, 4 or 8.
    """
    count, upper = 4 * tiles, Uint32(16 << 16)
    outs = [", ".join(f"{{$w{h * count + i}}}" for i in range(count)) for h in range(2)]
    name = f"tcgen05.ld.sync.aligned.16x256b.x{tiles}.b32"
    # One piece of text with its wait, so that nothing reads the registers before they are loaded.
    values = ptx.assembly(
        f"{name} {{{outs[0]}}}, [{{$r0}}]; {name} {{{outs[1]}}}, [{{$r1}}]; "
        "tcgen05.wait::ld.sync.aligned;",
        [Float32] * (2 * count),
        [address, address + upper],
    )
    return [
        [list(values[h * count + 4 * n : h * count + 4 * n + 4]) for n in range(tiles)]
        for h in range(2)
    ]
