"""Attention over a paged cache: the compressors beside the queries; order, bits and sharing."""

from __future__ import annotations

import pytest
import torch

from dsv4 import dispatch, layers, overlap
from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.kv_cache.paged_cache import Batch, CacheStep, PagedCache
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.models import randomize_
from dsv4.testing.strategies import normal
from tests._tools.stream_log import written_down

KINDS = (SLIDING, HCA, CSA)
LAST = "sparse_attention on current"


@pytest.fixture(scope="module", autouse=True)
def _few_tokens_have_streams():
    """Side streams are used without a captured graph: for a GPU's tests, whose steps are small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "_LAUNCH_BOUND_TOKENS", 0)
        yield


def model_of(*kinds):
    return ModelConfig.tiny(
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        mlp_layer_types=("moe",) * len(kinds),
        num_nextn_predict_layers=0,
    )


def attention(config, index=0, device="cpu"):
    result = layers.DeepseekV4Attention(config, index).to(torch.bfloat16).requires_grad_(False)
    return randomize_(result, 1).to(device)


def step_of(config, tokens, device="cpu"):
    cache = PagedCache(config, max_sequences=2, max_tokens=64, device=device)
    rows = torch.arange(2, device=device)
    return CacheStep(cache, Batch.from_lengths([tokens, tokens], torch.zeros_like(rows), rows))


def hidden(config, step, seed=0, device="cpu"):
    count = step.batch.positions.shape[0]
    return normal(seed, (1, count, config.hidden_size), torch.bfloat16).to(device)


@pytest.mark.parametrize("kind", KINDS)
def test_compressors_wait_for_no_query_and_attention_for_both(kind, monkeypatch):
    config = model_of(kind)
    module, step = attention(config), step_of(config, 40)  # of either of two sequences
    said = written_down(monkeypatch)
    module(hidden(config, step), past_key_values=step)
    if kind == SLIDING:
        assert not [line for line in said if "side" in line]
        return
    # Keys and entries have a stream each; the second also has what keys are weighted with, first.
    stored = {"side": "end 1 of side"} | ({"side 2": "end 2 of side 2"} if kind == CSA else {})
    queries = "head_norm_rope_write_kv"
    first_query = next(i for i, line in enumerate(said) if line.startswith(queries))
    for side, end in stored.items():
        written, ended = said.index(f"compress_write on {side}"), said.index(f"{side} ended")
        assert said.index(f"{side} waits for current") < written < first_query
        assert ended < first_query < said.index(f"current waits for {end}") < said.index(LAST)
    if kind == CSA:
        chosen = said.index("indexer_select on current")
        for expected in ("end 1 of side", "end 1 of side 2"):
            assert said.index(f"current waits for {expected}") < chosen
        assert chosen < said.index("current waits for end 2 of side 2")


def test_few_tokens_have_one_launch_for_all_projections(monkeypatch):
    """One side stream then has keys and entries; attention waits for keys first."""
    config = model_of(CSA)
    module, step = attention(config), step_of(config, 9)
    said = written_down(monkeypatch)
    module(hidden(config, step), past_key_values=step)
    made = said.index("compressor_projections on side")
    written = [i for i, line in enumerate(said) if line == "compress_write on side"]
    assert said.index("side waits for current") < made < written[0]
    assert len(written) == 2
    chosen = said.index("indexer_select on current")
    ends = [f"current waits for end {number} of side" for number in (1, 2, 3)]
    assert max(said.index(ends[0]), said.index(ends[1])) < chosen
    assert chosen < said.index(ends[2]) < said.index(LAST)


@pytest.mark.parametrize("tokens", [9, 40])
def test_few_tokens_are_projected_beside_the_choice_of_entries(tokens, monkeypatch):
    config = model_of(CSA)
    module, step = attention(config), step_of(config, tokens)  # of either of two sequences
    said = written_down(monkeypatch)
    module(hidden(config, step), past_key_values=step)
    where = "side 2" if 2 * tokens <= 64 else "current"
    queries = said.index(f"head_norm_rope_write_kv on {where}")
    assert queries < said.index("indexer_select on current")
    if where == "side 2":
        made = max(i for i, line in enumerate(said) if line == "window_slots on current")
        join = said.index("current waits for end 1 of side 2")
        assert made < said.index("side 2 waits for current") < queries
        assert said.index("indexer_select on current") < join < said.index(LAST)


@pytest.mark.parametrize("kind", KINDS)
def test_operators_of_a_decode_step(kind, monkeypatch):
    """Norms and the write of the entry are one operator; slots come from the selection."""
    config = model_of(kind)
    module, step = attention(config), step_of(config, 1)
    said = written_down(monkeypatch)
    module(hidden(config, step), past_key_values=step)
    ran = [line.split(" on ")[0] for line in said if " on " in line]
    assert ran.count("head_norm_rope_write_kv") == 1
    assert ran.count("indexer_select") == (kind == CSA)
    assert not {"head_norm_rope_", "norm_rope_write_kv", "entry_slots"} & set(ran)


def test_layers_share_what_a_step_has_one_of(monkeypatch):
    config = model_of(CSA, CSA, HCA, HCA)
    step, said = step_of(config, 9), []
    run = dispatch.run

    def record(op, args, *rest):
        said.append(op)
        return run(op, args, *rest)

    modules = [attention(config, index) for index in range(4)]
    monkeypatch.setattr(dispatch, "run", record)
    for module in modules:
        module(hidden(config, step), past_key_values=step)
    assert said.count("rope_tables") == said.count("prefix_slots") == 1
    assert said.count("window_slots") == 2  # to write, and to read


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [CSA, HCA])
def test_two_streams_give_the_bits_of_one(kind, monkeypatch):
    """One of the other streams may be late: it sleeps before and after its work."""
    config = model_of(kind)
    module = attention(config, device="cuda")
    works = [(module.compressor, "write_pages")]
    if kind == CSA:
        indexer = module.compressor.indexer
        works += [(indexer, "write_pages"), (indexer, "head_weights")]
        works.append((module, "_queries_and_entries"))

    def late(run):
        def work(*args):
            torch.cuda._sleep(3_000_000)
            out = run(*args)
            torch.cuda._sleep(3_000_000)
            return out

        return work

    def run():
        step = step_of(config, 25, "cuda")
        outs = [
            module(hidden(config, step, seed, "cuda"), past_key_values=step)[0] for seed in range(3)
        ]
        layer = step.cache.layers[0]
        return (*outs, layer.compressed.data, layer.state)

    with monkeypatch.context() as patched:
        patched.setattr(overlap, "uses_side_streams", lambda x: False)
        expected = run()
    for slow in ([], *([work] for work in works), works):
        with monkeypatch.context() as patched:
            for owner, name in slow:
                patched.setattr(owner, name, late(getattr(owner, name)))
            for actual, tensor in zip(run(), expected, strict=True):
                assert_bitwise(actual, tensor)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [CSA, HCA])
def test_a_captured_step_forks_and_joins(kind):
    config = model_of(kind)
    module = attention(config, device="cuda")
    step, again = (step_of(config, 25, "cuda") for _ in range(2))
    x = hidden(config, step, 0, "cuda")
    module(x, past_key_values=step_of(config, 25, "cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(x, past_key_values=step)[0]
    for seed in (1, 2):
        other = hidden(config, step, seed, "cuda")
        x.copy_(other)
        out.fill_(torch.nan)
        graph.replay()
        fresh = CacheStep(again.cache, again.batch)
        assert_bitwise(out, module(other, past_key_values=fresh)[0])
