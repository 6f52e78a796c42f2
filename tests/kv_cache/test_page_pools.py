"""Sequences in shared pools: they grow, join, leave and fork, and are what they are alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.kv_cache import layer_cache
from dsv4.kv_cache.paged_cache import Batch, CacheFullError, LayerCache, PagedCache
from dsv4.kv_cache.pages import Pages
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.configs import chunkings
from dsv4.testing.models import random_model
from dsv4.testing.strategies import seeds
from tests.kv_cache.attention_stack import TYPES, Stack, shuffled, small, tokens

EXACT = 1e-12  # relative, float64: rounding alone
BORDERS = (0, 1, 3, 4, 127, 128, 129)


def published(**changes) -> ModelConfig:
    """The published window, rates and pages of 64, 64 and 2 entries; narrow layers."""
    return small(sliding_window=128, compress_rates={CSA: 4, HCA: 128}, **changes)


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    if not actual.numel():
        return 0.0
    return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def pages_taken(cache: PagedCache) -> dict[str, int]:
    sizes = {t.pool.name: t.pool.size for t in cache._tables.values()}
    return {name: sizes[name] - free for name, free in cache.free_pages.items()}


def snapshot(cache: PagedCache) -> list[torch.Tensor]:
    tensors = [t for layer in cache.layers for pair in layer.tensors() for t in pair]
    return [t.clone() for t in (*tensors, cache.lengths) if t is not None]


# Equal to each sequence alone -----------------------------------------------------------------


@pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
def test_a_mixed_batch_at_every_border_is_each_sequence_alone(numerics: str) -> None:
    """Prefill to each border, one token, two at once (as a verification), and one again."""
    config = published(numerics=numerics)
    stack = Stack(config, 3)
    cache = shuffled(stack.cache(len(BORDERS), 160, pool_tokens=7 * 256, max_chunk=129), 3)
    data = [tokens(i, n + 4, config) for i, n in enumerate(BORDERS)]
    rows = [cache.allocate() for _ in BORDERS]
    out: list[list[torch.Tensor]] = [[] for _ in BORDERS]
    done = [0] * len(BORDERS)
    for step in (BORDERS, *[[n] * len(BORDERS) for n in (1, 2, 1)]):
        pieces = [x[a : a + n] for x, a, n in zip(data, done, step, strict=True)]
        for i, piece in enumerate(stack.step(cache, rows, pieces)):
            out[i].append(piece)
            done[i] += step[i]
    for i, x in enumerate(data):
        assert distance(torch.cat(out[i]), stack.whole(x)) < EXACT, BORDERS[i]


@pytest.mark.parametrize("layer_type", TYPES)
@given(seed=seeds(), data=st.data())
@settings(max_examples=6)
def test_any_chunking_of_a_mixed_batch_is_prefill(
    layer_type: str, seed: int, data: st.DataObject
) -> None:
    config = published(layer_types=(layer_type,))
    stack = Stack(config, seed % 1000)
    lengths = [data.draw(st.sampled_from(BORDERS[1:])) + data.draw(st.integers(0, 2)) for _ in "ab"]
    chunks = [data.draw(chunkings(n)) for n in lengths]
    cache = shuffled(stack.cache(2, 140, pool_tokens=512), seed)
    hidden = [tokens(seed + i, n, config) for i, n in enumerate(lengths)]
    rows = [cache.allocate(), cache.allocate()]
    done, out = [0, 0], [[], []]
    for turn in range(max(map(len, chunks))):
        step = [c[turn] if turn < len(c) else 0 for c in chunks]
        pieces = [x[a : a + n] for x, a, n in zip(hidden, done, step, strict=True)]
        for i, piece in enumerate(stack.step(cache, rows, pieces)):
            out[i].append(piece)
            done[i] += step[i]
    for x, pieces in zip(hidden, out, strict=True):
        assert distance(torch.cat(pieces), stack.whole(x)) < EXACT


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("layer_type", TYPES)
def test_any_chunking_of_a_mixed_batch_is_prefill_through_4096_tokens(layer_type: str) -> None:
    through_4096_tokens(layer_type, "cuda")


def through_4096_tokens(layer_type: str, device: str) -> None:
    config = published(layer_types=(layer_type,), index_topk=512)
    stack = Stack(config, 8).to(device)
    pieces = [[1700, 1, 1, 127, 129, 1, 2, 63, 2071, 1], [1, 640, 1, 1, 1, 1024, 3, 1, 1, 2000]]
    hidden = [tokens(i, sum(p), config).to(device) for i, p in enumerate(pieces)]
    cache = shuffled(stack.cache(2, 4096, pool_tokens=8192, max_chunk=2100), 1)
    rows, out, done = [cache.allocate(), cache.allocate()], [[], []], [0, 0]
    for step in zip(*pieces, strict=True):
        parts = [x[a : a + n] for x, a, n in zip(hidden, done, step, strict=True)]
        for i, piece in enumerate(stack.step(cache, rows, parts)):
            out[i].append(piece)
            done[i] += step[i]
    assert done == [4096, 3673]
    for x, result in zip(hidden, out, strict=True):
        assert distance(torch.cat(result), stack.whole(x)) < EXACT


class Crowd:
    """Sequences in two caches whose pages lie in different orders, and what each has seen."""

    def __init__(self, stack: Stack, seed: int) -> None:
        self.stack, self.seed = stack, seed
        sizes = {"pool_tokens": 90, "window_pages": 20, "max_chunk": 12}
        self.caches = [shuffled(stack.cache(4, 60, **sizes), seed + i) for i in range(2)]
        self.seen: dict[int, torch.Tensor] = {}
        self.count = 0

    def join(self) -> None:
        if len(self.seen) == 4:
            for cache in self.caches:
                with pytest.raises(CacheFullError, match="all 4 sequences are taken"):
                    cache.allocate()
            return
        (row,) = {cache.allocate() for cache in self.caches}
        self.seen[row] = tokens(0, 0, self.stack.config)

    def leave(self, row: int) -> None:
        for cache in self.caches:
            cache.free(row)
        del self.seen[row]

    def fork(self, row: int) -> None:
        before = [snapshot(cache) for cache in self.caches]
        rows = set()
        for cache, old in zip(self.caches, before, strict=True):
            try:
                rows.add(cache.fork(row))
            except CacheFullError:
                rows.add(-1)
                for a, b in zip(snapshot(cache), old, strict=True):
                    assert torch.equal(a.nan_to_num(), b.nan_to_num())
        (new,) = rows
        if new >= 0:
            self.seen[new] = self.seen[row]

    def grow(self, wishes: dict[int, int]) -> None:
        rows = [row for row in wishes if len(self.seen[row]) + wishes[row] <= 60]
        new = {row: tokens(self.next(), wishes[row], self.stack.config) for row in rows}
        result = []
        for cache in self.caches:
            before = snapshot(cache)
            try:
                result.append(self.stack.step(cache, rows, list(new.values())) if rows else [])
            except CacheFullError:
                result.append(None)
                for a, b in zip(snapshot(cache), before, strict=True):
                    assert torch.equal(a.nan_to_num(), b.nan_to_num())
        if result[0] is None:
            assert result[1] is None
            return
        for row, first, other in zip(rows, *result, strict=True):
            assert_bitwise(first, other, "pages in another order")
            start = len(self.seen[row])
            self.seen[row] = torch.cat((self.seen[row], new[row]))
            assert distance(first, self.stack.whole(self.seen[row])[start:]) < EXACT

    def next(self) -> int:
        self.count += 1
        return 1000 * self.seed + self.count


@settings(max_examples=12)
@given(seed=st.integers(0, 999), data=st.data())
def test_sequences_that_join_grow_fork_and_leave_are_what_they_are_alone(
    seed: int, data: st.DataObject
) -> None:
    """Pages of 4 and 2 entries and too few of them, so that pools run full now and then."""
    with mock.patch.multiple(layer_cache, WINDOW_PAGE=4, BLOCK=16):
        crowd = Crowd(Stack(small(compress_rates={CSA: 4, HCA: 8}), 1), seed)
        crowd.join()
        for _ in range(data.draw(st.integers(3, 9))):
            live = sorted(crowd.seen)
            action = data.draw(st.sampled_from(["grow", "grow", "grow", "fork", "join", "leave"]))
            if action == "grow" and live:
                count = st.one_of(st.just(1), st.integers(0, 12))
                crowd.grow({row: data.draw(count) for row in live if data.draw(st.booleans())})
            elif action == "fork" and live and len(live) < 4:
                crowd.fork(data.draw(st.sampled_from(live)))
            elif action == "leave" and live:
                crowd.leave(data.draw(st.sampled_from(live)))
            elif action == "join":
                crowd.join()
        for row in sorted(crowd.seen):
            crowd.leave(row)
        for cache in crowd.caches:
            assert not any(pages_taken(cache).values())


@pytest.mark.parametrize("length", [2, 6, 125])
def test_pitfall_15_every_accepted_prefix_of_a_guess_is_serial(length: int) -> None:
    """A fork verifies five tokens at once; the sequence goes on with those that were right."""
    stack = Stack(published(), 6)
    cache = stack.cache(2, 140, pool_tokens=512)
    x, guess = tokens(1, length, stack.config), tokens(2, 5, stack.config)
    row = cache.allocate()
    stack.step(cache, [row], [x])
    for accepted in (0, 1, 3):
        fork = cache.fork(row)
        (verified,) = stack.step(cache, [fork], [guess])
        assert distance(verified, stack.whole(torch.cat((x, guess)))[len(x) :]) < EXACT
        cache.free(fork)
        truth = torch.cat((guess[:accepted], tokens(3 + accepted, 1, stack.config)))
        (out,) = stack.step(cache, [row], [truth])
        x = torch.cat((x, truth))
        assert distance(out, stack.whole(x)[-len(truth) :]) < EXACT


def test_a_model_prefills_and_decodes_in_pools_as_without() -> None:
    config = ModelConfig.tiny()
    model = random_model(config, 3, torch.float64)
    prompts = [list(range(1, 14)), [5, 4, 3]]
    result = []
    for sizes in ({}, {"pool_tokens": 1024}):
        cache = model.new_cache(3, 20, 5, **sizes)
        rows = [cache.allocate(), cache.allocate()]
        logits = [model.prefill(prompts, cache, rows)]
        for _ in range(3):
            logits.append(model.decode(logits[-1].argmax(-1), cache, rows))
        rows.append(cache.fork(rows[0]))
        there = torch.tensor(rows[1:])
        cache.prepare(rows[1:], [1, 1])
        logits.append(model.decode(torch.tensor([7, 8]), cache, there))
        logits.append(model.prefill([[9, 9], [1]], cache, rows[1:]))
        assert cache.lengths.tolist() == [16, 9, 18]
        result.append(torch.cat(logits))
        with pytest.raises(ValueError, match=r"would reach 18 \+ 3 tokens, .*max_tokens \(20\)"):
            model.prefill([[1, 2, 3]], cache, rows[2:])
    assert_bitwise(*result)


# Memory ---------------------------------------------------------------------------------------


# Gigabytes of KV cache and index entries of a sequence, specification, section 13.
SPECIFIED = {
    "pro": {4096: 0.025, 32768: 0.169, 131072: 0.664, 1048576: 5.28},
    "flash": {4096: 0.018, 32768: 0.118, 131072: 0.464, 1048576: 3.69},
}
# Its formula, in bytes: entries of 584 bytes, MXFP4 keys of 68, a window of 128.
LAYERS = {"pro": (61, 30, 31), "flash": (43, 21, 20)}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("length", SPECIFIED["pro"])
def test_memory_of_a_sequence_is_what_the_specification_computes(name: str, length: int) -> None:
    config = getattr(ModelConfig, name)()
    cache = PagedCache(
        config, max_sequences=2, max_tokens=1 << 20, max_chunk=4096, device="meta",
        index_format="index_mxfp4", pool_tokens=1 << 20,
    )  # fmt: skip
    actual = cache.bytes_per_sequence(length)
    entries = actual["window"] + actual["compressed"] + actual["indexer"]
    layers, csa, hca = LAYERS[name]
    expected = 584 * (128 * layers + length // 4 * csa + length // 128 * hca) + 17 * length * csa
    assert abs(expected / SPECIFIED[name][length] / 1e9 - 1) < 0.03  # rounded to three digits there
    assert abs(entries / expected - 1) < 0.05
    # 8 open tokens of 2 x (1024 + 256) float32 and 128 of 2 x 512: specification, section 13. Of
    # either 8 more, to be taken back.
    for back in (0, 8):
        state = 4 * (csa * (8 + back) * 2 * 1280 + hca * (128 + back) * 2 * 512)
        sizes = {"max_sequences": 1, "max_tokens": 256, "device": "meta", "rollback": back}
        assert PagedCache(config, **sizes).bytes_per_sequence(0)["state"] == state
    assert actual["state"] == state == {"flash": 14_581_760, "pro": 22_183_936}[name]


def test_the_bytes_of_a_sequence_are_those_of_the_pages_it_takes() -> None:
    config = published(num_nextn_predict_layers=0, numerics="deepseek")
    cache = PagedCache(
        config, max_sequences=1, max_tokens=2000, max_chunk=500, pool_tokens=2000,
        index_format="index_mxfp4",
    )  # fmt: skip
    row = cache.allocate()
    page_bytes = {"window": 3 * cache.layers[0].window.page_bytes()}
    csa, hca = cache.layers[1], cache.layers[2]
    page_bytes["compressed (ratio 4)"] = csa.compressed.page_bytes()
    page_bytes["compressed (ratio 4)"] += csa.indexer_pages.page_bytes()
    page_bytes["compressed (ratio 128)"] = hca.compressed.page_bytes()
    states = sum(t[0].nbytes for t in (csa.state, csa.indexer_state, hca.state))
    length = singles = 0
    for step in (1, 2, 1, 123, 1, *[1] * 200, 500, *[1] * 70, 3, *[1] * 140):
        cache.prepare([row], [step])
        length += step
        singles = singles + 1 if step == 1 else 0
        if singles >= 64:  # for fewer after a chunk it may be a page more
            taken = sum(page_bytes[name] * count for name, count in pages_taken(cache).items())
            assert taken + states == sum(cache.bytes_per_sequence(length).values()), length
    with pytest.raises(ValueError, match="tokens is 2001, wanted 0 to 2000"):
        cache.bytes_per_sequence(2001)


def test_the_window_costs_the_same_at_any_length() -> None:
    cache = Stack(published(), 0).cache(1, 1 << 20, max_chunk=4096, pool_tokens=1 << 20)
    row, taken = cache.allocate(), []
    for _ in range(40):
        cache.prepare([row], [4096])
        for _ in range(65):
            cache.prepare([row], [1])
        taken.append(pages_taken(cache)["window"])
    assert set(taken) == {2}


# Full pools and wrong numbers -----------------------------------------------------------------


def test_a_full_pool_is_an_error_before_anything_is_written() -> None:
    stack = Stack(published(), 0)
    cache = stack.cache(3, 1000, pool_tokens=512, max_chunk=400, window_pages=8)
    a, b = cache.allocate(), cache.allocate()
    x = tokens(0, 300, stack.config)
    stack.step(cache, [a], [x[:200]])
    before = snapshot(cache)
    for rows, lengths, words in (
        ([a, b], [1, 330], r"needs 6 window pages, and 5 of 8 are free; .*larger window_pages"),
        ([a, b], [60, 8], r"needs 2 compressed \(ratio 4\) pages, and 1 of 2 .*larger pool_tokens"),
    ):
        with pytest.raises(CacheFullError, match="prepare: " + words):
            cache.prepare(rows, lengths)
        for old, new in zip(before, snapshot(cache), strict=True):
            assert_bitwise(new, old)
    stack.step(cache, [b], [x[:8]])
    with pytest.raises(CacheFullError, match=r"copy: needs 1 compressed \(ratio 4\) pages, and 0"):
        cache.fork(b)
    # Whoever has room goes on, with what it would have been.
    (out,) = stack.step(cache, [a], [x[200:256]])
    assert distance(out, stack.whole(x[:256])[200:]) < EXACT


def raised(call: Callable[[], None]) -> tuple[type, str] | None:
    try:
        call()
    except (CacheFullError, ValueError) as error:
        return type(error), str(error)
    return None


@given(seeds(), st.integers(1, 40), st.integers(2, 6), st.integers(64, 400))
def test_prompts_are_checked_as_their_chunks_are_prepared(
    seed, chunk, window_pages, pool_tokens
) -> None:
    """Raises what one of the steps raises, and has changed nothing, whether it does or not."""
    draw = random.Random(seed)
    sizes = {"pool_tokens": pool_tokens, "window_pages": window_pages, "max_chunk": 40}
    cache = Stack(published(), 0).cache(3, 300, **sizes)
    rows = [cache.allocate(), cache.allocate()]
    try:
        cache.prepare(rows[:1], [draw.randrange(40)])
        if draw.random() < 0.5:
            rows.append(cache.fork(rows[0]))
    except CacheFullError:
        pass
    lengths = [draw.randrange(1, 200) for _ in rows]
    state = snapshot(cache), cache.free_pages
    result = raised(lambda: cache.check_prompts(rows, lengths, chunk))
    for old, new in zip(state[0], snapshot(cache), strict=True):
        assert_bitwise(new, old)
    assert cache.free_pages == state[1]

    def every_step() -> None:
        for begin in range(0, max(lengths), chunk):
            cache.prepare(rows, [max(0, min(chunk, length - begin)) for length in lengths])

    assert raised(every_step) == result


@pytest.mark.parametrize("sizes", [{"pool_tokens": 256}, {}])
def test_a_prompt_without_room_for_its_last_chunk_is_refused_before_its_first(sizes) -> None:
    model = random_model(ModelConfig.tiny(), 3, torch.float64)
    cache = model.new_cache(2, 600 if sizes else 20, 8, **sizes)
    rows = [cache.allocate(), cache.allocate()]
    model.prefill([[1, 2, 3], [4]], cache, rows)
    before = snapshot(cache)
    long = [i % 100 for i in range(1, 400 if sizes else 21)]
    error, words = (CacheFullError, "needs") if sizes else (ValueError, r"would reach 17 \+ 4")
    with pytest.raises(error, match=words):
        model.prefill([[5], long], cache, rows)
    for old, new in zip(before, snapshot(cache), strict=True):
        assert_bitwise(new, old)


def test_numbers_that_cannot_be_are_named() -> None:
    cache = Stack(published(), 0).cache(3, 100, pool_tokens=512, max_chunk=40)
    a, b = cache.allocate(), cache.allocate()
    cache.prepare([a, -1, b], [5, 7, 0])
    for arguments, words in (
        (([a], [1], [4]), r"starts\[0\] is 4, wanted 5: .*neither go back nor skip"),
        (([b, a], [1, 1], [0, 6]), r"starts\[1\] is 6, wanted 5"),
        (([a, a], [1, 1]), r"sequences are \[0, 0\], wanted distinct"),
        (([2], [1]), "sequence is 2, wanted one that is allocated"),
        (([-2], [1]), "sequence is -2, wanted one that is allocated"),
        (([a], [-1]), r"lengths\[0\] is -1, wanted >= 0"),
        (([a], [41]), r"41 new tokens, wanted at most max_chunk \(40\)"),
        (([a, b], [1]), "2 sequences, 1 lengths and 2 starts"),
    ):
        with pytest.raises(ValueError, match=words):
            cache.prepare(*arguments)
    cache.prepare([b], [40])
    cache.prepare([b], [40])
    with pytest.raises(ValueError, match=r"reach 80 \+ 21 tokens, wanted at most max_tokens"):
        cache.prepare([b], [21])
    static = Stack(published(), 0).cache(1, 100)
    row = static.allocate()
    static.prepare([row], [3], [7])  # without pools a step need not be announced
    with pytest.raises(ValueError, match=r"starts\[0\] is 9, wanted 10"):
        static.prepare([row], [1], [9])
    for sizes, words in (
        ({"pool_tokens": 0}, "pool_tokens is 0, wanted >= 1"),
        ({"pool_tokens": 9, "window_pages": 0}, "window_pages is 0, wanted >= 1"),
        ({"window_pages": 3}, "window_pages is 3 and pool_tokens None, wanted both"),
    ):
        with pytest.raises(ValueError, match=words):
            Stack(published(), 0).cache(1, 100, **sizes)


def test_forks_and_frees_of_a_static_cache() -> None:
    stack = Stack(published(), 2)
    cache = stack.cache(2, 140)
    assert cache.free_pages == {}
    x = tokens(5, 132, stack.config)
    row = cache.allocate()
    stack.step(cache, [row], [x[:130]])
    other = cache.fork(row)
    both = stack.step(cache, [row, other], [x[130:], x[130:].flip(0)])
    assert distance(both[0], stack.whole(x)[130:]) < EXACT
    mixed = torch.cat((x[:130], x[130:].flip(0)))
    assert distance(both[1], stack.whole(mixed)[130:]) < EXACT
    with pytest.raises(CacheFullError, match="all 2 sequences are taken"):
        cache.fork(row)
    with pytest.raises(ValueError, match=r"fork: sequence is 7, wanted one that is allocated"):
        cache.fork(7)


@pytest.mark.parametrize("sizes", [{"pool_tokens": 1024}, {}])
@pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
def test_forks_and_frees_leave_the_bits_of_others_alone(sizes: dict, numerics: str) -> None:
    """The same steps of two sequences, with others that come from them and end, and without."""
    stack, result = Stack(published(numerics=numerics), 4), []
    x, y = tokens(0, 150, stack.config), tokens(1, 150, stack.config)
    for busy in (False, True):
        cache = shuffled(stack.cache(4, 160, **sizes), 1 + busy)
        rows = [cache.allocate(), cache.allocate()]
        out = stack.step(cache, rows, [x[:130], y[:127]])
        if busy:
            first, second = cache.fork(rows[0]), cache.fork(rows[1])
            stack.step(cache, [first, second], [y[:9], x[:2]])
            cache.free(first)
        out += stack.step(cache, rows, [x[130:133], y[127:131]])
        if busy:
            cache.copy(rows[1], second)
            third = cache.allocate()
            stack.step(cache, [third, second], [x[:140], y[:1]])
            cache.free(second)
            cache.reset(third)
        out += stack.step(cache, rows, [x[133:], y[131:132]])
        result.append(torch.cat(out))
    assert_bitwise(*result)


@pytest.mark.parametrize(
    ("changes", "dtype", "error", "words"),
    [
        ({"sliding_window": 64}, None, ValueError, "made for sliding_window 64, wanted 128"),
        ({"head_dim": 64}, None, ValueError, "made for head_dim 64, wanted 32 as the model has"),
        (
            {"compress_rates": {CSA: 4, HCA: 64}},
            None,
            ValueError,
            r"compression rates \(0, 4, 64\), wanted \(0, 4, 128\)",
        ),
        ({"layer_types": (SLIDING, CSA)}, None, ValueError, "num_hidden_layers 2, wanted 3"),
        (
            {"numerics": "deepseek"},
            None,
            ValueError,
            "made for numerics deepseek, wanted transformers as the model has",
        ),
        ({}, torch.bfloat16, TypeError, "layer 0 have dtype bfloat16, wanted float64"),
    ],
)
def test_a_cache_of_another_model_is_refused(changes, dtype, error, words) -> None:
    stack = Stack(published(numerics="transformers"), 0)
    fixed = {
        "numerics": "transformers",
        "sliding_window": 128,
        "compress_rates": {CSA: 4, HCA: 128},
    }
    other = Stack(small(**{**fixed, **changes}), 0)
    cache = PagedCache(other.config, max_sequences=1, max_tokens=64, dtype=dtype or torch.float64)
    with pytest.raises(error, match=words):
        stack.step(cache, [cache.allocate()], [tokens(0, 2, stack.config)])


def test_a_state_of_another_dtype_is_refused() -> None:
    stack = Stack(published(numerics="deepseek"), 0)
    cache = PagedCache(stack.config, max_sequences=1, max_tokens=64)  # FP8 pages fit any dtype
    with pytest.raises(TypeError, match="state of layer 1 has dtype float32, wanted float64"):
        stack.step(cache, [cache.allocate()], [tokens(0, 2, stack.config)])


# Somebody else's pools and tables -------------------------------------------------------------


def brought(config: ModelConfig, **changes) -> list[LayerCache]:
    """Pools of 20 pages for 2 sequences; tables as an engine has them, int32 and out of order."""
    dtype, d, rope = torch.float64, config.head_dim, config.qk_rope_head_dim

    def pages(size: int, dim: int = d) -> Pages:
        return Pages.allocate(20, size, dim, rope, "plain", dtype)

    order = torch.randperm(20, generator=torch.Generator().manual_seed(1)).int()
    window, csa, hca = order[:6].view(2, 3), order[:2].view(2, 1), order[4:8].view(2, 2)

    def state(ratio: int, c: int, dim: int) -> torch.Tensor:
        return torch.zeros(2, c * ratio, 2, c * dim, dtype=dtype)

    kinds = {
        SLIDING: {},
        CSA: {
            "ratio": 4, "compressed": pages(64), "compressed_table": csa, "state": state(4, 2, d),
            "indexer_pages": pages(64, config.index_head_dim),
            "indexer_state": state(4, 2, config.index_head_dim),
        },
        HCA: {
            "ratio": 128, "compressed": pages(2), "compressed_table": hca,
            "state": state(128, 1, d),
        },
    }  # fmt: skip
    layers = []
    for kind, parts in kinds.items():
        fields = {"window": pages(64), "window_table": window, "sliding_window": 128, **parts}
        fields.update(changes.get(kind, {}))
        layers.append(LayerCache(**fields))
    return layers


def test_somebody_elses_pools_serve_as_ours_do() -> None:
    stack = Stack(published(numerics="transformers"), 4)
    theirs = PagedCache.of_layers(stack.config, brought(stack.config), max_tokens=192)
    x = tokens(3, 131, stack.config)
    ours = stack.cache(2, 192)
    rows, there = [ours.allocate(), ours.allocate()], torch.tensor([0, 1])
    for piece in x.split([129, 1, 1]):
        batch = Batch.from_lengths([0, len(piece)], theirs.lengths[there], there)
        theirs.prepare([0, 1], [0, len(piece)], theirs.lengths.tolist())
        actual = stack.run(piece, theirs, batch)
        # Not bitwise: their tables are wider, and a BLAS may sum rows of another width otherwise.
        expected = stack.step(ours, rows, [piece[:0], piece])[1]
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-14)
    with pytest.raises(RuntimeError, match="allocate: the pages were brought"):
        theirs.allocate()
    with pytest.raises(RuntimeError, match="fork: the pages were brought"):
        theirs.fork(0)
    with pytest.raises(ValueError, match="starts is None, wanted it with brought pages"):
        theirs.prepare([0], [1])
    with pytest.raises(ValueError, match="would reach 192"):
        theirs.prepare([0], [1], [192])


STEPS = (
    (([0, 0], [1, 1], [0, 0]), r"sequences are \[0, 0\], wanted distinct ones"),
    (([9], [1], [0]), r"sequences\[0\] is 9, wanted -1 to 1"),
    (([-2], [1], [0]), r"sequences\[0\] is -2, wanted -1 to 1"),
    (([0, 1], [1], [0, 0]), "2 sequences, 1 lengths and 2 starts"),
    (([0], [-1], [5]), r"lengths\[0\] is -1, wanted >= 0"),
    (([0], [1], [3]), r"starts\[0\] is 3, wanted 10: .* positions neither go back nor skip"),
)


@pytest.mark.parametrize(("step", "words"), STEPS, ids=range(len(STEPS)))
def test_wrong_steps_with_somebody_elses_pages_are_named(step: tuple, words: str) -> None:
    config = published()
    theirs = PagedCache.of_layers(config, brought(config), max_tokens=192)
    theirs.prepare([0], [10], [0])
    with pytest.raises(ValueError, match=words):
        theirs.prepare(*step)
    # What was refused has changed nothing; row 1 goes on where its owner says, row 0 begins again.
    theirs.prepare([0, 1, -1], [1, 1, 0], [10, 100, 0])
    theirs.prepare([0], [2], [0])
    with pytest.raises(ValueError, match="wanted 2"):
        theirs.prepare([0], [1], [1])


def test_a_table_changed_to_point_outside_its_pool_is_named() -> None:
    config = published()
    layers = brought(config)
    theirs = PagedCache.of_layers(config, layers, max_tokens=192)
    theirs.check_tables()
    layers[1].compressed_table[1, 0] = 20
    with pytest.raises(ValueError, match="_table has page 20, wanted -1 to 19"):
        theirs.check_tables()
    Stack(config, 0).cache(2, 192, pool_tokens=192).check_tables()


def table(*values: int) -> torch.Tensor:
    return torch.tensor(values).view(2, -1)


WRONG = (
    (
        SLIDING,
        {"window_table": table(0, 1, 2, 3, 4, 20)},
        "has page 20, wanted -1 to 19",
    ),
    (SLIDING, {"window_table": table(0, 1, 2, 3, 4, -2)}, "page -2, wanted -1 to 19"),
    (SLIDING, {"window_table": table(0, 1)}, r"room for 64 entries .*, wanted at least 192"),
    (
        HCA,
        {"window_table": torch.zeros(3, 3).long()},
        r"layer 2: window_table has shape \[3, 3\]",
    ),
    (SLIDING, {"sliding_window": 64}, "layer 0: sliding_window is 64, wanted 128"),
    (CSA, {"compressed_table": table(0, 33)}, "layer 1: compressed_table has page 33"),
    (CSA, {"indexer_pages": None}, "indexer_pages is None, wanted one for compressed_sparse"),
    (CSA, {"ratio": 8}, "layer 1: ratio is 8, wanted 4"),
    (CSA, {"state": torch.zeros(2, 4, 2, 64)}, r"state has shape \[2, 4, 2, 64\], wanted \[2, 8"),
    (
        CSA,
        {"indexer_pages": Pages.allocate(20, 32, 32, 8, "plain")},
        "indexer_pages.page_size is 32, wanted 64",
    ),
    (
        CSA,
        {"compressed": Pages.allocate(20, 64, 64, 8, "plain")},
        "layer 1: compressed.head_dim is 64, wanted 32",
    ),
    (
        CSA,
        {"indexer_pages": Pages.allocate(1, 64, 32, 8, "plain")},
        r"the pool has 1 pages",
    ),
    (HCA, {"compressed_table": table(0, -1)[:, :0]}, r"room for 0 entries .* at least 1"),
    (HCA, {"indexer_state": torch.zeros(1)}, "indexer_state is given, wanted None for heavily"),
)


@pytest.mark.parametrize(("kind", "change", "words"), WRONG, ids=range(len(WRONG)))
def test_wrong_pools_and_tables_are_named(kind: str, change: dict, words: str) -> None:
    config = published()
    with pytest.raises(ValueError, match=words):
        PagedCache.of_layers(config, brought(config, **{kind: change}), max_tokens=192)


def test_tables_of_another_dtype_or_number_are_named() -> None:
    config = published()
    floats = {SLIDING: {"window_table": torch.zeros(2, 3)}}
    with pytest.raises(TypeError, match="layer 0: window_table has dtype float32, wanted int32 or"):
        PagedCache.of_layers(config, brought(config, **floats), max_tokens=192)
    with pytest.raises(ValueError, match="layers are 2, wanted 3"):
        PagedCache.of_layers(config, brought(config)[:2], max_tokens=192)
    bytes_of = {HCA: {"state": torch.zeros(2, 128, 2, 32, dtype=torch.float16)}}
    with pytest.raises(TypeError, match="state has dtype float16, wanted float32 or float64"):
        PagedCache.of_layers(config, brought(config, **bytes_of), max_tokens=192)


@given(story=st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 90)), max_size=12))
def test_before_a_step_the_device_knows_which_pages_every_row_has(
    story: list[tuple[bool, int, int]],
) -> None:
    """A freed row has none."""
    cache = Stack(published(), 1).cache(3, 280, pool_tokens=3 * 512, max_chunk=90)
    live: list[int] = []
    for joins, row_index, new in story:
        if joins and len(live) < 3:
            live.append(cache.allocate())
        elif live:
            cache.free(live.pop(row_index % len(live)))
        step = [row for row in live if cache._counts[row].high + new <= 280]
        cache.prepare(step, [new] * len(step))
        for table in cache._tables.values():
            expected = torch.full_like(table.table, -1)
            for row, held in enumerate(table._held):
                for number, page in sorted(held.pages.items()):
                    expected[row, number % table.columns] = page
            assert torch.equal(table.table, expected)
