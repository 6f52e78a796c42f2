"""Compression with states in pages: against ``compress_write``, and properties."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.kv_cache.layer_cache import state_shape
from dsv4.kv_cache.pages import COMPACT_FORMATS
from dsv4.ops.compressor import compress_write
from dsv4.ops.compressor_paged import compress_write_paged
from dsv4.ops.kv_cache import Pages, read_kv
from dsv4.ops.rope import rope_tables
from dsv4.testing.assertions import assert_bitwise, assert_within_budget
from dsv4.testing.strategies import generator, normal, seeds, strided

KERNELS = ("triton",)
KINDS = [(4, True), (8, False), (3, True), (5, False), (1, True)]
PAGE, LONGEST = 4, 60


@dataclass
class Model:
    """A compressor and random tokens of some sequences.

    Attributes:
        kv: ``[S, LONGEST, c*d]``, of every position.
        score: As ``kv``.
    """

    kv: torch.Tensor
    score: torch.Tensor
    ape: torch.Tensor
    weight: torch.Tensor
    frequencies: torch.Tensor
    overlap: bool
    seed: int

    @classmethod
    def make(cls, seed, kind, d, rotated, sequences, device):
        ratio, overlap = kind
        width = (1 + overlap) * d
        kv, score = (normal(seed + i, (sequences, LONGEST, width)).to(device) for i in (0, 1))
        ape, weight = normal(seed + 2, (ratio, width)), normal(seed + 3, (d,))
        frequencies = torch.rand(rotated // 2, generator=generator(seed))
        tensors = (ape.to(device), weight.to(device), frequencies.to(device))
        return cls(kv, score, *tensors, overlap, seed)

    @property
    def ratio(self):
        return self.ape.shape[0]

    @property
    def d(self):
        return self.weight.shape[0]

    @property
    def device(self):
        return self.kv.device

    def table(self, size, seed):
        """Pages of a random order, ``[S, P]``, for entries or positions of every sequence."""
        sequences, columns = self.kv.shape[0], -(-LONGEST // size)
        order = torch.randperm(sequences * columns, generator=generator(seed))
        return order.view(sequences, columns).to(self.device)

    def pages(self, entry_format, rope_dim, dtype=torch.float32):
        count = self.kv.shape[0] * -(-LONGEST // PAGE)
        return Pages.allocate(count, PAGE, self.d, rope_dim, entry_format, dtype, self.device)


@dataclass
class Engine:
    """States in pages, filled with NaN, and both tables."""

    model: Model
    state: torch.Tensor
    state_table: torch.Tensor
    entry_table: torch.Tensor
    angles: torch.Tensor

    @classmethod
    def of(cls, model, block_size):
        state_table = model.table(block_size, model.seed)
        entry_table = model.table(PAGE, model.seed + 1)
        width = 2 * model.kv.shape[2]
        state = torch.full((state_table.numel(), block_size, width), torch.nan, device=model.device)
        positions = torch.arange(LONGEST, device=model.device)
        angles = torch.cat(rope_tables(positions, model.frequencies), dim=1)
        return cls(model, state, state_table, entry_table, angles)

    def batch(self, pieces, padding):
        """``(kv, score)``, then ``positions, sequences, state_slots, slots`` of the tokens."""
        model, device = self.model, self.model.device
        rows = [(s, p) for s, start, n in pieces for p in range(start, start + n)]
        sequences, positions = (
            torch.tensor([row[i] for row in rows], dtype=torch.int64, device=device) for i in (0, 1)
        )
        kv, score = (x[sequences, positions] for x in (model.kv, model.score))
        size = self.state.shape[1]
        state_slots = self.state_table[sequences, positions // size] * size + positions % size
        entry = positions // model.ratio
        slots = self.entry_table[sequences, entry // PAGE] * PAGE + entry % PAGE
        closes = (positions + 1) % model.ratio == 0
        slots = torch.where(closes, slots, -1)
        fill = [
            torch.cat((x, x.new_full((padding, *x.shape[1:]), value)))
            for x, value in (
                (kv, torch.nan),
                (score, torch.nan),
                (positions, 0),
                (sequences, 0),
                (state_slots, -1),
                (slots, -1),
            )
        ]
        return fill[:2], fill[2:]

    def step(self, pieces, pages, padding=0, spread=False, **kwargs):
        (kv, score), (positions, sequences, state_slots, slots) = self.batch(pieces, padding)
        if spread:
            kv, score, positions, slots = (strided(x) for x in (kv, score, positions, slots))
        compress_write_paged(
            kv,
            score,
            self.model.ape,
            self.state,
            positions,
            sequences.to(torch.int32),
            state_slots,
            self.state_table.to(torch.int32),
            slots,
            self.model.weight,
            self.angles,
            pages,
            overlap=self.model.overlap,
            **kwargs,
        )


def expected(model, steps, pages, table, **kwargs):
    """Pages after the same steps by ``compress_write`` on states of its own."""
    sequences = model.kv.shape[0]
    state = torch.zeros(state_shape(sequences, model.ratio, model.overlap, model.d))
    state = state.to(model.device)
    for pieces in steps:
        kv, score = (
            torch.cat([x[s, start : start + n] for s, start, n in pieces])
            for x in (model.kv, model.score)
        )
        lengths = torch.tensor([0, *(n for *_, n in pieces)])
        compress_write(
            kv,
            score,
            model.ape,
            state,
            lengths.cumsum(0).to(model.device),
            torch.tensor([start for _, start, _ in pieces], device=model.device),
            torch.tensor([s for s, *_ in pieces], device=model.device),
            model.weight,
            model.frequencies,
            pages,
            table,
            overlap=model.overlap,
            **kwargs,
        )


@st.composite
def runs(draw, sequences=3):
    """Steps, each with the next tokens of some sequences, in random pieces."""
    ends, steps = [0] * sequences, []
    for _ in range(draw(st.integers(1, 4))):
        pieces = []
        for s in draw(st.permutations(range(sequences))):
            n = min(draw(st.sampled_from([0, 1, 1, 2, 3, 7, 17])), LONGEST - ends[s])
            if n:
                pieces.append((s, ends[s], n))
                ends[s] += n
        if pieces:
            steps.append(pieces)
    return steps


def assert_same_entries(mine, other):
    """The same bytes; on a GPU sums in another order may tip a rounding."""
    if mine.data.device.type == "cpu":
        assert_bitwise(mine.data, other.data)
        return
    slots = torch.arange(mine.num_slots, device=mine.data.device)
    actual, reference = (
        read_kv(p, slots, torch.float32, backend="reference") for p in (mine, other)
    )
    assert_within_budget(actual, reference.double(), 2.0**-3 * reference.double().abs() + 2.0**-10)


@pytest.fixture(params=["few", "many"])
def some_tokens(request, monkeypatch):
    """Whether the Triton kernels take the path for few tokens or that for many."""
    kernels = pytest.importorskip("dsv4.triton.compressor_paged")
    monkeypatch.setattr(kernels, "FEW_TOKENS", 128 if request.param == "few" else 0)


@pytest.mark.usefixtures("some_tokens")
@settings(max_examples=20)
@given(
    st.sampled_from(KINDS),
    seeds(),
    runs(),
    st.sampled_from([1, 2, 8]),
    st.integers(0, 3),
    st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_any_run_stores_what_compress_write_stores(
    device, kind, seed, steps, block_size, padding, dtype
):
    """However sequences are cut into steps; what a window does not have is NaN in the state."""
    model = Model.make(seed, kind, 32, 10, 3, device)
    engine = Engine.of(model, block_size)
    mine, other = (model.pages("fp8", 12) for _ in range(2))
    for pieces in steps:
        engine.step(pieces, mine, padding, dtype=dtype)
    expected(model, steps, other, engine.entry_table, dtype=dtype)
    assert_same_entries(mine, other)


@pytest.mark.usefixtures("some_tokens")
@settings(max_examples=10)
@given(st.sampled_from(KINDS), seeds(), runs(), st.sampled_from([1, 3]))
def test_every_token_is_in_the_state_and_nothing_else(device, kind, seed, steps, block_size):
    model = Model.make(seed, kind, 32, 10, 3, device)
    engine = Engine.of(model, block_size)
    for pieces in steps:
        engine.step(pieces, model.pages("fp8", 12), 2)
    states = torch.full_like(engine.state, torch.nan)
    for s, start, n in (piece for pieces in steps for piece in pieces):
        for p in range(start, start + n):
            score = model.score[s, p] + model.ape[p % model.ratio]
            block = engine.state_table[s, p // block_size]
            states[block, p % block_size] = torch.cat((model.kv[s, p], score))
    assert_bitwise(engine.state, states)


@pytest.mark.usefixtures("some_tokens")
@pytest.mark.parametrize("entry_format", [*COMPACT_FORMATS, "plain"])
@settings(max_examples=6)
@given(seeds(), runs())
def test_other_formats_of_pages(device, entry_format, seed, steps):
    model = Model.make(seed, (4, True), 64, 16, 3, device)
    engine = Engine.of(model, 4)
    mine, other = (model.pages(entry_format, 0) for _ in range(2))
    for pieces in steps:
        engine.step(pieces, mine, 1)
    expected(model, steps, other, engine.entry_table)
    assert_same_entries(mine, other)


SHORT = [[(0, 0, 7), (1, 0, 3)], [(1, 3, 1), (0, 7, 1)], [(0, 8, 4)]]
LONG = [[(0, 0, 31)], [(0, 31, 1), (1, 0, 1)]]


@pytest.mark.parametrize(
    ("kind", "d", "steps"),
    [
        pytest.param((4, True), 512, SHORT, marks=pytest.mark.rarely_interpreted),
        pytest.param((32, False), 512, LONG, marks=pytest.mark.rarely_interpreted),
        ((4, True), 128, SHORT),
    ],
)
@pytest.mark.usefixtures("some_tokens")
def test_the_sizes_of_the_model(device, kind, d, steps):
    """All dims, and pages and states with gaps between them."""
    model = Model.make(0, kind, d, 64, 2, device)
    engine = Engine.of(model, 8)
    wide = torch.stack((engine.state, engine.state), 1)
    engine = replace(engine, state=wide[:, 0])
    mine, other = (model.pages("fp8", 64) for _ in range(2))
    spread = torch.stack((mine.data, mine.data), 1)
    mine = replace(mine, data=spread[:, 0])
    for pieces in steps:
        engine.step(pieces, mine, 2, spread=True)
    expected(model, steps, other, engine.entry_table)
    assert_same_entries(replace(mine, data=mine.data.contiguous()), other)
    assert not spread[:, 1].any()
    assert bool(wide[:, 1].isnan().all())


@pytest.mark.usefixtures("some_tokens")
def test_a_slot_without_a_window_is_left_alone(device):
    """Tokens that end no window, and padding, store nothing whatever their slots say."""
    model = Model.make(0, (4, True), 32, 10, 3, device)
    engine = Engine.of(model, 4)
    pages = model.pages("fp8", 12)
    (kv, score), (positions, sequences, state_slots, slots) = engine.batch([(0, 0, 7)], 1)
    rest = (engine.state_table, torch.full_like(slots, 3), model.weight, engine.angles, pages)
    state_slots[3] = -1
    compress_write_paged(
        kv, score, model.ape, engine.state, positions, sequences, state_slots, *rest, overlap=True
    )
    assert not pages.data.any()


@settings(max_examples=6)
@given(seeds())
def test_nan_stays_in_its_windows(device, seed):
    model = Model.make(seed, (4, True), 32, 10, 2, device)
    clean, dirty = (model.pages("plain", 0) for _ in range(2))
    steps = [[(0, 0, 9), (1, 0, 20)], [(1, 20, 3), (0, 9, 12)]]
    for pages in (clean, dirty):
        engine = Engine.of(model, 4)
        for pieces in steps:
            engine.step(pieces, pages)
        model.kv[0, 10, 40] = torch.nan  # of the half that its own window pools
    hit = dirty.data.isnan().any(-1)
    entry = engine.entry_table[0, 2 // PAGE] * PAGE + 2 % PAGE
    assert hit.flatten().nonzero().flatten().tolist() == [int(entry)]
    assert_bitwise(dirty.data[~hit], clean.data[~hit])


def test_nothing_to_do(device):
    model = Model.make(0, (4, True), 32, 10, 1, device)
    for pages in (model.pages("fp8", 12), Pages.allocate(0, PAGE, 32, 12, device=device)):
        engine = Engine.of(model, 4)
        engine.step([], pages)
        assert not pages.data.any()
        assert bool(engine.state.isnan().all())


def call(**changes):
    """A call of one token with some arguments replaced."""
    arguments = {
        "kv": torch.zeros(1, 16),
        "score": torch.zeros(1, 16),
        "ape": torch.zeros(4, 16),
        "state": torch.zeros(2, 4, 32),
        "positions": torch.tensor([3]),
        "sequences": torch.tensor([0]),
        "state_slots": torch.tensor([3]),
        "state_table": torch.tensor([[0, 1]]),
        "slots": torch.tensor([0]),
        "norm_weight": torch.ones(8),
        "angles": torch.zeros(8, 4),
        "pages": Pages.allocate(1, 2, 8, 4),
        "overlap": True,
        **changes,
    }
    compress_write_paged(**arguments)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"state": torch.zeros(2, 4, 32).half()}, TypeError, "state has dtype float16"),
        (
            {"state": torch.zeros(2, 4, 30)},
            ValueError,
            r"state has .* wanted \[any, any, 32\]",
        ),
        (
            {"state": torch.zeros(1, 4, 32).expand(2, 4, 32)},
            ValueError,
            "state has shape .* overlap",
        ),
        ({"score": torch.zeros(2, 16)}, ValueError, r"score has shape \[2, 16\]"),
        ({"overlap": False}, ValueError, "kv has 16 columns, wanted 1 x 8"),
        ({"ape": torch.zeros(0, 16)}, ValueError, "ape has .* wanted a row at least"),
        ({"angles": torch.zeros(8, 3)}, ValueError, "angles has .* even R <= 8"),
        ({"angles": torch.zeros(8, 10)}, ValueError, "angles has .* even R <= 8"),
        ({"dtype": torch.float16}, TypeError, "dtype is torch.float16"),
        ({"state_slots": torch.tensor([8])}, IndexError, r"state_slots\[0\] is 8, wanted below 8"),
        ({"slots": torch.tensor([2])}, IndexError, r"slots\[0\] is 2, wanted below 2"),
        ({"sequences": torch.tensor([1])}, IndexError, r"sequences\[0\] is 1"),
        ({"positions": torch.tensor([-1])}, IndexError, r"positions\[0\] is -1"),
        ({"positions": torch.tensor([8])}, IndexError, r"positions\[0\] is 8"),
    ],
)
def test_what_does_not_fit_is_refused(changes, error, words):
    call()
    with pytest.raises(error, match=f"compress_write_paged: {words}"):
        call(**changes)


def test_padding_may_have_any_row_and_position():
    bad = torch.tensor([99])
    call(state_slots=torch.tensor([-1]), sequences=bad, positions=bad, slots=bad)
