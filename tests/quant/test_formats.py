"""Formats, scale layouts, joining and conversion; oracles: ml_dtypes and compressed-tensors."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize as ct_dequantize
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.ops.quantize import dequantize, quantize
from dsv4.quant import formats
from dsv4.quant.elements import decode_e2m1, encode_e2m1, encode_e4m3, pack, unpack
from dsv4.quant.formats import FP8_BLOCK, MXFP4, NVFP4, QuantizedTensor
from dsv4.quant.scales import (
    e8m0_from_bytes,
    e8m0_to_float,
    scale_offset,
    scales_to_float,
    swizzle_scales,
    swizzled_size,
    unswizzle_scales,
)
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise

ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def random_bytes(seed, shape, high=256):
    drawn = torch.randint(0, high, shape, generator=strategies.generator(seed))
    return drawn.to(torch.uint8)


def random_nvfp4(seed, shape, device="cpu", globals_=1):
    """Any codes, any finite non-negative block scales, positive global scales."""
    *batch, rows, columns = shape
    codes = random_bytes(seed, (*batch, rows, columns // 2)).to(device)
    scales = random_bytes(seed + 1, (*batch, rows, columns // 16), 0x7F).to(device)
    scale = strategies.normal(seed, (*batch, globals_)).abs() + 0.01
    return QuantizedTensor(codes, scales.view(torch.float8_e4m3fn), scale.to(device), NVFP4)


def random_mxfp4(seed, shape, low=100, high=150, device="cpu"):
    *batch, rows, columns = shape
    codes = random_bytes(seed, (*batch, rows, columns // 2)).to(device)
    drawn = torch.randint(
        low, high + 1, (*batch, rows, columns // 32), generator=strategies.generator(seed + 1)
    )
    return QuantizedTensor(codes, e8m0_from_bytes(drawn.to(device)), None, MXFP4)


class TestElements:
    def test_every_e2m1_code_equals_ml_dtypes(self, device):
        codes = torch.arange(16, dtype=torch.uint8, device=device)
        expected = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            assert_bitwise(
                decode_e2m1(codes, dtype), torch.from_numpy(expected).to(dtype).to(device), "value"
            )
        assert_bitwise(encode_e2m1(decode_e2m1(codes)), codes, "code")

    @given(draw=strategies.finite_draws(-4, 3))
    def test_rounding_equals_ml_dtypes(self, device, draw):
        x = draw.build((257,))
        clipped = np.clip(x.numpy(), -6, 6)
        expected = clipped.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        assert_bitwise(encode_e2m1(x.to(device)).cpu(), torch.from_numpy(expected), "code")

    def test_midpoints_and_neighbours_round_to_even(self, device):
        mids = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
        inf = torch.tensor(float("inf"))
        x = torch.cat([mids, torch.nextafter(mids, inf), torch.nextafter(mids, -inf)])
        x = torch.cat([x, -x])
        expected = x.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        assert_bitwise(encode_e2m1(x.to(device)).cpu(), torch.from_numpy(expected), "code")

    def test_saturates_at_six_and_keeps_the_sign_of_zero(self, device):
        x = torch.tensor([7.0, -1e30, float("inf"), 0.0, -0.0, -0.1], device=device)
        assert encode_e2m1(x).tolist() == [7, 15, 7, 0, 8, 8]

    def test_every_byte_unpacks_as_compressed_tensors_does(self, device):
        packed = ALL_BYTES.reshape(16, 16)
        expected = unpack_fp4_from_uint8(packed, 16, 32, dtype=torch.float32)
        got = decode_e2m1(unpack(packed.to(device)))
        assert_bitwise(got.cpu(), expected, "value")
        assert_bitwise(pack(unpack(packed.to(device))).cpu(), packed, "byte")
        assert_bitwise(pack_fp4_to_uint8(got.cpu()), packed, "byte")

    @given(seed=strategies.seeds(), shape=strategies.shapes(strategies.multiples(2, 20)))
    def test_pack_and_unpack_are_inverse(self, device, seed, shape):
        codes = random_bytes(seed, shape, 16).to(device)
        assert_bitwise(unpack(pack(codes)), codes, "code")

    @given(draw=strategies.finite_draws(-14, 9))
    def test_e4m3_equals_ml_dtypes_and_saturates(self, device, draw):
        x = draw.build((513,))
        expected = np.clip(x.numpy(), -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        got = encode_e4m3(x.to(device)).view(torch.uint8).cpu()
        assert_bitwise(got, torch.from_numpy(expected), "byte")

    def test_e4m3_midpoints(self, device):
        values = ALL_BYTES[:0x7F].view(torch.float8_e4m3fn).float()
        mids = (values[1:] + values[:-1]) / 2
        inf = torch.tensor(float("inf"))
        x = torch.cat([mids, torch.nextafter(mids, inf), torch.nextafter(mids, -inf)])
        expected = x.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        got = encode_e4m3(x.to(device)).view(torch.uint8).cpu()
        assert_bitwise(got, torch.from_numpy(expected), "byte")


class TestScales:
    def test_every_e8m0_byte_equals_ml_dtypes(self, device):
        expected = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        got = e8m0_to_float(ALL_BYTES.to(device).view(torch.float8_e8m0fnu))
        assert_bitwise(got.cpu(), torch.from_numpy(expected), "value")

    def test_every_e4m3_byte_equals_ml_dtypes(self, device):
        expected = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        got = scales_to_float(ALL_BYTES.to(device).view(torch.float8_e4m3fn))
        assert_bitwise(got.cpu(), torch.from_numpy(expected), "value")

    def test_pitfall_33_e8m0_moves_by_view_not_by_value(self, device):
        scale = torch.tensor([120], dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu)
        assert e8m0_to_float(scale).item() == 2.0**-7
        assert e8m0_from_bytes(torch.tensor([120], device=device)).view(torch.uint8).item() == 120
        with pytest.raises(TypeError, match="view"):
            e8m0_to_float(scale.view(torch.uint8))
        q = random_mxfp4(0, (4, 64), 120, 120, device)
        assert_bitwise(dequantize(q), decode_e2m1(unpack(q.codes)) * 2.0**-7, "value")
        joined = formats.cat_rows([q, q])
        assert joined.scales.view(torch.uint8).unique().tolist() == [120]
        for layout in (formats.SWIZZLED, formats.LINEAR):
            joined = joined.with_layout(layout)
            assert set(joined.scales.view(torch.uint8).unique().tolist()) <= {0, 120}
        assert_bitwise(dequantize(joined)[:4], dequantize(q), "value")

    @given(
        seed=strategies.seeds(),
        rows=strategies.rows(300),
        columns=st.integers(1, 11),
        batch=st.sampled_from([(), (1,), (2, 2)]),
    )
    @example(seed=0, rows=128, columns=4, batch=())
    @example(seed=0, rows=129, columns=5, batch=(2,))
    def test_swizzle_is_a_bijection_and_equals_the_formula(
        self, device, seed, rows, columns, batch
    ):
        scales = random_bytes(seed, (*batch, rows, columns)).to(device)
        swizzled = swizzle_scales(scales)
        assert swizzled.shape == (*batch, swizzled_size(rows, columns))
        assert_bitwise(unswizzle_scales(swizzled, rows, columns), scales, "scale")
        offsets = [scale_offset(m, k, columns) for m in range(rows) for k in range(columns)]
        assert len(set(offsets)) == rows * columns
        index = torch.tensor(offsets, dtype=torch.int64, device=device)
        assert_bitwise(swizzled[..., index], scales.flatten(-2), "scale at its offset")

    @given(rows=st.integers(1, 200), columns=st.integers(1, 9))
    def test_pitfall_31_padding_of_swizzled_scales_is_written(self, device, rows, columns):
        """With uninitialised memory poisoned, every byte outside the matrix is still zero."""
        scales = torch.full((rows, columns), 0x38, dtype=torch.uint8, device=device)
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)  # torch.empty is filled with 0xFF
        try:
            assert torch.empty(64, dtype=torch.uint8, device=device).min() == 255
            swizzled = swizzle_scales(scales.view(torch.float8_e4m3fn)).view(torch.uint8)
        finally:
            torch.use_deterministic_algorithms(before)
        assert int((swizzled == 0x38).sum()) == rows * columns
        assert int((swizzled == 0).sum()) == swizzled.numel() - rows * columns

    def test_wrong_sizes_are_named(self):
        with pytest.raises(ValueError, match="5 entries, wanted 512"):
            unswizzle_scales(torch.zeros(5, dtype=torch.uint8), 3, 3)
        with pytest.raises(TypeError, match="one byte"):
            swizzle_scales(torch.zeros(4, 4))


class TestQuantizedTensor:
    def test_properties(self, device):
        q = random_nvfp4(1, (3, 10, 64), device)
        assert q.shape == (3, 10, 64)
        assert (q.rows, q.columns) == (10, 64)
        assert q.nbytes == 3 * 10 * 32 + 3 * 10 * 4 + 3 * 4
        assert q.device.type == device.type
        assert "nvfp4" in repr(q)
        assert "[3, 10, 64]" in repr(q)
        assert q.to("cpu").device.type == "cpu"

    @given(seed=strategies.seeds(), rows=strategies.rows(140), blocks=st.integers(1, 6))
    def test_layouts_hold_the_same_values(self, device, seed, rows, blocks):
        q = random_nvfp4(seed, (2, rows, 16 * blocks), device)
        swizzled = q.with_layout(formats.SWIZZLED).validate()
        assert_bitwise(dequantize(swizzled), dequantize(q), "value")
        back = swizzled.with_layout(formats.LINEAR)
        assert_bitwise(back.scales, q.scales, "scale")
        assert_bitwise(dequantize(swizzled[1]), dequantize(q)[1], "value")

    @given(seed=strategies.seeds(), parts=st.lists(st.integers(0, 9), min_size=1, max_size=4))
    def test_cat_rows_keeps_every_value(self, device, seed, parts):
        items = [random_nvfp4(seed + i, (n, 48), device) for i, n in enumerate(parts)]
        joined = formats.cat_rows(items).validate()
        assert joined.rows == sum(parts)
        assert joined.segments == (tuple(parts) if len(parts) > 1 else ())
        expected = torch.cat([dequantize(item) for item in items])
        assert_bitwise(dequantize(joined), expected, "value")
        assert_bitwise(
            joined.row_scale(), torch.cat([item.row_scale() for item in items]), "row scale"
        )

    def test_cat_rows_of_batches_segments_and_rows(self, device):
        first, second = random_nvfp4(1, (3, 4, 32), device), random_nvfp4(9, (3, 6, 32), device)
        pair = formats.cat_rows([first, second])
        assert pair.segments == (4, 6)
        assert pair[2].global_scale.shape == (2,)
        triple = formats.cat_rows([pair, first])
        assert triple.segments == (4, 6, 4)
        per_row = random_nvfp4(2, (3, 5, 32), device, globals_=5)
        mixed = formats.cat_rows([pair, per_row]).validate()
        assert mixed.global_scale.shape == (3, 15)
        assert_bitwise(dequantize(mixed)[:, 10:], dequantize(per_row), "value")
        assert_bitwise(dequantize(mixed)[:, :10], dequantize(pair), "value")

    def test_cat_rows_of_fp8(self, device):
        x, y = strategies.normal(1, (256, 130)), strategies.normal(2, (3, 130))
        parts = [quantize(t.to(device), FP8_BLOCK) for t in (x, y)]
        expected = torch.cat([dequantize(p) for p in parts])
        assert_bitwise(dequantize(formats.cat_rows(parts)), expected, "value")
        with pytest.raises(ValueError, match="multiples of 128"):
            formats.cat_rows(parts[::-1])

    def test_cat_rows_refuses(self):
        with pytest.raises(ValueError, match="empty"):
            formats.cat_rows([])
        with pytest.raises(ValueError, match="differ"):
            formats.cat_rows([random_nvfp4(0, (2, 32)), random_nvfp4(0, (2, 64))])
        with pytest.raises(ValueError, match="differ"):
            formats.cat_rows([random_nvfp4(0, (2, 32)), random_mxfp4(0, (2, 32))])

    def test_no_batch_axis_to_index(self):
        with pytest.raises(IndexError, match="batch axis"):
            random_nvfp4(0, (2, 32))[0]

    BAD = (
        ({"codes": torch.zeros(4, 16, dtype=torch.int8)}, TypeError, "codes have dtype"),
        ({"codes": torch.zeros(16, dtype=torch.uint8)}, ValueError, "codes have shape"),
        ({"codes": torch.zeros(4, 12, dtype=torch.uint8)}, ValueError, "multiple of 16"),
        ({"scales": torch.zeros(4, 2)}, TypeError, "scales have dtype"),
        (
            {"scales": torch.zeros(4, 2, dtype=torch.uint8)},
            TypeError,
            "scales have dtype torch.uint8",
        ),
        ({"scales": torch.ones(4, 3).to(torch.float8_e4m3fn)}, ValueError, r"wanted \[4, 2\]"),
        ({"layout": "swizzled_128x4"}, ValueError, r"wanted \[512\]"),
        ({"layout": "tiled"}, ValueError, "layout is 'tiled'"),
        ({"global_scale": None}, ValueError, "wanted a global scale"),
        ({"global_scale": torch.ones(1).double()}, TypeError, "global_scale has dtype"),
        ({"global_scale": torch.ones(())}, ValueError, "global_scale has shape"),
        ({"global_scale": torch.ones(3)}, ValueError, r"wanted \[1\] or \[4\]"),
        ({"segments": (1, 2)}, ValueError, r"segments \(1, 2\) sum to 3, not 4"),
        ({"segments": (1, 3)}, ValueError, r"wanted \[2\]"),
    )

    @pytest.mark.parametrize(("changes", "error", "words"), BAD)
    def test_validate_names_what_is_wrong(self, changes, error, words):
        good = random_nvfp4(0, (4, 32))
        assert good.validate() is good
        with pytest.raises(error, match=words):
            dataclasses.replace(good, **changes).validate()

    @pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
    def test_bad_global_scales_are_found(self, device, value):
        q = random_nvfp4(0, (3, 4, 32), device)
        q.global_scale[2] = value
        with pytest.raises(ValueError, match=r"global_scale is .* at \[2, 0\]"):
            q.validate(check_values=True)

    @pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x80 | 0x38])
    def test_bad_block_scales_are_found(self, device, byte):
        q = random_nvfp4(0, (4, 32), device)
        q.scales.view(torch.uint8)[3, 1] = byte
        with pytest.raises(ValueError, match=r"1 block scales.*\[3, 1\]"):
            q.validate(check_values=True)

    def test_e8m0_nan_bytes_are_found(self, device):
        q = random_mxfp4(0, (4, 64), device=device)
        q.validate(check_values=True)
        q.scales.view(torch.uint8)[1, 0] = 255
        with pytest.raises(ValueError, match=r"1 block scales.*\[1, 0\]"):
            q.validate(check_values=True)

    def test_formats_are_named(self):
        assert formats.format_named("mxfp4") is MXFP4
        assert formats.format_named(NVFP4) is NVFP4
        with pytest.raises(ValueError, match="'int8'"):
            formats.format_named("int8")
        with pytest.raises(ValueError, match="no swizzled"):
            quantize(torch.ones(2, 2), FP8_BLOCK, layout=formats.SWIZZLED)


class TestPitfalls:
    def test_pitfall_35_bytes_are_uint8_row_major_with_untransposed_scales(self, device):
        """One non-zero code: low nibble = even column, byte j of row n, scale [n][k // 16]."""
        for n, k in ((0, 0), (1, 1), (2, 17), (3, 62)):
            codes = torch.zeros(4, 32, dtype=torch.uint8)
            codes[n, k // 2] = 0x5 << (4 * (k % 2))
            scales = torch.arange(1, 17).reshape(4, 4).float().to(torch.float8_e4m3fn)
            unit_scale = torch.ones(1)
            q = QuantizedTensor(codes, scales, unit_scale, NVFP4).to(device)
            expected = torch.zeros(4, 64)
            expected[n, k] = 3.0 * (4 * n + k // 16 + 1)
            assert_bitwise(dequantize(q).cpu(), expected, "value")
        q = random_nvfp4(0, (4, 32), device)
        for codes in (q.codes.view(torch.int8), q.codes.view(torch.float4_e2m1fn_x2)):
            with pytest.raises(TypeError, match=r"wanted torch\.uint8"):
                dataclasses.replace(q, codes=codes).validate()
        with pytest.raises(ValueError, match=r"scales have shape \[2, 4\], wanted \[4, 2\]"):
            dequantize(dataclasses.replace(q, scales=q.scales.T.contiguous()))
        k_major = dataclasses.replace(q, codes=q.codes.T.contiguous().repeat(1, 2))
        with pytest.raises(ValueError, match=r"scales have shape \[4, 2\], wanted \[16, 1\]"):
            dequantize(k_major)

    @given(seed=strategies.seeds(), exponent=st.integers(-15, 10))
    def test_pitfall_25_compressed_tensors_scale_is_a_reciprocal(self, device, seed, exponent):
        """Powers of two, so that inverting is exact: bitwise their dequantisation."""
        q = random_nvfp4(seed, (6, 64))
        reciprocal = torch.tensor([2.0**exponent])
        args = QuantizationArgs(num_bits=4, type="float", group_size=16, strategy="tensor_group")
        values = unpack_fp4_from_uint8(q.codes, 6, 64, dtype=torch.float32)
        expected = ct_dequantize(
            values, q.scales.float(), args=args, global_scale=reciprocal, dtype=torch.float32
        )
        ours = formats.from_compressed_tensors(
            q.codes.to(device), q.scales.to(device), reciprocal.to(device)
        )
        assert ours.global_scale.item() == 2.0**-exponent
        assert_bitwise(dequantize(ours).cpu(), expected, "value")
        packed, scale, back = formats.to_compressed_tensors(ours)
        assert_bitwise(back.cpu(), reciprocal, "weight_global_scale")
        assert packed is ours.codes
        assert_bitwise(scale, ours.scales, "weight_scale")

    @pytest.mark.parametrize("value", [0.0, float("inf"), float("nan"), -1.0])
    def test_pitfall_25_a_reciprocal_that_cannot_be_inverted_is_an_error(self, value):
        q = random_nvfp4(0, (2, 32))
        with pytest.raises(ValueError, match="global_scale is"):
            formats.from_compressed_tensors(q.codes, q.scales, torch.tensor([value]))
        with pytest.raises(TypeError, match="global_scale has dtype"):
            formats.invert_global_scale(torch.ones(1, dtype=torch.float16))

    @given(seed=strategies.seeds())
    def test_pitfall_29_global_scale_is_not_folded_into_block_scales(self, device, seed):
        """The product of the three factors is exact in float64; a folded E4M3 scale is not."""
        q = random_nvfp4(seed, (5, 64), device)
        codes = decode_e2m1(unpack(q.codes), torch.float64)
        wide = q.scales.float().double().repeat_interleave(16, -1)
        assert_bitwise(
            dequantize(q, torch.float64), codes * wide * q.global_scale.double(), "value"
        )
        folded = encode_e4m3(q.scales.float() * q.global_scale)
        separate = dataclasses.replace(
            q, scales=folded, global_scale=torch.ones_like(q.global_scale)
        )
        assert not torch.equal(dequantize(separate), dequantize(q))


def exact_values(q):
    """MXFP4 values in float64, by ml_dtypes alone."""
    codes = unpack(q.codes).cpu().numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    scale = q.scales.view(torch.uint8).cpu().numpy().view(ml_dtypes.float8_e8m0fnu)
    return torch.from_numpy(codes * np.repeat(scale.astype(np.float64), 32, -1))


class TestMxfp4ToNvfp4:
    @given(
        seed=strategies.seeds(),
        low=st.integers(18, 230),
        span=st.integers(0, 17),
        batch=st.sampled_from([(), (3,)]),
        swizzled=st.booleans(),
    )
    @example(seed=1, low=1, span=17, batch=(), swizzled=False)
    @example(seed=1, low=237, span=17, batch=(), swizzled=False)
    def test_lossless_within_eighteen_exponents(self, device, seed, low, span, batch, swizzled):
        q = random_mxfp4(seed, (*batch, 5, 96), low, low + span, device)
        if swizzled:
            q = q.with_layout(formats.SWIZZLED)
        out, report = formats.mxfp4_to_nvfp4(q)
        assert report.exact
        assert str(report).startswith("all")
        out.validate(check_values=True)
        linear = q.with_layout(formats.LINEAR)
        assert_bitwise(out.codes, linear.codes, "code")
        assert_bitwise(dequantize(out, torch.float64).cpu(), exact_values(linear), "value")

    @given(seed=strategies.seeds(), low=st.integers(0, 200), span=st.integers(18, 54))
    def test_pitfall_30_out_of_range_blocks_are_rounded_and_named(self, device, seed, low, span):
        """Nothing becomes NaN above 448 or silently zero below 2^-9; the report names each block.

        A block may come out changed only if its scale is more than 2^17 below the largest, and
        every block that changed is in the report, and no other.
        """
        q = random_mxfp4(seed, (2, 8, 64), low, low + span, device)
        out, report = formats.mxfp4_to_nvfp4(q)
        out.validate(check_values=True)
        was, now = exact_values(q), dequantize(out, torch.float64).cpu()
        changed = (was != now).unflatten(-1, (2, 32)).any(-1)
        assert_bitwise(report.inexact.cpu(), changed, "report")
        assert report.count == int(changed.sum())
        assert str(report).startswith("all" if report.exact else f"{report.count} of 32")
        exponent = q.scales.view(torch.uint8).cpu().int()
        used = (was != 0).unflatten(-1, (2, 32)).any(-1)
        largest = torch.where(used, exponent, -1).amax((-1, -2))
        assert not bool((changed & (exponent >= largest[:, None, None] - 17)).any())
        step = torch.exp2((largest - 127 - 17).double())[:, None, None]
        bound = torch.where(was.abs() <= 6 * step, step / 2, 0) + (was.abs() / 6)
        assert bool(((was - now).abs() <= bound).all())

    def test_pitfall_30_block_scales_stay_inside_e4m3(self, device):
        scales = e8m0_from_bytes(torch.tensor([[160, 160 - 17, 160 - 18, 160 - 40]])).to(device)
        codes = torch.full((1, 64), 0x22, dtype=torch.uint8, device=device)  # all 1.0
        out, report = formats.mxfp4_to_nvfp4(QuantizedTensor(codes, scales, None, MXFP4))
        assert out.scales.float().tolist() == [[256.0] * 2 + [2.0**-9] * 6]
        assert report.inexact.tolist() == [[False, False, False, True]]  # 1 -> 0.5 at 2^-9 is exact
        assert out.global_scale.item() == 2.0 ** (160 - 127 - 8)

    def test_blocks_of_zeros_and_nan_scales(self, device):
        codes = torch.full((1, 48), 0x22, dtype=torch.uint8, device=device)
        codes[0, :16] = 0x80  # zeros of both signs, under the largest exponent of all
        scales = e8m0_from_bytes(torch.tensor([[200, 127, 255]])).to(device)
        out, report = formats.mxfp4_to_nvfp4(QuantizedTensor(codes, scales, None, MXFP4))
        values = dequantize(out)
        assert report.exact
        assert out.global_scale.item() == 2.0**-8
        assert torch.signbit(values[0, :32]).tolist() == [False, True] * 16
        assert values[0, 32:64].tolist() == [1.0] * 32
        assert torch.isnan(values[0, 64:]).all()

    @pytest.mark.parametrize("rows", [0, 3])
    def test_nothing_but_zeros(self, device, rows):
        q = quantize(torch.zeros(rows, 64, device=device), MXFP4)
        out, report = formats.mxfp4_to_nvfp4(q)
        assert report.exact
        assert out.global_scale.item() == 1.0
        assert_bitwise(dequantize(out), torch.zeros(rows, 64, device=device), "value")

    def test_other_formats_are_refused(self):
        with pytest.raises(ValueError, match="wanted mxfp4"):
            formats.mxfp4_to_nvfp4(random_nvfp4(0, (2, 32)))
