"""The CuTeDSL kernels of the indexer: plans and machine code here, results on a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import re

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4.cute.runtime import driver as cuda_driver
from dsv4.cute.runtime.driver import Image, Kernel
from dsv4.cute.sm90 import indexer_logits_plan
from dsv4.cute.sm90.indexer_logits_plan import (
    INDEXER_LOGITS_ABI,
    IndexerLogitsArgs,
    IndexerLogitsPlan,
    plans,
    supports_int8,
)
from dsv4.cute.sm90.topk_plan import TOPK_ABI, TopkArgs, is_long, topk_plan
from dsv4.dispatch import explain
from dsv4.kv_cache.pages import IndexLayout
from dsv4.ops.indexer import indexer_select
from dsv4.ops.kv_cache import Pages
from dsv4.ops.slots import entry_slots
from dsv4.quant.formats import MXFP4, QuantizedTensor
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.strategies import generator, normal, seeds, small_integers
from tests._tools import covering
from tests._tools.ptx import machine as ptx_machine
from tests.cute.test_launch import Driver

HEADS, DIMS, PAGE = 64, 128, 64
KINDS = ("normal", "integers", "rising", "equal", "zeros", "blocks", "outliers", "negative")


def rows_of(kind, seed, tokens, width):
    """Scores of some distribution, float32."""
    gen = generator(seed)
    x = torch.randn(tokens, width, generator=gen)
    if kind == "integers":
        x = torch.randint(0, 200, x.shape, generator=gen).float()
    elif kind == "rising":
        x = torch.arange(width).float().expand(tokens, -1).clone()
    elif kind == "equal":
        x = torch.ones_like(x)
    elif kind == "zeros":
        x = torch.relu(x - 3)
    elif kind == "blocks":
        x = x[:, : width // 64 + 1].repeat_interleave(64, 1)[:, :width] + 1e-3 * x
    elif kind == "outliers":
        x[:, 7], x[:, 9] = 1e30, -1e30
    elif kind == "negative":
        x = -x.abs()
    return x


def keys_of(scores):
    """int32 whose bits order as unsigned integers do."""
    bits = (scores + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF) ^ -0x80000000


def wide(x, multiple):
    """Add columns of garbage, up to a multiple."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % multiple), value=-1)


def chosen(scores, visible, k, group, slot_table=None):
    """Return the kernel's selection of ``scores`` on a GPU; invisible scores are garbage."""
    from dsv4.cute.indexer import topk
    from dsv4.triton.indexer_select import Selected

    (tokens, width), visible = scores.shape, visible.to(scores.device)
    shown = torch.arange(width, device=scores.device) < visible.unsqueeze(1)
    keys = torch.where(shown, keys_of(scores), -1)
    maxima = keys.new_empty(tokens, 4)
    if group:
        signed = torch.where(shown, keys ^ -0x80000000, -(2**31))
        padded = torch.nn.functional.pad(signed, (0, -width % group), value=-(2**31))
        maxima = wide(padded.unflatten(1, (-1, group)).amax(-1) ^ -0x80000000, 4)
    out = torch.full((tokens, k), -7, device=scores.device)
    topk(wide(keys, 4), maxima, Selected(visible, out, slot_table), width, group)
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(
    st.sampled_from(
        [(4, 9000), (4, 16385), (16, 32768), (31, 32768), (65, 20000), (5, 70001), (4, 262144)]
    ),
    st.sampled_from([1, 37, 512, 1024]),
    st.sampled_from([0, 8, 16]),
    st.sampled_from([torch.int32, torch.int64]),
    seeds(),
)
def test_a_choice_is_what_a_sort_takes(kind, shape, k, group, dtype, seed):
    """Select among the visible ones, whatever follows them; the first of equal ones.

    Rows are as many as one block, four or eight have each.
    """
    tokens, width = shape
    scores = rows_of(kind, seed, tokens, width).cuda()
    visible = torch.randint(0, width + 1, (tokens,), generator=generator(seed + 1))
    visible[0], visible[1] = width, min(width, k + seed % 3)
    out = chosen(scores, visible.to(dtype), k, group)
    for t in range(tokens):
        order = scores[t, : visible[t]].sort(descending=True, stable=True).indices
        best = order[:k].sort().values
        assert_bitwise(out[t, : best.numel()], best)
        assert bool((out[t, best.numel() :] == -1).all())


@pytest.mark.gpu
@settings(max_examples=30)
@given(
    st.sampled_from([(4, 9000), (16, 32768), (65, 20000), (4, 262144)]),
    st.sampled_from([1, 512, 1024]),
    st.sampled_from([0, 8, 16]),
    st.sampled_from([torch.int32, torch.int64]),
    seeds(),
)
def test_slots_of_a_choice(shape, k, group, dtype, seed):
    """The slots of the positions that the same kernel stores; none for a token of no sequence."""
    from dsv4.triton.indexer_select import SlotTable

    (tokens, width), gen = shape, generator(seed + 2)
    scores = rows_of(KINDS[seed % len(KINDS)], seed, tokens, width).cuda()
    visible = torch.randint(0, width + 1, (tokens,), generator=gen).to(dtype)
    visible[0], visible[1] = width, min(width, k)
    pages = -(-width // PAGE)
    table = torch.randint(-1, 1 << 20, (3, pages + 1), generator=gen)[:, :pages].cuda()
    sequences = torch.randint(-1, 3, (tokens,), generator=gen).cuda()
    slot_table = SlotTable(table.to(dtype), PAGE, sequences.to(dtype))
    actual = chosen(scores, visible, k, group, slot_table)
    positions = chosen(scores, visible, k, group)
    expected = entry_slots(table, PAGE, sequences, positions, backend="reference")
    assert_bitwise(actual, expected)


@dataclasses.dataclass
class Coded:
    """Random MXFP4 keys and queries of 128 dims, a sequence to each token, pages anywhere."""

    tokens: int
    entries: int
    seed: int
    heads: int = HEADS
    page: int = PAGE
    device: str = "cpu"

    def __post_init__(self):
        self.gen = generator(self.seed)
        pages = self.tokens * -(-self.entries // self.page)
        self.codes = self.bytes(pages, self.page, DIMS // 2)
        self.scales = self.bytes(pages, self.page, DIMS // 32, low=120, high=124)
        self.table = torch.randperm(pages, generator=self.gen).view(self.tokens, -1)
        self.q = self.bytes(self.tokens, self.heads, DIMS // 2)
        self.q_scales = self.bytes(self.tokens, self.heads, DIMS // 32, low=118, high=122)
        self.weights = small_integers(self.seed, (self.tokens, self.heads), limit=3)
        self.visible = torch.full((self.tokens,), self.entries)

    def bytes(self, *shape, low=0, high=256):
        return torch.randint(low, high, shape, generator=self.gen, dtype=torch.uint8)

    def arguments(self, k):
        layout = IndexLayout(DIMS, "index_mxfp4")
        data = torch.cat((self.codes.flatten(1), self.scales.flatten(1)), 1)
        assert data.shape[1] == layout.page_bytes(self.page)
        rest = (data, self.table, torch.arange(self.tokens), self.visible)
        data, table, sequence, visible = (x.to(self.device) for x in rest)
        scales = self.q_scales.to(self.device).view(torch.float8_e8m0fnu)
        return {
            "q": QuantizedTensor(self.q.to(self.device), scales, None, MXFP4),
            "weights": self.weights.to(self.device),
            "keys": Pages(data, self.page, "index_mxfp4", DIMS, 0),
            "page_table": table,
            "sequence_of_token": sequence,
            "visible": visible,
            "top_k": k,
        }

    def exact(self, token):
        """float64 scores of a token, and the sums of the magnitudes that they are sums of."""
        pages = self.table[token]
        keys = values(self.codes[pages].flatten(0, 1), self.scales[pages].flatten(0, 1))
        q, w = values(self.q[token], self.q_scales[token]), self.weights[token].double()
        scores = torch.relu(keys @ q.T) @ w
        return scores[: self.entries], ((keys.abs() @ q.abs().T) @ w.abs())[: self.entries]


def values(codes, scales):
    """float64 of E2M1 codes and E8M0 bytes."""
    positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    table = torch.cat((positive, -positive))
    pairs = torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), -1)
    groups = pairs.flatten(-2).unflatten(-1, (-1, 32))
    return (groups * torch.exp2(scales.double() - 127).unsqueeze(-1)).flatten(-2)


def randomize_scales(case, share):
    """Groups of some keys and heads at scales anywhere, and groups of zeros."""
    for scales, codes in ((case.scales, case.codes), (case.q_scales, case.q)):
        raised = torch.rand(scales.shape, generator=case.gen) < share
        scales.copy_(torch.where(raised, case.bytes(*scales.shape, low=90, high=150), scales))
        none = torch.rand(scales.shape, generator=case.gen) < share
        codes.unflatten(-1, (-1, 16))[none] = 0x80
        scales[none] = 1


def scored(case, group, calls):
    """Scores and maxima of calls in a row, without anything between."""
    from dsv4.cute.indexer import indexer_logits
    from dsv4.triton.indexer_select import Keys, Scoring

    arguments = case.arguments(1)
    q = arguments["q"]
    keys = Keys(arguments["keys"].data, case.page, "index_mxfp4", arguments["page_table"])
    tokens = (arguments["sequence_of_token"], arguments["visible"])
    operands = Scoring(q.codes, q.scales.view(torch.uint8), arguments["weights"], keys, *tokens)
    widths = (case.entries, -(-case.entries // group))
    actual = [torch.full((calls, case.tokens, w), 7, dtype=torch.int32).cuda() for w in widths]
    for scores, maxima in zip(*actual, strict=True):
        indexer_logits(operands, scores, maxima, 1, group)
    return actual


def check_scores(case, tokens):
    """Compare with float64: equal for integers, else up to twice the error of nested sums."""
    scores, maxima = (tensor[0] for tensor in scored(case, 8, 1))
    for t in tokens:
        shown = int(case.visible[t])
        exact, sizes = case.exact(t)
        signed = scores[t].cpu() ^ -0x80000000
        result = (signed ^ ((signed >> 31) & 0x7FFFFFFF)).view(torch.float32)[:shown]
        error = (result.double() - exact[:shown]).abs().max()
        assert error <= 2 * (DIMS + HEADS + 2) * 2.0**-24 * sizes[:shown].max()
        if int(case.scales.max()) - int(case.scales.min()) <= 3:
            assert_bitwise(result, exact[:shown].float())
        assert bool((scores[t, shown:] == 7).all())
        highest = torch.nn.functional.pad(signed[:shown], (0, -shown % 8), value=-(2**31))
        highest = highest.view(-1, 8).amax(1) ^ -0x80000000
        assert_bitwise(maxima[t, : highest.numel()].cpu(), highest)
        assert bool((maxima[t, highest.numel() :] == 7).all())


@pytest.mark.gpu
@settings(max_examples=20)
@given(
    st.integers(1, 5),
    st.sampled_from([1, 63, 64, 65, 300, 1000]),
    st.sampled_from([1, 3, 63, 64]),
    st.sampled_from([64, 128]),
    st.sampled_from([0.0, 0.02, 1.0]),
    seeds(),
)
@example(3, 640, 64, 64, 0.0, 0)
@example(140, 300, 64, 64, 0.02, 1)
@example(70, 9000, 64, 64, 0.02, 2)
def test_scores_of_integers(tokens, entries, heads, page, share, seed):
    case = Coded(tokens, entries, seed, heads, page, "cuda")
    case.visible = torch.randint(2, max(3, entries + 1), (tokens,), generator=case.gen)
    case.visible.clamp_(max=entries)
    if share:
        randomize_scales(case, share)
        case.weights = normal(seed, case.weights.shape) * 2.0 ** (seed % 40 - 20)
    if entries > 1:
        check_scores(case, range(tokens))


@pytest.mark.gpu
@pytest.mark.parametrize("entries", [262144, 200001])
def test_scores_of_keys_near_at_hand(entries):
    """Copies of keys that are in the L2 take the least time; every call is right.

    Scales are within 2^2, so that no key is multiplied again from memory, which would hide it.
    """
    case = Coded(1, entries, 0, device="cuda")
    case.scales = case.scales.clamp(max=122)
    scores, maxima = scored(case, 16, 100)
    right = keys_of(case.exact(0)[0].float())
    highest = torch.nn.functional.pad(right ^ -0x80000000, (0, -entries % 16), value=-(2**31))
    highest = highest.view(-1, 16).amax(1) ^ -0x80000000
    for actual, expected in ((scores, right), (maxima, highest)):
        assert_bitwise(actual, expected.cuda().expand_as(actual))


@pytest.fixture
def always(monkeypatch):
    """Integers are multiplied however few keys there are."""
    monkeypatch.setattr(indexer_logits_plan, "_LARGE", 0)


@pytest.mark.gpu
@pytest.mark.usefixtures("always")
def test_a_nan_stays_in_its_key():
    """A NaN of a head or weight reaches its token; NaN is the highest."""
    case = Coded(3, 640, 0, device="cuda")
    case.scales[:, 5, 2] = 255
    case.q_scales[1, 9, 0] = 255
    case.weights[2, 3] = torch.nan
    ids = indexer_select(**case.arguments(9), backend="cute")
    assert_bitwise(ids[0].cpu(), torch.arange(9) * 64 + 5)
    assert_bitwise(ids[1:].cpu(), torch.arange(9).expand(2, -1))


@pytest.mark.gpu
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("share", [0.0, 0.02])
@pytest.mark.parametrize("entries", [700, 8192, 20000, 140000])
def test_selection_from_codes_is_best(entries, share):
    """Either selection takes such rows; twice, with the same bits."""
    case = Coded(2, entries, entries, device="cuda")
    case.visible[1] = entries - 77
    if share:
        randomize_scales(case, share)
    arguments = case.arguments(512)
    ids = indexer_select(**arguments, backend="cute")
    assert_bitwise(indexer_select(**arguments, backend="cute"), ids)
    for t in range(2):
        shown, result = int(case.visible[t]), ids[t].cpu()
        exact, sizes = case.exact(t)
        exact = exact[:shown]
        if not share:
            best = exact.sort(descending=True, stable=True).indices[:512].sort().values
            assert_bitwise(result, best)
        assert bool((result[1:] > result[:-1]).all())
        error = 2 * (DIMS + HEADS + 2) * 2.0**-23 * sizes[:shown].max()
        left = torch.ones(shown, dtype=torch.bool).index_fill(0, result, False)
        assert exact[left].max() <= exact[result].min() + error


@pytest.mark.gpu
def test_who_takes_a_selection():
    """Many keys and long rows; else Triton."""
    for entries, chosen in ((640, "triton"), (8256, "cute")):
        case = Coded(1, entries, 0, device="cuda")
        assert explain(indexer_select, **case.arguments(9)).chosen == chosen


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("entry_format", "index_fp8"),
        ("query_scales", None),
        ("capacity", 8192),
        ("page_size", 32),
        ("page_size", 192),
        ("weights", torch.zeros(1, 64, dtype=torch.bfloat16)),
        ("q", torch.zeros(1, 65, 64, dtype=torch.uint8)),
        ("q", torch.zeros(1, 64, 32, dtype=torch.uint8)),
        ("q", torch.zeros(1, 64, 65, dtype=torch.uint8)[..., 1:]),
        ("data", torch.zeros(2, 4353, dtype=torch.uint8)[:, :4352]),
        ("data", torch.zeros(2, 4368, dtype=torch.uint8)[:, 8:4360]),
        ("data", torch.zeros(4352, dtype=torch.uint8).as_strided((1, 4352), (1 << 31, 1))),
    ],
)
def test_what_integers_do_not_multiply(change, value):
    arguments = {
        "q": torch.zeros(1, 64, 64, dtype=torch.uint8),
        "weights": torch.zeros(1, 64),
        "data": torch.zeros(2, 4352, dtype=torch.uint8),
        "page_size": 64,
        "entry_format": "index_mxfp4",
        "query_scales": torch.zeros(1, 64, 4, dtype=torch.uint8),
        "capacity": 1 << 20,
    }
    assert supports_int8(**arguments)
    assert not supports_int8(**(arguments | {change: value}))


def test_which_rows_are_long():
    assert is_long(8193, 1024)
    assert not is_long(8192, 512)
    assert not is_long(1 << 20, 1025)


def test_few_rows_are_shared_by_blocks():
    """By as many as the GPU has room for; each of the tests of a choice has some of them."""
    result = [topk_plan(tokens, group) for tokens in (1, 15, 16, 30, 31) for group in (8, 16)]
    assert [plan.ctas for plan in result] == [4, 8, 4, 8, 4, 4, 4, 4, 1, 1]
    assert set(plans()) >= {*result, topk_plan(1, 0), topk_plan(1, 16, slots=True)}


@pytest.mark.parametrize("batch", covering.batches(plans(), 1, option=0))
def test_kernels_compile(batch, tmp_path):
    """There is no stack, and registers suffice for as many CTAs as they count on."""
    [plan] = batch
    pytest.importorskip("cutlass")
    pytest.importorskip("triton")
    from dsv4.cute.runtime import cubin_cache
    from dsv4.cute.runtime.architectures import HOPPER
    from tests._tools.ptx.machine_code import (
        REGISTER_FILE,
        assert_parameters_lie_where_they_are_read,
        loads_before_wait,
        run,
        usage_of,
    )

    image, file = cubin_cache.compile_image(plan, HOPPER), tmp_path / "kernel.cubin"
    assert_parameters_lie_where_they_are_read(plan, image)
    usage = usage_of(image, file)
    assert usage["STACK"] == usage["LOCAL"] == 0
    resident = getattr(plan, "ctas_per_sm", 1)
    assert usage["REG"] * plan.threads * resident <= REGISTER_FILE
    assert plan.shared_bytes * resident <= 227 * 1024
    # Keys, queries and scores are written by the preceding kernels.
    listing = run("nvdisasm", "-c", file)
    assert not loads_before_wait(listing)
    assert ".CONSTANT" not in listing


def test_sums_are_subnormal():
    """A sum of integers at its largest; as it counts it is at most 1 and not subnormal."""
    pytest.importorskip("cutlass")
    from dsv4.cute.sm90 import indexer_logits_tile as tile

    largest = DIMS * (12 << 2) * (12 << 3)
    assert tile.BIAS == 12 << 2
    assert largest < 1 << 23
    sums = torch.tensor([1, largest], dtype=torch.int32).view(torch.float32).double()
    assert sums.tolist() == [2.0**-149, largest * 2.0**-149]
    counted = sums * 2.0**127
    assert counted.tolist() == [tile.UNIT, largest * tile.UNIT]
    assert counted[1] <= 1
    negative = torch.tensor([-1, -largest], dtype=torch.int32).view(torch.float32)
    assert bool(negative.isnan().all())


@pytest.mark.parametrize("distance", range(3))
def test_codes_as_bytes(monkeypatch, distance):
    """Of every code in every place: twice its value, times its group's scale, and the bias."""
    pytest.importorskip("cutlass")
    from dsv4.cute.sm90 import indexer_logits_tile as tile

    monkeypatch.setattr(tile, "Uint32", int)
    ptx_machine.install(monkeypatch)
    tables = tile.IndexerLogitsTile(IndexerLogitsPlan(8, 4))._tables(
        tile.ptx.shift_right(4, distance * 0x0101)
    )
    for word in range(0, 1 << 32, 0x01234567):
        both = tile.ptx.e2m1_to_bytes_by_table(word, tables, 2**32 - 1)
        codes = torch.tensor([word >> 4 * i & 15 for i in range(8)], dtype=torch.uint8)
        pairs = (codes[::2] | codes[1::2] << 4).view(1, -1)
        exact = values(pairs.repeat(1, 4), torch.full((1, 1), 127))[0, :8]
        expected = tile.BIAS + (2 * exact * 2 ** (2 - distance)).int()
        actual = b"".join(half.to_bytes(4, "little") for half in both)
        assert list(actual) == expected.tolist()


@given(st.tuples(*[st.integers(0, 255)] * 8), st.integers(0, 3))
@example((0,) * 8, 0)
@example((255, 0, 0, 0, 0, 0, 0, 255), 3)
def test_distances_of_two_keys_scales(scales, group):
    """Of one group below the largest of its key, in both bytes of a half; which are too large."""
    pytest.importorskip("cutlass")
    from dsv4.cute.sm90 import indexer_logits_tile as tile

    words = [int.from_bytes(bytes(scales[i : i + 4]), "little") for i in (0, 4)]
    with pytest.MonkeyPatch.context() as patch:
        ptx_machine.install(patch)
        patch.setattr(tile, "Uint32", int)
        below = tile.ptx.max_of_bytes_pair(*words) - tile.ptx.select_byte_pair(*words, group)
        distances = [max(scales[i : i + 4]) - scales[i + group] for i in (0, 4)]
        assert below.to_bytes(4, "little") == bytes(d for d in distances for _ in range(2))
        assert tile.IndexerLogitsTile(IndexerLogitsPlan(8, 4))._is_distant(below) == (
            max(distances) > 2
        )


def test_the_bias_step_subtracts_the_bias():
    """For every sum that a head's integers have."""
    pytest.importorskip("cutlass")
    from dsv4.cute.sm90 import indexer_logits_tile as tile

    left = list(tile.BIAS_LEFT.to_bytes(4, "little")) * 8
    for total in range(-DIMS * (12 << 3), DIMS * (12 << 3) + 1):
        most, rest = tile.IndexerLogitsTile._bias_bytes(total)
        right = [0, most, most, most] * 8
        right[0] = rest
        assert -128 <= min(right) <= max(right) <= 127
        step = sum(a * b for a, b in zip(left, right, strict=True))
        assert step + tile.BIAS * total == 0


@pytest.fixture
def driver(monkeypatch):
    """A mock driver that keeps launches of the indexer's kernels."""
    from dsv4.cute import indexer

    result = Driver()
    monkeypatch.setattr(cuda_driver, "_driver", lambda: result)
    monkeypatch.setattr(indexer, "stream_of", lambda index: 77)
    monkeypatch.setattr(indexer, "on", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(indexer, "loaded", lambda plan, arch: _kernel_of(plan))
    monkeypatch.setattr(indexer, "sms", lambda device: 132)
    for name in ("_topk_launch", "_logits_launch"):
        monkeypatch.setattr(indexer, name, getattr(indexer, name).__wrapped__)
    return result


def _kernel_of(plan):
    return Kernel(Image(b"code", "name", plan.threads, plan.ctas, plan.shared_bytes))


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize(("tokens", "group"), [(1, 0), (2, 8), (2, 16), (40, 16)])
def test_arguments_of_topk(driver, tokens, group, slots):
    """Every argument has its name, in a grid of a cluster for each row."""
    from dsv4.cute.indexer import topk
    from dsv4.triton.indexer_select import Selected, SlotTable

    keys = torch.zeros(tokens + 1, 40000, dtype=torch.int32)
    maxima, visible = keys.new_zeros(tokens + 1, 5004), torch.zeros(tokens).long()
    out = torch.zeros(tokens, 512).long()
    driver.kinds = TOPK_ABI.parameters
    table, sequences = torch.zeros(3, 700).int(), torch.zeros(tokens).long()
    slot_table = SlotTable(table[:, :650], 64, sequences) if slots else None
    topk(keys, maxima, Selected(visible, out, slot_table), 39999, group)
    plan = topk_plan(tokens, group, slots)
    [(grid, threads, stream, values)] = driver.launches
    assert (grid, threads, stream) == (tokens * plan.ctas, plan.threads, 77)
    assert TopkArgs(*[value for (value,) in values]) == TopkArgs(
        keys=keys.data_ptr(),
        maxima=maxima.data_ptr(),
        visible=visible.data_ptr(),
        table=table.data_ptr() if slots else 0,
        sequences=sequences.data_ptr() if slots else 0,
        out=out.data_ptr(),
        key_stride=40000,
        maxima_stride=5004,
        table_stride=700 if slots else 0,
        page_shift=6 if slots else 0,
        visible_bytes=8,
        table_bytes=4 if slots else 0,
        sequence_bytes=8 if slots else 0,
        capacity=39999,
        k=512,
        slack=64,
        direct=16384 if group else 39999,
    )


@pytest.mark.parametrize(
    ("tokens", "entries", "warpgroups", "splits"),
    [(1, 400000, 4, 132), (1, 640, 4, 2), (60, 4096, 4, 2), (50, 4096, 2, 5), (200, 640, 2, 1)],
)
def test_arguments_of_logits(driver, tokens, entries, warpgroups, splits):
    """Every argument by its name; ``inverse_splits`` gives every CTA its token."""
    from dsv4.cute.indexer import indexer_logits
    from dsv4.triton.indexer_select import Keys, Scoring

    case = Coded(tokens, entries, 0, heads=3)
    arguments = case.arguments(512)
    keys = Keys(arguments["keys"].data, PAGE, "index_mxfp4", arguments["page_table"])
    scales = arguments["q"].scales.view(torch.uint8)
    scores, maxima = torch.zeros(tokens, 1000).int(), torch.zeros(tokens, 9).int()
    sequences, visible = arguments["sequence_of_token"].int(), arguments["visible"]
    driver.kinds = INDEXER_LOGITS_ABI.parameters
    operands = (arguments["q"].codes, scales, arguments["weights"], keys, sequences, visible)
    indexer_logits(Scoring(*operands), scores, maxima, 512, 8)
    plan = IndexerLogitsPlan(8, warpgroups)
    [(grid, threads, stream, values)] = driver.launches
    assert (grid, threads, stream) == (tokens * splits, plan.threads, 77)
    args = IndexerLogitsArgs(*[value for (value,) in values])
    assert args == IndexerLogitsArgs(
        q=arguments["q"].codes.data_ptr(),
        q_scales=scales.data_ptr(),
        weights=arguments["weights"].data_ptr(),
        cache=keys.data.data_ptr(),
        table=keys.page_table.data_ptr(),
        sequences=sequences.data_ptr(),
        visible=visible.data_ptr(),
        scores=scores.data_ptr(),
        maxima=maxima.data_ptr(),
        token_stride=3 * DIMS // 2,
        head_stride=DIMS // 2,
        page_stride=keys.data.stride(0),
        table_stride=keys.page_table.stride(0),
        score_stride=1000,
        maxima_stride=9,
        heads=3,
        capacity=keys.capacity,
        k=512,
        page_shift=6,
        splits=splits,
        table_bytes=8,
        sequence_bytes=4,
        visible_bytes=8,
        shift16=65536,
        inverse_splits=args.inverse_splits,
        table_rows=tokens,
    )
    ctas = range(grid)
    assert all(2 * cta * args.inverse_splits >> 32 == cta // splits for cta in ctas)


def _instructions(ptx):
    """Operation, what it writes and what it reads, of each in the order of the text."""
    result = []
    for text in re.split(r"[;\n]", ptx):
        text = re.sub(r"^[\s{]*(\w+:\s+)?(@!?%?\w+\s+)?", "", text)
        if not re.match(r"[a-z][\w.:]*\s+\S", text):
            continue
        operation, rest = text.split(None, 1)
        stores = operation.startswith(("st.", "mbarrier.arrive", "red.", "bra", "wgmma"))
        first = re.match(r"\{[^}]*\}|[^,]*", rest).group()
        written = () if stores else tuple(re.findall(r"%[a-z]+\d+", first))
        read = re.findall(r"%[a-z]+\d+", rest if stores else rest[len(first) :])
        result.append((operation, written, tuple(read)))
    return result


@pytest.mark.parametrize("warpgroups", [2, 4])
def test_arrivals_wait_for_what_was_read(tmp_path, monkeypatch, warpgroups):
    """The copy that follows is in no order with loads under way: each arrival's address is of them.

    Bytes of keys come by bulk copies, which other orders of memory operations do not bind.
    """
    pytest.importorskip("cutlass")
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    from dsv4.cute.sm90.indexer_logits import IndexerLogitsKernel

    options = f"--gpu-arch sm_90a --keep-ptx --dump-dir {tmp_path}"
    sources, loads, arrivals = {}, [], 0
    for operation, written, read in _instructions(
        IndexerLogitsKernel(IndexerLogitsPlan(16, warpgroups)).compile(options).__ptx__
    ):
        sources |= dict.fromkeys(written, read)
        if operation.startswith("mbarrier.try_wait"):
            loads = []
        elif operation.startswith("ld.shared"):
            loads.append(set(written))
        elif operation == "mbarrier.arrive.shared::cta.b64":
            assert len(loads) == 4
            left, reached = list(read), set()
            while left:
                register = left.pop()
                if register not in reached:
                    reached.add(register)
                    left += sources.get(register, ())
            assert all(load & reached for load in loads)
            arrivals += 1
    assert arrivals == 4
