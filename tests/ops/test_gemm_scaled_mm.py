"""torch's block-scaled GEMM as an implementation of ``gemm``.

It runs on Blackwell alone. Here stands, in its place, what its documentation says: an emulation
that refuses arguments that it would refuse, decodes the others and multiplies in float64.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn.functional import ScalingType, SwizzleType

from dsv4 import device, dispatch, self_check
from dsv4.blas import gemm as blas
from dsv4.blas import supports
from dsv4.ops.gemm import gemm
from dsv4.ops.quantize import dequantize, quantize
from dsv4.quant import formats
from dsv4.quant.elements import encode_e4m3
from dsv4.quant.formats import FRAGMENTS, LINEAR, NVFP4, SWIZZLED, QuantizedTensor
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise, assert_within_budget, gemm_budget

MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def elements(packed):
    """float64 ``[rows, K]`` of two codes a byte, the low nibble first."""
    byte = packed.view(torch.uint8)
    codes = torch.stack((byte & 15, byte >> 4), -1).flatten(-2).long()
    return MAGNITUDES[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)


def unswizzled(scales, rows, blocks):
    """float64 ``[rows, blocks]`` from 128 x 4 tiles: 32 lines of four rows, 32 apart, by four."""
    m, k = torch.meshgrid(torch.arange(rows), torch.arange(blocks), indexing="ij")
    tile = m // 128 * -(-blocks // 4) + k // 4
    position = tile * 512 + m % 32 * 16 + m % 128 // 32 * 4 + k % 4
    padding = torch.ones(scales.numel(), dtype=torch.bool)
    padding[position.flatten()] = False
    assert not bool(scales.view(torch.uint8)[padding].any()), "the padding is not zero"
    return scales.double()[position]


def emulated(
    mat_a,
    mat_b,
    scale_a,
    scale_recipe_a,
    scale_b,
    scale_recipe_b,
    swizzle_a=None,
    swizzle_b=None,
    bias=None,
    output_dtype=torch.bfloat16,
    contraction_dim=(),
    use_fast_accum=False,
):
    """``torch.nn.functional.scaled_mm`` of NVFP4 operands without a global scale."""
    assert (bias, contraction_dim, use_fast_accum) == (None, (), False)
    assert scale_recipe_a == scale_recipe_b == ScalingType.BlockWise1x16
    assert swizzle_a == swizzle_b == SwizzleType.SWIZZLE_32_4_4
    assert mat_a.dtype == mat_b.dtype == torch.float4_e2m1fn_x2
    (rows, half), (inner, outputs) = mat_a.shape, mat_b.shape
    assert half == inner
    assert half % 16 == inner % 16 == outputs % 16 == 0
    assert mat_a.stride() == (half, 1), "row-major"
    assert mat_b.stride() == (1, half), "column-major"
    blocks = half // 8
    for scale, count in ((scale_a, rows), (scale_b, outputs)):
        assert scale.dtype == torch.float8_e4m3fn
        assert scale.is_contiguous()
        assert scale.numel() == math.ceil(count / 128) * 128 * math.ceil(blocks / 4) * 4
    assert not any(t.data_ptr() % 16 for t in (mat_a, mat_b, scale_a, scale_b))
    _asked_of_torch(mat_a, mat_b, scale_a, scale_b, output_dtype)
    left = elements(mat_a) * unswizzled(scale_a, rows, blocks).repeat_interleave(16, 1)
    right = elements(mat_b.t()) * unswizzled(scale_b, outputs, blocks).repeat_interleave(16, 1)
    return (left @ right.T).to(output_dtype)


def _asked_of_torch(mat_a, mat_b, scale_a, scale_b, output_dtype):
    """torch's own checks of sizes, strides and dtypes, on tensors without content."""

    def empty(tensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    recipe, swizzle = [ScalingType.BlockWise1x16.value], [SwizzleType.SWIZZLE_32_4_4.value]
    a, b, scales = empty(mat_a), empty(mat_b), [[empty(s)] for s in (scale_a, scale_b)]
    out = torch._scaled_mm_v2(
        a, b, scales[0], recipe, swizzle, scales[1], recipe, swizzle, None, output_dtype
    )
    assert out.shape == (mat_a.shape[0], mat_b.shape[1])


@pytest.fixture
def calls(monkeypatch):
    """Return how often the GEMM was called."""
    result = []

    def product(*args, **kwargs):
        result.append(args)
        return emulated(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", product)
    return result


def run(x, weight, input_scale=None, groups=1, out_dtype=torch.float32):
    """Call it as dispatch does."""
    call = dispatch.arguments(
        gemm,
        x,
        weight,
        activation="nvfp4",
        input_scale=input_scale,
        groups=groups,
        out_dtype=out_dtype,
    )
    on_gpu = call._replace(device=torch.device("cuda", 0))
    assert supports.scaled_mm(on_gpu) is None
    return blas.gemm(call.args)


@pytest.fixture(autouse=True)
def capability(monkeypatch):
    """Every GPU is a B200; a test can have another."""
    monkeypatch.setattr(self_check, "unsupported", lambda *call: None)  # green
    with device.pretend(capability=(10, 0)) as be:
        yield lambda capability: be(capability=capability)


def weight_of(seed, rows, columns, cuts=()):
    """A weight with a global scale for each segment."""
    weight = quantize(strategies.normal(seed, (rows, columns)), scaling="weight")
    if not cuts:
        return weight
    segments = tuple(b - a for a, b in zip((0, *cuts), (*cuts, rows), strict=True))
    scale = torch.rand(len(segments), generator=strategies.generator(seed)) + 0.5
    return dataclasses.replace(weight, global_scale=scale, segments=segments)


def truth(x, weight, input_scale):
    scaling = "token" if input_scale is None else "static"
    left = dequantize(quantize(x, scaling=scaling, global_scale=input_scale), torch.float64)
    right = dequantize(weight, torch.float64)
    return left @ right.T, gemm_budget(left, right, torch.float32)


@given(
    seed=strategies.seeds(),
    tokens=st.integers(1, 140),
    rows=strategies.multiples(16, 10),
    columns=strategies.multiples(32, 7),
    cut=st.floats(0, 1, exclude_max=True),
    static=st.booleans(),
    layout=st.sampled_from((LINEAR, SWIZZLED)),
    dtype=st.sampled_from((torch.bfloat16, torch.float16, torch.float32)),
)
@example(0, 129, 144, 96, 0.5, False, SWIZZLED, torch.bfloat16)
def test_it_is_the_product(calls, seed, tokens, rows, columns, cut, static, layout, dtype):
    """Arguments as documented, decoded and multiplied: the reference's result."""
    first = int(cut * rows)
    weight = weight_of(seed, rows, columns, (first,) if first else ()).with_layout(layout)
    x = strategies.normal(seed + 1, (tokens, columns), dtype)
    scale = torch.tensor([0.01]) if static else None
    expected, budget = truth(x, weight, scale)
    got = run(x, weight, scale)
    assert_within_budget(got, expected, budget, "product")
    wide = gemm(x, weight, activation="nvfp4", input_scale=scale, out_dtype=torch.float32)
    assert_within_budget(got, wide.double(), 2 * budget, "the reference's product")
    assert_bitwise(run(x, weight, scale, out_dtype=dtype), got.to(dtype), "narrow product")


@given(seed=strategies.seeds(), tokens=st.integers(1, 9), rows=st.sampled_from((16, 48, 128)))
def test_a_global_scale_per_row_multiplies_the_sum(calls, seed, tokens, rows):
    """Codes, scales and sums are exact; 0.3 would not be, inside an E4M3 scale."""
    weight = weight_of(seed, rows, 64)
    scale = torch.where(torch.arange(rows) % 2 == 0, 0.3, 2.0**-3)
    weight = dataclasses.replace(weight, global_scale=scale)
    ones = dataclasses.replace(weight, global_scale=torch.ones(1))
    x = strategies.small_integers(seed, (tokens, 64))
    got, plain = (run(x, w, torch.ones(1)) for w in (weight, ones))
    assert_bitwise(got, plain * scale, "product")
    last = calls[-1]
    assert torch.equal(unswizzled(last[4], rows, 4), weight.scales.double())


@given(seed=strategies.seeds(), groups=st.integers(2, 4), static=st.booleans())
@pytest.mark.parametrize(("rows", "layout"), [(16, LINEAR), (128, LINEAR), (128, SWIZZLED)])
def test_groups(calls, seed, groups, static, rows, layout):
    parts = [weight_of(seed + g, rows, 64) for g in range(groups)]
    weight = formats.cat_rows(parts).with_layout(layout)
    x = strategies.normal(seed, (5, groups, 64))
    scale = torch.tensor([0.01]) if static else None
    got = run(x, weight, scale, groups)
    separate = [run(x[:, g], part, scale) for g, part in enumerate(parts)]
    assert_bitwise(got, torch.stack(separate, 1), "product")


@pytest.mark.parametrize("kind", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("static", [False, True])
def test_a_bad_token_is_alone(calls, kind, static):
    weight, x = weight_of(0, 32, 64), strategies.normal(1, (5, 64))
    scale = torch.tensor([0.01]) if static else None
    clean = run(x, weight, scale)
    x[2, 17] = kind
    got = run(x, weight, scale)
    assert bool(got[2].isnan().all())
    rest = [0, 1, 3, 4]
    assert_bitwise(got[rest], clean[rest], "the others")


@pytest.mark.parametrize("value", [448.0, 2.0**-9, 0.0])
def test_extreme_scales(calls, value):
    weight, x = weight_of(0, 32, 64), strategies.normal(1, (5, 64))
    weight = dataclasses.replace(weight, scales=encode_e4m3(torch.full((32, 4), value)))
    expected, budget = truth(x, weight, None)
    assert_within_budget(run(x, weight), expected, budget, "product")


def test_no_token(calls):
    assert run(torch.empty(0, 64), weight_of(0, 32, 64)).shape == (0, 32)
    assert calls == []


class TestDispatch:
    def call(self, **changes):
        x, weight = torch.ones(3, 64), changes.pop("weight", weight_of(0, 32, 64))
        options = {"activation": "nvfp4", **changes}
        call = dispatch.arguments(gemm, options.pop("x", x), weight, **options)
        return call._replace(device=torch.device("cuda", 0))

    @pytest.mark.parametrize("gpu", [(10, 0), (10, 3)])
    @pytest.mark.parametrize("layout", [LINEAR, SWIZZLED])
    def test_auto_takes_it_on_blackwell(self, capability, gpu, layout):
        capability(gpu)
        assert dispatch.choose(self.call(weight=weight_of(0, 32, 64).with_layout(layout))).name == (
            "scaled_mm"
        )

    @pytest.mark.parametrize("gpu", [(9, 0), (11, 0), (12, 0)])
    def test_other_gpus_have_the_reference(self, capability, gpu):
        capability(gpu)
        call = self.call()
        result = ".".join(map(str, gpu))
        assert supports.scaled_mm(call).endswith(f"10.0 and 10.3, not {result}")
        assert dispatch.choose(call).name == "reference"

    WIDE = QuantizedTensor(
        torch.zeros(32, 33, dtype=torch.uint8)[:, :32],
        torch.zeros(32, 4).to(torch.float8_e4m3fn),
        torch.ones(1),
        NVFP4,
    )

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"activation": "bf16"}, "activations are 'bf16'"),
            ({"weight": weight_of(0, 32, 64).with_layout(FRAGMENTS)}, "wanted 'linear' or"),
            ({"weight": quantize(torch.ones(32, 64), "mxfp4")}, "the weight is 'mxfp4'"),
            ({"weight": weight_of(0, 24, 64)}, "a group is 24 x 64"),
            ({"weight": weight_of(0, 32, 48), "x": torch.ones(3, 48)}, "a group is 32 x 48"),
            (
                {
                    "weight": weight_of(0, 32, 64).with_layout(SWIZZLED),
                    "x": torch.ones(3, 2, 64),
                    "groups": 2,
                },
                "a group has 16 rows, and swizzled",
            ),
            ({"x": torch.ones(3, 64).double()}, "float64"),
            ({"weight": WIDE}, "not contiguous"),
        ],
    )
    def test_it_says_why_not(self, changes, words):
        assert words in supports.scaled_mm(self.call(**changes))

    def test_the_cpu(self):
        call = dispatch.arguments(gemm, torch.ones(3, 64), weight_of(0, 32, 64), activation="nvfp4")
        assert "the tensors are on cpu" in supports.scaled_mm(call)
