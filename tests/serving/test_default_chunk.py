"""The chunk of a runner by default, where each step of a prompt copies all experts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dsv4
from dsv4 import layers
from dsv4.debug import compilations
from dsv4.layers import HostExperts
from dsv4.layers.step_tokens import STEP_TOKENS, cache_bytes, chunk_bytes, step_tokens
from dsv4.serving import Runner, _setup
from dsv4.serving._setup import Limits
from dsv4.serving.kept_runner import KeptRunner
from dsv4.testing.models import random_model

LONG = {"max_position_embeddings": 1 << 20}
GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def model() -> Any:
    made = random_model(dsv4.ModelConfig.tiny(**LONG), 0, mtp=False)
    layers.host_experts_(made, HostExperts(2, 3, staged=1))
    return made


@given(tokens=st.integers(2, 1 << 20), own=st.none() | st.integers(1, 1 << 20))
def test_it_is_a_step_by_default_and_else_the_users(
    model: Any, tokens: int, own: int | None
) -> None:
    limits = Limits.of(model, 1, tokens, own, 0)
    assert limits.max_chunk == min(16384 if own is None else own, tokens)


@pytest.mark.parametrize("own", [None, 20000, 100])
def test_a_runner_has_it(model: Any, own: int | None) -> None:
    sizes = {"max_sequences": 1, "max_tokens": 40000, "prefix_sequences": 0}
    with Runner(model, **sizes, max_chunk=own) as runner:
        assert runner.limits.max_chunk == (16384 if own is None else own)
        assert runner.cache.max_chunk == runner.limits.max_chunk
    plain = random_model(dsv4.ModelConfig.tiny(**LONG), 0, mtp=False)
    with Runner(plain, **sizes) as runner:
        assert runner.limits.max_chunk == STEP_TOKENS


def test_a_prompt_of_one_step_by_default(monkeypatch: Any) -> None:
    model = random_model(dsv4.ModelConfig.tiny(), 0, mtp=False)
    layers.host_experts_(model, HostExperts(2, 3, staged=1))
    buffer = model.model.layers[0].mlp.experts.hosted.staging
    monkeypatch.setattr(buffer, "step_tokens", 6)  # 16384 take long on a CPU
    steps: list[int] = []
    forward = model.model.forward

    def counted(ids: torch.Tensor, *rest: Any, **options: Any) -> Any:
        steps.append(ids.numel())
        return forward(ids, *rest, **options)

    monkeypatch.setattr(model.model, "forward", counted)
    for length in (6, 7):
        model.generate([[1] * length], 1, stop_ids=())
    model.generate([[1] * 6], 1, stop_ids=(), chunk=4)
    assert steps == [6, 6, 1, 4, 2]


@given(free=st.integers(0, 1 << 34), rows=st.integers(1, 64), tokens=st.integers(2, 1 << 17))
def test_it_is_as_long_as_memory_allows(model: Any, free: int, rows: int, tokens: int) -> None:
    """The largest of 16384, 8192 and 4096 with which the cache and a step fit."""
    config = dsv4.ModelConfig.flash()
    on_gpu: Any = SimpleNamespace(device=GPU, config=config, modules=model.modules)
    assert step_tokens(on_gpu) == 16384
    limits = Limits(rows, tokens, min(16384, tokens), 0)
    pool = limits.pool_tokens()

    def needed(chunk: int) -> int:
        cache = cache_bytes(config, tokens, chunk, rows, pool, "index_mxfp4")
        return cache + chunk_bytes(config, chunk, tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_setup, "free_bytes", lambda device: free)
        chunk = limits.within_memory(on_gpu, pool, "index_mxfp4").max_chunk
    assert chunk in {limits.max_chunk, max(4096, limits.max_chunk // 2), 4096}
    assert chunk <= STEP_TOKENS or needed(chunk) <= free
    if chunk < limits.max_chunk:
        assert needed(limits.max_chunk) > free


def test_memory_does_not_count_without_a_buffer_or_a_gpu(model: Any) -> None:
    limits = Limits(1, 20000, 9000, 0)
    plain = random_model(dsv4.ModelConfig.tiny(), 0, mtp=False)
    on_gpu: Any = SimpleNamespace(device=GPU, modules=plain.modules)
    assert limits.within_memory(on_gpu, 20000, "plain") is limits
    assert limits.within_memory(model, 20000, "plain") is limits


@pytest.mark.gpu
def test_after_load_a_prompt_of_one_step_compiles_and_captures_nothing(tmp_path: Path) -> None:
    """``load`` compiles for the default chunk, and ``generate`` is prepared for such a prompt."""
    sizes = {"hidden_size": 128, "q_lora_rank": 64, "moe_intermediate_size": 64, "o_lora_rank": 32}
    config = dsv4.ModelConfig.tiny(**sizes, **LONG)
    source = random_model(config, 0, mtp=False).to(torch.bfloat16)
    layers.quantize_(source)
    dsv4.save(source, tmp_path / "model")
    placement = HostExperts(2, 3, staged=2)
    model = dsv4.load(
        tmp_path / "model", device="cuda", host_experts=placement, mtp=False, progress=False
    )
    runner = KeptRunner.of(model).runner
    assert runner is not None
    assert (runner.limits.max_chunk, runner.limits.max_tokens) == (16384, 32768)
    captures, compiled = runner.captures, compilations()
    before = layers.cache_use(model).steps
    model.generate([[1] * 16384], 1, stop_ids=())
    assert layers.cache_use(model).steps == before + 1
    for length in (8193, 12345, 16383):
        model.generate([[1] * length], 2, stop_ids=())
    assert KeptRunner.of(model).runner is runner
    assert runner.captures == captures
    assert compilations() - compiled == {}
