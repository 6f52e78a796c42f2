"""Places of vLLM that the plugin calls, overrides or replaces, with the signatures it knows.

A place is compared by the text of its signature, so that a release of vLLM that changes one is
refused instead of called wrongly.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass

from dsv4.integrations.vllm import switches

VERSIONS = ("0.33",)  # minor releases that were tried


@dataclass(frozen=True)
class Place:
    """A function, class or method of vLLM.

    Attributes:
        module: Where it is defined.
        name: Its qualified name there.
        signature: Parameter names, separated by commas, as ``signature_of`` writes them.
    """

    module: str
    name: str
    signature: str


_V4 = "vllm.models.deepseek_v4"
CORE: tuple[Place, ...] = (
    Place(f"{_V4}.nvidia.model", "DeepseekV4ForCausalLM.__init__", "self, vllm_config, prefix"),
    Place(f"{_V4}.nvidia.model", "DeepseekV4ForCausalLM.load_weights", "self, weights"),
)
EXPERTS: tuple[Place, ...] = ()
LINEAR: tuple[Place, ...] = ()
ATTENTION: tuple[Place, ...] = ()
HYPER_CONNECTION: tuple[Place, ...] = ()
MODEL: tuple[Place, ...] = ()


def is_supported(version: str) -> bool:
    """Whether a release of vLLM, ``0.33.1+cu130`` say, is one that was tried."""
    return ".".join(version.split("+")[0].split(".")[:2]) in VERSIONS


def of_part(part: str) -> tuple[Place, ...]:
    """Places of a part of ``switches.PARTS``, or of ``"core"`` or ``"model"``."""
    return {
        "core": CORE,
        switches.EXPERTS: EXPERTS,
        switches.LINEAR: LINEAR,
        switches.ATTENTION: ATTENTION,
        switches.HYPER_CONNECTION: HYPER_CONNECTION,
        "model": MODEL,
    }[part]


def signature_of(target: object) -> str:
    """Parameter names of a function, separated by commas; stars mark the variadic ones."""
    parameters = inspect.signature(target).parameters.values()  # type: ignore[arg-type]
    return ", ".join(_stars(parameter) + parameter.name for parameter in parameters)


def _stars(parameter: inspect.Parameter) -> str:
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return "*"
    return "**" if parameter.kind is inspect.Parameter.VAR_KEYWORD else ""


def mismatches(places: Iterable[Place]) -> list[str]:
    """One sentence per place that this vLLM does not have, or has with other parameters."""
    sentences = [_mismatch(place) for place in places]
    return [sentence for sentence in sentences if sentence]


def _mismatch(place: Place) -> str:
    where = f"{place.module}.{place.name}"
    try:
        target: object = importlib.import_module(place.module)
        for name in place.name.split("."):
            target = getattr(target, name)
    except (ImportError, AttributeError) as error:
        return f"{where} is missing ({error})"
    actual = signature_of(target)
    if actual != place.signature:
        return f"{where} has the parameters ({actual}), expected ({place.signature})"
    return ""
