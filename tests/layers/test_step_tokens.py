"""The tokens of a step by default, and the memory that is counted for such a step."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsv4 import layers
from dsv4.compilation.meta_model import of_each_kind, packed_model
from dsv4.config import ModelConfig
from dsv4.kv_cache.paged_cache import Batch, CacheStep, PagedCache
from dsv4.layers import HostExperts
from dsv4.layers._expert_staging import STAGED_STEP_TOKENS
from dsv4.layers.step_tokens import (
    STEP_TOKENS,
    cache_bytes,
    limit_step_tokens,
    prepared_tokens,
    prompt_bytes,
    step_bytes,
    step_tokens,
)
from dsv4.testing.models import random_model

PRESETS = {"flash": ModelConfig.flash(), "pro": ModelConfig.pro()}


def hosted(placement: HostExperts | None) -> torch.nn.Module:
    model = random_model(ModelConfig.tiny(), 0, mtp=False)
    if placement is not None:
        layers.host_experts_(model, placement)
    return model


class TestDefault:
    @pytest.mark.parametrize(
        ("placement", "tokens"),
        [
            (None, STEP_TOKENS),
            (HostExperts(4, 2), STEP_TOKENS),
            (HostExperts(4, 2, staged=1), STAGED_STEP_TOKENS),
        ],
    )
    def test_is_larger_where_each_step_copies_all_experts(self, placement, tokens):
        model = hosted(placement)
        assert step_tokens(model) == tokens
        assert prepared_tokens(model) == 2 * tokens
        assert limit_step_tokens(model, PRESETS["flash"], 1 << 60) == tokens

    @given(free=st.integers(0, 12_000_000_000), preset=st.sampled_from(sorted(PRESETS)))
    def test_is_the_largest_that_memory_holds(self, free, preset):
        config, model = PRESETS[preset], hosted(HostExperts(4, 2, staged=1))
        tokens = limit_step_tokens(model, config, free)
        assert tokens == step_tokens(model)
        assert tokens in (4096, 8192, 16384)
        assert tokens == STEP_TOKENS or prompt_bytes(config, tokens) <= free
        assert tokens == STAGED_STEP_TOKENS or prompt_bytes(config, 2 * tokens) > free

    def test_without_a_buffer_memory_does_not_count(self):
        model = hosted(HostExperts(4, 2))
        assert limit_step_tokens(model, PRESETS["flash"], 0) == STEP_TOKENS

    def test_is_not_more_than_is_reserved(self):
        model = hosted(HostExperts(4, 2, staged=1))
        layers.reserve_experts(model, 10_000)
        assert step_tokens(model) == 10_000
        layers.reserve_experts(model, 5)
        assert step_tokens(model) == STEP_TOKENS


class MetaPeak(TorchDispatchMode):
    """The most bytes that tensors without memory, made inside of the block, held at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {k: v for k, v in self._alive.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._alive.values()))
        return result


@pytest.fixture(scope="module")
def shapes_of():
    """Models of one layer of each kind, without memory."""
    known = {}

    def build(preset):
        if preset not in known:
            known[preset] = packed_model(of_each_kind(PRESETS[preset]))
        return known[preset]

    return build


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize(
    ("tokens", "context"), [(4096, 4096), (16384, 16384), (16384, 32768), (8192, 1 << 20)]
)
@torch.inference_mode()
def test_the_tensors_of_a_step_are_counted(preset, tokens, context, shapes_of):
    """Those that are alive together in a step, which runs without memory, and hardly more."""
    model = shapes_of(preset)
    cache = PagedCache(
        model.config, max_sequences=1, max_tokens=context, max_chunk=tokens, device="meta"
    )
    row = torch.zeros(1, dtype=torch.int64, device="meta")
    ids = torch.zeros((1, tokens), dtype=torch.int64, device="meta")
    gc.collect()
    with MetaPeak() as used:
        step = CacheStep(cache, Batch.from_lengths([tokens], row, row))
        hidden, _ = model.model(ids, None, step)
        model.logits(hidden[0, -1:])
    counted = step_bytes(model.config, tokens, context)
    assert 0.95 * counted < used.peak <= counted


def test_published_models_need_what_is_documented():
    gigabytes = {
        (preset, tokens): round(prompt_bytes(config, tokens) / 1e9, 1)
        for preset, config in PRESETS.items()
        for tokens in (4096, 16384)
    }
    assert gigabytes == {
        ("flash", 4096): 2.9,
        ("flash", 16384): 6.9,
        ("pro", 4096): 3.8,
        ("pro", 16384): 10.5,
    }
    assert round(step_bytes(PRESETS["flash"], 16384) / 1e9, 1) == 3.8
    assert round(step_bytes(PRESETS["pro"], 16384) / 1e9, 1) == 6.5


@given(tokens=st.integers(2, 300), chunk=st.integers(1, 300), sequences=st.integers(1, 5))
def test_a_cache_is_counted_as_it_is(tokens, chunk, sequences):
    config = ModelConfig.tiny()
    chunk = min(chunk, tokens)
    cache = PagedCache(
        config,
        max_sequences=sequences,
        max_tokens=tokens,
        max_chunk=chunk,
        pool_tokens=sequences * tokens,
    )
    assert cache_bytes(config, tokens, chunk, sequences) == cache.nbytes()
