"""Asynchronous copies (cp.async, cp.async.bulk) and distributed shared memory of a cluster."""

from __future__ import annotations

from collections.abc import Sequence

from cutlass import Float32, Int32, Int64, Uint32

from dsv4.cute.device.ptx._emit import Float, _ins, _outs, assembly


def map_to_cta(address: Uint32, rank: Int32) -> Uint32:
    """``mapa.shared::cluster``: a shared-memory address in the CTA of that cluster rank."""
    return assembly("mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", [Uint32], [address, rank])


def async_store_remote4(
    address: Uint32, values: Sequence[Float], barrier: Uint32, offset: int = 0
) -> None:
    """``st.async.v4.f32`` to a CTA of the cluster; 16 bytes complete on its mbarrier.

    Address and barrier are ``map_to_cta`` addresses of the same CTA. Waiting for the mbarrier's
    phase there makes the values visible; the sender never waits.
    """
    assembly(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
        f"[{{$r0}}+{offset}], {_ins(1, 4)}, [{{$r5}}];",
        (),
        [address, *values, barrier],
    )


def store_shared_cluster4(address: Uint32, words: Sequence[Uint32]) -> None:
    """``st.shared::cluster.v4.u32`` to a ``map_to_cta`` address.

    Visible to the other CTA after a cluster barrier with release and acquire.
    """
    assembly(f"st.shared::cluster.v4.u32 [{{$r0}}], {_ins(1, 4)};", (), [address, *words])


def store_shared_cluster(address: Uint32, word: Uint32) -> None:
    """``st.shared::cluster.u32`` to a ``map_to_cta`` address.

    Visible to the other CTA after a cluster barrier with release and acquire.
    """
    assembly("st.shared::cluster.u32 [{$r0}], {$r1};", (), [address, word])


def bulk_copy_to_shared(target: Uint32, source: Int64, count: Int32 | int, barrier: Uint32) -> None:
    """``cp.async.bulk`` from global to shared memory; completes bytes on an mbarrier.

    One thread issues it. Addresses and ``count`` are multiples of 16. The bytes are counted by the
    current phase of ``barrier``, which must expect them (``mbarrier_arrive_expect_tx``);
    waiting for that phase makes them visible.

    Args:
        target: Shared-memory address.
        source: Global address.
        count: Bytes.
        barrier: mbarrier in the same shared memory.
    """
    assembly(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
        (),
        [target, source, Int32(count), barrier],
    )


def bulk_copy_to_remote(target: Uint32, source: Uint32, count: int, barrier: Uint32) -> None:
    """``cp.async.bulk`` from own shared memory to that of another CTA of the cluster.

    One thread issues it. Target and barrier are ``map_to_cta`` addresses in the other CTA, whose
    mbarrier counts the bytes. What other threads wrote to the source needs a barrier and, before
    it, ``fence_proxy_async_shared`` by the writers.
    """
    assembly(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
        (),
        [target, source, Int32(count), barrier],
    )


def bulk_prefetch_l2(source: Int64, count: Int32 | int) -> None:
    """``cp.async.bulk.prefetch.L2``: ask for ``count`` bytes in L2; nothing waits.

    One thread issues it; address and count are multiples of 16.
    """
    assembly("cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};", (), [source, Int32(count)])


def load_shared_cluster_float4(address: Uint32) -> tuple[Float32, ...]:
    """``ld.shared::cluster.v4.f32`` from a ``map_to_cta`` address."""
    return assembly(f"ld.shared::cluster.v4.f32 {_outs(4)}, [{{$r0}}];", [Float32] * 4, [address])


def async_copy16_or_zero(
    target: Uint32, source: Int64, count: Int32, to: int = 0, offset: int = 0
) -> None:
    """``cp.async.cg.shared.global``, 16 bytes, zero-filled beyond ``count`` (0 or 16).

    The issuing thread waits by ``wait_async_copies``, other threads by an mbarrier that
    ``mbarrier_arrive_on_async_copies`` arrives at.

    Args:
        target: Shared-memory address.
        source: Global address; not read where ``count`` is 0.
        count: Bytes that are read.
        to: Immediate offset of the target.
        offset: Immediate offset of the source.
    """
    assembly(
        f"cp.async.cg.shared.global [{{$r0}}+{to}], [{{$r1}}+{offset}], 16, {{$r2}};",
        (),
        [target, source, count],
    )


def async_copy4_or_zero(target: Uint32, source: Int64, count: Int32) -> None:
    """``cp.async.ca.shared.global``, 4 bytes, zero-filled beyond ``count`` (0 or 4)."""
    code = "cp.async.ca.shared.global [{$r0}], [{$r1}], 4, {$r2};"
    assembly(code, (), [target, source, count])


def async_copy16(
    target: Uint32, source: Int64, to: int = 0, offset: int = 0, to_l2: int = 0
) -> None:
    """``cp.async.cg.shared.global``, 16 bytes; ``to`` and ``offset`` are immediate offsets.

    ``to_l2`` (64, 128 or 256) asks for as many bytes around the source in L2; 0: no hint.
    """
    hint = f".L2::{to_l2}B" if to_l2 else ""
    assembly(
        f"cp.async.cg.shared.global{hint} [{{$r0}}+{to}], [{{$r1}}+{offset}], 16;",
        (),
        [target, source],
    )


def async_copy8(target: Uint32, source: Int64, to: int = 0, offset: int = 0) -> None:
    """``cp.async.ca.shared.global``, 8 bytes; ``to`` and ``offset`` are immediate offsets."""
    assembly(
        f"cp.async.ca.shared.global [{{$r0}}+{to}], [{{$r1}}+{offset}], 8;", (), [target, source]
    )


def commit_async_copies() -> None:
    """``cp.async.commit_group``: close the group of this thread's cp.async so far."""
    assembly("cp.async.commit_group;")


def wait_async_copies(groups: int) -> None:
    """``cp.async.wait_group``: wait for all but this thread's last ``groups`` groups.

    Orders the copied bytes before this thread's later reads, and no other thread's.
    """
    assembly(f"cp.async.wait_group {groups};")
