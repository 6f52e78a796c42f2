"""What each process of ``test_multi_gpu.py`` does, one process per GPU.

``RANK=r WORLD_SIZE=N ... python -m tests.parallel.multi_gpu_program PART FOLDER DEVICE``. A part is
a list of checks, because starting processes and compiling kernels takes most of the time. What a
check measured goes to ``<folder>/<rank>.jsonl`` at once: ``{"check", "seconds"}`` and
``"error"``, empty if it passed, or whatever figures the check returns.

With DEVICE ``cpu`` everything runs over gloo, without graphs and without what is of GPUs alone:
so the program itself is tested where there is no GPU.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dsv4
from dsv4 import explain, ops
from dsv4.checkpoint import Checkpoint
from dsv4.compilation.warmup import warm_ranks
from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.debug import compilations
from dsv4.dispatch import use_backend
from dsv4.kv_cache.paged_cache import Batch, CacheStep
from dsv4.ops._library import as_record
from dsv4.ops.all_reduce import HcReducePostPreNormArgs
from dsv4.ops.hyper_connection import HcPostPreNormArgs
from dsv4.parallel import groups, mailboxes, multicast
from dsv4.parallel.context import ParallelContext, RankError
from dsv4.parallel.gather import pushed_gather
from dsv4.parallel.guard import guard, hash64
from dsv4.parallel.local_model import local_model
from dsv4.parallel.split import local_bytes
from dsv4.parallel.token_rows import RowLayout
from dsv4.reference.all_reduce import rank_ordered_sum
from dsv4.serving import Runner, release
from dsv4.serving.kept_runner import KeptRunner
from dsv4.serving.sampling import Sampler
from dsv4.serving.step_launcher import StepLauncher
from dsv4.testing.ranks import run_ranks

# Whole blocks of every format, and whole tiles, on each of four ranks; kernels of a GPU take it.
CONFIG = ModelConfig.tiny(
    layer_types=(SLIDING, CSA, HCA),
    hidden_size=1024,
    head_dim=512,
    qk_rope_head_dim=64,
    num_attention_heads=64,
    index_head_dim=128,
    index_n_heads=64,
    q_lora_rank=256,
    o_groups=8,
    o_lora_rank=256,
    moe_intermediate_size=512,
    sliding_window=128,
    n_routed_experts=8,
    num_experts_per_tok=3,
    vocab_size=4096,
    compress_rates={CSA: 4, HCA: 128},
    max_position_embeddings=2048,
    num_nextn_predict_layers=1,
)
PROMPTS = [[5, 9, 2], list(range(1, 150)), [7], [1000, 30, 4], list(range(500, 530))]
NEW = 8
SIZES = (8192, 14336, 262144, 1 << 20, 8 << 20)  # bytes of sums
BACKENDS = ("push", "one_shot", "two_shot", "nccl")
PUSHED, WORKSPACE = 1 << 20, 64 << 20
REPLAYS, LONG_REPLAYS = 200, 1000


@dataclass(eq=False)
class Worker:
    """A process of several, and what its checks share.

    Attributes:
        rank: Its number.
        size: Number of processes.
        folder: Holds the checkpoint, and takes the reports.
        device: Its GPU, or the CPU.
        shared: What an earlier check made for later ones.
    """

    rank: int
    size: int
    folder: Path
    device: torch.device
    shared: dict[str, Any] = field(default_factory=dict)

    @property
    def has_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def group(self) -> str:
        """Name of the group of all processes."""
        return dist.group.WORLD.group_name

    def load(self, parallel: str | None, **options: Any) -> Any:
        """The checkpoint's model, of this rank or, with None, whole."""
        options = {"device": self.device, "progress": False, "mtp": False, **options}
        if parallel is not None:
            mesh = dist.init_device_mesh(self.device.type, (self.size,), mesh_dim_names=(parallel,))
            options |= {"device_mesh": mesh, "parallel": parallel}
        return dsv4.load(self.folder / "checkpoint", **options)

    def same(self, value: Any) -> None:
        """Fail unless all ranks have the same value."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        assert all(other == values[0] for other in values), values

    def synchronize(self) -> None:
        if self.has_gpu:
            torch.cuda.synchronize()


# Sums and tokens over ranks, without a model.


def counted(step: torch.Tensor, rank: int, numel: int) -> torch.Tensor:
    """A partial sum of a step whose number is on the device; any sum of four is exact in bf16."""
    ramp = torch.arange(numel, device=step.device) % 29
    return ((step * (rank + 1) + ramp) % 32).bfloat16()


def drawn(worker: Worker, rank: int, numel: int) -> torch.Tensor:
    """A partial sum; rank 2 cancels rank 0, so that another order has other bits."""
    generator = torch.Generator().manual_seed(rank % 2)
    part = torch.randn(numel, generator=generator) * (1.0, 1.5, -1.0, 2.5)[rank % 4]
    if worker.size > 2 and rank % 2 == 0:
        part *= 2.0**20
    return part.bfloat16().to(worker.device)


def opened(worker: Worker) -> dict[str, Any]:
    """Mailboxes in symmetric memory, checked."""
    box = mailboxes.symmetric(worker.group, PUSHED, worker.device, WORKSPACE)
    worker.shared["box"] = box
    assert box.kind == "symmetric"
    assert box.defect is None, box.defect
    assert box.workspace is not None
    assert len({part.data_ptr() for part in box.slots}) == worker.size
    own = torch.ones(4096, dtype=torch.bfloat16, device=worker.device)
    assert explain(ops.all_reduce, own, worker.group).chosen == "push"
    return {"capacity": box.capacity}


def eager_sums(worker: Worker, backend: str) -> None:
    """Sums of all sizes: equal bits on all ranks; those of push are the reference's."""
    for nbytes in SIZES:
        if backend == "push" and nbytes > PUSHED:
            continue
        own = drawn(worker, worker.rank, nbytes // 2)
        for _ in range(4):
            total = ops.all_reduce(own, worker.group, backend=backend)
        parts = [drawn(worker, rank, nbytes // 2) for rank in range(worker.size)]
        if backend == "push":
            assert torch.equal(total, rank_ordered_sum(parts)), nbytes
        exact = torch.stack([part.double() for part in parts])
        allowed = worker.size * 2.0**-8 * exact.abs().sum(0)
        assert bool(((total.double() - exact.sum(0)).abs() <= allowed).all()), nbytes
        worker.same((nbytes, int(hash64(total))))


def captured(worker: Worker, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of some work, which ran before; all ranks capture at the same time."""
    worker.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has a thread
        work()
    return graph


def graphs(worker: Worker, backend: str) -> dict[str, float]:
    """Sums in graphs that are replayed, each of new numbers, compared on the device."""
    times = {}
    for nbytes in SIZES:
        if backend == "push" and nbytes > PUSHED:
            continue
        replays = LONG_REPLAYS if nbytes == SIZES[0] else REPLAYS
        step = torch.zeros((), dtype=torch.int64, device=worker.device)
        wrong = torch.zeros((), dtype=torch.int64, device=worker.device)

        def run(nbytes=nbytes, step=step, wrong=wrong) -> None:
            step.add_(1)
            own = counted(step, worker.rank, nbytes // 2)
            total = ops.all_reduce(own, worker.group, backend=backend)
            every = [counted(step, rank, nbytes // 2) for rank in range(worker.size)]
            wrong.add_((total != rank_ordered_sum(every)).sum())

        run()
        graph = captured(worker, run)
        began = time.perf_counter()
        for _ in range(replays):
            graph.replay()
        worker.synchronize()
        times[f"{nbytes} B, us a replay"] = (time.perf_counter() - began) * 1e6 / replays
        assert int(wrong) == 0, (nbytes, int(wrong))
        assert int(step) == replays + 1
    return times


def all_in_one_graph(worker: Worker) -> None:
    """All implementations, one after another, in one graph."""
    step = torch.zeros((), dtype=torch.int64, device=worker.device)
    wrong = torch.zeros((), dtype=torch.int64, device=worker.device)

    def run() -> None:
        for backend in (*BACKENDS, "push"):
            step.add_(1)
            total = ops.all_reduce(counted(step, worker.rank, 4096), worker.group, backend=backend)
            every = [counted(step, rank, 4096) for rank in range(worker.size)]
            wrong.add_((total != rank_ordered_sum(every)).sum())

    run()
    graph = captured(worker, run)
    for _ in range(REPLAYS):
        graph.replay()
    worker.synchronize()
    assert int(wrong) == 0, int(wrong)


def fused_sums(worker: Worker) -> None:
    """A sum with the hyper-connection behind it has the bits of both, one after the other."""
    from dsv4.triton import hyper_connection

    for tokens in (1, 4, 64):
        generator = torch.Generator().manual_seed(tokens)
        shapes = {"streams": (tokens, 4, 1024), "post": (tokens, 4), "comb": (tokens, 4, 4)}
        shapes |= {"fn": (24, 4096), "scale": (3,), "base": (24,), "norm_weight": (1024,)}
        values = {
            name: torch.randn(shape, generator=generator).to(worker.device)
            for name, shape in shapes.items()
        }
        for name in ("streams", "norm_weight"):
            values[name] = values[name].bfloat16()
        rest = {"norm_eps": 1e-6, "hc_eps": 1e-6, "iterations": 3}
        own = drawn(worker, worker.rank, tokens * 1024).view(tokens, 1024)
        args = {"partial": own, **values, **rest, "group": worker.group}
        results = ops.hc_reduce_post_pre_norm(**args)
        assert explain(ops.hc_reduce_post_pre_norm, **args).chosen == "push"
        parts = [drawn(worker, rank, tokens * 1024) for rank in range(worker.size)]
        y = rank_ordered_sum([part.view(tokens, 1024) for part in parts])
        record = HcReducePostPreNormArgs(**args)
        after = as_record(HcPostPreNormArgs, record, y=y)
        for result, right in zip(results, hyper_connection.hc_post_pre_norm(after), strict=True):
            assert torch.equal(result, right), tokens


def gathered(worker: Worker) -> None:
    """Candidates of the sampler, as they are pushed."""
    for dtype in (torch.int64, torch.float32, torch.bfloat16):
        own = (torch.arange(40, device=worker.device) * (worker.rank + 1)).to(dtype)
        pushed = pushed_gather(own, worker.group)
        assert pushed is not None
        for part, right in zip(pushed, groups.gather(own, worker.group), strict=True):
            assert torch.equal(part, right)


def tokens(worker: Worker, backend: str) -> None:
    """Tokens to the ranks of their experts and back, in graphs."""
    from tests.parallel.test_exchange_gpu import CHOICES, EXPERTS, tokens_of, wrong_rows, wrong_sums

    count, hidden = 8, 4096
    nbytes = RowLayout(CHOICES, hidden).nbytes(count)
    box = mailboxes.symmetric(worker.group, nbytes, worker.device)
    step = torch.zeros((), dtype=torch.int64, device=worker.device)
    wrong = torch.zeros((), dtype=torch.int64, device=worker.device)

    def run() -> None:
        step.add_(1)
        sent = tokens_of(step, worker.rank, count, hidden)
        received = ops.moe_send(
            sent.x, sent.ids, sent.weights, EXPERTS, worker.group, backend=backend
        )
        wrong.add_(wrong_rows(step, worker.rank, worker.size, received, count))
        here = (received[1] >= 0).any(1, keepdim=True)  # what is not of this rank is not defined
        y = torch.where(here, received[0], 0)
        total = ops.moe_return(y, received[1], sent.ids, EXPERTS, worker.group, backend=backend)
        wrong.add_(wrong_sums(sent, worker.size, total))

    run()
    graph = captured(worker, run)
    for _ in range(LONG_REPLAYS):
        graph.replay()
    worker.synchronize()
    assert int(wrong) == 0, int(wrong)
    assert int(step) == LONG_REPLAYS + 1
    del box
    if "box" in worker.shared:
        mailboxes.announce(worker.group, worker.shared["box"])


def refusals(worker: Worker) -> None:
    """Multicast that is asked for, by name and by the environment: nothing is allocated."""
    own = torch.ones(64, dtype=torch.bfloat16, device=worker.device)
    before = torch.cuda.memory_allocated() if worker.has_gpu else 0
    _refused("multicast", lambda: ops.all_reduce(own, worker.group, backend="multimem"))
    path, world = worker.folder / "checkpoint", {"device_mesh": dist.group.WORLD}
    _refused("multicast", lambda: dsv4.load(path, **world, parallel="multicast"))
    for name, off in multicast.OFF.items():
        old = os.environ[name]
        os.environ[name] = "1" if off == "0" else "0"
        try:
            _refused(name, lambda: dsv4.load(path, **world, parallel="tp", device=worker.device))
            if worker.has_gpu:
                _refused(name, lambda: mailboxes.symmetric(worker.group, 64, worker.device))
        finally:
            os.environ[name] = old
    assert not worker.has_gpu or torch.cuda.memory_allocated() == before


def _refused(word: str, action: Callable[[], Any]) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=word):
        action()


# A model of a checkpoint with parallel="tp".


def sizes_of(checkpoint: Checkpoint) -> dict[str, int]:
    """Bytes of what is loaded: the draft layer is not, but for ``drafts``."""
    entries = checkpoint.entries.items()
    return {name: entry.nbytes for name, entry in entries if not name.startswith("mtp.")}


def loaded(worker: Worker) -> dict[str, float]:
    """A rank reads, holds and allocates its share; its mailboxes are in symmetric memory."""
    with Checkpoint.open(worker.folder / "checkpoint") as checkpoint:
        sizes = sizes_of(checkpoint)
    rule, whole = local_bytes(sizes, worker.size), sum(sizes.values())
    before = 0
    if worker.has_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    model = worker.load("tp", prepare=False, reserve_tokens=0)
    peak = torch.cuda.max_memory_allocated() - before if worker.has_gpu else 0
    held = sum({t.data_ptr(): t.nbytes for t in model.state_dict().values()}.values())
    read = model.load_report.bytes_read
    figures = {"rule": rule, "whole": whole, "read": read, "held": held, "peak": peak}
    worker.shared["model"] = model
    assert abs(read - rule) <= 0.05 * rule, figures
    assert abs(held - rule) <= 0.05 * rule, figures
    layer = max(
        sum(size for name, size in sizes.items() if f"layers.{i}." in name) for i in range(3)
    )
    assert peak <= 1.05 * rule + layer / worker.size, figures
    if worker.has_gpu:
        box = model.parallel.group.mailbox
        assert box is not None
        assert (box.kind, box.defect) == ("symmetric", None)
        assert box.workspace is not None
    return figures


def kernels(worker: Worker) -> dict[str, Any]:
    """All kernels of the rank's sizes are compiled ahead, by rank 0."""
    done = warm_ranks(worker.shared["model"], 2048, progress=False)
    worker.shared["compiled"] = compilations()
    if not worker.has_gpu:
        return {}
    assert done is not None
    assert done.failed == {}, done.failed
    return {"kernels": done.kernels + done.triton, "seconds of kernels": done.seconds}


def logits(worker: Worker) -> dict[str, Any]:
    """Logits of prompts: equal bits on all ranks, and near those of the whole model on one GPU."""
    model = worker.shared["model"]
    ours = _prefilled(model)
    worker.same(int(hash64(ours)))
    worker.shared["logits"] = ours
    measured = _compared(worker, ours) if worker.rank == 0 else {}
    dist.barrier()
    return measured


def virtual_ranks(worker: Worker) -> None:
    """Compare bits with the same ranks as threads of one process; the host computes their sums.

    Kernels are the same, because their sizes are those of a rank. Other tests show in float64 that
    such ranks compute the results of the whole model.
    """
    if worker.rank == 0:
        whole = worker.load(None, prepare=False, reserve_tokens=0)

        def work(context: ParallelContext) -> torch.Tensor:
            return _prefilled(local_model(whole, context))

        for other in run_ranks(worker.size, work):
            difference = (other - worker.shared["logits"]).abs().max()
            assert torch.equal(other, worker.shared["logits"]), f"up to {float(difference)} apart"
    dist.barrier()


@torch.inference_mode()
def _prefilled(model: Any) -> torch.Tensor:
    """Logits after each prompt, float32; every rank has all of the vocabulary."""
    cache = model.new_cache(len(PROMPTS), 256, 64)
    rows = [cache.allocate() for _ in PROMPTS]
    return model.prefill(PROMPTS, cache, rows).float()


def _compared(worker: Worker, ours: torch.Tensor) -> dict[str, Any]:
    """Compare with the whole model by the reference, which compiles no kernel.

    The bfloat16 reference differs from float32 by ``floor``. One process rounds the output of a
    sublayer once; ranks round N parts and their sum. Independent errors are therefore at most ``(N
    + 1)^0.5`` as large, and two results differ by at most the sum of their errors. A close call of
    a router or an indexer in bfloat16 gives a token another expert or entry. One prompt may have
    such a call; ``virtual_ranks`` compares bits.
    """
    right, exact = _of_one(worker, "bfloat16"), _of_one(worker, "float32")
    floors = _distances(right, exact)
    usual = floors.median()
    allowed = (1 + (worker.size + 1) ** 0.5) * torch.maximum(floors, usual)
    errors = _distances(ours, right)
    measured = {
        "errors": [round(error, 4) for error in errors.tolist()],
        "allowed": [round(error, 4) for error in allowed.tolist()],
        "argmax agrees": float((ours.argmax(-1) == right.argmax(-1)).float().mean()),
    }
    assert int((errors > allowed).sum()) <= 1, measured
    return measured


def _distances(values: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the relative error of each prompt's logits."""
    return (values - expected).norm(dim=-1) / expected.norm(dim=-1)


def _of_one(worker: Worker, dtype: str) -> torch.Tensor:
    """Logits of the whole model on one device by the reference."""
    whole = worker.load(None, prepare=False, reserve_tokens=0, pack=False, dtype=dtype)
    with use_backend("reference"):
        return _prefilled(whole)


def answers(model: Any, capture: bool | None) -> list[list[int]]:
    """Tokens of two requests in a runner, greedy and drawn."""
    options: dict[str, Any] = {"max_sequences": 2, "max_tokens": 192, "max_chunk": 64}
    buckets = {"buckets": (2,), "prompt_buckets": (64,)}
    with Runner(model, capture=capture, **options, **buckets, speculate=None) as runner:
        asked = [
            runner.add(p, max_new_tokens=NEW, stop_ids=(), seed=1, temperature=t)
            for p, t in zip(PROMPTS[:2], (0.0, 1.0), strict=True)
        ]
        runner.run()
        texts = [request.result() for request in asked]
        assert (runner.captures > 0) == bool(capture)
        return texts


def steps(worker: Worker) -> None:
    """Eager steps under the guard of streams, and captured ones, give one text on all ranks."""
    model = worker.shared["model"]
    with guard(model, every=1):
        eager = answers(model, False)
    worker.same(eager)
    if worker.has_gpu:
        captured_text = answers(model, True)
        assert captured_text == eager, (captured_text, eager)


def generated(worker: Worker) -> dict[str, Any]:
    """``generate``, greedy and drawn: the same on all ranks."""
    model = worker.shared["model"]
    texts = []
    for sampler in (None, Sampler(1.0, top_p=0.9, generator=torch.Generator().manual_seed(7))):
        options = {} if sampler is None else {"sampler": sampler}
        texts.append(model.generate(PROMPTS, NEW, stop_ids=[], **options))
    worker.same(texts)
    assert all(len(text) == NEW for half in texts for text in half)
    graphs_of = KeptRunner.of(model).runner.captures if worker.has_gpu else 0
    assert not worker.has_gpu or graphs_of > 0
    release(model)
    return {"graphs": graphs_of, "greedy": texts[0]}


def compiled_nothing(worker: Worker) -> None:
    """Since ``kernels``."""
    later = compilations() - worker.shared["compiled"]
    assert not later, dict(later)


@torch.inference_mode()
def replays(worker: Worker) -> dict[str, float]:
    """A captured decode step, replayed often with other tokens: streams have equal bits."""
    model, device = worker.shared["model"], worker.device
    cache = model.new_cache(2, 64, 16)
    rows = [cache.allocate(), cache.allocate()]
    model.prefill([[1, 2, 3], [4, 5]], cache, rows)
    cache.prepare(rows, [1, 1], [3, 2])
    rows, lengths = torch.tensor(rows, device=device), cache.lengths.clone()
    ids = torch.tensor([[7, 8]], device=device)
    total = torch.zeros((), dtype=torch.int64, device=device)

    def step() -> None:
        cache.lengths.copy_(lengths)
        batch = Batch.decode(cache.lengths[rows], rows)
        _, streams = model.model(ids, None, CacheStep(cache, batch))
        total.add_(hash64(streams)).mul_(3)
        ids.add_(11).remainder_(CONFIG.vocab_size)

    step()
    step()
    again: Callable[[], Any] = captured(worker, step).replay if worker.has_gpu else step
    count = LONG_REPLAYS if worker.has_gpu else 4
    began = time.perf_counter()
    for _ in range(count):
        again()
    worker.synchronize()
    elapsed = time.perf_counter() - began
    worker.same(int(total))
    return {"ms a step": 1e3 * elapsed / count}


def drafts(worker: Worker) -> dict[str, Any]:
    """Drafts, captured: one text on all ranks, which begins as the one without drafts."""
    model = worker.load("tp", prepare=False, reserve_tokens=0, mtp=True)
    texts = model.generate(PROMPTS, NEW, stop_ids=[], speculate="mtp")
    worker.same(texts)
    measured: dict[str, Any] = {}
    if worker.has_gpu:
        runner = KeptRunner.of(model).runner
        assert runner is not None
        assert runner.captures > 0
        assert runner.draft_counts.drafted > 0
        measured["drafts"] = str(runner.draft_counts)
    plain = model.generate(PROMPTS, NEW, stop_ids=[], speculate=None)
    assert [text[0] for text in texts] == [text[0] for text in plain]
    same = sum(text == other for text, other in zip(texts, plain, strict=True))
    release(model)
    return {"texts as without drafts": f"{same} of {len(plain)}", **measured}


# A model with parallel="dp".


def kernels_of_one(worker: Worker) -> None:
    """The texts of the whole model, whose kernels are many of a rank's."""
    if worker.rank == 0 and worker.has_gpu:
        whole = worker.load(None, prepare="kernels", reserve_tokens=512)
        worker.shared["alone"] = whole.generate(PROMPTS, NEW, stop_ids=[])
        release(whole)
        del whole
        torch.cuda.empty_cache()
    dist.barrier()


def own_prompts(worker: Worker) -> list[list[int]]:
    """Fewer on each rank, and none on the last."""
    return (
        PROMPTS[: max(0, len(PROMPTS) - 2 * worker.rank)] if worker.rank < worker.size - 1 else []
    )


def loaded_dp(worker: Worker) -> dict[str, Any]:
    """Whole matrices but for the experts; tokens are pushed through symmetric memory."""
    with Checkpoint.open(worker.folder / "checkpoint") as checkpoint:
        sizes = sizes_of(checkpoint)
    model = worker.shared["model"] = worker.load("dp", prepare=False, reserve_tokens=0)
    rule, read = local_bytes(sizes, worker.size, "dp"), model.load_report.bytes_read
    assert abs(read - rule) <= 0.05 * rule, (read, rule)
    if worker.has_gpu:
        box = model.parallel.group.mailbox
        assert box is not None
        assert (box.kind, box.defect) == ("symmetric", None)
    return {"rule": rule, "read": read}


def uneven(worker: Worker) -> dict[str, Any]:
    """Uneven numbers of prompts, none on the last rank: captured, pushed and by NCCL."""
    model, group = worker.shared["model"], worker.shared["model"].parallel.group
    pushed = model.generate(own_prompts(worker), NEW, stop_ids=[])
    assert [len(text) for text in pushed] == [NEW] * len(own_prompts(worker))
    if worker.has_gpu:
        runner = KeptRunner.of(model).runner
        assert runner is not None
        assert runner.captures > 0
    release(model)
    moved = pushed
    if worker.has_gpu:
        box = mailboxes._OPEN.pop(group.name)
        moved = model.generate(own_prompts(worker), NEW, stop_ids=[])
        release(model)
        mailboxes.announce(group.name, box)
    assert moved == pushed, (moved, pushed)
    alone = worker.shared.get("alone", pushed)
    same = sum(a == b for a, b in zip(alone, pushed, strict=False))
    return {"texts as on one GPU": f"{same} of {len(pushed)}"}


def dp_steps(worker: Worker) -> None:
    """Requests of each rank, in eager and captured steps of equal sizes, with late arrivals."""
    model = worker.shared["model"]
    texts = []
    for capture in (False, True) if worker.has_gpu else (False,):
        options: dict[str, Any] = {"max_sequences": 2, "max_tokens": 192, "max_chunk": 64}
        buckets = {"buckets": (2,), "prompt_buckets": (64,)}
        with Runner(model, capture=capture, **options, **buckets) as runner:
            asked = [runner.add(p, max_new_tokens=NEW, stop_ids=()) for p in own_prompts(worker)]
            for _ in range(3):
                runner.step()
            if worker.rank == worker.size - 1:
                asked.append(runner.add([3, 1], max_new_tokens=NEW, stop_ids=()))
            runner.run()
            texts.append([request.result() for request in asked])
            assert (runner.captures > 0) == capture
    assert texts[0] == texts[-1], texts


def dp_logits(worker: Worker) -> dict[str, Any]:
    """Logits near those of the whole model on one GPU; all ranks have the same prompts."""
    ours = _prefilled(worker.shared["model"])
    measured = _compared(worker, ours) if worker.rank == 0 else {}
    dist.barrier()
    return measured


# A rank that ends.


def killed(worker: Worker, parallel: str, with_mailboxes: bool) -> dict[str, Any]:
    """The last rank ends in the middle of a step: the others get an error, and end, too."""
    model = worker.load(parallel, prepare=False, reserve_tokens=0)
    warm_ranks(model, 256, progress=False)
    if worker.has_gpu and not with_mailboxes:
        mailboxes._OPEN.pop(model.parallel.group.name, None)
        model.parallel.group.mailbox = None
    began, is_last = time.monotonic(), worker.rank == worker.size - 1
    try:
        with Runner(model, max_sequences=1, max_tokens=256, speculate=None) as runner:
            request = runner.add(PROMPTS[0], max_new_tokens=200, stop_ids=())
            for _ in range(20):
                runner.step()
            assert (runner.captures > 0) == worker.has_gpu
            began = time.monotonic()
            with in_place_of_decode_steps(_end) if is_last else nullcontext():
                runner.run()
            request.result()
    except RankError as error:
        return {"message": str(error), "after": time.monotonic() - began}
    raise AssertionError(f"rank {worker.rank} had {len(request.tokens)} tokens and no error")


@contextmanager
def in_place_of_decode_steps(action: Callable[..., Any]) -> Iterator[None]:
    """Call something where a runner of this process would launch a decode step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepLauncher, "decode", action)
        yield


def _end(*args: Any) -> bool:
    """End at once, when all ranks are about to launch a decode step."""
    os._exit(17)


PARTS: dict[str, list[Callable[[Worker], Any]]] = {
    "sums": [
        opened,
        *[partial(eager_sums, backend=name) for name in BACKENDS],
        *[partial(graphs, backend=name) for name in BACKENDS],
        all_in_one_graph,
        fused_sums,
        gathered,
        partial(tokens, backend="push"),
        partial(tokens, backend="nccl"),
        refusals,
    ],
    "tp": [
        loaded,
        kernels,
        steps,
        generated,
        compiled_nothing,
        replays,
        logits,
        drafts,
        virtual_ranks,
    ],
    "dp": [kernels_of_one, loaded_dp, kernels, uneven, dp_steps, compiled_nothing, dp_logits],
    "killed": [partial(killed, parallel="tp", with_mailboxes=True)],
    "killed_nccl": [partial(killed, parallel="tp", with_mailboxes=False)],
    "killed_dp": [partial(killed, parallel="dp", with_mailboxes=True)],
}


def name_of(check: Callable[..., Any]) -> str:
    """A check's name, with its backend."""
    if isinstance(check, partial):
        words = [
            check.func.__name__,
            *(str(v) for k, v in check.keywords.items() if k == "backend"),
        ]
        return " ".join(words)
    return check.__name__


def main(part: str, folder: str, kind: str) -> int:
    """Run the checks of a part until one fails."""
    multicast.turn_off()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    own = {"device_id": device} if kind == "cuda" else {}
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", **own)
    worker = Worker(rank, size, Path(folder), device)
    for check in PARTS[part]:
        began = time.perf_counter()
        report: dict[str, Any] = {"check": name_of(check), "error": ""}
        try:
            report["measured"] = check(worker)
        except BaseException:
            report["error"] = traceback.format_exc()[-4000:]
        report["seconds"] = round(time.perf_counter() - began, 2)
        with (worker.folder / f"{rank}.jsonl").open("a") as file:
            file.write(json.dumps(report) + "\n")
        if report["error"]:
            print(report["error"], flush=True)
            os._exit(1)  # without destructors, which wait for the others
    if part.startswith("killed"):
        return 0  # as a program ends that has caught the error
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
