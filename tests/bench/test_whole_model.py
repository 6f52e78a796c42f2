"""Models of random weights, and the least cost of their decode steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dsv4.bench.suites.random_model import RECIPES, WEIGHTS, Weights, random_model
from dsv4.bench.suites.whole_model import (
    FILL_CHUNK,
    DecodeStep,
    Fill,
    prompt_flops,
    step_cost,
)
from dsv4.config import ModelConfig
from dsv4.layers import DeepseekV4Experts
from dsv4.quant.formats import FP8_BLOCK, FRAGMENTS, NVFP4

CONFIG = ModelConfig.tiny(hidden_size=256, moe_intermediate_size=128)
CPU = torch.device("cpu")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("values", WEIGHTS)
def test_matrices_keep_the_magnitude_of_what_passes(values: str, recipe: str) -> None:
    model = random_model(CONFIG, CPU, Weights(values, recipe), pack=False)
    attention = NVFP4 if recipe == "nvfp4" else FP8_BLOCK
    assert model.lm_head.format is None
    for layer in model.model.layers:
        q_b, experts = layer.self_attn.q_b_proj, layer.mlp.experts
        assert (q_b.format, experts.format) == (attention, NVFP4)
        for dense, columns in (
            (q_b.dense_weight(torch.float64), q_b.in_features),
            (experts.dense_weight("gate_up_proj", torch.float64), CONFIG.hidden_size),
        ):
            assert 0.65 < float(dense.std()) * columns**0.5 < 1.5
        scales = experts.gate_up_proj_scale.double()
        powers = bool((scales.log2() == scales.log2().round()).all())
        assert powers == (values == "mxfp4-cast")
    hidden, _ = model.model(torch.randint(0, CONFIG.vocab_size, (1, 40)))
    assert 0.5 < float(hidden.float().std()) < 2


def test_packed_as_it_is_drawn_it_is_the_same_model() -> None:
    packed, plain = (random_model(CONFIG, CPU, Weights(), pack=p) for p in (True, False))
    for layer in packed.model.layers:
        assert layer.mlp.experts.layout == FRAGMENTS
    for (name, tensor), (_, other) in zip(
        packed.state_dict().items(), plain.state_dict().items(), strict=True
    ):
        assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)), name


def test_a_step_repeats_itself() -> None:
    model = random_model(CONFIG, CPU, Weights())
    with torch.inference_mode():
        step = DecodeStep(model, 3, 70)
        assert torch.equal(step(), step())


def test_the_least_bytes_are_those_of_the_chosen_experts() -> None:
    model = random_model(CONFIG, CPU, Weights(), pack=False)
    costs = {n: step_cost(model, n, 70) for n in (1, 2, 1000)}
    experts = [m for m in model.modules() if isinstance(m, DeepseekV4Experts)]
    whole = sum(t.nbytes for m in experts for t in (*m.parameters(), *m.buffers()))
    share = CONFIG.num_experts_per_tok / CONFIG.n_routed_experts
    embedded = model.model.embed_tokens.weight[0].nbytes
    added = costs[2].weight_bytes - costs[1].weight_bytes
    assert added == pytest.approx(whole * (share - share**2) + embedded)
    assert costs[2].kv_bytes == 2 * costs[1].kv_bytes
    assert costs[2].flops == 2 * costs[1].flops


@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_a_prompt_does_the_work_of_its_tokens_but_for_the_head(tokens: int) -> None:
    model = random_model(CONFIG, CPU, Weights(), pack=False)
    one_by_one = sum(step_cost(model, 1, context).flops for context in range(1, tokens + 1))
    head = 2 * CONFIG.vocab_size * CONFIG.hidden_size
    assert prompt_flops(model, tokens) == one_by_one - (tokens - 1) * head


def test_experts_that_a_step_reads_are_counted() -> None:
    model = random_model(CONFIG, CPU, Weights())
    with torch.inference_mode():
        assert DecodeStep(model, 1, 9).experts_read() == CONFIG.num_experts_per_tok
        assert 4 < DecodeStep(model, 8, 9).experts_read() <= CONFIG.n_routed_experts
    assert not any(m._forward_hooks for m in model.modules())
    fewer = step_cost(model, 8, 9, experts_read=2.0)
    assert fewer.weight_bytes < step_cost(model, 8, 9).weight_bytes


@given(sequences=st.integers(1, 200), context=st.integers(1, 1 << 20), most=st.integers(1, 1 << 16))
@example(sequences=64, context=4096, most=32768)
@example(sequences=8, context=131072, most=32768)
def test_few_prompts_fill_a_cache(sequences: int, context: int, most: int) -> None:
    fill = Fill.plan(sequences, context, most)
    assert 1 <= fill.prompts <= sequences
    assert fill.prompts * fill.prompt_tokens <= max(most, 256)
    assert fill.prompt_tokens == context or fill.prompt_tokens % 256 == 0
    more = fill.prompts + 1
    assert fill.prompts == sequences or more * fill.prompt_tokens > max(most, 256)


@pytest.mark.parametrize("prompt_tokens", [0, 128, 257, 8192])
def test_prompts_of_parts_of_a_block_are_refused(prompt_tokens: int) -> None:
    """The pages of such prompts could not be repeated."""
    with pytest.raises(ValueError, match=f"prompt_tokens is {prompt_tokens}, wanted the context"):
        Fill(1, 4096, 1, prompt_tokens)


@pytest.mark.parametrize("sequences", [3, 64])
def test_steps_that_fill_a_cache_are_bounded(sequences: int, monkeypatch) -> None:
    """So that a list of kernels for ``FILL_CHUNK`` tokens has theirs."""
    monkeypatch.setattr("dsv4.bench.suites.whole_model.FILL_CHUNK", 256)
    model, tokens = random_model(CONFIG, CPU, Weights()), []
    model.model.register_forward_pre_hook(lambda module, args: tokens.append(args[0].numel()))
    with torch.inference_mode():
        DecodeStep(model, sequences, 7, fill=Fill.plan(sequences, 7))
    assert 0 < max(tokens) <= 256 < FILL_CHUNK


def test_copies_compute_what_their_prompts_do() -> None:
    model = random_model(CONFIG, CPU, Weights())
    with torch.inference_mode():
        step = DecodeStep(model, 4, 70, fill=Fill(4, 70, 2, 70))
        step.tokens[:] = 5
        tokens = step()
    assert str(step.fill) == "2 prompts of 70 tokens, copied to 4 sequences"
    assert torch.equal(tokens[:2], tokens[2:])
    assert not torch.equal(tokens[0], tokens[1])


def test_pages_are_repeated_up_to_the_context() -> None:
    model = random_model(CONFIG, CPU, Weights())
    fill = Fill(2, 700, 1, 256)
    with torch.inference_mode():
        step = DecodeStep(model, 2, 700, fill=fill)
        pages = [
            data[table[row]]
            for layer in step.cache.layers
            for table in [layer.compressed_table]
            if table is not None
            for data in layer.pools(layer.ratio)
            for row in (0, 1)
        ]
        logits = step()
        assert torch.equal(logits, step())
    assert str(fill) == ("1 prompt of 256 tokens, pages repeated up to 700, copied to 2 sequences")
    assert len(pages) == 2 * 5, "two layers with index keys, one without"
    for data in pages:
        assert data[0].any()
        assert len(data) >= 3
        for page in data[1:]:
            assert torch.equal(page.view(torch.uint8), data[0].view(torch.uint8))
    assert step.cache.lengths.tolist() == [701, 701]
    assert bool(logits.isfinite().all())


@pytest.mark.parametrize("field", ["values", "recipe"])
def test_unknown_weights_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"weights: {field} is 'other', wanted one of"):
        Weights(**{field: "other"})
