"""Counts of which implementation multiplied each quantised weight, and with which activations."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch

from dsv4 import ModelConfig, debug, dispatch, layers
from dsv4.bench.suites.random_model import Weights, random_model
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.layers.linear import Linear
from dsv4.ops.gemm import gemm
from dsv4.ops.norm import rms_norm
from dsv4.ops.quantize import quantize
from dsv4.testing import strategies

TINY = ModelConfig.tiny(
    hidden_size=128,
    moe_intermediate_size=128,
    n_routed_experts=4,
    q_lora_rank=128,
    o_lora_rank=128,
)
RECIPES = pytest.mark.parametrize("recipe", ["nvfp4", "nvidia"])


def model_of(recipe, config, device="cpu"):
    return random_model(config, torch.device(device), Weights("mxfp4-cast", recipe), pack=False)


def counted(model, tokens):
    """Pack a model, and run it on as many tokens; return both reports."""
    report = layers.pack_(model)
    ids = torch.arange(tokens, device=model.lm_head.weight.device)[None] % 1024
    with debug.count_gemms(model) as counts, torch.no_grad():
        model(ids)
    return report, counts


class TestModel:
    @RECIPES
    def test_every_exact_weight_meets_fp8_activations(self, recipe):
        model = model_of(recipe, TINY.replace(activation="fp8"))
        report, counts = counted(model, 24)
        exact = {name for name, of in report.fp8.items() if of.is_exact}
        assert any(name.endswith("experts.gate_up_proj") for name in exact)
        assert any(name.endswith("self_attn.q_b_proj") for name in exact)
        assert exact == set(report.fp8) == set(counts.weights)
        assert counts.multiplied(activation="fp8") == exact
        assert {call.activation for call in counts.calls} == {"fp8"}
        assert {call.implementation for call in counts.calls} == {"reference"}
        assert f"{len(exact)} of {len(exact)} quantised weights multiplied" in str(counts)

    def test_other_activations_say_so(self):
        model = model_of("nvfp4", TINY)
        for module in model.modules():
            if isinstance(module, (Linear, DeepseekV4Experts)) and module.format is not None:
                module.activation = "nvfp4" if isinstance(module, DeepseekV4Experts) else "bf16"
        _, counts = counted(model, 24)
        routed = {name for name in counts.weights if "mlp.experts." in name}
        assert counts.multiplied(activation="nvfp4") == routed
        assert counts.multiplied(activation="bf16") == set(counts.weights) - routed
        assert not counts.multiplied(activation="fp8")
        assert not counts.multiplied(implementation="fp8")

    @pytest.mark.gpu
    @RECIPES
    def test_fp8_tensor_cores_ran_for_every_exact_weight(self, recipe):
        """At 4096 tokens: attention, shared and routed experts of Flash, of 64 experts a layer."""
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("the kernels are Hopper's")
        flash = ModelConfig.flash()
        first, last = 1, 4  # layers of a window, of CSA and of HCA
        config = flash.replace(
            activation="fp8",
            n_routed_experts=64,
            num_hidden_layers=last - first,
            layer_types=flash.layer_types[first:last],
            mlp_layer_types=flash.mlp_layer_types[first:last],
            num_nextn_predict_layers=0,
            vocab_size=1024,
        )
        report, counts = counted(model_of(recipe, config, "cuda"), 4096)
        exact = {name for name, of in report.fp8.items() if of.is_exact}
        assert exact == set(counts.weights)
        assert counts.multiplied(activation="fp8", implementation="fp8") == exact, str(counts)


class TestCounting:
    @pytest.mark.parametrize("interleaved", [False, True])
    def test_a_fused_weight_counts_for_each_of_its_layers(self, interleaved):
        module = torch.nn.ModuleList([quantised(32 if interleaved else 16 * n) for n in (1, 2)])
        other = quantised(16)
        layers.pack_(module)
        x = torch.zeros(3, 64)
        assert layers.join_weights(list(module), interleaved=interleaved)
        with debug.count_gemms(module) as counts:
            gemm(x, module[0].fused.whole())
            other(x)
            if not interleaved:
                module[1](x)
        assert {(c.weight, n) for c, n in counts.calls.items()} == {
            ("0", 1),
            ("1", 1 if interleaved else 2),
        }

    def test_codes_of_an_input_count_as_fp8(self):
        layer = quantised(16)
        with debug.count_gemms(layer) as counts:
            gemm(quantize(torch.ones(3, 64), "fp8_token"), layer.quantized_weight())
        [call] = counts.calls
        assert dataclasses.astuple(call) == ("", "gemm", "reference", "fp8")

    def test_parts_of_an_operator_are_seen_after_it(self):
        seen = []
        with dispatch.watching(lambda call, row: seen.append((call.op, row.name))):
            args = dispatch.arguments(rms_norm, torch.ones(2, 8), torch.ones(8)).args
            dispatch.first("rms_norm", args)
            rms_norm(torch.ones(2, 8), torch.ones(8))
        rms_norm(torch.ones(2, 8), torch.ones(8))
        assert seen == [("rms_norm", "reference")] * 2

    def test_plans_and_other_threads_are_left_out(self):
        assert dispatch.is_free("auto")
        with debug.count_gemms(quantised(16)) as counts:
            assert not dispatch.is_free("auto")
            thread = threading.Thread(target=quantised(16), args=(torch.ones(3, 64),))
            thread.start()
            thread.join()
        assert not counts.calls
        assert dispatch.is_free("auto")


def quantised(rows):
    layer = Linear(64, rows).requires_grad_(False)
    layer.set_weight(quantize(strategies.normal(rows, (rows, 64)), scaling="weight"))
    return layer
