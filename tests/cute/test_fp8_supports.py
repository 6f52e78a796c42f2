"""Choice of the GEMMs on FP8 tensor cores, and the reasons against them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4 import device as machine
from dsv4 import dispatch
from dsv4.cute import e4m3_costs
from dsv4.cute.sm90.e4m3_converted_plan import (
    ConvertedE4m3Plan,
    GroupedConvertedE4m3Plan,
    converted_plans,
)
from dsv4.cute.sm90.gemm_e4m3_plan import e4m3_plans
from dsv4.ops.gemm import gemm
from dsv4.ops.gemm_swiglu import gemm_swiglu
from dsv4.ops.grouped_gemm import grouped_gemm
from dsv4.ops.grouped_gemm_swiglu import grouped_gemm_swiglu
from dsv4.ops.grouped_gemm_swiglu_fp8 import grouped_gemm_swiglu_fp8
from dsv4.ops.quantize import empty_fp8_token
from dsv4.quant.exact_fp8 import MOST_CONVERTED, with_row_exponent
from dsv4.quant.formats import FP8_BLOCK, FP8_TOKEN, FRAGMENTS, LINEAR, NVFP4, QuantizedTensor

DENSE, ROUTED = (gemm, gemm_swiglu), (grouped_gemm, grouped_gemm_swiglu, grouped_gemm_swiglu_fp8)


@pytest.fixture(autouse=True)
def packages():
    """Every package counts as installed, and a test names the GPU."""
    with machine.pretend(packages=True):
        machine.MACHINE.pretend(capability=(9, 0))
        yield


def exact(*shape, layout=FRAGMENTS, scale=1.0):
    """A weight of ones whose scales are ``scale``, exact in E4M3 if that is a power of two."""
    codes = torch.full((*shape[:-1], shape[-1] // 2), 0x22, dtype=torch.uint8)
    scales = torch.full((*shape[:-1], shape[-1] // 16), scale).to(torch.float8_e4m3fn)
    weight = QuantizedTensor(codes, scales, torch.ones(*shape[:-2], 1), NVFP4)
    return with_row_exponent(weight.with_layout(layout))[0]


def sizes_of(*shape, weight_format=NVFP4):
    """A weight of these sizes; its memory is never read or written."""
    if weight_format == FP8_BLOCK:
        codes = torch.empty(shape, dtype=torch.float8_e4m3fn)
        return QuantizedTensor(codes, torch.empty(*(n // 128 for n in shape)), None, FP8_BLOCK)
    codes = torch.empty(*shape[:-1], shape[-1] // 2, dtype=torch.uint8)
    scales = torch.empty(*shape[:-1], shape[-1] // 16, dtype=torch.uint8)
    exponent = torch.empty(shape[:-1], dtype=torch.int8)
    scale = torch.empty(*shape[:-2], 1)
    return QuantizedTensor(codes, scales, scale, NVFP4, FRAGMENTS, row_exponent=exponent)


def call_of(op, weight, tokens=192, activation="fp8", layout=None, **how):
    """An input of codes in ``layout``, or of bfloat16 if that is None."""
    shape = (tokens, *([how["groups"]] if "groups" in how else []), weight.columns)
    x = torch.empty(shape, dtype=torch.bfloat16)
    if layout is not None:
        codes, scales = empty_fp8_token(x, shape)
        x, activation = QuantizedTensor(codes, scales, None, FP8_TOKEN, layout), "bf16"
    rest = () if op is gemm else (None,)
    arguments = dispatch.arguments(op, x, weight, *rest, activation=activation, **how)
    return dispatch.Call(arguments.op, arguments.args, torch.device("cuda", 0))


def call_of_experts(op, weight, rows=256, layout=None, **how):
    """Rows that are codes in ``layout``, or bfloat16 if that is None."""
    x = torch.empty(rows, weight.columns, dtype=torch.bfloat16)
    rest = () if op is grouped_gemm else (None,)
    how = {"activation": "fp8"} | how
    if layout is not None:
        codes, scales = empty_fp8_token(x, x.shape)
        x, how["activation"] = QuantizedTensor(codes, scales, None, FP8_TOKEN, layout), "bf16"
    if op is grouped_gemm_swiglu_fp8:
        how.setdefault("result_layout", FRAGMENTS)
    experts = weight.codes.shape[0]
    offsets = torch.zeros(experts + 1, dtype=torch.int32)
    arguments = dispatch.arguments(op, x, weight, offsets, *rest, **how)
    return dispatch.Call(arguments.op, arguments.args, torch.device("cuda", 0))


def reason(call, requested="fp8"):
    """Return why the row ``"fp8"`` does not run a call, or None."""
    row = next(row for row in dispatch.implementations(call.op) if row.name == "fp8")
    return row.unsupported_reason(call, requested)


def note(call):
    """What ``explain`` adds to the choice of the row ``"fp8"``."""
    explanation = dispatch._explanation(call, "auto")
    assert explanation.chosen == "fp8"
    assert f"     {explanation.note}" in str(explanation).splitlines()
    return explanation.note


def faster(said, what):
    """Whether a note names both times for ``what``, and FP8's is the shorter."""
    pattern = rf"FP8 arithmetic takes an estimated (\d+) us for {what}, bfloat16's (\d+)"
    fp8, bfloat16 = map(int, re.fullmatch(pattern, said).groups())
    return fp8 < bfloat16


@pytest.mark.parametrize("layout", [None, FRAGMENTS])
@pytest.mark.parametrize("op", DENSE, ids=lambda op: op.__name__)
def test_auto_takes_it_for_many_tokens(op, layout):
    weight = sizes_of(4096, 8192)
    large_m = call_of(op, weight, tokens=4096, layout=layout)
    assert dispatch.choose(large_m).name == "fp8"
    assert faster(note(large_m), "4096 tokens")
    short = call_of(op, weight, tokens=128, layout=layout)
    assert dispatch.choose(short).name == "cute"
    assert re.search(r"an estimated \d+ us for 128 tokens, bfloat16's \d+", reason(short, "auto"))
    assert reason(short) is None


@pytest.mark.parametrize("layout", [None, FRAGMENTS])
@pytest.mark.parametrize("op", ROUTED, ids=lambda op: op.__name__)
def test_auto_takes_it_for_many_rows_of_experts(op, layout):
    weight = sizes_of(64, 4096, 4096)
    large_m = call_of_experts(op, weight, 64 * 1024, layout)
    assert dispatch.choose(large_m).name == "fp8"
    assert faster(note(large_m), "65536 rows of 64 experts")
    short = call_of_experts(op, weight, 64 * 32, layout)
    assert "of 64 experts" in reason(short, "auto")
    assert reason(short) is None


@pytest.mark.parametrize("layout", [None, LINEAR])
def test_auto_takes_it_for_fp8_weights(layout):
    weight = sizes_of(4096, 8192, weight_format=FP8_BLOCK)
    large_m = call_of(gemm, weight, tokens=1024, layout=layout)
    assert dispatch.choose(large_m).name == "fp8"
    assert faster(note(large_m), "1024 tokens")
    assert "bfloat16" in reason(call_of(gemm, weight, tokens=16, layout=layout), "auto")
    other = call_of(gemm, weight, tokens=1024, layout=FRAGMENTS)
    assert dispatch.choose(other).name == "cute"


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (8, 0), (12, 0)])
@pytest.mark.parametrize("op", DENSE, ids=lambda op: op.__name__)
def test_some_kernel_takes_codes_in_any_order(op, capability):
    """Kernels for bfloat16 dequantise them; no GEMM of NVFP4 activations takes them."""
    machine.MACHINE.pretend(capability=capability)
    for layout in (LINEAR, FRAGMENTS):
        call = call_of(op, sizes_of(4096, 8192), tokens=16, layout=layout)
        rows = {row.name: row.unsupported_reason(call) for row in dispatch.implementations(call.op)}
        assert rows["triton"] is None
        assert rows["tcgen05"] is not None
        if op is gemm:
            assert "FP8 codes" in rows["scaled_mm"]


def test_many_tokens_have_their_weights_converted():
    in_the_loop, converted = (
        e4m3_costs.nvfp4_plan(32768, 1024, n, False, False) for n in (1024, 4096)
    )
    assert not isinstance(in_the_loop, ConvertedE4m3Plan)
    assert isinstance(converted, ConvertedE4m3Plan)
    huge = e4m3_costs.nvfp4_plan(1 << 16, 1 << 14, 8192, False, False)
    assert not isinstance(huge, ConvertedE4m3Plan)  # too large for scratch memory
    sizes, kind = (4096, 4096, 64), (False, True, False, True)
    assert not isinstance(e4m3_costs.experts_plan(*sizes, 64 * 128, kind), GroupedConvertedE4m3Plan)
    assert isinstance(e4m3_costs.experts_plan(*sizes, 64 * 4096, kind), GroupedConvertedE4m3Plan)


@given(
    rows=st.integers(1, 512).map(lambda n: 128 * n),
    stages=st.integers(1, 128),
    tokens=st.integers(1, 1 << 14),
)
def test_the_form_is_the_one_of_less_estimated_time(rows, stages, tokens):
    sizes = (rows, 128 * stages, tokens)
    plan = e4m3_costs.nvfp4_plan(*sizes, False, False)
    us = e4m3_costs.plan_us(plan, *sizes)
    for plan in e4m3_plans(False, False):
        assert us <= e4m3_costs.plan_us(plan, *sizes)
    if rows * 128 * stages <= MOST_CONVERTED:
        for plan in converted_plans(False, False):
            assert us <= e4m3_costs.plan_us(plan, *sizes)


def numbers(pattern):
    """Numbers in the cells of the rows of docs/numerics.md that a pattern matches, by rows."""
    text = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text()
    rows = re.findall(pattern, text, re.MULTILINE)
    return [[[int(n) for n in re.findall(r"\d+", cell)] for cell in row] for row in rows]


def assert_crossovers(faster_by, documented, most):
    """FP8 is slower below the first documented number, and faster from the last one on."""
    first, always = documented[0], documented[-1]
    assert not any(map(faster_by, range(1, first, 5)))
    assert faster_by(first)
    assert not faster_by(first - 1)
    assert not faster_by(always - 1)
    assert all(map(faster_by, range(always, most, 31)))


@pytest.mark.parametrize("is_block", [False, True])
def test_documented_crossovers_are_those_of_the_estimates(is_block):
    rows = numbers(r"^\| .*, (\d+ x \d+) \| ([\d, ]+) \| ([\d, ]+) \|$")
    assert len(rows) == 10
    for sizes, *formats in rows:

        def faster_by(count, sizes=sizes):
            times = e4m3_costs.estimate(*sizes, count, is_block=is_block)
            return times.of_codes(count, count * sizes[1]).is_faster

        assert_crossovers(faster_by, formats[is_block], 4097)


@pytest.mark.parametrize("is_down", [False, True])
def test_documented_crossovers_of_experts(is_down):
    rows = numbers(r"^\| (?:Flash|Pro) \| ([\d, ]+) \| ([\d, ]+) \|$")
    weights = ((4096, 4096), (4096, 2048)), ((6144, 7168), (7168, 3072))
    for parts, sizes in zip(rows, weights, strict=True):

        def faster_by(count, sizes=sizes[is_down]):
            rows_of_x = 64 * count
            quantized = {"quantized_out": not is_down}
            times = e4m3_costs.estimate_experts(*sizes, 64, rows_of_x, **quantized)
            return times.of_codes(rows_of_x, rows_of_x * sizes[1]).is_faster

        assert_crossovers(faster_by, parts[is_down], 1025)


@pytest.mark.parametrize(
    ("weight", "how", "said"),
    [
        (exact(256, 256, scale=1.125), {}, "the weight is not exact in FP8"),
        (exact(256, 256), {"activation": "bf16"}, "activation is 'bf16', wanted 'fp8'"),
        (exact(256, 256, layout=LINEAR), {}, "layout"),
        (exact(256, 192), {}, "a group is 256 x 192, wanted a multiple of 128 columns"),
        (exact(192, 256), {"groups": 2}, "a group is 96 x 256, wanted a multiple of 128 columns"),
        (exact(256, 256), {"out_dtype": torch.float16}, "torch.float16"),
        (exact(256, 256), {"layout": LINEAR}, "columns of codes are 'linear', wanted 'fragments"),
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
