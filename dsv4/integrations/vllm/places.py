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
_WARMUP = "vllm.model_executor.warmup.jit_warmup"
JIT_WARMUP: tuple[Place, ...] = (
    Place(_WARMUP, "JitWarmupRegistry.__init__", "self, vllm_config"),
    Place(_WARMUP, "JitWarmupRegistry.activate", "self"),
    Place(_WARMUP, "JitWarmupRegistry.register", "kernel, *args, **kwargs"),
    # Not called: how registrations are stored and compiled.
    Place(_WARMUP, "JitWarmupRegistry._add", "self, kernel, args, kwargs"),
    Place(_WARMUP, "JitWarmupRegistry.warmup", "self"),
    Place(_WARMUP, "VllmJitKernel.register_warmup", "self, *args, **kwargs"),
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
        "MoERunner.forward",
        "self, hidden_states, router_logits, input_ids, shared_experts_input",
    ),
    Place(
        f"{_MOE}.runner.moe_runner",
        "MoERunner._maybe_reduce_final_output",
        "self, states, trunc_size, output_is_reduced",
    ),
    Place(
        f"{_MOE}.runner.moe_runner",
        "MoERunner._maybe_apply_shared_experts",
        "self, shared_experts_input, order",
    ),
    Place(f"{_MOE}.runner.moe_runner", "MoERunner._encode_layer_name", "self"),
    # ``MoERunner._forward_entry`` is this function or an operator that calls it.
    Place(f"{_MOE}.runner.moe_runner", "MoERunner._select_forward", "self"),
    Place(
        f"{_MOE}.runner.moe_runner",
        "_moe_forward_shared",
        "hidden_states, router_logits, shared_experts_input, input_ids, layer_name, "
        "hidden_dim_unpadded",
    ),
    Place(
        f"{_MOE}.router.fused_moe_router",
        "FusedMoERouter.select_experts",
        "self, hidden_states, router_logits, topk_indices_dtype, input_ids",
    ),
    Place(f"{_MOE}.runner.shared_experts", "SharedExperts.wait", "self"),
    Place(
        f"{_MOE}.runner.shared_experts",
        "SharedExperts.maybe_forward_async",
        "self, shared_experts_input",
    ),
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
_INPUTS = (
    "self, hidden_states, qr, kv, qr_scale, kv_score, indexer_kv_score, indexer_weights, "
    "positions, o_padded"
)
ATTENTION: tuple[Place, ...] = (
    Place(
        f"{_V4}.attention",
        "DeepseekV4Attention.forward",
        "self, positions, hidden_states, llama_4_scaling",
    ),
    Place(
        f"{_V4}.attention",
        "DeepseekV4Attention._alloc_attn_out",
        "self, num_tokens, hidden_states",
    ),
    Place(f"{_V4}.attention", "DeepseekV4Attention._split_qkv_and_norm", "self, qr_kv"),
    Place(f"{_V4}.attention", "DeepseekV4Attention._prepare_and_attn", _INPUTS),
    Place(f"{_V4}.attention", "DeepseekV4Attention._prepare_and_attn_eager", _INPUTS),
    Place(
        f"{_V4}.attention",
        "DeepseekV4Attention._fused_qnorm_rope_kv_insert",
        "self, q, kv, positions, attn_metadata",
    ),
    Place(
        f"{_V4}.attention",
        "DeepseekV4Attention._sparse_indexer_and_attn",
        "self, hidden_states, index_q, index_q_scale, index_weights, q, kv, positions, out",
    ),
    Place(
        f"{_V4}.nvidia.flashmla",
        "DeepseekV4FlashMLAAttention.forward_mqa",
        "self, q, kv, positions, output",
    ),
    Place(f"{_V4}.nvidia.flashmla", "DeepseekV4FlashMLAAttention._o_proj", "self, o, positions"),
    Place(
        f"{_V4}.attention",
        "DeepseekV4Indexer.forward",
        "self, hidden_states, qr, compressed_kv_score, indexer_weights, positions, rotary_emb, "
        "qr_scale, skip_compressor",
    ),
    Place(f"{_V4}.attention", "DeepseekV4Indexer._wq_b_proj", "self, qr, qr_scale"),
    Place(
        f"{_V4}.compressor",
        "DeepseekCompressor.forward",
        "self, kv_score, positions, rotary_emb",
    ),
    Place(
        f"{_V4}.compressor",
        "CompressorMetadata",
        "block_table, slot_mapping, block_size, token_to_req_indices, num_decode_tokens, "
        "c128_boundary",
    ),
    Place(
        f"{_V4}.sparse_mla",
        "DeepseekV4FlashMLAMetadata",
        "num_reqs, max_query_len, max_seq_len, num_actual_tokens, query_start_loc, slot_mapping, "
        "block_table, req_id_per_token, block_size, topk_tokens, "
        "c128a_global_decode_topk_indices, c128a_decode_topk_lens, c128a_prefill_topk_indices",
    ),
    Place(
        "vllm.v1.attention.backends.mla.indexer",
        "DeepseekV32IndexerMetadata",
        "seq_lens, max_seq_len, slot_mapping, num_decodes, num_decode_tokens, num_prefills, "
        "num_prefill_tokens, decode, prefill, positions, block_table",
    ),
    Place(
        f"{_V4}.sparse_mla",
        "DeepseekV4FlashMLAMetadataBuilder.build",
        "self, common_prefix_len, common_attn_metadata, fast_build",
    ),
    Place(
        f"{_V4}.compressor",
        "CompressorMetadataBuilder.build",
        "self, common_prefix_len, common_attn_metadata, fast_build",
    ),
    Place(f"{_V4}.compressor", "CompressorStateCache.get_attn_backend", "self"),
    Place(
        f"{_V4}.nvidia.flashmla",
        "DeepseekSparseSWAFlashMLAMetadataBuilder.build",
        "self, common_prefix_len, common_attn_metadata, fast_build, replay_start",
    ),
    Place(
        "vllm.v1.attention.backend",
        "CommonAttentionMetadata.token_to_req_indices",
        "self, buffer",
    ),
    Place(f"{_V4}.attention", "DeepseekV4IndexerCache.get_attn_backend", "self"),
    Place(
        "vllm.v1.attention.backends.mla.indexer",
        "DeepseekV32IndexerMetadataBuilder.build",
        "self, common_prefix_len, common_attn_metadata, fast_build",
    ),
    Place(
        "vllm.v1.worker.block_table",
        "get_block_table_width",
        "max_num_blocks, block_size, token_alignment",
    ),
    Place(
        "vllm.v1.attention.backend",
        "AttentionBackend.get_preferred_block_size",
        "default_block_size",
    ),
    Place(
        "vllm.utils.multi_stream_utils",
        "maybe_execute_in_parallel",
        "fn0, fn1, event0, event1, aux_stream",
    ),
    Place("vllm.compilation.breakable_cudagraph", "eager_break_during_capture", "fn"),
    Place("vllm.compilation.breakable_cudagraph", "BreakableCUDAGraphCapture.is_active", ""),
    Place("vllm.forward_context", "get_forward_context", ""),
    Place("vllm.forward_context", "override_forward_context", "forward_context"),
    Place(
        "vllm.forward_context",
        "ForwardContext",
        "no_compile_layers, attn_metadata, slot_mapping, dp_metadata, cudagraph_runtime_mode, "
        "batch_descriptor, ubatch_slices, is_padding, skip_compiled, all_moe_layers, "
        "moe_layer_index, additional_kwargs",
    ),
    # Constructed with the fields that this package's operators read; the others have defaults.
    Place(
        "vllm.v1.attention.backends.mla.sparse_swa",
        "DeepseekSparseSWAMetadata",
        "block_table, slot_mapping, block_size, seq_lens, query_start_loc, query_start_loc_cpu, "
        "is_valid_token, token_to_req_indices, decode_swa_indices, decode_swa_lens, "
        "decode_swa_width, prefill_swa_indices, prefill_swa_lens, prefill_left_visible, "
        "prefill_right_visible, replay_start, cache_slot_mapping, cache_positions, num_decodes, "
        "num_prefills, num_decode_tokens, num_prefill_tokens, max_decode_query_len, "
        "flashinfer_decode_topk_lens, flashinfer_decode_seq_lens, prefill_seq_lens, "
        "prefill_seq_lens_cpu, prefill_gather_lens, prefill_query_lens_cpu, prefill_window_size, "
        "prefill_max_model_len, prefill_max_num_batched_tokens, tile_sched_swaonly, "
        "tile_sched_c4a, tile_sched_c128a, tile_sched_c1a, tile_sched_c2a, "
        "flashinfer_sparse_index_cache",
    ),
)
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
_MTP, _DSPARK = f"{_V4}.nvidia.mtp", f"{_V4}.nvidia.dspark"
DRAFT: tuple[Place, ...] = (
    Place(
        _MTP,
        "DeepSeekV4MultiTokenPredictorLayer.forward",
        "self, input_ids, positions, previous_hidden_states, inputs_embeds, spec_step_index",
    ),
    Place(
        _MTP,
        "DeepSeekV4MultiTokenPredictor.compute_logits",
        "self, hidden_states, spec_step_idx",
    ),
    Place(_MTP, "DeepSeekV4MTP.__init__", "self, vllm_config, prefix"),
    Place(_MTP, "DeepSeekV4MTP.load_weights", "self, weights"),
    Place(
        _DSPARK,
        "DSparkDeepseekV4Model.forward",
        "self, input_ids, positions, inputs_embeds",
    ),
    Place(
        _DSPARK,
        "DSparkDeepseekV4Model.precompute_and_store_context_kv",
        "self, main_x, context_positions, context_slot_mappings",
    ),
    Place(_DSPARK, "DSparkDeepseekV4ForCausalLM.__init__", "self, vllm_config, prefix"),
    Place(_DSPARK, "DSparkDeepseekV4ForCausalLM.load_weights", "self, weights"),
    # Not called: what stands in their place was compared with them.
    Place(
        _DSPARK,
        "_insert_context_kv",
        "attn, kv, positions, slot_mapping",
    ),
)
CHECK_STATE: tuple[Place, ...] = (
    Place(_STATE, "resolve_model_state_cls", "vllm_config, model"),
    Place(f"{_STATE}.default", "DefaultModelState.preprocess_state", _PREPROCESS),
    Place(f"{_STATE}.default", "DefaultModelState.remove_request", "self, req_id"),
)
CHECK: tuple[Place, ...] = (
    *CHECK_STATE,
    Place(_MODEL, "DeepseekV4ForCausalLM.compute_logits", "self, hidden_states"),
    Place(_MODEL, "DeepseekV4ForCausalLM.compute_logits_local", "self, hidden_states"),
    Place(
        _MODEL,
        "DeepseekV4ForCausalLM.forward",
        "self, input_ids, positions, intermediate_tensors, inputs_embeds",
    ),
)
_MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
_LAYER = "vllm.model_executor.layers.attention_layer_base"
_BACKEND = "vllm.v1.attention.backend"
MODEL: tuple[Place, ...] = (
    Place(
        _MANAGERS,
        "CircularBufferManager.get_num_blocks_to_allocate",
        "self, request_id, num_tokens, new_computed_blocks, total_computed_tokens, "
        "num_local_computed_tokens, num_tokens_main_model, apply_admission_cap, prefill_end",
    ),
    Place(
        _MANAGERS,
        "CircularBufferManager.allocate_new_blocks",
        "self, request_id, num_tokens, num_tokens_main_model",
    ),
    Place(
        _MANAGERS,
        "CircularBufferManager.allocate_external_computed_blocks",
        "self, request_id, num_local_computed_tokens, num_external_computed_tokens, "
        "record_for_zeroing",
    ),
    Place(_MANAGERS, "CircularBufferManager.pop_blocks_for_free", "self, request_id"),
    Place(
        "vllm.v1.kv_cache_spec_registry",
        "KVCacheSpecRegistry.register",
        "kvcache_spec_cls, manager_class, uniform_type_base_spec",
    ),
    Place(
        "vllm.v1.kv_cache_spec_registry",
        "KVCacheSpecRegistry.get_manager_class",
        "kvcache_spec, role",
    ),
    Place(
        "vllm.model_executor.models.interfaces",
        "SupportsKVCacheGrouping.get_kv_cache_groups",
        "vllm_config, kv_cache_spec",
    ),
    Place(_LAYER, "AttentionLayerBase.bind_kv_cache", "self, kv_cache"),
    Place(_LAYER, "AttentionLayerBase.get_kv_cache_spec", "self, vllm_config"),
    Place(
        _BACKEND,
        "AttentionMetadataBuilder.build",
        "self, common_prefix_len, common_attn_metadata, fast_build",
    ),
    Place(
        _BACKEND,
        "AttentionMetadataBuilder.get_cudagraph_support",
        "vllm_config, kv_cache_spec",
    ),
    Place(_BACKEND, "AttentionBackend.get_supported_kernel_block_sizes", "kv_cache_spec"),
    Place(_BACKEND, "AttentionBackend.supported_kv_cache_layouts", ""),
)


NAMES = ("core", "jit_warmup", *switches.PARTS, "draft", "model")  # that ``of_part`` takes


def is_supported(version: str) -> bool:
    """Whether a release of vLLM, ``0.33.1+cu130`` say, is one that was tried."""
    return ".".join(version.split("+")[0].split(".")[:2]) in VERSIONS


def of_part(part: str) -> tuple[Place, ...]:
    """Places of a part of ``switches.PARTS``, or of another of ``NAMES``."""
    return {
        "core": CORE,
        "jit_warmup": JIT_WARMUP,
        switches.EXPERTS: EXPERTS,
        switches.LINEAR: LINEAR,
        switches.ATTENTION: ATTENTION,
        switches.HYPER_CONNECTION: HYPER_CONNECTION,
        "draft": DRAFT,
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
