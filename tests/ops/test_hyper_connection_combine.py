"""Sums of experts' rows within hyper-connections: the bits of the operators one after the other."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.ops.hyper_connection import hc_post, hc_post_pre_norm
from dsv4.ops.hyper_connection_combine import hc_combine_post, hc_combine_post_pre_norm
from dsv4.ops.moe import moe_combine, moe_permute
from dsv4.testing import strategies as fuzz
from dsv4.testing.assertions import assert_bitwise, assert_pure

KERNELS = ("triton",)
INTERPRETED_SHARE = 4
PRE = {"norm_eps": 1e-6, "hc_eps": 1e-6, "iterations": 4}
EXPERTS = 8

cases = st.fixed_dictionaries(
    {
        "seed": fuzz.seeds(),
        "tokens": st.sampled_from([0, 1, 2, 4, 5, 9, 66]),
        "n": st.sampled_from([4, 4, 4, 3]),
        "hidden": st.sampled_from([1, 5, 32, 70, 272]),
        "top_k": st.integers(1, 9),
        "local": st.sampled_from([EXPERTS, EXPERTS, 5]),
        "weighted": st.booleans(),
        "shared": st.booleans(),
        "dtype": st.sampled_from([torch.bfloat16, torch.bfloat16, torch.float32]),
    }
)
FLASH = {
    "seed": 1,
    "tokens": 1,
    "n": 4,
    "hidden": 70,
    "top_k": 6,
    "local": EXPERTS,
    "weighted": False,
    "shared": True,
    "dtype": torch.bfloat16,
}


def build(case, device):
    """Arguments of ``moe_combine`` without ``shared``, ``shared``, and those of ``hc_post`` etc."""
    seed, t, n, hidden, k = (case[name] for name in ("seed", "tokens", "n", "hidden", "top_k"))
    dtype = case["dtype"]
    ids = torch.randint(-1, EXPERTS, (t, k), generator=torch.Generator().manual_seed(seed))
    _, offsets, rows = moe_permute(ids, EXPERTS, num_local_experts=case["local"])
    y = fuzz.normal(seed + 1, (t * k, hidden), dtype)
    y[int(offsets[-1]) :] = torch.nan  # rows of no expert hold anything
    weights = fuzz.normal(seed + 2, (t, k)) if case["weighted"] else None
    shared = fuzz.normal(seed + 3, (t, hidden), dtype) if case["shared"] else None
    rows_of = (y, rows, offsets, weights, shared)
    streams = fuzz.normal(seed + 4, (t, n, hidden), dtype)
    post = 2 * fuzz.normal(seed + 5, (t, n)).sigmoid()
    comb = fuzz.normal(seed + 6, (t, n, n)).softmax(-1)
    height = (2 + n) * n
    fn = fuzz.normal(seed + 7, (height, n * hidden)) / (n * hidden) ** 0.5
    scale, base = fuzz.normal(seed + 8, (3,)), fuzz.normal(seed + 9, (height,))
    weight = fuzz.normal(seed + 10, (hidden,), dtype)
    parts = (rows_of, (streams, post, comb), (fn, scale, base, weight))
    return tuple(
        tuple(None if value is None else value.to(device) for value in part) for part in parts
    )


def combined(rows_of, lead=None):
    *args, shared = rows_of
    y = moe_combine(*args, shared=shared)
    return y if lead is None else y.view(*lead, y.shape[-1])


@pytest.mark.costly(2)
@given(case=cases)
@example(case=FLASH)
@example(case={**FLASH, "tokens": 9, "weighted": True, "local": 5})
def test_post_is_its_parts(device, case):
    rows_of, back, _ = build(case, device)
    assert_bitwise(hc_combine_post(*rows_of, *back), hc_post(combined(rows_of), *back))


@pytest.mark.costly(2)
@given(case=cases)
@example(case=FLASH)
@example(case={**FLASH, "tokens": 9, "weighted": True, "local": 5})
def test_post_pre_norm_is_its_parts(device, case):
    rows_of, back, pre = build(case, device)
    actual = hc_combine_post_pre_norm(*rows_of, *back, *pre, **PRE)
    expected = hc_post_pre_norm(combined(rows_of), *back, *pre, **PRE)
    for got, expected_tensor in zip(actual, expected, strict=True):
        assert_bitwise(got, expected_tensor)


@pytest.mark.parametrize("tokens", [1, 8, 64, 65])
def test_a_launch_of_its_own_only_for_many_tokens(tokens, monkeypatch):
    """The sum of rows is stored for more than 64 tokens alone."""
    module = pytest.importorskip("dsv4.triton.hyper_connection_combine")
    from dsv4.device import interpret_triton

    sums = []
    original = module.moe_combine
    monkeypatch.setattr(module, "moe_combine", lambda args: sums.append(1) or original(args))
    rows_of, back, _ = build({**FLASH, "tokens": tokens, "hidden": 5}, torch.device("cpu"))
    with interpret_triton():
        hc_combine_post(*rows_of, *back, backend="triton")
    assert len(sums) == (tokens > 64)


@pytest.mark.parametrize("lead", [(), (5,), (1, 3), (2, 0)])
def test_any_leading_shape(device, lead):
    tokens = torch.Size(lead).numel()
    rows_of, back, pre = build({**FLASH, "tokens": tokens}, device)
    shaped = tuple(value.view(*lead, *value.shape[1:]) for value in back)
    actual = hc_combine_post_pre_norm(*rows_of, *shaped, *pre, **PRE)
    expected = hc_post_pre_norm(combined(rows_of, lead), *shaped, *pre, **PRE)
    for got, expected_tensor in zip(actual, expected, strict=True):
        assert_bitwise(got, expected_tensor)
    assert_bitwise(hc_combine_post(*rows_of, *shaped), expected[0])


def test_strided_input_gives_the_same_result(device):
    rows_of, back, pre = build({**FLASH, "tokens": 3, "weighted": True}, device)
    gapped = tuple(map(fuzz.strided, (*rows_of, *back, *pre)))
    expected = hc_post_pre_norm(combined(rows_of), *gapped[5:], **PRE)
    for got, expected_tensor in zip(
        hc_combine_post_pre_norm(*gapped, **PRE), expected, strict=True
    ):
        assert_bitwise(got, expected_tensor)


def test_rows_are_rounded_before_they_are_written_back(device):
    """A sum that lies between two bfloat16 numbers is not written back as it is."""
    y = torch.tensor([[1.0], [2.0**-9]], dtype=torch.bfloat16, device=device)
    rows = torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    offsets = torch.tensor([0, 2], dtype=torch.int32, device=device)
    streams = torch.zeros(1, 4, 1, device=device)
    post = torch.ones(1, 4, device=device)
    comb = torch.zeros(1, 4, 4, device=device)
    out = hc_combine_post(y, rows, offsets, None, None, streams, post, comb)
    assert out.flatten().tolist() == [1.0] * 4


SOURCES = ("expert", "weight", "shared", "stream")
BAD = 1  # token with a value that is not finite


def poisoned(rows_of, back, source, value):
    """Return copies of the arguments with a bad value in column 3 of token ``BAD``.

    ``source`` is where it is: a row of an expert, its weight, the shared expert's row, a stream.
    """
    y, rows, offsets, weights, shared = rows_of
    streams, *others = back
    y, weights, shared, streams = y.clone(), weights.clone(), shared.clone(), streams.clone()
    [slot, *_] = (rows[BAD] < offsets[-1]).nonzero().flatten().tolist()  # rows of no expert: unread
    if source == "expert":
        y[int(rows[BAD, slot]), 3] = value
    elif source == "weight":
        weights[BAD, slot] = value
    elif source == "shared":
        shared[BAD, 3] = value
    else:
        streams[BAD, 2, 3] = value
    return (y, rows, offsets, weights, shared), (streams, *others)


@pytest.mark.parametrize(
    ("tokens", "source", "value"),
    [
        *itertools.product((3,), SOURCES, (torch.nan, torch.inf)),
        (9, "expert", torch.nan),
        (9, "stream", torch.inf),
    ],
)
def test_a_bad_row_stays_alone(device, tokens, source, value):
    """Also of tokens whose next start has a launch of its own, from 9 on."""
    case = {**FLASH, "tokens": tokens, "hidden": 32, "weighted": True}
    rows_of, back, pre = build(case, device)
    bad_rows, bad_back = poisoned(rows_of, back, source, value)
    rest = [row for row in range(tokens) if row != BAD]
    clean = hc_combine_post_pre_norm(*rows_of, *back, *pre, **PRE)
    mixed, *others = got = hc_combine_post_pre_norm(*bad_rows, *bad_back, *pre, **PRE)
    assert_bitwise(hc_combine_post(*bad_rows, *bad_back), mixed, "streams")
    hit = mixed[BAD] if source == "weight" else mixed[BAD, :, 3]
    assert not hit.isfinite().any()
    if source != "weight":
        good_columns = [column for column in range(32) if column != 3]
        assert_bitwise(
            mixed[BAD][:, good_columns], clean[0][BAD][:, good_columns], "columns without it"
        )
    assert all(tensor[BAD].isnan().all() for tensor in others)
    for tensor, before in zip(got, clean, strict=True):
        assert_bitwise(tensor[rest], before[rest], "rows without it")


def arguments(device, dtype=torch.bfloat16, tokens=3):
    rows_of, back, pre = build({**FLASH, "tokens": tokens, "hidden": 48, "dtype": dtype}, device)
    return (*rows_of, *back, *pre)


@pytest.mark.rarely_interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_opcheck(device, dtype):
    args = arguments(device, dtype)
    for op, values in (
        (torch.ops.dsv4.hc_combine_post.default, (*args[:8], "auto")),
        (torch.ops.dsv4.hc_combine_post_pre_norm.default, (*args, 1e-6, 1e-6, 4, "auto")),
    ):
        torch.library.opcheck(op, values)
        assert_pure(op, *values)


@pytest.mark.rarely_interpreted
def test_compiles_without_graph_breaks(device):
    def both(*args):
        return hc_combine_post(*args[:8]), *hc_combine_post_pre_norm(*args, **PRE)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (2, 3):
        args = arguments(device, tokens=tokens)
        for got, expected in zip(compiled(*args), both(*args), strict=True):
            assert_bitwise(got, expected)


def test_bad_arguments_are_named():
    args = list(arguments(torch.device("cpu")))
    op = "hc_combine_post"
    with pytest.raises(ValueError, match=rf"{op}: rows has shape \[3, 6\], wanted \[2, k\]"):
        hc_combine_post(*args[:5], *(value[:2] for value in args[5:8]))
    with pytest.raises(ValueError, match=rf"{op}: y has shape \[17, 48\], wanted \[18, "):
        hc_combine_post(args[0][:17], *args[1:8])
    with pytest.raises(TypeError, match=rf"{op}: rows has dtype int64, wanted int32"):
        hc_combine_post(args[0], args[1].long(), *args[2:8])
    with pytest.raises(ValueError, match=rf"{op}: shared has shape \[2, 48\], wanted \[3, 48\]"):
        hc_combine_post(*args[:4], args[4][:2], *args[5:8])
    with pytest.raises(ValueError, match=rf"{op}: streams has shape \[48\], wanted \[..., n, H\]"):
        hc_combine_post(*args[:5], args[5][0, 0], *args[6:8])
    with pytest.raises(IndexError, match=rf"{op}: rows"):
        hc_combine_post(args[0], args[1] + 1, *args[2:8])
    with pytest.raises(ValueError, match=rf"{op}_pre_norm: iterations is 0"):
        hc_combine_post_pre_norm(*args, **{**PRE, "iterations": 0})


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 8, 9, 64, 65])
@pytest.mark.parametrize("weighted", [False, True])
def test_flash_on_a_gpu_is_its_parts(tokens, weighted):
    """Compiled kernels have the bits of the separate ones at Flash's sizes."""
    case = {**FLASH, "tokens": tokens, "hidden": 4096, "weighted": weighted}
    rows_of, back, pre = build(case, torch.device("cuda"))
    settings = {**PRE, "iterations": 20, "backend": "triton"}
    *args, shared = rows_of
    y = moe_combine(*args, shared=shared, backend="triton")
    actual = hc_combine_post_pre_norm(*rows_of, *back, *pre, **settings)
    for got, expected_tensor in zip(
        actual, hc_post_pre_norm(y, *back, *pre, **settings), strict=True
    ):
        assert_bitwise(got, expected_tensor)
    separate = hc_post(y, *back, backend="triton")
    assert_bitwise(hc_combine_post(*rows_of, *back, backend="triton"), separate)
