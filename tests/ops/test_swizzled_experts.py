"""GEMMs of NVFP4 rows with experts whose scales are swizzled, as Blackwell's kernel takes them.

On the CPU, and on other GPUs, the reference runs: these are the tests for a B200's first minutes.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4 import dispatch
from dsv4.ops.grouped_gemm import grouped_gemm
from dsv4.ops.grouped_gemm_swiglu import grouped_gemm_swiglu, grouped_gemm_swiglu_quantize
from dsv4.ops.quantize import quantize
from dsv4.quant.formats import SWIZZLED
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise
from dsv4.triton.nvfp4_supports import VERSIONS, triton_version
from tests.ops.test_packed_experts import (
    DTYPES,
    LIMITS,
    check_codes,
    check_product,
    check_swiglu,
    loads,
    of_rows_or_one,
    row_weights,
    scales_of,
    sorted_rows,
    weights_of,
)

FEW_EXAMPLES = settings(max_examples=6)
SCALES = st.sampled_from(["one", "segments", "rows"])


def blackwell():
    return torch.cuda.is_available() and torch.cuda.get_device_capability() in ((10, 0), (10, 3))


def best(device):
    """The implementation that multiplies weights with swizzled scales by NVFP4 activations."""
    if device.type == "cpu":
        return "reference"
    if blackwell():
        return "tcgen05"
    major = torch.cuda.get_device_capability()[0]
    is_known = triton_version().startswith(tuple(f"{known}." for known in VERSIONS))
    return "fp4" if major == 12 and is_known else "triton"


def swizzled(seed, experts, rows, columns, device, scales="one"):
    return weights_of(seed, experts, rows, columns, device, scales, SWIZZLED)


def chosen(op, *args, **kwargs):
    return dispatch.explain(op, *args, **kwargs).chosen


@FEW_EXAMPLES
@given(
    strategies.seeds(), loads(5, 40), st.integers(0, 3), st.integers(1, 11), SCALES, DTYPES,
    st.booleans(),
)  # fmt: skip
def test_product(device, seed, counts, spare, tiles, scales, dtype, calibrated):
    weight = swizzled(seed, 5, 16 * tiles, 256, device, scales)
    x, offsets = sorted_rows(seed + 1, counts, spare, 256, device)
    assert chosen(grouped_gemm, x, weight, offsets, activation="nvfp4") == best(device)
    scale = torch.tensor([0.001, 0.002, 0.004, 0.008, 0.01], device=device)
    check_product(x, weight, offsets, "nvfp4", dtype, scale if calibrated else None)


@FEW_EXAMPLES
@given(
    strategies.seeds(), loads(5, 40), st.integers(0, 3), st.integers(1, 5), LIMITS, st.booleans()
)
def test_swiglu_and_its_codes(device, seed, counts, spare, tiles, limit, weighted):
    weight = swizzled(seed, 5, 32 * tiles, 256, device, "rows")
    x, offsets = sorted_rows(seed + 1, counts, spare, 256, device)
    options = {"activation": "nvfp4", "row_weight": row_weights(seed + 2, x, weighted)}
    check_swiglu(x, weight, offsets, limit, **options)
    got = check_codes(x, weight, offsets, limit, scales_of(seed, 5, device), **options)
    end = int(offsets[-1])
    assert not got.codes[end:].any()
    assert not got.scales[end:].float().any()


@FEW_EXAMPLES
@given(strategies.seeds(), loads(5, 40), st.integers(0, 3))
def test_quantised_rows_are_those_that_products_quantise(device, seed, counts, spare):
    """Results of all three operators."""
    weight = swizzled(seed, 5, 64, 256, device)
    x, offsets = sorted_rows(seed + 1, counts, spare, 256, device)
    scale = scales_of(seed, 5, device)
    q = quantize(x, scaling="static", global_scale=of_rows_or_one(scale, offsets, x.shape[0]))
    how = {"activation": "nvfp4", "input_scale": scale}
    rest = (weight, offsets)
    assert_bitwise(grouped_gemm(q, *rest), grouped_gemm(x, *rest, **how), "product")
    got, expected = grouped_gemm_swiglu(q, *rest, 10.0), grouped_gemm_swiglu(x, *rest, 10.0, **how)
    assert_bitwise(got, expected, "SwiGLU")
    arguments = (*rest, 10.0, torch.full_like(scale, 0.01))
    first, other = (
        grouped_gemm_swiglu_quantize(rows, *arguments, **options)
        for rows, options in ((q, {}), (x, how))
    )
    for name in ("codes", "scales", "global_scale"):
        parts = (getattr(actual, name).view(torch.uint8) for actual in (first, other))
        assert_bitwise(*parts, name)


@pytest.mark.parametrize("kind", [math.nan, math.inf])
def test_a_bad_row_is_alone(device, kind):
    weight = swizzled(0, 3, 64, 256, device)
    x, offsets = sorted_rows(0, [3, 0, 4], 1, 256, device)
    clean = grouped_gemm(x, weight, offsets, activation="nvfp4")
    x[3, 77] = kind
    got = grouped_gemm(x, weight, offsets, activation="nvfp4")
    keep = torch.arange(8, device=device) != 3
    assert bool(got[3].isnan().all())
    assert_bitwise(got[keep], clean[keep], "the others")


@pytest.mark.gpu
@pytest.mark.skipif(not blackwell(), reason="needs compute capability 10.0 or 10.3")
class TestKernel:
    """Tiles end anywhere, and configurations of every size are taken."""

    @given(
        strategies.seeds(), st.integers(1, 40), st.sampled_from([1, 4, 30, 70, 130, 260, 600]),
        st.integers(1, 40), st.integers(1, 6),
    )  # fmt: skip
    @example(0, 8, 130, 24, 2)
    @example(0, 6, 1, 448, 28)
    def test_product_and_codes(self, seed, experts, load, tiles, steps):
        draw = torch.randint(0, 2 * load, (experts,), generator=strategies.generator(seed))
        weight = swizzled(seed, experts, 32 * tiles, 256 * steps, "cuda", "rows")
        x, offsets = sorted_rows(seed, draw.tolist(), 3, 256 * steps, "cuda")
        assert chosen(grouped_gemm, x, weight, offsets, activation="nvfp4") == "tcgen05"
        check_product(x, weight, offsets, "nvfp4", torch.bfloat16)
        scale = scales_of(seed, experts, "cuda")
        check_codes(x, weight, offsets, 10.0, scale, activation="nvfp4")

    @pytest.mark.parametrize("tokens", [12, 400, 3000])
    def test_one_graph_serves_any_routing(self, tokens):
        weight = swizzled(0, 16, 512, 512, "cuda", "rows")
        x, offsets = sorted_rows(0, [tokens] + [0] * 15, 0, 512, "cuda")
        arguments = (x, weight, offsets, 10.0)
        grouped_gemm_swiglu(*arguments, activation="nvfp4")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = grouped_gemm_swiglu(*arguments, activation="nvfp4")
        for seed in range(100):
            ids = torch.randint(0, 17, (tokens,), generator=strategies.generator(seed))
            counts = torch.bincount(ids % 3 if seed % 3 == 0 else ids, minlength=17)[:16]
            offsets.copy_(torch.tensor([0, *counts.cumsum(0).tolist()]).int())
            x.copy_(strategies.normal(seed, x.shape, torch.bfloat16))
            out.fill_(math.nan)
            graph.replay()
            expected = grouped_gemm_swiglu(*arguments, activation="nvfp4")
            assert_bitwise(out, expected, f"routing {seed}")
