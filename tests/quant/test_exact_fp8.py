"""Weights that are exact in E4M3: what qualifies, and the conversion there and back."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.ops.quantize import dequantize, quantize
from dsv4.quant import formats
from dsv4.quant.elements import decode_e2m1
from dsv4.quant.exact_fp8 import (
    HIGHEST,
    LOWEST,
    SPAN,
    Exactness,
    examine,
    from_e4m3,
    to_e4m3,
    with_row_exponent,
)
from dsv4.quant.formats import FRAGMENTS, LINEAR, NVFP4, QuantizedTensor, mxfp4_to_nvfp4
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise

LAYOUTS = st.sampled_from([LINEAR, FRAGMENTS])
EXPONENTS = range(-9, 9)  # of the powers of two that E4M3 holds


def weight_of(exponents, seed=0, batch=()):
    """Random codes under block scales ``2 ** exponents [*batch, N, K/16]``."""
    powers = torch.as_tensor(exponents)
    scales = (2.0 ** powers.double()).to(torch.float8_e4m3fn)
    shape = (*powers.shape[:-1], powers.shape[-1] * 8)
    codes = torch.randint(0, 256, shape, generator=strategies.generator(seed)).to(torch.uint8)
    return QuantizedTensor(codes, scales, torch.full((*batch, 1), 0.37), NVFP4)


def spread_rows(seed, spans, blocks):
    """Exponents of rows whose largest and smallest differ by ``spans``, anywhere in the range."""
    generator = strategies.generator(seed)
    rows = torch.empty(len(spans), blocks, dtype=torch.int64)
    for row, span in enumerate(spans):
        low = int(torch.randint(-9, 9 - span, (), generator=generator))
        rows[row] = torch.randint(low, low + span + 1, (blocks,), generator=generator)
        ends = torch.randperm(blocks, generator=generator)[:2]
        rows[row, ends[0]], rows[row, ends[1]] = low, low + span
    return rows


def test_the_limits_are_those_of_e4m3():
    """Every E2M1 value times 2^k is an E4M3 number for these k, and for no k around them."""
    values = decode_e2m1(torch.arange(16, dtype=torch.uint8), torch.float64).numpy()
    exact = []
    for k in range(-16, 16):
        scaled = values * 2.0**k
        exact.append((scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) == scaled).all())
    assert [k for k, fits in zip(range(-16, 16), exact, strict=True) if fits] == list(
        range(LOWEST, HIGHEST + 1)
    )


def test_every_code_under_every_pair_of_exponents():
    """All spans up to the limit convert and come back; those beyond do not qualify."""
    packed = torch.tensor([16 * high + low for high in range(16) for low in range(16)])
    codes = packed.to(torch.uint8).view(1, 32, 8).repeat(18 * 18, 1, 1)  # [pairs, blocks, bytes]
    exponents = torch.tensor([[low] * 16 + [high] * 16 for low in EXPONENTS for high in EXPONENTS])
    scales = (2.0 ** exponents.double()).to(torch.float8_e4m3fn)
    whole = QuantizedTensor(codes.flatten(1), scales, torch.ones(1), NVFP4)
    span = (exponents[:, 0] - exponents[:, 16]).abs()
    counts = examine(whole).exactness
    assert counts.wide_rows == int((span > SPAN).sum()) == 12
    assert (counts.no_power, counts.wide_blocks, counts.blocks) == (0, 12 * 16, 18 * 18 * 32)
    rows = torch.nonzero(span <= SPAN).flatten()
    part = QuantizedTensor(
        whole.codes[rows], scales.view(torch.uint8)[rows].view(scales.dtype), torch.ones(1), NVFP4
    )
    weight, counts = with_row_exponent(part)
    assert counts == Exactness(len(rows) * 32)
    values = to_e4m3(weight).double() * 2.0 ** weight.row_exponent.double()[:, None]
    assert_bitwise(values, dequantize(part, torch.float64), "value")
    assert_bitwise(from_e4m3(to_e4m3(weight), weight), part.codes, "code")


@given(
    seed=strategies.seeds(),
    spans=st.lists(st.integers(0, SPAN), min_size=16, max_size=16),
    tiles=st.integers(1, 3),
    layout=LAYOUTS,
)
def test_a_weight_within_the_span_is_exact_and_comes_back(seed, spans, tiles, layout):
    exponents = spread_rows(seed, spans, 4 * tiles)
    linear = weight_of(exponents, seed)
    weight, counts = with_row_exponent(linear.with_layout(layout))
    assert counts.is_exact
    assert counts.reason is None
    assert weight.row_exponent.shape == (16,)
    relative = exponents - weight.row_exponent[:, None]
    assert LOWEST <= int(relative.min()) <= int(relative.max()) <= HIGHEST
    # Rows without small scales agree, whatever their largest is.
    assert (weight.row_exponent[exponents.amin(-1) >= -6] == 2).all()
    fp8 = to_e4m3(weight)
    scale = linear.global_scale.double() * 2.0 ** weight.row_exponent.double()[:, None]
    assert_bitwise(fp8.double() * scale, dequantize(linear, torch.float64), "value")
    assert_bitwise(from_e4m3(fp8, weight), linear.codes, "code")


@given(
    seed=strategies.seeds(),
    beyond=st.integers(SPAN + 1, 17),
    row=st.integers(0, 15),
    layout=LAYOUTS,
)
def test_one_row_beyond_the_span_is_counted(seed, beyond, row, layout):
    spans = [3] * 16
    spans[row] = beyond
    exponents = spread_rows(seed, spans, 8)
    examined = examine(weight_of(exponents, seed).with_layout(layout))
    too_low = int((exponents < exponents.amax(-1, keepdim=True) - SPAN).sum())
    assert examined.exactness == Exactness(128, 0, 1, too_low)
    assert examined.row_exponent is None
    assert f"{too_low} of 128 blocks are more than 2^14 below" in examined.exactness.reason


@given(seed=strategies.seeds(), byte=st.integers(0, 127), layout=LAYOUTS)
def test_any_other_scale_is_counted(seed, byte, layout):
    """Each of E4M3's bytes: the powers of two qualify, zero, NaN and the rest do not."""
    linear = weight_of([[0] * 4] * 16, seed)
    where = seed % 64
    linear.scales.view(torch.uint8).view(-1)[where] = byte
    value = float(linear.scales.view(-1)[where].float())
    power = value > 0 and np.frexp(value)[0] == 0.5
    counts = examine(linear.with_layout(layout)).exactness
    assert counts.no_power == (0 if power else 1)
    if not power:
        assert counts.reason == "1 of 64 block scales are no power of two"


@given(seed=strategies.seeds(), spread=st.integers(0, 6))
def test_mxfp4_weights_qualify(seed, spread):
    """What DeepSeek publishes, converted without loss, loses nothing in FP8 either."""
    steps = torch.randint(-spread, spread + 1, (32, 4), generator=strategies.generator(seed))
    values = strategies.normal(seed, (32, 128)) * 2.0 ** steps.repeat_interleave(32, -1)
    converted, report = mxfp4_to_nvfp4(quantize(values, "mxfp4"))
    assert report.exact
    weight, counts = with_row_exponent(converted)
    assert counts.is_exact == (weight.row_exponent is not None)
    if weight.row_exponent is not None:
        assert_bitwise(from_e4m3(to_e4m3(weight), weight), converted.codes, "code")


def test_scales_from_data_do_not_qualify():
    weight = quantize(strategies.normal(0, (32, 128)), scaling="weight")
    counts = examine(weight).exactness
    assert counts.no_power > 100
    with pytest.raises(ValueError, match="has no row_exponent"):
        to_e4m3(weight)
    with pytest.raises(ValueError, match="wanted nvfp4"):
        examine(quantize(strategies.normal(0, (32, 128)), "mxfp4"))


def test_stacks_pieces_and_rows_that_are_joined(monkeypatch):
    """The result does not depend on how many rows are examined at once."""
    exponents = spread_rows(1, [5, 14] * 48, 4).view(2, 48, 4)
    stack = weight_of(exponents, batch=(2,)).with_layout(FRAGMENTS)
    whole, counts = with_row_exponent(stack)
    monkeypatch.setattr("dsv4.quant.exact_fp8._PIECE", 1)
    pieces, again = with_row_exponent(stack)
    assert counts == again == Exactness(2 * 48 * 4)
    assert_bitwise(pieces.row_exponent, whole.row_exponent, "exponent")
    assert_bitwise(whole[1].row_exponent, whole.row_exponent[1], "exponent")
    parts = [whole[0], whole[1]]
    joined = formats.cat_rows(parts)
    assert_bitwise(joined.row_exponent, whole.row_exponent.flatten(), "exponent")
    assert formats.cat_rows([parts[0], stack[1]]).row_exponent is None
    assert examine(weight_of(torch.zeros(0, 4))).row_exponent.shape == (0,)
    assert joined.to("meta").row_exponent.is_meta


def test_a_wrong_row_exponent_is_refused():
    weight = weight_of([[0] * 4] * 16)
    for exponent, error in ((torch.zeros(16), TypeError), (torch.zeros(15).char(), ValueError)):
        wrong = QuantizedTensor(
            weight.codes, weight.scales, weight.global_scale, NVFP4, row_exponent=exponent
        )
        with pytest.raises(error, match="row_exponent has"):
            wrong.validate()


@given(
    wrong=st.lists(st.sampled_from([0, 0, 0, 1, 3]), min_size=2, max_size=9),
    layout=st.sampled_from([LINEAR, FRAGMENTS]),
    wide=st.booleans(),
)
@example([1] * 6, LINEAR, False)
def test_matrices_of_a_stack_are_named(wrong, layout, wide):
    """With their blocks that are no powers of two, or one step beyond the span."""
    scales = torch.ones(len(wrong), 16, 8)
    for n, count in enumerate(wrong):
        scales[n, 2, :count] = 2.0**-9 if wide else 1.125
        if wide and count:
            scales[n, 2, 7] = 2.0**6
    codes = torch.zeros(len(wrong), 16, 64, dtype=torch.uint8)
    stack = QuantizedTensor(codes, scales.to(torch.float8_e4m3fn), torch.ones(len(wrong), 1), NVFP4)
    exactness = examine(stack.with_layout(layout)).exactness
    assert (exactness.wide_blocks if wide else exactness.no_power) == sum(wrong)
    assert exactness.inexact == {n: count for n, count in enumerate(wrong) if count}
    moved = dataclasses.replace(exactness, first=100)
    assert list(moved.inexact) == [100 + n for n in exactness.inexact]
    if not any(wrong):
        assert exactness == Exactness(len(wrong) * 16 * 8)
        return
    last = [f"{100 + n} (blocks: {count})" for n, count in enumerate(wrong) if count][:4][-1]
    assert f"of {len(wrong)} matrices of the stack have such blocks: 10" in moved.reason
    assert last in moved.reason
    assert ("more" in moved.where) == (sum(map(bool, wrong)) > 4)
    assert (exactness + exactness).inexact == {}
