"""GEMMs of NVFP4 by NVFP4 on the FP4 tensor cores of 12.x, requested by name: dense and grouped.

Interpreted on the CPU. ``tests/triton/test_block_scaled.py`` runs what the compiler makes of them.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4 import device as machine
from dsv4 import dispatch
from dsv4.bench.checks.fused_judges import gemm_swiglu as swiglu_judge
from dsv4.bench.checks.fused_judges import grouped_gemm_swiglu as grouped_judge
from dsv4.bench.problem import Problem
from dsv4.ops.gemm import gemm
from dsv4.ops.gemm_swiglu import gemm_swiglu
from dsv4.ops.grouped_gemm import grouped_gemm
from dsv4.ops.grouped_gemm_swiglu import grouped_gemm_swiglu, grouped_gemm_swiglu_quantize
from dsv4.ops.quantize import dequantize, quantize
from dsv4.quant.formats import FRAGMENTS, LINEAR, SWIZZLED, SWIZZLED_EXPERTS
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise, assert_pure, assert_within_budget, gemm_budget
from dsv4.triton import gemm_nvfp4, nvfp4_supports
from dsv4.triton._lib.block_scaled_plan import BlockScaledPlan, dense_plan, grouped_plan
from tests.ops.test_four_bit_gemms import operand_of, weight_of
from tests.ops.test_packed_experts import (
    assert_zeros_from,
    loads,
    of_rows_or_one,
    row_weights,
    scales_of,
    sorted_rows,
)

REFERENCE = False
KERNELS = ("triton",)
INTERPRETED_SHARE = 8
GPU = torch.device("cuda", 0)
RTX, SPARK, ADA, B200 = (12, 0), (12, 1), (8, 9), (10, 0)
LAYOUTS = st.sampled_from([LINEAR, SWIZZLED])
DTYPES = st.sampled_from([torch.bfloat16, torch.float32])
SCALES = st.sampled_from(["one", "segments", "five segments", "rows"])
LIMITS = st.sampled_from([None, 0.5, 10.0])
# A tiling of each kind; the last one has more rows and tokens than the GEMM.
PLANS = [
    BlockScaledPlan(16, 8, 256, 2),
    BlockScaledPlan(32, 16, 64, 2),
    BlockScaledPlan(64, 32, 128, 4),
    BlockScaledPlan(128, 128, 128, 8),
]


@pytest.fixture(autouse=True)
def _has_the_instruction(request):
    if "device" in request.fixturenames and request.getfixturevalue("device").type == "cuda":
        reason = nvfp4_supports.no_block_scaled_mma(GPU)
        if reason:
            pytest.skip(reason)


def nvfp4(seed, shape, device, layout, scales="one"):
    """A weight as in a checkpoint, or with swizzled block scales."""
    weight = weight_of(seed, shape, device, FRAGMENTS, scales)
    return weight.with_layout(layout)


def rows_of(seed, shape, device):
    return strategies.normal(seed, shape, torch.bfloat16).to(device)


def run(op, *args, **options):
    return op(*args, **options, backend="fp4")


def check_judged(op, judge, args, **options):
    got = run(op, *args, **options)
    problem = Problem(op, args, options, judge, 0)
    verdict = judge(problem, (got,), problem.widened().run("reference"))
    assert verdict.match, verdict.message
    return got


class TestDense:
    @given(
        seed=strategies.seeds(),
        tokens=st.integers(1, 40),
        tiles=st.integers(1, 9),
        columns=st.integers(1, 4),
        layout=LAYOUTS,
        scales=SCALES,
        dtype=DTYPES,
        static=st.booleans(),
    )
    @example(0, 130, 1, 2, SWIZZLED, "one", torch.bfloat16, False)
    def test_product(self, device, seed, tokens, tiles, columns, layout, scales, dtype, static):
        weight = nvfp4(seed, (16 * tiles, 64 * columns), device, layout, scales)
        x = rows_of(seed + 1, (tokens, 64 * columns), device)
        scale = torch.tensor([0.01], device=device) if static else None
        how = {"activation": "nvfp4", "input_scale": scale, "out_dtype": dtype}
        got = run(gemm, x, weight, **how)
        left, right = operand_of(x, "nvfp4", scale), dequantize(weight, torch.float64)
        budget = gemm_budget(left, right, dtype)
        assert_within_budget(got, left @ right.T, budget, "product")

    @given(
        seed=strategies.seeds(), tokens=st.integers(1, 20), layout=LAYOUTS, limit=LIMITS,
        scales=SCALES, dtype=DTYPES,
    )  # fmt: skip
    def test_swiglu(self, device, seed, tokens, layout, limit, scales, dtype):
        weight = nvfp4(seed, (48, 128), device, layout, scales)
        x = rows_of(seed + 1, (tokens, 128), device)
        how = {"activation": "nvfp4", "out_dtype": dtype}
        check_judged(gemm_swiglu, swiglu_judge, (x, weight, limit), **how)

    @given(
        seed=strategies.seeds(), tokens=st.integers(1, 20), groups=st.integers(2, 3), layout=LAYOUTS
    )
    def test_groups(self, device, seed, tokens, groups, layout):
        weight = nvfp4(seed, (48 * groups, 128), device, layout, "rows")
        x = rows_of(seed + 1, (tokens, groups, 128), device)
        how = {"groups": groups, "activation": "nvfp4", "out_dtype": torch.float32}
        got = run(gemm, x, weight, **how)
        right = dequantize(weight, torch.float64).unflatten(0, (groups, -1))
        for g in range(groups):
            left = operand_of(x[:, g], "nvfp4")
            budget = gemm_budget(left, right[g], torch.float32)
            assert_within_budget(got[:, g], left @ right[g].T, budget, f"group {g}")

    @pytest.mark.parametrize("plan", PLANS, ids=repr)
    def test_every_tiling_is_exact(self, device, monkeypatch, plan):
        """Every tiling gives the same bits, because sums of integers are exact in any order."""
        monkeypatch.setattr(gemm_nvfp4, "dense_plan", lambda *_: plan)
        unscaled = {"scaling": "static", "global_scale": torch.ones(1, device=device)}
        weight = strategies.small_integers(plan.tokens, (80, 256)).to(device)
        weight = quantize(weight, **unscaled).with_layout(SWIZZLED)
        x = strategies.small_integers(1, (37, 256), torch.bfloat16).to(device)
        how = {"activation": "nvfp4", "input_scale": unscaled["global_scale"]}
        got = run(gemm, x, weight, **how, out_dtype=torch.float32)
        left = dequantize(quantize(x, **unscaled), torch.float64)
        expected = left @ dequantize(weight, torch.float64).T
        assert_bitwise(got, expected.float(), "product")

    @given(
        seed=strategies.seeds(),
        tokens=st.integers(2, 20),
        kind=st.sampled_from([math.nan, math.inf, -math.inf]),
        layout=LAYOUTS,
    )
    def test_a_bad_token_is_alone(self, device, seed, tokens, kind, layout):
        weight = nvfp4(seed, (48, 192), device, layout)
        x = rows_of(seed, (tokens, 192), device)
        how = {"activation": "nvfp4"}
        clean = run(gemm, x, weight, **how), run(gemm_swiglu, x, weight, 10.0, **how)
        x[tokens // 2, seed % 192] = kind
        got = run(gemm, x, weight, **how), run(gemm_swiglu, x, weight, 10.0, **how)
        keep = torch.arange(tokens, device=device) != tokens // 2
        for first, other in zip(got, clean, strict=True):
            assert bool(first[tokens // 2].isnan().all())
            assert_bitwise(first[keep], other[keep], "the other tokens")

    def test_a_pure_operator(self, device):
        weight = nvfp4(0, (32, 64), device, LINEAR)
        x = rows_of(1, (3, 64), device)

        def multiply(x):
            return run(gemm, x, weight, activation="nvfp4")

        assert_pure(multiply, x)
        none = run(gemm, x[:0], weight, activation="nvfp4")
        assert none.shape == (0, 32)


class TestExperts:
    @given(
        seed=strategies.seeds(),
        counts=loads(4, 60),
        spare=st.integers(0, 3),
        tiles=st.integers(1, 9),
        layout=LAYOUTS,
        scales=SCALES,
        static=st.booleans(),
    )
    def test_product(self, device, seed, counts, spare, tiles, layout, scales, static):
        weight = nvfp4(seed, (4, 16 * tiles, 128), device, layout, scales)
        x, offsets = sorted_rows(seed + 1, counts, spare, 128, device)
        drawn = torch.tensor([0.001, 0.002, 0.004, 0.01], device=device)
        how = {"activation": "nvfp4", "input_scale": drawn if static else None}
        got = run(grouped_gemm, x, weight, offsets, **how, out_dtype=torch.float32)
        dense, start = dequantize(weight, torch.float64), 0
        for expert, end in enumerate(offsets.tolist()[1:]):
            left = operand_of(x[start:end], "nvfp4", drawn[expert] if static else None)
            budget = gemm_budget(left, dense[expert], torch.float32)
            expected = left @ dense[expert].T
            assert_within_budget(got[start:end], expected, budget, f"expert {expert}")
            start = end
        assert_zeros_from(got, start)

    @given(
        seed=strategies.seeds(),
        counts=loads(3, 30),
        spare=st.integers(0, 3),
        layout=LAYOUTS,
        limit=LIMITS,
        weighted=st.booleans(),
    )
    def test_swiglu(self, device, seed, counts, spare, layout, limit, weighted):
        weight = nvfp4(seed, (3, 48, 128), device, layout, "segments")
        x, offsets = sorted_rows(seed + 1, counts, spare, 128, device)
        row_weight = row_weights(seed + 2, x, weighted)
        how = {"activation": "nvfp4", "row_weight": row_weight, "out_dtype": torch.float32}
        args = (x, weight, offsets, limit)
        got = check_judged(grouped_gemm_swiglu, grouped_judge, args, **how)
        assert_zeros_from(got, int(offsets[-1]))

    @given(
        seed=strategies.seeds(),
        counts=loads(3, 30),
        spare=st.integers(0, 3),
        swizzled=st.booleans(),
    )
    def test_codes(self, device, seed, counts, spare, swizzled):
        """Codes go in and codes come out, as if values had been quantised at either place."""
        weight = nvfp4(seed, (3, 128, 64), device, SWIZZLED)
        x, offsets = sorted_rows(seed + 1, counts, spare, 64, device)
        scale, codes = scales_of(seed, 3, device), quantize(x, scaling="token")
        layout = SWIZZLED_EXPERTS if swizzled else LINEAR
        args, how = (weight, offsets, 10.0), {"scale_layout": layout}
        got = run(grouped_gemm_swiglu_quantize, codes, *args, scale, **how)
        inner = run(grouped_gemm_swiglu, x, *args, activation="nvfp4", out_dtype=torch.bfloat16)
        of_rows = of_rows_or_one(scale, offsets, x.shape[0])
        expected = quantize(inner, scaling="static", global_scale=of_rows, backend="reference")
        assert_bitwise(got.codes, expected.codes, "codes")
        if not swizzled:
            assert_bitwise(
                got.scales.view(torch.uint8), expected.scales.view(torch.uint8), "scales"
            )

    @pytest.mark.gpu
    def test_one_graph_serves_any_routing(self):
        if torch.cuda.get_device_capability() not in nvfp4_supports.GPUS:
            pytest.skip("the GPU does not multiply NVFP4 by mma.sync")
        weight = nvfp4(0, (8, 128, 256), GPU, SWIZZLED, "rows")
        x = rows_of(1, (64, 256), GPU)
        offsets = torch.zeros(9, dtype=torch.int32, device=GPU)
        how = {"activation": "nvfp4"}
        run(grouped_gemm, x, weight, offsets, **how)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(grouped_gemm, x, weight, offsets, **how)
        for seed in range(50):
            drawn = torch.randint(0, 9, (8,), generator=strategies.generator(seed))
            offsets.copy_(torch.tensor([0, *drawn.tolist()]).cumsum(0).clamp(max=64))
            graph.replay()
            assert_bitwise(out, run(grouped_gemm, x, weight, offsets, **how), "replay")


class TestPlan:
    @given(
        rows=st.integers(1, 32768),
        tiles=st.integers(1, 300),
        tokens=st.integers(1, 10000),
        groups=st.integers(1, 8),
        sms=st.sampled_from([1, 48, 170, 188]),
    )
    def test_steps_divide_the_columns(self, rows, tiles, tokens, groups, sms):
        columns = 64 * tiles
        plans = dense_plan(rows, columns, tokens, groups, sms), grouped_plan(columns, tokens, 8)
        for plan in plans:
            assert columns % plan.columns == 0 == plan.columns % 64
            assert plan.tokens >= 8
            assert plan.rows * plan.tokens // (32 * plan.warps) <= 64, "sums of a thread"

    def test_few_tokens_take_many_programs(self):
        assert dense_plan(4096, 4096, 1, 1, 188).rows == 16
        assert dense_plan(32768, 1024, 1, 1, 188).rows == 128
        assert dense_plan(4096, 4096, 4096, 1, 188) == BlockScaledPlan(128, 128, 128, 8)


class TestDispatch:
    """Choice and reasons on a GPU that is not there."""

    @pytest.fixture
    def be(self, monkeypatch):
        with machine.pretend(capability=RTX, packages=True) as be:
            monkeypatch.setattr(nvfp4_supports, "triton_version", lambda: "3.9.1")
            yield lambda gpu: be(capability=gpu)

    def reasons(self, op, *args, **options):
        call = dispatch.arguments(op, *args, **options)._replace(device=GPU)
        rows = dispatch.implementations(call.op)
        return {row.name: row.unsupported_reason(call, dispatch.AUTO) for row in rows}

    def dense(self, layout=SWIZZLED, op=gemm, tokens=4, columns=256, **options):
        weight = quantize(torch.ones(64, columns), scaling="weight").with_layout(layout)
        x, more = torch.ones(tokens, columns).bfloat16(), (10.0,) if op is gemm_swiglu else ()
        return self.reasons(op, x, weight, *more, **{"activation": "nvfp4", **options})

    def routed(self, op, layout=SWIZZLED, **options):
        weight = quantize(torch.ones(2, 64, 256), scaling="weight").with_layout(layout)
        offsets = torch.tensor([0, 3, 5], dtype=torch.int32)
        x, more = torch.ones(5, 256).bfloat16(), () if op is grouped_gemm else (10.0,)
        return self.reasons(op, x, weight, offsets, *more, **{"activation": "nvfp4", **options})

    @pytest.mark.parametrize("gpu", [RTX, SPARK])
    @pytest.mark.parametrize("layout", [LINEAR, SWIZZLED])
    def test_it_is_the_first_of_its_gpus(self, be, gpu, layout):
        be(gpu)
        scale = torch.ones(2)
        for why in (
            self.dense(layout),
            self.dense(layout, gemm_swiglu),
            self.routed(grouped_gemm, layout),
            self.routed(grouped_gemm_swiglu, layout),
            self.routed(grouped_gemm_swiglu_quantize, layout, result_scale=scale),
        ):
            assert next(name for name, reason in why.items() if reason is None) == "fp4"

    @pytest.mark.parametrize("gpu", [(8, 0), ADA, (9, 0), B200, (10, 3), (11, 0)])
    def test_no_other_gpu(self, be, gpu):
        be(gpu)
        for why in (self.dense(), self.routed(grouped_gemm), self.dense(op=gemm_swiglu)):
            assert why["fp4"].startswith("mma.sync multiplies NVFP4 on compute capability")
            assert why["fp4"].endswith(f"the GPU has {gpu[0]}.{gpu[1]}")

    @pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0", "3.10.0", "4.0.0", ""])
    def test_no_version_that_is_not_known(self, be, monkeypatch, version):
        monkeypatch.setattr(nvfp4_supports, "triton_version", lambda: version)
        reason = self.dense()["fp4"]
        assert reason.startswith(f"Triton is {version or 'of an unknown version'}, wanted 3.9")

    def test_other_calls_are_refused_with_the_reason(self, be):
        assert "wanted 'swizzled_128x4' or 'linear'" in self.dense(FRAGMENTS)["fp4"]
        assert "activations are 'bf16'" in self.dense(activation="bf16")["fp4"]
        assert "the result is torch.float16" in self.dense(out_dtype=torch.float16)["fp4"]
        assert (
            "the weight has 96 columns, wanted a multiple of 64"
            in (self.dense(LINEAR, columns=96)["fp4"])
        )

    def test_no_verdict_no_choice(self):
        """It ran on no GPU, so a self-test decides before ``auto`` takes it."""
        rows = [row for row in dispatch.IMPLEMENTATIONS if row.name == "fp4"]
        assert len(rows) == 5
        for row in rows:
            assert row.proven == frozenset()
            assert row.self_test is not None

    def test_a_cpu_takes_the_reference(self):
        with machine.interpret_triton():
            weight = quantize(torch.ones(64, 256), scaling="weight")
            x = torch.ones(2, 256).bfloat16()
            chosen = dispatch.explain(gemm, x, weight, activation="nvfp4").chosen
        assert chosen == "reference"
