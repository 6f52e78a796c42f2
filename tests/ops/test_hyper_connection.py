"""Hyper-connections against explicit float64 loops, and the properties of the Sinkhorn matrix."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.ops.all_reduce import hc_reduce_post
from dsv4.ops.hyper_connection import hc_head, hc_post, hc_post_pre_norm, hc_pre, hc_pre_norm
from dsv4.ops.hyper_connection_quantize import hc_post_pre_norm_quantize, hc_pre_norm_quantize
from dsv4.ops.norm import rms_norm
from dsv4.ops.quantize import quantize
from dsv4.testing import strategies as fuzz
from dsv4.testing.assertions import (
    assert_bitwise,
    assert_pure,
    assert_within_budget,
    unit_roundoff,
)

KERNELS = ("triton",)
U = unit_roundoff(torch.float32)
EPS = {"norm_eps": 1e-6, "hc_eps": 1e-6}
PRE = {**EPS, "iterations": 20}


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def plain_mixes(streams, fn, norm_eps):
    """Specification, section 3.2, first step, for one token: lists of Python floats."""
    flat = [value for stream in streams for value in stream]
    inverse_rms = 1 / math.sqrt(sum(v * v for v in flat) / len(flat) + norm_eps)
    return [sum(w * v for w, v in zip(row, flat, strict=True)) * inverse_rms for row in fn]


def plain_sinkhorn(logits, eps, iterations):
    """Row softmax, + eps, columns; then rows and columns, iterations - 1 times."""
    n = len(logits)
    comb = []
    for row in logits:
        top = max(row)
        exps = [math.exp(v - top) for v in row]
        comb.append([e / sum(exps) + eps for e in exps])

    def columns():
        for k in range(n):
            total = sum(comb[j][k] for j in range(n)) + eps
            for j in range(n):
                comb[j][k] /= total

    def rows():
        for j in range(n):
            total = sum(comb[j]) + eps
            comb[j] = [v / total for v in comb[j]]

    columns()
    for _ in range(iterations - 1):
        rows()
        columns()
    return comb


def plain_weighted_sum(pre, streams):
    return [
        sum(p * s[d] for p, s in zip(pre, streams, strict=True)) for d in range(len(streams[0]))
    ]


def plain_pre(streams, fn, scale, base, norm_eps, hc_eps, iterations):
    """Specification, section 3.2 for one token."""
    n = len(streams)
    m = plain_mixes(streams, fn, norm_eps)
    pre = [sigmoid(m[i] * scale[0] + base[i]) + hc_eps for i in range(n)]
    post = [2 * sigmoid(m[n + i] * scale[1] + base[n + i]) for i in range(n)]
    logits = [
        [m[2 * n + n * j + k] * scale[2] + base[2 * n + n * j + k] for k in range(n)]
        for j in range(n)
    ]
    return plain_weighted_sum(pre, streams), post, plain_sinkhorn(logits, hc_eps, iterations)


def plain_post(y, streams, post, comb):
    """Specification, section 3.3 for one token: the sum is over the first index of comb."""
    n = len(streams)
    return [
        [post[k] * y[d] + sum(comb[j][k] * streams[j][d] for j in range(n)) for d in range(len(y))]
        for k in range(n)
    ]


cases = st.fixed_dictionaries(
    {
        "seed": fuzz.seeds(),
        "exponent": fuzz.magnitudes(-20, 20),
        "tokens": fuzz.rows(4),
        "n": st.sampled_from([1, 2, 3, 4, 4, 4, 5]),
        "hidden": st.integers(1, 6),
        "hc_eps": st.sampled_from([1e-6, 1e-2]),
        "iterations": st.sampled_from([1, 2, 3, 20]),
    }
)


def build(case, device, dtype=torch.float64):
    """streams, fn, scale, base; parameters in float32, as checkpoints have them."""
    n, hidden, seed = case["n"], case["hidden"], case["seed"]
    streams = fuzz.normal(seed, (case["tokens"], n, hidden)) * 2.0 ** case["exponent"]
    rows = (2 + n) * n
    fn = fuzz.normal(seed + 1, (rows, n * hidden))
    scale, base = fuzz.normal(seed + 2, (3,)), fuzz.normal(seed + 3, (rows,))
    return streams.to(dtype).to(device), fn.to(device), scale.to(device), base.to(device)


# Kernels have four streams: an example for the few that the interpreter gets.
FOUR = {
    "seed": 0,
    "exponent": 0,
    "tokens": 3,
    "n": 4,
    "hidden": 5,
    "hc_eps": 1e-6,
    "iterations": 20,
}


def settings_of(case):
    return {"norm_eps": 1e-6, "hc_eps": case["hc_eps"], "iterations": case["iterations"]}


def stack(tokens, *shape):
    return torch.tensor(tokens, dtype=torch.float64).reshape(*shape)


def computed(dtype):
    """The unit roundoff of what results of this dtype are computed in, and the float64 oracle's."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return unit_roundoff(wide) + unit_roundoff(torch.float64)


def logit_budget(streams, fn, scale, base):
    """Error of ``m * scale + base`` (Higham, 3.1), K = n H products per dot.

    The dot is off by (K + 1) u sum |fn x|; the mean square by K + 1 roundings, halved by the root,
    which takes 2 more; the products and the sum by 4.
    """
    flat = streams.double().flatten(-2)
    inverse_rms = torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
    terms = flat.shape[-1]
    size = flat.abs() @ fn.double().abs().T * inverse_rms
    u = computed(streams.dtype)
    return 1.01 * u * ((1.5 * terms + 8) * size * scale.double().abs().max() + 4 * base.abs())


def weighted_sum_budget(streams, error, truth, hc_eps):
    """Return the budget of a sum over n streams, weights off by sigmoids of ``error [..., n]``.

    A sigmoid moves by a quarter of its argument and takes 7 u of its own (exp 4, sum, quotient).
    """
    u, sizes = computed(streams.dtype), streams.double().abs()
    off = error / 4 + 8 * u
    size = (off.unsqueeze(-1) * sizes).sum(-2)
    size = size + 1.01 * (streams.shape[-2] + 2) * u * sizes.sum(-2) * (1 + hc_eps)
    return size + 1.01 * unit_roundoff(streams.dtype) * (truth.abs() + size) + 1e-42


def sinkhorn_budget(n, iterations, logit, u):
    """Relative error of an entry of comb by logits that are off by ``logit``.

    An entry is exp(logit) times a row and a column factor. An error of d in every logit moves each
    factor by at most d more than the one before, so entries by (2 steps + 1) d; each of the steps
    adds its own n + 3 roundings, which the later steps carry along in the same way.
    """
    steps = 2 * iterations - 1
    return 1.01 * ((2 * steps + 1) * (2 * logit + 8 * u) + steps * (steps + 1) * (n + 3) * u)


def assert_is_pre(result, truth, args, hc_eps, iterations):
    """``result`` of hc_pre for ``args`` against ``truth`` in float64."""
    streams, n = args[0], args[0].shape[-2]
    u, error = computed(streams.dtype), logit_budget(*args)
    mixed, post, comb = result
    assert_within_budget(post, truth[1], 2 * (error[:, n : 2 * n] / 4 + 8 * u), "post")
    budget = weighted_sum_budget(streams, error[:, :n], truth[0], hc_eps)
    assert_within_budget(mixed, truth[0], budget, "collapsed")

    logit = error[:, 2 * n :].unflatten(-1, (n, n)).amax((-1, -2), keepdim=True)
    relative = sinkhorn_budget(n, iterations, logit, u)
    assert_within_budget(comb, truth[2], relative * truth[2].abs(), "comb")


def post_budget(dtype, truth, size, n):
    """n + 1 products and their sum, on magnitudes ``size``, and one rounding to ``dtype``."""
    wide, final = computed(dtype), unit_roundoff(dtype)
    smallest = 8 * torch.finfo(dtype).smallest_normal * final
    return 1.01 * ((n + 2) * wide * size + final * (truth.abs() + wide * size)) + smallest


@given(case=cases)
@example(case=FOUR)
def test_pitfall_8_pre_against_explicit_loops(device, wide, case):
    args = build(case, device, wide)
    result = hc_pre(*args, **settings_of(case))
    parameters = [t.double().tolist() for t in args[1:]]
    tokens = [plain_pre(t, *parameters, **settings_of(case)) for t in args[0].tolist()]
    t, n, hidden = args[0].shape
    shapes = enumerate(((t, hidden), (t, n), (t, n, n)))
    truth = [stack([token[i] for token in tokens], *shape).to(device) for i, shape in shapes]
    assert all(part.dtype == wide for part in result)
    assert_is_pre(result, truth, args, case["hc_eps"], case["iterations"])


@given(case=cases)
@example(case=FOUR)
def test_pitfall_7_post_against_explicit_loops(device, wide, case):
    streams = build(case, device, wide)[0]
    t, n, hidden = streams.shape
    seed = case["seed"]
    y = fuzz.normal(seed + 4, (t, hidden), wide).to(device)
    post, comb = (
        fuzz.normal(seed + 5, (t, n)).to(device),
        fuzz.normal(seed + 6, (t, n, n)).to(device),
    )
    actual = hc_post(y, streams, post, comb)

    def loops(*parts):
        tokens = zip(*(part.double().tolist() for part in parts), strict=True)
        return stack([plain_post(*token) for token in tokens], t, n, hidden)

    parts = (y, streams, post, comb)
    expected, size = loops(*parts), loops(*(part.abs() for part in parts))
    assert_within_budget(actual.cpu(), expected, post_budget(wide, expected, size, n))


def test_pitfall_7_comb_j_k_is_what_stream_j_gives_to_stream_k(device):
    streams = torch.tensor([[1.0], [10.0], [100.0], [1000.0]], device=device)
    comb = torch.eye(4, device=device).roll(1, dims=1)
    zero = torch.zeros(1, device=device)
    out = hc_post(zero, streams, torch.zeros(4, device=device), comb)
    assert out.flatten().tolist() == [1000.0, 1.0, 10.0, 100.0]  # comb X: [10, 100, 1000, 1]


def from_base(base, n, device, dtype=torch.float64, **overrides):
    """hc_pre with fn = 0: the logits of pre, post and comb are exactly ``base``, rounded."""
    shapes = ((n, 2), ((2 + n) * n, 2 * n), (3,))
    streams, fn, scale = (torch.ones(shape, dtype=dtype) for shape in shapes)
    args = (t.to(device) for t in (streams, 0 * fn, scale, base.to(dtype)))
    return hc_pre(*args, **{**PRE, **overrides})


def test_pitfall_8_eps_of_pre_and_factor_of_post(device, wide):
    n, exactly = 4, 8 * unit_roundoff(wide)
    low = torch.full((24,), -200.0)
    mixed, post, _ = from_base(low, n, device, wide, hc_eps=0.25)
    assert mixed.tolist() == pytest.approx([n * 0.25] * 2, rel=exactly)  # pre = 0 + eps
    assert post.max().item() < 1e-80  # no eps
    high = -low
    mixed, post, _ = from_base(high, n, device, wide, hc_eps=0.25)
    assert mixed.tolist() == pytest.approx([n * 1.25] * 2, rel=exactly)
    assert post.tolist() == pytest.approx([2.0] * n, rel=exactly)


def test_pitfall_8_by_hand(device):
    # n = 2, one iteration: softmax rows (3/4, 1/4) and (1/2, 1/2), + 1/4, columns over sum + 1/4.
    base = torch.zeros(8, dtype=torch.float64)
    base[4] = math.log(3.0)
    _, _, comb = from_base(base, 2, device, hc_eps=0.25, iterations=1)
    expected = [[1.0 / 2.0, 0.5 / 1.5], [0.75 / 2.0, 0.75 / 1.5]]
    assert_within_budget(comb.cpu(), stack(expected, 2, 2), 1e-15)
    # A second iteration divides rows, then columns.
    _, _, comb = from_base(base, 2, device, hc_eps=0.25, iterations=2)
    rows = [[v / (sum(row) + 0.25) for v in row] for row in expected]
    sums = [rows[0][k] + rows[1][k] + 0.25 for k in range(2)]
    twice = [[rows[j][k] / sums[k] for k in range(2)] for j in range(2)]
    assert_within_budget(comb.cpu(), stack(twice, 2, 2), 1e-15)


def logits_of(seed, n, size):
    base = torch.zeros((2 + n) * n, dtype=torch.float64)
    base[2 * n :] = (torch.rand(n * n, generator=fuzz.generator(seed)) * 2 - 1) * size
    return base


@given(
    seed=fuzz.seeds(),
    n=st.integers(1, 5),
    size=st.sampled_from([0.5, 5.0, 50.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@example(seed=0, n=4, size=5.0, dtype=torch.float32)
def test_columns_sum_to_one(device, seed, n, size, dtype):
    _, _, comb = from_base(logits_of(seed, n, size), n, device, dtype)
    assert (comb >= 0).all()
    # The last division leaves s / (s + eps); s is at least 1/n, as rows summed to n at the most.
    # In float32: n additions, one division, n additions here.
    sums = comb.double().sum(-2)
    budget = 1.01 * n * 1e-6 + (2 * n + 2) * unit_roundoff(dtype)
    assert_within_budget(sums, torch.ones_like(sums), budget)


@given(
    seed=fuzz.seeds(), n=st.integers(1, 5), dtype=st.sampled_from([torch.float32, torch.float64])
)
@example(seed=0, n=4, dtype=torch.float32)
def test_comb_is_doubly_stochastic(device, seed, n, dtype):
    # Logits within 1/2: Sinkhorn contracts by tanh(1/2)^2 = 0.21 per iteration, so that after 20
    # only the eps of each division is left: eps n in the columns (above), as much in the rows.
    _, _, comb = from_base(logits_of(seed, n, 0.5), n, device, dtype)
    for axis in (-1, -2):
        sums = comb.double().sum(axis)
        budget = (2 * n + 2) * 1e-6 + (4 * n + 4) * unit_roundoff(dtype)
        assert_within_budget(sums, torch.ones_like(sums), budget)


@given(seed=fuzz.seeds(), n=st.integers(2, 5))
@example(seed=0, n=4)
def test_relabelling_columns_relabels_comb(device, wide, seed, n):
    base = logits_of(seed, n, 5.0)
    moved = torch.randperm(n, generator=fuzz.generator(seed))
    other = base.clone()
    other[2 * n :] = base[2 * n :].view(n, n)[:, moved].flatten()
    _, _, comb = from_base(base, n, device, wide)
    _, _, swapped = from_base(other, n, device, wide)
    # Both add up their rows in an order of their own; the logits are the same.
    expected = comb[:, moved.to(device)].double()
    budget = 2 * sinkhorn_budget(n, PRE["iterations"], 0.0, unit_roundoff(wide)) * expected
    assert_within_budget(swapped, expected, budget)


@given(case=cases)
@example(case=FOUR)
def test_first_layer_identity(device, wide, case):
    # All streams equal e (specification, section 3.3): fn @ x = (sum of fn over streams) @ e, the
    # collapse is (sum pre) e, and writing back zero gives e again, up to eps.
    case = {**case, "iterations": 20, "hc_eps": 1e-6}
    streams, fn, scale, base = build(case, device, wide)
    n, hidden = case["n"], case["hidden"]
    e = streams[:, 0]
    streams = e.unsqueeze(1).expand(-1, n, -1)
    mixed, post, comb = hc_pre(streams, fn, scale, base, **PRE)
    short = fn.double().view(-1, n, hidden).sum(1)
    exact = e.double()
    m = exact @ short.T * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6)
    pre = torch.sigmoid(m[:, :n] * scale[0].double() + base[:n].double()) + 1e-6
    error = logit_budget(streams, fn[:n], scale[:1], base[:n])
    expected = pre.sum(-1, keepdim=True) * exact
    assert_within_budget(mixed, expected, weighted_sum_budget(streams, error, expected, 1e-6))
    back = hc_post(torch.zeros_like(e), streams, post, comb)
    # As in ``test_columns_sum_to_one``, and the sum over the streams.
    lost = 1.01 * n * 1e-6 + (2 * n + 2) * unit_roundoff(wide)
    size = streams.double().abs()
    budget = lost * size + post_budget(wide, streams.double(), (1 + lost) * size, n)
    assert_within_budget(back, streams.double(), budget)


@given(case=cases)
@example(case=FOUR)
def test_head_against_explicit_loops(device, wide, case):
    streams, fn, scale, base = build(case, device, wide)
    n = case["n"]
    args = fn[:n], scale[:1], base[:n]
    actual = hc_head(streams, *args, norm_eps=1e-6, hc_eps=case["hc_eps"])
    rows, factor, offset = (a.double().tolist() for a in args)
    tokens = []
    for token in streams.tolist():
        m = plain_mixes(token, rows, 1e-6)
        pre = [sigmoid(m[i] * factor[0] + offset[i]) + case["hc_eps"] for i in range(n)]
        tokens.append(plain_weighted_sum(pre, token))
    expected = stack(tokens, case["tokens"], case["hidden"]).to(device)
    error = logit_budget(streams, *args)
    assert_within_budget(
        actual, expected, weighted_sum_budget(streams, error, expected, case["hc_eps"])
    )


@given(case=cases)
@example(case=FOUR)
def test_head_is_the_collapse_of_pre(device, case):
    streams, fn, scale, base = build(case, device, torch.float32)
    n = case["n"]
    mixed, _, _ = hc_pre(streams, fn, scale, base, **settings_of(case))
    head = hc_head(streams, fn[:n], scale[:1], base[:n], norm_eps=1e-6, hc_eps=case["hc_eps"])
    # The products of fn may be summed in another order: K u on each logit, 1/4 of it on a weight.
    size = fn.abs().sum() * scale.abs().max() * 2 * n * case["hidden"] * U + 8 * U
    assert_within_budget(head, mixed.double(), size.double() * streams.abs().sum(1).double())


@given(case=cases, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@example(case=FOUR, dtype=torch.bfloat16)
def test_float32_within_budget_of_float64(device, case, dtype):
    case = {**case, "exponent": min(case["exponent"], 10)}
    streams, fn, scale, base = build(case, device, dtype)
    kwargs = settings_of(case)
    mixed, post, comb = hc_pre(streams, fn, scale, base, **kwargs)
    assert (mixed.dtype, post.dtype, comb.dtype) == (dtype, torch.float32, torch.float32)
    truth = hc_pre(streams.double(), fn, scale, base, **kwargs)
    args = (streams, fn, scale, base)
    assert_is_pre((mixed, post, comb), truth, args, case["hc_eps"], case["iterations"])


@given(case=cases, dtype=fuzz.float_dtypes())
def test_post_within_budget_of_float64(device, case, dtype):
    case = {**case, "exponent": min(case["exponent"], 5)}
    streams = build(case, device, dtype)[0]
    t, n, hidden = streams.shape
    seed = case["seed"]
    y = fuzz.normal(seed + 4, (t, hidden), dtype).to(device)
    post, comb = (
        fuzz.normal(seed + 5, (t, n)).to(device),
        fuzz.normal(seed + 6, (t, n, n)).to(device),
    )
    out = hc_post(y, streams, post, comb)
    assert out.dtype == dtype
    truth = hc_post(y.double(), streams.double(), post.double(), comb.double())
    size = hc_post(
        y.double().abs(), streams.double().abs(), post.double().abs(), comb.double().abs()
    )
    assert_within_budget(out, truth, post_budget(dtype, truth, size, n))


def test_post_and_comb_may_be_rounded_first(device):
    # What transformers does (specification, section 10): the same GEMM of rounded weights.
    streams, y = fuzz.normal(0, (3, 4, 8)).to(device), fuzz.normal(1, (3, 8)).to(device)
    post, comb = fuzz.normal(2, (3, 4)).to(device), fuzz.normal(3, (3, 4, 4)).to(device)
    rounded = post.bfloat16(), comb.bfloat16()
    expected = hc_post(y, streams, *(r.float() for r in rounded))
    assert_bitwise(hc_post(y, streams, *rounded), expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_row_stays_alone(device, bad):
    case = {"seed": 0, "exponent": 0, "tokens": 5, "n": 4, "hidden": 6}
    streams, fn, scale, base = build(case, device, torch.float32)
    y = fuzz.normal(9, (5, 6)).to(device)

    def everything():
        mixed, post, comb = hc_pre(streams, fn, scale, base, **PRE)
        head = hc_head(streams, fn[:4], scale[:1], base[:4], **EPS)
        return mixed, post, comb, head, hc_post(y, streams, post, comb)

    clean = everything()
    streams[2, 1, 3] = bad
    others = [0, 1, 3, 4]
    for actual, expected in zip(everything(), clean, strict=True):
        assert actual[2].isnan().all()
        assert_bitwise(actual[others], expected[others])


def test_a_bad_sublayer_output_stays_in_its_column(device):
    streams, y = fuzz.normal(0, (3, 4, 6)).to(device), fuzz.normal(1, (3, 6)).to(device)
    post, comb = torch.ones(3, 4, device=device), fuzz.normal(2, (3, 4, 4)).to(device)
    clean = hc_post(y, streams, post, comb)
    y[1, 2] = torch.nan
    out = hc_post(y, streams, post, comb)
    assert out[1, :, 2].isnan().all()
    hit = torch.zeros_like(out, dtype=torch.bool)
    hit[1, :, 2] = True
    assert_bitwise(out[~hit], clean[~hit])


@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (0,), (2, 0)])
def test_any_leading_shape(device, wide, lead):
    streams, fn, scale, base = build(
        {"seed": 0, "exponent": 0, "tokens": 6, "n": 4, "hidden": 3}, device, wide
    )
    tokens = math.prod(lead)
    shaped = streams[:tokens].reshape(*lead, 4, 3)
    mixed, post, comb = hc_pre(shaped, fn, scale, base, **PRE)
    assert (mixed.shape, post.shape, comb.shape) == ((*lead, 3), (*lead, 4), (*lead, 4, 4))
    assert hc_post(mixed, shaped, post, comb).shape == shaped.shape
    assert hc_head(shaped, fn[:4], scale[:1], base[:4], **EPS).shape == (*lead, 3)


def test_strided_input_gives_the_same_result(device, wide):
    args = build({"seed": 0, "exponent": 0, "tokens": 5, "n": 4, "hidden": 6}, device, wide)
    strided = [fuzz.strided(a) for a in args]
    actual = hc_pre(*strided, **PRE)
    truth = hc_pre(*(a.double() for a in args), **PRE)
    assert_is_pre(actual, truth, args, PRE["hc_eps"], PRE["iterations"])
    assert all(part.is_contiguous() for part in actual)
    y, post, comb = actual
    back = hc_post(fuzz.strided(y), strided[0], fuzz.strided(post), fuzz.strided(comb))
    parts = [part.double() for part in (y, args[0], post, comb)]
    expected, size = hc_post(*parts), hc_post(*(part.abs() for part in parts))
    assert_within_budget(back, expected, post_budget(wide, expected, size, 4))
    assert back.is_contiguous()


@pytest.mark.rarely_interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_opcheck(device, dtype):
    streams, fn, scale, base = build(
        {"seed": 0, "exponent": 0, "tokens": 3, "n": 4, "hidden": 6}, device, dtype
    )
    ops = torch.ops.dsv4
    torch.library.opcheck(ops.hc_pre.default, (streams, fn, scale, base, 1e-6, 1e-6, 20, "auto"))
    args = (streams, fn[:4], scale[:1], base[:4], 1e-6, 1e-6, "auto")
    torch.library.opcheck(ops.hc_head.default, args)
    y, post, comb = hc_pre(streams, fn, scale, base, **PRE)
    torch.library.opcheck(ops.hc_post.default, (y, streams, post, comb, "auto"))


@pytest.mark.rarely_interpreted
def test_compiles_without_graph_breaks(device):
    def sublayer(streams, fn, scale, base):
        y, post, comb = hc_pre(streams, fn, scale, base, **PRE)
        streams = hc_post(y, streams, post, comb)
        return hc_head(streams, fn[:4], scale[:1], base[:4], **EPS)

    compiled = torch.compile(sublayer, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (2, 3, 7):
        case = {"seed": tokens, "exponent": 0, "tokens": tokens, "n": 4, "hidden": 6}
        args = build(case, device, torch.bfloat16)
        assert_bitwise(compiled(*args), sublayer(*args))


def test_bad_arguments_are_named(device):
    case = {"seed": 0, "exponent": 0, "tokens": 3, "n": 4, "hidden": 6}
    streams, fn, scale, base = build(case, device)
    with pytest.raises(TypeError, match=r"hc_pre: streams has dtype int64"):
        hc_pre(streams.long(), fn, scale, base, **PRE)
    with pytest.raises(ValueError, match=r"hc_pre: streams has shape \[6\], wanted \[..., n, H\]"):
        hc_pre(streams[0, 0], fn, scale, base, **PRE)
    with pytest.raises(ValueError, match=r"hc_pre: fn has shape \[23, 24\], wanted \[24, 24\]"):
        hc_pre(streams, fn[:23], scale, base, **PRE)
    with pytest.raises(ValueError, match=r"hc_pre: scale has shape \[1\], wanted \[3\]"):
        hc_pre(streams, fn, scale[:1], base, **PRE)
    with pytest.raises(ValueError, match=r"hc_pre: base has shape \[4\], wanted \[24\]"):
        hc_pre(streams, fn, scale, base[:4], **PRE)
    with pytest.raises(ValueError, match=r"hc_pre: iterations is 0, wanted at least 1"):
        hc_pre(streams, fn, scale, base, **EPS, iterations=0)
    with pytest.raises(ValueError, match=r"hc_head: fn has shape \[24, 24\], wanted \[4, 24\]"):
        hc_head(streams, fn, scale[:1], base[:4], **EPS)
    with pytest.raises(ValueError, match=r"hc_head: scale has shape \[3\], wanted \[1\]"):
        hc_head(streams, fn[:4], scale, base[:4], **EPS)
    with pytest.raises(TypeError, match=r"hc_head: base has dtype int64"):
        hc_head(streams, fn[:4], scale[:1], base[:4].long(), **EPS)
    y, post, comb = hc_pre(streams, fn, scale, base, **PRE)
    with pytest.raises(ValueError, match=r"hc_post: y has shape \[3, 5\], wanted \[3, 6\]"):
        hc_post(y[:, :5], streams, post, comb)
    with pytest.raises(ValueError, match=r"hc_post: post has shape \[2, 4\], wanted \[3, 4\]"):
        hc_post(y, streams, post[:2], comb)
    with pytest.raises(ValueError, match=r"hc_post: comb has shape \[3, 4\], wanted \[3, 4, 4\]"):
        hc_post(y, streams, post, post)
    with pytest.raises(TypeError, match=r"hc_post: comb has dtype bool"):
        hc_post(y, streams, post, comb.bool())


@pytest.mark.parametrize("operator", [hc_post, hc_reduce_post])
def test_streams_of_one_axis_are_named(operator):
    """While torch.compile traces, too, which does not check other shapes."""
    args = torch.ones(8), torch.ones(8), torch.ones(3), torch.ones(3, 3)
    name = operator.__name__
    with pytest.raises(ValueError, match=rf"{name}: streams has shape \[8\], wanted \[..., n, H\]"):
        operator(*args)
    compiled = torch.compile(operator, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"streams has shape .*, n, H"):
        compiled(*args)


four = st.fixed_dictionaries(
    {
        "seed": fuzz.seeds(),
        "exponent": st.just(0),
        "tokens": fuzz.rows(4),
        "n": st.sampled_from([4, 4, 4, 3]),
        "hidden": st.sampled_from([1, 5, 32, 33, 70, 130]),
    }
)


def write_back(case, device, dtype):
    """The output of a sublayer, and the post and comb to write it back with."""
    t, n, hidden, seed = case["tokens"], case["n"], case["hidden"], case["seed"]
    y = fuzz.normal(seed + 4, (t, hidden), dtype).to(device)
    post = fuzz.normal(seed + 5, (t, n)).sigmoid().to(device)
    return y, 2 * post, fuzz.normal(seed + 6, (t, n, n)).softmax(-1).to(device)


def assert_is_pre_then_norm(got, streams, fn, scale, base, weight, dtype):
    """``got`` of hc_pre_norm against its parts, which have tests of their own.

    The sums over the splits and over the row may run in another order: a few units of float32,
    which the Sinkhorn steps carry along; and one more rounding of the collapsed row.
    """
    normed, post, comb = got
    parts = hc_pre(streams, fn, scale, base, **PRE)
    slack = 64 * U * (1 + fn.abs().sum(-1).max())
    assert_within_budget(post, parts[1], slack, "post")
    assert_within_budget(comb, parts[2], 40 * slack, "comb")
    truth = rms_norm(parts[0].double(), weight.double(), 1e-6)
    allowed = 4 * unit_roundoff(dtype) + slack
    size = truth.abs() + truth.abs().amax(-1, keepdim=True)
    assert_within_budget(normed, truth, allowed * size + 1e-30, "normed")


@given(case=four, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@example({"seed": 0, "exponent": 0, "tokens": 1, "n": 4, "hidden": 5}, torch.float32)
@example({"seed": 0, "exponent": 0, "tokens": 2, "n": 4, "hidden": 70}, torch.bfloat16)
def test_pre_norm_is_pre_then_norm(device, case, dtype):
    streams, fn, scale, base = build(case, device, dtype)
    weight = fuzz.normal(case["seed"] + 9, (case["hidden"],), dtype).to(device)
    got = hc_pre_norm(streams, fn, scale, base, weight, **PRE)
    assert_is_pre_then_norm(got, streams, fn, scale, base, weight, dtype)


@given(case=four, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_post_pre_norm_is_its_parts(device, case, dtype):
    """The streams bit for bit, and the rest of the streams as they are returned."""
    streams, fn, scale, base = build(case, device, dtype)
    weight = fuzz.normal(case["seed"] + 9, (case["hidden"],), dtype).to(device)
    back = write_back(case, device, dtype)
    mixed, *got = hc_post_pre_norm(back[0], streams, *back[1:], fn, scale, base, weight, **PRE)
    assert_bitwise(mixed, hc_post(back[0], streams, *back[1:]), "streams")
    assert_is_pre_then_norm(got, mixed, fn, scale, base, weight, dtype)


def assert_quantized(actual, normed, scaling="token", **options):
    expected = quantize(normed, "nvfp4", scaling=scaling, backend="reference", **options)
    assert actual.layout == expected.layout == "linear"
    assert_bitwise(actual.codes, expected.codes, "codes")
    assert_bitwise(actual.scales.view(torch.uint8), expected.scales.view(torch.uint8), "scales")
    assert_bitwise(actual.global_scale, expected.global_scale, "global scale")


@pytest.mark.costly(2)
@given(
    seed=fuzz.seeds(),
    tokens=st.integers(0, 9),
    hidden=st.sampled_from([16, 48, 128, 272]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scaling=st.sampled_from(["token", "one", "rows"]),
    exponent=st.sampled_from([-40, -4, 0, 6, 40]),
    separate=st.booleans(),
)
def test_norm_that_is_quantised_is_its_parts(
    device, seed, tokens, hidden, dtype, scaling, exponent, separate
):
    """The codes are those of the norm that is returned; that and the rest as without them.

    In the launch that makes the norm, and in one of its own.
    """
    kernels = pytest.importorskip("dsv4.triton.hyper_connection")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_FEW_QUANTIZED", -1 if separate else 128)
        check_quantised(device, seed, tokens, hidden, dtype, scaling, exponent)


def check_quantised(device, seed, tokens, hidden, dtype, scaling, exponent):
    case = {"seed": seed, "exponent": 0, "tokens": tokens, "n": 4, "hidden": hidden}
    streams, fn, scale, base = build(case, device, dtype)
    weight = (fuzz.normal(seed + 9, (hidden,)) * 2.0**exponent).to(dtype).to(device)
    back = write_back(case, device, dtype)
    args = (back[0], streams, *back[1:], fn, scale, base, weight)
    settings = {"scaling": "token"}
    if scaling != "token":
        # Some of them saturate, some leave all codes 0.
        steps = torch.randint(-6, 3, (1 if scaling == "one" else tokens,)).double()
        global_scale = torch.exp2(steps + exponent).float().to(device)
        settings = {"scaling": "static", "global_scale": global_scale}
    mixed, normed, codes, *rest = hc_post_pre_norm_quantize(*args, **PRE, **settings)
    assert_bitwise(mixed, hc_post(back[0], streams, *back[1:]), "streams")
    assert_is_pre_then_norm([normed, *rest], mixed, fn, scale, base, weight, dtype)
    assert_quantized(codes, normed, **settings)
    first, codes, *others = hc_pre_norm_quantize(*args[1:2], *args[4:], **PRE, **settings)
    assert_is_pre_then_norm([first, *others], *args[1:2], *args[4:], dtype)
    assert_quantized(codes, first, **settings)
    if device.type == "cpu":
        for got, expected in zip(
            (mixed, normed, *rest), hc_post_pre_norm(*args, **PRE), strict=True
        ):
            assert_bitwise(got, expected)
        for got, expected in zip(
            (first, *others), hc_pre_norm(args[1], *args[4:], **PRE), strict=True
        ):
            assert_bitwise(got, expected)


@pytest.mark.parametrize(
    ("hidden", "tokens", "large_m"),
    [
        *((n, t, 1024) for n, t in ((96, 1), (96, 4), (96, 65), (520, 1), (520, 4), (520, 17))),
        pytest.param(96, 17, 1024, marks=pytest.mark.rarely_interpreted),
        pytest.param(520, 65, 1024, marks=pytest.mark.rarely_interpreted),
        *((96, 257, 5), (520, 40, 5)),
    ],
)
def test_every_way_to_split_the_work(device, tokens, hidden, large_m, monkeypatch):
    """Programs of 16, 64 and 256 tokens, slices with and without a rest: in budget of float64."""
    kernels = pytest.importorskip("dsv4.triton._lib.mixing_gemm")
    monkeypatch.setattr(kernels, "LARGE_M", large_m)
    case = {"seed": tokens, "exponent": 0, "tokens": tokens, "n": 4, "hidden": hidden}
    streams, fn, scale, base = build(case, device, torch.bfloat16)
    fn = fn / (4 * hidden) ** 0.5
    got, truth = (hc_pre(x, fn, scale, base, **PRE) for x in (streams, streams.double()))
    error = logit_budget(streams, fn, scale, base).amax()
    assert_within_budget(got[1], truth[1], error + 16 * U, "post")
    assert_within_budget(got[2], truth[2], 100 * (error + 16 * U), "comb")
    size = 4 * (unit_roundoff(torch.bfloat16) + error) * streams.double().abs().sum(1)
    assert_within_budget(got[0], truth[0], size, "collapsed")


def test_many_tokens_make_their_matrices_side_by_side(device, monkeypatch):
    """One token to a thread gives what one token to a program gives, up to the order of sums."""
    pytest.importorskip("triton")
    from dsv4.triton._lib import mixing_gemm as kernels

    case = {"seed": 3, "exponent": 0, "tokens": 37, "n": 4, "hidden": 40}
    args = build(case, device, torch.bfloat16)
    small_m = hc_pre(*args, **PRE)
    monkeypatch.setattr(kernels, "LARGE_M", 1)
    large_m = hc_pre(*args, **PRE)
    for got, expected in zip(large_m, small_m, strict=True):
        assert_within_budget(got, expected.double(), 1e-4 * expected.double().abs() + 1e-5)


def test_many_tokens_at_an_odd_address(device, monkeypatch):
    """No tensor descriptor takes such streams."""
    kernels = pytest.importorskip("dsv4.triton._lib.mixing_gemm")
    monkeypatch.setattr(kernels, "LARGE_M", 5)
    case = {"seed": 3, "exponent": 0, "tokens": 37, "n": 4, "hidden": 40}
    streams, *parameters = build(case, device, torch.bfloat16)
    odd = streams.new_empty(streams.numel() + 1)[1:].view(streams.shape).copy_(streams)
    expected = hc_pre(streams, *parameters, **PRE)
    for got, expected_tensor in zip(hc_pre(odd, *parameters, **PRE), expected, strict=True):
        assert_within_budget(
            got, expected_tensor.double(), 1e-2 * expected_tensor.double().abs() + 1e-4
        )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_a_bad_row_stays_alone_between_sublayers(device, bad):
    case = {"seed": 0, "exponent": 0, "tokens": 5, "n": 4, "hidden": 48}
    streams, fn, scale, base = build(case, device, torch.float32)
    weight = torch.ones(48, device=device)
    y, post, comb = write_back(case, device, torch.float32)
    clean = hc_post_pre_norm(y, streams, post, comb, fn, scale, base, weight, **PRE)
    streams[2, 1, 3] = bad
    got = hc_post_pre_norm(y, streams, post, comb, fn, scale, base, weight, **PRE)
    rest = [0, 1, 3, 4]
    for name, a, b in zip(("streams", "normed", "post", "comb"), got, clean, strict=True):
        assert_bitwise(a[rest], b[rest], name)
        assert name == "streams" or a[2].isnan().all(), name


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("scaling", ["token", "static"])
def test_a_bad_row_of_codes_stays_alone(device, bad, scaling):
    """Scales of the bad row are NaN; a row of zeros has codes 0."""
    case = {"seed": 0, "exponent": 0, "tokens": 5, "n": 4, "hidden": 48}
    streams, fn, scale, base = build(case, device, torch.float32)
    weight = torch.ones(48, device=device)
    y, post, comb = write_back(case, device, torch.float32)
    streams[2, 1, 3] = bad
    streams[3], y[3] = 0, 0
    settings = {"scaling": scaling} | ({"global_scale": 0.01} if scaling == "static" else {})
    args = (y, streams, post, comb, fn, scale, base, weight)
    for normed, codes, *_ in (
        hc_post_pre_norm_quantize(*args, **PRE, **settings)[1:],
        hc_pre_norm_quantize(streams, *args[4:], **PRE, **settings),
    ):
        assert_quantized(codes, normed, **settings)
        broken = codes.scales.float().isnan().all(1)
        assert broken.tolist() == [False, False, True, False, False]
        assert not bool(codes.codes[2:4].any())


@pytest.mark.parametrize("tokens", [1, 17])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_parameters_beyond_bfloat16(device, tokens, sign):
    """A float32 parameter above the largest bfloat16 is a number like any other."""
    case = {"seed": 0, "exponent": 0, "tokens": tokens, "n": 4, "hidden": 64}
    streams, fn, scale, base = build(case, device, torch.bfloat16)
    fn = fn.float() / 16
    fn[:, 5] = sign * 3.4e38
    streams[:, 0, 5] = 2.0**-128
    got, truth = (hc_pre(x, fn, scale, base, **PRE) for x in (streams, streams.double()))
    for name, a, b in zip(("collapsed", "post", "comb"), got, truth, strict=True):
        assert bool(a.isfinite().all()), name
        assert_within_budget(a, b, 0.02 * b.abs() + 1e-4, name)


def fused_arguments(device, dtype=torch.bfloat16, tokens=3):
    case = {"seed": 0, "exponent": 0, "tokens": tokens, "n": 4, "hidden": 48}
    streams, fn, scale, base = build(case, device, dtype)
    weight = torch.ones(48, dtype=dtype, device=device)
    y, post, comb = write_back(case, device, dtype)
    return (y, streams, post, comb, fn, scale, base, weight, 1e-6, 1e-6, 20, "auto")


@pytest.mark.rarely_interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_opcheck_of_fused(device, dtype):
    args = fused_arguments(device, dtype)
    torch.library.opcheck(torch.ops.dsv4.hc_post_pre_norm.default, args)
    pre = (args[1], *args[4:])
    torch.library.opcheck(torch.ops.dsv4.hc_pre_norm.default, pre)


@pytest.mark.rarely_interpreted
def test_fused_compiles_without_graph_breaks(device):
    def between(*args):
        return hc_post_pre_norm(*args[:8], **PRE)

    compiled = torch.compile(between, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (2, 3):
        args = fused_arguments(device, tokens=tokens)
        for got, expected in zip(compiled(*args), between(*args), strict=True):
            assert_bitwise(got, expected)


def quantize_arguments(device, scaling, dtype=torch.bfloat16, tokens=3):
    args = fused_arguments(device, dtype, tokens)
    global_scale = torch.full((1,), 0.01, device=device) if scaling == "static" else None
    return (*args[:8], global_scale, *args[8:11], scaling, "auto")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scaling", ["token", "static"])
def test_opcheck_of_quantize(device, dtype, scaling):
    op = torch.ops.dsv4.hc_post_pre_norm_quantize.default
    args = quantize_arguments(device, scaling, dtype)
    torch.library.opcheck(op, args)
    assert_pure(op, *args)
    op, args = torch.ops.dsv4.hc_pre_norm_quantize.default, (args[1], *args[4:])
    torch.library.opcheck(op, args)
    assert_pure(op, *args)


def test_quantize_compiles_without_graph_breaks(device):
    def between(*args):
        mixed, normed, codes, *rest = hc_post_pre_norm_quantize(*args[:8], **PRE)
        first, others, *made = hc_pre_norm_quantize(args[1], *args[4:8], **PRE)
        parts = (c.view(torch.uint8) for q in (codes, others) for c in (q.codes, q.scales))
        return mixed, normed, first, *parts, *rest, *made

    compiled = torch.compile(between, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (2, 3):
        args = fused_arguments(device, tokens=tokens)
        for got, expected in zip(compiled(*args), between(*args), strict=True):
            assert_bitwise(got, expected)


def test_fused_take_strided_input(device):
    """The product with ``fn`` may be added up in another order."""
    args = fused_arguments(device)[:8]
    gapped = tuple(map(fuzz.strided, args))
    mixed, normed, post, comb = hc_post_pre_norm(*args, **PRE)
    for actual in (hc_post_pre_norm(*gapped, **PRE), hc_post_pre_norm_quantize(*gapped, **PRE)):
        assert_bitwise(actual[0], mixed)
        for got, expected_tensor in zip(
            (actual[1], *actual[-2:]), (normed, post, comb), strict=True
        ):
            assert_within_budget(got, expected_tensor.double(), 2 * unit_roundoff(got.dtype) * 8)
    assert_quantized(actual[2], actual[1])
    actual = hc_pre_norm_quantize(gapped[1], *gapped[4:], **PRE)
    expected = hc_pre_norm(args[1], *args[4:], **PRE)
    for got, expected_tensor in zip((actual[0], *actual[2:]), expected, strict=True):
        assert_within_budget(got, expected_tensor.double(), 2 * unit_roundoff(got.dtype) * 8)
    assert_quantized(actual[1], actual[0])


def test_bad_arguments_of_quantize_are_named():
    args = list(fused_arguments(torch.device("cpu"))[:8])
    call = hc_post_pre_norm_quantize
    with pytest.raises(ValueError, match=r"streams has shape \[1, 3, 4, 48\], wanted \[any, any"):
        call(args[0], args[1][None], *args[2:], **PRE)
    with pytest.raises(ValueError, match="scaling is 'tensor', wanted one of 'token', 'static'"):
        call(*args, **PRE, scaling="tensor")
    with pytest.raises(ValueError, match="scaling is 'static' and global_scale is None"):
        call(*args, **PRE, scaling="static")
    with pytest.raises(ValueError, match="global_scale is given, but scaling 'token'"):
        call(*args, **PRE, global_scale=1.0)
    with pytest.raises(TypeError, match="global_scale has dtype float64, wanted float32"):
        call(*args, **PRE, scaling="static", global_scale=torch.ones(1, dtype=torch.float64))
    narrow = [args[0][:, :40], args[1][..., :40], *args[2:4], args[4][:, :160], *args[5:7]]
    with pytest.raises(ValueError, match="streams has 40 columns, wanted a positive multiple"):
        call(*narrow, args[7][:40], **PRE)
    with pytest.raises(ValueError, match=r"norm_weight has shape \[47\], wanted \[48\]"):
        call(*args[:7], args[7][:47], **PRE)
    first, rest = args[1], args[4:]
    with pytest.raises(ValueError, match=r"hc_pre_norm_quantize: streams has shape \[1, 3, 4, 48"):
        hc_pre_norm_quantize(first[None], *rest, **PRE)
    with pytest.raises(ValueError, match="scaling is 'static' and global_scale is None"):
        hc_pre_norm_quantize(first, *rest, **PRE, scaling="static")
    with pytest.raises(ValueError, match="streams has 40 columns, wanted a positive multiple"):
        hc_pre_norm_quantize(*narrow[1:2], *narrow[4:], args[7][:40], **PRE)


def test_bad_arguments_of_fused_are_named():
    args = list(fused_arguments(torch.device("cpu"))[:8])
    with pytest.raises(ValueError, match=r"norm_weight has shape \[47\], wanted \[48\]"):
        hc_post_pre_norm(*args[:7], args[7][:47], **PRE)
    with pytest.raises(ValueError, match=r"hc_post_pre_norm: y has shape \[2, 48\]"):
        hc_post_pre_norm(args[0][:2], *args[1:], **PRE)
    with pytest.raises(ValueError, match=r"hc_pre_norm: iterations is 0"):
        hc_pre_norm(args[1], *args[4:], **EPS, iterations=0)


@pytest.mark.gpu
def test_a_captured_graph_follows_its_inputs():
    device = torch.device("cuda")
    case = {"seed": 0, "exponent": 0, "tokens": 5, "n": 4, "hidden": 4096}
    streams, fn, scale, base = build(case, device, torch.bfloat16)
    weight = torch.ones(4096, dtype=torch.bfloat16, device=device)
    back = write_back(case, device, torch.bfloat16)

    def chain():
        args = (back[0], streams, *back[1:], fn, scale, base, weight)
        mixed, normed, codes, post, comb = hc_post_pre_norm_quantize(*args, **PRE)
        parts = codes.codes, codes.scales.view(torch.uint8), codes.global_scale
        return *hc_post_pre_norm(*args, **PRE), mixed, normed, *parts, post, comb

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for seed in range(5):
        streams.copy_(fuzz.normal(seed, tuple(streams.shape)))
        back[0].copy_(fuzz.normal(seed + 1, tuple(back[0].shape)))
        for tensor in out:
            tensor.view(torch.uint8).fill_(0xA5)
        graph.replay()
        for got, expected in zip(out, chain(), strict=True):
            assert_bitwise(got, expected)
