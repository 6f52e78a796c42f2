"""Properties of the attention kernel: rounded weights, shared tokens, NaN, codes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("triton")

from dsv4 import device as machine
from dsv4 import dispatch
from dsv4.device import interpret_triton
from dsv4.dispatch import explain, use_backend
from dsv4.ops.attention import sparse_attention
from dsv4.ops.kv_cache import Pages, read_kv, write_kv
from dsv4.testing.assertions import assert_bitwise, assert_within_budget, unit_roundoff
from dsv4.testing.strategies import normal, seeds, strided
from dsv4.triton import attention as kernels
from tests._tools import large_pages
from tests.ops.attention_cases import U, angles, rotated_back, same_nans, softmax

KERNELS = ("triton",)
REFERENCE = False
INTERPRETED_SHARE = 25
BF16, F64 = torch.bfloat16, torch.float64
# Of the smallest tiles: blocks that are not full, and several to a token.
SMALL = kernels.Shape(16, 32, 4, 3, 1, 1, 1, 1, 1)
formats = st.sampled_from(["fp8", "plain"])
# Full groups, short ones, none of a kind, several columns without a dim.
dims = st.sampled_from([(32, 8), (64, 64), (16, 0), (200, 64), (72, 16), (136, 8)])
widths = st.tuples(st.integers(0, 40), st.integers(0, 40))
splits = st.integers(1, 5)


@contextlib.contextmanager
def launched(count: int, shape: kernels.Shape = SMALL, scan: int = 16):
    """Every token shared by ``count`` programs, and the last slot looked for in small steps."""
    before = kernels.plan, kernels._SCAN, kernels._FEW_SLOTS
    kernels.plan = lambda *sizes: (shape, count)
    kernels._SCAN, kernels._FEW_SLOTS = scan, 50
    try:
        yield
    finally:
        kernels.plan, kernels._SCAN, kernels._FEW_SLOTS = before


class Case:
    """Two pools of one format and other page sizes, with duplicates and -1 among the slots."""

    def __init__(
        self, seed, device, tokens=3, widths=(18, 20), entry_format="fp8", heads=3, size=(32, 8)
    ):
        gen = torch.Generator().manual_seed(seed)
        dim, rope = size
        self.device = device
        self.q = normal(seed, (tokens, heads, dim), BF16).to(device)
        self.sink = normal(seed + 1, (heads,), torch.float32).to(device)
        self.scale = dim**-0.5
        self.pools, self.slots = [], []
        for i, width in enumerate(widths):
            pages = Pages.allocate(3, 5 + 3 * i, dim, rope, entry_format, BF16, device)
            x = normal(seed + 2 + i, (pages.num_slots, dim), BF16).to(device)
            write_kv(pages, x, torch.arange(pages.num_slots, device=device), backend="reference")
            self.pools.append(pages)
            slots = torch.randint(-1, pages.num_slots, (tokens, width), generator=gen)
            self.slots.append(slots.to(device))

    def run(self, backend="triton", **changes):
        operands = {"q": self.q, "sink": self.sink, "scale": self.scale, **changes}
        (window, compressed), (slots, chosen) = self.pools, self.slots
        arguments = (operands["q"], window, slots, compressed, chosen, operands["sink"])
        tables = {name: operands[name] for name in ("cos", "sin") if name in operands}
        return sparse_attention(*arguments, scale=operands["scale"], backend=backend, **tables)

    def entries(self, token: int) -> torch.Tensor:
        """The entries the token attends to, float64."""
        read = [
            read_kv(pages, slots[token][slots[token] >= 0], F64, backend="reference")
            for pages, slots in zip(self.pools, self.slots, strict=True)
        ]
        return torch.cat(read)

    def check(self, out: torch.Tensor, **changes) -> None:
        """Compare every token with a softmax in float64."""
        arguments = {"q": self.q, "sink": self.sink, "scale": self.scale, **changes}
        for t in range(self.q.shape[0]):
            kv, q = self.entries(t), arguments["q"][t].double()
            if kv.shape[0] == 0:
                assert not out[t].any()
                continue
            truth, budget = softmax(q, kv, arguments["sink"].double(), arguments["scale"])
            if "cos" in arguments:
                truth, budget = rotated_back(
                    truth, budget, arguments["cos"][t], arguments["sin"][t]
                )
            assert_within_budget(out[t], truth, budget)


@example(seed=0, tokens=2, width=(40, 33), entry_format="fp8", size=(200, 64), heads=17, count=3)
@given(
    seed=seeds(),
    tokens=st.integers(0, 3),
    width=widths,
    entry_format=formats,
    size=dims,
    heads=st.sampled_from([1, 3, 17]),
    count=splits,
)
def test_equals_a_softmax(device, seed, tokens, width, entry_format, size, heads, count):
    case = Case(seed, device, tokens, width, entry_format, heads, size)
    with launched(count):
        case.check(case.run())


@example(seed=0, entry_format="fp8", size=(200, 64), rotated=64, heads=17, count=1)
@example(seed=1, entry_format="fp8", size=(72, 16), rotated=40, heads=3, count=3)
@given(
    seed=seeds(),
    entry_format=formats,
    size=dims,
    rotated=st.sampled_from([0, 2, 8, 16]),
    heads=st.sampled_from([1, 3, 17]),
    count=splits,
)
def test_the_last_dims_are_turned_back(device, seed, entry_format, size, rotated, heads, count):
    """Whatever the pages rotate; the dims before them keep their bits, infinities too."""
    case = Case(seed, device, 2, (18, 20), entry_format, heads, size)
    cos, sin = angles(seed, 2, rotated // 2, device)
    with launched(count):
        plain, out = case.run(), case.run(cos=cos, sin=sin)
    unrotated = size[0] - rotated
    assert_bitwise(out[..., :unrotated], plain[..., :unrotated])
    case.check(out, cos=cos, sin=sin)


@given(seeds(), splits)
def test_an_infinity_beside_turned_dims_stays_alone(device, seed, count):
    """An entry of weight 0 makes its one dim NaN, and nothing else."""
    case = Case(seed, device, 1, entry_format="plain")
    token = torch.tensor([4], device=device)
    entry = read_kv(case.pools[0], token, torch.float32, backend="reference")
    entry[:, 1] = -torch.inf
    write_kv(case.pools[0], entry, token, backend="reference")
    case.slots[0][0, 7] = 4
    q = case.q.clone()
    q[..., 1] = 1
    cos, sin = angles(seed, 1, 4, device)
    with launched(count):
        out = case.run(q=q, cos=cos, sin=sin)
    same_nans(out, case.run("reference", q=q, cos=cos, sin=sin))
    assert bool((out.isnan().nonzero()[:, -1] == 1).all())
    assert int(out.isnan().sum()) == 3


@given(seeds(), formats, splits, st.sampled_from([0.0, 0.1, 30.0, 1e4]))
def test_large_logits(device, seed, entry_format, count, magnitude):
    case = Case(seed, device, entry_format=entry_format)
    q = (case.q.float() * magnitude).to(BF16)
    with launched(count):
        out = case.run(q=q)
        assert bool(out.isfinite().all())
        case.check(out, q=q)
        assert not case.run(q=q, sink=torch.full((3,), 1e30, device=device)).any()


@given(seeds(), splits, st.floats(0.01, 3), st.floats(-3, 3))
def test_equal_weights_are_exact(device, seed, count, scale, sink):
    """If q = 0 all weights are 1, exact in bfloat16, so that only float32's roundings remain."""
    case = Case(seed, device, 2)
    sinks = torch.tensor([sink, -torch.inf, -sink], device=device)
    with launched(count):
        out = case.run(q=torch.zeros_like(case.q), sink=sinks, scale=scale)
    for t in range(2):
        kv = case.entries(t)
        share = 1 / (kv.shape[0] + sinks.double().exp())
        truth = share[:, None] * kv.sum(0)
        budget = (2 * kv.shape[0] + 40) * U * float(kv.abs().max())
        assert_within_budget(out[t], truth, budget + 1.01 * unit_roundoff(BF16) * truth.abs())


@given(seeds(), st.integers(1, 40), splits)
def test_a_repeated_entry_counts_again(device, seed, times, count):
    case = Case(seed, device, 1, (times, 1))
    case.slots[0].fill_(2)
    case.slots[1].fill_(-1)
    with launched(count):
        case.check(case.run())


@given(seeds(), formats)
def test_the_result_is_inside_the_hull_of_the_entries_and_zero(device, seed, entry_format):
    case = Case(seed, device, 2, entry_format=entry_format)
    with launched(2):
        out = case.run(q=(case.q.float() * 8).to(BF16)).double()
    for t in range(2):
        kv = torch.cat((case.entries(t), torch.zeros(1, 32, dtype=F64, device=device)))
        slack = 200 * U * float(kv.abs().max())
        low, high = kv.amin(0) - slack, kv.amax(0) + slack
        assert bool((out[t] <= high + unit_roundoff(BF16) * high.abs()).all())
        assert bool((out[t] >= low - unit_roundoff(BF16) * low.abs()).all())


@given(seeds(), formats, splits, st.integers(0, 2))
def test_unselected_entries_have_no_effect(device, seed, entry_format, count, token):
    """NaN in every entry that no slot of a token names, in pages at both of their borders."""
    case = Case(seed, device, entry_format=entry_format)
    for slots in case.slots:
        slots.masked_fill_(slots % 3 == 1, -1)
    with launched(count):
        expected = case.run()
        for pages, slots in zip(case.pools, case.slots, strict=True):
            named = set(slots[token].tolist())
            others = [s for s in range(pages.num_slots) if s not in named]
            bad = torch.full((len(others), 32), torch.nan, device=device)
            write_kv(pages, bad, torch.tensor(others, device=device), backend="reference")
        assert_bitwise(case.run()[token], expected[token])


@given(seeds(), formats, splits, st.sampled_from([torch.nan, torch.inf, -torch.inf]))
def test_a_bad_entry_reaches_the_tokens_that_name_it(device, seed, entry_format, count, bad):
    case = Case(seed, device, entry_format=entry_format)
    case.slots[0].clamp_(max=3)
    case.slots[0][1, 7] = 4
    with launched(count):
        expected = case.run()
        entry = read_kv(case.pools[0], torch.tensor([4], device=device), F64, backend="reference")
        entry[0, -1] = bad
        write_kv(case.pools[0], entry, torch.tensor([4], device=device), backend="reference")
        out = case.run()
    assert_bitwise(out[[0, 2]], expected[[0, 2]])
    same_nans(out, case.run("reference"))


@given(seeds(), formats, splits, st.sampled_from([torch.nan, torch.inf, -torch.inf]))
def test_a_bad_query_stays_in_its_token_and_head(device, seed, entry_format, count, bad):
    """-Inf logits among them: dim 4 of every entry is positive."""
    case = Case(seed, device, entry_format=entry_format)
    for pages in case.pools:
        every = torch.arange(pages.num_slots, device=device)
        x = read_kv(pages, every, torch.float32, backend="reference")
        x[:, 4] = x[:, 4].abs() + 0.5
        write_kv(pages, x, every, backend="reference")
    case.slots[0][2] = -1
    case.slots[1][2] = -1
    with launched(count):
        expected = case.run()
        q = case.q.clone()
        q[1:, 1, 4] = bad
        out = case.run(q=q)
        same_nans(out, case.run("reference", q=q))
    keep = torch.ones(3, 3, dtype=torch.bool, device=device)
    keep[1, 1] = False
    assert_bitwise(out[keep], expected[keep])
    assert bool(out[1, 1].isnan().all()) == (bad != -torch.inf)
    if bad == -torch.inf:
        assert not out[1, 1].any()


@given(seeds(), st.sampled_from([torch.nan, torch.inf, -torch.inf, 1e38, -1e38]), splits)
def test_extreme_sinks(device, seed, value, count):
    case = Case(seed, device)
    case.slots[0][0] = -1
    case.slots[1][0] = -1
    sink = case.sink.clone()
    sink[1] = value
    with launched(count):
        out = case.run(sink=sink)
    same_nans(out, case.run("reference", sink=sink))
    if value == -torch.inf or abs(value) < torch.inf:
        case.check(out, sink=sink)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("widths", [(0, 0), (20, 17), (3, 0)])
def test_nothing_to_attend_to(device, widths, count):
    case = Case(0, device, 2, widths)
    for slots in case.slots:
        slots.fill_(-1)
    with launched(count):
        for sink in (case.sink, torch.full((3,), -torch.inf, device=device)):
            assert not case.run(sink=sink).any()


@given(seeds(), formats, splits)
def test_slots_that_end_early_and_long_rows_of_none(device, seed, entry_format, count):
    """Nothing is looked at after the last slot; before it, slots of no entry are passed over."""
    case = Case(seed, device, 4, (30, 80), entry_format)
    case.slots[0][:, 11:] = -1
    case.slots[0][1, 29] = 3
    case.slots[1][0, 1:] = -1
    case.slots[1][1, :60] = -1
    case.slots[1][2] = -7
    case.slots[1][3, 16:] = torch.iinfo(torch.int64).min
    with launched(count):
        case.check(case.run())


@given(seeds(), splits)
def test_a_token_alone_and_again_has_the_same_bits(device, seed, count):
    case = Case(seed, device, 3)
    with launched(count):
        together = case.run()
        assert_bitwise(case.run(), together)
        case.q, case.slots = case.q[1:2], [s[1:2] for s in case.slots]
        assert_bitwise(case.run(), together[1:2])


@given(seeds(), formats)
def test_types_of_slots_views_and_no_compressed_pages(device, seed, entry_format):
    case = Case(seed, device, entry_format=entry_format)
    expected = case.run()
    (window, other), (slots, chosen) = case.pools, case.slots

    def call(q=case.q, a=slots, b=chosen, c=other, sink=case.sink):
        return sparse_attention(q, window, a, c, b, sink, scale=case.scale, backend="triton")

    for a, b in ((slots.int(), chosen.int()), (slots.int(), chosen), (slots, chosen.int())):
        assert_bitwise(call(a=a, b=b), expected)
    assert_bitwise(call(q=strided(case.q), a=strided(slots), sink=strided(case.sink)), expected)
    assert_bitwise(call(q=case.q.transpose(0, 1).contiguous().transpose(0, 1)), expected)
    assert_bitwise(call(b=None, c=None), call(b=chosen[:, :0]))


@given(seeds(), st.sampled_from([(32, 8), (200, 64), (512, 64)]))
def test_every_byte_of_an_entry_is_read_as_the_cache_reads_it(device, seed, size):
    """One entry, no sink and q = 0: the result is the entry. Any bytes, scales of NaN included."""
    case = Case(seed, device, 4, (1, 0), size=size)
    gen = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, case.pools[0].data.shape, generator=gen, dtype=torch.uint8)
    case.pools[0].data.copy_(data)
    case.slots[0] = torch.randint(0, 15, (4, 1), generator=gen).to(device)
    sink = torch.full((3,), -torch.inf, device=device)
    out = case.run(q=torch.zeros_like(case.q), sink=sink)
    entry = read_kv(case.pools[0], case.slots[0][:, 0], BF16, backend="reference")
    bad = ~entry.isfinite().all(-1)
    entry[bad] = torch.nan
    assert_within_budget(out[~bad], entry[~bad][:, None].expand(-1, 3, -1), 0.0)
    assert bool(out[bad].isnan().all())


@given(st.integers(0, 255))
def test_every_scale(device, byte):
    """All codes under one scale, exactly; what bfloat16 rounds, rounded once."""
    pages = Pages.allocate(1, 4, 256, 0, device=device)
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    pages.data[0, :256] = torch.where(codes & 0x7F == 0x7F, 0, codes)
    pages.data[0, 4 * 256 : 4 * 256 + 4] = byte
    q = torch.zeros(1, 1, 256, dtype=BF16, device=device)
    slots = torch.zeros(1, 1, dtype=torch.int64, device=device)
    none = torch.full((1,), -torch.inf, device=device)
    out = sparse_attention(q, pages, slots, None, None, none, scale=1.0, backend="triton")
    entry = read_kv(pages, slots[0], BF16, backend="reference")
    if bool(entry.isfinite().all()):
        assert_within_budget(out[0], entry, 0.0)
    else:
        assert bool(out.isnan().all())


@pytest.mark.parametrize("entry_format", ["fp8", "plain"])
def test_published_dimensions(device, entry_format):
    """512 dims, pages of 64 and of 2, 128 and 64 entries, 64 heads: the tiles that are launched."""
    window = Pages.allocate(3, 64, 512, 64, entry_format, device=device)
    other = Pages.allocate(50, 2, 512, 64, entry_format, device=device)
    case = Case(3, device, 1, heads=64, size=(512, 64))
    case.pools = [window, other]
    for pages in case.pools:
        x = normal(pages.page_size, (pages.num_slots, 512), BF16).to(device)
        every = torch.arange(pages.num_slots, device=device)
        write_kv(pages, x, every, backend="reference")
    case.slots = [
        torch.arange(32, 160, device=device)[None],
        torch.arange(99, 29, -1, device=device)[None],
    ]
    for shape, count in ((kernels._SHAPES[0], 1), *((shape, 2) for shape in kernels._SHAPES)):
        with launched(count, shape, 1024):
            case.check(case.run())


def test_offsets_past_two_gigabytes(device):
    """All pages of the pool but the last are memory that is never touched."""
    count = 2**31 // 37440 + 3
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < 4 << 30:
        pytest.skip("needs 4 GB")
    pages = large_pages.allocate(count, 64, 512, 64, device=device)
    case = Case(0, device, 1, (3, 1), size=(512, 64))
    x = normal(1, (3, 512), BF16).to(device)
    case.slots[0] = torch.tensor([[count * 64 - 1, 5, count * 64 - 64]], device=device)
    write_kv(pages, x, case.slots[0][0], backend="reference")
    case.pools[0] = pages
    case.check(case.run())


def test_opcheck_and_compile(device):
    case = Case(0, device)
    (window, other), (slots, chosen) = case.pools, case.slots
    cos, sin = angles(0, 3, 4, device)
    rest = (other.data, other.page_size, "fp8", chosen, case.sink, 8, 0.25, cos, sin, "triton")
    args = (case.q, window.data, window.page_size, "fp8", slots, *rest)
    op = torch.ops.dsv4.sparse_attention.default
    torch.library.opcheck(op, args)

    def call(q, sink):
        return sparse_attention(q, window, slots, other, chosen, sink, scale=0.25, cos=cos, sin=sin)

    with use_backend("triton"):
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        assert_bitwise(compiled(case.q, case.sink), call(case.q, case.sink))


@pytest.mark.gpu
def test_a_captured_graph_replays_on_new_contents():
    device = torch.device("cuda")
    case, other = Case(0, device, 2, (128, 512)), Case(9, device, 2, (128, 512))
    for count in (1, 4):
        with launched(count, kernels._SHAPES[-1], 1024):
            case.run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = case.run()
            graph.replay()
            assert_bitwise(out, case.run())
            for mine, new in zip(case.slots, other.slots, strict=True):
                mine.copy_(new)
            case.q.copy_(other.q)
            graph.replay()
            assert_bitwise(out, case.run())


class TestPlan:
    @given(
        st.integers(1, 9000),
        st.sampled_from([1, 8, 16, 24, 64, 128]),
        st.tuples(st.integers(0, 300), st.integers(0, 9000)),
        st.sampled_from([1, 78, 132, 148]),
    )
    def test_no_program_is_without_a_block(self, tokens, heads, width, sm_count):
        for wide in (True, False):
            shape, count = kernels.plan(tokens, heads, 512, width, sm_count, wide)
            assert wide or shape.heads == 16
            assert 1 <= count <= max(1, kernels._blocks(shape, width))
            if heads <= 16:
                assert shape.heads == 16

    @pytest.mark.parametrize("sm", [80, 86, 87, 89, 120, 121])
    def test_programs_that_count_as_resident_fit_an_sm(self, sm):
        memory = machine.shared_memory(divmod(sm, 10))
        for tokens, heads, chosen in itertools.product((1, 64, 4096), (8, 64, 128), (0, 512, 1024)):
            shape, _ = kernels.plan(tokens, heads, 512, (128, chosen), 108, False, sm)
            assert shape.heads == 16
            assert shape.shared <= memory
            assert shape.resident * (shape.shared + 1024) <= memory + 1024

    def test_hopper_and_data_centre_blackwell_have_the_shapes_that_were_fitted(self):
        for sm in (90, 100, 103):
            assert kernels._shapes(sm) == kernels._SHAPES

    def test_few_tokens_fill_a_gpu_and_many_are_not_split(self):
        for heads in (16, 64, 128):
            for chosen in (512, 1024):
                shape, count = kernels.plan(1, heads, 512, (128, chosen), 132, True)
                programs = -(-heads // shape.heads) * count
                assert programs >= min(132, sum(-(-w // 64) for w in (128, chosen)))
        for tokens in (1024, 4096):
            assert kernels.plan(tokens, 128, 512, (128, 1024), 132, True)[1] == 1
        assert kernels.plan(4096, 128, 512, (128, 1024), 132, True)[0].heads == 64


class TestDispatch:
    @pytest.mark.parametrize(("rope_dim", "fits"), [(64, True), (72, False)])
    def test_padded_entries_that_do_not_fit_are_left_to_the_reference(self, rope_dim, fits):
        """Nine groups are padded to 16, twice as much shared memory as the models' eight."""
        pages = Pages.allocate(1, 8, 512, rope_dim, device="cpu")
        q, slots = torch.zeros(1, 16, 512, dtype=BF16), torch.zeros(1, 1, dtype=torch.int64)
        arguments = (q, pages, slots, None, None, torch.zeros(16))
        call = dispatch.arguments(sparse_attention, *arguments, scale=1.0)
        row = next(r for r in dispatch.implementations("sparse_attention") if r.name == "triton")
        for capability in ((8, 0), (8, 6), (9, 0), (12, 0)):
            with machine.pretend(capability=capability, packages=True):
                reason = row.unsupported_reason(call._replace(device=torch.device("cuda", 0)))
            assert (reason is None) == (fits or capability == (9, 0)), reason
            assert reason is None or "9 groups" in reason

    def test_what_is_left_to_the_reference_is_said(self):
        case = Case(0, torch.device("cpu"))
        (window, other), (slots, chosen) = case.pools, case.slots

        def why(q=case.q, a=window, b=other):
            with interpret_triton():
                result = explain(sparse_attention, q, a, slots, b, chosen, case.sink, scale=1.0)
            return dict(result.candidates)["triton"] or ""

        def plain(dtype, dim=32):
            return Pages.allocate(3, 8, dim, 8, "plain", dtype)

        assert why() == ""
        assert "wanted bfloat16" in why(q=case.q.float())
        odd = [Pages.allocate(3, 8, 31, 0, "plain") for _ in range(2)]
        table = torch.zeros(3, 4)
        arguments = (case.q[..., :31], odd[0], slots, odd[1], chosen, case.sink)
        with interpret_triton():
            result = explain(sparse_attention, *arguments, scale=1.0, cos=table, sin=table)
        assert "wanted an even number" in dict(result.candidates)["triton"]
        assert "different formats" in why(b=plain(BF16))
        assert "different formats" in why(a=plain(BF16), b=plain(torch.float16))
        assert "wanted bfloat16" in why(a=plain(torch.float32), b=plain(torch.float32))
        assert "at most 512" in why(
            q=torch.zeros(3, 3, 520, dtype=BF16), a=plain(BF16, 520), b=plain(BF16, 520)
        )
        short = [Pages.allocate(3, 8, 30, 8) for _ in range(2)]
        assert "multiples of 8" in why(q=case.q[..., :30], a=short[0], b=short[1])
        transposed = window.data.t().contiguous().t()
        assert "strides" in why(a=dataclasses.replace(window, data=transposed))
        result = explain(sparse_attention, case.q, window, slots, None, None, case.sink, scale=1.0)
        assert result.chosen == "reference"
