"""Launches of CuTeDSL kernels, against a mock driver."""

from __future__ import annotations

import ctypes
import itertools
import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4.cute import gemm, gemm_e4m3, gemm_fp8, gemm_fp8_small_m, grouped_gemm
from dsv4.cute.grouped_problem import Experts
from dsv4.cute.runtime import driver as cuda_driver
from dsv4.cute.runtime.architectures import HOPPER
from dsv4.cute.runtime.driver import Image, Kernel, Matrix, Parameters
from dsv4.cute.sm90 import grouped_gemm_plans
from dsv4.cute.sm90.gemm_e4m3_plan import E4m3Plan
from dsv4.cute.sm90.gemm_fp8_small_m_plan import SmallMFp8Plan
from dsv4.cute.sm90.gemm_fp8_wgmma_plan import Fp8WgmmaPlan
from dsv4.cute.sm90.gemm_small_m_plan import SmallMPlan
from dsv4.cute.sm90.gemm_wgmma_plan import WgmmaPlan
from dsv4.cute.sm90.grouped_gemm_plans import ANY_ROWS, LaunchPlan
from dsv4.cute.sm90.grouped_gemm_small_m_plan import GroupedSmallMPlan
from dsv4.cute.sm90.plans import GemmProblem, choose
from dsv4.ops.gemm import GemmArgs
from dsv4.ops.gemm_swiglu import GemmSwigluArgs
from dsv4.ops.grouped_gemm import GroupedGemmArgs
from dsv4.ops.grouped_gemm_swiglu import GroupedGemmSwigluArgs, GroupedGemmSwigluQuantizeArgs
from dsv4.ops.quantize import empty_fp8_token
from dsv4.quant.formats import LINEAR, SWIZZLED_EXPERTS

MAP = bytes(range(128))


class Driver:
    """Keeps what it was asked to launch: blocks, stream, and the bytes at every pointer."""

    def __init__(self, kinds=None):
        self.kinds, self.launches, self.maps = kinds, [], []
        self.early = []  # whether each launch's blocks may begin before the preceding kernel ends
        self.arch, self.archs = HOPPER, []
        self.plan = None  # of a dense GEMM, instead of what would be chosen

    def __getattr__(self, name):
        return lambda *arguments: 0

    def cuOccupancyMaxActiveClusters(self, count, kernel, config):  # noqa: N802, the driver's
        count._obj.value = 132
        return 0

    def cuLaunchKernelEx(self, config, kernel, pointers, extra):  # noqa: N802
        assert extra is None
        config = config._obj
        expected = self.kinds[len(self.launches)] if isinstance(self.kinds, list) else self.kinds
        values = [
            struct.unpack("@" + kind, ctypes.string_at(pointer, struct.calcsize("@" + kind)))
            for kind, pointer in zip(expected.kinds, pointers, strict=True)
        ]
        self.launches.append((config.grid[0], config.block[0], config.stream, values))
        attributes = config.attributes[: config.attribute_count]
        self.early.append(
            any(attribute.id == cuda_driver._PROGRAMMATIC_LAUNCH for attribute in attributes)
        )
        assert any(attribute.id == cuda_driver._CLUSTER_DIMENSION for attribute in attributes)
        return 0


class Contexts(Driver):
    """Two GPUs that nothing has used, and the context that is current."""

    def __init__(self, current=None):
        super().__init__()
        self.current, self.asked = current, []

    def cuCtxGetCurrent(self, result):  # noqa: N802
        result._obj.value = self.current
        return 0

    def cuDeviceGet(self, handle, device):  # noqa: N802
        handle._obj.value = 10 + device
        return 0

    def cuDevicePrimaryCtxRetain(self, result, handle):  # noqa: N802
        result._obj.value = 100 + handle.value
        return 0

    def cuCtxSetCurrent(self, context):  # noqa: N802
        self.current = context.value
        return 0

    def cuOccupancyMaxActiveClusters(self, count, kernel, config):  # noqa: N802
        if self.current is None:
            return 201  # invalid device context
        self.asked.append(self.current)
        return super().cuOccupancyMaxActiveClusters(count, kernel, config)


@pytest.mark.parametrize("index", [0, 1])
def test_a_kernel_is_made_ready_on_a_gpu_that_nothing_has_used(index, monkeypatch):
    result = Contexts()
    monkeypatch.setattr(cuda_driver, "_driver", lambda: result)
    assert Kernel(Image(b"", "k", 32, 1, 0)).prepare(index) == 132
    assert result.asked == [110 + index]


def test_a_context_that_is_current_stays(monkeypatch):
    result = Contexts(current=7)
    monkeypatch.setattr(cuda_driver, "_driver", lambda: result)
    Kernel(Image(b"", "k", 32, 1, 0)).prepare(0)
    assert result.asked == [7]


def single_launch(problem, tokens, arch=HOPPER):
    plan = grouped_gemm_plans.typical_plan(problem, tokens, arch)
    return () if plan is None else (LaunchPlan(plan, 0, ANY_ROWS),)


@pytest.fixture
def driver(monkeypatch):
    result = Driver()
    monkeypatch.setattr(cuda_driver, "_driver", lambda: result)
    monkeypatch.setattr(cuda_driver, "tensor_map", lambda *what: result.maps.append(what) or MAP)
    # One launch for all experts, unless a test asks for those that there are.
    monkeypatch.setattr(grouped_gemm, "launch_plans", single_launch)
    monkeypatch.setattr(gemm, "choose", lambda *what: result.plan or choose(*what))
    for module in (gemm, gemm_fp8, gemm_e4m3, grouped_gemm):
        monkeypatch.setattr(module, "stream_of", lambda index: 77)
        monkeypatch.setattr(module, "current_device", lambda: -1)
    for module in (gemm, gemm_fp8, gemm_fp8_small_m, gemm_e4m3, grouped_gemm):
        monkeypatch.setattr(module, "_prepared", module._prepared.__wrapped__)
        monkeypatch.setattr(module, "architecture", lambda index: result.arch)
        monkeypatch.setattr(
            module, "loaded", lambda plan, arch: result.archs.append(arch) or _kernel_of(plan)
        )
    return result


def _kernel_of(plan):
    return Kernel(Image(b"code", "name", plan.threads, plan.ctas, plan.shared_bytes))


def launched(
    driver, tokens, rows=6144, columns=7168, groups=1, scales=1, segments=(), reserve_sms=0
):
    product = GemmProblem(rows, columns, groups, False, False)
    plan = driver.plan or choose(product, tokens, driver.arch)
    is_small_m = isinstance(plan, SmallMPlan)
    driver.kinds = gemm.SMALL_M_ABI.parameters if is_small_m else gemm.WGMMA_ABI.parameters
    driver.launches, driver.maps = [], []
    x = torch.empty((tokens, columns) if groups == 1 else (tokens, groups, columns), device="cpu")
    x = x.to(torch.bfloat16)
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8)
    block = torch.empty(rows, columns // 16, dtype=torch.uint8)
    scale = torch.ones(scales)
    out = gemm.gemm(GemmArgs(
        x, codes, block, scale, None, segments, "nvfp4", "fragments_16x64", "bf16", None, groups,
        torch.bfloat16,
    ), reserve_sms)  # fmt: skip
    addresses = [t.data_ptr() for t in (codes, block, scale, x)] + [0, out.data_ptr()]
    return plan, addresses, driver.launches


def flat(values):
    return [v for value in values for v in value]


def test_few_tokens(driver):
    plan, addresses, [(grid, threads, stream, values)] = launched(driver, 5)
    assert (grid, threads, stream) == (-(-384 // plan.warps) * plan.ctas, plan.threads, 77)
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


WGMMA_PLANS = [
    WgmmaPlan(128, 2, 1, 2, False, False),
    WgmmaPlan(64, 2, 5, 2, False, False, warp_tiles=2),
]


@pytest.mark.parametrize("plan", WGMMA_PLANS, ids=repr)
def test_many_tokens(driver, plan):
    driver.plan = plan
    _, addresses, [(grid, threads, stream, values)] = launched(
        driver, 300, segments=(1000, 1144, 4000), scales=3
    )
    tiles = -(-300 // plan.token_block), -(-6144 // plan.rows)
    clusters = tiles[0] * tiles[1] if plan.ctas > 1 else min(132, tiles[0] * tiles[1])
    assert (grid, threads, stream) == (clusters * plan.ctas, plan.threads, 77)
    codes, scales, *rest, x = (addresses[n] for n in (0, 1, 2, 3, 4, 5, 3))
    boxes = (
        Matrix(300, 7168, 7168, plan.token_block),
        Matrix(384, 112 * 128, 112 * 128, plan.rows // 16, plan.stage_k_blocks * 128, True),
        Matrix(384, 112 * 16, 112 * 16, plan.rows // 16, plan.stage_k_blocks * 16, True),
    )
    assert driver.maps == list(zip((x, codes, scales), boxes, strict=True))
    assert flat(values) == [
        MAP, MAP, MAP, 300, 7168, 384, 112 * 128, 384, 112 * 16, b"\0", *rest, 300, tiles[0],
        1024 // plan.token_block, 112, 384, tiles[1], tiles[1], 7168, 0, 1000, 2144, 2**31 - 1, 0,
        1, 16, math.inf,
    ]  # fmt: skip


@pytest.mark.parametrize("reserve_sms", [0, 20, 200])
@pytest.mark.parametrize("plan", WGMMA_PLANS, ids=repr)
def test_many_tokens_reserve_sms(driver, plan, reserve_sms):
    driver.plan = plan
    _, _, [(reserving, *_)] = launched(driver, 300, reserve_sms=reserve_sms)
    _, _, [(whole, *_)] = launched(driver, 300)
    assert driver.early == [reserve_sms == 0, True]
    # Single CTAs are persistent, a cluster has one tile.
    assert reserving == (whole if plan.ctas > 1 else max(1, whole - reserve_sms))


def test_few_tokens_reserve_nothing(driver):
    _, _, [(reserving, *_)] = launched(driver, 5, reserve_sms=20)
    _, _, [(whole, *_)] = launched(driver, 5)
    assert reserving == whole
    assert driver.early == [True, True]


@pytest.mark.parametrize("plan", WGMMA_PLANS, ids=repr)
def test_groups_and_scales_of_rows(driver, plan):
    driver.plan = plan
    _, _, [(_, _, _, values)] = launched(driver, 100, 16384, 4096, groups=16, scales=16384)
    columns, row_blocks = values[3][1], -(-16384 // plan.rows)
    assert columns == 16 * 4096
    # Blocks of rows, of a group's, stride of tokens and of groups, and the end.
    assert flat(values[-11:-7]) == [row_blocks, row_blocks // 16, 16 * 4096, 4096]
    assert flat(values[-4:]) == [1, 16, 16, math.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu])
@pytest.mark.parametrize("blocks", [1, 3])
def test_fp8_weights(driver, monkeypatch, blocks, dtype):
    """Two groups of rows whose codes lie apart, and activations with a scale each."""
    plan = Fp8WgmmaPlan(96, 2, blocks, 2, True, True)
    folded, asked = dtype == torch.float8_e8m0fnu, []
    monkeypatch.setattr(gemm_fp8, "fp8_plan", lambda *arguments: asked.append(arguments) or plan)
    driver.kinds = gemm_fp8.FP8_WGMMA_ABI.parameters
    x = torch.ones(300, 2, 512, dtype=torch.bfloat16)
    codes = torch.zeros(1024, 640, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, :512]
    scales = torch.ones(8, 4).to(dtype)
    form = ("fp8_block", "linear", "nvfp4")
    out = gemm.gemm(GemmArgs(x, codes, scales, None, None, (), *form, None, 2, torch.float32))
    assert (out.shape, out.dtype) == ((300, 2, 512), torch.float32)
    [(grid, threads, stream, values)] = driver.launches
    assert (grid, threads, stream) == (4 * 8 * blocks, 128 * 3, 77)
    (x_at, of_x), (codes_at, of_codes) = driver.maps
    assert (of_x, of_codes) == (
        Matrix(300, 1024, 1024, 96),
        Matrix(1024, 256, 320, 128),
    )
    assert codes_at == codes.data_ptr()
    *most, token_scale, end = flat(values[:10])
    assert most == [MAP, MAP, 300, 1024, 1024, 256, b"\0", codes_at, scales.data_ptr(), x_at]
    assert token_scale
    assert end == out.data_ptr()
    assert flat(values[10:]) == [
        *(300, 4, 1024 // 96, 8, 64, 8, 4),
        *(1024, 512, 640, 2, 8),
    ]
    assert asked == [(GemmProblem(1024, 512, 2, True, True), 300, folded)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu])
def test_fp8_weights_and_few_tokens(driver, monkeypatch, dtype):
    """Two launches, of two groups of rows whose codes lie apart, and a scale for each token."""
    folded, asked = dtype == torch.float8_e8m0fnu, []
    plan = SmallMFp8Plan(512, 2, 8, 4, True, True, 2, e8m0_scales=folded)
    monkeypatch.setattr(
        gemm_fp8_small_m, "fp8_small_m_plan", lambda *arguments: asked.append(arguments) or plan
    )
    driver.kinds = gemm_fp8_small_m.SMALL_M_FP8_ABI.parameters
    x = torch.ones(40, 2, 512, dtype=torch.bfloat16)
    codes = torch.zeros(1024, 640, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, :512]
    scales = torch.ones(8, 4).to(dtype)
    form = ("fp8_block", "linear", "nvfp4")
    args = GemmArgs(x, codes, scales, None, None, (), *form, None, 2, torch.float32)
    out = gemm_fp8_small_m.gemm(args)
    assert (out.shape, out.dtype) == ((40, 2, 512), torch.float32)
    first, second = driver.launches
    for launch, tokens in ((first, 32), (second, 8)):
        grid, threads, stream, values = launch
        assert (grid, threads, stream) == (8 * 2, 256, 77)
        assert flat(values)[:2] == [codes.data_ptr(), scales.data_ptr()]
        assert flat(values)[5:] == [tokens, 64, 32, 1024, 512, 640, 2]
    x_at, token_scale, out_at = flat(first[3])[2:5]
    assert out_at == out.data_ptr()
    assert flat(second[3])[2:5] == [
        *(x_at + 32 * 1024 * 2, token_scale + 32 * 2 * 4, out_at + 32 * 1024 * 4)
    ]
    problem = GemmProblem(1024, 512, 2, True, True)
    assert asked == [(problem, 32, folded), (problem, 8, folded)]


@pytest.mark.parametrize("op", ["gemm", "gemm_swiglu"])
@pytest.mark.parametrize("layout", ["linear", "fragments_16x64"])
def test_fp8_tensor_cores_take_codes_as_they_are(driver, monkeypatch, op, layout):
    """No launch before the GEMM, which reads the caller's codes and scales."""
    block = layout == "linear"
    if block and op == "gemm_swiglu":
        pytest.skip("no SwiGLU with FP8 weights")
    monkeypatch.setattr(gemm_e4m3, "quantize", lambda *what, **how: pytest.fail("quantised"))
    form = ("fp8_block", "linear") if block else ("nvfp4", "fragments_16x64")
    codes, scales = torch.empty(256, 128, dtype=torch.uint8), torch.empty(256, 16).byte()
    scale, exponent = torch.ones(1), torch.zeros(256, dtype=torch.int8)
    if block:
        codes, scales = torch.empty(256, 256, dtype=torch.uint8), torch.ones(2, 2)
        codes, scale, exponent = codes.view(torch.float8_e4m3fn), None, None
    x, x_scales = empty_fp8_token(torch.empty(0, device="cpu"), (300, 256))
    weight = (x, codes, scales, scale, exponent, [], *form, "bf16", None)
    codes_of_x = {"x_scales": x_scales, "x_layout": layout}
    if not block:  # its weight is dequantized in the main loop
        plan = E4m3Plan(2, 3, 3, False, op == "gemm_swiglu")
        monkeypatch.setattr(gemm_e4m3, "choose", lambda problem: plan)
    abi = gemm_e4m3.BLOCK_E4M3_ABI if block else gemm_e4m3.E4M3_ABI
    driver.kinds = abi.parameters
    if op == "gemm":
        args = GemmArgs(*weight, 1, torch.bfloat16, **codes_of_x)
    else:
        args = GemmSwigluArgs(*weight, None, torch.bfloat16, **codes_of_x)
    out = getattr(gemm_e4m3, op)(args)
    assert (out.shape, out.dtype) == ((300, 256 if op == "gemm" else 128), torch.bfloat16)
    [(_, _, stream, values)] = driver.launches
    assert stream == 77
    assert x_scales.data_ptr() in flat(values[:16])
    assert driver.maps[0][0] == x.data_ptr()
    assert driver.maps[1][0] == codes.data_ptr()


def test_sixteen_tokens_at_a_time(driver):
    """Columns that are no multiple of 128 have the kernel for few tokens alone."""
    plan, addresses, launches = launched(driver, 40, 512, 192)
    assert isinstance(plan, SmallMPlan)
    result = [flat(values) for _, _, _, values in launches]
    assert [values[6] for values in result] == [16, 16, 8]
    assert [values[3] - addresses[3] for values in result] == [0, 16 * 192 * 2, 32 * 192 * 2]
    assert [values[5] - addresses[5] for values in result] == [0, 16 * 512 * 2, 32 * 512 * 2]


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_blackwell_has_the_kernels_for_few_tokens_alone(driver, arch):
    """Sixteen tokens at a time, of any matrix; any number of experts' rows in one launch."""
    driver.arch = arch
    _, _, launches = launched(driver, 64)
    assert [flat(values)[6] for _, _, _, values in launches] == [16] * 4
    product, x = Grouped(HIDDEN, INNER), torch.empty(3000, INNER).bfloat16()
    [(_, _, _, values)] = product(driver, grouped_gemm.grouped_gemm, x)
    assert isinstance(product.plan, GroupedSmallMPlan)
    assert values["tokens"] == 3000
    assert set(driver.archs) == {arch}
    assert driver.maps == []


@pytest.mark.parametrize(("limit", "expected"), [(10.0, 10.0), (None, math.inf)])
@pytest.mark.parametrize("tokens", [5, 40])
def test_swiglu(driver, tokens, limit, expected):
    plan = choose(GemmProblem(512, 256, 1, False, False, swiglu=True), tokens)
    assert plan.swiglu
    is_small_m = isinstance(plan, SmallMPlan)
    driver.kinds, driver.launches = (
        gemm.SMALL_M_ABI.parameters if is_small_m else gemm.WGMMA_ABI.parameters,
        [],
    )
    x, codes = torch.empty(tokens, 256).bfloat16(), torch.empty(512, 128, dtype=torch.uint8)
    out = gemm.gemm_swiglu(GemmSwigluArgs(
        x, codes, codes, torch.ones(1), None, (), "nvfp4", "fragments_16x64", "bf16", None, limit,
        torch.bfloat16,
    ))  # fmt: skip
    assert out.shape == (tokens, 256)
    [(_, _, _, values)] = driver.launches
    assert values[-1] == (expected,)


EXPERTS, INNER, HIDDEN = 12, 512, 256
NEVER = 2**31 - 1
ADDRESSES = ("codes", "scales", "global_scale", "x", "out", "offsets")
# The arguments of both kernels, in order.
_FIRST = (
    *("codes", "scales", "global_scale", "x", "row_scale", "row_weight", "out", "offsets"),
    *("codes_scale", "block_scales", "result_scale"),
)
_LAST = ("stride", "scales_each", "cut0", "cut1", "cut2", "scale_rows", "opaque_16")
SMALL_M_ARGUMENTS = (*_FIRST, "tokens", "experts", "row_tiles", *_LAST, "most", "ready", "limit")
WGMMA_ARGUMENTS = (
    *("map", "map_of_codes", "map_of_scales", "map_rows", "map_columns"),
    *("code_rows", "code_words", "scale_rows_of_all", "scale_words", "layout"),
    *_FIRST[2:],
    *("counter", "tokens", "experts", "k_blocks", "row_tiles", "row_blocks"),
    *_LAST,
    *("above", "most", "all_ready", "limit"),
)
SMALL_M_ROWS, LARGE_M_ROWS = 16, 80  # rows of the first kernel and of the second
SEVERAL_ROWS = 56  # rows of both kernels, in a launch each


class Grouped:
    """A grouped GEMM on parts whose addresses are kept; nothing but the driver sees them."""

    def __init__(self, rows, columns, scales=1):
        self.codes = torch.empty(EXPERTS, rows, columns // 2, dtype=torch.uint8)
        self.block = torch.empty(EXPERTS, rows, columns // 16, dtype=torch.uint8)
        self.scale = torch.ones(EXPERTS, scales)
        self.offsets = torch.zeros(EXPERTS + 1, dtype=torch.int32)
        self.rows, self.columns, self.row_scale = rows, columns, None

    def __call__(
        self,
        driver,
        function,
        x,
        *rest,
        segments=(),
        activation="bf16",
        dtype=None,
        codes=None,
        step=(0, 0),
    ):
        """Launches: grid, threads, stream, and the kernel's arguments by name.

        ``rest`` is what SwiGLU takes, ``codes`` the scales of results that are quantised, and how
        their block scales lie, ``step`` the rows and experts of a step that these are a part of.
        """
        self.problem = Experts(
            self.rows,
            self.columns,
            EXPERTS,
            dtype == torch.float32,
            activation == "nvfp4" or self.row_scale is not None,
            bool(rest),
            bool(rest) and rest[1] is not None,
            codes is not None,
            codes is not None and codes[1] == SWIZZLED_EXPERTS,
        )
        chosen = self.problem._replace(experts=step[1] or EXPERTS)
        rows = step[0] or max(x.shape[0], 1)
        self.launches = grouped_gemm.launch_plans(chosen, rows, driver.arch)
        self.plan = self.launches[-1].plan
        small_m = [isinstance(launch.plan, GroupedSmallMPlan) for launch in self.launches]
        kinds = (
            grouped_gemm.GROUPED_WGMMA_ABI.parameters,
            grouped_gemm.GROUPED_SMALL_M_ABI.parameters,
        )
        driver.kinds = [kinds[is_small_m] for is_small_m in small_m]
        driver.launches, driver.maps = [], []
        parts = (self.codes, self.block, self.scale, None, segments, self.offsets)
        named = ("nvfp4", "fragments_16x64", activation, None, None, "linear", self.row_scale)
        if codes is not None:
            record, last = GroupedGemmSwigluQuantizeArgs, codes
        elif rest:
            record, last = GroupedGemmSwigluArgs, [dtype or torch.bfloat16]
        else:
            record, last = GroupedGemmArgs, [dtype or torch.bfloat16, False]
        args = record(x, *parts, *named, *rest, *last)
        self.out = function(args._replace(step_rows=step[0], step_experts=step[1]))
        names = [(WGMMA_ARGUMENTS, SMALL_M_ARGUMENTS)[is_small_m] for is_small_m in small_m]
        return [
            (*launch[:3], dict(zip(of_launch, flat(launch[3]), strict=True)))
            for of_launch, launch in zip(names, driver.launches, strict=bool(driver.launches))
        ]

    def addresses(self, x, row_scale=0, row_weight=0):
        out = self.out[0] if isinstance(self.out, tuple) else self.out
        own = (self.codes, self.block, self.scale, x, out, self.offsets)
        named = dict(zip(ADDRESSES, (t.data_ptr() for t in own), strict=True))
        if not isinstance(self.plan, GroupedSmallMPlan):  # TMA copies read them
            del named["codes"], named["scales"]
        none = {"codes_scale": 0, "block_scales": 0, "result_scale": 0}
        none |= {} if isinstance(self.plan, GroupedSmallMPlan) else {"counter": 0}
        return {**named, **none, "row_scale": row_scale, "row_weight": row_weight}


def sizes_of(product, x):
    """The arguments of every launch that describe sizes."""
    tokens, row_tiles = x.shape[0], product.rows // 16
    expected = {"tokens": tokens, "experts": EXPERTS, "row_tiles": row_tiles, "opaque_16": 16}
    expected |= {"stride": x.stride(0), "most": NEVER}
    if isinstance(product.plan, GroupedSmallMPlan):
        return expected | {"ready": 0}
    expected |= {"above": 0, "all_ready": 0}
    k_blocks, plan = product.columns // 64, product.plan
    expected |= {"k_blocks": k_blocks, "layout": b"\0"}
    expected |= {"map": MAP, "map_of_codes": MAP, "map_of_scales": MAP}
    expected |= {"map_rows": tokens, "map_columns": product.columns}
    expected |= {"code_rows": EXPERTS * row_tiles, "code_words": k_blocks * 128}
    expected |= {"scale_rows_of_all": EXPERTS * row_tiles, "scale_words": k_blocks * 16}
    return expected | {"row_blocks": -(-product.rows // plan.rows)}


def described_of(product, x):
    """The operands as the driver describes them for TMA copies."""
    plan = product.plan
    if isinstance(plan, GroupedSmallMPlan):
        return []
    tiles, k_blocks = EXPERTS * product.rows // 16, product.columns // 64
    of_x = Matrix(x.shape[0], x.shape[1], x.stride(0), plan.tma_tokens)
    codes = Matrix(
        tiles, k_blocks * 128, k_blocks * 128, plan.cta_row_tiles, plan.stage_k_blocks * 128, True
    )
    scales = Matrix(
        tiles, k_blocks * 16, k_blocks * 16, plan.cta_row_tiles, plan.stage_k_blocks * 16, True
    )
    addresses = (t.data_ptr() for t in (x, product.codes, product.block))
    return list(zip(addresses, (of_x, codes, scales), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, SMALL_M_ROWS, LARGE_M_ROWS, 300, 3000])
def test_experts(driver, tokens, dtype):
    product, x = Grouped(HIDDEN, INNER), torch.empty(tokens, INNER).bfloat16()
    [(grid, threads, stream, values)] = product(
        driver, grouped_gemm.grouped_gemm, x, segments=(), dtype=dtype
    )
    is_small_m = isinstance(product.plan, GroupedSmallMPlan)
    assert is_small_m == (tokens <= SMALL_M_ROWS)
    assert (product.out.shape, product.out.dtype) == ((tokens, HIDDEN), dtype)
    # As many blocks as fit the GPU: how many tiles there are is known to the kernel alone.
    assert (grid, threads, stream) == (132, product.plan.threads, 77)
    never = {"cut0": NEVER, "cut1": NEVER, "cut2": NEVER}
    scales = {"scales_each": 1, "scale_rows": 0, "limit": math.inf}
    assert values == {**sizes_of(product, x), **product.addresses(x), **never, **scales}
    assert driver.maps == described_of(product, x)


def test_offsets_that_are_ready(driver):
    """Said to the kernel for few rows, which alone asks for weights so early."""
    product, x = Grouped(HIDDEN, INNER), torch.empty(1, INNER).bfloat16()

    def with_ready_offsets(args):
        return grouped_gemm.grouped_gemm(args._replace(settled=True))

    [(_, _, _, values)] = product(driver, with_ready_offsets, x)
    assert values["ready"] == 1


@pytest.mark.parametrize("tokens", [SEVERAL_ROWS, 300, 3000])
@pytest.mark.parametrize("offsets_ready", [False, True])
def test_experts_of_other_loads_have_launches_of_their_own(
    driver, monkeypatch, tokens, offsets_ready
):
    """Each expert is one launch's. The first waits for the operands, the last fills spare rows."""
    monkeypatch.setattr(grouped_gemm, "launch_plans", grouped_gemm_plans.launch_plans)
    product, x = Grouped(HIDDEN, INNER), torch.empty(tokens, INNER).bfloat16()
    launches = product(
        driver, lambda args: grouped_gemm.grouped_gemm(args._replace(settled=offsets_ready)), x
    )
    arguments = [values for _, _, _, values in launches]
    assert len(arguments) == len(product.launches) > 1
    bounds = sorted((values.get("above", 0), values["most"]) for values in arguments)
    assert [bounds[0][0], bounds[-1][1]] == [0, NEVER]
    assert all(bound[1] == following[0] for bound, following in itertools.pairwise(bounds))
    assert [values["tokens"] for values in arguments] == [0] * (len(arguments) - 1) + [tokens]
    waits = [values.get("all_ready", values.get("ready")) for values in arguments]
    small_m = [isinstance(launch.plan, GroupedSmallMPlan) for launch in product.launches]
    assert waits == [0, *(2 if bound else 1 for bound in small_m[1:])]
    assert [values["map_rows"] for values in arguments if "map_rows" in values].count(tokens) == (
        len(arguments) - sum(small_m)
    )


@pytest.mark.parametrize("rows", [3, 300, 3000])
@pytest.mark.parametrize("step", [(20, 64), (3000, 4), (3000, 0), (0, 256), (1000, 300)])
def test_a_part_of_a_step_has_the_kernels_of_the_whole(driver, monkeypatch, rows, step):
    """The step decides the launches and the experts of each; the part decides sizes."""
    monkeypatch.setattr(grouped_gemm, "launch_plans", grouped_gemm_plans.launch_plans)
    product, x = Grouped(HIDDEN, INNER), torch.empty(rows, INNER).bfloat16()
    launches = product(driver, grouped_gemm.grouped_gemm, x, step=step)
    assert len(launches) == len(product.launches)
    for (_, threads, _, values), planned in zip(launches, product.launches, strict=True):
        assert threads == planned.plan.threads
        assert (values.get("above", 0), values["most"]) == planned[1:]
        assert values["experts"] == EXPERTS
        assert values.get("map_rows", rows) == rows
        assert values.get("code_rows", EXPERTS * HIDDEN // 16) == EXPERTS * HIDDEN // 16
    assert launches[-1][3]["tokens"] == rows
    counted = any(values.get("counter") for *_, values in launches)
    chosen = product.problem._replace(experts=step[1] or EXPERTS)
    several = len(launches) > 1
    assert counted == (several and grouped_gemm.uses_tile_counters(chosen, step[0] or rows))


@pytest.mark.parametrize(
    ("tokens", "counted"), [(SEVERAL_ROWS, False), (400, False), (900, True), (3000, False)]
)
def test_every_launch_has_a_counter_of_its_own(driver, monkeypatch, tokens, counted):
    """CTAs that take tiles as they are done use memory that holds zeros."""
    monkeypatch.setattr(grouped_gemm, "launch_plans", grouped_gemm_plans.launch_plans)
    product, x = Grouped(HIDDEN, INNER), torch.empty(tokens, INNER).bfloat16()
    held, zeros = [], torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, **b: held.append(zeros(*a, **b)) or held[-1])
    launches = product(driver, grouped_gemm.grouped_gemm, x)
    counter_addresses = [values["counter"] for *_, values in launches if "counter" in values]
    if not counted:
        assert (set(counter_addresses), held) == ({0}, [])
        return
    [counters] = held
    start = counters.data_ptr()
    assert (counters.dtype, counters.shape) == (torch.int32, (len(launches),))
    assert counter_addresses == [start + 4 * i for i in range(len(launches))]


@pytest.mark.parametrize(
    ("segments", "scales", "expected"),
    [
        ((), 1, (1, NEVER, NEVER, NEVER, 0)),
        ((), HIDDEN, (HIDDEN, NEVER, NEVER, NEVER, 1)),
        ((HIDDEN,), 1, (1, NEVER, NEVER, NEVER, 0)),
        ((100, 156), 2, (2, 100, NEVER, NEVER, 0)),
        ((16, 40, 100, 100), 4, (4, 16, 56, 156, 0)),
    ],
)
@pytest.mark.parametrize("tokens", [SMALL_M_ROWS, LARGE_M_ROWS])
def test_scales_of_experts(driver, tokens, segments, scales, expected):
    """Scales of an expert, rows at which the next one holds, whether every row has its own."""
    x = torch.empty(tokens, INNER).bfloat16()
    [(_, _, _, values)] = Grouped(HIDDEN, INNER, scales)(
        driver, grouped_gemm.grouped_gemm, x, segments=segments
    )
    names = ("scales_each", "cut0", "cut1", "cut2", "scale_rows")
    assert tuple(values[name] for name in names) == expected


@pytest.mark.parametrize(("limit", "passed_limit"), [(10.0, 10.0), (None, math.inf)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("tokens", [SMALL_M_ROWS, LARGE_M_ROWS])
def test_swiglu_of_experts(driver, tokens, limit, passed_limit, weighted):
    product = Grouped(2 * INNER, HIDDEN, 2 * INNER)
    x, weight = torch.empty(tokens, HIDDEN).bfloat16(), torch.ones(tokens)
    [(grid, threads, _, values)] = product(
        driver, grouped_gemm.grouped_gemm_swiglu, x, limit, weight if weighted else None
    )
    assert (product.plan.swiglu, product.plan.row_weighted) == (True, weighted)
    assert (grid, threads) == (132, product.plan.threads)
    assert product.out.shape == (tokens, INNER)
    never = {"cut0": NEVER, "cut1": NEVER, "cut2": NEVER}
    scales = {"scales_each": 2 * INNER, "scale_rows": 1, "limit": passed_limit}
    addresses = product.addresses(x, row_weight=weight.data_ptr() if weighted else 0)
    assert values == {**sizes_of(product, x), **addresses, **never, **scales}


@pytest.mark.parametrize("layout", [LINEAR, SWIZZLED_EXPERTS])
@pytest.mark.parametrize("tokens", [SMALL_M_ROWS, LARGE_M_ROWS])
def test_codes_of_experts(driver, tokens, layout):
    product, swizzled = Grouped(2 * INNER, HIDDEN), layout == SWIZZLED_EXPERTS
    tiles = (tokens + 127 * min(EXPERTS, tokens)) // 128
    x, scale = torch.empty(tokens, HIDDEN).bfloat16(), torch.ones(EXPERTS, 2)[:, 0]
    function = grouped_gemm.grouped_gemm_swiglu_quantize
    [(_, _, _, values)] = product(driver, function, x, None, None, codes=(scale, layout))
    codes, block_scales, row_scale = product.out
    assert product.plan.swizzled_out == swizzled
    assert (codes.shape, codes.dtype) == ((tokens, INNER // 2), torch.uint8)
    shape = (tiles * 128 * (INNER // 16),) if swizzled else (tokens, INNER // 16)
    assert (block_scales.shape, block_scales.dtype) == (shape, torch.float8_e4m3fn)
    assert (row_scale.shape, row_scale.dtype) == ((tokens,), torch.float32)
    expected = {"block_scales": block_scales.data_ptr(), "result_scale": row_scale.data_ptr()}
    assert values["codes_scale"] not in (0, scale.data_ptr()), "a contiguous copy"
    assert values.items() >= {**expected, "out": codes.data_ptr()}.items()
    # Two row tiles make a block.
    assert values["row_tiles"] == 2 * INNER // (32 if tokens == SMALL_M_ROWS else 16)
    [] = product(driver, function, x[:0], None, None, codes=(scale, layout))
    of_scales = (0,) if swizzled else (0, INNER // 16)
    assert [tuple(t.shape) for t in product.out] == [(0, INNER // 2), of_scales, (0,)]


@pytest.mark.parametrize("tokens", [SMALL_M_ROWS, LARGE_M_ROWS])
def test_a_given_scale_of_every_row(driver, tokens):
    product, x = Grouped(HIDDEN, INNER), torch.empty(tokens, INNER).bfloat16()
    product.row_scale = torch.ones(tokens)
    [(_, _, _, values)] = product(driver, grouped_gemm.grouped_gemm, x)
    assert values.items() >= product.addresses(x, row_scale=product.row_scale.data_ptr()).items()


def test_weights_of_rows_are_read_as_float32(driver, monkeypatch):
    """Whatever dtype and stride they come in."""
    seen, multiply = [], grouped_gemm._multiply

    def watched(problem, args, x, row_weight, *rest):
        seen.append(row_weight)
        multiply(problem, args, x, row_weight, *rest)

    monkeypatch.setattr(grouped_gemm, "_multiply", watched)
    weight = torch.ones(LARGE_M_ROWS, 2, dtype=torch.bfloat16)[:, 0]
    x = torch.empty(LARGE_M_ROWS, HIDDEN).bfloat16()
    [(_, _, _, values)] = Grouped(2 * INNER, HIDDEN)(
        driver, grouped_gemm.grouped_gemm_swiglu, x, None, weight
    )
    assert (seen[0].dtype, seen[0].stride()) == (torch.float32, (1,))
    assert values["row_weight"] == seen[0].data_ptr()


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("tokens", [SMALL_M_ROWS, LARGE_M_ROWS])
def test_quantised_rows_of_experts_have_a_scale_each(driver, monkeypatch, tokens, swiglu):
    other, scale = torch.empty(tokens, HIDDEN).bfloat16(), torch.ones(tokens)
    monkeypatch.setattr(grouped_gemm, "bfloat16_operand", lambda x, scales: (other, scale))
    product, x = Grouped(2 * INNER, HIDDEN), torch.empty(tokens, HIDDEN).bfloat16()
    function = grouped_gemm.grouped_gemm_swiglu if swiglu else grouped_gemm.grouped_gemm
    rest = (10.0, None) if swiglu else ()
    [(_, _, _, values)] = product(driver, function, x, *rest, activation="nvfp4")
    assert values.items() >= product.addresses(other, row_scale=scale.data_ptr()).items()


@pytest.mark.parametrize("tokens", [SMALL_M_ROWS, LARGE_M_ROWS])
def test_rows_of_experts_apart_and_misaligned(driver, tokens):
    """A stride is passed to the kernel; rows that bulk copies cannot read are copied."""
    product, wide = Grouped(HIDDEN, INNER), torch.empty(tokens, INNER + 72).bfloat16()
    x = wide[:, 8 : 8 + INNER]
    [(_, _, _, values)] = product(driver, grouped_gemm.grouped_gemm, x)
    assert values.items() >= {**product.addresses(x), "stride": INNER + 72}.items()
    assert driver.maps == described_of(product, x)
    odd = wide[:, 4 : 4 + INNER]
    [(_, _, _, values)] = product(driver, grouped_gemm.grouped_gemm, odd)
    assert values["x"] != odd.data_ptr()
    assert values["stride"] == INNER
    assert [matrix.stride for _, matrix in driver.maps[:1]] in ([], [INNER])


def test_no_rows_launch_nothing(driver):
    product = Grouped(2 * INNER, HIDDEN)
    x = torch.empty(0, HIDDEN).bfloat16()
    assert product(driver, grouped_gemm.grouped_gemm, x) == []
    assert product.out.shape == (0, 2 * INNER)
    assert product(driver, grouped_gemm.grouped_gemm_swiglu, x, None, None) == []
    assert product.out.shape == (0, INNER)


@given(kinds=st.lists(st.sampled_from(["i", "q", "2i", "s", "128s"]), min_size=1, max_size=9))
def test_parameters_lie_apart(kinds):
    result = Parameters(*kinds)
    ends = [
        start + struct.calcsize(kind) for start, kind in zip(result.offsets, kinds, strict=True)
    ]
    assert all(start >= end for start, end in zip(result.offsets[1:], ends, strict=False))
    assert result.size == ends[-1]
    aligned = {"i": 4, "2i": 4, "q": 8}
    assert all(o % aligned.get(k, 1) == 0 for o, k in zip(result.offsets, kinds, strict=True))
