"""RMS normalisation: budget from float64, and what a norm must keep."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from dsv4.dispatch import explain
from dsv4.ops.norm import head_norm_rope_, rms_norm, rms_norm_pair, rms_norm_quantize
from dsv4.ops.quantize import quantize
from dsv4.ops.rope import rope
from dsv4.testing import strategies
from dsv4.testing.assertions import (
    assert_bitwise,
    assert_pure,
    assert_ulp,
    assert_within_budget,
    unit_roundoff,
)

KERNELS = ("triton",)
COLUMNS = st.integers(1, 96)


@pytest.fixture
def large_m_paths(monkeypatch):
    """A few rows take the way of many: some share a program, some have several blocks a thread."""
    pytest.importorskip("triton")
    from dsv4.triton import norm
    from dsv4.triton._lib import row_tiles

    monkeypatch.setattr(row_tiles, "_MANY_ROWS", 4)
    monkeypatch.setattr(norm, "_FEW_ROWS", 4)


def oracle(x, weight, eps):
    """Written out in float64, independently of the operator."""
    wide = x.double()
    mean = sum(wide[..., i] ** 2 for i in range(wide.shape[-1])) / wide.shape[-1]
    out = wide / torch.sqrt(mean + eps)[..., None]
    return out if weight is None else out * weight.double()


def budget(truth, columns, dtype):
    """Relative: the sum of D squares (D roundings, halved by the root), and six more operations.

    ``rsqrt`` is allowed 2 ulp. Then one rounding to the dtype, or half its smallest subnormal.
    """
    relative = 1.01 * (columns / 2 + 6) * unit_roundoff(torch.float32)
    relative += 1.01 * unit_roundoff(dtype)
    smallest = torch.finfo(dtype).smallest_normal * unit_roundoff(dtype)
    return truth.abs() * relative + smallest + 2.0**-126


class TestValues:
    @given(
        draw=strategies.finite_draws(-12, 12),
        shape=strategies.shapes(COLUMNS),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        weighted=st.booleans(),
        eps=st.sampled_from([1e-6, 1e-5, 1.0]),
    )
    @example(strategies.Draw(0, 0, "zero"), (2, 16), torch.float32, True, 1e-6)
    @example(strategies.Draw(0, 0, "denormal"), (2, 16), torch.float32, False, 1e-6)
    def test_within_the_budget(self, device, draw, shape, dtype, weighted, eps):
        assume(draw.special != "huge")  # its square overflows float32
        x = draw.build(shape, dtype, device)
        assume(bool(torch.isfinite(x).all()))
        weight = strategies.normal(draw.seed, shape[-1:], dtype).to(device) if weighted else None
        got = rms_norm(x, weight, eps)
        assert got.dtype == dtype
        assert got.is_contiguous()
        truth = oracle(x, weight, eps) if x.numel() else x.double()
        assert_within_budget(got, truth, budget(truth, shape[-1], dtype), "norm")

    @given(draw=strategies.finite_draws(-12, 12), shape=strategies.shapes(COLUMNS))
    def test_float64_is_the_oracle(self, device, draw, shape):
        assume(draw.special != "huge")
        x = draw.build(shape, torch.float64, device)
        got = rms_norm(x)
        truth = oracle(x, None, 1e-6) if x.numel() else x
        allowed = truth.abs() * (shape[-1] + 8) * 2.0**-53 + 2.0**-1000
        assert_within_budget(got, truth, allowed, "norm")

    @given(draw=strategies.draws(-6, 6, ["none"]), columns=st.integers(1, 96))
    def test_the_result_has_mean_square_one(self, device, wide, draw, columns):
        x = draw.build((5, columns), wide, device)
        mean = x.double().square().mean(-1)
        got = rms_norm(x, None, 1e-6).double().square().mean(-1)
        # A square is off by twice what its root is, the means here by their own sums.
        allowed = 2.02 * (columns / 2 + 7) * unit_roundoff(wide) + 4 * columns * 2.0**-53
        assert_within_budget(got, mean / (mean + 1e-6), allowed, "mean square")

    @given(draw=strategies.finite_draws(-6, 6), columns=st.integers(1, 96))
    def test_sign_symmetry(self, device, draw, columns):
        x = draw.build((4, columns), torch.float32, device)
        assert_bitwise(rms_norm(-x), -rms_norm(x), "norm")

    @given(seed=strategies.seeds(), exponent=st.integers(-8, 30), columns=st.integers(1, 96))
    def test_scaling_by_powers_of_two_needs_eps_scaled_with_the_square(
        self, device, seed, exponent, columns
    ):
        """x -> 2^e x with eps -> 4^e eps changes nothing; with the same eps only near zero."""
        x = strategies.normal(seed, (4, columns)).to(device)
        eps = 2.0**-20
        got = rms_norm(x * 2.0**exponent, None, eps * 4.0**exponent)
        assert_ulp(got, rms_norm(x, None, eps), 2, "norm")

    @given(seed=strategies.seeds(), exponent=st.integers(-10, 10))
    def test_the_weight_multiplies(self, device, seed, exponent):
        """Powers of two as weights: bitwise, so the weight is applied once and after the norm."""
        x = strategies.normal(seed, (4, 32)).to(device)
        weight = torch.full((32,), 2.0**exponent, device=device)
        assert_bitwise(rms_norm(x, weight), rms_norm(x) * 2.0**exponent, "norm")

    @given(seed=strategies.seeds(), rows=st.integers(1, 9))
    def test_rows_are_independent(self, device, seed, rows):
        x = strategies.normal(seed, (rows, 48)).to(device)
        weight = strategies.normal(seed + 1, (48,)).to(device)
        order = torch.randperm(rows, generator=strategies.generator(seed)).to(device)
        assert_bitwise(rms_norm(x[order], weight), rms_norm(x, weight)[order], "norm")

    @given(
        seed=strategies.seeds(),
        kind=st.sampled_from([float("nan"), float("inf"), -float("inf")]),
        weighted=st.booleans(),
    )
    def test_a_nan_row_is_alone(self, device, seed, kind, weighted):
        x = strategies.normal(seed, (5, 32)).to(device)
        weight = strategies.normal(seed, (32,)).to(device) if weighted else None
        poisoned = x.clone()
        poisoned[3, seed % 32] = kind
        got, expected = rms_norm(poisoned, weight), rms_norm(x, weight)
        assert got[3].isnan().all()
        rest = [0, 1, 2, 4]
        assert_bitwise(got[rest], expected[rest], "other rows")

    @pytest.mark.parametrize("columns", [1024, 1536, 4096, 7168])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_every_warp_of_a_wide_row_has_the_whole_sum(self, device, columns, dtype):
        """Warps tell one another their sums: of one number each, in turn, and of a NaN."""
        x = torch.zeros((8, columns), dtype=dtype)
        positions = torch.arange(8) * (columns // 8) + 3
        x[torch.arange(8), positions] = 2.0 ** torch.arange(8).to(dtype)
        x[5, positions[5]] = float("nan")
        weight = strategies.normal(1, (columns,), dtype)
        got = rms_norm(x.to(device), weight.to(device)).cpu()
        assert got[5].isnan().all()
        rest = [0, 1, 2, 3, 4, 6, 7]
        truth = oracle(x[rest], weight, 1e-6)
        assert_within_budget(got[rest], truth, budget(truth, columns, dtype), "norm")

    @pytest.mark.parametrize("shape", [(1, 7168), (2, 16384), (3, 1536), (1, 257), (11, 24)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_long_rows_and_many(self, device, large_m_paths, shape, dtype):
        """More than a warp to a row, more than a row to a program, and a last one that is alone."""
        x = strategies.normal(0, shape, dtype).to(device)
        weight = strategies.normal(1, shape[-1:], dtype).to(device)
        truth = oracle(x, weight, 1e-6)
        got = rms_norm(x, weight)
        assert_within_budget(got, truth, budget(truth, shape[-1], dtype), "norm")
        assert_bitwise(rms_norm(x, weight), got, "again")

    def test_a_row_whose_mean_square_overflows_is_nan(self, device):
        """The result is NaN, not zeros, which would look like a result."""
        x = torch.ones(2, 16, device=device)
        x[1, 3] = 1e20
        got = rms_norm(x)
        assert got[1].isnan().all()
        assert got[0].isfinite().all()

    def test_zeros_stay_zero(self, device):
        x = torch.zeros(3, 16, device=device)
        assert_bitwise(rms_norm(x), x, "norm")

    def test_per_head_statistics_are_per_head(self, device, wide):
        """Heads of different size each have mean square one: the mean is over the last axis."""
        x = torch.ones(2, 3, 8, dtype=wide, device=device)
        x[:, 1] *= 100
        got = rms_norm(x, None, 1e-12)
        allowed = 1e-12 + 1.01 * (8 / 2 + 7) * unit_roundoff(wide)
        assert_within_budget(got, torch.ones_like(x), allowed, "norm")


class TestContract:
    @given(draw=strategies.draws(-6, 6), shape=strategies.shapes(st.integers(2, 40)))
    def test_strided_input(self, device, draw, shape):
        x = draw.build(shape, torch.float32, device)
        got = rms_norm(strategies.strided(x))
        assert got.is_contiguous()
        assert_ulp(got, rms_norm(x), 4, "norm")

    @pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16), (0,)])
    def test_empty(self, device, shape):
        x = torch.empty(shape, device=device)
        assert rms_norm(x, torch.empty(shape[-1:], device=device)).shape == shape

    def test_a_row_too_long_for_a_program_is_left_to_the_reference(self, device):
        x = torch.ones(1, 65537, device=device)
        assert explain(rms_norm, x).chosen == "reference"

    BAD = (
        ({"x": torch.ones(2, 4).int()}, TypeError, "x has dtype int32"),
        ({"weight": torch.ones(4).int()}, TypeError, "weight has dtype int32"),
        ({"weight": torch.ones(5)}, ValueError, r"weight has shape \[5\], wanted \[4\]"),
        ({"weight": torch.ones(1, 4)}, ValueError, r"weight has shape \[1, 4\]"),
        ({"weight": torch.ones(4, device="meta")}, ValueError, "different devices"),
        ({"backend": "absent"}, ValueError, "backend is 'absent'"),
    )

    @pytest.mark.parametrize(("changes", "error", "words"), BAD)
    def test_wrong_arguments_are_named(self, changes, error, words):
        arguments = {"x": torch.ones(2, 4), **changes}
        with pytest.raises(error, match=words):
            rms_norm(arguments.pop("x"), **arguments)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("weighted", [False, True])
    def test_opcheck(self, device, dtype, weighted):
        x = strategies.normal(0, (3, 16), dtype).to(device)
        weight = strategies.normal(1, (16,), dtype).to(device) if weighted else None
        args = (x, weight, 1e-6, "auto")
        torch.library.opcheck(torch.ops.dsv4.rms_norm.default, args)
        assert_pure(torch.ops.dsv4.rms_norm.default, *args)

    @pytest.mark.parametrize("dynamic", [False, True])
    def test_compiles_whole(self, device, dynamic):
        weight = strategies.normal(1, (16,)).to(device)

        def norm(x):
            return rms_norm(x, weight) + rms_norm(x)

        torch.compiler.reset()
        compiled = torch.compile(norm, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for rows in (2, 5, 0):
            x = strategies.normal(rows, (rows, 16)).to(device)
            assert_bitwise(compiled(x), norm(x), "norm")


HEADS = st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(1, 12), st.integers(0, 4))


def angles(seed, tokens, half, device):
    turn = strategies.normal(seed, (tokens, half)) * 10
    return turn.cos().to(device), turn.sin().to(device)


def rotated_heads(q, cos, sin):
    """The heads in float64, and how far off they may be."""
    columns, unrotated, dtype = q.shape[-1], q.shape[-1] - 2 * cos.shape[-1], q.dtype
    normed = oracle(q, None, 1e-6) if q.numel() else q.double()
    error = budget(normed, columns, dtype)
    cos, sin = cos[:, None].double(), sin[:, None].double()
    truth = rope(normed, cos, sin)
    pairs = error[..., unrotated:].unflatten(-1, (-1, 2))
    rotated = pairs * cos.abs()[..., None] + pairs.flip(-1) * sin.abs()[..., None]
    rotated = rotated.flatten(-2) + 3 * unit_roundoff(torch.float32) * normed.abs().amax(-1, True)
    allowed = torch.cat((error[..., :unrotated], rotated), -1)
    return truth, allowed + 1.01 * unit_roundoff(dtype) * truth.abs() + 2.0**-126


class TestPair:
    @given(
        seed=strategies.seeds(),
        rows=st.integers(0, 4),
        first=COLUMNS,
        second=COLUMNS,
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    )
    def test_is_two_norms(self, device, seed, rows, first, second, dtype):
        x = strategies.normal(seed, (rows, first + second), dtype).to(device)
        weights = [
            strategies.normal(seed + i, (n,), dtype).to(device)
            for i, n in enumerate((first, second))
        ]
        parts = x.split((first, second), -1)
        for got, part, weight in zip(rms_norm_pair(x, *weights, 1e-6), parts, weights, strict=True):
            assert got.is_contiguous()
            truth = oracle(part, weight, 1e-6) if part.numel() else part.double()
            assert_within_budget(got, truth, budget(truth, part.shape[-1], dtype), "norm")

    def test_many_rows(self, device, large_m_paths):
        x = strategies.normal(0, (11, 40)).to(device)
        first, second = torch.ones(24, device=device), torch.ones(16, device=device)
        parts = rms_norm(x[:, :24], first), rms_norm(x[:, 24:], second)
        for got, expected in zip(rms_norm_pair(x, first, second), parts, strict=True):
            assert_ulp(got, expected, 4, "norm")

    @given(seed=strategies.seeds(), kind=st.sampled_from([float("nan"), float("inf")]))
    def test_a_nan_stays_in_its_part_of_its_row(self, device, seed, kind):
        x = strategies.normal(seed, (3, 40)).to(device)
        first, second = torch.ones(24, device=device), torch.ones(16, device=device)
        clean = rms_norm_pair(x, first, second)
        x[1, seed % 24] = kind
        got = rms_norm_pair(x, first, second)
        assert got[0][1].isnan().all()
        assert_bitwise(got[0][[0, 2]], clean[0][[0, 2]], "first")
        assert_bitwise(got[1], clean[1], "second")

    def test_strided(self, device):
        x = strategies.normal(0, (5, 40)).to(device)
        weights = torch.ones(24, device=device), torch.ones(16, device=device)
        for got, expected in zip(
            rms_norm_pair(strategies.strided(x), *weights), rms_norm_pair(x, *weights), strict=True
        ):
            assert_ulp(got, expected, 4, "norm")

    def test_wrong_arguments_are_named(self):
        x, weight = torch.ones(2, 8), torch.ones(4)
        with pytest.raises(ValueError, match=r"x has 8 columns, wanted 4 \+ 3"):
            rms_norm_pair(x, weight, torch.ones(3))
        with pytest.raises(TypeError, match="second_weight has dtype int64"):
            rms_norm_pair(x, weight, torch.ones(4).long())


class TestHeads:
    @given(
        seed=strategies.seeds(),
        sizes=HEADS,
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        gaps=st.booleans(),
    )
    @example(0, (2, 2, 8, 0), torch.bfloat16, False)
    @example(0, (1, 3, 4, 1), torch.bfloat16, False)
    def test_is_the_norm_then_the_rotation(self, device, seed, sizes, dtype, gaps):
        """Compare with float64; the norm's error, one rounding of it included, rotates along.

        Also with an odd number of columns before the pairs.
        """
        tokens, heads, half, unrotated = sizes
        columns = 2 * half + unrotated
        q = strategies.normal(seed, (tokens, heads, columns), dtype).to(device)
        if gaps:
            q = torch.cat((q, q), -1)[..., :columns]
        cos, sin = angles(seed, tokens, half, device)
        truth, allowed = rotated_heads(q, cos, sin)
        head_norm_rope_(q, cos, sin, 1e-6)
        assert_within_budget(q, truth, allowed, "q")

    @pytest.mark.parametrize("sizes", [(5, 1, 32, 448), (67, 1, 2, 3)])
    def test_many_heads(self, device, large_m_paths, sizes):
        """Several to a program, the last one alone."""
        tokens, heads, half, unrotated = sizes
        q = strategies.normal(0, (tokens, heads, 2 * half + unrotated), torch.bfloat16).to(device)
        cos, sin = angles(0, tokens, half, device)
        truth, allowed = rotated_heads(q, cos, sin)
        head_norm_rope_(q, cos, sin, 1e-6)
        assert_within_budget(q, truth, allowed, "q")

    @given(seed=strategies.seeds(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
    def test_columns_that_are_not_turned_are_those_of_the_norm(self, device, seed, dtype):
        """Whatever the angles, bit for bit, signs of zeros too; and all columns where they are 0.

        Two kernels may add up a row in two orders, which shows in float32: there the norm is that
        of float64, within the budget of any order.
        """
        q = strategies.normal(seed, (3, 2, 16), dtype)
        q[:, :, ::3] = -0.0
        q = q.to(device)
        cos, sin = angles(seed, 3, 4, device)
        still, rotated = q.clone(), q.clone()
        head_norm_rope_(rotated, cos, sin)
        head_norm_rope_(still, torch.ones_like(cos), torch.zeros_like(sin))
        assert_bitwise(rotated[..., :8], still[..., :8], "the first columns")
        assert bool((q == 0).logical_or(still != 0).all())
        assert_bitwise(still[..., :8].signbit(), q[..., :8].signbit(), "signs")
        truth = oracle(q, None, 1e-6)
        assert_within_budget(still, truth, budget(truth, 16, dtype), "no turn")
        if dtype == torch.bfloat16:
            assert_ulp(still, rms_norm(q), 0, "no turn")

    @given(seed=strategies.seeds(), kind=st.sampled_from([float("nan"), float("inf")]))
    def test_a_nan_head_is_alone(self, device, seed, kind):
        q = strategies.normal(seed, (2, 3, 16)).to(device)
        cos, sin = angles(seed, 2, 4, device)
        clean, poisoned = q.clone(), q.clone()
        poisoned[1, 2, seed % 16] = kind
        head_norm_rope_(clean, cos, sin)
        head_norm_rope_(poisoned, cos, sin)
        assert poisoned[1, 2].isnan().all()
        poisoned[1, 2] = clean[1, 2]
        assert_bitwise(poisoned, clean, "the other heads")

    def test_nothing_beside_the_heads_is_written(self, device):
        """Pitfall 17, and a view: what lies between the heads of a view stays as it was."""
        base = strategies.normal(0, (2, 3, 24)).to(device)
        before = base.clone()
        cos, sin = angles(0, 2, 4, device)
        head_norm_rope_(base[:, 1:, 4:20], cos, sin)
        changed = base != before
        assert changed[:, 1:, 4:20].all()
        changed[:, 1:, 4:20] = False
        assert not changed.any()

    def test_wrong_arguments_are_named(self):
        q, table = torch.ones(2, 3, 8), torch.ones(2, 4)
        with pytest.raises(ValueError, match="cos has 5 columns, wanted at most 4"):
            head_norm_rope_(q, torch.ones(2, 5), torch.ones(2, 5))
        with pytest.raises(ValueError, match=r"cos has shape \[3, 4\], wanted \[2, any\]"):
            head_norm_rope_(q, torch.ones(3, 4), torch.ones(3, 4))
        with pytest.raises(ValueError, match="wanted 1 along the heads"):
            head_norm_rope_(torch.ones(2, 8, 3).transpose(1, 2), table, table)

    def test_a_number_is_no_row(self):
        scalar, weight = torch.tensor(1.0), torch.ones(1)
        with pytest.raises(ValueError, match=r"rms_norm: x has shape \[\], wanted \[\.\.\., D\]"):
            rms_norm(scalar)
        with pytest.raises(ValueError, match=r"rms_norm_pair: x has shape \[\], wanted"):
            rms_norm_pair(scalar, weight, weight)

    @given(q=strategies.overlapping(torch.empty(2, 3, 8)))
    @example(q=torch.zeros(1, 3, 8).expand(2, 3, 8))
    def test_heads_that_overlap_are_refused(self, q):
        with pytest.raises(ValueError, match=r"head_norm_rope_: q has shape .* overlap itself"):
            head_norm_rope_(q, torch.ones(2, 4), torch.ones(2, 4))
        assert not q.any()


def assert_norm_and_codes(x, weight, **arguments):
    y, got = rms_norm_quantize(x, weight, **arguments)
    truth = oracle(x, weight, 1e-6) if x.numel() else x.double()
    truth[~x.isfinite().all(-1)] = torch.nan
    assert_within_budget(y, truth, budget(truth, x.shape[-1], x.dtype), "norm")
    expected = quantize(y, "nvfp4", **{"scaling": "token", **arguments}, backend="reference")
    assert_bitwise(got.codes, expected.codes, "codes")
    assert_bitwise(got.scales.view(torch.uint8), expected.scales.view(torch.uint8), "scales")
    assert_bitwise(got.global_scale, expected.global_scale, "global scale")


class TestQuantized:
    @given(
        seed=strategies.seeds(),
        rows=st.integers(0, 4),
        blocks=st.sampled_from([1, 2, 3, 5, 8, 9, 34, 64]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        layout=st.sampled_from(["linear", "swizzled_128x4"]),
        static=st.sampled_from([None, "one", "rows"]),
        kind=st.sampled_from([0.0, 1.0, float("nan"), float("inf")]),
        part=st.sampled_from([16, 128]),
    )
    def test_is_the_norm_and_its_quantisation(
        self, device, monkeypatch, seed, rows, blocks, dtype, layout, static, kind, part
    ):
        """Codes and scales, padding too, bit for bit those of the norm that is returned.

        Also with rows that several programs share.
        """
        monkeypatch.setattr("dsv4.triton._lib.nvfp4_tile._SHARE_BLOCKS", part)
        x = strategies.normal(seed, (rows, 16 * blocks), dtype).to(device)
        if rows and kind != 1.0:
            x[seed % rows, seed % (16 * blocks)] = kind
        weight = strategies.normal(seed + 1, (16 * blocks,), dtype).to(device)
        scale = None
        if static is not None:
            count = rows if static == "rows" else 1
            scale = strategies.normal(seed, (count,)).abs().to(device) * 0.01 + 1e-3
        arguments = {"scaling": "token" if scale is None else "static", "global_scale": scale}
        assert_norm_and_codes(x, weight, layout=layout, **arguments)

    @pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
    @pytest.mark.parametrize("shape", [(2, 8208), (3, 2064)])
    def test_long_rows_and_many(self, device, large_m_paths, shape, layout):
        """Several blocks to a thread, the last ones past the row; a NaN among them."""
        x = strategies.normal(0, shape, torch.bfloat16).to(device)
        x[1, shape[1] - 3] = torch.nan
        weight = strategies.normal(1, shape[1:], torch.bfloat16).to(device)
        assert_norm_and_codes(x, weight, layout=layout)
        scale = torch.tensor([2.0**-110], device=device)  # so small that quotients are shifted
        assert_norm_and_codes(x[:2], weight, layout=layout, scaling="static", global_scale=scale)

    def test_wrong_arguments_are_named(self):
        x, weight = torch.ones(2, 32), torch.ones(32)
        with pytest.raises(ValueError, match="x has 24 columns, wanted a positive multiple of 16"):
            rms_norm_quantize(x[:, :24], weight[:24])
        with pytest.raises(ValueError, match="scaling is 'weight', wanted one of"):
            rms_norm_quantize(x, weight, scaling="weight")
        with pytest.raises(ValueError, match="global_scale is None, wanted one"):
            rms_norm_quantize(x, weight, scaling="static")


FUSED = {
    "rms_norm_pair": lambda t: (t(0, 3, 40), t(1, 24), t(2, 16), 1e-6, "auto"),
    "head_norm_rope_": lambda t: (t(0, 2, 3, 16), t(1, 2, 4), t(2, 2, 4), 1e-6, "auto"),
    "rms_norm_quantize": lambda t: (t(0, 3, 32), t(1, 32), None, 1e-6, "token", "linear", "auto"),
}


class TestFusedContract:
    @pytest.mark.parametrize("op", FUSED)
    def test_opcheck(self, device, op):
        args = FUSED[op](lambda seed, *shape: strategies.normal(seed, shape).to(device))
        overload = getattr(torch.ops.dsv4, op).default
        torch.library.opcheck(overload, args)
        if not op.endswith("_"):
            assert_pure(overload, *args)

    def test_compiles_whole(self, device):
        weight = strategies.normal(1, (32,)).to(device)
        cos, sin = angles(0, 3, 4, device)

        def chain(x):
            first, second = rms_norm_pair(x, weight[:16], weight[16:])
            q = torch.cat((first, second), -1).view(-1, 2, 16)
            head_norm_rope_(q, cos, sin)
            y, packed = rms_norm_quantize(q.flatten(1), weight)
            return y, packed.codes, packed.global_scale

        torch.compiler.reset()
        compiled = torch.compile(chain, fullgraph=True, backend="aot_eager")
        x = strategies.normal(0, (3, 32)).to(device)
        for got, expected in zip(compiled(x), chain(x), strict=True):
            assert_bitwise(got, expected, "chain")

    @pytest.mark.gpu
    def test_a_captured_graph_follows_its_inputs(self):
        weight = strategies.normal(1, (4096,)).bfloat16().cuda()
        cos, sin = angles(0, 4, 32, "cuda")
        x = torch.zeros(4, 4096, device="cuda", dtype=torch.bfloat16)

        def chain():
            q = x.view(4, 8, 512).clone()
            head_norm_rope_(q, cos, sin)
            y, packed = rms_norm_quantize(x, weight)
            return (
                q,
                y,
                packed.codes,
                packed.global_scale,
                *rms_norm_pair(x, weight[:96], weight[96:]),
            )

        chain()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain()
        for seed in range(5):
            x.copy_(strategies.normal(seed, (4, 4096)))
            for tensor in out:
                tensor.view(torch.uint8).fill_(0xA5)
            graph.replay()
            for got, expected in zip(out, chain(), strict=True):
                assert_bitwise(got, expected, "replay")
