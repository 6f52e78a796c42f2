"""The compressor: any chunking equals one pass equals the loops of the specification."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4 import dispatch
from dsv4.kv_cache.pages import COMPACT_FORMATS
from dsv4.ops.compressor import compress_write, compressor_update, pool_windows
from dsv4.ops.indexer import indexer_rotate_quantize
from dsv4.ops.kv_cache import Pages, read_kv, write_kv
from dsv4.ops.norm import rms_norm
from dsv4.ops.rope import rope, rope_tables
from dsv4.ops.slots import entry_slots
from dsv4.reference import indexer
from dsv4.testing.assertions import assert_bitwise, assert_within_budget, unit_roundoff
from dsv4.testing.strategies import (
    generator,
    normal,
    overlapping,
    partitions,
    seeds,
    strided,
)
from tests._tools import large_pages

KERNELS = ("triton",)
# (ratio, overlap): both kinds, also where the ratio is no power of two.
KINDS = [(4, True), (8, False), (3, True), (5, False), (1, False), (1, True)]
kinds = st.sampled_from(KINDS)


def naive(
    kv: torch.Tensor, score: torch.Tensor, ape: torch.Tensor, overlap: bool
) -> list[list[float]]:
    """Entries of one sequence from position 0, by specification, section 5.2, loop by loop."""
    kv, score, ape = kv.double(), score.double(), ape.double()
    m, d = ape.shape[0], ape.shape[1] // (2 if overlap else 1)
    entries = []
    for w in range(kv.shape[0] // m):
        entry = []
        for channel in range(d):
            slots = []
            if overlap and w > 0:
                for t in range(m * (w - 1), m * w):
                    slots.append((score[t, channel] + ape[t % m, channel], kv[t, channel]))
            column = channel + d if overlap else channel
            for t in range(m * w, m * w + m):
                slots.append((score[t, column] + ape[t % m, column], kv[t, column]))
            top = max(float(s) for s, _ in slots)
            weights = [math.exp(float(s) - top) for s, _ in slots]
            values = [float(v) for _, v in slots]
            entry.append(sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights))
        entries.append(entry)
    return entries


def empty_state(
    rows: int, ratio: int, overlap: bool, d: int, dtype=torch.float64, device="cpu", spare: int = 0
) -> torch.Tensor:
    c = 2 if overlap else 1
    state = torch.zeros(rows, c * ratio + spare, 2, c * d, dtype=dtype, device=device)
    state[:, :, 1] = -torch.inf
    return state


def live_slots(tokens: int, ratio: int, overlap: bool, spare: int = 0) -> list[int]:
    """Slots of the tokens that later windows pool, after that many."""
    first = max(0, tokens // ratio * ratio - (ratio if overlap else 0))
    return [p % ((2 if overlap else 1) * ratio + spare) for p in range(first, tokens)]


@dataclass
class Stream:
    """A compressor with its state, fed piece by piece, that keeps what came out."""

    ape: torch.Tensor
    overlap: bool
    state: torch.Tensor
    out: dict[int, list[tuple[int, torch.Tensor]]] = field(default_factory=dict)

    def feed(self, pieces: list[tuple[int, int, torch.Tensor, torch.Tensor]]) -> None:
        """Pieces are (state row, start, kv, score); some may be empty."""
        device = self.ape.device
        lengths = [kv.shape[0] for _, _, kv, _ in pieces]
        cu = torch.tensor([0, *lengths], device=device).cumsum(0)
        rows = torch.tensor([row for row, *_ in pieces], dtype=torch.int64, device=device)
        starts = torch.tensor([p[1] for p in pieces], dtype=torch.int64, device=device)
        width = self.ape.shape[1]
        nothing = [torch.zeros(0, width, dtype=self.state.dtype, device=device)]
        kv = torch.cat(nothing + [p[2] for p in pieces])
        score = torch.cat(nothing + [p[3] for p in pieces])
        pooled, positions, sequence = compressor_update(
            kv, score, self.ape, self.state, cu, starts, rows, overlap=self.overlap
        )
        ratio = self.ape.shape[0]
        assert pooled.shape[0] == kv.shape[0] // ratio + len(pieces)
        used = positions >= 0
        count = int(used.sum())
        assert bool(used[:count].all())
        assert bool((sequence[count:] == -1).all())
        assert not pooled[count:].any()
        for i in range(count):
            self.out.setdefault(int(sequence[i]), []).append((int(positions[i]), pooled[i]))

    def entries(self, row: int) -> torch.Tensor:
        result = self.out.get(row, [])
        ratio = self.ape.shape[0]
        assert [p for p, _ in result] == [ratio * w for w in range(len(result))]
        empty = self.state.new_zeros(0, self.state.shape[-1] // (2 if self.overlap else 1))
        return torch.stack([e for _, e in result]) if result else empty


# Of float32 the kernels' results, of float64 the reference's whatever else is asked for.
WIDE = [torch.float64, torch.float32]


def inputs(
    seed: int, tokens: int, ratio: int, overlap: bool, d: int, device="cpu", dtype=torch.float64
):
    c = 2 if overlap else 1
    kv = normal(seed, (tokens, c * d), torch.float64).to(device)
    score = 3 * normal(seed + 1, (tokens, c * d), torch.float64).to(device)
    ape = normal(seed + 2, (ratio, c * d), torch.float64).to(device)
    return kv.to(dtype), score.to(dtype), ape.to(dtype)


def close(actual: torch.Tensor, expected, scale: float = 8.0) -> None:
    """Against float64 in another order: |kv| <= 8 or so, 2m + 8 roundings, scores below 24."""
    expected = torch.as_tensor(expected, dtype=torch.float64, device=actual.device)
    budget = scale * 64 * unit_roundoff(actual.dtype)
    assert_within_budget(actual, expected.reshape(actual.shape), budget)


@st.composite
def ragged_schedules(draw: st.DrawFn):
    """Lengths of up to 3 sequences, and rounds in which each may take some of its tokens."""
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))
    chunks = [draw(partitions(n)) for n in lengths]
    queue = [i for i, c in enumerate(chunks) for _ in c]
    rounds: list[list[int]] = []
    for i in draw(st.permutations(queue)):
        if rounds and i not in rounds[-1] and draw(st.booleans()):
            rounds[-1].append(i)
        else:
            rounds.append([i])
    return lengths, chunks, rounds, draw(st.booleans())


@given(kinds, seeds(), ragged_schedules())
def test_any_chunking_equals_the_loops(device, wide, kind, seed, schedule):
    ratio, overlap = kind
    lengths, chunks, rounds, pad = schedule
    d = 3
    data = [
        inputs(seed + 10 * i, n, ratio, overlap, d, device, wide) for i, n in enumerate(lengths)
    ]
    ape = data[0][2]
    # A state row of its own for each sequence, in another order, full of rubbish from before.
    rows = [(2 * i + 1) % 5 for i in range(len(lengths))]
    state = torch.full_like(empty_state(5, ratio, overlap, d, wide, device), torch.nan)
    stream = Stream(ape, overlap, state)
    done = [0] * len(lengths)
    left = [list(c) for c in chunks]
    for members in rounds:
        pieces = []
        for i in members:
            n = left[i].pop(0)
            part = slice(done[i], done[i] + n)
            pieces.append((rows[i], done[i], data[i][0][part], data[i][1][part]))
            done[i] += n
        if pad:  # entries without tokens, of a row in use and of no row
            nothing = data[0][0][:0]
            pieces.insert(1, (pieces[0][0], 7, nothing, nothing))
            pieces.append((-1, 0, nothing, nothing))
        stream.feed(pieces)
    once = Stream(ape, overlap, empty_state(5, ratio, overlap, d, wide, device))
    for i, n in enumerate(lengths):
        close(stream.entries(rows[i]), naive(data[i][0], data[i][1], ape, overlap))
        once.feed([(rows[i], 0, data[i][0], data[i][1])])
        live = live_slots(n, ratio, overlap)
        assert_bitwise(stream.state[rows[i], live], once.state[rows[i], live], "final state")
    unused = [r for r in range(5) if r not in rows]
    assert bool(stream.state[unused].isnan().all())


@pytest.mark.parametrize("kind", KINDS)
def test_every_position_phase(device, wide, kind):
    """Prefill of every length up to three windows, then token by token over two more."""
    ratio, overlap = kind
    kv, score, ape = inputs(5, 5 * ratio, ratio, overlap, 2, device, wide)
    expected = torch.tensor(naive(kv, score, ape, overlap), dtype=torch.float64)
    for prompt in range(3 * ratio + 1):
        stream = Stream(ape, overlap, empty_state(1, ratio, overlap, 2, wide, device))
        stream.feed([(0, 0, kv[:prompt], score[:prompt])])
        for t in range(prompt, 5 * ratio):
            before = len(stream.out.get(0, []))
            stream.feed([(0, t, kv[t : t + 1], score[t : t + 1])])
            closes = len(stream.out.get(0, [])) - before
            assert closes == (1 if (t + 1) % ratio == 0 else 0)
        close(stream.entries(0), expected)


@given(kinds, seeds(), st.integers(0, 30), st.integers(1, 30))
def test_state_is_a_function_of_the_last_tokens(device, wide, kind, seed, tokens, again):
    """A slot per position modulo their number; those of no such token are not written."""
    ratio, overlap = kind
    kv, score, ape = inputs(seed, tokens, ratio, overlap, 2, device, wide)
    stream = Stream(ape, overlap, empty_state(1, ratio, overlap, 2, wide, device))
    stream.feed([(0, 0, kv, score)])
    expected = empty_state(1, ratio, overlap, 2, wide, device)
    slots = stream.state.shape[1]
    for p in range(max(0, tokens - slots), tokens):
        expected[0, p % slots, 0] = kv[p]
        expected[0, p % slots, 1] = score[p] + ape[p % ratio]
    assert_bitwise(stream.state, expected)


@given(kinds, seeds(), st.integers(0, 60))
@example((4, True), 0, 7)
@example((8, False), 0, 7)
def test_one_token_can_be_taken_twice(device, wide, kind, seed, start):
    """A step that was not finished is repeated: also where it closes a window."""
    ratio, overlap = kind
    kv, score, ape = inputs(seed, start + 2, ratio, overlap, 2, device, wide)
    streams = []
    for other in (None, kv.flip(0)):
        stream = Stream(ape, overlap, empty_state(1, ratio, overlap, 2, wide, device))
        stream.feed([(0, 0, kv[:start], score[:start])])
        if other is not None:
            before = dict(stream.out)
            stream.feed([(0, start, other[start : start + 1], score[:1])])
            stream.out = before
            for row, entries in stream.out.items():
                stream.out[row] = entries[: start // ratio]
        stream.feed([(0, start, kv[start : start + 1], score[start : start + 1])])
        stream.feed([(0, start + 1, kv[start + 1 :], score[start + 1 :])])
        streams.append(stream)
    assert_bitwise(streams[1].entries(0), streams[0].entries(0))
    live = live_slots(start + 2, ratio, overlap)
    assert_bitwise(streams[1].state[0, live], streams[0].state[0, live])


@given(kinds, seeds(), st.integers(1, 25), st.integers(1, 25))
def test_a_reused_row_forgets(device, wide, kind, seed, first, second):
    ratio, overlap = kind
    old = inputs(seed, first, ratio, overlap, 2, device, wide)
    kv, score, ape = inputs(seed + 1, second, ratio, overlap, 2, device, wide)
    used = Stream(ape, overlap, empty_state(1, ratio, overlap, 2, wide, device))
    used.feed([(0, 0, old[0] * torch.nan, old[1])])
    used.out.clear()
    used.feed([(0, 0, kv, score)])
    fresh = Stream(ape, overlap, empty_state(1, ratio, overlap, 2, wide, device))
    fresh.feed([(0, 0, kv, score)])
    assert_bitwise(used.entries(0), fresh.entries(0))
    live = live_slots(second, ratio, overlap)
    assert_bitwise(used.state[0, live], fresh.state[0, live])


@given(kinds, seeds(), st.integers(1, 40), st.data())
def test_causality(device, wide, kind, seed, tokens, data):
    """A token changes only entries of its window and, with overlap, of the next."""
    ratio, overlap = kind
    kv, score, ape = inputs(seed, tokens, ratio, overlap, 2, device, wide)
    at = data.draw(st.integers(0, tokens - 1))
    clean = Stream(ape, overlap, empty_state(1, ratio, overlap, 2, wide, device))
    clean.feed([(0, 0, kv, score)])
    kv = kv.clone()
    kv[at] = torch.nan
    dirty = Stream(ape, overlap, empty_state(1, ratio, overlap, 2, wide, device))
    dirty.feed([(0, 0, kv, score)])
    bad = dirty.entries(0).isnan().any(-1).tolist()
    reach = {at // ratio, at // ratio + 1} if overlap else {at // ratio}
    assert [w for w, b in enumerate(bad) if b] == [w for w in range(len(bad)) if w in reach]
    keep = [w for w in range(len(bad)) if w not in reach]
    assert_bitwise(dirty.entries(0)[keep], clean.entries(0)[keep])


@given(kinds, seeds(), st.lists(st.integers(0, 20), min_size=2, max_size=4))
def test_nan_stays_in_its_own_sequence(device, wide, kind, seed, lengths):
    ratio, overlap = kind
    parts = [inputs(seed + i, n, ratio, overlap, 2, device, wide) for i, n in enumerate(lengths)]
    ape = parts[0][2]
    streams = []
    for poison in (False, True):
        stream = Stream(ape, overlap, empty_state(len(lengths), ratio, overlap, 2, wide, device))
        kv0 = parts[0][0] * torch.nan if poison else parts[0][0]
        pieces = [(i, 0, kv, score) for i, (kv, score, _) in enumerate(parts)]
        stream.feed([(0, 0, kv0, parts[0][1]), *pieces[1:]])
        streams.append(stream)
    for row in range(1, len(lengths)):
        assert_bitwise(streams[1].entries(row), streams[0].entries(row))
        assert_bitwise(streams[1].state[row], streams[0].state[row])


@given(kinds, seeds(), st.integers(0, 3), st.integers(0, 4))
def test_pool_windows_equals_the_loops(device, wide, kind, seed, sequences, windows):
    ratio, overlap = kind
    d, tokens = 3, windows * ratio
    data = [inputs(seed + i, tokens, ratio, overlap, d, device, wide) for i in range(sequences)]
    c = 2 if overlap else 1
    ape = inputs(seed, 0, ratio, overlap, d, device, wide)[2]
    shape = (sequences, windows, ratio, c * d)
    empty = torch.zeros(0, c * d, dtype=wide, device=device)
    kv = torch.cat([empty] + [x[0] for x in data]).view(shape)
    score = torch.cat([empty] + [x[1] for x in data]).view(shape) + ape
    out = pool_windows(kv, score, overlap=overlap)
    assert out.shape == (sequences, windows, d)
    for i in range(sequences):
        close(out[i], naive(data[i][0], data[i][1], ape, overlap))
    if overlap and windows > 1:
        ca_kv, ca_score = kv[:, 0, :, :d], score[:, 0, :, :d]
        assert_bitwise(
            pool_windows(kv[:, 1:], score[:, 1:], ca_kv, ca_score, overlap=True), out[:, 1:]
        )


@given(seeds(), st.integers(-10, 10), kinds)
def test_an_entry_is_a_mean_that_ignores_a_common_shift(device, wide, seed, shift, kind):
    ratio, overlap = kind
    c = 2 if overlap else 1
    kv = normal(seed, (2, 3, ratio, c * 2), wide).to(device)
    score = normal(seed + 1, (2, 3, ratio, c * 2), wide).to(device)
    out = pool_windows(kv, score, overlap=overlap)
    # As in the next test, for these scores.
    slots, u = 2 * ratio if overlap else ratio, unit_roundoff(wide)
    largest = float(score.abs().max()) + abs(shift)
    allowed = (3 * slots + 8 + 6 * largest) * u * float(kv.abs().max())
    # A constant in all scores of the channel drops out.
    moved = pool_windows(kv, score + shift, overlap=overlap)
    assert_within_budget(moved, out.double(), 2 * allowed)
    assert bool((out <= kv.max() + allowed).all())
    assert bool((out >= kv.min() - allowed).all())
    # Two sums of the same weights, in any order, and their quotient.
    ones = torch.ones_like(kv)
    mean = pool_windows(ones, score, overlap=overlap)
    assert_within_budget(mean, torch.ones_like(out), (2 * slots + 4) * u)


@given(kinds, seeds(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_float32_is_within_its_budget(device, kind, seed, dtype):
    """Softmax of n slots: each weight off by (2n + 6)u with |score| <= 24, then n products."""
    ratio, overlap = kind
    kv, score, ape = (x.to(dtype) for x in inputs(seed, 3 * ratio + 1, ratio, overlap, 4, device))
    results = []
    for wide in (torch.float32, torch.float64):
        state = empty_state(1, ratio, overlap, 4, wide, device)
        stream = Stream(ape.to(wide), overlap, state)
        stream.feed([(0, 0, kv.to(wide), score.to(wide))])
        results.append(stream.entries(0))
    slots = 2 * ratio if overlap else ratio
    # The score sum and its difference from the maximum are off by u |score| each, exp carries that
    # over as a relative error.
    relative = (3 * slots + 8 + 6 * 24) * unit_roundoff(torch.float32)
    assert_within_budget(results[0], results[1], relative * float(kv.abs().max()))


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("kind", [(4, True), (128, False)])
def test_pitfall_3_position_is_the_first_token_of_the_window(device, kind, dtype):
    """m * w: neither the entry number nor the last token, whatever the start."""
    ratio, overlap = kind
    kv, score, ape = inputs(0, 3 * ratio, ratio, overlap, 1, device, dtype)
    state = empty_state(1, ratio, overlap, 1, dtype, device)
    for start, positions in ((0, [0, ratio, 2 * ratio]), (5 * ratio, [5, 6, 7])):
        _, actual, sequence = compressor_update(
            kv,
            score,
            ape,
            state,
            torch.tensor([0, 3 * ratio], device=device),
            torch.tensor([start], device=device),
            torch.tensor([0], device=device),
            overlap=overlap,
        )
        expected = positions if start == 0 else [ratio * w for w in positions]
        assert actual.tolist() == [*expected, -1]
        assert sequence.tolist() == [0, 0, 0, -1]


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("prompt", [3, 4, 5, 7, 8, 9])
def test_pitfall_16_true_lengths(device, prompt, dtype):
    """A prompt batched with longer ones, or followed by padding, equals the prompt alone."""
    kv, score, ape = inputs(3, 16, 4, True, 2, device, dtype)
    expected = naive(kv[:prompt], score[:prompt], ape, True)
    assert len(expected) == prompt // 4
    alone = Stream(ape, True, empty_state(1, 4, True, 2, dtype, device))
    alone.feed([(0, 0, kv[:prompt], score[:prompt])])
    assert len(alone.entries(0)) == prompt // 4
    close(alone.entries(0), expected)
    batched = Stream(ape, True, empty_state(2, 4, True, 2, dtype, device))
    batched.feed([(0, 0, kv[:prompt], score[:prompt]), (1, 0, kv, score)])
    assert len(batched.entries(0)) == prompt // 4
    close(batched.entries(0), expected)
    close(batched.entries(1), naive(kv, score, ape, True))
    # Sixteen token rows, of which only the first `prompt` belong to the sequence.
    state = empty_state(1, 4, True, 2, dtype, device)
    pooled, positions, _ = compressor_update(
        kv,
        score,
        ape,
        state,
        torch.tensor([0, prompt], device=device),
        torch.tensor([0], device=device),
        torch.tensor([0], device=device),
        overlap=True,
    )
    assert int((positions >= 0).sum()) == prompt // 4
    close(pooled[: prompt // 4], expected)
    assert_bitwise(state, alone.state)


@pytest.mark.parametrize("dtype", WIDE)
def test_pitfall_22_all_lengths_zero(device, dtype):
    """No token at all, or token rows that belong to nobody: nothing comes out, nothing changes."""
    for ratio, overlap in KINDS:
        _, _, ape = inputs(0, 0, ratio, overlap, 2, device, dtype)
        for tokens in (0, 9):
            kv, score, _ = inputs(1, tokens, ratio, overlap, 2, device, dtype)
            state = normal(2, empty_state(3, ratio, overlap, 2).shape, dtype).to(device)
            before = state.clone()
            zeros = torch.zeros(4, dtype=torch.int64, device=device)
            pooled, positions, sequence = compressor_update(
                kv, score, ape, state, zeros, zeros[:3], zeros[:3], overlap=overlap
            )
            assert pooled.shape == (tokens // ratio + 3, 2)
            assert not pooled.any()
            assert bool((positions == -1).all())
            assert bool((sequence == -1).all())
            assert_bitwise(state, before)


@given(seeds(), st.integers(0, 9), st.sampled_from(WIDE))
@example(0, 3, torch.float32)
def test_pitfall_41_ape_row_is_the_position_and_the_first_columns_are_the_overlap_half(
    device, seed, start, dtype
):
    """Scores are ape alone: each entry is known from ape's rows and columns."""
    d, ratio, tokens = 2, 4, 12
    kv, _, ape = inputs(seed, start + tokens, ratio, True, d, device, dtype)
    score = torch.zeros_like(kv)
    stream = Stream(ape, True, empty_state(1, ratio, True, d, dtype, device))
    stream.feed([(0, 0, kv[:start], score[:start])])
    stream.feed([(0, start, kv[start:], score[start:])])
    entries = stream.entries(0)
    for w in range(1, entries.shape[0]):
        weights = torch.cat((ape[:, :d], ape[:, d:])).softmax(0)
        before, own = kv[4 * w - 4 : 4 * w, :d], kv[4 * w : 4 * w + 4, d:]
        close(entries[w], (weights * torch.cat((before, own))).sum(0))
    if entries.shape[0]:
        close(entries[0], (ape[:, d:].softmax(0) * kv[:4, d:]).sum(0))


_TESTS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def arguments(ratio: int, overlap: bool, device, tokens: int = 11):
    kv, score, ape = (x.float() for x in inputs(0, tokens, ratio, overlap, 2, device))
    state = empty_state(3, ratio, overlap, 2, torch.float32, device)
    cu = torch.tensor([0, 4, 4, tokens], device=device)
    starts = torch.tensor([0, 2, 0], device=device)
    return kv, score, ape, state, cu, starts, torch.tensor([2, 0, 1], device=device)


@pytest.mark.rarely_interpreted
@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (8, False)])
def test_opcheck(device, ratio, overlap):
    args = (*arguments(ratio, overlap, device), overlap, "auto")
    torch.library.opcheck(torch.ops.dsv4.compressor_update.default, args, test_utils=_TESTS)
    c = 2 if overlap else 1
    kv, score = (normal(i, (2, 3, ratio, c * 2)).to(device) for i in range(2))
    before = (None, None)
    if overlap:
        before = (kv[:, 0, :, :2].clone(), score[:, 0, :, :2].clone())
    args = (kv, score, *before, overlap, "auto")
    torch.library.opcheck(torch.ops.dsv4.pool_windows.default, args, test_utils=_TESTS)


@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (8, False)])
def test_compiles_whole(device, ratio, overlap):
    def step(*args: torch.Tensor) -> torch.Tensor:
        pooled, positions, sequence = compressor_update(*args, overlap=overlap)
        return pooled + positions[:, None] + sequence[:, None]

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        args = arguments(ratio, overlap, device)
        results.append((function(*args), args[3]))
    assert_bitwise(results[1][0], results[0][0])
    assert_bitwise(results[1][1], results[0][1])


@given(seeds())
def test_strided_input_and_int32(device, seed):
    kv, score, ape, state, cu, starts, rows = arguments(4, True, device)
    other = state.clone()
    plain = compressor_update(kv, score, ape, state, cu, starts, rows, overlap=True)
    args = (strided(kv), strided(score), strided(ape), other, cu.int(), starts.int(), rows.int())
    gaps = compressor_update(*args, overlap=True)
    for a, b in zip(gaps, plain, strict=True):
        assert_bitwise(a, b)
    assert_bitwise(other, state)


def test_tokens_further_apart_than_32_bits_reach(device):
    """The last token of a window of 8 begins more than 2^31 numbers after the first."""
    gap = 310_000_000  # 9 rows of it take no memory but what is touched
    dense, score, ape = (x.bfloat16() for x in inputs(3, 9, 8, False, 32, device))
    far = torch.empty_strided(dense.shape, (gap, 1), dtype=dense.dtype, device=device)
    far.copy_(dense)
    assert 7 * far.stride(0) >= 2**31
    cu, starts = (torch.tensor(x, device=device) for x in ([0, 9], [0]))
    actual = []
    for kv in (dense, far):
        state = empty_state(1, 8, False, 32, torch.float32, device)
        keywords = (cu, starts, torch.zeros_like(starts))
        actual.append((*compressor_update(kv, score, ape, state, *keywords, overlap=False), state))
    for far_away, expected in zip(*actual[::-1], strict=True):
        assert_bitwise(far_away, expected)


def test_a_state_with_slots_that_far_apart_is_the_references(device):
    kv, score, ape, state, cu, starts, rows = arguments(8, False, device)
    far = torch.empty_strided(state.shape, (4, 310_000_000, 2, 1), device=device).copy_(state)
    keywords = (kv, score, ape, far, cu, starts, rows)
    why = dispatch.explain(compressor_update, *keywords, overlap=False)
    assert why.chosen == "reference"
    compressor_update(*keywords, overlap=False)
    compressor_update(kv, score, ape, state, cu, starts, rows, overlap=False, backend="reference")
    assert_bitwise(far.contiguous(), state)


@settings(max_examples=5)
@given(seeds())
def test_strided_state(device, seed):
    kv, score, ape, state, cu, starts, rows = arguments(8, False, device)
    wide = torch.zeros(3, 8, 2, 2, 2, device=device)
    view = wide[..., 0]
    view.copy_(state)
    compressor_update(kv, score, ape, view, cu, starts, rows, overlap=False)
    compressor_update(kv, score, ape, state, cu, starts, rows, overlap=False)
    assert_bitwise(view.contiguous(), state)
    assert not wide[..., 1].any()


@pytest.mark.parametrize("overlap", [False, True])
def test_no_batch(device, overlap):
    kv, score, ape = (x.float() for x in inputs(0, 0, 4, overlap, 2, device))
    state = empty_state(1, 4, overlap, 2, torch.float32, device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    cu = torch.zeros(1, dtype=torch.int64, device=device)
    pooled, positions, sequence = compressor_update(
        kv, score, ape, state, cu, none, none, overlap=overlap
    )
    assert pooled.shape == (0, 2)
    assert positions.shape == sequence.shape == (0,)
    shape = (0, 3, 4, 4 if overlap else 2)
    empty = torch.zeros(shape, device=device)
    assert pool_windows(empty, empty, overlap=overlap).shape == (0, 3, 2)


@pytest.mark.parametrize(
    ("name", "change", "error", "words"),
    [
        ("kv", lambda x: x[0], ValueError, "kv has shape"),
        ("kv", lambda x: x[0, 0], ValueError, r"kv has shape \[\], wanted \[any, any\]"),
        ("score", lambda x: x[:5], ValueError, r"score has shape \[5, 4\], wanted \[11, 4\]"),
        ("ape", lambda x: x[:, :3], ValueError, r"ape has shape \[4, 3\], wanted \[any, 4\]"),
        ("ape", lambda x: x[:0], ValueError, r"ape has shape \[0, 4\], wanted a row at least"),
        ("state", lambda x: x[:, :7], ValueError, "state has 7 slots, wanted at least 8: two win"),
        ("state", lambda x: x[:, :, :1], ValueError, r"state has shape \[3, 8, 1, 4\], wanted"),
        ("state", lambda x: x.half(), TypeError, "state has dtype float16, wanted float32"),
        ("cu", lambda x: x[:3], ValueError, r"cu_seqlens has shape \[3\], wanted \[4\]"),
        ("cu", lambda x: x.float(), TypeError, "cu_seqlens has dtype float32"),
        ("starts", lambda x: x.bool(), TypeError, "starts has dtype bool"),
        ("rows", lambda x: x[:2], ValueError, r"sequences has shape \[2\], wanted \[3\]"),
        ("kv", lambda x: x.long(), TypeError, "kv has dtype int64"),
    ],
)
def test_bad_input_is_named_and_changes_nothing(device, name, change, error, words):
    names = ("kv", "score", "ape", "state", "cu", "starts", "rows")
    args = dict(zip(names, arguments(4, True, device), strict=True))
    before = args["state"].clone()
    state = args["state"]
    args[name] = change(args[name])
    with pytest.raises(error, match=words):
        compressor_update(*args.values(), overlap=True)
    assert_bitwise(state, before)


@given(
    st.lists(st.sampled_from([0, 0, 1, 5]), min_size=1, max_size=4),
    st.data(),
    st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from(["cu_seqlens", "starts", "sequences"]),
)
@example([1], None, torch.int64, "sequences")
def test_numbers_out_of_range_raise_on_the_cpu(lengths, data, dtype, name):
    """Only entries with tokens are checked; others may be anything."""
    count, tokens = len(lengths), sum(lengths)
    kv, score, ape = (x.float() for x in inputs(0, tokens, 4, False, 2))
    state = empty_state(count, 4, False, 2, torch.float32)
    cu = torch.tensor([0, *lengths]).cumsum(0).to(dtype)
    busy = [b for b in range(count) if lengths[b]]
    starts, rows = (torch.full((count,), 99, dtype=dtype) for _ in range(2))
    for b in busy:
        starts[b], rows[b] = 3, b
    given_numbers = {"cu_seqlens": cu, "starts": starts, "sequences": rows}
    tensors = (kv, score, ape, state.clone(), *given_numbers.values())
    compressor_update(*tensors, overlap=False)
    if name == "cu_seqlens":
        position, bad, expected = count, tokens + 1, f"from 0 on, below {tokens + 1}"
    elif not busy:
        return
    else:
        position = busy[-1] if data is None else data.draw(st.sampled_from(busy))
        past = (count, f"below {count}")
        bad, expected = {"starts": (-1, "from 0 on"), "sequences": past}[name]
    given_numbers[name][position] = bad
    before = state.clone()
    words = rf"compressor_update: {name}\[{position}\] is {bad}, wanted {expected}"
    with pytest.raises(IndexError, match=words):
        compressor_update(kv, score, ape, state, *given_numbers.values(), overlap=False)
    assert_bitwise(state, before)


@given(data=st.data())
def test_a_state_that_overlaps_is_refused(data):
    kv, score, ape, state, *numbers = arguments(4, True, "cpu")
    state = data.draw(overlapping(state))
    with pytest.raises(ValueError, match=r"compressor_update: state has shape .* overlap itself"):
        compressor_update(kv, score, ape, state, *numbers, overlap=True)
    assert not state.any()


def test_odd_columns_are_refused_with_overlap(device):
    kv, score, ape, state, *numbers = arguments(4, True, device)
    with pytest.raises(ValueError, match="compressor_update: kv has 3 columns, wanted an even num"):
        compressor_update(
            kv[:, :3], score[:, :3], ape[:, :3], state[..., :3].contiguous(), *numbers, overlap=True
        )


def test_bad_windows_are_named(device):
    x = torch.zeros(2, 3, 4, 6, device=device)
    with pytest.raises(ValueError, match=r"kv has shape \[\], wanted \[any, any, any, any\]"):
        pool_windows(x[0, 0, 0, 0], x[0, 0, 0, 0], overlap=True)
    with pytest.raises(ValueError, match="score has shape"):
        pool_windows(x, x[:, :2], overlap=True)
    with pytest.raises(ValueError, match="go together"):
        pool_windows(x, x, x[:, 0, :, :3], None, overlap=True)
    with pytest.raises(ValueError, match="only with overlap"):
        pool_windows(x, x, x[:, 0], x[:, 0], overlap=False)
    with pytest.raises(ValueError, match=r"previous_kv has shape \[2, 4, 6\], wanted \[2, 4, 3\]"):
        pool_windows(x, x, x[:, 0], x[:, 0], overlap=True)
    with pytest.raises(ValueError, match="kv has 5 columns, wanted an even number"):
        pool_windows(x[..., :5], x[..., :5], overlap=True)
    with pytest.raises(TypeError, match="kv has dtype int64"):
        pool_windows(x.long(), x, overlap=True)


def test_same_bits_every_time(device):
    args = arguments(4, True, device)
    first = compressor_update(*args, overlap=True)[0]
    args[3].copy_(empty_state(3, 4, True, 2, torch.float32, device))
    assert_bitwise(compressor_update(*args, overlap=True)[0], first)


@dataclass
class Ragged:
    """Arguments of a ragged batch in float32 whose sequences have states that earlier calls left.

    ``pieces`` are (state row, start, length); a row of -1 is padding.
    """

    kv: torch.Tensor
    score: torch.Tensor
    ape: torch.Tensor
    state: torch.Tensor
    cu: torch.Tensor
    starts: torch.Tensor
    rows: torch.Tensor
    overlap: bool

    @classmethod
    def make(cls, seed, kind, d, pieces, device, extra=2, spare=0):
        ratio, overlap = kind
        tokens = sum(n for *_, n in pieces) + extra
        kv, score, ape = (x.float() for x in inputs(seed, tokens, ratio, overlap, d, device))
        rows = len(pieces) + 1
        state = empty_state(rows, ratio, overlap, d, torch.float32, device, spare)
        filled = normal(seed + 3, state.shape).to(device)
        for row, start, _ in pieces:
            # What no window pools any more is poisoned.
            state[row] = torch.nan
            live = live_slots(start, ratio, overlap, spare)
            state[row, live] = filled[row, live]
        lengths = torch.tensor([0, *(n for *_, n in pieces)])
        whole = torch.tensor(pieces, dtype=torch.int64).reshape(-1, 3).to(device)
        cu = lengths.cumsum(0).to(device)
        return cls(kv, score, ape, state, cu, whole[:, 1], whole[:, 0], overlap)

    def args(self, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.kv, self.score, self.ape, state, self.cu, self.starts, self.rows)

    def update(self, dtype=torch.float32, **kwargs):
        """(state after it, pooled, positions, sequence)."""
        state = self.state.to(dtype, copy=True)
        return state, *compressor_update(*self.args(state), overlap=self.overlap, **kwargs)

    def bound(self) -> float:
        """Return how far pooled values may be off; see ``test_float32_is_within_its_budget``."""
        slots = self.ape.shape[0] * (1 + self.overlap)
        largest = max(
            float(self.kv.abs().max()), float(self.state[:, :, 0].nan_to_num(0).abs().max())
        )
        return (3 * slots + 8 + 6 * 24) * unit_roundoff(torch.float32) * largest


@st.composite
def pieces(draw: st.DrawFn, longest: int = 23):
    """Tokens of up to 5 sequences, in any order of state rows, one perhaps padding."""
    count = draw(st.integers(1, 5))
    rows = draw(st.permutations(range(count)))
    starts = [draw(st.integers(0, 40)) for _ in rows]
    lengths = [draw(st.integers(0, longest)) for _ in rows]
    if draw(st.booleans()):
        rows[draw(st.integers(0, count - 1))] = -1
    return list(zip(rows, starts, lengths, strict=True))


@settings(max_examples=25)
@given(st.sampled_from([*KINDS, (16, False), (12, True)]), seeds(), pieces(), st.integers(0, 9))
@example((4, True), 0, [(0, 7, 23), (1, 0, 9)], 8)
@example((8, False), 0, [(0, 7, 23), (1, 15, 2)], 8)
@example((8, False), 0, [(0, 7, 23), (1, 15, 2)], 9)
def test_float32_equals_the_reference(device, kind, seed, batch, spare):
    ragged = Ragged.make(seed, kind, 5, batch, device, spare=spare)
    state, pooled, positions, sequence = ragged.update()
    wanted_state, _, wanted_positions, wanted_sequence = ragged.update(backend="reference")
    assert_bitwise(positions, wanted_positions)
    assert_bitwise(sequence, wanted_sequence)
    assert_bitwise(state, wanted_state, "state")
    _, truth, *_ = ragged.update(torch.float64, backend="reference")
    assert_within_budget(pooled, truth, ragged.bound())
    assert not pooled[positions < 0].any()


# (ratio, overlap, channels, pieces): more slots or channels than one tile or one program takes.
LARGE = [
    (128, False, 40, [(0, 127, 1), (1, 200, 300), (2, 0, 129), (3, 4, 0), (4, 270, 9)]),
    (130, False, 130, [(i, 120 + i, 20) for i in range(18)]),
    (16, True, 512, [(1, 31, 1), (0, 40, 50)]),
    (4, True, 512, [(1, 3, 1), (0, 4, 1), (2, 0, 1)]),
    (4, True, 512, [(1, 3, 22), (0, 5, 4)]),
]


@pytest.mark.parametrize(
    ("ratio", "overlap", "d", "batch", "counts_as_few"),
    [
        pytest.param(
            *large, counts_as_few, marks=[pytest.mark.rarely_interpreted] if i in rarely else []
        )
        for counts_as_few, rarely in ((True, (1, 2, 4)), (False, (0, 3)))
        for i, large in enumerate(LARGE)
    ],
)
def test_large_windows_equal_the_reference(device, ratio, overlap, d, batch, counts_as_few):
    """However many rows a batch is said to have: programs share them out in two ways."""
    ragged = Ragged.make(1, (ratio, overlap), d, batch, device, spare=8)
    kernels = pytest.importorskip("dsv4.triton._lib.window_pooling")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_WARPS", 1 << 30 if counts_as_few else 0)
        state, pooled, positions, sequence = ragged.update()
    wanted_state, *_ = ragged.update(backend="reference")
    _, truth, wanted_positions, wanted_sequence = ragged.update(torch.float64, backend="reference")
    assert_bitwise(positions, wanted_positions)
    assert_bitwise(sequence, wanted_sequence)
    assert_bitwise(state, wanted_state, "state")
    assert_within_budget(pooled, truth, ragged.bound())


@settings(max_examples=10)
@given(kinds, seeds(), pieces())
def test_a_batch_larger_than_one_scan(device, kind, seed, batch):
    """Entries of the batch are looked at two at a time, here."""
    kernels = pytest.importorskip("dsv4.triton.compressor_update")
    ragged = Ragged.make(seed, kind, 5, batch, device)
    expected = ragged.update()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_SCANS", (1, 2))
        actual = ragged.update()
    for a, b in zip(actual, expected, strict=True):
        assert_bitwise(a, b)


@settings(max_examples=10)
@given(seeds(), st.sampled_from([torch.nan, torch.inf, -torch.inf]), st.booleans())
def test_a_bad_number_stays_in_its_windows_and_channel(device, seed, bad, in_score):
    ragged = Ragged.make(seed, (4, True), 6, [(0, 0, 24)], device, extra=0)
    clean = ragged.update()[1]
    (ragged.score if in_score else ragged.kv)[9, 6 * (seed % 2) + seed % 6] = bad
    dirty = ragged.update()[1]
    expected = ragged.update(backend="reference")[1]
    assert_bitwise(dirty.isfinite(), expected.isfinite())
    # Token 9 is in window 2, with its first half of columns in window 3.
    hit = torch.zeros_like(clean, dtype=torch.bool)
    hit[2 if seed % 2 else 3, seed % 6] = True
    assert_bitwise(dirty[~hit], clean[~hit])


@settings(max_examples=15)
@given(kinds, seeds(), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_float32_windows_equal_float64(device, kind, seed, given_before, dtype):
    ratio, overlap = kind
    c, d = (2 if overlap else 1), 5
    kv, score = (normal(seed + i, (2, 3, ratio, c * d)).to(dtype).to(device) for i in (0, 1))
    before = ()
    if overlap and given_before:
        before = tuple(normal(seed + i, (2, ratio, d)).to(device) for i in (2, 3))
    result = pool_windows(kv, score, *before, overlap=overlap)
    wide = (x.double() for x in (kv, score, *before))
    truth = pool_windows(*wide, overlap=overlap)
    slots = 2 * ratio if overlap else ratio
    bound = (3 * slots + 8 + 6 * 16) * unit_roundoff(torch.float32) * 8
    assert_within_budget(result, truth, bound)


class TestCompressWrite:
    PAGE = 4

    def finish(self, seed, ragged, rotated, entry_format, rope_dim, dtype=torch.float32):
        """(norm_weight, inv_freq, pages, page_table), the table with a page of -1."""
        device, rows = ragged.kv.device, ragged.state.shape[0]
        d = ragged.kv.shape[1] // (1 + ragged.overlap)
        weight = normal(seed, (d,)).to(device)
        frequencies = torch.rand(rotated // 2, generator=generator(seed)).to(device)
        columns = 18
        order = torch.randperm(rows * columns, generator=generator(seed)).view(rows, columns)
        order[1:2, 0] = -1
        size = (rows * columns, self.PAGE, d, rope_dim, entry_format)
        pages = Pages.allocate(*size, dtype=dtype, device=device)
        return weight, frequencies, pages, order.to(device)

    def parts(self, ragged, weight, frequencies, pages, table, eps, rotate_quantize, dtype, tables):
        """The composition that the operator stands for; the state after it."""
        state, pooled, positions, sequence = ragged.update(ragged.state.dtype)
        normed = rms_norm(pooled.to(dtype), weight, eps)
        cos, sin = rope_tables(positions.clamp(min=0), frequencies)
        entries = rope(normed, cos.to(tables), sin.to(tables))
        if rotate_quantize:
            entries = indexer_rotate_quantize(entries)
        numbers = positions.div(ragged.ape.shape[0], rounding_mode="floor")
        write_kv(pages, entries, entry_slots(table, pages.page_size, sequence, numbers))
        return state

    @settings(max_examples=10)
    @given(
        kinds,
        seeds(),
        pieces(),
        st.booleans(),
        st.sampled_from([torch.bfloat16, torch.float32]),
        st.sampled_from([torch.bfloat16, torch.float32]),
    )
    def test_reference_is_the_composition(self, kind, seed, batch, rotate_quantize, dtype, tables):
        ragged = Ragged.make(seed, kind, 32, batch, "cpu")
        *norm, actual, table = self.finish(seed, ragged, 10, "fp8", 12)
        expected = Pages.allocate(actual.num_pages, self.PAGE, 32, 12)
        rest = (1e-6, rotate_quantize, dtype, tables)
        state = self.parts(ragged, *norm, expected, table, *rest)
        mine = ragged.state.clone()
        compress_write(
            *ragged.args(mine),
            *norm,
            actual,
            table,
            overlap=ragged.overlap,
            rotate_quantize=rotate_quantize,
            dtype=dtype,
            table_dtype=tables,
        )
        assert_bitwise(actual.data, expected.data)
        assert_bitwise(mine, state)

    # (ratio, overlap, d, rotated dims, rope_dim of the pages, largest length)
    SIZES = ((4, True, 128, 64, 64, 23), (8, False, 100, 30, 20, 23), (4, True, 32, 32, 0, 1))

    @settings(max_examples=8)
    @given(st.sampled_from([*SIZES, (3, True, 70, 10, 24, 9), (16, False, 40, 0, 40, 40)]), seeds())
    def test_entries_and_their_bytes(self, device, size, seed):
        """Float32 entries within the budget of float64; bytes of exactly those entries."""
        ratio, overlap, d, rotated, rope_dim, longest = size
        lengths = torch.randint(0, longest + 1, (4,), generator=generator(seed)).tolist()
        starts = torch.randint(0, 40, (4,), generator=generator(seed + 1)).tolist()
        batch = list(zip((2, 0, -1, 1), starts, lengths, strict=True))
        ragged = Ragged.make(seed, (ratio, overlap), d, batch, device)
        *norm, pages, table = self.finish(seed, ragged, rotated, "plain", rope_dim)
        kwargs = {"overlap": overlap, "dtype": torch.float32}
        state = ragged.state.clone()
        compress_write(*ragged.args(state), *norm, pages, table, **kwargs)
        assert_bitwise(state, ragged.update(backend="reference")[0], "state")
        slots = torch.arange(pages.num_slots, device=device)
        entries = read_kv(pages, slots, torch.float32)
        truth, budget = self.oracle(ragged, norm, table, pages)
        assert_bitwise(entries.any(1), truth.any(1), "written")
        assert_within_budget(entries, truth, budget)
        stored, expected = (
            Pages.allocate(pages.num_pages, self.PAGE, d, rope_dim, device=device) for _ in range(2)
        )
        compress_write(*ragged.args(ragged.state.clone()), *norm, stored, table, **kwargs)
        write_kv(expected, entries, torch.where(entries.any(1), slots, -1), backend="reference")
        assert_bitwise(stored.data, expected.data, "bytes")

    def oracle(self, ragged, norm, table, pages):
        """Entries of every slot in float64, and how far float32 may be off."""
        weight, frequencies = norm
        _, pooled, positions, sequence = ragged.update(torch.float64, backend="reference")
        rms = pooled.square().mean(-1, keepdim=True).add(1e-6).sqrt()
        u = unit_roundoff(torch.float32)
        d = pooled.shape[1]
        # The norm passes an error on twice, directly and through the root mean square, and adds
        # its own (see test_norm); a rotation mixes two numbers, with tables off by 2^-23 each.
        off = 2.2 * ragged.bound() + (d / 2 + 8) * u * pooled.abs().amax(-1, keepdim=True)
        off = weight.double().abs().max() * off / rms
        cos, sin = rope_tables(positions.clamp(min=0), frequencies)
        truth = rope(weight.double() * pooled / rms, cos.double(), sin.double())
        off = 1.5 * off + 2.0**-21 * truth.abs().amax(-1, keepdim=True)
        numbers = positions.div(ragged.ape.shape[0], rounding_mode="floor")
        slots = entry_slots(table, self.PAGE, sequence, numbers)
        every, budget = (truth.new_zeros(pages.num_slots, d) for _ in range(2))
        live = slots >= 0
        every[slots[live]], budget[slots[live]] = truth[live], off[live].expand(-1, d)
        return every, budget

    @settings(max_examples=6)
    @given(st.sampled_from(SIZES), seeds(), st.sampled_from([torch.bfloat16, torch.float32]))
    def test_the_indexer_keys_are_rotated_and_rounded_entries(self, device, size, seed, dtype):
        """The result is ``indexer_rotate_quantize`` of what the operator stores without it."""
        ratio, overlap, d, rotated, rope_dim, longest = size
        d = 64 if d == 100 else d
        batch = [(1, 5, longest), (0, 3, 1), (2, 0, min(4, longest))]
        ragged = Ragged.make(seed, (ratio, overlap), d, batch, device)
        *norm, keys, table = self.finish(seed, ragged, rotated, "plain", rope_dim)
        *_, plain, _ = self.finish(seed, ragged, rotated, "plain", rope_dim)
        for pages, rotate in ((keys, True), (plain, False)):
            compress_write(
                *ragged.args(ragged.state.clone()),
                *norm,
                pages,
                table,
                overlap=overlap,
                rotate_quantize=rotate,
                dtype=dtype,
            )
        expected = indexer_rotate_quantize(plain.data.to(dtype), backend="reference")
        assert_bitwise(keys.data, expected.float())

    @pytest.mark.parametrize("entry_format", COMPACT_FORMATS)
    @settings(max_examples=6)
    @given(
        st.sampled_from([*SIZES[::2], (3, True, 96, 10, 24, 9), (16, False, 64, 16, 0, 40)]),
        seeds(),
        st.sampled_from([torch.bfloat16, torch.float32]),
        st.booleans(),
    )
    def test_compact_index_keys_are_codes_of_entries(
        self, device, entry_format, size, seed, dtype, rotate
    ):
        """Bytes of what the operator stores plainly, transformed if asked, as ``write_kv`` codes
        it; in MXFP4 the values of plain keys."""
        ratio, overlap, d, rotated, rope_dim, longest = size
        rotate = rotate and d & (d - 1) == 0
        batch = [(1, 5, longest), (0, 3, 1), (2, 0, min(4, longest))]
        ragged = Ragged.make(seed, (ratio, overlap), d, batch, device)
        kwargs = {"overlap": overlap, "dtype": dtype}
        *norm, plain, table = self.finish(seed, ragged, rotated, "plain", rope_dim)
        *_, keys, _ = self.finish(seed, ragged, rotated, entry_format, rope_dim)
        *_, expected, _ = self.finish(seed, ragged, rotated, entry_format, rope_dim)
        state = ragged.state.clone()
        compress_write(*ragged.args(state), *norm, keys, table, rotate_quantize=rotate, **kwargs)
        assert_bitwise(state, ragged.update(backend="reference")[0])
        compress_write(*ragged.args(ragged.state.clone()), *norm, plain, table, **kwargs)
        slots = torch.arange(plain.num_slots, device=device)
        entries = read_kv(plain, slots, dtype)
        written = torch.where(entries.any(1), slots, -1)
        rotated = indexer.rotated(entries) if rotate else entries
        write_kv(expected, rotated, written, backend="reference")
        if device.type == "cuda":
            # The kernels may add the squares of a row in another order: the next code is right too.
            actual, other = (read_kv(p, slots, torch.float32) for p in (keys, expected))
            step = other.abs().amax(-1, keepdim=True) * (2.0**-3 if "fp8" in entry_format else 0.5)
            assert_within_budget(actual, other.double(), step.double().expand_as(other))
            return
        assert_bitwise(keys.data, expected.data)
        if rotate and entry_format == "index_mxfp4":
            rounded = indexer_rotate_quantize(entries, backend="reference")
            assert_bitwise(read_kv(keys, slots, dtype, backend="reference"), rounded)

    def test_compact_pages_at_odd_addresses(self, device):
        """FP8 scales need their alignment: left to the reference."""
        ragged = Ragged.make(0, (4, True), 32, [(0, 3, 9)], device)
        *norm, keys, table = self.finish(0, ragged, 8, "index_fp8", 0)
        memory = torch.zeros(keys.data.numel() + 1, dtype=torch.uint8, device=device)
        odd = Pages(memory[1:].view_as(keys.data), self.PAGE, "index_fp8", 32, 0)
        for pages in (keys, odd):
            compress_write(*ragged.args(ragged.state.clone()), *norm, pages, table, overlap=True)
        assert bool(keys.data.any())
        assert_bitwise(odd.data, keys.data)

    @pytest.mark.slow
    @pytest.mark.parametrize("entry_format", ["fp8", "plain", "index_fp8", "index_mxfp4"])
    def test_offsets_past_two_gigabytes(self, device, entry_format):
        """The bytes that they are in a small pool; on a CPU the rest of it is never touched."""
        ragged = Ragged.make(0, (4, True), 32, [(0, 3, 9), (1, 0, 5)], device)
        rope_dim = 8 if entry_format == "fp8" else 0
        *norm, near, table = self.finish(0, ragged, 8, entry_format, rope_dim)
        first = 2**31 // near.page_bytes() + 1
        size = (first + near.num_pages, self.PAGE, 32, rope_dim)
        options = {"entry_format": entry_format, "dtype": torch.float32, "device": device}
        far = large_pages.allocate(*size, **options)
        there = torch.where(table < 0, -1, table + first)
        compress_write(*ragged.args(ragged.state.clone()), *norm, near, table, overlap=True)
        compress_write(*ragged.args(ragged.state.clone()), *norm, far, there, overlap=True)
        assert near.data.any()
        assert_bitwise(far.data[first:], near.data)

    @pytest.mark.parametrize("tables", [torch.float32, torch.bfloat16])
    def test_far_positions_turn_by_their_true_angle(self, device, tables):
        """A position of a million at frequency 1; the reference's tables round the same angle."""
        ragged = Ragged.make(0, (4, True), 32, [(0, 1_000_003, 1), (1, 999_999, 1)], device, 0)
        weight, _, _, _ = self.finish(0, ragged, 32, "plain", 0)
        frequencies = torch.tensor([1.0, 0.9999, 0.5, 0.013], device=device)
        table = torch.full((3, 250_001), -1, dtype=torch.int32, device=device)
        table[0, 250_000], table[1, 249_999] = 0, 1
        stored = []
        for backend in ("auto", "reference"):
            pages = Pages.allocate(2, 1, 32, 0, "plain", torch.float32, device)
            compress_write(
                *ragged.args(ragged.state.clone()),
                weight,
                frequencies,
                pages,
                table,
                overlap=True,
                dtype=torch.float32,
                table_dtype=tables,
                backend=backend,
            )
            stored.append(pages.data)
        assert bool(stored[1].any(-1).all())
        # Tables off by 2^-23, which may tip the rounding of one of them.
        tipped = 2.0**-8 if tables == torch.bfloat16 else 0.0
        assert_within_budget(stored[0], stored[1].double(), 8 * (2.0**-20 + tipped))

    def test_a_bad_sequence_stays_alone(self, device):
        ragged = Ragged.make(0, (4, True), 32, [(0, 3, 1), (1, 7, 6), (2, 3, 1)], device)
        *norm, clean, table = self.finish(0, ragged, 8, "plain", 8)
        *_, dirty, _ = self.finish(0, ragged, 8, "plain", 8)
        table[1, 0] = table.max() - 1
        compress_write(*ragged.args(ragged.state.clone()), *norm, clean, table, overlap=True)
        ragged.kv[2, 5] = torch.nan
        compress_write(*ragged.args(ragged.state.clone()), *norm, dirty, table, overlap=True)
        is_clean = ~dirty.data.isnan().any(-1)
        assert_bitwise(dirty.data[is_clean], clean.data[is_clean])
        pages = (~is_clean).any(1).nonzero().flatten()
        assert set(pages.tolist()) <= set(table[1].tolist())

    def test_nothing_to_do(self, device):
        none = torch.zeros(0, dtype=torch.int64, device=device)
        for batch, num_pages in (([], 2), ([(0, 3, 0)], 2), ([(0, 3, 1)], 0)):
            ragged = Ragged.make(0, (4, True), 6, batch, device, 0)
            *norm, _, table = self.finish(0, ragged, 2, "plain", 2)
            if not batch:
                table = none.view(0, 0)
            if not num_pages:
                table = torch.full_like(table, -1)
            pages = Pages.allocate(num_pages, 2, 6, 2, device=device)
            state = ragged.state.clone()
            compress_write(*ragged.args(state), *norm, pages, table, overlap=True)
            assert not pages.data.any()
            expected = ragged.update(backend="reference")[0]
            assert_bitwise(state, expected)

    def test_a_table_that_is_too_short(self, device):
        """Entries past it are skipped; the state goes on."""
        ragged = Ragged.make(0, (4, True), 6, [(0, 0, 13)], device, 0)
        *norm, _, _ = self.finish(0, ragged, 2, "plain", 2)
        pages = Pages.allocate(3, 1, 6, 2, "plain", torch.float32, device)
        table = torch.tensor([[2, 1]], device=device)
        state = ragged.state.clone()
        compress_write(*ragged.args(state), *norm, pages, table, overlap=True)
        assert pages.data.any(-1).flatten().tolist() == [False, True, True]
        assert_bitwise(state, ragged.update(backend="reference")[0])

    @settings(max_examples=5)
    @given(seeds())
    def test_strided_input_and_int32(self, device, seed):
        ragged = Ragged.make(seed, (4, True), 32, [(0, 3, 1), (1, 0, 9)], device)
        *norm, plain, table = self.finish(seed, ragged, 8, "fp8", 8)
        *_, gaps, _ = self.finish(seed, ragged, 8, "fp8", 8)
        states = ragged.state.clone(), ragged.state.clone()
        compress_write(*ragged.args(states[0]), *norm, plain, table, overlap=True)
        kv, score, ape, state, cu, starts, rows = ragged.args(states[1])
        product = torch.cat((kv, torch.full_like(kv, torch.nan), score), 1)
        views = (product[:, :64], product[:, 128:], strided(ape))
        index = (strided(cu), starts.int(), rows.int())
        gapped = (strided(x) for x in (*norm,))
        compress_write(*views, state, *index, *gapped, gaps, strided(table), overlap=True)
        assert_bitwise(gaps.data, plain.data)
        assert_bitwise(states[1], states[0])

    @pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (16, False)])
    def test_same_bits_every_time(self, device, ratio, overlap):
        ragged = Ragged.make(0, (ratio, overlap), 32, [(0, 15, 1), (1, 3, 40)], device)
        *norm, pages, table = self.finish(0, ragged, 8, "fp8", 8)
        results = []
        for _ in range(3):
            pages.data.zero_()
            state = ragged.state.clone()
            compress_write(*ragged.args(state), *norm, pages, table, overlap=overlap)
            results.append((pages.data.clone(), state))
        for data, state in results[1:]:
            assert_bitwise(data, results[0][0])
            assert_bitwise(state, results[0][1])

    @pytest.mark.rarely_interpreted
    @pytest.mark.parametrize("entry_format", ["fp8", *COMPACT_FORMATS])
    def test_opcheck(self, device, entry_format):
        ragged = Ragged.make(0, (4, True), 32, [(0, 3, 1), (1, 0, 9)], device)
        *norm, pages, table = self.finish(0, ragged, 8, entry_format, 8)
        fields = (pages.data, pages.page_size, pages.entry_format, 32, 8)
        rest = (True, 1e-6, False, torch.bfloat16, torch.float32, "auto")
        args = (*ragged.args(ragged.state), *norm, *fields, table, *rest)
        torch.library.opcheck(torch.ops.dsv4.compress_write.default, args, test_utils=_TESTS)

    @pytest.mark.rarely_interpreted
    @pytest.mark.parametrize("entry_format", ["fp8", *COMPACT_FORMATS])
    def test_compiles_whole(self, device, entry_format):
        ragged = Ragged.make(0, (4, True), 32, [(0, 3, 1), (1, 0, 9)], device)
        *norm, expected, table = self.finish(0, ragged, 8, entry_format, 8)
        *_, actual, _ = self.finish(0, ragged, 8, entry_format, 8)
        states = ragged.state.clone(), ragged.state.clone()
        compress_write(*ragged.args(states[0]), *norm, expected, table, overlap=True)
        compiled = torch.compile(compress_write, fullgraph=True, backend="aot_eager")
        compiled(*ragged.args(states[1]), *norm, actual, table, overlap=True)
        assert_bitwise(actual.data, expected.data)
        assert_bitwise(states[1], states[0])

    @pytest.mark.parametrize(
        ("name", "change", "error", "words"),
        [
            ("kv", lambda x: x[0], ValueError, "kv has shape"),
            ("norm_weight", lambda x: x[:5], ValueError, r"norm_weight has shape \[5\], wanted"),
            ("inv_freq", lambda x: x.double(), TypeError, "inv_freq has dtype float64"),
            ("inv_freq", lambda x: x.repeat(9), ValueError, "R <= 32"),
            ("page_table", lambda x: x[0], ValueError, "page_table has shape"),
            ("page_table", lambda x: x.float(), TypeError, "page_table has dtype float32"),
            ("dtype", lambda x: torch.float16, TypeError, "dtype is torch.float16"),
            ("table_dtype", lambda x: torch.int8, TypeError, "table_dtype is torch.int8"),
            ("pages", lambda x: Pages.allocate(2, 4, 16, 8), ValueError, "head_dim 16, wanted 32"),
        ],
    )
    def test_bad_input_is_named_and_changes_nothing(self, name, change, error, words):
        ragged = Ragged.make(0, (4, True), 32, [(0, 3, 1), (1, 0, 9)], "cpu")
        weight, frequencies, pages, table = self.finish(0, ragged, 8, "fp8", 8)
        state = ragged.state.clone()
        names = ("kv", "score", "ape", "state", "cu_seqlens", "starts", "sequences")
        args = dict(zip(names, ragged.args(state), strict=True))
        args |= {"norm_weight": weight, "inv_freq": frequencies, "pages": pages}
        args |= {"page_table": table, "dtype": torch.bfloat16, "table_dtype": torch.float32}
        args[name] = change(args[name])
        with pytest.raises(error, match=words):
            compress_write(**args, overlap=True)
        assert not pages.data.any()
        assert_bitwise(state, ragged.state)

    @settings(max_examples=20)
    @given(pieces(), seeds(), st.data())
    @example([(0, 4, 1), (1, 3, 1)], 0, None)
    def test_only_pages_of_entries_that_close_have_to_be_there(self, batch, seed, data):
        """Others may be any number. On the CPU the first that lies past raises."""
        ragged = Ragged.make(0, (4, True), 32, batch, "cpu")
        *norm, pages, table = self.finish(seed, ragged, 8, "plain", 8)
        closing = {
            (row, window // self.PAGE)
            for row, start, length in batch
            for window in range(start // 4, (start + length) // 4)
            if row >= 0 and length and window // self.PAGE < table.shape[1]
        }
        junk = torch.full_like(table, pages.num_pages)
        for position in closing:
            junk[position] = table[position]
        states = ragged.state.clone(), ragged.state.clone()
        other = replace(pages, data=pages.data.clone())
        compress_write(*ragged.args(states[0]), *norm, pages, table, overlap=True)
        compress_write(*ragged.args(states[1]), *norm, other, junk, overlap=True)
        assert_bitwise(other.data, pages.data)
        assert_bitwise(states[1], states[0])
        if not closing:
            return
        positions = sorted(closing)
        position = positions[0] if data is None else data.draw(st.sampled_from(positions))
        junk[position] = pages.num_pages
        entry = ragged.rows.tolist().index(position[0])
        words = (
            rf"page_table\[sequences\]\[{entry}, {position[1]}\] is {pages.num_pages}, wanted below"
        )
        with pytest.raises(IndexError, match=f"compress_write: {words} {pages.num_pages}"):
            compress_write(*ragged.args(states[1]), *norm, other, junk, overlap=True)
        assert_bitwise(other.data, pages.data)
        assert_bitwise(states[1], states[0])

    def test_rows_past_the_table_raise_on_the_cpu(self):
        ragged = Ragged.make(0, (4, True), 32, [(0, 3, 1), (1, 0, 9)], "cpu")
        *norm, pages, table = self.finish(0, ragged, 8, "fp8", 8)
        state = ragged.state.clone()
        with pytest.raises(
            IndexError, match=r"compress_write: sequences\[1\] is 1, wanted below 1"
        ):
            compress_write(*ragged.args(state), *norm, pages, table[:1], overlap=True)
        assert not pages.data.any()
        assert_bitwise(state, ragged.state)

    @given(data=st.data(), entry_format=st.sampled_from(["plain", "fp8", *COMPACT_FORMATS]))
    def test_pages_or_a_state_that_overlap_are_refused(self, data, entry_format):
        ragged = Ragged.make(0, (4, True), 32, [(0, 3, 1), (1, 0, 9)], "cpu")
        *norm, pages, table = self.finish(0, ragged, 8, entry_format, 8)
        bad = replace(pages, data=data.draw(overlapping(pages.data)))
        with pytest.raises(ValueError, match=r"pages\.data has shape .* overlap itself"):
            compress_write(*ragged.args(ragged.state.clone()), *norm, bad, table, overlap=True)
        state = data.draw(overlapping(ragged.state))
        with pytest.raises(ValueError, match=r"compress_write: state has shape .* overlap itself"):
            compress_write(*ragged.args(state), *norm, pages, table, overlap=True)
        assert not pages.data.any()
        assert not bad.data.any()

    def test_fp4_needs_a_power_of_two(self):
        ragged = Ragged.make(0, (4, True), 40, [(0, 3, 1)], "cpu")
        *norm, pages, table = self.finish(0, ragged, 8, "plain", 8)
        with pytest.raises(ValueError, match="entries have 40 dims, wanted a power of two >= 32"):
            compress_write(
                *ragged.args(ragged.state),
                *norm,
                pages,
                table,
                overlap=True,
                rotate_quantize=True,
            )

    @pytest.mark.gpu
    @pytest.mark.parametrize("kind", [(4, True), (128, False)])
    def test_a_captured_graph_follows_its_inputs(self, kind):
        """One token each of five sequences, at positions where other windows close each time."""
        ratio, overlap = kind
        made = [
            Ragged.make(
                seed,
                kind,
                128,
                [(row, 128 * row + (seed + row * (seed % 2)) % ratio, 1) for row in range(5)],
                "cuda",
            )
            for seed in (ratio - 1, 1, 2, 2 * ratio - 1)
        ]
        *norm, pages, table = self.finish(0, made[0], 64, "fp8", 64)
        table = torch.arange(6 * 200, device="cuda").view(6, 200)
        pages = Pages.allocate(1200, self.PAGE, 128, 64, device="cuda")
        buffers = Ragged.make(9, kind, 128, [(row, 9, 1) for row in range(5)], "cuda")

        def run():
            compress_write(*buffers.args(buffers.state), *norm, pages, table, overlap=overlap)

        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        for ragged in made:
            for name in ("kv", "score", "ape", "starts", "rows", "cu", "state"):
                getattr(buffers, name).copy_(getattr(ragged, name))
            pages.data.fill_(0xA5)
            graph.replay()
            replayed = pages.data.clone(), buffers.state.clone()
            buffers.state.copy_(ragged.state)
            pages.data.fill_(0xA5)
            run()
            assert_bitwise(replayed[0], pages.data)
            assert_bitwise(replayed[1], buffers.state)
            assert_bitwise(buffers.state, ragged.update(backend="reference")[0])
