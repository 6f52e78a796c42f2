"""Products with FP8 weights, one scale per 128 x 128 block: the Triton kernel and the reference."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4 import device as machine
from dsv4 import dispatch
from dsv4.cute import supports
from dsv4.device import interpret_triton
from dsv4.ops.gemm import gemm
from dsv4.ops.quantize import dequantize, quantize
from dsv4.quant.formats import FP8_BLOCK, FRAGMENTS, NVFP4, QuantizedTensor
from dsv4.testing import strategies
from dsv4.testing.assertions import (
    assert_bitwise,
    assert_pure,
    assert_within_budget,
    gemm_budget,
)

KERNELS = ("triton",)
SCALE_DTYPES = st.sampled_from(FP8_BLOCK.scale_dtypes)
OUT_DTYPES = st.sampled_from([torch.bfloat16, torch.float32])
COLUMNS = st.integers(1, 300) | st.sampled_from([128, 256, 384])
PUBLISHED = [(1536, 4096, 1), (32768, 1024, 1), (1024, 4096, 8), (4096, 8192, 1), (4096, 2048, 1)]


@pytest.fixture(autouse=True)
def no_cute(monkeypatch):
    """The CuTeDSL kernels are other files'."""
    for check in ("_fp8_gemm", "_fp8_small_m_gemm"):
        monkeypatch.setattr(supports, check, lambda args, device: "another file's")


def weight_of(seed, rows, columns, device, dtype=torch.float32):
    """Normal values, every row with a magnitude of its own, so that the scales differ."""
    spread = torch.exp2(strategies.normal(seed + 7, (rows, 1)))
    weight = quantize(
        strategies.normal(seed, (rows, columns)) * spread, FP8_BLOCK, scale_dtype=dtype
    )
    return weight.to(device)


def bfloat16(seed, shape, device):
    return strategies.normal(seed, shape, torch.bfloat16).to(device)


def truth(x, weight, activation="bf16", input_scale=None):
    """float64 product of the operands, and the budget of float32 sums."""
    if activation == "nvfp4":
        scaling = "token" if input_scale is None else "static"
        x = dequantize(quantize(x, scaling=scaling, global_scale=input_scale), torch.float64)
    elif activation == "fp8":
        x = dequantize(quantize(x, "fp8_token"), torch.float64)
    left, right = x.double(), dequantize(weight, torch.float64)
    return left @ right.T, gemm_budget(left, right, torch.float32)


@st.composite
def planned(draw, columns):
    """Any tile and any split of the columns, chosen by the rule or not."""
    from dsv4.triton.gemm_fp8 import Plan

    blocks = -(-columns // 128)
    length = draw(st.integers(1, blocks))
    high, wide, warps = draw(st.sampled_from([(64, 16, 4), (64, 64, 4), (128, 128, 8)]))
    return Plan(high, wide, length, -(-blocks // length), warps, 2)


class TestValues:
    @given(
        seed=strategies.seeds(),
        tokens=st.integers(0, 40),
        rows=st.integers(1, 300),
        columns=COLUMNS,
        dtype=SCALE_DTYPES,
    )
    @example(seed=0, tokens=70, rows=130, columns=256, dtype=torch.float32)
    @example(seed=0, tokens=70, rows=129, columns=255, dtype=torch.float8_e8m0fnu)
    @example(seed=0, tokens=16, rows=64, columns=2048, dtype=torch.float32)
    def test_within_the_budget_of_the_dense_gemm(self, device, seed, tokens, rows, columns, dtype):
        weight = weight_of(seed, rows, columns, device, dtype)
        x = bfloat16(seed + 1, (tokens, columns), device)
        expected, budget = truth(x, weight)
        got = gemm(x, weight, out_dtype=torch.float32)
        assert got.shape == (tokens, rows)
        assert_within_budget(got, expected, budget, "product")
        assert_bitwise(gemm(x, weight), got.to(torch.bfloat16), "product in bfloat16")

    @given(
        seed=strategies.seeds(),
        tokens=st.integers(1, 20),
        blocks=st.integers(1, 20),
        static=st.booleans(),
    )
    def test_quantised_activations(self, device, seed, tokens, blocks, static):
        weight = weight_of(seed, 70, 16 * blocks, device)
        x = bfloat16(seed, (tokens, 16 * blocks), device)
        scale = torch.tensor([0.01], device=device) if static else None
        expected, budget = truth(x, weight, "nvfp4", scale)
        got = gemm(x, weight, activation="nvfp4", input_scale=scale, out_dtype=torch.float32)
        assert_within_budget(got, expected, budget, "product")

    @given(
        seed=strategies.seeds(),
        tokens=st.integers(1, 20),
        groups=st.integers(2, 4),
        rows=st.integers(1, 150),
        columns=COLUMNS,
        dtype=SCALE_DTYPES,
        out_dtype=OUT_DTYPES,
    )
    @example(1, 3, 2, 128, 256, torch.float32, torch.float32)
    def test_groups(self, device, seed, tokens, groups, rows, columns, dtype, out_dtype):
        """Groups may begin within a block of 128 rows, whose scales they share."""
        weight = weight_of(seed, rows * groups, columns, device, dtype)
        x = bfloat16(seed, (tokens, groups, columns), device)
        got = gemm(x, weight, groups=groups, out_dtype=torch.float32)
        assert got.shape == (tokens, groups, rows)
        dense = dequantize(weight, torch.float64).unflatten(0, (groups, rows))
        for g in range(groups):
            left, right = x[:, g].double(), dense[g]
            budget = gemm_budget(left, right, torch.float32)
            assert_within_budget(got[:, g], left @ right.T, budget, f"group {g}")
        narrow = gemm(x, weight, groups=groups, out_dtype=out_dtype)
        assert_bitwise(narrow, got.to(out_dtype), "product")

    @given(data=st.data(), seed=strategies.seeds(), tokens=st.integers(1, 20))
    def test_any_cut_of_the_work(self, device, monkeypatch, data, seed, tokens):
        """Configurations that the rule would not choose here: large tiles, columns of many CTAs."""
        kernel = pytest.importorskip("dsv4.triton.gemm_fp8")
        groups, rows = data.draw(st.sampled_from([(1, 150), (2, 70), (2, 128)]))
        columns = data.draw(st.integers(129, 900) | st.sampled_from([384, 896]))
        plan = data.draw(planned(columns))
        activation = data.draw(st.sampled_from(["bf16", "fp8", "nvfp4"][: 2 + (columns % 16 == 0)]))
        weight = weight_of(seed, groups * rows, columns, device)
        x = bfloat16(seed, (tokens, groups, columns), device)
        monkeypatch.setattr(kernel, "plan", lambda *sizes: plan)
        for g in range(groups):
            x[tokens // 2, g, seed % columns] = float("inf")
        input_rows = x if groups > 1 else x[:, 0]
        options = {"groups": groups, "activation": activation, "out_dtype": torch.float32}
        got = gemm(input_rows, weight, **options).reshape(tokens, groups, rows)
        assert bool(got[tokens // 2].isnan().all())
        keep = torch.arange(tokens, device=device) != tokens // 2
        if activation == "nvfp4":
            x = dequantize(quantize(x.flatten(0, 1), scaling="token"), torch.float64).view(x.shape)
        elif activation == "fp8":
            x = dequantize(quantize(x, "fp8_token"), torch.float64)
        left = x[keep].double()
        right = dequantize(weight, torch.float64).unflatten(0, (groups, rows))
        for g in range(groups):
            budget = gemm_budget(left[:, g], right[g], torch.float32)
            assert_within_budget(got[keep, g], left[:, g] @ right[g].T, budget, f"group {g}")

    @given(seed=strategies.seeds(), tokens=st.integers(1, 18), dtype=SCALE_DTYPES)
    def test_exact_where_everything_is_dyadic(self, device, seed, tokens, dtype):
        """Every partial sum is exact in float32, in any order: one scale off would be seen."""
        made = strategies.generator(seed)
        codes = torch.randint(-8, 9, (200, 320), generator=made).float().to(torch.float8_e4m3fn)
        scales = torch.exp2(torch.randint(-3, 4, (2, 3), generator=made).float())
        scales = scales if dtype == torch.float32 else scales.to(dtype)
        weight = QuantizedTensor(codes, scales, None, FP8_BLOCK).to(device)
        x = strategies.small_integers(seed, (tokens, 320), torch.bfloat16).to(device)
        expected = (x.double() @ dequantize(weight, torch.float64).T).float()
        assert_bitwise(gemm(x, weight, out_dtype=torch.float32), expected, "product")

    def test_every_code(self, device):
        """All 254 numbers of E4M3, subnormal ones and both zeros included, and both NaN."""
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
        weight = QuantizedTensor(codes, torch.ones(2, 1), None, FP8_BLOCK).to(device)
        got = gemm(torch.ones(1, 1, dtype=torch.bfloat16, device=device), weight)
        expected = codes.float().T.to(device)
        assert bool(got.isnan().eq(expected.isnan()).all())
        assert_bitwise(got.float().nan_to_num(0.0).abs(), expected.nan_to_num(0.0).abs(), "codes")
        assert bool(got.nan_to_num(0.0).float().eq(expected.nan_to_num(0.0)).all())

    @pytest.mark.parametrize("tokens", [1, 65])
    @pytest.mark.parametrize("byte", [0, 1, 7, 120, 220, 229])
    def test_extreme_powers_of_two(self, device, byte, tokens):
        weight = weight_of(3, 140, 256, "cpu", torch.float8_e8m0fnu)
        scales = torch.full((2, 2), byte, dtype=torch.uint8)
        scales[1, 1] = 127
        weight = dataclasses.replace(weight, scales=scales.view(torch.float8_e8m0fnu)).to(device)
        x = bfloat16(4, (tokens, 256), device)
        expected, budget = truth(x, weight)
        got = gemm(x, weight, out_dtype=torch.float32)
        assert_within_budget(got, expected, budget, "product")

    @pytest.mark.parametrize("value", [2.0**-126, 3e-30, 0.3, 3e30, 0.0])
    def test_extreme_float_scales(self, device, value):
        weight = weight_of(3, 140, 256, device)
        scales = weight.scales.clone()
        scales[0, 1] = value
        weight = dataclasses.replace(weight, scales=scales)
        x = bfloat16(4, (5, 256), device)
        expected, budget = truth(x, weight)
        assert_within_budget(gemm(x, weight, out_dtype=torch.float32), expected, budget, "product")

    @given(seed=strategies.seeds(), pad=st.integers(0, 5), shift=st.integers(0, 9))
    def test_strides_and_misaligned_rows(self, device, seed, pad, shift):
        weight = weight_of(seed, 40, 128, device)
        buffer = bfloat16(seed, (5 * (128 + pad) + 16,), device)
        x = buffer[shift : shift + 5 * (128 + pad)].view(5, -1)[:, :128]
        expected, budget = truth(x, weight)
        wide = torch.zeros(40, 128 + pad, device=device).to(torch.float8_e4m3fn)
        wide.view(torch.uint8)[:, :128] = weight.codes.view(torch.uint8)
        separate = dataclasses.replace(weight, codes=wide[:, :128])
        for left, right in ((x, weight), (x.t().contiguous().t(), weight), (x, separate)):
            got = gemm(left, right, out_dtype=torch.float32)
            assert_within_budget(got, expected, budget, "product")


class TestIndependence:
    @given(
        seed=strategies.seeds(),
        tokens=st.integers(2, 20),
        kind=st.sampled_from([float("nan"), float("inf"), float("-inf")]),
        activation=st.sampled_from(["bf16", "nvfp4", "fp8"]),
    )
    def test_a_bad_token_is_alone(self, device, seed, tokens, kind, activation):
        weight = weight_of(seed, 70, 272, device)
        weight.codes.view(torch.uint8)[:, 10] = 0  # an infinity times a zero, and times others
        x = bfloat16(seed, (tokens, 272), device)
        clean = gemm(x, weight, activation=activation)
        x[tokens // 2, seed % 272] = kind
        got = gemm(x, weight, activation=activation)
        assert bool(got[tokens // 2].isnan().all())
        keep = torch.arange(tokens, device=device) != tokens // 2
        assert_bitwise(got[keep], clean[keep], "the other tokens")

    def test_sums_beyond_float32_stay_infinite(self, device):
        """It is next to a token whose own value is infinite, and one that is finite throughout."""
        weight = weight_of(0, 70, 256, "cpu")
        codes = (weight.codes.view(torch.uint8) & 0x7F | 0x38).view(torch.float8_e4m3fn)
        codes = torch.where(codes.float().isnan(), 1.0, codes.float()).to(torch.float8_e4m3fn)
        weight = dataclasses.replace(weight, codes=codes).to(device)
        x = bfloat16(1, (4, 256), device)
        x[1], x[2, 200] = 3e38, float("inf")
        got = gemm(x, weight, out_dtype=torch.float32)
        assert bool(got[1].isposinf().all())
        assert bool(got[2].isnan().all())
        assert bool(got[[0, 3]].isfinite().all())

    @pytest.mark.parametrize("dtype", FP8_BLOCK.scale_dtypes)
    def test_a_nan_scale_is_in_its_rows(self, device, dtype):
        weight = weight_of(0, 300, 256, "cpu", dtype)
        if dtype == torch.float32:
            weight.scales[1, 0] = float("nan")
        else:
            weight.scales.view(torch.uint8)[1, 0] = 255
        got = gemm(bfloat16(1, (4, 256), device), weight.to(device))
        assert bool(got[:, 128:256].isnan().all())
        assert int(got.isnan().sum()) == 4 * 128

    @given(seed=strategies.seeds(), tokens=st.integers(1, 20))
    def test_same_bits_twice(self, device, seed, tokens):
        weight, x = weight_of(seed, 70, 400, device), bfloat16(seed, (tokens, 400), device)
        assert_bitwise(gemm(x, weight), gemm(x, weight), "product")

    @pytest.mark.gpu
    @pytest.mark.parametrize("tokens", [1, 40, 200])
    def test_same_bits_twice_where_programs_share_columns(self, tokens):
        weight, x = weight_of(0, 256, 7168, "cuda"), bfloat16(0, (tokens, 7168), "cuda")
        first = gemm(x, weight, backend="triton")
        for _ in range(20):
            assert_bitwise(gemm(x, weight, backend="triton"), first, "product")

    @pytest.mark.parametrize("shape", [(0, 128), (0, 2, 128), (3, 0, 128)])
    def test_no_tokens(self, device, shape):
        weight = weight_of(0, 32, 128, device)
        assert gemm(bfloat16(0, shape, device), weight).shape == (*shape[:-1], 32)


class TestPlan:
    @given(
        tokens=st.integers(1, 9000),
        rows=st.integers(1, 40000),
        columns=st.integers(1, 20000),
        groups=st.integers(1, 16),
    )
    def test_every_row_and_column_is_in_one_program(self, tokens, rows, columns, groups):
        kernel = pytest.importorskip("dsv4.triton.gemm_fp8")
        plan = kernel.plan(tokens, rows, columns, groups, 132)
        blocks = -(-columns // 128)
        assert (plan.splits - 1) * plan.length < blocks <= plan.splits * plan.length
        assert 128 % plan.rows == 0
        tiles = kernel.tiles_of_group(rows, groups, plan.rows)
        for g in {0, groups // 2, groups - 1}:
            begin = g * rows // plan.rows * plan.rows
            assert begin <= g * rows
            assert (g + 1) * rows <= begin + tiles * plan.rows

    @pytest.mark.parametrize(("rows", "columns", "groups"), PUBLISHED)
    @pytest.mark.parametrize("tokens", [1, 16, 64])
    def test_few_tokens_fill_the_gpu(self, rows, columns, groups, tokens):
        """The weight is read once."""
        kernel = pytest.importorskip("dsv4.triton.gemm_fp8")
        plan = kernel.plan(tokens, rows, columns, groups, 132)
        assert plan.tokens >= tokens
        assert kernel.tiles_of_group(rows, groups, plan.rows) * groups * plan.splits >= 120


class TestIntegration:
    @pytest.mark.parametrize("tokens", [1, 20])
    def test_a_pure_operator(self, device, tokens):
        weight = weight_of(0, 40, 200, device)
        call = dispatch.arguments(gemm, bfloat16(0, (tokens, 200), device), weight)
        assert_pure(torch.ops.dsv4.gemm, *call.args, "auto")
        # Without test_schema: it compares inputs by torch.allclose, which cannot take float8.
        checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        args = (*call.args, "auto")
        torch.library.opcheck(torch.ops.dsv4.gemm.default, args, test_utils=checks)

    def test_compiles_in_one_graph(self, device):
        weight, x = weight_of(0, 40, 200, device), bfloat16(0, (3, 200), device)
        compiled = torch.compile(lambda t: gemm(t, weight) + 1, fullgraph=True, backend="eager")
        assert_bitwise(compiled(x), gemm(x, weight) + 1, "compiled")

    @pytest.mark.gpu
    @pytest.mark.parametrize(
        ("tokens", "columns", "groups"), list(itertools.product([1, 40, 300], [512, 7168], [1, 2]))
    )
    def test_a_captured_graph_takes_new_data(self, tokens, columns, groups):
        """Inputs, codes and scales may change between replays."""
        first = weight_of(0, 160 * groups, columns, "cuda")
        shape = (tokens, groups, columns) if groups > 1 else (tokens, columns)
        x = bfloat16(0, shape, "cuda")
        gemm(x, first, groups=groups, backend="triton")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = gemm(x, first, groups=groups, backend="triton")
        for seed in range(1, 6):
            other = weight_of(seed, 160 * groups, columns, "cuda")
            x.copy_(bfloat16(seed, shape, "cuda"))
            first.codes.copy_(other.codes)
            first.scales.copy_(other.scales)
            out.fill_(torch.nan)
            graph.replay()
            assert_bitwise(out, gemm(x, other, groups=groups, backend="triton"), "replay")

    @pytest.mark.gpu
    def test_offsets_beyond_32_bits(self):
        """Rows of x, and of the result, whose elements have numbers past 2^31."""
        for rows, columns in ((64, 4096), (4096, 128)):
            weight = weight_of(0, rows, columns, "cuda")
            x = torch.zeros(2**31 // 4096 + 300, columns, dtype=torch.bfloat16, device="cuda")
            x[-200:] = bfloat16(1, (200, columns), "cuda")
            expected, budget = truth(x[-200:], weight)
            got = gemm(x, weight, backend="triton")[-200:]
            rounding = torch.finfo(torch.bfloat16).eps / 2 * (expected.abs() + budget)
            assert_within_budget(got, expected, budget + rounding, "product")


class TestDispatch:
    def test_the_kernel_says_why_not(self):
        weight, x = weight_of(0, 32, 128, "cpu"), bfloat16(0, (3, 128), "cpu")
        packed = quantize(strategies.normal(0, (32, 128)), NVFP4, scaling="weight")
        with pytest.raises(NotImplementedError, match=r"run on a CUDA GPU|is not installed"):
            gemm(x, weight, backend="triton")
        pytest.importorskip("triton")
        with interpret_triton():
            cases = (
                ((x, packed), "the weight has layout 'linear', wanted 'fragments_16x64'"),
                ((x.half(), packed.with_layout(FRAGMENTS)), "x is torch.float16"),
                ((x.half(), weight), "x is torch.float16, wanted bfloat16"),
                ((x.double(), weight), "float64, which only the reference"),
            )
            for args, words in cases:
                with pytest.raises(NotImplementedError, match=words):
                    gemm(*args, backend="triton")
            with pytest.raises(NotImplementedError, match=r"the result is torch\.float64"):
                gemm(x, weight, out_dtype=torch.float64, backend="triton")
            assert dispatch.explain(gemm, x, weight).chosen == "triton"
            assert dispatch.explain(gemm, x.float(), weight).chosen == "reference"

    @pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (12, 0)])
    def test_gpus_with_and_without_e4m3_have_a_kernel(self, capability):
        pytest.importorskip("triton")
        args = dispatch.arguments(gemm, bfloat16(0, (3, 128), "cpu"), weight_of(0, 32, 128, "cpu"))
        call = dispatch.Call("gemm", args.args, torch.device("cuda"))
        row = next(row for row in dispatch.implementations("gemm") if row.name == "triton")
        with machine.pretend(capability=capability):
            assert row.unsupported_reason(call) is None
