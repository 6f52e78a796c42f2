"""Products with weights in fragments: the kernels for few and for many tokens."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4 import dispatch
from dsv4.cute import gemm as cute_gemm
from dsv4.cute.sm90.gemm_small_m_plan import SmallMPlan, SmallMRingPlan
from dsv4.cute.sm90.gemm_wgmma_plan import candidates as wgmma_candidates
from dsv4.ops.gemm import gemm
from dsv4.ops.quantize import dequantize, quantize
from dsv4.quant.elements import encode_e4m3
from dsv4.quant.formats import FRAGMENTS, NVFP4, QuantizedTensor
from dsv4.testing import strategies
from dsv4.testing.assertions import (
    assert_bitwise,
    assert_pure,
    assert_within_budget,
    gemm_budget,
)

KERNELS = ("triton",)
FLOATS = st.sampled_from([torch.bfloat16, torch.float32])
ACTIVATIONS = st.sampled_from(["bf16", "nvfp4", "fp8"])


def weight_of(seed, rows, columns, device, cuts=()):
    """Random codes and scales; a global scale per segment."""
    weight = quantize(strategies.normal(seed, (rows, columns)), scaling="weight")
    if cuts:
        segments = tuple(b - a for a, b in zip((0, *cuts), (*cuts, rows), strict=True))
        scale = torch.rand(len(segments), generator=strategies.generator(seed)) + 0.5
        weight = dataclasses.replace(weight, global_scale=scale, segments=segments)
    return weight.to(device)


def product(x, weight, activation="bf16", **options):
    """Run the kernel that dispatch chooses; where there is one, not the reference."""
    packed = weight.with_layout(FRAGMENTS)
    return gemm(x, packed, activation=activation, **options)


def truth(x, weight, activation, input_scale=None):
    """float64 product of the operands, and the budget of float32 sums."""
    if activation == "nvfp4":
        scaling = "token" if input_scale is None else "static"
        x = dequantize(quantize(x, scaling=scaling, global_scale=input_scale), torch.float64)
    elif activation == "fp8":
        x = dequantize(quantize(x, "fp8_token"), torch.float64)
    left, right = x.double(), dequantize(weight, torch.float64)
    return left @ right.T, gemm_budget(left, right, torch.float32)


def bfloat16(seed, shape, device):
    return strategies.normal(seed, shape, torch.bfloat16).to(device)


@st.composite
def cut_rows(draw, most):
    """Row counts in tiles, and up to three cuts anywhere in them."""
    rows = 16 * draw(st.integers(1, most))
    cuts = draw(st.lists(st.integers(1, rows - 1), max_size=3, unique=True))
    return rows, tuple(sorted(cuts))


class TestValues:
    @given(
        seed=strategies.seeds(),
        tokens=st.integers(0, 40),
        shape=cut_rows(5),
        columns=st.integers(1, 6),
        activation=ACTIVATIONS,
        static=st.booleans(),
    )
    @example(seed=0, tokens=16, shape=(144, ()), columns=8, activation="bf16", static=False)
    @example(seed=0, tokens=70, shape=(48, (7, 30)), columns=3, activation="nvfp4", static=True)
    def test_within_the_budget_of_the_dense_gemm(
        self, device, seed, tokens, shape, columns, activation, static
    ):
        (rows, cuts), columns = shape, 64 * columns
        weight = weight_of(seed, rows, columns, device, cuts)
        x = bfloat16(seed + 1, (tokens, columns), device)
        scale = torch.tensor([0.01], device=device) if static and activation == "nvfp4" else None
        expected, budget = truth(x, weight, activation, scale)
        got = product(x, weight, activation, input_scale=scale, out_dtype=torch.float32)
        assert got.shape == (tokens, rows)
        assert_within_budget(got, expected, budget, "product")
        narrow = product(x, weight, activation, input_scale=scale)
        assert_bitwise(narrow, got.to(torch.bfloat16), "product in bfloat16")

    @given(seed=strategies.seeds(), tokens=st.integers(1, 20), dtype=FLOATS)
    def test_a_global_scale_per_row(self, device, seed, tokens, dtype):
        weight = weight_of(seed, 48, 128, device)
        scale = torch.rand(48, generator=strategies.generator(seed)).to(device) + 0.5
        weight = dataclasses.replace(weight, global_scale=scale)
        x = bfloat16(seed, (tokens, 128), device)
        expected, budget = truth(x, weight, "bf16")
        got = product(x, weight, out_dtype=torch.float32)
        assert_within_budget(got, expected, budget, "product")
        assert_bitwise(product(x, weight, out_dtype=dtype), got.to(dtype), "product")

    @given(
        seed=strategies.seeds(),
        tokens=st.integers(1, 20),
        groups=st.integers(2, 4),
        activation=ACTIVATIONS,
    )
    def test_groups(self, device, seed, tokens, groups, activation):
        """Each group's rows meet its own input, bit for bit as alone up to the order of sums."""
        weight = weight_of(seed, 32 * groups, 64, device)
        x = bfloat16(seed, (tokens, groups, 64), device)
        got = product(x, weight, activation, groups=groups, out_dtype=torch.float32)
        assert got.shape == (tokens, groups, 32)
        for g in range(groups):
            part = dataclasses.replace(
                weight,
                codes=weight.codes[32 * g : 32 * g + 32],
                scales=weight.scales[32 * g : 32 * g + 32],
            )
            expected, budget = truth(x[:, g], part, activation)
            assert_within_budget(got[:, g], expected, budget, f"group {g}")

    @given(seed=strategies.seeds(), tokens=st.integers(1, 18))
    def test_exact_where_everything_is_dyadic(self, device, seed, tokens):
        """Every partial sum is exact in float32, in any order."""
        drawn = torch.randint(0, 16, (80, 160, 2), generator=strategies.generator(seed))
        drawn = torch.where((drawn & 7) > 5, drawn & 8, drawn).to(torch.uint8)
        scales = torch.full((80, 20), 2.0).to(torch.float8_e4m3fn)
        codes = drawn[..., 0] | drawn[..., 1] << 4
        weight = QuantizedTensor(codes, scales, torch.full((1,), 0.125), NVFP4).to(device)
        x = strategies.small_integers(seed, (tokens, 320), torch.bfloat16).to(device)
        expected = (x.double() @ dequantize(weight, torch.float64).T).float()
        assert_bitwise(product(x, weight, out_dtype=torch.float32), expected, "product")

    @pytest.mark.parametrize("kind", ["largest", "subnormal", "zero", "cancelling"])
    @pytest.mark.parametrize("tokens", [1, 9, 65])
    def test_extreme_scales(self, device, kind, tokens):
        weight = weight_of(3, 64, 256, "cpu")
        codes, value = weight.codes, {"largest": 448.0, "subnormal": 2.0**-9, "zero": 0.0}
        if kind == "cancelling":
            codes = codes & 0x77 | 0x80  # each pair of columns has opposite signs
        scales = encode_e4m3(torch.full((64, 16), value.get(kind, 1.0)))
        weight = dataclasses.replace(weight, codes=codes, scales=scales).to(device)
        x = bfloat16(4, (tokens, 256), device)
        expected, budget = truth(x, weight, "bf16")
        got = product(x, weight, out_dtype=torch.float32)
        assert_within_budget(got, expected, budget, "product")
        if kind == "zero":
            assert not bool(got.any())

    @given(seed=strategies.seeds(), pad=st.integers(0, 5), shift=st.integers(0, 9))
    def test_strides_and_misaligned_rows(self, device, seed, pad, shift):
        weight = weight_of(seed, 32, 128, device)
        buffer = bfloat16(seed, (5 * (128 + 8 * pad) + 16,), device)
        x = buffer[shift : shift + 5 * (128 + 8 * pad)].view(5, -1)[:, :128]
        assert_bitwise(product(x, weight), product(x.clone(), weight), "product")
        transposed = bfloat16(seed, (128, 5), device).t()
        assert_bitwise(
            product(transposed, weight), product(transposed.contiguous(), weight), "product"
        )


class TestIndependence:
    @given(
        seed=strategies.seeds(),
        tokens=st.integers(2, 20),
        kind=st.sampled_from([float("nan"), float("inf"), float("-inf")]),
        activation=ACTIVATIONS,
    )
    def test_a_bad_token_is_alone(self, device, seed, tokens, kind, activation):
        weight = weight_of(seed, 48, 192, device)
        weight.codes[:, 10] = 0  # an infinity times a zero code, and times others
        x = bfloat16(seed, (tokens, 192), device)
        clean = product(x, weight, activation)
        x[tokens // 2, seed % 192] = kind
        got = product(x, weight, activation)
        assert bool(got[tokens // 2].isnan().all())
        keep = torch.arange(tokens, device=device) != tokens // 2
        assert_bitwise(got[keep], clean[keep], "the other tokens")

    def test_a_nan_scale_is_in_its_row(self, device):
        weight = weight_of(0, 32, 128, device)
        weight.scales.view(torch.uint8)[5, 3] = 0x7F
        got = product(bfloat16(1, (4, 128), device), weight)
        assert bool(got[:, 5].isnan().all())
        assert int(got.isnan().sum()) == 4

    @given(seed=strategies.seeds(), tokens=st.integers(1, 20))
    def test_same_bits_twice(self, device, seed, tokens):
        weight = weight_of(seed, 48, 192, device).with_layout(FRAGMENTS)
        x = bfloat16(seed, (tokens, 192), device)
        assert_bitwise(gemm(x, weight), gemm(x, weight), "product")

    def test_no_tokens(self, device):
        weight = weight_of(0, 32, 128, device)
        assert product(bfloat16(0, (0, 128), device), weight).shape == (0, 32)

    @pytest.mark.gpu
    @given(seed=strategies.seeds(), tokens=st.integers(1, 8), blocks=st.integers(1, 4))
    def test_batch_invariant_up_to_eight_tokens(self, seed, tokens, blocks):
        weight = weight_of(seed, 640, 448 * blocks, "cuda").with_layout(FRAGMENTS)
        x = bfloat16(seed, (tokens, 448 * blocks), "cuda")
        whole = gemm(x, weight, backend="cute")
        for token in range(tokens):
            alone = gemm(x[token : token + 1], weight, backend="cute")
            assert_bitwise(alone, whole[token : token + 1], f"token {token}")


def configurations():
    """Each shape of tiles and number of blocks once."""
    result = {}
    for tokens in (32, 64, 128, 256):
        for columns in (512, 1408):
            for plan in wgmma_candidates(592, 592, columns, tokens, False, False):
                shape = (plan.token_block, plan.rows, plan.warp_tiles, plan.ctas)
                result.setdefault(shape, (plan, columns))
    return list(result.values())


def few_configurations():
    """Whole steps of one round and of two, a rest of a round and more, of less, and none; rings."""
    kinds = [(12, 4, 1), (12, 12, 1), (13, 3, 2), (11, 3, 2), (11, 4, 2), (11, 8, 2), (11, 11, 2)]
    result = [
        SmallMPlan(64 * blocks * tiles, blocks, 5, token_tiles, False, False, depth, rounds=rounds)
        for tiles, depth, rounds in kinds
        for blocks, token_tiles in ((2, 1), (3, 2))
    ]
    return result + [
        SmallMRingPlan(64 * blocks * tiles, blocks, 5, token_tiles, False, False, depth)
        for tiles, depth in ((12, 4), (12, 12), (5, 1))
        for blocks, token_tiles in ((2, 1), (3, 2))
    ]


@pytest.mark.gpu
class TestFewTokens:
    @pytest.mark.parametrize("plan", few_configurations(), ids=repr)
    def test_every_way_of_loading_ahead(self, plan, monkeypatch):
        """Rows that end within a cluster; a bad token and an infinite one alone."""
        monkeypatch.setattr(cute_gemm, "choose", lambda *_: plan)
        # What was prepared for one configuration must not serve another.
        monkeypatch.setattr(cute_gemm, "_prepared", cute_gemm._prepared.__wrapped__)
        weight = weight_of(0, 592, plan.columns, "cuda", (100, 300))
        for tokens in (1, 8 * plan.token_tiles - 3, 8 * plan.token_tiles):
            x = bfloat16(tokens, (tokens, plan.columns), "cuda")
            expected, budget = truth(x, weight, "bf16")
            got = product(x, weight, backend="cute")
            rounding = torch.finfo(torch.bfloat16).eps / 2 * expected.abs() + 1e-30
            assert_within_budget(got, expected, budget + rounding, "product")
            bad = x.clone()
            bad[tokens // 2, 5], bad[-1, 70] = float("nan"), float("inf")
            other = product(bad, weight, backend="cute")
            rows = torch.ones(tokens, dtype=torch.bool, device="cuda")
            rows[tokens // 2] = rows[-1] = False
            assert bool(other[~rows].isnan().all())
            assert_bitwise(other[rows], got[rows], "the other tokens")


@pytest.mark.gpu
class TestManyTokens:
    @pytest.mark.parametrize(("plan", "columns"), configurations(), ids=repr)
    def test_every_configuration(self, plan, columns, monkeypatch):
        """Rows and tokens that end within a tile; a bad token and an infinite one alone."""
        monkeypatch.setattr(cute_gemm, "choose", lambda *_: plan)
        # What was prepared for one configuration must not serve another.
        monkeypatch.setattr(cute_gemm, "_prepared", cute_gemm._prepared.__wrapped__)
        weight = weight_of(0, 592, columns, "cuda", (100, 300))
        for tokens in (1, plan.token_block - 3, 2 * plan.token_block + 5):
            x = bfloat16(tokens, (tokens, columns), "cuda")
            expected, budget = truth(x, weight, "bf16")
            got = product(x, weight, backend="cute")
            rounding = torch.finfo(torch.bfloat16).eps / 2 * expected.abs() + 1e-30
            assert_within_budget(got, expected, budget + rounding, "product")
            bad = x.clone()
            bad[tokens // 2, 5], bad[-1, 70] = float("nan"), float("inf")
            other = product(bad, weight, backend="cute")
            rows = torch.ones(tokens, dtype=torch.bool, device="cuda")
            rows[tokens // 2] = rows[-1] = False
            assert bool(other[~rows].isnan().all())
            assert_bitwise(other[rows], got[rows], "the other tokens")

    @given(
        seed=strategies.seeds(),
        tokens=st.integers(9, 700),
        shape=cut_rows(40),
        columns=st.integers(1, 9),
        activation=ACTIVATIONS,
        pad=st.integers(0, 2),
    )
    @example(seed=0, tokens=2000, shape=(1040, (700,)), columns=8, activation="nvfp4", pad=1)
    def test_within_the_budget(self, seed, tokens, shape, columns, activation, pad):
        (rows, cuts), columns = shape, 128 * columns
        weight = weight_of(seed, rows, columns, "cuda", cuts)
        x = bfloat16(seed + 1, (tokens, columns + 8 * pad), "cuda")[:, :columns]
        expected, budget = truth(x, weight, activation)
        got = product(x, weight, activation, out_dtype=torch.float32, backend="cute")
        assert_within_budget(got, expected, budget, "product")
        narrow = product(x, weight, activation, backend="cute")
        assert_bitwise(narrow, got.to(torch.bfloat16), "product in bfloat16")

    @given(seed=strategies.seeds(), tokens=st.integers(17, 300), groups=st.integers(2, 4))
    def test_groups(self, seed, tokens, groups):
        weight = weight_of(seed, 256 * groups, 384, "cuda")
        x = bfloat16(seed, (tokens, groups, 384), "cuda")
        got = product(x, weight, groups=groups, out_dtype=torch.float32, backend="cute")
        for g in range(groups):
            rows = slice(256 * g, 256 * g + 256)
            part = dataclasses.replace(weight, codes=weight.codes[rows], scales=weight.scales[rows])
            expected, budget = truth(x[:, g], part, "bf16")
            assert_within_budget(got[:, g], expected, budget, f"group {g}")

    @pytest.mark.parametrize("kind", ["largest", "subnormal", "overflow"])
    def test_extreme_values(self, kind):
        """Finite inputs whose sum passes float32's range stay infinite."""
        weight = weight_of(3, 192, 1024, "cpu")
        value = 2.0**-9 if kind == "subnormal" else 448.0
        codes = weight.codes & 0x77 if kind == "overflow" else weight.codes
        scales = encode_e4m3(torch.full((192, 64), value))
        weight = dataclasses.replace(weight, codes=codes, scales=scales).to("cuda")
        x = bfloat16(4, (100, 1024), "cuda")
        if kind == "overflow":
            x[7] = 3e38
            got = product(x, weight, out_dtype=torch.float32, backend="cute")
            assert bool(got[7].isinf().all())
            assert bool(got[:7].isfinite().all())
        else:
            expected, budget = truth(x, weight, "bf16")
            got = product(x, weight, out_dtype=torch.float32, backend="cute")
            assert_within_budget(got, expected, budget, "product")


class TestIntegration:
    @pytest.mark.parametrize("tokens", [1, 20])
    def test_a_pure_operator(self, device, tokens):
        weight = weight_of(0, 32, 128, device).with_layout(FRAGMENTS)
        x = bfloat16(0, (tokens, 128), device)
        call = dispatch.arguments(gemm, x, weight)
        assert_pure(torch.ops.dsv4.gemm, *call.args, "auto")

    def test_compiles_in_one_graph(self, device):
        weight = weight_of(0, 32, 128, device).with_layout(FRAGMENTS)
        x = bfloat16(0, (3, 128), device)
        compiled = torch.compile(lambda t: gemm(t, weight) + 1, fullgraph=True, backend="eager")
        assert_bitwise(compiled(x), gemm(x, weight) + 1, "compiled")

    @pytest.mark.gpu
    @pytest.mark.parametrize(
        ("tokens", "columns"), [(1, 448), (8, 448), (16, 448), (40, 512), (300, 512)]
    )
    def test_a_captured_graph_takes_new_data(self, tokens, columns):
        """Inputs, codes, scales and global scales may change between replays."""
        first = weight_of(0, 160, columns, "cuda", (100,)).with_layout(FRAGMENTS)
        x = bfloat16(0, (tokens, columns), "cuda")
        gemm(x, first, backend="cute")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = gemm(x, first, backend="cute")
        for seed in range(1, 9):
            other = weight_of(seed, 160, columns, "cuda", (100,)).with_layout(FRAGMENTS)
            for old, new in zip(
                (first.codes, first.scales, first.global_scale, x),
                (other.codes, other.scales, other.global_scale, bfloat16(seed, x.shape, "cuda")),
                strict=True,
            ):
                old.copy_(new)
            out.fill_(torch.nan)
            graph.replay()
            assert_bitwise(out, gemm(x, other, backend="cute"), "replay")

    @pytest.mark.gpu
    def test_two_streams_at_once(self):
        weight = weight_of(0, 2048, 7168, "cuda").with_layout(FRAGMENTS)
        inputs = [bfloat16(i, (8, 7168), "cuda") for i in range(2)]
        expected = [gemm(x, weight) for x in inputs]
        streams = [torch.cuda.Stream() for _ in inputs]
        torch.cuda.synchronize()
        for _ in range(20):
            got = []
            for stream, x in zip(streams, inputs, strict=True):
                with torch.cuda.stream(stream):
                    got.append(gemm(x, weight))
            torch.cuda.synchronize()
            for first, two in zip(got, expected, strict=True):
                assert_bitwise(first, two, "product")

    @pytest.mark.gpu
    @pytest.mark.parametrize("tokens", [3, 200])
    def test_another_gpu_than_the_current_one(self, tokens):
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")
        weight = weight_of(0, 640, 512, "cpu").with_layout(FRAGMENTS)
        x = bfloat16(0, (tokens, 512), "cpu")
        result = [gemm(x.to(d), weight.to(d), backend="cute") for d in ("cuda:0", "cuda:1")]
        assert result[1].device.index == 1
        assert_bitwise(result[0].cpu(), result[1].cpu(), "product")

    @pytest.mark.gpu
    def test_no_memory_is_touched_around_the_operands(self):
        """Canaries around X and the weight; those around the result are the sanitizer's."""
        buffer = torch.full((3, 1 << 20), 7, dtype=torch.uint8, device="cuda")
        weight = weight_of(0, 640, 448, "cuda").with_layout(FRAGMENTS)
        parts = (bfloat16(0, (8, 448), "cuda"), weight.codes, weight.scales)
        placed = []
        for line, part in zip(buffer, parts, strict=True):
            flat = part.reshape(-1).view(torch.uint8)
            line_part = line[4096 : 4096 + flat.numel()]
            line_part.copy_(flat)
            placed.append(line_part.view(part.dtype).view(part.shape))
        x, codes, scales = placed
        weight = dataclasses.replace(weight, codes=codes, scales=scales)
        before = buffer.clone()
        for tokens in range(1, 9):
            gemm(x[:tokens], weight, backend="cute")
        assert torch.equal(buffer, before)


class TestDispatch:
    def test_the_kernel_says_why_not(self):
        weight = weight_of(0, 32, 128, "cpu")
        x = bfloat16(0, (3, 128), "cpu")
        with pytest.raises(NotImplementedError, match="wanted 'fragments_16x64'"):
            gemm(x, weight, backend="cute")
        packed = weight.with_layout(FRAGMENTS)
        with pytest.raises(NotImplementedError, match=r"run on a CUDA GPU|is not installed"):
            gemm(x, packed, backend="cute")
        with pytest.raises(NotImplementedError, match="wanted bfloat16"):
            gemm(x.float(), packed, backend="cublas")

    def test_the_reference_understands_packed_weights(self):
        weight = weight_of(0, 32, 128, "cpu")
        x = bfloat16(0, (3, 128), "cpu")
        result = dispatch.explain(gemm, x, weight.with_layout(FRAGMENTS))
        assert result.chosen == "reference"
        assert_bitwise(product(x, weight), gemm(x, weight), "product")

    @pytest.mark.gpu
    def test_the_kernels_take_what_they_can(self):
        """Columns that are no multiple of 128 have a kernel for small M alone."""
        for columns, counts in (
            (128, {0: "cute", 9000: "cute"}),
            (192, {64: "cute", 65: "cublas"}),
        ):
            weight = weight_of(0, 32, columns, "cuda").with_layout(FRAGMENTS)
            for tokens, chosen in counts.items():
                x = bfloat16(0, (tokens, columns), "cuda")
                assert dispatch.explain(gemm, x, weight).chosen == chosen
