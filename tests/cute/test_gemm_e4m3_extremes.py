"""GEMMs with FP8 arithmetic beside those in bfloat16, run to run, at extreme scales and codes.

On a CPU a model of Hopper's sums stands for the kernel (``tests._tools.hopper_fp8``), and the
reference implementation for the bfloat16 kernels. So the budgets follow from what is known of the
tensor cores, and on Hopper the same tests show that the kernels keep them.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.bench.checks.judge import sum_error
from dsv4.ops.gemm import gemm
from dsv4.ops.grouped_gemm import GroupedGemmArgs, grouped_gemm
from dsv4.ops.grouped_gemm_swiglu_fp8 import GroupedGemmSwigluFp8Args
from dsv4.ops.quantize import dequantize, quantize
from dsv4.quant.formats import (
    FP8_BLOCK,
    FP8_TOKEN,
    FRAGMENTS,
    LINEAR,
    NVFP4,
    QuantizedTensor,
    e8m0_from_bytes,
)
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise, assert_ulp, assert_within_budget, unit_roundoff
from tests._tools import hopper_fp8
from tests.cute.test_gemm_e4m3 import (
    BY_FP8,
    COUNTS,
    EXPERT_FORMS,
    K_BLOCK,
    Routed,
    assert_right,
    block_weight_of,
    chosen_form,
    product,
    quick,
    routed,
    weight_of,
)

WEIGHTS = pytest.mark.parametrize("weight_format", [NVFP4, FP8_BLOCK], ids=lambda f: f.name)
# Tokens, tiles of 16 rows and blocks of 128 columns.
SIZES = {
    "cpu": st.tuples(st.integers(1, 5), st.integers(1, 2), st.integers(1, 4)),
    "cuda": st.tuples(st.integers(1, 700), st.integers(1, 40), st.integers(1, 20)),
}
# Forms of a GEMM with NVFP4 weights; the model of its sums has one.
FORMS_OF = {"cpu": ("in the loop",), "cuda": ("in the loop", "converted")}


def by_fp8(x, weight, out_dtype, form="in the loop"):
    """The product by FP8 arithmetic; a form is that of NVFP4 weights."""
    if x.codes.device.type == "cpu":
        return hopper_fp8.gemm(x, weight).to(out_dtype)
    if weight.format == FP8_BLOCK:
        return gemm(x, weight, out_dtype=out_dtype, **BY_FP8)
    with chosen_form(form):
        return gemm(x, weight, out_dtype=out_dtype, **BY_FP8)


def by_bfloat16(x, weight, out_dtype):
    """The product of the same codes by the kernels of bfloat16."""
    backend = "reference" if x.codes.device.type == "cpu" else "cute"
    return gemm(x, weight, out_dtype=out_dtype, backend=backend)


def codes_of(x, weight):
    """FP8 codes in the order of a weight's columns."""
    return quantize(x, FP8_TOKEN, layout=LINEAR if weight.format == FP8_BLOCK else FRAGMENTS)


def weight_in(weight_format, seed, rows, columns):
    """A weight that FP8 arithmetic takes."""
    if weight_format == FP8_BLOCK:
        return quantize(strategies.normal(seed, (rows, columns)), FP8_BLOCK)
    return weight_of(seed, rows, columns)


def positive(weight):
    """The weight without its signs."""
    if weight.format == FP8_BLOCK:
        codes = (weight.codes.view(torch.uint8) & 0x7F).view(weight.codes.dtype)
        return dataclasses.replace(weight, codes=codes)
    bits = weight.with_layout(LINEAR)
    return dataclasses.replace(bits, codes=bits.codes & 0x77).with_layout(FRAGMENTS)


def dyadic(weight_format, seed, rows, columns):
    """A weight whose products with small integers have exact sums."""
    if weight_format == FP8_BLOCK:
        codes = strategies.small_integers(seed, (rows, columns)).to(torch.float8_e4m3fn)
        scales = torch.full((-(-rows // 128), columns // 128), 0.5)
        return QuantizedTensor(codes, scales, None, FP8_BLOCK)
    weight = weight_of(seed, rows, columns, low=0, high=0)
    return dataclasses.replace(weight, global_scale=torch.ones(1))


def truth(x, weight):
    """float64 product of the operands, and the sum of its magnitudes."""
    left, right = (dequantize(operand, torch.float64) for operand in (x, weight))
    return left @ right.T, left.abs() @ right.abs().T


class TestAgainstBfloat16:
    """The same codes by both kinds of arithmetic."""

    @WEIGHTS
    @quick
    @given(data=st.data(), seed=strategies.seeds())
    def test_sums_of_one_sign_are_one_step_of_bfloat16_apart(
        self, device, weight_format, data, seed
    ):
        tokens, tiles, stages = data.draw(SIZES[device.type])
        weight = positive(weight_in(weight_format, seed, 16 * tiles, K_BLOCK * stages))
        weight = weight.to(device)
        x = strategies.normal(seed + 1, (tokens, weight.columns), torch.bfloat16).abs()
        x = codes_of(x.to(device), weight)
        other = by_bfloat16(x, weight, torch.bfloat16)
        assert_ulp(by_fp8(x, weight, torch.bfloat16), other, 1, "product")

    @WEIGHTS
    @quick
    @given(data=st.data(), seed=strategies.seeds())
    def test_float32_sums_differ_by_a_rounding_of_bfloat16(self, device, weight_format, data, seed):
        """Of the sum of magnitudes, because terms of both signs cancel."""
        tokens, tiles, stages = data.draw(SIZES[device.type])
        weight = weight_in(weight_format, seed, 16 * tiles, K_BLOCK * stages).to(device)
        x = strategies.normal(seed + 1, (tokens, weight.columns), torch.bfloat16)
        x = codes_of(x.to(device), weight)
        _, magnitude = truth(x, weight)
        unit = unit_roundoff(torch.bfloat16) + sum_error(weight.columns)
        other = by_bfloat16(x, weight, torch.float32)
        got = by_fp8(x, weight, torch.float32)
        assert_within_budget(got, other.double(), unit * magnitude + 1e-30, "product")

    @WEIGHTS
    @quick
    @given(data=st.data(), seed=strategies.seeds())
    def test_exact_sums_have_equal_bits(self, device, weight_format, data, seed):
        tokens, tiles, stages = data.draw(SIZES[device.type])
        weight = dyadic(weight_format, seed, 16 * tiles, K_BLOCK * stages).to(device)
        x = strategies.small_integers(seed + 1, (tokens, weight.columns), torch.bfloat16)
        x = codes_of(x.to(device), weight)
        for dtype in (torch.float32, torch.bfloat16):
            got, other = by_fp8(x, weight, dtype), by_bfloat16(x, weight, dtype)
            assert_bitwise(got + 0.0, other + 0.0, f"product in {dtype}")

    @pytest.mark.gpu
    @quick
    @given(seed=strategies.seeds(), counts=COUNTS, stages=st.integers(1, 9))
    @example(0, [300, 0, 1, 129], 16)
    def test_rows_of_experts_are_one_step_apart(self, seed, counts, stages):
        made = Routed(seed, counts, 256, K_BLOCK * stages)
        parts = [positive(weight) for weight in made.weights]
        codes, scales, global_scale, row_exponent = (
            torch.stack([getattr(part, name) for part in parts])
            for name in ("codes", "scales", "global_scale", "row_exponent")
        )
        weight = QuantizedTensor(
            *(codes, scales, global_scale, NVFP4, FRAGMENTS), row_exponent=row_exponent
        )
        x = quantize(made.x.abs(), FP8_TOKEN, layout=FRAGMENTS)
        got, other = (
            grouped_gemm(x, weight, made.offsets, backend=name) for name in ("fp8", "cute")
        )
        assert_ulp(got, other, 1, "product of experts")


@pytest.mark.gpu
class TestRuns:
    """The bits are those of the first run; other work of the GPU moves CTAs in time."""

    @pytest.mark.parametrize("tokens", [100, 3000])
    def test_fp8_weights(self, tokens):
        weight = block_weight_of(3, 4096, 2048, torch.float32)
        x = strategies.normal(4, (tokens, 2048), torch.bfloat16).to("cuda")
        first = product(x, weight, torch.float32)
        for _ in range(20):
            assert_bitwise(product(x, weight, torch.float32), first, "product")

    @pytest.mark.parametrize("form", EXPERT_FORMS)
    def test_experts(self, form):
        made = Routed(5, [700, 513, 0, 1, 256, 90], 1024, 1024)
        plain = GroupedGemmArgs(**made.fields(), out_dtype=torch.bfloat16, settled=False)
        fused = {"limit": 10.0, "row_weight": made.row_weight, "result_layout": FRAGMENTS}
        coded = GroupedGemmSwigluFp8Args(**made.fields(), **fused)
        first = routed(form, "grouped_gemm", plain)
        first_coded = routed(form, "grouped_gemm_swiglu_fp8", coded)
        for _ in range(20):
            assert_bitwise(routed(form, "grouped_gemm", plain), first, "product")
            again = routed(form, "grouped_gemm_swiglu_fp8", coded)
            for got, expected in zip(again, first_coded, strict=True):
                assert_bitwise(got.view(torch.uint8), expected.view(torch.uint8), "FP8 results")


class TestExtremes:
    @WEIGHTS
    def test_long_sums_of_one_sign(self, device, weight_format):
        tokens, rows = (3, 16) if device.type == "cpu" else (300, 272)
        weight = positive(weight_in(weight_format, 5, rows, 16384)).to(device)
        x = strategies.normal(6, (tokens, 16384), torch.bfloat16).abs().to(device)
        got = by_fp8(codes_of(x, weight), weight, torch.float32, "converted")
        assert_right(x, weight, got)

    @WEIGHTS
    @pytest.mark.parametrize("scale_byte", [105, 247])
    def test_the_quantisers_smallest_and_largest_scales(self, device, weight_format, scale_byte):
        """2^-22 of values that are nearly zero, and 2^120 of the largest in bfloat16."""
        weight = tiny_weight(weight_format, 7).to(device)
        x = one_per_block(weight.columns, 3.3e38 if scale_byte == 247 else 2.0**-30, device)
        codes = codes_of(x, weight)
        assert bool((codes.scales.view(torch.uint8) == scale_byte).all())
        got = by_fp8(codes, weight, torch.float32)
        # One product a block: nothing is dropped, and sums of 4 blocks are rounded to float32.
        expected, magnitude = truth(codes, weight)
        assert_within_budget(got, expected, 8 * 2.0**-24 * magnitude, "product")
        assert bool(got.isfinite().all())
        assert bool(got.any())

    @pytest.mark.parametrize(
        ("scale_byte", "code", "exponent"), [(1, 448.0, 40), (254, 2.0**-9, -40)]
    )
    def test_scales_at_the_ends_of_e8m0(self, device, scale_byte, code, exponent):
        """2^-126 and 2^127, which no quantiser makes, with codes at E4M3's ends."""
        weight = weight_of(7, 272, 512, low=0, high=0)
        global_scale = torch.full((1,), 2.0**exponent)
        weight = dataclasses.replace(weight, global_scale=global_scale).to(device)
        codes = one_per_block(512, code, device).to(torch.float8_e4m3fn)
        scales = torch.full((3, 4), scale_byte, dtype=torch.int32, device=device)
        x = QuantizedTensor(codes, e8m0_from_bytes(scales), None, FP8_TOKEN)
        x = x.with_layout(FRAGMENTS)
        expected, magnitude = truth(x, weight)
        for form in FORMS_OF[device.type]:
            got = by_fp8(x, weight, torch.float32, form)
            assert_within_budget(got, expected, 8 * 2.0**-24 * magnitude, "product")
            assert bool(got.any())

    @quick
    @given(seed=strategies.seeds(), low=st.sampled_from([0, -9]))
    def test_subnormal_codes_of_activations(self, device, seed, low):
        """All seven of them; every sum is exact, with subnormal codes of the weight, too."""
        weight = weight_of(seed, 16 if device.type == "cpu" else 272, 256, low=low, high=low)
        weight = dataclasses.replace(weight, global_scale=torch.ones(1)).to(device)
        x = strategies.small_integers(seed, (4, 256), limit=7) * 2.0**-31
        x[0, :7] = torch.arange(1, 8) * 2.0**-31
        codes = quantize(x.to(torch.bfloat16).to(device), FP8_TOKEN, layout=FRAGMENTS)
        there = set((codes.codes.view(torch.uint8) & 0x7F).unique().tolist())
        assert there == set(range(8))
        expected, _ = truth(codes, weight)
        for form in FORMS_OF[device.type]:
            got = by_fp8(codes, weight, torch.float32, form)
            assert_bitwise(got + 0.0, expected.float() + 0.0, "product")


def tiny_weight(weight_format, seed):
    """A weight of 272 x 512 whose products with the largest numbers of bfloat16 are finite."""
    if weight_format == FP8_BLOCK:
        weight = quantize(strategies.normal(seed, (272, 512)) * 2.0**-20, FP8_BLOCK)
        codes = weight.codes.float() * 2.0**-6
        return dataclasses.replace(weight, codes=codes.to(torch.float8_e4m3fn))
    return weight_of(seed, 272, 512, low=-9, high=-9)


def one_per_block(columns, value, device):
    """Three tokens with one number in each block of 128 columns, of changing sign."""
    x = torch.zeros(3, columns)
    for token in range(3):
        x[token, torch.arange(columns // 128) * 128 + 37 * token + 5] = value * (-1) ** token
    return x.to(torch.bfloat16).to(device)
