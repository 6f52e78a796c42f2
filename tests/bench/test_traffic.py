"""Bytes of operator calls: those of the bench's cases, and what they count by numbers of a step."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsv4 import dispatch
from dsv4.bench.cases import cases
from dsv4.bench.problem import Draw
from dsv4.bench.suites import whole_model
from dsv4.bench.suites.model.trace.marks import marking
from dsv4.bench.suites.model.trace.traffic import entry_bytes, moved_bytes, traffic_of
from dsv4.bench.suites.random_model import Weights
from dsv4.bench.suites.random_model import random_model as packed_model
from dsv4.config import CSA, HCA, ModelConfig
from dsv4.kv_cache.pages import Pages
from dsv4.ops.attention import SparseAttentionArgs
from dsv4.ops.compressor import CompressWriteArgs
from dsv4.ops.indexer import IndexerSelectArgs
from dsv4.testing import strategies as fuzz

CPU = torch.device("cpu")
# Operators whose bytes the bench counts in the same way, with all tensors that they read.
COUNTED_ALIKE = (
    *("gemm", "gemm_swiglu", "grouped_gemm", "grouped_gemm_swiglu", "route_topk", "route_hash"),
    *("compressor_projections", "head_norm_rope_", "head_norm_rope_write_kv", "write_kv"),
    *("norm_rope_write_kv", "hc_post_pre_norm", "hc_combine_post_pre_norm", "moe_sort"),
    *("moe_combine", "rms_norm_pair", "quantize_index_queries"),
)


def counted(op, args, result):
    traffic = traffic_of(op, args, result)
    return traffic() if callable(traffic) else traffic


@pytest.mark.parametrize("op", COUNTED_ALIKE)
@pytest.mark.parametrize("tokens", [1, 5])
def test_bytes_are_those_of_the_bench(op, tokens):
    for case in cases(op, "tiny", tokens):
        problem = case.build(Draw(0, CPU))
        call = dispatch.arguments(problem.function, *problem.args, **problem.kwargs)
        outputs = problem.run("reference")
        results = outputs[: len(outputs) - len(problem.mutates)]
        writes = moved_bytes(results) if problem.writes is None else problem.writes
        assert counted(op, call.args, results) == problem.reads + writes, case.name


def test_a_tensor_that_is_there_twice_is_read_once():
    x = torch.zeros(3)
    assert moved_bytes((x, [x, None, x[1:]], 5)) == 12 + 8


def test_an_operator_that_nobody_counts_has_none():
    assert traffic_of("verify_greedy", (torch.zeros(3),), torch.zeros(3)) is None


def test_a_step_has_its_weights_and_entries():
    """Calls together have at least the bytes of the bench's bound, and experts hardly more."""
    config = ModelConfig.tiny(num_nextn_predict_layers=0).replace(
        num_hidden_layers=2, layer_types=(CSA, HCA), mlp_layer_types=("moe", "moe")
    )
    sequences, context = 2, 31  # windows of both ratios close
    model = packed_model(config, CPU, Weights())
    numbers = itertools.count()
    with torch.inference_mode():
        fill = whole_model.Fill(sequences, context, prompts=1, prompt_tokens=context)
        step = whole_model.DecodeStep(model, sequences, context, fill=fill)
        with marking(model, lambda: next(numbers)) as marks:
            step()
        calls = marks.counted().calls
        chosen = step.experts_read()
    cost = whole_model.step_cost(model, sequences, context + 1, chosen)
    assert sum(mark.bytes for mark in calls) >= cost.weight_bytes + cost.kv_bytes
    experts = sum(mark.bytes for mark in calls if mark.name.startswith("grouped_gemm"))
    weights = chosen * whole_model.expert_bytes(model)
    assert weights <= experts <= 1.3 * weights


@given(
    slots=st.lists(st.integers(-1, 40), min_size=6, max_size=6),
    more=st.lists(st.integers(-1, 40), min_size=4, max_size=4),
)
def test_attention_reads_each_entry_once(slots, more):
    pages = Pages.allocate(3, 16, 128, 64)
    q = torch.zeros(2, 4, 128, dtype=torch.bfloat16)
    window, chosen = torch.tensor(slots).view(2, 3), torch.tensor(more).view(2, 2)
    args = SparseAttentionArgs(
        *(q, pages.data, 16, "fp8", window, pages.data, 16, "fp8", chosen),
        *(torch.zeros(4), 64, 1.0, None, None),
    )
    entries = len(set(slots) - {-1}) + len(set(more) - {-1})
    fixed = 2 * q.nbytes + window.nbytes + chosen.nbytes + 16
    assert counted("sparse_attention", args, torch.zeros_like(q)) == fixed + entries * (192 + 8)


@given(
    tokens=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 80)), min_size=1, max_size=5),
    compact=st.booleans(),
)
def test_selection_reads_each_visible_key_once(tokens, compact):
    """Tokens of a sequence share its keys; no more are there than the pages have."""
    sequences, visible = (torch.tensor(values) for values in zip(*tokens, strict=True))
    pages = Pages.allocate(8, 16, 64, 0, "index_mxfp4" if compact else "plain")
    heads = torch.zeros(len(tokens), 2)
    codes = torch.zeros(len(tokens), 2, 32 if compact else 64, dtype=torch.uint8)
    scales = torch.zeros(len(tokens), 2, 2, dtype=torch.uint8) if compact else None
    table = torch.zeros(3, 4, dtype=torch.int32)  # 64 entries
    result = torch.zeros(len(tokens), 4, dtype=torch.int64)
    args = IndexerSelectArgs(
        *(codes, heads, pages.data, 16, pages.entry_format, 0, table, sequences, visible),
        *(4, scales, False),
    )
    keys = sum(max(min(n, 64) for s, n in tokens if s == row) for row in {s for s, _ in tokens})
    fixed = moved_bytes((codes, heads, scales, sequences, visible, result))
    size = 34 if compact else 128
    assert counted("indexer_select", args, result) == fixed + keys * size


@given(
    seed=fuzz.seeds(),
    start=st.integers(0, 30),
    tokens=st.integers(0, 4),
    overlap=st.booleans(),
    padded=st.booleans(),
)
def test_compressor_reads_states_of_the_window_that_closes(seed, start, tokens, overlap, padded):
    """Compare with the positions of that window, and of the one before if they overlap."""
    ratio, dims = 4, 64
    width, slots = dims * (1 + overlap), ratio * (1 + overlap) + 2
    kv, score = (fuzz.normal(seed, (tokens, width), torch.bfloat16) for _ in range(2))
    ape, state = torch.zeros(ratio, width), torch.zeros(1, slots, 2, width)
    pages = Pages.allocate(4, 4, dims, 16)
    weight, frequencies = torch.zeros(dims, dtype=torch.bfloat16), torch.zeros(8)
    args = CompressWriteArgs(
        *(kv, score, ape, state, torch.tensor([0, tokens]), torch.tensor([start])),
        *(torch.tensor([-1 if padded else 0]), weight, frequencies, pages.data, 4, "fp8"),
        *(dims, 16, torch.zeros(1, 4), overlap, 1e-6, False, torch.bfloat16, torch.float32),
    )
    expected = 0
    if not padded:
        closing = [p for p in range(start, start + tokens) if p % ratio == ratio - 1]
        expected = tokens * (2 * 2 * width + 4 * width + 2 * 4 * width)
        for last in closing:  # of four tokens at most one is the last of its window
            first = last - ratio + 1 - (ratio if overlap else 0)
            expected += sum(2 * 4 * dims for p in range(max(first, 0), start))
            expected += (
                entry_bytes("fp8", pages.data, dims, 16) + weight.nbytes + frequencies.nbytes
            )
    assert counted("compress_write", args, None) == expected
