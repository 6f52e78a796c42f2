"""The whole model: ``backbone`` has its layers, ``causal_lm`` the output head and generation."""

from __future__ import annotations

from dsv4.model.backbone import DeepseekV4Model as DeepseekV4Model
from dsv4.model.causal_lm import DeepseekV4ForCausalLM as DeepseekV4ForCausalLM
