"""The layout of Hopper's operands: nothing lost, nothing changed, every code and scale."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4.config import ModelConfig
from dsv4.dispatch import use_backend
from dsv4.layers import DeepseekV4Experts
from dsv4.ops.quantize import dequantize, quantize
from dsv4.quant import fragments
from dsv4.quant.elements import decode_e2m1, unpack
from dsv4.quant.formats import FRAGMENTS, LINEAR, MXFP4, NVFP4, SWIZZLED, QuantizedTensor, cat_rows
from dsv4.reference import fragments as reference
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.models import randomize_

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


def same(first, two):
    assert (first.layout, first.segments, first.shape) == (two.layout, two.segments, two.shape)
    assert torch.equal(first.codes, two.codes)
    assert torch.equal(first.scales.view(torch.uint8), two.scales.view(torch.uint8))
    assert first.global_scale is two.global_scale


def every_pair():
    """Every code under every scale: 127 rows of 16 columns, padded to whole tiles."""
    codes = torch.zeros((128, 64), dtype=torch.uint8)
    codes[:, :16] = torch.arange(16, dtype=torch.uint8)
    scales = torch.zeros((128, 4), dtype=torch.uint8)
    scales[:ALL_SCALES, 0] = torch.arange(ALL_SCALES, dtype=torch.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    unit_scale = torch.ones(1)
    return QuantizedTensor(packed, scales.view(torch.float8_e4m3fn), unit_scale, NVFP4)


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
        """Compute it by the words of the module, one by one."""
        weight = drawn(0, (32, 128))
        codes, scales = weight.codes, weight.scales.view(torch.uint8)
        packed = weight.with_layout(FRAGMENTS)
        words = packed.codes.view(torch.int32).reshape(2, 2, 32, 4)
        tiles = packed.scales.reshape(2, 2, 8, 4, 2)
        for row, column in ((0, 0), (9, 1), (17, 26), (31, 127), (24, 72), (5, 63)):
            nibble = int(codes[row, column // 2]) >> column % 2 * 4 & 15
            inner, k = column % 64, column % 16
            lane = row % 8 * 4 + k % 8 // 2
            word = int(words[row // 16, column // 64, lane, inner // 16])
            position = fragments.BIT_POSITIONS[2 * (k // 8) + row % 16 // 8]
            bits = [(bit + column % 2 * 16) % 32 for bit in position]
            result = sum((word >> bit & 1) << 3 - i for i, bit in enumerate(bits))
            assert result == nibble
            byte = int(tiles[row // 16, column // 64, row % 8, inner // 16, row % 16 // 8])
            assert byte == int(fragments.scale_bytes()[int(scales[row, column // 16])])

    def test_the_scale_byte_is_a_shifted_bfloat16(self):
        """``(byte << 4) + 0x7600`` is, as 16 bits, ``scale * 2^119``: zero, subnormals, NaN too."""
        bits = (fragments.scale_bytes().int() << 4) + fragments.SCALE_BIAS
        signed = torch.where(bits >= 0x8000, bits - 0x10000, bits).to(torch.int16)
        got = signed.view(torch.bfloat16).double() * 2.0**-119
        expected = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        assert torch.equal(got[:ALL_SCALES], expected[:ALL_SCALES])
        assert bool(got[ALL_SCALES:].isnan().all())

    def test_segments_and_global_scales_stay(self):
        weight = cat_rows([quantize(torch.randn(16, 64), scaling="weight") for _ in range(3)])
        assert weight.with_layout(FRAGMENTS).segments == (16, 16, 16)
        same(weight.with_layout(FRAGMENTS).with_layout(LINEAR), weight)


class TestTheKernelsArithmetic:
    """The instructions by which kernels expand a word, on integers of 32 bits."""

    @given(seed=strategies.seeds())
    def test_a_word_gives_the_bfloat16s_of_its_codes(self, seed):
        pytest.importorskip("cutlass")
        from dsv4.cute.device import dequant

        generator = np.random.default_rng(seed)
        codes = generator.integers(0, 16, (4, 2, 1000), dtype=np.uint32)  # 2 k + h, e
        words = np.zeros(1000, np.uint32)
        for position, both in zip(fragments.BIT_POSITIONS, codes, strict=True):
            for odd, code in enumerate(both):
                for i, bit in enumerate(position):
                    words |= (code >> (3 - i) & 1) << (bit + 16 * odd) % 32
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dequant, "Uint32", np.uint32)
            patch.setattr(dequant, "rotate_right", lambda word, n: word >> n | word << (32 - n))
            result = dequant.codes_to_bfloat16(words)
        for got, both in zip(result, codes, strict=True):
            low, high = ((code >> 3) << 15 | (code & 7) << 6 for code in both)
            assert np.array_equal(got, low | high << 16)


class TestMoving:
    """Whatever moves the bytes, they are those of the reference."""

    @given(
        seed=strategies.seeds(),
        batch=st.lists(st.integers(0, 2), max_size=2),
        rows=st.integers(1, 3),
        columns=st.integers(1, 19),
        pairs=st.booleans(),
        strided=st.booleans(),
    )
    def test_the_same_bits(self, device, seed, batch, rows, columns, pairs, strided):
        weight = drawn(seed, (*batch, 16 * rows, 64 * columns))
        expected = reference.pack(weight.codes, weight.scales.view(torch.uint8), pairs)
        linear = [weight.codes.to(device), weight.scales.view(torch.uint8).to(device)]
        if strided:
            linear = [t.mT.contiguous().mT for t in linear]
        codes, scales = fragments.pack(linear[0], linear[1].view(torch.float8_e4m3fn), pairs=pairs)
        assert_bitwise(codes.cpu(), expected[0], "packed codes")
        assert_bitwise(scales.cpu(), expected[1], "packed scales")
        if strided:
            codes, scales = codes.mT.contiguous().mT, scales.mT.contiguous().mT
        codes, scales = fragments.unpack(codes, scales, pairs=pairs)
        assert_bitwise(codes.cpu(), weight.codes, "linear codes")
        assert_bitwise(scales.view(torch.uint8).cpu(), weight.scales.view(torch.uint8), "scales")

    @given(seed=strategies.seeds(), pairs=st.booleans())
    def test_any_bytes_come_apart_alike(self, device, seed, pairs):
        """Bytes that no scale has, too: a damaged weight is not made sound by the kernel."""
        codes = torch.randint(0, 256, (32, 64), generator=strategies.generator(seed)).byte()
        scales = torch.arange(256, dtype=torch.uint8).reshape(32, 8)
        expected = reference.unpack(codes, scales, pairs)
        got = fragments.unpack(codes.to(device), scales.to(device), pairs=pairs)
        assert_bitwise(got[0].cpu(), expected[0], "codes")
        assert_bitwise(got[1].view(torch.uint8).cpu(), expected[1], "scales")

    def test_pairs_are_interleaved_rows(self):
        weight = drawn(0, (3, 32, 128))
        order = torch.tensor([half * 16 + i for i in range(16) for half in range(2)])
        ordered = dataclasses.replace(
            weight, codes=weight.codes[:, order], scales=weight.scales[:, order]
        )
        expected = ordered.with_layout(FRAGMENTS)
        got = fragments.pack(weight.codes, weight.scales, pairs=True)
        assert_bitwise(got[0], expected.codes, "codes")
        assert_bitwise(got[1], expected.scales, "scales")

    def test_codes_at_an_odd_address(self, device):
        weight = drawn(0, (16, 64)).to(device)
        packed = weight.with_layout(FRAGMENTS)
        buffer = torch.empty(packed.codes.numel() + 1, dtype=torch.uint8, device=device)
        odd = buffer[1:].view(packed.codes.shape)
        odd.copy_(packed.codes)
        assert torch.equal(fragments.unpack(odd, packed.scales)[0], weight.codes)


class TestExperts:
    def test_in_place_there_and_back(self, device):
        """A layer packs as the reference does, gate and up rows interleaved, and comes back."""
        config = ModelConfig.tiny(n_routed_experts=2, hidden_size=128, moe_intermediate_size=64)
        plain = randomize_(DeepseekV4Experts(config).requires_grad_(False), 0)
        with use_backend("reference"):
            plain.quantize()
        experts = copy.deepcopy(plain).to(device)
        experts.pack()
        for name in ("gate_up_proj", "down_proj"):
            codes, scales = (getattr(plain, name + suffix) for suffix in ("", "_scale"))
            pairs = name == "gate_up_proj"
            expected = reference.pack(codes, scales.view(torch.uint8), pairs)
            assert_bitwise(getattr(experts, name).cpu(), expected[0], name)
            assert_bitwise(getattr(experts, name + "_scale").cpu(), expected[1], name)
        for expert in range(2):
            parts = zip(experts.get_expert(expert), plain.get_expert(expert), strict=True)
            for first, two in parts:
                assert_bitwise(first.codes.cpu(), two.codes, "codes")
                assert_bitwise(first.scales.float().cpu(), two.scales.float(), "scales")
        experts.unpack()
        for name, tensor in plain.named_parameters():
            actual = experts.get_parameter(name).cpu()
            assert_bitwise(actual.view(torch.uint8), tensor.view(torch.uint8), name)


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize(("rows", "columns"), [(6144, 7168), (7168, 3072), (65536, 1536)])
    @pytest.mark.parametrize("pairs", [False, True])
    def test_beside_the_result_there_is_nothing(self, rows, columns, pairs):
        codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device="cuda")
        scales = torch.randint(0, 127, (rows, columns // 16), dtype=torch.uint8, device="cuda")
        scales = scales.view(torch.float8_e4m3fn)
        fragments.pack(codes[:16], scales[:16])
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        packed = fragments.pack(codes, scales, pairs=pairs)
        most = torch.cuda.max_memory_allocated() - before
        assert most <= codes.nbytes + scales.nbytes + (1 << 20)
        expected = reference.pack(codes, scales.view(torch.uint8), pairs)
        actual = fragments.unpack(*packed, pairs=pairs)
        assert_bitwise(packed[0], expected[0], "packed codes")
        assert_bitwise(packed[1], expected[1], "packed scales")
        assert_bitwise(actual[0], codes, "codes")
        assert_bitwise(actual[1].view(torch.uint8), scales.view(torch.uint8), "scales")


class TestExpansion:
    def test_every_code_times_every_scale(self, device):
        """Bitwise: the product of the two is exact in bfloat16."""
        pytest.importorskip("triton")
        from dsv4.triton.gemm import dequantize_packed

        weight = every_pair().to(device)
        expected = dequantize(weight, torch.float64)
        assert torch.equal(expected.to(torch.bfloat16).double(), expected)
        packed = weight.with_layout(FRAGMENTS)
        got = dequantize_packed(packed.codes, packed.scales)
        finite = expected[:ALL_SCALES, :16]
        values = decode_e2m1(unpack(weight.codes), torch.float64)[:ALL_SCALES, :16]
        scales = weight.scales.double()[:ALL_SCALES, :1]
        assert torch.equal(finite, values * scales)
        assert torch.equal(got.double(), expected)

    @given(seed=strategies.seeds(), rows=st.integers(1, 3), columns=st.integers(1, 9))
    def test_any_shape(self, device, seed, rows, columns):
        pytest.importorskip("triton")
        from dsv4.triton.gemm import dequantize_packed

        weight = drawn(seed, (16 * rows, 64 * columns)).to(device)
        plain = dataclasses.replace(weight, global_scale=torch.ones(1, device=device))
        packed = plain.with_layout(FRAGMENTS)
        got, expected = dequantize_packed(packed.codes, packed.scales), dequantize(plain)
        assert torch.equal(got.float().nan_to_num(7.0), expected.nan_to_num(7.0))


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
        weight.scales[0, 0] = fragments.NAN
        with pytest.raises(ValueError, match="block scales are NaN"):
            weight.validate(check_values=True)
