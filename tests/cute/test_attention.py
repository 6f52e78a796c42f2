"""The CuTeDSL kernel of attention: plans and machine code here, results on a GPU."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4 import device as machine
from dsv4 import dispatch
from dsv4.cute import attention as launcher
from dsv4.cute import supports
from dsv4.cute.sm90.attention_plan import (
    BLOCK,
    COLUMN_CLUSTERS,
    HEADS,
    AttentionPlan,
    ColumnsPlan,
    NarrowPlan,
    attention_plan,
    head_tiles,
    kv_splits,
)
from dsv4.ops.attention import SparseAttentionArgs, sparse_attention
from dsv4.ops.kv_cache import Pages, read_kv, write_kv
from dsv4.testing.assertions import assert_bitwise, assert_within_budget
from dsv4.testing.strategies import normal, seeds, strided
from tests._tools.covering import covering
from tests.ops.attention_cases import angles, rotated_back, same_nans, softmax

BF16, F64 = torch.bfloat16, torch.float64
CUDA = torch.device("cuda")
# Around the borders of blocks of 64, of the window and of what is looked at together.
lengths = st.sampled_from([0, 1, 3, 4, 63, 64, 65, 127, 128, 129, 200, 513])
head_counts = st.sampled_from([1, 8, 16, 17, 64, 65, 128])
COLUMNS = {f"columns {blocks}": (ColumnsPlan(blocks), blocks) for blocks in COLUMN_CLUSTERS}
CLUSTERS = {
    "together": (AttentionPlan(False, paired=True), 2),
    "four warps": (AttentionPlan(False, dequant_warps=4), 1),
    "narrow": (NarrowPlan(), 8),
    "narrow 9": (NarrowPlan(9), 9),
    "narrow 12": (NarrowPlan(12), 12),
    "narrow 16": (NarrowPlan(16), 16),
    "narrow of 64": (NarrowPlan(8, 64), 8),
    "narrow 9 of 64": (NarrowPlan(9, 64), 9),
    "narrow 12 of 64": (NarrowPlan(12, 64), 12),
    "narrow 16 of 64": (NarrowPlan(16, 64), 16),
    **COLUMNS,
}
counts = st.sampled_from([None, 1, 2, 3, 7, *CLUSTERS])


@contextlib.contextmanager
def splits(count: int | str | None):
    """Every token split over ``count`` blocks, or to those of a cluster; None: as planned.

    Clusters that do not all fit a GPU at a time take turns; a plan would be for smaller ones.
    """
    before = launcher.attention_plan, launcher._fitting_plan
    if count is not None:
        chosen = CLUSTERS.get(count) or (AttentionPlan(count > 1), count)
        launcher.attention_plan = lambda *sizes: chosen
        launcher._fitting_plan = lambda plan, *sizes: plan
    try:
        yield
    finally:
        launcher.attention_plan, launcher._fitting_plan = before


class Case:
    """Pools of pages of 64 and of 2 entries, with duplicates and -1 among the slots."""

    def __init__(self, seed, tokens=3, widths=(128, 70), heads=16, device=CUDA):
        gen = torch.Generator().manual_seed(seed)
        self.q = normal(seed, (tokens, heads, 512), BF16).to(device)
        self.sink = normal(seed + 1, (heads,), torch.float32).to(device)
        self.pools, self.slots = [], []
        for i, (width, size) in enumerate(zip(widths, (64, 2), strict=True)):
            pages = Pages.allocate(256 // size, size, 512, 64, device=device)
            x = normal(seed + 2 + i, (pages.num_slots, 512), BF16).to(device)
            write_kv(pages, x, torch.arange(pages.num_slots, device=device), backend="reference")
            self.pools.append(pages)
            slots = torch.randint(-20, pages.num_slots, (tokens, width), generator=gen)
            self.slots.append(slots.clamp(min=-1).to(device))

    def run(self, q=None, sink=None, scale=512**-0.5, backend="cute", cos=None, sin=None):
        (window, compressed), (slots, chosen) = self.pools, self.slots
        q, sink = self.q if q is None else q, self.sink if sink is None else sink
        return sparse_attention(
            q,
            window,
            slots,
            compressed,
            chosen,
            sink,
            scale=scale,
            cos=cos,
            sin=sin,
            backend=backend,
        )

    def entries(self, token):
        read = [
            read_kv(pages, slots[token][slots[token] >= 0], F64, backend="reference")
            for pages, slots in zip(self.pools, self.slots, strict=True)
        ]
        return torch.cat(read)

    def check(self, out, q=None, sink=None, scale=512**-0.5, cos=None, sin=None):
        """Compare with a softmax in float64; the weights' exp2 errs by up to 2^-22 of them."""
        q, sink = self.q if q is None else q, self.sink if sink is None else sink
        for t in range(q.shape[0]):
            kv = self.entries(t)
            if kv.shape[0] == 0:
                assert not out[t].any()
                continue
            truth, budget = softmax(q[t].double(), kv, sink.double(), scale, 2.0**-11.6)
            budget = budget + 2.0**-21 * float(kv.abs().max())
            if cos is not None:
                truth, budget = rotated_back(truth, budget, cos[t], sin[t])
            assert_within_budget(out[t], truth, budget)


@pytest.mark.gpu
@example(seed=0, tokens=2, width=513, second=129, heads=65, count=3)
@example(seed=1, tokens=200, width=65, second=64, heads=64, count=None)
@example(seed=2, tokens=3, width=513, second=200, heads=128, count="together")
@example(seed=3, tokens=4, width=129, second=513, heads=65, count="narrow")
@example(seed=4, tokens=1, width=128, second=1024, heads=128, count=None)
@example(seed=8, tokens=4, width=128, second=8569, heads=16, count=None)
@example(seed=9, tokens=2, width=128, second=4224, heads=90, count=None)
@example(seed=6, tokens=3, width=513, second=129, heads=17, count="columns 1")
@example(seed=7, tokens=3, width=129, second=513, heads=16, count="columns 2")
@example(seed=8, tokens=2, width=65, second=1, heads=8, count="columns 8")
@example(seed=5, tokens=64, width=128, second=513, heads=64, count=None)
@given(seeds(), st.integers(0, 4), lengths, lengths, head_counts, counts)
def test_equals_a_softmax(seed, tokens, width, second, heads, count):
    case = Case(seed, tokens, (width, second), heads)
    with splits(count):
        case.check(case.run())


@pytest.mark.gpu
@example(seed=0, tokens=200, heads=65, count=None)
@example(seed=1, tokens=9, heads=65, count="together")
@example(seed=2, tokens=3, heads=128, count="narrow")
@example(seed=3, tokens=3, heads=16, count="columns 1")
@example(seed=4, tokens=3, heads=17, count="columns 8")
@given(seeds(), st.integers(1, 9), head_counts, counts)
def test_the_last_dims_are_rotated_back(seed, tokens, heads, count):
    """The dims before them keep their bits; tables of bfloat16 and strided ones are read, too."""
    case = Case(seed, tokens, (65, 70), heads)
    cos, sin = angles(seed, tokens, 32, CUDA)
    with splits(count):
        plain, out = case.run(), case.run(cos=cos, sin=sin)
        assert_bitwise(case.run(cos=strided(cos), sin=strided(sin)), out)
        narrow = [table.to(BF16) for table in (cos, sin)]
        rounded = case.run(cos=narrow[0], sin=narrow[1])
        assert_bitwise(rounded, case.run(cos=narrow[0].float(), sin=narrow[1].float()))
        still = case.run(cos=torch.ones_like(cos), sin=torch.zeros_like(sin))
    assert_bitwise(out[..., :448], plain[..., :448])
    assert_within_budget(still, plain, 0.0)
    case.check(out, cos=cos, sin=sin)


@pytest.mark.gpu
@given(seeds(), counts, st.sampled_from([0.0, 0.1, 30.0, 1e4]))
def test_large_logits(seed, count, magnitude):
    case = Case(seed)
    q = (case.q.float() * magnitude).to(BF16)
    with splits(count):
        out = case.run(q=q)
        assert bool(out.isfinite().all())
        case.check(out, q=q)
        assert not case.run(q=q, sink=torch.full((16,), 1e30, device=CUDA)).any()


@pytest.mark.gpu
@given(seeds(), counts)
def test_a_reference_that_keeps_growing(seed, count):
    """Each entry's logits far above those before: every block changes what weights are by."""
    case = Case(seed, 1, (200, 0), 16)
    case.slots[0] = torch.arange(200, device=CUDA)[None]
    steps = torch.linspace(0, 4, 256, device=CUDA)[:, None].expand(-1, 512)
    every = torch.arange(256, device=CUDA)
    write_kv(case.pools[0], steps.to(BF16).contiguous(), every, backend="reference")
    q = torch.full((1, 16, 512), 2.0, dtype=BF16, device=CUDA)
    with splits(count):
        case.check(case.run(q=q), q=q)


@pytest.mark.gpu
@given(seeds(), counts, st.integers(0, 2))
def test_unselected_entries_have_no_effect(seed, count, token):
    """NaN in every entry that no slot of a token names."""
    case = Case(seed)
    with splits(count):
        expected = case.run()
        for pages, slots in zip(case.pools, case.slots, strict=True):
            named = set(slots[token].tolist())
            others = [s for s in range(pages.num_slots) if s not in named]
            bad = torch.full((len(others), 512), torch.nan, device=CUDA)
            write_kv(pages, bad, torch.tensor(others, device=CUDA), backend="reference")
        assert_bitwise(case.run()[token], expected[token])


@pytest.mark.gpu
@given(seeds(), counts, st.sampled_from([torch.nan, torch.inf, -torch.inf]))
def test_a_bad_query_stays_in_its_token_and_head(seed, count, bad):
    case = Case(seed)
    with splits(count):
        expected = case.run()
        q = case.q.clone()
        q[1, 3, 7] = bad
        out = case.run(q=q)
        same_nans(out, case.run(q=q, backend="reference"))
    keep = torch.ones(3, 16, dtype=torch.bool, device=CUDA)
    keep[1, 3] = False
    assert_bitwise(out[keep], expected[keep])


@pytest.mark.gpu
@given(seeds(), st.sampled_from([torch.nan, torch.inf, -torch.inf, 1e38, -1e38]), counts)
def test_extreme_sinks(seed, value, count):
    case = Case(seed)
    for slots in case.slots:
        slots[0] = -1
    sink = case.sink.clone()
    sink[1] = value
    with splits(count):
        out = case.run(sink=sink)
    same_nans(out, case.run(sink=sink, backend="reference"))
    if value < torch.inf:
        case.check(out, sink=sink)


@pytest.mark.gpu
@given(seeds(), counts)
def test_slots_that_end_early_and_long_rows_of_none(seed, count):
    case = Case(seed, 4, (130, 700))
    case.slots[0][:, 70:] = -1
    case.slots[0][1, 129] = 3
    case.slots[1][0, 1:] = -1
    case.slots[1][1, :600] = -1
    case.slots[1][2] = -7
    case.slots[1][3, 64:] = torch.iinfo(torch.int64).min
    with splits(count):
        case.check(case.run())


@pytest.mark.gpu
@given(seeds(), st.sampled_from([1, *COLUMNS]), st.sampled_from([1086, 1087, 1088, 1089, 1499]))
def test_the_last_slot_of_a_row_longer_than_what_is_looked_at_together(seed, count, last):
    """1280 slots are: three blocks of the window and 1088 others."""
    case = Case(seed, 3, (130, 1500))
    case.slots[1][0, last + 1 :] = -1
    case.slots[1][1] = -1
    case.slots[1][1, last] = 7
    case.slots[0][2] = -1
    case.slots[1][2, :last] = -1
    with splits(count):
        case.check(case.run())


@pytest.mark.gpu
@given(seeds(), st.integers(2, 300), st.sampled_from([1, *CLUSTERS]))
def test_a_token_has_the_same_bits_alone_again_and_in_other_pages(seed, tokens, count):
    """Each token has the same number of CTAs; many tokens take turns on an SM."""
    case = Case(seed, tokens, (65, 64))
    with splits(count):
        together = case.run()
        assert_bitwise(case.run(), together)
        shuffled = torch.randperm(case.pools[0].num_slots // 64, device=CUDA)
        data = case.pools[0].data
        case.pools[0].data[shuffled] = data.clone()
        slots = case.slots[0]
        case.slots[0] = torch.where(slots < 0, slots, shuffled[slots // 64] * 64 + slots % 64)
        assert_bitwise(case.run(), together)
        case.q, case.slots = case.q[1:2], [s[1:2] for s in case.slots]
        assert_bitwise(case.run(), together[1:2])


@pytest.mark.gpu
@given(seeds())
def test_types_of_slots_views_and_no_compressed_pages(seed):
    case = Case(seed)
    expected = case.run()
    (window, other), (slots, chosen) = case.pools, case.slots

    def call(q=case.q, a=slots, b=chosen, c=other, sink=case.sink):
        return sparse_attention(q, window, a, c, b, sink, scale=512**-0.5, backend="cute")

    for a, b in ((slots.int(), chosen.int()), (slots.int(), chosen), (slots, chosen.int())):
        assert_bitwise(call(a=a, b=b), expected)
    assert_bitwise(call(q=strided(case.q), a=strided(slots), sink=strided(case.sink)), expected)
    assert_bitwise(call(q=case.q.transpose(0, 1).contiguous().transpose(0, 1)), expected)
    assert_bitwise(call(sink=case.sink.to(BF16)), call(sink=case.sink.to(BF16).float()))
    assert_bitwise(call(b=None, c=None), call(b=chosen[:, :0]))


@pytest.mark.gpu
@example(seed=0, count=2)
@example(seed=1, count=11)
@given(seeds(), st.sampled_from([1, 2, *CLUSTERS]))
def test_every_byte_of_an_entry_is_read_as_the_cache_reads_it(seed, count):
    """One entry, no sink and q = 0: the result is the entry. Any bytes, scales of NaN included."""
    case = Case(seed, 64, (1, 0))
    gen = torch.Generator().manual_seed(seed)
    shape = case.pools[0].data.shape
    case.pools[0].data.copy_(torch.randint(0, 256, shape, generator=gen, dtype=torch.uint8))
    case.slots[0] = torch.randint(0, 256, (64, 1), generator=gen).to(CUDA)
    sink = torch.full((16,), -torch.inf, device=CUDA)
    with splits(count):
        out = case.run(q=torch.zeros_like(case.q), sink=sink)
    entry = read_kv(case.pools[0], case.slots[0][:, 0], BF16, backend="reference")
    bad = ~entry.isfinite().all(-1)
    assert_within_budget(out[~bad], entry[~bad][:, None].expand(-1, 16, -1), 0.0)
    assert bool(out[bad].isnan().all())


@pytest.mark.gpu
@given(st.integers(0, 255))
def test_every_scale(byte):
    """All finite codes under one scale; what bfloat16 rounds, rounded once."""
    pages = Pages.allocate(1, 4, 512, 64, device=CUDA)
    codes = torch.arange(448, device=CUDA).to(torch.uint8)
    pages.data[0, :448] = torch.where(codes & 0x7F == 0x7F, 0, codes)
    pages.data[0, 448:576] = 0
    pages.data[0, 4 * 576 : 4 * 576 + 7] = byte
    q = torch.zeros(4, 64, 512, dtype=BF16, device=CUDA)
    slots = torch.zeros(4, 1, dtype=torch.int64, device=CUDA)
    none = torch.full((64,), -torch.inf, device=CUDA)
    out = sparse_attention(q, pages, slots, None, None, none, scale=1.0, backend="cute")
    entry = read_kv(pages, slots[:, 0], BF16, backend="reference")
    if bool(entry.isfinite().all()):
        # A zero may have lost its sign; a subnormal bfloat16 is a sum of float32 as well.
        assert_within_budget(out, entry[:, None].expand(-1, 64, -1), 0.0)
    else:
        assert bool(out.isnan().all())


@pytest.mark.gpu
def test_offsets_past_two_gigabytes():
    if torch.cuda.mem_get_info()[0] < 4 << 30:
        pytest.skip("needs 4 GB")
    count = 2**31 // 37376 + 3
    pages = Pages.allocate(count, 64, 512, 64, device=CUDA)
    case = Case(0, 1, (3, 1), 64)
    case.slots[0] = torch.tensor([[count * 64 - 1, 5, count * 64 - 64]], device=CUDA)
    write_kv(pages, normal(1, (3, 512), BF16).to(CUDA), case.slots[0][0], backend="reference")
    case.pools[0] = pages
    for count in (1, "narrow", "columns 2"):
        with splits(count):
            case.check(case.run())


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 4, *CLUSTERS])
def test_a_captured_graph_replays_on_new_contents(count):
    case, other = Case(0, 5, (128, 512), 64), Case(9, 5, (128, 512), 64)
    with splits(count):
        case.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = case.run()
        for seed in range(20):
            other = Case(seed, 5, (128, 512), 64)
            for mine, new in zip(case.slots, other.slots, strict=True):
                mine.copy_(new)
            case.q.copy_(other.q)
            out.fill_(torch.nan)
            graph.replay()
            assert_bitwise(out, case.run())


@pytest.mark.gpu
def test_auto_takes_it():
    for tokens, heads, second in ((1, 16, 8), (3, 64, 1300), (1, 128, 4300), (9, 128, 8)):
        case = Case(0, tokens, (8, second), heads)
        (window, other), (slots, chosen) = case.pools, case.slots
        args = (case.q, window, slots, other, chosen, case.sink)
        assert dispatch.explain(sparse_attention, *args, scale=1.0).chosen == "cute"


@given(
    st.integers(1, 9000),
    st.sampled_from([1, 8, 16, 24, 64, 128]),
    st.tuples(st.integers(0, 300), st.integers(0, 9000)),
    st.sampled_from([1, 78, 132, 148]),
)
def test_a_token_is_split_over_no_more_ctas_than_it_has_blocks(tokens, heads, widths, processors):
    count = kv_splits(tokens, heads, widths, processors)
    assert 1 <= count <= max(1, sum(-(-width // BLOCK) for width in widths))
    programs = tokens * head_tiles(heads)
    assert count == 1 or programs * count <= 2 * processors
    assert (head_tiles(heads) - 1) * HEADS < heads <= head_tiles(heads) * HEADS


def test_what_is_chosen():
    """Splits as measured on a GPU of 132 SMs; ``kv_splits`` may be any where it is not named."""
    alone, split, two = AttentionPlan(False), AttentionPlan(True), CLUSTERS["together"]
    assert attention_plan(64, 128, (128, 1024), 132) == (alone, 1)
    for tokens in (67, 1024, 4096):
        assert attention_plan(tokens, 128, (128, 1024), 132) == CLUSTERS["four warps"]
    for tokens, heads in ((1, 64), (1, 128), (2, 64), (8, 16)):
        assert attention_plan(tokens, heads, (128, 512), 132) == CLUSTERS["narrow 16 of 64"]
    assert attention_plan(1, 128, (128, 1024), 132) == CLUSTERS["narrow 16"]
    for tokens in (32, 48, 64):
        assert attention_plan(tokens, 64, (128, 512), 132) == two
    assert attention_plan(32, 128, (128, 1024), 132) == two
    for tokens, blocks in ((48, 2), (64, 2), (66, 2), (132, 1), (1024, 1), (4096, 1)):
        for second in (512, 1024):
            assert attention_plan(tokens, 16, (128, second), 132) == COLUMNS[f"columns {blocks}"]
    for tokens, blocks in ((13, 8), (16, 4), (24, 4), (32, 2)):
        assert attention_plan(tokens, 16, (128, 512), 132) == COLUMNS[f"columns {blocks}"]
    assert attention_plan(32, 16, (128, 1024), 132) == (split, 4)
    assert attention_plan(20, 64, (128, 512), 132) == (split, 6)
    for tokens, heads in ((20, 128), (64, 64)):
        assert attention_plan(tokens, heads, (128, 1), 132) == two
    for tokens, blocks in ((4, 4), (6, 4), (12, 2), (16, 2)):
        assert attention_plan(tokens, 64, (128, 512), 132) == COLUMNS[f"columns {blocks}"]
    assert attention_plan(3, 64, (128, 512), 132) == CLUSTERS["narrow"]
    # Parts, of 18 blocks of entries, of 128 and then of 64 heads.
    for tokens, count in ((2, 16), (3, 11), (4, 8), (6, 11), (8, 8), (12, 5), (16, 4)):
        assert attention_plan(tokens, 128, (128, 1024), 132) == (split, count)
    for tokens, count in ((4, 16), (8, 8), (12, 11), (16, 8), (24, 5), (32, 4)):
        assert attention_plan(tokens, 64, (128, 1024), 132) == (split, count)
    # C128A of 256k, 512k and 1M tokens.
    for tokens, heads, second in ((3, 64, 2048), (1, 128, 4096), (1, 64, 8192), (4, 16, 8192)):
        assert isinstance(attention_plan(tokens, heads, (128, second), 132)[0], NarrowPlan)
    for tokens, heads in ((1, 128), (2, 64), (5, 16)):
        assert attention_plan(tokens, heads, (128, 8192), 132)[0] == split
    assert attention_plan(64, 64, (64, 0), 132) == (alone, 1)


@given(
    st.integers(1, 9000),
    st.sampled_from([1, 8, 16, 24, 64, 128]),
    st.tuples(st.integers(0, 300), st.integers(0, 9000)),
)
def test_clusters_that_share_a_token_are_all_there_at_a_time(tokens, heads, widths):
    plan, count = attention_plan(tokens, heads, widths, 132)
    if plan.ctas > 1:
        assert count == plan.ctas
        of = 16 if isinstance(plan, NarrowPlan | ColumnsPlan) else HEADS
        assert tokens * -(-heads // of) * count <= 132


def test_clusters_are_smaller_where_a_gpu_has_no_room_for_all(monkeypatch):
    class Kernel:
        def __init__(self, plan, arch):
            self.clusters = {8: 15, 9: 9, 12: 7, 16: 7}[plan.ctas]

        def prepare(self, device):
            return self.clusters

    monkeypatch.setattr(launcher, "loaded", Kernel)
    launcher._fitting_plan.cache_clear()
    # Of 36 steps 9 blocks have 4 each, or 2 of twice as many entries, and 8 have 5; of 20, both
    # have 3.
    expected = {
        ((128, 1024), 7): NarrowPlan(16),
        ((128, 1024), 8): NarrowPlan(9, 64),
        ((128, 512), 8): NarrowPlan(8),
        ((128, 1024), 10): NarrowPlan(8),
    }
    for (widths, clusters), plan in expected.items():
        assert launcher._fitting_plan(NarrowPlan(16), widths, clusters, 0) == plan
        assert launcher._fitting_plan(NarrowPlan(), widths, clusters, 0) == NarrowPlan()
    assert launcher._fitting_plan(NarrowPlan(), (128, 512), 16, 0) == NarrowPlan()
    launcher._fitting_plan.cache_clear()


def unsupported_reason(
    heads=64,
    tokens=4,
    page=64,
    size=(512, 64),
    scale=1.0,
    offset=0,
    rotated=64,
):
    """The reason for a call on tensors that are not looked at."""
    width = size[0] + size[1] + (size[0] - size[1]) // 64 + 1
    data = torch.empty(3 * page * width + offset, dtype=torch.uint8)[offset:].view(3, page * width)
    q = torch.empty(tokens, heads, size[0], dtype=BF16)
    slots = torch.empty(tokens, 3, dtype=torch.int64)
    pool, others = (data, page, "fp8"), torch.empty(tokens, 3, dtype=torch.int64)
    tables = (torch.empty(tokens, rotated // 2),) * 2 if rotated else (None, None)
    sink = torch.empty(heads)
    args = SparseAttentionArgs(q, *pool, slots, *pool, others, sink, size[1], scale, *tables)
    return supports.sparse_attention(dispatch.Call("sparse_attention", args, CUDA))


@pytest.fixture
def pretended():
    """A GPU of any capability, and all packages."""
    with machine.pretend(packages=True) as be:
        yield lambda capability: be(capability=capability)


def test_what_it_does_not_run_is_said(pretended):
    pretended((9, 0))
    assert unsupported_reason() is None
    assert unsupported_reason(heads=1, page=2) is None
    assert "wanted 512 and 64" in unsupported_reason(size=(128, 64))
    assert unsupported_reason(rotated=0) is None
    assert "32 dims of the result are to be rotated back, wanted 64" in unsupported_reason(
        rotated=32
    )
    assert "power of two" in unsupported_reason(page=48)
    assert "multiples of 16" in unsupported_reason(offset=8)
    assert "above 0" in unsupported_reason(scale=-1.0)
    pretended((10, 0))
    assert "Hopper" in unsupported_reason()


@pytest.mark.slow
def test_compiles_without_spills(tmp_path, snapshots):
    """Every value of a field; nightly all."""
    pytest.importorskip("cutlass")
    triton = pytest.importorskip("triton")
    from dsv4.cute.runtime.cubin_cache import compile_image
    from tests._tools.ptx.machine_code import (
        assert_parameters_lie_where_they_are_read,
        loads_before_wait,
    )

    is_nightly = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    figures = {}
    for plan in launcher.plans() if is_nightly else covering(launcher.plans(), option=0):
        image = compile_image(plan, "sm_90a")
        assert_parameters_lie_where_they_are_read(plan, image)
        file = tmp_path / "kernel.cubin"
        file.write_bytes(image.cubin)

        def shown(tool, *options, file=file):
            command = [tools / tool, *options, file]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        usage = shown("cuobjdump", "-res-usage")
        numbers = {k: int(n) for k, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
        sass = shown("nvdisasm", "-c")
        # Slots, entries and queries are written by the preceding kernels.
        assert not loads_before_wait(sass)
        assert ".CONSTANT" not in sass
        assert numbers["STACK"] == numbers["LOCAL"] == 0
        assert not re.search(r"\b(LDL|STL)\b", sass)
        assert image.shared_bytes <= 227 * 1024
        assert image.threads * numbers["REG"] <= 65536
        if isinstance(plan, AttentionPlan):
            # With eight warps that dequantize there are no registers for sums of 256 dims.
            assert f"HGMMA.64x{256 if plan.dequant_warps == 4 else 128}x16.F32.BF16" in sass
        if isinstance(plan, AttentionPlan | ColumnsPlan):
            # GEMMs are waited for where the kernel says so, not one by one.
            assert 0 < sass.count("WARPGROUP.DEPBAR") < sass.count("HGMMA.") // 8
        if isinstance(plan, NarrowPlan):
            assert sass.count("HMMA.16816.F32.BF16") == sass.count("MOVM.16.MT88") > 0
        names = r"\b(?:HGMMA\.\w+|HMMA\.\w+|MOVM|WARPGROUP\.DEPBAR)"
        figures[repr(plan)] = dict(collections.Counter(re.findall(names, sass)))
    snapshots.check("all", figures)
    snapshots.check_no_others("all", figures)
