"""SwiGLU: the clamp of the specification against float64, layouts, and non-finite input."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv4.ops.quantize import dequantize, quantize
from dsv4.ops.swiglu import swiglu, swiglu_quantize
from dsv4.quant.formats import LINEAR, SWIZZLED
from dsv4.testing import strategies as fuzz
from dsv4.testing.assertions import (
    assert_bitwise,
    assert_pure,
    assert_within_budget,
    unit_roundoff,
)

KERNELS = ("triton",)
KINDS = ("none", "zero", "denormal", "tiny", "saturating")
limits = st.sampled_from([10.0, 0.5, 1.0, None])

# Small enough that nothing overflows float16 without a limit.
cases = st.fixed_dictionaries(
    {
        "draw": fuzz.draws(-20, 2, KINDS),
        "shape": fuzz.shapes(st.integers(0, 9).map(lambda i: 2 * i), largest=4),
        "dtype": fuzz.float_dtypes(),
        "limit": limits,
    }
)


def build(case, device):
    x = case["draw"].build(case["shape"], case["dtype"], device)
    if case["dtype"] == torch.float16 and case["limit"] is None:
        x = x.clamp(-200, 200)
    return x


def interleave(x):
    half = x.shape[-1] // 2
    return torch.stack((x[..., :half], x[..., half:]), -1).flatten(-2)


def oracle(x, limit):
    half = x.shape[-1] // 2
    gate, up = x[..., :half].double(), x[..., half:].double()
    if limit is not None:
        gate = torch.minimum(gate, torch.tensor(limit, dtype=torch.float64, device=x.device))
        up = torch.minimum(
            torch.maximum(up, -torch.full_like(up, limit)), torch.full_like(up, limit)
        )
    return gate / (1 + torch.exp(-gate)) * up


def budget_of(x, truth, limit, out_dtype):
    """exp (2 ulp = 4 u), sum, quotient and product (1 u each), and the result's rounding.

    Below -88.7 exp overflows in float32: silu is 0 there instead of at most 89 e^-88.7 < 3e-37.
    """
    half = x.shape[-1] // 2
    wide = unit_roundoff(torch.float64 if x.dtype == torch.float64 else torch.float32)
    up = x[..., half:].double().abs()
    up = up if limit is None else up.clamp(max=limit)
    lost = 0 if x.dtype == torch.float64 else 3e-37 * up
    relative = 1.01 * (7 * wide + unit_roundoff(out_dtype))
    return relative * truth.abs() + lost + smallest_of(out_dtype)


def smallest_of(dtype):
    """The smallest subnormal number, twice what rounding to one is off by."""
    return 2 * torch.finfo(dtype).smallest_normal * unit_roundoff(dtype)


@given(case=cases)
def test_pitfall_9_against_float64(device, case):
    x, limit = build(case, device), case["limit"]
    truth = oracle(x, limit)
    out = swiglu(x, limit)
    assert out.dtype == x.dtype
    assert out.shape == (*x.shape[:-1], x.shape[-1] // 2)
    assert_within_budget(out, truth, budget_of(x, truth, limit, x.dtype))


@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize("limit", [10.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_pitfall_9_on_both_sides_of_each_bound(device, dtype, limit, layout):
    """Every gate with every up, so that no bound depends on which examples are drawn."""
    side = torch.tensor([-8, -2, -1.25, -1, -0.75, 0, 0.75, 1, 1.25, 2, 8], device=device) * limit
    gate, up = torch.meshgrid(side, side, indexing="ij")
    x = torch.cat((gate, up), -1).to(dtype)
    truth = oracle(x, limit)
    out = swiglu(interleave(x) if layout == "interleaved" else x, limit, layout=layout)
    assert_within_budget(out, truth, budget_of(x, truth, limit, dtype))


def silu(x):
    return x / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [
        (-20.0, 1.0, silu(-20.0)),  # a lower clamp of the gate would give silu(-10), 10^4 times it
        (20.0, 1.0, silu(10.0)),  # the gate's upper clamp comes before silu: silu(10) < 10
        (1.0, 20.0, silu(1.0) * 10),  # up is clamped above
        (1.0, -20.0, silu(1.0) * -10),  # and below
        (20.0, 20.0, silu(10.0) * 10),  # a clamp of the product would give 10
        (9.0, -9.0, silu(9.0) * -9),  # nothing is clamped inside the bounds
    ],
)
@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
def test_pitfall_9_by_hand(device, wide, gate, up, expected, layout):
    x = torch.tensor([gate, up], dtype=wide, device=device)
    # 8 u as in ``budget_of``, and as much for what is wanted.
    actual = swiglu(x, 10.0, layout=layout).item()
    assert actual == pytest.approx(expected, rel=16 * unit_roundoff(wide))


@given(case=cases)
def test_layouts_give_the_same_bits(device, case):
    x = build(case, device)
    expected = swiglu(x, case["limit"])
    assert_bitwise(swiglu(interleave(x), case["limit"], layout="interleaved"), expected)


@given(case=cases)
def test_odd_in_up(device, case):
    x = build(case, device)
    half = x.shape[-1] // 2
    mirrored = torch.cat((x[..., :half], -x[..., half:]), -1)
    assert_bitwise(swiglu(mirrored, case["limit"]), -swiglu(x, case["limit"]))


@given(case=cases)
def test_clamping_beforehand_changes_nothing(device, case):
    limit = 1.0
    x = build(case, device)
    half = x.shape[-1] // 2
    clamped = torch.cat((x[..., :half].clamp(max=limit), x[..., half:].clamp(-limit, limit)), -1)
    assert_bitwise(swiglu(clamped, limit), swiglu(x, limit))


@given(case=cases, out_dtype=fuzz.float_dtypes())
def test_one_rounding_to_the_output_dtype(device, case, out_dtype):
    x, limit = build(case, device), case["limit"] or 10.0
    if x.dtype != torch.float64:
        wide = swiglu(x, limit, out_dtype=torch.float32)
        assert_bitwise(swiglu(x, limit, out_dtype=out_dtype), wide.to(out_dtype))
    assert swiglu(x, limit, out_dtype=out_dtype).dtype == out_dtype


@given(
    seed=fuzz.seeds(),
    bad=st.sampled_from([torch.nan, torch.inf, -torch.inf]),
    column=st.integers(0, 7),
    limit=limits,
    layout=st.sampled_from(["concatenated", "interleaved"]),
)
def test_bad_input_is_nan_in_its_own_element(device, seed, bad, column, limit, layout):
    x = fuzz.normal(seed, (3, 8)).to(device)
    clean = swiglu(x, limit, layout=layout)
    x[1, column] = bad
    out = swiglu(x, limit, layout=layout)
    hit = torch.zeros_like(out, dtype=torch.bool)
    hit[1, column // 2 if layout == "interleaved" else column % 4] = True
    assert out[hit].isnan().all()
    assert_bitwise(out[~hit], clean[~hit])


@given(case=cases, layout=st.sampled_from(["concatenated", "interleaved"]))
def test_strided_input_gives_the_same_bits(device, case, layout):
    x = build(case, device)
    out = swiglu(fuzz.strided(x), case["limit"], layout=layout)
    assert_bitwise(out, swiglu(x, case["limit"], layout=layout))
    assert out.is_contiguous()


@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize("limit", [10.0, None])
def test_opcheck(device, layout, limit):
    weight = fuzz.normal(1, (3,)).to(device)
    for dtype, out_dtype in ((torch.bfloat16, torch.bfloat16), (torch.float64, torch.float32)):
        x = fuzz.normal(0, (3, 8), dtype).to(device)
        for row_weight in (None, weight):
            args = (x, limit, layout, row_weight, out_dtype, "auto")
            torch.library.opcheck(torch.ops.dsv4.swiglu.default, args)


def test_compiles_without_graph_breaks(device):
    compiled = torch.compile(swiglu, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (2, 3, 7):
        x = fuzz.normal(tokens, (tokens, 8), torch.bfloat16).to(device) * 10
        assert_bitwise(compiled(x, 10.0), swiglu(x, 10.0))


@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 8)])
def test_no_tokens_and_no_columns(device, layout, shape):
    out = swiglu(torch.zeros(shape, device=device), 10.0, layout=layout)
    assert out.shape == (*shape[:-1], shape[-1] // 2)


def test_bad_arguments_are_named(device):
    x = torch.zeros(3, 8, device=device)
    with pytest.raises(TypeError, match=r"swiglu: gate_up has dtype int64"):
        swiglu(x.long(), 10.0)
    with pytest.raises(ValueError, match=r"gate_up has shape \[3, 7\], wanted an even last size"):
        swiglu(x[:, :7], 10.0)
    with pytest.raises(ValueError, match=r"gate_up has shape \[\]"):
        swiglu(x[0, 0], 10.0)
    for limit in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=rf"limit is {limit}"):
            swiglu(x, limit)
    with pytest.raises(ValueError, match=r"layout is 'split', wanted one of 'concatenated'"):
        swiglu(x, 10.0, layout="split")
    with pytest.raises(TypeError, match=r"out_dtype is torch.int8"):
        swiglu(x, 10.0, out_dtype=torch.int8)
    with pytest.raises(ValueError, match=r"row_weight has shape \[3, 1\], wanted \[3\]"):
        swiglu(x, 10.0, row_weight=x[:, :1])
    with pytest.raises(TypeError, match=r"row_weight has dtype int64"):
        swiglu(x, 10.0, row_weight=x[:, 0].long())


# A small weight makes a float16 result subnormal, whose rounding is none of plain's.
SUBNORMAL = {
    "draw": fuzz.Draw(1140, -6),
    "shape": (4, 4, 16),
    "dtype": torch.float16,
    "limit": 10.0,
}


@given(case=cases, weight_dtype=fuzz.float_dtypes())
@example(case=SUBNORMAL, weight_dtype=torch.float64)
def test_a_row_weight_multiplies_before_the_rounding(device, case, weight_dtype):
    """The weight multiplies in float32 what is not rounded yet: bitwise."""
    x, limit = build(case, device), case["limit"]
    weight = fuzz.normal(case["draw"].seed, x.shape[:-1], weight_dtype).to(device)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    plain = swiglu(x, limit, out_dtype=wide)
    expected = (plain * weight.to(wide)[..., None]).to(x.dtype)
    got = swiglu(x, limit, row_weight=weight)
    if x.dtype == torch.float64 or weight_dtype != torch.float64:
        assert_bitwise(got, expected)
    else:  # only the reference takes a float64 weight
        before = budget_of(x, plain.double(), limit, x.dtype) * 3 * weight.abs()[..., None]
        bound = before + 1e-37 + smallest_of(x.dtype)
        assert_within_budget(got, plain.double() * weight[..., None], bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("limit", [10.0, None])
def test_large_and_small_gates(device, dtype, limit):
    """Gates where exp overflows or is 1, and where silu is as large as the dtype."""
    ends = [0.0, 1e-30, 1e-5, 1.0, 20.0, 80.0, 87.0, 88.0, 89.0, 100.0, 1000.0, 3e4, 3e38]
    gate = torch.tensor(ends, dtype=torch.float64).to(dtype)
    gate = torch.cat((gate, -gate))
    gate = gate[gate.isfinite()]
    x = torch.cat((gate, torch.full_like(gate, 0.75)))[None].to(device)
    truth = oracle(x, limit)
    assert_within_budget(swiglu(x, limit), truth, budget_of(x, truth, limit, dtype))


@given(
    draw=fuzz.draws(-8, 2),
    rows=st.sampled_from([(1,), (3,), (2, 3)]),
    blocks=st.sampled_from([1, 3, 32]),
    few_rows=st.sampled_from([0, 256]),
    part=st.sampled_from([8, 128]),
    dtype=fuzz.float_dtypes(),
    layout=st.sampled_from(["concatenated", "interleaved"]),
    scale_layout=st.sampled_from((LINEAR, SWIZZLED)),
    static=st.booleans(),
    weighted=st.booleans(),
)
@settings(max_examples=20)
def test_fused_quantisation_equals_its_parts(
    device,
    monkeypatch,
    draw,
    rows,
    blocks,
    few_rows,
    part,
    dtype,
    layout,
    scale_layout,
    static,
    weighted,
):
    """Bit for bit, with NaN and infinities in the input, whatever implementation runs.

    Also with the tiles that are meant for many rows, and with rows that several programs share.
    """
    monkeypatch.setattr("dsv4.triton._lib.nvfp4_tile._SHARE_BLOCKS", part)
    monkeypatch.setattr("dsv4.triton._lib.nvfp4_tile._FEW_ROWS", few_rows)
    x = draw.build((*rows, 32 * blocks), dtype, device)
    weight = fuzz.normal(draw.seed, rows).to(device) if weighted else None
    scale = torch.full((1,), 0.003, device=device) if static else None
    scaling = "static" if static else "token"
    got = swiglu_quantize(
        x,
        10.0,
        layout=layout,
        row_weight=weight,
        global_scale=scale,
        scaling=scaling,
        scale_layout=scale_layout,
    ).validate()
    inner = swiglu(x, 10.0, layout=layout, row_weight=weight)
    expected = quantize(inner, global_scale=scale, scaling=scaling, layout=scale_layout)
    assert_bitwise(got.codes, expected.codes, "code")
    assert_bitwise(got.scales.view(torch.uint8), expected.scales.view(torch.uint8), "block scale")
    assert_bitwise(got.global_scale, expected.global_scale, "global scale")


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (0, 3, 64)])
def test_fused_quantisation_of_no_tokens(device, shape):
    q = swiglu_quantize(torch.zeros(shape, device=device), 10.0)
    assert q.shape == (*shape[:-1], 32)


def test_fused_quantisation_names_bad_arguments(device):
    x = torch.zeros(3, 64, device=device)
    with pytest.raises(TypeError, match=r"swiglu_quantize: gate_up has dtype int64"):
        swiglu_quantize(x.long(), 10.0)
    with pytest.raises(ValueError, match=r"gate_up has 48 columns, wanted a positive multiple of"):
        swiglu_quantize(x[:, :48], 10.0)
    with pytest.raises(ValueError, match=r"gate_up has shape \[64\], wanted \[..., N, 2 I\]"):
        swiglu_quantize(x[0], 10.0)
    with pytest.raises(ValueError, match=r"scaling is 'tensor', wanted one of 'static', 'token'"):
        swiglu_quantize(x, 10.0, scaling="tensor")
    with pytest.raises(ValueError, match=r"swiglu_quantize: scaling is 'static' and global_scale"):
        swiglu_quantize(x, 10.0, scaling="static")
    with pytest.raises(ValueError, match=r"swiglu_quantize: limit is -1"):
        swiglu_quantize(x, -1.0)


@pytest.mark.parametrize("scale_layout", [LINEAR, SWIZZLED])
def test_fused_quantisation_opcheck(device, scale_layout):
    x = fuzz.normal(0, (3, 64), torch.bfloat16).to(device)
    scale = torch.ones(1, device=device)
    op = torch.ops.dsv4.swiglu_quantize.default
    for given_scale, scaling in ((None, "token"), (scale, "static")):
        args = (x, 10.0, "concatenated", x[:, 0], given_scale, scaling, scale_layout, "auto")
        torch.library.opcheck(op, args)
        assert_pure(op, *args)


def test_fused_quantisation_compiles_whole(device):
    def both(x):
        return dequantize(swiglu_quantize(x, 10.0))

    torch.compiler.reset()
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (2, 5):
        x = fuzz.normal(tokens, (tokens, 64), torch.bfloat16).to(device)
        assert_bitwise(compiled(x), both(x))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
def test_replays_of_a_graph(layout):
    x = fuzz.normal(0, (33, 4096), torch.bfloat16).cuda()
    weight = fuzz.normal(1, (33,)).cuda()
    swiglu_quantize(x, 10.0, layout=layout, row_weight=weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = swiglu(x, 10.0, layout=layout, row_weight=weight)
        q = swiglu_quantize(x, 10.0, layout=layout, row_weight=weight)
    for seed in (2, 3):
        x.copy_(fuzz.normal(seed, (33, 4096), torch.bfloat16) * seed)
        out.fill_(torch.nan)
        q.codes.fill_(0xFF)
        graph.replay()
        assert_bitwise(out, swiglu(x, 10.0, layout=layout, row_weight=weight))
        assert_bitwise(q.codes, quantize(out, scaling="token").codes, "code")
