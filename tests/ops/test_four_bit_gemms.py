"""Triton's GEMMs with four-bit weights, requested by name: dense and grouped."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4 import dispatch
from dsv4.bench.checks.fused_judges import gemm_swiglu as swiglu_judge
from dsv4.bench.checks.fused_judges import grouped_gemm_swiglu as grouped_judge
from dsv4.bench.problem import Problem
from dsv4.device import pretend
from dsv4.ops.gemm import gemm
from dsv4.ops.gemm_swiglu import gemm_swiglu
from dsv4.ops.grouped_gemm import grouped_gemm
from dsv4.ops.grouped_gemm_swiglu import grouped_gemm_swiglu, grouped_gemm_swiglu_quantize
from dsv4.ops.quantize import dequantize, quantize
from dsv4.quant.formats import (
    FRAGMENTS,
    LINEAR,
    MXFP4,
    NVFP4,
    SWIZZLED,
    SWIZZLED_EXPERTS,
    QuantizedTensor,
)
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise, assert_within_budget, gemm_budget
from dsv4.triton import gemm_packed
from dsv4.triton import grouped_gemm as grouped_module
from dsv4.triton._lib import last_arrival
from dsv4.triton._lib.packed_plan import PackedPlan, Weight, dense_plan, grouped_plan
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
INTERPRETED_SHARE = 9  # one example in nine; every tiling and format has its own test
ACTIVATIONS = st.sampled_from(["bf16", "nvfp4", "fp8"])
DTYPES = st.sampled_from([torch.bfloat16, torch.float32])
SCALES = st.sampled_from(["one", "segments", "five segments", "rows"])
LIMITS = st.sampled_from([None, 0.5, 10.0])
# Tokens of every tile that a plan has, one of it and one more than it.
TOKENS = st.sampled_from([1, 8, 9, 16, 17, 33, 65, 129])
# A tiling of each kind: columns shared by warps or not, one row tile or several, split or not.
PLANS = [
    PackedPlan(1, 8, 2, 2, 3, 2, 2),
    PackedPlan(2, 16, 4, 4, 3, 4),
    PackedPlan(4, 8, 1, 4, 4, 4, blocks=2, prefetched=4),
    PackedPlan(4, 16, 1, 4, 1, 4, blocks=2, prefetched=2),
    PackedPlan(1, 8, 2, 2, 1, 4, blocks=2),
    PackedPlan(4, 32, 1, 4, 4, 2, 2),
    PackedPlan(8, 64, 1, 8, 3, 3, 2),
    PackedPlan(8, 128, 1, 4, 3, 4),
    PackedPlan(8, 256, 1, 8, 3, 1, 4),
    PackedPlan(8, 256, 1, 8, 3, 4),
]

# Of experts alone; with at most 3/4 of its tokens it multiplies no more.
OVERLAPPED = PackedPlan(4, 32, 1, 4, 3, 2, is_overlapped=True)


def quantized(values, *args, **options):
    """By the reference: the interpreter took a third of this module's time for the weights."""
    return quantize(values, *args, **options, backend="reference")


def weight_of(seed, shape, device, layout=FRAGMENTS, scales="one"):
    """A weight whose global scales are one, one per segment, or one per row."""
    values = strategies.normal(seed, shape)
    if layout == LINEAR:
        return quantized(values, MXFP4).to(device)
    weight = quantized(values, NVFP4, scaling="weight")
    rows = shape[-2]
    cuts = {
        "one": (),
        "segments": (16, rows - 16) if rows > 16 else (4, 12),
        "five segments": (1, 2, 3, 4, rows - 10),
        "rows": (),
    }[scales]
    count = len(cuts) or (rows if scales == "rows" else 1)
    drawn = torch.rand(*shape[:-2], count, generator=strategies.generator(seed)) + 0.5
    total = weight.global_scale * drawn
    return (
        dataclasses.replace(weight, global_scale=total, segments=cuts)
        .with_layout(layout)
        .to(device)
    )


def dense_layout(layout, device):
    """The layout, or one that kernels for dense weights take on this GPU."""
    swizzled_fits = device.type == "cpu" or torch.cuda.get_device_capability()[0] == 12
    return layout if layout != SWIZZLED or swizzled_fits else FRAGMENTS


def rows_of(seed, shape, device):
    return strategies.normal(seed, shape, torch.bfloat16).to(device)


def operand_of(x, activation, scale=None):
    """The activations as the GEMM multiplies them, in float64."""
    if activation == "nvfp4":
        scaling = "token" if scale is None else "static"
        x = dequantize(quantize(x, scaling=scaling, global_scale=scale), torch.float64)
    elif activation == "fp8" and len(x):
        x = dequantize(quantize(x, "fp8_token"), torch.float64)
    return x.double()


def check_judged(op, judge, args, **options):
    got = op(*args, **options, backend="triton")
    problem = Problem(op, args, options, judge, 0)
    verdict = judge(problem, (got,), problem.widened().run("reference"))
    assert verdict.match, verdict.message
    return got


class TestDense:
    @given(
        seed=strategies.seeds(),
        tokens=TOKENS,
        tiles=st.integers(1, 3),
        columns=st.sampled_from([1, 2, 3, 8]),
        layout=st.sampled_from([FRAGMENTS, SWIZZLED, LINEAR]),
        activation=ACTIVATIONS,
        scales=SCALES,
        dtype=DTYPES,
    )
    def test_product(self, device, seed, tokens, tiles, columns, layout, activation, scales, dtype):
        layout = dense_layout(layout, device)
        weight = weight_of(seed, (16 * tiles, 64 * columns), device, layout, scales)
        x = rows_of(seed + 1, (tokens, 64 * columns), device)
        got = gemm(x, weight, activation=activation, out_dtype=dtype, backend="triton")
        left, right = operand_of(x, activation), dequantize(weight, torch.float64)
        budget = gemm_budget(left, right, dtype)
        assert_within_budget(got, left @ right.T, budget, "product")

    @given(
        seed=strategies.seeds(),
        tokens=TOKENS,
        layout=st.sampled_from([FRAGMENTS, SWIZZLED, LINEAR]),
        scales=SCALES,
        limit=LIMITS,
        activation=ACTIVATIONS,
        dtype=DTYPES,
    )
    def test_swiglu(self, device, seed, tokens, layout, scales, limit, activation, dtype):
        weight = weight_of(seed, (48, 128), device, dense_layout(layout, device), scales)
        x = rows_of(seed + 1, (tokens, 128), device)
        how = {"activation": activation, "out_dtype": dtype}
        check_judged(gemm_swiglu, swiglu_judge, (x, weight, limit), **how)

    @given(
        seed=strategies.seeds(),
        tokens=st.integers(1, 20),
        groups=st.integers(2, 3),
        scales=SCALES,
        swizzled=st.booleans(),
    )
    def test_groups(self, device, seed, tokens, groups, scales, swizzled):
        rows = 128 if swizzled else 32
        layout = dense_layout(SWIZZLED, device) if swizzled else FRAGMENTS
        weight = weight_of(seed, (rows * groups, 128), device, layout, scales)
        x = rows_of(seed + 1, (tokens, groups, 128), device)
        got = gemm(x, weight, groups=groups, out_dtype=torch.float32, backend="triton")
        right = dequantize(weight, torch.float64).unflatten(0, (groups, -1))
        for g in range(groups):
            left = x[:, g].double()
            budget = gemm_budget(left, right[g], torch.float32)
            assert_within_budget(got[:, g], left @ right[g].T, budget, f"group {g}")

    @pytest.mark.parametrize("layout", [FRAGMENTS, SWIZZLED, LINEAR])
    @pytest.mark.parametrize("plan", PLANS, ids=repr)
    def test_every_tiling_is_exact(self, device, monkeypatch, plan, layout):
        """Every tiling gives the same bits, because sums of integers are exact in any order."""
        layout = dense_layout(layout, device)
        if layout != FRAGMENTS:
            plan = dataclasses.replace(plan, blocks=1, prefetched=0)
        monkeypatch.setattr(gemm_packed, "dense_plan", lambda *_: plan)
        weight = strategies.small_integers(plan.tokens, (80, 256)).to(device)
        fmt = MXFP4 if layout == LINEAR else NVFP4
        how = {"scaling": "static", "global_scale": torch.ones(1, device=device)}
        how = how if fmt == NVFP4 else {}
        packed = quantized(weight.clamp(-6, 6), fmt, **how).with_layout(layout)
        x = strategies.small_integers(1, (plan.tokens + 3, 256), torch.bfloat16).to(device)
        got = gemm(x, packed, out_dtype=torch.float32, backend="triton")
        expected = x.double() @ dequantize(packed, torch.float64).T
        assert_bitwise(got, expected.float(), "product")
        x[1, 5], x[2, 7] = math.inf, math.nan
        bad = gemm(x, packed, out_dtype=torch.float32, backend="triton")
        assert bool(bad[1:3].isnan().all())
        assert_bitwise(bad[3:], got[3:], "the other tokens")
        check_judged(gemm_swiglu, swiglu_judge, (x[3:] / 64, packed, 10.0))

    @pytest.mark.parametrize("plan", [PLANS[0], PLANS[3], PLANS[6]], ids=repr)
    def test_the_last_program_adds_as_a_second_launch_does(self, device, monkeypatch, plan):
        """Bit for bit, whatever the memory held in which programs count."""
        plan = dataclasses.replace(plan, length=4 // max(2, plan.splits) or 1, splits=0)
        plan = dataclasses.replace(plan, splits=-(-4 // plan.length), blocks=1)
        tokens, groups = plan.tokens + 3, 2
        weight = weight_of(1, (2 * 80, 256), device)
        x = rows_of(2, (tokens, groups, 256), device)
        x[1, 0, 5], x[2, 1, 7] = math.inf, math.nan
        made = []

        def words_of(count, device):
            made.append(torch.randint(-(2**62), 2**62, (count,), dtype=torch.int64, device=device))
            made[-1][::2] = last_arrival.NONE_ARRIVED
            return made[-1]

        def run(is_joined):
            own = dataclasses.replace(plan, is_joined=is_joined)
            monkeypatch.setattr(gemm_packed, "dense_plan", lambda *_: own)
            plain = gemm(x, weight, groups=groups, out_dtype=torch.float32, backend="triton")
            return plain, gemm_swiglu(x[:, 0], weight, 10.0, backend="triton")

        monkeypatch.setattr(gemm_packed, "words_of", words_of)
        expected = run(False)
        assert made == []
        monkeypatch.setattr(gemm_packed, "_packed_sum_kernel", None)
        for got, added in zip(run(True), expected, strict=True):
            assert_bitwise(got.nan_to_num(7.0), added.nan_to_num(7.0), "product")
            assert bool((got.isnan() == added.isnan()).all())
        assert all(bool((words == last_arrival.NONE_ARRIVED).all()) for words in made)
        tiles = -(-80 // (16 * plan.tiles)) * groups, -(-160 // (16 * plan.tiles))
        assert [len(words) for words in made] == [2 * number for number in tiles]

    @pytest.mark.gpu
    @pytest.mark.parametrize("tokens", [1, 16])
    def test_two_graphs_at_one_time_count_in_words_of_their_own(self, device, tokens):
        """As eager calls before them, in every replay; the plan is the GPU's own."""
        weight = weight_of(3, (4096, 4096), device)
        x = rows_of(4, (tokens, 4096), device)
        expected = gemm(x, weight, backend="triton")
        graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
        results = []
        for graph in graphs:
            with torch.cuda.graph(graph):
                results += [gemm(x, weight, backend="triton") for _ in range(8)]
        streams = [torch.cuda.Stream() for _ in graphs]
        torch.cuda.synchronize()
        for _ in range(100):
            for graph, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for result in results:
            assert_bitwise(result, expected, "product")

    @given(
        seed=strategies.seeds(),
        tokens=st.integers(2, 20),
        kind=st.sampled_from([math.nan, math.inf, -math.inf]),
        activation=ACTIVATIONS,
    )
    @example(seed=0, tokens=100, kind=math.inf, activation="bf16")
    def test_a_bad_token_is_alone(self, device, seed, tokens, kind, activation):
        weight = weight_of(seed, (48, 192), device)
        x = rows_of(seed, (tokens, 192), device)
        how = {"activation": activation, "backend": "triton"}
        clean = gemm(x, weight, **how), gemm_swiglu(x, weight, 10.0, **how)
        x[tokens // 2, seed % 192] = kind
        got = gemm(x, weight, **how), gemm_swiglu(x, weight, 10.0, **how)
        keep = torch.arange(tokens, device=device) != tokens // 2
        for first, other in zip(got, clean, strict=True):
            assert bool(first[tokens // 2].isnan().all())
            assert_bitwise(first[keep], other[keep], "the other tokens")

    def test_a_sum_that_passes_float32_stays_infinite(self, device):
        weight = weight_of(3, (32, 512), "cpu")
        weight = dataclasses.replace(weight, codes=weight.codes | 0x07)
        weight = dataclasses.replace(weight.with_layout(LINEAR), global_scale=torch.ones(1))
        positive = dataclasses.replace(weight, codes=weight.codes & 0x77)
        x = rows_of(4, (40, 512), "cpu")
        x[7] = 3e38
        got = gemm(
            x.to(device),
            positive.with_layout(FRAGMENTS).to(device),
            out_dtype=torch.float32,
            backend="triton",
        )
        assert bool(got[7].isinf().all())
        assert bool(got[:7].isfinite().all())

    @given(seed=strategies.seeds(), pad=st.integers(0, 5), shift=st.integers(0, 9))
    def test_strides_and_misaligned_rows(self, device, seed, pad, shift):
        weight = weight_of(seed, (32, 128), device)
        buffer = rows_of(seed, (5 * (128 + 8 * pad) + 16,), device)
        x = buffer[shift : shift + 5 * (128 + 8 * pad)].view(5, -1)[:, :128]
        expected = gemm(x.clone(), weight, backend="triton")
        assert_bitwise(gemm(x, weight, backend="triton"), expected, "product")


def every_pair(fmt):
    """A weight of 256 rows: each code with each scale in a place of its own, in linear layout."""
    bytes_ = torch.arange(256)
    codes = torch.arange(64) % 16
    codes = (codes[0::2] | codes[1::2] << 4).to(torch.uint8).expand(256, 32).contiguous()
    if fmt == MXFP4:
        scales = bytes_.to(torch.uint8)[:, None].expand(256, 2).contiguous()
        return QuantizedTensor(codes, scales.view(torch.float8_e8m0fnu), None, MXFP4)
    scales = (bytes_ % 128).to(torch.uint8)[:, None].expand(256, 4).contiguous()
    return QuantizedTensor(codes, scales.view(torch.float8_e4m3fn), torch.ones(1), NVFP4)


class TestValues:
    @pytest.mark.parametrize("layout", [FRAGMENTS, SWIZZLED, LINEAR])
    def test_every_code_and_scale(self, device, layout):
        """The weight times the identity; a NaN scale gives NaN only in its own row."""
        weight = every_pair(MXFP4 if layout == LINEAR else NVFP4)
        expected = dequantize(weight, torch.float32, backend="reference")
        of_nan = expected.isnan().any(1)
        weight = weight.with_layout(layout).to(device)
        experts = dataclasses.replace(
            weight,
            codes=weight.codes[None],
            scales=weight.scales[None],
            global_scale=None if layout == LINEAR else torch.ones(1, 1, device=device),
        )
        x = torch.eye(64, dtype=torch.bfloat16, device=device)
        offsets = torch.tensor([0, 64], dtype=torch.int32, device=device)
        got = grouped_gemm(x, experts, offsets, out_dtype=torch.float32, backend="triton").T.cpu()
        # An infinite weight times a zero of the identity is NaN; those rows are looked at below.
        finite = expected.isfinite().all(1)
        assert_bitwise(got[finite] + 0.0, expected[finite] + 0.0, "weights")
        assert bool(got[of_nan].isnan().all())
        assert bool((of_nan.sum() > 0) & (finite.sum() >= 250 - of_nan.sum()))


class TestExperts:
    @given(
        seed=strategies.seeds(),
        counts=loads(4, 60),
        spare=st.integers(0, 3),
        tiles=st.integers(1, 3),
        columns=st.integers(1, 2),
        layout=st.sampled_from([FRAGMENTS, SWIZZLED, LINEAR]),
        activation=ACTIVATIONS,
        scales=SCALES,
        dtype=DTYPES,
        static=st.booleans(),
    )
    def test_product(
        self,
        device,
        seed,
        counts,
        spare,
        tiles,
        columns,
        layout,
        activation,
        scales,
        dtype,
        static,
    ):
        weight = weight_of(seed, (4, 16 * tiles, 128 * columns), device, layout, scales)
        x, offsets = sorted_rows(seed + 1, counts, spare, 128 * columns, device)
        scale = None
        if static and activation == "nvfp4":
            scale = torch.tensor([0.001, 0.002, 0.004, 0.01], device=device)
        how = {"activation": activation, "input_scale": scale, "out_dtype": dtype}
        got = grouped_gemm(x, weight, offsets, **how, backend="triton")
        dense, start = dequantize(weight, torch.float64), 0
        for expert, end in enumerate(offsets.tolist()[1:]):
            own = None if scale is None else scale[expert]
            left, right = operand_of(x[start:end], activation, own), dense[expert]
            budget = gemm_budget(left, right, dtype)
            assert_within_budget(got[start:end], left @ right.T, budget, f"expert {expert}")
            start = end
        assert_zeros_from(got, start)
        out = torch.full_like(got, math.nan)
        assert grouped_gemm(x, weight, offsets, **how, out=out, backend="triton") is out
        assert_bitwise(out, got, "in a given place")

    @given(
        seed=strategies.seeds(),
        counts=loads(4, 60),
        spare=st.integers(0, 3),
        layout=st.sampled_from([FRAGMENTS, LINEAR]),
        scales=SCALES,
        limit=LIMITS,
        activation=ACTIVATIONS,
        weighted=st.booleans(),
        dtype=DTYPES,
    )
    def test_swiglu(
        self, device, seed, counts, spare, layout, scales, limit, activation, weighted, dtype
    ):
        weight = weight_of(seed, (4, 48, 128), device, layout, scales)
        x, offsets = sorted_rows(seed + 1, counts, spare, 128, device)
        row_weight = row_weights(seed + 2, x, weighted)
        how = {"activation": activation, "row_weight": row_weight, "out_dtype": dtype}
        args = (x, weight, offsets, limit)
        got = check_judged(grouped_gemm_swiglu, grouped_judge, args, **how)
        assert_zeros_from(got, int(offsets[-1]))

    @given(
        seed=strategies.seeds(),
        counts=loads(3, 30),
        spare=st.integers(0, 3),
        swizzled=st.booleans(),
        weighted=st.booleans(),
    )
    def test_codes(self, device, seed, counts, spare, swizzled, weighted):
        weight = weight_of(seed, (3, 128, 64), device, FRAGMENTS, "rows")
        x, offsets = sorted_rows(seed + 1, counts, spare, 64, device)
        row_weight = row_weights(seed + 2, x, weighted)
        scale = scales_of(seed, 3, device)
        layout = SWIZZLED_EXPERTS if swizzled else LINEAR
        how = {"row_weight": row_weight, "backend": "triton"}
        got = grouped_gemm_swiglu_quantize(
            x, weight, offsets, 10.0, scale, scale_layout=layout, **how
        )
        inner = grouped_gemm_swiglu(x, weight, offsets, 10.0, **how)
        own = of_rows_or_one(scale, offsets, x.shape[0])
        expected = quantize(inner, scaling="static", global_scale=own, backend="reference")
        end = int(offsets[-1])
        assert_bitwise(got.codes, expected.codes, "codes")
        assert_bitwise(got.global_scale, own, "scales of rows")
        if not swizzled:
            bits = [q.scales.view(torch.uint8) for q in (got, expected)]
            assert_bitwise(*bits, "block scales")
            assert not got.scales[end:].float().any()

    @given(seed=strategies.seeds(), kind=st.sampled_from([math.nan, math.inf, -math.inf]))
    def test_a_bad_row_is_alone(self, device, seed, kind):
        weight = weight_of(seed, (3, 48, 128), device)
        x, offsets = sorted_rows(seed, [3, 0, 4], 0, 128, device)

        def both():
            args = (x, weight, offsets)
            return (
                grouped_gemm(*args, backend="triton"),
                grouped_gemm_swiglu(*args, 10.0, backend="triton"),
            )

        clean = both()
        x[3, seed % 128] = kind
        keep = torch.arange(7, device=device) != 3
        for first, other in zip(both(), clean, strict=True):
            assert bool(first[3].isnan().all())
            assert_bitwise(first[keep], other[keep], "the other rows")

    @pytest.mark.parametrize("plan", [*PLANS, OVERLAPPED], ids=repr)
    def test_every_tiling_is_exact(self, device, monkeypatch, plan):
        """Integers; experts of one row, of none, and of one more than a tile; many of no expert."""
        whole = dataclasses.replace(plan, length=4, splits=1)
        monkeypatch.setattr(grouped_module, "grouped_plan", lambda *_: whole)
        values = strategies.small_integers(plan.tokens, (4, 80, 256)).to(device).clamp(-6, 6)
        how = {"scaling": "static", "global_scale": torch.ones(1, device=device)}
        weight = quantized(values, NVFP4, **how).with_layout(FRAGMENTS)
        weight = dataclasses.replace(weight, global_scale=torch.ones(4, 1, device=device))
        counts = [1, 0, plan.tokens + 1, 3]
        x = strategies.small_integers(1, (sum(counts) + plan.tokens + 2, 256), torch.bfloat16)
        x = x.to(device)
        offsets = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(device)
        got = grouped_gemm(x, weight, offsets, out_dtype=torch.float32, backend="triton")
        expert = torch.repeat_interleave(torch.arange(4), torch.tensor(counts)).to(device)
        dense, end = dequantize(weight, torch.float64), sum(counts)
        expected = torch.einsum("rk,rnk->rn", x[:end].double(), dense[expert])
        assert_bitwise(got[:end], expected.float(), "product")
        assert not got[end:].any()

    def test_an_overlapped_tile_has_the_bits_of_the_other(self, device, monkeypatch):
        """With as many rows as fill it, or its groups, and one more; with bad rows.

        Of integers, because the interpreter's sums depend on the number of tokens.
        """
        counts = [23, 24, 0, 25, 56]
        weight = weight_of(1, (len(counts), 48, 128), device, scales="segments")
        x, offsets = sorted_rows(2, counts, 34, 128, device)
        x = strategies.small_integers(3, x.shape, torch.bfloat16).to(device)
        bad = [30, 48, sum(counts) - 1]
        x[bad[0], 5], x[bad[1], 127], x[bad[2], 64] = math.inf, math.nan, -math.inf
        weights = row_weights(3, x, True)

        def both(is_overlapped):
            plan = dataclasses.replace(OVERLAPPED, is_overlapped=is_overlapped)
            monkeypatch.setattr(grouped_module, "grouped_plan", lambda *_: plan)
            how = {"out_dtype": torch.float32, "backend": "triton"}
            plain = grouped_gemm(x, weight, offsets, **how)
            return plain, grouped_gemm_swiglu(x, weight, offsets, 10.0, row_weight=weights, **how)

        for got, expected in zip(both(True), both(False), strict=True):
            assert got.isnan().all(1).nonzero().flatten().tolist() == bad
            assert_bitwise(got.nan_to_num(7.0), expected.nan_to_num(7.0), "product")
            assert bool((got.isnan() == expected.isnan()).all())
            assert_zeros_from(got, sum(counts))

    @pytest.mark.gpu
    @pytest.mark.parametrize("most", [80, 230])
    def test_overlapped_tiles_of_256_experts(self, most, monkeypatch):
        """The plan of Hopper, and its bits in the tiles of other GPUs; also replays of a graph."""
        generator = strategies.generator(0)
        counts = torch.randint(0, most, (256,), generator=generator)
        borders = [0, 1, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129, 224]
        counts[: len(borders)] = torch.tensor(borders)
        rows = int(counts.sum()) + 200
        weight = weight_of(1, (256, 272, 512), "cuda")
        x, offsets = sorted_rows(2, counts.tolist(), 200, 512, torch.device("cuda"))
        bad = [150, rows // 2, rows - 300]
        x[bad[0], 5], x[bad[1], 511], x[bad[2], 64] = math.inf, math.nan, -math.inf
        sizes = Weight(272, 512, is_fragments=True)
        overlapped = grouped_plan(sizes, rows, 256, 132, has_wgmma=True)
        assert overlapped.is_overlapped
        other = grouped_plan(sizes, rows, 256, 132, has_wgmma=False)
        assert (other.tokens, other.is_overlapped) == (overlapped.tokens, False)

        def both(plan):
            monkeypatch.setattr(grouped_module, "grouped_plan", lambda *_: plan)
            plain = grouped_gemm(x, weight, offsets, backend="triton")
            return plain, grouped_gemm_swiglu(x, weight, offsets, 10.0, backend="triton")

        expected = [result.nan_to_num(7.0) for result in both(other)]
        results = both(overlapped)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = both(overlapped)
        for _ in range(20):
            for got in captured:
                got.zero_()
            graph.replay()
            for got, want in zip(captured, expected, strict=True):
                assert got.isnan().all(1).nonzero().flatten().tolist() == bad
                assert_bitwise(got.nan_to_num(7.0), want, "product")
                assert_zeros_from(got, int(counts.sum()))
        for got, want in zip(results, expected, strict=True):
            assert_bitwise(got.nan_to_num(7.0), want, "product")

    def test_no_rows(self, device):
        weight = weight_of(0, (3, 32, 128), device)
        for rows in (0, 5):
            x, offsets = sorted_rows(0, [0, 0, 0], rows, 128, device)
            got = grouped_gemm(x, weight, offsets, backend="triton")
            assert_bitwise(got, x.new_zeros(rows, 32), "rows of no expert")
            got = grouped_gemm_swiglu(x, weight, offsets, 10.0, backend="triton")
            assert_bitwise(got, x.new_zeros(rows, 16), "rows of no expert")

    @pytest.mark.gpu
    @pytest.mark.parametrize("rows", [6, 48, 400])
    def test_1000_replays_of_a_graph(self, rows):
        """Both GEMMs of experts, captured; offsets may change between replays."""
        first, last = (
            weight_of(i, size, "cuda") for i, size in enumerate(((8, 256, 512), (8, 512, 128)))
        )
        x = rows_of(2, (rows, 512), "cuda")
        starts = [torch.arange(9) * rows // 8, torch.tensor([0] * 4 + [rows] * 5)]
        tables = [start.to(torch.int32).cuda() for start in starts]
        offsets = tables[0].clone()

        def run():
            inner = grouped_gemm_swiglu(x, first, offsets, 10.0, backend="triton")
            return grouped_gemm(inner, last, offsets, backend="triton")

        expected = []
        for table in tables:
            offsets.copy_(table)
            expected.append(run().clone())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for replay in range(1000):
            offsets.copy_(tables[replay % 2])
            out.fill_(math.nan)
            graph.replay()
            want = expected[replay % 2].view(torch.int16)
            wrong += (out.view(torch.int16) != want).sum()
        assert int(wrong) == 0


class TestPlans:
    @given(
        tiles=st.integers(1, 2048),
        k_tiles=st.integers(1, 300),
        tokens=st.integers(1, 9000),
        groups=st.sampled_from([1, 2, 8]),
        sms=st.sampled_from([1, 48, 108, 132, 188]),
        has_wgmma=st.booleans(),
        is_fragments=st.booleans(),
    )
    def test_programs_cover_the_columns_once(
        self, tiles, k_tiles, tokens, groups, sms, has_wgmma, is_fragments
    ):
        weight = Weight(16 * tiles, 64 * k_tiles, is_fragments)
        plans = [dense_plan(weight, tokens, groups, sms, has_wgmma)]
        plans += [grouped_plan(weight, tokens, 64, sms, has_wgmma)]
        for plan in plans:
            assert (plan.splits - 1) * plan.length < k_tiles <= plan.splits * plan.length
            assert plan.parts in (1, plan.warps)
            # An iteration never passes the end of a program's columns.
            assert (
                k_tiles % (plan.parts * plan.blocks)
                == plan.length % (plan.parts * plan.blocks)
                == 0
            )
            assert is_fragments or plan.blocks == 1
            iteration = plan.parts * plan.blocks
            assert plan.splits == 1 or plan.blocks == 1 or plan.length >= 2 * iteration
            assert plan.prefetched in (0, 1, 2, 4, 8, 16)
            assert not has_wgmma or plan.parts > 1 or plan.warps in (1, 4, 8)
            # Codes, scales as four lanes have them, and x, in stages of a pipeline.
            stage = (768 * plan.tiles + 128 * plan.tokens) * plan.parts * plan.blocks
            most = 227 if plan.tokens == 256 else 99
            assert stage * plan.stages <= most * 1024
        assert plans[1].splits == 1
        assert not plans[1].is_overlapped or (has_wgmma and is_fragments)

    @pytest.mark.parametrize(
        ("rows", "is_overlapped", "tokens"),
        [
            (24, False, 32),
            (25, True, 64),
            (60, True, 64),
            (61, True, 128),
            (1023, True, 128),
            (1024, False, 256),
        ],
    )
    def test_many_rows_of_each_expert_overlap_on_hopper(self, rows, is_overlapped, tokens):
        """Two programs fit an SM: its 228 KB hold what both take and 1 KB for each."""
        weight = Weight(4096, 4096, is_fragments=True)
        plan = grouped_plan(weight, 256 * rows, 256, 132, has_wgmma=True)
        assert (plan.is_overlapped, plan.tokens) == (is_overlapped, tokens)
        shared = (768 * plan.tiles + 128 * plan.tokens) * plan.stages
        assert not is_overlapped or 2 * (shared + 1024) <= 228 * 1024
        for other in (Weight(4096, 4096, is_fragments=False), weight):
            has_wgmma = not other.is_fragments
            assert not grouped_plan(other, 256 * rows, 256, 132, has_wgmma).is_overlapped


class TestDispatch:
    CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1))

    @pytest.mark.parametrize("capability", CAPABILITIES)
    @pytest.mark.parametrize("layout", [FRAGMENTS, SWIZZLED, LINEAR])
    def test_no_routed_expert_runs_on_the_reference(self, capability, layout):
        weight = weight_of(0, (4, 128, 128), "cpu", layout)
        x, offsets = torch.ones(6, 128, dtype=torch.bfloat16), torch.zeros(5, dtype=torch.int32)
        scale = torch.ones(4)
        calls = [
            dispatch.arguments(grouped_gemm, x, weight, offsets),
            dispatch.arguments(grouped_gemm_swiglu, x, weight, offsets, 10.0),
            dispatch.arguments(grouped_gemm_swiglu_quantize, x, weight, offsets, 10.0, scale),
        ]
        with pretend(capability=capability, packages=True):
            for call in calls:
                call = call._replace(device=torch.device("cuda", 0))
                rows = dispatch.implementations(call.op)
                able = [row.name for row in rows if row.unsupported_reason(call, "auto") is None]
                assert "triton" in able, [row.unsupported_reason(call, "auto") for row in rows]
                assert able.index("triton") == len(able) - 2

    @pytest.mark.parametrize(
        ("capability", "tokens", "chosen"),
        [
            ((8, 0), 1, "triton"),
            ((12, 0), 512, "triton"),
            ((8, 9), 513, "cublas"),
            ((9, 0), 64, "triton"),
            ((10, 0), 65, "cublas"),
        ],
    )
    def test_many_tokens_are_left_to_cublas(self, capability, tokens, chosen):
        """The row comes after CuTeDSL's kernels."""
        weight = weight_of(0, (32, 128), "cpu")
        x = torch.ones(tokens, 128, dtype=torch.bfloat16)
        with pretend(capability=capability, packages=True):
            for op, args in ((gemm, (x, weight)), (gemm_swiglu, (x, weight, 10.0))):
                call = dispatch.arguments(op, *args)._replace(device=torch.device("cuda", 0))
                rows = [r for r in dispatch.implementations(call.op) if r.name != "cute"]
                able = [r.name for r in rows if r.unsupported_reason(call, "auto") is None]
                other = "parts" if op is gemm_swiglu else "cublas"
                assert able[0] == (chosen if chosen == "triton" else other)

    def test_what_is_unsupported_is_said(self):
        x = torch.ones(3, 128, dtype=torch.bfloat16)
        for weight, words in (
            (weight_of(0, (32, 128), "cpu").with_layout(LINEAR), "fragments_16x64"),
            (quantize(torch.ones(24, 128), MXFP4), "24 x 128"),
        ):
            reasons = dict(dispatch.explain(gemm, x, weight).candidates)
            assert reasons["triton"] is not None
            with pretend(capability=(8, 0), packages=True):
                call = dispatch.arguments(gemm, x, weight)._replace(device=torch.device("cuda", 0))
                row = next(r for r in dispatch.implementations("gemm") if r.name == "triton")
                reason = row.unsupported_reason(call)
            assert reason is not None
            assert words in reason
