"""The shared expert beside the routed ones: order of streams, and the bits of the serial path."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4 import dispatch, layers, overlap
from dsv4.config import ModelConfig
from dsv4.layers import moe
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.models import randomize_
from tests._tools.stream_log import written_down

KINDS = ["plain", "nvfp4", "packed"]
LAYERS = [0, 5]  # chosen by token id, and by score
SIZES = {
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "n_routed_experts": 16,
    "num_hidden_layers": 6,
}


@pytest.fixture(scope="module", autouse=True)
def _few_tokens_have_streams():
    """Side streams are used without a captured graph: for a GPU's tests, whose steps are small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "_LAUNCH_BOUND_TOKENS", 0)
        yield


def block(kind, layer=5, **changes):
    """Make a block of sizes that the kernels support: K is a multiple of 128."""
    config = ModelConfig.tiny(**{**SIZES, **changes})
    result = layers.DeepseekV4SparseMoeBlock(config, layer).requires_grad_(False)
    randomize_(result, 1)
    if kind != "plain":
        layers.quantize_(result)
    if kind == "packed":
        assert layers.pack_(result).kept == {}
    return result.to(torch.bfloat16)


def inputs(seed, module, tokens, device="cpu"):
    """Hidden states, and token ids where the layer wants them."""
    x = strategies.normal(seed, (1, tokens, 256), torch.bfloat16).to(device)
    ids = torch.randint(0, 100, (1, tokens), generator=strategies.generator(seed)).to(device)
    return (x, ids) if module.is_hash else (x,)


@contextlib.contextmanager
def serially():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "uses_side_streams", lambda x: False)
        yield


class TestOnCpu:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("layer", LAYERS)
    def test_there_is_one_stream(self, kind, layer, monkeypatch):
        monkeypatch.setattr(torch.cuda, "Stream", lambda *_: pytest.fail("made a stream"))
        module = block(kind, layer)
        x, *ids = inputs(1, module, 7)
        assert overlap.side_streams(x) is overlap.IN_ORDER
        shared = module.shared_experts(x[0])
        _, weights, chosen = module.gate(x, *ids)
        expected = module.experts(x[0], chosen, weights, shared)
        assert_bitwise(module(x, *ids)[0], expected, "block")

    def test_experts_join_the_shared_part_at_the_end(self, monkeypatch):
        module, said = block("plain"), []
        run = dispatch.run

        def record(op, args, *rest):
            said.append(op)
            return run(op, args, *rest)

        monkeypatch.setattr(dispatch, "run", record)
        x, ids, weights = inputs(1, module, 3)[0][0], torch.zeros(3, 2).long(), torch.ones(3, 2)
        shared = module.shared_experts(x)
        expected = module.experts(x, ids, weights, shared)
        said.clear()

        class Joins(overlap.Streams):
            def join(self, name, *results):
                assert results == (shared,)
                said.append(f"join {name}")

        actual = module.experts(x, ids, weights, shared, Joins())
        assert_bitwise(actual, expected, "experts")
        assert said[-2:] == ["join shared", "moe_combine"]

    @pytest.mark.parametrize("reserving", [4096, 3])
    def test_compiles_to_one_graph(self, reserving, monkeypatch):
        monkeypatch.setattr(moe, "_RESERVING_TOKENS", reserving)
        module = block("packed")
        args = inputs(1, module, 5)
        torch._dynamo.reset()
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        assert_bitwise(compiled(*args), module(*args), "block")

    def test_a_tensor_that_is_none_takes_no_stream(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: pytest.fail("asked a GPU"))
        with FakeTensorMode(allow_non_fake_inputs=True):
            x = torch.empty(3, 8, device="cuda", dtype=torch.bfloat16)
            assert x.is_cuda
            assert overlap.side_streams(x) is overlap.IN_ORDER

    def test_few_tokens_take_no_stream_unless_a_graph_is_captured(self, monkeypatch):
        class OnGpu:
            is_cuda = True

            def __init__(self, tokens):
                self.shape = (1, tokens, 8)

            def numel(self):
                return math.prod(self.shape)

        monkeypatch.setattr(torch, "Tensor", OnGpu)
        monkeypatch.setattr(overlap, "_LAUNCH_BOUND_TOKENS", 64)
        for capturing in (False, True):
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda c=capturing: c)
            assert overlap.uses_side_streams(OnGpu(64)) == capturing
            assert overlap.uses_side_streams(OnGpu(65))

    def test_nothing_is_made_at_import(self):
        code = (
            "import torch\n"
            "def fail(*args, **kwargs): raise AssertionError('made a stream')\n"
            "torch.cuda.Stream.__new__ = fail\n"
            "import dsv4, dsv4.layers\n"
            "from dsv4 import overlap\n"
            "assert overlap._side_stream.cache_info().currsize == 0\n"
            "assert not torch.cuda.is_initialized()\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)


def part_of(whole, layer, first, count):
    """A block of that number of the experts of ``whole``, with its weights."""
    config = ModelConfig.tiny(**{**SIZES, "numerics": whole.experts.numerics})
    part = layers.DeepseekV4SparseMoeBlock(config, layer, first, count).requires_grad_(False)
    part.gate, experts = whole.gate, part.experts
    assert (part.shared_experts is None) == (first > 0)
    if first == 0:
        part.shared_experts = whole.shared_experts
    if whole.experts.format is None:
        for name in ("gate_up_proj", "down_proj"):
            held = getattr(whole.experts, name)[first : first + count]
            setattr(experts, name, nn.Parameter(held, requires_grad=False))
        return part
    experts.to_format(whole.experts.format)
    for i in range(count):
        experts.set_expert(i, *whole.experts.get_expert(first + i))
    if whole.experts.layout != "linear":
        experts.pack()
    return part


class TestRanges:
    @pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("layer", LAYERS)
    @given(
        seed=strategies.seeds(),
        tokens=st.integers(0, 5),
        cuts=st.sets(st.integers(1, SIZES["n_routed_experts"] - 1), min_size=1),
    )
    @settings(max_examples=4)
    def test_the_sum_over_ranges_is_the_whole(self, layer, kind, numerics, seed, tokens, cuts):
        """Sum in float64, so that one rounds nowhere; the shared expert is in it once."""
        whole = block(kind, layer, numerics=numerics)
        x, *ids = inputs(seed, whole, tokens)
        whole, x = whole.double(), x.double()
        total = torch.zeros_like(x)
        for first, last in pairwise([0, *sorted(cuts), SIZES["n_routed_experts"]]):
            total += part_of(whole, layer, first, last - first)(x, *ids)
        expected = whole(x, *ids)
        assert (total - expected).norm() <= 1e-12 * expected.norm()

    def test_experts_that_there_are_not(self):
        config = ModelConfig.tiny()
        with pytest.raises(ValueError, match="first_expert is 4 and num_local_experts 5, wanted"):
            layers.DeepseekV4SparseMoeBlock(config, 0, 4, 5)


SHARED_AT_ONCE = ["side waits for current", "gemm_swiglu on side", "gemm on side", "side ended"]


class TestOrder:
    """The order of work on streams, with streams that only note what they are asked."""

    @pytest.fixture
    def said(self, monkeypatch):
        """The recorded calls, in order."""
        return written_down(monkeypatch)

    def test_fork_and_join(self, said):
        module = block("packed", numerics="transformers")
        (x,) = inputs(1, module, 3)
        said.clear()
        with_two = module(x)
        assert said == [
            "side waits for current",
            "gemm_swiglu on side",
            "side ended",
            "route_topk on current",
            "moe_sort on current",
            "side waits for current",
            "gemm on side",
            "side ended",
            "grouped_gemm_swiglu on current",
            "grouped_gemm on current",
            "current waits for end 2 of side",
            "memory kept for current",
            "moe_combine on current",
        ]
        with serially():
            assert_bitwise(with_two, module(x), "block")

    def test_above_eight_tokens_the_shared_expert_is_launched_at_once(self, said):
        module = block("packed")
        (x,) = inputs(1, module, 9)
        said.clear()
        with_two = module(x)
        assert said[:5] == [*SHARED_AT_ONCE, "route_topk on current"]
        with serially():
            assert_bitwise(with_two, module(x), "block")

    def test_beside_hosted_experts_the_shared_expert_is_launched_at_once(self):
        module = block("packed")
        assert module._has_late_shared
        module.experts.hosted = object()
        assert not module._has_late_shared

    def test_of_many_tokens_the_shared_expert_comes_behind_the_router(self, said, monkeypatch):
        monkeypatch.setattr(moe, "_LATE_TOKENS", 0)
        monkeypatch.setattr(moe, "_RESERVING_TOKENS", 3)
        module = block("packed")
        (x,) = inputs(1, module, 3)
        said.clear()
        with_two = module(x)
        assert said == [
            "route_topk on current",
            *SHARED_AT_ONCE,
            "moe_sort on current",
            "grouped_gemm_swiglu on current",
            "grouped_gemm on current",
            "current waits for end 1 of side",
            "memory kept for current",
            "moe_combine on current",
        ]
        with serially():
            assert_bitwise(with_two, module(x), "block")
        said.clear()
        module(x[:, :2])
        assert said[0] == "side waits for current"
        assert said.count("side waits for current") == 1

    @pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook"])
    @pytest.mark.parametrize("reserving", [3, 4096])
    def test_a_shared_expert_that_is_watched_is_one(self, said, monkeypatch, hook, reserving):
        monkeypatch.setattr(moe, "_RESERVING_TOKENS", reserving)
        module, seen = block("packed"), []
        (x,) = inputs(1, module, 3)
        expected = module(x)
        getattr(module.shared_experts, hook)(lambda *args: seen.append(args))
        said.clear()
        assert_bitwise(module(x), expected, "block")
        assert len(seen) == 1
        first = said.index("side waits for current")
        assert said[first : first + 3] == SHARED_AT_ONCE[:3]

    def test_of_many_tokens_the_shared_expert_reserves_sms(self, said, monkeypatch):
        monkeypatch.setattr(moe, "_LATE_TOKENS", 0)
        monkeypatch.setattr(moe, "_RESERVING_TOKENS", 3)
        module, run, asked = block("packed"), dispatch.run, {}

        def record(op, args, backend, out=None, reserve_sms=0):
            asked[op] = reserve_sms
            return run(op, args, backend, out, reserve_sms)

        monkeypatch.setattr(dispatch, "run", record)
        (x,) = inputs(1, module, 3)
        module(x)
        reserving = {op: count for op, count in asked.items() if count}
        assert reserving == dict.fromkeys(("gemm_swiglu", "gemm"), moe._RESERVED_SMS)
        assert len(asked) > len(reserving)
        module(x[:, :2])
        assert not any(asked.values())

    def test_in_a_graph_memory_is_used_again(self, said, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        module = block("packed")
        module(*inputs(1, module, 3))
        assert said[-2:] == ["current waits for end 2 of side", "moe_combine on current"]


class Slow(nn.Module):
    """A module after a millisecond or more."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        torch.cuda._sleep(5_000_000)
        return self.module(*args)


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("layer", LAYERS)
    @pytest.mark.parametrize("tokens", [0, 1, 7, 300, 4100])
    @torch.inference_mode()
    def test_gives_the_bits_of_the_serial_path(self, kind, layer, tokens):
        module = block(kind, layer).cuda()
        for seed in range(20):
            args = inputs(seed, module, tokens, "cuda")
            result = module(*args)
            with serially():
                assert_bitwise(result, module(*args), f"input {seed}")

    @pytest.mark.parametrize("slow", ["input", "shared_experts", "its last GEMM", "experts"])
    @torch.inference_mode()
    def test_whatever_takes_long(self, slow):
        """Waits that are missing do not show while everything is quick."""
        module = block("packed").cuda()
        (x,) = inputs(0, module, 7, "cuda")
        if slow == "its last GEMM":
            module.shared_experts.down_proj = Slow(module.shared_experts.down_proj)
        for name in ("shared_experts", "experts"):
            if name == slow:
                setattr(module, name, Slow(getattr(module, name)))
        for seed in range(20):
            (new,) = inputs(seed, module, 7, "cuda")
            torch.cuda.synchronize()
            if slow == "input":
                torch.cuda._sleep(5_000_000)
            x.copy_(new)
            result = module(x)
            x.fill_(math.nan)  # on the current stream, after the block
            with serially():
                assert_bitwise(result, module(new), f"input {seed}")

    @pytest.mark.parametrize("slow", ["input", "gate", "shared_experts", "down_proj", "experts"])
    @torch.inference_mode()
    def test_whatever_takes_long_where_the_shared_expert_reserves_sms(self, slow, monkeypatch):
        monkeypatch.setattr(moe, "_LATE_TOKENS", 0)
        monkeypatch.setattr(moe, "_RESERVING_TOKENS", 7)
        module = block("packed").cuda()
        (x,) = inputs(0, module, 7, "cuda")
        mlp = module.shared_experts
        news = [inputs(seed, module, 7, "cuda")[0] for seed in range(20)]
        with serially():
            expected = [module(new) for new in news]
        holder = mlp if slow == "down_proj" else module
        if slow != "input":
            setattr(holder, slow, Slow(getattr(holder, slow)))
        for seed, new in enumerate(news):
            torch.cuda.synchronize()
            if slow == "input":
                torch.cuda._sleep(5_000_000)
            x.copy_(new)
            actual = module(x)
            x.fill_(math.nan)  # on the current stream, after the block
            assert_bitwise(actual, expected[seed], f"input {seed}")

    @torch.inference_mode()
    def test_layers_after_each_other_and_no_pause(self):
        """Memory of the second stream is given again while the first one is behind."""
        stack = [block("packed").cuda() for _ in range(4)]
        (x,) = inputs(0, stack[0], 300, "cuda")
        with serially():
            expected = x
            for module in stack:
                expected = module(expected)
        torch.cuda.synchronize()
        for _ in range(20):
            actual = x
            torch.cuda._sleep(1_000_000)
            for module in stack:
                actual = module(actual)
            assert_bitwise(actual, expected, "stack")

    @torch.inference_mode()
    def test_on_streams_of_the_caller(self):
        module = block("packed").cuda()
        (x,) = inputs(0, module, 300, "cuda")
        with serially():
            expected = module(x)
        torch.cuda.synchronize()
        streams, actual = [torch.cuda.Stream() for _ in range(3)], []
        for turn in range(30):
            with torch.cuda.stream(streams[turn % 3]):
                actual.append(module(x))
        torch.cuda.synchronize()
        for turn, output in enumerate(actual):
            assert_bitwise(output, expected, f"turn {turn}")

    @pytest.mark.parametrize("layer", LAYERS)
    @pytest.mark.parametrize("tokens", [1, 7, 300, 4100])
    @torch.inference_mode()
    def test_a_captured_graph_takes_new_data(self, layer, tokens):
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("grouped GEMMs of other GPUs are the reference, which reads offsets")
        stack = [block("packed", layer).cuda() for _ in range(3)]
        args = inputs(0, stack[0], tokens, "cuda")

        def run(x, *ids):
            for module in stack:
                x = module(x, *ids)
            return x

        run(*args)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(*args)
        for seed in range(1000 if tokens < 4096 else 20):
            new = inputs(seed, stack[0], tokens, "cuda")
            for old, other in zip(args, new, strict=True):
                old.copy_(other)
            out.fill_(math.nan)
            graph.replay()
            with serially():
                assert_bitwise(out, run(*new), f"input {seed}")
