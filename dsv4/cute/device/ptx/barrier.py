"""Shared-memory barriers (mbarrier) and the fence between memory proxies.

A phase of an mbarrier completes when its pending arrivals and its pending bytes are both zero; the
next phase starts at once. Waiters name the phase by its parity, 0 for the first.
"""

from __future__ import annotations

from cutlass import Int32, Uint32

from dsv4.cute.device.ptx._emit import assembly


def mbarrier_init(barrier: Uint32, arrivals: int) -> None:
    """``mbarrier.init``: an mbarrier whose phases complete after ``arrivals`` arrivals.

    One thread executes it, then ``fence_mbarrier_init`` and a CTA (or cluster) barrier before use.
    """
    assembly("mbarrier.init.shared::cta.b64 [{$r0}], " + f"{arrivals};", (), [barrier])


def fence_mbarrier_init() -> None:
    """``fence.mbarrier_init.release.cluster``: publish initialised mbarriers.

    Makes them visible to the async proxy and, after a cluster barrier, to the cluster's other CTAs.
    """
    assembly("fence.mbarrier_init.release.cluster;")


def mbarrier_arrive_expect_tx(barrier: Uint32, count: Int32 | int) -> None:
    """``mbarrier.arrive.expect_tx``: one arrival, and ``count`` bytes to wait for.

    One thread executes it before, or after, the copies that complete these bytes.
    """
    assembly(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{$r0}], {$r1};", (), [barrier, Int32(count)]
    )


def mbarrier_wait(barrier: Uint32, parity: Int32) -> None:
    """Spin on ``mbarrier.try_wait.parity`` until the phase of that parity has completed.

    Acquires, at CTA scope: reads after it see what was written before the phase's arrivals and what
    its copies wrote. Returns at once if the phase of the other parity is in progress.
    """
    assembly(
        "{ .reg .pred p; AGAIN: "
        "mbarrier.try_wait.parity.shared::cta.b64 p, [{$r0}], {$r1}, 0x989680; "
        "@!p bra AGAIN; }",
        (),
        [barrier, parity],
    )


def mbarrier_arrive_remote(barrier: Uint32) -> None:
    """``mbarrier.arrive.shared::cluster`` at a ``map_to_cta`` address.

    Tells another CTA that this thread has read what it was given; orders this thread's earlier
    reads before the phase completes.
    """
    assembly("mbarrier.arrive.shared::cluster.b64 _, [{$r0}];", (), [barrier])


def mbarrier_arrive(barrier: Uint32) -> None:
    """``mbarrier.arrive``: one arrival; releases this thread's accesses at CTA scope."""
    assembly("mbarrier.arrive.shared::cta.b64 _, [{$r0}];", (), [barrier])


def mbarrier_arrive_pending_count(barrier: Uint32) -> Uint32:
    """``mbarrier.arrive``, then ``mbarrier.pending_count`` of the state.

    Returns the arrivals that were pending before this one: 1 tells a thread that it is the last.
    Lanes that arrive in the same instruction may be merged into one arrival, so call it with one
    lane.
    """
    return assembly(
        "{ .reg .b64 s; mbarrier.arrive.shared::cta.b64 s, [{$r0}]; "
        "mbarrier.pending_count.b64 {$w0}, s; }",
        [Uint32],
        [barrier],
    )


def mbarrier_arrive_on_async_copies(barrier: Uint32) -> None:
    """``cp.async.mbarrier.arrive.noinc``: arrive when own copies are done.

    The arrival is triggered by the completion of all cp.async of this thread so far, and counts
    among those the mbarrier was initialised with.
    """
    assembly("cp.async.mbarrier.arrive.noinc.shared.b64 [{$r0}];", (), [barrier])


def fence_proxy_async_shared() -> None:
    """``fence.proxy.async.shared::cta``: order own writes before the async proxy.

    Every writing thread executes it, then a barrier, before wgmma, tcgen05 or a bulk copy reads
    what was written by ordinary stores.
    """
    assembly("fence.proxy.async.shared::cta;")
