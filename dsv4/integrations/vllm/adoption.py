"""Arguments with which a part of the plugin replaces modules of vLLM's model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dsv4.integrations.vllm.report import Report
from dsv4.integrations.vllm.switches import Switches


@dataclass(frozen=True)
class Adoption:
    """The context of ``adopt(model, context)``, one per model of an engine's process.

    Attributes:
        vllm_config: vLLM's ``VllmConfig`` of the model.
        switches: What the environment asks for.
        report: The table that ``adopt`` fills: a row per module, replaced or not.
    """

    vllm_config: Any
    switches: Switches = field(default_factory=Switches.of)
    report: Report = field(default_factory=Report)
