"""The indexer: transform and rounding against independent oracles, selection against a sort."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from dsv4._support import interpret_triton
from dsv4.dispatch import explain
from dsv4.ops.indexer import indexer_queries, indexer_rotate_quantize, indexer_select
from dsv4.ops.kv_cache import Pages, fake_quantize_kv, write_kv
from dsv4.ops.rope import rope
from dsv4.reference import indexer as reference
from dsv4.testing.assertions import assert_bitwise, assert_pure
from dsv4.testing.strategies import finite_draws, normal, seeds, small_integers, strided

KERNELS = ("triton",)
widths = st.sampled_from([32, 64, 128, 256])
dtypes = st.sampled_from([torch.bfloat16, torch.float32, torch.float64])


def sylvester(d: int) -> np.ndarray:
    """Entry (i, j) is -1 to the number of bits that i and j share."""
    return np.array([[(-1) ** bin(i & j).count("1") for j in range(d)] for i in range(d)])


def fp4_oracle(x: np.ndarray) -> np.ndarray:
    """Groups of 32 through ml_dtypes' E2M1, scales by exact arithmetic."""
    out = np.empty_like(x)
    for i in np.ndindex(*x.shape[:-1], x.shape[-1] // 32):
        part = (*i[:-1], slice(32 * i[-1], 32 * i[-1] + 32))
        amax = max(Fraction(float(np.abs(x[part]).max())), Fraction(6) / 2**126)
        e = -126
        while Fraction(2) ** e < amax / 6:
            e += 1
        scale = x.dtype.type(2.0) ** x.dtype.type(e)
        out[part] = (x[part] / scale).astype(ml_dtypes.float4_e2m1fn).astype(x.dtype) * scale
    return out


@given(widths, seeds(), st.sampled_from([torch.float32, torch.float64]), st.integers(-30, 30))
def test_equals_the_oracles_bit_for_bit(device, d, seed, dtype, exponent):
    """Integers times a power of two: the transform is exact but for the factor d^-0.5."""
    x = small_integers(seed, (3, d), torch.float64, limit=9)
    total = x.numpy() @ sylvester(d).T * 2.0**exponent
    wide = np.float64 if dtype == torch.float64 else np.float32
    expected = fp4_oracle(total.astype(wide) * wide(d**-0.5))
    out = indexer_rotate_quantize((x * 2.0**exponent).to(dtype).to(device))
    assert_bitwise(out.cpu(), torch.from_numpy(expected))


@given(widths, seeds())
def test_bfloat16_rounds_the_rotated_value_first(device, d, seed):
    x = small_integers(seed, (3, d), torch.float64, limit=100)
    total = (x.numpy() @ sylvester(d).T).astype(np.float32) * np.float32(d**-0.5)
    rounded = total.astype(ml_dtypes.bfloat16).astype(np.float32)
    expected = torch.from_numpy(fp4_oracle(rounded))
    out = indexer_rotate_quantize(x.to(torch.bfloat16).to(device))
    assert_bitwise(out.cpu().float(), expected)
    assert_bitwise(out.cpu(), expected.to(torch.bfloat16))


@given(widths, dtypes, finite_draws(-20, 20))
def test_values_lie_on_the_grid(device, d, dtype, drawn):
    x = drawn.build((4, d), dtype, device)
    if drawn.special == "huge" or not bool(x.isfinite().all()):
        x = torch.zeros_like(x)
    out = indexer_rotate_quantize(x).double().unflatten(-1, (-1, 32))
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device=device)
    # The scale is a power of two that makes every value one of the grid; the largest exceeds 3
    # unless the group is below the floor.
    amax = out.abs().amax(-1, keepdim=True)
    exponent = torch.floor(torch.log2(amax.clamp(min=2.0**-126) / 3.5))
    for shift in (0, 1):
        scaled = out.abs() / torch.exp2(exponent + shift)
        good = (scaled.unsqueeze(-1) == grid).any(-1).all(-1)
        if shift == 0:
            found = good
        found = found | good
    assert bool((found | (amax.squeeze(-1) <= 6 * 2.0**-126)).all())


@given(widths, seeds())
def test_transform_is_an_orthonormal_involution(d, seed):
    x = normal(seed, (5, d), torch.float64)
    rotated = reference._hadamard(x)
    torch.testing.assert_close(reference._hadamard(rotated), x, rtol=0, atol=1e-13)
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1), rtol=1e-13, atol=0)
    matrix = reference._hadamard(torch.eye(d, dtype=torch.float64))
    expected = torch.from_numpy(sylvester(d) * d**-0.5)
    assert_bitwise(matrix, expected)


@given(st.sampled_from([64, 256]), seeds())
def test_products_are_unchanged_by_the_transform(d, seed):
    """Exactly, where d^-0.5 is a power of two and the values are small integers."""
    q = small_integers(seed, (4, d), torch.float64)
    k = small_integers(seed + 1, (6, d), torch.float64)
    assert_bitwise(reference._hadamard(q) @ reference._hadamard(k).T, q @ k.T)


@pytest.mark.parametrize("ratio", [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
def test_ties_go_to_the_even_code(device, ratio):
    """Through the transform: x is the rotation of the wanted row, so it rotates back to it."""
    even = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}[ratio]
    row = torch.zeros(1, 64, dtype=torch.float64, device=device)
    row[0, 0], row[0, 1], row[0, 2] = 6.0, ratio, -ratio
    out = indexer_rotate_quantize(reference._hadamard(row))
    assert out[0, :3].tolist() == [6.0, even, -even]


@given(widths, dtypes, seeds(), st.sampled_from([float("nan"), float("inf")]))
def test_nan_stays_in_its_own_row(device, d, dtype, seed, bad):
    x = normal(seed, (3, 2, d), dtype).to(device)
    expected = indexer_rotate_quantize(x)
    x[1, 0, seed % d] = bad
    expected[1, 0] = torch.nan
    assert_bitwise(indexer_rotate_quantize(x), expected)


def test_zeros_stay_zero(device):
    x = torch.zeros(2, 128, dtype=torch.bfloat16, device=device)
    assert_bitwise(indexer_rotate_quantize(x), x)


def test_rotate_contract(device):
    tests = (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    )
    x = normal(0, (3, 2, 32)).to(device)
    op = torch.ops.dsv4.indexer_rotate_quantize.default
    torch.library.opcheck(op, (x, "auto"), test_utils=tests)
    compiled = torch.compile(indexer_rotate_quantize, fullgraph=True, backend="aot_eager")
    assert_bitwise(compiled(x), indexer_rotate_quantize(x))
    assert_bitwise(indexer_rotate_quantize(strided(x)), indexer_rotate_quantize(x))
    assert indexer_rotate_quantize(x[:0]).shape == (0, 2, 32)
    for d in (16, 48, 0):
        with pytest.raises(ValueError, match=f"last axis of x is {d}, wanted a power of two"):
            indexer_rotate_quantize(torch.zeros(1, d, device=device))
    with pytest.raises(TypeError, match="x has dtype float16"):
        indexer_rotate_quantize(x.half())


def queries_of(seed, tokens, heads, d, turned, dtype, device="cpu"):
    """q, cos, sin; ``turned`` dims are rotated."""
    q = normal(seed, (tokens, heads, d), dtype).to(device)
    angles = normal(seed + 1, (tokens, turned // 2)) * 3
    return q, angles.cos().to(device), angles.sin().to(device)


@given(
    st.sampled_from([(32, 32), (32, 6), (64, 0), (128, 64), (256, 64)]),
    st.integers(0, 4),
    st.integers(1, 5),
    seeds(),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.booleans(),
)
def test_queries_are_rope_then_rotation(device, dims, tokens, heads, seed, dtype, rotate):
    """The bits of the parts, computed apart; a NaN or Inf stays in its own head."""
    q, cos, sin = queries_of(seed, tokens, heads, *dims, dtype, device)
    if tokens > 1:
        q[1, 0, seed % dims[0]] = torch.inf if seed % 2 else torch.nan
    out = indexer_queries(q, cos, sin, rotate_quantize=rotate)
    parts = rope(q, cos.unsqueeze(1), sin.unsqueeze(1), backend="reference")
    if rotate:
        parts = indexer_rotate_quantize(parts, backend="reference")
    assert_bitwise(out, parts)
    assert bool(out[:1].isfinite().all())
    assert bool(out[1:, 1:].isfinite().all())


@given(seeds(), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_queries_of_other_widths(device, seed, dtype):
    """Without the transform any even width will do; dims that are not turned keep their bits."""
    q, cos, sin = queries_of(seed, 3, 3, 20, 6, dtype, device)
    out = indexer_queries(q, cos.to(dtype), sin.to(dtype), rotate_quantize=False)
    cos, sin = (x.to(dtype).unsqueeze(1) for x in (cos, sin))
    assert_bitwise(out, rope(q, cos, sin, backend="reference"))
    assert_bitwise(out[..., :14], q[..., :14])


@pytest.mark.parametrize("rotate", [False, True])
def test_queries_contract(device, rotate):
    q, cos, sin = queries_of(0, 3, 2, 32, 8, torch.bfloat16, device)
    op = torch.ops.dsv4.indexer_queries.default
    tests = (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    )
    torch.library.opcheck(op, (q, cos, sin, rotate, "auto"), test_utils=tests)
    assert_pure(op, q, cos, sin, rotate, "auto")
    expected = indexer_queries(q, cos, sin, rotate_quantize=rotate)

    def call(q, cos, sin):
        return indexer_queries(q, cos, sin, rotate_quantize=rotate)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_bitwise(compiled(q, cos, sin), expected)
    assert_bitwise(call(strided(q), strided(cos), strided(sin)), expected)
    wide = torch.zeros(3, 2, 48, dtype=q.dtype, device=device)
    wide[..., 8:40] = q
    assert_bitwise(call(wide[..., 8:40], cos, sin), expected)
    assert call(q[:0], cos[:0], sin[:0]).shape == (0, 2, 32)
    double = indexer_queries(q.double(), cos, sin, rotate_quantize=rotate)
    assert double.dtype == torch.float64


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q": (3, 32)}, ValueError, r"q has shape \[3, 32\]"),
        ({"cos": (2, 4), "sin": (2, 4)}, ValueError, r"cos has shape \[2, 4\], wanted \[3, any\]"),
        ({"sin": (3, 5)}, ValueError, r"sin has shape \[3, 5\], wanted \[3, 4\]"),
        ({"cos": (3, 17), "sin": (3, 17)}, ValueError, "q has 32 dims and cos 17"),
        ({"q": (3, 2, 9)}, ValueError, "q has 9 dims and cos 4, wanted an even number"),
        ({"q": (3, 2, 48)}, ValueError, "last axis of q is 48, wanted a power of two"),
    ],
)
def test_bad_queries_are_named(change, error, words):
    shapes = {"q": (3, 2, 32), "cos": (3, 4), "sin": (3, 4)} | change
    with pytest.raises(error, match=words):
        indexer_queries(**{k: torch.zeros(v) for k, v in shapes.items()}, rotate_quantize=True)


def test_float16_queries_are_not_rotated():
    q = torch.zeros(1, 1, 32, dtype=torch.float16)
    table = torch.zeros(1, 4)
    assert indexer_queries(q, table, table, rotate_quantize=False).dtype == torch.float16
    with pytest.raises(TypeError, match="q has dtype float16, wanted bfloat16"):
        indexer_queries(q, table, table, rotate_quantize=True)


class Case:
    """Small integers, so that scores are exact in float32 and ties are common."""

    def __init__(
        self,
        seed,
        tokens,
        sequences,
        pages,
        page_size,
        device="cpu",
        d=4,
        heads=2,
        dtype=torch.float32,
    ):
        gen = torch.Generator().manual_seed(seed)
        self.capacity = pages * page_size
        order = torch.randperm(sequences * pages + 1, generator=gen)[: sequences * pages]
        self.table = order.view(sequences, pages).to(device)
        self.keys = Pages.allocate(sequences * pages + 1, page_size, d, 0, "plain", dtype, device)
        self.keys.data.copy_(small_integers(seed, self.keys.data.shape, limit=2))
        self.q = small_integers(seed + 1, (tokens, heads, d), dtype, limit=2).to(device)
        self.weights = small_integers(seed + 2, (tokens, heads), limit=2).to(device)
        self.sequence = torch.randint(0, sequences, (tokens,), generator=gen).to(device)
        self.visible = torch.randint(0, self.capacity + 1, (tokens,), generator=gen).to(device)

    def arguments(self, top_k, rows=slice(None)):
        return {
            "q": self.q[rows],
            "weights": self.weights[rows],
            "keys": self.keys,
            "page_table": self.table,
            "sequence_of_token": self.sequence[rows],
            "visible": self.visible[rows],
            "top_k": top_k,
        }

    def run(self, top_k, rows=slice(None), backend="auto"):
        return indexer_select(**self.arguments(top_k, rows), backend=backend)

    def key(self, token: int, entry: int) -> torch.Tensor:
        size = self.keys.page_size
        page = int(self.table[self.sequence[token], entry // size])
        return self.keys.data[page, entry % size]

    def oracle(self, top_k: int) -> torch.Tensor:
        k = min(top_k, self.capacity)
        out = []
        for t in range(self.q.shape[0]):
            scores = []
            for c in range(int(self.visible[t])):
                dots = [float(q @ self.key(t, c)) for q in self.q[t]]
                pairs = zip(self.weights[t].tolist(), dots, strict=True)
                scores.append((-sum(w * max(x, 0.0) for w, x in pairs), c))
            ids = sorted(c for _, c in sorted(scores)[:k])
            out.append(ids + [-1] * (k - len(ids)))
        return torch.tensor(out, dtype=torch.int64, device=self.q.device).view(-1, k)


@st.composite
def cases(draw: st.DrawFn):
    return (
        draw(seeds()),
        draw(st.integers(0, 5)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 2, 4])),
    )


@given(cases(), st.integers(1, 14))
def test_selects_as_a_sort_does(device, drawn, top_k):
    case = Case(*drawn, device=device)
    assert_bitwise(case.run(top_k), case.oracle(top_k))


@given(cases(), st.integers(1, 14))
def test_work_pieces_do_not_matter(drawn, top_k):
    case = Case(*drawn)
    whole = case.run(top_k)
    before = reference._WORK_BYTES
    reference._WORK_BYTES = 1
    try:
        assert_bitwise(case.run(top_k), whole)
    finally:
        reference._WORK_BYTES = before


@given(cases(), st.integers(1, 14), st.data())
def test_hidden_keys_have_no_effect(device, drawn, top_k, data):
    """NaN in every key that a token may not see, and pages that are not there."""
    case = Case(*drawn, device=device)
    if not case.q.shape[0]:
        return
    token = data.draw(st.integers(0, case.q.shape[0] - 1))
    expected = case.run(top_k)[token : token + 1]
    size, shown = case.keys.page_size, int(case.visible[token])
    keep = case.keys.data.clone()
    case.keys.data.fill_(torch.nan)
    row = int(case.sequence[token])
    for c in range(shown):
        page = int(case.table[row, c // size])
        case.keys.data[page, c % size] = keep[page, c % size]
    case.table[row, -(-shown // size) :] = -1
    assert_bitwise(case.run(top_k, slice(token, token + 1)), expected)


@given(cases(), st.integers(1, 14), st.data())
def test_nan_ranks_first_and_ids_stay_in_range(device, drawn, top_k, data):
    case = Case(*drawn, device=device)
    tokens = case.q.shape[0]
    if not tokens:
        return
    clean = case.run(top_k)
    token = data.draw(st.integers(0, tokens - 1))
    case.q[token, 0, 0] = torch.nan
    out = case.run(top_k)
    others = [t for t in range(tokens) if t != token]
    assert_bitwise(out[others], clean[others])
    shown = int(case.visible[token])
    ids = list(range(min(shown, out.shape[1])))
    assert out[token].tolist() == ids + [-1] * (out.shape[1] - len(ids))


@given(seeds(), st.integers(1, 10), st.integers(1, 10))
def test_equal_scores_go_to_the_lowest_entry(device, seed, visible, top_k):
    case = Case(seed, 1, 1, 5, 2, device=device)
    case.keys.data.fill_(1)
    case.visible[0] = visible
    ids = list(range(min(visible, top_k)))
    assert case.run(top_k)[0].tolist() == ids + [-1] * (top_k - len(ids))


def test_negative_and_zero_scores_are_selected_too(device):
    """A score below zero, or equal to what hidden entries are filled with, is not 'none'."""
    keys = Pages.allocate(1, 4, 4, 0, "plain", torch.float32, device)
    keys.data[0, :, 0] = torch.tensor([1.0, 3.0, -2.0, 2.0], device=device)
    q = torch.tensor([[[1.0, 0, 0, 0]]], device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    shown = torch.tensor([3], device=device)
    # Scores -1, -3, 0; then -inf, -inf and NaN (-inf times relu(-2)), which ranks first.
    for weight in (-1.0, -torch.inf):
        w = torch.tensor([[weight]], device=device)
        ids = indexer_select(q, w, keys, zero.view(1, 1), zero, shown, top_k=4)
        assert ids[0].tolist() == [0, 1, 2, -1]


@settings(max_examples=5)
@given(seeds())
def test_fp8_keys_count_as_what_they_read_back_as(device, seed):
    keys = Pages.allocate(2, 4, 64, 16, "fp8", device=device)
    plain = Pages.allocate(2, 4, 64, 16, "plain", torch.float32, device)
    x = normal(seed, (8, 64)).to(device)
    write_kv(keys, x, torch.arange(8, device=device))
    write_kv(plain, fake_quantize_kv(x, 16), torch.arange(8, device=device))
    q = normal(seed + 1, (3, 2, 64)).to(device)
    w = normal(seed + 2, (3, 2)).to(device)
    table = torch.tensor([[1, 0]], device=device)
    rows, shown = (torch.tensor(x, device=device) for x in ([0, 0, 0], [8, 5, 1]))
    a, b = (indexer_select(q, w, k, table, rows, shown, top_k=6) for k in (keys, plain))
    assert_bitwise(a, b)


@given(cases(), st.integers(1, 14))
def test_trap_t13_one_token_alone_sees_what_it_sees_in_a_batch(device, drawn, top_k):
    case = Case(*drawn, device=device)
    together = case.run(top_k)
    for t in range(case.q.shape[0]):
        assert_bitwise(case.run(top_k, slice(t, t + 1)), together[t : t + 1])


def test_trap_t13_a_decode_step_sees_every_entry(device):
    """The last of 12 tokens at ratio 4: 3 entries, none hidden because it is one token."""
    case = Case(3, 1, 1, 2, 4, device=device)
    case.visible[0] = (11 + 1) // 4
    for top_k in (3, 8):  # a mask of the wrong polarity fills the first places with hidden ones
        assert sorted(case.run(top_k)[0].tolist()) == [-1] * (top_k - 3) + [0, 1, 2]


@given(seeds(), st.integers(1, 8))
def test_trap_t21_selecting_all_still_scores(seed, visible):
    """A trace made where every entry is taken is replayed with more entries, as a graph is."""
    case = Case(seed, 3, 2, 4, 2)
    rest = (case.keys.data, 2, "plain", 0, case.table, case.sequence)

    def call(shown):
        return reference.indexer_select(case.q, case.weights, *rest, shown, 3)

    trace = make_fx(call)(torch.full((3,), 2))
    case.visible.fill_(visible)
    assert_bitwise(trace(case.visible), case.oracle(3))


@given(seeds(), st.integers(0, 4), st.integers(1, 9))
def test_trap_t22_nothing_visible(device, seed, tokens, top_k):
    """All-zero lengths, no pages given, NaN everywhere: -1, and nothing out of bounds."""
    case = Case(seed, tokens, 2, 2, 4, device=device)
    case.visible.zero_()
    case.table.fill_(-1)
    case.keys.data.fill_(torch.nan)
    out = case.run(top_k)
    assert out.shape == (tokens, min(top_k, 8))
    assert bool((out == -1).all())


@pytest.fixture(params=["narrowed", "narrowed in pieces", "shared"])
def small_limits(request, monkeypatch):
    """Limits of the kernels so small that a short row goes the ways of a long one."""
    kernels = pytest.importorskip("dsv4.triton.indexer")
    monkeypatch.setattr(kernels, "_SHARED_FROM", 2)
    if request.param != "shared":
        monkeypatch.setattr(kernels, "_DIRECT", 16)
        monkeypatch.setattr(kernels, "_LARGEST", 32 if "pieces" in request.param else 512)
    return request.param


@settings(max_examples=15)
@given(
    seeds(),
    st.integers(1, 5),
    st.sampled_from([(1, 40, 4), (2, 20, 8), (1, 3, 50)]),
    st.integers(1, 12),
    st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_every_way_to_a_long_row(device, small_limits, seed, tokens, table, top_k, dtype):
    case = Case(seed, tokens, *table, device=device, dtype=dtype)
    assert_bitwise(case.run(top_k), case.run(top_k, backend="reference"))


@settings(max_examples=20)
@given(seeds(), st.integers(1, 4), st.sampled_from([torch.bfloat16, torch.float32]))
def test_no_entry_left_out_is_better(device, small_limits, seed, tokens, dtype):
    """Random values: the float64 scores tell, up to twice the error of two nested sums."""
    heads, d, k = 5, 24, 9
    case = Case(seed, tokens, 2, 10, 8, device=device, d=d, heads=heads, dtype=dtype)
    case.keys.data.copy_(normal(seed, case.keys.data.shape))
    case.q = normal(seed + 1, case.q.shape, dtype).to(device)
    case.weights = normal(seed + 2, case.weights.shape).to(device)
    ids = case.run(k)
    for t in range(tokens):
        shown = int(case.visible[t])
        found = ids[t][ids[t] >= 0]
        assert found.tolist() == sorted(set(found.tolist()))
        assert found.numel() == min(k, shown)
        if shown <= k:
            continue
        keys = torch.stack([case.key(t, c) for c in range(shown)]).double()
        q, w = case.q[t].double(), case.weights[t].double()
        scores = (torch.relu(keys @ q.T) * w).sum(1)
        sizes = (keys.abs() @ q.abs().T * w.abs()).sum(1)
        error = 2 * (d + heads + 2) * 2.0**-24 * float(sizes.max())
        left = torch.ones(shown, dtype=torch.bool, device=device).index_fill(0, found, False)
        assert float(scores[left].max()) <= float(scores[found].min()) + error


@settings(max_examples=10)
@given(seeds(), st.integers(1, 6))
def test_hidden_keys_have_no_effect_on_neighbours(device, small_limits, seed, top_k):
    """Tokens of one sequence share tiles; a NaN that one may see stays out of the others."""
    case = Case(seed, 4, 1, 10, 8, device=device, dtype=torch.bfloat16)
    expected = case.run(top_k)
    last = int(case.visible.argmax())
    shown = int(case.visible[last])
    others = [t for t in range(4) if int(case.visible[t]) < shown]
    if shown:
        case.keys.data[case.table[0, (shown - 1) // 8], (shown - 1) % 8] = torch.nan
    out = case.run(top_k)
    assert_bitwise(out[others], expected[others])
    assert shown == 0 or shown - 1 in out[last].tolist()


def test_pages_with_strides(device):
    case = Case(5, 3, 2, 4, 2, device=device)
    expected = case.run(3)
    wide = torch.full((*case.keys.data.shape[:2], 9), torch.nan, device=device)
    wide[..., 3:7] = case.keys.data
    for data in (wide[..., 3:7], strided(case.keys.data)):
        case.keys = Pages(data, 2, "plain", 4, 0)
        assert_bitwise(case.run(3), expected)


def test_too_large_a_selection_is_left_to_the_reference():
    case = Case(0, 1, 1, 5000, 1)
    case.visible.fill_(5000)
    with interpret_triton():
        assert "at most 4096" in str(explain(indexer_select, **case.arguments(4500)))
        assert_bitwise(case.run(4500), case.oracle(4500))


def test_two_runs_have_the_same_bits(device):
    case = Case(7, 4, 2, 10, 8, device=device)
    case.keys.data.copy_(normal(7, case.keys.data.shape))
    assert_bitwise(case.run(9), case.run(9))


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", [4096, 65536])
def test_a_graph_replays_with_other_lengths(capacity):
    """Captured where every entry is taken (trap T21), replayed with none and with all visible."""
    device = torch.device("cuda")
    case = Case(0, 3, 2, capacity // 64, 64, device=device, d=128, heads=64, dtype=torch.bfloat16)
    q, cos, sin = queries_of(1, 3, 64, 128, 64, torch.bfloat16, device)
    case.visible.fill_(5)

    def step():
        case.q = indexer_queries(q, cos, sin, rotate_quantize=True)
        return case.q, case.run(512)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    for lengths in ([0, 0, 0], [capacity, 600, 512], [7, capacity - 1, capacity // 2]):
        case.visible.copy_(torch.tensor(lengths))
        q.copy_(normal(lengths[0], q.shape))
        for x in outputs:
            x.fill_(-7)
        graph.replay()
        replayed = [x.clone() for x in outputs]
        for a, b in zip(replayed, step(), strict=True):
            assert_bitwise(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [512, 1024, 2048, 4096])
@pytest.mark.parametrize("kind", ["integers", "normal", "rising", "equal"])
def test_rows_of_a_million_tokens(top_k, kind):
    """Against a sort of the same scores: keys of one dim make the scores the keys themselves."""
    device, capacity = torch.device("cuda"), 262144
    case = Case(top_k, 3, 1, capacity // 64, 64, device=device, d=16, heads=1)
    values = {
        "integers": small_integers(top_k, (capacity,), limit=200) + 200,
        "normal": normal(top_k, (capacity,)).abs(),
        "rising": torch.arange(capacity).float(),
        "equal": torch.ones(capacity),
    }[kind].to(device)
    case.q.zero_()
    case.q[..., 0] = 1
    case.weights.fill_(1)
    case.table.copy_(torch.arange(capacity // 64, device=device))
    case.keys.data.zero_()
    case.keys.data.view(-1, 16)[:capacity, 0] = values
    case.visible.copy_(torch.tensor([capacity, capacity - 77, 100000]))
    out = case.run(top_k)
    for t in range(3):
        order = values[: case.visible[t]].sort(descending=True, stable=True).indices
        assert_bitwise(out[t], order[:top_k].sort().values)


def test_select_contract(device):
    tests = (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    )
    case = Case(0, 4, 2, 2, 4, device=device)
    keys = case.keys
    args = (case.q, case.weights, keys.data, 4, "plain", 0, case.table, case.sequence, case.visible)
    op = torch.ops.dsv4.indexer_select.default
    for top_k in (3, 100):
        torch.library.opcheck(op, (*args, top_k, "auto"), test_utils=tests)
    expected = case.run(3)

    def call(q, weights):
        return indexer_select(q, weights, keys, case.table, case.sequence, case.visible, top_k=3)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_bitwise(compiled(case.q, case.weights), expected)
    assert_bitwise(call(strided(case.q), strided(case.weights)), expected)
    case.table, case.sequence = case.table.int(), case.sequence.int()
    case.visible = case.visible.int()
    assert_bitwise(case.run(3), expected)
    assert case.run(3, slice(0, 0)).shape == (0, 3)


@pytest.mark.parametrize(
    ("name", "change", "error", "words"),
    [
        (
            "q",
            lambda x: x[:, :, :3],
            ValueError,
            r"q has shape \[4, 2, 3\], wanted \[any, any, 4\]",
        ),
        ("weights", lambda x: x[:, :1], ValueError, r"weights has shape \[4, 1\]"),
        ("table", lambda x: x[0], ValueError, "page_table has shape"),
        ("table", lambda x: x.float(), TypeError, "page_table has dtype float32"),
        ("sequence", lambda x: x[:2], ValueError, r"sequence_of_token has shape \[2\], wanted"),
        ("visible", lambda x: x.float(), TypeError, "visible has dtype float32"),
        ("q", lambda x: x.long(), TypeError, "q has dtype int64"),
    ],
)
def test_bad_input_is_named(device, name, change, error, words):
    case = Case(0, 4, 2, 2, 4, device=device)
    setattr(case, name, change(getattr(case, name)))
    with pytest.raises(error, match=words):
        case.run(3)


def test_top_k_below_one_is_refused(device):
    with pytest.raises(ValueError, match="top_k is 0, wanted >= 1"):
        Case(0, 4, 2, 2, 4, device=device).run(0)
