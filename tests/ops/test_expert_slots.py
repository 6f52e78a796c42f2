"""Slots of experts in host memory: against dictionaries and lists walked in Python."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4 import use_backend
from dsv4.ops.expert_slots import (
    COUNTERS,
    DECAY_STEPS,
    LAST_STEP,
    expert_decide,
    expert_gather,
)
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise

KERNELS = ("triton",)
INTERPRETED_SHARE = 4
NAMES = ("slot_of", "expert_in", "used", "last", "totals", "counters")


@dataclass
class Oracle:
    """The contract in plain Python; ``slots[s]`` is the expert in slot s or None."""

    experts: int
    static: int
    slots: list[int | None]
    used: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)
    step: int = 0
    asked: int = 0
    loaded: int = 0

    def __post_init__(self) -> None:
        for name in ("used", "last", "totals"):
            setattr(self, name, [0] * self.experts)

    def decide(self, ids: list[list[int]]):
        flat = [e for row in ids for e in row if 0 <= e < self.experts]
        self.step += 1
        if self.step > LAST_STEP:
            self.step, self.last = 1, [0] * self.experts
        if self.step % DECAY_STEPS == 0:
            self.used = [n // 2 for n in self.used]
        for e in flat:
            self.used[e] += 1
            self.totals[e] += 1
            self.last[e] = self.step
        missing = [e for e in sorted(set(flat)) if e not in self.slots]
        self.asked += len(set(flat))
        self.loaded += len(missing)

        def worth(slot: int):
            e = self.slots[slot]
            return (0, 0, 0, slot) if e is None else (1, self.used[e], self.last[e], slot)

        free = [s for s in range(self.static, len(self.slots)) if self.slots[s] not in flat]
        victims = sorted(sorted(free, key=worth)[: len(missing)])
        assert len(victims) == len(missing)
        for slot, e in zip(victims, missing, strict=True):
            self.slots[slot] = e
        slots = [[self.slots.index(e) if e in self.slots else -1 for e in row] for row in ids]
        choices = sum(map(len, ids))
        size = min(choices, len(self.slots) - self.static)
        pad = [-1] * (size - len(missing))
        return slots, missing + pad, victims + pad

    def tables(self) -> dict[str, list[int]]:
        inverse = {e: s for s, e in enumerate(self.slots) if e is not None}
        return {
            "slot_of": [inverse.get(e, -1) for e in range(self.experts)],
            "expert_in": [-1 if e is None else e for e in self.slots],
            "used": self.used,
            "last": self.last,
            "totals": self.totals,
            "counters": [self.step, self.asked, self.loaded],
        }

    def tensors(self, device) -> dict[str, torch.Tensor]:
        return {
            name: torch.tensor(
                values,
                dtype=torch.int64 if name in ("totals", "counters") else torch.int32,
                device=device,
            )
            for name, values in self.tables().items()
        }


def drawn_oracle(seed: int, experts: int, static: int, cached: int) -> Oracle:
    """Static experts in the first slots, some others behind them, some slots empty."""
    order = torch.randperm(experts, generator=strategies.generator(seed)).tolist()
    slots: list[int | None] = list(order[: static + cached // 2])
    return Oracle(experts, static, slots + [None] * (static + cached - len(slots)))


def drawn_ids(generator, tokens: int, k: int, experts: int, dtype) -> torch.Tensor:
    """A few favourites, padding, and a token that chooses an expert twice now and then."""
    uniform = torch.randint(-1, experts + 1, (tokens, k), generator=generator)
    favourite = torch.randint(0, max(1, experts // 4), (tokens, k), generator=generator)
    return torch.where(torch.rand(tokens, k, generator=generator) < 0.5, uniform, favourite).to(
        dtype
    )


def run_steps(device, seed, experts, static, spare, tokens, k, dtype, steps, start=0) -> None:
    most = min(tokens * k, experts - static)
    cached = min(experts - static, most + spare)
    oracle = drawn_oracle(seed, experts, static, cached)
    oracle.step = start
    oracle.last = [min(start, 7)] * experts
    state = oracle.tensors(device)
    generator = strategies.generator(seed + 1)
    for step in range(steps):
        ids = drawn_ids(generator, tokens, k, experts, dtype)
        slots, loaded, targets = expert_decide(ids.to(device), *state.values(), static_slots=static)
        expected = oracle.decide(ids.tolist())
        where = f"step {step}"
        assert slots.tolist() == expected[0], where
        assert (loaded.tolist(), targets.tolist()) == expected[1:], where
        assert {n: t.tolist() for n, t in state.items()} == oracle.tables(), where


@given(
    seed=strategies.seeds(),
    experts=st.integers(1, 40),
    static=st.integers(0, 40),
    spare=st.integers(0, 9),
    tokens=st.integers(0, 3),
    k=st.integers(1, 6),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    start=st.sampled_from([0, DECAY_STEPS - 2, LAST_STEP - 2]),
)
@example(1, 8, 2, 0, 1, 6, torch.int64, 0)  # as few slots as a step can need
@example(2, 8, 8, 0, 1, 6, torch.int64, 0)  # all static
@example(3, 8, 0, 9, 3, 6, torch.int64, 0)  # more choices than experts
@example(4, 33, 5, 1, 3, 6, torch.int32, LAST_STEP - 2)
def test_steps_follow_the_oracle(device, seed, experts, static, spare, tokens, k, dtype, start):
    steps = 4 if str(device) == "cpu" else 5
    run_steps(device, seed, experts, min(static, experts), spare, tokens, k, dtype, steps, start)


@pytest.mark.parametrize(("static", "spare"), [(9, 0), (5, 7)])
def test_a_thousand_steps(static, spare):
    with use_backend("reference"):
        run_steps("cpu", static, 32, static, spare, 2, 4, torch.int64, 1000)


def test_a_hundred_steps_with_a_kernel(device):
    run_steps(device, 11, 24, 4, 3, 1, 6, torch.int64, 100 if str(device) == "cpu" else 70)


@pytest.mark.gpu
def test_a_thousand_steps_of_flash():
    run_steps("cuda", 5, 256, 150, 40, 2, 6, torch.int64, 1000)
    run_steps("cuda", 6, 256, 70, 28, 1, 6, torch.int64, 1000)


def some_state(experts=8, slots=6):
    return list(Oracle(experts, 0, [*range(slots)]).tensors("cpu").values())


def test_too_few_slots_are_refused():
    ids = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="4 slots are not static, wanted 6 or more for 8 choices"):
        expert_decide(ids, *some_state(), static_slots=2)
    with pytest.raises(ValueError, match="6 slots, 7 of them static"):
        expert_decide(ids, *some_state(), static_slots=7)
    with pytest.raises(ValueError, match=r"ids\[0, 0\] is 9, wanted an expert"):
        expert_decide(ids[:1, :1] + 9, *some_state(), static_slots=0)
    state = some_state()
    state[2] = state[2].long()
    with pytest.raises(TypeError, match="used"):
        expert_decide(ids, *state, static_slots=0)


def test_nothing_is_read_on_the_host():
    """A tensor without contents cannot be read; tensors of a captured graph must not."""
    state = [t.to("meta") for t in some_state()]
    ids = torch.zeros(1, 6, dtype=torch.int64, device="meta")
    with use_backend("reference"):
        slots, loaded, targets = expert_decide(ids, *state, static_slots=0)
    assert (slots.shape, loaded.shape, targets.shape) == ((1, 6), (6,), (6,))


def test_operators_compile():
    ids = torch.tensor([[1, 7, -1, 2]])
    op = torch.ops.dsv4
    arguments = (ids, *some_state(), 1, "reference")
    torch.library.opcheck(op.expert_decide.default, arguments, test_utils="test_schema")
    torch.library.opcheck(op.expert_decide.default, arguments, test_utils="test_faketensor")
    case = Rows.drawn(0, 3, 4, (16, 8), "cpu")
    torch.library.opcheck(op.expert_gather.default, (*case.arguments([1], [2]), "reference"))


@dataclass
class Rows:
    """Experts' rows whose pieces go to arrays of slots."""

    slots: torch.Tensor
    rows: torch.Tensor
    row_of: torch.Tensor
    parts: tuple[int, ...]
    chunks: torch.Tensor
    count: int

    @classmethod
    def drawn(cls, seed, experts, count, parts, device):
        """``parts``: words of each piece; those of whole 16 bytes begin at whole 16 bytes."""
        generator = strategies.generator(seed)
        width = -(-sum(parts) // 4) * 16
        host = torch.randint(0, 256, (experts + 1, width), generator=generator, dtype=torch.uint8)
        rows = host.pin_memory() if torch.device(device).type == "cuda" else host
        chunks, at, region = [], 0, 0
        for words in parts:
            half = words // 8 * 4
            for first, size in ((0, half), (half, words - half)):
                chunks.append([at + first, region + first, words, size])
            at, region = at + words, region + count * words
        slots = torch.randint(0, 256, (4 * region,), generator=generator, dtype=torch.uint8)
        row_of = torch.randperm(experts + 1, generator=generator)[:experts].to(torch.int32)
        table = torch.tensor(chunks, dtype=torch.int32).to(device)
        return cls(slots.to(device), rows, row_of.to(device), parts, table, count)

    def arguments(self, experts, targets):
        lists = (torch.tensor(x, dtype=torch.int32) for x in (experts, targets))
        lists = (x.to(self.slots.device) for x in lists)
        return (self.slots, self.rows, self.row_of, *lists, self.chunks)

    def expected(self, experts, targets) -> torch.Tensor:
        slots = self.slots.cpu().clone()
        for expert, target in zip(experts, targets, strict=True):
            row, at, region = self.rows[int(self.row_of[expert])], 0, 0
            for words in self.parts:
                first = region + 4 * target * words
                slots[first : first + 4 * words] = row[4 * at : 4 * (at + words)]
                at, region = at + words, region + 4 * self.count * words
        return slots


@given(
    seed=strategies.seeds(),
    parts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    wide=st.lists(st.sampled_from([4, 8, 64, 2052]), max_size=2),
    loads=st.integers(0, 3),
)
@example(1, [1, 2], [2052, 64], 3)
@example(2, [3], [], 1)
def test_rows_go_to_their_slots(device, seed, parts, wide, loads):
    case = Rows.drawn(seed, 5, 4, (*wide, *parts), device)
    generator = strategies.generator(seed + 1)
    experts = torch.randperm(5, generator=generator)[:loads].tolist()
    targets = torch.randperm(4, generator=generator)[:loads].tolist()
    expected = case.expected(experts, targets)
    experts, targets = [[x for e in xs for x in (e, -1)] for xs in (experts, targets)]
    expert_gather(*case.arguments([-1, *experts], [-1, *targets]))
    assert_bitwise(case.slots.cpu(), expected, "slots")


def test_long_lists_are_read_to_their_last_expert(device):
    case = Rows.drawn(3, 5, 4, (8, 3), device)
    expected = case.expected([4, 2], [1, 3])
    listed = [-1] * 40
    targets = list(listed)
    for at, expert, target in ((20, 4, 1), (33, 2, 3)):
        listed[at], targets[at] = expert, target
    expert_gather(*case.arguments(listed, targets))
    assert_bitwise(case.slots.cpu(), expected, "slots")


def test_rows_that_cannot_be_loaded_are_refused():
    case = Rows.drawn(0, 3, 4, (16, 8), "cpu")
    with pytest.raises(IndexError, match="experts"):
        expert_gather(*case.arguments([3], [0]))
    with pytest.raises(IndexError, match="in slots"):
        expert_gather(*case.arguments([0], [4]))
    case.row_of[0] = -1
    with pytest.raises(IndexError, match=r"row_of\[experts\]"):
        expert_gather(*case.arguments([0], [0]))
    case.rows = case.rows[:, :-4].contiguous()
    with pytest.raises(ValueError, match="multiples of 16 and 4"):
        expert_gather(*case.arguments([1], [0]))


@pytest.mark.gpu
def test_pageable_rows_are_refused():
    case = Rows.drawn(0, 3, 4, (16, 8), "cuda")
    case.rows = case.rows.clone()
    with use_backend("triton"), pytest.raises(NotImplementedError, match="pageable"):
        expert_gather(*case.arguments([1], [0]))


def test_counters_are_those_of_the_contract():
    assert len(Oracle(1, 0, []).tables()["counters"]) == COUNTERS
    assert tuple(Oracle(1, 0, []).tables()) == NAMES
