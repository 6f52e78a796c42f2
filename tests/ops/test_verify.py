"""Verified and drawn drafts: kernels decide as the reference does, and neither reads the host.

That the reference's tokens have the target's distribution is in ``tests/speculation``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.dispatch import use_backend
from dsv4.ops.verify import draw_draft, verify_greedy, verify_sampled
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise, assert_pure

KERNELS = ("triton",)
INTERPRETED_SHARE = 5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT32 = 2.0**-24


@dataclass(frozen=True)
class Draw:
    """Inputs of a verification."""

    logits: torch.Tensor
    drafts: torch.Tensor
    q: torch.Tensor | None
    numbers: tuple[torch.Tensor, ...]
    filters: bool

    @classmethod
    def of(cls, seed, batch, count, vocab, dtype, certain, filters, device, spread=2.0):
        """Drafts near the target, some missing; each sequence has options of its own."""
        generator = strategies.generator(seed)
        logits = spread * torch.randn(batch, count + 1, vocab, generator=generator)
        logits = logits.to(dtype).float()
        near = logits[:, :-1] + 0.5 * torch.randn(batch, count, vocab, generator=generator)
        q = near.softmax(-1)
        drafts = near.argmax(-1) if certain else _chosen(q, generator)
        missing = torch.rand(batch, count, generator=generator) < 0.15
        drafts = torch.where(missing, -1, drafts)
        uniform = torch.rand(4, batch, generator=generator, dtype=torch.float64)
        temperature = torch.where(uniform[0] < 0.3, 0, 0.4 + uniform[0])
        neutral = torch.ones(batch, dtype=torch.float64)
        top_k = torch.full((batch,), vocab)
        top_p, log_min_p = neutral, torch.full_like(neutral, -math.inf)
        if filters:
            top_p = torch.where(uniform[1] < 0.5, 1, uniform[1])
            log_min_p = torch.where(uniform[2] < 0.5, -math.inf, (uniform[2] / 4).log())
            drawn = torch.randint(1, vocab + 1, (batch,), generator=generator)
            top_k = torch.where(uniform[3] < 0.5, vocab, drawn)
        seeds = torch.randint(1 << 62, (batch,), generator=generator)
        positions = torch.randint(1 << 30, (batch,), generator=generator)
        numbers = (temperature, top_p, log_min_p, top_k, seeds, positions)
        moved = cls(logits.to(dtype), drafts, None if certain else q, numbers, filters)
        return moved.to(device)

    def to(self, device):
        q = None if self.q is None else self.q.to(device)
        numbers = tuple(x.to(device) for x in self.numbers)
        return replace(
            self, logits=self.logits.to(device), drafts=self.drafts.to(device), q=q, numbers=numbers
        )

    def sampled(self):
        return verify_sampled(self.logits, self.drafts, self.q, *self.numbers, filters=self.filters)

    def drawn(self):
        return draw_draft(self.logits[:, 0], *self.numbers, filters=self.filters)


def _chosen(q: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not q.numel():
        return torch.zeros(q.shape[:2], dtype=torch.int64)
    return q.flatten(0, 1).multinomial(1, generator=generator).view(q.shape[:2])


def assert_decides_as_the_reference(case: Draw) -> None:
    """Accepted drafts, tokens and drawn drafts have the reference's bits."""
    got = (*case.sampled(), *verify_greedy(case.logits, case.drafts), *case.drawn())
    with use_backend("reference"):
        expected = (*case.sampled(), *verify_greedy(case.logits, case.drafts), *case.drawn())
    names = ("accepted", "tokens", "greedy accepted", "greedy tokens", "drawn")
    for name, actual, truth in zip(names, got, expected, strict=False):
        assert_bitwise(actual, truth, name)
    p, truth = got[-1], expected[-1]
    assert torch.equal(p.isnan(), truth.isnan())
    error = (p - truth).abs().nan_to_num()
    assert bool((error <= 300 * FLOAT32 * truth.nan_to_num() + 2.0**-120).all())


@given(
    seed=strategies.seeds(),
    batch=st.integers(0, 4),
    count=st.integers(0, 4),
    vocab=st.sampled_from([1, 2, 5, 16, 37, 64]),
    dtype=st.sampled_from(DTYPES),
    certain=st.booleans(),
    filters=st.booleans(),
)
@example(3, 4, 3, 37, torch.float32, False, True)
@example(4, 4, 3, 37, torch.float32, False, False)
@example(5, 4, 4, 16, torch.bfloat16, True, True)
def test_decisions_are_the_reference_s(
    device, seed, batch, count, vocab, dtype, certain, filters
) -> None:
    """Ties of bfloat16 included: the lowest token of equal ones, filters keep all of them."""
    case = Draw.of(seed, batch, count, vocab, dtype, certain, filters, device)
    assert_decides_as_the_reference(case)


@pytest.mark.parametrize("filters", [False, True])
def test_rows_are_split_over_programs(device, filters) -> None:
    """More tokens than one tile has, not a multiple of it."""
    vocab = 4200 if str(device) == "cpu" else 129_280
    case = Draw.of(7, 2, 2, vocab, torch.float32, False, filters, device, spread=3.0)
    assert_decides_as_the_reference(case)


BAD = {
    "NaN": (0, math.nan), "+inf": (3, math.inf), "-inf alone": (slice(None), -math.inf),
}  # fmt: skip


@pytest.mark.parametrize("where", BAD)
def test_a_row_that_is_not_finite_fails_alone(device, where) -> None:
    at, value = BAD[where]
    case = Draw.of(1, 3, 2, 24, torch.float32, False, False, device)
    best = case.logits.argmax(-1)
    drafts = best[:, :-1].contiguous()
    case.logits[1, 1, at] = value
    accepted, tokens = verify_greedy(case.logits, drafts)
    assert accepted.tolist() == [2, 1, 2]
    assert tokens[1].tolist() == [int(best[1, 0]), -1, -1]
    assert torch.equal(tokens[0], best[0])
    assert_decides_as_the_reference(replace(case, drafts=drafts))
    drawn, p = replace(case, logits=case.logits.flip(1)[:, 1:]).drawn()
    assert drawn.tolist()[1] == -1
    assert p.isnan().all(-1).tolist() == [False, True, False]


def test_a_draft_without_a_finite_distribution_is_dropped(device) -> None:
    case = Draw.of(2, 4, 2, 24, torch.float32, False, False, device)
    assert case.q is not None
    case.q[:, 0, 17] = torch.tensor([math.nan, math.inf, 0.1, -math.inf])
    assert case.sampled()[0].tolist()[:2] + case.sampled()[0].tolist()[3:] == [0, 0, 0]
    assert_decides_as_the_reference(case)


def test_where_nothing_is_left_p_is_drawn_from(device) -> None:
    """q is not normalised and at least p everywhere, as if by roundings."""
    case = Draw.of(6, 4, 1, 16, torch.float32, False, False, device)
    assert case.q is not None
    full = replace(case, q=torch.full_like(case.q, 1e6))
    accepted, tokens = full.sampled()
    assert accepted.tolist() == [0] * 4
    assert bool((tokens[:, 0] >= 0).all())
    assert_decides_as_the_reference(full)


@pytest.mark.parametrize("filters", [False, True])
def test_nothing_is_read_on_the_host(filters) -> None:
    """A tensor without contents cannot be read; tensors of a captured graph must not."""
    case = Draw.of(0, 3, 2, 32, torch.float32, False, filters, "meta")
    with use_backend("reference"):
        accepted, tokens = case.sampled()
        assert accepted.shape == (3,)
        assert tokens.shape == (3, 3)
        assert verify_greedy(case.logits, case.drafts)[1].shape == (3, 3)
        assert case.drawn()[1].shape == (3, 32)


def test_operators_are_pure_and_compile() -> None:
    case = Draw.of(0, 2, 2, 16, torch.float32, False, True, "cpu")
    op = torch.ops.dsv4
    numbers = (*case.numbers, True, "reference")
    torch.library.opcheck(op.verify_greedy.default, (case.logits, case.drafts, "reference"))
    torch.library.opcheck(op.verify_sampled.default, (case.logits, case.drafts, case.q, *numbers))
    torch.library.opcheck(op.draw_draft.default, (case.logits[:, 0], *numbers))
    assert_pure(verify_greedy, case.logits, case.drafts)


def test_strided_inputs(device) -> None:
    case = Draw.of(9, 3, 2, 32, torch.float32, False, True, device)
    assert case.q is not None
    wide = torch.cat((case.logits, case.logits), -1)[..., :32]
    drafts = case.drafts.t().contiguous().t()
    numbers = tuple(torch.stack((x, x), 1)[:, 0] for x in case.numbers)
    other = replace(case, logits=wide, drafts=drafts, q=case.q.expand_as(case.q), numbers=numbers)
    for plain, strided in zip(case.sampled(), other.sampled(), strict=True):
        assert_bitwise(plain, strided)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"drafts": torch.zeros(2, 3, dtype=torch.int64), "q": None},
            ValueError,
            "logits have 3 rows a sequence, wanted 4",
        ),
        ({"drafts": torch.zeros(2, 2)}, TypeError, "drafts has dtype float32, wanted int64"),
        ({"drafts": torch.full((2, 2), 8)}, IndexError, r"drafts\[0, 0\] is 8, wanted below 8"),
        ({"q": torch.zeros(2, 2, 9)}, ValueError, r"probabilities has shape \[2, 2, 9\], wanted"),
        ({"logits": torch.zeros(2, 3)}, ValueError, r"logits has shape \[2, 3\], wanted"),
    ],
)
def test_wrong_arguments_are_named(changes, error, words) -> None:
    case = Draw.of(0, 2, 2, 8, torch.float32, False, False, "cpu")
    with pytest.raises(error, match=words):
        replace(case, **changes).sampled()
