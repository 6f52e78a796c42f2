"""RMS normalisation: budget from float64, and what a norm must keep."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from dsv4.ops.norm import rms_norm
from dsv4.testing import strategies
from dsv4.testing.assertions import (
    assert_bitwise,
    assert_pure,
    assert_ulp,
    assert_within_budget,
    unit_roundoff,
)

KERNELS = ("triton",)
OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
COLUMNS = st.integers(1, 96)


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
    def test_the_result_has_mean_square_one(self, device, draw, columns):
        x = draw.build((5, columns), torch.float64, device)
        mean = x.square().mean(-1)
        got = rms_norm(x, None, 1e-6).square().mean(-1)
        assert_within_budget(got, mean / (mean + 1e-6), 1e-12, "mean square")

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
        got, want = rms_norm(poisoned, weight), rms_norm(x, weight)
        assert got[3].isnan().all()
        rest = [0, 1, 2, 4]
        assert_bitwise(got[rest], want[rest], "other rows")

    def test_a_row_whose_mean_square_overflows_is_nan(self, device):
        """Not zeros, which would look like a result."""
        x = torch.ones(2, 16, device=device)
        x[1, 3] = 1e20
        got = rms_norm(x)
        assert got[1].isnan().all()
        assert got[0].isfinite().all()

    def test_zeros_stay_zero(self, device):
        x = torch.zeros(3, 16, device=device)
        assert_bitwise(rms_norm(x), x, "norm")

    def test_per_head_statistics_are_per_head(self, device):
        """Heads of different size each have mean square one: the mean is over the last axis."""
        x = torch.ones(2, 3, 8, dtype=torch.float64, device=device)
        x[:, 1] *= 100
        got = rms_norm(x, None, 1e-12)
        assert_within_budget(got, torch.ones_like(x), 1e-9, "norm")


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
        torch.library.opcheck(torch.ops.dsv4.rms_norm.default, args, test_utils=OPCHECKS)
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
