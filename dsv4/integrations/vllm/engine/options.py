"""Options of the model in ``--additional-config '{"dsv4": {...}}'``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Options:
    """Arguments of ``dsv4.load`` that vLLM has no setting for.

    Attributes:
        numerics: ``"deepseek"`` or ``"transformers"``.
        activation: ``"bf16"``, ``"nvfp4"`` or ``"fp8"``.
        mxfp4: See ``dsv4.load``.
        input_scales: See ``dsv4.load``.
        index_format: Of index keys; None: the smallest that holds the same values as plain ones.
        dtype: Of the hidden states; None: vLLM's ``dtype``, which cannot be float32 with a
            quantised checkpoint.
    """

    numerics: str = "deepseek"
    activation: str = "bf16"
    mxfp4: str | None = None
    input_scales: str = "stored"
    index_format: str | None = None
    dtype: str | None = None

    @classmethod
    def of(cls, additional_config: Any) -> Options:
        """Read the part of vLLM's additional configuration that is named ``dsv4``.

        Raises:
            ValueError: naming what it does not know; values are checked where they are used.
        """
        part = additional_config.get("dsv4", {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(part, Mapping):
            raise ValueError(f"additional_config['dsv4'] is {part!r}, expected a dictionary")
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(part) - known)
        if unknown:
            raise ValueError(
                f"additional_config['dsv4'] has {', '.join(unknown)}, expected some of "
                f"{', '.join(sorted(known))}"
            )
        return cls(**part)
