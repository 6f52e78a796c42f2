"""Tokens of logits that are split over ranks are those of all logits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4.serving import sampler, split_sampler
from dsv4.serving.sampler import Parameters, Variant
from dsv4.serving.split_sampler import VocabularyPart
from dsv4.testing.ranks import run_ranks

VOCABULARY = 56
VARIANTS = [
    Variant(),
    Variant(draw=True),
    Variant(draw=True, filters=True),
    Variant(draw=True, filters=True, penalty=True),
    Variant(penalty=True),
]


def parameters(rows: int, seed: int) -> Parameters:
    generator = torch.Generator().manual_seed(seed)

    def choice(*values: float) -> torch.Tensor:
        index = torch.randint(len(values), (rows,), generator=generator)
        return torch.tensor(values, dtype=torch.float64)[index]

    integers = {"generator": generator, "dtype": torch.int64}
    return Parameters(
        temperature=choice(0, 0.1, 1, 3),
        top_p=choice(1, 0.99, 0.5, 0.01),
        log_min_p=choice(-math.inf, math.log(0.3), 0),
        penalty=choice(1, 1.5, 0.5),
        top_k=choice(1, 2, 9, VOCABULARY, 1000).long(),
        seed=torch.randint(2**62, (rows,), **integers),
        position=torch.randint(1000, (rows,), **integers),
        present=torch.rand(rows, VOCABULARY, generator=generator) < 0.2,
    )


def logits(rows: int, seed: int, dtype: torch.dtype, ties: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = 3 * torch.randn(rows, VOCABULARY, generator=generator, dtype=torch.float64)
    drawn = drawn.round() if ties else drawn
    drawn[0, ::3] = -math.inf
    return drawn.to(dtype)


def on_ranks(size, values, given_parameters, function):
    """Call ``function(part, local logits, local parameters)`` on every rank."""

    def work(context):
        width = VOCABULARY // size
        part = VocabularyPart(context, range(context.rank * width, (context.rank + 1) * width))
        columns = slice(part.tokens.start, part.tokens.stop)
        present = given_parameters.present[:, columns]
        local = given_parameters._replace(present=present)
        return function(part, values[:, columns], local), context.group.gathered

    return run_ranks(size, work)


@given(
    st.integers(0, 1 << 30),
    st.sampled_from(VARIANTS),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
)
def test_tokens_are_those_of_one_process(seed, variant, size, dtype, ties):
    rows = 5
    values, chosen = logits(rows, seed, dtype, ties), parameters(rows, seed)
    expected = sampler.sample(values, chosen, variant)
    results = on_ranks(
        size, values, chosen, lambda part, own, p: split_sampler.sample(part, own, p, variant)
    )
    for tokens, gathered in results:
        assert torch.equal(tokens, expected)
        # Values and ids, and class sums: nothing of the size of the vocabulary.
        assert set(gathered) <= {(2, rows), (rows,), (rows, 256)}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("variant", VARIANTS[:3])
def test_rows_that_are_not_finite_fail_on_all_ranks(bad, variant):
    values, chosen = logits(4, 0, torch.float32, False), parameters(4, 0)
    values[1, 3] = bad
    values[2] = -math.inf
    expected = sampler.sample(values, chosen, variant)
    assert expected[1] == expected[2] == sampler.FAILED
    results = on_ranks(
        2, values, chosen, lambda part, own, p: split_sampler.sample(part, own, p, variant)
    )
    assert all(torch.equal(tokens, expected) for tokens, _ in results)


def test_log_probabilities():
    values, chosen = logits(4, 1, torch.float32, False), parameters(4, 1)
    tokens = torch.tensor([1, 17, 55, sampler.FAILED])
    expected = sampler.logprobs(values, tokens)
    for report, _ in on_ranks(
        4, values, chosen, lambda part, own, p: split_sampler.logprobs(part, own, tokens)
    ):
        torch.testing.assert_close(report.chosen[:3], expected.chosen[:3])
        torch.testing.assert_close(report.values, expected.values)
        assert torch.equal(report.ids[1:], expected.ids[1:])  # row 0 has ties of -inf
