"""Experts in host memory on a GPU: captured steps with changing ids, waves, pinned memory."""

from __future__ import annotations

import copy
import os

import pytest
import torch

import dsv4
from dsv4 import layers
from dsv4.config import ModelConfig
from dsv4.debug import compilations
from dsv4.layers import HostExperts
from dsv4.layers import _host_memory as host_memory
from dsv4.layers import experts as experts_module
from dsv4.layers._expert_staging import ExpertStaging
from dsv4.layers.host_experts import Hosting
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving import Runner
from dsv4.serving._capture import CaptureError, captured
from dsv4.serving._setup import default_index_format
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.models import randomize_
from tests._tools import host_soak
from tests.speculation.mixed_drafts import mix

pytestmark = pytest.mark.gpu

# With 4096 columns K is split for up to 64 rows, so waves of fewer rows could have other sums.
EXPERTS, TOP_K, HIDDEN = 32, 4, 4096
PROMPTS = ([1, 2, 3, 4, 5, 6, 7], [9, 8])


@pytest.fixture(scope="module")
def plain() -> layers.DeepseekV4Experts:
    config = ModelConfig.tiny(
        hidden_size=HIDDEN,
        moe_intermediate_size=256,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
    )
    experts = layers.DeepseekV4Experts(config).requires_grad_(False).cuda()
    randomize_(experts, 1)
    experts.quantize("nvfp4")
    experts = experts.to(torch.bfloat16)
    experts.pack()
    dsv4.warmup(experts, max_tokens=64, progress=False)  # in parallel processes
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
            assert layers.repin_(layer, torch.randint(100, (1, EXPERTS))) >= 0
    use = layers.cache_use(layer)
    assert 0 < use.loaded < use.asked


@pytest.mark.parametrize(("static", "slots"), [(3, 5), (18, 8)])
@torch.inference_mode()
def test_waves_have_the_bits_of_all_resident_experts(plain, static, slots):
    """A wave takes the kernels for all rows of the step, not for its own: 17 tokens are 68."""
    layer = hosted(plain, static, slots)
    for step, count in enumerate((9, 1, 17, 2, 24, 40, 1, 64, 17)):
        inputs = tokens(step, count)
        expected = plain(*inputs)
        assert_bitwise(layer(*inputs), expected, f"{count} tokens")
        assert_bitwise(layer(*inputs), expected, f"{count} tokens again")


@pytest.fixture
def staged(plain):
    """Three layers whose prompts all pass through a buffer of two times four experts."""
    hosting = Hosting(HostExperts(3, 8, staged=4), 3)
    made = [copy.deepcopy(plain) for _ in range(3)]
    for layer in made:
        hosting.move(layer)
    hosting.staging.choices_per_expert = 0
    return made, hosting.staging


@pytest.mark.parametrize("late", ["copies", "gemms", "none"])
@torch.inference_mode()
def test_prompts_by_layers_have_the_bits_of_all_resident_experts(plain, staged, late, monkeypatch):
    """Copies that are late are waited for, and no copy overwrites what a late GEMM reads."""
    made, staging = staged
    original, spin = ExpertStaging._copy, 2_000_000  # cycles: longer than a copy or a GEMM

    def slow_copy(self, half, load):
        torch.cuda._sleep(spin)
        original(self, half, load)

    def slow(function):
        def call(*arguments, **options):
            torch.cuda._sleep(spin)
            return function(*arguments, **options)

        return call

    if late == "copies":
        monkeypatch.setattr(ExpertStaging, "_copy", slow_copy)
    if late == "gemms":
        for name in [name for name in vars(experts_module) if name.startswith("grouped_gemm")]:
            monkeypatch.setattr(experts_module, name, slow(getattr(experts_module, name)))
    for step, count in enumerate((64, 9, 1, 40, 64, 2, 17)):
        if step % 2:  # between steps, what is in the buffer counts for nothing
            torch.cuda.synchronize()
            staging._staged.clear()
            for half in staging._halves:
                half.memory.fill_(0xFF)
        for number, layer in enumerate(made):
            before = layer.hosted.state.expert_in.tolist()
            inputs = tokens(10 * step + number, count)
            assert_bitwise(layer(*inputs), plain(*inputs), f"{count} tokens, layer {number}")
            if count * TOP_K > 8:
                assert layer.hosted.state.expert_in.tolist() == before, "slots changed"
    use = layers.cache_use(torch.nn.ModuleList(made))
    assert 0 < use.loaded < use.asked


@torch.inference_mode()
def test_replays_after_a_prompt_by_layers(plain, staged):
    """A graph captured before a prompt goes on with the slots, which the prompt left alone."""
    layer = staged[0][0]
    inputs = tokens(0, 2)
    layer(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(*inputs)
    for step in range(40):
        for buffer, new in zip(inputs, tokens(step + 1, 2), strict=True):
            buffer.copy_(new)
        graph.replay()
        assert_bitwise(out, plain(*inputs), f"replay {step}")
        if step % 4 == 0:
            prompt = tokens(step, 64)
            assert_bitwise(layer(*prompt), plain(*prompt), f"prompt {step}")


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
    host_memory.release(memory, torch.device("cuda"))
    assert not memory.is_pinned()


def test_memory_that_cannot_be_locked_leaves_no_error(monkeypatch):
    """CUDA's last error would be raised by the next launch."""
    memory = host_memory.allocate(1 << 20, torch.device("cuda"))
    monkeypatch.setattr(host_memory, "_mapped", lambda nbytes: memory)  # it is locked already
    with pytest.raises(MemoryError, match=r"cudaHostRegister returned \d+\); \d+\.\d GB are avail"):
        host_memory.allocate(1 << 20, torch.device("cuda"))
    assert torch.ones(3, device="cuda").sum().item() == 3
    host_memory.release(memory, torch.device("cuda"))


@pytest.fixture(scope="module")
def models() -> tuple[DeepseekV4ForCausalLM, DeepseekV4ForCausalLM]:
    """A model, and the same with experts in host memory and warm kernels."""
    model = host_soak.small_model(torch.device("cuda"), mtp=True)
    other = copy.deepcopy(model)
    layers.host_experts_(other, HostExperts(3, 8, staged=2))
    done = dsv4.warmup(other, max_tokens=64, progress=False)
    assert done.failed == {}
    return model, other


def answers(model, capture: bool) -> tuple[list[list[int]], int]:
    # A padded prompt would have GEMMs of other sizes.
    options = {"max_sequences": 2, "max_tokens": 64, "prompt_buckets": ()}
    with Runner(model, **options, capture=capture, speculate=None) as runner:
        requests = [runner.add(p, max_new_tokens=24, stop_ids=()) for p in PROMPTS]
        runner.run()
        return [list(request.tokens) for request in requests], runner.captures


def test_after_a_warm_up_nothing_compiles(models):
    """Prompts in waves of any number of rows, steps in slots, captured ones."""
    model, before = models[1], compilations()
    with Runner(model, max_sequences=1, max_tokens=80, max_chunk=64, capture=False) as runner:
        for length in (1, 2, 3, 5, 11, 21, 40, 64):
            runner.add([length] * length, max_new_tokens=3, stop_ids=())
        runner.run()
    answers(model, capture=True)
    assert compilations() - before == {}


@torch.inference_mode()
def test_logits_have_the_bits_of_all_resident_experts(models):
    generator = torch.Generator().manual_seed(5)
    staging = models[1].model.layers[0].mlp.experts.hosted.staging
    for count in (1, 2, 5, 23, 64, 64):
        staging.choices_per_expert = 16 if staging.choices_per_expert == 0 else 0  # both ways
        prompt, logits = torch.randint(0, 128, (count,), generator=generator).tolist(), []
        for model in models:
            index_format = default_index_format(model.config)
            cache = model.new_cache(1, 80, 64, index_format=index_format)
            logits.append(model.prefill([prompt], cache, [cache.allocate()]))
        assert_bitwise(logits[1], logits[0], f"{count} tokens")


def test_a_runner_captures_its_steps(models):
    resident, model = models
    expected, _ = answers(resident, capture=True)
    eager, _ = answers(model, capture=False)
    captured, graphs = answers(model, capture=True)
    assert graphs > 0
    assert captured == eager == expected
    with pytest.raises(ValueError, match="wanted at most 2 tokens in a decode step"):
        Runner(model, max_sequences=3, max_tokens=64, capture=True)
    with pytest.raises(ValueError, match="wanted at most 2 tokens in a decode step"):
        Runner(model, max_sequences=2, max_tokens=64, capture=True, speculate="mtp")


def test_a_runner_drafts(models):
    """One draft of one sequence fits the slots, in captured steps."""
    texts = []
    for model in models:
        options = {"max_sequences": 1, "max_tokens": 64, "prompt_buckets": ()}
        options |= {"speculate": "mtp", "draft_tokens": 1}
        with Runner(model, **options, capture=True) as runner:
            request = runner.add(PROMPTS[0], max_new_tokens=24, stop_ids=())
            runner.run()
            assert runner.draft_counts.drafted > 0
            assert runner.captures > 0
            texts.append(request.tokens)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("drafts", [1, 3, 8])
def test_drafts_in_waves_have_the_text_of_all_resident_experts(models, drafts):
    """Two sequences with drafts choose more experts than slots hold; no wave compiles a kernel.

    Random weights draft hardly anything right. So the drafts of some steps are the text itself.
    """
    text, _ = answers(models[0], capture=False)
    known = {i: [*prompt, *text[i]] for i, prompt in enumerate(PROMPTS)}
    texts, accepted, before = [], [], compilations()
    for model in models:
        options = {"max_sequences": 2, "max_tokens": 64, "prompt_buckets": (), "capture": False}
        with Runner(model, **options, speculate="mtp", draft_tokens=drafts) as runner:
            mix(runner, known, 0.6, seed=1)
            requests = [runner.add(p, max_new_tokens=24, stop_ids=()) for p in PROMPTS]
            runner.run()
            texts.append([list(request.tokens) for request in requests])
            accepted.append(runner.draft_counts.accepted)
        if model is models[0]:
            before = compilations()
    assert compilations() - before == {}
    assert accepted[0] == accepted[1] > 0
    assert texts[0] == texts[1]


@pytest.mark.nightly
def test_a_soak():
    """``DSV4_SOAK_SECONDS`` of captured decode, 30 minutes by default."""
    host_soak.soak(float(os.environ.get("DSV4_SOAK_SECONDS", "1800")), "cuda")
