"""Query heads and KV entries in one step: the bits of the two operators, and one launch."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.ops.head_norm_rope_write_kv import head_norm_rope_write_kv
from dsv4.ops.kv_cache import Pages, norm_rope_write_kv, read_kv
from dsv4.ops.norm import head_norm_rope_
from dsv4.ops.rope import rope_tables
from dsv4.testing import strategies as fuzz
from dsv4.testing.assertions import assert_bitwise

KERNELS = ("triton",)
INTERPRETED_SHARE = 3
_TESTS = ("test_schema", "test_faketensor")
EPS = {"q_eps": 1e-6, "kv_eps": 1e-3}
# (head_dim, rotated dims): the model's; all dims; a few; dims that one warp does not share.
DIMS = ((512, 64), (64, 64), (128, 8), (130, 10), (70, 20))

cases = st.fixed_dictionaries(
    {
        "seed": fuzz.seeds(),
        "tokens": fuzz.rows(9),
        "heads": st.integers(1, 5),
        "dims": st.sampled_from(DIMS),
        "entry_format": st.sampled_from(["fp8", "plain"]),
        "dtype": st.sampled_from([torch.bfloat16, torch.float32]),
        "strided": st.booleans(),
        "index": st.sampled_from([torch.int32, torch.int64]),
    }
)


def build(case, device):
    """Queries, pages and the other arguments; about a third of the slots are skipped."""
    seed, tokens = case["seed"], case["tokens"]
    head_dim, rotated = case["dims"]
    dtype = case["dtype"]
    q = fuzz.normal(seed, (tokens, case["heads"], head_dim), dtype)
    kv = fuzz.normal(seed + 1, (tokens, 2 * head_dim), dtype)[:, head_dim:]
    weight = fuzz.normal(seed + 2, (head_dim,), dtype)
    q, kv, weight = q.to(device), kv.to(device), weight.to(device)
    if case["strided"]:
        q = torch.cat((q, q), 2)[:, :, head_dim:]
    else:
        kv = kv.contiguous()
    positions = torch.arange(tokens, device=device) * 1000 + seed % 1000
    frequencies = torch.rand(rotated // 2, generator=fuzz.generator(seed)).to(device)
    cos, sin = rope_tables(positions, frequencies)
    count = max(1, tokens)
    pages = Pages.allocate(count, 4, head_dim, rotated, case["entry_format"], dtype, device)
    slots = torch.randperm(4 * count, generator=fuzz.generator(seed))[:tokens]
    slots = torch.where(slots % 3 == 0, -1, slots).to(device, case["index"])
    return q, pages, (kv, weight, cos, sin, slots)


def copies(q, pages):
    """A copy of both, q with its strides."""
    other = q.new_empty_strided(q.shape, q.stride()).copy_(q)
    return other, replace(pages, data=pages.data.clone())


@given(case=cases)
@example(
    {
        "seed": 0,
        "tokens": 2,
        "heads": 64,
        "dims": DIMS[0],
        "entry_format": "fp8",
        "dtype": torch.bfloat16,
        "strided": False,
        "index": torch.int64,
    }
)
def test_the_bits_are_those_of_both_operators(device, case):
    q, pages, (kv, weight, cos, sin, slots) = build(case, device)
    expected_q, expected = copies(q, pages)
    head_norm_rope_write_kv(q, pages, kv, weight, cos, sin, slots, **EPS)
    head_norm_rope_(expected_q, cos, sin, EPS["q_eps"])
    norm_rope_write_kv(expected, kv, weight, cos, sin, slots, eps=EPS["kv_eps"])
    assert_bitwise(q, expected_q, "q")
    assert_bitwise(pages.data, expected.data, "pages")


def case_of(tokens, heads=4, dims=(512, 64), dtype=torch.bfloat16):
    return {
        "seed": tokens,
        "tokens": tokens,
        "heads": heads,
        "dims": dims,
        "entry_format": "fp8",
        "dtype": dtype,
        "strided": False,
        "index": torch.int64,
    }


@pytest.mark.parametrize(
    ("case", "launches"),
    [
        (case_of(1), 1),
        (case_of(128), 1),
        (case_of(129), 2),  # entries have programs of four warps
        (case_of(2, dims=(130, 10)), 2),  # no programs of 8 columns to a thread
        (case_of(2, 1, (4096, 64), torch.float32), 2),  # heads have programs of four warps
    ],
)
def test_few_tokens_have_one_launch(case, launches, monkeypatch):
    pytest.importorskip("triton")
    from dsv4.device import interpret_triton
    from dsv4.triton import kv_cache, norm

    counted = []
    for module, name in ((norm, "head_norm_rope_"), (kv_cache, "norm_rope_write_kv")):
        run = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda args, run=run, name=name: (counted.append(name), run(args))
        )
    q, pages, rest = build(case, "cpu")
    expected_q, expected = copies(q, pages)
    with interpret_triton():
        head_norm_rope_write_kv(q, pages, *rest, **EPS, backend="triton")
    assert len(counted) == (0 if launches == 1 else 2)
    head_norm_rope_write_kv(expected_q, expected, *rest, **EPS, backend="reference")
    live = rest[-1][rest[-1] >= 0]
    assert bool(live.numel()) == bool(pages.data.any())
    torch.testing.assert_close(q, expected_q, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("entry_format", "source", "value"),
    [
        *itertools.product(("fp8",), ("head", "entry", "angle"), (torch.nan, torch.inf)),
        ("plain", "entry", torch.inf),
    ],
)
def test_a_bad_row_stays_alone(device, entry_format, source, value):
    """A bad head is NaN alone, and so is a bad entry; a bad angle is in all of its token."""
    case = {**case_of(3, heads=3), "entry_format": entry_format}
    q, pages, (kv, weight, cos, sin, slots) = build(case, device)
    slots = torch.tensor([5, 2, 9], device=device)  # every token is stored
    clean_q, clean = copies(q, pages)
    head_norm_rope_write_kv(clean_q, clean, kv, weight, cos, sin, slots, **EPS)
    kv, cos = kv.clone(), cos.clone()
    tensor, at = {"head": (q, (1, 2, 7)), "entry": (kv, (1, 7)), "angle": (cos, (1, 3))}[source]
    tensor[at] = value
    head_norm_rope_write_kv(q, pages, kv, weight, cos, sin, slots, **EPS)
    stored = read_kv(pages, slots)
    assert stored[1].isfinite().all() == (source == "head")
    if source == "head":
        assert q[1, 2].isnan().all()
        q[1, 2] = clean_q[1, 2]
    elif source == "entry":
        assert stored[1].isnan().all()
    else:
        # Value 3 of cos turns the pair 6 and 7 of the last 64 dims; the others are as they were.
        same = [dim for dim in range(512) if dim not in (448 + 6, 448 + 7)]
        assert not q[1, :, 448 + 6 : 448 + 8].isfinite().any()
        assert_bitwise(q[1, :, same], clean_q[1, :, same], "dims without it")
        q[1] = clean_q[1]
    assert_bitwise(q, clean_q, "heads without it")
    others = torch.tensor([slot for slot in range(12) if slot != 2], device=device)
    assert_bitwise(read_kv(pages, others), read_kv(clean, others), "entries without it")
    if source == "head":
        assert_bitwise(pages.data, clean.data, "pages")


def test_no_tokens_no_heads_and_no_pages(device):
    for tokens, heads, count in ((0, 3, 2), (2, 0, 2), (0, 3, 0)):
        pages = Pages.allocate(count, 4, 64, 8, device=device)
        q = torch.ones(tokens, heads, 64, dtype=torch.bfloat16, device=device)
        kv, weight = q.new_ones(tokens, 64), q.new_ones(64)
        cos, sin = (torch.ones(tokens, 4, device=device) for _ in range(2))
        slots = torch.arange(tokens, device=device)
        head_norm_rope_write_kv(q, pages, kv, weight, cos, sin, slots)
        assert bool(pages.data.any()) == bool(tokens)


@pytest.mark.parametrize("entry_format", ["fp8", "plain"])
def test_opcheck(device, entry_format):
    q, pages, rest = build({**case_of(3), "dims": (64, 8), "entry_format": entry_format}, device)
    sizes = pages.page_size, entry_format, 64, 8
    torch.library.opcheck(
        torch.ops.dsv4.head_norm_rope_write_kv.default,
        (q, pages.data, *sizes, *rest, 1e-6, 1e-6, "auto"),
        test_utils=_TESTS,
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(device, dynamic):
    torch.compiler.reset()
    compiled = torch.compile(
        head_norm_rope_write_kv, fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    for tokens in (2, 5):
        q, pages, rest = build(case_of(tokens, dims=(64, 8)), device)
        expected_q, expected = copies(q, pages)
        compiled(q, pages, *rest)
        head_norm_rope_write_kv(expected_q, expected, *rest)
        assert_bitwise(q, expected_q)
        assert_bitwise(pages.data, expected.data)


def test_bad_input_is_named_and_changes_nothing(device):
    q, pages, (kv, weight, cos, sin, slots) = build(case_of(3, dims=(64, 8)), device)
    before, run = q.clone(), head_norm_rope_write_kv
    with pytest.raises(TypeError, match="kv has dtype float16"):
        run(q, pages, kv.half(), weight, cos, sin, slots)
    with pytest.raises(ValueError, match=r"kv has shape \[2, 64\], wanted \[3, 64\]"):
        run(q, pages, kv[:2], weight, cos, sin, slots)
    with pytest.raises(ValueError, match=r"q has shape \[3, 4, 63\], wanted \[any, any, 64\]"):
        run(q[..., :63], pages, kv, weight, cos, sin, slots)
    with pytest.raises(ValueError, match=r"q has strides \[256, 1, 4\], wanted 1 along"):
        run(q.view(3, 64, 4).transpose(1, 2), pages, kv, weight, cos, sin, slots)
    with pytest.raises(ValueError, match=r"q has shape .* overlap itself"):
        run(q[:, :1].expand(3, 4, 64), pages, kv, weight, cos, sin, slots)
    wide = torch.ones(3, 33, device=device)
    with pytest.raises(ValueError, match=r"cos has shape \[3, 33\], wanted .* R <= 64"):
        run(q, pages, kv, weight, wide, wide, slots)
    if device.type == "cpu":
        with pytest.raises(IndexError, match="slots"):
            run(q, pages, kv, weight, cos, sin, slots + 100)
    assert_bitwise(q, before)
    assert not pages.data.any()


@pytest.mark.gpu
@pytest.mark.parametrize("entry_format", ["fp8", "plain"])
@pytest.mark.parametrize("tokens", [1, 2, 8, 64, 128, 129])
def test_a_captured_graph_has_the_bits_of_both_operators(tokens, entry_format):
    device = torch.device("cuda")
    case = {**case_of(tokens, heads=64), "entry_format": entry_format}
    q, pages, rest = build(case, device)
    other_q, other = copies(q, pages)
    start_q, start = q.clone(), pages.data.clone()
    head_norm_rope_write_kv(q, pages, *rest, **EPS)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        head_norm_rope_write_kv(q, pages, *rest, **EPS)
    q.copy_(start_q)
    pages.data.copy_(start)
    graph.replay()
    kv, weight, cos, sin, slots = rest
    head_norm_rope_(other_q, cos, sin, EPS["q_eps"])
    norm_rope_write_kv(other, kv, weight, cos, sin, slots, eps=EPS["kv_eps"])
    assert_bitwise(q, other_q)
    assert_bitwise(pages.data, other.data)
