"""The calls of CuTeDSL kernels that a model makes, and the kernels that they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dsv4.compilation import draft_steps
from dsv4.config import ModelConfig
from dsv4.cute import attention as cute_attention
from dsv4.cute import gemm as cute_gemm
from dsv4.cute import (
    gemm_e4m3,
    gemm_fp8,
    gemm_fp8_small_m,
    gemm_nvfp4,
    grouped_gemm_e4m3,
    grouped_nvfp4,
)
from dsv4.cute import grouped_gemm as cute_grouped
from dsv4.cute.grouped_problem import Experts
from dsv4.cute.runtime.architectures import ARCHITECTURES, HOPPER
from dsv4.cute.sm90 import indexer_logits_plan
from dsv4.cute.sm90.attention_plan import DIMS, ROPE
from dsv4.cute.supports import packed_layout_of
from dsv4.integrations._swap import OutputHead
from dsv4.layers._pooling import PoolingModule
from dsv4.layers.attention import DeepseekV4Attention
from dsv4.layers.experts import DeepseekV4Experts
from dsv4.layers.linear import Linear
from dsv4.model import DeepseekV4ForCausalLM
from dsv4.parallel.context import ALONE, DATA, Ranks
from dsv4.parallel.emulated import emulated_rank
from dsv4.parallel.expert_exchange import rows_of
from dsv4.quant import fragments
from dsv4.quant.formats import FP8_BLOCK, FRAGMENTS, LINEAR, NVFP4, SWIZZLED
from dsv4.speculation.draft_head import why_no_copy


@dataclass(frozen=True)
class PackedGemm:
    """The facts that the kernels of a packed GEMM depend on.

    Attributes:
        rows: N, of all groups.
        columns: K.
        groups: Groups of rows with an input each.
        activation: ``"bf16"``, ``"nvfp4"`` or ``"fp8"``.
        out_dtype: Dtype of the result.
        swiglu: Whether gate and up rows are interleaved and the result is their SwiGLU.
        layout: Layout of the weight.
    """

    rows: int
    columns: int
    groups: int
    activation: str
    out_dtype: torch.dtype
    swiglu: bool = False
    layout: str = FRAGMENTS

    def plans(self, max_tokens: int, arch: str = HOPPER) -> list[Any]:
        """Configurations of all kernels for up to that many tokens."""
        if self.layout == SWIZZLED:
            if arch == HOPPER or self.activation != "nvfp4":
                return []
            return gemm_nvfp4.plans(
                self.rows,
                self.columns,
                self.groups,
                self.out_dtype,
                max_tokens,
                swiglu=self.swiglu,
            )
        sizes = (self.rows, self.columns, self.groups)
        plans: list[Any] = cute_gemm.plans(
            *sizes, self.activation, self.out_dtype, max_tokens, swiglu=self.swiglu, arch=arch
        )
        if self.activation == "fp8" and arch == HOPPER:
            plans += gemm_e4m3.plans(*sizes, self.out_dtype, max_tokens, swiglu=self.swiglu)
        return plans


@dataclass(frozen=True)
class Fp8Gemm:
    """The facts that the kernels of a GEMM with an FP8 weight depend on; see ``PackedGemm``."""

    rows: int
    columns: int
    groups: int
    activation: str
    out_dtype: torch.dtype
    scale_dtype: torch.dtype

    def plans(self, max_tokens: int, arch: str = HOPPER) -> list[Any]:
        """Configurations of all kernels for up to that many tokens."""
        if arch != HOPPER:
            return []
        sizes = (self.rows, self.columns, self.groups)
        kind = (self.activation, self.out_dtype, self.scale_dtype)
        plans: list[Any] = [
            *gemm_fp8_small_m.plans(*sizes, *kind, max_tokens),
            *gemm_fp8.plans(*sizes, *kind, max_tokens),
        ]
        if self.activation == "fp8":
            plans += gemm_e4m3.plans(
                *sizes, self.out_dtype, max_tokens, scale_dtype=self.scale_dtype
            )
        return plans


@dataclass(frozen=True)
class GroupedGemm:
    """GEMMs of packed routed experts.

    Attributes:
        experts: Sizes and kind.
        top_k: Rows of each token.
        layout: Layout of the weights.
        ranks: Ranks whose tokens come together.
        is_fp8: Whether activations are FP8.
    """

    experts: Experts
    top_k: int
    layout: str = FRAGMENTS
    ranks: int = 1
    is_fp8: bool = False

    def plans(self, max_tokens: int, arch: str = HOPPER) -> list[Any]:
        """Configurations of all kernels for up to that many tokens, whatever their experts."""
        tokens = max_tokens if self.ranks == 1 else rows_of(max_tokens, self.ranks)
        rows = tokens * self.top_k
        if self.layout == SWIZZLED:
            if arch == HOPPER or not self.experts.row_scaled:
                return []
            return list(grouped_nvfp4.plans(self.experts, rows))
        plans: list[Any] = cute_grouped.plans(self.experts, rows, arch)
        if self.is_fp8 and arch == HOPPER:
            # Gate and up have FP8 results, which down takes.
            fused = self.experts.swiglu
            plans += grouped_gemm_e4m3.plans(self.experts, rows, quantized_out=fused)
        return plans


@dataclass(frozen=True)
class Attention:
    """Sparse attention over FP8 entries of the kernel's size.

    Attributes:
        heads: Heads of a token.
    """

    heads: int

    def plans(self, max_tokens: int, arch: str = HOPPER) -> list[Any]:
        """All of Hopper's: how tokens are split follows from the width of the page tables."""
        return [] if arch != HOPPER else cute_attention.plans()


@dataclass(frozen=True)
class Indexer:
    """Top-k selection from long rows, and indexer logits of MXFP4 keys of the kernel's size."""

    def plans(self, max_tokens: int, arch: str = HOPPER) -> list[Any]:
        """All of Hopper's: which is taken follows from the width of the page tables."""
        return [] if arch != HOPPER else indexer_logits_plan.plans()


Call = PackedGemm | Fp8Gemm | GroupedGemm | Attention | Indexer


def kernel_plans(calls: Sequence[Call], max_tokens: int, arch: str = HOPPER) -> list[Any]:
    """Return the configurations of all kernels of these calls, each once; may be empty."""
    if arch not in ARCHITECTURES.values():
        return []
    return list(dict.fromkeys(plan for p in calls for plan in p.plans(max_tokens, arch)))


def every_call(model: Any, arch: str = HOPPER, ranks: Ranks = ALONE) -> list[Call]:
    """GEMMs of linear layers and of routed experts, the indexer, and attention.

    Of a configuration those of one of ``ranks``.
    """
    dense, grouped = packed_gemms(model, arch, ranks), grouped_gemms(model, arch, ranks)
    others: list[Call] = [*indexers(model), *attentions(model), *draft_heads(model, arch)]
    return [*dense, *fp8_gemms(model), *grouped, *others]


def layout_of(layer: Linear | DeepseekV4Experts, arch: str) -> str:
    """The layout of a packed layer; of another one that which it would be packed to."""
    if layer.layout != LINEAR:
        return layer.layout
    return packed_layout_of(arch, layer.activation)


def packed_gemms(model: Any, arch: str = HOPPER, ranks: Ranks = ALONE) -> list[PackedGemm]:
    """GEMMs of packed weights, each shape once; see ``warmup`` for which layers count."""
    if isinstance(model, nn.Module):
        if _not_bfloat16(model):
            return []
        return _packed_gemms(model, arch, lambda layer: layer.format == NVFP4)
    return _packed_gemms(_empty(model, ranks), arch, lambda layer: True)


def fp8_gemms(model: Any) -> list[Fp8Gemm]:
    """GEMMs of a module's FP8 weights, each shape once; none of a configuration."""
    if not isinstance(model, nn.Module) or _not_bfloat16(model):
        return []
    wide = {layer for parent in model.modules() for layer in _float32_results(parent)}
    return list(
        dict.fromkeys(
            Fp8Gemm(
                layer.out_features,
                layer.in_features,
                layer.groups,
                layer.activation,
                torch.float32 if layer in wide or isinstance(layer, OutputHead) else torch.bfloat16,
                _scale_dtype(layer),
            )
            for layer in model.modules()
            if isinstance(layer, Linear) and layer.format == FP8_BLOCK
        )
    )


def _scale_dtype(layer: Linear) -> torch.dtype:
    assert layer.weight_scale is not None
    return layer.weight_scale.dtype


def grouped_gemms(model: Any, arch: str = HOPPER, ranks: Ranks = ALONE) -> list[GroupedGemm]:
    """Return the GEMMs of packed routed experts, each shape once."""
    if isinstance(model, nn.Module):
        layers = [] if _not_bfloat16(model) else _experts_of(model)
        layers = [layer for layer in layers if layer.format == NVFP4]
        context = getattr(model, "parallel", None)
        ranks = ALONE if context is None else context.ranks
    else:
        layers = _experts_of(_empty(model, ranks))
    gathered = ranks.size if ranks.mode == DATA else 1
    return list(dict.fromkeys(p for layer in layers for p in _of_experts(layer, arch, gathered)))


def attentions(model: Any) -> list[Attention]:
    """Sparse attention of each number of heads once; see ``warmup`` for which layers count."""
    return list(
        dict.fromkeys(
            Attention(config.num_attention_heads)
            for config in _configs(model)
            if (config.head_dim, config.qk_rope_head_dim) == (DIMS, ROPE)
            and config.numerics == "deepseek"
        )
    )


def draft_heads(model: Any, arch: str = HOPPER) -> list[PackedGemm]:
    """GEMM of the NVFP4 copy of the head that drafts take; none of a configuration.

    There all layers count as NVFP4, the head too.
    """
    if not isinstance(model, DeepseekV4ForCausalLM) or not draft_steps.has_draft(model):
        return []
    head = model.lm_head
    if why_no_copy(model) or head.weight.dtype != torch.bfloat16 or arch != HOPPER:
        return []
    if not fragments.fits(head.out_features, head.in_features):
        return []
    wide = torch.float32 if model.config.numerics == "deepseek" else torch.bfloat16
    return [PackedGemm(head.out_features, head.in_features, 1, "bf16", wide)]


def indexers(model: Any) -> list[Indexer]:
    """The indexer, if there is one and its keys are of the kernel's size."""
    sizes = {config.index_head_dim for config in _configs(model)}
    return [Indexer()] if indexer_logits_plan.DIMS in sizes else []


def _configs(model: Any) -> list[ModelConfig]:
    """Return the configuration of each layer of attention, or the one passed."""
    if not isinstance(model, nn.Module):
        return [ModelConfig.of(model)]
    configs = [m.config for m in model.modules() if isinstance(m, DeepseekV4Attention)]
    return [] if _not_bfloat16(model) else configs


def _not_bfloat16(model: nn.Module) -> bool:
    return bool(getattr(model, "dtype", torch.bfloat16) != torch.bfloat16)


def _empty(config: Any, ranks: Ranks = ALONE) -> DeepseekV4ForCausalLM:
    config = ModelConfig.of(config)
    context = emulated_rank(ranks, config, with_mailboxes=False)
    with torch.device("meta"):
        # Ranks with tokens of their own draft nothing, and have no layers of a DSpark draft.
        has_draft = context is None or ranks.mode != DATA or config.dspark is None
        return DeepseekV4ForCausalLM(config, mtp=has_draft, parallel=context)


def _experts_of(model: nn.Module) -> list[DeepseekV4Experts]:
    return [module for module in model.modules() if isinstance(module, DeepseekV4Experts)]


def _of_experts(layer: DeepseekV4Experts, arch: str, ranks: int = 1) -> list[GroupedGemm]:
    """Return the GEMMs of gate and up, and of down; none if the layer cannot be packed.

    Quantised results of the first are the second's rows where their scales are known; whether they
    will be is not known of a layer without a format yet.
    """
    inner, hidden, layout = layer.intermediate_dim, layer.hidden_dim, layout_of(layer, arch)
    if not (packs(2 * inner, hidden, layout) and packs(hidden, inner, layout)):
        return []
    quantises, weighs = layer.activation == "nvfp4", layer.numerics == "deepseek"
    known = quantises and layer.down_proj_input_scale is not None
    # GEMMs of experts in slots take the same kernels as those of all experts of the layer.
    count = layer.num_local_experts if layer.hosted is None else layer.num_experts
    first = Experts(2 * inner, hidden, count, False, quantises, True, weighs)
    second = Experts(hidden, inner, count, False, quantises)
    kinds = [first._replace(quantized_out=known), second]
    if quantises and layer.format is None:
        kinds.append(first._replace(quantized_out=True))
    top_k, is_fp8 = layer.num_experts_per_tok, layer.activation == "fp8"
    return [GroupedGemm(experts, top_k, layout, ranks, is_fp8) for experts in kinds]


def _packed_gemms(model: nn.Module, arch: str, nvfp4: Callable[[Linear], bool]) -> list[PackedGemm]:
    modules = list(model.modules())
    linear = {
        m: torch.float32 if isinstance(m, OutputHead) else torch.bfloat16
        for m in modules
        if isinstance(m, Linear) and nvfp4(m)
    }
    gemms: list[PackedGemm] = []
    for parent in modules:
        for layer in _float32_results(parent):
            if layer in linear:
                linear[layer] = torch.float32
        for how in ("joined", "joined_interleaved"):
            for names in getattr(parent, how, ()):
                layers = [getattr(parent, name) for name in names]
                if all(m in linear for m in layers) and len({m.activation for m in layers}) == 1:
                    interleaved = how == "joined_interleaved"
                    gemms += _gemm_of(layers, linear.pop(layers[0]), arch, swiglu=interleaved)
                    for layer in layers[1:]:
                        del linear[layer]
    for layer, dtype in linear.items():
        gemms += _gemm_of([layer], dtype, arch)
    return list(dict.fromkeys(gemms))


def _gemm_of(
    layers: Sequence[Linear], out_dtype: torch.dtype, arch: str, *, swiglu: bool = False
) -> list[PackedGemm]:
    """Return the GEMM of layers, or none if a layer cannot be packed."""
    first, rows = layers[0], [layer.out_features for layer in layers]
    layout = layout_of(first, arch)
    if layout == SWIZZLED and not swiglu and any(n % 128 for n in rows[:-1]):
        return []  # their matrices would share blocks of scales; put together they are linear
    if not all(packs(n // first.groups, first.in_features, layout, first.groups) for n in rows):
        return []
    shape = (sum(rows), first.in_features, first.groups)
    return [PackedGemm(*shape, first.activation, out_dtype, swiglu, layout)]


def packs(rows: int, columns: int, layout: str, groups: int = 1) -> bool:
    """Return whether there are kernels for ``groups`` matrices of this many rows in a layout."""
    if layout == SWIZZLED:
        return rows % (128 if groups > 1 else 16) == columns % 32 == 0
    return fragments.fits(rows, columns)


def _float32_results(module: nn.Module) -> list[nn.Module]:
    """Return the linear children that compute in float32 (specification, sections 2 and 5.1)."""
    if isinstance(module, PoolingModule) and module.numerics == "deepseek":
        return [module.kv_proj, module.gate_proj]
    if isinstance(module, DeepseekV4ForCausalLM) and module.config.numerics == "deepseek":
        return [module.lm_head]
    return []
