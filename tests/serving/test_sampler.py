"""The sampler against its definition in loops, and its draws against the distribution."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.serving import SamplingOptions
from dsv4.serving.philox import Words, philox, token_words
from dsv4.serving.sampler import (
    FAILED,
    Parameters,
    Variant,
    exponential_log,
    keep_mask,
    logprobs,
    sample,
)
from tests.serving.cases import parameters

ALL = Variant(draw=True, filters=True, penalty=True, logprobs=True)


def joined(rows: list[Parameters]) -> Parameters:
    return Parameters(*(torch.cat(values) for values in zip(*rows, strict=True)))


def absent(vocab: int) -> torch.Tensor:
    return torch.zeros(1, vocab, dtype=torch.bool)


@pytest.mark.parametrize(
    ("word", "key", "expected"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, -1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(word, key, expected) -> None:
    counter = Words(*(torch.tensor([w]) for w in word))
    assert tuple(int(w) for w in philox(counter, torch.tensor([key]))) == expected


def test_random_words_depend_on_seed_position_and_token_alone() -> None:
    seeds, positions = torch.tensor([5, 6, 5]), torch.tensor([0, 0, 7])
    words = token_words(seeds, positions, range(131))
    for i in range(3):
        alone = token_words(seeds[i : i + 1], positions[i : i + 1], range(64))[0]
        assert torch.equal(alone, words[i, :64])
    assert words.unique().numel() == words.numel()
    assert 0 <= int(words.min()) <= int(words.max()) < 2**32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_exponential_and_finite(dtype) -> None:
    """Words from the first to the last, and where its two formulas meet."""
    words = torch.tensor([0, 1, 2, 1000, 2**24 - 1, 2**24, 2**31, 2**32 - 300, 2**32 - 1])
    actual = exponential_log(words, dtype).exp()
    v = (words.double() + 0.5) / 2**32
    expected = -torch.log1p(-v)
    assert bool(actual.isfinite().all())
    assert bool(((actual - expected).abs() <= 2e-5 * expected)[:-2].all())


def kept_in_words(scaled: list[float], top_k: int, top_p: float, min_p: float) -> list[bool]:
    """The rules of ``SamplingOptions``, token by token."""
    ratios = [math.exp(x) for x in scaled]
    by_k = [sum(y > x for y in scaled) < top_k for x in scaled]
    total = sum(r for r, keep in zip(ratios, by_k, strict=True) if keep)
    out = []
    for x, keep in zip(scaled, by_k, strict=True):
        above = sum(r for r, y, k in zip(ratios, scaled, by_k, strict=True) if k and y > x)
        out.append(keep and (top_p == 1 or above < top_p * total) and math.exp(x) >= min_p)
    return out


@given(
    st.lists(st.integers(-30, 0), min_size=1, max_size=12),
    st.integers(1, 14),
    st.sampled_from([1.0, 0.999, 0.9, 0.51, 0.2, 1e-9]),
    st.sampled_from([0.0, 1e-3, 0.3, 1.0]),
)
@example([0, 0, 0, -1], 2, 0.2, 0.0)
@example([-30, 0], 2, 1.0, 0.0)
def test_filters_keep_what_their_definition_says(values, top_k, top_p, min_p) -> None:
    values = [v - max(values) for v in values]
    scaled = torch.tensor([values], dtype=torch.float64)
    options = SamplingOptions(top_k=top_k, top_p=top_p, min_p=min_p, temperature=1)
    result = keep_mask(scaled, parameters(options, 0, 0, absent(len(values))))
    assert result[0].tolist() == kept_in_words([float(v) for v in values], top_k, top_p, min_p)


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Normal deviate of the chi-square statistic (Wilson and Hilferty)."""
    expected = probabilities * counts.sum()
    live = expected > 0
    assert int(counts[~live].sum()) == 0
    freedom = int(live.sum()) - 1
    statistic = float(((counts - expected)[live] ** 2 / expected[live]).sum())
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("by", ["seed", "position"])
@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(temperature=1),
        SamplingOptions(temperature=0.5),
        SamplingOptions(temperature=2, top_k=5),
        SamplingOptions(temperature=1, top_p=0.7),
        SamplingOptions(temperature=1, min_p=0.3),
        SamplingOptions(temperature=1.5, top_k=9, top_p=0.8, min_p=0.1, repetition_penalty=2),
    ],
)
def test_draws_follow_the_distribution(options, by, dtype) -> None:
    vocab, draws = 13, 20_000
    logits = torch.linspace(-2, 1.5, vocab).sin().mul(2).to(dtype).unsqueeze(0)
    present = torch.arange(vocab).remainder(3).eq(0).unsqueeze(0)
    expected = logits.double().clone()
    factor = options.repetition_penalty
    changed = torch.where(expected > 0, expected / factor, expected * factor)
    expected = torch.where(present, changed, expected) / options.temperature
    expected = expected - expected.max()
    keep = kept_in_words(expected[0].tolist(), options.top_k or vocab, options.top_p, options.min_p)
    probabilities = expected.exp()[0] * torch.tensor(keep)
    row = parameters(options, 12345, 77, present)
    rows = Parameters(*(value.expand(draws, *value.shape[1:]) for value in row))
    rows = rows._replace(**{by: torch.arange(draws) + 10**9 * (by == "seed")})
    tokens = sample(logits.expand(draws, -1), rows, ALL)
    counts = torch.bincount(tokens, minlength=vocab).double()
    assert abs(chi_square(counts, probabilities / probabilities.sum())) < 4


@given(st.integers(0, 2**31), st.integers(2, 6))
def test_a_row_is_chosen_alone_and_by_the_smallest_variant(seed: int, count: int) -> None:
    """Whatever its neighbours are and need."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(count, 50, generator=generator)
    sets = [
        SamplingOptions(),
        SamplingOptions(temperature=0.7),
        SamplingOptions(temperature=0.7, top_k=3, top_p=0.9),
        SamplingOptions(repetition_penalty=1.5),
        SamplingOptions(temperature=1, min_p=0.2, repetition_penalty=0.5),
        SamplingOptions(temperature=1e-30),
    ][:count]
    present = torch.rand(count, 50, generator=generator) < 0.5
    rows = [parameters(o, seed, 9, present[i : i + 1]) for i, o in enumerate(sets)]
    together = sample(logits, joined(rows), ALL)
    for i, options in enumerate(sets):
        row, variant = logits[i : i + 1], Variant.of(options)
        assert int(sample(row, rows[i], ALL)) == int(together[i])
        assert int(sample(row, rows[i], variant)) == int(together[i])
    assert int(together[0]) == int(logits[0].argmax())
    if count == 6:
        assert int(together[5]) == int(logits[5].argmax())


def test_ties_of_a_greedy_choice_go_to_the_lowest_token() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    for variant in (Variant(), ALL):
        row = parameters(SamplingOptions(), 0, 0, absent(4))
        assert sample(logits, row, variant).tolist() == [1]


@pytest.mark.parametrize("variant", [Variant(), Variant(draw=True), ALL])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_and_the_others_do_not(variant, wrong) -> None:
    options = SamplingOptions(temperature=1, top_p=0.9)
    rows = [parameters(options, i, 3, absent(20)) for i in range(4)]
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(1))
    expected = sample(logits, joined(rows), variant)
    logits[1, 7], logits[2] = wrong, -math.inf
    logits[3, 0] = -math.inf  # a token that cannot be chosen is no failure
    actual = sample(logits, joined(rows), variant)
    assert actual[0] == expected[0]
    assert actual[1] == actual[2] == FAILED
    assert actual[3] > 0
    assert logprobs(logits, actual).chosen.shape == (4,)


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(2))
    tokens = torch.tensor([4, 0, 39])
    actual = logprobs(logits, tokens)
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(actual.chosen.double(), expected.gather(1, tokens[:, None])[:, 0])
    top = expected.topk(20)
    torch.testing.assert_close(actual.values.double(), top.values)
    assert torch.equal(actual.ids, top.indices)


def test_a_variant_says_what_options_need() -> None:
    assert Variant.of(SamplingOptions()) == Variant()
    assert Variant.of(SamplingOptions(top_k=3, top_p=0.5, min_p=0.1)) == Variant()
    assert Variant.of(SamplingOptions(temperature=1, top_k=3)) == Variant(draw=True, filters=True)
    both = Variant.of(SamplingOptions(repetition_penalty=2)) | Variant(logprobs=True)
    assert both == Variant(penalty=True, logprobs=True)
    assert Variant().plain
    assert not Variant(penalty=True).plain
