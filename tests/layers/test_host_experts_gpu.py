"""Experts in host memory on a GPU: captured steps with changing ids, waves, pinned memory."""

from __future__ import annotations

import copy

import pytest
import torch

from dsv4 import layers
from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.layers import HostExperts
from dsv4.layers import _host_memory as host_memory
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving import Runner
from dsv4.serving._capture import CaptureError, captured
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.models import randomize_

pytestmark = pytest.mark.gpu

EXPERTS, TOP_K, HIDDEN = 16, 4, 256
SIZES = {
    "hidden_size": HIDDEN,
    "moe_intermediate_size": 128,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
}


@pytest.fixture(scope="module")
def plain() -> layers.DeepseekV4Experts:
    experts = layers.DeepseekV4Experts(ModelConfig.tiny(**SIZES)).requires_grad_(False)
    randomize_(experts, 1)
    experts.quantize("nvfp4")
    experts = experts.to("cuda", torch.bfloat16)
    experts.pack()
    return experts


def hosted(plain, static: int, slots: int) -> layers.DeepseekV4Experts:
    experts = copy.deepcopy(plain)
    layers.host_experts_(experts, HostExperts(static, slots))
    return experts


def tokens(seed: int, count: int):
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(count, HIDDEN, generator=generator, device="cuda").bfloat16()
    keys = torch.rand(count, EXPERTS, generator=generator, device="cuda")
    ids = keys.topk(TOP_K).indices
    ids[torch.rand(count, TOP_K, generator=generator, device="cuda") < 0.1] = -1
    return x, ids, torch.rand(count, TOP_K, generator=generator, device="cuda")


@pytest.mark.parametrize("count", [1, 2])
@torch.inference_mode()
def test_replays_have_the_bits_of_all_resident_experts(plain, count):
    """A graph reads other ids in each replay; cached slots are poisoned before it begins."""
    layer = hosted(plain, 3, count * TOP_K)
    inputs = tokens(0, count)
    layer(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(*inputs)
    state = layer.hosted
    static = state.static_slots
    state.state.set_slots([*state.state.expert_in.tolist()[:static], *[-1] * state.cached_slots])
    for tensor in state.tensors.values():
        tensor[static:].view(torch.uint8).fill_(0xFF)
    for step in range(200):
        for buffer, new in zip(inputs, tokens(step + 1, count), strict=True):
            buffer.copy_(new)
        graph.replay()
        assert_bitwise(out, plain(*inputs), f"replay {step}")
        if step == 100:  # between steps the host may exchange static experts
            assert layers.repin_(layer, torch.rand(1, EXPERTS)) >= 0
    use = layers.cache_use(layer)
    assert 0 < use.loaded < use.asked


@torch.inference_mode()
def test_waves_are_the_layer(plain):
    """Launches of a wave are planned for fewer experts, so sums may have another order."""
    layer = hosted(plain, 3, 5)
    for step, count in enumerate((9, 1, 200, 1, 33, 1)):
        inputs = tokens(step, count)
        expected, actual = plain(*inputs).float(), layer(*inputs).float()
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-7 * float(expected.std()))


@torch.inference_mode()
def test_a_step_in_waves_is_not_captured(plain):
    layer = hosted(plain, 3, 5)
    inputs = tokens(0, 9)
    layer(*inputs)
    torch.cuda.synchronize()
    with pytest.raises(CaptureError, match="waves are planned on the host"):
        captured(lambda: layer(*inputs), torch.cuda.graph_pool_handle())
    torch.cuda.synchronize()
    layer(*inputs)


def test_host_memory_is_read_by_kernels():
    memory = host_memory.allocate(1 << 22, torch.device("cuda"))
    assert memory.is_pinned()
    memory.copy_(torch.randint(0, 256, (1 << 22,), dtype=torch.uint8))
    assert torch.equal(memory.cuda().cpu(), memory)
    host_memory.release(memory)
    assert not memory.is_pinned()


@pytest.fixture(scope="module")
def model() -> DeepseekV4ForCausalLM:
    config = ModelConfig.tiny(layer_types=(SLIDING, CSA, HCA), vocab_size=128, **SIZES)
    model = DeepseekV4ForCausalLM(config, mtp=False).requires_grad_(False)
    randomize_(model, 3)
    layers.quantize_(model)
    model = model.to("cuda", torch.bfloat16).eval()
    layers.pack_(model)
    layers.host_experts_(model, HostExperts(3, 8))
    return model


def answers(model, capture: bool) -> tuple[list[list[int]], int]:
    prompts = [[1, 2, 3, 4, 5, 6, 7], [9, 8]]
    with Runner(model, max_sequences=2, max_tokens=64, capture=capture, speculate=None) as runner:
        requests = [runner.add(p, max_new_tokens=24, stop_ids=()) for p in prompts]
        while not all(request.done for request in requests):
            runner.step()
        return [list(request.tokens) for request in requests], runner.captures


def test_a_runner_captures_its_steps(model):
    eager, _ = answers(model, capture=False)
    captured, graphs = answers(model, capture=True)
    assert graphs > 0
    assert captured == eager
    with pytest.raises(ValueError, match="wanted at most 2 tokens in a decode step"):
        Runner(model, max_sequences=3, max_tokens=64, capture=True)
