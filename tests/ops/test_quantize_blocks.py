"""Quantise and dequantise MXFP4 and FP8 blocks, bitwise against ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from dsv4.ops.quantize import dequantize, quantize
from dsv4.quant import formats
from dsv4.quant.elements import unpack
from dsv4.quant.formats import FP8_BLOCK, MXFP4, QuantizedTensor
from dsv4.testing import oracles, strategies
from dsv4.testing.assertions import assert_bitwise

KERNELS = ("triton",)


def build(draw, shape, device, dtype=torch.float32):
    x = draw.build(shape, dtype)
    return x, x.to(device)


class TestMxfp4:
    @given(
        draw=strategies.draws(-100, 100), rows=strategies.rows(5), dtype=strategies.float_dtypes()
    )
    @example(strategies.Draw(0, -149), 2, torch.float32)
    def test_equals_ml_dtypes_bitwise(self, device, draw, rows, dtype):
        x, on_device = build(draw, (rows, 96), device, dtype)
        q = quantize(on_device, MXFP4).validate()
        codes, bits = oracles.mxfp4(x.float().numpy())
        assert_bitwise(q.scales.view(torch.uint8).cpu(), torch.from_numpy(bits), "scale")
        assert_bitwise(unpack(q.codes).cpu(), torch.from_numpy(codes), "code")

    def test_every_code_under_every_scale(self, device, wide):
        codes = torch.arange(16, dtype=torch.uint8).reshape(8, 2).repeat(2, 1)
        packed = (codes[:, 0] | codes[:, 1] << 4).repeat(256, 1)
        scales = torch.arange(256, dtype=torch.uint8).reshape(256, 1).view(torch.float8_e8m0fnu)
        got = dequantize(QuantizedTensor(packed, scales, None, MXFP4).to(device), wide)
        values = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        byte = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
        want = torch.from_numpy(np.tile(values, 2) * byte[:, None]).to(wide)
        assert_bitwise(got.cpu(), want, "value")

    @given(
        draw=strategies.finite_draws(-90, 90),
        layout=st.sampled_from((formats.LINEAR, formats.SWIZZLED)),
    )
    def test_never_saturates_and_is_idempotent(self, device, draw, layout):
        assume(draw.special != "huge")  # 4 * 2^126 overflows float32 when it is dequantised
        x, on_device = build(draw, (4, 64), device)
        q = quantize(on_device, MXFP4, layout=layout)
        values = dequantize(q)
        assert_bitwise(dequantize(quantize(values, MXFP4)), values, "value")
        biggest = values.cpu().unflatten(-1, (2, 32)).abs().amax(-1)
        amax = x.unflatten(-1, (2, 32)).abs().amax(-1)
        assert bool((biggest >= amax * 0.75).logical_or(amax < 2.0**-120).all())


class TestFp8Block:
    @given(
        draw=strategies.draws(-60, 60),
        rows=strategies.rows(150),
        columns=st.integers(1, 150),
        power_of_two=st.booleans(),
    )
    @example(strategies.Draw(0), 128, 128, True)
    @example(strategies.Draw(0), 129, 257, False)
    def test_equals_ml_dtypes_bitwise(self, device, draw, rows, columns, power_of_two):
        x, on_device = build(draw, (rows, columns), device)
        dtype = torch.float8_e8m0fnu if power_of_two else torch.float32
        q = quantize(on_device, FP8_BLOCK, scale_dtype=dtype).validate()
        values = dequantize(q)
        want = np.empty((rows, columns), np.uint8)
        for n in range(0, rows, 128):
            for k in range(0, columns, 128):
                tile = x[n : n + 128, k : k + 128].numpy()
                codes, scale = oracles.fp8_tile(tile, power_of_two)
                want[n : n + 128, k : k + 128] = codes
                found = q.scales[n // 128, k // 128].reshape(1).cpu()
                if power_of_two:
                    byte = found.view(torch.uint8).numpy().view(ml_dtypes.float8_e8m0fnu)
                    found = torch.from_numpy(byte.astype(np.float32))
                assert found.item() == scale
        got = q.codes.view(torch.uint8).cpu()
        got = torch.where((got & 0x7F) == 0x7F, 0x7F, got)
        assert_bitwise(got, torch.from_numpy(want), "code")
        assert_bitwise(torch.isnan(values).cpu(), ~torch.isfinite(x), "where NaN")

    def test_every_code_under_every_scale(self, device, wide):
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
        tall = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).reshape(256, 1)
        matrix = codes.view(torch.uint8)[None].repeat(256 * 128, 1).view(torch.float8_e4m3fn)
        scales = tall.view(torch.uint8).repeat(1, 2).view(torch.float8_e8m0fnu)
        got = dequantize(QuantizedTensor(matrix, scales, None, FP8_BLOCK).to(device), wide)
        values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        byte = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
        want = torch.from_numpy(values * byte[:, None]).to(wide)
        for row in (0, 64, 127):
            assert_bitwise(got.cpu()[row::128], want, "value")

    @given(draw=strategies.finite_draws(-20, 20))
    def test_float32_scales_round_the_product_once(self, device, draw):
        _, x = build(draw, (3, 20), device)
        q = quantize(x, FP8_BLOCK, scale_dtype=torch.float32)
        want = q.codes.double() * q.scales.double()[0, 0]
        assert_bitwise(dequantize(q, torch.float64), want, "value")
        assert_bitwise(dequantize(q), want.float(), "value")
