"""Models whose decode steps are captured, and the consequences of a capture that fails."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dsv4 import device, dispatch, layers, ops
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.quant.formats import SWIZZLED
from dsv4.serving import Runner, SamplingOptions
from dsv4.serving._capture import CaptureError, captured, obstacle
from dsv4.serving._setup import check_prompt_buckets, resolve_capture
from dsv4.serving.graphs import Graphs
from tests._tools.taped import replayed
from tests._tools.warmed import warmed
from tests.serving.cases import ToyModel, assert_empty, packed, plain_text, wide

GPU = torch.device("cuda", 0)
HOPPER, B200, B300, THOR = (9, 0), (10, 0), (10, 3), (11, 0)
OPTIONS = SamplingOptions(max_new_tokens=12, stop_ids=())
DRAWN = SamplingOptions(max_new_tokens=12, stop_ids=(), temperature=0.9, seed=4)
LOGGER = "dsv4.serving._setup"


@pytest.fixture
def capability() -> Iterator[Callable[[tuple[int, int]], None]]:
    """Every GPU is a Hopper; a test can have another. Every package is installed."""
    with device.pretend(capability=HOPPER, packages=True) as be:
        yield lambda gpu: be(capability=gpu)


def why(model: DeepseekV4ForCausalLM) -> str | None:
    return obstacle(model, (1, 6), GPU)


@pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
def test_a_packed_model_can_be_captured(capability: Any, numerics: str) -> None:
    model = packed(numerics)
    for gpu in (HOPPER, B200, B300):
        capability(gpu)
        assert why(model) is None
    with dispatch.use_backend("reference"):  # while it is asked for, steps are eager anyway
        assert why(model) is None
    layers.unpack_(model)
    assert why(model) is not None


def test_packed_for_blackwell(capability: Any) -> None:
    """Hopper runs it, too: Triton's kernels take every layout."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "o_lora_rank": 128}
    model = packed(layout=SWIZZLED, activation="nvfp4", q_lora_rank=128, **sizes)
    for gpu in (B200, B300, HOPPER):
        capability(gpu)
        assert why(model) is None


def test_mxfp4_experts_are_not_packed(capability: Any) -> None:
    model = wide()
    layers.quantize_(model, "mxfp4", ["*.mlp.experts"])
    for gpu in (HOPPER, B200, (8, 0)):
        capability(gpu)
        assert why(model) is None


@pytest.mark.parametrize("format", [None, "nvfp4"])
def test_experts_that_are_not_packed_wait_for_the_host(capability: Any, format: str | None) -> None:
    model = wide()
    if format is not None:
        layers.quantize_(model, format, ["*.mlp.experts"])
    reason = why(model)
    assert reason is not None
    assert reason.startswith("model.layers.0.mlp.experts: grouped_gemm runs as 'reference'")
    assert "cute: the weight has layout 'linear'" in reason
    assert "dsv4.layers.pack_" in reason


def test_one_layer_decides(capability: Any) -> None:
    model = packed()
    model.model.layers[2].mlp.experts.unpack()
    assert str(why(model)).startswith("model.layers.2.mlp.experts: ")
    model.model.layers[2].mlp.experts.pack()
    assert why(model) is None


def test_gpus_before_ampere_have_no_kernel_for_experts(capability: Any) -> None:
    model = packed()
    for gpu in (THOR, (8, 9), (8, 0)):
        capability(gpu)
        assert why(model) is None
    capability((7, 5))
    assert "the GPU has 7.5" in str(why(model))


def test_float32_has_no_kernel(capability: Any) -> None:
    model = wide(dtype=torch.float32)
    layers.quantize_(model)
    layers.pack_(model)
    assert "runs as 'reference'" in str(why(model))


def test_calibration_reads_on_the_host(capability: Any) -> None:
    model = packed()
    with layers.calibrate(model):
        assert "is being calibrated" in str(why(model))


@pytest.mark.parametrize("change", [lambda m: None, layers.unpack_])
def test_what_is_asked_for_dispatch_is_what_the_layer_runs(
    capability: Any, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    model = packed()
    change(model)
    experts = model.model.layers[0].mlp.experts
    ran: list[tuple[str, Any]] = []
    run = dispatch.run

    def noting(op: str, args: Any, *rest: Any, **out: Any) -> Any:
        if op.startswith("grouped_gemm"):
            ran.append((op, described(args)))
        return run(op, args, *rest, **out)

    ids = torch.arange(6).view(3, 2)
    x = torch.ones(3, 128, dtype=torch.bfloat16)
    monkeypatch.setattr(dispatch, "run", noting)
    experts(x, ids, torch.ones(3, 2))
    monkeypatch.setattr(dispatch, "run", run)
    asked = experts.gemm_calls(3, torch.bfloat16)
    assert ran == [(call.op, described(call.args)) for call in asked]


def described(args: Any) -> dict[str, Any]:
    """Operands by name, up to the activation."""
    fields = list(args._asdict().items())
    names = [name for name, _ in fields]
    return {n: getattr(a, "shape", a) for n, a in fields[: names.index("activation") + 1]}


def test_an_implementation_that_waits_is_marked() -> None:
    rows = [row for row in dispatch.IMPLEMENTATIONS if row.waits]
    grouped = ("grouped_gemm", "grouped_gemm_swiglu", "grouped_gemm_swiglu_quantize")
    assert {(row.op, row.name) for row in rows} == {
        (op, "reference") for op in (*grouped, "grouped_gemm_swiglu_fp8", "expert_gather")
    }
    x, offsets = torch.ones(2, 4), torch.tensor([0, 2], dtype=torch.int32)
    call = dispatch.arguments(ops.grouped_gemm, x, torch.ones(1, 3, 4), offsets)
    assert "grouped_gemm runs as 'reference'" in str(dispatch.wait_of(call))
    assert dispatch.wait_of(dispatch.arguments(ops.rms_norm, x, torch.ones(4), 1e-6)) is None


def test_experts_in_host_memory_bound_the_tokens_of_a_step(capability: Any) -> None:
    model = packed()
    top_k = model.config.num_experts_per_tok
    layers.host_experts_(model, layers.HostExperts(0, 2 * top_k))
    assert obstacle(model, (1, 2), GPU) is None
    reason = str(obstacle(model, (1, 3), GPU))
    assert f"but {2 * top_k} slots are for those" in reason
    assert reason.endswith("wanted at most 2 tokens in a decode step")
    with device.pretend(capability=HOPPER, packages=True):
        assert check_prompt_buckets(model, None, 4096, True, False) == (2,)
        assert len(check_prompt_buckets(packed(), None, 4096, True, False)) == 8


def test_the_runner_says_once_why_steps_are_eager(
    capability: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(DeepseekV4ForCausalLM, "device", property(lambda model: GPU))
    model = wide()
    with caplog.at_level(logging.WARNING, LOGGER):
        assert not resolve_capture(model, None, 4)
        assert not resolve_capture(model, None, 8)
        assert not resolve_capture(model, False, 4)
    (record,) = caplog.records
    assert "decode steps run eagerly" in record.message
    assert "model.layers.0.mlp.experts" in record.message
    assert "dsv4.layers.pack_" in record.message
    with pytest.raises(ValueError, match=r"capture is True, but model\.layers\.0\.mlp\.experts"):
        resolve_capture(model, True, 4)
    layers.quantize_(model)
    layers.pack_(model)
    assert resolve_capture(model, None, 4)
    assert resolve_capture(model, True, 4)
    assert not resolve_capture(model, False, 4)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("ahead", [False, True])
def test_after_a_capture_that_fails_steps_are_eager(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, after: int, ahead: bool
) -> None:
    """The first, the sampler's or a later one; between steps of requests that run."""
    done: list[int] = []

    def capturing(graphs: Graphs, work: Any) -> Any:
        if len(done) == after:
            work()
            raise CaptureError("OSError: broken")
        done.append(1)
        return replayed(graphs, work)

    monkeypatch.setattr(Graphs, "captured", capturing)
    model = ToyModel()
    runner = Runner(model, max_sequences=4, max_tokens=64, buckets=(1, 4))
    runner._steps.is_captured = True
    with caplog.at_level(logging.WARNING, LOGGER):
        requests = [runner.add([i, 5], OPTIONS) for i in range(2)]
        for _ in range(3):
            runner.step()
        if ahead:
            assert runner.warm_up([OPTIONS, DRAWN]) == 0
        requests += [runner.add([i, 7], DRAWN) for i in range(3)]
        runner.run()
    assert [r.message for r in caplog.records] == [
        "decode steps run eagerly, not as CUDA graphs: a capture failed with OSError: broken"
    ]
    assert not runner._steps.is_captured
    assert runner.captures == 0
    assert len(done) == after
    for request in requests:
        text = plain_text(model, list(request.prompt), request.options, request.seed)
        assert request.tokens == text
    assert_empty(runner)


def test_each_kind_of_step_that_cannot_be_captured_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(graphs: Graphs, work: Any) -> Any:
        work()
        raise CaptureError("OSError: broken")

    monkeypatch.setattr(Graphs, "captured", failing)
    model = ToyModel()
    for _ in range(2):
        runner = Runner(model, max_sequences=4, max_tokens=64, buckets=(1, 4), prompt_buckets=(8,))
        runner._steps.is_captured = True
        with caplog.at_level(logging.WARNING, LOGGER):
            requests = [runner.add([i, 5], OPTIONS) for i in range(2)]
            runner.run()
        assert (runner._steps.is_captured, runner.captures) == (False, 0)
        for request in requests:
            text = plain_text(model, list(request.prompt), request.options, request.seed)
            assert request.tokens == text
    reason = "steps run eagerly, not as CUDA graphs: a capture failed with OSError: broken"
    assert [r.message for r in caplog.records] == [f"prompt {reason}", f"decode {reason}"]


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_capture_of_prompts_that_fails_leaves_decode_steps_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, after: int, ahead: bool
) -> None:
    left = [after]

    def capturing(graphs: Graphs, work: Any) -> Any:
        if getattr(work, "func", None) == runner._steps.prompts._forward:
            left[0] -= 1
            if left[0] < 0:
                work()
                raise CaptureError("OSError: broken")
        return replayed(graphs, work)

    monkeypatch.setattr(Graphs, "captured", capturing)
    model = ToyModel()
    sizes = {"max_sequences": 4, "max_tokens": 64, "buckets": (1, 4), "prompt_buckets": (2, 8)}
    runner = Runner(model, **sizes)
    runner._steps.is_captured = True
    with caplog.at_level(logging.WARNING, LOGGER):
        if ahead:
            assert runner.warm_up([OPTIONS, DRAWN]) == 2 * 3
        requests = [runner.add([1, 5], OPTIONS)]
        runner.step()
        requests += [runner.add([i, 7], DRAWN) for i in range(3)]
        runner.run()
    assert [r.message for r in caplog.records] == [
        "prompt steps run eagerly, not as CUDA graphs: a capture failed with OSError: broken"
    ]
    assert runner._steps.is_captured
    assert runner._steps.prompts.captures == 0
    assert runner._steps.decode.captures > 0
    for request in requests:
        text = plain_text(model, list(request.prompt), request.options, request.seed)
        assert request.tokens == text
    assert_empty(runner)


class FakeGraphs:
    """PyTorch's captures on a machine without a GPU; the end of one may raise as CUDA's does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        self.end: Exception | None = None
        self.modes: list[str] = []
        outer = self

        class Stream:
            device_index, device = 0, torch.device("cpu")

        class Graph:
            def __init__(
                self, graph: Any, pool: Any = None, capture_error_mode: str = "global"
            ) -> None:
                self.pool = pool
                outer.modes.append(capture_error_mode)

            def __enter__(self) -> None:
                outer.log.append(("begin", self.pool))

            def __exit__(self, *error: Any) -> None:
                outer.log.append(("end", self.pool))
                if self.pool is not None and outer.end is not None:
                    raise outer.end

        self.stream = Stream()
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.stream)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda s: self.log.append(("stream", s)))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.log.append("wait"))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
        monkeypatch.setattr(torch.cuda, "graph", Graph)
        monkeypatch.setattr(
            torch._C,
            "_cuda_endAllocateToPool",
            lambda device, pool: self.log.append(("pool", device, pool)),
            raising=False,
        )


def test_a_capture_gives_what_the_work_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGraphs(monkeypatch)
    assert captured(lambda: 7, "pool")[1] == 7
    assert fake.log == [("begin", "pool"), ("end", "pool")]
    assert fake.modes == ["thread_local"]


@pytest.fixture
def collector() -> Iterator[None]:
    """A garbage collector that runs at nearly every new object, as before afterwards."""
    before, enabled = gc.get_threshold(), gc.isenabled()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*before)
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_no_garbage_is_collected_in_a_capture(
    monkeypatch: pytest.MonkeyPatch, collector: None, enabled: bool, fails: bool
) -> None:
    FakeGraphs(monkeypatch)
    (gc.enable if enabled else gc.disable)()
    destroyed, in_capture = [], []

    class Circle:
        """What an earlier runner leaves: only the collector destroys it."""

        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            destroyed.append(self)

    def work() -> None:
        for _ in range(100):
            Circle()
        in_capture.extend(destroyed)
        if fails:
            raise ValueError("no")

    with pytest.raises(CaptureError) if fails else contextlib.nullcontext():
        captured(work, "pool")
    assert not in_capture
    assert gc.isenabled() == enabled


@pytest.mark.parametrize("end", [None, RuntimeError("capturing stream has unjoined work")])
def test_a_failed_capture_is_ended_and_names_the_first_error(
    monkeypatch: pytest.MonkeyPatch, end: Exception | None
) -> None:
    fake = FakeGraphs(monkeypatch)
    fake.end = end

    def fails() -> None:
        raise ValueError("tolist waits\nfor details see elsewhere")

    with pytest.raises(CaptureError, match=r"^ValueError: tolist waits$") as caught:
        captured(fails, "pool")
    assert isinstance(caught.value.__cause__, ValueError)
    back = ("stream", fake.stream)
    assert fake.log == [
        *(("begin", "pool"), ("end", "pool"), back, "wait", ("pool", 0, "pool")),
        *(("begin", None), ("end", None), back),
    ]


def test_an_end_that_fails_is_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGraphs(monkeypatch)
    fake.end = RuntimeError("unjoined work")
    with pytest.raises(CaptureError, match=r"^RuntimeError: unjoined work$"):
        captured(lambda: 7, "pool")


def test_an_interrupt_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGraphs(monkeypatch)
    fake.end = RuntimeError("unjoined work")

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        captured(interrupted, "pool")
    assert ("pool", 0, "pool") in fake.log


def texts(runner: Runner) -> list[list[int]]:
    requests = [runner.add([i, 7, 9], options) for i in range(3) for options in (OPTIONS, DRAWN)]
    runner.run()
    assert_empty(runner)
    return [request.tokens for request in requests]


SIZES: dict[str, Any] = {
    "max_sequences": 6,
    "max_tokens": 128,
    "buckets": (1, 2, 4, 6),
    "prompt_buckets": (32,),
}


@pytest.mark.gpu
def test_a_plain_model_on_a_gpu_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    model = wide().cuda()
    with caplog.at_level(logging.WARNING, LOGGER):
        runner = Runner(model, **SIZES)
        assert runner.warm_up() == 0
        result = texts(runner)
        assert texts(Runner(model, **SIZES)) == result
    assert runner.captures == 0
    (record,) = (r for r in caplog.records if r.name == LOGGER)
    assert "model.layers.0.mlp.experts" in record.message
    assert "dsv4.layers.pack_" in record.message
    assert texts(Runner(model, **SIZES, capture=False)) == result
    with pytest.raises(ValueError, match="capture is True, but model"):
        Runner(model, **SIZES, capture=True)


@pytest.mark.gpu
@pytest.mark.parametrize("waiting", [False, True], ids=["raises", "waits"])
def test_a_capture_that_fails_on_a_gpu_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, waiting: bool
) -> None:
    model = warmed(packed().cuda(), 256)
    expected = texts(Runner(model, **SIZES, capture=False))
    mlp = model.model.layers[1].mlp
    forward = mlp.experts.forward

    def failing(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        if torch.cuda.is_current_stream_capturing():
            if waiting:
                out.sum().item()
            raise OSError("broken")
        return out

    monkeypatch.setattr(mlp.experts, "forward", failing)
    before = torch.cuda.current_stream()
    with caplog.at_level(logging.WARNING, LOGGER):
        assert texts(Runner(model, **SIZES)) == expected
    messages = [r.message for r in caplog.records if r.name == LOGGER]
    assert [message.partition(" ")[0] for message in messages] == ["prompt", "decode"]
    assert all("a capture failed with" in message for message in messages)
    assert torch.cuda.current_stream() == before
    torch.rand(4, device="cuda").sum().item()  # the default generator is usable
    monkeypatch.undo()
    runner = Runner(model, **SIZES, capture=True)
    assert texts(runner) == expected
    assert runner.captures > 1
