"""Steps of ranks on a GPU: graphs with sums inside, and processes that wait for each other."""

from __future__ import annotations

import pytest
import torch

from dsv4.bench.suites.random_model import Weights, random_model
from dsv4.bench.suites.whole_model import DecodeStep, Fill
from dsv4.compilation.warmup import warm_ranks
from dsv4.config import CSA, HCA, ModelConfig
from dsv4.debug import compilations
from dsv4.parallel import mailboxes
from dsv4.parallel.context import MODES, Ranks
from dsv4.parallel.emulated import emulated_rank
from dsv4.serving import Runner
from dsv4.testing.assertions import assert_bitwise
from tests._tools.rank_processes import run_rank_processes
from tests.plans.layer_plan_cases import plans_of

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
# Whole tiles of packed weights on each of four ranks.
CONFIG = ModelConfig.flash().replace(
    num_hidden_layers=2,
    layer_types=(CSA, HCA),
    mlp_layer_types=("moe", "moe"),
    n_routed_experts=8,
    num_nextn_predict_layers=0,
    max_position_embeddings=512,
)


# Of a step. The list of steps of up to 2048 tokens has twice as many kernels, and compiling them
# takes nearly all the time of these tests where none is on disk.
MOST_TOKENS = 64


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [2, 4])
@torch.inference_mode()
def test_a_captured_step_of_a_rank_is_the_eager_one_and_compiles_nothing(ranks, mode):
    """With emulated peers; eager steps are plans of layers from the third on."""
    context = emulated_rank(Ranks(ranks, mode), CONFIG, DEVICE)
    model = random_model(CONFIG, DEVICE, Weights(recipe="nvidia"), parallel=context)
    done = warm_ranks(model, MOST_TOKENS, progress=False)
    assert done.failed == {}
    before = compilations()
    for sequences in (1, 3, 64):
        fill = Fill(sequences, MOST_TOKENS, prompts=1, prompt_tokens=MOST_TOKENS)
        step = DecodeStep(model, sequences, MOST_TOKENS, fill=fill)
        eager = [step().clone() for _ in range(5)]
        for logits in eager[1:]:
            assert_bitwise(logits, eager[0])
        graph = step.captured()
        for _ in range(20):
            graph.replay()
        assert_bitwise(step.logits, eager[0])
        plans = [plan.again is not None for plan in plans_of(model)]
        assert plans.count(True) >= len(model.model.layers)
    with Runner(model, max_sequences=4, max_tokens=128, max_chunk=64) as runner:
        runner.warm_up()
        request = runner.add(list(range(2, 40)), max_new_tokens=8, stop_ids=())
        runner.run()
        assert len(request.result()) == 8
    assert compilations() - before == {}
    assert mailboxes.of_group(context.group.name).counter[1] == 0


PROGRAM = """
import sys, time
import torch
import torch.distributed as dist
from dsv4.bench.suites.random_model import Weights, random_model
from dsv4.compilation.warmup import warm_ranks
from dsv4.debug import compilations
from dsv4.kv_cache.paged_cache import Batch, CacheStep
from dsv4.parallel.guard import guard, hash64
from dsv4.parallel.opening import open_mailboxes
from dsv4.parallel.process_group import context_of
from dsv4.serving import Runner
from tests.parallel.test_ranks_gpu import CONFIG

rank, replays = int(sys.argv[1]), int(sys.argv[2])
device = torch.device("cuda", 0)
dist.init_process_group("gloo")
context = context_of(dist.group.WORLD, "tp", device)
open_mailboxes(context, device)
assert context.group.mailbox.kind == "ipc"
model = random_model(CONFIG, device, Weights(), parallel=context)
# Each rank's own experts differ: those of another rank would give other sums.
for layer in model.model.layers:
    layer.mlp.experts.gate_up_proj_scale_2.mul_(1 + rank / 8)
assert warm_ranks(model, 32, progress=False).failed == {}
before = compilations()

def answers(capture):
    options = dict(max_sequences=2, max_tokens=64, max_chunk=32, capture=capture)
    buckets = dict(buckets=(2,), prompt_buckets=(32,))
    with Runner(model, **options, **buckets) as runner:
        prompts = ([5, 9, 2], list(range(1, 31)))
        asked = [runner.add(p, max_new_tokens=6, stop_ids=(), seed=1, temperature=t)
                 for p, t in zip(prompts, (0.0, 1.0))]
        runner.run()
        return [request.result() for request in asked]

with guard(model, every=1):
    eager = answers(False)
captured = answers(True)
assert eager == captured, (eager, captured)
first, *others = context.group.exchange(eager)
assert all(theirs == first for theirs in others), (first, others)

with torch.inference_mode():
    cache = model.new_cache(2, 64, 16)
    rows = [cache.allocate(), cache.allocate()]
    model.prefill([[1, 2, 3], [4, 5]], cache, rows)
    cache.prepare(rows, [1, 1], [3, 2])
    rows, lengths = torch.tensor(rows, device=device), cache.lengths.clone()
    ids = torch.tensor([[7, 8]], device=device)
    total = torch.zeros((), dtype=torch.int64, device=device)

    def step():
        cache.lengths.copy_(lengths)
        batch = Batch.decode(cache.lengths[rows], rows)
        hidden, streams = model.model(ids, None, CacheStep(cache, batch))
        total.add_(hash64(streams)).mul_(3)
        ids.add_(11).remainder_(CONFIG.vocab_size)

    step()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    began = time.perf_counter()
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
print("replays", time.perf_counter() - began, "s")
hashes = context.group.exchange(int(total))
assert len(set(hashes)) == 1, hashes
assert compilations() == before, compilations() - before
"""


OWN_TOKENS = """
import sys
import torch
import torch.distributed as dist
from dsv4.bench.suites.random_model import Weights, random_model
from dsv4.compilation.warmup import warm_ranks
from dsv4.debug import compilations
from dsv4.parallel.exchange_mailboxes import open_exchange
from dsv4.parallel.process_group import context_of
from dsv4.serving import Runner
from tests.parallel.test_ranks_gpu import CONFIG

rank = int(sys.argv[1])
device = torch.device("cuda", 0)
dist.init_process_group("gloo")
context = context_of(dist.group.WORLD, "dp", device)
model = random_model(CONFIG, device, Weights(), parallel=context)
for layer in model.model.layers:
    layer.mlp.experts.gate_up_proj_scale_2.mul_(1 + rank / 8)
open_exchange(context, CONFIG, device, torch.bfloat16)
assert context.group.mailbox.kind == "ipc"
assert warm_ranks(model, 32, progress=False).failed == {}
before = compilations()
prompts = ([[5, 9, 2], list(range(1, 31))], [], [[7]], [[8, 8]])[rank]

def answers(capture):
    options = dict(max_sequences=2, max_tokens=64, max_chunk=32, capture=capture)
    buckets = dict(buckets=(1, 2), prompt_buckets=(32,))
    with Runner(model, **options, **buckets) as runner:
        asked = [runner.add(p, max_new_tokens=6, stop_ids=(), seed=1, temperature=t)
                 for p, t in zip(prompts, (0.0, 1.0))]
        runner.run()
        return [request.result() for request in asked]

for _ in range(2):
    assert (eager := answers(False)) == (captured := answers(True)), (eager, captured)
assert context.group.mailbox.counter[0] > 0
assert compilations() == before, compilations() - before
dist.barrier()
"""


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_that_share_a_gpu_exchange_their_tokens(ranks, tmp_path):
    """Requests on some ranks alone; captured steps by IPC mailboxes give the text of eager ones."""
    run_rank_processes(OWN_TOKENS, ranks, folder=tmp_path, seconds=120)


@pytest.mark.parametrize(("ranks", "replays"), [(2, 300), (4, 50)])
def test_processes_that_share_a_gpu_have_the_same_streams(ranks, replays, tmp_path):
    """A captured step of a model by IPC mailboxes, whose streams are bitwise equal on all ranks.

    A process has the GPU for some milliseconds at a time, so that each sum takes as long, and
    longer beside other processes. A thousand replays are in ``test_push_gpu`` and
    ``test_multi_gpu``.
    """
    run_rank_processes(PROGRAM, ranks, replays, folder=tmp_path, seconds=120)
