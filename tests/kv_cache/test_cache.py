"""The static cache: slots against a plain dictionary of what was written, sequences, limits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.kv_cache.paged_cache import Batch, LayerCache, PagedCache
from dsv4.ops.attention import sparse_attention
from dsv4.ops.compressor import compressor_update
from dsv4.ops.kv_cache import read_kv, write_kv
from dsv4.testing.assertions import assert_bitwise, assert_within_budget
from dsv4.testing.strategies import normal, partitions, seeds

CONFIG = ModelConfig.tiny(
    layer_types=(SLIDING, CSA, HCA), num_nextn_predict_layers=1, compress_rates={CSA: 4, HCA: 8}
)


def make(**changes) -> PagedCache:
    arguments = {"max_sequences": 3, "max_tokens": 200, "max_chunk": 40, "dtype": torch.float64}
    return PagedCache(CONFIG, **{**arguments, "entry_format": "plain", **changes})


def tensor(values, device="cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50)), max_size=5))
def test_ragged_batch_is_the_concatenation(device, pieces):
    lengths = [n for n, _ in pieces]
    rows = list(range(len(pieces)))[::-1]
    starts = tensor([s for _, s in pieces], device)
    batch = Batch.from_lengths(lengths, starts.int(), tensor(rows, device))
    positions = [s + i for n, s in pieces for i in range(n)]
    owners = [r for r, n in zip(rows, lengths, strict=True) for _ in range(n)]
    assert batch.positions.tolist() == positions
    assert batch.sequence_of_token.tolist() == owners
    assert batch.cu_seqlens.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert batch.starts.dtype == batch.positions.dtype == torch.int64


@given(st.lists(st.integers(0, 50), max_size=5))
def test_decode_batch_is_a_ragged_batch_of_ones(device, starts):
    rows = tensor(range(len(starts)), device)
    decode = Batch.decode(tensor(starts, device), rows)
    ragged = Batch.from_lengths([1] * len(starts), tensor(starts, device), rows)
    for name in ("cu_seqlens", "starts", "sequences", "positions", "sequence_of_token"):
        assert_bitwise(getattr(decode, name), getattr(ragged, name), name)


def test_bad_batches_are_named():
    with pytest.raises(ValueError, match="wanted none negative"):
        Batch.from_lengths([1, -1], tensor([0, 0]), tensor([0, 1]))
    with pytest.raises(ValueError, match=r"starts has shape \[1\], wanted \[2\]"):
        Batch.from_lengths([1, 1], tensor([0]), tensor([0, 1]))
    with pytest.raises(ValueError, match=r"sequences has shape \[3\], wanted \[2\]"):
        Batch.from_lengths([1, 1], tensor([0, 0]), tensor([0, 1, 2]))


@given(st.integers(0, 2), st.integers(0, 199), st.integers(1, 40))
def test_window_slots_hold_every_position_in_sight(device, row, start, tokens):
    """Within a chunk tokens in sight have different slots, and all lie in the row's ring."""
    cache = make(device=device)
    layer = cache.layers[0]
    positions = torch.arange(start, start + tokens, device=device)
    rows = torch.full_like(positions, row)
    read = cache.layers[0].window_read_slots(rows, positions)
    window = CONFIG.sliding_window
    assert read.shape == (tokens, window)
    slot_of = {}
    for i, p in enumerate(positions.tolist()):
        for j, slot in enumerate(read[i].tolist()):
            seen = p - window + 1 + j
            assert (slot < 0) == (seen < 0)
            if slot >= 0:
                assert slot_of.setdefault(seen, slot) == slot
    assert len(set(slot_of.values())) == len(slot_of)
    assert cache.layers[0].window_write_slots(rows, positions).tolist() == [
        slot_of[p] for p in positions.tolist()
    ]
    entries = torch.arange(64, device=device)
    own = set((layer.window_table[row] * 64)[:, None].add(entries).flatten().tolist())
    assert set(slot_of.values()) <= own


@given(st.integers(0, 200), st.sampled_from([1, 2]))
def test_compressed_slots_are_distinct_and_match(device, visible, index):
    cache = make(device=device)
    layer = cache.layers[index]
    visible = min(visible, 200 // layer.ratio)
    entries = torch.arange(visible, device=device)
    seen = set()
    for row in range(3):
        written = cache.layers[index].compressed_slots_of(torch.full_like(entries, row), entries)
        seen |= set(written.tolist())
        prefix = cache.layers[index].compressed_prefix_slots(
            tensor([row], device), tensor([visible], device)
        )
        assert prefix.shape == (1, layer.compressed_capacity)
        assert prefix[0, :visible].tolist() == written.tolist()
        assert bool((prefix[0, visible:] == -1).all())
        chosen = cache.layers[index].compressed_slots_of(
            tensor([row], device), entries.flip(0)[None]
        )
        assert chosen[0].tolist() == written.tolist()[::-1]
    assert len(seen) == 3 * visible
    assert all(0 <= s < layer.compressed.num_slots for s in seen)


def test_pitfall_20_padding_passes_through_as_minus_one(device):
    cache = make(device=device)
    single, none = tensor([0, -1, -1], device), tensor([-1, 3, -1], device)
    for slots in (
        cache.layers[0].window_write_slots(single, none),
        cache.layers[0].window_read_slots(single, none),
        cache.layers[1].compressed_slots_of(single, none),
        cache.layers[1].compressed_slots_of(single, none[:, None]),
        cache.layers[2].compressed_prefix_slots(single, tensor([0, 5, 5], device)),
    ):
        assert slots.dtype == torch.int64
        assert bool((slots == -1).all())
    # Past the end of the row: no slot, rather than the next row's.
    past = tensor([cache.layers[1].compressed_capacity], device)
    assert cache.layers[1].compressed_slots_of(tensor([0], device), past).tolist() == [-1]


@given(st.integers(0, 2**40))
def test_pitfall_20_slots_do_not_wrap_at_32_bits(position):
    """A table whose pages lie past 2^31 entries; int32 arguments."""
    cache = make()
    far = 2**33
    layer = cache.layers[0]
    layer = LayerCache(layer.window, layer.window_table + far, layer.sliding_window)
    rows = torch.tensor([1], dtype=torch.int32)
    slot = int(layer.window_write_slots(rows, torch.tensor([position])))
    ring = position % layer.window_capacity
    assert slot == (int(layer.window_table[1, ring // 64])) * 64 + ring % 64
    assert slot > 2**33


def test_page_sizes_are_the_published_ones():
    """64 entries per page at ratio 4, 2 at ratio 128, bytes as in specification, section 7."""
    config = ModelConfig.flash(
        num_hidden_layers=4,
        layer_types=(SLIDING, SLIDING, CSA, HCA),
        mlp_layer_types=("moe",) * 4,
        num_nextn_predict_layers=1,
    )
    cache = PagedCache(config, max_sequences=2, max_tokens=512, max_chunk=64)
    assert [layer.ratio for layer in cache.layers] == [0, 0, 4, 128, 0]
    csa, hca = cache.layers[2], cache.layers[3]
    assert cache.layers[0].window.data.shape == (2 * 3, 37440)  # 127 + 64 entries: 3 pages
    assert csa.compressed.data.shape == (2 * 2, 37440)
    assert hca.compressed.data.shape == (2 * 2, 1728)
    assert csa.state.shape == (2, 8 + 8, 2, 1024)
    assert hca.state.shape == (2, 128 + 8, 2, 512)
    assert csa.indexer_pages.data.shape == (2 * 2, 64, 128)
    assert csa.indexer_state.shape == (2, 8 + 8, 2, 256)
    assert csa.state.dtype == torch.float32
    assert hca.indexer_pages is None
    assert bool((csa.state[:, :, 1] == -torch.inf).all())
    assert not csa.state[:, :, 0].any()


class Layer:
    """Raw and compressed entries of one layer, written through the cache as a model would."""

    def __init__(self, cache: PagedCache, index: int, device) -> None:
        self.cache, self.index, self.layer = cache, index, cache.layers[index]
        d = CONFIG.head_dim
        self.overlap = CONFIG.layer_type(index) == CSA
        if self.layer.ratio:
            self.ape = normal(9, (self.layer.ratio, d * (1 + self.overlap)), torch.float64)
            self.ape = self.ape.to(device)
        self.sink = normal(8, (2,)).to(device)

    def step(self, batch: Batch, q, kv, wide, score) -> torch.Tensor:
        layer, rows, positions = self.layer, batch.sequence_of_token, batch.positions
        write_kv(layer.window, kv, layer.window_write_slots(rows, positions))
        compressed = slots = None
        if layer.ratio:
            pooled, first, owner = compressor_update(
                wide, score, self.ape, layer.state, batch.cu_seqlens, batch.starts,
                batch.sequences, overlap=self.overlap,
            )  # fmt: skip
            entry = torch.where(first < 0, -1, first // layer.ratio)
            write_kv(layer.compressed, pooled, layer.compressed_slots_of(owner, entry))
            visible = (positions + 1) // layer.ratio
            compressed = layer.compressed
            slots = layer.compressed_prefix_slots(rows, visible)
        window = layer.window_read_slots(rows, positions)
        return sparse_attention(q, layer.window, window, compressed, slots, self.sink, scale=0.2)


def stream(seed: int, tokens: int, device) -> list[torch.Tensor]:
    d = CONFIG.head_dim
    shapes = [(tokens, 2, d), (tokens, d), (tokens, 2 * d), (tokens, 2 * d)]
    return [normal(seed + i, s, torch.float64).to(device) for i, s in enumerate(shapes)]


def dense(layer: Layer, data: list[torch.Tensor], p: int) -> torch.Tensor:
    """Token p by the words of the specification: its window, then every closed window's entry."""
    q, kv, wide, score = data
    ratio, d = layer.layer.ratio, CONFIG.head_dim
    seen = [kv[max(0, p - CONFIG.sliding_window + 1) : p + 1]]
    for w in range((p + 1) // ratio if ratio else 0):
        own = slice(ratio * w, ratio * w + ratio)
        before = slice(ratio * w - ratio, ratio * w)
        if layer.overlap:
            values, scores = wide[own, d:], score[own, d:] + layer.ape[:, d:]
            if w:
                values = torch.cat((wide[before, :d], values))
                scores = torch.cat((score[before, :d] + layer.ape[:, :d], scores))
        else:
            values, scores = wide[own, :d], score[own, :d] + layer.ape
        seen.append((scores.softmax(0) * values).sum(0, keepdim=True))
    kv = torch.cat(seen)
    logits = torch.cat((0.2 * q[p] @ kv.T, layer.sink.double()[:, None]), 1)
    return logits.softmax(-1)[:, :-1] @ kv


def cut(layer: Layer, data: list[torch.Tensor]) -> list[torch.Tensor]:
    width = CONFIG.head_dim * (2 if layer.overlap else 1)
    return [data[0], data[1], data[2][:, :width], data[3][:, :width]]


@settings(max_examples=15)
@given(
    st.sampled_from([0, 1, 2, 3]),
    seeds(),
    st.integers(1, 90).flatmap(partitions),
    st.integers(0, 9),
)
@example(1, 0, [1] * 12, 0)  # every third step has one token in all
@example(2, 0, [1] * 12, 2)
def test_pitfall_13_any_chunking_sees_all_it_should(device, index, seed, chunks, idle):
    """Prefill, chunks and decode steps of one token, with a neighbour and padding in the batch.

    90 tokens pass the end of the ring of 64 entries.
    """
    cache = make(max_tokens=200, max_chunk=min(max(chunks), 40), device=device)
    layer = Layer(cache, index, device)
    chunks = [part for c in chunks for part in [40] * (c // 40) + [c % 40] * (c % 40 > 0)]
    row, other = 2, 0
    data, noise = stream(seed, sum(chunks), device), stream(seed + 7, 200, device)
    done = 0
    for i, n in enumerate(chunks):
        m = min((idle + i) % 3, n)  # the neighbour's tokens of this round
        before = sum(min((idle + j) % 3, chunks[j]) for j in range(i))
        batch = Batch.from_lengths(
            [m, n], tensor([before, done], device), tensor([other, row], device)
        )
        parts = [
            torch.cat((y[before : before + m], x[done : done + n]))
            for x, y in zip(data, noise, strict=True)
        ]
        out = layer.step(batch, *cut(layer, parts))
        for t in range(n):
            expected = dense(layer, cut(layer, data), done + t)
            assert_within_budget(out[m + t], expected, 1e-12, f"position {done + t}")
        for t in range(m):
            expected = dense(layer, cut(layer, noise), before + t)
            assert_within_budget(out[t], expected, 1e-12, "neighbour")
        cache.advance(batch)
        done += n
        assert int(cache.lengths[row]) == done


@settings(max_examples=10)
@given(st.sampled_from([0, 1, 2]), seeds(), st.integers(1, 30), st.integers(1, 30))
def test_copy_continues_apart(device, index, seed, first, more):
    cache = make(device=device)
    layer = Layer(cache, index, device)
    a, b = cache.allocate(), cache.allocate()
    data, other = stream(seed, first + more, device), stream(seed + 5, first + more, device)
    start = Batch.from_lengths([first], tensor([0], device), tensor([a], device))
    layer.step(start, *cut(layer, [x[:first] for x in data]))
    cache.advance(start)
    cache.copy(a, b)
    assert cache.lengths.tolist()[:2] == [first, first]
    # Both go on in one batch, the copy with other tokens.
    batch = Batch.from_lengths([more, more], cache.lengths[[a, b]], tensor([a, b], device))
    tail = [torch.cat((x[first:], y[first:])) for x, y in zip(data, other, strict=True)]
    out = layer.step(batch, *cut(layer, tail))
    mixed = [torch.cat((x[:first], y[first:])) for x, y in zip(data, other, strict=True)]
    for t in range(more):
        assert_within_budget(out[t], dense(layer, cut(layer, data), first + t), 1e-12)
        assert_within_budget(out[more + t], dense(layer, cut(layer, mixed), first + t), 1e-12)


@settings(max_examples=10)
@given(st.sampled_from([0, 1, 2]), seeds(), st.integers(1, 40), st.integers(1, 40))
def test_a_freed_sequence_leaves_nothing_behind(device, index, seed, first, second):
    """The row is reused after a sequence full of NaN."""
    cache = make(max_sequences=1, device=device)
    layer = Layer(cache, index, device)
    row = cache.allocate()
    bad = [x * torch.nan for x in stream(seed, first, device)]
    batch = Batch.from_lengths([first], cache.lengths[[row]], tensor([row], device))
    layer.step(batch, *cut(layer, bad))
    cache.advance(batch)
    cache.free(row)
    row = cache.allocate()
    data = stream(seed, second, device)
    batch = Batch.from_lengths([second], cache.lengths[[row]], tensor([row], device))
    out = layer.step(batch, *cut(layer, data))
    for t in range(second):
        assert_within_budget(out[t], dense(layer, cut(layer, data), t), 1e-12)


@given(st.lists(st.integers(-1, 2), max_size=4, unique=True), st.data())
def test_advance_ignores_padding(device, rows, data):
    cache = make(device=device)
    cache.lengths.copy_(tensor([5, 6, 7], device))
    starts = data.draw(st.lists(st.integers(0, 9), min_size=len(rows), max_size=len(rows)))
    new = data.draw(st.lists(st.integers(0, 9), min_size=len(rows), max_size=len(rows)))
    cache.advance(Batch.from_lengths(new, tensor(starts, device), tensor(rows, device)))
    expected = [5, 6, 7]
    for row, start, n in zip(rows, starts, new, strict=True):
        if row >= 0 and n:
            expected[row] = start + n
    assert cache.lengths.tolist() == expected


@pytest.mark.gpu
def test_slots_are_captured_in_a_graph():
    """Captured once, replayed with other rows and positions."""
    cache = make(device="cuda")
    rows, positions = tensor([0, 1], "cuda"), tensor([3, 70], "cuda")

    def slots():
        return (
            cache.layers[0].window_read_slots(rows, positions),
            cache.layers[0].window_write_slots(rows, positions),
            cache.layers[1].compressed_prefix_slots(rows, (positions + 1) // 4),
        )

    slots()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = slots()
    rows.copy_(tensor([2, -1], "cuda"))
    positions.copy_(tensor([199, 0], "cuda"))
    graph.replay()
    for a, b in zip(captured, slots(), strict=True):
        assert_bitwise(a, b)


@given(st.lists(st.integers(0, 3), max_size=20))
def test_rows_are_handed_out_once(actions):
    """Compare with a set: 0..2 frees that row, 3 allocates."""
    cache = make()
    taken: set[int] = set()
    for action in actions:
        if action == 3 and len(taken) < 3:
            row = cache.allocate()
            assert row == min({0, 1, 2} - taken)
            assert int(cache.lengths[row]) == 0
            cache.lengths[row] = 9
            taken.add(row)
        elif action == 3:
            with pytest.raises(RuntimeError, match="all 3 sequences are taken"):
                cache.allocate()
        elif action in taken:
            cache.free(action)
            taken.remove(action)
        else:
            for refused in (cache.free, cache.reset):
                with pytest.raises(ValueError, match=f"sequence is {action}, wanted one that is"):
                    refused(action)


def test_copy_and_free_refuse_rows_that_are_not_allocated():
    cache = make()
    row = cache.allocate()
    for pair in ((row, 1), (1, row), (row, 5), (-1, row)):
        with pytest.raises(ValueError, match="wanted one that is allocated"):
            cache.copy(*pair)
    with pytest.raises(ValueError, match="sequence is 3"):
        cache.free(3)
    cache.lengths[row] = 4
    cache.reset(row)
    assert int(cache.lengths[row]) == 0


def test_limits_are_named():
    cache = make(max_tokens=100, max_chunk=40)
    cache.check([40, 0], [60, 100])
    with pytest.raises(ValueError, match=r"entry 1 of the batch has 41 new tokens.*\(40\)"):
        cache.check([1, 41], [0, 0])
    with pytest.raises(ValueError, match=r"would reach 61 \+ 40 tokens.*max_tokens \(100\)"):
        cache.check([40], [61])
    with pytest.raises(ValueError, match=r"would reach -1 \+ 1"):
        cache.check([1], [-1])
    for name in ("max_sequences", "max_tokens", "max_chunk"):
        with pytest.raises(ValueError, match=f"{name} is 0, wanted >= 1"):
            make(**{name: 0})
    with pytest.raises(ValueError, match="entry_format is 'fp4'"):
        make(entry_format="fp4")
    with pytest.raises(ValueError, match="index_format is 'fp8', wanted 'plain', 'index_fp8'"):
        make(index_format="fp8")
    with pytest.raises(ValueError, match="a sliding-window layer has no compressed entries"):
        cache.layers[0].compressed_slots_of(tensor([0]), tensor([0]))


@given(st.integers(1, 300), st.integers(1, 300))
def test_the_ring_holds_a_window_and_a_chunk(max_tokens, max_chunk):
    cache = make(max_tokens=max_tokens, max_chunk=max_chunk, max_sequences=1)
    chunk = min(max_chunk, max_tokens)
    needed = min(CONFIG.sliding_window - 1 + max(chunk, 8), max_tokens + 8)
    assert needed <= cache.layers[0].window_capacity < needed + 64
    for layer in cache.layers[1:3]:
        assert layer.compressed_capacity >= max_tokens // layer.ratio


def test_format_follows_numerics_and_dtypes():
    deepseek = PagedCache(CONFIG, max_sequences=1, max_tokens=64)
    assert {p.entry_format for p in (deepseek.layers[1].window, deepseek.layers[1].compressed)} == {
        "fp8"
    }
    assert deepseek.layers[1].indexer_pages.entry_format == "plain"
    for name in ("index_fp8", "index_mxfp4"):
        compact = PagedCache(CONFIG, max_sequences=1, max_tokens=64, index_format=name)
        assert compact.layers[1].indexer_pages.entry_format == name
        assert compact.layers[1].compressed.entry_format == "fp8"
        assert compact.nbytes() < deepseek.nbytes()
    other = PagedCache(
        CONFIG.replace(numerics="transformers"), max_sequences=1, max_tokens=64, dtype=torch.float32
    )
    assert other.layers[1].window.data.dtype == torch.float32
    assert other.layers[1].window.entry_format == "plain"
    assert make().layers[2].state.dtype == torch.float64
    assert len(make().layers) == 4


def test_nbytes_counts_everything_once():
    cache = make(max_sequences=2, entry_format="fp8", dtype=torch.bfloat16)
    d, total = CONFIG.head_dim, 2 * 8  # lengths
    ring = 64  # 8 - 1 + 40 tokens
    layout = cache.layers[0].window.layout
    total += 4 * 2 * layout.page_bytes(64) + 2 * 8 * (ring // 64)
    csa, hca = cache.layers[1], cache.layers[2]
    assert csa.compressed_table.shape == (2, 1)
    assert hca.compressed_table.shape == (2, 1)
    total += 2 * layout.page_bytes(64) + 2 * 64 * CONFIG.index_head_dim * 2 + 2 * 8
    total += 2 * (8 + 8) * 2 * 2 * (d + CONFIG.index_head_dim) * 4
    total += 2 * layout.page_bytes(32) + 2 * 8
    total += 2 * (8 + 8) * 2 * d * 4
    assert cache.nbytes() == total


def test_slots_compile_whole(device):
    cache = make(device=device)
    layer = cache.layers[1]

    def slots(rows, positions):
        return (
            layer.window_read_slots(rows, positions),
            layer.compressed_prefix_slots(rows, (positions + 1) // layer.ratio),
        )

    compiled = torch.compile(slots, fullgraph=True, backend="aot_eager")
    rows, positions = tensor([0, 2, -1], device), tensor([3, 70, 5], device)
    for a, b in zip(compiled(rows, positions), slots(rows, positions), strict=True):
        assert_bitwise(a, b)


def test_written_entries_read_back_through_slots(device):
    """Two rows at the same positions do not meet."""
    cache = make(device=device)
    layer = cache.layers[0]
    positions = torch.arange(30, 70, device=device)
    values = {}
    for row in (0, 1):
        values[row] = normal(row, (40, CONFIG.head_dim), torch.float64).to(device)
        rows = torch.full_like(positions, row)
        write_kv(layer.window, values[row], layer.window_write_slots(rows, positions))
    for row in (0, 1):
        seen = layer.window_read_slots(tensor([row], device), positions[-1:])
        back = read_kv(layer.window, seen, torch.float64)[0]
        assert_bitwise(back, values[row][-CONFIG.sliding_window :])
