"""Environment variables of the vLLM plugin."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

EXPERTS, LINEAR, ATTENTION, HYPER_CONNECTION = "experts", "linear", "attention", "hyper_connection"
PARTS = (EXPERTS, LINEAR, ATTENTION, HYPER_CONNECTION)
_ALL, _OFF, _MODEL = "all", "off", "model"
_SWITCHES = {"0": False, "": False, "1": True}


@dataclass(frozen=True)
class Switches:
    """Settings of the plugin from environment variables.

    Attributes:
        parts: Parts of vLLM's model that run on this package's kernels; ``DSV4_VLLM``.
        model: Whether this package's model replaces vLLM's (``DSV4_VLLM=model``); then ``parts``
            is empty.
        strict: Whether what cannot be replaced is an error; ``DSV4_VLLM_STRICT``.
        check: Whether every boundary is watched for values that are not finite;
            ``DSV4_VLLM_CHECK``.
    """

    parts: frozenset[str] = frozenset(PARTS)
    model: bool = False
    strict: bool = False
    check: bool = False

    @property
    def off(self) -> bool:
        """Whether vLLM stays as it is."""
        return not self.parts and not self.model

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Switches:
        """Read the variables.

        Raises:
            ValueError: naming the variable, its value and the values that it may have.
        """
        value = environment.get("DSV4_VLLM", _ALL)
        return cls(
            parts=_parts(value),
            model=value == _MODEL,
            strict=_switch(environment, "DSV4_VLLM_STRICT"),
            check=_switch(environment, "DSV4_VLLM_CHECK"),
        )


def _parts(value: str) -> frozenset[str]:
    if value in (_OFF, _MODEL):
        return frozenset()
    if value == _ALL:
        return frozenset(PARTS)
    names = [name.strip() for name in value.split(",")]
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise ValueError(
            f"DSV4_VLLM is {value!r}, expected {_ALL}, {_OFF}, {_MODEL} or a comma-separated list "
            f"of {', '.join(PARTS)}"
        )
    return frozenset(names)


def _switch(environment: Mapping[str, str], name: str) -> bool:
    value = environment.get(name, "0")
    if value not in _SWITCHES:
        raise ValueError(f"{name} is {value!r}, expected 0 or 1")
    return _SWITCHES[value]
