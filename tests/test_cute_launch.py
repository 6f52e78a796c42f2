"""What a launch of a CuTeDSL kernel tells the driver, against a driver that only listens."""

from __future__ import annotations

import ctypes
import math
import struct
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4.cute import _driver, gemm, grouped_gemm
from dsv4.cute._driver import Image, Kernel, Parameters
from dsv4.cute.sm90 import grouped_plan
from dsv4.cute.sm90.few_plan import FewPlan
from dsv4.cute.sm90.grouped_plan import Experts
from dsv4.cute.sm90.plans import Product, choose

MAP = bytes(range(128))


class Driver:
    """Keeps what it was asked to launch: blocks, stream, and the bytes at every pointer."""

    def __init__(self, kinds=None):
        self.kinds, self.launches, self.maps = kinds, [], []

    def __getattr__(self, name):
        return lambda *arguments: 0

    def cuOccupancyMaxActiveClusters(self, count, kernel, config):  # noqa: N802, the driver's
        count._obj.value = 132
        return 0

    def cuLaunchKernelEx(self, config, kernel, pointers, extra):  # noqa: N802
        assert extra is None
        config = config._obj
        values = [
            struct.unpack("@" + kind, ctypes.string_at(pointer, struct.calcsize("@" + kind)))
            for kind, pointer in zip(self.kinds.kinds, pointers, strict=True)
        ]
        self.launches.append((config.grid[0], config.block[0], config.stream, values))
        return 0


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setattr(_driver, "_driver", lambda: found)
    for module in (gemm, grouped_gemm):
        monkeypatch.setattr(module, "tensor_map", lambda *what: found.maps.append(what) or MAP)
        monkeypatch.setattr(module, "stream_of", lambda index: 77)
        monkeypatch.setattr(module, "_prepared", module._prepared.__wrapped__)
        monkeypatch.setattr(module, "loaded", lambda plan, arch: _kernel_of(plan))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return found


def _kernel_of(plan):
    return Kernel(Image(b"code", "name", plan.threads, plan.blocks, plan.shared_bytes))


def launched(driver, tokens, rows=6144, columns=7168, groups=1, scales=1, segments=()):
    product = Product(rows, columns, groups, False, False)
    plan = choose(product, tokens)
    few = isinstance(plan, FewPlan)
    driver.kinds, driver.launches = gemm.FEW_PARAMETERS if few else gemm.MANY_PARAMETERS, []
    x = torch.empty((tokens, columns) if groups == 1 else (tokens, groups, columns), device="cpu")
    x = x.to(torch.bfloat16)
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8)
    block = torch.empty(rows, columns // 16, dtype=torch.uint8)
    scale = torch.ones(scales)
    out = gemm.gemm(
        x, codes, block, scale, segments, "nvfp4", "fragments_16x64", "bf16", None, groups,
        torch.bfloat16,
    )  # fmt: skip
    addresses = [t.data_ptr() for t in (codes, block, scale, x)] + [0, out.data_ptr()]
    return plan, addresses, driver.launches


def flat(values):
    return [v for value in values for v in value]


def test_few_tokens(driver):
    plan, addresses, [(grid, threads, stream, values)] = launched(driver, 5)
    assert (grid, threads, stream) == (-(-384 // plan.warps) * plan.blocks, plan.threads, 77)
    never = 2**31 - 1
    assert flat(values) == [
        *addresses,
        5,
        384,
        384,
        7168,
        0,
        never,
        never,
        never,
        0,
        1,
        16,
        math.inf,
    ]


def test_many_tokens(driver):
    plan, addresses, [(grid, threads, stream, values)] = launched(
        driver, 300, segments=(1000, 1144, 4000), scales=3
    )
    tiles = -(-300 // plan.token_block), -(-6144 // plan.rows)
    clusters = tiles[0] * tiles[1] if plan.blocks > 1 else min(132, tiles[0] * tiles[1])
    assert (grid, threads, stream) == (clusters * plan.blocks, plan.threads, 77)
    span = 1024 // plan.token_block
    assert flat(values) == [
        MAP, 300, 7168, b"\0", *addresses, 300, tiles[0], span, 112, 384, tiles[1], tiles[1],
        7168, 0, 1000, 2144, 2**31 - 1, 0, 1, 16, math.inf,
    ]  # fmt: skip


def test_groups_and_scales_of_rows(driver):
    plan, _, [(_, _, _, values)] = launched(driver, 100, 16384, 4096, groups=16, scales=16384)
    columns, row_blocks = values[1][1], -(-16384 // plan.rows)
    assert columns == 16 * 4096
    # Blocks of rows, of a group's, stride of tokens and of groups, and the end.
    assert flat(values[14:18]) == [row_blocks, row_blocks // 16, 16 * 4096, 4096]
    assert flat(values[-4:]) == [1, 16, 16, math.inf]


def test_sixteen_tokens_at_a_time(driver):
    """Columns that are no multiple of 128 have the kernel for few tokens alone."""
    plan, addresses, launches = launched(driver, 40, 512, 192)
    assert isinstance(plan, FewPlan)
    found = [flat(values) for _, _, _, values in launches]
    assert [values[6] for values in found] == [16, 16, 8]
    assert [values[3] - addresses[3] for values in found] == [0, 16 * 192 * 2, 32 * 192 * 2]
    assert [values[5] - addresses[5] for values in found] == [0, 16 * 512 * 2, 32 * 512 * 2]


@pytest.mark.parametrize(("limit", "told"), [(10.0, 10.0), (None, math.inf)])
@pytest.mark.parametrize("tokens", [5, 40])
def test_swiglu(driver, tokens, limit, told):
    plan = choose(Product(512, 256, 1, False, False, swiglu=True), tokens)
    assert plan.swiglu
    few = isinstance(plan, FewPlan)
    driver.kinds, driver.launches = gemm.FEW_PARAMETERS if few else gemm.MANY_PARAMETERS, []
    x, codes = torch.empty(tokens, 256).bfloat16(), torch.empty(512, 128, dtype=torch.uint8)
    out = gemm.gemm_swiglu(
        x, codes, codes, torch.ones(1), (), "nvfp4", "fragments_16x64", "bf16", None, limit,
        torch.bfloat16,
    )  # fmt: skip
    assert out.shape == (tokens, 256)
    [(_, _, _, values)] = driver.launches
    assert values[-1] == (told,)


EXPERTS, INNER, HIDDEN = 5, 512, 256
NEVER = 2**31 - 1


class Grouped:
    """A grouped product on parts whose addresses are kept; nothing but the driver sees them."""

    def __init__(self, rows, columns, scales=1):
        self.codes = torch.empty(EXPERTS, rows, columns // 2, dtype=torch.uint8)
        self.block = torch.empty(EXPERTS, rows, columns // 16, dtype=torch.uint8)
        self.scale = torch.ones(EXPERTS, scales)
        self.offsets = torch.zeros(EXPERTS + 1, dtype=torch.int32)
        self.rows, self.columns = rows, columns

    def __call__(self, driver, function, x, *rest, segments=(), activation="bf16", dtype=None):
        driver.kinds, driver.launches, driver.maps = grouped_gemm.PARAMETERS, [], []
        parts = (self.codes, self.block, self.scale, segments, self.offsets)
        named = ("nvfp4", "fragments_16x64", activation, None)
        self.out = function(x, *parts, *named, *rest, dtype or torch.bfloat16)
        return [(*launch[:3], flat(launch[3])) for launch in driver.launches]

    def addresses(self, x, row_scale=0, row_weight=0):
        """In the order in which the kernel takes them."""
        first = [t.data_ptr() for t in (self.codes, self.block, self.scale, x)]
        return [*first, row_scale, row_weight, self.out.data_ptr(), self.offsets.data_ptr()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 24, 3000])
def test_experts(driver, tokens, dtype):
    product = Grouped(HIDDEN, INNER)
    x = torch.empty(tokens, INNER).bfloat16()
    [(grid, threads, stream, values)] = product(
        driver, grouped_gemm.grouped_gemm, x, segments=(), dtype=dtype
    )
    wanted = Experts(HIDDEN, INNER, EXPERTS, dtype == torch.float32, False)
    plan = grouped_plan.choose(wanted, tokens)
    assert (product.out.shape, product.out.dtype) == ((tokens, HIDDEN), dtype)
    # As many blocks as fit the GPU: how many tiles there are is known to the kernel alone.
    assert (grid, threads, stream) == (132, plan.threads, 77)
    assert values == [
        MAP, tokens, INNER, b"\0", *product.addresses(x), tokens, EXPERTS, INNER // 64,
        HIDDEN // 16, -(-HIDDEN // plan.rows), INNER, 1, NEVER, NEVER, NEVER, 0, 16, math.inf,
    ]  # fmt: skip
    assert driver.maps == [(x.data_ptr(), tokens, INNER, INNER, plan.token_block)]


@pytest.mark.parametrize(
    ("segments", "scales", "told"),
    [
        ((), 1, [1, NEVER, NEVER, NEVER, 0]),
        ((), HIDDEN, [HIDDEN, NEVER, NEVER, NEVER, 1]),
        ((HIDDEN,), 1, [1, NEVER, NEVER, NEVER, 0]),
        ((100, 156), 2, [2, 100, NEVER, NEVER, 0]),
        ((16, 40, 100, 100), 4, [4, 16, 56, 156, 0]),
    ],
)
def test_scales_of_experts(driver, segments, scales, told):
    """Scales of an expert, rows at which the next one holds, whether every row has its own."""
    x = torch.empty(40, INNER).bfloat16()
    [(_, _, _, values)] = Grouped(HIDDEN, INNER, scales)(
        driver, grouped_gemm.grouped_gemm, x, segments=segments
    )
    assert values[-7:-2] == told


@pytest.mark.parametrize(("limit", "told"), [(10.0, 10.0), (None, math.inf)])
@pytest.mark.parametrize("weighted", [False, True])
def test_swiglu_of_experts(driver, limit, told, weighted):
    product, tokens = Grouped(2 * INNER, HIDDEN, 2 * INNER), 48
    x, weight = torch.empty(tokens, HIDDEN).bfloat16(), torch.ones(tokens)
    [(grid, threads, _, values)] = product(
        driver, grouped_gemm.grouped_gemm_swiglu, x, limit, weight if weighted else None
    )
    wanted = Experts(2 * INNER, HIDDEN, EXPERTS, False, False, True, weighted)
    plan = grouped_plan.choose(wanted, tokens)
    assert (plan.swiglu, plan.row_weighted) == (True, weighted)
    assert (grid, threads) == (132, plan.threads)
    assert product.out.shape == (tokens, INNER)
    addresses = product.addresses(x, row_weight=weight.data_ptr() if weighted else 0)
    assert values == [
        MAP, tokens, HIDDEN, b"\0", *addresses, tokens, EXPERTS, HIDDEN // 64, 2 * INNER // 16,
        -(-2 * INNER // plan.rows), HIDDEN, 2 * INNER, NEVER, NEVER, NEVER, 1, 16, told,
    ]  # fmt: skip


def test_weights_of_rows_are_read_as_float32(driver):
    """Whatever dtype and stride they come in; the copy lives until the launch."""
    weight = torch.ones(2, 48, dtype=torch.bfloat16).T[:, 0]
    x = torch.empty(48, HIDDEN).bfloat16()
    [(_, _, _, values)] = Grouped(2 * INNER, HIDDEN)(
        driver, grouped_gemm.grouped_gemm_swiglu, x, None, weight
    )
    assert values[9] not in (0, weight.data_ptr())


@pytest.mark.parametrize("swiglu", [False, True])
def test_quantised_rows_of_experts_have_a_scale_each(driver, monkeypatch, swiglu):
    other, scale = torch.empty(48, HIDDEN).bfloat16(), torch.ones(48)
    monkeypatch.setattr(grouped_gemm, "bfloat16_operand", lambda x, scales: (other, scale))
    product, x = Grouped(2 * INNER, HIDDEN), torch.empty(48, HIDDEN).bfloat16()
    function = grouped_gemm.grouped_gemm_swiglu if swiglu else grouped_gemm.grouped_gemm
    rest = (10.0, None) if swiglu else ()
    [(_, _, _, values)] = product(driver, function, x, *rest, activation="nvfp4")
    assert values[4:12] == product.addresses(other, row_scale=scale.data_ptr())


def test_rows_of_experts_apart_and_misaligned(driver):
    """A stride is told to the kernel; rows that tensor copies cannot read are copied."""
    product, wide = Grouped(HIDDEN, INNER), torch.empty(24, INNER + 72).bfloat16()
    x = wide[:, 8 : 8 + INNER]
    [(_, _, _, values)] = product(driver, grouped_gemm.grouped_gemm, x)
    assert values[4:12] == product.addresses(x)
    assert values[17] == driver.maps[0][3] == INNER + 72
    [(_, _, _, values)] = product(driver, grouped_gemm.grouped_gemm, wide[:, 4 : 4 + INNER])
    assert values[7] != wide[:, 4:].data_ptr()
    assert values[17] == driver.maps[0][3] == INNER


def test_no_rows_launch_nothing(driver):
    product = Grouped(2 * INNER, HIDDEN)
    x = torch.empty(0, HIDDEN).bfloat16()
    assert product(driver, grouped_gemm.grouped_gemm, x) == []
    assert product.out.shape == (0, 2 * INNER)
    assert product(driver, grouped_gemm.grouped_gemm_swiglu, x, None, None) == []
    assert product.out.shape == (0, INNER)


@given(kinds=st.lists(st.sampled_from(["i", "q", "2i", "s", "128s"]), min_size=1, max_size=9))
def test_parameters_lie_apart(kinds):
    found = Parameters(*kinds)
    ends = [start + struct.calcsize(kind) for start, kind in zip(found.offsets, kinds, strict=True)]
    assert all(start >= end for start, end in zip(found.offsets[1:], ends, strict=False))
    assert found.size == ends[-1]
    aligned = {"i": 4, "2i": 4, "q": 8}
    assert all(o % aligned.get(k, 1) == 0 for o, k in zip(found.offsets, kinds, strict=True))
