"""A draft's experts in the format of the layers that vLLM built for them.

NVIDIA's checkpoints store a draft as DeepSeek published it, with MXFP4 experts, while config.json
names NVFP4 for all routed experts. On NVIDIA's GPUs vLLM builds MXFP4 layers where a pattern in
``quantization_config.ignore`` names the draft, as NVIDIA's ``mtp.*`` does, and NVFP4 layers
elsewhere. MXFP4 layers take a draft's tensors as they are, and ``experts`` converts those layers
after loading. Into NVFP4 layers vLLM would copy MXFP4 scales as a part of the NVFP4 scales, without
an error. So such tensors are converted before vLLM's loader sees them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts

from dsv4.checkpoint.mxfp4 import to_nvfp4
from dsv4.integrations.vllm._log import logger
from dsv4.quant.formats import MXFP4, NVFP4, Format, QuantizedTensor, cat_rows

Stored = tuple[str, torch.Tensor]
_EXPERT = re.compile(
    r"mtp\.(?P<layer>\d+)\.ffn\.experts\.\d+\.(?P<matrix>w[123])"
    r"\.(?P<part>weight|scale|weight_scale|weight_scale_2|input_scale)$"
)
_PARTS_OF_NVFP4 = ("weight_scale", "weight_scale_2", "input_scale")
_DTYPES_OF_MXFP4 = (torch.int8, torch.float8_e8m0fnu)
# Matrices that are converted together: gate and up have one global scale in vLLM's kernels.
_TOGETHER = {"w1": ("w1", "w3"), "w3": ("w1", "w3"), "w2": ("w2",)}


def as_built(model: nn.Module, weights: Iterable[Stored]) -> Iterator[Stored]:
    """Yield a draft's tensors in the format of the experts that vLLM built.

    MXFP4 becomes NVFP4 where vLLM built an NVFP4 layer. Matrices with block scales that NVFP4 does
    not have are rounded, which one warning says: fewer drafts may be right then. All other tensors
    stay as they are.

    Args:
        model: The draft, its weights not loaded yet.
        weights: Names and tensors of the checkpoint, in any order.

    Raises:
        ValueError: if the checkpoint has NVFP4 experts where vLLM built an MXFP4 layer, or a part
            of the tensors of an MXFP4 matrix where it built an NVFP4 layer.
    """
    built = [built_format(m) for m in model.modules() if isinstance(m, RoutedExperts)]
    waiting: dict[str, torch.Tensor] = {}
    rounded: list[str] = []
    for name, tensor in weights:
        match = _EXPERT.search(name)
        format = _format_of_layer(built, match)
        if match is None or format != NVFP4 or tensor.dtype not in _DTYPES_OF_MXFP4:
            if match is not None and format == MXFP4:
                _check_mxfp4(name, match["part"])
            yield name, tensor
            continue
        waiting[name] = tensor
        stems = [name[: match.start("matrix")] + matrix for matrix in _TOGETHER[match["matrix"]]]
        parts = [f"{stem}.{part}" for stem in stems for part in ("weight", "scale")]
        if all(part in waiting for part in parts):
            yield from _converted(stems, [waiting.pop(part) for part in parts], rounded)
    _check_none_waits(waiting)
    if rounded:
        logger().warning(
            "%d matrices of the draft's experts are MXFP4 with block scales that NVFP4 does not "
            "have, and were rounded; the first is %s",
            *(len(rounded), rounded[0]),
        )


def built_format(layer: RoutedExperts) -> Format | None:
    """Format of the parameters that vLLM made for a layer's experts, None for any other."""
    codes, scales = (getattr(layer, name, None) for name in ("w13_weight", "w13_weight_scale"))
    if codes is None or scales is None or codes.dtype != torch.uint8:
        return None
    return {torch.uint8: MXFP4, torch.float8_e4m3fn: NVFP4}.get(scales.dtype)


def _format_of_layer(built: list[Format | None], match: re.Match[str] | None) -> Format | None:
    """Format that vLLM built for a tensor's layer; None for a layer that it did not build."""
    number = len(built) if match is None else int(match["layer"])
    return built[number] if number < len(built) else None


def _check_mxfp4(name: str, part: str) -> None:
    if part in _PARTS_OF_NVFP4:
        raise ValueError(
            f"{name} is a tensor of NVFP4 experts, wanted MXFP4 (int8 weight, float8_e8m0fnu "
            "scale), for which vLLM built this layer of the draft. vLLM builds NVFP4 experts if "
            "quantization_config of config.json has moe_quant_algo 'NVFP4' and no pattern in its "
            "'ignore' (such as 'mtp.*') matches the layer"
        )


def _check_none_waits(waiting: dict[str, torch.Tensor]) -> None:
    if waiting:
        name, tensor = next(iter(waiting.items()))
        raise ValueError(
            f"{name} ({tensor.dtype}) is a tensor of an MXFP4 expert of the draft whose other "
            "tensors are missing, wanted weight (int8) and scale (float8_e8m0fnu) of w1, w2 and w3"
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
