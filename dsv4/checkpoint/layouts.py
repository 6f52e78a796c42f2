"""Layouts: how each producer stores tensors, with names, formats and quantization_config.

=====================  ============  =============================================================
layout                 names         what a plain model becomes
=====================  ============  =============================================================
``nvidia``             DeepSeek      routed experts NVFP4; attention, shared experts and MTP as
                                     in ``deepseek``
``deepseek``           DeepSeek      routed experts MXFP4; attention, indexer q and shared experts
                                     FP8 with E8M0 scales
``transformers``       transformers  every large projection NVFP4 but ``o_a_proj``
``compressed-tensors`` transformers  routed experts NVFP4, attention and shared experts FP8 with
                                     float32 scales; MTP BF16
``bf16``               DeepSeek      all plain: what transformers loads by itself
=====================  ============  =============================================================

Each is described in specification, sections 11.5.1 to 11.5.4.

Quantised weights are stored bitwise as they are, under the layout's names, with exceptions:
``bf16`` dequantises, ``nvidia`` turns MXFP4 experts of the main layers into NVFP4 (those of MTP and
DSpark stay), a model's NVFP4 experts become MXFP4 again where that is the layout's format for them
and no value of their layer changes (``dsv4.checkpoint.items``), and gate and up of an MLP in NVFP4
get one global scale (``dsv4.checkpoint.pairs``), their values unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dsv4.checkpoint import names
from dsv4.config import ModelConfig
from dsv4.ops.quantize import dequantize, quantize
from dsv4.quant.formats import (
    FP8_BLOCK,
    MXFP4,
    NVFP4,
    Format,
    QuantizedTensor,
    invert_global_scale,
    mxfp4_to_nvfp4,
    scales_to_float,
)

Matrix = torch.Tensor | QuantizedTensor
DraftFormats = Mapping[int, Format | None]
LAYOUTS = ("nvidia", "deepseek", "transformers", "compressed-tensors", "bf16")
_FP8 = re.compile(
    r"\.self_attn\.(q_a|q_b|kv|o_a|o_b)_proj\.weight$|\.indexer\.q_b_proj\.weight$"
    r"|\.shared_experts\.\w+\.weight$|^mtp\.\d+\.(e|h|main)_proj\.weight$"
)
_FULL_NVFP4 = re.compile(
    r"\.self_attn\.(q_a|q_b|kv|o_b)_proj\.weight$|\.indexer\.q_b_proj\.weight$"
    r"|\.compressor\.(indexer\.)?(kv|gate)_proj\.weight$"
    r"|\.shared_experts\.\w+\.weight$|^mtp\.\d+\.(e|h|main)_proj\.weight$"
)


@dataclass(frozen=True)
class Layout:
    """One way to store a model.

    Attributes:
        name: One of ``LAYOUTS``.
        plain: Whether a plain matrix of a canonical name stays plain although the layout would
            quantise it.
        plain_dtype: Dtype of plain floating tensors that are not float32 by definition; None
            keeps each one's own.
    """

    name: str
    plain: Callable[[str], bool]
    plain_dtype: torch.dtype | None = torch.bfloat16

    @property
    def original_names(self) -> bool:
        """Return whether tensors have DeepSeek's names."""
        return self.name in ("nvidia", "deepseek", "bf16")

    def format_of(self, name: str) -> Format | None:
        """Return the format this layout gives to a plain matrix, None for plain."""
        return None if self.plain(name) else self.own_format(name)

    def own_format(self, name: str) -> Format | None:
        """Return the same without exceptions for names."""
        if self.name == "bf16" or (self.name == "compressed-tensors" and names.is_mtp(name)):
            return None
        if names.is_routed(name):
            keeps_mxfp4 = self.name == "nvidia" and names.is_mtp(name)
            return MXFP4 if self.name == "deepseek" or keeps_mxfp4 else NVFP4
        if self.name == "transformers":
            return NVFP4 if _FULL_NVFP4.search(name) else None
        return FP8_BLOCK if _FP8.search(name) else None

    def convert(self, name: str, value: Matrix) -> Matrix:
        """Convert a value to the format this layout stores it in.

        Raises:
            ValueError: if the layout cannot express the value's format.
        """
        target = self.format_of(name)
        if isinstance(value, torch.Tensor):
            return self._plain(name, value) if target is None else _quantize(value, target)
        if self.name == "bf16":
            return self._plain(name, dequantize(value, self.plain_dtype or torch.float32))
        if self.name == "nvidia" and target == NVFP4 and value.format == MXFP4:
            converted, report = mxfp4_to_nvfp4(value)
            if not report.exact:
                raise ValueError(
                    f"{name} is mxfp4 with values that nvfp4, the format of layout nvidia, does "
                    f"not have ({report}), wanted layout 'deepseek' or 'transformers'"
                )
            return converted
        allowed = {"deepseek": (MXFP4, FP8_BLOCK), "compressed-tensors": (NVFP4, FP8_BLOCK)}
        if value.format not in allowed.get(self.name, (NVFP4, MXFP4, FP8_BLOCK)):
            raise ValueError(f"{name} is {value.format.name}, which layout {self.name} cannot hold")
        return value

    def _plain(self, name: str, value: torch.Tensor) -> torch.Tensor:
        if not value.is_floating_point():
            return value
        if names.is_float32(name):
            return value.float() if self.plain_dtype is not None else value
        return value.to(self.plain_dtype or value.dtype)

    def encode(
        self, name: str, value: Matrix, input_scale: torch.Tensor | None
    ) -> list[tuple[str, torch.Tensor]]:
        """Return names and tensors of the file for a value that ``convert`` returned.

        Raises:
            ValueError: if the name has no counterpart in this layout.
        """
        stored = names.to_original(name) if self.original_names else name
        if stored is None:
            raise ValueError(f"{name} has no name in layout {self.name}")
        if isinstance(value, torch.Tensor):
            return [(stored, value)]
        value = value.validate().with_layout("linear")
        if value.segments or (value.global_scale is not None and value.global_scale.numel() != 1):
            raise ValueError(f"{name} has several global scales, wanted one")
        stem = stored.removesuffix(".weight")
        parts = _nvfp4 if value.format == NVFP4 else _blocks
        return [(f"{stem}.{last}", t) for last, t in parts(self, value, input_scale)]


def _nvfp4(
    layout: Layout, value: QuantizedTensor, input_scale: torch.Tensor | None
) -> list[tuple[str, torch.Tensor]]:
    assert value.global_scale is not None
    if layout.name == "compressed-tensors":
        parts = [
            ("weight_packed", value.codes),
            ("weight_scale", value.scales),
            ("weight_global_scale", invert_global_scale(value.global_scale.reshape(1))),
        ]
        if input_scale is not None:
            inverse = invert_global_scale(input_scale.reshape(1).float())
            parts.append(("input_global_scale", inverse))
        return parts
    parts = [
        ("weight", value.codes),
        ("weight_scale", value.scales),
        ("weight_scale_2", value.global_scale.reshape(())),
    ]
    if input_scale is not None:
        parts.append(("input_scale", input_scale.reshape(()).float()))
    return parts


def _blocks(
    layout: Layout, value: QuantizedTensor, input_scale: torch.Tensor | None
) -> list[tuple[str, torch.Tensor]]:
    codes, scales = value.codes, value.scales
    if value.format == MXFP4:
        codes = codes.view(torch.int8)
    if layout.name == "compressed-tensors":
        return [("weight", codes), ("weight_scale", scales_to_float(scales))]
    last = "scale" if layout.original_names or value.format == MXFP4 else "weight_scale_inv"
    return [("weight", codes), (last, scales)]


def _quantize(value: torch.Tensor, target: Format) -> QuantizedTensor:
    if target == NVFP4:
        return quantize(value, NVFP4, scaling="weight")
    return quantize(value, target)


_DEEPSEEK_QUANTISATION: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}


def _nvidia_quantisation(config: ModelConfig, drafts: DraftFormats) -> dict[str, Any]:
    tensor = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    layers = [f"layers.{i}" for i in range(config.num_hidden_layers)]
    in_nvfp4 = [f"mtp.{i}" for i, stored in sorted(drafts.items()) if stored == NVFP4]
    others = [f"mtp.{i}.*" for i, stored in sorted(drafts.items()) if stored != NVFP4]
    # A reader takes experts that a pattern names for MXFP4.
    rest = (
        [*others, *(f"mtp.*.{part}_proj" for part in ("e", "h", "main"))] if in_nvfp4 else ["mtp.*"]
    )
    return {
        **_DEEPSEEK_QUANTISATION,
        "moe_quant_algo": "NVFP4",
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "producer": {"name": "modelopt", "version": "dsv4-nvfp4-experts"},
        "config_groups": {
            "group_0": {"weights": tensor, "input_activations": tensor, "targets": ["Linear"]}
        },
        "quantized_layers": {
            f"{layer}.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16}
            for layer in [*layers, *in_nvfp4]
        },
        "ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head", *rest],
    }


def _modelopt_quantisation() -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "ignore": ["lm_head", "*.mlp.gate", "*.o_a_proj"],
        "producer": {"name": "modelopt"},
    }


def _compressed_tensors_quantisation() -> dict[str, Any]:
    four = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    eight = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    experts, others = r"re:.*mlp\.experts\.\d+\..*", r"re:.*(self_attn|shared_experts)\..*"
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "format": "nvfp4-pack-quantized",
                "targets": [experts],
                "weights": {**four, "dynamic": False, "symmetric": True},
                "input_activations": {**four, "dynamic": "local", "symmetric": True},
            },
            "group_1": {
                "format": "float-quantized",
                "targets": [others],
                "weights": {**eight, "dynamic": False, "symmetric": True},
            },
        },
        "ignore": ["lm_head", r"re:mtp\..*"],
    }


def documents(
    layout: Layout, config: ModelConfig, drafts: DraftFormats | None = None
) -> dict[str, Any]:
    """Return the contents of a layout's JSON files by name, without the index; config.json is last.

    Args:
        layout: The layout.
        config: Configuration of the model.
        drafts: Format of the routed experts of each draft layer, as they were stored.
    """
    body = config.to_dict() if layout.original_names else config.to_transformers_dict()
    if layout.name == "bf16":
        return {"config.json": body}
    if layout.original_names:
        body["expert_dtype"] = "fp4"
    table = {
        "nvidia": lambda: _nvidia_quantisation(config, drafts or {}),
        "deepseek": lambda: _DEEPSEEK_QUANTISATION,
        "transformers": _modelopt_quantisation,
        "compressed-tensors": _compressed_tensors_quantisation,
    }[layout.name]()
    body["quantization_config"] = table
    if layout.name != "nvidia":
        return {"config.json": body}
    note = {key: value for key, value in table.items() if key not in ("ignore", "producer")}
    note["exclude_modules"] = table["ignore"]
    extra = {"producer": table["producer"], "quantization": note}
    return {"hf_quant_config.json": extra, "config.json": body}
