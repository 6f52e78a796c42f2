"""Push kernels of tokens on a GPU: ranks that wait for each other, in graphs and processes."""

from __future__ import annotations

import pytest
import torch

from dsv4.ops.moe_exchange import MoeReturnArgs, MoeSendArgs
from dsv4.parallel import mailboxes
from dsv4.parallel.token_rows import RowLayout
from tests._tools.rank_processes import run_rank_processes
from tests.parallel.exchange_cases import exchange
from tests.parallel.test_moe_exchange import check_push

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
REPLAYS = 1000
EXPERTS, CHOICES = 16, 6


def tokens_of(step: torch.Tensor, rank: int, tokens: int, hidden: int) -> MoeSendArgs:
    """A rank's tokens in a step whose number is on the device; values are exact in bfloat16."""
    token = torch.arange(tokens, device=step.device).unsqueeze(1)
    column = torch.arange(hidden, device=step.device)
    x = ((step * (rank + 1) + 31 * token + column) % 128).bfloat16()
    choice = torch.arange(CHOICES, device=step.device)
    ids = (7 * step + 5 * token + 3 * choice * (step % 3) + rank) % (EXPERTS + 2) - 1
    return MoeSendArgs(x, ids, ids.float() / 2, EXPERTS, "")


def wrong_rows(
    step: torch.Tensor, rank: int, ranks: int, received: tuple[torch.Tensor, ...], tokens: int
) -> torch.Tensor:
    """Count differences from what all ranks sent, which follows from the step alone."""
    rows, ids, weights = received
    wrong = torch.zeros((), dtype=torch.int64, device=step.device)
    experts = EXPERTS // ranks
    for source in range(ranks):
        part = slice(source * tokens, (source + 1) * tokens)
        sent = tokens_of(step, source, tokens, rows.shape[1])
        here = ((sent.ids >= rank * experts) & (sent.ids < (rank + 1) * experts)).any(1, True)
        wrong += (ids[part] != torch.where(here, sent.ids, -1)).sum()
        wrong += (weights[part] != torch.where(here, sent.weights, 0)).sum()
        wrong += ((rows[part] != sent.x) & here).sum()
    return wrong


def wrong_sums(sent: MoeSendArgs, ranks: int, total: torch.Tensor) -> torch.Tensor:
    """Count differences from each token times the ranks that hold one of its experts."""
    experts = EXPERTS // ranks
    counts = torch.zeros(len(sent.x), 1, device=sent.x.device)
    for rank in range(ranks):
        counts += ((sent.ids >= rank * experts) & (sent.ids < (rank + 1) * experts)).any(1, True)
    return (total != (counts * sent.x.float()).bfloat16()).sum()


@pytest.mark.parametrize(("ranks", "tokens", "hidden"), [(2, 1, 4096), (4, 5, 7168), (8, 64, 1000)])
def test_bits_are_those_of_the_reference(ranks, tokens, hidden):
    """Ranks in turn, on one stream; through all generations."""
    nbytes = RowLayout(CHOICES, hidden).nbytes(tokens)
    boxes = mailboxes.virtual(ranks, nbytes, DEVICE)
    for seed in range(2 * mailboxes.GENERATIONS):
        check_push(boxes, exchange(ranks, tokens, hidden, CHOICES, 4, seed, DEVICE))


@pytest.mark.parametrize(("ranks", "tokens", "hidden"), [(2, 4, 4096), (4, 3, 7168), (8, 1, 1000)])
def test_ranks_on_streams_wait_for_each_other(ranks, tokens, hidden):
    """Each rank has a stream and a graph of several exchanges; all are replayed at one time."""
    from dsv4.triton import moe_exchange as kernels

    nbytes = RowLayout(CHOICES, hidden).nbytes(tokens)
    # All kernels are loaded first: loading one may wait for the GPU, on which others would wait.
    loading = exchange(ranks, tokens, hidden, CHOICES, EXPERTS // ranks, 0, DEVICE)
    check_push(mailboxes.virtual(ranks, nbytes, DEVICE), loading)
    boxes = mailboxes.virtual(ranks, nbytes, DEVICE)
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    zero = torch.zeros((), dtype=torch.int64, device=DEVICE)
    steps, wrong = ([zero.clone() for _ in range(ranks)] for _ in range(2))

    def step(rank):
        for _ in range(2):
            steps[rank].add_(1)
            sent = tokens_of(steps[rank], rank, tokens, hidden)
            kernels.push_tokens(boxes[rank], sent)
            received = kernels.receive_tokens(boxes[rank], sent)
            wrong[rank].add_(wrong_rows(steps[rank], rank, ranks, received, tokens))
            back = MoeReturnArgs(received[0], received[1], sent.ids, None, EXPERTS, "")
            kernels.push_results(boxes[rank], back)
            total = kernels.sum_results(boxes[rank], back)
            wrong[rank].add_(wrong_sums(sent, ranks, total))

    sent = tokens_of(zero + 1, 0, tokens, hidden)  # torch's own kernels, too
    wrong_rows(zero + 1, 0, ranks, (loading.received(0)), tokens)
    wrong_sums(sent, ranks, sent.x)
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
    assert [int(count) for count in steps] == [2 * (REPLAYS // 4 + 1)] * ranks


PROGRAM = """
import sys
import torch
import torch.distributed as dist
from dsv4 import ops
from dsv4.parallel import mailboxes
from dsv4.parallel.token_rows import RowLayout
from tests.parallel.test_exchange_gpu import CHOICES, EXPERTS, tokens_of, wrong_rows, wrong_sums

rank, tokens, hidden, replays = int(sys.argv[1]), 8, 4096, int(sys.argv[2])
device = torch.device("cuda", 0)
dist.init_process_group("gloo")
group, ranks = dist.group.WORLD.group_name, dist.get_world_size()
box = mailboxes.ipc(group, RowLayout(CHOICES, hidden).nbytes(tokens), device)
step = torch.zeros((), dtype=torch.int64, device=device)
wrong = torch.zeros((), dtype=torch.int64, device=device)

def run():
    step.add_(1)
    sent = tokens_of(step, rank, tokens, hidden)
    received = ops.moe_send(sent.x, sent.ids, sent.weights, EXPERTS, group, backend="push")
    wrong.add_(wrong_rows(step, rank, ranks, received, tokens))
    total = ops.moe_return(received[0], received[1], sent.ids, EXPERTS, group, backend="push")
    wrong.add_(wrong_sums(sent, ranks, total))

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
