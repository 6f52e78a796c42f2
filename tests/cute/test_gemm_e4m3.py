"""GEMM with FP8 arithmetic and exact NVFP4 weights: dequantizing on a CPU, products on Hopper."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4.bench.checks.judge import FP8_SUM
from dsv4.cute.sm90.e4m3_converted_plan import ConvertedE4m3Plan, grouped_converted_plan
from dsv4.cute.sm90.gemm_e4m3_plan import E4m3Plan, grouped_e4m3_plan
from dsv4.ops._library import as_record
from dsv4.ops.gemm import GemmArgs, gemm
from dsv4.ops.gemm_swiglu import GemmSwigluArgs, gemm_swiglu
from dsv4.ops.grouped_gemm import GroupedGemmArgs
from dsv4.ops.grouped_gemm_swiglu import GroupedGemmSwigluArgs
from dsv4.ops.grouped_gemm_swiglu_fp8 import GroupedGemmSwigluFp8Args
from dsv4.ops.quantize import dequantize, quantize
from dsv4.quant.elements import pack
from dsv4.quant.exact_fp8 import to_e4m3, with_row_exponent
from dsv4.quant.formats import FP8_BLOCK, FP8_TOKEN, FRAGMENTS, LINEAR, NVFP4, QuantizedTensor
from dsv4.quant.fragments import fragment_columns
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise, assert_within_budget

# Sizes of tiles, so that drawn ones end within them.
ROWS, K_BLOCK = 128, 128
# Forms of a GEMM with NVFP4 weights; a plan takes float32_out and swiglu.
FORMS = {
    "converted": lambda *kind: ConvertedE4m3Plan(2, 4, 0, *kind),
    "in the loop": lambda *kind: E4m3Plan(2, 3, 3, *kind),
    "converted, narrow": lambda *kind: ConvertedE4m3Plan(1, 6, 0, *kind),
    "in the loop, narrow": lambda *kind: E4m3Plan(1, 5, 3, *kind),
}
# Forms in tests of values; the others have the same bits.
BOTH = pytest.mark.parametrize("form", ["converted", "in the loop"])
EXPERT_FORMS = {
    "converted": lambda *kind: grouped_converted_plan(128, *kind),
    "in the loop": lambda *kind: grouped_e4m3_plan(1 << 20, 1, *kind),
    "in the loop, narrow": lambda *kind: grouped_e4m3_plan(1, 1, *kind),
}
# Compilation takes longer than a run: few examples and few configurations per test.
quick = settings(max_examples=12)
BY_FP8 = {"backend": "fp8"}


def weight_of(seed, rows, columns, *, low=-3, high=3, segments=1, zeros=False):
    """NVFP4 codes with block scales that are powers of two, exact in E4M3, in fragments.

    Args:
        seed: Of the generator.
        rows: A multiple of 16.
        columns: A multiple of 128.
        low: Smallest exponent of a scale.
        high: Largest one, at most ``low + 14``.
        segments: Of how many parts the weight is, each with a global scale.
        zeros: Whether all codes are zero or minus zero.
    """
    made = strategies.generator(seed)
    values = torch.randint(0, 16, (rows, columns), generator=made, dtype=torch.uint8)
    exponents = torch.randint(low, high + 1, (rows, columns // 16), generator=made)
    codes = pack(values & 8 if zeros else values)
    scales = torch.exp2(exponents.float()).to(torch.float8_e4m3fn)
    parts = [rows // 16 // segments * 16] * (segments - 1)
    parts = (*parts, rows - sum(parts)) if segments > 1 else ()
    global_scale = torch.rand(segments, generator=made) + 0.5
    weight = QuantizedTensor(codes, scales, global_scale, NVFP4, segments=parts)
    weight = weight.with_layout(FRAGMENTS)
    weight, exactness = with_row_exponent(weight)
    assert exactness.is_exact
    return weight


def rows_of(weight, first, count):
    """A weight in linear layout of ``count`` rows of another, which has one global scale."""
    weight, rows = weight.with_layout(LINEAR), slice(first, first + count)
    scale = weight.global_scale
    return QuantizedTensor(weight.codes[rows], weight.scales[rows], scale, weight.format)


class TestDequantizing:
    """The device functions run here, an instruction at a time, on the layout of fragments."""

    @settings(max_examples=4)
    @given(seed=strategies.seeds(), low=st.integers(-9, -6))
    @example(0, -9)
    @example(1, -6)
    def test_lines_are_e4m3_in_fragment_order(self, seed, low):
        pytest.importorskip("cutlass")
        weight = weight_of(seed, 16, K_BLOCK, low=low, high=low + 14)
        with pytest.MonkeyPatch.context() as patch:
            got = dequantized_lines(patch, weight)
        expected = fragment_columns(to_e4m3(weight)).view(torch.uint8)
        assert_bitwise(got, expected, "lines")


class TestScaleOfResults:
    @settings(max_examples=40)
    @given(st.integers(0, 0x7F7F))
    @example(0)
    @example(0x43E0)  # 448
    @example(0x43E1)
    @example(0x7F7F)
    def test_byte_is_the_quantisers(self, bits):
        pytest.importorskip("cutlass")
        from dsv4.cute.sm90 import e4m3_results
        from tests._tools.ptx import machine

        value = torch.tensor([bits], dtype=torch.int16).view(torch.bfloat16)
        with pytest.MonkeyPatch.context() as patch:
            machine.install(patch)
            patch.setattr(e4m3_results, "Uint32", lambda word: int(word) & 0xFFFFFFFF)
            patch.setattr(e4m3_results, "Int32", int)
            patch.setattr(e4m3_results.cutlass, "max", max)
            kernel = e4m3_results.E4m3Results(None)
            got = kernel._scale_byte(np.float32(value.float().item()))
        x = torch.zeros(1, 128, dtype=torch.bfloat16)
        x[0, 5] = value
        assert got == int(quantize(x, FP8_TOKEN).scales.view(torch.uint8))


def dequantized_lines(patch, weight):
    """Lines of 128 bytes of 16 rows, as the lanes of a warp write them, without the swizzle."""
    from dsv4.cute.device import exact_fp8
    from tests._tools.ptx import machine

    machine.install(patch)
    patch.setattr(exact_fp8, "Uint32", lambda value: int(value) & 0xFFFFFFFF)
    patch.setattr(exact_fp8, "Int32", int)
    codes = weight.codes.numpy().reshape(-1).view(np.uint32)
    scales = weight.scales.view(torch.uint8).numpy().reshape(-1).view(np.uint32)
    exponent = weight.row_exponent.tolist()
    lines = torch.zeros(16, K_BLOCK, dtype=torch.uint8)
    for lane in range(32):
        row, quarter = divmod(lane, 4)
        biases = exact_fp8.row_biases(exponent[row], exponent[row + 8])
        for u in range(2):
            words = codes[u * 128 + lane * 4 :][:4].tolist()
            two = scales[u * 16 + row * 2 :][:2].tolist()
            for j in range(4):
                factor = exact_fp8.factors(two, j, biases, 16)
                for h, word in enumerate(exact_fp8.dequantized(words[j], factor, 16)):
                    at = (2 * quarter + u) * 16 + 4 * j
                    piece = torch.tensor(list(int(word).to_bytes(4, "little")), dtype=torch.uint8)
                    lines[row + 8 * h, at : at + 4] = piece
    return lines


@contextlib.contextmanager
def chosen(launchers, choose):
    """Replace a launcher's choice by ``choose``; no prepared launch is reused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launchers, "choose", choose)
        patch.setattr(launchers, "_prepared", launchers._prepared.__wrapped__)
        yield


def product(x, weight, out_dtype=torch.bfloat16, groups=1, form=None):
    """The kernel's result, in a named form or in the form with the least estimated time."""
    from dsv4.cute import gemm_e4m3

    record = gemm_record(x, weight, out_dtype, groups)
    if form is None:
        return gemm_e4m3.gemm(record)
    with chosen_form(form):
        return gemm_e4m3.gemm(record)


@contextlib.contextmanager
def chosen_form(form):
    """Let the launcher of dense GEMMs take a named form."""
    from dsv4.cute import gemm_e4m3

    with chosen(gemm_e4m3, lambda problem: FORMS[form](problem.float32_out, problem.swiglu)):
        yield


def gemm_record(x, weight, out_dtype, groups):
    return GemmArgs(
        x,
        weight.codes,
        weight.scales,
        weight.global_scale,
        weight.row_exponent,
        list(weight.segments),
        weight.format.name,
        weight.layout,
        "fp8",
        None,
        groups,
        out_dtype,
    )


def swiglu(x, weight, out_dtype=torch.bfloat16, limit=None, form="converted"):
    from dsv4.cute import gemm_e4m3

    args = as_record(GemmSwigluArgs, gemm_record(x, weight, out_dtype, 1), limit=limit)
    with chosen_form(form):
        return gemm_e4m3.gemm_swiglu(args)


def truth(x, weight):
    """float64 product of the operands that the kernel has, and the budget of its sums."""
    left = dequantize(quantize(x, "fp8_token"), torch.float64)
    right = dequantize(weight, torch.float64)
    expected = left @ right.T
    magnitude = left.abs() @ right.abs().T
    return expected, FP8_SUM * magnitude + 1e-30


def assert_right(x, weight, got):
    """Check a result in float32 or bfloat16."""
    expected, budget = truth(x, weight)
    unit = torch.finfo(got.dtype).eps / 2
    assert_within_budget(got, expected, budget + unit * (expected.abs() + budget), "product")


def nvfp4_plan_of(problem):
    from dsv4.cute.e4m3_costs import nvfp4_plan

    kind = (problem.float32_out, problem.swiglu)
    return nvfp4_plan(problem.rows, problem.columns, problem.tokens, *kind)


def bfloat16(seed, shape):
    return strategies.normal(seed, shape, torch.bfloat16).to("cuda")


@pytest.mark.gpu
class TestValues:
    @BOTH
    @quick
    @given(
        seed=strategies.seeds(),
        tokens=st.integers(1, 700),
        row_tiles=st.integers(1, 40),
        stages=st.integers(1, 9),
        low=st.integers(-9, -6),
        span=st.integers(0, 14),
    )
    @example(0, 2000, 65, 8, -3, 6)
    @example(0, 1500, 256, 8, -3, 6)
    @example(0, 257, 40, 1, -9, 14)
    def test_within_the_budget(self, form, seed, tokens, row_tiles, stages, low, span):
        weight = weight_of(seed, 16 * row_tiles, K_BLOCK * stages, low=low, high=low + span)
        weight, x = weight.to("cuda"), bfloat16(seed + 1, (tokens, K_BLOCK * stages))
        assert_right(x, weight, product(x, weight, torch.float32, form=form))

    @pytest.mark.parametrize("form", [form for form in FORMS if form != "in the loop"])
    def test_forms_have_equal_bits(self, form):
        for rows, columns, tokens in ((272, 128, 700), (4096, 1024, 1300), (400, 2048, 3)):
            weight = weight_of(rows, rows, columns).to("cuda")
            x = bfloat16(tokens, (tokens, columns))
            first = product(x, weight, form="in the loop")
            assert_bitwise(product(x, weight, form=form), first, form)

    def test_many_tokens_are_converted(self):
        """The chosen form: the same bits in each run, and in bfloat16."""
        from dsv4.cute import gemm_e4m3

        weight, x = weight_of(3, 4096, 1024).to("cuda"), bfloat16(4, (8192, 1024))
        plans = []

        def choose(problem):
            plans.append(nvfp4_plan_of(problem))
            return plans[-1]

        with chosen(gemm_e4m3, choose):
            first = gemm_e4m3.gemm(gemm_record(x, weight, torch.float32, 1))
        assert isinstance(plans[0], ConvertedE4m3Plan)
        for _ in range(20):
            assert_bitwise(product(x, weight, torch.float32), first, "product")
        assert_bitwise(product(x, weight), first.to(torch.bfloat16), "product in bfloat16")

    @BOTH
    @quick
    @given(seed=strategies.seeds(), tokens=st.integers(1, 600), stages=st.integers(1, 20))
    @example(0, 1000, 16)
    def test_exact_where_everything_is_dyadic(self, form, seed, tokens, stages):
        """Few bits: every sum of the tensor cores is exact, so the float32 bits are known."""
        weight = weight_of(seed, 208, K_BLOCK * stages, low=0, high=0)
        weight = dataclasses.replace(weight, global_scale=torch.ones(1)).to("cuda")
        x = strategies.small_integers(seed, (tokens, K_BLOCK * stages), torch.bfloat16)
        x = x.clamp(-4, 4).to("cuda")
        expected = (x.double() @ dequantize(weight, torch.float64).T).float()
        assert_bitwise(product(x, weight, torch.float32, form=form), expected, "product")

    def test_every_code_and_exponent(self):
        """Unit vectors give the weight back: all codes, all exponents that a row may have."""
        made = strategies.generator(0)
        for low in range(-9, -5):
            codes = torch.arange(16, dtype=torch.uint8).repeat(256, 8)
            codes = codes.gather(1, torch.rand(256, 128, generator=made).argsort(1))
            exponents = low + torch.arange(256 * 8).view(256, 8) % 15
            scales = torch.exp2(exponents.float()).to(torch.float8_e4m3fn)
            weight = QuantizedTensor(pack(codes), scales, torch.ones(1), NVFP4)
            weight, _ = with_row_exponent(weight.with_layout(FRAGMENTS))
            weight = weight.to("cuda")
            x = torch.eye(128, dtype=torch.bfloat16, device="cuda")
            got = product(x, weight, torch.float32, form="converted")
            assert_bitwise(got + 0.0, dequantize(weight, torch.float32).T + 0.0, "weight")

    @BOTH
    @quick
    @given(seed=strategies.seeds(), tokens=st.integers(2, 600))
    def test_bad_tokens_stay_alone(self, form, seed, tokens):
        weight = weight_of(seed, 272, 384).to("cuda")
        x = bfloat16(seed, (tokens, 384))
        got = product(x, weight, form=form)
        bad = x.clone()
        bad[tokens // 2, 5], bad[-1, 300] = float("nan"), float("inf")
        other = product(bad, weight, form=form)
        good = torch.ones(tokens, dtype=torch.bool, device="cuda")
        good[tokens // 2] = good[-1] = False
        assert bool(other[~good].isnan().all())
        assert_bitwise(other[good], got[good], "the other tokens")

    @BOTH
    @quick
    @given(seed=strategies.seeds(), tokens=st.integers(1, 300))
    def test_zero_codes(self, form, seed, tokens):
        weight = weight_of(seed, 144, 256, zeros=True).to("cuda")
        got = product(bfloat16(seed, (tokens, 256)), weight, form=form)
        assert bool((got == 0).all())

    @BOTH
    @quick
    @given(seed=strategies.seeds(), tokens=st.integers(1, 300), groups=st.integers(2, 4))
    def test_groups(self, form, seed, tokens, groups):
        weight = weight_of(seed, 256 * groups, 384).to("cuda")
        x = bfloat16(seed, (tokens, groups, 384))
        got = product(x, weight, torch.float32, groups=groups, form=form)
        assert got.shape == (tokens, groups, 256)
        for g in range(groups):
            assert_right(x[:, g], rows_of(weight, 256 * g, 256), got[:, g])

    @BOTH
    @quick
    @given(seed=strategies.seeds(), tokens=st.integers(1, 300), segments=st.integers(2, 4))
    def test_segments(self, form, seed, tokens, segments):
        weight = weight_of(seed, 16 * 21, 256, segments=segments).to("cuda")
        x = bfloat16(seed, (tokens, 256))
        assert_right(x, weight, product(x, weight, torch.float32, form=form))

    @BOTH
    @quick
    @given(seed=strategies.seeds(), tokens=st.integers(1, 600), limit=st.sampled_from([None, 1.5]))
    def test_swiglu(self, form, seed, tokens, limit):
        weight = weight_of(seed, 352, 256).to("cuda")
        x = bfloat16(seed, (tokens, 256))
        sums = product(x, weight, torch.float32, form=form)
        gate, up = sums[:, 0::2], sums[:, 1::2]
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        expected = torch.nn.functional.silu(gate.double()) * up.double()
        got = swiglu(x, weight, torch.float32, limit, form)
        assert_within_budget(got, expected, 1e-5 * (expected.abs() + up.abs()), "SwiGLU")
        narrow = swiglu(x, weight, limit=limit, form=form)
        assert_bitwise(narrow, got.to(torch.bfloat16), "SwiGLU in bfloat16")

    @BOTH
    @quick
    @given(seed=strategies.seeds(), tokens=st.integers(1, 700), groups=st.integers(1, 3))
    def test_codes(self, form, seed, tokens, groups):
        """The bits of a GEMM that quantises its input itself."""
        weight = weight_of(seed, 256 * groups, 384).to("cuda")
        shape = (tokens, 384) if groups == 1 else (tokens, groups, 384)
        x = bfloat16(seed, shape)
        with chosen_form(form):
            got = gemm(quantize(x, FP8_TOKEN, layout=FRAGMENTS), weight, groups=groups, **BY_FP8)
            expected = gemm(x, weight, groups=groups, activation="fp8", **BY_FP8)
            assert_bitwise(got, expected, "product")
            if groups == 1:
                codes = quantize(x, FP8_TOKEN, layout=FRAGMENTS)
                fused = gemm_swiglu(codes, weight, 1.5, **BY_FP8)
                expected = gemm_swiglu(x, weight, 1.5, activation="fp8", **BY_FP8)
                assert_bitwise(fused, expected, "SwiGLU")

    def test_long_sums_of_one_sign(self):
        weight = weight_of(5, 256, 16384).to("cuda")
        bits = weight.with_layout(LINEAR)
        positive = dataclasses.replace(bits, codes=bits.codes & 0x77).with_layout(FRAGMENTS)
        x = bfloat16(6, (300, 16384)).abs()
        assert_right(x, positive, product(x, positive, torch.float32, form="converted"))


def block_weight_of(seed, rows, columns, dtype):
    spread = torch.exp2(strategies.normal(seed + 7, (rows, 1)))
    values = strategies.normal(seed, (rows, columns)) * spread
    return quantize(values, FP8_BLOCK, scale_dtype=dtype).to("cuda")


@pytest.mark.gpu
class TestFp8Weights:
    @quick
    @given(
        seed=strategies.seeds(),
        tokens=st.integers(1, 700),
        row_tiles=st.integers(1, 40),
        stages=st.integers(1, 9),
        dtype=st.sampled_from(FP8_BLOCK.scale_dtypes),
    )
    @example(0, 2000, 65, 8, torch.float32)
    @example(0, 1500, 256, 8, torch.float8_e8m0fnu)
    def test_within_the_budget(self, seed, tokens, row_tiles, stages, dtype):
        weight = block_weight_of(seed, 16 * row_tiles, K_BLOCK * stages, dtype)
        x = bfloat16(seed + 1, (tokens, K_BLOCK * stages))
        assert_right(x, weight, product(x, weight, torch.float32))

    def test_bfloat16_is_rounded_once(self):
        weight, x = block_weight_of(4, 272, 1024, torch.float32), bfloat16(5, (700, 1024))
        exact = product(x, weight, torch.float32)
        assert_bitwise(product(x, weight), exact.to(torch.bfloat16), "product in bfloat16")

    @quick
    @given(seed=strategies.seeds(), tokens=st.integers(1, 300), groups=st.integers(2, 4))
    @example(0, 43, 4)  # input and weight are the same numbers: a sum of one sign
    def test_groups(self, seed, tokens, groups):
        weight = block_weight_of(seed, 256 * groups, 384, torch.float32)
        x = bfloat16(seed, (tokens, groups, 384))
        got = product(x, weight, torch.float32, groups=groups)
        for g in range(groups):
            codes, scales = weight.codes[256 * g :][:256], weight.scales[2 * g : 2 * g + 2]
            part = dataclasses.replace(weight, codes=codes, scales=scales)
            assert_right(x[:, g], part, got[:, g])

    @pytest.mark.parametrize("groups", [1, 2])
    def test_codes(self, groups):
        weight = block_weight_of(1, 256 * groups, 384, torch.float32)
        x = bfloat16(2, (300, 384) if groups == 1 else (300, groups, 384))
        got = gemm(quantize(x, FP8_TOKEN), weight, groups=groups, **BY_FP8)
        expected = gemm(x, weight, groups=groups, activation="fp8", **BY_FP8)
        assert_bitwise(got, expected, "product")

    def test_bad_tokens_and_weights(self):
        weight = block_weight_of(1, 272, 384, torch.float32)
        x = bfloat16(2, (300, 384))
        got = product(x, weight)
        bad = x.clone()
        bad[7, 5] = float("nan")
        other = product(bad, weight)
        assert bool(other[7].isnan().all())
        assert_bitwise(other[8:], got[8:], "the other tokens")
        weight.codes.view(torch.uint8)[130, 3] = 0x7F
        assert bool(product(x, weight)[:, 130].isnan().all())


class Routed:
    """Rows of experts, their weights, and records of the operators."""

    def __init__(self, seed, counts, rows, columns, spare=0):
        self.counts, made = counts, strategies.generator(seed)
        self.total = sum(counts) + spare
        ends = torch.tensor([0, *counts]).cumsum(0)
        self.offsets = ends.to(torch.int32).to("cuda")
        weights = [weight_of(seed + e, rows, columns) for e in range(len(counts))]
        self.weights = [weight.to("cuda") for weight in weights]
        self.codes, self.scales, self.global_scale, self.row_exponent = (
            torch.stack([getattr(weight, name) for weight in self.weights])
            for name in ("codes", "scales", "global_scale", "row_exponent")
        )
        self.x = bfloat16(seed + 1, (self.total, columns))
        self.row_weight = torch.rand(self.total, generator=made).to("cuda")
        self.starts = ends.tolist()

    def fields(self, codes=None):
        """Fields that all records have; of rows that are FP8 codes if these are given."""
        return {
            "x": self.x if codes is None else codes.codes,
            "weight": self.codes,
            "scales": self.scales,
            "global_scale": self.global_scale,
            "row_exponent": self.row_exponent,
            "segments": [],
            "offsets": self.offsets,
            "format": "nvfp4",
            "layout": FRAGMENTS,
            "activation": "fp8" if codes is None else "bf16",
            "input_scale": None,
            "x_scales": None if codes is None else codes.scales,
            "x_layout": LINEAR if codes is None else codes.layout,
            "row_scale": None,
        }

    def of_expert(self, e):
        return slice(self.starts[e], self.starts[e + 1])


COUNTS = st.lists(st.integers(0, 400) | st.integers(0, 3), min_size=1, max_size=9).filter(sum)


def routed(form, function, record):
    """The result of a grouped GEMM in a form, with two experts at most at a time."""
    from dsv4.cute import grouped_gemm_e4m3

    def choose(problem):
        kind = (problem.float32_out, problem.swiglu, problem.row_weighted, problem.quantized_out)
        return EXPERT_FORMS[form](*kind)

    with chosen(grouped_gemm_e4m3, choose), pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped_gemm_e4m3, "experts_at_once", lambda rows, columns: 2)
        return getattr(grouped_gemm_e4m3, function)(record)


@pytest.mark.gpu
class TestExperts:
    @pytest.mark.parametrize("form", EXPERT_FORMS)
    @quick
    @given(
        seed=strategies.seeds(),
        counts=COUNTS,
        row_tiles=st.integers(1, 20),
        stages=st.integers(1, 6),
        spare=st.integers(0, 40),
    )
    @example(0, [700, 513, 0, 1, 256], 17, 3, 7)
    @example(1, [65, 64, 384, 1025], 8, 9, 200)
    def test_rows_are_those_of_the_dense_gemm(self, form, seed, counts, row_tiles, stages, spare):
        """Bit for bit, since the order of sums is the same; rows of no expert are zeros."""
        made = Routed(seed, counts, 16 * row_tiles, K_BLOCK * stages, spare)
        record = GroupedGemmArgs(**made.fields(), out_dtype=torch.bfloat16, settled=False)
        got = routed(form, "grouped_gemm", record)
        for e, weight in enumerate(made.weights):
            rows = made.of_expert(e)
            expected = product(made.x[rows], weight, form="converted")
            assert_bitwise(got[rows], expected, f"expert {e}")
        assert not bool(got[sum(counts) :].any())

    @BOTH
    @quick
    @given(
        seed=strategies.seeds(),
        counts=COUNTS,
        blocks=st.integers(1, 3),
        stages=st.integers(1, 4),
        limit=st.sampled_from([None, 2.0]),
        weighted=st.booleans(),
        spare=st.integers(0, 40),
    )
    @example(0, [700, 513, 0, 1, 256], 2, 3, 10.0, True, 7)
    def test_fp8_results_are_the_quantisers(
        self, form, seed, counts, blocks, stages, limit, weighted, spare
    ):
        """Bit for bit those of ``quantize`` of the bfloat16 results; X may be codes."""
        made = Routed(seed, counts, 256 * blocks, K_BLOCK * stages, spare)
        weights = made.row_weight if weighted else torch.ones_like(made.row_weight)
        codes = quantize(made.x, FP8_TOKEN, layout=FRAGMENTS)
        fields = made.fields(codes) | {"limit": limit, "row_weight": weights}
        record = GroupedGemmSwigluArgs(**fields, out_dtype=torch.bfloat16)
        wide = routed(form, "grouped_gemm_swiglu", record)
        for e, weight in enumerate(made.weights):
            rows = made.of_expert(e)
            if not weighted:
                assert_bitwise(wide[rows], swiglu(made.x[rows], weight, limit=limit), f"expert {e}")
        expected = quantize(wide, FP8_TOKEN, layout=FRAGMENTS)
        record = GroupedGemmSwigluFp8Args(**fields, result_layout=FRAGMENTS)
        got, scales = routed(form, "grouped_gemm_swiglu_fp8", record)
        assert_bitwise(scales.view(torch.uint8), expected.scales.view(torch.uint8), "scales")
        assert_bitwise(got.view(torch.uint8), expected.codes.view(torch.uint8), "codes")

    @BOTH
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_bad_rows_stay_alone(self, form, value):
        made = Routed(3, [300, 20, 130], 512, 256)
        fields = {"limit": None, "row_weight": None, "result_layout": FRAGMENTS}
        op = "grouped_gemm_swiglu_fp8"
        plain = GroupedGemmArgs(**made.fields(), out_dtype=torch.bfloat16, settled=False)
        sums = routed(form, "grouped_gemm", plain)
        good = routed(form, op, GroupedGemmSwigluFp8Args(**made.fields(), **fields))
        made.x[310, 3] = value
        bad = routed(form, op, GroupedGemmSwigluFp8Args(**made.fields(), **fields))
        rows = torch.arange(450, device="cuda") != 310
        for a, b in zip(good, bad, strict=True):
            assert_bitwise(a.view(torch.uint8)[rows], b.view(torch.uint8)[rows], "other rows")
        assert bool((bad[0].view(torch.uint8)[310] == 0x7F).all())
        other = routed(form, "grouped_gemm", plain)
        assert_bitwise(other[rows], sums[rows], "other rows of the product")
        assert bool(other[310].isnan().all())
