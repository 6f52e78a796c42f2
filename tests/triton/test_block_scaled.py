"""GEMMs of NVFP4 by NVFP4, compiled for 12.0 and 12.1; their PTX runs on the CPU.

The launchers are the package's own. A compiled kernel takes the place of each launch, and
``tests/_tools/ptx`` runs it on operands of any size.
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from dsv4 import dispatch
from dsv4.bench.checks.fused_judges import grouped_gemm_swiglu as grouped_judge
from dsv4.bench.problem import Problem
from dsv4.ops.gemm import gemm
from dsv4.ops.grouped_gemm import grouped_gemm
from dsv4.ops.grouped_gemm_swiglu import grouped_gemm_swiglu
from dsv4.ops.quantize import dequantize, quantize
from dsv4.quant.formats import NVFP4, QuantizedTensor
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise, assert_within_budget, gemm_budget
from dsv4.triton import gemm_nvfp4, grouped_nvfp4
from dsv4.triton._lib.block_scaled_plan import BlockScaledPlan
from dsv4.triton.nvfp4_supports import triton_version
from tests._tools.ptx import grid as ptx_grid
from tests.ops.test_packed_experts import loads, sorted_rows

REGISTERS, SHARED = 65536, 99 * 1024  # of an SM, and bytes of a program
MMA = (
    "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X"
    ".f32.e2m1.e2m1.f32.ue4m3"
)
LARGE = BlockScaledPlan(128, 128, 128, 8)
NARROW = BlockScaledPlan(16, 8, 64, 2)
EXPERTS = BlockScaledPlan(64, 16, 128, 4)
FUSED_EXPERTS = BlockScaledPlan(64, 32, 64, 4)
BRIEF = settings(max_examples=5)
CLOSE = 1e-6  # of the sum of magnitudes

pytestmark = pytest.mark.skipif(
    tuple(map(int, triton_version().split(".")[:2] or (0,))) < (3, 9),
    reason="Triton before 3.9 does not compile tl.dot_scaled for 12.1",
)


def reports(*options):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests._tools.compile_block_scaled", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def small():
    return reports("--small")


def check_fits(kernel):
    assert kernel["multiplied"] == [MMA], kernel["kernel"]
    assert kernel["registers"] * kernel["threads"] <= REGISTERS, kernel
    assert kernel["shared"] <= SHARED, kernel
    assert (kernel["stack"], kernel["spills"], kernel["waits"]) == (0, 0, True), kernel


def test_kernels_compile_for_both_gpus(small):
    assert len(small) == 6
    for kernel in small:
        check_fits(kernel)
        target = f".target sm_{kernel['arch']}a"
        [other] = [
            k["ptx"]
            for k in small
            if k["arch"] == 120 and (k["kernel"], k["constants"]) == described(kernel)
        ]
        assert target in kernel["ptx"]
        assert kernel["ptx"].replace(target, ".target sm_120a") == other


def described(kernel):
    return kernel["kernel"], kernel["constants"]


@pytest.mark.slow
@pytest.mark.nightly
def test_every_tiling_of_published_models_compiles():
    kernels = reports()
    assert {kernel["arch"] for kernel in kernels} == {120, 121}
    assert len(kernels) == 46
    for kernel in kernels:
        check_fits(kernel)


class Compiled:
    """Stands in the place of a kernel: a launch runs the PTX of 12.0 on tensors of the CPU."""

    def __init__(self, kernels, name):
        self.kernels = [k for k in kernels if (k["arch"], k["kernel"]) == (120, name)]

    def __getitem__(self, grid):
        return functools.partial(self.launch, (*grid, 1, 1)[:3])

    def launch(self, grid, *arguments, num_warps, **constants):
        del constants["PDL"]
        [kernel] = [
            k
            for k in self.kernels
            if constants.items() <= k["constants"].items() and k["threads"] == 32 * num_warps
        ]
        given_arguments = [a for a in arguments if a is not None]
        shared, threads = kernel["shared"], kernel["threads"]
        ptx_grid.launch(kernel["ptx"], given_arguments, grid, threads, shared)


@pytest.fixture(scope="module")
def compiled(small):
    """Returns a function that runs an operator by compiled kernels with one tiling."""

    def run(function, plan, *args, **options):
        name = function.__name__
        module = grouped_nvfp4 if name.startswith("grouped") else gemm_nvfp4
        kernel = f"_{'grouped_nvfp4' if module is grouped_nvfp4 else 'nvfp4_gemm'}_kernel"
        options = {"out_dtype": torch.float32, **options}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, kernel, Compiled(small, kernel))
            for chooser in {"dense_plan", "grouped_plan"} & set(vars(module)):
                patch.setattr(module, chooser, lambda *_: plan)
            record = dispatch.arguments(function, *args, **options).args
            return getattr(module, name)(record)

    return run


def weight_of(seed, shape, scales="one", layout="linear", largest=126):
    """Any codes with any block scales but NaN, and some blocks of zeros."""
    generator = strategies.generator(seed)
    *batch, rows, columns = shape

    def drawn(high, *sizes):
        return torch.randint(0, high, (*batch, *sizes), generator=generator).to(torch.uint8)

    codes, blocks = drawn(256, rows, columns // 2), drawn(largest + 1, rows, columns // 16)
    codes[..., 3, :] = 0
    codes[..., ::5, :8] &= 0x88  # zeros of both signs
    cuts = (rows // 2, rows - rows // 2) if scales == "segments" else ()
    count = len(cuts) or (rows if scales == "rows" else 1)
    total = torch.rand(*batch, count, generator=generator) + 0.5
    weight = QuantizedTensor(codes, blocks.view(torch.float8_e4m3fn), total, NVFP4, segments=cuts)
    return weight.with_layout(layout)


def rows_of(seed, count, columns, exponent=0):
    """Rows of different magnitude, whose blocks differ as well; the first row is zero."""
    x = strategies.normal(seed, (count, columns))
    x = x * (3 * strategies.normal(seed + 1, (count, columns // 16)).repeat_interleave(16, 1)).exp()
    x *= 2.0**exponent
    x[:1] = 0
    return x.bfloat16()


def operand(x, scale=None):
    scaling = "token" if scale is None else "static"
    return dequantize(quantize(x, scaling=scaling, global_scale=scale), torch.float64)


def check_close(got, x, weight, what):
    """Compare float32 sums with the float64 product of the operands."""
    magnitude = x.abs() @ weight.abs().T
    assert_within_budget(got, x @ weight.T, CLOSE * magnitude + 2.0**-149, what)


class TestDense:
    @BRIEF
    @given(
        seed=strategies.seeds(),
        tokens=st.integers(1, 140),
        rows=st.integers(4, 150),
        columns=st.integers(1, 2),
        exponent=st.integers(-60, 60),
        static=st.booleans(),
    )
    @example(seed=0, tokens=129, rows=129, columns=1, exponent=0, static=False)
    def test_large_tiles(self, compiled, seed, tokens, rows, columns, exponent, static):
        """Shapes that fill no tile, any scales, zero codes, two segments of the weight."""
        weight = weight_of(seed, (rows, 128 * columns), "segments", "swizzled_128x4")
        x = rows_of(seed, tokens, 128 * columns, exponent)
        scale = torch.tensor([2.0 ** (exponent - 8)]) if static else None
        got = compiled(gemm, LARGE, x, weight, activation="nvfp4", input_scale=scale)
        left, right = operand(x, scale), dequantize(weight, torch.float64)
        check_close(got, left, right, "product")
        assert not got[:, 3].any(), "a row of zero codes"
        how = {"activation": "nvfp4", "input_scale": scale, "out_dtype": torch.float32}
        reference = gemm(x, weight, **how, backend="reference")
        budget = gemm_budget(left, right, torch.float32)
        assert_within_budget(got, reference.double(), budget, "the reference's product")

    @BRIEF
    @given(
        seed=strategies.seeds(),
        tokens=st.integers(1, 9),
        rows=st.integers(4, 20),
        columns=st.sampled_from([1, 3]),
        groups=st.integers(2, 3),
    )
    def test_groups(self, compiled, seed, tokens, rows, columns, groups):
        weight = weight_of(seed, (groups * rows, 64 * columns), "rows")
        x = rows_of(seed, tokens * groups, 64 * columns).reshape(tokens, groups, -1)
        got = compiled(gemm, NARROW, x, weight, activation="nvfp4", groups=groups)
        right = dequantize(weight, torch.float64).unflatten(0, (groups, rows))
        for g in range(groups):
            check_close(got[:, g], operand(x[:, g]), right[g], f"group {g}")

    @BRIEF
    @given(
        seed=strategies.seeds(),
        tokens=st.integers(2, 9),
        kind=st.sampled_from([math.nan, math.inf, -math.inf]),
    )
    def test_a_bad_token_and_a_nan_scale_are_alone(self, compiled, seed, tokens, kind):
        weight = weight_of(seed, (24, 192), "rows")
        x = rows_of(seed, tokens, 192)
        clean = compiled(gemm, NARROW, x, weight, activation="nvfp4")
        x[tokens // 2, seed % 192] = kind
        weight.scales.view(torch.uint8)[5, seed % 12] = 0x7F
        got = compiled(gemm, NARROW, x, weight, activation="nvfp4")
        assert bool(got[tokens // 2].isnan().all())
        assert bool(got[:, 5].isnan().all())
        clean[tokens // 2], clean[:, 5] = math.nan, math.nan
        assert_bitwise(got.nan_to_num(7.0), clean.nan_to_num(7.0), "the other sums")


class TestExperts:
    @BRIEF
    @given(
        seed=strategies.seeds(),
        counts=loads(3, 40),
        spare=st.integers(0, 3),
        rows=st.integers(4, 80),
        codes=st.booleans(),
        static=st.booleans(),
    )
    @example(seed=0, counts=[0, 17, 0], spare=1, rows=65, codes=True, static=False)
    def test_product(self, compiled, seed, counts, spare, rows, codes, static):
        """Global scales of experts, of rows of a weight, and of rows of x."""
        weight = weight_of(seed, (3, rows, 256), "rows")
        x, offsets = sorted_rows(seed, counts, spare, 256, "cpu")
        scale = torch.tensor([0.001, 0.004, 0.01]) if static else None
        operands = [
            operand(part, None if scale is None else scale[e]) if len(part) else part.double()
            for e, part in enumerate(x[: sum(counts)].split(counts))
        ]
        how = {"activation": "nvfp4", "input_scale": scale}
        if codes and not static:
            x, how = quantize(x, scaling="token"), {}
        got = compiled(grouped_gemm, EXPERTS, x, weight, offsets, **how)
        right = dequantize(weight, torch.float64)
        for e, part in enumerate(got[: sum(counts)].split(counts)):
            check_close(part, operands[e], right[e], f"expert {e}")
        assert_bitwise(got[sum(counts) :], torch.zeros(spare, rows), "rows of no expert")

    @BRIEF
    @given(
        seed=strategies.seeds(),
        counts=loads(3, 40),
        spare=st.integers(0, 2),
        pairs=st.integers(2, 40),
    )
    def test_swiglu(self, compiled, seed, counts, spare, pairs):
        weight = quantize(strategies.normal(seed, (3, 2 * pairs, 64)), scaling="weight")
        x, offsets = sorted_rows(seed, counts, spare, 64, "cpu")
        args = (x, weight.with_layout("swizzled_128x4"), offsets, 10.0)
        row_weight = strategies.normal(seed + 2, (len(x),))
        how = {"activation": "nvfp4", "row_weight": row_weight, "out_dtype": torch.float32}
        got = compiled(grouped_gemm_swiglu, FUSED_EXPERTS, *args, **how)
        problem = Problem(grouped_gemm_swiglu, args, how, grouped_judge, 0)
        verdict = grouped_judge(problem, (got,), problem.widened().run("reference"))
        assert verdict.match, verdict.message
        assert not got[sum(counts) :].any()


_KERNEL = """
.visible .entry kernel(.param .u64 .ptr .global .align 1 from, .param .u64 .ptr .global .align 1 to)
{{ .reg .b32 %r<20>; .reg .b64 %rd<9>;
ld.param.b64 %rd1, [from]; ld.param.b64 %rd2, [to]; mov.u32 %r1, %tid.x;
mad.wide.u32 %rd3, %r1, 48, %rd1; mad.wide.u32 %rd4, %r1, 16, %rd2;
ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%rd3];
ld.global.v4.b32 {{%r6, %r7, %r8, %r9}}, [%rd3+16];
ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd3+32];
{mma} {{%r10, %r11, %r12, %r13}}, {{%r2, %r3, %r4, %r5}}, {{%r6, %r7}},
 {{%r10, %r11, %r12, %r13}}, %r8, {a}, %r9, {b};
st.global.v4.b32 [%rd4], {{%r10, %r11, %r12, %r13}}; ret; }}
"""
_MAGNITUDES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def multiplied(words, a="{0, 0}", b="{0, 0}"):
    """``d [16, 8]`` of a lane's twelve words: a, b, both scales, c."""
    out = torch.zeros(32, 4)
    ptx = _KERNEL.format(mma=MMA, a=a, b=b)
    ptx_grid.launch(ptx, [torch.from_numpy(words.view(np.int32)), out], (1, 1, 1), 32, 0)
    result = np.zeros((16, 8))
    for lane in range(32):
        for i in range(4):
            result[lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2] = out[lane, i]
    return result


def codes_of(word):
    """Values of eight codes, the lowest four bits first."""
    nibbles = [int(word) >> 4 * i & 15 for i in range(8)]
    return [(-1 if n & 8 else 1) * _MAGNITUDES[n & 7] for n in nibbles]


def factors_of(word):
    """Values of four scales, the lowest byte first."""
    return torch.tensor([int(word) >> 8 * i & 255 for i in range(4)], dtype=torch.uint8).view(
        torch.float8_e4m3fn
    )


class TestInstruction:
    """The instruction alone, by the tables of the PTX manual, lane after lane."""

    @given(seed=strategies.seeds(), a=st.integers(0, 1), b=st.integers(0, 3))
    @settings(max_examples=10)
    def test_each_lanes_part(self, seed, a, b):
        generator = np.random.default_rng(seed)
        words = generator.integers(0, 1 << 32, (32, 12), dtype=np.uint32)
        words[:, 6:8] = generator.integers(0, 127, (32, 2, 4), dtype=np.uint8).view(np.uint32)[
            ..., 0
        ]
        words[:, 8:] = generator.standard_normal((32, 4), np.float32).view(np.uint32)
        left, right, c = np.zeros((16, 64)), np.zeros((64, 8)), np.zeros((16, 8))
        for lane in range(32):
            quad, position = lane // 4, lane % 4
            for i in range(4):
                column = 8 * position + 32 * (i // 2)
                left[quad + 8 * (i % 2), column : column + 8] = codes_of(words[lane, i])
                c[quad + 8 * (i // 2), 2 * position + i % 2] = words[lane, 8 + i : 9 + i].view(
                    np.float32
                )[0]
            for i in range(2):
                right[8 * position + 32 * i :, quad][:8] = codes_of(words[lane, 4 + i])
        for row in range(16):
            lane = 4 * (row % 8) + 2 * a + row // 8
            left[row] *= np.repeat(factors_of(words[lane, 6]).double().numpy(), 16)
        for column in range(8):
            lane = 4 * column + b
            right[:, column] *= np.repeat(factors_of(words[lane, 7]).double().numpy(), 16)
        got = multiplied(words, f"{{0, {a}}}", f"{{0, {b}}}")
        assert (got == (left @ right + c).astype(np.float32)).all()

    @pytest.mark.parametrize(
        ("a", "b"), [("{1, 0}", "{0, 0}"), ("{0, 2}", "{0, 0}"), ("{0, 0}", "{0, 4}")]
    )
    def test_scales_elsewhere_are_refused(self, a, b):
        with pytest.raises(ValueError, match=r"wanted \{0, below"):
            multiplied(np.zeros((32, 12), np.uint32), a, b)

    def test_a_signed_scale_is_refused(self):
        words = np.zeros((32, 12), np.uint32)
        words[4, 6] = 0x80
        with pytest.raises(ValueError, match="sign bit"):
            multiplied(words)

    def test_a_nan_scale_is_in_its_row(self):
        words = np.zeros((32, 12), np.uint32)
        words[4, 6] = 0x7F00
        assert np.isnan(multiplied(words)).tolist() == [[row == 1] * 8 for row in range(16)]
