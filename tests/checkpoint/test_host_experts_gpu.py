"""``load(host_experts=)`` on a GPU whose memory is taken: placements, tokens, and the logged line.

A tensor takes the memory of the GPU but for what some of the experts need. So a small model is
placed as a large one is.
"""

from __future__ import annotations

import gc
import logging
import re

import pytest
import torch

import dsv4
from dsv4.bench.suites.random_model import Weights, random_model
from dsv4.checkpoint import Checkpoint, save
from dsv4.checkpoint.filling import FillRequest
from dsv4.checkpoint.host_experts import ExpertSizes
from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.layers.host_experts import cache_use, hosted_of
from dsv4.serving import Runner

CONFIG = ModelConfig.tiny(
    layer_types=(SLIDING, CSA, HCA),
    vocab_size=512,
    hidden_size=1024,
    moe_intermediate_size=512,
    n_routed_experts=64,
    num_experts_per_tok=4,
    num_nextn_predict_layers=0,
)
# In slots, in waves, and through the buffer: 300 tokens make more than 16 choices per expert.
PROMPTS = ([5, 6, 7], list(range(2, 42)), [2 + 7 * i % 499 for i in range(300)])
SHARE = 0.45  # of the experts that the free memory holds


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save(random_model(CONFIG, torch.device("cpu"), Weights(), pack=False), path)
    return path


@pytest.fixture(scope="module")
def sizes(folder) -> ExpertSizes:
    with Checkpoint.open(folder) as checkpoint:
        return ExpertSizes.of(checkpoint, checkpoint.config(), FillRequest(pack=True))


def free_for(sizes: ExpertSizes) -> int:
    """Free bytes of a GPU that hold a share of the experts, the buffer and what else is needed."""
    experts = SHARE * sizes.layers * sizes.experts * sizes.expert_bytes
    buffer = sizes.experts * sizes.expert_bytes
    return int(sizes.kept_bytes() + sizes.other_bytes + experts + buffer)


def answers(model) -> list[list[int]]:
    # A padded prompt would have GEMMs of other sizes.
    options = {"prompt_buckets": (), "prefix_sequences": 0, "speculate": None}
    with Runner(model, max_sequences=1, max_tokens=384, max_chunk=512, **options) as runner:
        requests = [runner.add(p, max_new_tokens=24, stop_ids=()) for p in PROMPTS]
        runner.run()
        return [list(request.tokens) for request in requests]


def test_the_memory_that_is_left_holds_some_experts():
    """What the tests on a GPU build on, with an error of a few allocations."""
    sizes = ExpertSizes(3, 64, 4, 888_876, 8_956_080, 2_500_486_720)  # of the model
    for error in (-16 << 20, 0, 16 << 20):
        placement = sizes.placement(free_for(sizes) + error, 10**13)
        assert placement is not None
        assert 0.3 * sizes.experts < placement.static + placement.slots < 0.7 * sizes.experts
        assert placement.staged > 0
    placement = sizes.with_host_bytes(sizes.layers * sizes.expert_bytes * 40, free_for(sizes))
    assert placement.static == sizes.experts - 40


@pytest.mark.gpu
@pytest.mark.parametrize("value", ["auto", "bytes"])
def test_a_gpu_with_little_memory_gives_the_same_tokens(folder, sizes, value, caplog):
    expected = answers(dsv4.load(folder, device="cuda", progress=False))
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    ballast = torch.empty(free - free_for(sizes), dtype=torch.uint8, device="cuda")
    asked = "auto" if value == "auto" else 40 * sizes.layers * sizes.expert_bytes
    with caplog.at_level(logging.INFO, logger="dsv4.checkpoint"):
        model = dsv4.load(folder, device="cuda", progress=False, host_experts=asked)
    layers = hosted_of(model)
    assert len(layers) == sizes.layers
    static, slots = layers[0].static_slots, layers[0].cached_slots
    assert {(hosted.static_slots, hosted.cached_slots) for hosted in layers} == {(static, slots)}
    assert 0.3 * sizes.experts < static + slots < 0.7 * sizes.experts
    assert value == "auto" or static == sizes.experts - 40
    (line,) = [r.message for r in caplog.records if "host_experts: " in r.message]
    words = rf"of 64 experts of each layer {static} are static and {slots} slots are for the others"
    assert words in line
    in_host = sum(hosted.rows.nbytes for hosted in layers)
    said = re.search(r"([\d.]+) GB in host memory", line)
    assert said is not None
    assert float(said[1]) == pytest.approx(in_host / 1e9, abs=0.051)
    assert all(hosted.rows.is_pinned() for hosted in layers)
    assert answers(model) == expected
    use = cache_use(model)
    assert 0 < use.loaded < use.asked
    assert layers[0].staging is not None
    assert torch.cuda.mem_get_info()[0] > 0
    del ballast
