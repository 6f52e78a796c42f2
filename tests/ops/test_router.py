"""Routers: selection and weights against plain Python, and float64 with derived budgets."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from dsv4.ops.router import route_hash, route_topk
from dsv4.testing import strategies as fuzz
from dsv4.testing.assertions import (
    assert_bitwise,
    assert_within_budget,
    gemm_budget,
    unit_roundoff,
)

KERNELS = ("triton",)
U = unit_roundoff(torch.float32)


def score(logit):
    """sqrt(softplus) in double precision, exact to a few ulp from -700 to 1e300."""
    return math.sqrt(max(logit, 0.0) + math.log1p(math.exp(-abs(logit))))


def plain_topk(logits, bias, top_k, scaling_factor):
    """Specification, section 8.1 for one token, over Python floats: ids and weights."""
    scores = [score(x) for x in logits]
    by_biased = sorted(range(len(scores)), key=lambda e: (-(scores[e] + bias[e]), e))
    ids = by_biased[:top_k]
    total = sum(scores[e] for e in ids) + 1e-20
    return ids, [scores[e] / total * scaling_factor for e in ids]


def weight_budget(truth, top_k, scaling_factor, logit_error=0.0):
    """Error of float32 routing weights.

    Score: exp and log1p 4 u each, one sum, halved by the root, plus its own rounding: below 6 u.
    Sum of k, floor, quotient, factor: k + 2 more. A logit error d moves a score by at most d / 2 of
    itself, and the quotient of two by d. Scores below 4e-23 (root of the smallest denormal) are
    lost, which matters against the floor of 1e-20.
    """
    relative = (14 + top_k) * U + logit_error
    return 1.01 * relative * truth.abs() + scaling_factor * (top_k + 2) * 4e-23 / 1e-20


def fixed_logits(logits, device, dtype=torch.float32):
    """x and weight whose product is exactly these logits: x times the identity."""
    x = torch.as_tensor(logits, dtype=dtype, device=device)
    return x, torch.eye(x.shape[1], dtype=dtype, device=device)


# A softplus that underflows is off by up to the smallest float32, 2^-149, its root by this; twice.
ROOT_OF_SMALLEST = 2.0**-73

cases = st.fixed_dictionaries(
    {
        "seed": fuzz.seeds(),
        "exponent": fuzz.magnitudes(-6, 6),
        "tokens": fuzz.rows(6),
        "hidden": st.integers(1, 40),
        "experts": st.integers(1, 12),
        "dtype": fuzz.float_dtypes(),
        "bias": st.booleans(),
    }
)


def build(case, device):
    x = fuzz.normal(case["seed"], (case["tokens"], case["hidden"])) * 2.0 ** case["exponent"]
    weight = fuzz.normal(case["seed"] + 1, (case["experts"], case["hidden"]), case["dtype"])
    bias = fuzz.normal(case["seed"] + 2, (case["experts"],)).to(device) if case["bias"] else None
    return x.to(case["dtype"]).to(device), weight.to(device), bias


@given(case=cases, data=st.data())
def test_topk_against_float64(device, case, data):
    x, weight, bias = build(case, device)
    top_k = data.draw(st.integers(1, case["experts"]))
    logits, weights, ids = route_topk(x, weight, bias, top_k=top_k, scaling_factor=2.5)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    assert (logits.dtype, weights.dtype, ids.dtype) == (wide, wide, torch.int64)

    product = x.double() @ weight.double().T
    logit_error = gemm_budget(x.double(), weight.double(), torch.float32)
    assert_within_budget(logits, product, logit_error)

    scores = (product.clamp(min=0) + torch.log1p(torch.exp(-product.abs()))).sqrt()
    chosen = scores.gather(1, ids)
    truth = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * 2.5
    worst = logit_error.max() if logit_error.numel() else 0.0
    assert_within_budget(weights, truth, weight_budget(truth, top_k, 2.5, worst))

    biased = scores if bias is None else scores + bias.double()
    picked = biased.gather(1, ids)
    slack = 2 * (scores.amax(-1) * (7 * U + worst) + 3 * U * biased.abs().amax(-1))
    slack += ROOT_OF_SMALLEST
    best = biased.sort(-1, descending=True).values[:, :top_k]
    assert ((picked - best).abs() <= slack.unsqueeze(-1)).all()
    assert all(len(set(row)) == top_k for row in ids.tolist())


def test_scores_that_underflow_tie_at_the_lowest_index(device):
    """The softplus is 0 in float32 below about -103, whatever the order of the logits."""
    x, weight = fixed_logits([[-130.0, -120.0, -125.0]], device)
    _, weights, ids = route_topk(x, weight, None, top_k=2, scaling_factor=2.5)
    assert ids.tolist() == [[0, 1]]
    assert weights.tolist() == [[0.0, 0.0]]


@given(case=cases, data=st.data())
def test_weights_sum_to_the_scaling_factor(device, case, data):
    x, weight, bias = build(case, device)
    top_k = data.draw(st.integers(1, case["experts"]))
    logits, weights, _ = route_topk(x, weight, bias, top_k=top_k, scaling_factor=1.5)
    assume(logits.numel() == 0 or logits.min() > -60)
    total = weights.double().sum(-1)
    assert_within_budget(total, torch.full_like(total, 1.5), 1.5 * (2 * top_k + 3) * U)
    assert (weights > 0).all()


@given(
    logits=st.lists(st.floats(-1000, 1000, width=32), min_size=2, max_size=8),
    top_k=st.integers(1, 2),
)
def test_pitfall_10_scores_are_stable_from_minus_1000_to_1000(device, logits, top_k):
    x, weight = fixed_logits([logits], device)
    result, weights, ids = route_topk(x, weight, None, top_k=top_k, scaling_factor=2.5)
    assert result.tolist() == x.tolist()
    assert weights.isfinite().all()
    chosen = torch.tensor([score(logits[e]) for e in ids[0].tolist()], dtype=torch.float64)
    truth = chosen / (chosen.sum() + 1e-20) * 2.5
    assert_within_budget(weights[0].cpu(), truth, weight_budget(truth, top_k, 2.5))


@pytest.mark.parametrize("hashed", [False, True])
def test_pitfall_10_by_hand(device, hashed):
    rows = [
        [-20.0, -22.0],  # log(1 + exp(x)) is 0 for both: 0/0, or 1/2 each with a floor
        [100.0, 400.0],  # exp overflows: inf/inf
        [-1000.0, -1000.0],  # all underflowed: zero weights, no NaN
        [1000.0, -1000.0],
    ]
    x, weight = fixed_logits(rows, device)
    if hashed:
        table = torch.tensor([[0, 1]], device=device)
        tokens = torch.zeros(4, dtype=torch.int64, device=device)
        _, weights, ids = route_hash(x, weight, table, tokens, scaling_factor=1.0)
    else:
        _, weights, ids = route_topk(x, weight, None, top_k=2, scaling_factor=1.0)
    by_expert = weights.gather(1, ids.argsort(1)).tolist()
    e = math.exp(-1.0)  # sqrt(softplus(x)) is exp(x / 2) there: the ratio is e
    assert by_expert[0] == pytest.approx([1 / (1 + e), e / (1 + e)], rel=1e-6)
    assert by_expert[1] == pytest.approx([10 / 30, 20 / 30], rel=1e-6)
    assert by_expert[2] == [0.0, 0.0]
    assert by_expert[3] == [1.0, 0.0]


def test_pitfall_11_other_scorings_choose_other_experts(device):
    # sqrt(softplus(8)) = 2.83 passes 0.83 + 1.5; sigmoid(8) and softmax do not reach 0.5 + 1.5.
    x, weight = fixed_logits([[0.0, 8.0]], device)
    bias = torch.tensor([1.5, 0.0], device=device)
    assert route_topk(x, weight, bias, top_k=1, scaling_factor=1.0)[2].tolist() == [[1]]
    _, weights, ids = route_topk(x, weight, bias, top_k=2, scaling_factor=1.0)
    assert ids.tolist() == [[1, 0]]
    # softmax would give 0.9997, sigmoid 0.667, softplus without the root 0.920.
    assert weights[0, 0].item() == pytest.approx(0.77259, abs=1e-5)


@given(
    seed=fuzz.seeds(),
    exponent=fuzz.magnitudes(-3, 5),
    experts=st.integers(2, 10),
    data=st.data(),
)
def test_pitfall_11_against_the_formula(device, wide, seed, exponent, experts, data):
    top_k = data.draw(st.integers(1, experts))
    # No score underflows, in float32 either.
    logits = (fuzz.normal(seed, (4, experts), wide) * 2.0**exponent).clamp(-80, 80)
    bias = fuzz.normal(seed + 1, (experts,), wide)
    # As in ``weight_budget``; and the argument of exp is off by a rounding.
    relative = 1.01 * (14 + top_k + 2 * float(logits.abs().max())) * unit_roundoff(wide)
    for row in logits.tolist():
        biased = sorted(score(v) + b for v, b in zip(row, bias.tolist(), strict=True))
        size = max(abs(v) for v in (*biased, *bias.tolist()))
        assume(all(b - a > 4 * relative * size for a, b in pairwise(biased)))
    x, weight = fixed_logits(logits, device, wide)
    _, weights, ids = route_topk(x, weight, bias.to(device), top_k=top_k, scaling_factor=1.5)
    for t, row in enumerate(logits.tolist()):
        wanted_ids, expected = plain_topk(row, bias.tolist(), top_k, 1.5)
        assert ids[t].tolist() == wanted_ids
        assert weights[t].tolist() == pytest.approx(expected, rel=relative)


def test_bias_is_for_the_selection_alone(device):
    x, weight = fixed_logits([[3.0, 2.0, 1.0, 0.0]], device)
    bias = torch.tensor([0.0, 0.0, 100.0, 200.0], device=device)
    _, weights, ids = route_topk(x, weight, bias, top_k=2, scaling_factor=1.0)
    assert ids.tolist() == [[3, 2]]
    total = score(0.0) + score(1.0)
    assert weights[0].tolist() == pytest.approx([score(0.0) / total, score(1.0) / total], rel=1e-6)


@given(seed=fuzz.seeds(), experts=st.integers(2, 300), distinct=st.integers(1, 3), data=st.data())
def test_ties_go_to_the_lowest_expert(device, seed, experts, distinct, data):
    top_k = data.draw(st.integers(1, min(experts, 8)))
    values = torch.randint(0, distinct, (3, experts), generator=fuzz.generator(seed)).float()
    x, weight = fixed_logits(values, device)
    ids = route_topk(x, weight, None, top_k=top_k, scaling_factor=1.0)[2]
    for row, result in zip(values.tolist(), ids.tolist(), strict=True):
        assert result == sorted(range(experts), key=lambda e: (-row[e], e))[:top_k]


@given(seed=fuzz.seeds(), experts=st.integers(1, 12), tokens=fuzz.rows(6), data=st.data())
def test_relabelling_experts_and_tokens_relabels_the_result(device, seed, experts, tokens, data):
    top_k = data.draw(st.integers(1, experts))
    logits = fuzz.normal(seed, (tokens, experts))
    bias = fuzz.normal(seed + 1, (experts,))
    assume(all(len(set(row)) == experts for row in (logits.abs() + 1).tolist()))
    new = torch.randperm(experts, generator=fuzz.generator(seed))  # expert new[i] becomes i
    moved = torch.randperm(tokens, generator=fuzz.generator(seed + 1))
    x, weight = fixed_logits(logits, device)
    first = route_topk(x, weight, bias.to(device), top_k=top_k, scaling_factor=1.0)
    second = route_topk(
        x[moved], weight[new], bias[new].to(device), top_k=top_k, scaling_factor=1.0
    )
    assert_bitwise(new.to(device)[second[2]], first[2][moved], "ids")
    assert_bitwise(second[1], first[1][moved], "weights")
    assert_bitwise(second[0], first[0][moved][:, new], "logits")


hash_cases = st.fixed_dictionaries(
    {
        "seed": fuzz.seeds(),
        "tokens": fuzz.rows(6),
        "experts": st.integers(1, 8),
        "chosen": st.integers(1, 4),
        "vocabulary": st.integers(1, 20),
        "ids": st.sampled_from([torch.int32, torch.int64]),
        "table": st.sampled_from([torch.int32, torch.int64]),
    }
)


def build_hash(case, device):
    generator = fuzz.generator(case["seed"])
    x, weight = fixed_logits(fuzz.normal(case["seed"], (case["tokens"], case["experts"])), device)
    size = (case["vocabulary"], case["chosen"])
    table = torch.randint(0, case["experts"], size, generator=generator, dtype=case["table"])
    tokens = torch.randint(
        0, case["vocabulary"], (case["tokens"],), generator=generator, dtype=case["ids"]
    )
    return x, weight, table.to(device), tokens.to(device)


@given(case=hash_cases)
def test_pitfall_12_experts_by_token_id_weights_by_score(device, case):
    x, weight, table, tokens = build_hash(case, device)
    logits, weights, ids = route_hash(x, weight, table, tokens, scaling_factor=1.5)
    assert_bitwise(logits, x)
    assert ids.dtype == torch.int64
    for t, token in enumerate(tokens.tolist()):
        experts = table[token].tolist()
        assert ids[t].tolist() == experts
        scores = [score(x[t, e].item()) for e in experts]
        expected = torch.tensor([s / (sum(scores) + 1e-20) * 1.5 for s in scores]).double()
        assert_within_budget(weights[t].cpu(), expected, weight_budget(expected, len(experts), 1.5))


def test_pitfall_12_the_choice_follows_the_ids_not_the_scores(device):
    x, weight = fixed_logits([[9.0, 0.0, 0.0, 1.0]] * 2, device)
    table = torch.tensor([[1, 2], [3, 1]], device=device)
    _, weights, ids = route_hash(
        x, weight, table, torch.tensor([1, 0], device=device), scaling_factor=1.0
    )
    assert ids.tolist() == [[3, 1], [1, 2]]
    assert weights[1].tolist() == pytest.approx([0.5, 0.5])
    share = score(1.0) / (score(1.0) + score(0.0))  # 0.579: not 1/2 each
    assert weights[0].tolist() == pytest.approx([share, 1 - share], rel=1e-6)


def test_pitfall_12_input_ids_are_required(device):
    x, weight = fixed_logits([[1.0, 2.0]], device)
    table = torch.tensor([[0]], device=device)
    with pytest.raises(ValueError, match=r"route_hash: input_ids is None, wanted \[T\]"):
        route_hash(x, weight, table, None, scaling_factor=1.0)


@pytest.mark.parametrize("token", [-1, 2, 129280])
def test_token_ids_outside_the_vocabulary(device, token):
    x, weight = fixed_logits([[1.0, 2.0]] * 2, device)
    table = torch.tensor([[0, 1], [1, 0]], device=device)
    tokens = torch.tensor([1, token], device=device)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=rf"input_ids of token 1 is {token}, wanted .* 0 to 1"):
            route_hash(x, weight, table, tokens, scaling_factor=1.0)
    else:
        _, weights, ids = route_hash(x, weight, table, tokens, scaling_factor=1.0)
        assert weights[0].isfinite().all()
        assert weights[1].isnan().all()
        assert ((ids >= 0) & (ids < 2)).all()


def test_table_entries_that_are_no_expert(device):
    x, weight = fixed_logits([[1.0, 2.0]] * 2, device)
    table = torch.tensor([[0, 1], [0, 2]], device=device)
    tokens = torch.tensor([0, 1], device=device)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"tid2eid of token 1 is \[0, 2\], wanted .* 0 to 1"):
            route_hash(x, weight, table, tokens, scaling_factor=1.0)
    else:
        _, weights, ids = route_hash(x, weight, table, tokens, scaling_factor=1.0)
        assert weights[0].isfinite().all()
        assert weights[1].isnan().all()
        assert ((ids >= 0) & (ids < 2)).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("hashed", [False, True])
def test_a_bad_row_stays_alone(device, bad, hashed):
    x = fuzz.normal(0, (5, 6)).to(device)
    weight = fuzz.normal(1, (8, 6)).abs().to(device)  # -inf in x makes every logit -inf: score 0
    table = torch.arange(8, device=device).view(4, 2)
    tokens = torch.tensor([0, 1, 2, 3, 0], device=device)

    def route():
        if hashed:
            return route_hash(x, weight, table, tokens, scaling_factor=1.0)
        return route_topk(x, weight, None, top_k=2, scaling_factor=1.0)

    clean = route()
    x[3, 2] = bad
    _, weights, ids = route()
    others = [0, 1, 2, 4]
    assert weights[3].isnan().all()
    assert_bitwise(weights[others], clean[1][others])
    assert_bitwise(ids[others], clean[2][others])
    assert ((ids >= 0) & (ids < 8)).all()
    assert len(set(ids[3].tolist())) == 2


def test_logits_dtype(device):
    x = fuzz.normal(0, (5, 64), torch.bfloat16).to(device)
    weight = fuzz.normal(1, (8, 64), torch.bfloat16).to(device)
    kwargs = {"top_k": 3, "scaling_factor": 1.0}
    wide, _, _ = route_topk(x, weight, None, **kwargs)
    narrow, weights, _ = route_topk(x, weight, None, logits_dtype=torch.bfloat16, **kwargs)
    assert (wide.dtype, narrow.dtype, weights.dtype) == (
        torch.float32,
        torch.bfloat16,
        torch.float32,
    )
    truth = x.double() @ weight.double().T
    assert_within_budget(wide, truth, gemm_budget(x.double(), weight.double(), torch.float32))
    assert_within_budget(narrow, truth, gemm_budget(x.double(), weight.double(), torch.bfloat16))
    assert route_topk(x.double(), weight, None, **kwargs)[0].dtype == torch.float64


def check_routing(x, weight, bias, top_k):
    """Logits within the budget of their product; ids and weights follow from these very logits."""
    logits, weights, ids = route_topk(x, weight, bias, top_k=top_k, scaling_factor=2.5)
    wide = x.double(), weight.double()
    assert_within_budget(logits, wide[0] @ wide[1].T, gemm_budget(*wide, torch.float32))
    own = logits.double()
    scores = (own.clamp(min=0) + torch.log1p(torch.exp(-own.abs()))).sqrt()
    biased = scores + bias.double()
    best = biased.sort(-1, descending=True).values[:, :top_k]
    slack = 2 * (7 * U * scores + U * biased.abs()).amax(-1, keepdim=True)
    assert ((biased.gather(1, ids) - best).abs() <= slack).all()
    assert (ids.sort(-1).values.diff(dim=-1) > 0).all()
    chosen = scores.gather(1, ids)
    truth = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * 2.5
    assert_within_budget(weights, truth, weight_budget(truth, top_k, 2.5))
    for result, again in zip(
        (logits, weights, ids),
        route_topk(x, weight, bias, top_k=top_k, scaling_factor=2.5),
        strict=True,
    ):
        assert_bitwise(result, again, "second run")


@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [
        *((tokens, dtype) for tokens in (3, 5, 17) for dtype in (torch.bfloat16, torch.float32)),
        *((40, torch.float32), (130, torch.bfloat16)),
        pytest.param(40, torch.bfloat16, marks=pytest.mark.rarely_interpreted),
        pytest.param(130, torch.float32, marks=pytest.mark.rarely_interpreted),
    ],
)
def test_slices_of_the_hidden_axis(device, monkeypatch, tokens, dtype):
    """Sizes that fill no tile, cut in as many slices as a GPU would like."""
    if device.type == "cpu":
        launch = pytest.importorskip("dsv4.triton._runtime.launch_options")
        monkeypatch.setattr(launch, "sm_count", lambda device: 16)
    x = fuzz.normal(0, (tokens, 600), dtype).to(device)
    weight = (fuzz.normal(1, (40, 600)) / 20).to(dtype).to(device)
    check_routing(x, weight, fuzz.normal(2, (40,)).to(device), 7)


@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "hidden"), [(256, 4096), (384, 7168)])
@pytest.mark.parametrize("tokens", [1, 3, 4, 7, 16, 33, 64, 200, 1025, 3000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sizes_of_the_models(experts, hidden, tokens, dtype):
    device = torch.device("cuda")
    x = fuzz.normal(0, (tokens, hidden), dtype).to(device)
    weight = (fuzz.normal(1, (experts, hidden)) * hidden**-0.5).to(dtype).to(device)
    check_routing(x, weight, fuzz.normal(2, (experts,)).to(device) / 10, 6)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 24, 300])
def test_a_graph_replays_with_other_data(tokens):
    """Captured with one set of tokens, replayed with another, results poisoned in between."""
    device = torch.device("cuda")
    weight = fuzz.normal(9, (64, 256), torch.bfloat16).to(device)
    table = torch.arange(400, device=device).view(100, 4) % 64

    def run(x, bias, words):
        learned = route_topk(x, weight, bias, top_k=6, scaling_factor=1.5)
        return *learned, *route_hash(x, weight, table, words, scaling_factor=1.5)

    sets = [
        (
            fuzz.normal(seed, (tokens, 256), torch.bfloat16).to(device),
            fuzz.normal(seed + 1, (64,)).to(device),
            torch.randint(0, 100, (tokens,), generator=fuzz.generator(seed)).to(device),
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


def test_strided_input_gives_the_same_result(device):
    x, weight = fixed_logits(fuzz.normal(0, (5, 6)), device)
    bias = fuzz.normal(2, (6,)).to(device)
    strided = [fuzz.strided(t) for t in (x, weight, bias)]
    expected = route_topk(x, weight, bias, top_k=2, scaling_factor=1.0)
    for actual, w in zip(route_topk(*strided, top_k=2, scaling_factor=1.0), expected, strict=True):
        assert_bitwise(actual, w)
        assert actual.is_contiguous()


def test_tokens_that_are_not_routed_have_no_expert(device):
    """And nothing else changes."""
    x, weight = fuzz.normal(0, (5, 8)).to(device), fuzz.normal(1, (6, 8)).to(device)
    table = (torch.arange(8, device=device) % 6).view(4, 2)
    words = torch.tensor([3, 0, 1, 0, 2], device=device)
    routed = torch.tensor([0, -1, 7, -9, 1], device=device)
    for run, table_of in ((route_topk, (None,)), (route_hash, (table, words))):
        options = {"scaling_factor": 1.5} | ({"top_k": 2} if run is route_topk else {})
        logits, weights, ids = run(x, weight, *table_of, **options, routed=routed)
        plain = run(x, weight, *table_of, **options)
        assert_bitwise(logits, plain[0])
        assert_bitwise(weights, plain[1])
        assert torch.equal(ids, torch.where((routed < 0).unsqueeze(1), -1, plain[2]))
    with pytest.raises(ValueError, match=r"route_topk: routed has shape \[4\], wanted \[5\]"):
        route_topk(x, weight, None, top_k=2, scaling_factor=1.0, routed=routed[:4])


def test_no_tokens(device):
    x, weight = torch.zeros(0, 4, device=device), torch.zeros(3, 4, device=device)
    table = torch.zeros(5, 2, dtype=torch.int64, device=device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    for result in (
        route_topk(x, weight, None, top_k=2, scaling_factor=1.0),
        route_hash(x, weight, table, none, scaling_factor=1.0),
    ):
        assert [list(t.shape) for t in result] == [[0, 3], [0, 2], [0, 2]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_opcheck(device, dtype):
    x, weight = fuzz.normal(0, (3, 8), dtype).to(device), fuzz.normal(1, (6, 8), dtype).to(device)
    bias = fuzz.normal(2, (6,)).to(device)
    logits_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    table = torch.zeros(5, 2, dtype=torch.int32, device=device)
    tokens = torch.zeros(3, dtype=torch.int64, device=device)
    ops = torch.ops.dsv4
    for b in (bias, None):
        args = (x, weight, b, 2, 1.5, logits_dtype, tokens if b is None else None, "auto")
        torch.library.opcheck(ops.route_topk.default, args)
    args = (x, weight, table, tokens, 1.5, logits_dtype, None, "auto")
    torch.library.opcheck(ops.route_hash.default, args)


def test_compiles_without_graph_breaks(device):
    def both(x, weight, bias, table, tokens):
        learned = route_topk(x, weight, bias, top_k=2, scaling_factor=1.5)
        return *learned, *route_hash(x, weight, table, tokens, scaling_factor=1.5)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=True)
    table = torch.arange(6, device=device).view(3, 2)
    for tokens in (2, 3, 7):
        x, weight = fixed_logits(fuzz.normal(tokens, (tokens, 6)), device)
        args = (x, weight, weight[0], table, torch.arange(tokens, device=device) % 3)
        for actual, expected in zip(compiled(*args), both(*args), strict=True):
            assert_bitwise(actual, expected)


def test_bad_arguments_are_named(device):
    x, weight = torch.zeros(3, 4, device=device), torch.zeros(6, 4, device=device)
    table = torch.zeros(5, 2, dtype=torch.int64, device=device)
    tokens = torch.zeros(3, dtype=torch.int64, device=device)
    kwargs = {"top_k": 2, "scaling_factor": 1.0}
    with pytest.raises(TypeError, match=r"route_topk: x has dtype int64"):
        route_topk(x.long(), weight, None, **kwargs)
    with pytest.raises(ValueError, match=r"route_topk: x has shape \[3, 4, 1\]"):
        route_topk(x[..., None], weight, None, **kwargs)
    with pytest.raises(ValueError, match=r"weight has shape \[4, 6\], wanted \[any, 4\]"):
        route_topk(x, weight.T, None, **kwargs)
    with pytest.raises(ValueError, match=r"bias has shape \[5\], wanted \[6\]"):
        route_topk(x, weight, torch.zeros(5, device=device), **kwargs)
    for top_k in (0, 7):
        with pytest.raises(ValueError, match=rf"top_k is {top_k}, wanted 1 to 6"):
            route_topk(x, weight, None, top_k=top_k, scaling_factor=1.0)
    with pytest.raises(TypeError, match=r"logits_dtype is torch.int8"):
        route_topk(x, weight, None, logits_dtype=torch.int8, **kwargs)
    with pytest.raises(TypeError, match=r"route_hash: tid2eid has dtype float32"):
        route_hash(x, weight, table.float(), tokens, scaling_factor=1.0)
    with pytest.raises(TypeError, match=r"route_hash: input_ids has dtype float32"):
        route_hash(x, weight, table, tokens.float(), scaling_factor=1.0)
    with pytest.raises(ValueError, match=r"input_ids has shape \[2\], wanted \[3\]"):
        route_hash(x, weight, table, tokens[:2], scaling_factor=1.0)
