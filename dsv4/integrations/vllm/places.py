"""Places of vLLM that the plugin calls, overrides or replaces, with the signatures it knows.

A place is compared by the text of its signature, so that a release of vLLM that changes one is
refused instead of called wrongly.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass

from dsv4.integrations.vllm import switches

VERSIONS = ("0.33",)  # minor releases that were tried


@dataclass(frozen=True)
class Place:
    """A function, class or method of vLLM.

    Attributes:
        module: Where it is defined.
        name: Its qualified name there.
        signature: Parameter names, separated by commas, as ``signature_of`` writes them.
    """

    module: str
    name: str
    signature: str


_V4 = "vllm.models.deepseek_v4"
CORE: tuple[Place, ...] = (
    Place(f"{_V4}.nvidia.model", "DeepseekV4ForCausalLM.__init__", "self, vllm_config, prefix"),
    Place(f"{_V4}.nvidia.model", "DeepseekV4ForCausalLM.load_weights", "self, weights"),
    Place(f"{_V4}.nvidia.model", "DeepseekV4ForCausalLM.process_weights_after_loading", "self"),
    Place(
        "vllm.model_executor.model_loader.utils",
        "process_weights_after_loading",
        "model, model_config, target_device",
    ),
)
_MOE = "vllm.model_executor.layers.fused_moe"
_QUANTIZATION = "vllm.model_executor.layers.quantization"
_APPLY = "self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input"
EXPERTS: tuple[Place, ...] = (
    Place(
        f"{_MOE}.routed_experts",
        "RoutedExperts.forward_modular",
        "self, x, topk_weights, topk_ids, shared_experts, shared_experts_input",
    ),
    Place(
        f"{_MOE}.routed_experts",
        "RoutedExperts.weight_loader",
        "self, param, loaded_weight, weight_name, shard_id, expert_id, return_success",
    ),
    Place(f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase.apply", _APPLY),
    Place(f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase.__init__", "self, moe"),
    Place(
        f"{_MOE}.runner.moe_runner",
        "MoERunner._apply_quant_method",
        "self, hidden_states, router_logits, shared_experts_input, input_ids, "
        "shared_experts_overlapping",
    ),
    Place(
        f"{_QUANTIZATION}.modelopt",
        "ModelOptNvFp4FusedMoE.process_weights_after_loading",
        "self, layer",
    ),
    Place(f"{_QUANTIZATION}.mxfp4", "Mxfp4MoEMethod.process_weights_after_loading", "self, layer"),
)
LINEAR: tuple[Place, ...] = (
    Place("vllm.model_executor.layers.linear", "LinearMethodBase.apply", "self, layer, x, bias"),
    Place(f"{_QUANTIZATION}.fp8", "Fp8LinearMethod.apply", "self, layer, x, bias"),
    Place(f"{_QUANTIZATION}.fp8", "Fp8LinearMethod.process_weights_after_loading", "self, layer"),
    Place(f"{_QUANTIZATION}.modelopt", "ModelOptLinearMethod.apply", "self, layer, x, bias"),
    Place(
        f"{_QUANTIZATION}.modelopt",
        "ModelOptLinearMethod.process_weights_after_loading",
        "self, layer",
    ),
)
ATTENTION: tuple[Place, ...] = ()
_MODEL = "vllm.models.deepseek_v4.nvidia.model"
_MHC_PRE = (
    "residual, fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, "
    "sinkhorn_repeat, n_splits, norm_weight, norm_eps"
)
HYPER_CONNECTION: tuple[Place, ...] = (
    Place(
        _MODEL,
        "DeepseekV4DecoderLayer.forward",
        "self, x, positions, input_ids, post_mix, res_mix, residual, mega_gate_metadata",
    ),
    Place(
        _MODEL,
        "DeepseekV4Model.forward",
        "self, input_ids, positions, intermediate_tensors, inputs_embeds",
    ),
    # Not called: what the operators stand for. With other arguments they would mean another thing.
    Place(_MODEL, "mhc_pre_tilelang", _MHC_PRE),
    Place(_MODEL, "mhc_pre_broadcast_tilelang", f"{_MHC_PRE}, fn_broadcast"),
    Place(
        _MODEL,
        "mhc_fused_post_pre_tilelang",
        "x, residual, post_layer_mix, comb_res_mix, fn, hc_scale, hc_base, rms_eps, hc_pre_eps, "
        "hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, n_splits, tile_n, norm_weight, "
        "norm_eps",
    ),
    Place(_MODEL, "mhc_post_tilelang", "x, residual, post_layer_mix, comb_res_mix"),
    Place(
        _MODEL,
        "hc_head_fused_kernel_tilelang",
        "hs_flat, fn, hc_scale, hc_base, rms_eps, hc_eps",
    ),
    Place(
        _MODEL,
        "prepare_mega_gate_routing_metadata",
        "input_ids, has_hash_routing, image_sentinel_base_id",
    ),
    Place(
        "vllm.models.deepseek_v4.attention",
        "DeepseekV4Attention._split_qkv_and_norm",
        "self, qr_kv",
    ),
    Place(_MODEL, "RMSNorm.forward_native", "self, x, residual"),
    Place(_MODEL, "SiluAndMulWithClamp.forward_native", "self, x"),
    Place("vllm.models.common.ops.sequence_parallel", "sp_all_gather", "x"),
    Place("vllm.models.common.ops.sequence_parallel", "sp_reduce_scatter", "x"),
    Place("vllm.models.common.ops.sequence_parallel", "sp_shard", "x"),
    Place(
        "vllm.models.common.ops.sequence_parallel", "sp_padding_mask", "is_padding, hidden_states"
    ),
)
_STATE = "vllm.v1.worker.gpu.model_states"
_PREPROCESS = "self, input_batch, block_tables, kv_cache_config, num_computed_tokens"
CHECK: tuple[Place, ...] = (
    Place(_STATE, "resolve_model_state_cls", "vllm_config, model"),
    Place(f"{_STATE}.default", "DefaultModelState.preprocess_state", _PREPROCESS),
    Place(f"{_STATE}.default", "DefaultModelState.remove_request", "self, req_id"),
    Place(_MODEL, "DeepseekV4ForCausalLM.compute_logits", "self, hidden_states"),
    Place(_MODEL, "DeepseekV4ForCausalLM.compute_logits_local", "self, hidden_states"),
    Place(
        _MODEL,
        "DeepseekV4ForCausalLM.forward",
        "self, input_ids, positions, intermediate_tensors, inputs_embeds",
    ),
)
MODEL: tuple[Place, ...] = ()


def is_supported(version: str) -> bool:
    """Whether a release of vLLM, ``0.33.1+cu130`` say, is one that was tried."""
    return ".".join(version.split("+")[0].split(".")[:2]) in VERSIONS


def of_part(part: str) -> tuple[Place, ...]:
    """Places of a part of ``switches.PARTS``, or of ``"core"`` or ``"model"``."""
    return {
        "core": CORE,
        switches.EXPERTS: EXPERTS,
        switches.LINEAR: LINEAR,
        switches.ATTENTION: ATTENTION,
        switches.HYPER_CONNECTION: HYPER_CONNECTION,
        "model": MODEL,
    }[part]


def signature_of(target: object) -> str:
    """Parameter names of a function, separated by commas; stars mark the variadic ones."""
    parameters = inspect.signature(target).parameters.values()  # type: ignore[arg-type]
    return ", ".join(_stars(parameter) + parameter.name for parameter in parameters)


def _stars(parameter: inspect.Parameter) -> str:
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return "*"
    return "**" if parameter.kind is inspect.Parameter.VAR_KEYWORD else ""


def mismatches(places: Iterable[Place]) -> list[str]:
    """One sentence per place that this vLLM does not have, or has with other parameters."""
    sentences = [_mismatch(place) for place in places]
    return [sentence for sentence in sentences if sentence]


def require(places: Iterable[Place]) -> None:
    """Raise RuntimeError, with one sentence per place, unless this vLLM has them as expected."""
    sentences = mismatches(places)
    if sentences:
        raise RuntimeError(
            "this vLLM is not as dsv4's plugin knows it; DSV4_VLLM=off leaves it untouched: "
            + "; ".join(sentences)
        )


def _mismatch(place: Place) -> str:
    where = f"{place.module}.{place.name}"
    try:
        target: object = importlib.import_module(place.module)
        for name in place.name.split("."):
            target = getattr(target, name)
    except Exception as error:  # importing vLLM's modules may raise anything
        return f"{where} is missing ({error})"
    actual = signature_of(target)
    if actual != place.signature:
        return f"{where} has the parameters ({actual}), expected ({place.signature})"
    return ""
