"""SwiGLU: the clamp of the specification against float64, layouts, and non-finite input."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4.ops.swiglu import swiglu
from dsv4.testing import strategies as fuzz
from dsv4.testing.assertions import assert_bitwise, assert_within_budget, unit_roundoff

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
    smallest = 2 * torch.finfo(out_dtype).smallest_normal * unit_roundoff(out_dtype)
    return 1.01 * (7 * wide + unit_roundoff(out_dtype)) * truth.abs() + lost + smallest


@given(case=cases)
def test_trap_t9_against_float64(device, case):
    x, limit = build(case, device), case["limit"]
    truth = oracle(x, limit)
    out = swiglu(x, limit)
    assert out.dtype == x.dtype
    assert out.shape == (*x.shape[:-1], x.shape[-1] // 2)
    assert_within_budget(out, truth, budget_of(x, truth, limit, x.dtype))


def silu(x):
    return x / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("gate", "up", "wanted"),
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
def test_trap_t9_by_hand(device, gate, up, wanted, layout):
    x = torch.tensor([gate, up], dtype=torch.float64, device=device)
    assert swiglu(x, 10.0, layout=layout).item() == pytest.approx(wanted, rel=1e-14)


@given(case=cases)
def test_layouts_give_the_same_bits(device, case):
    x = build(case, device)
    wanted = swiglu(x, case["limit"])
    assert_bitwise(swiglu(interleave(x), case["limit"], layout="interleaved"), wanted)


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
    for dtype, out_dtype in ((torch.bfloat16, torch.bfloat16), (torch.float64, torch.float32)):
        x = fuzz.normal(0, (3, 8), dtype).to(device)
        torch.library.opcheck(torch.ops.dsv4.swiglu.default, (x, limit, layout, None, out_dtype, "auto"))


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
