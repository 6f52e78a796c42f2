"""vLLM's draft models for DeepSeek-V4, MTP and DSpark, with modules on this package's kernels.

vLLM's proposers build the models, call them and verify the drafted tokens. A draft has layers of
the main model's classes, which take the same parts (``deepseek.adopt_parts``). Its norms, the last
write-back and the head belong to the part ``hyper_connection``, and DSpark's context entries to
``attention``.

Drafts have a report of their own, and are not watched by ``DSV4_VLLM_CHECK``.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.models.common.ops import sequence_parallel
from vllm.models.deepseek_v4.nvidia import dspark as vllm_dspark
from vllm.models.deepseek_v4.nvidia import mtp as vllm_mtp

from dsv4.integrations.vllm import deepseek, draft_experts, norm, places
from dsv4.integrations.vllm.adoption import Adoption
from dsv4.integrations.vllm.attention import Attention
from dsv4.integrations.vllm.attention_warm import scratch
from dsv4.integrations.vllm.hyper_connection import (
    shard_padding,
    spread,
    streams_reason,
    write_back,
)
from dsv4.integrations.vllm.switches import ATTENTION, HYPER_CONNECTION
from dsv4.ops.hyper_connection import hc_head
from dsv4.ops.kv_cache import norm_rope_write_kv
from dsv4.ops.norm import rms_norm

_KERNELS = "rms_norm, hc_post, hc_head"


class MtpLayer(vllm_mtp.DeepSeekV4MultiTokenPredictorLayer):
    """vLLM's MTP layer, with this package's norms and last write-back."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        previous_hidden_states: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
        spec_step_index: int = 0,
    ) -> torch.Tensor:
        """Run the layer.

        Args:
            input_ids: ``[T]``, the token after each position.
            positions: ``[T]``.
            previous_hidden_states: ``[T, n H]``, streams of the main model or of the last draft.
            inputs_embeds: ``[T, H]``, embeddings of ``input_ids``.
            spec_step_index: Not read: every layer has its own.

        Returns:
            Streams ``[T, n H]``, for ``compute_logits`` and for the next draft.
        """
        assert inputs_embeds is not None
        block = self.mtp_block
        streams = previous_hidden_states.view(-1, self.hc_mult, self.config.hidden_size)
        streams, embedded = self._normed(streams, inputs_embeds)
        # As vLLM does: no token precedes that of position 0.
        embedded = embedded.masked_fill((positions == 0).unsqueeze(-1), 0)
        if block.use_sequence_parallel:
            shard_padding(embedded)
            embedded = sequence_parallel.sp_shard(embedded)
            streams = sequence_parallel.sp_shard(streams)
        x = self.h_proj(streams) + self.e_proj(embedded).unsqueeze(-2)
        streams = write_back(*block(x=x, positions=positions, input_ids=input_ids))
        if block.use_sequence_parallel:
            streams = sequence_parallel.sp_all_gather(streams)[: positions.shape[0]]
        return streams.flatten(1)

    def _normed(
        self, streams: torch.Tensor, embedded: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norms of streams ``[T, n, H]`` and of embeddings ``[T, H]``."""
        return (
            rms_norm(streams, self.hnorm.weight, self.hnorm.variance_epsilon),
            rms_norm(embedded, self.enorm.weight, self.enorm.variance_epsilon),
        )

    def dsv4_warm(self, tokens: int) -> None:
        """Launch the kernels of a step of that many tokens on zeros; layers launch their own."""
        size = (tokens, self.hc_mult, self.config.hidden_size)
        streams = self.hnorm.weight.new_zeros(size, dtype=torch.bfloat16)
        self._normed(streams, streams[:, 0].contiguous())


class Mtp(vllm_mtp.DeepSeekV4MultiTokenPredictor):
    """vLLM's MTP layers, with this package's head."""

    def compute_logits(self, hidden_states: torch.Tensor, spec_step_idx: int = 0) -> torch.Tensor:
        """Logits ``[T, vocab]`` of streams ``[T, n H]``."""
        number = self.mtp_start_layer_idx + spec_step_idx % self.num_mtp_layers
        layer = self.layers[str(number)]
        streams = hidden_states.view(-1, layer.hc_mult, layer.config.hidden_size)
        hidden = self._normed_head(streams, layer)
        return self.logits_processor(layer.shared_head.head, hidden)  # type: ignore[no-any-return]

    @staticmethod
    def _normed_head(streams: torch.Tensor, layer: Any) -> torch.Tensor:
        """Normed hidden states ``[T, H]`` of streams ``[T, n, H]``."""
        last = layer.shared_head.norm
        return rms_norm(_head(streams, layer), last.weight, last.variance_epsilon)

    def dsv4_warm(self, tokens: int) -> None:
        """Launch the kernels of the head for that many tokens on zeros."""
        layer = next(iter(self.layers.values()))
        size = (tokens, layer.hc_mult, layer.config.hidden_size)
        self._normed_head(layer.hc_head_fn.new_zeros(size, dtype=torch.bfloat16), layer)


class Dspark(vllm_dspark.DSparkDeepseekV4Model):
    """vLLM's DSpark stages, with this package's last write-back, head and context entries."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states ``[T, H]`` of a block of drafts, before the final norm."""
        x = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        if self.use_sequence_parallel:
            shard_padding(x)
            x, input_ids = sequence_parallel.sp_shard(x), sequence_parallel.sp_shard(input_ids)
        output: Any = (None, None, None)
        x = spread(x, self.hc_mult)
        for layer in self.layers:
            streams, post, comb = output
            x, *output = layer(x, positions, input_ids, post, comb, streams)
        streams = write_back(x, *output)
        if self.use_sequence_parallel:
            streams = sequence_parallel.sp_all_gather(streams)[: positions.shape[0]]
        return _head(streams, self)

    def dsv4_warm(self, tokens: int) -> None:
        """Launch the kernels of the head for that many tokens on zeros."""
        size = (tokens, self.hc_mult, self.hidden_size)
        _head(self.hc_head_fn.new_zeros(size, dtype=torch.bfloat16), self)


class DsparkContext(Dspark):
    """And the context's entries, where the attention is this package's."""

    @torch.inference_mode()
    def precompute_and_store_context_kv(
        self,
        main_x: torch.Tensor,
        context_positions: torch.Tensor,
        context_slot_mappings: list[torch.Tensor | None] | None = None,
    ) -> None:
        """Store the entries of a step's tokens in the window of every stage.

        Args:
            main_x: ``[T, H]``, as ``combine_hidden_states`` makes it.
            context_positions: ``[T]``.
            context_slot_mappings: Per stage ``[T]``, or None: nothing is stored there.
        """
        kv = self.context_wkv_proj(main_x).unflatten(-1, (self.num_dspark_layers, -1))
        if context_slot_mappings is not None:
            self._store_context(kv, context_positions, context_slot_mappings)

    def dsv4_warm(self, tokens: int) -> None:
        """Launch the head's kernels, and those that store as many entries, on scratch pages."""
        super().dsv4_warm(tokens)
        attentions = [layer.attn for layer in self.layers]
        if any(attention.dsv4_state.limits is None for attention in attentions):
            return
        size = (tokens, self.num_dspark_layers, self.config.head_dim)
        kv = self.hc_head_fn.new_zeros(size, dtype=torch.bfloat16)
        positions = torch.zeros(tokens, dtype=torch.int64, device=kv.device)
        with ExitStack() as stack:
            for attention in attentions:
                stack.enter_context(scratch(attention, attention.dsv4_state.limits))
            self._store_context(kv, positions, [positions] * len(attentions))

    def _store_context(
        self,
        kv: torch.Tensor,
        positions: torch.Tensor,
        slots_of_stages: list[torch.Tensor | None],
    ) -> None:
        """Store ``kv [T, stages, D]`` in the windows of the stages that have slots."""
        for number, layer in enumerate(self.layers):
            slots = slots_of_stages[number]
            if slots is None:
                continue
            attention: Attention = layer.attn
            cos, sin = attention.rotary_emb.cos_sin_cache[positions].chunk(2, dim=-1)
            norm_rope_write_kv(
                attention.window_pages(),
                kv[:, number],
                attention.kv_norm.weight,
                cos.contiguous(),
                sin.contiguous(),
                slots,
                eps=attention.eps,
            )


class DeepSeekV4MTP(vllm_mtp.DeepSeekV4MTP):
    """The class that the plugin registers for MTP drafts.

    Attributes:
        dsv4: The context of the adoption, with the report.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.dsv4 = deepseek.adopt_parts(self, vllm_config, adopt)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the draft's tensors of the checkpoint."""
        loaded: set[str] = super().load_weights(draft_experts.as_built(self, weights))
        return loaded

    def process_weights_after_loading(self) -> None:
        """Warm the kernels and publish the report; vLLM calls it when all layers are processed."""
        deepseek.finish(self, self.dsv4, draft=True)


class DSparkDeepseekV4ForCausalLM(vllm_dspark.DSparkDeepseekV4ForCausalLM):
    """The class that the plugin registers for DSpark drafts.

    Attributes:
        dsv4: The context of the adoption, with the report.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.dsv4 = deepseek.adopt_parts(self, vllm_config, adopt)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the draft's tensors of the checkpoint."""
        loaded: set[str] = super().load_weights(draft_experts.as_built(self, weights))
        return loaded

    def process_weights_after_loading(self) -> None:
        """Warm the kernels and publish the report; vLLM calls it when all layers are processed."""
        deepseek.finish(self, self.dsv4, draft=True)


def _head(streams: torch.Tensor, owner: Any) -> torch.Tensor:
    return hc_head(
        streams,
        owner.hc_head_fn,
        owner.hc_head_scale,
        owner.hc_head_base,
        norm_eps=owner.rms_norm_eps,
        hc_eps=owner.hc_eps,
    )


def adopt(model: nn.Module, context: Adoption) -> None:
    """Replace the modules of a draft outside its layers, for the parts that are switched on."""
    parts = context.switches.parts
    different = places.mismatches(places.DRAFT) if HYPER_CONNECTION in parts else []
    for reason in different:
        context.report.left(HYPER_CONNECTION, "*", "vLLM's", reason)
    if HYPER_CONNECTION not in parts or different:
        return
    for name, module in model.named_modules():
        kind = type(module)
        if kind is vllm_mtp.DeepSeekV4MultiTokenPredictorLayer:
            _adopt(module, MtpLayer, name, _reason(module), context)
        elif kind is vllm_mtp.DeepSeekV4MultiTokenPredictor:
            _adopt(module, Mtp, name, _reason(next(iter(module.layers.values()))), context)
        elif kind is vllm_dspark.DSparkDeepseekV4Model:
            reason = _reason(module)
            adopted = all(isinstance(layer.attn, Attention) for layer in module.layers)
            _adopt(module, DsparkContext if adopted else Dspark, name, reason, context)
            if adopted and not reason:
                context.report.replaced(ATTENTION, f"{name}.context", "norm_rope_write_kv")
            norm.adopt_norm(module.norm, f"{name}.norm", context)
            norm.adopt_norm(module.main_norm, f"{name}.main_norm", context)


def _adopt(
    module: nn.Module, adopted: type[nn.Module], name: str, reason: str, context: Adoption
) -> None:
    if reason:
        context.report.left(HYPER_CONNECTION, name, "tilelang", reason)
        return
    module.__class__ = adopted
    context.report.replaced(HYPER_CONNECTION, name, _KERNELS)


def _reason(module: Any) -> str:
    """Why a draft's own operations stay vLLM's; empty: they need not."""
    if module.use_native_mega_moe:
        return "DeepGEMM's experts are routed by the model itself"
    return streams_reason(module.hc_mult)
