"""Routed experts of vLLM's model on this package's grouped GEMMs.

vLLM builds ``RoutedExperts`` with its own quantisation method and fills its parameters. ``adopt``
replaces that method by one of this module, which builds ``DeepseekV4Experts`` from the loaded
parameters without copying codes, and multiplies with it. Router, shared experts, their streams,
expert parallelism and all reductions stay vLLM's.

``moe_combine`` adds routed and shared experts in place of vLLM's runner (``shared_expert``).

Routing weights reach ``apply`` with ``routed_scaling_factor`` in them, because vLLM's router
multiplies it there for DeepSeek-V4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import vllm.envs
from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4FusedMoE
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod

from dsv4.config import ModelConfig
from dsv4.cute import supports
from dsv4.integrations.vllm import shared_expert
from dsv4.integrations.vllm.adoption import Adoption
from dsv4.integrations.vllm.stacks import Stacks, mxfp4_stacks, nvfp4_stacks
from dsv4.integrations.vllm.switches import EXPERTS
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.quant import fragments
from dsv4.quant.formats import FRAGMENTS

KERNEL = "grouped_gemm (NVFP4 weights)"
# How tokens reach experts of other ranks without a kernel of vLLM's own experts.
_ALL_TO_ALL = ("allgather_reducescatter",)
_PARAMETERS = tuple(
    projection + suffix
    for projection in ("w13_", "w2_")
    for suffix in ("weight", "weight_scale", "weight_scale_2", "input_scale")
)


@dataclass(frozen=True)
class Source:
    """A layer of vLLM and its method, which a method of this module replaces after loading.

    Attributes:
        name: Qualified name of the layer.
        method: vLLM's method that it replaces.
        runner: The module that has the layer.
        context: Switches and report of the model.
    """

    name: str
    method: Any
    runner: Any
    context: Adoption


def adopt(model: nn.Module, context: Adoption) -> None:
    """Replace the quantisation methods of routed experts; their rows follow when they are loaded.

    Layers that cannot be replaced get their row at once.
    """
    modules = dict(model.named_modules())
    for name, layer in modules.items():
        if isinstance(layer, RoutedExperts):
            reason = unsupported_reason(layer)
            if reason:
                context.report.left(EXPERTS, name, type(layer.quant_method).__name__, reason)
            else:
                runner = modules[name.rpartition(".")[0]]
                _replace_method(layer, Source(name, layer.quant_method, runner, context))


def _replace_method(layer: RoutedExperts, source: Source) -> None:
    own_class: Any = _METHODS[type(layer.quant_method)]
    own = own_class.__new__(own_class)
    vars(own).update(vars(layer.quant_method), dsv4_source=source)
    layer.quant_method = own


def unsupported_reason(layer: RoutedExperts) -> str:
    """Say why vLLM's method stays for a layer that is not loaded yet; empty if it need not."""
    moe = layer.moe_config
    parallel = moe.moe_parallel_config
    checks = (
        (type(layer) is not RoutedExperts, f"{type(layer).__name__} has experts of its own"),
        (
            type(layer.quant_method) not in _METHODS,
            "its weights are neither NVFP4 nor MXFP4 as vLLM loads them for DeepSeek-V4",
        ),
        (vllm.envs.VLLM_BATCH_INVARIANT, "VLLM_BATCH_INVARIANT=1 asks for vLLM's own kernels"),
        (moe.in_dtype != torch.bfloat16, f"the model computes in {moe.in_dtype}"),
        (parallel.enable_eplb, "EPLB moves experts between ranks, and packed ones cannot move"),
        (moe.is_lora_enabled, "LoRA needs vLLM's own experts"),
        (moe.has_bias, "the experts have biases"),
        (moe.activation != MoEActivation.SILU, f"the activation is {moe.activation.value}"),
        (
            layer.swiglu_limit is None or (layer.swiglu_alpha, layer.swiglu_beta) != (None, None),
            "SwiGLU is not clamped as in DeepSeek-V4",
        ),
        (layer.apply_router_weight_on_input, "routing weights multiply the inputs"),
        (
            parallel.use_all2all_kernels and parallel.all2all_backend not in _ALL_TO_ALL,
            f"all2all_backend {parallel.all2all_backend} needs a kernel of vLLM's own experts",
        ),
    )
    reasons = [reason for applies, reason in checks if applies]
    return reasons[0] if reasons else _unsupported_sizes(layer) or _unsupported_range(layer)


def _unsupported_sizes(layer: RoutedExperts) -> str:
    moe = layer.moe_config
    if moe.hidden_dim_unpadded not in (None, moe.hidden_dim) or moe.tp_shard_with_padding:
        return "vLLM pads the experts' matrices"
    inner, hidden = moe.intermediate_size_per_partition, moe.hidden_dim
    if layer.w13_weight.shape[1] != 2 * inner or inner * parallel_ranks(layer) != (
        moe.intermediate_size
    ):
        return f"vLLM pads the intermediate size {moe.intermediate_size} to {inner} per rank"
    for rows, columns in ((2 * inner, hidden), (hidden, inner)):
        if not fragments.fits(rows, columns):
            tile = f"{fragments.ROWS} x {fragments.COLUMNS}"
            return f"a matrix is {rows} x {columns} per rank, no multiple of {tile}"
    device = layer.w13_weight.device
    if device.type == "cpu":
        return ""
    return supports.no_packed_weights(device, moe.in_dtype) or ""


def parallel_ranks(layer: RoutedExperts) -> int:
    """Return among how many ranks an expert's intermediate size is divided."""
    return layer.moe_config.moe_parallel_config.tp_size


def _unsupported_range(layer: RoutedExperts) -> str:
    return "" if expert_range(layer) is not None else "the rank's experts are not contiguous"


def expert_range(layer: RoutedExperts) -> tuple[int, int] | None:
    """Return the first expert of this rank and how many it has; None if they have gaps."""
    local_of_global = layer.expert_map_manager.expert_map
    if local_of_global is None:
        return 0, layer.local_num_experts
    numbers = local_of_global.tolist()
    count = layer.local_num_experts
    first = numbers.index(0) if 0 in numbers else -1
    return (first, count) if numbers[first : first + count] == list(range(count)) else None


class _Experts:
    """Replacements for parts of vLLM's methods for routed experts.

    ``moe_kernel`` stays None, so vLLM's runner routes tokens, calls ``apply``, runs the shared
    experts before or beside it and reduces the sum.
    """

    dsv4_source: Source
    supports_pre_processed_weights = False
    supports_eplb = False
    is_monolithic = False
    skip_forward_padding = False
    has_unpadded_output = False

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """Return None: no kernel of vLLM's experts is configured."""

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Build this package's experts, or give the layer back to vLLM's method."""
        source = self.dsv4_source
        report = source.context.report
        stacks, reason = self.dsv4_stacks(layer)
        if stacks is not None:
            experts = built_experts(layer, stacks)
            reason = _packing_problem(experts)
            if not reason:
                _take_over(layer, experts)
                report.replaced(EXPERTS, source.name, KERNEL)
                if shared_expert.adopt(source.runner):
                    where = source.name.rpartition(".")[0]
                    report.replaced(EXPERTS, where, shared_expert.KERNEL)
                return
        report.left(EXPERTS, source.name, type(source.method).__name__, reason)
        layer.quant_method = source.method
        layer.quant_method.process_weights_after_loading(layer)

    def dsv4_stacks(self, layer: RoutedExperts) -> tuple[Stacks | None, str]:
        """Return the loaded weights as NVFP4 stacks, or None and the reason."""
        raise NotImplementedError

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """Sum of this rank's experts, each times its routing weight, without the shared experts."""
        return layer.dsv4_experts(x, topk_ids, topk_weights)


class Dsv4ModelOptNvFp4FusedMoE(_Experts, ModelOptNvFp4FusedMoE):
    """NVFP4 experts of NVIDIA's checkpoints; vLLM's loader looks for ``ModelOpt`` in the name."""

    def dsv4_stacks(self, layer: RoutedExperts) -> tuple[Stacks | None, str]:
        """Return vLLM's own tensors; gate and up keep their global scales."""
        return nvfp4_stacks(layer), ""


class Dsv4Mxfp4MoEMethod(_Experts, Mxfp4MoEMethod):
    """MXFP4 experts of DeepSeek's checkpoints, converted if no value changes."""

    def dsv4_stacks(self, layer: RoutedExperts) -> tuple[Stacks | None, str]:
        """Return the same values in NVFP4, whose codes are vLLM's own tensors."""
        stacks = mxfp4_stacks(layer)
        return stacks, "" if stacks else "MXFP4 block scales are too far apart for NVFP4"


_METHODS: dict[type, type] = {
    ModelOptNvFp4FusedMoE: Dsv4ModelOptNvFp4FusedMoE,
    Mxfp4MoEMethod: Dsv4Mxfp4MoEMethod,
}


def built_experts(layer: RoutedExperts, stacks: Stacks) -> DeepseekV4Experts:
    """Return a module that holds the stacks, of the experts and columns of this rank."""
    moe = layer.moe_config
    held = expert_range(layer)
    assert held is not None
    config = ModelConfig.tiny().replace(
        n_routed_experts=moe.num_experts,
        num_experts_per_tok=moe.experts_per_token,
        hidden_size=moe.hidden_dim,
        moe_intermediate_size=moe.intermediate_size_per_partition,
        swiglu_limit=layer.swiglu_limit,
        numerics="deepseek",
        activation="bf16",
    )
    with torch.device("meta"):
        experts = DeepseekV4Experts(config, *held)
    experts.set_stacks(stacks.gate_up, stacks.down)
    return experts.requires_grad_(False).eval()


def _packing_problem(experts: DeepseekV4Experts) -> str:
    if experts.gate_up_proj.device.type == "cpu":
        return ""
    try:
        experts.pack(FRAGMENTS)
    except ValueError as error:
        return str(error)
    return ""


def _take_over(layer: RoutedExperts, experts: DeepseekV4Experts) -> None:
    """Leave the tensors to the new module alone."""
    for name in _PARAMETERS:
        if name in layer._parameters:
            del layer._parameters[name]
    layer.dsv4_experts = experts
