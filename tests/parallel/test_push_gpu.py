"""The push kernels on a GPU: ranks that really wait for each other, in graphs and processes."""

from __future__ import annotations

import pytest
import torch

from dsv4.parallel import mailboxes
from dsv4.reference.all_reduce import rank_ordered_sum
from dsv4.testing.assertions import assert_bitwise
from tests._tools import sanitize_ranks
from tests._tools.rank_processes import run_rank_processes
from tests.parallel.test_all_reduce import between_sublayers, partial_sums

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
REPLAYS = 1000


def counted(step: torch.Tensor, rank: int, numel: int) -> torch.Tensor:
    """A partial sum that depends on the number of the step on the device, exact in bfloat16."""
    ramp = torch.arange(numel, device=step.device) % 97
    return ((step * (rank + 1) + ramp) % 128).bfloat16()


def load_all(ranks: int, numel: int) -> None:
    """Launch all kernels once: loading one may wait for the GPU, on which others would wait."""
    from dsv4.triton import all_reduce

    step = torch.ones((), dtype=torch.int64, device=DEVICE)
    parts = [counted(step, rank, numel) for rank in range(ranks)]
    for rank in range(ranks):
        boxes = mailboxes.virtual(ranks, 2 * numel, DEVICE)
        for other in range(ranks):
            if other != rank:
                all_reduce.push_flat(boxes[other], parts[other])
        total = all_reduce.exchange(boxes[rank], parts[rank])
        wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
        wrong.add_((total != rank_ordered_sum(parts)).sum())
        assert int(wrong) == 0
    torch.cuda.synchronize()


@pytest.mark.parametrize(("ranks", "numel"), [(2, 4096), (4, 7168), (8, 1000), (3, 8192)])
def test_ranks_on_streams_wait_for_each_other(ranks, numel):
    """Each rank has a stream and a graph of several sums; all are replayed at the same time.

    At most 8 programs a rank, so that all fit on a GPU whatever the order.
    """
    from dsv4.triton import all_reduce

    load_all(ranks, numel)
    boxes = mailboxes.virtual(ranks, 2 * numel, DEVICE)
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    steps = [torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in range(ranks)]
    wrong = [torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in range(ranks)]

    def step(rank):
        """Sum, and compare with what all ranks pushed, which follows from the step alone."""
        for _ in range(4):
            steps[rank].add_(1)
            total = all_reduce.exchange(boxes[rank], counted(steps[rank], rank, numel))
            every = [counted(steps[rank], other, numel) for other in range(ranks)]
            wrong[rank].add_((total != rank_ordered_sum(every)).sum())

    torch.cuda.synchronize()
    for rank in range(ranks):  # eager once
        with torch.cuda.stream(streams[rank]):
            step(rank)
    torch.cuda.synchronize()
    graphs = []
    for rank in range(ranks):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=streams[rank]):
            step(rank)
        graphs.append(graph)
    torch.cuda.synchronize()
    for _ in range(REPLAYS // 4):
        for rank in range(ranks):
            with torch.cuda.stream(streams[rank]):
                graphs[rank].replay()
    torch.cuda.synchronize()
    assert [int(count) for count in wrong] == [0] * ranks
    assert [int(count) for count in steps] == [4 * (REPLAYS // 4 + 1)] * ranks


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("tokens", [1, 4, 5, 64])
@pytest.mark.parametrize("hidden", [4096, 7168, 1000])
def test_the_fused_consumer_gives_the_bits_of_its_parts(ranks, tokens, hidden):
    from dsv4.ops._library import as_record
    from dsv4.ops.hyper_connection import HcPostPreNormArgs
    from dsv4.triton import all_reduce, hyper_connection

    boxes = mailboxes.virtual(ranks, 2 * tokens * hidden, DEVICE)
    for seed in range(4):
        args = between_sublayers(tokens, hidden, DEVICE, seed)
        parts = partial_sums(ranks, (tokens, hidden), DEVICE, seed)
        pushed = [all_reduce.push(box, part) for box, part in zip(boxes, parts, strict=True)]
        y = rank_ordered_sum(parts)
        expected = hyper_connection.hc_post_pre_norm(as_record(HcPostPreNormArgs, args, y=y))
        for one_rank in pushed:
            results = hyper_connection.reduced_post_pre_norm(args, one_rank)
            for result, right in zip(results, expected, strict=True):
                assert_bitwise(result, right)


PROGRAM = """
import sys
import torch
import torch.distributed as dist
from dsv4 import ops
from dsv4.parallel import mailboxes
from dsv4.reference.all_reduce import rank_ordered_sum
from tests.parallel.test_push_gpu import counted

rank, numel, replays = int(sys.argv[1]), 4096, int(sys.argv[2])
device = torch.device("cuda", 0)
dist.init_process_group("gloo")
group, ranks = dist.group.WORLD.group_name, dist.get_world_size()
box = mailboxes.ipc(group, 2 * numel, device)
step = torch.zeros((), dtype=torch.int64, device=device)
wrong = torch.zeros((), dtype=torch.int64, device=device)

def run():
    step.add_(1)
    total = ops.all_reduce(counted(step, rank, numel), group, backend="push")
    every = [counted(step, other, numel) for other in range(ranks)]
    wrong.add_((total != rank_ordered_sum(every)).sum())

run()
torch.cuda.synchronize()
dist.barrier()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    run()
for i in range(replays):
    graph.replay()
torch.cuda.synchronize()
assert int(wrong) == 0, int(wrong)
assert int(step) == replays + 1
dist.barrier()
"""


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_that_share_a_gpu(ranks, tmp_path):
    """Mailboxes by IPC handles; each process has the GPU for a slice of time at a time."""
    run_rank_processes(PROGRAM, ranks, REPLAYS, folder=tmp_path, seconds=300)


ENDS = """
import contextlib, os, time
import torch
from dsv4.parallel import mailboxes
from dsv4.triton import all_reduce

device = torch.device("cuda", 0)
part = torch.ones(4096, dtype=torch.bfloat16, device=device)
boxes = mailboxes.virtual(2, part.nbytes, device)
for box in boxes:
    all_reduce.push_flat(box, part)
assert bool((all_reduce.sum_pushed(boxes[0], part) == 2).all())  # and all kernels are loaded
all_reduce.push_flat(boxes[0], part)  # its peer does not
all_reduce.sum_pushed(boxes[0], part)
event = torch.cuda.Event()
event.record()
time.sleep(0.5)
assert not event.query(), "it did not wait"
began = time.monotonic()
with contextlib.suppress(RuntimeError):
    boxes[0].end_waits()
try:
    while not event.query():
        assert time.monotonic() - began < 10, "it still waits"
        time.sleep(0.01)
except RuntimeError as error:
    print("ended:", error)
    os._exit(0)
raise AssertionError("it ended without an error")
"""


def test_a_kernel_that_waits_is_ended_by_the_host(tmp_path):
    """In a process of its own, whose GPU has an error then."""
    run_rank_processes(ENDS, 1, folder=tmp_path, seconds=60)


@pytest.mark.parametrize("virtual", [False, True])
def test_the_program_that_compute_sanitizer_runs(virtual):
    """Sums, fused sums and tokens: by IPC mailboxes, and of ranks in one process."""
    assert sanitize_ranks.run(2, under="", virtual=virtual, seconds=120) == 0
