"""Products of sorted rows with experts in fragments, and their SwiGLU."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4 import dispatch
from dsv4.bench.checks.fused_judges import grouped_gemm_swiglu as judge
from dsv4.bench.problem import Problem
from dsv4.cute.grouped_gemm import plans
from dsv4.cute.grouped_problem import Experts
from dsv4.cute.sm90.grouped_gemm_plans import ANY_ROWS, launch_plans, typical_plan
from dsv4.cute.sm90.grouped_gemm_small_m_plan import GroupedSmallMPlan
from dsv4.cute.sm90.grouped_gemm_wgmma_plan import GroupedWgmmaPlan
from dsv4.ops._grouped_operands import of_rows
from dsv4.ops.gemm import gemm
from dsv4.ops.gemm_swiglu import gemm_swiglu
from dsv4.ops.grouped_gemm import grouped_gemm
from dsv4.ops.grouped_gemm_swiglu import grouped_gemm_swiglu, grouped_gemm_swiglu_quantize
from dsv4.ops.moe import moe_sort
from dsv4.ops.quantize import dequantize, quantize
from dsv4.quant.formats import FRAGMENTS
from dsv4.testing import strategies
from dsv4.testing.assertions import (
    assert_bitwise,
    assert_pure,
    assert_within_budget,
    gemm_budget,
)

ACTIVATIONS = st.sampled_from(["bf16", "nvfp4", "fp8"])
DTYPES = st.sampled_from([torch.bfloat16, torch.float32])
LIMITS = st.sampled_from([None, 0.5, 10.0])
# What the host may choose for any number of rows; small counts of experts keep tests quick.
LOADS = [1, 2, 4, 8, 30, 70, 130, 260, 600]


def weights_of(seed, experts, rows, columns, device, scales="one", layout=FRAGMENTS):
    """Packed experts, global scales of their own: one each, gate and up in segments, or per row."""
    weight = quantize(strategies.normal(seed, (experts, rows, columns)), scaling="weight")
    count = {"one": 1, "segments": 2, "rows": rows}[scales]
    drawn = torch.rand(experts, count, generator=strategies.generator(seed)) + 0.5
    segments = (rows // 2, rows - rows // 2) if scales == "segments" else ()
    weight = dataclasses.replace(weight, global_scale=drawn, segments=segments)
    return weight.to(device).with_layout(layout)


def sorted_rows(seed, counts, spare, columns, device):
    """Rows and offsets; those of no expert hold NaN."""
    x = strategies.normal(seed, (sum(counts) + spare, columns), torch.bfloat16)
    x[sum(counts) :] = math.nan
    offsets = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    return x.to(device), offsets.to(device)


def row_weights(seed, x, weighted):
    """A factor for each row, or None."""
    return strategies.normal(seed, (x.shape[0],)).to(x.device) if weighted else None


def assert_zeros_from(got, end):
    """Rows of no expert, which follow those of the last one, are zero."""
    assert_bitwise(got[end:], torch.zeros_like(got[end:]), "rows of no expert")


@st.composite
def loads(draw, experts, most):
    """Numbers of rows: empty experts, one with all, and uneven ones."""
    if draw(st.booleans()):
        counts = [0] * experts
        counts[draw(st.integers(0, experts - 1))] = draw(st.integers(0, most))
        return counts
    return draw(st.lists(st.integers(0, most // experts), min_size=experts, max_size=experts))


def check_product(x, weight, offsets, activation, dtype, scale=None):
    """It is within the budget of float32 sums of every expert's GEMM; zeros after the last."""
    options = {"activation": activation, "input_scale": scale, "out_dtype": dtype}
    got = grouped_gemm(x, weight, offsets, **options)
    dense = dequantize(weight, torch.float64)
    start = 0
    for expert, end in enumerate(offsets.tolist()[1:]):
        left = x[start:end]
        if activation == "nvfp4":
            expert_scale = None if scale is None else scale[expert]
            scaling = "token" if scale is None else "static"
            left = dequantize(
                quantize(left, scaling=scaling, global_scale=expert_scale), torch.float64
            )
        elif activation == "fp8" and len(left):
            left = dequantize(quantize(left, "fp8_token"), torch.float64)
        left, right = left.double(), dense[expert]
        budget = gemm_budget(left, right, dtype)
        assert_within_budget(got[start:end], left @ right.T, budget, f"expert {expert}")
        start = end
    assert_zeros_from(got, start)


def check_swiglu(x, weight, offsets, limit, **options):
    got = grouped_gemm_swiglu(x, weight, offsets, limit, **options)
    assert got.shape == (x.shape[0], weight.rows // 2)
    problem = Problem(grouped_gemm_swiglu, (x, weight, offsets, limit), options, judge, 0)
    verdict = judge(problem, (got,), problem.widened().run("reference"))
    assert verdict.match, verdict.message
    assert_zeros_from(got, int(offsets[-1]))


def scales_of(seed, experts, device):
    """Static scales of experts' results: values from far above to far below what codes hold."""
    exponents = torch.randint(-14, 0, (experts,), generator=strategies.generator(seed))
    drawn = torch.rand(experts, generator=strategies.generator(seed + 1)) + 1
    return (drawn * 2.0**exponents).to(device)


def check_codes(x, weight, offsets, limit, scale, **options):
    """Bit for bit SwiGLU in the dtype of x, then each row quantised with its expert's scale."""
    got = grouped_gemm_swiglu_quantize(x, weight, offsets, limit, scale, **options)
    inner = grouped_gemm_swiglu(x, weight, offsets, limit, **options)
    of_rows = of_rows_or_one(scale, offsets, x.shape[0])
    expected = quantize(inner, scaling="static", global_scale=of_rows, backend="reference")
    assert (got.shape, got.layout) == (expected.shape, expected.layout)
    for name in ("codes", "scales", "global_scale"):
        first, other = (getattr(q, name).view(torch.uint8) for q in (got, expected))
        assert_bitwise(first, other, name)
    return got


def of_rows_or_one(scale, offsets, rows):
    counts = offsets.diff()
    spare = rows - int(offsets[-1])
    return torch.cat([scale.repeat_interleave(counts), torch.ones(spare, device=scale.device)])


class TestValues:
    @given(
        seed=strategies.seeds(),
        counts=loads(5, 40),
        spare=st.integers(0, 3),
        tiles=st.integers(1, 3),
        columns=st.integers(1, 2),
        activation=ACTIVATIONS,
        scales=st.sampled_from(["one", "segments", "rows"]),
        dtype=DTYPES,
    )
    def test_product(self, device, seed, counts, spare, tiles, columns, activation, scales, dtype):
        weight = weights_of(seed, 5, 16 * tiles, 128 * columns, device, scales)
        x, offsets = sorted_rows(seed + 1, counts, spare, 128 * columns, device)
        check_product(x, weight, offsets, activation, dtype)

    @given(seed=strategies.seeds(), counts=loads(5, 40), spare=st.integers(0, 3), dtype=DTYPES)
    def test_a_calibrated_scale_of_each_expert(self, device, seed, counts, spare, dtype):
        weight = weights_of(seed, 5, 32, 128, device)
        x, offsets = sorted_rows(seed + 1, counts, spare, 128, device)
        scale = torch.tensor([0.001, 0.002, 0.004, 0.008, 0.01], device=device)
        check_product(x, weight, offsets, "nvfp4", dtype, scale)

    @given(counts=loads(4, 30), spare=st.integers(0, 3))
    def test_values_of_experts_for_their_rows(self, device, counts, spare):
        offsets = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(device)
        values = torch.arange(4, device=device)
        got = of_rows(values, offsets, sum(counts) + spare)[: sum(counts)]
        assert got.tolist() == [e for e, count in enumerate(counts) for _ in range(count)]

    @given(
        seed=strategies.seeds(),
        counts=loads(5, 40),
        spare=st.integers(0, 3),
        tiles=st.integers(1, 3),
        limit=LIMITS,
        activation=ACTIVATIONS,
        weighted=st.booleans(),
        dtype=DTYPES,
    )
    def test_swiglu(self, device, seed, counts, spare, tiles, limit, activation, weighted, dtype):
        weight = weights_of(seed, 5, 16 * tiles, 128, device, "rows")
        x, offsets = sorted_rows(seed + 1, counts, spare, 128, device)
        row_weight = row_weights(seed + 2, x, weighted)
        check_swiglu(
            x, weight, offsets, limit, activation=activation, row_weight=row_weight, out_dtype=dtype
        )

    @given(
        seed=strategies.seeds(),
        counts=loads(5, 40),
        spare=st.integers(0, 3),
        tiles=st.integers(1, 3),
        limit=LIMITS,
        activation=ACTIVATIONS,
        weighted=st.booleans(),
    )
    def test_codes(self, device, seed, counts, spare, tiles, limit, activation, weighted):
        weight = weights_of(seed, 5, 32 * tiles, 128, device, "rows")
        x, offsets = sorted_rows(seed + 1, counts, spare, 128, device)
        options = {"activation": activation, "row_weight": row_weights(seed + 2, x, weighted)}
        scale = scales_of(seed, 5, device)
        got = check_codes(x, weight, offsets, limit, scale, **options)
        end = int(offsets[-1])
        assert not got.codes[end:].any()
        assert not got.scales[end:].float().any()

    @given(
        seed=strategies.seeds(),
        counts=loads(5, 40),
        spare=st.integers(0, 3),
        dtype=DTYPES,
        scale_layout=st.booleans(),
    )
    def test_quantised_rows_are_those_that_the_product_quantises(
        self, device, seed, counts, spare, dtype, scale_layout
    ):
        weight = weights_of(seed, 5, 48, 128, device)
        x, offsets = sorted_rows(seed + 1, counts, spare, 128, device)
        scale = scales_of(seed, 5, device)
        if scale_layout:
            scale = scale[:1].expand(5).contiguous()
        of_rows = scale[:1] if scale_layout else of_rows_or_one(scale, offsets, x.shape[0])
        q = quantize(x, scaling="static", global_scale=of_rows)
        got = grouped_gemm(q, weight, offsets, out_dtype=dtype)
        how = {"activation": "nvfp4", "input_scale": scale, "out_dtype": dtype}
        assert_bitwise(got, grouped_gemm(x, weight, offsets, **how), "product")
        assert grouped_gemm(q, weight, offsets).dtype == torch.bfloat16
        out = torch.full_like(got, math.nan)
        assert grouped_gemm(q, weight, offsets, out_dtype=dtype, out=out) is out
        assert_bitwise(out, got, "in a given place")

    @given(seed=strategies.seeds(), kind=st.sampled_from([math.nan, math.inf, -math.inf]))
    def test_a_bad_row_has_nan_scales_and_is_alone(self, device, seed, kind):
        weight = weights_of(seed, 3, 64, 128, device)
        x, offsets = sorted_rows(seed, [3, 0, 4], 0, 128, device)
        arguments, scale = (weight, offsets, 10.0), scales_of(seed, 3, device)
        clean = grouped_gemm_swiglu_quantize(x, *arguments, scale)
        x[3, seed % 128] = kind
        got = grouped_gemm_swiglu_quantize(x, *arguments, scale)
        assert bool((got.scales[3].view(torch.uint8) == 0x7F).all())
        assert not got.codes[3].any()
        keep = torch.arange(7, device=device) != 3
        assert_bitwise(got.codes[keep], clean.codes[keep], "codes")
        assert_bitwise(dequantize(got)[keep], dequantize(clean)[keep], "values")

    @given(seed=strategies.seeds(), counts=loads(3, 20), limit=LIMITS)
    def test_an_expert_is_the_dense_operator(self, seed, counts, limit):
        """The reference has the same bits: gate in even rows, up in odd ones, one-sided clamp."""
        weight = weights_of(seed, 3, 32, 128, "cpu", "rows")
        x, offsets = sorted_rows(seed, counts, 2, 128, "cpu")
        got = grouped_gemm_swiglu(x, weight, offsets, limit)
        start = 0
        for expert, end in enumerate(offsets.tolist()[1:]):
            expected = gemm_swiglu(x[start:end], weight[expert], limit)
            assert_bitwise(got[start:end], expected, f"expert {expert}")
            start = end

    @given(seed=strategies.seeds(), kind=st.sampled_from([math.nan, math.inf, -math.inf]))
    def test_a_bad_row_is_alone(self, device, seed, kind):
        weight = weights_of(seed, 3, 48, 128, device)
        x, offsets = sorted_rows(seed, [3, 0, 4], 0, 128, device)
        clean = grouped_gemm(x, weight, offsets), grouped_gemm_swiglu(x, weight, offsets, 10.0)
        x[3, seed % 128] = kind
        got = grouped_gemm(x, weight, offsets), grouped_gemm_swiglu(x, weight, offsets, 10.0)
        keep = torch.arange(7, device=device) != 3
        for first, other in zip(got, clean, strict=True):
            assert bool(first[3].isnan().all())
            assert_bitwise(first[keep], other[keep], "the other rows")

    @given(seed=strategies.seeds(), counts=loads(4, 30))
    def test_experts_may_be_relabelled(self, device, seed, counts):
        weight = weights_of(seed, 4, 32, 128, device)
        x, offsets = sorted_rows(seed, counts, 0, 128, device)
        got = grouped_gemm(x, weight, offsets)
        order = torch.randperm(4, generator=strategies.generator(seed))
        pieces = torch.arange(sum(counts)).split(counts)
        rows = torch.cat([pieces[i] for i in order.tolist()]).to(device)
        moved, bounds = sorted_rows(seed, [counts[i] for i in order.tolist()], 0, 128, device)
        moved = x[rows]
        order = order.to(device)
        other = dataclasses.replace(
            weight,
            codes=weight.codes[order],
            scales=weight.scales[order],
            global_scale=weight.global_scale[order],
        )
        assert_bitwise(grouped_gemm(moved, other, bounds), got[rows], "product")


class TestContract:
    def test_no_rows(self, device):
        weight = weights_of(0, 3, 32, 128, device)
        for rows in (0, 5):
            x, offsets = sorted_rows(0, [0, 0, 0], rows, 128, device)
            assert_bitwise(
                grouped_gemm(x, weight, offsets), x.new_zeros(rows, 32), "rows of no expert"
            )
            got = grouped_gemm_swiglu(x, weight, offsets, 10.0)
            assert_bitwise(got, x.new_zeros(rows, 16), "rows of no expert")

    def test_a_pure_operator(self, device):
        weight = weights_of(0, 2, 32, 128, device)
        x, offsets = sorted_rows(0, [1, 2], 1, 128, device)
        call = dispatch.arguments(grouped_gemm_swiglu, x, weight, offsets, 10.0)
        assert_pure(torch.ops.dsv4.grouped_gemm_swiglu, *call.args, "auto")
        scale, op = torch.ones(2, device=device), grouped_gemm_swiglu_quantize
        call = dispatch.arguments(op, x, weight, offsets, 10.0, scale)
        assert_pure(torch.ops.dsv4.grouped_gemm_swiglu_quantize, *call.args, "auto")

    @pytest.mark.parametrize(
        ("changes", "error", "words"),
        [
            ({"limit": 0.0}, ValueError, "limit is 0.0"),
            ({"limit": math.nan}, ValueError, "limit is nan"),
            ({"row_weight": torch.ones(2)}, ValueError, r"row_weight has shape \[2\]"),
            ({"row_weight": torch.ones(3).int()}, TypeError, "row_weight has dtype int32"),
            ({"weight": torch.ones(2, 5, 128)}, ValueError, "weight has 5 rows"),
            ({"offsets": torch.zeros(3)}, TypeError, "offsets has dtype float32"),
            ({"x": torch.ones(3, 64)}, ValueError, "64 columns, wanted 128"),
        ],
    )
    def test_wrong_arguments_are_named(self, changes, error, words):
        x, offsets = sorted_rows(0, [1, 2], 0, 128, "cpu")
        arguments = {
            "x": x,
            "weight": weights_of(0, 2, 32, 128, "cpu"),
            "offsets": offsets,
            "limit": 10.0,
            **changes,
        }
        with pytest.raises(error, match=words):
            grouped_gemm_swiglu(**arguments)

    @pytest.mark.parametrize(
        ("changes", "error", "words"),
        [
            ({"result_scale": torch.ones(3)}, ValueError, r"result_scale has shape \[3\]"),
            ({"result_scale": torch.ones(2).double()}, TypeError, "result_scale has dtype"),
            ({"result_scale": torch.zeros(2)}, ValueError, "result_scale.*above 0"),
            ({"weight": torch.ones(2, 48, 128)}, ValueError, "weight has 48 rows, wanted"),
            ({"limit": 0.0}, ValueError, "limit is 0.0"),
        ],
    )
    def test_wrong_arguments_of_codes_are_named(self, changes, error, words):
        x, offsets = sorted_rows(0, [1, 2], 0, 128, "cpu")
        arguments = {
            "x": x,
            "weight": weights_of(0, 2, 32, 128, "cpu"),
            "offsets": offsets,
            "limit": 10.0,
            "result_scale": torch.ones(2),
            **changes,
        }
        with pytest.raises(error, match=words):
            grouped_gemm_swiglu_quantize(**arguments)

    def test_wrong_quantised_rows_are_named(self):
        x, offsets = sorted_rows(0, [1, 2], 0, 128, "cpu")
        weight, q = weights_of(0, 2, 32, 128, "cpu"), quantize(x)
        with pytest.raises(ValueError, match=r"x is quantised, but activation is 'nvfp4'"):
            grouped_gemm(q, weight, offsets, activation="nvfp4")
        with pytest.raises(ValueError, match="wanted a matrix in nvfp4"):
            grouped_gemm(quantize(x, "mxfp4"), weight, offsets)
        with pytest.raises(ValueError, match="64 columns, wanted 128"):
            grouped_gemm(quantize(x[:, :64]), weight, offsets)

    def test_dispatch_says_why(self):
        x, offsets = sorted_rows(0, [1, 2], 0, 128, "cpu")
        result = dispatch.explain(grouped_gemm, x, weights_of(0, 2, 32, 128, "cpu"), offsets)
        names = ["tcgen05", "fp4", "fp8", "cute", "triton", "reference"]
        assert [name for name, _ in result.candidates] == names
        assert result.chosen == "reference"


class TestPlans:
    @pytest.mark.parametrize(
        ("rows", "columns"), [(6144, 7168), (7168, 3072), (4096, 4096), (48, 128)]
    )
    @pytest.mark.parametrize("experts", [1, 48, 256, 384, 512])
    def test_every_number_of_rows_has_one(self, rows, columns, experts):
        for swiglu in (False, True):
            expected = Experts(rows, columns, experts, False, False, swiglu)
            actual = plans(expected, 8192 * 6)
            assert 1 <= len(actual) <= 16
            for tokens in (1, 5, 6, 100, 777, 8192 * 6):
                plan = typical_plan(expected, tokens)
                assert plan in actual
                assert (
                    columns
                    // 64
                    % (plan.stages if isinstance(plan, GroupedSmallMPlan) else plan.stage_k_blocks)
                    == 0
                )
                assert plan.ctas == 1
                assert plan.shared_bytes <= 227 * 1024

    def test_more_rows_of_an_expert_take_larger_tiles(self):
        expected = Experts(6144, 7168, 384, False, False, True)
        small_m_plans = [typical_plan(expected, rows) for rows in (1, 6, 384, 1536, 1537, 2048)]
        assert all(isinstance(plan, GroupedSmallMPlan) for plan in small_m_plans)
        assert [plan.segment_rows for plan in small_m_plans] == [8, 8, 8, 8, 14, 14]
        loads = (8, 16, 24, 40, 64, 96, 128)
        blocks = [typical_plan(expected, 384 * load).token_block for load in loads]
        assert blocks == sorted(blocks)
        assert all(load <= block <= 2 * load for load, block in zip(loads, blocks, strict=True))

    @given(experts=st.sampled_from([1, 5, 48, 384]), tokens=st.integers(1, 1 << 18))
    def test_an_expert_is_one_launchs(self, experts, tokens):
        expected = Experts(6144, 7168, experts, False, False, True)
        actual = launch_plans(expected, tokens)
        assert typical_plan(expected, tokens) in [launch.plan for launch in actual]
        assert {launch.plan for launch in actual} <= set(plans(expected, tokens))
        bounds = sorted((launch.above_rows, launch.most_rows) for launch in actual)
        assert (bounds[0][0], bounds[-1][1]) == (0, ANY_ROWS)
        assert all(low[1] == high[0] for low, high in pairwise(bounds))
        # Those of more rows come first; a launch for few rows is for no expert above any other.
        assert [launch.above_rows for launch in actual] == sorted(
            (b[0] for b in bounds), reverse=True
        )
        assert all(s.above_rows == 0 for s in actual if isinstance(s.plan, GroupedSmallMPlan))
        # But in the launch for the most rows, an expert is one tile.
        tiles = [
            s for s in actual if isinstance(s.plan, GroupedWgmmaPlan) and s.most_rows < ANY_ROWS
        ]
        assert all(s.plan.token_block == s.most_rows for s in tiles)
        assert len(actual) <= 10

    @given(experts=st.integers(8, 512), tokens=st.integers(1, 48), swiglu=st.booleans())
    def test_rows_of_eight_tokens_have_one_launch(self, experts, tokens, swiglu):
        expected = Experts(4096, 4096, experts, False, False, swiglu)
        [launch] = launch_plans(expected, tokens)
        assert isinstance(launch.plan, GroupedSmallMPlan)
        assert (launch.above_rows, launch.most_rows) == (0, ANY_ROWS)

    def test_none_for_what_the_kernel_cannot_do(self):
        assert typical_plan(Experts(32, 192, 4, False, False), 10) is None
        assert typical_plan(Experts(32, 128, 513, False, False), 10) is None
        assert launch_plans(Experts(32, 192, 4, False, False), 10) == ()


@pytest.mark.gpu
class TestKernel:
    """Shapes at which tiles end anywhere, on the GPU's own kernel."""

    @given(
        seed=strategies.seeds(),
        experts=st.integers(1, 40),
        load=st.sampled_from(LOADS),
        tiles=st.integers(1, 40),
        columns=st.integers(1, 6),
        activation=ACTIVATIONS,
        dtype=DTYPES,
    )
    @example(0, 40, 1, 30, 4, "bf16", torch.bfloat16)
    @example(0, 3, 600, 24, 6, "bf16", torch.bfloat16)
    @example(0, 40, 2, 37, 56, "bf16", torch.bfloat16)
    @example(0, 40, 8, 37, 56, "bf16", torch.bfloat16)
    @example(0, 40, 8, 30, 24, "nvfp4", torch.bfloat16)
    @example(0, 5, 2, 448, 24, "nvfp4", torch.float32)
    @example(0, 8, 70, 24, 4, "nvfp4", torch.bfloat16)
    @example(0, 8, 130, 24, 4, "bf16", torch.float32)
    def test_product(self, seed, experts, load, tiles, columns, activation, dtype):
        draw = torch.randint(0, 2 * load, (experts,), generator=strategies.generator(seed))
        weight = weights_of(seed, experts, 16 * tiles, 128 * columns, "cuda")
        x, offsets = sorted_rows(seed, draw.tolist(), 3, 128 * columns, "cuda")
        assert dispatch.explain(grouped_gemm, x, weight, offsets).chosen == "cute"
        check_product(x, weight, offsets, activation, dtype)

    @given(
        seed=strategies.seeds(),
        experts=st.integers(1, 40),
        load=st.sampled_from(LOADS),
        tiles=st.integers(1, 40),
        columns=st.integers(1, 6),
        weighted=st.booleans(),
    )
    @example(0, 40, 1, 30, 4, True)
    @example(0, 8, 70, 24, 4, True)
    @example(0, 8, 130, 24, 4, False)
    @example(0, 12, 2, 384, 56, True)
    @example(0, 12, 8, 384, 56, True)
    def test_swiglu(self, seed, experts, load, tiles, columns, weighted):
        draw = torch.randint(0, 2 * load, (experts,), generator=strategies.generator(seed))
        weight = weights_of(seed, experts, 16 * tiles, 128 * columns, "cuda", "rows")
        x, offsets = sorted_rows(seed, draw.tolist(), 2, 128 * columns, "cuda")
        row_weight = strategies.normal(seed, (x.shape[0],)).cuda() if weighted else None
        check_swiglu(x, weight, offsets, 10.0, row_weight=row_weight)

    @given(
        seed=strategies.seeds(),
        experts=st.integers(1, 40),
        load=st.sampled_from(LOADS),
        tiles=st.integers(1, 20),
        columns=st.integers(1, 6),
        weighted=st.booleans(),
        activation=ACTIVATIONS,
    )
    @example(0, 40, 1, 15, 4, True, "bf16")
    @example(0, 8, 70, 12, 4, True, "nvfp4")
    @example(0, 8, 130, 12, 4, False, "bf16")
    @example(0, 12, 2, 192, 56, True, "nvfp4")
    @example(0, 12, 8, 192, 56, True, "bf16")
    def test_codes(self, seed, experts, load, tiles, columns, weighted, activation):
        draw = torch.randint(0, 2 * load, (experts,), generator=strategies.generator(seed))
        weight = weights_of(seed, experts, 32 * tiles, 128 * columns, "cuda", "rows")
        x, offsets = sorted_rows(seed, draw.tolist(), 2, 128 * columns, "cuda")
        row_weight = strategies.normal(seed, (x.shape[0],)).cuda() if weighted else None
        options = {"row_weight": row_weight, "activation": activation}
        scale = scales_of(seed, experts, "cuda")
        arguments = (x, weight, offsets, 10.0, scale)
        result = dispatch.explain(grouped_gemm_swiglu_quantize, *arguments, **options)
        assert result.chosen == "cute"
        check_codes(*arguments, **options)

    @pytest.mark.parametrize("exponent", [-149, -140, -126, -100, -70, 0, 60, 100, 127])
    @pytest.mark.parametrize("counts", [[3, 0, 7], [300, 20, 90]])
    def test_codes_of_extreme_scales(self, exponent, counts):
        weight = weights_of(0, 3, 64, 256, "cuda", "rows")
        x, offsets = sorted_rows(0, counts, 1, 256, "cuda")
        x[0] = 0.0
        row_weight = 2.0 ** torch.linspace(-130, 100, x.shape[0], device="cuda")
        scale = torch.tensor([1.0, 1.3, 1.999], dtype=torch.float64).mul(2.0**exponent)
        check_codes(x, weight, offsets, None, scale.float().cuda(), row_weight=row_weight)

    @pytest.mark.parametrize("tokens", [12, 400, 1000])
    def test_one_graph_serves_any_routing(self, tokens):
        weight = weights_of(0, 16, 512, 512, "cuda", "rows")
        x, offsets = sorted_rows(0, [tokens] + [0] * 15, 0, 512, "cuda")
        grouped_gemm_swiglu(x, weight, offsets, 10.0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = grouped_gemm_swiglu(x, weight, offsets, 10.0)
        for seed in range(1000):
            ids = torch.randint(0, 17, (tokens,), generator=strategies.generator(seed))
            if seed % 3 == 0:
                ids = ids % 3
            counts = torch.bincount(ids, minlength=17)[:16]
            offsets.copy_(torch.tensor([0, *counts.cumsum(0).tolist()]).int())
            x.copy_(strategies.normal(seed, x.shape, torch.bfloat16))
            out.fill_(math.nan)
            graph.replay()
            assert_bitwise(out, grouped_gemm_swiglu(x, weight, offsets, 10.0), f"routing {seed}")

    @pytest.mark.parametrize("tokens", [1, 6, 60, 500])
    def test_offsets_that_are_ready_in_a_graph(self, tokens):
        """Sort and both GEMMs; each replay finds another routing's offsets and rows there."""
        first, second = (
            weights_of(0, 16, 512, 512, "cuda", "rows"),
            weights_of(1, 16, 512, 256, "cuda"),
        )

        def run(x, ids, weights, offsets_ready):
            rows, row_weight, offsets, _ = moe_sort(x, ids, weights, 16)
            inner = grouped_gemm_swiglu(rows, first, offsets, 10.0, row_weight=row_weight)
            return grouped_gemm(inner, second, offsets, settled=offsets_ready)

        x = strategies.normal(0, (tokens, 512), torch.bfloat16).cuda()
        ids, weights = torch.zeros(tokens, 3).long().cuda(), torch.ones(tokens, 3).cuda()
        run(x, ids, weights, True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(x, ids, weights, True)
        for seed in range(300):
            generator = strategies.generator(seed)
            most = (16, 2, 17)[seed % 3]  # 16 is no expert
            ids.copy_(torch.randint(0, most, ids.shape, generator=generator))
            x.copy_(strategies.normal(seed, x.shape, torch.bfloat16))
            out.fill_(math.nan)
            graph.replay()
            assert_bitwise(out, run(x, ids, weights, False), f"routing {seed}")

    def test_a_row_has_the_same_bits_as_in_another_batch_of_that_size(self):
        weight = weights_of(0, 4, 256, 512, "cuda")
        x, offsets = sorted_rows(0, [5, 40, 0, 19], 0, 512, "cuda")
        got = grouped_gemm(x, weight, offsets)
        alone, bounds = x.clone(), torch.tensor([0, 0, 40, 40, 40]).int().cuda()
        alone[:40] = x[5:45]
        assert_bitwise(grouped_gemm(alone, weight, bounds)[:40], got[5:45], "rows of one expert")

    def test_one_expert_within_the_budget_of_the_dense_kernel(self):
        weight = weights_of(0, 3, 768, 512, "cuda")
        x, offsets = sorted_rows(0, [0, 300, 0], 0, 512, "cuda")
        got = grouped_gemm(x, weight, offsets, out_dtype=torch.float32)
        expected = gemm(x, weight[1], out_dtype=torch.float32)
        left, right = x.double(), dequantize(weight, torch.float64)[1]
        budget = gemm_budget(left, right, torch.float32)
        assert_within_budget(got, expected.double(), 2 * budget, "product")
