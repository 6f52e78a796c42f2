"""NVFP4 rows of experts with block scales in the layout of other grouped GEMMs."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4 import dispatch
from dsv4.cute import grouped_gemm as hopper
from dsv4.cute import grouped_nvfp4 as blackwell
from dsv4.ops.gemm import gemm
from dsv4.ops.grouped_gemm import grouped_gemm
from dsv4.ops.grouped_gemm_swiglu import grouped_gemm_swiglu_quantize
from dsv4.ops.quantize import dequantize, quantize
from dsv4.quant.formats import (
    LINEAR,
    NVFP4,
    SWIZZLED,
    SWIZZLED_EXPERTS,
    QuantizedTensor,
    expert_tiles,
    swizzle_expert_scales,
    swizzle_scales,
    swizzled_size,
    unswizzle_expert_scales,
)
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise, assert_pure
from tests.ops.test_packed_experts import (
    ACTIVATIONS,
    LOADS,
    loads,
    row_weights,
    scales_of,
    sorted_rows,
    weights_of,
)

COUNTS = st.lists(
    st.one_of(st.integers(0, 9), st.sampled_from([0, 127, 128, 129, 256, 300])),
    min_size=1,
    max_size=9,
)


def offsets_of(counts):
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)


def expert_by_expert(scales, counts):
    """Join the results of ``swizzle_scales`` for every expert, then zeros."""
    rows, columns = scales.shape
    parts = [swizzle_scales(part) for part in scales[: sum(counts)].split(counts)]
    tiles = expert_tiles(rows, len(counts))
    out = torch.zeros(swizzled_size(128 * tiles, columns), dtype=torch.uint8, device=scales.device)
    joined = torch.cat([part.view(torch.uint8) for part in parts])
    out[: joined.numel()] = joined
    return out


class TestLayout:
    @given(counts=COUNTS, spare=st.integers(0, 3), columns=st.integers(1, 9), seed=st.integers(0))
    @example([0, 0], 0, 4, 0)
    @example([0, 0], 2, 4, 0)
    @example([256], 0, 4, 0)
    def test_is_that_of_every_expert(self, device, poisoned_memory, counts, spare, columns, seed):
        generator = strategies.generator(seed % 2**31)
        scales = torch.randint(1, 255, (sum(counts) + spare, columns), generator=generator)
        scales, offsets = scales.to(torch.uint8).to(device), offsets_of(counts).to(device)
        result = swizzle_expert_scales(scales.view(torch.float8_e4m3fn), offsets)
        assert result.dtype == torch.float8_e4m3fn
        assert_bitwise(result.view(torch.uint8), expert_by_expert(scales, counts), "scales")
        back = unswizzle_expert_scales(result, offsets, *scales.shape).view(torch.uint8)
        assert_bitwise(back[: sum(counts)], scales[: sum(counts)], "rows of experts")
        assert not back[sum(counts) :].any()

    @given(counts=COUNTS, spare=st.integers(0, 300))
    def test_no_routing_needs_more_tiles(self, counts, spare):
        needed = sum(-(-count // 128) for count in counts)
        assert needed <= expert_tiles(sum(counts) + spare, len(counts))

    @given(experts=st.integers(1, 600), rows=st.integers(0, 5000))
    def test_some_routing_needs_that_number(self, experts, rows):
        alone = min(experts, rows)
        counts = [1] * (alone - 1) + [rows - max(alone - 1, 0)]
        assert sum(-(-count // 128) for count in counts) == expert_tiles(rows, experts)

    def test_wrong_arguments_are_named(self):
        offsets = offsets_of([1, 2])
        with pytest.raises(TypeError, match=r"scales have dtype torch.float32, wanted one byte"):
            swizzle_expert_scales(torch.zeros(3, 4), offsets)
        with pytest.raises(ValueError, match="5 entries, wanted 1024"):
            unswizzle_expert_scales(torch.zeros(5, dtype=torch.uint8), offsets, 3, 4)

    def test_no_operator_takes_it(self):
        """It needs offsets: without them it would be read as something else."""
        codes = torch.zeros(128, 32, dtype=torch.uint8)
        scales = torch.zeros(512).to(torch.float8_e4m3fn)
        q = QuantizedTensor(codes, scales, torch.ones(128), NVFP4, SWIZZLED_EXPERTS)
        x, offsets = torch.ones(1, 64), offsets_of([128])
        for use in (
            q.validate,
            lambda: q.with_layout(LINEAR),
            lambda: q.with_layout(SWIZZLED),
            lambda: quantize(x, layout=SWIZZLED_EXPERTS),
            lambda: dequantize(q),
            lambda: gemm(x, q),
            lambda: grouped_gemm(q, torch.ones(1, 16, 64), offsets),
        ):
            with pytest.raises(ValueError, match="nothing without the experts' offsets"):
                use()


@contextlib.contextmanager
def poisoned():
    """Results of kernels begin as bytes 0x7F, NaN where they are scales."""

    def filled(make):
        def make_filled(*what):
            result = make(*what)
            for tensor in result:
                tensor.view(torch.uint8).fill_(0x7F)
            return result

        return make_filled

    with pytest.MonkeyPatch.context() as patch:
        for module in (hopper, blackwell):
            patch.setattr(module, "empty_codes", filled(module.empty_codes))
        yield


def check(x, weight, offsets, limit, scale, **options):
    """Bit for bit the result with linear scales, whose scales are moved; also what it is."""
    counts = offsets.diff().tolist()
    linear = grouped_gemm_swiglu_quantize(x, weight, offsets, limit, scale, **options)
    with poisoned():
        got = grouped_gemm_swiglu_quantize(
            x, weight, offsets, limit, scale, scale_layout=SWIZZLED_EXPERTS, **options
        )
    assert (got.shape, got.layout) == (linear.shape, SWIZZLED_EXPERTS)
    assert_bitwise(got.codes, linear.codes, "codes")
    assert_bitwise(got.global_scale, linear.global_scale, "global scales")
    expected = expert_by_expert(linear.scales.view(torch.uint8), counts)
    assert_bitwise(got.scales.view(torch.uint8), expected, "scales and their padding")
    return got


class TestValues:
    @given(
        seed=strategies.seeds(),
        counts=loads(5, 700),
        spare=st.integers(0, 3),
        tiles=st.integers(1, 2),
        weighted=st.booleans(),
        activation=ACTIVATIONS,
    )
    @example(0, [0, 128, 0, 1, 0], 2, 1, True, "nvfp4")
    @example(0, [0, 0, 0, 0, 0], 3, 1, True, "bf16")
    @example(0, [0, 0, 0, 0, 0], 0, 1, True, "bf16")
    def test_scales_are_moved(self, device, seed, counts, spare, tiles, weighted, activation):
        weight = weights_of(seed, 5, 128 * tiles, 128, device, "rows")
        x, offsets = sorted_rows(seed, counts, spare, 128, device)
        options = {"activation": activation, "row_weight": row_weights(seed + 2, x, weighted)}
        check(x, weight, offsets, 10.0, scales_of(seed, 5, device), **options)

    @given(seed=strategies.seeds(), rows=st.sampled_from([0, 1, 127, 128, 300]))
    def test_one_expert(self, device, seed, rows):
        weight = weights_of(seed, 1, 128, 128, device)
        x, offsets = sorted_rows(seed, [rows], 0, 128, device)
        got = check(x, weight, offsets, None, scales_of(seed, 1, device))
        plain = QuantizedTensor(got.codes, got.scales, got.global_scale, NVFP4, SWIZZLED)
        plain.validate()  # one expert's rows are a matrix

    @given(seed=strategies.seeds(), kind=st.sampled_from([math.nan, math.inf, -math.inf]))
    def test_a_bad_row_is_alone(self, device, seed, kind):
        weight = weights_of(seed, 3, 128, 128, device)
        x, offsets = sorted_rows(seed, [3, 0, 4], 0, 128, device)
        x[3, seed % 128] = kind
        got = check(x, weight, offsets, 10.0, scales_of(seed, 3, device))
        linear = unswizzle_expert_scales(got.scales, offsets, 7, 4).view(torch.uint8)
        assert (linear == 0x7F).all(1).tolist() == [row == 3 for row in range(7)]
        assert int((got.scales.view(torch.uint8) == 0x7F).sum()) == 4


class TestContract:
    def operands(self, device="cpu", rows=128):
        weight = weights_of(0, 2, rows, 128, device)
        x, offsets = sorted_rows(0, [1, 2], 1, 128, device)
        return x, weight, offsets, 10.0, torch.ones(2, device=device)

    def test_wrong_arguments_are_named(self):
        op = grouped_gemm_swiglu_quantize
        with pytest.raises(ValueError, match=r"scale_layout is 'swizzled_128x4', wanted one of"):
            op(*self.operands(), scale_layout=SWIZZLED)
        with pytest.raises(
            ValueError, match="weight has 96 rows, wanted a positive multiple of 12"
        ):
            op(*self.operands(rows=96), scale_layout=SWIZZLED_EXPERTS)

    def test_a_pure_operator_of_known_sizes(self, device):
        x, weight, offsets, *rest = self.operands(device)
        options = {"scale_layout": SWIZZLED_EXPERTS}
        arguments = (x, weight, offsets, *rest)
        call = dispatch.arguments(grouped_gemm_swiglu_quantize, *arguments, **options)
        assert_pure(torch.ops.dsv4.grouped_gemm_swiglu_quantize, *call.args, "auto")
        result = torch.ops.dsv4.grouped_gemm_swiglu_quantize(*call.args, "auto")
        with FakeTensorMode(allow_non_fake_inputs=True):
            said = torch.ops.dsv4.grouped_gemm_swiglu_quantize(*call.args, "auto")
        assert [(t.shape, t.dtype) for t in said] == [(t.shape, t.dtype) for t in result]

    def test_what_runs_does_not_depend_on_it(self, device):
        explained = [
            dispatch.explain(
                grouped_gemm_swiglu_quantize, *self.operands(device), scale_layout=layout
            )
            for layout in (LINEAR, SWIZZLED_EXPERTS)
        ]
        assert explained[0].candidates == explained[1].candidates


@pytest.mark.gpu
class TestKernel:
    """Shapes at which tiles end anywhere, on the GPU's own kernels."""

    @given(
        seed=strategies.seeds(),
        experts=st.integers(1, 40),
        load=st.sampled_from(LOADS),
        tiles=st.integers(1, 9),
        columns=st.integers(1, 6),
        weighted=st.booleans(),
        activation=ACTIVATIONS,
    )
    @example(0, 40, 1, 4, 4, True, "bf16")
    @example(0, 300, 1, 1, 1, True, "bf16")
    @example(0, 512, 8, 1, 1, False, "nvfp4")
    @example(0, 8, 70, 3, 4, True, "nvfp4")
    @example(0, 8, 130, 3, 4, False, "bf16")
    @example(0, 12, 2, 6, 56, True, "nvfp4")
    @example(0, 12, 8, 6, 56, True, "bf16")
    @example(0, 5, 600, 2, 2, True, "nvfp4")
    def test_scales_are_moved(self, seed, experts, load, tiles, columns, weighted, activation):
        draw = torch.randint(0, 2 * load, (experts,), generator=strategies.generator(seed))
        weight = weights_of(seed, experts, 128 * tiles, 128 * columns, "cuda", "rows")
        x, offsets = sorted_rows(seed, draw.tolist(), seed % 4, 128 * columns, "cuda")
        row_weight = strategies.normal(seed, (x.shape[0],)).cuda() if weighted else None
        options = {"row_weight": row_weight, "activation": activation}
        arguments = (x, weight, offsets, 10.0, scales_of(seed, experts, "cuda"))
        result = dispatch.explain(grouped_gemm_swiglu_quantize, *arguments, **options)
        assert result.chosen == "cute"
        check(*arguments, **options)

    @pytest.mark.parametrize("tokens", [6, 60, 400, 3000])
    def test_one_graph_serves_any_routing(self, tokens):
        """Padding is zero where rows of the routing before had scales."""
        weight = weights_of(0, 16, 512, 512, "cuda", "rows")
        x, offsets = sorted_rows(0, [tokens] + [0] * 15, 0, 512, "cuda")
        arguments = (x, weight, offsets, 10.0, scales_of(0, 16, "cuda"))
        options = {"scale_layout": SWIZZLED_EXPERTS}
        grouped_gemm_swiglu_quantize(*arguments, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = grouped_gemm_swiglu_quantize(*arguments, **options)
        for seed in range(200):
            ids = torch.randint(0, 17, (tokens,), generator=strategies.generator(seed))
            if seed % 3 == 0:
                ids = ids % 3
            counts = torch.bincount(ids, minlength=17)[:16].tolist()
            offsets.copy_(offsets_of(counts))
            x.copy_(strategies.normal(seed, x.shape, torch.bfloat16))
            if seed % 2:
                out.scales.view(torch.uint8).fill_(0x7F)
            graph.replay()
            linear = grouped_gemm_swiglu_quantize(*arguments)
            assert_bitwise(out.codes, linear.codes, f"codes of routing {seed}")
            expected = expert_by_expert(linear.scales.view(torch.uint8), counts)
            assert_bitwise(out.scales.view(torch.uint8), expected, f"scales of routing {seed}")
