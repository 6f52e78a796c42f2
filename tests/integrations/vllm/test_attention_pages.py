"""vLLM's cache pages: bytes that its own kernels write, against this package's operators."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.ops.compressor_paged import compress_write_paged
from dsv4.ops.indexer import quantize_index_queries
from dsv4.ops.kv_cache import read_kv, write_kv
from dsv4.ops.rope import rope_tables
from dsv4.testing.assertions import assert_bitwise, assert_within_budget
from dsv4.testing.strategies import generator, normal, seeds

pytest.importorskip("triton")
pytest.importorskip("vllm", reason="vLLM is not installed")

from dsv4.integrations.vllm.cache_views import PagesOf, index_pages, kv_pages
from tests.integrations.vllm import interpreted

HEAD, ROPE, KEY = 512, 64, 128
LAYERS = 3  # that share a block


def shared_blocks(blocks: int, entries: int, entry_bytes: int, page: int) -> torch.Tensor:
    """The middle layer's cache of blocks that hold pages of three, as vLLM's layout packs them."""
    memory = torch.zeros(blocks, LAYERS, page, dtype=torch.uint8)
    return memory[:, 1].as_strided(
        (blocks, entries, entry_bytes), (LAYERS * page, entry_bytes, 1), page
    )


def layer_bytes(cache: torch.Tensor) -> torch.Tensor:
    """All bytes of the blocks, those of other layers too."""
    return torch.tensor([], dtype=torch.uint8).set_(cache.untyped_storage())


@pytest.mark.parametrize(("entries", "page"), [(64, 37440), (2, 1728), (32, 19008)])
@settings(max_examples=8)
@given(seeds(), st.sampled_from([1e-6, 1e-3, 1.0, 448.0, 2.0**20]))
def test_vllm_and_this_package_store_the_same_bytes(entries, page, seed, size):
    """Also where a group's largest magnitude is 448 times a power of two, or nothing."""
    kv = (normal(seed, (9, HEAD)) * size).to(torch.bfloat16)
    kv[0, :64] = 0
    kv[1, :64] = kv[1, :64].clamp(-1, 1) * (448 / 1024)
    kv[1, 3] = 448 / 1024
    kv[2, 64:128] = torch.linspace(-450, 450, 64)
    slots = torch.randperm(4 * entries, generator=generator(seed))[:9]
    slots = torch.cat((slots, slots.new_full((9 - slots.shape[0],), -1)))
    slots[5] = -1
    theirs, mine = (shared_blocks(4, entries, 584, page) for _ in range(2))
    interpreted.insert(kv, theirs, slots)
    write_kv(kv_pages(mine, HEAD, ROPE), kv, slots)
    assert_bitwise(layer_bytes(mine), layer_bytes(theirs))
    stored = slots >= 0
    back = read_kv(kv_pages(theirs, HEAD, ROPE), slots[stored])
    assert_bitwise(back[:, -ROPE:], kv[stored, -ROPE:])


class Compression:
    """States in blocks and tokens of two sequences, which end a window here and there."""

    def __init__(self, seed, ratio, dims):
        width = (2 if ratio == 4 else 1) * dims
        block, lengths = (4 if ratio == 4 else 8), (ratio + 3, 2 * ratio)
        self.ratio, self.dims, self.block = ratio, dims, block
        self.kv_score = normal(seed, (sum(lengths) + 1, 2 * width))
        self.ape = normal(seed + 1, (ratio, width))
        self.norm = 1 + 0.1 * normal(seed + 2, (dims,))
        frequencies = torch.rand(ROPE // 2, generator=generator(seed))
        self.angles = torch.cat(rope_tables(torch.arange(4 * ratio), frequencies), dim=1)
        columns = -(-4 * ratio // block)
        order = torch.randperm(2 * columns, generator=generator(seed)).view(2, columns)
        self.table = order.to(torch.int32)
        self.state = normal(seed + 3, (2 * columns, block, 2 * width))
        starts = (ratio - 1, 0)
        self.positions = torch.cat(
            [torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]
            + [torch.tensor([7])]
        )
        self.rows = torch.tensor([0] * lengths[0] + [1] * lengths[1] + [0], dtype=torch.int32)
        blocks = self.table[self.rows, self.positions // block].to(torch.int64)
        self.state_slots = blocks * block + self.positions % block
        self.state_slots[-1] = -1
        count = self.positions.shape[0]
        slots = torch.randperm(2 * count, generator=generator(seed))[:count]
        closes = (self.positions + 1) % ratio == 0
        self.slots = torch.where(closes & (self.state_slots >= 0), slots, -1)

    def theirs(self, cache):
        state = self.state.clone()
        interpreted.save_states(self.kv_score, self.ape, self.positions, state, self.state_slots)
        batch = (self.rows, self.positions, self.state_slots, self.table, self.slots)
        interpreted.compress(state, batch, self.norm, self.angles, cache, self.ratio)
        return state

    def mine(self, pages):
        state = self.state.clone()
        compress_write_paged(
            *self.kv_score.chunk(2, dim=-1),
            self.ape,
            state,
            self.positions,
            self.rows,
            self.state_slots,
            self.table,
            self.slots,
            self.norm,
            self.angles,
            pages,
            overlap=self.ratio == 4,
        )
        return state


@pytest.mark.parametrize(("ratio", "dims"), [(4, HEAD), (8, HEAD), (4, KEY)])
@settings(max_examples=4)
@given(seeds())
def test_states_and_entries_are_where_vllm_has_them(ratio, dims, seed):
    """States bit for bit; entries up to the roundings to bfloat16 that vLLM leaves out."""
    problem = Compression(seed, ratio, dims)
    size, page = (584, 37440) if dims == HEAD else (132, 8640)
    theirs, mine = (shared_blocks(2, 64, size, page) for _ in range(2))
    views = (
        [kv_pages(cache, HEAD, ROPE) for cache in (theirs, mine)]
        if dims == HEAD
        else [index_pages(cache, KEY, "index_fp8") for cache in (theirs, mine)]
    )
    assert_bitwise(problem.mine(views[1]), problem.theirs(theirs))
    slots = torch.arange(128)
    reference, actual = (read_kv(pages, slots, torch.float64) for pages in views)
    assert_bitwise(reference.any(1), actual.any(1), "which entries")
    assert int(actual.any(1).sum()) == int((problem.slots >= 0).sum())
    # Three roundings to bfloat16 at most, which may tip one to E4M3: a step of its group.
    largest = reference.abs().amax(-1, keepdim=True)
    assert_within_budget(actual, reference, 0.14 * reference.abs() + 2.0**-9 * largest)


@settings(max_examples=5)
@given(seeds(), st.integers(1, 5))
def test_index_queries_have_vllm_codes_and_weights(seed, tokens):
    q = normal(seed, (tokens, 3, KEY)).to(torch.bfloat16)
    weights = normal(seed + 1, (tokens, 3))
    positions = torch.randint(0, 50, (tokens,), generator=generator(seed))
    frequencies = torch.rand(ROPE // 2, generator=generator(seed))
    cos, sin = rope_tables(torch.arange(50), frequencies)
    codes, folded = interpreted.index_queries(positions, q, torch.cat((cos, sin), 1), weights)
    mine, own = quantize_index_queries(
        q,
        cos[positions],
        sin[positions],
        weights,
        rotate=False,
        query_format="fp8",
        weight_scale=KEY**-0.5 * 3**-0.5,
    )
    assert_bitwise(mine.view(torch.uint8), codes.view(torch.uint8))
    assert_within_budget(own, folded.double(), 2.0**-21 * folded.double().abs())


def test_a_cache_that_is_not_of_such_pages_is_refused():
    plain = torch.zeros(2, 64, 584, dtype=torch.uint8)
    with pytest.raises(TypeError, match=r"KV cache is torch\.bfloat16, expected uint8"):
        kv_pages(plain.to(torch.bfloat16), HEAD, ROPE)
    with pytest.raises(
        ValueError, match=r"shape \[2, 64, 584\], expected \[blocks, entries, 132\]"
    ):
        index_pages(plain, KEY, "index_fp8")
    with pytest.raises(ValueError, match=r"strides \[37376, 584, 1\], expected \[37440 or more"):
        kv_pages(plain, HEAD, ROPE)


def test_a_view_is_made_once_for_a_tensor():
    views, caches = PagesOf(), [shared_blocks(2, 64, 584, 37440) for _ in range(2)]
    first = views.kv(caches[0], HEAD, ROPE)
    assert views.kv(caches[0], HEAD, ROPE) is first
    assert views.kv(caches[1], HEAD, ROPE) is not first
