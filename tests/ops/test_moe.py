"""Permute, gather, combine: the order they share, and sums that are exact or within budget."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4.ops.moe import moe_combine, moe_gather, moe_gather_quantize, moe_permute, moe_sort
from dsv4.ops.quantize import quantize
from dsv4.quant.formats import LINEAR, SWIZZLED_EXPERTS, swizzle_scales, swizzled_size
from dsv4.testing import strategies as fuzz
from dsv4.testing.assertions import (
    assert_bitwise,
    assert_pure,
    assert_within_budget,
    unit_roundoff,
)

KERNELS = ("triton",)
U = unit_roundoff(torch.float32)


@st.composite
def routings(draw, smallest=0):
    """ids with duplicates, -1 and num_experts among them, sometimes all for one expert."""
    tokens, top_k = draw(fuzz.rows(9, smallest)), draw(st.integers(1, 5))
    experts, seed = draw(st.integers(1, 8)), draw(fuzz.seeds())
    low, high = draw(st.sampled_from([(0, experts), (-1, experts + 1), (0, 1)]))
    ids = torch.randint(low, high, (tokens, top_k), generator=fuzz.generator(seed))
    return ids.to(draw(st.sampled_from([torch.int32, torch.int64]))), experts, seed


@given(routing=routings(), data=st.data())
def test_permute_is_a_stable_counting_sort(device, routing, data):
    check_counting_sort(device, *routing[:2], data)


def check_counting_sort(device, ids, experts, data):
    first = data.draw(st.integers(0, experts - 1))
    local = data.draw(st.one_of(st.none(), st.integers(1, experts - first)))
    order, offsets, rows = moe_permute(
        ids.to(device), experts, first_expert=first, num_local_experts=local
    )
    assert [t.dtype for t in (order, offsets, rows)] == [torch.int32] * 3

    flat = ids.flatten().tolist()
    last = experts if local is None else first + local
    expected, ends = [], [0]
    for e in range(first, last):
        expected += [slot for slot, actual in enumerate(flat) if actual == e]
        ends.append(len(expected))
    expected += [slot for slot, actual in enumerate(flat) if not first <= actual < last]
    assert order.tolist() == expected
    assert offsets.tolist() == ends
    assert rows.shape == ids.shape
    assert rows.flatten()[order.long()].tolist() == list(range(len(flat)))


FAR = (-(2**63), -(2**32), -(2**31), -9, -2, 2**31 - 1, 2**31, 2**32, 2**63 - 1)


@st.composite
def bad_routings(draw):
    """ids of which one at least is out of range, by a little or by as much as can be."""
    ids, experts, seed = draw(routings(smallest=1))
    limits = torch.iinfo(ids.dtype)
    wrong = [bad for bad in (*FAR, experts + 1) if limits.min <= bad <= limits.max]
    bad = torch.tensor(draw(st.sampled_from(wrong)), dtype=ids.dtype)
    where = torch.rand(ids.shape, generator=fuzz.generator(seed)) < 0.3
    where.view(-1)[draw(st.integers(0, ids.numel() - 1))] = True
    return torch.where(where, bad, ids), experts, where


@given(routing=bad_routings(), data=st.data())
def test_ids_out_of_range_raise_on_the_cpu_and_choose_no_expert_elsewhere(device, routing, data):
    ids, experts, where = routing
    if device.type == "cpu":
        token, slot = where.nonzero()[0].tolist()
        words = rf"ids\[{token}, {slot}\] is {ids[token, slot]}, wanted an expert, 0 to"
        with pytest.raises(ValueError, match=f"moe_permute: {words} {experts - 1}, or -1 or"):
            moe_permute(ids, experts)
    else:
        check_counting_sort(device, ids, experts, data)


@given(routing=bad_routings(), data=st.data())
def test_unchecked_ids_out_of_range_choose_no_expert(device, monkeypatch, routing, data):
    """The behaviour on a device, here of every implementation."""
    modules = ["reference.moe"]
    if importlib.util.find_spec("triton"):
        modules.append("triton.moe_sort")
    for module in modules:
        monkeypatch.setattr(f"dsv4.{module}.check_ids", lambda ids, num_experts: None)
    check_counting_sort(device, *routing[:2], data)


@given(routing=routings())
def test_order_is_a_permutation_and_offsets_count(device, routing):
    ids, experts, _ = routing
    order, offsets, _ = moe_permute(ids.to(device), experts)
    assert sorted(order.tolist()) == list(range(ids.numel()))
    counts = [int((ids == e).sum()) for e in range(experts)]
    assert offsets.diff().tolist() == counts
    assert offsets[0] == 0


@given(routing=routings(), hidden=st.integers(1, 6), dtype=fuzz.float_dtypes())
def test_gather_copies_each_slots_token(device, routing, hidden, dtype):
    ids, experts, seed = routing
    top_k = ids.shape[1]
    x = fuzz.normal(seed, (ids.shape[0], hidden), dtype).to(device)
    order, _, rows = moe_permute(ids.to(device), experts)
    out = moe_gather(x, rows)
    assert_bitwise(out, x.repeat_interleave(top_k, 0)[order.long()])


def check_sort(device, x, ids, weights, experts, **held):
    """Compare with the operators it stands for, in memory of its own and in given memory."""
    x, ids, weights = (t.to(device) for t in (x, ids, weights))
    order, offsets, rows = moe_permute(ids, experts, **held)
    expected = moe_gather(x, rows), weights.flatten()[order.long()], offsets, rows
    out = torch.full_like(expected[0], torch.nan)
    actual = moe_sort(x, ids, weights, experts, **held)
    in_memory = moe_sort(x, ids, weights, experts, out=out, **held)
    assert in_memory[0] is out
    for name, expected_tensor, *both in zip(
        ("sorted rows", "weights", "offsets", "rows"), expected, actual, in_memory, strict=True
    ):
        for got in both:
            assert_bitwise(got, expected_tensor, name)


@given(routing=routings(), hidden=st.integers(0, 6), dtype=fuzz.float_dtypes(), data=st.data())
def test_sort_is_its_parts(device, routing, hidden, dtype, data):
    ids, experts, seed = routing
    first = data.draw(st.integers(0, experts - 1))
    local = data.draw(st.integers(1, experts - first))
    x, weights = fuzz.normal(seed, (ids.shape[0], hidden), dtype), fuzz.normal(seed, ids.shape)
    held = {"first_expert": first, "num_local_experts": local}
    check_sort(device, x, ids, weights, experts, **held)


@pytest.mark.parametrize("tokens", [85, 86])
def test_sort_of_more_slots_than_one_launch_takes(device, tokens):
    """85 tokens with six choices have 510 slots, 86 have 516."""
    ids = torch.randint(-1, 10, (tokens, 6), generator=fuzz.generator(tokens))
    x, weights = fuzz.normal(0, (tokens, 300)), fuzz.normal(1, ids.shape)
    check_sort(device, x, ids, weights, 9)


def test_sort_of_strided_input(device):
    ids = torch.tensor([[0, 1], [1, 3], [2, 0]], device=device)
    x, weights = fuzz.normal(0, (3, 32)).to(device), fuzz.normal(1, (3, 2)).to(device)
    strided = [fuzz.strided(t) for t in (x, ids, weights)]
    for got, expected in zip(moe_sort(*strided, 3), moe_sort(x, ids, weights, 3), strict=True):
        assert_bitwise(got, expected)


def experts_by_hand(x, ids, weights, factors, shared):
    """Sum over the slots of a token, in slot order, where expert e multiplies its rows by e's
    factor; slots of no expert count nothing. float64.
    """
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for t in range(ids.shape[0]):
        for j in range(ids.shape[1]):
            e = int(ids[t, j])
            if 0 <= e < len(factors):
                out[t] += weights[t, j].double() * (factors[e] * x[t].double())
    return out if shared is None else out + shared.double()


def run_experts(rows, offsets, factors, first=0):
    """Sorted rows times their expert's factor; NaN in the rows that no expert owns."""
    out = torch.full_like(rows, torch.nan)
    for e in range(len(offsets) - 1):
        owned = slice(int(offsets[e]), int(offsets[e + 1]))
        out[owned] = rows[owned] * factors[first + e]
    return out


@given(routing=routings(), hidden=st.integers(1, 6), shared=st.booleans())
def test_whole_path_is_exact_on_small_integers(device, routing, hidden, shared):
    ids, experts, seed = routing
    x = fuzz.small_integers(seed, (ids.shape[0], hidden)).to(device)
    weights = fuzz.small_integers(seed + 1, ids.shape).to(device)
    extra = fuzz.small_integers(seed + 2, x.shape).to(device) if shared else None
    factors = list(range(1, experts + 1))
    _, offsets, rows = moe_permute(ids.to(device), experts)
    y = run_experts(moe_gather(x, rows), offsets, factors)
    out = moe_combine(y, rows, offsets, weights, shared=extra)
    assert_bitwise(out + 0.0, experts_by_hand(x, ids, weights, factors, extra).float() + 0.0)


@given(routing=routings(), hidden=st.integers(1, 6), data=st.data())
def test_ranks_add_up_to_the_whole(device, routing, hidden, data):
    ids, experts, seed = routing
    x = fuzz.small_integers(seed, (ids.shape[0], hidden)).to(device)
    weights = fuzz.small_integers(seed + 1, ids.shape).to(device)
    factors = list(range(1, experts + 1))
    total = torch.zeros_like(x)
    first = 0
    for local in data.draw(fuzz.partitions(experts)):
        _, offsets, rows = moe_permute(
            ids.to(device), experts, first_expert=first, num_local_experts=local
        )
        y = run_experts(moe_gather(x, rows), offsets.tolist(), factors, first)
        total += moe_combine(y, rows, offsets, weights)
        first += local
    assert_bitwise(total + 0.0, experts_by_hand(x, ids, weights, factors, None).float() + 0.0)


@given(routing=routings(), hidden=st.integers(1, 6))
def test_gather_then_combine_of_one_choice_is_the_identity(device, routing, hidden):
    ids, experts, seed = routing
    ids = ids[:, :1].clamp(0, experts - 1)
    x = fuzz.normal(seed, (ids.shape[0], hidden)).to(device)
    _, offsets, rows = moe_permute(ids.to(device), experts)
    assert_bitwise(moe_combine(moe_gather(x, rows), rows, offsets, None), x)


def random_case(routing, hidden, device, dtype=torch.float32):
    ids, experts, seed = routing
    x = fuzz.normal(seed, (ids.shape[0], hidden), dtype).to(device)
    weights = fuzz.normal(seed + 1, ids.shape).to(device)
    _, offsets, rows = moe_permute(ids.to(device), experts)
    y = run_experts(moe_gather(x, rows), offsets, [1.0] * experts)
    return x, weights, rows, offsets, y


@given(
    routing=routings(),
    hidden=st.integers(1, 6),
    dtype=fuzz.float_dtypes(),
    out_dtype=fuzz.float_dtypes(),
    shared=st.booleans(),
)
def test_combine_against_float64(device, routing, hidden, dtype, out_dtype, shared):
    ids, experts, seed = routing
    x, weights, rows, offsets, y = random_case(routing, hidden, device, dtype)
    extra = fuzz.normal(seed + 2, x.shape, dtype).to(device) if shared else None
    out = moe_combine(y, rows, offsets, weights, shared=extra, out_dtype=out_dtype)
    assert out.dtype == out_dtype
    truth = experts_by_hand(x, ids, weights, [1.0] * experts, extra)
    size = experts_by_hand(
        x.abs(), ids, weights.abs(), [1.0] * experts, None if extra is None else extra.abs()
    )
    # k products (1 u each) and k additions, the shared row among them; one rounding at the end.
    wide = unit_roundoff(torch.float64 if dtype == torch.float64 else torch.float32)
    final = unit_roundoff(out_dtype)
    smallest = torch.finfo(out_dtype).smallest_normal * final
    budget = 1.01 * ((ids.shape[1] + 2) * wide * size + final * truth.abs()) + smallest
    assert_within_budget(out, truth, budget + 1e-15 * size)


def test_combine_sums_in_slot_order(device):
    # In float32, (2^24 + 1) + 1 = 2^24 but (1 + 1) + 2^24 = 2^24 + 2. The experts are numbered
    # against the slots, so a sum in sorted order gives the other result.
    y_of_slot = torch.tensor([2.0**24, 1.0, 1.0], device=device)
    for values, expected in ((y_of_slot, 2.0**24), (y_of_slot.flip(0), 2.0**24 + 2)):
        ids = torch.tensor([[2, 1, 0]], device=device)
        order, offsets, rows = moe_permute(ids, 3)
        out = moe_combine(values[order.long(), None], rows, offsets, None)
        assert out.item() == expected
    # The shared row comes last: (2^24 + 1) - 2^24 = 0 in float32; added first it would give 1.
    _, offsets, rows = moe_permute(torch.tensor([[0, 0]], device=device), 1)
    y = torch.tensor([[2.0**24], [1.0]], device=device)
    shared = torch.tensor([[-(2.0**24)]], device=device)
    assert moe_combine(y, rows, offsets, None, shared=shared).item() == 0.0


@given(routing=routings(smallest=1), hidden=st.integers(1, 6))
def test_a_token_does_not_depend_on_its_batch(device, routing, hidden):
    ids, experts, _ = routing
    x, weights, rows, offsets, y = random_case(routing, hidden, device)
    whole = moe_combine(y, rows, offsets, weights)
    assert_bitwise(moe_combine(y, rows, offsets, weights), whole, "second run")
    for t in range(ids.shape[0]):
        row = slice(t, t + 1)
        _, off, r = moe_permute(ids[row].to(device), experts)
        y = run_experts(moe_gather(x[row], r), off, [1.0] * experts)
        assert_bitwise(moe_combine(y, r, off, weights[row]), whole[row])


@given(routing=routings(), hidden=st.integers(1, 6))
def test_permuted_tokens_give_permuted_results(device, routing, hidden):
    ids, experts, seed = routing
    x, weights, rows, offsets, y = random_case(routing, hidden, device)
    whole = moe_combine(y, rows, offsets, weights)
    moved = torch.randperm(ids.shape[0], generator=fuzz.generator(seed))
    _, off, r = moe_permute(ids[moved].to(device), experts)
    moved = moved.to(device)
    y = run_experts(moe_gather(x[moved], r), off, [1.0] * experts)
    assert_bitwise(moe_combine(y, r, off, weights[moved]), whole[moved])


@given(routing=routings(), hidden=st.integers(1, 6))
def test_relabelled_experts_give_the_same_bits(device, routing, hidden):
    ids, experts, seed = routing
    x, weights, rows, offsets, y = random_case(routing, hidden, device)
    whole = moe_combine(y, rows, offsets, weights)
    new = torch.randperm(experts, generator=fuzz.generator(seed))
    valid = (ids >= 0) & (ids < experts)
    renamed = torch.where(valid, new[ids.long().clamp(0, experts - 1)], ids.long())
    _, off, r = moe_permute(renamed.to(device), experts)
    y = run_experts(moe_gather(x, r), off, [1.0] * experts)
    assert_bitwise(moe_combine(y, r, off, weights), whole)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["row", "weight", "shared"])
def test_a_bad_row_stays_alone(device, bad, where):
    ids = torch.tensor([[0, 1], [1, 1], [2, 0], [3, -1]], device=device)
    x = fuzz.normal(0, (4, 5)).to(device)
    weights, shared = torch.ones(4, 2, device=device), torch.zeros(4, 5, device=device)
    order, offsets, rows = moe_permute(ids, 4)
    y = moe_gather(x, rows)
    clean = moe_combine(y, rows, offsets, weights, shared=shared)
    if where == "row":
        y[order.tolist().index(2 * 2 + 1), 3] = bad
    else:
        (weights if where == "weight" else shared)[2, 1] = bad
    out = moe_combine(y, rows, offsets, weights, shared=shared)
    assert not out[2].isfinite().all()
    others = [0, 1, 3]
    assert_bitwise(out[others], clean[others])


def test_strided_input_gives_the_same_bits(device):
    ids = torch.tensor([[0, 1], [1, 1], [2, 0]], device=device)
    x, weights = fuzz.normal(0, (3, 4)).to(device), fuzz.normal(1, (3, 2)).to(device)
    order, offsets, rows = moe_permute(ids, 3)
    actual = moe_permute(fuzz.strided(ids), 3)
    for got, expected in zip(actual, (order, offsets, rows), strict=True):
        assert_bitwise(got, expected)
    y = moe_gather(x, rows)
    assert_bitwise(moe_gather(fuzz.strided(x), fuzz.strided(rows)), y)
    expected = moe_combine(y, rows, offsets, weights, shared=x)
    strided = [fuzz.strided(t) for t in (y, rows, offsets, weights)]
    assert_bitwise(moe_combine(*strided, shared=fuzz.strided(x)), expected)


def test_no_tokens(device):
    ids = torch.zeros(0, 3, dtype=torch.int64, device=device)
    order, offsets, rows = moe_permute(ids, 4)
    assert (order.shape, offsets.tolist(), rows.shape) == ((0,), [0] * 5, (0, 3))
    y = moe_gather(torch.zeros(0, 8, device=device), rows)
    assert y.shape == (0, 8)
    weights = torch.zeros(0, 3, device=device)
    shared = torch.zeros(0, 8, device=device)
    assert moe_combine(y, rows, offsets, weights, shared=shared).shape == (0, 8)


def test_no_local_rows_leaves_the_shared_expert(device):
    ids = torch.tensor([[0, 4], [-1, 1]], device=device)
    _, offsets, rows = moe_permute(ids, 4, first_expert=2)
    assert offsets.tolist() == [0, 0, 0]
    y = torch.full((4, 3), torch.nan, device=device)
    shared = fuzz.normal(0, (2, 3)).to(device)
    out = moe_combine(y, rows, offsets, torch.ones(2, 2, device=device), shared=shared)
    assert_bitwise(out, shared)


def check_permute(ids, device):
    actual = moe_permute(ids.to(device), 21, first_expert=3, num_local_experts=15)
    args = (ids, 21, 3, 15)
    for got, expected in zip(actual, torch.ops.dsv4.moe_permute(*args, "reference"), strict=True):
        assert_bitwise(got.cpu(), expected)


KINDS = ("spread", "one", "none")


def many_ids(shape, kind):
    ids = torch.randint(-1, 22, shape, generator=fuzz.generator(0))
    return {"spread": ids, "one": torch.full_like(ids, 7), "none": torch.full_like(ids, -1)}[kind]


@pytest.mark.parametrize("shape", [(11, 3), (8, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_permute_of_more_slots_than_one_program_takes(device, monkeypatch, shape, kind):
    """The way of many slots, with blocks so small that the interpreter can follow."""
    if device.type == "cpu":
        kernels = pytest.importorskip("dsv4.triton.moe_sort")
        monkeypatch.setattr(kernels, "_RANKED_SLOTS", 0)
        monkeypatch.setattr(kernels, "_BLOCK", 8)
    check_permute(many_ids(shape, kind), device)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(682, 6), (683, 6), (1024, 8), (8192, 8), (30001, 5)])
@pytest.mark.parametrize("kind", KINDS)
def test_permute_of_many_slots(shape, kind):
    check_permute(many_ids(shape, kind), torch.device("cuda"))


def quantized_gather(x, rows, offsets, input_scale, layout):
    """Gather, clear what no expert owns, and quantise each expert's rows by themselves."""
    gathered = moe_gather(x, rows)
    gathered[int(offsets[-1]) :] = 0
    if layout == SWIZZLED_EXPERTS:
        return swizzled_by_expert(quantized_gather(x, rows, offsets, input_scale, LINEAR), offsets)
    if input_scale is None:
        return quantize(gathered, "nvfp4", scaling="token", layout=layout, backend="reference")
    scale = torch.ones(gathered.shape[0], device=x.device)
    for e in range(offsets.shape[0] - 1):
        scale[int(offsets[e]) : int(offsets[e + 1])] = input_scale[e]
    return quantize(
        gathered,
        "nvfp4",
        global_scale=scale,
        scaling="static",
        layout=layout,
        backend="reference",
    )


def swizzled_by_expert(q, offsets):
    """The scales of each expert swizzled by themselves, one behind the other, and zeros."""
    counts, rows = offsets.diff().tolist(), q.rows
    tiles = (rows + 127 * min(rows, len(counts))) // 128
    parts = [swizzle_scales(s) for s in q.scales[: sum(counts)].split(counts)]
    scales = torch.zeros(swizzled_size(128 * tiles, q.scales.shape[1]), dtype=torch.uint8)
    joined = torch.cat([part.view(torch.uint8) for part in parts])
    scales = scales.to(q.device)
    scales[: joined.numel()] = joined
    return dataclasses.replace(q, scales=scales.view(q.scales.dtype), layout=SWIZZLED_EXPERTS)


@given(
    routing=routings(),
    blocks=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    layout=st.sampled_from(["linear", "swizzled_128x4", "swizzled_128x4_experts"]),
    static=st.booleans(),
    kind=st.sampled_from([0.0, 1.0, torch.nan, torch.inf]),
    part=st.sampled_from([4, 128]),
)
@settings(max_examples=25)
def test_gather_quantize_is_its_parts(
    device, monkeypatch, routing, blocks, dtype, layout, static, kind, part
):
    """Codes, scales with their padding and global scales, bit for bit; a NaN is alone.

    Also with rows that several programs share.
    """
    monkeypatch.setattr("dsv4.triton._lib.nvfp4_tile._SHARE_BLOCKS", part)
    ids, experts, seed = routing
    x = fuzz.normal(seed, (ids.shape[0], 16 * blocks), dtype)
    if x.numel() and kind != 1.0:
        x[seed % x.shape[0], : 1 + seed % 16] = kind
    x, scale = x.to(device), None
    if static:
        scale = fuzz.normal(seed + 1, (experts,)).abs().to(device) * 2.0**-8 + 2.0**-20
    _, offsets, rows = moe_permute(ids.to(device), experts)
    actual = moe_gather_quantize(x, rows, offsets, input_scale=scale, layout=layout)
    expected = quantized_gather(x, rows, offsets, scale, layout)
    assert actual.layout == layout
    assert_bitwise(actual.codes, expected.codes, "codes")
    assert_bitwise(actual.scales.view(torch.uint8), expected.scales.view(torch.uint8), "scales")
    assert actual.global_scale.shape == (ids.numel(),)
    assert_bitwise(actual.global_scale, expected.row_scale(), "global scales")


@pytest.mark.parametrize(("static", "experts"), [(False, 1), (True, 3)])
def test_gather_quantize_of_experts_with_more_than_a_tile(device, static, experts, poisoned_memory):
    """129 rows of one expert, some of another or of none."""
    ids = torch.zeros(27, 5, dtype=torch.int64, device=device)
    ids[0] = torch.tensor([-1, experts - 1, -1, experts - 1, experts - 1])
    ids[1, 0] = experts
    x, scale = fuzz.normal(0, (27, 48), torch.bfloat16).to(device), None
    if static:
        scale = torch.linspace(0.01, 0.02, experts, device=device)
    _, offsets, rows = moe_permute(ids, experts)
    actual = moe_gather_quantize(x, rows, offsets, input_scale=scale, layout=SWIZZLED_EXPERTS)
    expected = quantized_gather(x, rows, offsets, scale, SWIZZLED_EXPERTS)
    assert_bitwise(actual.codes, expected.codes, "codes")
    assert_bitwise(actual.scales.view(torch.uint8), expected.scales.view(torch.uint8), "scales")
    assert_bitwise(actual.global_scale, expected.row_scale(), "global scales")


def test_gather_quantize_of_strided_input(device):
    ids = torch.tensor([[0, 1], [1, 3], [2, 0]], device=device)
    x, scale = fuzz.normal(0, (3, 32)).to(device), torch.tensor([0.5, 0.25, 1.0], device=device)
    _, offsets, rows = moe_permute(ids, 3)
    strided = [fuzz.strided(t) for t in (x, rows, offsets)]
    actual = moe_gather_quantize(*strided, input_scale=fuzz.strided(scale))
    expected = moe_gather_quantize(x, rows, offsets, input_scale=scale)
    assert_bitwise(actual.codes, expected.codes)
    assert_bitwise(actual.scales.view(torch.uint8), expected.scales.view(torch.uint8))


def test_gather_quantize_with_a_bad_scale(device):
    ids = torch.tensor([[0], [1]], device=device)
    x, scale = fuzz.normal(0, (2, 16)).to(device), torch.tensor([1.0, -1.0], device=device)
    _, offsets, rows = moe_permute(ids, 2)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"moe_gather_quantize: input_scale"):
            moe_gather_quantize(x, rows, offsets, input_scale=scale)
    else:
        q = moe_gather_quantize(x, rows, offsets, input_scale=scale)
        assert q.scales.float().isnan().flatten().tolist() == [False, True]


@pytest.mark.gpu
def test_a_graph_replays_with_other_data():
    """Captured with one set of tokens, replayed with others, results poisoned in between."""
    device = torch.device("cuda")

    def run(x, ids, weights):
        order, offsets, rows = moe_permute(ids, 8, first_expert=1, num_local_experts=6)
        y = moe_gather(x, rows)
        q = moe_gather_quantize(x, rows, offsets)
        together = moe_sort(x, ids, weights, 8, first_expert=1, num_local_experts=6)
        combined = moe_combine(y, rows, offsets, weights, shared=x)
        parts = order, offsets, rows, y, q.codes, q.scales.view(torch.uint8), combined
        return *parts, *together

    for tokens in (1, 40, 1500):
        sets = [
            (
                fuzz.normal(seed, (tokens, 64), torch.bfloat16).to(device),
                torch.randint(0, 8, (tokens, 3), generator=fuzz.generator(seed)).to(device),
                fuzz.normal(seed + 1, (tokens, 3)).to(device),
            )
            for seed in (0, 1)
        ]
        held = [t.clone() for t in sets[0]]
        run(*held)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = run(*held)
        for t, new in zip(held, sets[1], strict=True):
            t.copy_(new)
        for t in outputs:
            t.view(torch.uint8).fill_(255)
        graph.replay()
        for got, expected in zip(outputs, run(*sets[1]), strict=True):
            assert_bitwise(got, expected)


@pytest.mark.rarely_interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_opcheck(device, dtype):
    ops = torch.ops.dsv4
    ids = torch.tensor([[0, 1], [1, -1], [2, 0]], device=device)
    x, weights = fuzz.normal(0, (3, 4), dtype).to(device), fuzz.normal(1, (3, 2)).to(device)
    torch.library.opcheck(ops.moe_permute.default, (ids, 3, 1, 2, "auto"))
    torch.library.opcheck(ops.moe_permute.default, (ids.int(), 3, 0, 3, "auto"))
    _, offsets, rows = moe_permute(ids, 3)
    torch.library.opcheck(ops.moe_gather.default, (x, rows, "auto"))
    torch.library.opcheck(ops.moe_sort.default, (x, ids, weights, 3, 1, 2, "auto"))
    out = torch.zeros(6, 4, dtype=dtype, device=device)
    torch.library.opcheck(ops.moe_sort_out.default, (x, ids, weights, 3, 1, 2, out, "auto"))
    wide = fuzz.normal(0, (3, 32), dtype).to(device)
    for scale, layout in ((None, LINEAR), (torch.ones(3, device=device), SWIZZLED_EXPERTS)):
        args = (wide, rows, offsets, scale, layout, "auto")
        torch.library.opcheck(ops.moe_gather_quantize.default, args)
        assert_pure(ops.moe_gather_quantize.default, *args)
    y = moe_gather(x, rows)
    for w, shared in ((weights, x), (None, None)):
        args = (y, rows, offsets, w, shared, torch.bfloat16, "auto")
        torch.library.opcheck(ops.moe_combine.default, args)


def test_compiles_without_graph_breaks(device):
    def moe(x, ids, weights):
        _, offsets, rows = moe_permute(ids, 4)
        return moe_combine(moe_gather(x, rows), rows, offsets, weights, shared=x)

    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (2, 3, 7):
        x, weights = fuzz.normal(0, (tokens, 8)).to(device), fuzz.normal(1, (tokens, 3)).to(device)
        ids = (torch.arange(3 * tokens, device=device) % 5).view(tokens, 3)
        assert_bitwise(compiled(x, ids, weights), moe(x, ids, weights))


@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    far=st.integers(0, 2**20),
    below=st.booleans(),
    name=st.sampled_from(["rows", "offsets"]),
    data=st.data(),
)
@example(sizes=(3, 2), far=0, below=True, name="rows", data=None)
def test_rows_out_of_range_raise_on_the_cpu(sizes, far, below, name, data):
    """A negative one too, which torch would count from the end."""
    ids = torch.zeros(sizes, dtype=torch.int64)
    _, offsets, rows = moe_permute(ids, 2)
    tensor, most = {"rows": (rows, ids.numel()), "offsets": (offsets, ids.numel() + 1)}[name]
    position = (0,) * tensor.ndim
    if data is not None:
        position = tuple(data.draw(st.integers(0, size - 1)) for size in tensor.shape)
    bad = -1 - far if below else most + far
    tensor[position] = bad
    x, out = torch.ones(sizes[0], 16), torch.zeros(ids.numel(), 16)
    calls = {
        "moe_gather_quantize": lambda: moe_gather_quantize(x, rows, offsets),
        "moe_combine": lambda: moe_combine(out, rows, offsets, None),
    }
    if name == "rows":
        calls["moe_gather"] = lambda: moe_gather(x, rows)
        calls["moe_gather "] = lambda: moe_gather(x, rows, out=out)
    where = ", ".join(map(str, position))
    for op, call in calls.items():
        words = rf"{op.strip()}: {name}\[{where}\] is {bad}, wanted from 0 on, below {most}"
        with pytest.raises(IndexError, match=words):
            call()
    assert not out.any()


def test_bad_arguments_are_named(device):
    ids = torch.zeros(3, 2, dtype=torch.int64, device=device)
    _, offsets, rows = moe_permute(ids, 4)
    x, y = torch.zeros(3, 5, device=device), torch.zeros(6, 5, device=device)
    weights = torch.zeros(3, 2, device=device)
    with pytest.raises(TypeError, match=r"moe_permute: ids has dtype float32"):
        moe_permute(ids.float(), 4)
    with pytest.raises(ValueError, match=r"moe_permute: ids has shape \[6\]"):
        moe_permute(ids.flatten(), 4)
    for first, local in ((0, 5), (3, 2), (-1, 2), (0, 0), (4, None)):
        with pytest.raises(ValueError, match=r"local experts are .* within 0 to 3"):
            moe_permute(ids, 4, first_expert=first, num_local_experts=local)
    with pytest.raises(ValueError, match=r"moe_gather: rows has shape \[3, 2\], wanted \[4, any\]"):
        moe_gather(torch.zeros(4, 5, device=device), rows)
    with pytest.raises(TypeError, match=r"moe_gather: rows has dtype int64, wanted int32"):
        moe_gather(x, rows.long())
    with pytest.raises(ValueError, match=r"moe_gather: rows has shape \[3, 0\], wanted a slot"):
        moe_gather(x, rows[:, :0])
    with pytest.raises(ValueError, match=r"moe_gather_quantize: x has 5 columns, wanted .* 16"):
        moe_gather_quantize(x, rows, offsets)
    wide, scale = torch.zeros(3, 16, device=device), torch.ones(4, device=device)
    with pytest.raises(ValueError, match=r"input_scale has shape \[3\], wanted \[4\]"):
        moe_gather_quantize(wide, rows, offsets, input_scale=scale[:3])
    with pytest.raises(TypeError, match=r"input_scale has dtype float64, wanted float32"):
        moe_gather_quantize(wide, rows, offsets, input_scale=scale.double())
    with pytest.raises(ValueError, match=r"layout is 'tiled'"):
        moe_gather_quantize(wide, rows, offsets, layout="tiled")
    with pytest.raises(ValueError, match=r"offsets has 1 entries, wanted 2"):
        moe_gather_quantize(wide, rows, offsets[:1])
    with pytest.raises(ValueError, match=r"y has shape \[5, 5\], wanted \[6, any\]"):
        moe_combine(y[:5], rows, offsets, weights)
    with pytest.raises(TypeError, match=r"offsets has dtype int64"):
        moe_combine(y, rows, offsets.long(), weights)
    with pytest.raises(ValueError, match=r"weights has shape \[2, 2\], wanted \[3, 2\]"):
        moe_combine(y, rows, offsets, weights[:2])
    with pytest.raises(ValueError, match=r"shared has shape \[3, 4\], wanted \[3, 5\]"):
        moe_combine(y, rows, offsets, weights, shared=x[:, :4])
    with pytest.raises(TypeError, match=r"out_dtype is torch.int8"):
        moe_combine(y, rows, offsets, weights, out_dtype=torch.int8)
