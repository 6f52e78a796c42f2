"""Tokens that were taken back were never there: for every layer type, in rings and in pools."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.config import CSA, HCA, ModelConfig
from dsv4.kv_cache import layer_cache
from dsv4.kv_cache.paged_cache import Batch, CacheFullError, PagedCache
from dsv4.kv_cache.row_counts import OpenStep, RowCount
from dsv4.testing.assertions import assert_bitwise
from tests.kv_cache.attention_stack import Stack, shuffled, small, tokens

MOST = 8
POOLS = [{}, {"pool_tokens": 16000, "window_pages": 120}]


def published(**changes: object) -> ModelConfig:
    return small(sliding_window=128, compress_rates={CSA: 4, HCA: 128}, **changes)


def wrong(count: int, config: ModelConfig) -> torch.Tensor:
    """Hidden states that leave NaN in whatever reads them."""
    return torch.full((count, config.hidden_size), torch.nan, dtype=torch.float64)


def verify(
    stack: Stack,
    cache: PagedCache,
    rows: Sequence[int],
    pieces: Sequence[torch.Tensor],
    accepted: Sequence[int],
) -> list[torch.Tensor]:
    """A step of which the device keeps some tokens; the host is not told."""
    lengths = [len(piece) for piece in pieces]
    cache.prepare(rows, lengths, certain=[max(0, n - MOST) for n in lengths])
    there = torch.tensor(rows)
    batch = Batch.from_lengths(lengths, cache.lengths[there], there)
    hidden = torch.cat(list(pieces))
    return list(stack.run(hidden, cache, batch, torch.tensor(accepted)).split(lengths))


# Windows, states and pages at their borders: a row for each number of tokens before the guess.
OFFSETS = (0, 1, 2, 3, 4, 5, 7, 55, 56, 60, 62, 63, 64, 119, 120, 123, 126, 127, 128, 129, 135, 136,
           183, 190, 191, 192, 193, 247, 255, 256)  # fmt: skip


@pytest.mark.parametrize("sizes", POOLS, ids=["rings", "pools"])
@pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
def test_at_every_border_it_is_as_if_never_stepped(sizes: dict, numerics: str) -> None:
    """Eight wrong tokens, taken back, and then nine right ones, of which five are taken back."""
    config = published(numerics=numerics)
    stack = Stack(config, 1)
    out = []
    for guesses in (True, False):
        cache = shuffled(stack.cache(len(OFFSETS), 280, max_chunk=256, **sizes), 1)
        rows = [cache.allocate() for _ in OFFSETS]
        stack.step(cache, rows, [tokens(i, n, config) for i, n in enumerate(OFFSETS)])
        if guesses:
            stack.step(cache, rows, [wrong(MOST, config)] * len(rows))
            cache.roll_back(rows, OFFSETS)
        assert cache.lengths.tolist() == list(OFFSETS)
        steps = []
        for more, accepted in ((9, 4), (1, 1), (3, 3), (1, 1)):
            pieces = [tokens(50 * more + i, more, config) for i in rows]
            steps.append(torch.cat(stack.step(cache, rows, pieces)))
            now = [int(n) - more + accepted for n in cache.lengths]
            cache.roll_back(rows, now)
        out.append(steps)
    for actual, expected in zip(*out, strict=True):
        assert_bitwise(actual, expected)


@st.composite
def stories(draw: st.DrawFn):
    """Prompts of some rows, then rounds of (guessed, accepted) for each, perhaps a fork between."""
    count = draw(st.integers(1, 3))
    prompts = draw(st.lists(st.integers(0, 20), min_size=count, max_size=count))
    rounds = []
    for _ in range(draw(st.integers(2, 5))):
        guessed = [draw(st.integers(1, MOST + 1)) for _ in range(count)]
        rounds.append([(n, draw(st.integers(max(0, n - MOST), n))) for n in guessed])
    return prompts, rounds, draw(st.integers(0, len(rounds) - 1))


@pytest.mark.costly(2)
@settings(max_examples=15)
@given(st.booleans(), stories(), st.integers(0, 99))
def test_rejected_guesses_leave_nothing(pooled: bool, story: tuple, seed: int) -> None:
    """Three ways with the same bits, in pages of 4 and 2 entries, and the values of no cache.

    Wrong tokens are NaN and the host takes them back; they are others; or the device takes them
    back, and the host hears of it a step later.
    """
    prompts, rounds, forked_at = story
    sizes = {"pool_tokens": 300, "window_pages": 40} if pooled else {}
    with mock.patch.multiple(layer_cache, WINDOW_PAGE=4, BLOCK=16):
        stack = Stack(small(compress_rates={CSA: 4, HCA: 8}), 1)
        config, count = stack.config, len(prompts)
        caches = [
            shuffled(stack.cache(count + 1, 80, max_chunk=21, **sizes), seed + i) for i in range(3)
        ]
        seen = [tokens(seed + i, n, config) for i, n in enumerate(prompts)]
        rows = list(range(count))
        for cache in caches:
            assert [cache.allocate() for _ in rows] == rows
            stack.step(cache, rows, seen)
        late: dict[int, int] = {}
        for number, step in enumerate(rounds):
            right = [tokens(1000 * number + i, n, config) for i, (n, _) in enumerate(step)]
            accepted = [a for _, a in step]
            bad, other = [], []
            for x, a in zip(right, accepted, strict=True):
                bad.append(torch.cat((x[:a], wrong(len(x) - a, config))))
                other.append(torch.cat((x[:a], x[a:].flip(1))))
            seen = [torch.cat((x, y[:a])) for x, y, a in zip(seen, right, accepted, strict=True)]
            lengths = [len(x) for x in seen]
            outs = [stack.step(caches[0], rows, bad), stack.step(caches[1], rows, other)]
            for cache in caches[:2]:
                cache.roll_back(rows, lengths)
            outs.append(verify(stack, caches[2], rows, other, accepted))
            caches[2].confirm(list(late), list(late.values()))
            late = {row: lengths[row] for row in rows if caches[2]._counts[row].open}
            for cache in caches:
                assert cache.lengths[:count].tolist() == lengths
            for row, a in enumerate(accepted):
                for out in outs[1:]:
                    assert_bitwise(out[row][:a], outs[0][row][:a])
                if a:
                    whole = stack.whole(seen[row])[-a:]
                    assert float((outs[0][row][:a] - whole).abs().max()) < 1e-10
            if number == forked_at and count < 4:
                check_fork(stack, caches[:2], seen[0], seed)


def check_fork(stack: Stack, caches: list[PagedCache], seen: torch.Tensor, seed: int) -> None:
    """A fork of row 0 right after a rejection goes on alone, and takes tokens back alone."""
    more = tokens(seed + 77, 4, stack.config)
    for cache in caches:
        row = cache.fork(0)
        stack.step(cache, [row], [more.flip(0)])
        cache.roll_back([row], [len(seen)])
        (out,) = stack.step(cache, [row], [more])
        whole = stack.whole(torch.cat((seen, more)))[-4:]
        assert float((out - whole).abs().max()) < 1e-10
        cache.free(row)


@pytest.mark.parametrize("sizes", POOLS, ids=["rings", "pools"])
@pytest.mark.parametrize("limit", [64, 129, 200])
def test_guesses_beyond_the_last_position_harm_nobody(sizes: dict, limit: int) -> None:
    """The captured step has one size: near ``max_tokens`` its last tokens are never kept."""
    stack = Stack(published(), 2)
    x = tokens(1, limit, stack.config)
    cache = stack.cache(1, limit, max_chunk=limit, **sizes)
    row = cache.allocate()
    stack.step(cache, [row], [x[: limit - 3]])
    out = []
    for at in (limit - 3, limit - 2, limit - 1):
        piece = torch.cat((x[at : at + 1], wrong(MOST, stack.config)))
        out.append(verify(stack, cache, [row], [piece], [1])[0][:1])
        cache.confirm([row], [at + 1])
    assert float((torch.cat(out) - stack.whole(x)[-3:]).abs().max()) < 1e-10
    with pytest.raises(ValueError, match=f"would reach {limit} . 1 tokens, wanted at most"):
        cache.prepare([row], [9], certain=[1])


def test_what_cannot_be_taken_back_is_named() -> None:
    config = published()
    stack = Stack(config, 0)
    ring, pool = stack.cache(2, 300), stack.cache(2, 300, pool_tokens=600)
    for cache in (ring, pool):
        assert cache.rollback == MOST
        row = cache.allocate()
        stack.step(cache, [row], [tokens(0, 20, config)])
        for row_and_length, words in (
            (([0], [21]), "sequence 0 to 21 tokens, wanted 12 to 20: it has 20 tokens"),
            (([0], [11]), r"to 11 tokens, .*had 20, of which rollback \(8\) can be taken back"),
            (([1], [0]), "sequence is 1, wanted one that is allocated"),
            (([0, 0], [19, 19]), r"sequences are \[0, 0\], wanted distinct ones"),
            (([0], [19, 19]), "1 sequences and 2 lengths, wanted as many"),
        ):
            with pytest.raises(ValueError, match=words):
                cache.roll_back(*row_and_length)
        cache.roll_back([0], [15])
        with pytest.raises(ValueError, match=r"sequence 0 to 11 tokens, wanted 12 to 15: .*had 20"):
            cache.roll_back([0], [11])
        cache.roll_back([0], [12])
        cache.roll_back([], [])
        assert cache.lengths.tolist() == [12, 0]
        for least, words in ((0, r"certain\[0\] is 0, wanted 1 to 9: 9 new tokens"), (10, "is 10")):
            with pytest.raises(ValueError, match=words):
                cache.prepare([0], [9], certain=[least])
        with pytest.raises(ValueError, match="1 lengths and 2 certain"):
            cache.prepare([0], [9], certain=[9, 9])
        with pytest.raises(ValueError, match="sequence 0 has no open step"):
            cache.confirm([0], [12])
        cache.prepare([0], [5], certain=[1])
        with pytest.raises(ValueError, match="sequence 0 has 18 tokens, wanted 13 to 17"):
            cache.confirm([0], [18])
    with pytest.raises(ValueError, match="has steps of which the host does not know"):
        pool.roll_back([0], [13])
    pool.confirm([0], [14])
    for _ in range(2):
        pool.prepare([0], [1])
    with pytest.raises(
        ValueError, match=r"to 14 tokens, wanted 15 to 16: .*gave window pages back"
    ):
        pool.roll_back([0], [14])
    with pytest.raises(ValueError, match="rollback is -1, wanted >= 0"):
        stack.cache(1, 10, rollback=-1)
    with pytest.raises(TypeError, match="rollback is True, wanted an int"):
        stack.cache(1, 10, rollback=True)


def test_starts_confirm_open_steps() -> None:
    stack = Stack(published(), 0)
    cache = stack.cache(1, 300, pool_tokens=300)
    row = cache.allocate()
    cache.prepare([row], [9], certain=[1])
    cache.prepare([row], [9], certain=[1])
    assert cache._counts[row] == RowCount(2, 18, 0, 1, (OpenStep(1, 9), OpenStep(1, 9)))
    assert cache._counts[row].written == 18
    for start in (1, 19):
        with pytest.raises(ValueError, match=rf"starts\[0\] is {start}, wanted 18"):
            cache.prepare([row], [1], [start])
    cache.prepare([row], [1], [7])
    assert (cache._counts[row].low, cache._counts[row].high) == (8, 8)


def test_pages_of_guesses_are_reserved_and_a_full_pool_changes_nothing() -> None:
    """Two steps in flight may reach a page more than the confirmed tokens need."""
    config = published()
    stack = Stack(config, 0)
    cache = stack.cache(1, 600, pool_tokens=256, max_chunk=250)
    row = cache.allocate()
    stack.step(cache, [row], [tokens(0, 240, config)])
    cache.prepare([row], [9], certain=[1])
    before = cache._counts[row]
    cache.prepare([row], [9], certain=[1])
    assert cache.undo()
    assert (cache._counts[row].low, cache._counts[row].high) == (before.low, before.high)
    cache.prepare([row], [9], certain=[1])
    with pytest.raises(CacheFullError, match="compressed"):
        cache.prepare([row], [9], certain=[1])
    cache.confirm([row], [241])
    cache.prepare([row], [5], certain=[1])


def test_a_captured_length_is_the_eager_one() -> None:
    """``advance`` with ``accepted`` reads nothing on the host: tensors without values do."""
    cache = Stack(published(), 0).cache(3, 300)
    lengths = cache.lengths
    with torch.device("meta"):
        cache.lengths, cache._tops = lengths.to("meta"), lengths.to("meta")
        numbers = torch.zeros(3, dtype=torch.int64)
        batch = Batch(torch.zeros(4, dtype=torch.int64), numbers, numbers, numbers, numbers)
        cache.advance(batch, numbers)


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
def test_a_captured_verification_is_the_eager_one(numerics: str) -> None:
    """One graph of 9 tokens for all steps; the device says how many are accepted, bit for bit."""
    config = published(
        numerics=numerics, hidden_size=128, head_dim=512, qk_rope_head_dim=64,
        num_attention_heads=16, index_head_dim=128, q_lora_rank=64, o_groups=2,
    )  # fmt: skip
    stack, count = Stack(config, 5, torch.bfloat16).cuda(), 4
    rows = torch.arange(count, device="cuda")
    lengths = [0, 60, 119, 255]
    runs = []
    for captured in (False, True):
        cache = stack.cache(count, 400, max_chunk=256, pool_tokens=2048, window_pages=40)
        prompts = [tokens(i, n, config).cuda().bfloat16() for i, n in enumerate(lengths)]
        stack.step(cache, [cache.allocate() for _ in lengths], prompts)
        hidden = torch.zeros(9 * count, 128, dtype=torch.bfloat16, device="cuda")
        accepted = torch.ones(count, dtype=torch.int64, device="cuda")

        def step(cache=cache, hidden=hidden, accepted=accepted) -> torch.Tensor:
            starts = cache.lengths[rows]
            batch = Batch(
                9 * torch.arange(count + 1, device="cuda"),
                starts,
                rows,
                (starts[:, None] + torch.arange(9, device="cuda")).flatten(),
                rows.repeat_interleave(9),
            )
            return stack.run(hidden, cache, batch, accepted)

        graph, outs, now = torch.cuda.CUDAGraph(), [], list(lengths)
        for number in range(12):
            cache.prepare(range(count), [9] * count, certain=[1] * count)
            hidden.copy_(tokens(100 + number, 9 * count, config))
            accepted.copy_(torch.tensor([(number * k) % 9 + 1 for k in range(1, count + 1)]))
            if captured and number == 1:
                with torch.cuda.graph(graph):
                    out = step()
            if captured and number:
                graph.replay()
            else:
                out = step()
            outs.append(out.clone())
            now = [n + (number * (k + 1)) % 9 + 1 for k, n in enumerate(now)]
            cache.confirm(range(count), now)
            assert cache.lengths.tolist() == now
        runs.append(outs)
    for actual, expected in zip(*runs, strict=True):
        assert_bitwise(actual, expected)


def test_a_row_is_truncated_while_steps_are_under_way() -> None:
    """To what is certainly there and whose window and slots no step can have taken."""
    stack = Stack(published(), 0)
    cache = stack.cache(2, 600, pool_tokens=1200, max_chunk=300)
    row = cache.allocate()
    cache.prepare([row], [270])
    for _ in range(2):  # 278 at most, 272 at least
        cache.prepare([row], [4], certain=[1])
    assert not cache.truncate(row, 273)
    cache.confirm([row], [273])
    assert (cache._counts[row].low, cache._counts[row].written) == (274, 277)
    assert not cache.truncate(row, 270)
    assert cache.truncate(row, 272)
    assert cache.lengths.tolist()[row] == 272
    assert cache._counts[row] == RowCount(272, 272, 277, 271)
    with pytest.raises(ValueError, match="truncate: sequence is 1, wanted one that is allocated"):
        cache.truncate(1, 0)
    rings = stack.cache(1, 300)
    with pytest.raises(RuntimeError, match="has no pools, wanted pool_tokens"):
        rings.truncate(rings.allocate(), 0)


def test_a_fork_shares_no_page_that_an_open_step_may_leave_unfinished() -> None:
    """Of steps under way the certain tokens count: others may be rejected and written again."""
    config = published()
    cache = Stack(config, 0).cache(2, 600, pool_tokens=1200, max_chunk=300)
    row = cache.allocate()
    cache.prepare([row], [246])
    for _ in range(2):  # 248 to 264 tokens: the page of the first 256 may not be full
        cache.prepare([row], [9], certain=[1])
    free = cache.free_pages
    cache.fork(row)
    taken = {name: free[name] - count for name, count in cache.free_pages.items()}
    assert taken["compressed (ratio 4)"] == 2
    assert taken["compressed (ratio 128)"] == 1
