"""GEMMs of few tokens with FP8 weights by Hopper's kernel: on a GPU, and compiled on the CPU."""

from __future__ import annotations

import dataclasses
import functools
import os
import tempfile

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4 import device as machine
from dsv4 import dispatch
from dsv4.cute import gemm_fp8_small_m, supports
from dsv4.cute.runtime import cubin_cache
from dsv4.cute.sm90 import gemm_fp8_wgmma_plan
from dsv4.cute.sm90.gemm_fp8_small_m_plan import (
    BLOCK,
    TOKENS,
    SmallMFp8Plan,
    candidates,
    configuration_of,
    estimated_us,
    fastest_us,
    fits,
    fp8_small_m_plan,
    launches_of,
    token_tiles,
)
from dsv4.cute.sm90.plans import GemmProblem
from dsv4.cute.sm90.tuned import tuned
from dsv4.cute.sm90.tuned_records import RULE, TUNED, Entry, Origin, SmallMFp8Key
from dsv4.ops.gemm import gemm
from dsv4.ops.quantize import dequantize, quantize
from dsv4.quant.formats import FP8_BLOCK, NVFP4, QuantizedTensor
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise, assert_pure, assert_within_budget
from tests.ops.test_gemm_fp8 import PUBLISHED, SCALE_DTYPES, bfloat16, truth, weight_of

ROWS = st.integers(1, 40).map(lambda tiles: 16 * tiles)
COLUMNS = st.integers(1, 16).map(lambda blocks: BLOCK * blocks)
COUNTS = st.integers(1, TOKENS)
MOST_SHARED, REGISTER_FILE = 227 * 1024, 1 << 16


def product(x, weight, **options):
    return gemm(x, weight, backend="small_m", **options)


def problem_of(rows, columns, groups=1, float32_out=False, row_scaled=False):
    return GemmProblem(rows * groups, columns, groups, float32_out, row_scaled)


def estimated(plan, problem):
    return estimated_us(plan, problem, tuned().costs.gemm_fp8_small_m, tuned().clusters)


def rounding(expected, budget):
    """The budget of a result in bfloat16, beside that of its sums."""
    return torch.finfo(torch.bfloat16).eps / 2 * (expected.abs() + budget) + 1e-30


class TestPlans:
    @given(rows=ROWS, columns=COLUMNS, groups=st.integers(1, 3), tokens=COUNTS)
    def test_every_candidate_fits(self, rows, columns, groups, tokens):
        problem, folded = problem_of(rows, columns, groups), rows % 32 == 0
        every = list(candidates(problem, tokens, folded))
        assert every
        for plan in every:
            assert plan.blocks * BLOCK * plan.ctas == columns
            assert 1 <= plan.stages <= plan.blocks
            assert 8 * plan.token_tiles >= tokens
            assert plan.e8m0_scales == folded
            assert (plan.shared_bytes + 1024) * plan.ctas_per_sm <= MOST_SHARED + 1024
            # The rows of a CTA share an input, and regions of shared memory begin at whole lines.
            assert groups == 1 or rows // 16 % plan.warps == 0
            assert plan.x_bytes % 128 == plan.partials_bytes % 128 == plan.buffer_bytes % 128 == 0

    @given(rows=ROWS, columns=COLUMNS, tokens=COUNTS, folded=st.booleans())
    def test_the_choice_has_the_least_estimate(self, rows, columns, tokens, folded):
        problem = problem_of(rows, columns)
        times = [estimated(p, problem) for p in candidates(problem, tokens, folded)]
        chosen = fp8_small_m_plan(problem, tokens, folded)
        assert estimated(chosen, problem) == min(times)
        assert fastest_us(problem, tokens, folded) == min(times)

    @given(rows=ROWS, columns=COLUMNS, tokens=COUNTS, seed=strategies.seeds())
    def test_a_measured_configuration_is_taken(self, rows, columns, tokens, seed):
        """Also for kinds of results that were not measured, if they fit."""
        problem, tiles = problem_of(rows, columns), token_tiles(tokens)
        every = list(candidates(problem, tokens, True))
        measured = configuration_of(every[seed % len(every)])
        key = SmallMFp8Key(rows, 1, columns, tiles)
        assert fits(key, measured)
        entries = {**tuned().entries, key: Entry(measured)}
        with machine.pretend(plans=dataclasses.replace(tuned(), entries=entries)):
            for kind in (problem, problem._replace(float32_out=True)):
                plan = fp8_small_m_plan(kind, tokens, False)
                assert configuration_of(plan) == measured
                assert plan.float32_out == kind.float32_out

    @given(tokens=st.integers(1, 200))
    def test_launches_cover_the_tokens(self, tokens):
        counts = launches_of(tokens)
        assert sum(counts) == tokens
        assert all(count == TOKENS for count in counts[:-1])
        assert 0 < counts[-1] <= TOKENS

    @given(rows=ROWS, columns=COLUMNS, tokens=COUNTS)
    def test_a_plan_depends_on_the_tiles_of_tokens_alone(self, rows, columns, tokens):
        problem, most = problem_of(rows, columns), 8 * token_tiles(tokens)
        assert fp8_small_m_plan(problem, tokens, True) == fp8_small_m_plan(problem, most, True)

    @pytest.mark.parametrize(
        ("rows", "columns", "groups"), [(24, 128, 1), (32, 192, 1), (32, 0, 1), (40, 128, 2)]
    )
    def test_sizes_without_a_plan(self, rows, columns, groups):
        assert fp8_small_m_plan(GemmProblem(rows, columns, groups, False, False), 1, True) is None

    def test_warm_lists_have_what_calls_take(self):
        for rows, columns, groups in PUBLISHED:
            sizes = (rows * groups, columns, groups)
            kind = ("bf16", torch.bfloat16, torch.float8_e8m0fnu)
            listed = gemm_fp8_small_m.plans(*sizes, *kind, 64)
            for tokens in range(1, 65):
                for count in launches_of(tokens):
                    assert (
                        fp8_small_m_plan(problem_of(rows, columns, groups), count, True) in listed
                    )


def call_of(tokens, rows, columns, groups=1, weight=None):
    """A call on a GPU that is not there; its memory is never read."""
    codes = torch.empty(rows * groups, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows * groups // BLOCK), -(-columns // BLOCK))
    weight = weight or QuantizedTensor(codes, scales, None, FP8_BLOCK)
    shape = (tokens, groups, columns) if groups > 1 else (tokens, columns)
    arguments = dispatch.arguments(
        gemm, torch.empty(shape, dtype=torch.bfloat16), weight, groups=groups
    )
    return dispatch.Call(arguments.op, arguments.args, torch.device("cuda", 0))


def test_a_gpu_that_nobody_measured_takes_the_kernel_for_large_m():
    known = tuned()
    rule = {**known.origins, "gemm_fp8_small_m": Origin(RULE, "a test")}
    plans = dataclasses.replace(known, origins=rule)
    with machine.pretend(packages=True, capability=(9, 0), plans=plans):
        reason = supports.fp8_wgmma_is_faster(call_of(1, 4096, 8192))
    assert reason is not None
    assert "bench tune --only gemm_fp8_small_m measures them" in reason


class TestDispatch:
    @pytest.fixture(autouse=True)
    def hopper(self):
        """Every package counts as installed, and the GPU is of Hopper and was measured."""
        known = tuned()
        origins = {**known.origins, "gemm_fp8_small_m": Origin(TUNED, "a test")}
        plans = dataclasses.replace(known, origins=origins)
        with machine.pretend(packages=True, capability=(9, 0), plans=plans):
            yield

    @pytest.mark.parametrize(("rows", "columns", "groups"), PUBLISHED)
    @pytest.mark.parametrize("tokens", [1, 8, 16])
    def test_published_weights_and_few_tokens(self, tokens, rows, columns, groups):
        call = call_of(tokens, rows, columns, groups)
        assert supports.fp8_small_m_gemm(call) is None
        assert supports.fp8_wgmma_is_faster(call) is None

    @given(tokens=st.integers(1, 64), rows=ROWS, columns=COLUMNS, groups=st.integers(1, 3))
    def test_the_row_with_the_least_estimate(self, tokens, rows, columns, groups):
        call, problem = call_of(tokens, rows, columns, groups), problem_of(rows, columns, groups)
        assert supports.fp8_small_m_gemm(call) is None
        reason = supports.fp8_wgmma_is_faster(call)
        if gemm_fp8_wgmma_plan.fp8_plan(problem, tokens, False) is None:
            assert reason is None
            return
        small_m = fastest_us(problem, tokens, False)
        large_m = gemm_fp8_wgmma_plan.fastest_us(problem, tokens, False)
        assert (reason is None) == (small_m <= large_m)
        assert reason is None or f"{small_m:.1f} us for {tokens} tokens" in reason

    def test_reasons(self):
        def reason(*sizes, **options):
            return supports.fp8_small_m_gemm(call_of(*sizes, **options))

        assert reason(65, 128, 128) == "there are 65 tokens, wanted at most 64"
        assert "a group is 24 x 128, wanted multiples of 16 x 128" in reason(1, 24, 128)
        assert "a group is 16 x 192, wanted multiples of 16 x 128" in reason(1, 16, 192)
        codes = torch.empty(32, 136, dtype=torch.float8_e4m3fn)[:, :128]
        separate = QuantizedTensor(codes, torch.empty(1, 1), None, FP8_BLOCK)
        assert "multiples of 16 bytes" in reason(1, 32, 128, weight=separate)
        other = quantize(torch.ones(32, 128), NVFP4)
        assert reason(1, 32, 128, weight=other) == "the weight is in 'nvfp4', wanted 'fp8_block'"
        with machine.pretend(capability=(10, 0)):
            assert reason(1, 32, 128) is not None


@functools.cache
def ptx_of(plan):
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    with tempfile.TemporaryDirectory() as folder:
        kernel = cubin_cache.kernel_of(plan)
        options = f"--gpu-arch sm_90a --keep-cubin --keep-ptx --dump-dir {folder}"
        return kernel.compile(options).__ptx__


def computed(plan, x, weight, groups=1, token_scale=None, *, is_eager=False):
    """The result of the compiled kernel, run on the CPU; ``x`` is ``[T, G, K]``."""
    from tests._tools.ptx import cluster

    tokens, rows = x.shape[0], weight.codes.shape[0]
    dtype = torch.float32 if plan.float32_out else torch.bfloat16
    out = torch.full((tokens, groups, rows // groups), float("nan"), dtype=dtype)
    scales = weight.scales
    if plan.e8m0_scales:
        scales = scales.view(torch.uint8)
    row_tiles = rows // 16
    arguments = (
        *(weight.codes.view(torch.uint8), scales, x),
        *(0 if token_scale is None else token_scale, out, tokens, row_tiles, row_tiles // groups),
        *(groups * plan.columns, 0 if groups == 1 else plan.columns, weight.codes.stride(0)),
        groups,
    )
    ctas = -(-row_tiles // plan.warps) * plan.ctas
    shape = (ctas, plan.ctas, plan.threads, plan.shared_bytes)
    cluster.launch(ptx_of(plan), list(arguments), *shape, is_eager=is_eager)
    return out


# Every number of CTAs, warps that are not as many as CTAs, rings as deep as the part of K and not.
COMPILED = (
    SmallMFp8Plan(512, 1, 3, 1, True, False, 3, e8m0_scales=False),
    SmallMFp8Plan(1024, 2, 2, 2, True, False, 3, e8m0_scales=True),
    SmallMFp8Plan(1024, 4, 5, 4, False, False, 2, e8m0_scales=False),
    SmallMFp8Plan(1024, 8, 9, 1, False, False, 1, e8m0_scales=True),
    SmallMFp8Plan(512, 2, 4, 1, True, True, 2, e8m0_scales=False),
)


class TestCompiled:
    """The compiled kernel on the CPU: fragments, ring, exchange of partial sums and epilogue."""

    @pytest.fixture(autouse=True)
    def compiler(self):
        pytest.importorskip("cutlass")

    @pytest.mark.parametrize("plan", COMPILED, ids=repr)
    def test_within_the_budget(self, plan):
        """Rows and tokens that end within a tile; copies that come early or late."""
        dtype = torch.float8_e8m0fnu if plan.e8m0_scales else torch.float32
        weight = weight_of(0, 144, plan.columns, "cpu", dtype)
        tokens = 8 * plan.token_tiles - 3
        x = bfloat16(1, (tokens, 1, plan.columns), "cpu")
        scale = torch.linspace(0.5, 2.0, tokens).view(tokens, 1) if plan.row_scaled else None
        got = computed(plan, x, weight, token_scale=scale)
        assert_bitwise(computed(plan, x, weight, token_scale=scale, is_eager=True), got, "eager")
        expected, budget = truth(x[:, 0], weight)
        if scale is not None:
            expected, budget = expected * scale, 1.01 * budget * scale
        if not plan.float32_out:
            budget = budget + rounding(expected, budget)
        assert_within_budget(got[:, 0], expected, budget, "product")

    def test_groups(self):
        plan = COMPILED[0]
        weight = weight_of(0, 96, 512, "cpu")
        x = bfloat16(1, (5, 2, 512), "cpu")
        got = computed(plan, x, weight, 2)
        for group in range(2):
            codes = weight.codes[48 * group :][:48]
            part = dataclasses.replace(weight, codes=codes)
            expected, budget = truth(x[:, group], part)
            assert_within_budget(got[:, group], expected, budget, f"group {group}")

    def test_every_code(self):
        """All 254 numbers of E4M3, subnormal ones and both zeros included, and both NaN."""
        plan = COMPILED[0]
        codes = torch.zeros(256, 512, dtype=torch.uint8)
        codes[:, :8] = torch.arange(256)[:, None].to(torch.uint8)
        x = torch.zeros(8, 1, 512, dtype=torch.bfloat16)
        x[:, 0, :8].fill_diagonal_(1.0)
        floats = codes.view(torch.float8_e4m3fn)
        weight = QuantizedTensor(floats, torch.ones(2, 4), None, FP8_BLOCK)
        got = computed(plan, x, weight)[:, 0]
        expected = floats[:, :8].float().T
        finite = ~expected.isnan()
        assert bool(got[finite].eq(expected[finite]).all())
        assert bool(got[~finite].isnan().all())

    @pytest.mark.parametrize("value", [float("inf"), float("nan")])
    def test_a_bad_token_is_alone(self, value):
        plan = COMPILED[1]
        weight = weight_of(0, 48, 1024, "cpu", torch.float8_e8m0fnu)
        weight.codes.view(torch.uint8)[:, 700] = 0
        x = bfloat16(1, (11, 1, 1024), "cpu")
        clean = computed(plan, x, weight)
        x[3, 0, 700], x[7, 0, 5] = value, -value
        got = computed(plan, x, weight)
        bad = torch.tensor([3, 7])
        good = torch.tensor([t for t in range(11) if t not in (3, 7)])
        assert bool(got[bad].isnan().all())
        assert_bitwise(got[good], clean[good], "the other tokens")


def configurations():
    """Each split of K, number of tiles of tokens, and CTAs of an SM, of few warps and of many."""
    result = {}
    for tokens in (8, 16, 32):
        for plan in candidates(problem_of(592, 1024), tokens, tokens != 16):
            key = (plan.ctas, plan.token_tiles, plan.ctas_per_sm)
            if key not in result or plan.ctas in (2, 8):
                result[key] = plan
    return list(result.values())


@pytest.mark.gpu
class TestValues:
    @pytest.mark.parametrize("plan", configurations(), ids=repr)
    def test_every_configuration(self, plan, monkeypatch):
        """Rows and tokens that end within a tile; a bad token and an infinite one alone."""
        monkeypatch.setattr(gemm_fp8_small_m, "fp8_small_m_plan", lambda *_: plan)
        # What was prepared for one configuration must not serve another.
        unprepared = gemm_fp8_small_m._prepared.__wrapped__
        monkeypatch.setattr(gemm_fp8_small_m, "_prepared", unprepared)
        dtype = torch.float8_e8m0fnu if plan.e8m0_scales else torch.float32
        weight = weight_of(0, 592, 1024, "cuda", dtype)
        for tokens in (1, 8 * plan.token_tiles - 3, 8 * plan.token_tiles):
            x = bfloat16(tokens, (tokens, 1024), "cuda")
            got = product(x, weight)
            expected, budget = truth(x, weight)
            assert_within_budget(got, expected, budget + rounding(expected, budget), "product")
            bad = x.clone()
            bad[tokens // 2, 5], bad[-1, 70] = float("nan"), float("inf")
            other = product(bad, weight)
            rows = torch.ones(tokens, dtype=torch.bool, device="cuda")
            rows[tokens // 2] = rows[-1] = False
            assert bool(other[~rows].isnan().all())
            assert_bitwise(other[rows], got[rows], "the other tokens")

    @given(
        seed=strategies.seeds(),
        tokens=st.integers(1, 64),
        rows=ROWS,
        columns=COLUMNS,
        dtype=SCALE_DTYPES,
        activation=st.sampled_from(["bf16", "nvfp4", "fp8"]),
        pad=st.integers(0, 2),
    )
    @example(0, 8, 1536, 4096, torch.float8_e8m0fnu, "bf16", 0)
    @example(0, 64, 4096, 8192, torch.float8_e8m0fnu, "bf16", 0)
    @example(0, 33, 32768, 1024, torch.float32, "nvfp4", 1)
    def test_within_the_budget(self, seed, tokens, rows, columns, dtype, activation, pad):
        weight = weight_of(seed, rows, columns, "cuda", dtype)
        x = bfloat16(seed + 1, (tokens, columns + 8 * pad), "cuda")[:, :columns]
        expected, budget = truth(x, weight, activation)
        got = product(x, weight, activation=activation, out_dtype=torch.float32)
        assert_within_budget(got, expected, budget, "product")
        narrow = product(x, weight, activation=activation)
        assert_bitwise(narrow, got.to(torch.bfloat16), "product in bfloat16")

    @given(seed=strategies.seeds(), tokens=st.integers(1, 64), groups=st.integers(2, 4))
    def test_groups(self, seed, tokens, groups):
        weight = weight_of(seed, 384 * groups, 384, "cuda")
        x = bfloat16(seed, (tokens, groups, 384), "cuda")
        got = product(x, weight, groups=groups, out_dtype=torch.float32)
        assert got.shape == (tokens, groups, 384)
        for g in range(groups):
            codes, scales = weight.codes[384 * g :][:384], weight.scales[3 * g : 3 * g + 3]
            part = dataclasses.replace(weight, codes=codes, scales=scales)
            expected, budget = truth(x[:, g], part)
            assert_within_budget(got[:, g], expected, budget, f"group {g}")

    @given(seed=strategies.seeds(), tokens=st.integers(1, 64), dtype=SCALE_DTYPES)
    def test_exact_where_everything_is_dyadic(self, seed, tokens, dtype):
        """Every partial sum is exact in float32, in any order."""
        made = strategies.generator(seed)
        codes = torch.randint(-8, 9, (208, 384), generator=made).float()
        scales = torch.exp2(torch.randint(-3, 4, (2, 3), generator=made).float()).to(dtype)
        weight = QuantizedTensor(codes.to(torch.float8_e4m3fn), scales, None, FP8_BLOCK).to("cuda")
        x = strategies.small_integers(seed, (tokens, 384), torch.bfloat16).to("cuda")
        expected = (x.double() @ dequantize(weight, torch.float64).T).float()
        assert_bitwise(product(x, weight, out_dtype=torch.float32), expected, "product")

    @pytest.mark.parametrize("byte", [0, 1, 7, 120, 220, 229])
    def test_extreme_powers_of_two(self, byte):
        weight = weight_of(3, 144, 256, "cpu", torch.float8_e8m0fnu)
        scales = torch.full((2, 2), byte, dtype=torch.uint8)
        scales[1, 1] = 127
        weight = dataclasses.replace(weight, scales=scales.view(torch.float8_e8m0fnu)).to("cuda")
        x = bfloat16(4, (30, 256), "cuda")
        expected, budget = truth(x, weight)
        got = product(x, weight, out_dtype=torch.float32)
        assert_within_budget(got, expected, budget, "product")

    @given(seed=strategies.seeds(), pad=st.integers(0, 5), shift=st.integers(0, 9))
    def test_strides_and_misaligned_rows(self, seed, pad, shift):
        """Rows of codes apart from one another, too."""
        weight = weight_of(seed, 48, 128, "cuda")
        buffer = bfloat16(seed, (20 * (128 + pad) + 16,), "cuda")
        x = buffer[shift : shift + 20 * (128 + pad)].view(20, -1)[:, :128]
        wide = torch.full((48, 128 + 16 * pad), 0x7F, dtype=torch.uint8, device="cuda")
        wide[:, :128] = weight.codes.view(torch.uint8)
        separate = dataclasses.replace(weight, codes=wide.view(torch.float8_e4m3fn)[:, :128])
        expected = product(x.clone(), weight)
        for left, right in ((x, weight), (x.t().contiguous().t(), weight), (x, separate)):
            assert_bitwise(product(left, right), expected, "product")


@pytest.mark.gpu
class TestIndependence:
    @given(
        seed=strategies.seeds(),
        tokens=st.integers(2, 64),
        kind=st.sampled_from([float("nan"), float("inf"), float("-inf")]),
        activation=st.sampled_from(["bf16", "nvfp4"]),
    )
    def test_a_bad_token_is_alone(self, seed, tokens, kind, activation):
        weight = weight_of(seed, 80, 384, "cuda")
        weight.codes.view(torch.uint8)[:, 10] = 0  # an infinity times a zero, and times others
        x = bfloat16(seed, (tokens, 384), "cuda")
        clean = product(x, weight, activation=activation)
        x[tokens // 2, seed % 384] = kind
        got = product(x, weight, activation=activation)
        assert bool(got[tokens // 2].isnan().all())
        keep = torch.arange(tokens, device="cuda") != tokens // 2
        assert_bitwise(got[keep], clean[keep], "the other tokens")

    @given(seed=strategies.seeds(), tokens=st.integers(2, 64))
    def test_other_tokens_change_nothing(self, seed, tokens):
        weight = weight_of(seed, 80, 1024, "cuda")
        x, others = (bfloat16(seed + i, (tokens, 1024), "cuda") for i in range(2))
        others[1] = x[1]
        assert_bitwise(product(others, weight)[1], product(x, weight)[1], "a token")

    @pytest.mark.parametrize("dtype", FP8_BLOCK.scale_dtypes)
    def test_a_nan_scale_is_in_its_rows(self, dtype):
        weight = weight_of(0, 304, 256, "cpu", dtype)
        if dtype == torch.float32:
            weight.scales[1, 0] = float("nan")
        else:
            weight.scales.view(torch.uint8)[1, 0] = 255
        got = product(bfloat16(1, (30, 256), "cuda"), weight.to("cuda"))
        assert bool(got[:, 128:256].isnan().all())
        assert int(got.isnan().sum()) == 30 * 128

    def test_a_nan_code_is_in_its_row(self):
        weight = weight_of(0, 304, 256, "cpu")
        weight.codes.view(torch.uint8)[77, 200] = 0xFF
        got = product(bfloat16(1, (30, 256), "cuda"), weight.to("cuda"))
        assert bool(got[:, 77].isnan().all())
        assert int(got.isnan().sum()) == 30

    @pytest.mark.parametrize("tokens", [1, 8, 16, 32, 64])
    def test_same_bits_twice(self, tokens):
        weight, x = weight_of(0, 4096, 8192, "cuda"), bfloat16(0, (tokens, 8192), "cuda")
        first = product(x, weight)
        for _ in range(20):
            assert_bitwise(product(x, weight), first, "product")


@pytest.mark.gpu
class TestIntegration:
    @pytest.mark.parametrize("shape", [(0, 128), (0, 2, 128)])
    def test_no_tokens(self, shape):
        weight = weight_of(0, 256, 128, "cuda")
        got = product(bfloat16(0, shape, "cuda"), weight, groups=len(shape) - 1)
        assert got.shape == (*shape[:-1], 256 // (len(shape) - 1))

    def test_a_pure_operator(self):
        weight = weight_of(0, 48, 256, "cuda")
        call = dispatch.arguments(gemm, bfloat16(0, (20, 256), "cuda"), weight)
        assert_pure(torch.ops.dsv4.gemm, *call.args, "small_m")

    @pytest.mark.parametrize("tokens", [3, 64])
    @pytest.mark.parametrize("groups", [1, 2])
    def test_a_captured_graph_takes_new_data(self, tokens, groups):
        """Inputs, codes and scales may change between replays."""
        first = weight_of(0, 256 * groups, 512, "cuda")
        shape = (tokens, groups, 512) if groups > 1 else (tokens, 512)
        x = bfloat16(0, shape, "cuda")
        product(x, first, groups=groups)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = product(x, first, groups=groups)
        for seed in range(1, 6):
            other = weight_of(seed, 256 * groups, 512, "cuda")
            x.copy_(bfloat16(seed, shape, "cuda"))
            first.codes.copy_(other.codes)
            first.scales.copy_(other.scales)
            out.fill_(torch.nan)
            graph.replay()
            assert_bitwise(out, product(x, other, groups=groups), "replay")

    def test_a_weight_and_an_input_that_were_just_made(self):
        """It waits for the kernels that quantise the one and compute the other."""
        x, w = bfloat16(0, (20, 1024), "cuda"), bfloat16(1, (4096, 1024), "cuda")
        expected = product(product(x, quantize(w, FP8_BLOCK))[:, :1024], quantize(w, FP8_BLOCK))
        torch.cuda.synchronize()
        for _ in range(20):
            weight = quantize(w.clone(), FP8_BLOCK)
            inner = product(x, weight)[:, :1024]
            assert_bitwise(product(inner, weight), expected, "product")
