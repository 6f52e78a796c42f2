"""Tokens that are taken back leave a compressor as if they had never been there, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4.ops.compressor import compressor_update
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.strategies import seeds
from tests.ops.test_compressor import empty_state, inputs, live_slots

KERNELS = ("triton",)
KINDS = [(4, True), (8, False), (3, True), (5, False), (1, True)]
MOST = 8  # tokens that a step may have to take back


@dataclass
class Compressor:
    """A state, the true tokens of each row, and the entries that were stored last."""

    overlap: bool
    ape: torch.Tensor
    state: torch.Tensor
    tokens: list[tuple[torch.Tensor, torch.Tensor]]
    entries: dict[tuple[int, int], torch.Tensor]

    @classmethod
    def make(cls, seed, kind, rows, tokens, wide, device, spare) -> Compressor:
        ratio, overlap = kind
        data = [inputs(seed + 9 * i, tokens, ratio, overlap, 2, device, wide) for i in range(rows)]
        state = empty_state(rows, ratio, overlap, 2, wide, device, spare)
        return cls(overlap, data[0][2], state, [(kv, score) for kv, score, _ in data], {})

    def step(self, starts: list[int], lengths: list[int], true: list[int]) -> None:
        """Feed each row tokens, of which only the first ``true`` are its own."""
        parts = []
        for i, (start, n, right) in enumerate(zip(starts, lengths, true, strict=True)):
            part = [x[start : start + n].clone() for x in self.tokens[i]]
            for x in part:
                x[right:] = 50 - x[right:]
            parts.append(part)
        device = self.ape.device
        pooled, positions, owners = compressor_update(
            torch.cat([kv for kv, _ in parts]),
            torch.cat([score for _, score in parts]),
            self.ape,
            self.state,
            torch.tensor([0, *lengths], device=device).cumsum(0),
            torch.tensor(starts, device=device),
            torch.arange(len(starts), device=device),
            overlap=self.overlap,
        )
        ratio = self.ape.shape[0]
        for entry, position, owner in zip(pooled, positions.tolist(), owners.tolist(), strict=True):
            if owner >= 0:
                self.entries[owner, position // ratio] = entry


def check(drafted: Compressor, kind, ends: list[int], spare: int) -> None:
    """Compare state and visible entries with those of one token at a time, nothing taken back."""
    ratio, overlap = kind
    plain = Compressor(overlap, drafted.ape, torch.zeros_like(drafted.state), drafted.tokens, {})
    for p in range(max(ends)):
        lengths = [int(p < end) for end in ends]
        plain.step([p] * len(ends), lengths, lengths)
    for row, end in enumerate(ends):
        live = live_slots(end, ratio, overlap, spare)
        assert_bitwise(drafted.state[row, live], plain.state[row, live], f"state of {end} tokens")
        for number in range(end // ratio):
            key = row, number
            assert_bitwise(drafted.entries[key], plain.entries[key], f"entry {number} of {end}")


@st.composite
def schedules(draw: st.DrawFn):
    """Tokens per row at first, then steps of (tokens, accepted) for each row, and D."""
    most, rows = draw(st.integers(1, MOST)), draw(st.integers(1, 3))
    count = draw(st.integers(1, 6))
    steps = []
    for _ in range(count):
        new = [draw(st.integers(1, most + 1)) for _ in range(rows)]
        steps.append([(n, draw(st.integers(max(0, n - most), n))) for n in new])
    return most, draw(st.lists(st.integers(0, 30), min_size=rows, max_size=rows)), steps


@pytest.mark.costly(2)
@settings(max_examples=30)
@given(st.sampled_from(KINDS), seeds(), schedules())
@example((4, True), 0, (3, [5], [[(4, 1)], [(4, 2)], [(4, 1)]]))
@example((8, False), 0, (8, [127], [[(9, 1)], [(9, 9)], [(9, 1)]]))
def test_taken_back_is_never_there(device, wide, kind, seed, schedule):
    most, begun, steps = schedule
    total = max(begun) + (MOST + 1) * (len(steps) + 1)
    drafted = Compressor.make(seed, kind, len(begun), total, wide, device, most)
    drafted.step([0] * len(begun), begun, begun)
    ends = list(begun)
    for step in steps:
        drafted.step(ends, [n for n, _ in step], [accepted for _, accepted in step])
        ends = [end + accepted for end, (_, accepted) in zip(ends, step, strict=True)]
    check(drafted, kind, ends, most)


def _differs(kind, spare: int, most: int) -> bool:
    """Whether steps of ``most`` drafts, all wrong, go wrong somewhere with ``spare`` slots more."""
    ratio, _ = kind
    for begun in range(4 * ratio):
        drafted = Compressor.make(1, kind, 1, begun + most + 3, torch.float64, "cpu", spare)
        drafted.step([0], [begun], [begun])
        drafted.step([begun], [most + 1], [1])
        drafted.step([begun + 1], [1], [1])
        try:
            check(drafted, kind, [begun + 2], spare)
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("kind", [(4, True), (8, False)])
@pytest.mark.parametrize("most", [1, 5, 8])
def test_a_smaller_ring_fails(kind, most):
    """The reads of a step come before its writes, so one slot less than D would do; two do not."""
    assert not _differs(kind, most, most)
    assert not _differs(kind, most - 1, most)
    if most > 1:
        assert _differs(kind, most - 2, most)
