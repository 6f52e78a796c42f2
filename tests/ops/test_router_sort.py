"""The router with the sort of its choice: the bits of the operators one after the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.ops.moe import moe_sort
from dsv4.ops.router import route_topk
from dsv4.ops.router_sort import route_topk_sort
from dsv4.testing import strategies as fuzz
from dsv4.testing.assertions import assert_bitwise

KERNELS = ("triton",)
INTERPRETED_SHARE = 4

cases = st.fixed_dictionaries(
    {
        "seed": fuzz.seeds(),
        "tokens": st.sampled_from([0, 1, 1, 1, 1, 2, 5]),
        "experts": st.sampled_from([3, 8, 17, 40]),
        "hidden": st.sampled_from([1, 5, 64, 300]),
        "top_k": st.integers(1, 9),
        "first": st.integers(0, 7),
        "biased": st.booleans(),
        "left_out": st.sampled_from([None, False, True]),
        "dtype": st.sampled_from([torch.bfloat16, torch.bfloat16, torch.float32]),
        "logits_dtype": st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
        "kept": st.booleans(),
    }
)
FLASH = {
    "seed": 1,
    "tokens": 1,
    "experts": 40,
    "hidden": 300,
    "top_k": 6,
    "first": 0,
    "biased": True,
    "left_out": None,
    "dtype": torch.bfloat16,
    "logits_dtype": torch.float32,
    "kept": False,
}


def build(case, device):
    """x, weight and bias, arguments of the router by name, and the experts that are held."""
    seed, t, experts, hidden = (case[name] for name in ("seed", "tokens", "experts", "hidden"))
    x = fuzz.normal(seed, (t, hidden), case["dtype"]).to(device)
    weight = fuzz.normal(seed + 1, (experts, hidden), case["dtype"]).to(device)
    bias = fuzz.normal(seed + 2, (experts,)).to(device) if case["biased"] else None
    routed = None
    if case["left_out"] is not None:
        routed = torch.full((t,), -1 if case["left_out"] else 3, device=device)
    settings = {
        "top_k": min(case["top_k"], experts),
        "scaling_factor": 1.5,
        "logits_dtype": case["logits_dtype"],
        "routed": routed,
    }
    first = min(case["first"], experts - 1)
    held = {"first_expert": first, "num_local_experts": max(1, (experts - first) // 2)}
    return (x, weight, bias), settings, held if case["first"] else {}


def separate(operands, settings, held, **options):
    logits, weights, ids = route_topk(*operands, **settings, **options)
    x, weight, _ = operands
    return *moe_sort(x, ids, weights, weight.shape[0], **held, **options), logits, weights, ids


def check(case, device, **options):
    operands, settings, held = build(case, device)
    out = None
    if case["kept"]:
        out = operands[0].new_empty((case["tokens"] * settings["top_k"], case["hidden"]))
    actual = route_topk_sort(*operands, **settings, **held, out=out, **options)
    if out is not None:
        assert actual[0] is out
    for got, expected in zip(actual, separate(operands, settings, held, **options), strict=True):
        assert_bitwise(got, expected)


@given(case=cases)
@example(case=FLASH)
@example(case={**FLASH, "first": 2, "left_out": True})
@example(case={**FLASH, "tokens": 5, "first": 2, "logits_dtype": torch.bfloat16})
def test_it_is_its_parts(device, case):
    check(case, device)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_token_has_nan_weights_and_experts(device, bad):
    operands, settings, held = build(FLASH, device)
    operands[0][0, 3] = bad
    actual = route_topk_sort(*operands, **settings, **held)
    for got, expected in zip(actual, separate(operands, settings, held), strict=True):
        assert_bitwise(got, expected)
    assert bool(actual[1].isnan().all())


@pytest.mark.parametrize(("tokens", "separately"), [(1, False), (2, True)])
def test_one_token_is_sorted_where_it_is_routed(tokens, separately, monkeypatch):
    module = pytest.importorskip("dsv4.triton.router_sort")
    from dsv4.device import interpret_triton

    sorts, original = [], module.sort_rows
    monkeypatch.setattr(module, "sort_rows", lambda *args: sorts.append(1) or original(*args))
    operands, settings, held = build({**FLASH, "tokens": tokens, "hidden": 5}, torch.device("cpu"))
    with interpret_triton():
        route_topk_sort(*operands, **settings, **held, backend="triton")
    assert bool(sorts) == separately


@pytest.mark.parametrize("hidden", [64, 4097])
@pytest.mark.rarely_interpreted
def test_logits_of_several_slices(device, hidden):
    """The GEMM stores the logits of one slice itself."""
    check({**FLASH, "hidden": hidden, "experts": 8, "top_k": 2}, device)


@pytest.mark.rarely_interpreted
def test_opcheck_and_compile(device):
    operands, settings, _ = build(FLASH, device)
    values = (*operands, 6, 1.5, torch.float32, None, 0, 40, "auto")
    torch.library.opcheck(torch.ops.dsv4.route_topk_sort.default, values)

    def route(*args):
        return route_topk_sort(*args, **settings)

    compiled = torch.compile(route, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(*operands), route(*operands), strict=True):
        assert_bitwise(got, expected)


def test_strided_input_gives_the_same_result(device):
    operands, settings, held = build(FLASH, device)
    gapped = tuple(map(fuzz.strided, operands))
    actual = route_topk_sort(*gapped, **settings, **held)
    for got, expected in zip(actual, separate(gapped, settings, held), strict=True):
        assert_bitwise(got, expected)


def test_bad_arguments_are_named():
    (x, weight, bias), settings, _ = build(FLASH, torch.device("cpu"))
    op = "route_topk_sort"
    with pytest.raises(ValueError, match=rf"{op}: top_k is 41, wanted 1 to 40"):
        route_topk_sort(x, weight, bias, **{**settings, "top_k": 41})
    with pytest.raises(ValueError, match=rf"{op}: weight has shape \[40, 299\]"):
        route_topk_sort(x, weight[:, 1:], bias, **settings)
    with pytest.raises(ValueError, match=rf"{op}: local experts are 40 to 40"):
        route_topk_sort(x, weight, bias, **settings, first_expert=40, num_local_experts=1)
    with pytest.raises(ValueError, match=rf"{op}: out has shape \[5, 300\]"):
        route_topk_sort(x, weight, bias, **settings, out=x.new_empty(5, 300))
    with pytest.raises(TypeError, match=rf"{op}: x has dtype int64"):
        route_topk_sort(x.long(), weight, bias, **settings)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("hidden", [4096, 7168])
@pytest.mark.parametrize("first", [0, 64])
def test_flash_on_a_gpu_is_its_parts(tokens, hidden, first):
    """Compiled kernels have the bits of the separate ones at Flash's and Pro's sizes."""
    sizes = {"tokens": tokens, "hidden": hidden, "experts": 256, "first": first}
    for seed in range(20):
        check({**FLASH, **sizes, "seed": seed}, torch.device("cuda"), backend="triton")
