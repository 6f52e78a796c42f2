"""The layout of Hopper's operands: nothing lost, nothing changed, every code and scale."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4 import fragments
from dsv4.elements import decode_e2m1, unpack
from dsv4.formats import FRAGMENTS, LINEAR, MXFP4, NVFP4, SWIZZLED, QuantizedTensor, cat_rows
from dsv4.ops.quantize import dequantize, quantize
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise

KERNELS = ("triton",)

ALL_SCALES = 127  # E4M3 bytes without sign and without NaN


def drawn(seed, shape):
    """Any codes, any scale of sign 0, NaN too."""
    *batch, rows, columns = shape
    generator = strategies.generator(seed)
    codes = torch.randint(0, 256, (*batch, rows, columns // 2), generator=generator)
    scales = torch.randint(0, 128, (*batch, rows, columns // 16), generator=generator)
    scale = torch.rand((*batch, 1), generator=generator) + 0.5
    bytes_ = scales.to(torch.uint8).view(torch.float8_e4m3fn)
    return QuantizedTensor(codes.to(torch.uint8), bytes_, scale, NVFP4)


def same(one, two):
    assert (one.layout, one.segments, one.shape) == (two.layout, two.segments, two.shape)
    assert torch.equal(one.codes, two.codes)
    assert torch.equal(one.scales.view(torch.uint8), two.scales.view(torch.uint8))
    assert one.global_scale is two.global_scale


def every_pair():
    """Every code under every scale: 127 rows of 16 columns, padded to whole tiles."""
    codes = torch.zeros((128, 64), dtype=torch.uint8)
    codes[:, :16] = torch.arange(16, dtype=torch.uint8)
    scales = torch.zeros((128, 4), dtype=torch.uint8)
    scales[:ALL_SCALES, 0] = torch.arange(ALL_SCALES, dtype=torch.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    one = torch.ones(1)
    return QuantizedTensor(packed, scales.view(torch.float8_e4m3fn), one, NVFP4)


class TestLayout:
    @given(
        seed=strategies.seeds(),
        batch=st.lists(st.integers(0, 3), max_size=2),
        rows=st.integers(1, 6),
        columns=st.integers(1, 5),
    )
    def test_bitwise_there_and_back(self, device, seed, batch, rows, columns):
        weight = drawn(seed, (*batch, 16 * rows, 64 * columns)).to(device)
        packed = weight.with_layout(FRAGMENTS).validate()
        assert packed.nbytes == weight.nbytes
        same(packed.with_layout(LINEAR), weight)
        same(packed.with_layout(SWIZZLED), weight.with_layout(SWIZZLED))
        same(weight.with_layout(SWIZZLED).with_layout(FRAGMENTS), packed)

    @given(seed=strategies.seeds(), rows=st.integers(1, 4), columns=st.integers(1, 4))
    def test_means_the_same(self, device, seed, rows, columns):
        weight = drawn(seed, (16 * rows, 64 * columns)).to(device)
        assert_bitwise(dequantize(weight.with_layout(FRAGMENTS)), dequantize(weight), "values")

    def test_where_a_code_and_a_scale_go(self):
        """By the words of the module, one by one."""
        weight = drawn(0, (32, 128))
        codes, scales = weight.codes, weight.scales.view(torch.uint8)
        packed = weight.with_layout(FRAGMENTS)
        words = packed.codes.view(torch.int16).reshape(2, 2, 32, 4, 2).int() & 0xFFFF
        tiles = packed.scales.reshape(2, 2, 8, 4, 2)
        for row, column in ((0, 0), (9, 1), (17, 26), (31, 127), (24, 72), (5, 63)):
            nibble = int(codes[row, column // 2]) >> column % 2 * 4 & 15
            inner, k = column % 64, column % 16
            lane, half = row % 8 * 4 + k % 8 // 2, column % 2
            word = int(words[row // 16, column // 64, lane, inner // 16, half])
            place = fragments._PLACES[2 * (k // 8) + row % 16 // 8]
            found = sum((word >> bit & 1) << 3 - i for i, bit in enumerate(place))
            assert found == nibble
            byte = int(tiles[row // 16, column // 64, row % 8, inner // 16, row % 16 // 8])
            assert byte == int(fragments._scale_bytes()[int(scales[row, column // 16])])

    def test_the_scale_byte_is_a_shifted_bfloat16(self):
        """``(byte << 4) + 0x7600`` is, as 16 bits, ``scale * 2^119``: zero, subnormals, NaN too."""
        bits = (fragments._scale_bytes().int() << 4) + fragments.SCALE_BIAS
        signed = torch.where(bits >= 0x8000, bits - 0x10000, bits).to(torch.int16)
        got = signed.view(torch.bfloat16).double() * 2.0**-119
        want = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        assert torch.equal(got[:ALL_SCALES], want[:ALL_SCALES])
        assert bool(got[ALL_SCALES:].isnan().all())

    def test_segments_and_global_scales_stay(self):
        weight = cat_rows([quantize(torch.randn(16, 64), scaling="weight") for _ in range(3)])
        assert weight.with_layout(FRAGMENTS).segments == (16, 16, 16)
        same(weight.with_layout(FRAGMENTS).with_layout(LINEAR), weight)


class TestExpansion:
    def test_every_code_times_every_scale(self, device):
        """Bitwise: the product of the two is exact in bfloat16."""
        pytest.importorskip("triton")
        from dsv4.triton.gemm import expand

        weight = every_pair().to(device)
        want = dequantize(weight, torch.float64)
        assert torch.equal(want.to(torch.bfloat16).double(), want)
        packed = weight.with_layout(FRAGMENTS)
        got = expand(packed.codes, packed.scales)
        finite = want[:ALL_SCALES, :16]
        values = decode_e2m1(unpack(weight.codes), torch.float64)[:ALL_SCALES, :16]
        scales = weight.scales.double()[:ALL_SCALES, :1]
        assert torch.equal(finite, values * scales)
        assert torch.equal(got.double(), want)

    @given(seed=strategies.seeds(), rows=st.integers(1, 3), columns=st.integers(1, 9))
    def test_any_shape(self, device, seed, rows, columns):
        pytest.importorskip("triton")
        from dsv4.triton.gemm import expand

        weight = drawn(seed, (16 * rows, 64 * columns)).to(device)
        plain = dataclasses.replace(weight, global_scale=torch.ones(1, device=device))
        packed = plain.with_layout(FRAGMENTS)
        got, want = expand(packed.codes, packed.scales), dequantize(plain)
        assert torch.equal(got.float().nan_to_num(7.0), want.nan_to_num(7.0))


class TestBadInput:
    @pytest.mark.parametrize("shape", [(8, 64), (16, 32), (24, 64), (16, 96)])
    def test_not_whole_tiles(self, shape):
        with pytest.raises(ValueError, match=rf"{shape[0]} x {shape[1]}, wanted multiples of 16"):
            drawn(0, shape).with_layout(FRAGMENTS)

    def test_a_negative_scale(self):
        weight = drawn(0, (16, 64))
        weight.scales.view(torch.uint8)[3, 1] = 0x80
        with pytest.raises(ValueError, match="block scale is negative"):
            weight.with_layout(FRAGMENTS)

    def test_only_nvfp4(self):
        weight = quantize(torch.randn(16, 64), MXFP4)
        with pytest.raises(ValueError, match="only nvfp4"):
            weight.with_layout(FRAGMENTS)

    def test_what_quantises_does_not_write_it(self):
        with pytest.raises(ValueError, match="with_layout"):
            quantize(torch.randn(16, 64), layout=FRAGMENTS)

    def test_scales_must_be_its_bytes(self):
        weight = drawn(0, (16, 64))
        with pytest.raises(TypeError, match=r"wanted torch\.uint8"):
            dataclasses.replace(weight, layout=FRAGMENTS).validate()

    def test_check_values_reads_them(self):
        weight = quantize(torch.randn(16, 64), scaling="weight").with_layout(FRAGMENTS)
        weight.validate(check_values=True)
        weight.scales[0, 0] = fragments._NAN
        with pytest.raises(ValueError, match="block scales are NaN"):
            weight.validate(check_values=True)
