"""Properties of the kernels that quantise: borders of codes, padding, tiles, replays."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.dispatch import use_backend
from dsv4.ops.norm import rms_norm_quantize
from dsv4.ops.quantize import dequantize, quantize
from dsv4.ops.rope import rope, rope_quantize
from dsv4.ops.swiglu import swiglu, swiglu_quantize
from dsv4.quant import formats
from dsv4.quant.elements import encode_e2m1, pack
from dsv4.quant.formats import FP8_BLOCK, MXFP4, NVFP4
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise

KERNELS = ("triton",)
REFERENCE = False
E2M1_BORDERS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
NVFP4_SHAPES = ((1, 1, 16), (2, 3, 48), (1, 130, 32), (3, 129, 16), (1, 2, 2080), (2, 1, 1536))
FORMATS = (NVFP4, MXFP4, FP8_BLOCK)


def same(kernel, reference):
    """Codes, scales and global scale have the same bits."""
    assert_bitwise(kernel.codes.view(torch.uint8), reference.codes.view(torch.uint8), "code")
    byte = kernel.scales.element_size() == 1
    mine, other = (q.scales.view(torch.uint8) if byte else q.scales for q in (kernel, reference))
    assert_bitwise(mine, other, "block scale")
    if reference.global_scale is not None:
        assert_bitwise(kernel.global_scale, reference.global_scale, "global scale")


def by_reference(x, *args, **kwargs):
    with use_backend("reference"):
        return quantize(x, *args, **kwargs)


@contextlib.contextmanager
def poisoned_memory():
    """Fill what ``torch.empty`` returns with NaN, or the largest integer of its dtype."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def neighbours(values, ulps):
    """Every value and the float32 numbers up to ``ulps`` steps to either side."""
    steps = torch.arange(-ulps, ulps + 1, dtype=torch.int32)
    return (values.view(torch.int32)[..., None] + steps).view(torch.float32)


class TestBorders:
    @settings(max_examples=8)
    @given(
        seed=strategies.seeds(),
        exponent=st.integers(-138, 110),
        byte=st.integers(1, 0x7E),
        few_rows=st.sampled_from([0, 256]),
    )
    def test_codes_at_the_borders_of_e2m1(
        self, device, monkeypatch, seed, exponent, byte, few_rows
    ):
        """Values within 2 ulp of ``border * product``, products of any magnitude.

        The block maximum makes the block scale the byte that was drawn. Global scales from the
        subnormal numbers up: where the product is tiny or huge, a division whose intermediate
        values underflow or overflow rounds wrongly.
        """
        monkeypatch.setattr("dsv4.triton._lib.nvfp4_tile._FEW_ROWS", few_rows)
        scale = (strategies.normal(seed, (8,)).abs() + 0.5) * 2.0 ** max(exponent, -126)
        scale = scale * 2.0 ** min(0, exponent + 126)
        block = torch.tensor([byte], dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        product = block * scale
        near = neighbours(product[:, None] * torch.tensor(E2M1_BORDERS), 2).flatten(1)
        near = torch.where(near.isfinite(), near, 1.0).unflatten(1, (5, 7))
        signs = torch.where(torch.arange(7) % 2 == 0, 1.0, -1.0)
        x = torch.zeros(8, 32, 16)
        x[:, :5, :7] = near * signs
        x[..., 8] = ((6 * block) * scale)[:, None]
        x[..., 9] = -0.0
        x = x.flatten(1).to(device)
        for scaling in ("static", "weight"):
            arguments = {"scaling": scaling, "global_scale": scale.to(device)}
            same(quantize(x, **arguments), by_reference(x, **arguments))

    @settings(max_examples=8)
    @given(
        seed=strategies.seeds(), exponent=st.integers(-140, 100), few_rows=st.sampled_from([0, 256])
    )
    def test_block_scales_at_the_borders_of_e4m3(
        self, device, monkeypatch, seed, exponent, few_rows
    ):
        """Block maxima within 2 ulp of a tie between two scales, subnormal ones too."""
        monkeypatch.setattr("dsv4.triton._lib.nvfp4_tile._FEW_ROWS", few_rows)
        scale = (strategies.normal(seed, (16,)).abs() + 0.5) * 2.0 ** max(exponent, -126)
        scale = scale * 2.0 ** min(0, exponent + 126)
        byte = torch.randint(0, 0x7E, (16,), generator=strategies.generator(seed))
        low, high = ((byte + i).to(torch.uint8).view(torch.float8_e4m3fn).double() for i in (0, 1))
        tie = (6 * scale.double() * (low + high) / 2).float().clamp(min=1e-44)
        amax = neighbours(tie, 2)
        amax = torch.where(amax.isfinite(), amax, 1.0)
        x = torch.zeros(16, 32, 16)
        x[:, :5] = amax[..., None]
        x = x.flatten(1).to(device)
        for scaling in ("static", "weight"):
            arguments = {"scaling": scaling, "global_scale": scale.to(device)}
            same(quantize(x, **arguments), by_reference(x, **arguments))

    @settings(max_examples=10)
    @given(seed=strategies.seeds(), exponent=st.integers(-120, 110))
    def test_fp8_codes_at_the_borders_of_e4m3(self, device, seed, exponent):
        codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        largest = (strategies.normal(seed, ()).abs() + 0.5) * 2.0**exponent
        scale = (largest / 448).clamp(min=2.0**-126)
        near = neighbours(((codes[1:] + codes[:-1]) / 2 * scale).float(), 2).flatten()
        x = torch.zeros(6, 128)
        x.view(-1)[: near.numel()] = near.clamp(max=float(largest))
        x.view(-1)[near.numel() :] = -0.0
        x[-1, -9:-5] = -1e-42
        x[-1, -1] = -largest
        x = x.to(device)
        for dtype in (torch.float32, torch.float8_e8m0fnu):
            got = quantize(x, FP8_BLOCK, scale_dtype=dtype)
            same(got, by_reference(x, FP8_BLOCK, scale_dtype=dtype))

    @pytest.mark.gpu
    def test_every_divisor_at_every_border(self):
        """All mantissas of a divisor, the seven numbers around each border, as the module says."""
        triton = pytest.importorskip("triton")
        tl = triton.language
        from dsv4.triton._lib import nvfp4

        @triton.jit
        def kernel(wrong, BLOCK: tl.constexpr):
            start = tl.program_id(0) * BLOCK
            bits = 0x3F800000 + start + tl.arange(0, BLOCK)
            divisor = bits.to(tl.float32, bitcast=True)
            shift, high, low = nvfp4.divisor(divisor)
            bad = tl.where(high == tl.div_rn(1.0, divisor), 0, 1)
            for sixteenth in range(16):
                border = 1.0 + sixteenth * 0.0625
                for ulp in range(-3, 4):
                    x = ((divisor * border).to(tl.int32, bitcast=True) + ulp).to(
                        tl.float32, bitcast=True
                    )
                    got = nvfp4.quotient(x, shift, high, low)
                    expected = tl.div_rn(x, divisor)
                    bad += ((got > border) != (expected > border)).to(tl.int32)
                    bad += ((got < border) != (expected < border)).to(tl.int32)
            tl.store(wrong + tl.program_id(0), tl.sum(bad, 0))

        wrong = torch.full((1 << 13,), -1, dtype=torch.int32, device="cuda")
        kernel[(1 << 13,)](wrong, BLOCK=1024)
        assert not bool(wrong.any())

    @pytest.mark.gpu
    @pytest.mark.parametrize("name", ["dynamic_scale", "fp8_block_scale"])
    def test_every_mantissa_divided_by_a_constant(self, name):
        """Divide by 2688 and by 448, as one division; of numbers near the least scale, too."""
        triton = pytest.importorskip("triton")
        tl = triton.language
        from dsv4.triton._lib import nvfp4

        function = getattr(nvfp4, name)
        divisor = {"dynamic_scale": 2688.0, "fp8_block_scale": 448.0}[name]

        @triton.jit
        def kernel(out, exponent, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
            offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            x = (((exponent + 127) << 23) + offsets).to(tl.float32, bitcast=True)
            tl.store(out + offsets, FUNCTION(x))

        for exponent in (-127, -126, -119, -118, -117, -115, -61, -60, 0, 127):
            got = torch.empty(1 << 23, device="cuda")
            kernel[(1 << 13,)](got, exponent, function, BLOCK=1024)
            bits = torch.arange(1 << 23, dtype=torch.int32) + ((exponent + 127) << 23)
            x = bits.view(torch.float32)
            expected = torch.where(x == 0, 1.0, (x / divisor).clamp(min=2.0**-126))
            assert_bitwise(got.cpu(), expected, f"scales of 2^{exponent}")

    @pytest.mark.gpu
    def test_every_bfloat16_at_every_border_of_e2m1(self):
        """Products within 5 ulp of ``x / border``, for every mantissa of x; and any products.

        Beside x, its neighbours and their negatives, zeros of both signs, and numbers far above and
        below are divided by that product too. Some products are 0: codes 0, signs too.
        """
        triton = pytest.importorskip("triton")
        tl = triton.language
        from dsv4.triton._lib import nvfp4

        @triton.jit
        def kernel(x, products, codes, CONVERT: tl.constexpr, BLOCK: tl.constexpr):
            row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            values = tl.load(x + row[:, None] * 8 + tl.arange(0, 8)[None, :])
            packed = nvfp4.e2m1_codes(values, tl.load(products + row), CONVERT, True)
            tl.store(codes + row[:, None] * 4 + tl.arange(0, 4)[None, :], packed)

        mantissas = 1 + torch.arange(128) / 128
        near = neighbours((mantissas[:, None] / torch.tensor(E2M1_BORDERS)), 5)
        x = mantissas[:, None, None].expand(near.shape).flatten().repeat(8)
        product = near.flatten().repeat(8) * 2.0 ** torch.arange(-60, 52, 14).repeat_interleave(
            near.numel()
        )
        x = x * 2.0 ** torch.arange(-60, 52, 14).repeat_interleave(near.numel())
        seeds = strategies.normal(0, (2, 1 << 20))
        x, product = torch.cat((x, seeds[0])), torch.cat((product, seeds[1].abs() + 2.0**-20))
        size = x.numel() // 128 * 128
        x, product = x[:size].bfloat16(), product[:size]
        product[::97] = 0.0
        adjacent = (x.view(torch.int16)[:, None] + torch.tensor([-1, 0, 1])).to(torch.int16)
        adjacent = adjacent.view(torch.bfloat16)
        others = torch.stack((x * 0, x * 2.0**-9, x * -256), -1)
        values = torch.cat((adjacent, -adjacent[:, :2], others), -1).cuda()
        product = product.cuda()
        codes = torch.empty((size, 4), dtype=torch.uint8, device="cuda")
        kernel[(size // 128,)](values, product, codes, nvfp4.conversion(codes), BLOCK=128)
        expected = encode_e2m1(values.float() / product[:, None])
        assert_bitwise(codes, pack(torch.where(product[:, None] > 0, expected, 0)), "code")


class TestTiles:
    @settings(max_examples=12)
    @given(
        draw=strategies.draws(-30, 30),
        shape=st.sampled_from(NVFP4_SHAPES),
        scaling=st.sampled_from(["static", "tensor", "token", "weight"]),
        layout=st.sampled_from((formats.LINEAR, formats.SWIZZLED)),
        dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
        few_rows=st.sampled_from([0, 256]),
        part=st.sampled_from([16, 128]),
    )
    def test_nvfp4_equals_the_reference(
        self, device, monkeypatch, draw, shape, scaling, layout, dtype, few_rows, part
    ):
        """More rows and columns than a tile, and ragged ones; padding is zero, whatever was there.

        Memory that a kernel forgets to write is full of NaN here.
        """
        # From how many rows on, other tiles; and of how many blocks on, rows are shared.
        monkeypatch.setattr("dsv4.triton._lib.nvfp4_tile._FEW_ROWS", few_rows)
        monkeypatch.setattr("dsv4.triton._lib.nvfp4_tile._SHARE_BLOCKS", part)
        x = draw.build(shape, dtype, device)
        static = 0.01 if scaling == "static" else None
        arguments = {"scaling": scaling, "layout": layout, "global_scale": static}
        with poisoned_memory():
            got = quantize(x, **arguments)
        same(got, by_reference(x, **arguments))
        for dtype_ in (torch.float32, torch.bfloat16):
            with use_backend("reference"):
                expected = dequantize(got, dtype_)
            assert_bitwise(dequantize(got, dtype_), expected, "value")

    @settings(max_examples=10)
    @given(
        draw=strategies.draws(-30, 30),
        shape=st.sampled_from([(1, 1, 32), (2, 3, 96), (1, 130, 32), (1, 1, 4128)]),
        layout=st.sampled_from((formats.LINEAR, formats.SWIZZLED)),
        dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    )
    def test_mxfp4_equals_the_reference(self, device, draw, shape, layout, dtype):
        x = draw.build(shape, dtype, device)
        got = quantize(x, MXFP4, layout=layout)
        same(got, by_reference(x, MXFP4, layout=layout))
        with use_backend("reference"):
            expected = dequantize(got)
        assert_bitwise(dequantize(got), expected, "value")

    @settings(max_examples=10)
    @given(
        draw=strategies.draws(-30, 30),
        shape=st.sampled_from([(1, 1, 1), (2, 3, 7), (1, 130, 129), (2, 128, 128), (1, 300, 20)]),
        scale_dtype=st.sampled_from([torch.float32, torch.float8_e8m0fnu]),
        dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    )
    def test_fp8_equals_the_reference(self, device, draw, shape, scale_dtype, dtype):
        x = draw.build(shape, dtype, device)
        got = quantize(x, FP8_BLOCK, scale_dtype=scale_dtype)
        same(got, by_reference(x, FP8_BLOCK, scale_dtype=scale_dtype))
        with use_backend("reference"):
            expected = dequantize(got, torch.float16)
        assert_bitwise(dequantize(got, torch.float16), expected, "value")

    def test_segments(self, device):
        parts = [quantize(strategies.normal(i, (3 + i, 32)).to(device)) for i in range(3)]
        whole = formats.cat_rows(parts)
        expected = torch.cat([dequantize(part) for part in parts])
        assert_bitwise(dequantize(whole), expected, "value")

    def test_a_row_view_is_read_in_place(self, device):
        """Rows of a wider tensor: the gap between them is not part of the matrix."""
        wide = strategies.normal(5, (6, 96)).to(device)
        wide[:, 64:] = torch.nan
        for fmt in FORMATS:
            same(quantize(wide[:, :64], fmt), by_reference(wide[:, :64].contiguous(), fmt))

    @pytest.mark.parametrize("scaling", ["static", "tensor", "token", "weight"])
    def test_two_runs_give_the_same_bits(self, device, scaling):
        x = strategies.normal(1, (33, 256), torch.bfloat16).to(device)
        static = 0.01 if scaling == "static" else None
        first, two = (quantize(x, scaling=scaling, global_scale=static) for _ in range(2))
        same(first, two)

    def test_what_no_kernel_holds_goes_to_the_reference(self, device):
        x = strategies.normal(1, (1, 65552)).to(device)
        same(quantize(x, scaling="token"), by_reference(x, scaling="token"))
        q = quantize(strategies.normal(1, (2, 16)).to(device))
        assert dequantize(q, torch.float64).dtype == torch.float64


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", ["static", "tensor", "token", "weight"])
@pytest.mark.parametrize("layout", [formats.LINEAR, formats.SWIZZLED])
def test_replays_of_a_graph(scaling, layout):
    static = torch.tensor([0.01], device="cuda") if scaling == "static" else None
    arguments = {"scaling": scaling, "layout": layout, "global_scale": static}
    x = strategies.normal(0, (33, 4096), torch.bfloat16).cuda()
    quantize(x, **arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = quantize(x, **arguments)
        values = dequantize(got, torch.bfloat16)
    for seed in (1, 2):
        x.copy_(strategies.normal(seed, (33, 4096), torch.bfloat16) * seed)
        for poisoned in (got.codes, got.scales.view(torch.uint8)):
            poisoned.fill_(0xFF)
        values.fill_(torch.nan)
        graph.replay()
        expected = quantize(x, **arguments)
        same(got, expected)
        assert_bitwise(values, dequantize(expected, torch.bfloat16), "value")


@pytest.mark.parametrize("exponent", [-110, -8, 70])
@pytest.mark.parametrize("scaling", ["static", "token"])
def test_rows_of_several_chunks_at_any_scale(device, monkeypatch, exponent, scaling):
    """Rows by the kernels of many rows, with scales of usual size and far from it."""
    monkeypatch.setattr("dsv4.triton._lib.nvfp4_tile._FEW_ROWS", 0)
    monkeypatch.setattr("dsv4.triton.norm._FEW_ROWS", 0)
    x = strategies.normal(exponent, (2, 2048), torch.float32) * 2.0 ** (exponent + 8)
    scale = torch.full((1,), 2.0**exponent, device=device) if scaling == "static" else None
    arguments = {"scaling": scaling, "global_scale": scale}
    x = x.to(torch.bfloat16).to(device)
    same(quantize(x, **arguments), by_reference(x, **arguments))
    weight = torch.full((2048,), 2.0 ** (exponent + 8), dtype=torch.bfloat16, device=device)
    normed, result = rms_norm_quantize(x, weight, **arguments)
    same(result, by_reference(normed, **arguments))
    heads = x.reshape(2, 16, 128)
    cos, sin = (t.to(device) for t in torch.ones(2, 2, 8))
    result = rope_quantize(heads, cos, sin, inverse=True, groups=2, **arguments)
    rotated = rope(heads, cos[:, None], sin[:, None], inverse=True).reshape(2, 2, 1024)
    same(result, by_reference(rotated, **arguments))
    result = swiglu_quantize(x, None, **arguments)
    same(result, by_reference(swiglu(x, None), **arguments))
