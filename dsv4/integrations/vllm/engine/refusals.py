"""Settings of vLLM that this package's model does not support, refused when the engine starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dsv4.integrations.vllm import places
from dsv4.kv_cache.layer_cache import BLOCK

_DTYPES = (torch.bfloat16, torch.float32)
_PARALLEL = (
    "pipeline_parallel_size",
    "data_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)
_INSTEAD = "DSV4_VLLM=all runs vLLM's model on this package's kernels instead"


def check(vllm_config: Any) -> None:
    """Raise if the model cannot serve this configuration, or does not know this vLLM.

    Raises:
        RuntimeError: if something that is called or overridden has other parameters.
        ValueError: one sentence, naming the setting, its value and what it may be.
    """
    unknown = places.mismatches(places.MODEL)
    if unknown:
        raise RuntimeError(f"DSV4_VLLM=model: this vLLM is not known: {'; '.join(unknown)}")
    for sentence in refusals(vllm_config):
        raise ValueError(f"DSV4_VLLM=model: {sentence}")


def refusals(vllm_config: Any) -> Iterator[str]:
    """One sentence for each setting that is not supported."""
    yield from _parallel(vllm_config.parallel_config)
    yield from _features(vllm_config)
    yield from _model(vllm_config)
    yield from _cache(vllm_config)


def _parallel(parallel: Any) -> Iterator[str]:
    for name in _PARALLEL:
        value = getattr(parallel, name)
        if value != 1:
            yield f"{name} is {value}, expected 1: ranks are tensor-parallel ones; {_INSTEAD}"
    if parallel.enable_expert_parallel and parallel.tensor_parallel_size == 1:
        yield "enable_expert_parallel is True, expected False with one rank, which has all experts"
    if parallel.enable_eplb:
        yield f"enable_eplb is True, expected False: packed experts cannot move; {_INSTEAD}"
    if parallel.use_ubatching:
        yield "microbatches (enable_dbo, ubatch_size) are on, expected off: a step is one batch"


def _features(config: Any) -> Iterator[str]:
    if config.lora_config is not None:
        yield "LoRA is on, expected off: packed weights take no adapters"
    if config.speculative_config is not None:
        yield "speculative decoding is on, expected off: the model gives a draft nothing to read"
    if config.kv_transfer_config is not None:
        yield "a KV connector is set, expected none: compressor state is not in vLLM's blocks"
    if config.ec_transfer_config is not None:
        yield "an encoder connector is set, expected none: the model reads tokens alone"
    if config.aux_output_config.enable_return_routed_experts:
        yield "enable_return_routed_experts is True, expected False: the model returns logits alone"
    offload = config.offload_config
    if offload.uva.cpu_offload_gb > 0 or offload.prefetch.offload_group_size > 0:
        yield "weights are offloaded to the CPU, expected not: kernels read packed weights in place"


def _model(config: Any) -> Iterator[str]:
    model, load = config.model_config, config.load_config
    if model.dtype not in _DTYPES:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        yield f"dtype is {str(model.dtype).removeprefix('torch.')}, expected {names}"
    if model.enable_prompt_embeds:
        yield "enable_prompt_embeds is True, expected False: hash routers need token ids"
    if model.hf_overrides:
        yield "hf_overrides are set, expected none: dsv4.load reads config.json itself"
    if model.enable_sleep_mode:
        yield "enable_sleep_mode is True, expected False: weights are not read again"
    if model.runner_type != "generate":
        yield f"the runner is {model.runner_type}, expected generate: the model has no pooler"
    if load.load_format == "dummy":
        # Random codes and scales would route and saturate unlike any model, so that no time
        # measured with them says anything.
        yield (
            "load_format is dummy, expected auto: quantised weights are read from a checkpoint; "
            "dsv4.testing.models makes one with random weights"
        )
    elif load.load_format not in ("auto", "hf", "safetensors"):
        yield f"load_format is {load.load_format}, expected auto: dsv4.load reads safetensors"
    if not Path(model.model).is_dir():
        yield f"model is {model.model!r}, expected a folder: fetch it first with hf download"


def _cache(config: Any) -> Iterator[str]:
    cache, scheduler = config.cache_config, config.scheduler_config
    if cache.user_specified_block_size and cache.block_size != BLOCK:
        yield f"block_size is {cache.block_size}, expected {BLOCK} or none"
    if cache.cache_dtype != "auto":
        yield (
            f"kv_cache_dtype is {cache.cache_dtype}, expected auto: entries are FP8 with deepseek "
            "numerics and plain with transformers numerics"
        )
    if scheduler.disable_hybrid_kv_cache_manager:
        yield "disable_hybrid_kv_cache_manager is True, expected False: windows are freed early"
