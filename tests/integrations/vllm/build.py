"""vLLM's layers as its DeepSeek-V4 builds them, and checkpoints' tensors to load into them.

On a CPU vLLM finds no kernel for these formats and refuses to build a layer, so ``kernels``
stands for its choice. Parameters, loaders and runners are vLLM's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.fused_moe import FusedMoEConfig, RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig, RoutingMethodType
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.quantization import fp8, modelopt, mxfp4
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.models.deepseek_v41.quant_config import DeepseekV4FP8Config
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.utils.torch_utils import set_default_torch_dtype

from dsv4.checkpoint import save
from dsv4.config import CompressRates, ModelConfig
from dsv4.integrations.vllm.adoption import Adoption
from dsv4.integrations.vllm.report import Report
from dsv4.integrations.vllm.switches import Switches
from dsv4.testing.models import random_model

LIMIT = 10.0
NAME = "model.layers.0.ffn.experts"


class NoKernel:
    """What vLLM would run; it runs nothing."""

    processed = 0

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Count the calls."""
        self.processed += 1

    def input_quant_key(self) -> None:
        """Take no quantised inputs."""

    @classmethod
    def is_monolithic(cls) -> bool:
        """Take routed tokens."""
        return False


@contextmanager
def kernels() -> Iterator[None]:
    """Let vLLM build layers for which a CPU has no kernels, in bfloat16."""
    model_config = SimpleNamespace(dtype=torch.bfloat16)
    with mock.patch.object(get_current_vllm_config(), "model_config", model_config), chosen():
        yield


@contextmanager
def chosen() -> Iterator[None]:
    """Stand for vLLM's choice of kernels."""
    choices = (
        (modelopt, "select_nvfp4_moe_backend", (NvFp4MoeBackend.MARLIN, NoKernel)),
        (mxfp4, "select_deepseek_v4_mxfp4_moe_backend", (Mxfp4MoeBackend.TRITON, NoKernel)),
        (fp8, "init_fp8_linear_kernel", NoKernel()),
        (modelopt, "select_linear_kernel", NoKernel()),
    )
    with ExitStack() as stack:
        for module, name, choice in choices:
            stack.enter_context(mock.patch.object(module, name, lambda *_, _c=choice, **__: _c))
        yield


@dataclass(frozen=True)
class Rank:
    """One process of a tensor-parallel or expert-parallel group."""

    number: int = 0
    count: int = 1
    expert_parallel: bool = False
    eplb: bool = False
    all2all: str = "allgather_reducescatter"
    data_parallel: int = 1

    def config(self) -> FusedMoEParallelConfig:
        """As vLLM makes it."""
        tensor = (1, 0) if self.expert_parallel else (self.count, self.number)
        expert = (self.count, self.number) if self.expert_parallel else (1, 0)
        return FusedMoEParallelConfig(
            tp_size=tensor[0],
            tp_rank=tensor[1],
            pcp_size=1,
            pcp_rank=0,
            dp_size=self.data_parallel,
            dp_rank=0,
            ep_size=expert[0],
            ep_rank=expert[1],
            sp_size=1,
            use_ep=self.expert_parallel,
            all2all_backend=self.all2all,
            enable_eplb=self.eplb,
        )


def v4_quant_config(moe_quant_algo: str = "NVFP4", expert_dtype: str = "fp4") -> object:
    """vLLM's configuration of a checkpoint, of the class that it takes on NVIDIA's GPUs."""
    config = DeepseekV4FP8Config(True, "dynamic", None, [128, 128])
    config._resolved_expert_dtype = expert_dtype
    config._resolved_moe_quant_algo = moe_quant_algo
    return config


def experts_layer(
    experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    rank: Rank = Rank(),
    moe_quant_algo: str = "NVFP4",
    **options: object,
) -> RoutedExperts:
    """The routed experts of a layer as ``DeepseekV4MoE`` builds them on one rank."""
    parallel = rank.config()
    manager = ExpertMapManager(64, top_k, experts, 0, None, parallel, "linear", rank.eplb)
    moe_options = {k: options.pop(k) for k in ("is_lora_enabled", "has_bias") if k in options}
    moe = FusedMoEConfig(
        num_experts=experts,
        experts_per_token=top_k,
        hidden_dim=hidden,
        intermediate_size=inner,
        num_local_experts=manager.local_num_experts,
        num_logical_experts=experts,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
        swiglu_limit=LIMIT,
        **moe_options,
    )
    options.setdefault("swiglu_limit", LIMIT)
    quant_config = v4_quant_config(moe_quant_algo)
    names = ("w1", "w2", "w3")
    with kernels():
        return RoutedExperts(NAME, torch.bfloat16, moe, quant_config, manager, *names, **options)


def context(**switches: object) -> Adoption:
    """What ``adopt`` gets."""
    return Adoption(SimpleNamespace(), Switches(**switches), Report())


def in_model(layer: nn.Module, name: str = NAME) -> nn.Module:
    """A model in which a layer has its name."""
    model = nn.Module()
    *folders, last = name.split(".")
    parent = model
    for folder in folders:
        child = nn.Module()
        parent.add_module(folder, child)
        parent = child
    parent.add_module(last, layer)
    return model


def small_config(**changes: object) -> ModelConfig:
    """A small model whose sizes vLLM's FP8 blocks, heads and pages admit."""
    sizes = {
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "vocab_size": 256,
        "q_lora_rank": 128,
        "o_lora_rank": 128,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "num_attention_heads": 4,
        "o_groups": 2,
        "index_n_heads": 2,
        "index_head_dim": 128,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
        "compress_rates": CompressRates(4, 128),
    }
    return ModelConfig.tiny(**{**sizes, **changes})


def checkpoint(path: Path, layout: str, mtp: bool = False, **changes: object) -> ModelConfig:
    """Write a small model."""
    config = small_config(**changes)
    save(random_model(config, mtp=mtp), path, layout=layout)
    return config


def engine_config(path: Path, **options: object) -> VllmConfig:
    """What ``vllm serve`` makes of a checkpoint on an NVIDIA GPU.

    On a CPU vLLM takes another class for the quantisation, which reads no ``ignore``.
    """
    arguments = EngineArgs(
        model=str(path),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        **options,
    )
    classes = quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG
    with mock.patch.dict(classes, {DeepseekV4FP8Config.get_name(): DeepseekV4FP8Config}):
        config = arguments.create_engine_config()
    config.cache_config.cache_dtype = "fp8"
    return config


def no_stream(*_: object, **__: object) -> None:
    """Stand for CUDA's streams and events, which nothing here waits for."""


@contextmanager
def hopper(config: VllmConfig) -> Iterator[None]:
    """Let vLLM build its model for NVIDIA's GPUs on a CPU, as its loader does."""
    capability = classmethod(lambda *_, **__: DeviceCapability(9, 0))
    with (
        set_current_vllm_config(config),
        chosen(),
        mock.patch.object(type(current_platform), "get_device_capability", capability),
        mock.patch.object(torch.cuda, "Stream", no_stream),
        mock.patch.object(torch.cuda, "Event", no_stream),
        set_default_torch_dtype(torch.bfloat16),
    ):
        yield


def load_model(model: nn.Module, config: VllmConfig) -> None:
    """Load and process weights as vLLM's loader does."""
    DefaultModelLoader(config.load_config).load_weights(model, config.model_config)
    process_weights_after_loading(model, config.model_config, torch.device("cpu"))
