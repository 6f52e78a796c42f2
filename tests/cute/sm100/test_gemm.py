"""The ``tcgen05`` NVFP4 GEMM without a Blackwell: its numbers, its layouts, and its source run.

``blackwell_emulator`` runs the source of the kernel; ``sm100_layouts`` prints CuTeDSL's own layouts
and instructions, in a process of its own.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4.cute import gemm_nvfp4
from dsv4.cute.device.scheduler import tile_position
from dsv4.cute.sm100 import mma_descriptors
from dsv4.cute.sm100.gemm_plan import (
    CHUNK_TOKENS,
    K_SPLITS,
    SHARED_LIMIT,
    TCGEN05_ABI,
    TOKEN_BLOCKS,
    Tcgen05Args,
    Tcgen05Plan,
    Tcgen05Tma,
)
from dsv4.cute.sm100.plans import GemmProblem, candidates, choose, plans
from dsv4.ops.gemm import gemm
from dsv4.ops.gemm_swiglu import gemm_swiglu
from dsv4.ops.quantize import quantize
from dsv4.quant.formats import NVFP4, SWIZZLED, QuantizedTensor
from dsv4.quant.scales import scale_offset
from tests._tools.emulator import blackwell_emulator

LAYOUTS = list(itertools.product(TOKEN_BLOCKS, (1, 2)))
KINDS = list(itertools.product((False, True), repeat=2))
PLANS = [Tcgen05Plan(*how, *kind) for how in LAYOUTS for kind in KINDS]
PLANS += [Tcgen05Plan(64, splits, *kind, splits) for splits in K_SPLITS for kind in KINDS]


@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_resources(plan):
    """Limits of compute capability 10.0: 227 KiB of a CTA, 512 TMEM columns, boxes up to 256."""
    assert plan.shared_bytes <= 227 * 1024 == SHARED_LIMIT
    assert plan.stages >= 4
    assert plan.stage_bytes % 1024 == plan.row_code_bytes % 1024 == 0
    assert plan.cta_group * plan.stage_bytes < 1 << 20, "bytes that an mbarrier can expect"
    assert plan.barriers <= 32, "a lane initializes each"
    assert plan.k_splits == 1 or plan.stages * plan.stage_bytes >= 128 * 4 * plan.token_block
    assert plan.cta_group in (1, 2)
    assert plan.split_tiles <= 4 or plan.k_splits == 1
    assert plan.tmem_columns in (32, 64, 128, 256, 512)
    used = [(0, plan.token_block), (plan.second_accumulator, plan.token_block)]
    used += [(plan.row_scale_column, 16), (plan.token_scale_column, 16 * plan.scale_tiles)]
    assert max(start + count for start, count in used) <= plan.tmem_columns
    assert plan.row_scale_column >= plan.second_accumulator + plan.token_block
    assert plan.overlap == max(0, used[0][1] - plan.second_accumulator)
    assert plan.line_bytes % 16 == 0
    assert plan.line_bytes // 16 % 2 == 1, "lines of 8 tokens begin in different banks"
    for box in plan.boxes(400, 544, 300, 1):
        assert all(0 < count <= 256 for count in box.box)
        assert box.box[0] * box.item_bytes % 16 == 0
        assert not box.swizzled or box.box[0] * box.item_bytes == 128
        assert all(stride % 16 == 0 for stride in box.strides)
    copied = [math.prod(box.box) * box.item_bytes for box in plan.boxes(400, 544, 300, 1)]
    ctas = 2 if plan.multicasts_scales else 1
    assert copied[:3] == [plan.row_code_bytes, plan.row_scale_bytes, plan.token_code_bytes]
    assert ctas * copied[3] == plan.token_scale_bytes


@pytest.mark.parametrize("plan", PLANS[::4], ids=repr)
def test_columns_of_both_accumulators_are_loaded_first(plan):
    for count in range(2):
        order = [plan.chunk(i, count) for i in range(plan.chunks)]
        assert sorted(order) == list(range(plan.chunks))
        start = plan.accumulator_column(count)
        early = {
            start + chunk * CHUNK_TOKENS + column
            for chunk in order[: plan.early_chunks]
            for column in range(CHUNK_TOKENS)
        }
        other = plan.accumulator_column(count + 1)
        needed = set(range(start, start + plan.token_block))
        if plan.accumulator_stages == 1:
            needed &= set(range(other, other + plan.token_block))
        assert needed <= early


def test_every_gemm_has_a_plan_that_fits():
    for rows, columns, groups in ((65536, 1536, 1), (16384, 4096, 16), (400, 7168, 1)):
        problem = GemmProblem(rows, columns, groups, False)
        for tokens in (1, 7, 64, 65, 300, 1000, 8192):
            plan = choose(problem, tokens)
            assert plan in candidates(problem)
            assert groups == 1 or rows // groups % plan.rows == 0
        for most in (1, 64, 65, 300):
            chosen = [choose(problem, t) for t in range(1, most + 1)]
            assert plans(problem, most) == list(dict.fromkeys(chosen))
        assert choose(problem, 9000) == choose(problem, 8192)
    swiglu = gemm_nvfp4.plans(400, 7168, 1, torch.float32, 100, swiglu=True)
    assert swiglu == plans(GemmProblem(400, 7168, 1, True, True), 100)


def test_small_m_takes_the_smallest_tile():
    assert {choose(GemmProblem(7168, 7168, 1, False), t).token_block for t in range(1, 65)} == {64}


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(1, 20))
def test_every_tile_is_visited_once(token_tiles, span, row_blocks, clusters):
    total = token_tiles * row_blocks
    visited = [
        tile_position(tile, (token_tiles, span, row_blocks))
        for first in range(clusters)
        for tile in range(first, total, clusters)
    ]
    positions = itertools.product(range(row_blocks), range(token_tiles))
    assert sorted(visited) == sorted(positions)


@settings(max_examples=15)
@given(
    st.sampled_from(LAYOUTS),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 600),
    st.integers(1, 3),
)
@example((192, 1), 9, 17, 575, 2)
@example((64, 2), 9, 17, 575, 2)
def test_copies_walk_every_byte_once_for_each_use(how, rows, columns, tokens, groups):
    """Coordinates decide alone: tiles of tokens for the weight, blocks of rows for the tokens."""
    plan = Tcgen05Plan(*how, False)
    group_rows = rows * 16 if groups == 1 else -(-rows // 16) * 256
    rows, columns = group_rows * groups, columns * 32
    tiles, row_blocks = -(-tokens // plan.token_block), -(-group_rows // plan.rows)
    boxes = plan.boxes(rows, columns, tokens, groups)
    counts = [np.zeros((box.sizes[1], -(-box.sizes[0] // 128)), int) for box in boxes[::2]]
    scales = [np.zeros(box.sizes[:0:-1], int) for box in boxes[1::2]]
    for row_block, tile, rank in itertools.product(
        range(row_blocks * groups), range(tiles), range(plan.ctas)
    ):
        for k in range(plan.k_stages(columns)):
            token = tile * plan.token_block
            row = plan.row_tile(row_block, rank, k)
            tokens_at = plan.token_tile(token, row_block // row_blocks, tokens, rank, k)
            for (code, scale), count, scale_count, box in zip(
                (row, tokens_at), counts, scales, (boxes[:2], boxes[2:]), strict=True
            ):
                assert code[1] % 128 == 0
                count[code[0] : code[0] + box[0].box[1], code[1] // 128] += 1
                _, wide, high = box[1].box
                scale_count[scale[0] : scale[0] + high, scale[1] : scale[1] + wide] += 1
    assert (counts[0] == tiles).all()
    assert (scales[0] == tiles).all()
    # Tokens beyond a group's last tile are the next group's, which also reads them itself.
    own = np.zeros((groups, tokens), int) + row_blocks
    beyond = np.zeros(groups * tokens, int)
    for group in range(groups):
        end = (group + 1) * tokens
        beyond[end : group * tokens + tiles * plan.token_block] += row_blocks
    assert (counts[1] == (own.reshape(-1) + beyond)[:, None]).all()
    used = np.zeros(-(-tokens // 128) + 2, int)
    for tile in range(tiles):
        first = tile * plan.token_block // 128
        used[first : first + plan.scale_tiles] += row_blocks
    high = -(-tokens // 128)
    for group in range(groups):
        part = scales[1][group * high : (group + 1) * high]
        assert (part[: len(used)] >= used[:high, None]).all()
    assert groups > 1 or (scales[1] == used[:high, None]).all()


# CuTeDSL's layouts.


def at(coordinate, shape, stride):
    """Return where a coordinate of a CuTe layout lies; an integer for a tuple is split."""
    if isinstance(shape, int):
        assert 0 <= coordinate < shape
        return coordinate * stride
    if isinstance(coordinate, int):
        parts = []
        for size in map(size_of, shape):
            parts.append(coordinate % size)
            coordinate //= size
        assert coordinate == 0
        coordinate = parts
    return sum(at(*what) for what in zip(coordinate, shape, stride, strict=True))


def size_of(shape):
    return shape if isinstance(shape, int) else math.prod(map(size_of, shape))


@pytest.fixture(scope="module")
def cutedsl(tmp_path_factory):
    pytest.importorskip("cutlass")
    script = Path(blackwell_emulator.__file__).with_name("sm100_layouts.py")
    environment = {**os.environ, "CUTE_DSL_ARCH": "sm_100a"}
    done = subprocess.run(
        [sys.executable, script, tmp_path_factory.mktemp("ptx")],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_layouts_are_cutedsls(cutedsl):
    for (rows, tokens), layouts in cutedsl["shapes"]:
        plan = Tcgen05Plan(tokens, rows // 128, False)
        codes, scales, columns, sums = layouts[:2], layouts[2:4], layouts[4:6], layouts[6]
        for (shape, stride, swizzle), count in zip(codes, (128, plan.cta_tokens), strict=True):
            assert swizzle == "S<3,4,3>", "address bits 4 to 6 with bits 7 to 9"
            for m, k in itertools.product(range(0, count, 3), range(0, 256, 10)):
                address = at([[m, k % 64], 0, k // 64, 0], shape, stride)
                assert address == 2 * (m * 128 + k // 2)  # in codes, two a byte
        for (shape, stride), high in zip(scales, (1, plan.scale_tiles), strict=True):
            for m, k in itertools.product(range(0, 128 * high, 3), range(16)):
                address = at([[[m % 128, m // 128], [7, k % 4]], 0, k // 4, 0], shape, stride)
                assert address == (m // 128 * 4 + k // 4) * 512 + scale_offset(m % 128, k % 4, 4)
        for (shape, stride), high in zip(columns, (1, plan.scale_tiles), strict=True):
            for m, k, warp in itertools.product(range(0, 128 * high, 5), range(16), range(4)):
                address = at([[[[m % 32, m // 32], warp], [7, k % 4]], 0, k // 4], shape, stride)
                # In bytes: a lane is 2^18, a column 4.
                lane, column = m % 32 + 32 * warp, k // 4 * 4 * high + m // 32
                assert address == lane << 18 | column * 4 | k % 4
        for m, n in itertools.product(range(0, 128, 7), range(tokens)):
            assert at([[m, n], 0, 0, 0], *sums) == m << 16 | n


def test_loads_are_fragments_of_16_by_8(cutedsl):
    (shape, stride), text = cutedsl["loaded"]
    assert "Tiler MN:        ((4,16):(32,1),32:1)" in text, "16 lanes of each warp's 32"
    for thread, register in itertools.product(range(128), range(16)):
        address = at([thread, register], shape, stride)
        row, column = address % 64 % 4 * 32 + address % 64 // 4, address // 64
        tile, i = divmod(register, 4)
        lane = thread % 32
        assert row == thread // 32 * 32 + lane // 4 + i // 2 * 8
        assert column == tile * 8 + lane % 4 * 2 + i % 2


def test_descriptions_are_cutedsls(cutedsl):
    """Every large number in a kernel of CuTeDSL's own instructions, but the compiler's build."""
    ours = {mma_descriptors.CODES_DESCRIPTOR, mma_descriptors.SCALES_DESCRIPTOR}
    ours |= {mma_descriptors.instruction_descriptor(*shape) for shape, _ in cutedsl["shapes"]}
    numbers = set(cutedsl["numbers"])
    assert ours <= numbers
    assert len(numbers - ours) <= 1
    kinds = {i.split(".collector")[0] for i in cutedsl["instructions"]}
    assert kinds == {
        f"tcgen05.{what}"
        for group in (1, 2)
        for what in (
            f"mma.cta_group::{group}.kind::mxf4nvf4.block_scale.block16",
            f"cp.cta_group::{group}.32x128b.warpx4",
        )
    }


@settings(max_examples=10)
@given(st.lists(st.tuples(st.integers(1, 700), st.integers(1, 60)), min_size=1, max_size=3))
def test_scales_in_memory_are_cutedsls(shapes):
    """Specification, section 11.3, against the layout that CuTeDSL's own kernels assume."""
    pytest.importorskip("cutlass")
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    import cutlass.cute as cute
    import cutlass.utils.blockscaled_layout as blockscaled

    layouts = []

    def collect():
        for rows, k_blocks in shapes:
            layout = blockscaled.tile_atom_to_shape_SF((rows, k_blocks * 16, 1), 16)
            layouts.append((layout.shape, layout.stride))

    @cute.jit
    def trace():
        collect()

    trace()
    for (rows, k_blocks), (shape, stride) in zip(shapes, layouts, strict=True):
        for m, k in itertools.product(range(0, rows, 7), range(k_blocks)):
            coordinate = [[m % 128, m // 128], [k % 4 * 16, k // 4], 0]
            coordinate[1] = [[0, k % 4], k // 4]
            coordinate[0] = [[m % 32, m % 128 // 32], m // 128]
            assert at(coordinate, shape, stride) == scale_offset(m, k, k_blocks)


# The source, run.


def activations(x, scaling, groups):
    x = x if groups == 1 else x.transpose(0, 1)
    scale = torch.tensor([0.002]) if scaling == "static" else None
    given_scale = None if scale is None else scale.expand(*x.shape[:-2], 1)
    return scale, quantize(x, NVFP4, global_scale=given_scale, scaling=scaling, layout=SWIZZLED)


def emulate(monkeypatch, plan, x, weight, groups, scaling, clusters, limit):
    """Return the kernel's results, and the operands with how often they were read."""
    tokens, (rows, columns) = x.shape[0], weight.shape
    call = gemm_nvfp4._Call(
        problem=GemmProblem(rows, columns, groups, plan.float32_out, plan.swiglu),
        tokens=tokens,
        segments=weight.segments,
        scale_rows=not weight.segments and weight.global_scale.numel() > 1,
        scale_tokens=scaling == "token",
        limit=limit,
        device=0,
    )
    launch = blackwell_emulator.prepared(monkeypatch, gemm_nvfp4, TCGEN05_ABI, plan, clusters, call)
    _, q = activations(x, scaling, groups)
    memory = blackwell_emulator.Global()
    outputs = rows // 2 if plan.swiglu else rows
    out = np.zeros(tokens * outputs, np.float32 if plan.float32_out else np.uint16)
    pointers = {
        "global_scale": memory.add(weight.global_scale.numpy()),
        "token_scale": memory.add(q.global_scale.reshape(-1).numpy()),
        "out": memory.add(out),
    }
    contents = [
        t.contiguous().view(torch.uint8).reshape(-1).numpy()
        for t in (weight.codes, weight.scales, q.codes, q.scales)
    ]
    records = (Tcgen05Tma, Tcgen05Args)
    read = blackwell_emulator.run(plan, launch, contents, memory, records, pointers)
    assert (memory.arrays[pointers["out"]][1] == 1).all(), "every result is stored once"
    results = torch.from_numpy(out if plan.float32_out else out.view(np.int16))
    results = results if plan.float32_out else results.view(torch.bfloat16)
    return results.reshape(tokens, outputs), read


def compare(monkeypatch, plan, rows, columns, tokens, groups=1, scaling="token", clusters=1):
    torch.manual_seed(tokens)
    x = torch.randn(tokens, columns) if groups == 1 else torch.randn(tokens, groups, columns)
    x[tokens // 2] = 0
    weight = quantize(torch.randn(rows, columns), NVFP4, scaling="weight", layout=SWIZZLED)
    cuts = (16, 32, rows - 48) if groups == 1 else ()
    scale = torch.tensor([1.0, 0.5, 3.0]) if cuts else torch.rand(rows) + 0.5
    weight = QuantizedTensor(
        weight.codes, weight.scales, weight.global_scale * scale, NVFP4, SWIZZLED, cuts
    )
    limit = 7.0 if plan.swiglu else math.inf
    results, read = emulate(monkeypatch, plan, x, weight, groups, scaling, clusters, limit)
    kind = {"activation": "nvfp4", "input_scale": activations(x, scaling, groups)[0]}
    if plan.swiglu:
        kind["limit"] = limit
    op = gemm_swiglu if plan.swiglu else gemm
    if groups > 1:
        kind["groups"] = groups
    expected = op(x.double(), weight, backend="reference", **kind).reshape(tokens, -1)
    error = (results.double() - expected).abs()
    allowed = 1e-5 if plan.float32_out else 2**-8
    assert (error <= allowed * expected.abs() + 1e-6 * expected.abs().max()).all()
    assert (results[tokens // 2] == 0).all()
    row_blocks, tiles = -(-rows // plan.rows), -(-tokens // plan.token_block)
    assert [(operand.reads == tiles).all() for operand in read[:2]] == [True, True]
    assert groups > 1 or (read[2].reads == row_blocks).all()


@pytest.mark.parametrize("how", LAYOUTS, ids=str)
def test_the_source_multiplies(how, monkeypatch):
    """Rings go round more than once; the last tiles of rows, tokens and columns are ragged."""
    plan = Tcgen05Plan(*how, float32_out=True)
    compare(monkeypatch, plan, plan.rows + 16, 544, plan.token_block + 3)


@pytest.mark.parametrize("splits", [2, 4])
def test_the_source_splits_k(splits, monkeypatch):
    """CTAs get 2 and 3 of 5 stages of K, or 1, 1, 1 and 2."""
    plan = Tcgen05Plan(64, splits, True, k_splits=splits)
    compare(monkeypatch, plan, 144, 1056, 60, clusters=2)


def test_the_source_of_swiglu_splits_k(monkeypatch):
    compare(monkeypatch, Tcgen05Plan(64, 8, False, True, 8), 96, 2048, 35)


def test_the_source_transposes_bfloat16(monkeypatch):
    compare(monkeypatch, Tcgen05Plan(64, 2, False), 144, 64, 35, scaling="static")


def test_the_source_of_swiglu(monkeypatch):
    compare(monkeypatch, Tcgen05Plan(64, 1, False, swiglu=True), 96, 288, 33)


def test_the_source_of_groups(monkeypatch):
    plan = Tcgen05Plan(64, 1, float32_out=True)
    compare(monkeypatch, plan, 256, 288, 70, groups=2, clusters=3)


@pytest.mark.parametrize(
    ("how", "name", "value"),
    [
        ((64, 1), "scale_shift", lambda plan, tile: 0),
        ((64, 2), "token_scale_offset", lambda plan, rank: 0),
        ((256, 1), "chunk", lambda plan, i, count: i),
    ],
    ids=["scales of the tile before", "one half of the scales", "common columns loaded last"],
)
def test_a_wrong_number_is_seen(how, name, value, monkeypatch):
    monkeypatch.setattr(Tcgen05Plan, name, value)
    plan = Tcgen05Plan(*how, float32_out=True)
    with pytest.raises(AssertionError):
        compare(monkeypatch, plan, plan.rows + 16, 544, plan.token_block + 3)
