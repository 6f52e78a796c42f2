"""Models of random weights, and the least cost of their decode steps."""

from __future__ import annotations

import pytest
import torch

from dsv4.bench.random_model import RECIPES, WEIGHTS, Weights, random_model
from dsv4.bench.whole_model import DecodeStep, step_cost
from dsv4.config import ModelConfig
from dsv4.formats import FP8_BLOCK, FRAGMENTS, NVFP4
from dsv4.layers import DeepseekV4Experts

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
    for (name, one), (_, other) in zip(
        packed.state_dict().items(), plain.state_dict().items(), strict=True
    ):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), name


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
    found = costs[2].weight_bytes - costs[1].weight_bytes
    assert found == pytest.approx(whole * (share - share**2) + embedded)
    assert costs[2].kv_bytes == 2 * costs[1].kv_bytes
    assert costs[2].flops == 2 * costs[1].flops


@pytest.mark.parametrize("field", ["values", "recipe"])
def test_unknown_weights_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"weights: {field} is 'other', wanted one of"):
        Weights(**{field: "other"})
