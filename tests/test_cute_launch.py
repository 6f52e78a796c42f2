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

from dsv4.cute import _driver, gemm
from dsv4.cute._driver import Image, Kernel, Parameters
from dsv4.cute.sm90.few_plan import FewPlan
from dsv4.cute.sm90.plans import Product, choose

MAP = bytes(range(128))


class Driver:
    """Keeps what it was asked to launch: blocks, stream, and the bytes at every pointer."""

    def __init__(self, kinds=None):
        self.kinds, self.launches = kinds, []

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
    monkeypatch.setattr(gemm, "tensor_map", lambda *what: MAP)
    monkeypatch.setattr(gemm, "stream_of", lambda index: 77)
    monkeypatch.setattr(gemm, "_prepared", gemm._prepared.__wrapped__)
    monkeypatch.setattr(gemm, "loaded", lambda plan, arch: _kernel_of(plan))
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


@given(kinds=st.lists(st.sampled_from(["i", "q", "2i", "s", "128s"]), min_size=1, max_size=9))
def test_parameters_lie_apart(kinds):
    found = Parameters(*kinds)
    ends = [start + struct.calcsize(kind) for start, kind in zip(found.offsets, kinds, strict=True)]
    assert all(start >= end for start, end in zip(found.offsets[1:], ends, strict=False))
    assert found.size == ends[-1]
    aligned = {"i": 4, "2i": 4, "q": 8}
    assert all(o % aligned.get(k, 1) == 0 for o, k in zip(found.offsets, kinds, strict=True))
