"""RMS norms and the shared expert's activation of vLLM's DeepSeek-V4 by this package's operators.

The norms of the sublayers' inputs belong to ``hyper_connection``, those of the compressors and the
indexer to the attention.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn
from vllm import envs
from vllm.model_executor.layers import activation, layernorm
from vllm.models.deepseek_v4 import attention as vllm_attention
from vllm.models.deepseek_v4.nvidia import model as vllm_model

from dsv4.integrations.vllm.adoption import Adoption
from dsv4.integrations.vllm.switches import HYPER_CONNECTION
from dsv4.ops.norm import rms_norm, rms_norm_pair
from dsv4.ops.swiglu import swiglu


class FinalNorm(layernorm.RMSNorm):
    """vLLM's RMS norm by ``rms_norm``, without a residual."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., D]`` to the same."""
        return rms_norm(x, self.weight, self.variance_epsilon)

    @property
    def dsv4_kind(self) -> int:
        """Norms of one width launch the same kernels."""
        return int(self.weight.shape[0])

    def dsv4_warm(self, tokens: int) -> None:
        """Launch the kernels of a step of that many tokens on zeros."""
        self(self.weight.new_zeros((tokens, self.dsv4_kind), dtype=torch.bfloat16))


class Swiglu(activation.SiluAndMulWithClamp):
    """vLLM's clamped SwiGLU by ``swiglu``.

    Attributes:
        dsv4_empty: ``[0, 2 I]``, an input without tokens.
    """

    dsv4_empty: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., 2 I]`` to ``[..., I]``."""
        return swiglu(x, self.swiglu_limit)

    @property
    def dsv4_kind(self) -> int:
        """Activations of one width launch the same kernels."""
        return int(self.dsv4_empty.shape[1])

    def dsv4_warm(self, tokens: int) -> None:
        """Launch the kernels of a step of that many tokens on zeros."""
        self(self.dsv4_empty.new_zeros((tokens, self.dsv4_kind)))


def split_and_norm(
    attention: Any, qr_kv: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Norm both parts of the joint projection, in where of ``_split_qkv_and_norm``.

    Args:
        attention: vLLM's attention.
        qr_kv: ``[T, q_lora_rank + head_dim]``.

    Returns:
        ``(query part, None, key-value part)``; None stands for the scales of a quantised query
        part.
    """
    weights = attention.q_norm.weight, attention.kv_norm.weight
    qr, kv = rms_norm_pair(qr_kv, *weights, attention.eps)
    return qr, None, kv


def _warm_pair(attention: Any, tokens: int) -> None:
    """Launch the kernels of ``split_and_norm`` for that many tokens on zeros."""
    widths = attention.q_norm.weight.shape[0], attention.kv_norm.weight.shape[0]
    weight = attention.q_norm.weight
    split_and_norm(attention, weight.new_zeros((tokens, sum(widths)), dtype=torch.bfloat16))


def adopt(model: nn.Module, context: Adoption) -> None:
    """Replace the final norm, the norms of q_a and kv, and the shared experts' activations.

    What differs from the operators is left as it is, which the report says.
    """
    for name, module in model.named_modules():
        if isinstance(module, vllm_model.DeepseekV4Model):
            _adopt_final_norm(module, name, context)
        elif isinstance(module, vllm_attention.DeepseekV4Attention):
            _adopt_pair(module, name, context)
        elif isinstance(module, vllm_model.DeepseekV4MLP):
            _adopt_activation(module, name, context)


def _adopt_final_norm(model: Any, name: str, context: Adoption) -> None:
    if not isinstance(model.norm, vllm_model.PPMissingLayer):  # another pipeline stage has it
        adopt_norm(model.norm, f"{name}.norm", context)


def adopt_norm(norm: Any, where: str, context: Adoption) -> None:
    """Replace one RMS norm without a residual, or say why not."""
    if type(norm) is not layernorm.RMSNorm:
        _left(context, where, norm, "not vLLM's RMSNorm")
    elif envs.VLLM_BATCH_INVARIANT:
        _left(context, where, norm, "VLLM_BATCH_INVARIANT is 1, and sums depend on the rows")
    elif norm.variance_size_override is not None or not norm.has_weight:
        _left(context, where, norm, "a norm without a weight or of a part of the row")
    else:
        norm.__class__ = FinalNorm
        context.report.replaced(HYPER_CONNECTION, where, "rms_norm")


def _adopt_pair(attention: Any, name: str, context: Adoption) -> None:
    where = f"{name}.q_norm, kv_norm"
    own = type(attention)._split_qkv_and_norm
    if own.__module__.startswith("dsv4."):
        return  # this package's attention norms the keys where it writes them
    if own is not vllm_attention.DeepseekV4Attention._split_qkv_and_norm:
        _left(context, where, attention, "this attention has norms of its own")
        return
    attention._split_qkv_and_norm = MethodType(split_and_norm, attention)
    attention.dsv4_warm = MethodType(_warm_pair, attention)
    context.report.replaced(HYPER_CONNECTION, where, "rms_norm_pair")


def _adopt_activation(mlp: Any, name: str, context: Adoption) -> None:
    function, where = mlp.act_fn, f"{name}.act_fn"
    if type(function) is not activation.SiluAndMulWithClamp:
        _left(context, where, function, "no SwiGLU with a clamp")
    elif (function.alpha, function.beta) != (1.0, 0.0):
        reason = f"alpha is {function.alpha} and beta {function.beta}, swiglu has 1 and 0"
        _left(context, where, function, reason)
    else:
        function.__class__ = Swiglu
        up = mlp.gate_up_proj
        size = (0, up.output_size_per_partition)
        function.dsv4_empty = torch.empty(size, dtype=up.params_dtype, device=_device(up))
        context.report.replaced(HYPER_CONNECTION, where, "swiglu")


def _device(layer: nn.Module) -> torch.device:
    return next(layer.parameters()).device


def _left(context: Adoption, where: str, module: nn.Module, reason: str) -> None:
    context.report.left(HYPER_CONNECTION, where, type(module).__name__, reason)
