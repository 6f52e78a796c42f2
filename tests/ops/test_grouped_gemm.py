"""Product of sorted rows with their experts' weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4.ops.gemm import gemm
from dsv4.ops.grouped_gemm import grouped_gemm
from dsv4.ops.quantize import dequantize, quantize
from dsv4.quant import formats
from dsv4.quant.formats import FP8_BLOCK, MXFP4, NVFP4
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


def weights(seed, shape, fmt, device, **options):
    if fmt == NVFP4:
        options = {"scaling": "weight", **options}
    return quantize(strategies.normal(seed, shape).to(device), fmt, **options)


def offsets_of(counts, device):
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(device)


class TestValues:
    @given(
        seed=strategies.seeds(),
        counts=strategies.group_sizes(4),
        spare=st.integers(0, 3),
        fmt=st.sampled_from(FORMATS),
        activation=st.sampled_from(["bf16", "nvfp4", "fp8"]),
        static=st.booleans(),
        dtype=strategies.float_dtypes(),
        layout=st.sampled_from((formats.LINEAR, formats.SWIZZLED)),
    )
    def test_equals_one_gemm_per_expert(
        self, device, seed, counts, spare, fmt, activation, static, dtype, layout
    ):
        """Empty experts, all rows on one expert, and rows that belong to none, included."""
        options = {"layout": layout} if fmt.packed else {}
        weight = weights(seed, (4, 6, 64), fmt, device, **options)
        rows = sum(counts)
        x = strategies.normal(seed + 1, (rows + spare, 64), dtype).to(device)
        x[rows:] = float("nan")
        scale = None
        if static and activation == "nvfp4":
            scale = torch.tensor([0.001, 0.002, 0.004, 0.01], device=device)
        offsets = offsets_of(counts, device)
        got = grouped_gemm(x, weight, offsets, activation=activation, input_scale=scale)
        assert got.dtype == dtype
        start = 0
        for e, count in enumerate(counts):
            part = slice(start, start + count)
            expert_scale = None if scale is None else scale[e]
            expected = gemm(x[part], weight[e], activation=activation, input_scale=expert_scale)
            assert_bitwise(got[part], expected, f"expert {e}")
            start += count
        assert_bitwise(got[rows:], torch.zeros_like(got[rows:]), "rows of no expert")

    @given(
        draw=strategies.finite_draws(-8, 8),
        counts=strategies.group_sizes(3),
        activation=st.sampled_from(["bf16", "nvfp4", "fp8"]),
        plain=st.booleans(),
    )
    def test_within_the_budget_of_the_dense_gemm(self, device, draw, counts, activation, plain):
        if draw.special == "huge":
            draw = dataclasses.replace(draw, special="none")
        quantised = weights(draw.seed, (3, 5, 48), NVFP4, device)
        dense = dequantize(quantised, torch.float64)
        x = draw.build((sum(counts), 48), torch.float32, device)
        weight = dense.float() if plain else quantised
        got = grouped_gemm(x, weight, offsets_of(counts, device), activation=activation)
        left = x.double()
        if activation == "nvfp4":
            left = dequantize(quantize(x, scaling="token"), torch.float64)
        elif activation == "fp8" and len(x):
            left = dequantize(quantize(x, "fp8_token"), torch.float64)
        start = 0
        for e, count in enumerate(counts):
            part = slice(start, start + count)
            right = dense[e]
            budget = gemm_budget(left[part], right, torch.float32)
            assert_within_budget(got[part], left[part] @ right.T, budget, f"expert {e}")
            start += count

    @given(seed=strategies.seeds(), counts=strategies.group_sizes(3))
    def test_a_plain_weight_is_an_ordinary_product(self, device, seed, counts):
        weight = strategies.small_integers(seed, (3, 5, 20), torch.bfloat16).to(device)
        x = strategies.small_integers(seed + 1, (sum(counts), 20), torch.bfloat16).to(device)
        got = grouped_gemm(x, weight, offsets_of(counts, device), out_dtype=torch.float32)
        expert = torch.repeat_interleave(torch.arange(3), torch.tensor(counts)).to(device)
        expected = torch.einsum("rk,rnk->rn", x.float(), weight.float()[expert])
        assert_bitwise(got, expected, "product")

    @given(seed=strategies.seeds(), counts=strategies.group_sizes(3, 5))
    def test_pitfall_28_gate_and_up_keep_their_global_scales(self, device, seed, counts):
        """[E, 2I, K] with one global scale for the gate and one for the up rows of each expert."""
        gate, up = (weights(seed + i, (3, 4, 32), NVFP4, device) for i in (0, 1))
        up = dataclasses.replace(up, global_scale=up.global_scale * 8)
        joined = formats.cat_rows([gate, up])
        x = strategies.normal(seed, (sum(counts), 32)).to(device)
        offsets = offsets_of(counts, device)
        got = grouped_gemm(x, joined, offsets)
        expected = torch.cat([grouped_gemm(x, w, offsets) for w in (gate, up)], -1)
        start = 0
        for e, count in enumerate(counts):
            part = slice(start, start + count)
            right = dequantize(joined, torch.float64)[e]
            budget = gemm_budget(x[part].double(), right, torch.float32)
            assert_within_budget(got[part], expected[part].double(), 2 * budget, "product")
            start += count

    @given(
        seed=strategies.seeds(),
        kind=st.sampled_from([float("nan"), float("inf")]),
        activation=st.sampled_from(["bf16", "nvfp4", "fp8"]),
    )
    def test_a_non_finite_row_is_nan_and_alone(self, device, seed, kind, activation):
        weight = weights(seed, (2, 6, 32), NVFP4, device)
        x = strategies.normal(seed, (6, 32)).to(device)
        poisoned = x.clone()
        poisoned[1, seed % 32] = kind
        offsets = offsets_of([3, 3], device)
        got, expected = (
            grouped_gemm(t, weight, offsets, activation=activation) for t in (poisoned, x)
        )
        assert torch.isnan(got[1]).all()
        rest = [0, 2, 3, 4, 5]
        assert_bitwise(got[rest], expected[rest], "other rows")

    @given(seed=strategies.seeds(), counts=strategies.group_sizes(3, 6))
    def test_rows_permute_within_an_expert(self, device, seed, counts):
        weight = strategies.small_integers(seed, (3, 5, 32)).to(device)
        x = strategies.small_integers(seed + 1, (sum(counts), 32)).to(device)
        offsets = offsets_of(counts, device)
        pieces, start = [], 0
        for count in counts:
            order = torch.randperm(count, generator=strategies.generator(seed)) + start
            pieces.append(order)
            start += count
        order = torch.cat(pieces).to(device)
        got = grouped_gemm(x[order], weight, offsets)
        assert_bitwise(got, grouped_gemm(x, weight, offsets)[order], "product")


class TestContract:
    @pytest.mark.parametrize("rows", [0, 3])
    @pytest.mark.parametrize("plain", [False, True])
    def test_no_expert_has_rows(self, device, rows, plain):
        weight = weights(0, (2, 5, 32), NVFP4, device)
        weight = dequantize(weight) if plain else weight
        offsets = torch.zeros(3, dtype=torch.int32, device=device)
        x = torch.full((rows, 32), float("nan"), device=device)
        got = grouped_gemm(x, weight, offsets)
        assert_bitwise(got, torch.zeros(rows, 5, device=device), "product")

    def test_an_expert_without_rows_costs_nothing(self, device):
        """Its weight is not read: NaN scales and codes do not matter."""
        weight = weights(0, (3, 5, 32), NVFP4, device)
        weight.scales.view(torch.uint8)[1] = 0x7F
        x = strategies.normal(0, (4, 32)).to(device)
        got = grouped_gemm(x, weight, offsets_of([2, 0, 2], device))
        assert torch.isfinite(got).all()

    @given(seed=strategies.seeds())
    def test_strided_input(self, device, seed):
        weight = strategies.small_integers(seed, (2, 5, 32)).to(device)
        x = strategies.small_integers(seed, (4, 32)).to(device)
        offsets = offsets_of([1, 3], device)
        expected = grouped_gemm(x, weight, offsets)
        for view in (strategies.strided(x), x.T.contiguous().T):
            assert_bitwise(grouped_gemm(view, weight, offsets), expected, "product")

    WEIGHT = weights(0, (2, 4, 32), NVFP4, "cpu")
    BAD = (
        ({"x": torch.ones(3, 32).int()}, TypeError, "x has dtype int32"),
        ({"x": torch.ones(32)}, ValueError, r"x has shape \[32\]"),
        ({"x": torch.tensor(1.0)}, ValueError, r"x has shape \[\]"),
        ({"x": torch.ones(3, 16)}, ValueError, "16 columns, wanted 32"),
        ({"weight": torch.ones(2, 4, 32).int()}, TypeError, "weight has dtype int32"),
        ({"weight": torch.ones(4, 32)}, ValueError, r"weight has shape \[4, 32\]"),
        ({"offsets": torch.tensor([0, 1, 3])}, TypeError, "offsets has dtype int64"),
        ({"offsets": torch.tensor([0, 3]).int()}, ValueError, "offsets has shape"),
        ({"offsets": torch.tensor([0, 2, 1]).int()}, ValueError, r"offsets are \[0, 2, 1\]"),
        ({"offsets": torch.tensor([0, 2, 4]).int()}, ValueError, "at most 3"),
        ({"offsets": torch.tensor([1, 2, 3]).int()}, ValueError, "wanted 0"),
        ({"activation": "fp4"}, ValueError, "activation is 'fp4'"),
        ({"input_scale": torch.ones(2)}, ValueError, "activation is 'bf16'"),
        ({"input_scale": torch.ones(3), "activation": "nvfp4"}, ValueError, "input_scale has"),
        (
            {"input_scale": torch.tensor([1.0, 0.0]), "activation": "nvfp4"},
            ValueError,
            r"input_scale is 0.0 at \[1\]",
        ),
        ({"input_scale": torch.ones(2).double(), "activation": "nvfp4"}, TypeError, "float64"),
        ({"out_dtype": torch.uint8}, TypeError, "out_dtype is"),
        ({"step_rows": -1}, ValueError, "step_rows is -1, wanted 0 or more"),
        ({"step_experts": -2}, ValueError, "step_experts is -2, wanted 0 or more"),
        ({"backend": "nothing"}, ValueError, "backend is 'nothing'"),
    )

    @pytest.mark.parametrize(("changes", "error", "words"), BAD)
    def test_wrong_arguments_are_named(self, changes, error, words):
        arguments = {
            "x": torch.ones(3, 32),
            "weight": self.WEIGHT,
            "offsets": torch.tensor([0, 1, 3]).int(),
            **changes,
        }
        positional = [arguments.pop(name) for name in ("x", "weight", "offsets")]
        with pytest.raises(error, match=words):
            grouped_gemm(*positional, **arguments)

    @pytest.mark.parametrize("fmt", ["plain", *(f.name for f in FORMATS)])
    def test_opcheck(self, device, fmt):
        x = strategies.normal(0, (5, 32)).to(device)
        offsets = offsets_of([2, 3], device)
        parts = (strategies.normal(1, (2, 4, 32)).to(device), None, None, None)
        if fmt != "plain":
            w = weights(0, (2, 4, 32), formats.FORMATS[fmt], device)
            parts = (w.codes, w.scales, w.global_scale, None)
        for activation in ("bf16", "nvfp4", "fp8"):
            scale = torch.ones(2, device=device) if activation == "nvfp4" else None
            args = (x, *parts, [], offsets, fmt, "linear", activation, scale)
            row_scale = None if activation == "nvfp4" else torch.ones(5, device=device)
            args = (*args, None, "linear", row_scale, torch.bfloat16, False, 0, 0, "auto")
            op = torch.ops.dsv4.grouped_gemm.default
            torch.library.opcheck(op, args, test_utils=OPCHECKS)
            assert_pure(op, *args)

    @pytest.mark.parametrize("plain", [False, True])
    @pytest.mark.parametrize("dynamic", [False, True])
    def test_compiles_whole(self, device, plain, dynamic):
        weight = weights(0, (2, 4, 32), NVFP4, device)
        weight = dequantize(weight) if plain else weight

        def product(x, offsets):
            return grouped_gemm(x, weight, offsets, activation="nvfp4")

        torch.compiler.reset()
        compiled = torch.compile(product, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for counts in ([1, 2], [0, 5], [0, 0]):
            x = strategies.normal(sum(counts), (sum(counts), 32)).to(device)
            offsets = offsets_of(counts, device)
            assert_bitwise(compiled(x, offsets), product(x, offsets), "product")
