"""Sparse attention with a sink: against a dense softmax in float64, and properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.dispatch import explain
from dsv4.ops.attention import sparse_attention
from dsv4.ops.kv_cache import Pages, read_kv, write_kv
from dsv4.ops.rope import rope
from dsv4.reference import attention as reference
from dsv4.testing.assertions import assert_bitwise, assert_within_budget, unit_roundoff
from dsv4.testing.strategies import normal, seeds, strided

formats = st.sampled_from(["fp8", "plain"])
F64 = torch.float64


class Case:
    """Two pools of other page sizes and formats, with duplicates and -1 among the slots."""

    def __init__(
        self,
        seed,
        tokens=3,
        widths=(5, 4),
        entry_formats=("fp8", "plain"),
        device="cpu",
        heads=3,
        dim=32,
        dtype=F64,
        magnitude=1.0,
    ):
        gen = torch.Generator().manual_seed(seed)
        self.q = magnitude * normal(seed, (tokens, heads, dim), dtype).to(device)
        self.sink = normal(seed + 1, (heads,), torch.float32).to(device)
        self.scale = dim**-0.5
        self.pools, self.slots = [], []
        for i, (width, entry_format) in enumerate(zip(widths, entry_formats, strict=True)):
            pages = Pages.allocate(3, 2 + 2 * i, dim, 8, entry_format, dtype, device)
            x = normal(seed + 2 + i, (pages.num_slots, dim), dtype).to(device)
            write_kv(pages, x, torch.arange(pages.num_slots, device=device))
            self.pools.append(pages)
            slots = torch.randint(-1, pages.num_slots, (tokens, width), generator=gen)
            self.slots.append(slots.to(device))

    def run(self, **changes):
        arguments = {"q": self.q, "sink": self.sink, "scale": self.scale, **changes}
        return sparse_attention(
            arguments["q"],
            self.pools[0],
            self.slots[0],
            self.pools[1],
            self.slots[1],
            arguments["sink"],
            scale=arguments["scale"],
            cos=arguments.get("cos"),
            sin=arguments.get("sin"),
        )

    def entries(self, token: int) -> torch.Tensor:
        """The entries the token attends to, float64, by a loop over its slots."""
        result = [torch.zeros(0, self.q.shape[-1], dtype=F64, device=self.q.device)]
        for pages, slots in zip(self.pools, self.slots, strict=True):
            for s in slots[token].tolist():
                if s >= 0:
                    at = torch.tensor([s], device=self.q.device)
                    result.append(read_kv(pages, at, F64))
        return torch.cat(result)


def angles(seed, tokens, half, device, dtype=torch.float32):
    """cos and sin of any angles, ``[tokens, half]``."""
    angle = 3 * normal(seed, (tokens, half), F64)
    return angle.cos().to(dtype).to(device), angle.sin().to(dtype).to(device)


def dense(case: Case, token: int, scale: float | None = None) -> torch.Tensor:
    """A softmax over the logits with the sink as one more, whose value is zero. float64."""
    kv = case.entries(token)
    logits = case.q[token].double() @ kv.T * (case.scale if scale is None else scale)
    weights = torch.cat((logits, case.sink.double()[:, None]), dim=1).softmax(-1)
    return weights[:, :-1] @ kv


widths = st.tuples(st.integers(0, 6), st.integers(0, 6))


@given(seeds(), st.integers(0, 4), widths, st.tuples(formats, formats))
def test_equals_a_dense_softmax(device, seed, tokens, widths, entry_formats):
    case = Case(seed, tokens, widths, entry_formats, device)
    out = case.run()
    assert out.shape == case.q.shape
    for t in range(tokens):
        # Entries are normal values (|k| < 8), eight roundings of a sum of at most 12 + 32 terms.
        assert_within_budget(out[t], dense(case, t), 8 * 8 * 44 * 2.0**-53)


@given(seeds(), st.sampled_from([torch.float32, torch.bfloat16]), st.sampled_from([0.1, 1.0, 8.0]))
def test_float32_is_within_its_budget(device, seed, dtype, magnitude):
    """Logits err by (D + 2) u sum |q k| scale; weights by twice that; then a sum of K + 1."""
    case = Case(seed, 4, (6, 5), device=device, dtype=dtype, magnitude=magnitude)
    out = case.run()
    assert out.dtype == dtype
    u = unit_roundoff(torch.float32)
    for t in range(4):
        kv, q = case.entries(t), case.q[t].double()
        truth = dense(case, t)
        if not kv.shape[0]:
            continue
        largest = float((q.abs() @ kv.abs().T).max()) * case.scale
        top = max(largest, float(case.sink.abs().max()))
        delta = (q.shape[-1] + 3) * u * largest + u * top
        relative = 2 * delta + (2 * kv.shape[0] + 12) * u
        budget = 1.01 * relative * float(kv.abs().max()) + unit_roundoff(dtype) * truth.abs() * 1.01
        assert_within_budget(out[t], truth, budget + 1e-38)


@given(seeds(), st.sampled_from([0, 2, 8, 14, 32]), st.integers(0, 4))
def test_pitfall_4_the_last_dims_are_turned_back(device, seed, rotated, tokens):
    """Rotate as complex numbers times exp(-i angle); the dims before them keep their bits."""
    case = Case(seed, tokens, device=device)
    cos, sin = angles(seed, tokens, rotated // 2, device, F64)
    plain, out = case.run(), case.run(cos=cos, sin=sin)
    unrotated = 32 - rotated
    assert_bitwise(out[..., :unrotated], plain[..., :unrotated])
    pairs = torch.view_as_complex(plain[..., unrotated:].unflatten(-1, (-1, 2)).contiguous())
    expected = pairs * torch.complex(cos, -sin).unsqueeze(1)
    assert_within_budget(out[..., unrotated:], torch.view_as_real(expected).flatten(-2), 1e-14)
    assert_within_budget(out, rope(plain, cos[:, None], sin[:, None], inverse=True), 0.0)


@given(seeds(), st.sampled_from([torch.bfloat16, torch.float32]))
def test_pitfall_4_the_turned_result_is_rounded_once(device, seed, table_dtype):
    """It is within half a unit of the last place of the float64 result; float32 errs by less."""
    case = Case(seed, 4, device=device, dtype=torch.bfloat16)
    cos, sin = angles(seed, 4, 4, device, table_dtype)
    out = case.run(cos=cos, sin=sin)
    truth = case.run(q=case.q.double(), sink=case.sink.double(), cos=cos.double(), sin=sin.double())
    half = unit_roundoff(torch.bfloat16)
    assert_within_budget(out, truth, 1.01 * half * truth.abs() + 1e-5)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ((torch.zeros(3, 4), None), "cos and sin go together"),
        ((torch.zeros(2, 4), torch.zeros(2, 4)), r"cos has shape \[2, 4\], wanted \[3, any\]"),
        ((torch.zeros(3, 4), torch.zeros(3, 5)), r"sin has shape \[3, 5\], wanted \[3, 4\]"),
        ((torch.zeros(3, 17), torch.zeros(3, 17)), r"R <= 32"),
    ],
)
def test_bad_tables(tables, message):
    with pytest.raises(ValueError, match=message):
        Case(0).run(cos=tables[0], sin=tables[1])
    with pytest.raises(TypeError, match="cos has dtype int64"):
        Case(0).run(cos=torch.zeros(3, 4).long(), sin=torch.zeros(3, 4))


@given(seeds())
def test_without_compressed_pages(device, seed):
    case = Case(seed, widths=(5, 0), device=device)
    out = sparse_attention(
        case.q, case.pools[0], case.slots[0], None, None, case.sink, scale=case.scale
    )
    assert_bitwise(out, case.run())


@given(seeds(), st.integers(1, 4))
def test_a_repeated_entry_counts_again(device, seed, times):
    """n copies of one entry with logit s weigh n exp(s)."""
    case = Case(seed, 1, (times, 1), ("plain", "plain"), device)
    case.slots[0].fill_(2)
    case.slots[1].fill_(-1)
    kv = read_kv(case.pools[0], torch.tensor([2], device=device), F64)[0]
    s = case.q[0] @ kv * case.scale
    share = times * s.exp() / (times * s.exp() + case.sink.double().exp())
    assert_within_budget(case.run()[0], share[:, None] * kv, 1e-13)


@given(seeds(), st.integers(0, 5))
def test_order_and_absent_slots_do_not_matter(device, seed, extra):
    case = Case(seed, 3, (5, 4), device=device)
    expected = case.run()
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed)).to(device)
    none = torch.full((3, extra), -1, device=device)
    case.slots = [torch.cat((none, case.slots[0][:, order]), 1), case.slots[1].flip(1)]
    assert_within_budget(case.run(), expected, 1e-13)


@given(seeds(), st.floats(-20, 20))
def test_a_shift_of_all_logits_and_the_sink_drops_out(device, seed, shift):
    """Dim 0 of every entry is 1, so that adding to dim 0 of q shifts every logit alike."""
    case = Case(seed, 3, (5, 4), ("plain", "plain"), device)
    for pages in case.pools:
        pages.data[..., 0] = 1
    expected = case.run()
    q = case.q.clone()
    q[..., 0] += shift / case.scale
    moved = case.run(q=q, sink=case.sink.double() + shift)
    assert_within_budget(moved, expected, 1e-12)
    # Without the sink's shift the result does change.
    if abs(shift) > 1 and bool((case.slots[0] >= 0).any()):
        assert not torch.allclose(case.run(q=q), expected, atol=1e-9)


@given(seeds(), st.sampled_from([0.1, 1.0, 100.0, 1e5]))
def test_the_result_is_inside_the_hull_of_the_entries_and_zero(device, seed, magnitude):
    case = Case(seed, 4, (5, 4), device=device, dtype=torch.float32, magnitude=magnitude)
    out = case.run()
    assert bool(out.isfinite().all())
    for t in range(4):
        kv = torch.cat((case.entries(t), torch.zeros(1, 32, dtype=F64, device=device)))
        slack = 64 * unit_roundoff(torch.float32) * float(kv.abs().max())
        assert bool((out[t] <= kv.amax(0) + slack).all())
        assert bool((out[t] >= kv.amin(0) - slack).all())


@given(seeds(), formats, st.data())
def test_unselected_entries_have_no_effect(device, seed, entry_format, data):
    """NaN in every entry that no slot of a token names, in pages at both of their borders."""
    case = Case(seed, 3, (5, 4), (entry_format, entry_format), device)
    expected = case.run()
    token = data.draw(st.integers(0, 2))
    for pages, slots in zip(case.pools, case.slots, strict=True):
        named = set(slots[token].tolist())
        others = [s for s in range(pages.num_slots) if s not in named]
        bad = torch.full((len(others), 32), torch.nan, dtype=F64, device=device)
        write_kv(pages, bad, torch.tensor(others, dtype=torch.int64, device=device))
    assert_bitwise(case.run()[token], expected[token])


@given(seeds(), st.integers(0, 2), st.sampled_from([torch.nan, torch.inf, -torch.inf]))
def test_nan_in_q_stays_in_its_own_token_and_head(device, seed, token, bad):
    case = Case(seed, 3, (5, 4), device=device)
    case.slots[0][:, 0] = 3
    expected = case.run()
    case.q[token, 1, 4] = bad
    out = case.run()
    assert bool(out[token, 1].isnan().all()) or math.isinf(bad)
    keep = torch.ones(3, 3, dtype=torch.bool, device=device)
    keep[token, 1] = False
    assert_bitwise(out[keep], expected[keep])


@given(seeds(), st.integers(1, 4))
def test_work_pieces_do_not_matter(seed, tokens):
    case = Case(seed, tokens)
    whole = case.run()
    before = reference._WORK_BYTES
    reference._WORK_BYTES = 1
    try:
        assert_within_budget(case.run(), whole, 1e-14)
    finally:
        reference._WORK_BYTES = before


def test_large_logits_do_not_overflow(device):
    case = Case(0, 2, (5, 4), device=device, dtype=torch.float32, magnitude=1e4)
    assert bool(case.run().isfinite().all())
    far = case.run(sink=torch.full((3,), 1e30, device=device))
    assert not far.any()


@given(seeds(), st.floats(0.01, 3), st.floats(-3, 3))
def test_pitfall_14_the_sink_is_not_scaled(device, seed, scale, sink):
    """If q = 0 all logits are 0: o = sum v / (n + exp(sink)), whatever the scale."""
    case = Case(seed, 2, (5, 4), device=device)
    sinks = torch.tensor([sink, 0.0, -sink], device=device)
    out = case.run(q=torch.zeros_like(case.q), sink=sinks, scale=scale)
    for t in range(2):
        kv = case.entries(t)
        for h in range(3):
            share = 1 / (kv.shape[0] + math.exp(float(sinks[h])))
            assert_within_budget(out[t, h], kv.sum(0) * share, 1e-12)


@given(seeds())
def test_pitfall_14_the_sink_is_in_the_denominator_only(device, seed):
    """A sink multiplies the plain softmax by 1 - its own share, and adds no value."""
    case = Case(seed, 3, (5, 4), device=device)
    plain = case.run(sink=torch.full((3,), -torch.inf, device=device))
    out = case.run()
    for t in range(3):
        kv = case.entries(t)
        logits = case.q[t] @ kv.T * case.scale
        assert_within_budget(plain[t], logits.softmax(-1) @ kv, 1e-12)
        total = logits.exp().sum(-1)
        share = total / (total + case.sink.double().exp())
        assert_within_budget(out[t], plain[t] * share[:, None], 1e-12)


@given(seeds(), st.integers(0, 2), st.floats(0.5, 3))
def test_pitfall_14_one_sink_per_head(device, seed, head, change):
    case = Case(seed, 2, (5, 4), device=device)
    case.slots[0][:, 0] = 1
    expected = case.run()
    sink = case.sink.clone()
    sink[head] += change
    out = case.run(sink=sink)
    others = [h for h in range(3) if h != head]
    assert_bitwise(out[:, others], expected[:, others])
    assert bool((out[:, head].norm(dim=-1) < expected[:, head].norm(dim=-1)).all())


@pytest.mark.parametrize("widths", [(0, 0), (3, 2), (3, 0)])
def test_pitfall_14_nothing_to_attend_to(device, widths):
    """The sink takes everything; with sink -inf too the result is defined as 0, not 0 / 0."""
    case = Case(0, 2, widths, device=device)
    for slots in case.slots:
        slots.fill_(-1)
    for sink in (case.sink, torch.full((3,), -torch.inf, device=device)):
        assert not case.run(sink=sink).any()


@given(seeds())
def test_pitfall_13_one_token_alone_sees_what_it_sees_in_a_batch(device, seed):
    case = Case(seed, 4, (5, 4), device=device)
    together = case.run()
    for t in range(4):
        part = slice(t, t + 1)
        alone = sparse_attention(
            case.q[part],
            case.pools[0],
            case.slots[0][part],
            case.pools[1],
            case.slots[1][part],
            case.sink,
            scale=case.scale,
        )
        assert_within_budget(alone, together[part], 1e-14)


@given(seeds(), formats)
def test_pitfall_20_minus_one_is_not_the_last_entry(device, seed, entry_format):
    case = Case(seed, 2, (4, 3), (entry_format, entry_format), device)
    for slots in case.slots:
        slots[:, 1:] = -1
    for i, pages in enumerate(case.pools):
        bad = torch.full((1, 32), torch.nan, dtype=F64, device=device)
        last = torch.tensor([pages.num_slots - 1], device=device)
        if not bool((case.slots[i] == last).any()):
            write_kv(pages, bad, last)
        case.slots[i] = case.slots[i].int()
    out = case.run()
    for t in range(2):
        assert_within_budget(out[t], dense(case, t), 1e-12)


@pytest.mark.parametrize("both", [True, False])
def test_opcheck_and_compile(device, both):
    tests = (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    )
    case = Case(0, 3, (5, 4), device=device, dtype=torch.bfloat16)
    window, compressed = case.pools[0], case.pools[1] if both else None
    slots = case.slots[1] if both else None
    cos, sin = angles(0, 3, 4, device)
    args = (
        case.q,
        window.data,
        window.page_size,
        window.entry_format,
        case.slots[0],
        compressed.data if compressed else None,
        compressed.page_size if compressed else 1,
        compressed.entry_format if compressed else "fp8",
        slots,
        case.sink,
        8,
        0.25,
        cos if both else None,
        sin if both else None,
        "auto",
    )
    op = torch.ops.dsv4.sparse_attention.default
    torch.library.opcheck(op, args, test_utils=tests)

    def call(q, sink):
        table = {"cos": cos, "sin": sin} if both else {}
        return sparse_attention(
            q, window, case.slots[0], compressed, slots, sink, scale=0.25, **table
        )

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_bitwise(compiled(case.q, case.sink), call(case.q, case.sink))
    assert_bitwise(call(strided(case.q), strided(case.sink)), call(case.q, case.sink))


def test_empty_batch(device):
    case = Case(0, 0, (5, 4), device=device)
    assert case.run().shape == (0, 3, 32)


@settings(max_examples=3)
@given(seeds())
def test_published_dimensions(device, seed):
    """512 dims, pages of 64, a window of 128: the shapes of the model."""
    pages = Pages.allocate(3, 64, 512, 64, device=device)
    x = normal(seed, (192, 512), torch.bfloat16).to(device)
    write_kv(pages, x, torch.arange(192, device=device))
    q = normal(seed + 1, (2, 8, 512), torch.bfloat16).to(device)
    sink = normal(seed + 2, (8,)).to(device)
    slots = torch.stack((torch.arange(128), torch.arange(64, 192))).to(device)
    out = sparse_attention(q, pages, slots, None, None, sink, scale=512**-0.5)
    wide = sparse_attention(q.double(), pages, slots, None, None, sink, scale=512**-0.5)
    relative = 2 * 515 * unit_roundoff(torch.float32) * 32 + 300 * unit_roundoff(torch.float32)
    budget = relative * 6 + 1.01 * unit_roundoff(torch.bfloat16) * wide.abs()
    arguments = (q, pages, slots, None, None, sink)
    if explain(sparse_attention, *arguments, scale=512**-0.5).chosen == "triton":
        # It rounds weights to bfloat16: one that is off by u w moves the mean by u w (v - o).
        kv = read_kv(pages, slots, F64)
        logits = q.double() @ kv.transpose(1, 2) * 512**-0.5
        total = logits.logsumexp(-1, keepdim=True).logaddexp(sink.double()[None, :, None])
        spread = torch.stack(
            [
                (w[..., None] * (v - o[:, None]).abs()).sum(1)
                for w, v, o in zip((logits - total).exp(), kv, wide, strict=True)
            ]
        )
        budget += 1.01 * unit_roundoff(torch.bfloat16) * spread
    assert_within_budget(out, wide, budget)


def test_bad_input_is_named(device):
    case = Case(0, device=device)
    window, slots = case.pools[0], case.slots[0]

    def call(q=case.q, a=window, b=slots, c=None, d=None, sink=case.sink):
        return sparse_attention(q, a, b, c, d, sink, scale=1.0)

    with pytest.raises(ValueError, match=r"q has shape \[3, 3, 31\], wanted \[any, any, 32\]"):
        call(q=case.q[..., :31])
    with pytest.raises(ValueError, match=r"window_slots has shape \[2, 5\], wanted \[3, any\]"):
        call(b=slots[:2])
    with pytest.raises(TypeError, match="window_slots has dtype float32"):
        call(b=slots.float())
    with pytest.raises(ValueError, match="go together"):
        call(c=case.pools[1])
    with pytest.raises(ValueError, match="go together"):
        call(d=case.slots[1])
    with pytest.raises(ValueError, match=r"sink has shape \[2\], wanted \[3\]"):
        call(sink=case.sink[:2])
    with pytest.raises(TypeError, match="q has dtype int64"):
        call(q=case.q.long())
    narrow = Pages.allocate(1, 4, 16, 8, device=device)
    with pytest.raises(ValueError, match=r"compressed.head_dim is 16, wanted window's, 32"):
        call(c=narrow, d=case.slots[1])
    other = Pages.allocate(1, 4, 32, 4, device=device)
    with pytest.raises(ValueError, match=r"compressed.rope_dim is 4, wanted window's, 8"):
        call(c=other, d=case.slots[1])


def test_slot_past_the_pool_raises_on_the_cpu():
    case = Case(0)
    limit = case.pools[1].num_slots
    case.slots[1][1, 2] = limit
    words = rf"sparse_attention: compressed_slots\[1, 2\] is {limit}, wanted below {limit}"
    with pytest.raises(IndexError, match=words):
        case.run()
    limit = case.pools[0].num_slots
    case.slots[0][0, 1] = limit + 3
    words = rf"sparse_attention: window_slots\[0, 1\] is {limit + 3}, wanted below {limit}"
    with pytest.raises(IndexError, match=words):
        case.run()
