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
)
EXPERTS: tuple[Place, ...] = ()
LINEAR: tuple[Place, ...] = ()
ATTENTION: tuple[Place, ...] = ()
HYPER_CONNECTION: tuple[Place, ...] = ()
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


def _mismatch(place: Place) -> str:
    where = f"{place.module}.{place.name}"
    try:
        target: object = importlib.import_module(place.module)
        for name in place.name.split("."):
            target = getattr(target, name)
    except (ImportError, AttributeError) as error:
        return f"{where} is missing ({error})"
    actual = signature_of(target)
    if actual != place.signature:
        return f"{where} has the parameters ({actual}), expected ({place.signature})"
    return ""
