"""Hyper-connections of vLLM's DeepSeek-V4 by ``dsv4.ops.hyper_connection``.

vLLM calls its kernels by name in the ``forward`` of the decoder layer and of the model, so these
two methods are what is replaced, by a subclass that each instance gets as its class. All else of
the instances, parameters and vLLM's other methods included, stays.

Between layers the sublayer's output travels apart from the streams that it has not been written to,
as in vLLM, so that one operator writes back, collapses and norms.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from vllm import envs
from vllm.distributed import get_pp_group
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.models.common.ops import sequence_parallel
from vllm.models.deepseek_v4.nvidia import model as vllm_model
from vllm.sequence import IntermediateTensors

from dsv4.integrations.vllm.adoption import Adoption
from dsv4.integrations.vllm.switches import HYPER_CONNECTION
from dsv4.ops.hyper_connection import hc_head, hc_post, hc_post_pre_norm, hc_pre_norm

_STREAMS = 4  # that this package's kernels have
_POST_FACTOR = 2.0  # of the write-back weights, a constant of the operators
_LAYER_KERNEL = "hc_pre_norm, hc_post_pre_norm"
_MODEL_KERNEL = "hc_post, hc_head"


@dataclass(frozen=True)
class Mixed:
    """Input of a sublayer and the coefficients that write its output back.

    Attributes:
        streams: ``[T, n, H]``, the residual streams.
        normed: ``[T, H]``, the sublayer's input.
        post: ``[T, n]`` float32, write-back weights.
        comb: ``[T, n, n]`` float32, mixing matrices.
    """

    streams: torch.Tensor
    normed: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


@dataclass(frozen=True)
class HyperConnection:
    """Parameters of the hyper-connection around one sublayer, with the norm in it.

    Attributes:
        fn: ``[(2 + n) n, n H]`` float32.
        scale: ``[3]`` float32.
        base: ``[(2 + n) n]`` float32.
        norm_weight: ``[H]``.
        norm_eps: Added to both mean squares.
        hc_eps: The Sinkhorn epsilon.
        iterations: Column normalisations.
    """

    fn: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor
    norm_weight: torch.Tensor
    norm_eps: float
    hc_eps: float
    iterations: int

    def pre(self, streams: torch.Tensor) -> Mixed:
        """Collapse streams to which all sublayers have been written."""
        normed, post, comb = hc_pre_norm(
            streams, self.fn, self.scale, self.base, self.norm_weight, **self._settings()
        )
        return Mixed(streams, normed, post, comb)

    def post_pre(
        self, y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
    ) -> Mixed:
        """Write ``y``, the output of the sublayer before, to the streams and collapse them."""
        streams, normed, post, comb = hc_post_pre_norm(
            y,
            streams,
            post,
            comb,
            self.fn,
            self.scale,
            self.base,
            self.norm_weight,
            **self._settings(),
        )
        return Mixed(streams, normed, post, comb)

    def _settings(self) -> dict[str, Any]:
        return {
            "norm_eps": self.norm_eps,
            "hc_eps": self.hc_eps,
            "iterations": self.iterations,
        }


class DecoderLayer(vllm_model.DeepseekV4DecoderLayer):
    """vLLM's decoder layer, collapsing and writing back by this package's operators."""

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        input_ids: torch.Tensor | None,
        post_mix: torch.Tensor | None = None,
        res_mix: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        mega_gate_metadata: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run the layer.

        Args:
            x: Without ``residual`` the embeddings ``[T, H]`` or the streams ``[T, n, H]``; else the
                output ``[T, H]`` of the layer before, not yet written to its streams.
            positions: ``[T]``; T of all ranks under sequence parallelism.
            input_ids: ``[T]``, for layers that route by hash.
            post_mix: ``[T, n, 1]`` of the layer before.
            res_mix: ``[T, n, n]`` of the layer before.
            residual: ``[T, n, H]``, streams of the layer before.
            mega_gate_metadata: For the experts.

        Returns:
            ``(output [T, H], streams [T, n, H], post_mix, res_mix)`` for the layer that follows.
        """
        attention, experts = self._hyper_connection("attn"), self._hyper_connection("ffn")
        if residual is None:
            mixed = attention.pre(spread(x, self.hc_mult))
        else:
            assert post_mix is not None
            assert res_mix is not None
            mixed = attention.post_pre(x, residual, post_mix.squeeze(-1), res_mix)
        y = self._attend(mixed.normed, positions)
        mixed = experts.post_pre(y, mixed.streams, mixed.post, mixed.comb)
        y = self.ffn(mixed.normed, input_ids, mega_gate_metadata)
        return y, mixed.streams, mixed.post.unsqueeze(-1), mixed.comb

    def _hyper_connection(self, sublayer: str) -> HyperConnection:
        return HyperConnection(
            fn=getattr(self, f"hc_{sublayer}_fn"),
            scale=getattr(self, f"hc_{sublayer}_scale"),
            base=getattr(self, f"hc_{sublayer}_base"),
            norm_weight=getattr(self, f"{sublayer}_norm").weight,
            norm_eps=self.rms_norm_eps,
            hc_eps=self.hc_eps,
            iterations=self.hc_sinkhorn_iters,
        )

    def dsv4_warm(self, tokens: int) -> None:
        """Launch the kernels of a step of that many tokens on zeros."""
        mixer = self._hyper_connection("attn")
        embedded = mixer.fn.new_zeros((tokens, self.hidden_size), dtype=torch.bfloat16)
        mixed = mixer.pre(spread(embedded, self.hc_mult))
        mixed = mixer.post_pre(embedded, mixed.streams, mixed.post, mixed.comb)
        hc_post(embedded, mixed.streams, mixed.post, mixed.comb)

    def _attend(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if not self.use_sequence_parallel:
            return self.attn(positions, x, None)
        x = sequence_parallel.sp_all_gather(x)[: positions.shape[0]]
        return sequence_parallel.sp_reduce_scatter(self.attn(positions, x, None))


class Model(vllm_model.DeepseekV4Model):
    """vLLM's stack of layers, with this package's last write-back and head."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors | tuple[torch.Tensor, list[torch.Tensor]]:
        """Run the layers of this pipeline stage.

        Args:
            input_ids: ``[T]``.
            positions: ``[T]``.
            intermediate_tensors: From the stage before, in all but the first.
            inputs_embeds: ``[T, H]`` in place of the embeddings of ``input_ids``.

        Returns:
            Normed hidden states ``[T, H]``, with the auxiliary hidden states if a draft model reads
            any; in all stages but the last what the next stage begins with.
        """
        tokens = positions.shape[0]
        x = self._first(input_ids, intermediate_tensors, inputs_embeds)
        if self.use_native_mega_moe:
            input_ids = input_ids.to(torch.int64)
        if self.use_sequence_parallel:
            shard_padding(x)
            x, input_ids = sequence_parallel.sp_shard(x), sequence_parallel.sp_shard(input_ids)
        auxiliary = self.collect_remote_aux_hidden_states(intermediate_tensors)
        streams, local = self._run_layers(x, positions, input_ids)
        if not get_pp_group().is_last_rank:
            packed = self.pack_local_aux_hidden_states(local)
            return IntermediateTensors({"hidden_states": streams, **packed})
        hidden = self._finish(self._gathered(streams, tokens))
        auxiliary = auxiliary + local
        return (hidden, auxiliary) if auxiliary else hidden

    def _first(
        self,
        input_ids: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: torch.Tensor | None,
    ) -> torch.Tensor:
        """Embeddings ``[T, H]``, or the streams ``[T, n, H]`` of the stage before."""
        if not get_pp_group().is_first_rank:
            assert intermediate_tensors is not None
            return intermediate_tensors["hidden_states"]
        return self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds

    def _run_layers(
        self, x: torch.Tensor, positions: torch.Tensor, input_ids: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Streams after the last layer of this stage, and the auxiliary hidden states."""
        gate = self._gate_metadata(input_ids)
        output: tuple[torch.Tensor, ...] | None = None  # of the layer before
        written = None  # the streams after it, if they are needed more than once
        auxiliary = []
        layers = islice(self.layers, self.start_layer, self.end_layer)
        for layer_number, layer in enumerate(layers, start=self.start_layer + 1):
            y, streams, post, comb = (x, None, None, None) if output is None else output
            output = layer(y, positions, input_ids, post, comb, streams, mega_gate_metadata=gate)
            written = None
            if layer_number in self.aux_hidden_state_layers:
                written = write_back(*output)
                auxiliary.append(self._gathered(written.mean(dim=1), positions.shape[0]))
        if output is None:
            return spread(x, self.hc_mult), auxiliary
        return write_back(*output) if written is None else written, auxiliary

    def _gate_metadata(self, input_ids: torch.Tensor) -> Any:
        if not self.use_native_mega_moe:
            return None
        vision = getattr(self.config, "vision_n_layers", 0) > 0
        return vllm_model.prepare_mega_gate_routing_metadata(
            input_ids,
            has_hash_routing=self.has_local_hash_moe,
            image_sentinel_base_id=vllm_model.IMAGE_SENTINEL_BASE_ID if vision else None,
        )

    def _gathered(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        if not self.use_sequence_parallel:
            return x
        return sequence_parallel.sp_all_gather(x)[:tokens]

    def _finish(self, streams: torch.Tensor) -> torch.Tensor:
        """Collapse and norm the streams, and keep them for a draft model that reads them."""
        if self._mtp_hidden_buffer is not None:
            self._mtp_hidden_buffer[: streams.shape[0]].copy_(streams.flatten(1))
        return self.norm(self._head(streams))

    def _head(self, streams: torch.Tensor) -> torch.Tensor:
        return hc_head(
            streams,
            self.hc_head_fn,
            self.hc_head_scale,
            self.hc_head_base,
            norm_eps=self.rms_norm_eps,
            hc_eps=self.hc_eps,
        )

    def dsv4_warm(self, tokens: int) -> None:
        """Launch the kernels of the head, in the last stage, for that many tokens on zeros."""
        if get_pp_group().is_last_rank:
            size = (tokens, self.hc_mult, self.config.hidden_size)
            self._head(self.hc_head_fn.new_zeros(size, dtype=torch.bfloat16))


def write_back(
    y: torch.Tensor, streams: torch.Tensor, post_mix: torch.Tensor, res_mix: torch.Tensor
) -> torch.Tensor:
    """Streams ``[T, n, H]`` after a layer, of what the layer returns."""
    return hc_post(y, streams, post_mix.squeeze(-1), res_mix)


def spread(x: torch.Tensor, streams: int) -> torch.Tensor:
    """Return ``x`` if it has streams, else ``streams`` copies of each embedding, contiguous."""
    if x.dim() == 3:
        return x
    return x.unsqueeze(1).expand(-1, streams, -1).contiguous()


def shard_padding(x: torch.Tensor) -> None:
    """Leave to the experts this rank's part of the mask of padding."""
    if envs.VLLM_MOE_SKIP_PADDING and is_forward_context_available():
        context = get_forward_context()
        context.is_padding = sequence_parallel.sp_padding_mask(context.is_padding, x)


def adopt(model: nn.Module, context: Adoption) -> None:
    """Replace the hyper-connections of all layers, and the head's, of a model of vLLM.

    A layer or model is left as it is, which the report says, if its numbers are not those that the
    operators have as constants.
    """
    for name, module in model.named_modules():
        if type(module) is vllm_model.DeepseekV4DecoderLayer:
            _adopt(module, DecoderLayer, name, _LAYER_KERNEL, _layer_reason(module), context)
        elif type(module) is vllm_model.DeepseekV4Model:
            reason = streams_reason(module.hc_mult)
            _adopt(module, Model, name, _MODEL_KERNEL, reason, context)


def _adopt(
    module: nn.Module,
    adopted: type[nn.Module],
    name: str,
    kernel: str,
    reason: str,
    context: Adoption,
) -> None:
    if reason:
        context.report.left(HYPER_CONNECTION, name, "tilelang", reason)
        return
    module.__class__ = adopted
    context.report.replaced(HYPER_CONNECTION, name, kernel)


def streams_reason(streams: int) -> str:
    """Say why this package's operators cannot take the streams; empty: they can."""
    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT is 1: the sums of the mixing depend on the number of tokens"
    return "" if streams == _STREAMS else f"{streams} residual streams, the kernels have {_STREAMS}"


def _layer_reason(layer: Any) -> str:
    """Why a layer cannot be replaced; empty: it can."""
    if layer.hc_post_alpha != _POST_FACTOR:
        return f"hc_post_alpha is {layer.hc_post_alpha}, the operators have {_POST_FACTOR}"
    for name in ("attn_norm", "ffn_norm"):
        eps = getattr(layer, name).variance_epsilon
        if eps != layer.rms_norm_eps:
            return f"{name} has the epsilon {eps}, the mixing {layer.rms_norm_eps}: one is taken"
    return streams_reason(layer.hc_mult)
