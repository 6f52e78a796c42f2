"""Latency of sums over ranks by size and implementation.

``torchrun --nproc-per-node N -m dsv4.bench run all_reduce`` has a process per rank, with NCCL on
GPUs and gloo on a CPU. ``run all_reduce --ranks N`` on one GPU has N virtual ranks, whose mailboxes
are all on it: the time of the push kernel and of the kernel that adds, without NVLink, and beside
it that of the hyper-connection that adds.

Every rank makes the same number of calls: a rank that stopped earlier would leave others waiting.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from dsv4 import dispatch, ops
from dsv4.bench.cases import cases
from dsv4.bench.problem import Draw, UsageError
from dsv4.bench.results import Row
from dsv4.parallel import groups, mailboxes
from dsv4.reference.all_reduce import rank_ordered_sum

# A token of Flash and of Pro, 64 of each, and a prompt chunk of 4096 tokens of Flash.
SIZES = (8192, 14336, 524288, 917504, 33554432)
SIZES_ON_CPU = (8192, 65536)
_CAPTURED = 20  # calls of a graph
_PUSHED_BYTES, _WORKSPACE_BYTES = 1 << 20, 64 << 20
_EXACT = ("push", "gloo", "reference")  # those that promise the reference's bits
_TOKENS = (1, 4, 64)


@dataclass(frozen=True)
class Request:
    """What is measured.

    Attributes:
        sizes: Bytes of the sums, bfloat16.
        backends: Implementations, or None for all that can run.
        repeat: Timed runs.
        seed: Seed of the inputs.
        device: This rank's device.
    """

    sizes: Sequence[int]
    backends: Sequence[str] | None
    repeat: int
    seed: int
    device: torch.device


def is_first(group: str) -> bool:
    """Return whether this process is the group's first, which alone prints."""
    return groups.rank(group) == 0


def over_ranks(request: Request, group: str) -> tuple[list[Row], list[str]]:
    """Measure all sizes and implementations; all ranks of the group call it.

    Returns:
        The rows, and what was not measured and why, a line each.
    """
    box: mailboxes.Mailbox | None = None
    left_out: list[str] = []
    if request.device.type == "cuda":
        try:
            box = mailboxes.symmetric(group, _PUSHED_BYTES, request.device, _WORKSPACE_BYTES)
        except RuntimeError as error:
            left_out.append(str(error))
    rows = []
    for nbytes in request.sizes:
        partial = _partial(request, groups.rank(group), nbytes)
        call = dispatch.arguments(ops.all_reduce, partial, group)
        for row in dispatch.implementations("all_reduce"):
            if request.backends is not None and row.name not in request.backends:
                continue
            reason = row.unsupported_reason(call)
            if reason is not None:
                left_out.append(f"{nbytes} bytes, {row.name}: {reason}")
                continue
            rows.append(_measured(request, group, partial, row.name))
    del box  # until here operators find it by the group's name
    return rows, left_out


def _partial(request: Request, rank: int, nbytes: int) -> torch.Tensor:
    return Draw(request.seed + rank, request.device).normal(nbytes // 2)


def _measured(request: Request, group: str, partial: torch.Tensor, backend: str) -> Row:
    def call() -> torch.Tensor:
        return ops.all_reduce(partial, group, backend=backend)

    parts = groups.gather(partial, group)
    wrong = _wrong(call(), parts, backend)
    us, timer = _latency(call, request)
    own = torch.tensor([us, float(bool(wrong))], device=partial.device)
    of_ranks = torch.stack(groups.gather(own, group)).cpu()
    slowest, failed = float(of_ranks[:, 0].max()), int(of_ranks[:, 1].sum())
    return Row(
        "all_reduce",
        f"{len(parts)} ranks",
        {"bytes": partial.nbytes},
        1,
        backend,
        us=None if failed else slowest,
        bytes=partial.nbytes,
        error="bitwise" if backend in _EXACT and not failed else None,
        match=not failed,
        timer=timer,
        message=wrong or (f"wrong on {failed} ranks" if failed else ""),
    )


def _wrong(total: torch.Tensor, parts: Sequence[torch.Tensor], backend: str) -> str:
    """Return what is wrong with a sum, or an empty string."""
    expected = rank_ordered_sum(list(parts))
    if backend in _EXACT:
        return "" if torch.equal(total, expected) else "other bits than the reference's"
    exact = torch.stack([part.double() for part in parts]).sum(0)
    # Each of N - 1 additions may round to bfloat16, whose unit roundoff is 2^-9 of what it adds.
    largest = torch.stack([part.double().abs() for part in parts]).sum(0)
    allowed = len(parts) * 2.0**-8 * largest
    return "" if bool(((total.double() - exact).abs() <= allowed).all()) else "beyond its budget"


def _latency(call: Callable[[], Any], request: Request) -> tuple[float, str]:
    """Return the median microseconds of a call and the timer; every rank makes as many calls."""
    for _ in range(3):
        call()
    if request.device.type != "cuda":
        times = []
        for _ in range(request.repeat):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return 1e6 * statistics.median(times), "clock"
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has a thread
        for _ in range(_CAPTURED):
            call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(request.repeat + 1)]
    graph.replay()
    for event in events:
        event.record()
        graph.replay()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairwise(events)]
    return 1e3 * statistics.median(times) / _CAPTURED, "graph"


def virtual(request: Request, ranks: int) -> list[Row]:
    """Measure the kernels of N virtual ranks on one GPU.

    Raises:
        UsageError: if there is no GPU, or a number of ranks that mailboxes do not have.
    """
    if request.device.type != "cuda":
        raise UsageError("--ranks: virtual ranks need a CUDA GPU; with torchrun, gloo is measured")
    if not 2 <= ranks <= mailboxes.MOST_RANKS:
        raise UsageError(f"--ranks is {ranks}, wanted 2 to {mailboxes.MOST_RANKS}")
    sizes = [nbytes for nbytes in request.sizes if nbytes <= _PUSHED_BYTES]
    return [*_virtual_sums(request, ranks, sizes), *_virtual_consumers(request, ranks)]


def _virtual_sums(request: Request, ranks: int, sizes: Sequence[int]) -> Iterator[Row]:
    from dsv4.triton import all_reduce

    boxes = mailboxes.virtual(ranks, _PUSHED_BYTES, request.device)
    for nbytes in sizes:
        parts = [_partial(request, rank, nbytes) for rank in range(ranks)]
        for box, part in zip(boxes, parts, strict=True):
            all_reduce.push_flat(box, part)
        expected = rank_ordered_sum(parts)
        good = all(
            torch.equal(all_reduce.sum_pushed(box, part), expected)
            for box, part in zip(boxes, parts, strict=True)
        )
        box, part = boxes[0], parts[0]
        shape = {"bytes": nbytes}
        for name, call in (
            ("add", lambda box=box, part=part: all_reduce.sum_pushed(box, part)),
            ("push", lambda box=box, part=part: all_reduce.push_flat(box, part)),
        ):
            us, timer = _latency(call, request)
            case = f"{ranks} virtual ranks, {name}"
            yield Row("all_reduce", case, shape, 1, "push", us=us, match=good, timer=timer)
        boxes = mailboxes.virtual(ranks, _PUSHED_BYTES, request.device)  # of equal counters again


def _virtual_consumers(request: Request, ranks: int) -> Iterator[Row]:
    """The hyper-connection between sublayers, with a tensor and with one slot per rank."""
    from dsv4.triton import all_reduce, hyper_connection

    for preset in ("flash", "pro"):
        for tokens in _TOKENS:
            [case] = cases("hc_post_pre_norm", preset, tokens)
            problem = case.build(Draw(request.seed, request.device))
            args = dispatch.arguments(problem.function, *problem.args, **problem.kwargs).args
            boxes = mailboxes.virtual(ranks, args.y.nbytes, request.device)
            pushed = [all_reduce.push(box, args.y) for box in boxes]
            y = rank_ordered_sum([args.y] * ranks)
            plain = args._replace(y=y)
            results = hyper_connection.reduced_post_pre_norm(args, pushed[0])
            expected = hyper_connection.hc_post_pre_norm(plain)
            good = all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
            for name, call in (
                ("one tensor", lambda plain=plain: hyper_connection.hc_post_pre_norm(plain)),
                (
                    f"{ranks} slots",
                    lambda args=args, own=pushed[0]: hyper_connection.reduced_post_pre_norm(
                        args, own
                    ),
                ),
            ):
                us, timer = _latency(call, request)
                yield Row(
                    "hc_reduce_post_pre_norm",
                    f"{preset}, {name}",
                    case.shape,
                    tokens,
                    "push",
                    us=us,
                    match=good,
                    timer=timer,
                )
