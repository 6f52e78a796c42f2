"""The class that vLLM builds for ``DSV4_VLLM=model``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.forward_context import get_forward_context
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec

import dsv4
from dsv4.checkpoint.packing import fp8_hint
from dsv4.integrations.vllm import check
from dsv4.integrations.vllm._log import logger
from dsv4.integrations.vllm.adoption import Adoption
from dsv4.integrations.vllm.engine import refusals, rows, specs
from dsv4.integrations.vllm.engine.cache import EngineCache, EngineSize
from dsv4.integrations.vllm.engine.options import Options
from dsv4.kv_cache.batch import Batch, CacheStep
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.serving._capture import obstacle
from dsv4.serving._setup import default_index_format


class Dsv4ForCausalLM(nn.Module):
    """``dsv4.load``'s model, with vLLM's block tables, scheduler and sampler.

    vLLM asks for ``forward``, ``compute_logits``, ``load_weights`` and the KV cache specs of the
    modules that it finds in ``static_forward_context``.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        refusals.check(vllm_config)
        self._loaded = False
        rows.register()
        self.config = vllm_config.model_config.hf_config
        options = Options.of(vllm_config.additional_config)
        device = torch.device(vllm_config.device_config.device)
        self.size = EngineSize.of(vllm_config)
        with _own_defaults():
            self.model = _load(vllm_config, options, device)
            self.cache = self._cache(options, device)
        self._register(vllm_config, prefix)
        check.adopt(self, Adoption(vllm_config))

    def _cache(self, options: Options, device: torch.device) -> EngineCache:
        config = self.model.config
        formats = specs.Formats(
            "fp8" if config.numerics == "deepseek" else "plain",
            options.index_format or default_index_format(config),
            self.model.dtype,
        )
        cache = EngineCache.allocate(config, self.size, formats, device)
        logger().info(
            "compressor state and page tables of %d requests (max_num_seqs) take %.2f GB",
            self.size.max_requests,
            cache.nbytes / 1e9,
        )
        return cache

    def _register(self, vllm_config: VllmConfig, prefix: str) -> None:
        """Show vLLM the modules that it binds memory to."""
        context = vllm_config.compilation_config.static_forward_context
        reason = self._capture_obstacle()
        for name, module in self.cache.modules.items():
            if name in context:
                raise ValueError(f"{prefix}{name} is registered already, expected one model")
            module.capture_obstacle = reason
            context[name] = module

    def _capture_obstacle(self) -> str:
        """Why decode steps cannot be captured; empty: they can."""
        if self.model.device.type != "cuda":
            return f"the model is on {self.model.device.type}"
        tokens = (1, self.size.max_requests)
        reason = obstacle(self.model, tokens, self.model.device)
        if reason:
            logger().warning("decode steps run without CUDA graphs: %s", reason)
        return reason or ""

    @classmethod
    def get_kv_cache_groups(
        cls, vllm_config: VllmConfig, kv_cache_spec: dict[str, KVCacheSpec]
    ) -> list[KVCacheGroupSpec]:
        """Group the modules that share a block table; vLLM calls it before it makes its scheduler.

        The scheduler may be in another process than the model: rows are registered here, too, and
        prefix caching ends here. A prefix that is found has no compressor state, which is per
        request: the first entries after it would be wrong.
        """
        rows.register()
        if vllm_config.cache_config.enable_prefix_caching:
            logger().warning("prefix caching is off: compressor state is kept per request")
            vllm_config.cache_config.enable_prefix_caching = False
        return specs.groups(kv_cache_spec)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of tokens."""
        return self.model.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Hidden states ``[T, H]`` of the tokens of a step; no number is read from the device.

        Args:
            input_ids: ``[T]`` int, with tokens that pad the step.
            positions: Not read: they follow from vLLM's metadata.
            intermediate_tensors: None, as there is one pipeline stage.
            inputs_embeds: None, as hash routers need token ids.
            options: None is known.
        """
        if intermediate_tensors is not None or inputs_embeds is not None or options:
            raise ValueError(
                "forward: got intermediate tensors, embeddings or "
                f"{', '.join(options) or 'no option'}, expected token ids alone"
            )
        ids = input_ids.to(torch.int64)
        steps = get_forward_context().attn_metadata
        if not steps:
            return self._profile(ids)
        assert isinstance(steps, dict)  # a list stands for microbatches, which are refused
        batch = self.cache.begin(steps, ids.shape[0])
        hidden, _ = self.model.model(ids.unsqueeze(0), None, CacheStep(self.cache.paged, batch))
        return hidden[0]

    def _profile(self, ids: torch.Tensor) -> torch.Tensor:
        """Hidden states of as many tokens, with a cache of its own that is gone afterwards.

        vLLM measures memory so, before it has allocated its KV cache. It sees what a prompt needs.
        """
        tokens, longest = ids.shape[0], self.size.max_chunk
        lengths = [min(longest, tokens - begin) for begin in range(0, tokens, longest)]
        cache = self.model.new_cache(len(lengths), longest)
        numbers = torch.arange(len(lengths), device=ids.device)
        batch = Batch.from_lengths(lengths, torch.zeros_like(numbers), numbers)
        hidden, _ = self.model.model(ids.unsqueeze(0), None, CacheStep(cache, batch))
        return hidden[0]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits ``[..., vocab]`` of hidden states."""
        return self.model.logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Read nothing: ``dsv4.load`` has read the checkpoint, and packed it while it did.

        vLLM's iterator opens its files when the first tensor is asked for, so nothing is read
        twice.

        Returns:
            Names of all parameters, which vLLM compares with its own list.

        Raises:
            RuntimeError: if it is called again, for other weights.
        """
        del weights
        if self._loaded:
            raise RuntimeError("load_weights was called again: packed weights are not replaced")
        self._loaded = True
        return {name for name, _ in self.named_parameters()}


@contextlib.contextmanager
def _own_defaults() -> Iterator[None]:
    """Build outside vLLM's default dtype and device.

    vLLM builds models under the dtype that they compute in, bfloat16. Scales of this package are
    float32 whatever a model computes in: global scales made under bfloat16 would lose 16 bits. Its
    default device would also put what is read from files on the GPU before it is packed.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def _load(vllm_config: VllmConfig, options: Options, device: torch.device) -> DeepseekV4ForCausalLM:
    model = dsv4.load(
        vllm_config.model_config.model,
        device=device,
        numerics=options.numerics,
        activation=options.activation,
        dtype=options.dtype or vllm_config.model_config.dtype,
        mtp=False,
        mxfp4=options.mxfp4,
        input_scales=options.input_scales,
        reserve_tokens=0,  # vLLM runs a step of its largest size before it allocates its KV cache
        prepare="kernels",  # graphs are vLLM's
        progress=False,
        **_ranks(vllm_config),
    )
    report = model.load_report
    if report is not None and report.packing is not None:
        hint = fp8_hint(model, report.packing, options.activation)
        if hint is not None:
            logger().info("%s", hint)
    return model


def _ranks(vllm_config: VllmConfig) -> dict[str, Any]:
    """Arguments that split the model over vLLM's tensor-parallel group, if it has several ranks."""
    if vllm_config.parallel_config.tensor_parallel_size == 1:
        return {}
    return {"device_mesh": get_tp_group().device_group, "parallel": "tp"}
