"""Results in memory that was there before: operators with ``out``, and reserved routed experts."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4 import dispatch, layers
from dsv4.checkpoint import save
from dsv4.config import ModelConfig
from dsv4.ops import quantize
from dsv4.ops.grouped_gemm import grouped_gemm
from dsv4.ops.grouped_gemm_swiglu import grouped_gemm_swiglu
from dsv4.ops.moe import moe_gather, moe_permute
from dsv4.quant.formats import FRAGMENTS
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.models import random_model, randomize_
from tests.layers.experts_cases import quantize_apart

KERNELS = ("triton",)
KINDS = ["plain", "nvfp4", "packed"]
ACTIVATIONS = st.sampled_from(["bf16", "nvfp4", "fp8"])
NUMERICS = st.sampled_from(["deepseek", "transformers"])
HIDDEN, INNER, COUNT = 256, 128, 6


def poisoned(*shape, dtype=torch.bfloat16, device="cpu"):
    return torch.full(shape, math.nan, dtype=dtype, device=device)


def routing(seed, tokens, top_k, device="cpu"):
    generator = strategies.generator(seed)
    ids = torch.randint(-1, COUNT + 1, (tokens, top_k), generator=generator)
    weights = torch.rand(tokens, top_k, generator=generator)
    return ids.to(device), weights.to(device)


def sorted_rows(seed, tokens, device):
    ids, _ = routing(seed, tokens, 2, device)
    x = strategies.normal(seed, (tokens, HIDDEN), torch.bfloat16).to(device)
    _, offsets, positions = moe_permute(ids, COUNT)
    return x, positions, offsets


def packed_weight(seed, rows, device):
    weight = quantize(strategies.normal(seed, (COUNT, rows, HIDDEN)), scaling="weight")
    return weight.to(device).with_layout(FRAGMENTS)


class TestOperators:
    @given(seed=strategies.seeds(), tokens=st.integers(0, 9))
    def test_gather(self, device, seed, tokens):
        x, positions, _ = sorted_rows(seed, tokens, device)
        out = poisoned(2 * tokens, HIDDEN, device=device)
        assert moe_gather(x, positions, out=out) is out
        assert_bitwise(out, moe_gather(x, positions), "rows")

    @settings(max_examples=6)
    @given(seed=strategies.seeds(), tokens=st.integers(0, 9), activation=ACTIVATIONS)
    def test_products(self, device, seed, tokens, activation):
        x, positions, offsets = sorted_rows(seed, tokens, device)
        rows, weight = moe_gather(x, positions), packed_weight(seed, 64, device)
        scale = strategies.normal(seed, (2 * tokens,)).to(device)
        arguments = (rows, weight, offsets)
        for dtype in (torch.bfloat16, torch.float32):
            how = {"activation": activation, "out_dtype": dtype}
            out = poisoned(2 * tokens, 64, dtype=dtype, device=device)
            assert grouped_gemm(*arguments, out=out, **how) is out
            assert_bitwise(out, grouped_gemm(*arguments, **how), "product")
            out = poisoned(2 * tokens, 32, dtype=dtype, device=device)
            how["row_weight"] = scale
            assert grouped_gemm_swiglu(*arguments, 10.0, out=out, **how) is out
            assert_bitwise(out, grouped_gemm_swiglu(*arguments, 10.0, **how), "SwiGLU")

    @pytest.mark.rarely_interpreted
    def test_opcheck(self, device):
        x, positions, offsets = sorted_rows(0, 3, device)
        rows, ops = moe_gather(x, positions), torch.ops.dsv4
        weight = packed_weight(0, 64, device)
        arguments = dispatch.arguments(grouped_gemm, rows, weight, offsets).args
        swiglu = dispatch.arguments(grouped_gemm_swiglu, rows, weight, offsets, 10.0).args
        for op, args, columns in (
            (ops.moe_gather_out, (x, positions), HIDDEN),
            (ops.grouped_gemm_out, arguments, 64),
            (ops.grouped_gemm_swiglu_out, swiglu, 32),
        ):
            out = torch.zeros(6, columns, dtype=torch.bfloat16, device=device)
            before = [a.clone() if isinstance(a, torch.Tensor) else None for a in args]
            torch.library.opcheck(op.default, (*args, out, "auto"))
            for arg, old in zip(args, before, strict=True):
                if old is not None:
                    assert_bitwise(arg.view(torch.uint8), old.view(torch.uint8), "argument")

    def test_compiles_whole(self, device):
        x, positions, _ = sorted_rows(0, 3, device)

        def gather(x, positions):
            buffer = x.new_zeros(8, HIDDEN)
            moe_gather(x, positions, out=buffer[:6])
            return buffer

        torch.compiler.reset()
        compiled = torch.compile(gather, fullgraph=True, backend="aot_eager")
        assert_bitwise(compiled(x, positions), gather(x, positions), "rows")

    def test_the_named_implementation_runs(self):
        x, positions, offsets = sorted_rows(0, 3, "cpu")
        out = poisoned(6, HIDDEN)
        with pytest.raises(NotImplementedError, match="moe_gather: triton: Triton kernels run on"):
            moe_gather(x, positions, out=out, backend="triton")
        weight = packed_weight(0, HIDDEN, "cpu")
        with pytest.raises(NotImplementedError, match="grouped_gemm: cute: "):
            grouped_gemm(out, weight, offsets, out=poisoned(6, HIDDEN), backend="cute")
        assert dispatch.explain(moe_gather, x, positions, out=out).op == "moe_gather"

    @pytest.mark.parametrize(
        ("out", "error", "words"),
        [
            (poisoned(5, HIDDEN), ValueError, r"out has shape \[5, 256\], wanted \[6, 256\]"),
            (poisoned(6, 8), ValueError, r"out has shape \[6, 8\], wanted \[6, 256\]"),
            (poisoned(6, HIDDEN).float(), TypeError, "out has dtype float32, wanted bfloat16"),
            (poisoned(HIDDEN, 6).mT, ValueError, r"out has strides \[1, 6\]"),
            (poisoned(12, HIDDEN)[::2], ValueError, r"out has strides \[512, 1\]"),
            (poisoned(6 * HIDDEN + 4)[4:].view(6, HIDDEN), ValueError, "multiple of 16 bytes"),
            (poisoned(6, HIDDEN, device="meta"), ValueError, "out on meta"),
        ],
    )
    def test_wrong_memory_is_named(self, out, error, words):
        x, positions, offsets = sorted_rows(0, 3, "cpu")
        with pytest.raises(error, match=f"moe_gather: .*{words}"):
            moe_gather(x, positions, out=out)
        rows = moe_gather(x, positions)
        with pytest.raises(error, match=f"grouped_gemm: .*{words}"):
            grouped_gemm(rows, packed_weight(0, HIDDEN, "cpu"), offsets, out=out)
        weight = packed_weight(0, 2 * HIDDEN, "cpu")
        with pytest.raises(error, match=f"grouped_gemm_swiglu: .*{words}"):
            grouped_gemm_swiglu(rows, weight, offsets, 10.0, out=out)


def experts_of(kind, activation="bf16", numerics="deepseek", dtype=torch.bfloat16):
    config = ModelConfig.tiny(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        n_routed_experts=COUNT,
        activation=activation,
        numerics=numerics,
    )
    experts = randomize_(layers.DeepseekV4Experts(config).requires_grad_(False), 1)
    if kind != "plain":
        quantize_apart(experts)
    if kind == "packed":
        experts.pack()
    return experts.to(dtype)


def inputs(seed, tokens, top_k=2, dtype=torch.bfloat16, device="cpu"):
    x = (4 * strategies.normal(seed, (tokens, HIDDEN))).to(dtype).to(device)
    return (x, *routing(seed, tokens, top_k, device))


def addresses_of(experts):
    """Return where the gathered rows, SwiGLU and the results of a forward are."""
    actual = {}
    with pytest.MonkeyPatch.context() as patch:
        run = dispatch.run

        def record(op, *rest, **out):
            result = run(op, *rest, **out)
            first = result[0] if isinstance(result, tuple) else result
            actual[op] = first.data_ptr()
            return result

        patch.setattr(dispatch, "run", record)
        experts(*inputs(1, 5))
    return actual


class TestExperts:
    @given(strategies.seeds(), st.sampled_from(KINDS), ACTIVATIONS, NUMERICS, st.integers(0, 8))
    def test_the_same_bits(self, seed, kind, activation, numerics, tokens):
        experts = experts_of(kind, activation, numerics)
        args = inputs(seed, tokens)
        shared = strategies.normal(seed, (tokens, HIDDEN), torch.bfloat16)
        expected = experts(*args, shared)
        layers.reserve_experts(experts, 8)
        for buffer in experts.workspace.buffers():
            buffer.fill_(math.nan)
        for _ in range(2):
            actual = experts(*args, shared)
            assert_bitwise(actual, expected, "result")
        copied = actual.clone()
        experts(*inputs(seed + 1, 8))
        assert_bitwise(actual, copied, "an earlier result")

    @pytest.mark.parametrize("kind", KINDS)
    def test_at_the_same_places(self, kind):
        experts = experts_of(kind)
        layers.reserve_experts(experts, 5)
        rows, inner = experts.workspace.rows.data_ptr(), experts.workspace.inner.data_ptr()
        for _ in range(3):
            result = addresses_of(experts)
            assert result["moe_sort"] == rows
            assert result["grouped_gemm"] == rows, "of the second GEMM; the first has read them"
            if kind == "packed":
                assert result["grouped_gemm_swiglu"] == inner
        assert experts.workspace.rows.shape == (10, HIDDEN)
        assert experts.workspace.inner.shape == (10, INNER)

    def test_too_many_tokens(self):
        experts = experts_of("packed")
        assert layers.reserve_experts(experts, 8) == 2 * 8 * 2 * (HIDDEN + INNER)
        experts(*inputs(1, 8))
        message = (
            r"there are 9 tokens with 2 experts each, but memory is reserved for 8 tokens with 2 "
            r"each: call dsv4\.layers\.reserve_experts again with a larger max_tokens"
        )
        with pytest.raises(ValueError, match=message):
            experts(*inputs(1, 9))
        experts(*inputs(1, 16, top_k=1))
        with pytest.raises(ValueError, match="there are 6 tokens with 3 experts each"):
            experts(*inputs(1, 6, top_k=3))
        layers.reserve_experts(experts, 9)
        experts(*inputs(1, 9))
        assert layers.reserve_experts(experts, None) == 0
        assert experts.workspace is None
        experts(*inputs(1, 99))
        assert "orkspace" not in repr(experts)

    def test_another_dtype_or_device(self):
        experts = experts_of("packed", dtype=torch.float32)
        layers.reserve_experts(experts, 8)
        with pytest.raises(ValueError, match=r"are torch.float32 on cpu.*reserved for torch.bfloa"):
            experts(*inputs(1, 3, dtype=torch.float32))
        layers.reserve_experts(experts, 8, torch.float32)
        expected = experts(*inputs(1, 3, dtype=torch.float32))
        experts.to(torch.bfloat16)
        assert experts(*inputs(1, 3)).dtype == torch.bfloat16
        experts.float()
        assert_bitwise(experts(*inputs(1, 3, dtype=torch.float32)), expected, "result")
        experts.workspace.to("meta")
        with pytest.raises(ValueError, match=r"on cpu, but memory is reserved for .* on meta"):
            experts(*inputs(1, 3, dtype=torch.float32))

    def test_in_and_out_of_inference_mode(self):
        experts = experts_of("packed")
        expected = experts(*inputs(1, 3))
        with torch.inference_mode():
            layers.reserve_experts(experts, 8)
            assert_bitwise(experts(*inputs(1, 3)), expected, "result")
        assert_bitwise(experts(*inputs(1, 3)), expected, "result")

    @pytest.mark.parametrize("change", ["pack", "unpack"])
    def test_packed_and_unpacked_with_it(self, change):
        experts = experts_of("nvfp4" if change == "pack" else "packed")
        layers.reserve_experts(experts, 8)
        getattr(experts, change)()
        expected = experts_of("packed" if change == "pack" else "nvfp4")(*inputs(1, 5))
        assert_bitwise(experts(*inputs(1, 5)), expected, "result")

    def test_calibration_sees_the_same(self):
        first, two = experts_of("packed", "nvfp4"), experts_of("packed", "nvfp4")
        layers.reserve_experts(first, 30)
        for experts in (first, two):
            with layers.calibrate(experts):
                experts(*inputs(1, 30))
        for name, tensor in two.state_dict().items():
            assert torch.equal(first.state_dict()[name].view(torch.uint8), tensor.view(torch.uint8))

    def test_compiled_code_goes_without(self):
        experts = experts_of("packed")
        layers.reserve_experts(experts, 8)
        torch._dynamo.reset()
        compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
        assert_bitwise(compiled(*inputs(1, 9)), experts_of("packed")(*inputs(1, 9)), "result")

    @pytest.mark.parametrize("most", [0, -1])
    def test_wrong_arguments_are_named(self, most):
        experts = experts_of("packed")
        with pytest.raises(ValueError, match=f"max_tokens is {most}, wanted at least 1"):
            layers.reserve_experts(experts, most)
        assert experts.workspace is None
        with pytest.raises(ValueError, match="has no DeepseekV4Experts"):
            layers.reserve_experts(layers.Linear(64, 32), 8)


SIZES = {"moe_intermediate_size": 64, "q_lora_rank": 64, "o_lora_rank": 32}


def model_and_plain():
    """A packed model with memory for 40 tokens, and one without."""
    plain = random_model(ModelConfig.tiny(**SIZES), 1, mtp=True)
    layers.quantize_(plain)
    layers.pack_(plain)
    model = copy.deepcopy(plain)
    layers.reserve_experts(model, 40, torch.float32)
    return model, plain


def workspaces(model):
    return {m.workspace for m in model.modules() if isinstance(m, layers.DeepseekV4Experts)}


class TestModel:
    def test_one_memory_for_all_layers(self):
        model, plain = model_and_plain()
        (workspace,) = workspaces(model)
        config, ids = plain.config, torch.arange(37)[None]
        bytes_of = sum(t.nbytes for t in workspace.buffers())
        rows = 40 * config.num_experts_per_tok
        assert bytes_of == 4 * rows * (config.hidden_size + config.moe_intermediate_size)
        with torch.no_grad():
            assert torch.equal(model(ids), plain(ids))
        assert model.generate([[1, 2, 3]], 4, stop_ids=()) == plain.generate(
            [[1, 2, 3]], 4, stop_ids=()
        )
        with torch.no_grad(), pytest.raises(ValueError, match="there are 41 tokens"):
            model(torch.arange(41)[None])

    @pytest.mark.parametrize("how", ["deepcopy", "save", "cast", "meta"])
    def test_copies_and_moves(self, how):
        model, plain = model_and_plain()
        (old,) = workspaces(model)
        if how == "deepcopy":
            model = copy.deepcopy(model)
        elif how == "save":
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            model = torch.load(file, weights_only=False)
        elif how == "cast":
            model.to(torch.bfloat16).to(torch.float32)
            plain.to(torch.bfloat16).to(torch.float32)
        else:
            model.to("meta")
        (workspace,) = workspaces(model)
        assert (workspace is old) == (how in ("cast", "meta"))
        if how == "meta":
            assert {t.device.type for t in workspace.buffers()} == {"meta"}
            return
        if workspace is not old:
            assert workspace.rows.data_ptr() != old.rows.data_ptr()
        ids = torch.arange(37)[None]
        with torch.no_grad():
            assert torch.equal(model(ids), plain(ids))

    def test_it_is_not_stored(self, tmp_path):
        model, plain = model_and_plain()
        assert list(model.state_dict()) == list(plain.state_dict())
        for name, candidate in (("reserved", model), ("plain", plain)):
            save(candidate, tmp_path / name)
        for path in (tmp_path / "plain").iterdir():
            assert (tmp_path / "reserved" / path.name).read_bytes() == path.read_bytes()
        layers.unpack_(model)
        model.load_state_dict(plain.state_dict())

    def test_layers_of_other_sizes_have_their_own(self):
        small = random_model(ModelConfig.tiny(**SIZES), 1)
        large = random_model(ModelConfig.tiny(**{**SIZES, "moe_intermediate_size": 128}), 1)
        both = torch.nn.ModuleList([small, large])
        result = layers.reserve_experts(both, 8)
        assert len(workspaces(both)) == 2
        assert result == sum(layers.reserve_experts(model, 8) for model in both)


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("activation", ["bf16", "nvfp4"])
    @pytest.mark.parametrize("tokens", [0, 1, 9, 300])
    def test_the_same_bits(self, kind, activation, tokens):
        experts = experts_of(kind, activation).cuda()
        for seed in range(5):
            args = inputs(seed, tokens, device="cuda")
            layers.reserve_experts(experts, None)
            expected = experts(*args)
            layers.reserve_experts(experts, 300)
            assert_bitwise(experts(*args), expected, f"input {seed}")

    @pytest.mark.parametrize("tokens", [3, 60])
    @torch.inference_mode()
    def test_one_graph_serves_any_routing(self, tokens):
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("grouped GEMMs of other GPUs are the reference, which reads offsets")
        experts = experts_of("packed").cuda()
        reserved = layers.reserve_experts(experts, tokens)
        assert reserved == 2 * tokens * 2 * (HIDDEN + INNER)
        args = inputs(0, tokens, device="cuda")
        experts(*args)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = experts(*args)
        for seed in range(20):
            new = inputs(seed, tokens, device="cuda")
            for old, other in zip(args, new, strict=True):
                old.copy_(other)
            out.fill_(math.nan)
            graph.replay()
            torch.cuda.synchronize()
            assert_bitwise(out, experts(*new), f"input {seed}")
        with pytest.raises(ValueError, match=f"there are {tokens + 1} tokens"):
            experts(*inputs(0, tokens + 1, device="cuda"))

    def test_moves_there(self):
        model, plain = model_and_plain()
        model.cuda()
        (workspace,) = workspaces(model)
        assert workspace.rows.is_cuda
        ids = torch.arange(37, device="cuda")[None]
        with torch.no_grad():
            assert torch.equal(model(ids), plain.cuda()(ids))
