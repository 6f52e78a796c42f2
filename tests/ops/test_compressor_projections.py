"""Projections of compressor and indexer: budgets from float64, and rows that stay apart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.dispatch import explain
from dsv4.ops.compressor_projections import compressor_projections
from dsv4.testing import strategies as fuzz
from dsv4.testing.assertions import assert_bitwise, assert_within_budget, gemm_budget

KERNELS = ("triton",)
INTERPRETED_SHARE = 4
ROWS = st.integers(1, 40)

cases = st.fixed_dictionaries(
    {
        "seed": fuzz.seeds(),
        "tokens": fuzz.rows(20),
        "hidden": st.integers(1, 200),
        "rows": st.tuples(ROWS, ROWS, ROWS),
        "indexed": st.booleans(),
        "dtype": st.sampled_from([torch.bfloat16, torch.float16]),
        "out_dtype": st.sampled_from([None, torch.float32]),
    }
)


def build(case, device):
    """Tokens and the five weights, the last three None without an indexer."""
    dtype, hidden = case["dtype"], case["hidden"]
    x = fuzz.normal(case["seed"], (case["tokens"], hidden), dtype).to(device)
    pooled, index, heads = case["rows"]
    sizes = (pooled, pooled, *((index, index, heads) if case["indexed"] else ()))
    weights = [
        fuzz.normal(case["seed"] + 1 + i, (rows, hidden), dtype).to(device)
        for i, rows in enumerate(sizes)
    ]
    return x, weights + [None] * (5 - len(weights))


def assert_products(got, x, weights, out_dtype):
    out, heads = got
    wide = x.double()
    pooled = [weight.double() for weight in weights[:4] if weight is not None]
    truth = torch.cat([wide @ weight.T for weight in pooled], 1)
    budget = torch.cat([gemm_budget(wide, w, out_dtype, roundings=0) for w in pooled], 1)
    assert out.dtype == out_dtype
    assert heads.dtype == x.dtype
    assert_within_budget(out, truth, budget, "values and scores")
    if weights[4] is None:
        assert heads.shape == (x.shape[0], 0)
    else:
        last = weights[4].double()
        assert_within_budget(
            heads, wide @ last.T, gemm_budget(wide, last, x.dtype, roundings=0), "head weights"
        )


@given(case=cases)
@example(
    {
        "seed": 0,
        "tokens": 70,  # a second tile of tokens
        "hidden": 64,
        "rows": (33, 8, 1),
        "indexed": True,
        "dtype": torch.bfloat16,
        "out_dtype": torch.float32,
    }
)
def test_each_weight_is_multiplied(device, case):
    x, weights = build(case, device)
    got = compressor_projections(x, *weights, out_dtype=case["out_dtype"])
    assert_products(got, x, weights, case["out_dtype"] or x.dtype)


@pytest.mark.parametrize("hidden", [64, 160, 512, 520])
@pytest.mark.parametrize("tokens", [1, 2, 3, 17, 33])
def test_every_tile(device, tokens, hidden):
    """Blocks of columns that fill the hidden axis and that do not, in each tile of tokens."""
    case = {"seed": 1, "tokens": tokens, "hidden": hidden, "rows": (34, 16, 9), "indexed": True}
    x, weights = build({**case, "dtype": torch.bfloat16}, device)
    got = compressor_projections(x, *weights, out_dtype=torch.float32)
    assert_products(got, x, weights, torch.float32)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("tokens", [2, 5])
def test_a_bad_row_stays_alone(device, value, tokens):
    case = {"seed": 2, "tokens": tokens, "hidden": 64, "rows": (8, 8, 3), "indexed": True}
    x, weights = build({**case, "dtype": torch.bfloat16}, device)
    clean = compressor_projections(x, *weights)
    x[1, 7] = value
    for got, before in zip(compressor_projections(x, *weights), clean, strict=True):
        assert not got[1].isfinite().any()
        rest = [row for row in range(tokens) if row != 1]
        assert_bitwise(got[rest], before[rest], "rows without it")


@pytest.mark.parametrize("tokens", [2, 6])
def test_rows_that_lie_apart(device, tokens):
    case = {"seed": 3, "tokens": tokens, "hidden": 64, "rows": (8, 8, 3), "indexed": False}
    x, weights = build({**case, "dtype": torch.bfloat16}, device)
    strided = torch.cat((x, x), 1)[:, :64]
    for got, expected in zip(
        compressor_projections(strided, *weights), compressor_projections(x, *weights), strict=True
    ):
        assert_bitwise(got, expected, "strided tokens")


def test_float64_is_the_oracle(device):
    case = {"seed": 4, "tokens": 3, "hidden": 48, "rows": (5, 4, 2), "indexed": True}
    x, weights = build({**case, "dtype": torch.float64}, device)
    out, heads = compressor_projections(x, *weights)
    assert (out.dtype, heads.dtype) == (torch.float64, torch.float64)
    torch.testing.assert_close(out[:, :5], x @ weights[0].T, rtol=1e-13, atol=1e-12)
    torch.testing.assert_close(heads, x @ weights[4].T, rtol=1e-13, atol=1e-12)


def test_opcheck(device):
    case = {"seed": 5, "tokens": 3, "hidden": 32, "rows": (4, 4, 2), "indexed": True}
    x, weights = build({**case, "dtype": torch.bfloat16}, device)
    args = (x, *weights, torch.float32, "auto")
    torch.library.opcheck(torch.ops.dsv4.compressor_projections.default, args)


class TestErrors:
    @pytest.fixture
    def weights(self):
        return [torch.zeros(rows, 32) for rows in (4, 4, 2, 2, 3)]

    def test_columns(self, weights):
        with pytest.raises(ValueError, match=r"kv has shape \[4, 32\], wanted \[C, 16\]|wanted"):
            compressor_projections(torch.zeros(2, 16), *weights)

    def test_part_of_an_indexer(self, weights):
        with pytest.raises(ValueError, match=r"index_gate is None, wanted all weights"):
            compressor_projections(torch.zeros(2, 32), *weights[:3], None, weights[4])

    def test_result(self, weights):
        with pytest.raises(TypeError, match=r"out_dtype is torch.int8"):
            compressor_projections(torch.zeros(2, 32), *weights, out_dtype=torch.int8)

    def test_kernels_take_halves(self, weights):
        x = torch.zeros(2, 32)
        why = dict(explain(compressor_projections, x, *weights).candidates)
        assert why["triton"] is not None
