"""Kernels that are compiled beside other work: kept where a warm-up looks, and ended with it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dsv4
from dsv4.compilation import bundle, jobs, pool, sealed_file
from dsv4.compilation import warmup as _warmup
from dsv4.compilation.ahead import KernelsAhead, _LateCount
from dsv4.compilation.bundle import Compiled
from dsv4.compilation.jobs import CuteJob, FindJob, PlanJob, TritonJob
from dsv4.compilation.kernel_calls import Attention, every_call, kernel_plans
from dsv4.compilation.launch_recorder import Ran, Steps
from dsv4.compilation.listing import Listing
from dsv4.compilation.recipe import Recipe
from dsv4.compilation.target import Target
from dsv4.compilation.worker import Done
from dsv4.cute.runtime import cubin_cache, cubin_file
from dsv4.cute.runtime.driver import Image
from dsv4.parallel.context import ALONE, Ranks

kernel_store = pytest.importorskip("dsv4.triton._runtime.kernel_store")
ARCH = "sm_90a"
CONFIG = dsv4.ModelConfig.tiny(hidden_size=128, q_lora_rank=64, moe_intermediate_size=64)
NAMES = ("_first", "_second", "_third")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(cubin_cache.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.delenv(bundle.VARIABLE, raising=False)
    monkeypatch.setattr(_warmup._launch_recorder, "impossible", lambda: None)
    return tmp_path


class Workers:
    """Workers that are no processes: their jobs are done by name, and counted."""

    def __init__(self, patch: pytest.MonkeyPatch, fails: str = "") -> None:
        self.done: list[str] = []
        self.fails = fails
        patch.setattr(pool.forks, "start", lambda count, arch: None)
        process = SimpleNamespace(poll=lambda: None, kill=lambda: None)
        patch.setattr(pool, "start", lambda: process)
        patch.setattr(pool, "_ask", lambda process, job: self.answer(job))
        patch.setattr(pool, "_end", lambda process: None)

    def answer(self, job: pool.Job) -> Done:
        self.done.append(job.name)
        if self.fails and self.fails in job.name:
            return Done(error="RuntimeError: it cannot be compiled")
        if isinstance(job, FindJob):
            return Done(listed())
        return Done(job.run() if isinstance(job, PlanJob) else made(job))


def listed() -> Steps:
    """The kernels that every step launches here."""
    requests = {}
    for name in NAMES:
        key = name.encode().ljust(32)
        requests[key] = SimpleNamespace(key=key, name=name, module="kernels", arch=ARCH)
    return Steps({("norm", "triton"): Ran(kernels=set(NAMES))}, requests)


def made(job: CuteJob | TritonJob) -> Compiled:
    """A compiled kernel."""
    if isinstance(job, TritonJob):
        content = sealed_file.encode(kernel_store._MAGIC, job.key, b"code")
        return Compiled(job.key, job.name, content)
    plan = job.plan
    image = Image(b"code", "name", plan.threads, plan.ctas, plan.shared_bytes)
    return Compiled(job.key, job.name, cubin_file.encode(image, job.key))


def listing_of(model: object, tokens: int = 64) -> Listing:
    return Listing(Recipe.of(model), Target(ARCH), tokens)


def test_a_warm_up_afterwards_compiles_nothing(monkeypatch):
    workers = Workers(monkeypatch)
    with KernelsAhead() as ahead:
        ahead.begin(listing_of(CONFIG))
        ahead.wait(progress=True)
    assert len(workers.done) == len(set(workers.done)) > len(NAMES)
    number = len(workers.done)
    done, outcome = _warmup.compile_model(CONFIG, ARCH, 64)
    assert (done.compiled, done.triton_compiled, done.failed) == (0, 0, {})
    assert done.triton == len(NAMES)
    assert done.kernels == len(outcome.stored) > 0
    with KernelsAhead() as again:
        again.begin(listing_of(CONFIG))
        again.wait(progress=True)
    assert len(workers.done) == number, "nothing was left to do"


@pytest.mark.parametrize("fault", ["_second", "list of CuTeDSL", "list of Triton"])
def test_what_fails_is_left_to_the_warm_up(fault, monkeypatch):
    """It finds the same, and says it."""
    workers = Workers(monkeypatch, fault)
    with KernelsAhead() as ahead:
        ahead.begin(listing_of(CONFIG))
        ahead.wait(progress=False)
    assert listing_of(CONFIG).stored() is None
    workers.done.clear()
    done, _ = _warmup.compile_model(CONFIG, ARCH, 64)
    if fault == "_second":
        assert list(done.failed.values()) == ["RuntimeError: it cannot be compiled"]
        assert [name for name in workers.done if name.startswith("Triton")] == [
            "Triton kernel kernels._second"
        ]
    else:
        assert bool(done.skipped) == (fault == "list of Triton")


def test_a_list_that_this_process_makes_is_compiled_by_the_same_workers(monkeypatch):
    """Beside CuTeDSL's kernels, part by part; kept, it is not made again."""
    workers, whole, asked = Workers(monkeypatch), listed(), []

    def parts():
        for key, request in whole.requests.items():
            asked.append(key)
            yield Steps(whole.ran, {key: request})

    def compiled():
        model = dsv4.layers.Linear(128, 64).to(torch.bfloat16)
        options = {"recipe": "other modules", "others": [Attention(64)], "parts": parts()}
        return _warmup.compile_model(model, ARCH, 64, **options)

    done, outcome = compiled()
    assert asked == list(whole.requests)
    assert (done.triton, done.triton_compiled, done.failed) == (len(NAMES), len(NAMES), {})
    assert {type(job) for job in outcome.jobs} == {CuteJob, TritonJob}
    assert len(workers.done) == len(set(workers.done)) == len(outcome.jobs)
    assert done.kernels == len(outcome.jobs) - len(NAMES) > 0
    again, _ = compiled()
    assert len(asked) == len(NAMES), "the list was kept"
    assert (again.triton, again.triton_compiled, again.compiled) == (len(NAMES), 0, 0)


def test_where_no_process_can_be_started_this_one_does_nothing(monkeypatch, folder):
    """A job in this process would replace what the operators of other threads call."""
    monkeypatch.setattr(jobs.FindJob, "run", lambda job: pytest.fail("a job is done here"))
    monkeypatch.setattr(jobs.PlanJob, "run", lambda job: pytest.fail("a job is done here"))
    for name, value in (("can_start", lambda: False), ("start", lambda: None)):
        with monkeypatch.context() as patch, KernelsAhead() as ahead:
            patch.setattr(pool.forks, "start", lambda count, arch: None)
            patch.setattr(pool, name, value)
            ahead.begin(listing_of(CONFIG))
            ahead.wait(progress=False)
    assert list(folder.iterdir()) == []


def test_without_a_folder_they_stay_in_this_process(monkeypatch):
    Workers(monkeypatch)
    active = bundle.Active()
    monkeypatch.setattr(bundle, "active", lambda: active)
    monkeypatch.setattr(cubin_cache, "folder", lambda: None)
    with KernelsAhead() as ahead:
        ahead.begin(listing_of(CONFIG))
        ahead.wait(progress=False)
    done, _ = _warmup.compile_model(CONFIG, ARCH, 64)
    assert (done.compiled, done.triton_compiled, done.triton) == (0, 0, len(NAMES))


@pytest.mark.parametrize("ranks", [ALONE, Ranks(2)])
@pytest.mark.parametrize("arch", [ARCH, "sm_100a"])
def test_plans_of_a_worker_are_those_of_the_model(arch, ranks):
    recipe = Recipe.of(CONFIG, ranks)
    plans = PlanJob(recipe, Target(arch), 300).run()
    with torch.device("meta"):
        model = recipe.build(arch)
    assert plans == kernel_plans(every_call(model, arch), 300, arch)
    assert plans


@given(before=st.lists(st.booleans()), after=st.lists(st.booleans()))
def test_progress_is_shown_from_whenever(before, after):
    """True: a kernel more to come; False: one is done."""
    late, shown = _LateCount(), _LateCount()
    for number, is_expected in enumerate([*before, *after]):
        if number == len(before):
            late.show(shown)
        late.expect(1) if is_expected else late.advance()
    if after:
        assert (shown._total, shown._done) == (late._total, late._done)


@dataclass(frozen=True)
class Endless:
    """A recipe of a model whose steps nobody sees."""

    def shapes(self, max_tokens: int) -> list[int]:
        """Shapes of two jobs."""
        return list(range(100))

    def build(self, arch: str) -> None:
        """Take longer than any test."""
        time.sleep(1000)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("begun", [False, True])
def test_an_error_ends_the_workers(workers, begun, monkeypatch):
    """Interpreters and forks, also while they start."""
    monkeypatch.setattr(pool, "processors", lambda: workers)
    numbers, asked = [], pool._ask

    def noted(process, job):
        numbers.append(getattr(process, "_number", None) or process.pid)
        return asked(process, job)

    monkeypatch.setattr(pool, "_ask", noted)
    ahead = KernelsAhead()

    def interrupted():
        with ahead:
            ahead.begin(Listing(Endless(), Target(ARCH), 8))
            end = time.monotonic() + 120
            while begun and len(numbers) < 2 and time.monotonic() < end:
                time.sleep(0.05)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert ahead._thread is not None
    assert not ahead._thread.is_alive()
    assert bool(numbers) >= begun
    for number in numbers:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)
