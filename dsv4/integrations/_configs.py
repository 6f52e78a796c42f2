"""Configurations of transformers' DeepSeek-V4 as this package's, and the other way round."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch

from dsv4.config import ACTIVATIONS, NUMERICS, ModelConfig
from dsv4.config.fields import KNOWN


def with_modes(config: ModelConfig, numerics: str, activation: str) -> ModelConfig:
    """Return the configuration with other numerics and activations.

    Raises:
        ValueError: if either is unknown.
    """
    if numerics not in NUMERICS:
        raise ValueError(f"numerics is {numerics!r}, wanted one of {', '.join(NUMERICS)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, wanted one of {', '.join(ACTIVATIONS)}")
    return config.replace(numerics=numerics, activation=activation)


def config_of(config: Any) -> ModelConfig:
    """Return the configuration of a transformers model, without attributes of its user alone.

    Raises:
        ValueError: if it is not one this package implements.
    """
    values = config.to_dict()
    declared = {f.name for f in dataclasses.fields(config)}
    values = {name: v for name, v in values.items() if name in declared or name in KNOWN}
    limit = values.get("swiglu_limit")
    if limit == math.inf:
        values["swiglu_limit"] = None
    elif limit == 0:
        raise ValueError(
            f"swiglu_limit is {limit}, wanted a number > 0, or inf for no clamp: transformers "
            "clamps at 0, so that every expert gives 0"
        )
    return ModelConfig.of(values)


def transformers_config(config: ModelConfig, dtype: torch.dtype | None) -> Any:
    """Return transformers' ``DeepseekV4Config`` of a configuration; None: in bfloat16."""
    from transformers import DeepseekV4Config

    values = config.to_transformers_dict()
    if config.swiglu_limit is None:
        values["swiglu_limit"] = math.inf  # transformers clamps at 0 and takes no None
    theirs = DeepseekV4Config(**values)
    theirs.dtype = dtype or torch.bfloat16
    theirs.architectures = ["DeepseekV4ForCausalLM"]
    return theirs


def generation_config(path: Path, config: ModelConfig) -> Any:
    """Return generation_config.json of a folder, or else begin and end tokens alone."""
    from transformers import GenerationConfig

    if (path / "generation_config.json").exists():
        return GenerationConfig.from_pretrained(path)
    eos = config.eos_token_id
    return GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=list(eos) if isinstance(eos, tuple) else eos,
    )
