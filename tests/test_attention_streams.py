"""Attention over a paged cache: the compressors beside the queries; order, bits and sharing."""

from __future__ import annotations

import pytest
import torch
from stream_log import written_down

from dsv4 import dispatch, layers
from dsv4.cache import Batch, CacheStep, PagedCache
from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.layers import _beside
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.models import randomize_
from dsv4.testing.strategies import normal

KINDS = (SLIDING, HCA, CSA)
LAST = "sparse_attention on current"


def model_of(*kinds):
    return ModelConfig.tiny(
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        mlp_layer_types=("moe",) * len(kinds),
        num_nextn_predict_layers=0,
    )


def attention(config, index=0, device="cpu"):
    found = layers.DeepseekV4Attention(config, index).to(torch.bfloat16).requires_grad_(False)
    return randomize_(found, 1).to(device)


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
    module, step = attention(config), step_of(config, 9)
    said = written_down(monkeypatch)
    module(hidden(config, step), past_key_values=step)
    if kind == SLIDING:
        assert not [line for line in said if "side" in line]
        return
    forks = [i for i, line in enumerate(said) if line == "side waits for current"]
    ends = [i for i, line in enumerate(said) if line == "side ended"]
    joins = [said.index(f"current waits for end {i + 1} of side") for i in range(len(ends))]
    queries, attends = said.index("head_norm_rope_ on current"), said.index(LAST)
    assert len(forks) == len(ends) == (2 if kind == CSA else 1)
    assert max(ends) < queries < min(joins)
    assert max(joins) < attends
    for fork, end in zip(forks, ends, strict=True):
        assert said[fork:end].count("compress_write on side") == 1
    if kind == CSA:  # the keys first: they are wanted first
        assert joins[0] < said.index("indexer_select on current") < joins[1]


def test_layers_share_what_a_step_has_one_of(monkeypatch):
    config = model_of(CSA, CSA, HCA, HCA)
    step, said = step_of(config, 9), []
    run = dispatch.run

    def record(op, args):
        said.append(op)
        return run(op, args)

    modules = [attention(config, index) for index in range(4)]
    monkeypatch.setattr(dispatch, "run", record)
    for module in modules:
        module(hidden(config, step), past_key_values=step)
    assert said.count("rope_tables") == said.count("prefix_slots") == 1
    assert said.count("window_slots") == 2  # to write, and to read


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [CSA, HCA])
def test_two_streams_give_the_bits_of_one(kind, monkeypatch):
    """Also when the second one is late: it sleeps before and after its work."""
    config = model_of(kind)
    module = attention(config, device="cuda")
    run = module.compressor.write_pages

    def late(*args):
        torch.cuda._sleep(3_000_000)
        run(*args)
        torch.cuda._sleep(3_000_000)

    found = {}
    for streams in (1, 2):
        if streams == 1:
            monkeypatch.setattr(_beside, "possible", lambda x: False)
        else:
            monkeypatch.undo()
            monkeypatch.setattr(module.compressor, "write_pages", late)
        step = step_of(config, 25, "cuda")
        outs = [
            module(hidden(config, step, seed, "cuda"), past_key_values=step)[0] for seed in range(3)
        ]
        layer = step.cache.layers[0]
        found[streams] = (*outs, layer.compressed.data, layer.state)
    for one, two in zip(found[1], found[2], strict=True):
        assert_bitwise(two, one)


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
