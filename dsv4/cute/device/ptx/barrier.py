"""Shared-memory barriers (mbarrier) and the proxy fence."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, Uint32

from dsv4.cute.device.ptx._emit import assembly

Value = Any  # a DSL scalar


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


def arrive_copied(barrier: Value) -> None:
    """This thread arrives when its copies so far have arrived."""
    assembly("cp.async.mbarrier.arrive.noinc.shared.b64 [{$r0}];", (), [barrier])


def fence_shared() -> None:
    """What this thread wrote to shared memory comes before what tensor cores read there."""
    assembly("fence.proxy.async.shared::cta;")
