"""Choice of the GEMMs by FP8 tensor cores, and why others do not get them."""

from __future__ import annotations

import pytest
import torch

from dsv4 import device as machine
from dsv4 import dispatch
from dsv4.cute.fp8_supports import FEW_ROWS, FEW_TOKENS
from dsv4.ops.gemm import gemm
from dsv4.ops.gemm_swiglu import gemm_swiglu
from dsv4.ops.grouped_gemm import grouped_gemm
from dsv4.ops.grouped_gemm_swiglu import grouped_gemm_swiglu
from dsv4.ops.grouped_gemm_swiglu_fp8 import grouped_gemm_swiglu_fp8
from dsv4.ops.quantize import quantize
from dsv4.quant.exact_fp8 import with_row_exponent
from dsv4.quant.formats import FP8_BLOCK, FRAGMENTS, LINEAR, NVFP4, QuantizedTensor

DENSE, ROUTED = (gemm, gemm_swiglu), (grouped_gemm, grouped_gemm_swiglu, grouped_gemm_swiglu_fp8)


@pytest.fixture(autouse=True)
def packages():
    """Every package is installed, and a GPU is what a test says."""
    with machine.pretend(packages=True):
        machine.MACHINE.pretend(capability=(9, 0))
        yield


def exact(*shape, layout=FRAGMENTS, scale=1.0):
    """A weight of ones whose scales are ``scale``, exact in E4M3 if that is a power of two."""
    codes = torch.full((*shape[:-1], shape[-1] // 2), 0x22, dtype=torch.uint8)
    scales = torch.full((*shape[:-1], shape[-1] // 16), scale).to(torch.float8_e4m3fn)
    weight = QuantizedTensor(codes, scales, torch.ones(*shape[:-2], 1), NVFP4)
    return with_row_exponent(weight.with_layout(layout))[0]


def call_of(op, weight, tokens=FEW_TOKENS, activation="fp8", **how):
    x = torch.ones((tokens, *([how["groups"]] if "groups" in how else []), weight.columns))
    rest = () if op is gemm else (None,)
    arguments = dispatch.arguments(op, x.bfloat16(), weight, *rest, activation=activation, **how)
    return dispatch.Call(arguments.op, arguments.args, torch.device("cuda", 0))


def call_of_experts(op, weight, rows=2 * FEW_ROWS, layout=None, **how):
    """Rows that are codes in ``layout``, or bfloat16 if that is None."""
    x = torch.ones(rows, weight.columns).bfloat16()
    rest = () if op is grouped_gemm else (None,)
    how = {"activation": "fp8"} | how
    if layout is not None:
        x, how["activation"] = quantize(x, "fp8_token", layout=layout), "bf16"
    if op is grouped_gemm_swiglu_fp8:
        how.setdefault("result_layout", FRAGMENTS)
    offsets = torch.tensor([0, rows // 2, rows], dtype=torch.int32)
    arguments = dispatch.arguments(op, x, weight, offsets, *rest, **how)
    return dispatch.Call(arguments.op, arguments.args, torch.device("cuda", 0))


def reason(call, requested="fp8"):
    """Why the row ``"fp8"`` does not run a call, or None."""
    row = next(row for row in dispatch.implementations(call.op) if row.name == "fp8")
    return row.unsupported_reason(call, requested)


@pytest.mark.parametrize("op", DENSE, ids=lambda op: op.__name__)
def test_auto_takes_it_for_many_tokens(op):
    assert dispatch.choose(call_of(op, exact(256, 256))).name == "fp8"
    few = call_of(op, exact(256, 256), tokens=FEW_TOKENS - 1)
    assert dispatch.choose(few).name == "cute"
    assert f"from {FEW_TOKENS} on" in reason(few, "auto")
    assert reason(few) is None


@pytest.mark.parametrize("layout", [None, FRAGMENTS])
@pytest.mark.parametrize("op", ROUTED, ids=lambda op: op.__name__)
def test_auto_takes_it_for_many_rows_of_experts(op, layout):
    weight = exact(2, 256, 256)
    assert dispatch.choose(call_of_experts(op, weight, layout=layout)).name == "fp8"
    few = call_of_experts(op, weight, rows=2 * FEW_ROWS - 2, layout=layout)
    assert "of 2 experts" in reason(few, "auto")
    assert reason(few) is None


def test_auto_takes_it_for_fp8_weights():
    weight = quantize(torch.randn(384, 256), FP8_BLOCK)
    assert dispatch.choose(call_of(gemm, weight)).name == "fp8"


@pytest.mark.parametrize(
    ("weight", "how", "said"),
    [
        (exact(256, 256, scale=1.125), {}, "the weight is not exact in FP8"),
        (exact(256, 256), {"activation": "bf16"}, "activation is 'bf16', wanted 'fp8'"),
        (exact(256, 256, layout=LINEAR), {}, "layout"),
        (exact(256, 192), {}, "a group is 256 x 192, wanted columns by 128"),
        (exact(192, 256), {"groups": 2}, "a group is 96 x 256, wanted columns by 128"),
        (exact(256, 256), {"out_dtype": torch.float16}, "torch.float16"),
    ],
)
def test_gemms_it_cannot_run(weight, how, said):
    assert said in reason(call_of(gemm, weight, **how))


def test_other_gpus_and_cpus():
    call = call_of(gemm, exact(256, 256))
    assert reason(dispatch.Call(call.op, call.args, torch.device("cpu"))) is not None
    machine.MACHINE.pretend(capability=(10, 0))
    assert "10.0" in reason(call)


@pytest.mark.parametrize(
    ("op", "weight", "how", "said"),
    [
        (grouped_gemm, exact(2, 256, 256, scale=1.125), {}, "the weight is not exact in FP8"),
        (grouped_gemm, exact(2, 256, 256), {"activation": "bf16"}, "activation is 'bf16'"),
        (grouped_gemm, exact(2, 256, 256), {"layout": LINEAR}, "linear, wanted FP8 in"),
        (
            grouped_gemm_swiglu_fp8,
            exact(2, 256, 256),
            {"result_layout": LINEAR},
            "columns of the result are linear",
        ),
    ],
)
def test_experts_it_cannot_multiply(op, weight, how, said):
    assert said in reason(call_of_experts(op, weight, **how))
