"""vLLM's warm-up of its own kernels, without those that only replaced methods would launch.

Modules of vLLM register kernels in their constructors, and before vLLM captures graphs it compiles
all that are registered. The plugin replaces methods after the constructors have run. So a model is
built under a registry of its own, and the kernels that vLLM's code still launches are registered
with the runner's registry afterwards, in vLLM's order.

Drafts register nothing: vLLM 0.33 has no registry active where it builds them, because their main
model registers the same kernels. So all are handed on unless drafts are replaced like it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank

from dsv4.integrations.vllm import places
from dsv4.integrations.vllm._log import logger
from dsv4.integrations.vllm.plugin import DRAFT_CLASSES

_OURS = "dsv4."
_WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix")  # vLLM's methods that draft without a model
# Settings of drafts that differ from the main model's where they have a value.
_OVERRIDES = ("moe_backend", "attention_backend", "kv_cache_dtype")


@dataclass(frozen=True)
class Launched:
    """Kernels of vLLM and what launches them.

    Attributes:
        methods: Qualified names of methods, of modules or of their builders of metadata.
        kernels: Names of the kernels' classes.
    """

    methods: tuple[str, ...]
    kernels: tuple[str, ...]


_LAYER, _MODEL = "DeepseekV4DecoderLayer.forward", "DeepseekV4Model.forward"
_ENTRIES = "DeepseekV4SparseMLAMetadataBuilder.build"
_KEYS = "DeepseekV32IndexerMetadataBuilder.build"
LAUNCHED: tuple[Launched, ...] = (
    Launched(
        (_LAYER,),
        ("MhcPreBigFuseTileLangKernel", "HcPrenormGemmTileLangKernel", "MhcFusedTileLangKernel"),
    ),
    Launched((_LAYER, _MODEL), ("MhcPostTileLangKernel",)),
    Launched((_MODEL,), ("HcHeadFusedTileLangKernel",)),
    Launched(("DeepseekV4Attention._split_qkv_and_norm",), ("FusedQKVRMSNormKernel",)),
    Launched(("DeepseekV4Attention._o_proj",), ("FusedInvRopeFP8QuantKernel",)),
    Launched(
        ("DeepseekV4Attention.forward_mqa",),
        (
            *("CombineTopkSwaIndicesKernel", "ComputeGlobalTopkIndicesAndLensKernel"),
            *("DequantizeAndGatherKCacheKernel", "DequantGatherKCacheKernel"),
        ),
    ),
    Launched(
        ("DeepseekCompressor.forward",),
        (
            *("SavePartialStatesKernel", "FusedKVCompressNormRopeInsertIndexerTritonKernel"),
            *("SparseAttnCompressNormRopeStoreC4Kernel", "SparseAttnCompressC128Block8Kernel"),
            *("SparseAttnNormRopeStoreKernel",),
        ),
    ),
    Launched(
        ("DeepseekV4Indexer.forward",),
        (
            *("IndexerQFp8Kernel", "IndexerQMxFp4Kernel"),
            *("FusedIndexerQRopeQuantTritonKernel", "FusedIndexerQRopeMxFp4TritonKernel"),
            # Of its logits; the attention calls the layer that launches them.
            *("PackSeqTritonKernel", "UnpackSeqTritonKernel"),
        ),
    ),
    Launched(
        ("DeepseekSparseSWAMetadataBuilder.build",),
        ("ComputePrefillMetadataKernel", "ComputeSWAIndicesAndLensKernel"),
    ),
    Launched((_ENTRIES,), ("BuildC128ATopkMetadataKernel",)),
    Launched((_ENTRIES, _KEYS), ("CompressedSlotMappingKernel",)),
    Launched((_KEYS,), ("PrepareUniformDecodeKernel", "BuildPrefillChunkMetadataKernel")),
)
_METHODS = frozenset(method for launched in LAUNCHED for method in launched.methods)


class Registrations:
    """What a model's constructors register, held back until its modules are replaced."""

    def __init__(self, vllm_config: Any) -> None:
        """Make them empty; where this vLLM is not known a warning says so, and nothing is held.

        Args:
            vllm_config: vLLM's configuration of the model.
        """
        self._config = vllm_config
        self._registry: Any = None
        reason = "; ".join(places.mismatches(places.JIT_WARMUP))
        if not reason:
            from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry

            self._registry = JitWarmupRegistry(vllm_config)
            if not isinstance(getattr(self._registry, "_registrations", None), dict):
                reason, self._registry = "its registry has no registrations", None
        if reason:
            logger().warning("dsv4 leaves vLLM's warm-up of its own kernels as it is: %s", reason)

    def held(self) -> AbstractContextManager[Any]:
        """Return a context in which registrations are held back."""
        return nullcontext() if self._registry is None else self._registry.activate()

    def hand_on(self, model: nn.Module) -> None:
        """Register what is still launched with the runner's registry, and log what is not.

        Args:
            model: vLLM's model with replaced modules.
        """
        if self._registry is None:
            return
        calls_of = self._registry._registrations
        reason = reason_to_keep(model, self._config) if calls_of else ""
        idle = frozenset() if reason else idle_kernels(model)
        left_out = []
        for kernel, calls in calls_of.items():
            if type(kernel).__name__ in idle:
                left_out.append(type(kernel).__name__)
                continue
            for args, kwargs in calls:
                type(self._registry).register(kernel, *args, **kwargs)
        if get_tensor_model_parallel_rank() == 0:
            _log(left_out, reason)


def _log(left_out: list[str], reason: str) -> None:
    if left_out:
        text = ", ".join(left_out)
        logger().info("vLLM does not warm up kernels that dsv4 has replaced: %s", text)
    elif reason:
        logger().info("vLLM warms up kernels that dsv4 has replaced, too: %s", reason)


def idle_kernels(model: nn.Module) -> frozenset[str]:
    """Return the names of the classes of vLLM's kernels that nothing in a model launches.

    Args:
        model: vLLM's model with replaced modules.
    """
    launching = frozenset(_launching(model))
    return frozenset(
        kernel
        for launched in LAUNCHED
        if not launching.intersection(launched.methods)
        for kernel in launched.kernels
    )


def _launching(model: nn.Module) -> Iterator[str]:
    """Yield the methods that are vLLM's own in a module of the model or a builder of metadata."""
    for owner in _owners(model):
        bases = (owner if isinstance(owner, type) else type(owner)).__mro__
        classes = {base.__name__ for base in bases}
        for method in _METHODS:
            class_name, _, name = method.partition(".")
            if class_name in classes and not _is_replaced(owner, name):
                yield method


def _owners(model: nn.Module) -> Iterator[Any]:
    """Yield the modules and the classes of the builders of their metadata."""
    module: Any
    for module in model.modules():
        yield module
        if hasattr(module, "get_attn_backend"):
            yield module.get_attn_backend().get_builder_cls()


def _is_replaced(owner: Any, name: str) -> bool:
    function = getattr(owner, name, None)
    return str(getattr(function, "__module__", "")).startswith(_OURS)


def reason_to_keep(model: nn.Module, vllm_config: Any) -> str:
    """Say which drafts may launch kernels that the main model does not; empty if none may.

    Args:
        model: vLLM's main model with replaced modules.
        vllm_config: Its configuration.
    """
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None or speculative.method in _WITHOUT_MODEL:
        return ""
    draft = speculative.draft_model_config
    if draft is None or not set(draft.architectures or ("",)) <= DRAFT_CLASSES.keys():
        return f"drafts of the method {speculative.method} are vLLM's"
    if draft.model != vllm_config.model_config.model:
        return f"drafts have a checkpoint of their own, {draft.model}"
    own = [name for name in _OVERRIDES if getattr(speculative, name, None) is not None]
    if own:
        return f"drafts have their own {', '.join(own)}"
    if any(getattr(module, "use_native_mega_moe", False) for module in model.modules()):
        return "DeepGEMM's experts are routed by the drafts themselves"
    return "; ".join(places.mismatches(places.DRAFT))
