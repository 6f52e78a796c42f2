"""The sampling kernels against the definition in PyTorch: the same token for every row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.serving import SamplingOptions
from dsv4.serving.row_state import RowState
from dsv4.serving.sampler import FAILED, Variant, sample
from dsv4.triton import sampling
from tests.serving.cases import option_sets

KERNELS = ("triton",)
REFERENCE = False
INTERPRETED_SHARE = 4


def state_of(sets: list[SamplingOptions], vocab: int, device: torch.device) -> RowState:
    state = RowState(len(sets), vocab, device)
    for row, options in enumerate(sets):
        state.join(row, options, options.seed or 0, range(row, vocab, 3))
    return state


def compare(state: RowState, sets: list[SamplingOptions], logits: torch.Tensor) -> torch.Tensor:
    """Tokens by the kernels, which have to be those of the definition."""
    variant = Variant()
    for options in sets:
        variant = variant | Variant.of(options)
    entries = torch.arange(len(sets) - 1, -1, -1, device=logits.device)  # not the rows' own order
    positions = 5 + 1000 * entries
    found = state.next_tokens(logits, entries, lambda: positions, variant)
    wanted = sample(logits, state.parameters(entries, positions, variant.penalty), variant)
    assert torch.equal(found, wanted)
    return found


@given(st.integers(0, 2**31), st.lists(option_sets(), min_size=1, max_size=3), st.integers(1, 90))
@example(1, [SamplingOptions(temperature=1, top_k=3, top_p=0.5, seed=9)], 90)
@example(2, [SamplingOptions(temperature=1e-30), SamplingOptions(temperature=50, top_k=1)], 7)
def test_kernels_choose_what_the_definition_chooses(device, monkeypatch, seed, sets, vocab):
    """Rows of several splits and several tiles, with ties, with tokens that cannot be."""
    monkeypatch.setattr(sampling, "_QUADS", 4)
    monkeypatch.setattr(sampling, "_BLOCK", 32)
    generator = torch.Generator().manual_seed(seed)
    logits = (6 * torch.randn(len(sets), vocab, generator=generator)).round() / 2
    logits += 1e-3 * torch.randn(len(sets), vocab, generator=generator)
    logits[torch.rand(logits.shape, generator=generator) < 0.1] = -math.inf
    compare(state_of(sets, vocab, device), sets, logits.to(device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_that_is_not_finite_fails_alone(device, dtype):
    sets = [SamplingOptions(temperature=1, top_p=0.9, seed=i) for i in range(4)]
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    logits[0, 7], logits[1], logits[2, 3] = math.nan, -math.inf, math.inf
    found = compare(state_of(sets, 40, device), sets, logits)
    assert found[:3].tolist() == [FAILED] * 3
    assert found[3] >= 0


def test_equal_logits_are_kept_or_dropped_together(device):
    """A greedy choice among equal ones, after a penalty, is the lowest token."""
    logits = torch.tensor([[3.0, 1, 3, 3, 1, 0]], device=device)
    seen = set()
    for seed in range(12):
        sets = [SamplingOptions(temperature=1, top_k=2, seed=seed)]
        seen.add(int(compare(state_of(sets, 6, device), sets, logits)))
    assert seen == {0, 2, 3}
    sets = [SamplingOptions(repetition_penalty=0.5)]
    state = RowState(1, 6, device)
    state.join(0, sets[0], 0, [2, 3])
    assert compare(state, sets, logits).tolist() == [2]


@pytest.mark.gpu
def test_kernels_choose_what_the_definition_chooses_of_a_whole_vocabulary():
    """129280 tokens, 64 rows of every kind; the few that differ lie at a border of top-p."""
    kinds = [
        SamplingOptions(temperature=0.8),
        SamplingOptions(temperature=1, top_k=50),
        SamplingOptions(temperature=1, top_p=0.9),
        SamplingOptions(temperature=1, top_k=1000, top_p=0.7, min_p=0.001),
        SamplingOptions(temperature=0.7, repetition_penalty=1.2, top_p=0.95),
        SamplingOptions(),
    ]
    sets, device, vocab = [kinds[i % 6] for i in range(64)], torch.device("cuda"), 129280
    state = state_of(sets, vocab, device)
    generator = torch.Generator(device).manual_seed(3)
    entries, differing = torch.arange(64, device=device), 0
    variant = Variant(draw=True, filters=True, penalty=True)
    for scale in (0.5, 2.0, 8.0):
        logits = scale * torch.randn(64, vocab, generator=generator, device=device)
        for position in range(20):
            positions = torch.full_like(entries, position)
            found = state.next_tokens(logits, entries, lambda p=positions: p, variant)
            wanted = sample(logits, state.parameters(entries, positions, True), variant)
            differing += int((found != wanted).sum())
    assert differing <= 4  # of 3840
