"""MXFP4 experts of a draft whose main model has NVFP4 experts.

NVIDIA's checkpoints store a draft as DeepSeek published it, with MXFP4 experts, while config.json
names NVFP4 for all routed experts. vLLM builds the draft's experts by config.json and copies MXFP4
scales into a part of the NVFP4 scales, without an error. So the tensors are converted before vLLM's
loader sees them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts

from dsv4.checkpoint.mxfp4 import to_nvfp4
from dsv4.integrations.vllm._log import logger
from dsv4.quant.formats import MXFP4, QuantizedTensor, cat_rows

Stored = tuple[str, torch.Tensor]
_EXPERT = re.compile(r"(mtp\.\d+\.ffn\.experts\.\d+\.)(w[123])\.(weight|scale)$")
# Matrices that are converted together: gate and up have one global scale in vLLM's kernels.
_TOGETHER = {"w1": ("w1", "w3"), "w3": ("w1", "w3"), "w2": ("w2",)}


def as_built(model: nn.Module, weights: Iterable[Stored]) -> Iterator[Stored]:
    """Yield a draft's tensors in the format of the experts that vLLM built.

    Matrices with block scales that NVFP4 does not have are rounded, which one warning says: fewer
    drafts may be right then.

    Args:
        model: The draft, its weights not loaded yet.
        weights: Names and tensors of the checkpoint, in any order.
    """
    layers = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    if not any(hasattr(layer, "w13_weight_scale_2") for layer in layers):
        yield from weights
        return
    waiting: dict[str, torch.Tensor] = {}
    rounded: list[str] = []
    for name, tensor in weights:
        match = _EXPERT.search(name)
        if match is None or tensor.dtype not in (torch.int8, torch.float8_e8m0fnu):
            yield name, tensor
            continue
        waiting[name] = tensor
        stems = [name[: match.start(2)] + matrix for matrix in _TOGETHER[match[2]]]
        parts = [f"{stem}.{part}" for stem in stems for part in ("weight", "scale")]
        if all(part in waiting for part in parts):
            yield from _converted(stems, [waiting.pop(part) for part in parts], rounded)
    yield from waiting.items()
    if rounded:
        logger().warning(
            "%d matrices of the draft's experts are MXFP4 with block scales that NVFP4 does not "
            "have, and were rounded; the first is %s",
            *(len(rounded), rounded[0]),
        )


def _converted(stems: list[str], parts: list[torch.Tensor], rounded: list[str]) -> Iterator[Stored]:
    """Yield matrices in NVFP4 with one global scale; note the names of those that are rounded."""
    matrices = [
        QuantizedTensor(codes.view(torch.uint8), scales, None, MXFP4)
        for codes, scales in zip(parts[::2], parts[1::2], strict=True)
    ]
    stacked = cat_rows(matrices)
    nvfp4 = to_nvfp4(stacked)
    if nvfp4 is None:
        rounded += stems
        nvfp4 = to_nvfp4(stacked, rounds=True)
    assert nvfp4 is not None
    assert nvfp4.global_scale is not None
    rows = [matrix.rows for matrix in matrices]
    for stem, codes, scales in zip(
        stems, nvfp4.codes.split(rows), nvfp4.scales.split(rows), strict=True
    ):
        yield f"{stem}.weight", codes
        yield f"{stem}.weight_scale", scales
        yield f"{stem}.weight_scale_2", nvfp4.global_scale.reshape(())
