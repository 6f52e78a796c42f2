"""What a decoder layer does in one operator is what its modules do one after the other."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from dsv4 import dispatch, layers
from dsv4.config import CSA, HCA, SLIDING, ModelConfig
from dsv4.layers.dspark import Taps
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


class TestLayers:
    """A layer runs the beginning of the next one."""

    @pytest.mark.parametrize("numerics", ["deepseek", "transformers"])
    def test_streams_are_those_of_single_layers(self, numerics, monkeypatch):
        model = a_model(numerics)
        ids = torch.arange(7)[None] % 50
        (hidden, streams), counts = operators(lambda: model.model(ids), monkeypatch)
        assert (counts["hc_pre_norm"], counts["hc_combine_post"]) == (1, 1)
        assert counts["hc_combine_post_pre_norm"] == len(KINDS) - 1
        for layer in model.model.layers:
            layer.register_forward_hook(nothing)
        (expected, other), separate = operators(lambda: model.model(ids), monkeypatch)
        assert separate["hc_pre_norm"] == separate["hc_combine_post"] == len(KINDS)
        assert_bitwise(hidden, expected)
        assert_bitwise(streams, other)

    @pytest.mark.parametrize("watched", range(len(KINDS)))
    def test_a_layer_that_is_watched_is_called(self, watched, monkeypatch):
        model, seen = a_model(), []
        ids = torch.arange(7)[None] % 50
        expected = model.model(ids)[1]
        layer = model.model.layers[watched]
        handles = [
            layer.register_forward_pre_hook(lambda module, args: seen.append(args[0])),
            layer.register_forward_hook(lambda module, args, output: seen.append(output)),
        ]
        (_, actual), counts = operators(lambda: model.model(ids), monkeypatch)
        assert_bitwise(actual, expected)
        assert [tuple(streams.shape) for streams in seen] == [(1, 7, 4, 256)] * 2
        neighbours = len({watched - 1, watched, watched + 1} & set(range(len(KINDS)))) - 1
        assert counts["hc_pre_norm"] == 1 + neighbours
        for handle in handles:
            handle.remove()
        layer.register_forward_hook(lambda module, args, output: 2 * output)
        assert not torch.equal(model.model(ids)[1], expected)

    @pytest.mark.parametrize("name", ["attn_hc", "input_layernorm"])
    def test_the_beginning_of_the_next_layer_is_watched(self, name, monkeypatch):
        model, seen = a_model(), []
        ids = torch.arange(7)[None] % 50
        expected = model.model(ids)[1]
        module = getattr(model.model.layers[1], name)
        module.register_forward_hook(lambda *args: seen.append(args))
        assert_bitwise(model.model(ids)[1], expected)
        assert len(seen) == 1

    def test_layers_may_have_another_epsilon(self):
        model = a_model()
        ids = torch.arange(7)[None] % 50
        model.model.layers[1].input_layernorm.variance_epsilon = 1e-2
        joined = model.model(ids)[1]
        model.model.layers[0].register_forward_hook(nothing)
        assert_bitwise(joined, model.model(ids)[1])

    def test_taps_read_the_streams_of_their_layers(self):
        model, seen = a_model(), []
        ids = torch.arange(7)[None] % 50
        taps = Taps([0, 1, 2])
        model.model(ids, taps=taps)
        for layer in model.model.layers:
            layer.register_forward_hook(lambda module, args, output: seen.append(output.mean(-2)))
        model.model(ids)
        for value, expected in zip(taps.values, seen, strict=True):
            assert_bitwise(value, expected)

    def test_a_compiled_model_gives_the_same(self):
        model = a_model()
        ids = torch.arange(7)[None] % 50
        torch._dynamo.reset()
        compiled = torch.compile(model.model, backend="eager")
        for actual, expected in zip(compiled(ids), model.model(ids), strict=True):
            assert_bitwise(actual, expected)


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

    def test_a_block_that_compiles_itself_is_called(self, monkeypatch):
        layer = a_model().model.layers[1]
        streams, ids = torch.randn(1, 5, 4, 256).bfloat16(), torch.arange(5)[None]
        expected = layer(streams, ids)
        torch._dynamo.reset()
        layer.mlp.compile(backend="eager")
        actual, counts = operators(lambda: layer(streams, ids), monkeypatch)
        assert counts["hc_combine_post"] == 0
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
