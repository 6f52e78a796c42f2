"""Launches of the CuTeDSL kernels of attention, against a mock driver."""

from __future__ import annotations

import ctypes
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4.cute import attention as launcher
from dsv4.cute.runtime import driver as cuda_driver
from dsv4.cute.runtime.driver import Image, Kernel
from dsv4.cute.sm90.attention_args import ATTENTION_ABI, CLUSTER_ATTENTION_ABI, MERGE_ABI
from dsv4.cute.sm90.attention_plan import (
    COLUMN_CLUSTERS,
    NARROW_CLUSTERS,
    NARROW_STEPS,
    AttentionPlan,
    ColumnsPlan,
    MergePlan,
    NarrowPlan,
    head_tiles,
)
from dsv4.ops.attention import SparseAttentionArgs

SMS = 132
PLANS = [
    AttentionPlan(False),
    AttentionPlan(False, dequant_warps=4),
    AttentionPlan(True),
    AttentionPlan(False, paired=True),
    *(NarrowPlan(ctas, step) for ctas in NARROW_CLUSTERS for step in NARROW_STEPS),
    *map(ColumnsPlan, COLUMN_CLUSTERS),
]


def abi_of(plan):
    if isinstance(plan, AttentionPlan):
        return ATTENTION_ABI
    return MERGE_ABI if isinstance(plan, MergePlan) else CLUSTER_ATTENTION_ABI


class Driver:
    """Keeps the plan, the CTAs and every argument by name of each launch."""

    def __init__(self):
        self.launches, self.loaded = [], []

    def __getattr__(self, name):
        return lambda *arguments: 0

    def cuOccupancyMaxActiveClusters(self, count, kernel, config):  # noqa: N802, the driver's
        count._obj.value = SMS
        return 0

    def cuLaunchKernelEx(self, config, kernel, pointers, extra):  # noqa: N802
        plan, result = self.loaded[-1], {}
        for (name, field), address in zip(abi_of(plan).fields.items(), pointers, strict=True):
            kind = "@" + field.format
            (result[name],) = struct.unpack(kind, ctypes.string_at(address, struct.calcsize(kind)))
        self.launches.append((plan, config._obj.grid[0], result))
        return 0

    def load(self, plan, arch):
        self.loaded.append(plan)
        return Kernel(Image(b"", "name", plan.threads, plan.ctas, plan.shared_bytes))


def launches(args, plan, splits):
    """Launches of a call that takes a plan, and its result."""
    driver = Driver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_driver, "_driver", lambda: driver)
        patch.setattr(launcher, "loaded", driver.load)
        patch.setattr(launcher, "attention_plan", lambda *sizes: (plan, splits))
        patch.setattr(launcher, "_fitting_plan", lambda plan, *sizes: plan)
        patch.setattr(launcher, "_sms", lambda device: SMS)
        patch.setattr(launcher, "stream_of", lambda device: 7)
        patch.setattr(launcher, "on", lambda device: torch.inference_mode())
        for made in ("_attention_launch", "_cluster_launch", "_merge_launch"):
            patch.setattr(launcher, made, getattr(launcher, made).__wrapped__)
        out = launcher.sparse_attention(args)
    return driver.launches, out


def call(tokens, heads, widths, pages, angles):
    """Arguments of a call, whose tensors nobody reads."""
    pools = [torch.empty(3, size * 584, dtype=torch.uint8) for size in pages]
    slots = [torch.zeros(tokens, width, dtype=torch.int64) for width in widths]
    tables = [torch.empty(tokens, 32) if angles else None] * 2
    q = torch.empty(tokens, heads, 512, dtype=torch.bfloat16)
    window, compressed = ((pool, n, "fp8") for pool, n in zip(pools, pages, strict=True))
    return SparseAttentionArgs(
        q, *window, slots[0], *compressed, slots[1], torch.empty(heads), 64, 0.25, *tables
    )


@given(
    st.sampled_from(PLANS),
    st.integers(1, 5),
    st.sampled_from([1, 16, 64, 65, 128]),
    st.tuples(st.integers(0, 200), st.integers(0, 200)),
    st.tuples(st.sampled_from([2, 64]), st.sampled_from([4, 64, 128])),
    st.booleans(),
)
def test_every_argument_reaches_the_kernel_by_its_name(plan, tokens, heads, widths, pages, angles):
    args = call(tokens, heads, widths, pages, angles)
    splits = 3 if isinstance(plan, AttentionPlan) and plan.split else plan.ctas
    [(actual, ctas, first), *rest], out = launches(args, plan, splits)
    assert actual == plan
    expected = {
        "q": args.q.data_ptr(),
        "window": args.window.data_ptr(),
        "window_slots": args.window_slots.data_ptr(),
        "compressed": args.compressed.data_ptr(),
        "compressed_slots": args.compressed_slots.data_ptr(),
        "sink": args.sink.data_ptr(),
        "cos": args.cos.data_ptr() if angles else 0,
        "sin": args.sin.data_ptr() if angles else 0,
        "token_stride": heads * 512,
        "head_stride": 512,
        "window_stride": pages[0] * 584,
        "compressed_stride": pages[1] * 584,
        "window_width": widths[0],
        "compressed_width": widths[1],
        "heads": heads,
        "scale": 0.25,
    }
    assert {name: first[name] for name in expected} == expected
    assert (1 << first["window_shift"], 1 << first["compressed_shift"]) == pages
    if not isinstance(plan, AttentionPlan):
        assert first["head_tiles"] == -(-heads // 16)
        assert ctas == tokens * first["head_tiles"] * plan.ctas
    else:
        assert first["head_tiles"] == head_tiles(heads)
        assert first["splits"] == splits
        assert first["items"] == tokens * splits * head_tiles(heads)
        assert ctas == (first["items"] if plan.paired else min(first["items"], SMS))
    if not (isinstance(plan, AttentionPlan) and plan.split):
        assert not rest
        assert first["out"] == out.data_ptr()
        return
    [(merge, rows, second)] = rest
    assert merge == MergePlan()
    assert rows == tokens * heads
    assert second == {
        "partials": first["out"],
        "statistics": first["statistics"],
        "sink": expected["sink"],
        "out": out.data_ptr(),
        "cos": expected["cos"],
        "sin": expected["sin"],
        "heads": heads,
        "splits": splits,
    }


def test_no_compressed_pages_are_none_of_their_slots():
    args = call(2, 16, (8, 8), (64, 64), False)
    args = args._replace(compressed=None, compressed_slots=None, compressed_page_size=0)
    [(_, _, result)], _ = launches(args, NarrowPlan(), 8)
    assert (result["window_width"], result["compressed_width"]) == (8, 0)
    assert result["compressed"] == result["window"]


def test_launches_of_the_same_sizes_are_made_once(monkeypatch):
    """The pointers are those of each call."""
    driver = Driver()
    monkeypatch.setattr(cuda_driver, "_driver", lambda: driver)
    monkeypatch.setattr(launcher, "loaded", driver.load)
    problem = launcher._Problem(2, 16, 8192, 512, 64, 64, 128, 128, 64, 64, 0.25, 0)
    launcher._cluster_launch.cache_clear()
    for addresses in (range(16, 160, 16), range(160, 304, 16)):
        launcher._launch_cluster((NarrowPlan(), problem), 0, addresses)
        assert driver.launches[-1][2]["q"] == addresses[0]
        assert driver.launches[-1][2]["sin"] == addresses[-1]
    assert len(driver.loaded) == 1
    launcher._cluster_launch.cache_clear()
