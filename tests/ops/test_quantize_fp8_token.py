"""FP8 by tokens: bitwise against ml_dtypes, and the kernels against the reference."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.dispatch import use_backend
from dsv4.ops.gemm import gemm
from dsv4.ops.quantize import dequantize, fp8_values, quantize
from dsv4.quant.formats import FP8_TOKEN, FRAGMENTS, LINEAR, QuantizedTensor
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise

KERNELS = ("triton",)


def expected_block(block):
    """Codes and scale byte of one block by numpy, with the exponent found by comparison."""
    finite = np.where(np.isfinite(block), np.abs(block), 0.0)
    amax = max(float(finite.max(initial=0.0)), float(np.float32(1e-4)))
    exponent = next(e for e in range(-40, 140) if 448 * 2.0**e >= amax)
    with np.errstate(invalid="ignore"):
        scaled = np.where(np.isfinite(block), block.astype(np.float64) / 2.0**exponent, np.nan)
    # Rounded to float32 first, as torch and ml_dtypes convert: scaling is exact in it.
    codes = scaled.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(scaled), 0x7F, codes), exponent + 127


def without_sign_of_nan(codes):
    codes = codes.view(torch.uint8).cpu()
    return torch.where((codes & 0x7F) == 0x7F, 0x7F, codes)


def by_reference(x, layout=LINEAR):
    with use_backend("reference"):
        return quantize(x, FP8_TOKEN, layout=layout)


def same(got, expected):
    assert_bitwise(without_sign_of_nan(got.codes), without_sign_of_nan(expected.codes), "code")
    assert_bitwise(got.scales.view(torch.uint8), expected.scales.view(torch.uint8), "scale")


class TestQuantiser:
    @given(
        draw=strategies.draws(-60, 60),
        rows=strategies.rows(20),
        columns=st.sampled_from([1, 100, 128, 130, 256, 384]),
        dtype=strategies.float_dtypes(),
    )
    @example(strategies.Draw(0, -149), 2, 128, torch.float32)
    @example(strategies.Draw(3, 0, "zero"), 9, 256, torch.bfloat16)
    def test_equals_ml_dtypes_bitwise(self, device, draw, rows, columns, dtype):
        x = draw.build((rows, columns), dtype, block=128)
        q = quantize(x.to(device), "fp8_token").validate()
        numbers = x.float().numpy()
        codes = np.empty((rows, columns), np.uint8)
        scales = np.empty((rows, -(-columns // 128)), np.uint8)
        for row in range(rows):
            for block in range(scales.shape[1]):
                part = slice(128 * block, 128 * block + 128)
                codes[row, part], scales[row, block] = expected_block(numbers[row, part])
        assert_bitwise(without_sign_of_nan(q.codes), torch.from_numpy(codes), "code")
        assert_bitwise(q.scales.view(torch.uint8).cpu(), torch.from_numpy(scales), "scale")

    @given(
        draw=strategies.draws(-30, 30),
        shape=st.sampled_from([(1, 1, 1), (2, 3, 130), (1, 19, 128), (7, 256)]),
        dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    )
    def test_kernels_equal_the_reference(self, device, draw, shape, dtype):
        x = draw.build(shape, dtype, device, block=128)
        got = quantize(x, FP8_TOKEN)
        same(got, by_reference(x))
        with use_backend("reference"):
            values = dequantize(got, torch.float32)
        assert_bitwise(dequantize(got, torch.float32), values, "value")
        assert_bitwise(torch.isnan(values), ~torch.isfinite(x), "where NaN")

    @pytest.mark.parametrize("exponent", [-22, -3, 0, 7, 119])
    def test_the_border_of_a_scale(self, device, exponent):
        """448 * 2^e is the largest maximum of scale 2^e; the next number has twice the scale."""
        border = torch.tensor([448.0 * 2.0**exponent])
        steps = torch.tensor([-1, 0, 1, 2], dtype=torch.int32)
        amax = (border.view(torch.int32) + steps).view(torch.float32)
        x = torch.zeros(4, 128)
        x[:, 5] = -amax
        got = quantize(x.to(device), FP8_TOKEN).scales.view(torch.uint8).flatten().tolist()
        assert got == [exponent + 127, exponent + 127, exponent + 128, exponent + 128]

    def test_small_blocks_have_the_scale_of_one_ten_thousandth(self, device):
        x = torch.tensor([[0.0] * 128, [1e-30] * 128, [1e-4] * 128, [-0.0] * 128])
        q = quantize(x.to(device), FP8_TOKEN)
        assert q.scales.view(torch.uint8).flatten().tolist() == [105] * 4  # 2^-22
        assert q.codes.view(torch.uint8)[:, 0].tolist() == [0, 0, 0x7D, 0x80]

    def test_a_bad_value_changes_no_other(self, device):
        x = strategies.normal(1, (4, 256))
        clean = quantize(x.to(device), FP8_TOKEN)
        x[1, 7], x[2, 200], x[3, 0] = torch.nan, torch.inf, -torch.inf
        spoiled = quantize(x.to(device), FP8_TOKEN)
        values, before = dequantize(spoiled).cpu(), dequantize(clean).cpu()
        good = torch.isfinite(x)
        assert_bitwise(torch.isnan(values), ~good, "where NaN")
        small = x.abs() < x.abs().amax()  # no maximum of a block was overwritten
        assert_bitwise(values[good & small], before[good & small], "value")

    @given(draw=strategies.finite_draws(-40, 40))
    def test_bfloat16_holds_every_value(self, device, draw):
        x = draw.build((3, 128), torch.bfloat16, device, block=128)
        if draw.special == "huge":
            return  # 2^128 is beyond both
        q = quantize(x, FP8_TOKEN)
        exact = dequantize(q, torch.float64)
        assert_bitwise(fp8_values(x).double(), exact, "value")
        assert_bitwise(dequantize(quantize(exact, FP8_TOKEN), torch.float64), exact, "value")

    @given(draw=strategies.draws(-9, 9), shape=st.sampled_from([(1, 128), (2, 3, 256), (19, 384)]))
    def test_columns_in_the_order_of_fragments(self, device, draw, shape):
        """Place 32 q + 16 u + 4 j + 2 e + 1 - k of 128 has column 64 u + 16 j + 8 k + 2 q + e."""
        x = draw.build(shape, torch.bfloat16, device, block=128)
        got, linear = (quantize(x, FP8_TOKEN, layout=way).validate() for way in (FRAGMENTS, LINEAR))
        same(got, by_reference(x, FRAGMENTS))
        same(got.with_layout(LINEAR), linear)
        same(linear.with_layout(FRAGMENTS), got)
        assert_bitwise(dequantize(got), dequantize(linear), "value")
        codes, moved = (q.codes.view(torch.uint8).flatten(0, -2) for q in (linear, got))
        for column in range(shape[-1]):
            block, c = divmod(column, 128)
            u, j, k, q, e = c // 64, c // 16 % 4, c // 8 % 2, c // 2 % 4, c % 2
            slot = 128 * block + 32 * q + 16 * u + 4 * j + 2 * e + 1 - k
            assert torch.equal(moved[:, slot], codes[:, column])

    @given(
        draw=strategies.draws(-40, 40),
        shape=st.sampled_from([(1, 128), (5, 384), (2, 3, 640), (17, 256), (33, 128)]),
        skipped=st.sampled_from([0, 64]),
        dtype=strategies.float_dtypes(),
        layout=st.sampled_from([LINEAR, FRAGMENTS]),
    )
    @example(strategies.Draw(2, -149), (9, 512), 0, torch.float32, FRAGMENTS)
    def test_many_blocks(self, device, draw, shape, skipped, dtype, layout):
        """They have a kernel of their own; a block without a finite value has the least scale."""
        *batch, columns = shape
        x = draw.build((*batch, columns + skipped), dtype, device, block=128)[..., :columns]
        x[..., -1, -128:] = torch.nan
        launcher = pytest.importorskip("dsv4.triton.quantize_fp8_token")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launcher, "_MANY_BLOCKS", 0)
            same(quantize(x, FP8_TOKEN, layout=layout), by_reference(x, layout))

    @pytest.mark.gpu
    @pytest.mark.parametrize("columns", [1024, 4096, 32768])
    def test_many_rows_of_a_prompt(self, device, columns):
        x = strategies.normal(columns, (4099, columns)).to(device, torch.bfloat16)
        x[5, 9], x[4098] = torch.inf, torch.nan
        same(quantize(x, FP8_TOKEN, layout=FRAGMENTS), by_reference(x, FRAGMENTS))

    def test_strided_rows_and_no_rows(self, device):
        wide = strategies.normal(5, (6, 384)).to(device)
        same(quantize(wide[:, :200], FP8_TOKEN), by_reference(wide[:, :200].contiguous()))
        same(quantize(wide.T, FP8_TOKEN), by_reference(wide.T.contiguous()))
        for shape in ((0, 128), (2, 0, 64)):
            q = quantize(torch.empty(shape, device=device), FP8_TOKEN).validate()
            assert q.shape == shape == dequantize(q).shape

    @pytest.mark.rarely_interpreted
    def test_opcheck_and_compile(self, device):
        x = strategies.normal(0, (3, 256)).to(device)
        operator = torch.ops.dsv4.quantize_fp8_token.default
        torch.library.opcheck(operator, (x, "linear", "auto"))
        torch.compiler.reset()
        compiled = torch.compile(
            lambda x: dequantize(quantize(x, FP8_TOKEN)), fullgraph=True, backend="aot_eager"
        )
        assert_bitwise(compiled(x), dequantize(quantize(x, FP8_TOKEN)), "value")


def test_no_weight_has_the_format_of_activations():
    q = quantize(torch.ones(4, 128), FP8_TOKEN)
    with pytest.raises(ValueError, match="'fp8_token'"):
        gemm(torch.ones(2, 128), q)
    with pytest.raises(ValueError, match="format is 'fp8'"):
        quantize(torch.ones(4, 128), "fp8")
    with pytest.raises(ValueError, match="130 columns, wanted a multiple of 128"):
        quantize(torch.ones(4, 130), FP8_TOKEN, layout=FRAGMENTS)
    assert isinstance(q, QuantizedTensor)
