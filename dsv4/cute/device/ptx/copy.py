"""Asynchronous copies, and shared memory of other CTAs of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Uint32

from dsv4.cute.device.ptx._emit import _ins, _outs, assembly

Value = Any  # a DSL scalar


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


def load_remote_float4(address: Value) -> tuple[Value, ...]:
    """Four float32 from a cluster-wide address of shared memory."""
    return assembly(f"ld.shared::cluster.v4.f32 {_outs(4)}, [{{$r0}}];", [Float32] * 4, [address])


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


def commit_copies() -> None:
    """This thread's copies since the last such call are a group."""
    assembly("cp.async.commit_group;")


def wait_copies(groups: int) -> None:
    """All but the last so many groups of this thread's copies have arrived."""
    assembly(f"cp.async.wait_group {groups};")
