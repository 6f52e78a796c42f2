"""Product and SwiGLU in one operator, held to the float64 composition of its parts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4 import dispatch
from dsv4.bench.checks.fused_judges import gemm_swiglu as judge
from dsv4.bench.problem import Problem
from dsv4.ops.gemm import gemm
from dsv4.ops.gemm_swiglu import gemm_swiglu
from dsv4.ops.quantize import quantize
from dsv4.ops.swiglu import swiglu
from dsv4.quant.formats import FRAGMENTS, LINEAR
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise, assert_pure

KERNELS = ("triton",)
ACTIVATIONS = st.sampled_from(["bf16", "nvfp4", "fp8"])
LIMITS = st.sampled_from([None, 0.5, 10.0])


def weight_of(seed, rows, columns, device="cpu", layout=FRAGMENTS):
    weight = quantize(strategies.normal(seed, (rows, columns)), scaling="weight").to(device)
    return weight.with_layout(layout)


def inputs(seed, shape, device="cpu"):
    return strategies.normal(seed, shape, torch.bfloat16).to(device)


def check(x, weight, limit, backend="auto", **options):
    """The result is within the budget that the errors of both GEMMs leave."""
    got = gemm_swiglu(x, weight, limit, backend=backend, **options)
    assert got.shape == (*x.shape[:-1], weight.rows // 2)
    problem = Problem(gemm_swiglu, (x, weight, limit), options, judge, 0)
    verdict = judge(problem, (got,), problem.widened().run("reference"))
    assert verdict.match, verdict.message
    return got


@given(
    seed=strategies.seeds(),
    tokens=st.integers(1, 40),
    tiles=st.integers(1, 4),
    columns=st.integers(1, 5),
    limit=LIMITS,
    activation=ACTIVATIONS,
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_within_the_budget(device, seed, tokens, tiles, columns, limit, activation, dtype):
    weight = weight_of(seed, 16 * tiles, 64 * columns, device)
    x = inputs(seed + 1, (tokens, 64 * columns), device)
    check(x, weight, limit, activation=activation, out_dtype=dtype)


@given(seed=strategies.seeds(), limit=LIMITS, layout=st.sampled_from([LINEAR, FRAGMENTS]))
def test_the_reference_is_its_parts(seed, limit, layout):
    """Gate in even rows, up in odd ones, the clamp one-sided for the gate, one rounding."""
    weight, x = weight_of(seed, 32, 64, layout=layout), inputs(seed, (3, 64))
    wide = gemm(x, weight, out_dtype=torch.float32)
    expected = swiglu(wide, limit, layout="interleaved", out_dtype=torch.bfloat16)
    assert_bitwise(gemm_swiglu(x, weight, limit), expected, "result")
    gate, up = wide[:, ::2].double(), wide[:, 1::2].double()
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    plain = gate / (1 + torch.exp(-gate)) * up
    assert torch.allclose(expected.double(), plain, rtol=2**-7, atol=1e-6)


@given(seed=strategies.seeds(), kind=st.sampled_from([math.nan, math.inf, -math.inf]))
def test_a_bad_token_is_alone(device, seed, kind):
    weight, x = weight_of(seed, 48, 128, device), inputs(seed, (7, 128), device)
    clean = gemm_swiglu(x, weight, 10.0)
    x[3, seed % 128] = kind
    got = gemm_swiglu(x, weight, 10.0)
    assert bool(got[3].isnan().all())
    keep = torch.arange(7, device=device) != 3
    assert_bitwise(got[keep], clean[keep], "the other tokens")


def test_shapes_and_no_tokens(device):
    weight = weight_of(0, 32, 64, device)
    assert gemm_swiglu(inputs(0, (0, 64), device), weight, 10.0).shape == (0, 16)
    x = inputs(0, (2, 3, 64), device)
    got = gemm_swiglu(x, weight, 10.0)
    assert_bitwise(got, gemm_swiglu(x.flatten(0, 1), weight, 10.0).view(2, 3, 16), "result")


def test_a_pure_operator(device):
    call = dispatch.arguments(
        gemm_swiglu, inputs(0, (3, 64), device), weight_of(0, 32, 64, device), 10.0
    )
    assert_pure(torch.ops.dsv4.gemm_swiglu, *call.args, "auto")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["parts", "cute"])
class TestKernels:
    @given(
        seed=strategies.seeds(),
        tokens=st.integers(1, 600),
        tiles=st.integers(1, 40),
        columns=st.integers(1, 6),
        limit=LIMITS,
        activation=ACTIVATIONS,
        dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    )
    @example(0, 8, 384, 56, 10.0, "bf16", torch.bfloat16)
    @example(0, 300, 384, 56, 10.0, "nvfp4", torch.bfloat16)
    def test_within_the_budget(
        self, backend, seed, tokens, tiles, columns, limit, activation, dtype
    ):
        weight = weight_of(seed, 16 * tiles, 128 * columns, "cuda")
        x = inputs(seed + 1, (tokens, 128 * columns), "cuda")
        check(x, weight, limit, backend, activation=activation, out_dtype=dtype)

    @pytest.mark.parametrize("tokens", [1, 40, 300])
    def test_a_captured_graph_takes_new_data(self, backend, tokens):
        weight, x = weight_of(0, 512, 512, "cuda"), inputs(0, (tokens, 512), "cuda")
        gemm_swiglu(x, weight, 10.0, backend=backend)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = gemm_swiglu(x, weight, 10.0, backend=backend)
        for seed in range(1, 5):
            x.copy_(inputs(seed, x.shape, "cuda"))
            out.fill_(math.nan)
            graph.replay()
            assert_bitwise(out, gemm_swiglu(x, weight, 10.0, backend=backend), "replay")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"limit": 0.0}, ValueError, "limit is 0.0"),
        ({"limit": -1.0}, ValueError, "limit is -1.0"),
        ({"limit": math.nan}, ValueError, "limit is nan"),
        ({"x": torch.ones(2, 32)}, ValueError, "x has 32 columns"),
        ({"x": torch.ones(2, 64, dtype=torch.int32)}, TypeError, "x"),
        ({"weight": torch.ones(32, 64)}, TypeError, "weight is Tensor"),
        ({"weight": weight_of(0, 33, 64, layout=LINEAR)}, ValueError, "33 rows"),
        ({"activation": "fp4"}, ValueError, "activation"),
        ({"input_scale": torch.ones(1)}, ValueError, "input_scale is given"),
        ({"out_dtype": torch.int8}, TypeError, "out_dtype"),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    arguments = {"x": inputs(0, (2, 64)), "weight": weight_of(0, 32, 64), "limit": 10.0, **change}
    with pytest.raises(error, match=message):
        gemm_swiglu(**arguments)


def test_dispatch_says_why():
    result = dispatch.explain(gemm_swiglu, inputs(0, (2, 64)), weight_of(0, 32, 64), 10.0)
    names = [name for name, _ in result.candidates]
    assert names == ["tcgen05", "fp4", "fp8", "cute", "triton", "parts", "reference"]
    assert result.chosen == "reference"
