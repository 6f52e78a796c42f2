"""Products with FP8 weights by Hopper's kernel."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4 import dispatch
from dsv4.cute import gemm_fp8
from dsv4.cute.sm90.gemm_fp8_wgmma_plan import BLOCK, candidates
from dsv4.cute.sm90.plans import GemmProblem
from dsv4.ops.gemm import gemm
from dsv4.ops.quantize import dequantize, quantize
from dsv4.quant.formats import FP8_BLOCK, QuantizedTensor
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise, assert_pure, assert_within_budget
from tests.ops.test_gemm_fp8 import SCALE_DTYPES, bfloat16, truth, weight_of

ROWS = st.integers(1, 40).map(lambda tiles: 16 * tiles)
COLUMNS = st.integers(1, 9).map(lambda blocks: BLOCK * blocks)


def product(x, weight, **options):
    return gemm(x, weight, backend="cute", **options)


def configurations():
    """Each tile and number of blocks once."""
    result = {}
    for tokens, folded in itertools.product((32, 64, 128, 256), (False, True)):
        for plan in candidates(GemmProblem(592, 896, 1, False, False), tokens, folded):
            key = (plan.token_block, plan.rows, plan.ctas, plan.folded, plan.ctas_per_sm)
            result.setdefault(key, plan)
    return list(result.values())


def assert_right(x, weight, got):
    """Check a result in bfloat16."""
    expected, budget = truth(x, weight)
    rounding = torch.finfo(torch.bfloat16).eps / 2 * (expected.abs() + budget) + 1e-30
    assert_within_budget(got, expected, budget + rounding, "product")


@pytest.mark.gpu
class TestValues:
    @pytest.mark.parametrize("plan", configurations(), ids=repr)
    def test_every_configuration(self, plan, monkeypatch):
        """Rows and tokens that end within a tile; a bad token and an infinite one alone."""
        monkeypatch.setattr(gemm_fp8, "fp8_plan", lambda *_: plan)
        # What was prepared for one configuration must not serve another.
        monkeypatch.setattr(gemm_fp8, "_prepared", gemm_fp8._prepared.__wrapped__)
        dtype = torch.float8_e8m0fnu if plan.folded else torch.float32
        weight = weight_of(0, 592, 896, "cuda", dtype)
        for tokens in (1, plan.token_block - 3, 2 * plan.token_block + 5):
            x = bfloat16(tokens, (tokens, 896), "cuda")
            got = product(x, weight)
            assert_right(x, weight, got)
            bad = x.clone()
            bad[tokens // 2, 5], bad[-1, 70] = float("nan"), float("inf")
            other = product(bad, weight)
            rows = torch.ones(tokens, dtype=torch.bool, device="cuda")
            rows[tokens // 2] = rows[-1] = False
            assert bool(other[~rows].isnan().all())
            assert_bitwise(other[rows], got[rows], "the other tokens")

    @given(
        seed=strategies.seeds(),
        tokens=st.integers(1, 700),
        rows=ROWS,
        columns=COLUMNS,
        dtype=SCALE_DTYPES,
        activation=st.sampled_from(["bf16", "nvfp4"]),
        pad=st.integers(0, 2),
    )
    @example(0, 2000, 1040, 1024, torch.float32, "nvfp4", 1)
    @example(0, 3000, 16384, 1024, torch.float32, "bf16", 0)
    def test_within_the_budget(self, seed, tokens, rows, columns, dtype, activation, pad):
        weight = weight_of(seed, rows, columns, "cuda", dtype)
        x = bfloat16(seed + 1, (tokens, columns + 8 * pad), "cuda")[:, :columns]
        expected, budget = truth(x, weight, activation)
        got = product(x, weight, activation=activation, out_dtype=torch.float32)
        assert_within_budget(got, expected, budget, "product")
        narrow = product(x, weight, activation=activation)
        assert_bitwise(narrow, got.to(torch.bfloat16), "product in bfloat16")

    @given(seed=strategies.seeds(), tokens=st.integers(1, 300), groups=st.integers(2, 4))
    def test_groups(self, seed, tokens, groups):
        weight = weight_of(seed, 384 * groups, 384, "cuda")
        x = bfloat16(seed, (tokens, groups, 384), "cuda")
        got = product(x, weight, groups=groups, out_dtype=torch.float32)
        assert got.shape == (tokens, groups, 384)
        for g in range(groups):
            codes, scales = weight.codes[384 * g :][:384], weight.scales[3 * g : 3 * g + 3]
            part = dataclasses.replace(weight, codes=codes, scales=scales)
            expected, budget = truth(x[:, g], part)
            assert_within_budget(got[:, g], expected, budget, f"group {g}")

    @given(
        seed=strategies.seeds(),
        tokens=st.integers(1, 200),
        dtype=SCALE_DTYPES,
        cancel=st.booleans(),
    )
    def test_exact_where_everything_is_dyadic(self, seed, tokens, dtype, cancel):
        """Every partial sum is exact in float32, in any order; with ``cancel`` most are 0."""
        made = strategies.generator(seed)
        codes = torch.randint(-8, 9, (208, 384), generator=made).float()
        scales = torch.exp2(torch.randint(-3, 4, (2, 3), generator=made).float())
        x = strategies.small_integers(seed, (tokens, 384), torch.bfloat16)
        if cancel:
            codes[:, 1::2], x[:, 1::2] = -codes[:, ::2], x[:, ::2]
            x[:, 7] += 1
        converted = scales if dtype == torch.float32 else scales.to(dtype)
        weight = QuantizedTensor(codes.to(torch.float8_e4m3fn), converted, None, FP8_BLOCK).to(
            "cuda"
        )
        x = x.to("cuda")
        expected = (x.double() @ dequantize(weight, torch.float64).T).float()
        assert_bitwise(product(x, weight, out_dtype=torch.float32), expected, "product")

    def test_every_code(self):
        """All 254 numbers of E4M3, subnormal ones and both zeros included, and both NaN."""
        codes = torch.zeros(256, BLOCK, dtype=torch.uint8)
        x = torch.zeros(BLOCK, BLOCK, dtype=torch.bfloat16, device="cuda").fill_diagonal_(1.0)
        for column in range(BLOCK):
            codes[:, column] = torch.arange(256) + column
        for bad in (False, True):
            modified = codes.clone()
            if not bad:
                modified[(modified & 127) == 127] = 0
            floats = modified.view(torch.float8_e4m3fn)
            weight = QuantizedTensor(floats, torch.ones(2, 1), None, FP8_BLOCK).to("cuda")
            got, expected = product(x, weight), floats.float().T.to("cuda")
            if bad:  # each row has one, and a NaN times 0 is one
                assert bool(got.isnan().all())
            else:
                assert bool(got.float().eq(expected).all())

    @pytest.mark.parametrize("byte", [0, 1, 7, 120, 220, 229])
    def test_extreme_powers_of_two(self, byte):
        weight = weight_of(3, 144, 256, "cpu", torch.float8_e8m0fnu)
        scales = torch.full((2, 2), byte, dtype=torch.uint8)
        scales[1, 1] = 127
        weight = dataclasses.replace(weight, scales=scales.view(torch.float8_e8m0fnu)).to("cuda")
        x = bfloat16(4, (65, 256), "cuda")
        expected, budget = truth(x, weight)
        assert_within_budget(
            product(x, weight, out_dtype=torch.float32), expected, budget, "product"
        )

    @given(
        seed=strategies.seeds(),
        tokens=st.integers(1, 300),
        low=st.integers(0, 12),
        high=st.integers(100, 250),
    )
    @example(0, 70, 0, 250)
    def test_powers_of_two_that_do_not_fit_bfloat16(self, seed, tokens, low, high):
        """Such values stand beside ordinary ones, in any order: the sums are shifted, and back."""
        weight = weight_of(seed, 144, 1152, "cpu", torch.float8_e8m0fnu)
        made = strategies.generator(seed)
        exponents = torch.tensor([low, high, 127, low + 9, high - 4])
        scales = exponents[torch.randint(0, 5, (2, 9), generator=made)].to(torch.uint8)
        weight = dataclasses.replace(weight, scales=scales.view(torch.float8_e8m0fnu)).to("cuda")
        # Large scales meet small inputs, or the sums would be infinite.
        large = torch.exp2((127.0 - scales.amax(0).float()).clamp(max=100)).repeat_interleave(BLOCK)
        x = (bfloat16(seed, (tokens, 1152), "cpu") * large).to(torch.bfloat16).to("cuda")
        expected, budget = truth(x, weight)
        got = product(x, weight, out_dtype=torch.float32)
        assert_within_budget(got, expected, budget, "product")

    @pytest.mark.parametrize("value", [2.0**-126, 3e-30, 0.3, 3e30, 0.0])
    def test_extreme_float_scales(self, value):
        weight = weight_of(3, 144, 256, "cuda")
        scales = weight.scales.clone()
        scales[0, 1] = value
        weight = dataclasses.replace(weight, scales=scales)
        x = bfloat16(4, (65, 256), "cuda")
        expected, budget = truth(x, weight)
        assert_within_budget(
            product(x, weight, out_dtype=torch.float32), expected, budget, "product"
        )

    @given(seed=strategies.seeds(), pad=st.integers(0, 5), shift=st.integers(0, 9))
    def test_strides_and_misaligned_rows(self, seed, pad, shift):
        """Rows of codes apart from one another, too."""
        weight = weight_of(seed, 48, 128, "cuda")
        buffer = bfloat16(seed, (50 * (128 + pad) + 16,), "cuda")
        x = buffer[shift : shift + 50 * (128 + pad)].view(50, -1)[:, :128]
        wide = torch.full((48, 128 + 16 * pad), 0x7F, dtype=torch.uint8, device="cuda")
        wide[:, :128] = weight.codes.view(torch.uint8)
        separate = dataclasses.replace(weight, codes=wide.view(torch.float8_e4m3fn)[:, :128])
        expected = product(x.clone(), weight)
        assert_right(x, weight, expected)
        for left, right in ((x, weight), (x.t().contiguous().t(), weight), (x, separate)):
            assert_bitwise(product(left, right), expected, "product")


@pytest.mark.gpu
class TestIndependence:
    @given(
        seed=strategies.seeds(),
        tokens=st.integers(2, 200),
        kind=st.sampled_from([float("nan"), float("inf"), float("-inf")]),
        activation=st.sampled_from(["bf16", "nvfp4"]),
    )
    def test_a_bad_token_is_alone(self, seed, tokens, kind, activation):
        weight = weight_of(seed, 80, 384, "cuda")
        weight.codes.view(torch.uint8)[:, 10] = 0  # an infinity times a zero, and times others
        x = bfloat16(seed, (tokens, 384), "cuda")
        clean = product(x, weight, activation=activation)
        x[tokens // 2, seed % 384] = kind
        got = product(x, weight, activation=activation)
        assert bool(got[tokens // 2].isnan().all())
        keep = torch.arange(tokens, device="cuda") != tokens // 2
        assert_bitwise(got[keep], clean[keep], "the other tokens")

    def test_sums_beyond_float32_stay_infinite(self):
        """It is next to a token whose own value is infinite, and one that is finite throughout."""
        codes = torch.full((80, 256), 1.0).to(torch.float8_e4m3fn)
        weight = QuantizedTensor(codes, torch.ones(1, 2), None, FP8_BLOCK).to("cuda")
        x = bfloat16(1, (70, 256), "cuda")
        x[1], x[2, 200] = 3e38, float("inf")
        got = product(x, weight, out_dtype=torch.float32)
        assert bool(got[1].isposinf().all())
        assert bool(got[2].isnan().all())
        assert bool(got[3:].isfinite().all())

    @pytest.mark.parametrize("dtype", FP8_BLOCK.scale_dtypes)
    def test_a_nan_scale_is_in_its_rows(self, dtype):
        weight = weight_of(0, 304, 256, "cpu", dtype)
        if dtype == torch.float32:
            weight.scales[1, 0] = float("nan")
        else:
            weight.scales.view(torch.uint8)[1, 0] = 255
        got = product(bfloat16(1, (40, 256), "cuda"), weight.to("cuda"))
        assert bool(got[:, 128:256].isnan().all())
        assert int(got.isnan().sum()) == 40 * 128

    def test_a_nan_code_is_in_its_row(self):
        weight = weight_of(0, 304, 256, "cpu")
        weight.codes.view(torch.uint8)[77, 200] = 0xFF
        got = product(bfloat16(1, (40, 256), "cuda"), weight.to("cuda"))
        assert bool(got[:, 77].isnan().all())
        assert int(got.isnan().sum()) == 40

    @pytest.mark.parametrize("tokens", [64, 300])
    def test_same_bits_twice(self, tokens):
        weight, x = weight_of(0, 1536, 4096, "cuda"), bfloat16(0, (tokens, 4096), "cuda")
        first = product(x, weight)
        for _ in range(20):
            assert_bitwise(product(x, weight), first, "product")


@pytest.mark.gpu
class TestIntegration:
    @pytest.mark.parametrize("shape", [(0, 128), (0, 2, 128)])
    def test_no_tokens(self, shape):
        weight = weight_of(0, 256, 128, "cuda")
        got = product(bfloat16(0, shape, "cuda"), weight, groups=len(shape) - 1)
        assert got.shape == (*shape[:-1], 256 // (len(shape) - 1))

    def test_a_pure_operator(self):
        weight = weight_of(0, 48, 256, "cuda")
        call = dispatch.arguments(gemm, bfloat16(0, (70, 256), "cuda"), weight)
        assert_pure(torch.ops.dsv4.gemm, *call.args, "cute")

    @pytest.mark.parametrize("tokens", [40, 300])
    @pytest.mark.parametrize("groups", [1, 2])
    def test_a_captured_graph_takes_new_data(self, tokens, groups):
        """Inputs, codes and scales may change between replays."""
        first = weight_of(0, 256 * groups, 512, "cuda")
        shape = (tokens, groups, 512) if groups > 1 else (tokens, 512)
        x = bfloat16(0, shape, "cuda")
        product(x, first, groups=groups)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = product(x, first, groups=groups)
        for seed in range(1, 6):
            other = weight_of(seed, 256 * groups, 512, "cuda")
            x.copy_(bfloat16(seed, shape, "cuda"))
            first.codes.copy_(other.codes)
            first.scales.copy_(other.scales)
            out.fill_(torch.nan)
            graph.replay()
            assert_bitwise(out, product(x, other, groups=groups), "replay")

    def test_a_weight_that_was_just_made(self):
        """It waits for the kernel that quantises it."""
        x, w = bfloat16(0, (70, 1024), "cuda"), bfloat16(1, (4096, 1024), "cuda")
        expected = product(x, quantize(w, FP8_BLOCK))
        torch.cuda.synchronize()
        for _ in range(20):
            assert_bitwise(product(x, quantize(w.clone(), FP8_BLOCK)), expected, "product")

    def test_another_gpu_than_the_current_one(self):
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")
        weight, x = weight_of(0, 640, 512, "cpu"), bfloat16(0, (200, 512), "cpu")
        result = [product(x.to(d), weight.to(d)) for d in ("cuda:0", "cuda:1")]
        assert result[1].device.index == 1
        assert_bitwise(result[0].cpu(), result[1].cpu(), "product")

    def test_the_choice(self):
        weight = weight_of(0, 256, 256, "cuda")
        x = bfloat16(0, (300, 256), "cuda")
        assert dispatch.explain(gemm, x, weight).chosen == "cute"
        # The kernel for a small M where a table of measured plans says so.
        assert dispatch.explain(gemm, x[:1], weight).chosen in ("cute", "small_m")
        odd = dispatch.explain(gemm, x[:, :200], weight_of(0, 256, 200, "cuda"))
        assert odd.chosen == "triton"
        assert "wanted multiples of 16 x 128" in odd.reason


class TestDispatch:
    def test_the_kernel_says_why_not(self):
        x = bfloat16(0, (3, 128), "cpu")
        weight = weight_of(0, 32, 128, "cpu")
        with pytest.raises(NotImplementedError, match=r"run on a CUDA GPU|is not installed"):
            product(x, weight)
        with pytest.raises(NotImplementedError, match="wanted bfloat16"):
            product(x.float(), weight)
