"""The ``tcgen05`` NVFP4 grouped GEMM, without a Blackwell.

``blackwell_emulator`` runs its source for many routings, with every layout of shared memory and
TMEM in the nightly profile, else with some.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4.cute import grouped_nvfp4
from dsv4.cute.grouped_problem import MOST_EXPERTS, Experts, counted_as
from dsv4.cute.sm100.gemm_plan import SHARED_LIMIT, TOKEN_BLOCKS, OperandTile
from dsv4.cute.sm100.grouped_gemm_plan import (
    GROUPED_TCGEN05_ABI,
    SCALE_WARP,
    GroupedTcgen05Args,
    GroupedTcgen05Plan,
    GroupedTcgen05Tma,
    candidates,
    choose,
    plans,
)
from dsv4.ops.grouped_gemm import grouped_gemm
from dsv4.ops.grouped_gemm_swiglu import grouped_gemm_swiglu, grouped_gemm_swiglu_quantize
from dsv4.ops.quantize import quantize
from dsv4.quant.formats import (
    NVFP4,
    SWIZZLED,
    QuantizedTensor,
    expert_tiles,
    swizzle_expert_scales,
)
from tests._tools.emulator import blackwell_emulator

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
LAYOUTS = list(itertools.product(TOKEN_BLOCKS, (1, 2)))
# float32 results, SwiGLU, weights of rows, codes, swizzled scales of these.
KINDS = [
    (False, False, False, False),
    (False, True, True, True, True),
    (False, True, True, True),
    (True, True, False, False),
    (False, True, True, False),
    (True, False, False, False),
    (False, True, False, True),
    (False, True, False, False),
    (True, True, True, False),
]


def plan_of(how, float32_out=False, swiglu=False, *rest):
    return GroupedTcgen05Plan(*how, float32_out, swiglu, 1, *rest)


PLANS = [plan_of(how, *kind) for how in LAYOUTS for kind in KINDS]


@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_resources(plan):
    """Limits of compute capability 10.0: 227 KiB and 64 Ki registers of a CTA, 512 TMEM columns."""
    assert plan.shared_bytes <= 227 * 1024 == SHARED_LIMIT
    assert plan.shared_bytes >= plan.table_bytes + plan.stages * plan.stage_bytes
    # What comes while a stage is multiplied covers 1500 cycles of 64 bytes from the L2.
    assert (plan.stages - 1) * plan.stage_bytes >= 1500 * 64
    assert plan.stage_bytes % 1024 == 0
    assert plan.cta_group * plan.tma_bytes < 1 << 20, "bytes that an mbarrier can expect"
    assert plan.barriers <= 32, "a lane initializes each"
    assert plan.threads == 256
    assert plan.tmem_columns in (256, 512)
    assert plan.token_scale_column + 16 * plan.scale_tiles <= plan.tmem_columns
    boxes = plan.operands(400, 512, 300, 5)
    assert [box.sizes[-1] for box in boxes] == [2000, 20, 300]
    copied = [math.prod(box.box) * box.item_bytes for box in boxes]
    assert sum(copied) == plan.tma_bytes
    assert all(0 < count <= 256 for box in boxes for count in box.box)
    assert all(stride % 16 == 0 for box in boxes for stride in box.strides)


def test_these_are_all_there_are():
    chosen = {
        plan
        for kind in KINDS
        for plan in candidates(Experts(4096, 2048, 256, kind[0], True, *kind[1:]))
    }
    assert chosen == set(PLANS)


@pytest.mark.parametrize("sizes", [(6144, 7168, 384), (4096, 2048, 256), (48, 256, 3)], ids=str)
def test_every_number_of_rows_has_a_configuration(sizes):
    problem = Experts(*sizes, False, True)
    for most in (1, 2, 6, 100, 5000, 49152):
        chosen = [choose(problem, tokens) for tokens in range(1, most + 1, max(1, most // 999))]
        assert set(chosen) <= set(plans(problem, most)) <= set(candidates(problem))
        assert choose(problem, most) == choose(problem, counted_as(most))
    assert choose(problem, 1).token_block == 64
    assert sizes[0] < 128 or choose(problem, 400 * sizes[2]).token_block > 64
    assert choose(problem._replace(columns=sizes[1] + 128), 1) is None
    assert choose(problem._replace(experts=MOST_EXPERTS + 1), 1) is None


# Which tile is whose.


def tiles_of(counts, spare, tile_rows, row_blocks):
    """Return what the source finds of every tile: expert, block of rows, first row, rows left."""
    memory, tiles = blackwell_emulator.Global(), []
    module = blackwell_emulator.emulated_source(memory, "dsv4.cute.device.expert_scheduler")
    here = blackwell_emulator._HERE
    offsets = memory.add(np.array([0, *itertools.accumulate(counts)], np.int32))
    table = module.ExpertTable(1024, 1024 + 4 * (MOST_EXPERTS + 1), len(counts))

    def body():
        if here.warp == SCALE_WARP:
            module.count_tiles(offsets, table, tile_rows, here.lane)
        blackwell_emulator.meet(here.cluster.meeting)
        if here.thread == 0:
            total = module.total_tiles(table) * row_blocks
            order = module.GroupedTileOrder(table, row_blocks)
            tiles.extend(module.find_tile(t, order, tile_rows) for t in range(total))
            assert module.end_row(table) == sum(counts)

    blackwell_emulator.Cluster(plan_of((64, 1)), 0, 1).run(body)
    return tiles


ROUTINGS = st.one_of(
    st.lists(st.integers(0, 70), min_size=1, max_size=9),
    st.lists(st.sampled_from([0, 0, 0, 1, 64, 65, 400]), min_size=1, max_size=MOST_EXPERTS),
)


@pytest.mark.costly(3)
@settings(max_examples=12)
@given(ROUTINGS, st.sampled_from(TOKEN_BLOCKS), st.integers(1, 5))
@example([0] * MOST_EXPERTS, 64, 3)
@example([0] * (MOST_EXPERTS - 1) + [1000], 128, 2)
def test_every_tile_of_every_expert_is_found_once(counts, tile_rows, row_blocks):
    expected = [
        (expert, row_block, start + i * tile_rows, count - i * tile_rows)
        for expert, (start, count) in enumerate(
            zip(itertools.accumulate(counts, initial=0), counts, strict=False)
        )
        for row_block in range(row_blocks)
        for i in range(-(-count // tile_rows))
    ]
    assert tiles_of(counts, 0, tile_rows, row_blocks) == expected


# The source, run.


@dataclasses.dataclass
class Case:
    """Operands of a grouped GEMM, and sizes of its routing."""

    counts: list[int]
    spare: int
    rows: int
    columns: int
    scales: str = "one"
    limit: float = 7.0

    def __post_init__(self):
        torch.manual_seed(sum(self.counts))
        experts, total = len(self.counts), sum(self.counts) + self.spare
        self.x = torch.randn(total, self.columns)
        self.x[total // 3] = 0
        weight = torch.randn(experts, self.rows, self.columns)
        q = quantize(weight, NVFP4, scaling="weight", layout=SWIZZLED)
        expert_scales = {"one": 1, "segments": 3, "rows": self.rows}[self.scales]
        segments = (16, 32, self.rows - 48) if self.scales == "segments" else ()
        scale = q.global_scale * (torch.rand(experts, expert_scales) + 0.5)
        self.weight = QuantizedTensor(q.codes, q.scales, scale, NVFP4, SWIZZLED, segments)
        self.offsets = torch.tensor([0, *self.counts]).cumsum(0).to(torch.int32)
        self.row_weight = torch.rand(total) + 0.5
        self.result_scale = torch.rand(experts) * 0.02 + 0.001
        self.q = quantize(self.x, NVFP4, scaling="token")


def contents(tensor):
    return tensor.contiguous().view(torch.uint8).reshape(-1).numpy()


def emulate(monkeypatch, plan, case, clusters):
    """Return the kernel's results, the operands' numbers of reads, and the memory."""
    total, experts = case.x.shape[0], len(case.counts)
    call = grouped_nvfp4._Call(
        experts=Experts(case.rows, case.columns, experts, plan.float32_out, True),
        tokens=total,
        segments=case.weight.segments,
        expert_scales=case.weight.global_scale.shape[1],
        limit=case.limit if plan.swiglu else math.inf,
        device=0,
    )
    launch = blackwell_emulator.prepared(
        monkeypatch, grouped_nvfp4, GROUPED_TCGEN05_ABI, plan, clusters, call
    )
    memory, outputs = blackwell_emulator.Global(), case.rows // 2 if plan.swiglu else case.rows
    out = np.full(total * outputs, 7, np.float32 if plan.float32_out else np.uint16)
    if plan.quantized_out:
        out = np.full(total * outputs // 2, 0x77, np.uint8)
    scale_rows = 128 * expert_tiles(total, experts) if plan.swizzled_out else total
    results = {
        "out": out,
        "block_scales": np.full(scale_rows * outputs // 16, 0x77, np.uint8),
        "row_scale": np.full(total, 7, np.float32),
    }
    arrays = {
        "x_scales": contents(case.q.scales),
        "global_scale": case.weight.global_scale.reshape(-1).numpy(),
        "token_scale": case.q.global_scale.reshape(-1).numpy(),
        "row_weight": case.row_weight.numpy(),
        "offsets": case.offsets.numpy(),
        "result_scale": case.result_scale.numpy(),
        **results,
    }
    pointers = {name: memory.add(array) for name, array in arrays.items()}
    operands = [contents(t) for t in (case.weight.codes, case.weight.scales, case.q.codes)]
    records = (GroupedTcgen05Tma, GroupedTcgen05Args)
    read = blackwell_emulator.run(plan, launch, operands, memory, records, pointers)
    stored = list(results) if plan.quantized_out else ["out"]
    counts = [memory.arrays[pointers[name]][1] for name in stored]
    assert all((count == 1).all() for count in counts), "every result is stored once"
    return list(results.values()), read, memory


def check_reads(plan, case, read, memory):
    """Every operand, byte by byte: once for each tile that needs it, of no expert without rows."""
    row_blocks, tile_rows = -(-case.rows // plan.rows), plan.token_block
    tiles = [-(-count // tile_rows) for count in case.counts]
    codes = read[0].reads.reshape(len(tiles), case.rows, -1)
    # Two CTAs may reach beyond an expert's last rows, into the next expert's.
    own = codes.reshape(len(tiles), -1).min(1)
    assert (own >= tiles).all()
    if case.rows % plan.rows == 0:
        assert (codes == np.array(tiles)[:, None, None]).all()
        scales = read[1].reads.reshape(len(tiles), -1)
        assert (scales == np.array(tiles)[:, None]).all()
    expected, start = np.zeros(case.x.shape[0], int), 0
    needed = np.zeros_like(expected)
    for count, number in zip(case.counts, tiles, strict=True):
        expected[start : start + number * tile_rows] += row_blocks
        needed[start : start + count] += row_blocks * plan.cta_group
        start += count
    assert (read[2].reads == expected[:, None]).all()
    line = case.columns // 16
    loads = {i * 16: needed[i * 16 // line] for i in range(case.x.shape[0] * line // 16)}
    assert memory.loads == {at: count for at, count in loads.items() if count}


def reference(plan, case):
    """Compute in float64, SwiGLU with its clamp."""
    x, how = case.x.double(), {"activation": "nvfp4", "backend": "reference"}
    if not plan.swiglu:
        return grouped_gemm(x, case.weight, case.offsets, **how)
    weight = case.row_weight if plan.row_weighted else None
    inputs = (x, case.weight, case.offsets, case.limit)
    return grouped_gemm_swiglu(*inputs, row_weight=weight, **how)


def compare(monkeypatch, plan, case, clusters=1):
    results, read, memory = emulate(monkeypatch, plan, case, clusters)
    check_reads(plan, case, read, memory)
    expected, out = (
        reference(plan, case),
        torch.from_numpy(results[0] if plan.float32_out else results[0].view(np.int16)),
    )
    rows = (out if plan.float32_out else out.view(torch.bfloat16)).reshape(expected.shape)
    error, allowed = (rows.double() - expected).abs(), 1e-5 if plan.float32_out else 2**-8
    assert (error <= allowed * expected.abs() + 1e-6 * expected.abs().max()).all()
    assert (rows[case.x.shape[0] // 3] == 0).all()
    assert (rows[sum(case.counts) :] == 0).all(), "rows of no expert"
    return rows


def ragged(plan):
    """Empty experts, one with more rows than a tile, rows and tokens that fill no tile."""
    return Case([0, 3, 0, plan.token_block + 5, 1, 0], 2, plan.rows + 16, 512)


OFTEN = [(192, 1), (64, 2)]


@pytest.mark.parametrize("how", LAYOUTS if NIGHTLY else OFTEN, ids=str)
def test_the_source_multiplies(how, monkeypatch):
    plan = plan_of(how, float32_out=True)
    compare(monkeypatch, plan, ragged(plan), clusters=2)


@settings(max_examples=60 if NIGHTLY else 4)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(lambda counts: sum(counts) < 80),
    st.integers(0, 3),
    st.sampled_from(["one", "segments", "rows"]),
    st.integers(1, 3),
)
@example([0, 70, 0], 1, "one", 2)
def test_the_source_for_any_routing(counts, spare, scales, clusters):
    if sum(counts) + spare:
        with pytest.MonkeyPatch.context() as patch:
            case = Case(counts, spare, 64, 256, scales)
            compare(patch, plan_of((64, 1), float32_out=True), case, clusters)


def test_the_source_of_whole_tiles_and_two_blocks(monkeypatch):
    """Every byte is counted; the ring wraps around."""
    compare(monkeypatch, plan_of((128, 2)), Case([2, 0, 40], 0, 256, 1024, "rows"))


def test_no_rows_for_any_expert(monkeypatch):
    case = Case([0, 0, 0], 4, 64, 256)
    out = compare(monkeypatch, plan_of((64, 1)), case, clusters=2)
    assert not out.any()
    results, *_ = emulate(monkeypatch, plan_of((64, 1), False, True, False, True), case, 2)
    assert not results[0].any()
    assert not results[1].any()
    assert (results[2] == 1).all()


@pytest.mark.parametrize("how", [(64, 1), (128, 2)] if NIGHTLY else [(64, 1)], ids=str)
def test_the_source_of_swiglu_and_its_codes(how, monkeypatch):
    """Codes are bit for bit what ``quantize`` makes of the bfloat16 results, zeros behind them."""
    case = Case([0, 17, 3, 0], 2, 96, 256, "rows")
    case.x[5] *= 30  # beyond the clamp
    case.x[7, 9] = math.nan
    case.x[8] *= 1e-3
    case.q = quantize(case.x, NVFP4, scaling="token")
    bits = emulate(monkeypatch, plan_of(how, False, True, True), case, 1)[0][0].view(np.int16)
    bfloat16 = torch.from_numpy(bits).view(torch.bfloat16).reshape(22, 48)
    expected = reference(plan_of(how, False, True, True), case)
    known = torch.arange(22) != 7
    error = (bfloat16.double() - expected).abs()[known]
    assert (error <= 2**-8 * expected[known].abs() + 1e-6 * expected[known].abs().max()).all()
    assert bool(bfloat16[7].isnan().all())
    (codes, scales, total), *_ = emulate(
        monkeypatch, plan_of(how, False, True, True, True), case, 1
    )
    row_scales = torch.ones(22)
    row_scales[:17], row_scales[17:20] = case.result_scale[1], case.result_scale[2]
    quantized = quantize(bfloat16, scaling="static", global_scale=row_scales, backend="reference")
    assert torch.equal(torch.from_numpy(total), row_scales)
    assert torch.equal(torch.from_numpy(codes).view(22, -1), quantized.codes)
    assert torch.equal(torch.from_numpy(scales).view(22, -1), quantized.scales.view(torch.uint8))
    # And what the operator means, but for codes whose value lies at a border.
    options = {"activation": "nvfp4", "row_weight": case.row_weight, "backend": "reference"}
    inputs = (case.x, case.weight, case.offsets, case.limit, case.result_scale)
    same = grouped_gemm_swiglu_quantize(*inputs, **options).codes == quantized.codes
    assert same.float().mean() > 0.99


def check_swizzled(monkeypatch, how, weighted, case, clusters):
    """The linear result with its scales moved; every byte, padding too, is stored once."""
    plans = [plan_of(how, False, True, weighted, True, swizzled) for swizzled in (False, True)]
    linear, moved = (emulate(monkeypatch, plan, case, clusters)[0] for plan in plans)
    assert (linear[0] == moved[0]).all()
    assert (linear[2] == moved[2]).all()
    scales = torch.from_numpy(linear[1]).view(case.x.shape[0], -1)
    assert torch.equal(torch.from_numpy(moved[1]), swizzle_expert_scales(scales, case.offsets))


@pytest.mark.slow
@settings(max_examples=20 if NIGHTLY else 1)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(lambda counts: sum(counts) < 80),
    st.integers(0, 3),
    st.integers(1, 3),
)
@example([0, 128, 0, 3], 2, 2)
@example([0, 0], 3, 2)
def test_the_source_of_swizzled_scales(counts, spare, clusters):
    """Experts that end anywhere, clusters that share the padding, a tile of 128 that is full."""
    if sum(counts) + spare:
        with pytest.MonkeyPatch.context() as patch:
            check_swizzled(patch, (64, 1), False, Case(counts, spare, 128, 256), clusters)


@pytest.mark.slow
@pytest.mark.parametrize("how", LAYOUTS if NIGHTLY else [(64, 2)], ids=str)
def test_the_source_of_swizzled_scales_of_every_layout(how, monkeypatch):
    check_swizzled(monkeypatch, how, True, Case([1, 0, 66], 1, 128, 256), 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("full_arrivals", 1),
        ("sorted_codes", lambda plan, start, rank, k: (start // 128 * 128, k * 128)),
        ("expert_row_tile", lambda plan, row_block, rank, k, expert, rows: OperandTile(
            (expert * rows + row_block * 128, k * 128),
            ((expert * rows + row_block * 128) // 128, k * 4),
        )),
    ],
    ids=["full before the scales are there", "rows from a border", "scales without borders"],
)  # fmt: skip
def test_a_wrong_number_is_seen(name, value, monkeypatch):
    monkeypatch.setattr(GroupedTcgen05Plan, name, value)
    plan = plan_of((64, 1), float32_out=True)
    with pytest.raises((AssertionError, RuntimeError)):
        compare(monkeypatch, plan, Case([3, 0, 9], 0, 144, 256))
