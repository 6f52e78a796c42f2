"""Choice of the ``tcgen05`` kernels by GPU, why others do not get them, and their launches."""

from __future__ import annotations

import ctypes
import math
import struct
from contextlib import nullcontext

import pytest
import torch

from dsv4 import device as machine
from dsv4 import dispatch, self_check
from dsv4.bench.cases import moe as moe_cases
from dsv4.bench.problem import Draw
from dsv4.config import ModelConfig
from dsv4.cute import gemm_nvfp4, grouped_nvfp4
from dsv4.cute.grouped_problem import Experts
from dsv4.cute.runtime import driver as cuda_driver
from dsv4.cute.runtime import launch
from dsv4.cute.runtime.driver import Image, Kernel
from dsv4.cute.sm100 import grouped_gemm_plan, tensor_maps
from dsv4.cute.sm100.gemm_plan import TCGEN05_ABI, Tcgen05Tma
from dsv4.cute.sm100.grouped_gemm_plan import GROUPED_TCGEN05_ABI, GroupedTcgen05Tma
from dsv4.cute.sm100.plans import GemmProblem, choose
from dsv4.ops.gemm import GemmArgs, gemm
from dsv4.ops.gemm_swiglu import GemmSwigluArgs, gemm_swiglu
from dsv4.ops.grouped_gemm import GroupedGemmArgs, grouped_gemm
from dsv4.ops.grouped_gemm_swiglu import (
    GroupedGemmSwigluArgs,
    GroupedGemmSwigluQuantizeArgs,
    grouped_gemm_swiglu,
    grouped_gemm_swiglu_quantize,
)
from dsv4.ops.quantize import quantize
from dsv4.plans.recorder import DriverLaunch, Recorder
from dsv4.quant.formats import FRAGMENTS, LINEAR, NVFP4, SWIZZLED, SWIZZLED_EXPERTS
from dsv4.triton import nvfp4_supports


@pytest.fixture(autouse=True)
def packages():
    """Every package is installed, and a GPU is what a test says."""
    with machine.pretend(packages=True):
        yield


def call_of(capability, monkeypatch, op=gemm, layout=SWIZZLED, rows=256, columns=512, **how):
    """The call of a GEMM as if its tensors were on a GPU of that capability."""
    machine.MACHINE.pretend(capability=capability)
    monkeypatch.setattr(self_check, "unsupported", lambda *call: None)  # green
    weight = quantize(torch.randn(rows, columns), NVFP4, scaling="weight", layout=layout)
    shape = (3, columns) if "groups" not in how else (3, how["groups"], columns)
    x = torch.randn(shape).bfloat16()
    arguments = dispatch.arguments(op, x, weight, activation=how.pop("activation", "nvfp4"), **how)
    device = torch.device("cuda", 0) if capability else torch.device("cpu")
    return dispatch.Call(arguments.op, arguments.args, device)


EXPERT_OPS = [grouped_gemm, grouped_gemm_swiglu, grouped_gemm_swiglu_quantize]


def call_of_experts(
    capability, monkeypatch, op=grouped_gemm, layout=SWIZZLED, sizes=(3, 96, 256), **how
):
    """The same of a grouped GEMM; ``quantized`` rows, or ``activation``."""
    machine.MACHINE.pretend(capability=capability)
    monkeypatch.setattr(self_check, "unsupported", lambda *call: None)  # green
    weight = quantize(torch.randn(sizes), NVFP4, scaling="weight").with_layout(layout)
    x, offsets = torch.randn(5, sizes[2]).bfloat16(), torch.tensor([0, *range(1, sizes[0] + 1)])
    quantized = how.pop("quantized", False)
    x = quantize(x, NVFP4, scaling="token") if quantized else x
    how = {"activation": "bf16" if quantized else "nvfp4", **how}
    rest = () if op is grouped_gemm else (10.0,)
    rest += (torch.ones(sizes[0]),) if op is grouped_gemm_swiglu_quantize else ()
    arguments = dispatch.arguments(op, x, weight, offsets.clamp(max=5).int(), *rest, **how)
    return dispatch.Call(arguments.op, arguments.args, torch.device("cuda", 0))


@pytest.mark.parametrize("op", EXPERT_OPS, ids=lambda op: op.__name__)
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_auto_takes_it_for_experts(capability, op, quantized, monkeypatch):
    call = call_of_experts(capability, monkeypatch, op, quantized=quantized)
    assert dispatch.choose(call).name == "tcgen05"


@pytest.mark.parametrize(
    ("capability", "how", "said"),
    [
        ((9, 0), {}, "the GPU has compute capability 9.0, and tcgen05 is of 10.0 and 10.3"),
        ((12, 0), {}, "has no tensor memory"),
        ((10, 0), {"layout": FRAGMENTS}, "layout 'fragments_16x64', wanted 'swizzled_128x4'"),
        ((10, 0), {"activation": "bf16"}, "activations are 'bf16', and both operands"),
        (
            (10, 0),
            {"sizes": (3, 96, 320)},
            "3 experts of 96 x 320, wanted at most 512 of multiples",
        ),
        ((10, 0), {"sizes": (3, 56, 256)}, "3 experts of 56 x 256, wanted"),
        ((10, 0), {"sizes": (513, 16, 256)}, "513 experts of 16 x 256, wanted at most 512"),
        ((10, 0), {"out_dtype": torch.float16}, "the result is torch.float16"),
    ],
    ids=str,
)
def test_experts_it_cannot_multiply(capability, how, said, monkeypatch):
    assert said in unsupported_reason(call_of_experts(capability, monkeypatch, **how))


def test_experts_in_fragments_go_to_the_small_m_kernel(monkeypatch):
    call = call_of_experts((10, 0), monkeypatch, layout=FRAGMENTS, quantized=True)
    assert dispatch.choose(call).name == "cute"


def unsupported_reason(call):
    row = next(row for row in dispatch.implementations(call.op) if row.name == "tcgen05")
    return row.unsupported_reason(call)


@pytest.mark.parametrize("op", [gemm, gemm_swiglu], ids=["gemm", "gemm_swiglu"])
@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_auto_takes_it_on_blackwell(capability, op, monkeypatch):
    how = {"limit": 10.0} if op is gemm_swiglu else {}
    call = call_of(capability, monkeypatch, op, **how)
    assert dispatch.choose(call).name == "tcgen05"


@pytest.mark.parametrize(
    ("capability", "said"),
    [
        ((12, 0), "the GPU has compute capability 12.0, which has no tensor memory"),
        ((12, 1), "the GPU has compute capability 12.1, which has no tensor memory"),
        ((11, 0), "the GPU has compute capability 11.0, for which no kernel was compiled"),
        ((9, 0), "the GPU has compute capability 9.0, and tcgen05 is of 10.0 and 10.3"),
        (None, "CuTeDSL kernels run on a CUDA GPU, the tensors are on cpu"),
    ],
)
def test_elsewhere_it_says_why(capability, said, monkeypatch):
    """Something else runs there: on 12.x Triton's kernel for such weights, else the reference."""
    monkeypatch.setattr(nvfp4_supports, "triton_version", lambda: "3.9.0")
    call = call_of(capability, monkeypatch)
    assert unsupported_reason(call).startswith(said)
    other = "fp4" if capability in nvfp4_supports.GPUS else "reference"
    assert dispatch.choose(call).name == other
    with pytest.raises(NotImplementedError, match=r"tcgen05: .*"):
        dispatch.choose(call, "tcgen05")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"layout": LINEAR}, "the weight has layout 'linear', wanted 'swizzled_128x4'"),
        ({"activation": "bf16"}, "activations are 'bf16', and both operands have to be NVFP4"),
        ({"rows": 250}, "a group is 250 x 512, wanted multiples of 16 x 32"),
        ({"columns": 496}, "a group is 256 x 496, wanted multiples of 16 x 32"),
        ({"groups": 4}, "a group has 64 rows, wanted a multiple of 128"),
        ({"out_dtype": torch.float16}, "the result is torch.float16, wanted bfloat16 or float32"),
    ],
    ids=str,
)
def test_a_gemm_it_cannot_do(how, said, monkeypatch):
    assert said in unsupported_reason(call_of((10, 0), monkeypatch, **how))


def test_groups_it_can_do(monkeypatch):
    assert unsupported_reason(call_of((10, 3), monkeypatch, rows=512, groups=4)) is None


class Driver:
    """A mock CUDA driver: keeps the tensor maps and the arguments of launches, by name."""

    def __init__(self):
        self.maps, self.launches, self.abi = [], [], TCGEN05_ABI

    def __getattr__(self, name):
        return lambda *arguments: 0

    def cuOccupancyMaxActiveClusters(self, count, kernel, config):  # noqa: N802, the driver's
        count._obj.value = 7
        return 0

    def cuTensorMapEncodeTiled(self, out, kind, rank, start, sizes, strides, box, steps, *rest):  # noqa: N802
        out[0] = len(self.maps)
        arrays = (list(sizes), list(strides)[: rank - 1], list(box), list(steps))
        self.maps.append((kind, start.value, *arrays, rest))
        return 0

    def cuLaunchKernelEx(self, config, kernel, pointers, extra):  # noqa: N802
        config, values = config._obj, {}
        for (name, field), pointer in zip(self.abi.fields.items(), pointers, strict=True):
            kind = "@" + field.format
            values[name] = struct.unpack(kind, ctypes.string_at(pointer, struct.calcsize(kind)))[0]
        self.launches.append((config.grid[0], config.block[0], config.stream, values))
        return 0


@pytest.fixture
def driver(monkeypatch):
    mock = Driver()
    monkeypatch.setattr(cuda_driver, "_driver", lambda: mock)
    monkeypatch.setattr(launch, "current_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    for launcher in (gemm_nvfp4, grouped_nvfp4):
        monkeypatch.setattr(launcher, "tensor_map", tensor_maps.tensor_map.__wrapped__)
        monkeypatch.setattr(launcher, "stream_of", lambda index: 77)
        monkeypatch.setattr(launcher, "_prepared", launcher._prepared.__wrapped__)
        monkeypatch.setattr(launcher, "loaded", _kernel_of)
        monkeypatch.setattr(launcher, "architecture", lambda device: "sm_103a")
    return mock


@pytest.fixture
def grouped_driver(driver):
    driver.abi = GROUPED_TCGEN05_ABI
    return driver


def _kernel_of(plan, arch):
    assert arch == "sm_103a"
    return Kernel(Image(b"code", "name", plan.threads, plan.ctas, plan.shared_bytes))


@pytest.mark.parametrize("tokens", [70, 1000])
@pytest.mark.parametrize("scaling", ["static", "token"])
def test_a_launch(driver, monkeypatch, scaling, tokens):
    rows, columns = 400, 544
    weight = quantize(torch.randn(rows, columns), NVFP4, scaling="weight", layout=SWIZZLED)
    x = torch.randn(tokens, columns).bfloat16()
    input_scale = torch.tensor([0.01]) if scaling == "static" else None
    seen = []

    def quantized(*what):
        seen.append(quantize_x(*what))
        return seen[-1]

    quantize_x = gemm_nvfp4.quantized
    monkeypatch.setattr(gemm_nvfp4, "quantized", quantized)
    scale = torch.tensor([1.0, 2.0])
    out = gemm_nvfp4.gemm(GemmArgs(
        x, weight.codes, weight.scales, scale, None, (144, 256), "nvfp4", SWIZZLED, "nvfp4",
        input_scale, 1, torch.bfloat16,
    ))  # fmt: skip
    assert (out.shape, out.dtype) == ((tokens, rows), torch.bfloat16)
    plan = choose(GemmProblem(rows, columns, 1, False), tokens)
    [(x_codes, x_scales, token_scale)] = seen
    assert token_scale.numel() == (1 if scaling == "static" else tokens)
    [(grid, threads, stream, values)] = driver.launches
    tiles, row_blocks = -(-tokens // plan.token_block), -(-rows // plan.rows)
    clusters = tiles * row_blocks if plan.k_splits > 1 else min(7, tiles * row_blocks)
    assert (grid, threads, stream) == (clusters * plan.ctas, 192, 77)
    maps = [values.pop(name)[0] for name in Tcgen05Tma._fields]
    assert maps == [0, 1, 2, 3], "the maps in their order"
    assert values == {
        "global_scale": scale.data_ptr(),
        "token_scale": token_scale.data_ptr(),
        "out": out.data_ptr(),
        "tokens": tokens,
        "token_tiles": tiles,
        "token_span": max(1, 2048 // plan.token_block),
        "k_stages": 3,
        "rows": rows,
        "row_blocks": row_blocks,
        "group_blocks": row_blocks,
        "cut0": 144,
        "cut1": 2**31 - 1,
        "cut2": 2**31 - 1,
        "scale_rows": 0,
        "scale_tokens": scaling == "token",
        "limit": math.inf,
    }
    promote, high = 3, plan.token_scale_box
    codes, scales = weight.codes.data_ptr(), weight.scales.data_ptr()
    assert driver.maps == [
        (0, codes, [272, rows], [272], [128, 128], [1, 1], (0, 3, promote, 0)),
        (1, scales, [256, 9, 4], [512, 9 * 512], [256, 4, 1], [1] * 3, (0, 0, promote, 0)),
        (0, x_codes.data_ptr(), [272, tokens], [272], [128, plan.cta_tokens], [1, 1],
         (0, 3, promote, 0)),
        (1, x_scales.data_ptr(), [256, 9, -(-tokens // 128)], [512, 9 * 512],
         [256, high[1], high[0]], [1] * 3, (0, 0, promote, 0)),
    ]  # fmt: skip


def test_a_tape_repeats_launches(driver, monkeypatch):
    """The tape launches with the pointers of other tensors, in the kernel's order."""
    weight = quantize(torch.randn(32, 64), NVFP4, scaling="weight", layout=SWIZZLED)
    x = torch.randn(3, 64).bfloat16()
    q = quantize(x, NVFP4, scaling="token", layout=SWIZZLED)
    operands = (weight.codes, weight.scales, q.codes, q.scales, weight.global_scale, q.global_scale)
    monkeypatch.setattr(gemm_nvfp4, "quantized", lambda *what: (q.codes, q.scales, q.global_scale))
    recorder = Recorder([*operands, x], lambda name, args: None)
    args = GemmArgs(
        x, weight.codes, weight.scales, weight.global_scale, None, (), "nvfp4", SWIZZLED, "nvfp4",
        None, 1, torch.bfloat16,
    )  # fmt: skip
    with recorder.watching():
        gemm_nvfp4.gemm(args)
    assert recorder.inside is None
    launches = [step for step in recorder.steps if isinstance(step, DriverLaunch)]
    assert len(launches) == len(driver.launches) == 1
    launches[0].run(77, range(64, 64 * 8, 64))
    values = driver.launches[1][3]
    pointers = [values[name] for name in ("global_scale", "token_scale", "out")]
    assert pointers == [320, 384, 448]
    assert [start for _, start, *_ in driver.maps[4:]] == [64, 128, 192, 256]


def test_no_tokens_is_no_launch(driver):
    weight = quantize(torch.randn(32, 64), NVFP4, scaling="weight", layout=SWIZZLED)
    out = gemm_nvfp4.gemm_swiglu(GemmSwigluArgs(
        torch.zeros(0, 64).bfloat16(), weight.codes, weight.scales, weight.global_scale, None, (),
        "nvfp4", SWIZZLED, "nvfp4", None, 10.0, torch.float32,
    ))  # fmt: skip
    assert (out.shape, driver.launches) == ((0, 16), [])


def test_groups_are_quantised_separately():
    """Each group's scales begin at a multiple of 128 rows; global scales are of every token."""
    x = torch.randn(5, 3, 64)
    codes, scales, total = gemm_nvfp4.quantized(x, None)
    for group in range(3):
        alone = quantize(x[:, group], NVFP4, scaling="token", layout=SWIZZLED)
        assert torch.equal(codes[group], alone.codes)
        assert torch.equal(scales[group].view(torch.uint8), alone.scales.view(torch.uint8))
        assert torch.equal(total[group], alone.global_scale)
    _, _, total = gemm_nvfp4.quantized(x, torch.tensor([0.25]))
    assert total.reshape(-1)[0] == 0.25


@pytest.mark.parametrize("kind", ["GEMM", "SwiGLU", "codes", "swizzled"])
@pytest.mark.parametrize("quantized_rows", [False, True])
def test_a_launch_for_experts(grouped_driver, monkeypatch, kind, quantized_rows):
    experts, rows, columns, tokens = 5, 256 if kind == "swizzled" else 160, 512, 300
    weight = quantize(torch.randn(experts, rows, columns), scaling="weight", layout=SWIZZLED)
    x, offsets = torch.randn(tokens, columns).bfloat16(), torch.tensor([0, 3, 3, 90, 90, 290]).int()
    scale, of_rows, seen = torch.ones(experts, 2), torch.linspace(0.1, 1, experts), []
    quantized = grouped_nvfp4.quantized
    monkeypatch.setattr(
        grouped_nvfp4, "quantized", lambda *what: seen.append(quantized(*what)) or seen[-1]
    )
    q = quantize(x, scaling="token")
    of_x = (of_rows, None, LINEAR, None)
    if quantized_rows:
        of_x = (None, q.scales, LINEAR, q.global_scale)
    stored = (
        weight.codes,
        weight.scales,
        scale,
        None,
        (96, rows - 96),
        offsets,
        "nvfp4",
        SWIZZLED,
        "nvfp4",
    )
    inputs = (q.codes if quantized_rows else x, *stored, *of_x)
    row_weight, result_scale = torch.ones(tokens, dtype=torch.bfloat16), torch.ones(experts)
    if kind == "GEMM":
        out = [grouped_nvfp4.grouped_gemm(GroupedGemmArgs(*inputs, torch.float32, False))]
    elif kind == "SwiGLU":
        args = GroupedGemmSwigluArgs(*inputs, None, None, torch.bfloat16)
        out = [grouped_nvfp4.grouped_gemm_swiglu(args)]
    else:
        function = grouped_nvfp4.grouped_gemm_swiglu_quantize
        layout = SWIZZLED_EXPERTS if kind == "swizzled" else LINEAR
        rest = (10.0, row_weight, result_scale, layout)
        out = function(GroupedGemmSwigluQuantizeArgs(*inputs, *rest))
    wide = rows if kind == "GEMM" else rows // 2
    swiglu, codes = kind != "GEMM", kind in ("codes", "swizzled")
    # 300 rows of 5 experts: 7 tiles of 128, whatever the offsets.
    of_scales = (7 * 128 * wide // 16,) if kind == "swizzled" else (tokens, wide // 16)
    shapes = [(tokens, wide // 2), of_scales, (tokens,)]
    assert [tuple(t.shape) for t in out] == (shapes if codes else [(tokens, wide)])
    [(x_codes, x_scales, token_scale)] = seen
    if quantized_rows:
        assert (x_codes is q.codes, token_scale is q.global_scale) == (True, True)
    else:
        of_expert = of_rows[
            torch.bucketize(torch.arange(tokens), offsets[1:], right=True).clamp(max=4)
        ]
        expected = quantize(x, scaling="static", global_scale=of_expert)
        assert torch.equal(x_codes, expected.codes)
        assert torch.equal(x_scales.view(torch.uint8), expected.scales.view(torch.uint8))
        assert torch.equal(token_scale, of_expert)
    kinds = (swiglu, codes, codes, kind == "swizzled")
    sizes = Experts(rows, columns, experts, kind == "GEMM", True, *kinds)
    plan = grouped_gemm_plan.choose(sizes, tokens)
    [(grid, threads, stream, values)] = grouped_driver.launches
    row_blocks = -(-rows // plan.rows)
    most = (min(tokens, experts) + tokens // plan.token_block) * row_blocks
    assert (grid, threads, stream) == (min(7, most) * plan.ctas, 256, 77)
    maps = [values.pop(name)[0] for name in GroupedTcgen05Tma._fields]
    assert maps == [0, 1, 2], "the maps in their order"
    assert (values.pop("row_weight") != 0) == codes
    names = ("out", "block_scales", "row_scale")
    stored = dict(zip(names, [*(t.data_ptr() for t in out), 0, 0], strict=False))
    assert values == {
        "x_scales": x_scales.data_ptr(),
        "global_scale": scale.data_ptr(),
        "token_scale": token_scale.data_ptr(),
        "offsets": offsets.data_ptr(),
        "result_scale": result_scale.data_ptr() if codes else 0,
        **stored,
        "tokens": tokens,
        "experts": experts,
        "k_stages": 2,
        "rows": rows,
        "row_blocks": row_blocks,
        "expert_scales": 2,
        "cut0": 96,
        "cut1": 2**31 - 1,
        "cut2": 2**31 - 1,
        "scale_rows": 0,
        "limit": 10.0 if codes else math.inf,
    }
    promote = 3
    stored_at = weight.codes.data_ptr(), weight.scales.data_ptr(), x_codes.data_ptr()
    assert grouped_driver.maps == [
        (0, stored_at[0], [256, 5 * rows], [256], [128, 128], [1, 1], (0, 3, promote, 0)),
        (1, stored_at[1], [256, 8, 10], [512, 4096], [256, 4, 1], [1] * 3, (0, 0, promote, 0)),
        (0, stored_at[2], [256, 300], [256], [128, plan.cta_tokens], [1, 1], (0, 3, promote, 0)),
    ]
    grouped_driver.launches.clear()
    nothing = GroupedGemmArgs(inputs[0][:0], *inputs[1:], torch.float32, False)
    assert grouped_nvfp4.grouped_gemm(nothing).shape == (0, rows)
    assert grouped_driver.launches == []


@pytest.mark.parametrize("op", [op.__name__ for op in EXPERT_OPS])
def test_the_bench_has_experts_as_the_gpu_wants_them(op, monkeypatch):
    config = ModelConfig.tiny(hidden_size=256, moe_intermediate_size=256, n_routed_experts=4)
    layouts = {"sm_90a": FRAGMENTS, "sm_100a": SWIZZLED}
    for arch, layout in layouts.items():
        monkeypatch.setattr(moe_cases, "_architecture", lambda device, arch=arch: arch)
        for case in getattr(moe_cases, op)(config, 3):
            problem = case.build(Draw(0, torch.device("cpu")))
            quantises = problem.kwargs["activation"] == "nvfp4"
            assert problem.args[1].layout == (layout if quantises else FRAGMENTS)
            assert problem.judge(
                problem, problem.run("reference"), problem.widened().run("reference")
            ).match


@pytest.mark.parametrize("kind", ["GEMM", "SwiGLU", "codes", "swizzled"])
def test_a_tape_repeats_launches_for_experts(grouped_driver, kind):
    """The tape launches with other tensors' pointers, in order; an absent tensor stays 0."""
    experts, rows, columns, tokens = 3, 256, 256, 40
    weight = quantize(torch.randn(experts, rows, columns), scaling="weight", layout=SWIZZLED)
    q = quantize(torch.randn(tokens, columns).bfloat16(), scaling="token")
    tensors = {
        "weight": weight.codes,
        "weight_scales": weight.scales,
        "global_scale": weight.global_scale,
        "x": q.codes,
        "x_scales": q.scales,
        "token_scale": q.global_scale,
        "offsets": torch.tensor([0, 7, 7, 40]).int(),
        "row_weight": torch.rand(tokens),
        "result_scale": torch.rand(experts),
    }
    stored = (weight.codes, weight.scales, weight.global_scale, None, (), tensors["offsets"])
    formats = ("nvfp4", SWIZZLED, "bf16", None)
    inputs = (q.codes, *stored, *formats, q.scales, LINEAR, q.global_scale)
    results = ("out",)
    recorder = Recorder(list(tensors.values()), lambda name, args: None)
    with recorder.watching():
        if kind == "GEMM":
            grouped_nvfp4.grouped_gemm(GroupedGemmArgs(*inputs, torch.float32, False))
        elif kind == "SwiGLU":
            args = GroupedGemmSwigluArgs(*inputs, 10.0, tensors["row_weight"], torch.bfloat16)
            grouped_nvfp4.grouped_gemm_swiglu(args)
        else:
            results = ("out", "block_scales", "row_scale")
            layout = SWIZZLED_EXPERTS if kind == "swizzled" else LINEAR
            rest = (10.0, tensors["row_weight"], tensors["result_scale"], layout)
            grouped_nvfp4.grouped_gemm_swiglu_quantize(
                GroupedGemmSwigluQuantizeArgs(*inputs, *rest)
            )
    assert recorder.inside is None
    launches = [step for step in recorder.steps if isinstance(step, DriverLaunch)]
    assert len(launches) == len(grouped_driver.launches) == 1
    address = {name: 64 * i for i, name in enumerate((*tensors, *results), 1)}
    locations = launches[0].locations
    assert all(location is None or location.offset == 0 for location in locations)
    slots = [None if location is None else location.slot for location in locations]
    launches[0].run(77, [0 if slot is None else 64 * (slot + 1) for slot in slots])
    first, second = (values for *_, values in grouped_driver.launches)
    absent = set() if len(results) == 3 else {"result_scale", "block_scales", "row_scale"}
    absent |= {"row_weight"} if kind == "GEMM" else set()
    pointers = ("x_scales", "global_scale", "token_scale", "offsets", "row_weight", "result_scale")
    pointers += ("out", "block_scales", "row_scale")
    expected = {name: 0 if name in absent else address[name] for name in pointers}
    assert {name: second[name] for name in pointers} == expected
    assert [start for _, start, *_ in grouped_driver.maps[3:]] == [
        address["weight"], address["weight_scales"], address["x"]
    ]  # fmt: skip
    others = set(second) - set(pointers) - set(GroupedTcgen05Tma._fields)
    assert {name: second[name] for name in others} == {name: first[name] for name in others}
