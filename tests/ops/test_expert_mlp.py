"""Routed experts of sorted rows as one operator: the bits of both GEMMs, one after the other."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4 import dispatch, use_backend
from dsv4.config import ModelConfig
from dsv4.layers import _expert_weights, experts
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.ops.expert_mlp import COUNTERS, expert_mlp
from dsv4.ops.grouped_gemm import grouped_gemm
from dsv4.ops.grouped_gemm_swiglu import grouped_gemm_swiglu
from dsv4.ops.quantize import quantize
from dsv4.quant.formats import FRAGMENTS, LINEAR
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.models import randomize_

REPLAYS = 1000


def packed(seed, count, rows, columns, device="cpu", layout=FRAGMENTS):
    weight = quantize(strategies.normal(seed, (count, rows, columns)), scaling="weight")
    return weight.to(device).with_layout(layout)


def sorted_rows(seed, counts, spare, columns, device="cpu"):
    """Rows, offsets and weights of rows; rows of no expert hold NaN."""
    rows = sum(counts) + spare
    x = strategies.normal(seed, (rows, columns), torch.bfloat16)
    x[sum(counts) :] = math.nan
    offsets = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    weights = torch.rand(rows, generator=strategies.generator(seed))
    return x.to(device), offsets.to(device), weights.to(device)


def counters_on(device="cpu"):
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def parts(x, gate_up, down, offsets, limit, row_weight=None):
    """What the operator means."""
    inner = grouped_gemm_swiglu(x, gate_up, offsets, limit, row_weight=row_weight)
    return grouped_gemm(inner, down, offsets, settled=True)


@given(
    seed=strategies.seeds(),
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    spare=st.integers(0, 3),
    inner=st.integers(1, 2),
    limit=st.sampled_from([None, 0.5, 10.0]),
    weighted=st.booleans(),
    layout=st.sampled_from([LINEAR, FRAGMENTS, "plain"]),
)
def test_bits_of_its_parts(seed, counts, spare, inner, limit, weighted, layout):
    x, offsets, row_weight = sorted_rows(seed, counts, spare, 128)
    inner *= 64
    if layout == "plain":
        gate_up = strategies.normal(seed, (len(counts), 2 * inner, 128), torch.bfloat16)
        down = strategies.normal(seed + 1, (len(counts), 48, inner), torch.bfloat16)
    else:
        gate_up = packed(seed, len(counts), 2 * inner, 128, layout=layout)
        down = packed(seed + 1, len(counts), 48, inner, layout=layout)
    weights = row_weight if weighted else None
    counters = counters_on()
    got = expert_mlp(x, gate_up, down, offsets, limit, counters, row_weight=weights)
    assert_bitwise(got, parts(x, gate_up, down, offsets, limit, weights), "the result")
    assert not got[sum(counts) :].any()
    assert not counters.any()


@pytest.fixture
def operands():
    x, offsets, row_weight = sorted_rows(0, [1, 0, 2], 1, 128)
    gate_up, down = packed(0, 3, 128, 128), packed(1, 3, 48, 64)
    return {
        "x": x,
        "gate_up": gate_up,
        "down": down,
        "offsets": offsets,
        "limit": 10.0,
        "counters": counters_on(),
        "row_weight": row_weight,
    }


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"counters": torch.zeros(3, dtype=torch.int32)}, ValueError, "counters has shape"),
        (
            {"counters": torch.zeros(COUNTERS)},
            TypeError,
            "counters has dtype float32, wanted int32",
        ),
        ({"limit": 0.0}, ValueError, "limit is 0.0, wanted one above 0 or None"),
        ({"down": packed(1, 3, 48, 128)}, ValueError, "down has 128 columns, wanted 64"),
        (
            {"down": packed(1, 3, 48, 64, layout=LINEAR)},
            ValueError,
            "gate_up and down are .*, wanted the same",
        ),
        ({"row_weight": torch.ones(2)}, ValueError, "row_weight has shape"),
        ({"step_rows": -1}, ValueError, "step_rows is -1, wanted 0 or more"),
        ({"gate_up": torch.zeros(3, 7, 128)}, ValueError, "gate_up has 7 rows"),
    ],
)
def test_errors(operands, changed, error, text):
    with pytest.raises(error, match=text):
        expert_mlp(**operands | changed)


def test_the_operator(operands):
    """Its schema says what it writes, and ``torch.compile`` traces it whole."""
    call = dispatch.arguments(expert_mlp, **operands)
    torch.library.opcheck(torch.ops.dsv4.expert_mlp.default, (*call.args, "auto"))
    compiled = torch.compile(expert_mlp, fullgraph=True, backend="aot_eager")
    assert_bitwise(compiled(**operands), expert_mlp(**operands), "compiled")


def test_reasons(operands):
    """One launch is Hopper's; elsewhere the GEMMs run one after the other."""
    explained = dispatch.explain(expert_mlp, **operands)
    assert explained.chosen == "reference"
    assert "CUDA GPU" in str(explained)


# Layers.


def layer_of(device="cpu", numerics="deepseek", sizes=(256, 128, 12)):
    hidden, inner, count = sizes
    config = ModelConfig.tiny(
        hidden_size=hidden,
        moe_intermediate_size=inner,
        n_routed_experts=count,
        num_experts_per_tok=3,
        numerics=numerics,
    )
    layer = randomize_(DeepseekV4Experts(config).requires_grad_(False), 0).bfloat16()
    layer.quantize("nvfp4")
    return layer.to(device)


def use_one_launch(monkeypatch, rows=64):
    for module in (_expert_weights, experts):
        monkeypatch.setattr(module, "ONE_LAUNCH_ROWS", rows)


def routed(seed, tokens, count, hidden, device="cpu", top_k=3):
    generator = strategies.generator(seed)
    x = strategies.normal(seed, (tokens, hidden), torch.bfloat16)
    # Ids of no expert, and experts that several tokens choose.
    ids = torch.randint(-1, count + 1, (tokens, top_k), generator=generator)
    return x.to(device), ids.to(device), torch.rand(tokens, top_k, generator=generator).to(device)


def test_no_layer_takes_one_launch_by_default():
    layer = layer_of()
    layer.pack(FRAGMENTS)
    assert layer.mlp_counters is None
    assert _expert_weights.ONE_LAUNCH_ROWS == 0


@pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
def test_a_layer_has_the_same_bits(monkeypatch, numerics):
    layer = layer_of(numerics=numerics)
    layer.pack(FRAGMENTS)
    inputs = routed(0, 4, 12, 256)
    expected = layer(*inputs)
    use_one_launch(monkeypatch)
    layer.unpack()
    layer.pack(FRAGMENTS)
    assert "mlp_counters" not in layer.state_dict()
    called = []
    monkeypatch.setattr(
        experts, "expert_mlp", lambda *a, **k: called.append(1) or expert_mlp(*a, **k)
    )
    assert_bitwise(layer(*inputs), expected, "one launch")
    assert called
    longer = routed(1, 40, 12, 256)
    layer(*longer)
    assert len(called) == 1, "120 rows are more than 64"


# On a GPU.


@pytest.mark.gpu
class TestKernel:
    """The kernel against both GEMMs in a launch each, and its counters."""

    @staticmethod
    def weights(sizes):
        hidden, inner, count = sizes
        return packed(0, count, 2 * inner, hidden, "cuda"), packed(1, count, hidden, inner, "cuda")

    @given(
        seed=strategies.seeds(),
        sizes=st.sampled_from([(256, 128, 24), (1024, 256, 16), (4096, 2048, 16), (7168, 3072, 8)]),
        rows=st.integers(1, 48),
        spare=st.integers(0, 3),
        weighted=st.booleans(),
    )
    def test_bits_of_two_launches(self, seed, sizes, rows, spare, weighted):
        count = sizes[2]
        generator = strategies.generator(seed)
        chosen = torch.randint(0, max(1, min(count, rows)), (rows,), generator=generator)
        counts = torch.bincount(chosen, minlength=count).tolist()
        gate_up, down = self.weights(sizes)
        x, offsets, row_weight = sorted_rows(seed, counts, spare, sizes[0], "cuda")
        operands = (x, gate_up, down, offsets, 10.0)
        weights = row_weight if weighted else None
        counters = counters_on("cuda")
        call = dispatch.arguments(expert_mlp, *operands, counters, row_weight=weights)
        reasons = {
            row.name: row.unsupported_reason(call) for row in dispatch.implementations("expert_mlp")
        }
        if "several launches" in (reasons["cute"] or ""):
            return
        assert reasons["cute"] is None
        got = expert_mlp(*operands, counters, row_weight=weights, backend="cute")
        assert_bitwise(got, parts(*operands, weights), "the result")
        assert not counters.any()

    @pytest.mark.parametrize("sizes", [(256, 128, 24), (4096, 2048, 24)], ids=str)
    def test_replays_of_a_graph(self, sizes):
        """Offsets and rows change from replay to replay; counters need no launch of their own."""
        hidden, _, count = sizes
        gate_up, down = self.weights(sizes)
        counters, draws = counters_on("cuda"), []
        for seed in range(8):
            generator = strategies.generator(seed)
            ids = torch.randint(0, count if seed % 2 else 3, (24 - seed,), generator=generator)
            counts = torch.bincount(ids, minlength=count).tolist()
            draws.append(sorted_rows(seed, counts, seed, hidden, "cuda"))
        expected = [parts(x, gate_up, down, o, 10.0, w) for x, o, w in draws]
        x, offsets, row_weight = (tensor.clone() for tensor in draws[0])
        run = lambda: expert_mlp(  # noqa: E731
            *(x, gate_up, down, offsets, 10.0, counters), row_weight=row_weight, backend="cute"
        )
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        differ = torch.zeros((), dtype=torch.int64, device="cuda")
        for number in range(REPLAYS):
            draw = draws[number % len(draws)]
            for to, source in zip((x, offsets, row_weight), draw, strict=True):
                to.copy_(source)
            graph.replay()
            right = expected[number % len(draws)]
            differ += (out.view(torch.int16) != right.view(torch.int16)).sum()
        assert int(differ) == 0
        assert not counters.any()

    def test_a_row_with_nan(self):
        gate_up, down = self.weights((1024, 256, 16))
        x, offsets, row_weight = sorted_rows(0, [2, 0, 3, 1] * 4, 0, 1024, "cuda")
        arguments = (gate_up, down, offsets, 10.0, counters_on("cuda"))
        clean = expert_mlp(x, *arguments, row_weight=row_weight, backend="cute")
        x[3, 5], x[7, 9] = math.nan, math.inf
        got = expert_mlp(x, *arguments, row_weight=row_weight, backend="cute")
        others = [row for row in range(len(x)) if row not in (3, 7)]
        assert_bitwise(got[others], clean[others], "other rows")
        assert bool(got[[3, 7]].isnan().all())

    def test_layers(self, monkeypatch):
        use_one_launch(monkeypatch)
        layer = layer_of("cuda", sizes=(1024, 256, 32))
        layer.pack(FRAGMENTS)
        inputs = routed(0, 4, 32, 1024, "cuda")
        with use_backend("auto"):
            got = layer(*inputs)
        use_one_launch(monkeypatch, 0)
        assert_bitwise(got, layer(*inputs), "one launch")
        assert not layer.mlp_counters.any()
