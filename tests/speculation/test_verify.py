"""Verification: greedy is plain greedy, sampled has the target's distribution."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4.dispatch import use_backend
from dsv4.serving.sampler import FAILED, Parameters, Variant, sample
from dsv4.speculation.forced import ForcedAcceptance
from dsv4.speculation.verify import (
    NO_DRAFT,
    draw_draft,
    probabilities,
    verify_equal,
    verify_greedy,
    verify_same_draws,
    verify_sampled,
)
from dsv4.testing.strategies import generator
from tests.serving.test_sampler import chi_square

VOCAB, DRAWS = 16, 20_000
LIMIT = 4.5  # normal deviates
DRAWN = Variant(draw=True)


def request(batch: int, *, first_seed: int = 0, **changes: object) -> Parameters:
    """Parameters of requests that differ by their seeds."""
    values = {
        "temperature": 1.0, "top_p": 1.0, "log_min_p": -math.inf, "penalty": 1.0, "top_k": VOCAB,
        "position": 7, **changes,
    }  # fmt: skip
    integers = ("top_k", "position")
    rows = {
        name: torch.full((batch,), value, dtype=torch.int64 if name in integers else torch.float64)
        for name, value in values.items()
        if name != "present"
    }
    seeds = first_seed + torch.arange(batch)
    return Parameters(**rows, seed=seeds, present=changes.get("present"))


def noise(seed: int, *shape: int, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def counts_of(tokens: torch.Tensor) -> torch.Tensor:
    return torch.bincount(tokens.cpu(), minlength=VOCAB).double()


def wide(distribution: torch.Tensor) -> torch.Tensor:
    return distribution.double().cpu()


# Greedy ---------------------------------------------------------------------------------------


@given(st.data(), st.integers(1, 5), st.integers(0, 6))
def test_greedy_accepts_the_right_prefix(data, batch, count) -> None:
    """Any draft, right or wrong: the tokens are those of the rows, one after another."""
    logits = noise(3, batch, count + 1, VOCAB)
    best = logits.argmax(-1)
    right = torch.tensor(
        data.draw(st.lists(st.lists(st.booleans(), min_size=count, max_size=count),
                           min_size=batch, max_size=batch))
    ).reshape(batch, count)  # fmt: skip
    wrong = torch.where(best[:, :-1] % 2 == 0, NO_DRAFT, (best[:, :-1] + 1) % VOCAB)
    drafts = torch.where(right.bool(), best[:, :-1], wrong)
    verified = verify_greedy(logits, drafts)
    for row in range(batch):
        expected = next((i for i, ok in enumerate(right[row]) if not ok), count)
        assert int(verified.accepted[row]) == expected
        tokens = verified.tokens[row].tolist()
        assert tokens[: expected + 1] == best[row, : expected + 1].tolist()
        assert tokens[expected + 1 :] == [NO_DRAFT] * (count - expected)


def test_a_row_that_is_not_finite_fails_alone() -> None:
    logits = noise(1, 2, 4, VOCAB)
    best = logits.argmax(-1)
    logits[0, 1, 5] = torch.nan
    for verified in (
        verify_greedy(logits, best[:, :-1]),
        verify_sampled(logits, best[:, :-1], request(2, temperature=0.0), DRAWN),
    ):
        assert verified.accepted.tolist() == [1, 3]
        assert verified.tokens[0].tolist() == [int(best[0, 0]), FAILED, NO_DRAFT, NO_DRAFT]
        assert verified.tokens[1].tolist() == best[1].tolist()


# Sampled --------------------------------------------------------------------------------------


OPTIONS = [
    ({}, DRAWN),
    ({"temperature": 0.6}, DRAWN),
    ({"top_k": 5}, Variant(draw=True, filters=True)),
    ({"top_p": 0.7, "log_min_p": math.log(0.1)}, Variant(draw=True, filters=True)),
    ({"penalty": 1.7, "top_k": 12}, Variant(draw=True, filters=True, penalty=True)),
]


@pytest.mark.parametrize("how", ["drawn", "certain", "none"])
@pytest.mark.parametrize(("changes", "variant"), OPTIONS, ids=range(len(OPTIONS)))
def test_tokens_have_the_target_s_distribution(how, changes, variant) -> None:
    assert_tokens_have_the_target_s_distribution(how, changes, variant)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["drawn", "certain", "none"])
@pytest.mark.parametrize(("changes", "variant"), OPTIONS, ids=range(len(OPTIONS)))
def test_tokens_of_the_kernels_have_the_target_s_distribution(how, changes, variant) -> None:
    """Kernels take float32; operators that have none would raise here."""
    with use_backend("triton"):
        assert_tokens_have_the_target_s_distribution(how, changes, variant, "cuda", torch.float32)


def assert_tokens_have_the_target_s_distribution(
    how, changes, variant, device="cpu", dtype=torch.float64
) -> None:
    """20,000 seeds, two drafts from a distribution far from the target's."""
    present = torch.arange(VOCAB).remainder(3).eq(0).expand(DRAWS, VOCAB)
    parameters = request(DRAWS, **changes, present=present if variant.penalty else None)
    parameters = Parameters(*(None if x is None else x.to(device) for x in parameters))
    logits = noise(11, 1, 3, VOCAB).to(device, dtype).expand(DRAWS, -1, -1)
    q_logits = noise(12, 2, VOCAB).to(device, dtype)
    drafts, q = [], []
    for i in range(2):
        at = parameters._replace(position=parameters.position + i)
        drafted = draw_draft(q_logits[i].expand(DRAWS, -1), at, variant)
        if how == "certain":
            drafts.append(torch.full_like(drafted.tokens, 3 + i))
        else:
            missing = torch.full_like(drafted.tokens, NO_DRAFT)
            drafts.append(drafted.tokens if how == "drawn" else missing)
        q.append(drafted.probabilities)
        assert chi_square(counts_of(drafted.tokens), wide(drafted.probabilities[0])) < LIMIT
    proposals = torch.stack(q, 1) if how == "drawn" else None
    verified = verify_sampled(logits, torch.stack(drafts, 1), parameters, variant, proposals)
    p = wide(probabilities(logits[:1, 0], parameters_of(parameters, 1), variant)[0])
    assert chi_square(counts_of(verified.tokens[:, 0]), p) < LIMIT
    overlap = {
        "drawn": float(torch.minimum(p, wide(q[0][0])).sum()),
        "certain": float(p[3]),
        "none": 0.0,
    }
    rate = float((verified.accepted > 0).double().mean())
    assert abs(rate - overlap[how]) < 4 * (0.25 / DRAWS) ** 0.5
    if how == "none":
        plain = sample(logits[:, 0], parameters, variant)
        # Kernels round otherwise than the sampler, which may decide between two near draws.
        others = int((verified.tokens[:, 0] != plain).sum())
        assert others <= (0 if dtype == torch.float64 else 3)
        return
    # The second token, where there is one: of each first token a distribution of its own if
    # tokens seen are penalised, and one of all otherwise.
    second = verified.tokens[:, 1][verified.accepted > 0]
    if not variant.penalty and len(second) > 1000:
        p = wide(probabilities(logits[:1, 1], parameters_of(parameters, 1), variant)[0])
        assert chi_square(counts_of(second), p) < LIMIT


def parameters_of(parameters: Parameters, count: int) -> Parameters:
    return Parameters(*(None if x is None else x[:count] for x in parameters))


def test_what_the_target_excludes_is_never_accepted() -> None:
    """p(d) = 0; and where p is q all is accepted."""
    logits = noise(2, 1, 2, VOCAB).expand(2000, -1, -1).clone()
    logits[:, 0, 4] = -math.inf
    parameters = request(2000)
    drafts = torch.full((2000, 1), 4)
    q = torch.zeros(2000, 1, VOCAB, dtype=torch.float64)
    q[..., 4] = 1
    for proposals in (None, q):
        verified = verify_sampled(logits, drafts, parameters, DRAWN, proposals)
        assert not verified.accepted.any()
        assert not (verified.tokens[:, 0] == 4).any()
    drafted = draw_draft(logits[:, 0], parameters, DRAWN)
    same = verify_sampled(
        logits, drafted.tokens[:, None], parameters, DRAWN, drafted.probabilities[:, None]
    )
    assert bool((same.accepted == 1).all())


def test_a_draft_that_is_not_finite_is_dropped() -> None:
    logits, parameters = noise(5, 50, 3, VOCAB), request(50)
    broken = draw_draft(torch.full((50, VOCAB), torch.nan), parameters, DRAWN)
    assert broken.tokens.tolist() == [NO_DRAFT] * 50
    nan = broken.probabilities[:, None].expand(-1, 2, -1)
    for drafts in (torch.full((50, 2), NO_DRAFT), torch.full((50, 2), 3)):
        verified = verify_sampled(logits, drafts, parameters, DRAWN, nan)
        assert not verified.accepted.any()
        assert torch.equal(verified.tokens[:, 0], sample(logits[:, 0], parameters, DRAWN))


@settings(max_examples=20)
@given(st.integers(1, 6), st.integers(0, 5), st.integers(0, 10_000), st.booleans())
@example(3, 0, 1, True)
def test_a_sequence_is_what_it_is_alone(batch, count, seed, certain) -> None:
    """The batch and its padding change no token; float32 as well."""
    logits = noise(seed, batch, count + 1, VOCAB).float()
    parameters = request(batch, first_seed=seed)
    drafts = torch.randint(-1, VOCAB, (batch, count), generator=generator(seed))
    q = None if certain else noise(seed + 1, batch, count, VOCAB).softmax(-1).float()
    whole = verify_sampled(logits, drafts, parameters, DRAWN, q)
    for i in range(batch):
        at = slice(i, i + 1)
        row = Parameters(*(None if x is None else x[at] for x in parameters))
        alone = verify_sampled(logits[at], drafts[at], row, DRAWN, None if q is None else q[at])
        assert torch.equal(alone.tokens[0], whole.tokens[i])
        assert int(alone.accepted) == int(whole.accepted[i])


def test_the_token_after_accepted_drafts_is_that_of_plain_sampling() -> None:
    """By the random numbers of its own position, whatever the cut into steps."""
    logits, parameters = noise(4, 300, 3, VOCAB), request(300)
    drafted = [
        draw_draft(logits[:, i], parameters._replace(position=parameters.position + i), DRAWN)
        for i in range(2)
    ]
    drafts, q = (torch.stack(x, 1) for x in zip(*drafted, strict=True))
    verified = verify_sampled(logits, drafts, parameters, DRAWN, q)
    assert bool((verified.accepted == 2).all())
    plain = sample(logits[:, 2], parameters._replace(position=parameters.position + 2), DRAWN)
    assert torch.equal(verified.tokens[:, 2], plain)


def test_same_draws_are_those_without_drafts() -> None:
    """Whatever the drafts: the text of a seed."""
    logits, parameters = noise(8, 500, 4, VOCAB), request(500)
    plain = torch.stack(
        [
            sample(logits[:, i], parameters._replace(position=parameters.position + i), DRAWN)
            for i in range(4)
        ],
        1,
    )
    drafts = torch.where(noise(9, 500, 3) > 0, plain[:, :-1], 0)
    verified = verify_same_draws(logits, drafts, parameters, DRAWN)
    assert 0 < int(verified.accepted.min() + verified.accepted.max()) <= 6
    assert torch.equal(verified.tokens, verify_equal(plain, drafts).tokens)
    shown = verified.tokens != NO_DRAFT
    assert torch.equal(verified.tokens[shown], plain[shown])


@pytest.mark.parametrize(
    ("logits", "drafts", "q", "words"),
    [
        ((2, 3), (2, 2), None, r"logits have shape \[2, 3\] .*wanted \[B, D \+ 1, vocab\]"),
        ((2, 3, 16), (2, 3), None, r"drafts have shape \[2, 3\], wanted \[2, 2\]"),
        ((2, 3, 16), (2, 2), (2, 2, 9), r"draft_probabilities have shape .*wanted \[2, 2, 16\]"),
    ],
)
def test_wrong_shapes_are_named(logits, drafts, q, words) -> None:
    proposals = None if q is None else torch.zeros(q)
    with pytest.raises(ValueError, match=words):
        verify_sampled(
            torch.zeros(logits),
            torch.zeros(drafts, dtype=torch.int64),
            request(2),
            DRAWN,
            proposals,
        )


# Forced ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "count"), [(0.0, 3), (0.5, 5), (0.88, 2), (1.0, 4)])
def test_forced_acceptance_accepts_its_share(share, count) -> None:
    """Wrong drafts count as right, missing ones never do; the token after them is the target's."""
    forced = ForcedAcceptance(share)
    logits, parameters = noise(2, 4000, count + 1, VOCAB), request(4000, temperature=0.0)
    drafts = torch.randint(VOCAB, (4000, count), generator=generator(1))
    verified = forced(logits, drafts, parameters, Variant(), None)
    assert abs(float(verified.accepted.double().mean()) / count - share) < 0.02
    best = logits.argmax(-1)
    for row in range(50):
        accepted, tokens = int(verified.accepted[row]), verified.tokens[row].tolist()
        assert tokens[:accepted] == drafts[row, :accepted].tolist()
        assert tokens[accepted] == int(best[row, accepted])
        assert tokens[accepted + 1 :] == [NO_DRAFT] * (count - accepted)
    drafts[:, 0] = NO_DRAFT
    assert not forced(logits, drafts, parameters, Variant(), None).accepted.any()
    with pytest.raises(ValueError, match=r"share is 1\.5, wanted 0 to 1"):
        ForcedAcceptance(1.5)
