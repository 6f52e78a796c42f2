"""Product with a quantised weight: error budget from float64, exact cases bitwise, properties."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from dsv4.ops.gemm import gemm
from dsv4.ops.quantize import dequantize, quantize
from dsv4.quant import formats
from dsv4.quant.elements import encode_e4m3
from dsv4.quant.formats import FP8_BLOCK, MXFP4, NVFP4, QuantizedTensor
from dsv4.testing import strategies
from dsv4.testing.assertions import (
    assert_bitwise,
    assert_pure,
    assert_within_budget,
    gemm_budget,
)

# Without test_schema: it compares inputs by torch.allclose, which cannot take float8.
OPCHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
FORMATS = [NVFP4, MXFP4, FP8_BLOCK]


def weight_of(seed, shape, fmt=NVFP4, device="cpu", **options):
    if fmt == NVFP4:
        options = {"scaling": "weight", **options}
    return quantize(strategies.normal(seed, shape).to(device), fmt, **options)


def exact_weight(seed, shape, device="cpu", global_scale=2.0**-3):
    """Codes 0, 0.5 .. 3 under scale 2 and a power-of-two global scale: small dyadic numbers.

    With integer activations every partial sum is exact in float32, in any order.
    """
    *batch, rows, columns = shape
    drawn = torch.randint(
        0, 16, (*batch, rows, columns // 2, 2), generator=strategies.generator(seed)
    )
    drawn = torch.where((drawn & 7) > 5, drawn & 8, drawn).to(torch.uint8)
    codes = drawn[..., 0] | drawn[..., 1] << 4
    scales = torch.full((*batch, rows, columns // 16), 2.0).to(torch.float8_e4m3fn)
    scale = torch.full((*batch, 1), global_scale)
    return QuantizedTensor(codes, scales, scale, NVFP4).to(device)


def operands(x, weight, activation, input_scale=None):
    """The float64 operands whose product gemm computes."""
    if activation == "nvfp4":
        scaling = "token" if input_scale is None else "static"
        x = dequantize(quantize(x, scaling=scaling, global_scale=input_scale), torch.float64)
    elif activation == "fp8":
        x = dequantize(quantize(x, "fp8_token"), torch.float64)
    return x.double(), dequantize(weight, torch.float64)


class TestValues:
    @given(
        draw=strategies.finite_draws(-10, 10),
        rows=strategies.rows(9),
        outputs=st.integers(1, 20),
        blocks=st.integers(1, 6),
        fmt=st.sampled_from(FORMATS),
        activation=st.sampled_from(["bf16", "nvfp4", "fp8"]),
        static=st.booleans(),
        dtype=strategies.float_dtypes(),
        layout=st.sampled_from((formats.LINEAR, formats.SWIZZLED)),
    )
    def test_within_the_budget_of_the_dense_gemm(
        self, device, draw, rows, outputs, blocks, fmt, activation, static, dtype, layout
    ):
        if draw.special == "huge":
            draw = dataclasses.replace(draw, special="none")
        options = {"layout": layout} if fmt.packed else {}
        weight = weight_of(draw.seed, (outputs, 32 * blocks), fmt, device, **options)
        x = draw.build((rows, 32 * blocks), dtype, device)
        assume(bool(torch.isfinite(x).all()))
        scale = torch.tensor([0.01], device=device) if static and activation == "nvfp4" else None
        left, right = operands(x, weight, activation, scale)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        got = gemm(x, weight, activation=activation, input_scale=scale, out_dtype=wide)
        assert got.shape == (rows, outputs)
        budget = gemm_budget(left, right, torch.float32)
        if dtype == torch.float64:
            budget = budget * 2.0**-26
        assert_within_budget(got, left @ right.T, budget, "product")
        narrow = gemm(x, weight, activation=activation, input_scale=scale)
        assert_bitwise(narrow, got.to(dtype), "product in the dtype of x")

    @given(draw=strategies.draws(-4, 4), rows=strategies.rows(9), seed=strategies.seeds())
    def test_float64_is_the_oracle(self, device, draw, rows, seed):
        """float64 input gives the dense float64 product of the same operands."""
        weight = weight_of(seed, (12, 64), device=device)
        x = strategies.normal(draw.seed, (rows, 64), torch.float64).to(device)
        for activation in ("bf16", "nvfp4", "fp8"):
            left, right = operands(x, weight, activation)
            got = gemm(x, weight, activation=activation)
            assert got.dtype == torch.float64
            error = (got - left @ right.T).abs()
            assert bool((error <= 200 * 2.0**-53 * (left.abs() @ right.abs().T)).all())

    @given(seed=strategies.seeds(), rows=strategies.rows(9), outputs=st.integers(1, 40))
    def test_exact_where_everything_is_dyadic(self, device, seed, rows, outputs):
        weight = exact_weight(seed, (outputs, 64), device)
        x = strategies.small_integers(seed, (rows, 64), torch.bfloat16).to(device)
        expected = (x.double() @ dequantize(weight, torch.float64).T).float()
        assert_bitwise(gemm(x, weight, out_dtype=torch.float32), expected, "product")

    @given(seed=strategies.seeds(), exponent=st.integers(-30, 30))
    def test_linear_in_the_global_scale(self, device, seed, exponent):
        """A power of two multiplies the result bitwise; the block scales are not touched."""
        weight = weight_of(seed, (10, 64), device=device)
        scaled = dataclasses.replace(weight, global_scale=weight.global_scale * 2.0**exponent)
        x = strategies.normal(seed + 1, (5, 64)).to(device)
        for activation in ("bf16", "nvfp4", "fp8"):
            first, two = (gemm(x, w, activation=activation) for w in (weight, scaled))
            assert_bitwise(two, first * 2.0**exponent, "product")

    @given(seed=strategies.seeds(), rows=st.integers(1, 12))
    def test_rows_permute_with_the_input(self, device, seed, rows):
        weight = exact_weight(seed, (9, 48), device)
        x = strategies.small_integers(seed, (rows, 48)).to(device)
        order = torch.randperm(rows, generator=strategies.generator(seed)).to(device)
        for activation in ("bf16", "nvfp4", "fp8"):
            whole = gemm(x, weight, activation=activation)
            part = gemm(x[order], weight, activation=activation)
            budget = gemm_budget(*operands(x[order], weight, activation), torch.float32)
            assert_within_budget(part, whole[order].double(), 2 * budget, "product")
            if activation == "bf16":
                assert_bitwise(part, whole[order], "product")

    @given(seed=strategies.seeds(), outputs=st.integers(1, 12))
    def test_output_rows_permute_with_the_weight(self, device, seed, outputs):
        weight = exact_weight(seed, (outputs, 48), device)
        order = torch.randperm(outputs, generator=strategies.generator(seed)).to(device)
        scales = weight.scales.view(torch.uint8)[order].view(torch.float8_e4m3fn)
        moved = dataclasses.replace(weight, codes=weight.codes[order], scales=scales)
        x = strategies.small_integers(seed, (4, 48)).to(device)
        assert_bitwise(gemm(x, moved), gemm(x, weight)[:, order], "product")

    @given(
        draw=strategies.draws(-3, 3),
        kind=st.sampled_from([float("nan"), float("inf"), -float("inf")]),
        activation=st.sampled_from(["bf16", "nvfp4", "fp8"]),
        static=st.booleans(),
        groups=st.sampled_from([1, 2]),
    )
    def test_a_non_finite_row_is_nan_and_alone(
        self, device, draw, kind, activation, static, groups
    ):
        weight = exact_weight(draw.seed, (8, 32), device)
        shape = (5, 32) if groups == 1 else (5, groups, 32)
        x = strategies.small_integers(draw.seed, shape).to(device)
        poisoned = x.clone()
        poisoned[2, ..., draw.seed % 32] = kind
        scale = torch.tensor([2.0**-4], device=device)
        scale = scale if static and activation == "nvfp4" else None
        got, expected = (
            gemm(t, weight, activation=activation, input_scale=scale, groups=groups)
            for t in (poisoned, x)
        )
        assert torch.isnan(got[2]).all()
        rest = [0, 1, 3, 4]
        assert_bitwise(got[rest], expected[rest], "other rows")
        assert torch.isfinite(expected).all()

    @given(
        seed=strategies.seeds(),
        groups=st.integers(2, 5),
        outputs=st.integers(1, 6),
        lead=st.sampled_from([(), (0,), (7,), (2, 3)]),
        activation=st.sampled_from(["bf16", "nvfp4", "fp8"]),
        static=st.booleans(),
    )
    def test_groups_equal_one_product_each(
        self, device, seed, groups, outputs, lead, activation, static
    ):
        parts = [weight_of(seed + g, (outputs, 32), device=device) for g in range(groups)]
        joined = formats.cat_rows(parts)
        x = strategies.normal(seed, (*lead, groups, 32)).to(device)
        scale = torch.tensor([0.002], device=device) if static and activation == "nvfp4" else None
        got = gemm(x, joined, activation=activation, input_scale=scale, groups=groups)
        separate = [
            gemm(x[..., g, :], part, activation=activation, input_scale=scale)
            for g, part in enumerate(parts)
        ]
        assert_bitwise(got, torch.stack(separate, -2), "product")


class TestPitfalls:
    @given(
        seed=strategies.seeds(),
        sizes=st.lists(st.integers(1, 9), min_size=2, max_size=3),
        exponents=st.lists(st.integers(-12, 12), min_size=3, max_size=3, unique=True),
        activation=st.sampled_from(["bf16", "nvfp4", "fp8"]),
        static=st.booleans(),
    )
    @example(seed=0, sizes=[4, 4], exponents=[0, 3, 1], activation="nvfp4", static=True)
    def test_pitfall_28_a_fused_matrix_keeps_both_global_scales(
        self, device, seed, sizes, exponents, activation, static
    ):
        """q_a and kv in one matrix equal the two matrices apart; one maximum for both does not."""
        parts = [
            exact_weight(seed + i, (n, 64), device, 2.0**e)
            for i, (n, e) in enumerate(zip(sizes, exponents, strict=False))
        ]
        fused = formats.cat_rows(parts)
        x = strategies.small_integers(seed, (6, 64)).to(device)
        scale = torch.tensor([2.0**-5], device=device) if static and activation == "nvfp4" else None
        options = {"activation": activation, "input_scale": scale}
        got = gemm(x, fused, **options)
        separate = torch.cat([gemm(x, part, **options) for part in parts], -1)
        budget = torch.cat([_budget(x, part, activation, scale) for part in parts], -1)
        assert_within_budget(got, separate.double(), 2 * budget, "product")
        if activation == "bf16":
            assert_bitwise(got, separate, "product")
        largest = fused.global_scale.amax(-1, keepdim=True)
        wrong = dataclasses.replace(fused, global_scale=largest, segments=())
        if bool((separate != 0).any(0).all()):
            assert not torch.allclose(gemm(x, wrong, **options), got, rtol=0.4, atol=0)

    @given(seed=strategies.seeds())
    def test_pitfall_29_the_global_scale_multiplies_the_sum(self, device, seed):
        """0.3 does not fit E4M3: folded into the block scales it would be off by up to 1/16."""
        weight = exact_weight(seed, (7, 64), device, 1.0)
        scaled = dataclasses.replace(weight, global_scale=torch.tensor([0.3], device=device))
        x = strategies.small_integers(seed, (4, 64)).to(device)
        assert_bitwise(gemm(x, scaled), gemm(x, weight) * scaled.global_scale, "product")
        folded = encode_e4m3(weight.scales.float() * 0.3)
        wrong = gemm(x, dataclasses.replace(weight, scales=folded))
        if bool(gemm(x, weight).any()):
            assert not torch.allclose(wrong, gemm(x, scaled), rtol=1e-3)

    @given(seed=strategies.seeds(), exponent=st.integers(-10, 10))
    def test_pitfall_25_a_reciprocal_scale_is_seen_in_the_product(self, device, seed, exponent):
        weight = exact_weight(seed, (5, 32), device, 2.0**exponent)
        packed, scale, reciprocal = formats.to_compressed_tensors(weight)
        x = strategies.small_integers(seed, (3, 32)).to(device)
        read = formats.from_compressed_tensors(packed, scale, reciprocal)
        assert_bitwise(gemm(x, read), gemm(x, weight), "product")
        assert reciprocal.item() == 2.0**-exponent

    @given(seed=strategies.seeds(), rows=st.integers(1, 140), blocks=st.integers(1, 5))
    def test_pitfall_31_padding_of_swizzled_scales_does_not_reach_the_product(
        self, device, seed, rows, blocks
    ):
        """NaN bytes in the padding change nothing."""
        weight = weight_of(seed, (rows, 16 * blocks), device=device)
        swizzled = weight.with_layout(formats.SWIZZLED)
        raw = torch.full_like(swizzled.scales.view(torch.uint8), 0x7F)
        offsets = [formats.scale_offset(m, k, blocks) for m in range(rows) for k in range(blocks)]
        index = torch.tensor(offsets, device=device)
        raw[index] = weight.scales.view(torch.uint8).flatten()
        dirty = dataclasses.replace(swizzled, scales=raw.view(torch.float8_e4m3fn))
        x = strategies.normal(seed, (3, 16 * blocks)).to(device)
        assert_bitwise(gemm(x, dirty), gemm(x, weight), "product")
        assert_bitwise(gemm(x, swizzled), gemm(x, weight), "product")

    @given(draw=strategies.finite_draws(-20, 20), over=st.integers(1, 6))
    def test_static_scales_clip_and_dynamic_ones_do_not(self, device, draw, over):
        """Activations past the calibrated range lose magnitude unless the scale is dynamic."""
        weight = exact_weight(draw.seed, (6, 32), device)
        x = strategies.normal(draw.seed, (4, 32)).to(device) * 2.0**draw.exponent
        calibrated = (x.abs().amax() / 2688 / 2.0**over).reshape(1)
        static = quantize(x, scaling="static", global_scale=calibrated)
        reached = dequantize(static).abs().amax()
        assert bool(reached <= 2688 * calibrated * (1 + 2.0**-22))
        left, right = operands(x, weight, "nvfp4")
        assert bool((left - x.double()).abs().amax() <= x.abs().amax() / 6)
        got = gemm(x, weight, activation="nvfp4")
        assert_within_budget(got, left @ right.T, gemm_budget(left, right, torch.float32))


def _budget(x, weight, activation, scale):
    return gemm_budget(*operands(x, weight, activation, scale), torch.float32)


class TestContract:
    @pytest.mark.parametrize("shape", [(32,), (0, 32), (3, 32), (2, 0, 32), (2, 3, 4, 32)])
    def test_any_leading_shape(self, device, shape):
        weight = exact_weight(0, (5, 32), device)
        x = strategies.small_integers(1, shape).to(device)
        for activation in ("bf16", "nvfp4", "fp8"):
            got = gemm(x, weight, activation=activation)
            assert got.shape == (*shape[:-1], 5)
            flat = gemm(x.reshape(-1, 32), weight, activation=activation) if x.numel() else got
            assert_bitwise(got, flat.reshape(got.shape), "product")

    @given(seed=strategies.seeds(), activation=st.sampled_from(["bf16", "nvfp4", "fp8"]))
    def test_strided_input(self, device, seed, activation):
        weight = exact_weight(seed, (5, 64), device)
        x = strategies.small_integers(seed, (6, 64)).to(device)
        expected = gemm(x, weight, activation=activation)
        for view in (strategies.strided(x), x.T.contiguous().T):
            assert not view.is_contiguous()
            got = gemm(view, weight, activation=activation)
            if activation == "bf16":
                assert_bitwise(got, expected, "product")
            budget = _budget(x, weight, activation, None)
            assert_within_budget(got, expected.double(), 2 * budget, "product")

    BAD = (
        ({"x": torch.ones(3, 32, dtype=torch.int64)}, TypeError, "x has dtype int64"),
        ({"x": torch.ones(3, 48)}, ValueError, "48 columns, wanted 32"),
        ({"x": torch.ones(())}, ValueError, r"x has shape \[\]"),
        ({"x": torch.ones(3, 4, 32), "groups": 2}, ValueError, r"wanted \[..., 2, K\]"),
        ({"groups": 3}, ValueError, "groups is 3, wanted a divisor of 4 rows"),
        ({"groups": 0}, ValueError, "groups is 0"),
        ({"activation": "int8"}, ValueError, "activation is 'int8'"),
        ({"out_dtype": torch.int8}, TypeError, "out_dtype is torch"),
        ({"weight": torch.ones(4, 32)}, TypeError, "weight is Tensor"),
        ({"weight": weight_of(0, (2, 4, 32))}, ValueError, r"weight has shape \[2, 4, 32\]"),
        ({"input_scale": torch.ones(1)}, ValueError, "activation is 'bf16'"),
        ({"input_scale": torch.ones(2), "activation": "nvfp4"}, ValueError, r"wanted \[1\]"),
        ({"input_scale": torch.zeros(1), "activation": "nvfp4"}, ValueError, "input_scale is 0.0"),
        (
            {"input_scale": torch.tensor(float("nan")), "activation": "nvfp4"},
            ValueError,
            "input_scale is nan",
        ),
        ({"input_scale": torch.ones(1).half(), "activation": "nvfp4"}, TypeError, "float16"),
        ({"backend": "triton-of-tomorrow"}, ValueError, "backend is"),
    )

    @pytest.mark.parametrize(("changes", "error", "words"), BAD)
    def test_wrong_arguments_are_named(self, changes, error, words):
        arguments = {"x": torch.ones(3, 32), "weight": weight_of(0, (4, 32)), **changes}
        with pytest.raises(error, match=words):
            gemm(arguments.pop("x"), arguments.pop("weight"), **arguments)

    def test_columns_that_do_not_fill_a_block(self):
        weight = weight_of(0, (4, 24), FP8_BLOCK)
        assert gemm(torch.ones(2, 24), weight).shape == (2, 4)
        with pytest.raises(ValueError, match="multiple of 16"):
            gemm(torch.ones(2, 24), weight, activation="nvfp4")

    def test_transposed_scales_are_refused(self):
        weight = weight_of(0, (4, 32))
        with pytest.raises(ValueError, match="scales have shape"):
            gemm(torch.ones(2, 32), dataclasses.replace(weight, scales=weight.scales.T))

    def test_a_bad_input_scale_gives_nan_where_it_cannot_be_read(self, device):
        w = exact_weight(0, (4, 32), device)
        for value in (0.0, float("nan"), float("inf"), -1.0):
            scale = torch.tensor([value], device=device)
            got = torch.ops.dsv4.gemm(
                torch.ones(2, 32, device=device),
                w.codes,
                w.scales,
                w.global_scale,
                None,
                [],
                "nvfp4",
                "linear",
                "nvfp4",
                scale,
                1,
                torch.float32,
                None,
                "linear",
                "auto",
            )
            assert torch.isnan(got).all()

    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
    @pytest.mark.parametrize("groups", [1, 2])
    def test_opcheck(self, device, fmt, groups):
        w = weight_of(0, (4, 32), fmt, device)
        x = strategies.normal(0, (3, 32) if groups == 1 else (3, 2, 32)).to(device)
        for activation in ("bf16", "nvfp4", "fp8"):
            scale = torch.ones(1, device=device) if activation == "nvfp4" else None
            args = (x, w.codes, w.scales, w.global_scale, None, [], fmt.name, w.layout, activation)
            args = (*args, scale, groups, torch.bfloat16, None, formats.LINEAR, "auto")
            torch.library.opcheck(torch.ops.dsv4.gemm.default, args, test_utils=OPCHECKS)
            assert_pure(torch.ops.dsv4.gemm.default, *args)

    @pytest.mark.parametrize("activation", ["bf16", "nvfp4", "fp8"])
    @pytest.mark.parametrize("dynamic", [False, True])
    def test_compiles_whole(self, device, activation, dynamic):
        weight = formats.cat_rows([exact_weight(i, (4, 32), device) for i in range(2)])
        scale = torch.tensor([0.5], device=device) if activation == "nvfp4" else None

        def product(x):
            return gemm(x, weight, activation=activation, input_scale=scale)

        torch.compiler.reset()
        compiled = torch.compile(product, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for rows in (2, 5, 0):
            x = strategies.small_integers(rows, (rows, 32)).to(device)
            assert_bitwise(compiled(x), product(x), "product")
