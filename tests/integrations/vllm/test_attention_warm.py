"""Attention on scratch pages launches what steps of requests launch, and leaves nothing behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4.config import CSA, HCA, SLIDING

pytest.importorskip("vllm", reason="vLLM is not installed")

from dsv4.integrations.vllm import attention, compressor, indexer, warm
from dsv4.integrations.vllm.attention_warm import Limits, Shape, shapes
from tests.integrations.vllm import attention_modules as modules
from tests.integrations.vllm.attention_modules import Sizes, Step, Tables
from tests.integrations.vllm.test_attention import (
    WINDOW,
    inputs_of,
    own_layer,
    products_in_float32,
)

__all__ = ["products_in_float32"]  # a fixture for every test
LIMITS = Limits(block_tokens=256, max_tokens=4096, max_sequences=4)


class Operators(TorchDispatchMode):
    """Records this package's operators and the shapes that they were called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "dsv4":
            key = tuple((tuple(x.shape), x.dtype) for x in args if isinstance(x, torch.Tensor))
            self.calls.add((func.name(), key))
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.calls}


def adopted(layer: Any, limits: Limits | None = LIMITS) -> Any:
    module = modules.vllm_module(layer, Sizes(max_len=4096, sequences=4, max_tokens=4096))
    attention.adopt_attention(module, limits)
    if module.compressor is not None:
        compressor.adopt_compressor(module.compressor)
    if module.indexer is not None:
        indexer.adopt_indexer(module.indexer)
    return module


def caches(module: Any) -> list[torch.Tensor]:
    owners = [module, module.swa_cache_layer]
    for part in (module.compressor, getattr(module.indexer, "compressor", None)):
        owners += [] if part is None else [part.state_cache]
    owners += [] if module.indexer is None else [module.indexer.k_cache]
    return [owner.kv_cache for owner in owners]


@pytest.mark.parametrize(
    ("layer_type", "steps"),
    [
        (SLIDING, [Step([(0, 0, 8)], 0), Step([(s, 0, 1) for s in range(4)], 4)]),
        (HCA, [Step([(0, 0, 8)], 0), Step([(s, 0, 1) for s in range(4)], 4)]),
        # Beyond 2048 tokens the indexer chooses; before, all entries are taken.
        (CSA, [Step([(0, 0, 8)], 0), Step([(0, 4080, 8)], 0), Step([(0, 4088, 1)], 1)]),
    ],
)
def test_operators_of_steps_are_launched(layer_type: str, steps: list[Step]) -> None:
    """Shapes of block tables and slots included, whichever context is the longest."""
    layer = own_layer(layer_type, 1, ratio=128)
    module = adopted(layer)
    before = caches(module)
    contents = [cache.clone() for cache in before]
    warmed = Operators()
    with warmed, torch.inference_mode():
        for tokens in (1, 4, 8):
            module.dsv4_warm(tokens)
    assert all(a is b for a, b in zip(caches(module), before, strict=True))
    assert all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(before, contents, strict=True)
    )
    tables, needed = Tables(module, Sizes(max_len=4096, sequences=4), 0), Operators()
    for step, x in zip(steps, inputs_of(layer, steps, 0), strict=True):
        made, positions = modules.metadata(module, tables, step, WINDOW)
        with needed:
            modules.run(module, made, positions, x)
    assert {"dsv4::sparse_attention", "dsv4::norm_rope_write_kv"} <= needed.names
    assert ("dsv4::indexer_select" in needed.names) == (layer_type == CSA)
    assert ("dsv4::compress_write_paged" in needed.names) == (layer_type != SLIDING)
    assert needed.names <= warmed.names
    # Pages and tables have as many rows as there are; what attention gets of a token decides.
    for name, key in needed.calls:
        if name == "dsv4::sparse_attention":
            assert any(n == name and k[:1] == key[:1] for n, k in warmed.calls), (name, key)


def test_shapes() -> None:
    """Powers of two of tokens, and one more, have every width of tables, others the widest."""
    limits = Limits(256, 1000, 4)
    assert limits.contexts() == [256, 512, 1000]
    assert list(shapes(7, limits)) == [Shape(7, 1, 1000)]
    assert list(shapes(4, limits)) == [
        Shape(4, sequences, longest) for longest in (256, 512, 1000) for sequences in (1, 4)
    ]
    for tokens in (8, 9):
        assert list(shapes(tokens, limits)) == [
            Shape(tokens, 1, longest) for longest in (256, 512, 1000)
        ]
    several = [Shape(1024, 4, 256), Shape(1024, 2, 512), Shape(1024, 2, 1000)]
    assert list(shapes(1024, limits)) == several, "of prompts that are shorter than the step"
    assert [shape.tokens_of_each for shape in several] == [256, 512, 512]
    assert list(shapes(4096, limits)) == [], "no step has as many sequences"


def test_one_module_of_each_ratio_warms_up() -> None:
    kinds = (SLIDING, HCA, CSA)
    layers = torch.nn.ModuleList(adopted(own_layer(kind, 1)) for kind in (*kinds, *kinds))
    assert list(warm.self_warming(layers)) == list(layers)[:3]


def test_parts_of_vllms_own_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their metadata are not made up here."""
    ran: list[int] = []
    monkeypatch.setattr(
        "dsv4.integrations.vllm.attention_warm.warm", lambda module, tokens, limits: ran.append(1)
    )
    module = adopted(own_layer(HCA, 1))
    module.dsv4_warm(1)
    assert ran == [1]
    adopted(own_layer(HCA, 1), None).dsv4_warm(1)
    own = adopted(own_layer(HCA, 1))
    object.__setattr__(own, "compressor", torch.nn.Identity())
    own._modules.pop("compressor", None)
    own.dsv4_warm(1)
    assert ran == [1]


def test_limits_are_the_engines() -> None:
    module = adopted(own_layer(HCA, 1))
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=16, user_specified_block_size=False),
        model_config=SimpleNamespace(max_model_len=9000),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
    )
    limits = Limits.of(config, module)
    assert limits == Limits(256, 9000, 8), "vLLM sets 256 after the model is built"
    assert limits.contexts() == [256, 512, 1024, 2048, 4096, 8192, 9000]
    config.cache_config.user_specified_block_size = True
    assert Limits.of(config, module).block_tokens == 16
