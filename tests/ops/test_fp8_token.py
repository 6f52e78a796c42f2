"""Operators with FP8 results: the bits of the operator and the quantiser, one after the other."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4.dispatch import arguments, explain, use_backend
from dsv4.ops.fp8_note import multiplied_as_bfloat16
from dsv4.ops.fp8_token import moe_gather_fp8, rms_norm_fp8, swiglu_fp8
from dsv4.ops.gemm import gemm
from dsv4.ops.grouped_gemm import grouped_gemm
from dsv4.ops.grouped_gemm_swiglu import grouped_gemm_swiglu
from dsv4.ops.grouped_gemm_swiglu_fp8 import grouped_gemm_swiglu_fp8
from dsv4.ops.moe import moe_gather, moe_permute
from dsv4.ops.norm import rms_norm
from dsv4.ops.quantize import quantize
from dsv4.ops.swiglu import swiglu
from dsv4.quant.exact_fp8 import with_row_exponent
from dsv4.quant.formats import FP8_TOKEN, FRAGMENTS, LINEAR, NVFP4
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise, assert_pure

KERNELS = ("triton",)
LAYOUTS = st.sampled_from([LINEAR, FRAGMENTS])
DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


def same(got, expected):
    """Codes and scales have the same bits, those of NaN apart."""
    codes = [q.codes.view(torch.uint8) for q in (got, expected)]
    codes = [torch.where((c & 0x7F) == 0x7F, 0x7F, c) for c in codes]
    assert_bitwise(*codes, "code")
    assert_bitwise(*(q.scales.view(torch.uint8) for q in (got, expected)), "scale")
    assert got.layout == expected.layout


def by_tokens(x, layout):
    with use_backend("reference"):
        return quantize(x, FP8_TOKEN, layout=layout)


def columns_of(layout, columns):
    return columns - columns % 128 + 128 if layout == FRAGMENTS else columns


class TestBits:
    @given(
        draw=strategies.draws(-8, 8),
        rows=strategies.rows(9),
        columns=st.sampled_from([1, 40, 128, 300, 512]),
        layout=LAYOUTS,
        dtype=DTYPES,
    )
    def test_norm(self, device, draw, rows, columns, layout, dtype):
        columns = columns_of(layout, columns)
        x = draw.build((rows, columns), dtype, device, block=128)
        weight = strategies.normal(draw.seed, (columns,), dtype).to(device)
        y, q = rms_norm_fp8(x, weight, 1e-6, result_layout=layout)
        same(q.validate(), by_tokens(y, layout))
        if columns >= 128:  # a narrower row is added up in another order
            assert_bitwise(y, rms_norm(x, weight, 1e-6), "norm")

    @given(
        draw=strategies.draws(-3, 6),
        rows=strategies.rows(19),
        columns=st.sampled_from([1, 24, 128, 200]),
        layout=LAYOUTS,
        order=st.sampled_from(["concatenated", "interleaved"]),
        weighted=st.booleans(),
        dtype=DTYPES,
    )
    def test_swiglu(self, device, draw, rows, columns, layout, order, weighted, dtype):
        columns = columns_of(layout, columns)
        gate_up = draw.build((rows, 2 * columns), dtype, device)
        weight = strategies.normal(draw.seed, (rows,), dtype).to(device) if weighted else None
        options = {"layout": order, "row_weight": weight}
        got = swiglu_fp8(gate_up, 10.0, result_layout=layout, **options).validate()
        same(got, by_tokens(swiglu(gate_up, 10.0, **options), layout))

    @given(
        draw=strategies.draws(-8, 8),
        tokens=st.integers(0, 7),
        top_k=st.integers(1, 3),
        columns=st.sampled_from([1, 40, 128, 1300]),
        layout=LAYOUTS,
        dtype=DTYPES,
    )
    def test_gather(self, device, draw, tokens, top_k, columns, layout, dtype):
        columns = columns_of(layout, columns)
        x = draw.build((tokens, columns), dtype, device, block=128)
        generator = strategies.generator(draw.seed)
        ids = torch.randint(-1, 4, (tokens, top_k), generator=generator).to(device)
        _, _, rows = moe_permute(ids, 4)
        weights = strategies.normal(draw.seed, (tokens, top_k), dtype).to(device)
        got, row_weight = moe_gather_fp8(x, rows, weights, result_layout=layout)
        got.validate()
        assert_bitwise(row_weight[rows.long()], weights, "weight")
        same(got, by_tokens(moe_gather(x, rows), layout))

    def test_a_row_weight_that_is_no_number_spoils_its_row_alone(self, device):
        gate_up = strategies.normal(1, (4, 400), torch.bfloat16).to(device)
        weight = torch.tensor([1.0, torch.nan, torch.inf, 1.0], device=device)
        got = swiglu_fp8(gate_up, 10.0, row_weight=weight)
        same(got, by_tokens(swiglu(gate_up, 10.0, row_weight=weight), LINEAR))


@functools.cache
def weights_of(seed, inner):
    """Gate and up, and down, of three experts, made by the reference, which is faster here."""
    with use_backend("reference"):
        return [
            quantize(strategies.normal(seed + i, shape), NVFP4, scaling="weight")
            for i, shape in enumerate(((3, 2 * inner, 128), (3, 16, inner)))
        ]


class TestExperts:
    """The experts' two GEMMs with FP8 rows between them."""

    def operands(self, seed, device, counts=(3, 0, 2), inner=128):
        weights = weights_of(seed % 2, inner)
        offsets = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(device)
        x = strategies.normal(seed + 2, (sum(counts) + 1, 128), torch.bfloat16).to(device)
        return x, *(weight.to(device) for weight in weights), offsets

    @given(seed=strategies.seeds(), layout=LAYOUTS, activation=st.sampled_from(["bf16", "fp8"]))
    def test_both_operators_in_one(self, device, seed, layout, activation):
        x, gate_up, _, offsets = self.operands(seed, device)
        weight = strategies.normal(seed, (x.shape[0],)).to(device)
        options = {"row_weight": weight, "activation": activation}
        got = grouped_gemm_swiglu_fp8(x, gate_up, offsets, 10.0, result_layout=layout, **options)
        same(
            got.validate(),
            by_tokens(grouped_gemm_swiglu(x, gate_up, offsets, 10.0, **options), layout),
        )

    @given(seed=strategies.seeds(), layout=LAYOUTS)
    def test_rows_that_come_quantised_are_those_that_a_gemm_rounds(self, device, seed, layout):
        x, gate_up, down, offsets = self.operands(seed, device)
        q = quantize(x, FP8_TOKEN, layout=layout)
        expected = grouped_gemm(x, gate_up, offsets, activation="fp8")
        assert_bitwise(grouped_gemm(q, gate_up, offsets), expected, "product")
        inner = grouped_gemm_swiglu(x, gate_up, offsets, None, activation="fp8")
        assert_bitwise(grouped_gemm_swiglu(q, gate_up, offsets, None), inner, "SwiGLU")
        again = grouped_gemm_swiglu_fp8(q, gate_up, offsets, None, result_layout=layout)
        same(again, by_tokens(inner, layout))
        expected = grouped_gemm(inner, down, offsets, activation="fp8")
        assert_bitwise(grouped_gemm(again, down, offsets), expected, "down projection")

    def test_a_row_that_is_no_number_is_alone(self, device):
        x, gate_up, down, offsets = self.operands(0, device)
        clean = grouped_gemm(grouped_gemm_swiglu_fp8(x, gate_up, offsets, 10.0), down, offsets)
        x[3, 9] = torch.inf
        inner = grouped_gemm_swiglu_fp8(x, gate_up, offsets, 10.0, activation="fp8")
        spoiled = grouped_gemm(inner, down, offsets)
        assert spoiled[3].isnan().all()
        rest = [0, 1, 2, 4]
        assert spoiled[rest].isfinite().all()
        assert clean.isfinite().all()

    def test_wrong_rows_are_refused(self):
        x, gate_up, _, offsets = self.operands(0, "cpu")
        q = quantize(x, FP8_TOKEN)
        with pytest.raises(ValueError, match="x is quantised, but activation is 'fp8'"):
            grouped_gemm(q, gate_up, offsets, activation="fp8")
        with pytest.raises(ValueError, match="which is for activations"):
            grouped_gemm(x, quantize(strategies.normal(0, (3, 64, 128)), FP8_TOKEN), offsets)
        x, gate_up, _, offsets = self.operands(0, "cpu", inner=192)
        with pytest.raises(ValueError, match="192 columns, wanted a multiple of 128"):
            grouped_gemm_swiglu_fp8(x, gate_up, offsets, None, result_layout=FRAGMENTS)


@pytest.mark.rarely_interpreted
def test_opcheck(device):
    x = strategies.normal(0, (3, 256)).to(device)
    weight = torch.ones(256, device=device)
    ids = torch.tensor([[0, 1], [1, -1], [1, 0]], device=device)
    rows = moe_permute(ids, 2)[2]
    ops = torch.ops.dsv4
    for op, args in (
        (ops.rms_norm_fp8, (x, weight, 1e-6, LINEAR)),
        (ops.swiglu_fp8, (x, 10.0, "interleaved", None, FRAGMENTS)),
        (ops.moe_gather_fp8, (x, rows, torch.ones(3, 2, device=device), FRAGMENTS)),
    ):
        torch.library.opcheck(op.default, (*args, "auto"))
        assert_pure(op.default, *args, "auto")


def test_explain_says_how_fp8_activations_run():
    """Here the reference runs; the note is what the kernels' rows say of the same call."""
    x, weight = torch.ones(2, 64), quantize(strategies.normal(0, (16, 64)), scaling="weight")
    assert explain(gemm, x, weight, activation="fp8").note is None
    call = arguments(gemm, x, weight, activation="fp8")
    assert "multiplied as bfloat16, at its rate; the weight is not exact in FP8: " in (
        multiplied_as_bfloat16(call)
    )
    assert "of 64 block scales are no power of two" in multiplied_as_bfloat16(call)
    assert multiplied_as_bfloat16(arguments(gemm, x, weight)) is None
    weight.scales.fill_(1.0)
    exact, _ = with_row_exponent(weight)
    said = multiplied_as_bfloat16(arguments(gemm, x, exact, activation="fp8"))
    assert said.endswith("the weight is exact in FP8")
