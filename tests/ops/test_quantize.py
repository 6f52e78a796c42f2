"""Quantise and dequantise, bitwise against ml_dtypes and compressed-tensors, and by properties."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize as ct_dequantize
from compressed_tensors.quantization.lifecycle.forward import quantize as ct_quantize
from compressed_tensors.quantization.utils.helpers import calculate_qparams
from hypothesis import assume, example, given
from hypothesis import strategies as st

from dsv4.ops.quantize import dequantize, quantize
from dsv4.quant import formats
from dsv4.quant.elements import unpack
from dsv4.quant.formats import MXFP4, NVFP4, QuantizedTensor
from dsv4.testing import oracles, strategies
from dsv4.testing.assertions import assert_bitwise, assert_pure

KERNELS = ("triton",)
OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
SCALINGS = ("static", "tensor", "token", "weight")
CT = QuantizationArgs(
    num_bits=4,
    type="float",
    group_size=16,
    strategy="tensor_group",
    symmetric=True,
    scale_dtype=torch.float8_e4m3fn,
)


def build(draw, shape, device, dtype=torch.float32):
    x = draw.build(shape, dtype)
    return x, x.to(device)


class TestNvfp4:
    @given(
        draw=strategies.draws(-100, 100),
        rows=strategies.rows(6),
        blocks=st.integers(1, 5),
        scaling=st.sampled_from(SCALINGS),
        exponent=st.integers(-20, 20),
        dtype=strategies.float_dtypes(),
    )
    @example(strategies.Draw(0, 0, "nan"), 1, 1, "token", 0, torch.float32)
    @example(strategies.Draw(0, 0, "huge"), 2, 2, "static", 0, torch.float32)
    @example(strategies.Draw(0, 0, "denormal"), 2, 1, "tensor", 0, torch.float32)
    @example(strategies.Draw(0, -149), 2, 1, "weight", 0, torch.float32)
    def test_equals_ml_dtypes_bitwise(self, device, draw, rows, blocks, scaling, exponent, dtype):
        x, on_device = build(draw, (rows, 16 * blocks), device, dtype)
        static = float(oracles.f32(1.37 * 2.0**exponent)) if scaling == "static" else None
        q = quantize(on_device, scaling=scaling, global_scale=static).validate()
        codes, bits, scale = oracles.nvfp4(x.float().numpy(), scaling, static)
        assert_bitwise(q.global_scale.cpu(), torch.from_numpy(scale), "global scale")
        assert_bitwise(q.scales.view(torch.uint8).cpu(), torch.from_numpy(bits), "block scale")
        assert_bitwise(unpack(q.codes).cpu(), torch.from_numpy(codes), "code")

    @given(seed=strategies.seeds(), weight=st.booleans())
    def test_the_order_of_the_divisions(self, device, seed, weight):
        """Block maxima within two ulp of a tie between two scales, where the orders disagree.

        Activations divide by 6 and then by s, weights by the product 6 s; a product with 1/6, as
        torch computes a division of a CUDA tensor by a number, is neither.
        """
        scale = strategies.normal(seed, (256,)).abs() + 0.5
        bytes_ = torch.randint(8, 0x7E, (256,), generator=strategies.generator(seed))
        below, above = (
            (bytes_ + i).to(torch.uint8).view(torch.float8_e4m3fn).double() for i in (0, 1)
        )
        near = (6 * scale.double() * (below + above) / 2).float()
        ulp = torch.arange(-2, 3, dtype=torch.int32)
        amax = (near.view(torch.int32)[:, None] + ulp).view(torch.float32).flatten()
        rows = scale.repeat_interleave(5)
        x = amax[:, None].repeat(1, 16)
        six = oracles.f32(6)
        first = (amax.numpy() / six) / rows.numpy()
        second = amax.numpy() / (six * rows.numpy())
        third = (amax.numpy() * (oracles.f32(1) / six)) / rows.numpy()
        expected, *others = (
            torch.from_numpy(ratio.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
            for ratio in ((second, first, third) if weight else (first, second, third))
        )
        assert all(bool((expected != other).any()) for other in others)  # this sample can tell
        scaling = "weight" if weight else "static"
        q = quantize(x.to(device), scaling=scaling, global_scale=rows.to(device))
        assert_bitwise(q.scales.view(torch.uint8).cpu()[:, 0], expected, "block scale")

    @given(
        draw=strategies.finite_draws(-12, 12),
        rows=st.integers(1, 6),
        blocks=st.integers(1, 5),
        exponent=st.integers(-8, 8),
    )
    def test_equals_compressed_tensors_bitwise(self, device, draw, rows, blocks, exponent):
        """Global scales that are powers of two, so that their reciprocal direction is exact.

        compressed-tensors replaces block scales of 0 by 0.125, and cannot hold infinities, so
        blocks with scale 0 or past the range are compared by value.
        """
        x, on_device = build(draw, (rows, 16 * blocks), device)
        assume(bool((x.abs() < 1e30).all()))
        reciprocal = torch.tensor([2.0**exponent])
        wide = x.unflatten(-1, (blocks, 16))
        theirs, _ = calculate_qparams(wide.amin(-1), wide.amax(-1), CT, reciprocal)
        theirs = theirs.to(torch.float8_e4m3fn)
        rounded = ct_quantize(x, theirs.float(), None, CT, global_scale=reciprocal)
        packed = pack_fp4_to_uint8(rounded)
        q = quantize(on_device, scaling="static", global_scale=1 / reciprocal.item())
        live = q.scales.float().cpu() != 0
        assert_bitwise(q.scales.float().cpu()[live], theirs.float()[live], "block scale")
        mine, other = (unpack(c).unflatten(-1, (blocks, 16)) for c in (q.codes.cpu(), packed))
        # They drop the sign of a zero input; the value is the same.
        zero = (wide == 0) & (other == 0) & (mine == 8)
        assert_bitwise(mine.where(~zero, 0)[live], other[live], "code")
        assert not bool(mine[~live].any())

    @given(seed=strategies.seeds(), exponent=st.integers(-8, 8))
    def test_every_code_under_every_scale_dequantises_as_both_oracles_do(
        self, device, seed, exponent
    ):
        """256 scale bytes x 16 codes; the negative and NaN scale bytes too."""
        codes = torch.arange(16, dtype=torch.uint8).reshape(1, 8, 2)
        packed = (codes[..., 0] | codes[..., 1] << 4).repeat(256, 1)
        scales = torch.arange(256, dtype=torch.uint8).reshape(256, 1).view(torch.float8_e4m3fn)
        scale = torch.tensor([2.0**exponent])
        q = QuantizedTensor(packed, scales, scale, NVFP4).to(device)
        got = dequantize(q).cpu()
        values = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        blocks = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        expected = torch.from_numpy(values * blocks[:, None] * oracles.f32(2.0**exponent))
        assert_bitwise(got, expected, "value by ml_dtypes")
        theirs = ct_dequantize(
            unpack_fp4_from_uint8(packed, 256, 16, dtype=torch.float32),
            scales.float(),
            args=CT,
            global_scale=1 / scale,
            dtype=torch.float32,
        )
        assert_bitwise(got, theirs, "value by compressed-tensors")

    @given(draw=strategies.finite_draws(-12, 12), dtype=strategies.float_dtypes())
    def test_dequantise_rounds_once(self, device, draw, dtype):
        _, on_device = build(draw, (3, 64), device)
        q = quantize(on_device)
        codes = unpack(q.codes).cpu().numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        scale = q.scales.float().cpu().double().repeat_interleave(16, -1)
        exact = torch.from_numpy(codes) * scale * q.global_scale.cpu().double()
        expected = exact if dtype == torch.float64 else exact.float().to(dtype)
        assert_bitwise(dequantize(q, dtype).cpu(), expected, "value")

    @given(draw=strategies.finite_draws(-30, 30), scaling=st.sampled_from(SCALINGS[1:]))
    def test_dynamic_scales_never_saturate(self, device, draw, scaling):
        """The block maximum gets the largest code; no block is clipped by more than a rounding."""
        x, on_device = build(draw, (5, 64), device)
        q = quantize(on_device, scaling=scaling)
        sf = q.scales.float().cpu()
        row = q.row_scale().cpu()[:, None]
        amax = x.unflatten(-1, (4, 16)).abs().amax(-1)
        codes = unpack(q.codes).cpu().unflatten(-1, (4, 16)) & 7
        normal = (sf >= 2.0**-6) & (amax > 0)
        assert bool((codes.amax(-1)[normal] == 7).all())
        assert bool((amax.double() <= 6 * 448 * row.double() * (1 + 2.0**-22)).all())
        short = amax.double() - 6 * sf.double() * row.double()
        assert bool((short[normal] <= amax.double()[normal] / 16).all())

    @given(draw=strategies.draws(-10, 10), scaling=st.sampled_from(SCALINGS))
    def test_idempotent(self, device, draw, scaling):
        """Quantising what was dequantised, at the same global scale, changes no normal block."""
        _, x = build(draw, (4, 48), device)
        static = 0.02 if scaling == "static" else None
        q = quantize(x, scaling=scaling, global_scale=static)
        again = quantize(
            dequantize(q),
            scaling="weight" if scaling == "weight" else "static",
            global_scale=q.global_scale,
        )
        sf = q.scales.float()
        stable = (sf >= 2.0**-6) | (sf == 0) | torch.isnan(sf)
        if scaling == "weight":  # a block of zeros has scale 1, a block that rounded to zero not
            stable &= dequantize(q).unflatten(-1, (3, 16)).abs().amax(-1) > 0
        assert_bitwise(again.scales.float()[stable], sf[stable], "block scale")
        codes, before = (unpack(t.codes).unflatten(-1, (3, 16))[stable] for t in (again, q))
        assert_bitwise(codes, before, "code")

    @given(
        draw=strategies.draws(-10, 10),
        power=st.integers(-30, 30),
        scaling=st.sampled_from(SCALINGS[1:]),
    )
    def test_powers_of_two_move_into_the_global_scale(self, device, draw, power, scaling):
        assume(draw.special not in ("huge", "denormal", "tiny"))
        _, x = build(draw, (4, 48), device)
        assume(bool((x != 0).any()))
        first, two = quantize(x, scaling=scaling), quantize(x * 2.0**power, scaling=scaling)
        assert_bitwise(two.codes, first.codes, "code")
        assert_bitwise(two.scales.view(torch.uint8), first.scales.view(torch.uint8), "block scale")
        moved = torch.where(
            first.global_scale == 1, first.global_scale, first.global_scale * 2.0**power
        )
        if scaling != "token":
            moved = first.global_scale * 2.0**power
        finite_row = (x * torch.isfinite(x)).nan_to_num().abs().amax(-1) > 0
        keep = finite_row if scaling == "token" else slice(None)
        if draw.special in ("none", "saturating"):
            assert_bitwise(two.global_scale[keep], moved[keep], "global scale")

    @given(draw=strategies.draws(), scaling=st.sampled_from(SCALINGS))
    def test_sign_symmetry(self, device, draw, scaling):
        _, x = build(draw, (4, 48), device)
        static = 0.01 if scaling == "static" else None
        plus, minus = (quantize(v, scaling=scaling, global_scale=static) for v in (x, -x))
        assert_bitwise(plus.scales.view(torch.uint8), minus.scales.view(torch.uint8), "scale")
        alive = (plus.scales.float() > 0)[..., None]
        flipped = (unpack(minus.codes).unflatten(-1, (3, 16)) ^ 8).where(alive, 0)
        assert_bitwise(unpack(plus.codes).unflatten(-1, (3, 16)), flipped, "code")

    @given(
        draw=strategies.draws(),
        format=st.sampled_from([NVFP4, MXFP4]),
        row=st.integers(0, 4),
        block=st.integers(0, 3),
    )
    def test_slices_on_block_borders(self, device, draw, format, row, block):
        _, x = build(draw, (5, 128), device)
        scale = {"scaling": "static", "global_scale": 0.01} if format == NVFP4 else {}
        width = 32 * block
        whole, part = quantize(x, format, **scale), quantize(x[row:, width:], format, **scale)
        assert_bitwise(part.codes, whole.codes[row:, width // 2 :], "code")
        expected = whole.scales.view(torch.uint8)[row:, width // format.block[1] :]
        assert_bitwise(part.scales.view(torch.uint8), expected, "scale")

    @given(
        draw=strategies.draws(),
        kind=st.sampled_from(["nan", "inf", "-inf"]),
        scaling=st.sampled_from(SCALINGS),
    )
    def test_a_non_finite_block_is_nan_and_touches_nothing_else(self, device, draw, kind, scaling):
        draw = strategies.Draw(draw.seed, draw.exponent)
        _, x = build(draw, (3, 64), device)
        poisoned = x.clone()
        at = draw.seed % 64
        poisoned[1, at] = float(kind)
        clean = x.clone()
        clean[1, at // 16 * 16 : at // 16 * 16 + 16] = 0
        static = 0.01 if scaling == "static" else None
        got, expected = (
            quantize(t, scaling=scaling, global_scale=static) for t in (poisoned, clean)
        )
        assert_bitwise(got.global_scale, expected.global_scale, "global scale")
        values, other = dequantize(got), dequantize(expected)
        other[1, at // 16 * 16 : at // 16 * 16 + 16] = float("nan")
        assert_bitwise(values, other, "value")
        assert got.scales.view(torch.uint8)[1, at // 16] == 0x7F
        assert not bool(got.codes[1, at // 16 * 8 : at // 16 * 8 + 8].any())

    def test_pitfall_30_zero_blocks_and_the_ends_of_the_range(self, device):
        """Blocks: zeros, below 2^-10, between, the largest. Activations and weights differ."""
        s = 2.0**-5
        a = torch.tensor([0.0, 2.0**-11, 2.0**-9 * 1.5, 448.0, 1000.0]) * 6 * s
        x = (torch.ones(16) * a[:, None]).reshape(1, 80).to(device)
        active = quantize(x, scaling="static", global_scale=s)
        assert active.scales.float().tolist() == [[0, 0, 2.0**-8, 448, 448]]
        assert not bool(active.codes[0, :16].any())
        weight = quantize(x, scaling="weight", global_scale=s)
        assert weight.scales.float().tolist() == [[1, 2.0**-9, 2.0**-8, 448, 448]]
        for q in (active, weight):
            values = dequantize(q)
            assert torch.isfinite(values).all()
            assert bool((values[0, 48:] == 448 * 6 * s).all())  # saturated, not NaN
        assert bool((dequantize(active)[0, :32] == 0).all())
        # 6 * 2^-11 * s under the smallest scale 2^-9 * s is 1.5: kept by the clamp, lost without.
        assert bool((dequantize(weight)[0, 16:32] == 1.5 * 2.0**-9 * s).all())

    @pytest.mark.parametrize("scaling", ["tensor", "token", "weight"])
    def test_all_zeros(self, device, scaling):
        q = quantize(torch.zeros(3, 32, device=device), scaling=scaling)
        q.validate(check_values=True)
        assert bool((q.global_scale == 1).all())
        assert not bool(dequantize(q).any())

    def test_a_bad_global_scale_gives_nan_where_it_cannot_be_read(self, device):
        """The behaviour on a device: the operator itself, without the public function's check."""
        for value in (0.0, -1.0, float("nan"), float("inf")):
            scale = torch.tensor([value], device=device)
            x = torch.ones(2, 16, device=device)
            codes, scales, total = torch.ops.dsv4.quantize_nvfp4(
                x, scale, "static", "linear", "auto"
            )
            assert torch.isnan(dequantize(QuantizedTensor(codes, scales, total, NVFP4))).all()

    @given(
        draw=strategies.finite_draws(-5, 5),
        batch=st.sampled_from([(1,), (3,), (2, 2)]),
        scaling=st.sampled_from(["tensor", "token", "weight"]),
        layout=st.sampled_from((formats.LINEAR, formats.SWIZZLED)),
    )
    def test_batches_are_quantised_matrix_by_matrix(self, device, draw, batch, scaling, layout):
        _, x = build(draw, (*batch, 5, 32), device)
        q = quantize(x, scaling=scaling, layout=layout).validate()
        single = quantize(x.reshape(-1, 5, 32)[-1], scaling=scaling, layout=layout)
        last = q[-1] if len(batch) == 1 else q[-1][-1]
        assert_bitwise(last.codes, single.codes, "code")
        assert_bitwise(dequantize(last), dequantize(single), "value")

    def test_global_scale_per_matrix_and_per_row(self, device):
        x = strategies.normal(3, (2, 3, 32)).to(device)
        row_scales = torch.tensor([[0.01], [0.03]], device=device)
        rows = torch.tensor([[0.01, 0.02, 0.03]] * 2, device=device)
        q = quantize(x, scaling="static", global_scale=row_scales).validate()
        assert_bitwise(
            q[1].codes, quantize(x[1], scaling="static", global_scale=0.03).codes, "code"
        )
        q = quantize(x, scaling="static", global_scale=rows).validate()
        expected = quantize(x[:, 1:2], scaling="static", global_scale=0.02)
        assert_bitwise(q.codes[:, 1:2], expected.codes, "code")
        assert q.global_scale.data_ptr() != rows.data_ptr()


class TestContract:
    @given(draw=strategies.draws(), rows=strategies.rows(9))
    def test_strided_input(self, device, draw, rows):
        _, x = build(draw, (rows, 64), device)
        for view in (strategies.strided(x), x.T.contiguous().T):
            for fmt in formats.FORMATS.values():
                first, two = quantize(x, fmt), quantize(view, fmt)
                assert_bitwise(first.codes.view(torch.uint8), two.codes.view(torch.uint8), "code")

    @pytest.mark.parametrize("fmt", list(formats.FORMATS))
    @pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (0, 3, 64)])
    def test_no_rows(self, device, fmt, shape):
        q = quantize(torch.empty(shape, device=device), fmt).validate()
        assert q.shape == shape
        assert dequantize(q).shape == shape
        scalings = ("token", "weight") if fmt == "nvfp4" else ()
        for scaling in scalings:
            assert quantize(torch.empty(shape, device=device), scaling=scaling).validate()

    @given(draw=strategies.draws(-20, 20))
    def test_float64_is_float32_rounded_first(self, device, draw):
        """The codes of a float64 oracle are those of the float32 computation."""
        x = draw.build((4, 64)).to(device)
        for fmt in formats.FORMATS.values():
            first, two = quantize(x, fmt), quantize(x.double(), fmt)
            assert_bitwise(first.codes.view(torch.uint8), two.codes.view(torch.uint8), "code")

    BAD = (
        ({"x": torch.ones(2, 32, dtype=torch.int32)}, TypeError, "x has dtype int32"),
        ({"x": torch.ones(32)}, ValueError, r"x has shape \[32\]"),
        ({"x": torch.ones(2, 24)}, ValueError, "24 columns, wanted a positive multiple of 16"),
        ({"x": torch.ones(2, 0)}, ValueError, "0 columns"),
        ({"x": torch.ones(2, 48), "format": "mxfp4"}, ValueError, "multiple of 32"),
        ({"format": "nvfp5"}, ValueError, "format is 'nvfp5'"),
        ({"scaling": "row"}, ValueError, "scaling is 'row'"),
        ({"layout": "blocked"}, ValueError, "layout is 'blocked'"),
        ({"scaling": "static"}, ValueError, "global_scale is None"),
        ({"global_scale": 1.0}, ValueError, "'tensor' computes it"),
        ({"format": "mxfp4", "global_scale": 1.0}, ValueError, "mxfp4 has none"),
        ({"scaling": "static", "global_scale": 0.0}, ValueError, "global_scale is 0.0"),
        ({"scaling": "static", "global_scale": float("nan")}, ValueError, "global_scale is nan"),
        ({"scaling": "static", "global_scale": torch.zeros(1)}, ValueError, "is 0.0 at"),
        ({"scaling": "static", "global_scale": -torch.ones(2)}, ValueError, "is -1.0 at"),
        ({"scaling": "static", "global_scale": torch.ones(3)}, ValueError, r"shape \[3\]"),
        ({"scaling": "static", "global_scale": torch.ones(1).half()}, TypeError, "float16"),
        ({"scale_dtype": torch.float32}, ValueError, "scale_dtype is torch.float32"),
        ({"format": "fp8_block", "scale_dtype": torch.float16}, ValueError, "scale_dtype is"),
        ({"backend": "cuda"}, ValueError, "backend is 'cuda'"),
    )

    @pytest.mark.parametrize(("changes", "error", "words"), BAD)
    def test_wrong_arguments_are_named(self, changes, error, words):
        arguments = {"x": torch.ones(2, 32), **changes}
        with pytest.raises(error, match=words):
            quantize(arguments.pop("x"), **arguments)

    def test_dequantise_refuses(self):
        q = quantize(torch.ones(2, 32))
        with pytest.raises(TypeError, match=r"dtype is torch\.int8"):
            dequantize(q, torch.int8)

    @pytest.mark.rarely_interpreted
    @pytest.mark.parametrize("layout", [formats.LINEAR, formats.SWIZZLED])
    def test_opcheck(self, device, layout):
        x = strategies.normal(0, (3, 64)).to(device)
        ops = torch.ops.dsv4
        unit_scale = torch.ones(1, device=device)
        calls = [
            (ops.quantize_nvfp4, (x, None, "token", layout, "auto")),
            (ops.quantize_nvfp4, (x, None, "tensor", layout, "auto")),
            (ops.quantize_nvfp4, (x, unit_scale, "static", layout, "auto")),
            (ops.quantize_mxfp4, (x, layout, "auto")),
            (ops.quantize_fp8_block, (x, torch.float32, "auto")),
        ]
        for fmt in (NVFP4, MXFP4):
            q = quantize(x, fmt, layout=layout)
            rest = (q.global_scale, [], fmt.name, layout, torch.bfloat16, "auto")
            calls.append((ops.dequantize, (q.codes, q.scales, *rest)))
        for op, args in calls:
            float8 = any(isinstance(a, torch.Tensor) and a.element_size() == 1 for a in args)
            # Without test_schema: it compares inputs by torch.allclose, which cannot take float8.
            checks = OPCHECKS[1:] if float8 else OPCHECKS
            torch.library.opcheck(op.default, args, test_utils=checks)
            assert_pure(op.default, *args)

    @pytest.mark.rarely_interpreted
    @pytest.mark.parametrize("fmt", list(formats.FORMATS))
    @pytest.mark.parametrize("dynamic", [False, True])
    def test_compiles_whole(self, device, fmt, dynamic):
        def there_and_back(x):
            return dequantize(quantize(x, fmt))

        torch.compiler.reset()
        compiled = torch.compile(
            there_and_back, fullgraph=True, backend="aot_eager", dynamic=dynamic
        )
        for rows in (3, 5, 8):
            x = strategies.normal(rows, (rows, 64)).to(device)
            assert_bitwise(compiled(x), there_and_back(x), "value")

    @pytest.mark.gpu
    @given(draw=strategies.draws(-100, 100), scaling=st.sampled_from(SCALINGS))
    def test_the_gpu_gives_the_same_bits(self, draw, scaling):
        x = draw.build((64, 256))
        static = 0.0137 if scaling == "static" else None
        here, there = (quantize(t, scaling=scaling, global_scale=static) for t in (x, x.to("cuda")))
        assert_bitwise(there.codes.cpu(), here.codes, "code")
        assert_bitwise(there.scales.view(torch.uint8).cpu(), here.scales.view(torch.uint8), "scale")
        assert_bitwise(there.global_scale.cpu(), here.global_scale, "global scale")
        assert_bitwise(dequantize(there).cpu(), dequantize(here), "value")
