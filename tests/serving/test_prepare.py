"""``prepare``: after it no call captures, and nothing of it is left in the cache."""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import dsv4
from dsv4 import debug
from dsv4.compilation.warmup import Warmup
from dsv4.layers import quantize_
from dsv4.serving import Runner, SamplingOptions, _setup, kept_runner, prepare, prompts, release
from dsv4.serving._capture import CaptureError
from dsv4.serving.graphs import Graphs, default_buckets
from dsv4.serving.kept_runner import Capacity, KeptRunner
from dsv4.serving.sampling import Sampler
from dsv4.testing.models import random_model
from tests._tools.taped import replayed
from tests.serving.cases import ToyModel, assert_empty, packed, plain_text

LOGGER = "dsv4.serving"
PACKAGE = dsv4.__file__.removesuffix("__init__.py")
GREEDY = SamplingOptions(max_new_tokens=6, stop_ids=())


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ToyModel:
    """A model that is treated as one on a GPU; a replay of a graph runs what was captured."""
    for module in (kept_runner, _setup):
        monkeypatch.setattr(module, "why_eager", lambda model, sequences: None)
    monkeypatch.setattr(kept_runner, "_keeps", lambda model: True)
    monkeypatch.setattr(Graphs, "captured", replayed)
    for name, value in {
        "device": contextlib.nullcontext(),
        "memory_reserved": 7,
        "mem_get_info": (1_500_000_000, 80_000_000_000),
        "synchronize": None,
        "empty_cache": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    return ToyModel()


def runner_of(model: ToyModel) -> Runner:
    runner = KeptRunner.of(model).runner
    assert runner is not None
    return runner


def test_nothing_is_prepared_on_a_cpu() -> None:
    model = ToyModel()
    done = prepare(model)
    assert str(done) == "nothing is prepared: the model is on cpu"
    assert (done.capacity, done.graphs, done.bytes) == (None, 0, 0)
    assert model.generate([[1, 2]], 6, stop_ids=()) == [plain_text(model, [1, 2], GREEDY, 0)]
    assert KeptRunner.of(model).runner is None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.nn.Linear(1, 1),), TypeError, "model is Linear, wanted what dsv4.load gives"),
        ((ToyModel(), 0), ValueError, "sequences is 0, wanted 1 or more"),
        ((ToyModel(), 1, 1), ValueError, "tokens is 1, wanted 2 or more"),
        ((ToyModel(), 1, 2.0), TypeError, "tokens is 2.0"),
    ],
)
def test_what_cannot_be_prepared_is_refused(arguments: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        prepare(*arguments)


@pytest.mark.parametrize("sequences", [1, 3])
def test_the_first_call_captures_nothing(
    gpu: ToyModel, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "BUCKETS", (32, 64, 512))
    steps: list[int] = []
    forward = gpu.model.forward

    def counted(ids: torch.Tensor, *rest: Any) -> Any:
        steps.append(ids.numel())
        return forward(ids, *rest)

    gpu.model.forward = counted  # type: ignore[method-assign]
    done = prepare(gpu, sequences)
    assert done.capacity == Capacity(
        sequences, 1024, sequences * 1024
    )  # as many as it has positions
    assert steps.count(1023) == 2, "a chunk that no graph holds, until its calls are planned"
    runner, captures = runner_of(gpu), runner_of(gpu).captures
    assert done.graphs == captures > 5
    assert not runner.has_work
    assert len(runner._prefixes) == 0
    assert_empty(runner)
    for sampler in (None, Sampler(0.7), Sampler(0.7, 0.9)):
        for length in (1, 33, 600):
            texts = [[length % 100 + i] * length for i in range(sequences)]
            result = gpu.generate(texts, 6, sampler=sampler, stop_ids=())
            if sampler is None:
                assert result == [plain_text(gpu, prompt, GREEDY, 0) for prompt in texts]
    assert runner_of(gpu) is runner
    assert runner.captures == captures


class Functions:
    """Functions of this package that ran inside a ``with`` block."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __enter__(self) -> Functions:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            self.names.add(f"{code.co_filename}:{code.co_qualname}")


@pytest.mark.parametrize("sequences", [1, 2])
def test_the_first_call_runs_nothing_that_was_not_rehearsed(
    gpu: ToyModel, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_runner, "BUCKETS", (32, 64))
    monkeypatch.setattr(prompts, "BUCKETS", (32, 64))
    monkeypatch.delitem(sys.modules, "dsv4.serving.generation", raising=False)
    with Functions() as rehearsed:
        prepare(gpu, sequences, 128)
    modules = set(sys.modules)
    for sampler in (None, Sampler(0.7), Sampler(0.7, 0.9)):
        for length in (1, 21, 40):
            with Functions() as called:
                gpu.generate([[7] * length] * sequences, 3, sampler=sampler, stop_ids=())
            assert called.names - rehearsed.names == set()
    assert set(sys.modules) == modules
    assert any("generation.py:generate" in name for name in rehearsed.names)


def test_a_rehearsal_leaves_random_numbers_and_says_nothing(
    gpu: ToyModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Not of logits that are not finite either: the call that gets them raises."""
    gpu.failing = set(range(1_000_003))
    state = torch.get_rng_state()
    with caplog.at_level(logging.INFO):
        done = prepare(gpu, 2, 64)
    assert torch.equal(torch.get_rng_state(), state)
    assert (done.skipped, len(caplog.records)) == ("", 1)
    assert_empty(runner_of(gpu))
    with pytest.raises(RuntimeError, match="logits of prompt 0 for new token 1 have no finite"):
        gpu.generate([[1, 2]], 6, stop_ids=())


@pytest.mark.parametrize("rows", [2, 4])
def test_a_rehearsal_changes_no_running_sequence(gpu: ToyModel, rows: int) -> None:
    """This holds with a free row, and without one."""
    runner = Runner(gpu, max_sequences=rows, max_tokens=300, max_chunk=200, prefix_sequences=0)
    requests = [runner.add([i + 1] * 70, GREEDY) for i in range(2)]
    for _ in range(3):
        runner.step()
        runner.warm_up([SamplingOptions(), SamplingOptions(temperature=1.0)])
    runner.run()
    for request in requests:
        assert request.tokens == plain_text(gpu, list(request.prompt), GREEDY, 0)
    assert_empty(runner)


def test_bytes_is_what_it_takes(gpu: ToyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture empties the allocator's cache, which held 0.1 GB of other work."""
    reserved = [300_000_000]
    make = kept_runner.new_runner

    def empty_cache() -> None:
        reserved[0] -= 100_000_000 * (reserved[0] % 2 == 0)
        reserved[0] |= 1

    def made(*args: Any) -> Runner:
        empty_cache()
        reserved[0] += 5_000_000
        return make(*args)

    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved[0])
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(kept_runner, "new_runner", made)
    assert prepare(gpu).bytes == 5_000_000


def test_without_memory_a_warning_has_the_numbers(
    gpu: ToyModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    make = kept_runner.new_runner
    monkeypatch.setattr(kept_runner, "new_runner", full)
    with caplog.at_level(logging.WARNING, LOGGER):
        done = prepare(gpu)
    assert done.skipped == "CUDA out of memory. Tried to allocate 2.00 GiB."
    assert [r.message for r in caplog.records] == [
        "generate is not prepared, for a sequence of 1024 tokens with 1.50 of 80.0 GB of the GPU "
        "free: CUDA out of memory. Tried to allocate 2.00 GiB.; its first call tries again"
    ]
    assert KeptRunner.of(gpu).runner is None
    monkeypatch.setattr(kept_runner, "new_runner", make)
    assert gpu.generate([[1, 2]], 6, stop_ids=()) == [plain_text(gpu, [1, 2], GREEDY, 0)]


def test_a_step_without_memory_leaves_no_runner(gpu: ToyModel) -> None:
    forward = gpu.model.forward

    def full(ids: torch.Tensor, *rest: Any) -> Any:
        if ids.numel() > 600:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(ids, *rest)

    gpu.model.forward = full  # type: ignore[method-assign]
    assert prepare(gpu).skipped == "CUDA out of memory."
    assert KeptRunner.of(gpu).runner is None
    assert gpu.generate([[1, 2]], 6, stop_ids=()) == [plain_text(ToyModel(), [1, 2], GREEDY, 0)]


def test_a_failed_capture_leaves_no_runner(
    gpu: ToyModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(graphs: Graphs, work: Any) -> Any:
        raise CaptureError("OSError: broken")

    monkeypatch.setattr(Graphs, "captured", failing)
    with caplog.at_level(logging.WARNING, LOGGER):
        assert prepare(gpu).skipped == "a capture failed"
    assert "a capture failed with OSError: broken" in caplog.text
    assert KeptRunner.of(gpu).runner is None


def test_a_backend_by_name_is_said(gpu: ToyModel) -> None:
    with dsv4.use_backend("reference"):
        assert prepare(gpu).skipped == "a backend is asked for by name"


def test_a_runner_that_grows_is_said(gpu: ToyModel, caplog: pytest.LogCaptureFixture) -> None:
    prepare(gpu, tokens=64)
    with caplog.at_level(logging.WARNING, LOGGER):
        gpu.generate([[1], [2], [3]], 6, stop_ids=())
        gpu.generate([[1], [2], [3], [4]], 50, stop_ids=())
    assert [r.message.partition(":")[0] for r in caplog.records] == [
        "generate needs room for 3 sequences of 7 tokens, 768 together, and its runner has it for "
        "a sequence of 64 tokens"
    ]


def test_without_memory_to_grow_a_call_gets_what_it_needs(
    gpu: ToyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, asked = kept_runner.new_runner, list[Capacity]()

    def little(model: Any, capacity: Capacity, chunk: int | None) -> Runner:
        asked.append(capacity)
        if capacity.sequences > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return make(model, capacity, chunk)

    prepare(gpu, sequences=2)
    monkeypatch.setattr(kept_runner, "new_runner", little)
    prompts = [[1], [2], [3]]
    expected = [plain_text(gpu, prompt, GREEDY, 0) for prompt in prompts]
    assert gpu.generate(prompts, 6, stop_ids=()) == expected
    assert [capacity.sequences for capacity in asked] == [4, 3]
    with pytest.raises(torch.OutOfMemoryError):
        gpu.generate([*prompts, [4]], 6, stop_ids=())


@given(
    have=st.tuples(st.integers(1, 70), st.integers(2, 5000)),
    prompts=st.lists(st.integers(1, 4000), min_size=1, max_size=70),
    new=st.integers(1, 1000),
)
@example(have=(1, 8192), prompts=[20] * 64, new=1)
def test_room_grows_at_least_twofold(have: tuple[int, int], prompts: list[int], new: int) -> None:
    most = 8192
    capacity, need = Capacity.of_equal(*have), Capacity.of_prompts([[0] * n for n in prompts], new)
    grown = capacity.grown(need, most)
    assert grown.holds(capacity)
    assert grown.holds(need)
    assert capacity.rounded(most).holds(capacity)
    for name in ("sequences", "tokens", "pool"):
        old, now = getattr(capacity, name), getattr(grown, name)
        if getattr(need, name) > old:
            whole = Capacity.of_equal(grown.sequences, grown.tokens).pool
            limits = {"tokens": most, "pool": whole}
            assert now >= min(2 * old, limits.get(name, 2 * old))
        elif name != "pool":
            assert now == old
    assert grown.sequences in (capacity.sequences, *default_buckets(4096))
    # The longest is not multiplied by the number of sequences.
    parts = 2 * capacity.pool, 2 * need.pool, grown.sequences * need.rounded(most).tokens
    assert grown.pool <= max(*parts, grown.tokens + 256) + 256 * grown.sequences


@pytest.mark.parametrize("sampler", [None, Sampler(1.0, 1.0, torch.Generator().manual_seed(3))])
def test_a_weight_that_was_written_to_is_seen_in_time(
    gpu: ToyModel, sampler: Sampler | None
) -> None:
    """The comparison follows the first step: its results are dropped, and no random number."""
    prepare(gpu)
    first = runner_of(gpu)
    gpu.lm_head.weight.add_(1)
    state = None if sampler is None else sampler.generator.get_state()
    result = gpu.generate([[1, 2]], 9, sampler=sampler, stop_ids=())
    assert runner_of(gpu) is not first
    assert first._closed
    if sampler is not None:
        sampler.generator.set_state(state)
    release(gpu)
    assert gpu.generate([[1, 2]], 9, sampler=sampler, stop_ids=()) == result


@pytest.mark.parametrize(
    ("prepared", "asked", "failed"),
    [(True, True, {}), ("kernels", False, {}), (False, False, {}), (True, False, {"k": "why"})],
)
def test_load_prepares(
    prepared: Any, asked: bool, failed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed, calls = Warmup(1, 0, 0.0, failed=failed), list[Any]()
    monkeypatch.setattr("dsv4.compilation.warmup.warm_loaded", lambda *args: warmed)
    monkeypatch.setattr("dsv4.serving.prepare", calls.append)
    dsv4.save(random_model(dsv4.ModelConfig.tiny(), 0), tmp_path / "model")
    model = dsv4.load(tmp_path / "model", prepare=prepared, progress=False)
    assert calls == [model] * asked
    assert not model.training


@pytest.mark.parametrize("fits", [True, False])
def test_a_step_has_its_memory_after_the_captures(
    fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A capture gives the reserved memory back; without room for both the graphs go."""
    calls: list[str] = []

    def reserve(model: Any, tokens: int, dtype: torch.dtype) -> int:
        calls.append(f"reserve {tokens}")
        if calls[-2:-1] == ["prepare"] and not fits:
            raise torch.OutOfMemoryError("CUDA out of memory.\nmore")
        return 0

    monkeypatch.setattr("dsv4.checkpoint.preparing.warm_allocator", reserve)
    monkeypatch.setattr(
        "dsv4.compilation.warmup.warm_loaded", lambda *args: Warmup(1, 0, 0.0, failed={})
    )
    monkeypatch.setattr("dsv4.serving.prepare", lambda model: calls.append("prepare"))
    monkeypatch.setattr("dsv4.serving.release", lambda model: calls.append("release"))
    dsv4.save(random_model(dsv4.ModelConfig.tiny(), 0), tmp_path / "model")
    with caplog.at_level(logging.WARNING, "dsv4.checkpoint"):
        dsv4.load(tmp_path / "model", mtp=False, reserve_tokens=7, progress=False)
    assert calls == ["reserve 7", "prepare", "reserve 7", *["release", "reserve 7"] * (not fits)]
    assert [r.message for r in caplog.records] == [
        "generate is not prepared, because its graphs and a step of 7 tokens (reserve_tokens) do "
        "not fit together: CUDA out of memory.; its first call tries again"
    ] * (not fits)


def test_load_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="prepare is 'graphs', wanted True, 'kernels' or False"):
        dsv4.load(tmp_path, prepare="graphs")


def first_calls(model: Any, lengths: tuple[int, ...]) -> None:
    """The first calls of ``generate`` capture and compile nothing."""
    runner = runner_of(model)
    captures, compiled = runner.captures, debug.compilations()
    for length in lengths:
        prompt = [i % model.config.vocab_size for i in range(length)]
        for sampler in (None, Sampler(0.7), Sampler(0.7, 0.9)):
            assert len(model.generate([prompt], 3, sampler=sampler, stop_ids=())[0]) == 3
    assert runner_of(model) is runner
    assert runner.captures == captures > 5
    assert debug.compilations() == compiled


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
def test_a_loaded_model_is_ready(numerics: str, tmp_path: Path) -> None:
    model = packed(numerics)
    dsv4.save(model, tmp_path / "model")
    loaded = dsv4.load(tmp_path / "model", device="cuda", numerics=numerics, progress=False)
    first_calls(loaded, (21, 512, 700, 1000))
    assert_empty(runner_of(loaded))
    result = loaded.generate([[1, 2, 3]], 9, stop_ids=())
    release(loaded)
    assert loaded.generate([[1, 2, 3]], 9, stop_ids=()) == result


@pytest.mark.gpu
def test_a_model_is_ready_once_prepared() -> None:
    model = packed("deepseek").cuda()
    done = prepare(model)
    assert (done.graphs, done.skipped) == (runner_of(model).captures, "")
    assert done.bytes > 0
    first_calls(model, (21, 200, 512))


@pytest.mark.gpu
def test_a_model_that_is_not_packed_is_not_prepared() -> None:
    model = random_model(dsv4.ModelConfig.tiny(), 0).cuda()
    quantize_(model)
    assert "wanted a bfloat16 model whose routed experts" in prepare(model).skipped
    assert KeptRunner.of(model).runner is None
