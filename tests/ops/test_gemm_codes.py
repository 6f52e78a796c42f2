"""Dense GEMMs of FP8 codes: the bits of a GEMM that rounds the same values itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4 import dispatch
from dsv4.device import is_interpreting
from dsv4.ops.gemm import gemm
from dsv4.ops.gemm_swiglu import gemm_swiglu
from dsv4.ops.quantize import dequantize, quantize
from dsv4.quant.exact_fp8 import with_row_exponent
from dsv4.quant.formats import (
    FP8_BLOCK,
    FP8_TOKEN,
    FRAGMENTS,
    LINEAR,
    MXFP4,
    NVFP4,
    QuantizedTensor,
    mxfp4_to_nvfp4,
)
from dsv4.testing import strategies
from dsv4.testing.assertions import assert_bitwise, assert_pure

KERNELS = ("triton",)
LAYOUTS = [LINEAR, FRAGMENTS]
WEIGHTS = ["linear nvfp4", "packed nvfp4", "exact nvfp4", "mxfp4", "fp8_block"]
OPCHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def weight_of(kind, seed, rows, columns, device="cpu"):
    values = strategies.normal(seed, (rows, columns))
    if kind == "fp8_block":
        return quantize(values, FP8_BLOCK).to(device)
    if kind == "mxfp4":
        return quantize(values, MXFP4).to(device)
    if kind == "exact nvfp4":
        weight, _ = mxfp4_to_nvfp4(quantize(values, MXFP4))
        return with_row_exponent(weight.with_layout(FRAGMENTS))[0].to(device)
    weight = quantize(values, NVFP4, scaling="weight")
    return weight.with_layout(LINEAR if kind == "linear nvfp4" else FRAGMENTS).to(device)


def input_of(seed, shape, device="cpu", dtype=torch.bfloat16):
    return (3 * strategies.normal(seed, shape, dtype)).to(device)


class TestBits:
    @given(
        seed=strategies.seeds(),
        kind=st.sampled_from(WEIGHTS),
        tokens=st.sampled_from([0, 1, 9, 40]),
        blocks=st.integers(1, 4),
        groups=st.integers(1, 3),
        layout=st.sampled_from(LAYOUTS),
        wide=st.booleans(),
    )
    def test_gemm(self, device, seed, kind, tokens, blocks, groups, layout, wide):
        columns = 128 * blocks if layout == FRAGMENTS else 64 * blocks
        weight = weight_of(kind, seed, 32 * groups, columns, device)
        x = input_of(seed, (tokens, groups, columns) if groups > 1 else (tokens, columns), device)
        how = {"groups": groups, "out_dtype": torch.float32 if wide else torch.bfloat16}
        codes = quantize(x, FP8_TOKEN, layout=layout)
        got = gemm(codes, weight, **how)
        # Not every implementation takes every layout of codes.
        how["backend"] = dispatch.choose(dispatch.arguments(gemm, codes, weight, **how)).name
        assert_bitwise(got, gemm(x, weight, activation="fp8", **how), "product")

    @given(
        seed=strategies.seeds(),
        kind=st.sampled_from(WEIGHTS[:4]),
        tokens=st.sampled_from([0, 1, 9, 40]),
        blocks=st.integers(1, 3),
        layout=st.sampled_from(LAYOUTS),
        limit=st.sampled_from([None, 0.5]),
    )
    def test_swiglu(self, device, seed, kind, tokens, blocks, layout, limit):
        columns = 128 * blocks if layout == FRAGMENTS else 64 * blocks
        weight = weight_of(kind, seed, 32, columns, device)
        x = input_of(seed, (tokens, columns), device)
        codes = quantize(x, FP8_TOKEN, layout=layout)
        got = gemm_swiglu(codes, weight, limit)
        name = dispatch.choose(dispatch.arguments(gemm_swiglu, codes, weight, limit)).name
        expected = gemm_swiglu(x, weight, limit, activation="fp8", backend=name)
        assert_bitwise(got, expected, "result")

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize(
        ("op", "name", "kind"),
        [
            (gemm, "cublas", "packed nvfp4"),
            (gemm, "triton", "mxfp4"),
            (gemm, "triton", "fp8_block"),
            (gemm_swiglu, "parts", "packed nvfp4"),
            (gemm_swiglu, "triton", "packed nvfp4"),
        ],
    )
    def test_each_implementation(self, device, op, name, kind, layout):
        if torch.device(device).type == "cpu" and not is_interpreting():
            pytest.skip("the reference is tested above")
        rest = () if op is gemm else (None,)
        weight, x = weight_of(kind, 1, 48, 256, device), input_of(2, (20, 256), device)
        x[3, 7] = float("nan")
        codes = quantize(x, FP8_TOKEN, layout=layout)
        got = op(codes, weight, *rest, backend=name)
        expected = op(x, weight, *rest, activation="fp8", backend=name)
        bad = torch.arange(20, device=device) == 3
        assert bool(got[bad].isnan().all())
        assert_bitwise(got[~bad], expected[~bad], name)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
    @pytest.mark.parametrize("op", [gemm, gemm_swiglu])
    def test_dtypes_of_the_reference(self, op, dtype):
        rest = () if op is gemm else (0.7,)
        weight, x = weight_of("linear nvfp4", 1, 12, 192), input_of(2, (2, 3, 192), dtype=dtype)
        got = op(quantize(x, FP8_TOKEN), weight, *rest, out_dtype=dtype)
        assert got.shape == (2, 3, 12 if op is gemm else 6)
        assert_bitwise(got, op(x, weight, *rest, activation="fp8"), "result")

    def test_float64_is_the_oracle(self):
        weight, x = weight_of("exact nvfp4", 1, 48, 256), input_of(2, (5, 256))
        codes = quantize(x, FP8_TOKEN, layout=FRAGMENTS)
        left, right = (dequantize(q, torch.float64) for q in (codes, weight))
        error = (gemm(codes, weight, out_dtype=torch.float64) - left @ right.T).abs()
        assert bool((error <= 1e-12 * (left.abs() @ right.abs().T)).all())


class TestContract:
    def test_default_dtype(self):
        codes = quantize(input_of(0, (3, 64), dtype=torch.float32), FP8_TOKEN)
        assert gemm(codes, weight_of("mxfp4", 0, 4, 64)).dtype == torch.bfloat16

    def test_what_is_not_supported(self):
        x, weight = input_of(0, (3, 64)), weight_of("mxfp4", 0, 4, 64)
        with pytest.raises(ValueError, match="x is in 'nvfp4', wanted 'fp8_token' or values"):
            gemm(quantize(x, NVFP4, scaling="token"), weight)
        codes = quantize(x, FP8_TOKEN)
        for activation in ("fp8", "nvfp4"):
            with pytest.raises(ValueError, match=f"activation is '{activation}', wanted 'bf16'"):
                gemm(codes, weight, activation=activation)
        with pytest.raises(ValueError, match="x has 64 columns, wanted 128"):
            gemm(codes, weight_of("mxfp4", 0, 4, 128))
        wrong = QuantizedTensor(codes.codes, codes.scales[:2], None, FP8_TOKEN)
        with pytest.raises(ValueError, match="scales have shape"):
            gemm(wrong, weight)
        with pytest.raises(ValueError, match=r"wanted \[\.\.\., 2, K\]"):
            gemm(codes, weight, groups=2)

    def test_a_pure_operator(self):
        codes = quantize(input_of(0, (3, 64)), FP8_TOKEN)
        for op, rest in ((gemm, ()), (gemm_swiglu, (None,))):
            call = dispatch.arguments(op, codes, weight_of("mxfp4", 0, 4, 64), *rest)
            registered = getattr(torch.ops.dsv4, call.op).default
            assert_pure(registered, *call.args, "auto")
            args = (*call.args, "auto")
            torch.library.opcheck(registered, args, test_utils=OPCHECKS)

    def test_compiles_whole(self):
        weight = weight_of("mxfp4", 0, 4, 128)

        def product(x):
            return gemm(quantize(x, FP8_TOKEN, layout=FRAGMENTS), weight)

        torch.compiler.reset()
        compiled = torch.compile(product, fullgraph=True, backend="aot_eager", dynamic=True)
        for rows in (2, 5):
            x = input_of(rows, (rows, 128))
            assert_bitwise(compiled(x), product(x), "product")
