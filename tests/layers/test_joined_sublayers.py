"""What a decoder layer does in one operator is what its modules do one after the other."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from dsv4 import dispatch, layers
from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.testing.assertions import assert_bitwise
from dsv4.testing.models import random_model

SIZES = {"hidden_size": 256, "moe_intermediate_size": 128, "n_routed_experts": 16}
KINDS = (SLIDING, CSA, HCA)


def a_model(numerics="deepseek", packed=False):
    config = ModelConfig.tiny(
        layer_types=KINDS,
        mlp_layer_types=("hash_moe", "moe", "moe"),
        num_nextn_predict_layers=0,
        numerics=numerics,
        **SIZES,
    )
    model = random_model(config, 3, torch.bfloat16)
    if packed:
        layers.quantize_(model)
        layers.pack_(model)
    return model


def operators(call, monkeypatch):
    """Return the result of a call, and how often it runs each operator."""
    counts, run = Counter(), dispatch.run

    def counted(op, *args, **kwargs):
        counts[op] += 1
        return run(op, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "run", counted)
        return call(), counts


def nothing(*args):
    return None


def replace_forward(module):
    """Make a module's ``forward`` an attribute of its own; return what takes it back."""
    module.forward = module.forward
    return lambda: delattr(module, "forward")


WATCHED = {
    "a hook of the block": lambda layer: layer.mlp.register_forward_hook(nothing).remove,
    "a hook in front of it": lambda layer: layer.mlp.register_forward_pre_hook(nothing).remove,
    "a hook of the experts": lambda layer: layer.mlp.experts.register_forward_hook(nothing).remove,
    "a hook of all modules": lambda _: (
        nn.modules.module.register_module_forward_hook(nothing).remove
    ),
    "another forward": lambda layer: replace_forward(layer.mlp),
    "another forward of the experts": lambda layer: replace_forward(layer.mlp.experts),
}


class TestRowsOfExperts:
    """The hyper-connection adds up the experts' rows."""

    @pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
    @pytest.mark.parametrize("packed", [False, True])
    def test_streams_are_those_of_the_block(self, numerics, packed, monkeypatch):
        model = a_model(numerics, packed)
        ids = torch.arange(7)[None] % 50
        (_, streams), counts = operators(lambda: model.model(ids), monkeypatch)
        assert counts["moe_combine"] == 0
        handles = [layer.mlp.register_forward_hook(nothing) for layer in model.model.layers]
        (_, expected), separate = operators(lambda: model.model(ids), monkeypatch)
        for handle in handles:
            handle.remove()
        assert separate["moe_combine"] == len(KINDS)
        assert_bitwise(streams, expected)

    @pytest.mark.parametrize("how", WATCHED)
    def test_a_block_that_is_watched_is_called(self, how, monkeypatch):
        model = a_model()
        layer, ids = model.model.layers[1], torch.arange(5)[None]
        streams = torch.randn(1, 5, 4, 256).bfloat16()
        expected, counts = operators(lambda: layer(streams, ids), monkeypatch)
        assert (counts["moe_combine"], counts["hc_combine_post"]) == (0, 1)
        undo = WATCHED[how](layer)
        try:
            actual, counts = operators(lambda: layer(streams, ids), monkeypatch)
        finally:
            undo()
        assert (counts["moe_combine"], counts["hc_post"]) == (1, 1)
        assert_bitwise(actual, expected)

    def test_a_block_of_another_class_is_called(self, monkeypatch):
        class Block(layers.DeepseekV4SparseMoeBlock):
            def forward(self, hidden_states, input_ids=None, **options):
                return 2 * super().forward(hidden_states, input_ids, **options)

        layer = a_model().model.layers[1]
        streams, ids = torch.randn(1, 5, 4, 256).bfloat16(), torch.arange(5)[None]
        before = layer(streams, ids)
        layer.mlp.__class__ = Block
        after, counts = operators(lambda: layer(streams, ids), monkeypatch)
        assert counts["moe_combine"] == 1
        assert not torch.equal(after, before)

    def test_a_compiled_layer_calls_the_block(self):
        layer = a_model().model.layers[1]
        streams, ids = torch.randn(1, 5, 4, 256).bfloat16(), torch.arange(5)[None]
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend="eager")
        assert_bitwise(compiled(streams, ids), layer(streams, ids))
