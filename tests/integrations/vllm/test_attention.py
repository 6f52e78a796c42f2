"""vLLM's attention on this package's operators: against this package's own layer and operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.config import CSA, HCA, SLIDING, CompressRates, ModelConfig
from dsv4.kv_cache.paged_cache import Batch, CacheStep, PagedCache
from dsv4.layers.attention import DeepseekV4Attention as Layer
from dsv4.testing.assertions import assert_within_budget
from dsv4.testing.strategies import generator, normal, seeds

pytest.importorskip("vllm", reason="vLLM is not installed")

from dsv4.integrations.vllm import attention, compressor, indexer
from tests.integrations.vllm import attention_modules as modules
from tests.integrations.vllm.attention_modules import Sizes, Step, Tables

BF16 = torch.bfloat16
WINDOW = 24


@pytest.fixture(autouse=True)
def products_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.mm(..., out_dtype=)``, which a CPU does not have."""
    mm = torch.mm

    def with_out_dtype(x: Any, w: Any, *, out_dtype: Any = None) -> torch.Tensor:
        return mm(x, w) if out_dtype is None else mm(x.to(out_dtype), w.to(out_dtype))

    monkeypatch.setattr(torch, "mm", with_out_dtype)


def own_layer(layer_type: str, seed: int) -> Layer:
    config = ModelConfig.tiny(
        layer_types=(layer_type,),
        numerics="deepseek",
        head_dim=512,
        qk_rope_head_dim=64,
        index_head_dim=128,
        index_n_heads=4,
        index_topk=512,
        sliding_window=WINDOW,
        compress_rates=CompressRates(4, 8),
        num_nextn_predict_layers=0,
    )
    layer = Layer(config, 0).to(BF16)
    gen = generator(seed)
    for parameter in layer.parameters():
        values = torch.randn(parameter.shape, generator=gen)
        if parameter.dim() == 2:
            values *= parameter.shape[1] ** -0.5
        parameter.data = values.to(parameter.dtype)
        parameter.requires_grad = False
    return layer


def adopted(layer: Layer, sizes: Sizes) -> Any:
    module = modules.vllm_module(layer, sizes)
    attention.adopt_attention(module)
    if module.compressor is not None:
        compressor.adopt_compressor(module.compressor)
    if module.indexer is not None:
        indexer.adopt_indexer(module.indexer)
    return module


@st.composite
def runs(draw: st.DrawFn, sequences: int = 3, longest: int = 40) -> list[Step]:
    """Whole and chunked prompts, decode steps of one token or more, and both together."""
    ends, steps = [0] * sequences, []
    for _ in range(draw(st.integers(1, 4))):
        kinds = draw(st.lists(st.sampled_from("dvp-"), min_size=sequences, max_size=sequences))
        decodes, prefills = [], []
        for s, kind in enumerate(kinds):
            n = {"d": 1, "v": 3, "p": draw(st.integers(1, 20)), "-": 0}[kind]
            n = min(n, longest - ends[s])
            if n:
                (prefills if kind == "p" else decodes).append((s, ends[s], n))
                ends[s] += n
        if decodes or prefills:
            padding = draw(st.integers(0, 3))
            steps.append(Step(decodes + prefills, len(decodes), padding))
    return steps


def own_outputs(layer: Layer, sizes: Sizes, steps: list[Step], inputs: Any) -> list[torch.Tensor]:
    cache = PagedCache(
        layer.config,
        max_sequences=sizes.sequences,
        max_tokens=sizes.max_len,
        max_chunk=64,
        entry_format="fp8",
    )
    outputs = []
    for step, x in zip(steps, inputs, strict=True):
        rows, starts, lengths = zip(*step.pieces, strict=True)
        batch = Batch.from_lengths(lengths, torch.tensor(starts), torch.tensor(rows))
        count = sum(lengths)
        with torch.inference_mode():
            out, _ = layer(x[:count].unsqueeze(0), past_key_values=CacheStep(cache, batch))
        outputs.append(out[0])
    return outputs


@pytest.mark.parametrize("takes_all", [True, False])
@pytest.mark.parametrize("layer_type", [SLIDING, CSA, HCA])
@settings(max_examples=8)
@given(seeds(), runs())
def test_a_layer_equals_this_packages_own(layer_type, takes_all, seed, steps):
    """Whatever blocks its pages lie in, and however tokens are dealt to steps.

    The entries are the same bytes; sums over slots are in another order, which moves a result by a
    unit in the last place of bfloat16, and another one in the projections behind it.
    """
    layer, sizes = own_layer(layer_type, seed), Sizes()
    module = adopted(layer, sizes)
    if module.indexer is not None and not takes_all:
        object.__setattr__(module.indexer, "_takes_all", lambda: False)
    tables = Tables(module, sizes, seed)
    inputs = []
    for i, step in enumerate(steps):
        count = sum(n for *_, n in step.pieces) + step.padding
        inputs.append(normal(seed + i, (count, layer.config.hidden_size)).to(BF16))
    expected = own_outputs(layer, sizes, steps, inputs)
    for step, x, own in zip(steps, inputs, expected, strict=True):
        made, positions = modules.metadata(module, tables, step, WINDOW)
        out = modules.run(module, made, positions, x)
        assert out.shape == x.shape
        size = own.double().abs().amax()
        assert_within_budget(out[: own.shape[0]], own.double(), 2.0**-6 * size)
