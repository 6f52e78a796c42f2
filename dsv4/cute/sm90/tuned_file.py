"""Data files of plans: read, check, and write them.

A file is read as a whole or refused with the reason. ``FAMILIES`` names for each family its keys,
its plans, and the function that says whether a plan is one that the code can choose.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from dsv4.cute.sm90 import tuned_records as records
from dsv4.cute.sm90.costs import Costs, flat, with_values
from dsv4.cute.sm90.tuned_records import CLUSTERS, Entry, Key, Origin, Residual, TunedData

SCHEMA = "dsv4 plans 2"
_FIELDS = {
    "schema": str,
    "gpu": str,
    "date": str,
    "versions": dict,
    "source": str,
    "sms": int,
    "bandwidth_tbs": (int, float, type(None)),
    "clusters": dict,
    "families": dict,
}
_FAMILY = {"date": str, "constants": dict, "residual": (dict, type(None)), "plans": list}
_RESIDUAL = {"points": int, "mean": (int, float), "worst": (int, float)}
_TIMES = ("us", "rule_us")
_CAN_BE_ZERO = "compressed"  # slots of a layer without compressed entries

R = TypeVar("R")


class TunedFileError(ValueError):
    """A data file of plans has a wrong schema, field or value."""


@dataclass(frozen=True)
class Family:
    """A family of kernels as a file has it.

    Attributes:
        key: Type of its keys; None: it has constants alone.
        plan: Type of its plans.
        fits: ``"module:function"`` that returns whether a plan can be chosen for a key.
    """

    key: type[Any] | None = None
    plan: type[Any] | None = None
    fits: str = ""


def _family(module: str, key: type[Any], plan: type[Any]) -> Family:
    return Family(key, plan, f"dsv4.cute.{module}:fits")


FAMILIES: Mapping[str, Family] = {
    "gemm_small_m": _family(
        "sm90.gemm_small_m_plan", records.SmallMKey, records.SmallMConfiguration
    ),
    "gemm_wgmma": _family("sm90.gemm_wgmma_plan", records.WgmmaKey, records.WgmmaConfiguration),
    "gemm_fp8_wgmma": _family(
        "sm90.gemm_fp8_wgmma_plan", records.Fp8WgmmaKey, records.Fp8WgmmaConfiguration
    ),
    "gemm_fp8_small_m": _family(
        "sm90.gemm_fp8_small_m_plan", records.SmallMFp8Key, records.SmallMFp8Configuration
    ),
    "gemm_e4m3": _family("e4m3_costs", records.E4m3Key, records.E4m3Configuration),
    "grouped_gemm": Family(),
    "attention": _family(
        "sm90.attention_plan", records.AttentionKey, records.AttentionConfiguration
    ),
}
OF_KEY = {family.key: name for name, family in FAMILIES.items() if family.key is not None}


def decode(text: str, kind: str, where: str) -> TunedData:
    """Read a file's content.

    Args:
        text: The content.
        kind: ``"shipped"`` or ``"tuned"``, for the origin of its plans.
        where: Name of the file, for errors and origins.

    Raises:
        TunedFileError: naming the file, the field, what was found and what was expected.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TunedFileError(f"{where}: is no JSON: {error}") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        actual = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise TunedFileError(f"{where}: the schema is {actual!r}, wanted {SCHEMA!r}")
    _checked(where, "the file", content, _FIELDS)
    _at_least(where, "sms", content["sms"], 1)
    costs, entries, residuals = Costs(), dict[Key, Entry](), dict[str, Residual]()
    origins: dict[str, Origin] = {}
    for name, family in content["families"].items():
        if name not in FAMILIES:
            raise TunedFileError(f"{where}: families has {name!r}, wanted of {sorted(FAMILIES)}")
        _checked(where, name, family, _FAMILY)
        origins[name] = Origin(kind, f"{family['date']}, {where}", family["date"])
        constants = _constants(where, name, family["constants"], getattr(costs, name))
        costs = with_values(costs, {f"{name}.{key}": value for key, value in constants.items()})
        if family["residual"] is not None:
            _checked(where, f"{name}.residual", family["residual"], _RESIDUAL)
            residuals[name] = Residual(**family["residual"])
        for i, plan in enumerate(family["plans"]):
            key, entry = _entry(where, f"{name}.plans[{i}]", plan, FAMILIES[name])
            if key in entries:
                raise TunedFileError(f"{where}: {name}.plans[{i}] has the key of an earlier one")
            entries[key] = entry
    bandwidth = content["bandwidth_tbs"]
    if bandwidth is not None:
        _at_least(where, "bandwidth_tbs", bandwidth, 0.01)
    return TunedData(
        gpu=content["gpu"],
        date=content["date"],
        versions=content["versions"],
        source=content["source"],
        sms=content["sms"],
        bandwidth=bandwidth,
        clusters=_clusters(where, content["clusters"]),
        costs=costs,
        entries=entries,
        residuals=residuals,
        families=tuple(content["families"]),
        origins=origins,
    )


def encode(data: TunedData) -> str:
    """Return a file's content: a line for each plan, so that files differ by plans."""
    families = {}
    for name in data.families:
        plans = [
            json.dumps({**asdict(key), **asdict(entry.plan), **entry.times()})
            for key, entry in data.entries.items()
            if OF_KEY[type(key)] == name
        ]
        residual = data.residuals.get(name)
        parts = {
            "date": json.dumps(data.origins[name].date),
            "constants": json.dumps(flat(getattr(data.costs, name))),
            "residual": json.dumps(None if residual is None else asdict(residual)),
            "plans": "[\n        " + ",\n        ".join(plans) + "\n      ]" if plans else "[]",
        }
        families[name] = ",\n".join(f'      "{key}": {value}' for key, value in parts.items())
    head = {
        "schema": SCHEMA,
        "gpu": data.gpu,
        "date": data.date,
        "versions": dict(data.versions),
        "source": data.source,
        "sms": data.sms,
        "bandwidth_tbs": data.bandwidth,
        "clusters": {str(ctas): count for ctas, count in data.clusters.items()},
    }
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    shown = ",\n".join(f'    "{name}": {{\n{text}\n    }}' for name, text in families.items())
    lines.append(f'  "families": {{\n{shown}\n  }}' if families else '  "families": {}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _clusters(where: str, content: dict[str, Any]) -> dict[int, int]:
    expected = [str(ctas) for ctas in CLUSTERS]
    if sorted(content) != sorted(expected):
        raise TunedFileError(f"{where}: clusters has {sorted(content)}, wanted {expected}")
    for ctas, count in content.items():
        _at_least(where, f"clusters.{ctas}", count, 1)
    return {ctas: content[str(ctas)] for ctas in CLUSTERS}


def _constants(where: str, name: str, content: dict[str, Any], default: Any) -> dict[str, float]:
    """Return the constants of a family; raise if one is missing, unknown or no finite number."""
    expected = flat(default)
    if content.keys() != expected.keys():
        odd = sorted(content.keys() ^ expected.keys())
        raise TunedFileError(f"{where}: {name}.constants differs in {odd} from what is wanted")
    for key, value in content.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value < 0:
            raise TunedFileError(f"{where}: {name}.constants.{key} is {value!r}, wanted 0 or more")
    return content


def _entry(where: str, at: str, content: Any, family: Family) -> tuple[Key, Entry]:
    """Return a measured plan and its key; raise if the code could not choose it."""
    if family.key is None or family.plan is None:
        raise TunedFileError(f"{where}: {at} is one too many: the family has constants alone")
    names = {f.name: f.type for kind in (family.key, family.plan) for f in fields(kind)}
    if not isinstance(content, dict) or content.keys() != {*names, *_TIMES}:
        actual = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise TunedFileError(f"{where}: {at} has {actual}, wanted {sorted({*names, *_TIMES})}")
    for name, kind in names.items():
        value = content[name]
        if kind == "bool" and type(value) is not bool:
            raise TunedFileError(f"{where}: {at}.{name} is {value!r}, wanted true or false")
        if kind == "str" and type(value) is not str:
            raise TunedFileError(f"{where}: {at}.{name} is {value!r}, wanted a text")
        if kind == "int":
            _at_least(where, f"{at}.{name}", value, 0 if name == _CAN_BE_ZERO else 1)
    for name in _TIMES:
        if content[name] is not None and not _is_time(content[name]):
            raise TunedFileError(f"{where}: {at}.{name} is {content[name]!r}, wanted a time")
    key = family.key(**{f.name: content[f.name] for f in fields(family.key)})
    plan = family.plan(**{f.name: content[f.name] for f in fields(family.plan)})
    module, function = family.fits.split(":")
    if not getattr(importlib.import_module(module), function)(key, plan):
        raise TunedFileError(f"{where}: {at} is {plan}, which no kernel has for {key}")
    return key, Entry(plan, content["us"], content["rule_us"])


def _is_time(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0


def _at_least(where: str, name: str, value: Any, least: float) -> None:
    number = isinstance(value, int if isinstance(least, int) else (int, float))
    if not number or isinstance(value, bool) or not least <= value < math.inf:
        raise TunedFileError(f"{where}: {name} is {value!r}, wanted {least} or more")


def _checked(where: str, name: str, content: Any, expected: Mapping[str, Any]) -> None:
    """Raise unless a part has exactly these fields, of these types."""
    if not isinstance(content, dict) or content.keys() != expected.keys():
        actual = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise TunedFileError(f"{where}: {name} has {actual}, wanted {sorted(expected)}")
    for key, kinds in expected.items():
        if not isinstance(content[key], kinds) or isinstance(content[key], bool):
            raise TunedFileError(f"{where}: {name}.{key} is {content[key]!r}, wanted {kinds}")
