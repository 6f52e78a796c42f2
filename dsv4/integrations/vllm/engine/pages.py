"""Modules that vLLM binds its KV cache memory to, and what it tells them of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout


class BlockPages(nn.Module, AttentionLayerBase):
    """Pages of one kind of one layer, or the rows; nothing is computed here.

    Attributes:
        capture_obstacle: Why decode steps cannot be captured in CUDA graphs; empty: they can.
    """

    def __init__(self, spec: AttentionSpec, bound: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.spec = spec
        self.capture_obstacle = "the model is not loaded"
        self.kv_cache = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._bound = bound

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Take vLLM's memory, ``[blocks, 1, entries, bytes]``."""
        self.kv_cache = kv_cache
        self._bound(kv_cache)

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Return the class that makes the metadata."""
        return PagesBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """Describe a block to vLLM."""
        del vllm_config
        return self.spec


@dataclass(frozen=True, eq=False)
class GroupStep:
    """Metadata of a step for a KV cache group; on the device, padded for CUDA graphs.

    Attributes:
        query_start_loc: ``[requests + 1]`` int, first new token of each request.
        seq_lens: ``[requests]`` int, tokens of each with the new ones.
        block_table: ``[requests, columns]`` int, its blocks; 0 where it has none.
        query_start_loc_cpu: ``query_start_loc`` on the host, for messages; None: not known.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    query_start_loc_cpu: torch.Tensor | None = None


class GroupStepBuilder(AttentionMetadataBuilder[GroupStep]):
    """Passes vLLM's own buffers on, so that a captured graph finds the next step in them."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec
    ) -> AttentionCGSupport:
        """Decode steps, unless something in the model reads from the device.

        Prompts are not captured: their shapes are many, and steps of many tokens are not bound by
        launches.
        """
        del kv_cache_spec
        modules = vllm_config.compilation_config.static_forward_context.values()
        pages = [module for module in modules if isinstance(module, BlockPages)]
        if any(module.capture_obstacle for module in pages):
            return AttentionCGSupport.NEVER
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> GroupStep:
        """Take what the model needs."""
        del common_prefix_len, fast_build
        common = common_attn_metadata
        requests = common.num_reqs
        return GroupStep(
            common.query_start_loc[: requests + 1],
            common.seq_lens[:requests],
            common.block_table_tensor[:requests],
            common.query_start_loc_cpu[: requests + 1],
        )


class PagesBackend(AttentionBackend):
    """No attention: says how pages lie in vLLM's memory and who makes the metadata of a step."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        """Name in vLLM's messages."""
        return "DSV4_PAGES"

    @staticmethod
    def get_impl_cls() -> Any:
        """Raise: the model has its own attention."""
        raise NotImplementedError("dsv4's model calls its own attention")

    @staticmethod
    def get_builder_cls() -> type[GroupStepBuilder]:
        """Return the class that makes the metadata."""
        return GroupStepBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Blocks are pages: none is split."""
        return [MultipleOf(1) if kv_cache_spec is None else int(kv_cache_spec.block_size)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Side by side in a block, because pages of a group differ in size."""
        return (KVCacheLayout.BLHNC,)

    @classmethod
    def is_mla(cls) -> bool:
        """Keys and values are one entry."""
        return True
